"""Advantage estimators."""

from rlox.kernels import prefer_level

prefer_level(__path__, "advantage")

from rlox.kernels.advantage.gae import (  # noqa: E402 - found only once the level is on the path
    compute_gae,
    compute_gae_batched,
    compute_gae_batched_f32,
)
from rlox.kernels.advantage.vtrace import compute_vtrace  # noqa: E402

__all__ = ["compute_gae", "compute_gae_batched", "compute_gae_batched_f32", "compute_vtrace"]

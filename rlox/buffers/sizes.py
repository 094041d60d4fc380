"""Estimate of the bytes that a replay memory will take."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

from rlox.buffers.table import buffer_class, make_buffer
from rlox.config import BufferConfig, MmapBufferConfig
from rlox.envs import EnvSpec


@dataclass(frozen=True)
class Footprint:
    """Bytes that a replay memory takes."""

    reserved: int  # memory reserved when it is created
    resident: int  # part of it in use once all transitions are pushed
    disk: int  # size of its file
    row: int  # memory per transition


# Transitions of the small memories that `footprint` creates: size is linear in rows, so two sizes determine all others.
_MINIATURE = 512


def footprint(
    config: BufferConfig,
    spec: EnvSpec,
    n_envs: int,
    gamma: float,
    n_pushed: int,
    state_dim: int = 0,
    with_masks: bool = False,
) -> Footprint | None:
    """Return the bytes that `make_buffer`'s memory for the same arguments takes after `n_pushed` transitions.

    Return None if its class has no ``nbytes``. The full size is never allocated.
    """
    least = max(_MINIATURE, n_envs, config.n_step)
    if config.holds == "sequences" or state_dim:
        least = _MINIATURE * n_envs  # the room is divided equally among the environments
    if isinstance(config, MmapBufferConfig):
        with tempfile.TemporaryDirectory(prefix="rlox-replay-") as folder:
            # With everything hot there is no table of cold blocks either, so that all memory is rows.
            small_config = replace(config, size=least, hot_size=least, folder=folder)
            mini: Any = make_buffer(small_config, spec, n_envs, gamma, with_masks=with_masks)
            row = mini.ram_budget // least
            mini.close()
        hot = config.n_hot * row
        return Footprint(hot, min(n_pushed, config.n_hot) * row, max(0, min(n_pushed, config.size) * row - hot), row)
    if not hasattr(buffer_class(config.name), "nbytes"):
        return None

    def nbytes(size: int) -> int:
        sizes = (n_envs, gamma, state_dim)
        memory: Any = make_buffer(replace(config, size=size), spec, *sizes, with_masks=with_masks)
        return memory.nbytes

    try:
        small, large = nbytes(least), nbytes(2 * least)
    except ValueError:
        return None  # an external configuration, whose rules forbid such a small memory
    reserved = small + (large - small) * (config.size - least) // least
    return Footprint(reserved, reserved * min(n_pushed, config.size) // config.size, 0, -(-(large - small) // least))

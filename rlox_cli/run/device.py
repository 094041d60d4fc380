"""What a run says about its GPU, and how it lets it compute; nothing here is needed for a run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlox.checkpoint import versions
from rlox.config import RunConfig
from rlox.gpu import numerics


def prepare_deterministic(config: RunConfig) -> None:
    """Prepare this process for deterministic results on a GPU, before anything is created there."""
    if config.device != "cpu":
        numerics.prepare_deterministic()


@contextmanager
def set_numerics(config: RunConfig, algorithm: Any, log: Callable[[str], object]) -> Iterator[None]:
    """Set how the GPU of `algorithm` computes from `config`; on the CPU, `log` that the settings have no effect."""
    if algorithm.device == "cpu":
        if config.deterministic:
            log("deterministic: nothing to do on the CPU, where the same seed always gives the same bits")
        if config.matmul_precision != "highest":
            log(f"matmul_precision: {config.matmul_precision} is for a GPU; the CPU computes in float32")
        yield
        return
    with numerics.set_numerics(config.matmul_precision, config.deterministic):
        yield


def describe_device(algorithm: Any) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return what a record says about the GPU of `algorithm` and how it computes, and lines that say it to a reader."""
    known = versions(algorithm.device) | numerics.describe_numerics(algorithm)
    driver = f", driver {known['driver']}" if "driver" in known else ""
    built = "" if known["cuda"] == "None" else f", CUDA {known['cuda']}"
    products = "float32" if known["matmul_precision"] == "highest" else "TF32"
    if products == "TF32" and float(known["compute_capability"]) < 8:
        products = "float32, because this GPU has no TF32"
    how = [
        f"matrix products in {products}",
        *(["losses in bfloat16"] if known["precision"] == "bfloat16" else []),
        *(["deterministic algorithms"] if known["deterministic"] == "true" else []),
    ]
    return known, [
        ("device", f"{known['gpu']}, compute capability {known['compute_capability']}{built}{driver}"),
        ("precision", "; ".join(how)),
    ]

"""How a GPU computes: the precision of its products, mixed precision, and algorithms that always add in one order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlox.nn.modules import computes_bfloat16

# Memory of cuBLAS with which products do not depend on what else runs; read when a process first uses it.
WORKSPACE, DETERMINISTIC_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
# How PyTorch's messages about operations without a deterministic version end.
_LACKS = " does not have a deterministic implementation"


def precision_of(wanted: str, device: str) -> str:
    """Return ``float32`` or ``bfloat16`` for a configuration's `precision`, which may be ``auto``."""
    if wanted == "auto":
        return "bfloat16" if device == "cuda" and computes_bfloat16() else "float32"
    return wanted


def autocast(wanted: str, device: str) -> Any:
    """Return a context that sets the precision of passes over a model; trained weights stay float32."""
    if precision_of(wanted, device) == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device, torch.bfloat16)


def describe_numerics(algorithm: Any) -> dict[str, str]:
    """Return how an algorithm's GPU computes now, as it is recorded; nothing for one on the CPU."""
    if algorithm.device == "cpu":
        return {}
    return {
        "precision": precision_of(getattr(algorithm.config, "precision", "float32"), algorithm.device),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
    }


def prepare_deterministic() -> None:
    """Choose the memory of cuBLAS for deterministic products; must come before this process uses the GPU.

    Raises
    ------
    ValueError
        If the process has used the GPU already, or the environment variable has a value that allows other results.
    """
    value = os.environ.get(WORKSPACE)
    if value is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        raise ValueError(
            "deterministic must be true from the start of the process that uses the GPU, but this one has used it "
            f"already; start this run on its own, or set {WORKSPACE}={DETERMINISTIC_WORKSPACES[0]} for all"
        )
    if value is not None and value not in DETERMINISTIC_WORKSPACES:
        raise ValueError(
            f"{WORKSPACE} must be {' or '.join(DETERMINISTIC_WORKSPACES)} with deterministic=true, got {value}; unset "
            "it, or set it to one of these"
        )
    os.environ[WORKSPACE] = value or DETERMINISTIC_WORKSPACES[0]


@contextlib.contextmanager
def set_numerics(matmul_precision: str, deterministic: bool) -> Iterator[None]:
    """Compute on the GPU with this precision of float32 products, deterministically or not; restore it afterwards.

    Raises
    ------
    RuntimeError
        If an operation has no deterministic version; the message names it.
    """
    cudnn = torch.backends.cudnn
    before = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )
    torch.set_float32_matmul_precision(matmul_precision)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as e:
        if not deterministic or _LACKS not in str(e):
            raise
        name = str(e).partition(_LACKS)[0].splitlines()[-1].rpartition(": ")[2].strip()
        raise RuntimeError(
            f"deterministic=true: {name} has no deterministic version on a GPU in PyTorch {torch.__version__}; train "
            "without it, on the CPU, or with a network that does not use it"
        ) from e
    finally:
        precision, was_deterministic, only_warns, cudnn.deterministic, cudnn.benchmark = before
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warns)


class CastLoss:
    """A loss whose products are computed in bfloat16; sums, and weights and their gradients, stay in float32."""

    def __init__(self, loss: Callable[..., Any], device: str):
        self._loss, self._device = loss, device

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.autocast(self._device, torch.bfloat16):
            return self._loss(*arguments)

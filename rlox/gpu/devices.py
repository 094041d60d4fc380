"""Which device an algorithm computes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlox.nn.modules import device_of, is_module

if TYPE_CHECKING:
    from torch import nn

# Below this many parameters, a GPU's launch latency costs more than its arithmetic saves.
CUDA_PAYS_FROM = 1_000_000
# Likewise for the captured updates of SAC, TD3 and DQN, in parameters times rows of a batch. With 256-256 units and
# batches of 256 (56 million), SAC takes 1,248 steps a second on an H200, and about 125 by the kernels of one core of an
# AMD EPYC; with 64-64 units (4.5 million) the kernels take about 750.
UPDATE_PAYS_FROM = 40_000_000
# From this many environments on, a small policy trains faster with environments on the GPU. Steps a second of PPO on
# CartPole-v1 with 64-64 units, on an H200 and by kernels on the CPU beside it (benchmarks/gpu.py crossover): 0.9 times
# as many with 64 environments, 6 times with 512, 37 times with 4,096. The first updates take a second or two longer.
RESIDENT_PAYS_FROM = 1024


def choose_device(
    device: str,
    policy: nn.Module,
    where: str,
    ranks: Any,
    count_others: Callable[[], int] = int,
    pays_from: float = CUDA_PAYS_FROM,
) -> str:
    """Return ``cpu`` or ``cuda`` for a policy, and for other networks, whose parameters `count_others` counts.

    ``auto`` is ``cuda``, if there is a GPU, for `pays_from` parameters or more.
    """
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError(
            f"{where}: device=cuda needs a GPU that this PyTorch ({torch.__version__}) can use; try device=cpu"
        )
    if device == "cpu" or not available:
        return "cpu"
    if device == "auto" and sum(p.numel() for p in policy.parameters()) + count_others() < pays_from:
        return "cpu"
    if not ranks.has_gpu():
        raise ValueError(
            f"{where}: device={device} needs a GPU for each of the {ranks.size} ranks; start at most as many processes "
            f"as a machine has GPUs ({torch.cuda.device_count()}; torchrun --nproc-per-node=…), or try device=cpu"
        )
    return "cuda"


def device_for(device: str, policy: nn.Module, where: str) -> str:
    """Return the `device` argument, or for ``auto`` that of a policy which its creator has moved to a GPU."""
    if not is_module(policy):
        return device
    own = device_of(policy, where)
    if device == "cpu":
        policy.to("cpu")
    return "cuda" if device == "auto" and own == "cuda" else device


def use_gpu(algorithm: Any, device: str, where: str) -> None:
    """Let `algorithm` compute on the GPU if `device` and its networks say so; choose whether updates are captured."""

    def count_others() -> int:
        return algorithm._network_sizes()[1]

    least = algorithm._pays_from
    algorithm.device = choose_device(device, algorithm.policy, where, algorithm.ranks, count_others, least)
    algorithm.backend.device = algorithm.device
    if algorithm.device == "cuda":
        from rlox.gpu.capture import find_capture_obstacle

        algorithm.backend.captures = find_capture_obstacle(algorithm) is None

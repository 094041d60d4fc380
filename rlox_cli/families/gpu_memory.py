"""Whether a training fits in the memory of a GPU; imported only for trainings on one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlox.config import RunConfig
from rlox.gpu.memories import count_bytes
from rlox_cli.families.limits import TIGHT, size

_DEPTH = 3  # of objects within objects that are searched for tensors
# Passes over a network keep its layers' outputs, and compute their gradients next to those of the next layer.
_COPIES_OF_OUTPUTS = 3
_REMEDIES = {
    "networks": "lower algo.hidden_sizes",
    "replay memory": "lower buffer.size, or set buffer.device=cpu",
    "rollout": "lower env.n_envs or algo.n_steps",
    "batch": "lower algo.batch_size",
}


def free_bytes() -> int:
    """Return the bytes of the GPU's memory that this process has or can get."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def count_parts(algorithm: Any, config: RunConfig) -> dict[str, int]:
    """Return the bytes on the GPU of each part of a training, by name; an estimate from below.

    What convolutions, memories and world models keep of a batch is not included, and neither are CUDA's libraries.
    """
    storages: dict[int, int] = {}
    for name, value in vars(algorithm).items():
        if name not in ("collector", "_memory", "buffer"):
            _add_storages(value, _DEPTH, storages)
    parts = {"networks": sum(storages.values())}
    memory, spec, c = getattr(algorithm, "_memory", None), algorithm.spec, config.algo
    if memory is not None and getattr(memory, "device", "cpu") == "cuda":
        parts["replay memory"] = count_bytes(algorithm, memory.config)
    rows = config.env.n_envs * getattr(c, "n_steps", 0)
    if rows:
        parts["rollout"] = rows * _rollout_row(algorithm)
    widths = getattr(c, "hidden_sizes", [])
    at_once = getattr(c, "batch_size", rows)
    outputs = 2 * (spec.obs_dim + sum(widths))  # of two networks
    parts["batch"] = 4 * at_once * outputs * _COPIES_OF_OUTPUTS
    return {name: n for name, n in parts.items() if n}


def _add_storages(value: Any, depth: int, storages: dict[int, int]) -> None:
    """Add the bytes of every tensor on a GPU that `value` holds, by the address of its memory."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return
    if depth == 0:
        return
    inside: Any = ()
    if isinstance(value, nn.Module):
        inside = [*value.parameters(), *value.buffers()]
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, (list, tuple)):
        inside = value
    elif type(value).__module__.startswith("rlox.") and not type(value).__module__.startswith("rlox.gpu."):
        inside = getattr(value, "__dict__", {}).values()
    for one in inside:
        _add_storages(one, depth - 1, storages)


def _rollout_row(algorithm: Any) -> int:
    """Return about how many bytes a step of one environment takes on the GPU, with its shuffled copy."""
    resident = algorithm.env_options.device is not None
    spec = algorithm.collector.env.spec if resident else algorithm.spec  # there, several agents are one
    obs = math.prod(spec.obs_shape) * (1 if spec.image else 4)
    actions = 4 * spec.act_dim if spec.act_dim is not None else 8 * math.prod(spec.action_shape)
    columns = 24  # log-probabilities, values, advantages and such
    if not resident:
        return 2 * (obs + actions + columns)
    players = algorithm.players if getattr(algorithm, "several", False) else []
    own = sum(len(one.members) * (8 * (one.obs_dim + (one.state_dim or 0)) + 2 * columns) for one in players)
    # Final observations, noise, flags, statistics of episodes, and the state that each step's episode would start from.
    starts = 8 * getattr(algorithm.collector.env, "state_size", spec.obs_dim)
    return own + 3 * obs + 3 * actions + 2 * columns + 24 + starts


def memory_warnings(algorithm: Any, config: RunConfig) -> Iterator[str]:
    """Yield a warning if a training does not fit in the GPU's memory, or barely."""
    parts, free = count_parts(algorithm, config), free_bytes()
    needed, largest = sum(parts.values()), max(parts, key=lambda name: parts[name])
    if needed > TIGHT * free:
        verb = "will run out" if needed > free else "is nearly full"
        listed = ", ".join(f"{name} {size(n)}" for name, n in parts.items() if n >= 1 << 20)
        yield (
            f"the GPU's memory {verb}: the training takes at least {size(needed)} ({listed}), and {size(free)} are "
            f"free; {_REMEDIES[largest]}"
        )


def describe_memory(algorithm: Any, config: RunConfig) -> str:
    """Return what ``--check`` says about the GPU's memory, after a short training there.

    That training had the batches of the run, but perhaps shorter rollouts.
    """
    parts = count_parts(algorithm, config)
    needed = max(sum(parts.values()), torch.cuda.max_memory_reserved() + parts.get("rollout", 0))
    listed = ", ".join(f"{name} {size(n)}" for name, n in sorted(parts.items(), key=lambda part: -part[1]))
    return f"{size(needed)} of {size(free_bytes())} free: {listed}"

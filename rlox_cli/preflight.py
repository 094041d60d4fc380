"""What is looked at before every run, in milliseconds: whether the plan makes sense, and fits this machine.

Nothing here draws a random number, and no environment is stepped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlox.buffers import Footprint, footprint
from rlox.config import OffPolicyConfig, RunConfig
from rlox.envs import EnvSpec
from rlox_cli import resources
from rlox_cli.errors import UsageError

# Of what is free: beyond this share it may fit, but little else does.
_TIGHT = 0.8


def preflight(algorithm: Any, config: RunConfig, folder: Path) -> list[str]:
    """Warnings, a line each, about the training that `algorithm` is to do with `config` into `folder`.

    Raises
    ------
    UsageError
        For what cannot be: a memory or files that do not fit this machine, a folder that cannot be written to.
    """
    n_steps = config.total_timesteps - algorithm.counters.env_steps
    require_folder(folder)
    found = replay_footprint(algorithm, config, n_steps)
    return [
        *plan_warnings(config),
        *memory_warnings(config, found, rollout_bytes(config, algorithm.spec)),
        *disk_warnings(config, found, folder, n_steps),
    ]


def rollout_steps(config: RunConfig) -> int:
    """Environment steps from one call of the update to the next."""
    n, c = config.env.n_envs, config.algo
    return -(-c.train_freq // n) * n if isinstance(c, OffPolicyConfig) else n * c.n_steps


def looks(config: RunConfig) -> int:
    """How often in the training callbacks are asked: whether to evaluate, save or stop."""
    total, per_round = config.total_timesteps, rollout_steps(config)
    if isinstance(config.algo, OffPolicyConfig):
        per_round = max(per_round, min(1000, max(1, total // 100)))
    return -(-total // per_round)


def plan_warnings(config: RunConfig) -> Iterator[str]:
    """About numbers that do not go together."""
    c, total, rollout = config.algo, config.total_timesteps, rollout_steps(config)
    off_policy = isinstance(c, OffPolicyConfig)
    if total < rollout:
        what = "round of train_freq" if off_policy else "rollout of env.n_envs x algo.n_steps"
        yield (
            f"total_timesteps={total:,} is less than one {what}, {rollout:,} steps: the run takes {rollout:,} and "
            "learns once"
        )
    if not off_policy and getattr(c, "batch_size", 0) > rollout:
        yield (
            f"algo.batch_size={c.batch_size:,} is more than a rollout holds, {rollout:,} transitions: each epoch is "
            "one step on all of them"
        )
    if config.eval.n_points > looks(config):
        yield (
            f"eval.n_points={config.eval.n_points:,} is more than the training has places for, {looks(config):,}: so "
            "many evaluations are made"
        )
    end = config.schedule_timesteps
    if end is not None and end < total and c.learning_rate_schedule == "linear":
        yield (
            f"schedule_timesteps={end:,} takes algo.learning_rate to 0 before total_timesteps={total:,}: nothing is "
            "learned after it"
        )
    if off_policy and c.learning_starts > total / 2:
        yield (
            f"algo.learning_starts={c.learning_starts:,} leaves {1 - c.learning_starts / total:.0%} of "
            f"total_timesteps={total:,} to learn in; all before it is random"
        )
    if getattr(c, "target_update_freq", 0) >= total:
        yield (
            f"algo.target_update_freq={c.target_update_freq:,} is not below total_timesteps={total:,}: the target "
            "network never moves"
        )


def time_limit(algorithm: Any) -> int | None:
    """Steps after which each episode ends; None where nothing says so."""
    env = algorithm.collector.env
    if algorithm.collector.native:
        return env.max_episode_steps or None
    limits = [*_declared_limits(algorithm)]
    layer = env.envs[0] if getattr(env, "envs", None) else None
    while layer is not None:
        limits.append(getattr(layer, "_max_episode_steps", None))
        layer = getattr(layer, "env", None)
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _declared_limits(algorithm: Any) -> Iterator[Any]:
    """What wrappers, arguments and gymnasium's registry say; of Atari games, which count frames, in steps of four."""
    import gymnasium

    for wrapper in algorithm.env_wrappers:
        if isinstance(wrapper, dict):
            yield (wrapper.get("TimeLimit") or {}).get("max_episode_steps")
    spec = gymnasium.registry.get(algorithm.env_id.rpartition(":")[2])
    if spec is not None:
        yield algorithm.env_kwargs.get("max_episode_steps", spec.max_episode_steps)
        yield spec.kwargs.get("max_num_frames_per_episode", 0) // 4


def time_limit_warnings(algorithm: Any, config: RunConfig) -> Iterator[str]:
    if config.env.backend != "envpool" and time_limit(algorithm) is None:
        yield (
            f"env={config.env.id} has no time limit: an evaluation lasts until its episodes end by themselves; "
            "env.wrappers=[{TimeLimit: {max_episode_steps: 1000}}] sets one"
        )


def rollout_bytes(config: RunConfig, spec: EnvSpec) -> int:
    """Memory of one rollout and of the copies that an update makes of it, about; 0 off-policy."""
    if isinstance(config.algo, OffPolicyConfig):
        return 0
    obs = spec.obs_dim * np.dtype(spec.obs_dtype).itemsize // spec.n_stacked
    # Rewards, flags, episode statistics, values, log-probabilities, advantages and returns: some 60 bytes.
    return 2 * config.env.n_envs * config.algo.n_steps * (obs + 8 * math.prod(spec.action_shape) + 60)


def replay_footprint(algorithm: Any, config: RunConfig, n_steps: int) -> Footprint | None:
    """Of the replay memory after `n_steps`; None where there is none, or it does not tell."""
    if config.buffer is None:
        return None
    return footprint(config.buffer, algorithm.spec, config.env.n_envs, config.algo.gamma, n_steps)


def memory_warnings(config: RunConfig, found: Footprint | None, more: int) -> Iterator[str]:
    """About the replay memory, and `more` bytes beside it.

    Raises
    ------
    UsageError
        If it is more than there is.
    """
    given, needed = resources.memory(), more + (0 if found is None else found.resident)
    if given is None:
        return
    free, total = given
    if found is not None and found.reserved > total:
        raise UsageError(
            f"buffer.size must fit in memory, got {config.buffer.size:,} transitions of {found.row:,} bytes, "
            f"{resources.size(found.reserved)}, where there are {resources.size(total)}; lower it to "
            f"{int(_TIGHT * free) // found.row:,}, or take buffer=mmap, which keeps older ones in a file"
        )
    if needed > free:
        if found is None:
            raise UsageError(
                f"algo.n_steps must fit in memory, got {config.algo.n_steps:,} in {config.env.n_envs:,} environments, "
                f"a rollout of {resources.size(more)}, where {resources.size(free)} are free; lower it, or env.n_envs"
            )
        raise UsageError(
            f"buffer.size must fit in memory, got {config.buffer.size:,}, of which the training fills "
            f"{resources.size(needed)}, where {resources.size(free)} are free; lower it to "
            f"{int(_TIGHT * free) // found.row:,}, or take buffer=mmap, which keeps older ones in a file"
        )
    if needed > _TIGHT * free:
        yield f"memory is tight: {resources.size(needed)} of experience, where {resources.size(free)} are free"


def disk_bytes(config: RunConfig, found: Footprint | None, n_steps: int) -> tuple[int, int]:
    """What a replay memory writes in `n_steps`: into its own file, and beside the checkpoints."""
    if found is None:
        return 0, 0
    beside = config.checkpoint.memory and not found.disk
    return found.disk, min(n_steps, config.buffer.size) * found.row if beside else 0


def disk_warnings(config: RunConfig, found: Footprint | None, folder: Path, n_steps: int) -> Iterator[str]:
    """About the replay memory's files.

    Raises
    ------
    UsageError
        If they are more than the disk has room for.
    """
    own, beside = disk_bytes(config, found, n_steps)
    at = Path(getattr(config.buffer, "folder", None) or folder)
    free, needed = resources.free_disk(at), own + beside
    if needed > free:
        remedy = "lower buffer.size" if own else "lower buffer.size, or set checkpoint.memory=false"
        raise UsageError(
            f"{resources.standing(at)} must have room for the replay memory's files, {resources.size(needed)}, but "
            f"{resources.size(free)} are free; {remedy}, or choose another folder by "
            f"{'buffer.folder' if own else 'hydra.run.dir'}"
        )
    if needed > _TIGHT * free:
        yield (
            f"the disk is nearly full: the replay memory's files take {resources.size(needed)}, where "
            f"{resources.size(free)} are free at {resources.standing(at)}"
        )


def require_folder(folder: Path) -> None:
    """A UsageError unless `folder` can be made, or written to, and holds no run."""
    above = resources.standing(folder)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "a folder" if not above.is_dir() else "a folder that you may write to"
        raise UsageError(f"hydra.run.dir={folder} must lie in {what}, got {above}; choose another hydra.run.dir")

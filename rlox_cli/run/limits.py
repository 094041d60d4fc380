"""Checks before every run, in milliseconds: whether the plan makes sense and fits this machine.

Nothing here draws a random number or steps an environment.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlox.buffers import Footprint, footprint
from rlox.callbacks import plan_advice
from rlox.collectors.evaluation import LEAST_STEPS, MAX_STEPS, TIMES_LONGEST
from rlox.config import BatchConfig, EvalConfig, LLMConfig, RunConfig
from rlox.envs import EnvSpec, is_native, make_vec_env
from rlox.multi_agent import is_multi_agent, make_multi_agent_env
from rlox_cli.run import machine
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import existing_parent, output_path

# Share of the free space: more may fit, but leaves little for anything else.
_TIGHT = 0.8


def training_warnings(algorithm: Any, config: RunConfig, folder: Path) -> list[str]:
    """Return warnings, one line each, about the training of `algorithm` with `config` into `folder`.

    Raises
    ------
    UsageError
        If the replay memory or its files do not fit this machine, or nobody would name such a folder.
    OSError
        If the folder cannot be written to.
    """
    n_steps = config.total_timesteps - algorithm.counters.steps
    output_path("output_dir", folder, folder=True)
    if config.language:
        return [*plan_warnings(config), *language_warnings(algorithm, config)]
    found = replay_footprint(algorithm, config, n_steps)
    return [
        *plan_warnings(config),
        *(line for _, line in plan_advice(algorithm)),
        *(dataset_warnings(algorithm.dataset, config) if config.offline else ()),
        *(shared_warnings(algorithm) if config.offline and is_multi_agent(config.env.id) else ()),
        *memory_warnings(config, found, rollout_bytes(config, algorithm.spec)),
        *disk_warnings(config, found, folder, n_steps),
    ]


def require_memory(config: RunConfig) -> None:
    """Raise a UsageError for networks, or a number of environments, that this machine cannot even create."""
    given = machine.memory()
    if given is None:
        return
    free, hidden = given[0], getattr(config.algo, "hidden_sizes", [])
    # Weights, gradients and two optimiser moments of a policy and a critic. Input and output layers come on top.
    weights = 2 * 16 * (sum(hidden) + sum(a * b for a, b in itertools.pairwise(hidden)))
    for key, value, needed, what in (
        ("algo.hidden_sizes", hidden, weights, "weights, gradients and moments"),
        ("env.n_envs", config.env.n_envs, 100 * config.env.n_envs, "states and observations"),
    ):
        if needed > free:
            raise UsageError(
                f"{key} must fit in memory, got {value}, whose {what} take at least {machine.size(needed)}, but only "
                f"{machine.size(free)} are free; lower it"
            )


def rollout_steps(config: RunConfig) -> int:
    """Return the number of environment steps from one update call to the next; 1 if updates are counted instead."""
    n, c = config.env.n_envs, config.algo
    if config.offline or config.language:
        return 1
    return n * c.n_steps if c.replays == "nothing" else -(-getattr(c, "train_freq", 1) // n) * n


def callback_calls(config: RunConfig) -> int:
    """Return how often callbacks are called in the training, to evaluate, save or stop."""
    total, per_round = config.total_timesteps, rollout_steps(config)
    if config.algo.replays != "nothing" or isinstance(config.algo, (BatchConfig, LLMConfig)):
        per_round = max(per_round, min(1000, max(1, total // 100)))
    return -(-total // per_round)


def plan_warnings(config: RunConfig) -> Iterator[str]:
    """Yield warnings about numbers that do not fit together."""
    c, total, rollout = config.algo, config.total_timesteps, rollout_steps(config)
    off_policy = c.replays != "nothing"
    if total < rollout:
        what = "round of train_freq" if off_policy else "rollout of env.n_envs x algo.n_steps"
        yield (
            f"total_timesteps={total:,} is less than one {what}, {rollout:,} steps: the run takes {rollout:,} and "
            "learns once"
        )
    several = is_multi_agent(config.env.id)  # a rollout holds a transition for each agent then
    off_rollout = off_policy or several or isinstance(c, (BatchConfig, LLMConfig))
    if not off_rollout and getattr(c, "batch_size", 0) > rollout:
        yield (
            f"algo.batch_size={c.batch_size:,} is more than a rollout has, {rollout:,} transitions: each epoch is "
            "one step on all of them"
        )
    # The default number is meant for longer runs, and the user has not chosen it.
    if callback_calls(config) < config.eval.n_points != EvalConfig.n_points:
        yield (
            f"eval.n_points={config.eval.n_points:,} is more than the training can evaluate: only "
            f"{callback_calls(config):,} evaluations are made"
        )
    end = config.schedule_timesteps
    if end is not None and end < total:
        falls = stays = ""
        if getattr(c, "learning_rate_schedule", "constant") == "linear":
            falls, stays = "algo.learning_rate", "nothing is learned"
        elif getattr(c, "policy_schedule", "constant") != "constant":
            falls, stays = "the policy's step size", "the policy does not change"
        if falls:
            yield f"schedule_timesteps={end:,} takes {falls} to 0 before total_timesteps={total:,}: {stays} after that"
    if off_policy and c.learning_starts > total / 2:
        yield (
            f"algo.learning_starts={c.learning_starts:,} leaves {1 - c.learning_starts / total:.0%} of "
            f"total_timesteps={total:,} for learning; all actions before that are random"
        )
    if getattr(c, "target_update_freq", 0) >= total:
        yield (
            f"algo.target_update_freq={c.target_update_freq:,} is not below total_timesteps={total:,}: the target "
            "network is never updated"
        )


def dataset_warnings(dataset: Any, config: RunConfig) -> Iterator[str]:
    """Yield warnings about a dataset that fits the environment, but not the plan."""
    c, n = config.algo, len(dataset)
    if c.batch_size > n:
        yield f"algo.batch_size={c.batch_size:,} is more than the dataset has, {n:,} transitions: batches repeat them"
    gathered = dataset.metadata.get("env", {}).get("id", config.env.id)
    if gathered != config.env.id:
        yield f"the dataset was gathered in {gathered}, but the policy is evaluated in {config.env.id}"
    given, size = machine.memory(), mapped_bytes(dataset)
    if given is not None and size > given[0]:
        yield (
            f"the dataset, {machine.size(size)}, is larger than the free memory, {machine.size(given[0])}: batches "
            "wait for the disk; dataset.max_transitions limits it to a part"
        )


def shared_warnings(algorithm: Any) -> Iterator[str]:
    """Yield warnings about agents for which the learned policy cannot act."""
    policy = algorithm._evaluation_arguments(1, 0)["policy"]
    if policy.others:
        played = ", ".join(agent for group in policy.groups for agent in group.agents)
        yield (
            f"in evaluations the learned policy acts for {played}; the actions of {', '.join(policy.others)} are "
            "random, since their spaces differ; the return is that of the former"
        )


def language_warnings(algorithm: Any, config: RunConfig) -> Iterator[str]:
    """Yield warnings about rows of text, a model and its tokenizer that do not fit together or promise little."""
    c, rows, model = config.algo, algorithm.rows, algorithm.model
    if c.batch_size > len(rows):
        yield f"algo.batch_size={c.batch_size:,} is more than the dataset has, {len(rows):,} rows: some repeat"
    if hasattr(c, "max_new_tokens") and not (model.eos or c.stop):
        yield (
            f"nothing ends a completion: the model and its tokenizer have no end of sequence, so every completion has "
            f"{c.max_new_tokens} tokens"
        )
    if config.sampler is not None and getattr(c, "sampler_correction", None) == "none":
        yield (
            f"algo.sampler_correction=none with sampler={config.sampler}: differences between its probabilities and "
            "the model's are not corrected; algo.sampler_correction=token_truncate corrects them"
        )
    if config.eval.dataset is None:
        yield "the model is evaluated on its training rows; eval.dataset=FILE names others"


def mapped_bytes(dataset: Any) -> int:
    """Return the size of a dataset's mapped file; its pages stay in memory while they are used and there is room."""
    return os.stat(dataset.metadata["file"]).st_size


def plays_native(algorithm: Any) -> bool:
    """Return whether the algorithm's environment, or offline that of its evaluations, is native."""
    if getattr(algorithm, "collector", None) is not None:
        return algorithm.collector.env.native
    return is_native(algorithm.env_id) and not (algorithm.env_options.kwargs or algorithm.env_options.wrappers)


def time_limit(algorithm: Any) -> int | None:
    """Return the number of steps after which each episode ends; None if no limit is known."""
    if getattr(algorithm, "collector", None) is not None:
        return _limit_of(algorithm.collector.env, algorithm)
    env: Any
    if is_multi_agent(algorithm.env_id):
        env = make_multi_agent_env(algorithm.env_id, 1, algorithm.seed, algorithm.env_options.kwargs)
    else:
        options = algorithm.env_options
        env = make_vec_env(algorithm.env_id, 1, algorithm.seed, options.kwargs, options.wrappers)
    try:
        return _limit_of(env, algorithm)
    finally:
        env.close()


def _limit_of(env: Any, algorithm: Any) -> int | None:
    if is_multi_agent(algorithm.env_id):
        # PettingZoo has no common name for it; this is the one in MPE and SISL.
        own = env.kernel.max_episode_steps if env.native else None
        given = algorithm.env_options.kwargs.get("max_cycles") or own
        return given if isinstance(given, int) and given > 0 else None
    if plays_native(algorithm):
        return env.max_episode_steps or None
    limits = [*_declared_limits(algorithm)]
    layer = env.envs[0] if getattr(env, "envs", None) else None
    while layer is not None:
        limits.append(getattr(layer, "_max_episode_steps", None))
        layer = getattr(layer, "env", None)
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _declared_limits(algorithm: Any) -> Iterator[Any]:
    """Yield the limits in wrappers, arguments and gymnasium's registry. Atari games count frames; a step has four."""
    import gymnasium

    for wrapper in algorithm.env_options.wrappers:
        if isinstance(wrapper, dict):
            yield (wrapper.get("TimeLimit") or {}).get("max_episode_steps")
    spec = gymnasium.registry.get(algorithm.env_id.rpartition(":")[2])
    if spec is not None:
        yield algorithm.env_options.kwargs.get("max_episode_steps", spec.max_episode_steps)
        yield spec.kwargs.get("max_num_frames_per_episode", 0) // 4


def time_limit_warnings(algorithm: Any, config: RunConfig) -> Iterator[str]:
    if (
        not config.language
        and not is_multi_agent(config.env.id)
        and config.env.backend != "envpool"
        and config.eval.max_steps is None
        and time_limit(algorithm) is None
    ):
        where = (
            f"{MAX_STEPS:,} steps"
            if config.offline
            else f"{TIMES_LONGEST} times the length of the longest recent episode in training, at least "
            f"{LEAST_STEPS:,} steps"
        )
        yield (
            f"env={config.env.id} has no time limit: evaluations cut off an episode that does not end by itself after "
            f"{where}; env.wrappers=[{{TimeLimit: {{max_episode_steps: 1000}}}}] sets a limit, "
            "eval.max_steps sets one for evaluations only"
        )


def rollout_bytes(config: RunConfig, spec: EnvSpec) -> int:
    """Return about how many bytes a rollout and its copies in an update take; 0 if there are no rollouts."""
    if config.algo.replays != "nothing" or isinstance(config.algo, BatchConfig):
        return 0
    obs = spec.obs_dim * np.dtype(spec.obs_dtype).itemsize // spec.n_stacked
    # Rewards, flags, episode statistics, values, log-probabilities, advantages and returns: about 60 bytes.
    return 2 * config.env.n_envs * config.algo.n_steps * (obs + 8 * math.prod(spec.action_shape) + 60)


def replay_footprint(algorithm: Any, config: RunConfig, n_steps: int) -> Footprint | None:
    """Return the footprint of the replay memory after `n_steps`; None if there is none, or it is not known."""
    if config.buffer is None:
        return None
    c, n = config.algo, config.env.n_envs
    if c.replays == "sequences" and algorithm.dataset is not None:
        n_steps += len(algorithm.dataset)
    return footprint(config.buffer, algorithm.spec, n, c.gamma, n_steps, algorithm._state_dim())


def memory_warnings(config: RunConfig, found: Footprint | None, more: int) -> Iterator[str]:
    """Yield warnings about the replay memory and `more` bytes in addition to it.

    Raises
    ------
    UsageError
        If they do not fit in memory.
    """
    given, needed = machine.memory(), more + (0 if found is None else found.resident)
    if given is None:
        return
    free, total = given
    if found is not None and found.reserved > total:
        what, remedy = "transitions", ", or use buffer=mmap, which keeps older ones in a file"
        if config.buffer.holds == "sequences":
            what, remedy = "steps", ""
        raise UsageError(
            f"buffer.size must fit in memory, got {config.buffer.size:,} {what} of {found.row:,} bytes, "
            f"{machine.size(found.reserved)}, but there are only {machine.size(total)}; lower it to "
            f"{int(_TIGHT * free) // found.row:,}{remedy}"
        )
    if needed > free:
        if found is None:
            raise UsageError(
                f"algo.n_steps must fit in memory, got {config.algo.n_steps:,} in {config.env.n_envs:,} environments, "
                f"a rollout of {machine.size(more)}, but only {machine.size(free)} are free; lower it, or env.n_envs"
            )
        raise UsageError(
            f"buffer.size must fit in memory, got {config.buffer.size:,}, of which the training fills "
            f"{machine.size(needed)}, but only {machine.size(free)} are free; lower it to "
            f"{int(_TIGHT * free) // found.row:,}, or use buffer=mmap, which keeps older ones in a file"
        )
    if needed > _TIGHT * free:
        yield f"memory is tight: {machine.size(needed)} of experience, and {machine.size(free)} are free"


def disk_bytes(config: RunConfig, found: Footprint | None, n_steps: int) -> tuple[int, int]:
    """Return the bytes that a replay memory writes in `n_steps`: into its own file, and next to the checkpoints."""
    if found is None:
        return 0, 0
    saves = config.checkpoint.memory and not found.disk
    # The states of steps are rewritten as they change, until their files have twice the size of the states.
    times = 2 if config.buffer.holds == "sequences" else 1
    return found.disk, times * min(n_steps, config.buffer.size) * found.row if saves else 0


def disk_warnings(config: RunConfig, found: Footprint | None, folder: Path, n_steps: int) -> Iterator[str]:
    """Yield warnings about the replay memory's files.

    Raises
    ------
    UsageError
        If the disk has no room for them.
    """
    own, saved = disk_bytes(config, found, n_steps)
    at = Path(getattr(config.buffer, "folder", None) or folder)
    free, needed = machine.free_disk(at), own + saved
    if needed > free:
        remedy = "lower buffer.size" if own else "lower buffer.size, or set checkpoint.memory=false"
        raise UsageError(
            f"{existing_parent(at)} must have room for the replay memory's files, {machine.size(needed)}, but "
            f"only {machine.size(free)} are free; {remedy}, or choose another folder with "
            f"{'buffer.folder' if own else 'output_dir'}"
        )
    if needed > _TIGHT * free:
        yield (
            f"the disk is nearly full: the replay memory's files take {machine.size(needed)}, and "
            f"{machine.size(free)} are free at {existing_parent(at)}"
        )

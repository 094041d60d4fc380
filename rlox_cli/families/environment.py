"""Algorithms that act in an environment: on-policy, and off-policy with a replay memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rlox.algorithms import ALGORITHMS, load, resolve
from rlox.buffers import Footprint, buffer_config_class, buffer_names, footprint
from rlox.callbacks import Callback, plan_advice
from rlox.callbacks.loggers import RecordLogger
from rlox.checkpoint import one_line
from rlox.config import BufferConfig, DatasetConfig, EvalConfig, MmapBufferConfig, RunConfig
from rlox.envs import is_vectorised, make_vec_env
from rlox.envs.gym_make import least_limit, limit_of_layers
from rlox.envs.registry import ZOO, find_module
from rlox.envs.tensor import table as tensor_table
from rlox.evaluation.episodes import LEAST_STEPS, TIMES_LONGEST
from rlox.multi_agent import is_multi_agent
from rlox_cli.families import limits
from rlox_cli.families.family import NO_SAMPLER, OFF_POLICY_ONLY, Estimate, Evaluation, Examination, Family, Start
from rlox_cli.families.imports import import_modules, resolve_reward

_FOR_LANGUAGE = dict.fromkeys(("model", "model_dtype", "tokenizer", "reward", "reward_weights", "conversation"))
_FOR_LANGUAGE |= NO_SAMPLER


class Environment(Family):
    """What all algorithms share whose policy acts in an environment, if only for its evaluation."""

    learns_from_env = True  # and not only from recorded rewards
    longest_episode = (
        f"{TIMES_LONGEST} times the length of the longest recent episode in training, at least {LEAST_STEPS:,} steps"
    )

    def check(self, run: RunConfig, algo: str, buffer: str | None) -> None:
        for key, default in _FOR_LANGUAGE.items():
            if (value := getattr(run, key)) != default:
                usual = "null" if default is None else default
                raise ValueError(f"{key} must be {usual} with algo={algo}, which trains no language model, got {value}")
        if run.eval.dataset is not None:
            raise ValueError(
                f"eval.dataset must be null with algo={algo}, which is evaluated on env, got {run.eval.dataset}"
            )
        self.check_buffer(run, algo, buffer)
        self.check_dataset(run, algo)
        if run.imports:
            import_modules(run.imports)
        if module := find_module(run.env.id):
            import_modules([module], f"env={run.env.id} imports")
        if is_multi_agent(run.env.id):
            _check_agents(run, algo)
        else:
            check_env_id(run.env.id.rpartition(":")[2], run.env.kwargs, run.env.backend)
        if run.env.reward_fn is not None:
            resolve_reward(run.env.reward_fn, run.imports)

    def check_buffer(self, run: RunConfig, algo: str, chosen: str | None) -> None:
        if run.buffer is not None:
            raise ValueError(f"buffer must be left out with algo={algo}, got {chosen or 'its keys'}; {OFF_POLICY_ONLY}")

    def check_dataset(self, run: RunConfig, algo: str) -> None:
        if run.dataset is None:
            return
        require_source(run)
        if run.algo.uses_dataset == "never":
            able = [name for name, entry in ALGORITHMS.items() if resolve(entry.config).uses_dataset in ("may", "must")]
            raise ValueError(
                f"dataset must be left out with algo={algo}, which collects its own data, got {run.dataset.source}; "
                f"algorithms that learn from a dataset: {', '.join(able)}"
            )
        from rlox.offline.dataset import check_source

        check_source(run.dataset.source)

    def build(self, cls: Any, config: RunConfig, folder: Path) -> Any:
        limits.require_memory(config)
        env = config.env
        arguments = self.arguments(config, folder)
        return cls(env.id, n_envs=env.n_envs, seed=config.seed, env_kwargs=env.kwargs, **arguments)

    def restore(self, config: RunConfig, checkpoint: Path, trusted: bool) -> Any:
        arguments = self.arguments(config, checkpoint.parent.parent)
        return load(checkpoint, env_id=config.env.id if trusted else None, **arguments)

    def note_on_restoring(self, algorithm: Any) -> str | None:
        # Before the first step there is nothing to lose.
        return algorithm.collector.restore_note() if algorithm.counters.env_steps > 0 else None

    def arguments(self, config: RunConfig, folder: Path) -> dict[str, Any]:
        """Return the arguments that an algorithm's constructor and its `from_checkpoint` share."""
        arguments = {
            "device": config.device,
            "backend": config.backend,
            "threads": config.threads,
            "compile": config.compile,
            "env_wrappers": config.env.wrappers,
            "env_workers": config.env.workers,
            "env_backend": config.env.backend,
            "config": config.algo,
        }
        if config.env.reward_fn is not None:
            arguments["reward_fn"] = resolve_reward(config.env.reward_fn, config.imports)
        if config.remote.addresses:
            arguments["remote"] = config.remote
        if getattr(config.algo, "actors", None) == "ray":
            arguments["ray"] = config.ray
        if config.dataset is not None:
            if config.dataset.normalize_returns:
                raise ValueError(
                    "dataset.normalize_returns must be false if the replay memory holds the environment's own "
                    "rewards, got true; use dataset.reward_scale and reward_shift for rewards that were recorded on "
                    "another scale"
                )
            from rlox.offline.dataset import open_dataset

            arguments["dataset"] = open_dataset(config.dataset)
        return arguments

    def warnings(self, algorithm: Any, config: RunConfig, folder: Path) -> Iterator[str]:
        """Yield warnings about numbers that do not fit together."""
        c, total = config.algo, config.total_timesteps
        # The default number is meant for longer runs, and the user has not chosen it.
        if (n := config.eval.n_points) != EvalConfig.n_points and (calls := self.callback_calls(config)) < n:
            yield few_evaluations(config, calls)
        end = config.schedule_timesteps
        if end is not None and end < total:
            falls = stays = ""
            if getattr(c, "learning_rate_schedule", "constant") == "linear":
                falls, stays = "algo.learning_rate", "nothing is learned"
            elif getattr(c, "policy_schedule", "constant") != "constant":
                falls, stays = "the policy's step size", "the policy does not change"
            if falls:
                yield (
                    f"schedule_timesteps={end:,} takes {falls} to 0 before total_timesteps={total:,}: {stays} after "
                    "that"
                )
        if getattr(c, "target_update_freq", 0) >= total:
            yield (
                f"algo.target_update_freq={c.target_update_freq:,} is not below total_timesteps={total:,}: the target "
                "network is never updated"
            )
        yield from (line for _, line in plan_advice(algorithm))
        if algorithm.device != "cpu":
            from rlox_cli.families.gpu_memory import memory_warnings

            yield from memory_warnings(algorithm, config)

    def time_limit_warnings(self, algorithm: Any, config: RunConfig) -> Iterator[str]:
        if config.eval.max_steps is None and config.env.backend != "envpool" and self.time_limit(algorithm) is None:
            yield (
                f"env={config.env.id} has no time limit: evaluations cut off an episode that does not end by itself "
                f"after {self.longest_episode}; env.wrappers=[{{TimeLimit: {{max_episode_steps: 1000}}}}] sets a "
                "limit, eval.max_steps sets one for evaluations only"
            )

    def time_limit(self, algorithm: Any) -> int | None:
        """Return the number of steps after which each episode ends; None if no limit is known."""
        if getattr(algorithm, "collector", None) is not None:
            return self.limit_of(algorithm.collector.env, algorithm)
        env = self.make_env(algorithm)
        try:
            return self.limit_of(env, algorithm)
        finally:
            env.close()

    def make_env(self, algorithm: Any) -> Any:
        """Return one environment like those of the algorithm's evaluations."""
        return make_vec_env(
            algorithm.env_id, 1, algorithm.seed, algorithm.env_options.kwargs, algorithm.env_options.wrappers
        )

    def limit_of(self, env: Any, algorithm: Any) -> int | None:
        if env.native or getattr(env, "max_episode_steps", None):
            return env.max_episode_steps or None
        known = [*_list_limits(algorithm)]
        if getattr(env, "envs", None):
            known.append(limit_of_layers(env.envs[0]))
        return least_limit(known)

    def rollout_bytes(self, config: RunConfig, spec: Any) -> int:
        """Return about how many bytes a rollout and its copies in an update take; 0 if there are no rollouts."""
        return 0

    def replay_footprint(self, algorithm: Any, config: RunConfig, n_steps: int) -> Footprint | None:
        """Return the footprint of the replay memory after `n_steps`; None if there is none, or it is not known."""
        return None

    def examine(self, algorithm: Any, config: RunConfig, start: Start, scratch: Path) -> Examination:
        from rlox_cli.families.estimate import estimate

        seen = self.probe(algorithm, config)
        costs = estimate(self, algorithm, config, seen, start, scratch)
        n = spell(self.evaluations(config), "evaluation")
        lines = [
            *self.describe_spaces(algorithm),
            ("backend", f"{algorithm.backend} ({algorithm.backend_reason})"),
            *self.describe_data(algorithm),
            (
                "plan",
                f"{self.describe_training(algorithm, config)}; {n} of {spell(config.eval.n_episodes, 'episode')}",
            ),
            ("memory", self.describe_memory(algorithm, config, costs)),
        ]
        if algorithm.device != "cpu":
            from rlox_cli.families.gpu_memory import describe_memory

            lines.append(("GPU memory", describe_memory(algorithm, config)))
        return Examination(lines, seen.warnings, costs, seen.limit)

    def probe(self, algorithm: Any, config: RunConfig) -> Any:
        """Return what one environment does under random actions."""
        from rlox_cli.families.probe import probe_env

        return probe_env(self, algorithm, config)

    def training_costs(self, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Time a short training: costs that come once, of a step with its share of the updates, and of a random step.

        A cost is a pair of seconds, (2,): CPU time, and wall time.
        """
        raise NotImplementedError

    def update_cost(self, config: RunConfig, each: np.ndarray, each_random: np.ndarray) -> np.ndarray | None:
        """Return the cost of an update, if a replay ratio sets their number."""
        return None

    def evaluation_costs(self, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return the costs of creating the environment and of a step, and whether all episodes are stepped together."""
        from rlox_cli.families.estimate import time_evaluation

        return time_evaluation(algorithm, config, algorithm.env_options.eval_kwargs)

    def describe_spaces(self, algorithm: Any) -> list[tuple[str, str]]:
        spec = algorithm.spec
        return [("spaces", f"{describe_observations(spec)}; {spec.describe_actions()}{spec.describe_masks()}")]

    def describe_data(self, algorithm: Any) -> list[tuple[str, str]]:
        return []

    def describe_training(self, algorithm: Any, config: RunConfig) -> str:
        every = self.round_steps(config)
        batches = f" in batches of {config.algo.batch_size:,}" if hasattr(config.algo, "batch_size") else ""
        return f"{describe_steps(config, every)}, learning every {every:,}{batches}"

    def describe_memory(self, algorithm: Any, config: RunConfig, estimate: Estimate) -> str:
        free, _ = limits.memory()
        known = f" of {limits.size(free)} free" if math.isfinite(free) else ""
        return f"{limits.size(estimate.memory)}{known}{self.describe_stored(algorithm, config)}"

    def describe_stored(self, algorithm: Any, config: RunConfig) -> str:
        return ""

    def evaluate(
        self, path: Path, header: dict[str, Any], typed: Evaluation, read_config: Callable[[], RunConfig]
    ) -> None:
        from rlox_cli.families.evaluation import evaluate

        evaluate(path, header, typed)

    def show(self, path: Path, header: dict[str, Any], typed: Evaluation) -> None:
        from rlox_cli.families.evaluation import show

        show(path, header, typed)


class OnPolicy(Environment):
    """Algorithms that learn from rollouts."""

    several_transitions = False  # whether a rollout has several for each of its steps

    def round_steps(self, config: RunConfig) -> int:
        return config.env.n_envs * config.algo.n_steps

    def callback_calls(self, config: RunConfig) -> int:
        return -(-config.total_timesteps // self.round_steps(config))

    def warnings(self, algorithm: Any, config: RunConfig, folder: Path) -> Iterator[str]:
        steps, batch = self.round_steps(config), getattr(config.algo, "batch_size", 0)
        if config.total_timesteps < steps:
            yield short_training(config, "rollout of env.n_envs x algo.n_steps", steps)
        if batch > steps and not self.several_transitions:
            yield (
                f"algo.batch_size={batch:,} is more than a rollout has, {steps:,} transitions: each epoch is one step "
                "on all of them"
            )
        yield from super().warnings(algorithm, config, folder)
        if algorithm.env_options.device != "cuda":
            yield from limits.memory_warnings(config, None, self.rollout_bytes(config, algorithm.spec))

    def rollout_bytes(self, config: RunConfig, spec: Any) -> int:
        obs = spec.obs_dim * np.dtype(spec.obs_dtype).itemsize // spec.n_stacked
        # Rewards, flags, episode statistics, values, log-probabilities, advantages and returns: about 60 bytes.
        return 2 * config.env.n_envs * config.algo.n_steps * (obs + 8 * math.prod(spec.action_shape) + 60)

    def training_costs(self, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from rlox_cli.families.estimate import time_rollouts

        return time_rollouts(self, algorithm, config)


class OffPolicy(Environment):
    """Algorithms with a replay memory of transitions."""

    usual_buffer = "uniform"
    least_size = "algo.batch_size and env.n_envs"

    def least_transitions(self, run: RunConfig) -> int:
        return max(run.algo.batch_size, run.env.n_envs)

    def check_buffer(self, run: RunConfig, algo: str, chosen: str | None) -> None:
        replays = run.algo.replays
        if not isinstance(run.buffer, BufferConfig):
            raise ValueError(f"buffer must be chosen for algo={algo}, got null; try buffer={self.usual_buffer}")
        if run.buffer.name != chosen:
            raise ValueError(f"buffer.name must be {chosen}, as buffer= chose, got {run.buffer.name!r}")
        if run.buffer.holds != replays:
            able = [name for name in buffer_names() if buffer_config_class(name).holds == replays]
            raise ValueError(f"buffer must hold {replays} for algo={algo}, got {chosen}; try buffer={', '.join(able)}")
        if run.buffer.size < (least := self.least_transitions(run)):
            raise ValueError(f"buffer.size must be at least {self.least_size} ({least}), got {run.buffer.size}")
        if run.algo.learning_starts >= run.total_timesteps:
            raise ValueError(
                f"algo.learning_starts must be below total_timesteps ({run.total_timesteps}), or nothing is learned, "
                f"got {run.algo.learning_starts}"
            )

    def arguments(self, config: RunConfig, folder: Path) -> dict[str, Any]:
        buffer, arguments = config.buffer, super().arguments(config, folder)
        if isinstance(buffer, MmapBufferConfig) and buffer.folder is None:
            buffer = replace(buffer, folder=str(folder))
        if buffer is not None:
            arguments["buffer"] = buffer
        return arguments

    def round_steps(self, config: RunConfig) -> int:
        n = config.env.n_envs
        return -(-getattr(config.algo, "train_freq", 1) // n) * n

    def warnings(self, algorithm: Any, config: RunConfig, folder: Path) -> Iterator[str]:
        total, starts, steps = config.total_timesteps, config.algo.learning_starts, self.round_steps(config)
        if total < steps:
            yield short_training(config, "round of train_freq", steps)
        if starts > total / 2:
            yield (
                f"algo.learning_starts={starts:,} leaves {1 - starts / total:.0%} of total_timesteps={total:,} for "
                "learning; all actions before that are random"
            )
        yield from super().warnings(algorithm, config, folder)
        n_steps = total - algorithm.counters.steps
        memory = self.replay_footprint(algorithm, config, n_steps)
        yield from limits.memory_warnings(config, memory, 0)
        if memory is not None:
            yield from limits.disk_warnings(config, memory, folder, n_steps)

    def replay_footprint(self, algorithm: Any, config: RunConfig, n_steps: int) -> Footprint | None:
        sizes = (config.env.n_envs, config.algo.gamma, n_steps, algorithm._state_dim)
        return footprint(config.buffer, algorithm.spec, *sizes, with_masks=algorithm.collector.stores_masks)

    def training_costs(self, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from rlox_cli.families.estimate import time_replay

        return time_replay(self, algorithm, config, 32)

    def describe_stored(self, algorithm: Any, config: RunConfig) -> str:
        replay = self.replay_footprint(algorithm, config, config.total_timesteps)
        if replay is None:
            return "; in addition to the replay memory, whose size is unknown"
        return f"; the replay memory takes {limits.size(replay.resident)}"


class Sequences(OffPolicy):
    """Algorithms that replay sequences of steps, such as world models."""

    usual_buffer = "sequence"
    least_size = "algo.seq_len times env.n_envs"

    def least_transitions(self, run: RunConfig) -> int:
        return run.algo.seq_len * run.env.n_envs

    def replay_footprint(self, algorithm: Any, config: RunConfig, n_steps: int) -> Footprint | None:
        recorded = 0 if algorithm._dataset is None else len(algorithm._dataset)
        return super().replay_footprint(algorithm, config, n_steps + recorded)

    def training_costs(self, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from rlox_cli.families.estimate import time_replay

        # As many steps as lead to two updates.
        c = config.algo
        return time_replay(self, algorithm, config, math.ceil(2 * c.update_rows / c.replay_ratio))

    def update_cost(self, config: RunConfig, each: np.ndarray, each_random: np.ndarray) -> np.ndarray | None:
        return (each - each_random) * config.algo.update_rows / config.algo.replay_ratio

    def make_callbacks(self, algorithm: Any, folder: Path, recorder: RecordLogger) -> list[Callback]:
        if not hasattr(algorithm.actor, "open_loop"):
            return []
        from rlox.callbacks import PredictionsCallback

        record = recorder.record
        return [
            PredictionsCallback(
                folder,
                # After the rows that wait for an evaluation.
                lambda step, values: recorder.on_step(step=step, metrics=values),
                lambda step, file: record.checkpoint(step, "predictions", file),
            )
        ]

    def describe_training(self, algorithm: Any, config: RunConfig) -> str:
        c = config.algo
        return (
            f"{describe_steps(config, self.round_steps(config))}, an update of {spell(c.batch_size, 'sequence')} of "
            f"{spell(c.seq_len, 'step')} for every {c.update_rows / c.replay_ratio:g}"
        )


def require_source(run: RunConfig) -> None:
    """Raise a ValueError if keys of ``dataset`` are set, but not where it comes from."""
    if not isinstance(run.dataset, DatasetConfig):
        raise ValueError(
            "dataset.source must be given; try dataset=data/medium.arrow (`rlox collect` writes one) or "
            "dataset=minari:ID"
        )


def _check_agents(run: RunConfig, algo: str) -> None:
    """Raise a ValueError unless the algorithm supports several agents, and the environment's package is installed."""
    if not run.algo.several_agents and run.algo.uses_dataset != "must":
        able = [name for name, entry in ALGORITHMS.items() if resolve(entry.config).several_agents]
        raise ValueError(
            f"env={run.env.id} has several agents, but algo={algo} trains only one; try algo={' or '.join(able)}"
        )
    if run.env.id.startswith(ZOO):
        path = run.env.id.removeprefix(ZOO).partition(":")[0]
        try:
            if find_spec("pettingzoo") is None:
                raise ImportError("PettingZoo is not installed")
            import_module(path)
        except ImportError as e:
            raise ValueError(
                f'env={run.env.id} is not available: {one_line(e)}; try: pip install "rlox-cli[multi-agent]", or name '
                "an installed module with a parallel environment"
            ) from e


def check_env_id(env_id: str, kwargs: dict[str, Any], backend: str = "auto") -> None:
    """Raise a ValueError unless `env_id` is native or registered with gymnasium.

    gymnasium is imported only if the environment is not native. With the backend envpool, the environment must be one
    of EnvPool's.
    """
    if backend == "envpool":
        from rlox.envs.envpool_env import check_envpool_id

        try:
            check_envpool_id(env_id)
        except ImportError as e:
            raise ValueError(f"env.backend=envpool is not available: {e}") from e
        return
    try:
        if is_vectorised(env_id) and not kwargs:
            return
    except ImportError as e:
        raise ValueError(f"env={env_id} is not available: {e}") from e
    if env_id in tensor_table.VEC_ENVS:
        return
    import gymnasium
    from gymnasium import error

    from rlox.envs import foreign_id
    from rlox.envs.gym_make import nearest_id, register_atari

    if env_id.startswith("ALE/"):
        try:
            register_atari()
        except ImportError as e:
            raise ValueError(f"env={env_id} is not available: {e}") from e
    try:
        gymnasium.spec(foreign_id(env_id))
    except (error.Error, ImportError) as e:
        raise ValueError(f"env={one_line(env_id, 80)} is no environment; {nearest_id(env_id)}") from e


def _list_limits(algorithm: Any) -> Iterator[Any]:
    """Yield the limits in wrappers, arguments and gymnasium's registry. Atari games count frames; a step has four."""
    import gymnasium

    for wrapper in algorithm.env_options.wrappers:
        if isinstance(wrapper, dict):
            yield (wrapper.get("TimeLimit") or {}).get("max_episode_steps")
    spec = gymnasium.registry.get(algorithm.env_id.rpartition(":")[2])
    if spec is not None:
        yield algorithm.env_options.kwargs.get("max_episode_steps", spec.max_episode_steps)
        yield spec.kwargs.get("max_num_frames_per_episode", 0) // 4


def few_evaluations(config: RunConfig, calls: int) -> str:
    return (
        f"eval.n_points={config.eval.n_points:,} is more than the training can evaluate: only {calls:,} evaluations "
        "are made"
    )


def short_training(config: RunConfig, what: str, steps: int) -> str:
    return (
        f"total_timesteps={config.total_timesteps:,} is less than one {what}, {steps:,} steps: the run takes {steps:,} "
        "and learns once"
    )


def spell(n: int, name: str) -> str:
    return f"{n:,} {name}{'' if n == 1 else 's'}"


def describe_observations(spec: Any) -> str:
    if spec.images:
        return f"observations of {spec.described_parts()}"
    if not spec.image:
        return f"observations of {spell(spec.obs_dim, 'number')}"
    frames = f" of {spec.n_stacked} frames" if spec.n_stacked > 1 else ""
    return f"images {' x '.join(map(str, spec.obs_shape))}{frames}"


def describe_steps(config: RunConfig, every: int) -> str:
    steps = -(-config.total_timesteps // every) * every
    return f"{steps:,} steps in {spell(config.env.n_envs, 'environment')}"

"""``rlox train … --check``: all that can go wrong before the night, and what the night will cost; trains nothing.

Each distinct job is built as it would be for its run. Its environment is asked what it promises, and a short training
of it, whose files go to a temporary folder, is timed; the rest is multiplication. What the numbers were worth:
benchmarks/preflight.json.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from rlox.algorithms import ALGORITHMS, resolve
from rlox.callbacks import AdviceCallback, Callback, TimingCallback
from rlox.config import MmapBufferConfig, OffPolicyConfig, RunConfig
from rlox.evaluation import evaluate, torch_threads
from rlox.logging import RecordLogger
from rlox.tracking import LOGGERS
from rlox.tracking.record import Record
from rlox_cli import machine
from rlox_cli.compose import Job, compose_jobs
from rlox_cli.errors import UsageError, paragraph
from rlox_cli.preflight import (
    disk_bytes,
    looks,
    preflight,
    replay_footprint,
    require_folder,
    rollout_bytes,
    rollout_steps,
    time_limit,
)
from rlox_cli.progress import ProgressCallback
from rlox_cli.runner import build, shown
from rlox_cli.terminal import make_table

# CPU seconds that the parts of a probe may take, about; a single update or step is waited for.
_RANDOM_S, _UPDATES_S, _EVALUATION_S, _ENV_S = 0.2, 1.0, 0.2, 0.2
_ENV_STEPS = 1000  # of the environment's own probe, at most
_PAIR_STEPS = 200  # of these, how many are taken twice to see whether the same seed gives the same
_TRACKER_S = 1.0  # seconds that a tracker's server has to answer
# What is odd enough to say so: a learner sees numbers about 1 best.
_LARGE_OBS, _LARGE_REWARD = 1e3, 1e3
# A mirror runs beside the training, in a process of its own: CPU seconds of its start for each one that rlox itself
# takes to start, and MiB. Measured (benchmarks/preflight.py); nothing of it is started here.
_MIRRORS = {"mlflow": (9.0, 330), "wandb": (5.0, 200), "tensorboard": (2.0, 120), "csv": (0.5, 40)}
_LEARNED_AFTER = 0.5  # the part of a training after which episodes are taken to last as long as at its end


@dataclass
class Report:
    """What is known of one job before it is run."""

    algorithm: str
    env: str
    spaces: str
    backend: str
    plan: str
    memory: int  # bytes of the process at its peak
    memory_note: str
    disk: int
    cpu: dict[str, float]  # seconds, by part
    wall: float
    longest_wall: float  # where every episode of every evaluation lasts as long as it may
    note: str  # on the time
    folder: str
    warnings: list[str] = field(default_factory=list)


def check(
    jobs: list[Job], flags: list[str], overrides: list[str], multirun: bool, console: Console
) -> None:
    """Look at every distinct job of `jobs`, and print what there is to say.

    Raises
    ------
    UsageError
        For the last job that cannot be trained; what is wrong with others is printed before.
    """
    started = machine.cpu_seconds()
    compose_jobs([flag for flag in flags if flag not in ("-m", "--multirun")], jobs[0].overrides)
    composing = machine.cpu_seconds() - started
    groups: dict[str, list[int]] = {}
    for i, job in enumerate(jobs):
        groups.setdefault(repr(replace(job.config, seed=0)), []).append(i)
    reports: list[tuple[Report, int]] = []
    failures: list[Exception] = []
    for numbers in groups.values():
        job = jobs[numbers[0]]
        try:
            reports.append((examine(job, composing, started, multirun), len(numbers)))
        except Exception as e:
            where = f"job {numbers[0]} of the sweep ({' '.join(job.overrides)}): " if multirun else ""
            failures.append(UsageError(where + paragraph(e)) if isinstance(e, ValueError) else e)
    for report, n in reports:
        _print(report, n if multirun else 0, console)
    if failures:
        *others, last = failures
        for e in others:
            print(f"rlox train: {paragraph(e)}", file=sys.stderr)
        raise last
    if multirun:
        total = sum(report.wall * n for report, n in reports)
        longest = max(report.wall for report, _ in reports)
        console.print(f"{len(jobs)} jobs: {_duration(total)} one after the other, the longest {_duration(longest)}")
    console.print("nothing was trained or written; without --check this runs")


def examine(job: Job, composing: float, started: float, multirun: bool) -> Report:
    """Everything about one job.

    Parameters
    ----------
    composing : float
        CPU seconds of composing one job, which a run does once more.
    started : float
        CPU seconds from the start of this process to the composed job.

    Raises
    ------
    UsageError, ValueError, TypeError, ImportError
        For what would end the run.
    """
    config = job.config
    folder = _folder(job, multirun)
    require_folder(folder)
    if (folder / "metrics.jsonl").exists():
        raise UsageError(
            f"hydra.run.dir={shown(folder)} must be a new folder, but holds a run; choose another, or go on with that "
            f"run: rlox train resume={shown(folder)}"
        )
    found = [*_tracker_warnings(config)]
    with tempfile.TemporaryDirectory(prefix="rlox-check-") as scratch, _streams_kept():
        at = machine.cpu_seconds()
        algorithm = build(_smaller(config, Path(scratch)), job.algo, Path(scratch))
        start = started + composing + machine.cpu_seconds() - at
        try:
            found += preflight(algorithm, config, folder)
            seen = probe_env(algorithm, config)
            found += seen.warnings
            report = _estimate(algorithm, job, seen, start, Path(scratch), folder)
        finally:
            algorithm.close()
    report.warnings = list(dict.fromkeys(found))
    return report


def _folder(job: Job, multirun: bool) -> Path:
    """Where the run's files are to go; by default its name has the time in it."""
    HydraConfig.instance().set_config(job.cfg)
    hydra = job.cfg.hydra
    return Path(hydra.sweep.dir if multirun else hydra.run.dir).absolute()


def _smaller(config: RunConfig, scratch: Path) -> RunConfig:
    """`config` for a probe: files of a replay memory go to `scratch`."""
    buffer = config.buffer
    if isinstance(buffer, MmapBufferConfig):
        return replace(config, buffer=replace(buffer, folder=str(scratch)))
    return config


@contextmanager
def _streams_kept() -> Iterator[None]:
    """Code of the user's may draw from the generators that all share: a run after this finds them as they were."""
    import random

    ours, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)


@dataclass
class Seen:
    """What an environment did under random actions."""

    limit: int | None  # steps after which it ends an episode, as far as it says
    lengths: list[int]  # of the episodes that ended
    reward: float  # mean of a step's
    constant: bool  # whether all rewards were the same
    warnings: list[str]

    @property
    def length(self) -> float:
        """Steps of an episode under random actions, about."""
        if self.lengths:
            return statistics.fmean(self.lengths)
        return float(self.limit or _ENV_STEPS)


def probe_env(algorithm: Any, config: RunConfig) -> Seen:
    """Step one environment, and for a while a second one with the same seed and actions.

    Raises
    ------
    UsageError
        For what no training could use: a step that is none, numbers that are none, an exception.
    """
    where, limit = f"env={config.env.id}", time_limit(algorithm)
    if config.env.backend == "envpool":
        return Seen(limit, [], 0.0, False, [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = [] if algorithm.collector.native else [*_contract(config, where)]
        seen = _play(algorithm, config, where, limit)
    if not algorithm.collector.native:
        lines += [f"{where}: {text}" for text in dict.fromkeys(_plain(str(item.message)) for item in caught)][:5]
    seen.warnings = [*dict.fromkeys(lines), *seen.warnings]
    return seen


def _plain(text: str) -> str:
    """A warning of gymnasium's without colours and heading, in one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("WARN: ", "")
    return " ".join(text.split()).rstrip(".")


def _contract(config: RunConfig, where: str) -> Iterator[str]:
    """What gymnasium's checker, and a look at single answers, find wrong with an environment of gymnasium's."""
    from gymnasium.utils.env_checker import check_env

    from rlox.gym_vec_env import make_gym_env

    env = make_gym_env(config.env.id, config.env.kwargs, config.env.wrappers)
    try:
        bare = env.unwrapped
        # Wrappers and checkers stumble over these, and say so in their own words.
        answer = _called(where, "reset", lambda: bare.reset(seed=config.eval_seed % 2**31))
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            raise UsageError(
                f"{where}: reset must return (observation, info), got {_described(answer)}; return {{}} where there is "
                "nothing to tell"
            )
        bare.action_space.seed(config.seed % 2**31)
        answer = _called(where, "step", lambda: bare.step(bare.action_space.sample()))
        if not (isinstance(answer, tuple) and len(answer) == 5):
            old = "; that is old gym's form: part done into terminated (by the task) and truncated (by a time limit)"
            raise UsageError(
                f"{where}: step must return (observation, reward, terminated, truncated, info), got "
                f"{_described(answer)}{old if isinstance(answer, tuple) and len(answer) == 4 else ''}"
            )
        _require_observation(where, bare.observation_space, answer[0])
        _require_reward(where, answer[1])
        try:
            check_env(bare, skip_render_check=True, skip_close_check=True)
        except Exception as e:
            yield f"{where}: gymnasium's checker says: {_plain(str(e)) or type(e).__name__}"
    finally:
        env.close()


def _called(where: str, what: str, call: Any) -> Any:
    try:
        return call()
    except Exception as e:  # the user's own code
        raise UsageError(f"{where}: {what} failed with {type(e).__name__}: {_plain(str(e))}") from e


def _described(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"a tuple of {len(answer)}"
    return f"{type(answer).__name__}{' of shape ' + str(answer.shape) if isinstance(answer, np.ndarray) else ''}"


def _require_observation(where: str, space: Any, obs: Any) -> None:
    if isinstance(obs, np.ndarray) and space.shape is not None and obs.shape != space.shape:
        raise UsageError(
            f"{where}: observations must have the shape of observation_space, {space.shape}, got {obs.shape}"
        )


def _require_reward(where: str, reward: Any) -> None:
    try:
        number = float(reward)
    except (TypeError, ValueError) as e:
        raise UsageError(f"{where}: the reward must be a number, got {_described(reward)}") from e
    if not np.isfinite(number):
        raise UsageError(f"{where}: rewards must be finite, got {number}; mend the environment, or set env.reward_fn")


def _play(algorithm: Any, config: RunConfig, where: str, limit: int | None) -> Seen:
    """Random actions in one environment, and for a while in a second one with the same seed."""
    from rlox.envs import make_vec_env, spec_of

    def make() -> Any:
        c = config.env
        return make_vec_env(c.id, 1, config.seed, c.kwargs, c.wrappers, 0, c.backend)

    first, second = make(), make()
    spec, rng = spec_of(first), np.random.default_rng(config.seed)
    lengths: list[int] = []
    by_limit: list[bool] = []
    rewards: list[float] = []
    largest, differs, compared = 0.0, "", True
    started = time.process_time()
    try:
        obs, other = (_called(where, "reset", env.reset_all) for env in (first, second))
        if not np.array_equal(obs, other):
            differs = "the first observation"
        while len(rewards) < _ENV_STEPS and (time.process_time() - started < _ENV_S or len(rewards) < 20):
            actions = _random_actions(spec, rng)
            out = _called(where, "step", lambda: first.step_all(actions))
            if compared and len(rewards) < _PAIR_STEPS and not differs:
                twin = _called(where, "step", lambda: second.step_all(actions))
                differs = next((what for what in ("final_obs", "rewards") if not _same(out[what], twin[what])), "")
            if not np.isfinite(out["final_obs"]).all():
                raise UsageError(
                    f"{where}: observations must be finite, got {float(out['final_obs'][~np.isfinite(out['final_obs'])][0])} "
                    f"after {len(rewards) + 1} steps of random actions"
                )
            _require_reward(where, out["rewards"][0])
            rewards.append(float(out["rewards"][0]))
            largest = max(largest, float(np.abs(out["final_obs"]).max(initial=0)))
            if out["terminated"][0] or out["truncated"][0]:
                lengths.append(int(out["episode_length"][0]))
                by_limit.append(bool(out["truncated"][0]))
    finally:
        for env in (first, second):
            if hasattr(env, "close"):
                env.close()
    lines = []
    if differs:
        name = {"final_obs": "observations", "rewards": "rewards"}.get(differs, differs)
        lines.append(
            f"{where} is not deterministic: under the same seed and actions {name} differ, so that no run of it can be "
            "repeated; draw from self.np_random, which reset(seed=…) seeds"
        )
    if limit is None and not lengths:
        lines.append(
            f"{where}: no episode ended in {len(rewards):,} random steps, and without a time limit an evaluation may "
            "never end"
        )
    if len(lengths) > 1 and len(set(lengths)) == 1 and lengths[0] > 1 and not any(by_limit):
        lines.append(
            f"{where}: every episode terminated after exactly {lengths[0]} steps; if that is a time limit, it must be "
            "truncated, or the learner takes it for a failure"
        )
    if largest > _LARGE_OBS and not (spec.image or getattr(config.algo, "normalize_obs", False)):
        lines.append(f"{where}: observations reach {largest:.3g}; algo.normalize_obs=true brings them near 1")
    scale = max(map(abs, rewards), default=0.0)
    if scale > _LARGE_REWARD and config.env.reward_fn is None and not getattr(config.algo, "normalize_rewards", False):
        remedy = "algo.normalize_rewards=true" if hasattr(config.algo, "normalize_rewards") else "a scale by env.reward_fn"
        lines.append(f"{where}: rewards reach {scale:.3g}; {remedy} brings them near 1")
    return Seen(limit, lengths, statistics.fmean(rewards), len(set(rewards)) == 1, lines)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _random_actions(spec: Any, rng: np.random.Generator) -> np.ndarray:
    """One action, within ±1 where there are no bounds."""
    if spec.discrete:
        return rng.integers(spec.n_actions, size=1)
    if spec.n_choices is not None:
        return rng.integers(spec.n_choices, size=(1, len(spec.n_choices)))
    low, high = (np.where(np.isfinite(b), b, d) for b, d in ((spec.act_low, -1.0), (spec.act_high, 1.0)))
    return rng.uniform(low, high, (1, spec.act_dim)).astype(np.float32)


class _Watch(Callback):
    """Reads the clocks after each update, and stops after so many CPU seconds and two of them."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.rows: list[tuple[float, float, int]] = []

    def on_training_start(self, *, algorithm: Any, **info: Any) -> None:
        self.rows = [(*_clocks(), algorithm.counters.env_steps)]

    def on_step(self, *, step: int, **info: Any) -> bool:
        self.rows.append((*_clocks(), step))
        return len(self.rows) < 3 or self.rows[-1][0] - self.rows[0][0] < self.seconds

    def costs(self) -> tuple[np.ndarray, np.ndarray]:
        """CPU and wall seconds, (2,) each: what came once, and of one environment step."""
        rows = np.array(self.rows)
        # The first update is slower: what it needs is loaded, and made, with it.
        settled = rows[1:] if len(rows) > 2 else rows
        each = (settled[-1, :2] - settled[0, :2]) / (settled[-1, 2] - settled[0, 2])
        first = rows[1] - rows[0]
        return np.maximum(0.0, first[:2] - each * first[2]), each


def _clocks() -> tuple[float, float]:
    return machine.cpu_seconds(), time.perf_counter()


def _estimate(algorithm: Any, job: Job, seen: Seen, start: float, scratch: Path, folder: Path) -> Report:
    """Train a little, and multiply."""
    config, spec = job.config, algorithm.spec
    off_policy = isinstance(config.algo, OffPolicyConfig)
    total = -(-config.total_timesteps // rollout_steps(config)) * rollout_steps(config)
    quiet = Console(file=StringIO(), force_terminal=False)
    with Record(scratch / "run") as record, torch_threads(config.threads):
        algorithm.callbacks.extend(
            [
                TimingCallback(),
                RecordLogger(record),
                AdviceCallback(lambda line: None),
                ProgressCallback(quiet, "", config.total_timesteps),
            ]
        )
        once, each, random_each = (_off_policy if off_policy else _on_policy)(algorithm, config)
        n_random = min(config.algo.learning_starts, total) if off_policy else 0
        training = once + random_each * n_random + each * (total - n_random)
        making, episode_step, side_by_side = _evaluation_costs(algorithm, config)
        saving, checkpoint_bytes = _saving_costs(algorithm, scratch)
        record.end(0, "finished")
    n_evaluations = min(config.eval.n_points, looks(config)) if config.eval.n_points else 1
    n_episodes = config.eval.n_episodes

    def evaluations(length: float, longest: float) -> np.ndarray:
        steps = longest if side_by_side else n_episodes * length
        return n_evaluations * (making + episode_step * steps)

    length = _expected_length(seen, config)
    likely = evaluations(length, min(seen.limit or np.inf, 1.5 * length))
    longest = evaluations(seen.limit, seen.limit) if seen.limit else likely
    n_saves = (n_evaluations + 1) / 2 + 1 + (training + likely)[1] / config.checkpoint.every_s
    ended = saving * n_saves
    found = replay_footprint(algorithm, config, total)
    rss = _peak_rss()
    rows = 0 if found is None else found.resident
    copied = 0
    if off_policy and config.checkpoint.memory and found is not None:
        # A save holds a copy of what is new, and the bytes that it makes of it for the file.
        between = config.checkpoint.every_s / max(each[1], 1e-9)
        copied = 2 * int(min(total, between, config.checkpoint.every_steps or np.inf)) * found.row
    more = rollout_bytes(algorithm) if algorithm.config != config.algo and not off_policy else 0
    cpu = {"start": start, "training": training[0], "evaluation": likely[0], "saving": ended[0]}
    notes = []
    for name in _loggers(config):
        factor, _ = _MIRRORS.get(name, (0.0, 0))
        cpu[name] = factor * start
    wall = start + float((training + likely + ended)[1])
    if seen.limit and longest[0] > 1.2 * likely[0]:
        notes.append(f"evaluation {_duration(longest[1])} if each episode lasts {seen.limit:,} steps")
    if config.max_seconds is not None and wall > config.max_seconds:
        notes.append(f"max_time={config.max_time} stops it before")
    own, beside = disk_bytes(config, found, total)
    rollout = rollout_steps(config)
    batch = f"batches of {config.algo.batch_size:,}" if hasattr(config.algo, "batch_size") else "whole rollouts"
    return Report(
        algorithm=job.algo,
        env=config.env.id,
        spaces=f"{_observations(spec)}; {spec.describe_actions()}",
        backend=f"{algorithm.backend} ({algorithm.backend_reason})",
        plan=(
            f"{total:,} steps in {config.env.n_envs:,} environment{'' if config.env.n_envs == 1 else 's'}, learning "
            f"every {rollout:,} in {batch}; {n_evaluations:,} evaluations of {n_episodes:,} episodes"
        ),
        memory=rss + rows + copied + more,
        memory_note="" if found is None else f"replay memory {machine.size(found.resident)}",
        disk=2 * checkpoint_bytes + own + beside,
        cpu=cpu,
        wall=wall,
        longest_wall=wall + float(longest[1] - likely[1]),
        note="; ".join(notes),
        folder=shown(folder),
    )


def _observations(spec: Any) -> str:
    if spec.image:
        frames = f" of {spec.n_stacked} frames" if spec.n_stacked > 1 else ""
        return f"images {' x '.join(map(str, spec.obs_shape))}{frames}"
    return f"observations of {spec.obs_dim} number{'' if spec.obs_dim == 1 else 's'}"


def _on_policy(algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Costs that come once, and of a step: with short rollouts first, with whole ones where these are short too."""
    c, n = config.algo, config.env.n_envs
    short = min(c.n_steps, -(-max(getattr(c, "batch_size", 0), 64) // n))
    once, each = _trained(algorithm, config, replace(c, n_steps=short), _RANDOM_S)
    if each[0] * c.n_steps * n < _UPDATES_S:
        again, each = _trained(algorithm, config, c, _UPDATES_S)
        once = once + again
    return once, each, each


def _off_policy(algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Costs that come once, of a step with its share of updates, and of one before the first update."""
    c = config.algo
    random_each = np.zeros(2)
    if c.learning_starts:
        _, random_each = _trained(algorithm, config, replace(c, learning_starts=2**60), _RANDOM_S)
    once, each = _trained(algorithm, config, replace(c, learning_starts=0), _UPDATES_S)
    return once, each, random_each


def _trained(algorithm: Any, config: RunConfig, changed: Any, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Train with `changed` hyper-parameters for so long; what came once, and of one step."""
    watch = _Watch(seconds)
    algorithm.config = changed
    algorithm.callbacks.extend([watch])
    # Of such a training, off-policy, callbacks are told every 32 steps.
    horizon = max(3200, 100 * rollout_steps(replace(config, algo=changed)))
    algorithm.train(horizon, schedule_timesteps=config.schedule_timesteps or config.total_timesteps)
    algorithm.callbacks.callbacks.remove(watch)
    return watch.costs()


def _evaluation_costs(algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, bool]:
    """CPU and wall seconds, (2,) each, of making the environment and of one step; whether episodes are side by side."""
    from rlox.envs import is_native
    from rlox.gym_vec_env import ATARI_WRAPPERS, whole_games

    wrappers, kwargs = config.env.wrappers, algorithm._eval_kwargs
    if is_native(config.env.id) and not (kwargs or wrappers):
        played, took = _timed(lambda: algorithm.evaluate(config.eval.n_episodes, config.eval_seed))
        return np.zeros(2), took / max(1, played.lengths.max()), True
    wrappers = whole_games(wrappers) or (ATARI_WRAPPERS if config.env.id.startswith("ALE/") else ())

    def play(limit: int, n_episodes: int) -> tuple[Any, np.ndarray]:
        return _timed(
            lambda: evaluate(
                algorithm.actor,
                algorithm.env_id,
                n_episodes,
                config.eval_seed,
                env_kwargs=kwargs,
                device=algorithm.device,
                wrappers=[*wrappers, {"TimeLimit": {"max_episode_steps": limit}}],
                transform=None if algorithm.normalizer is None else algorithm.normalizer.normalize,
            )
        )

    _, making = play(1, 1)
    limit, n_steps, spent = 50, 0, np.zeros(2)
    while spent[0] < _EVALUATION_S and n_steps < 2000:
        played, took = play(limit, 2)
        spent, n_steps = spent + np.maximum(took - making, 0.0), n_steps + int(played.lengths.sum())
        limit *= 2
    return making, spent / n_steps, False


def _timed(call: Any) -> tuple[Any, np.ndarray]:
    before = np.array(_clocks())
    result = call()
    return result, np.array(_clocks()) - before


def _saving_costs(algorithm: Any, scratch: Path) -> tuple[np.ndarray, int]:
    """CPU and wall seconds of one checkpoint without a replay memory, (2,), and its bytes."""
    path = scratch / "checkpoint.safetensors"
    _, took = _timed(lambda: algorithm.save(path))
    return took, path.stat().st_size


def _expected_length(seen: Seen, config: RunConfig) -> float:
    """Steps of an evaluation's episodes, averaged over the training: nobody knows, and this is what is likely.

    Where every step brings the same reward, the score that tuned settings must reach says how long episodes are at the
    end; else something between those of random actions and the time limit.
    """
    first, limit = seen.length, float(seen.limit or max(seen.length, 1.0))
    goal = (config.reference or {}).get("mean_return")
    if seen.constant and seen.reward:
        last = goal / seen.reward if goal is not None else limit if seen.reward > 0 else first
    else:
        last = first if not seen.lengths or min(seen.lengths) >= limit else (first + limit) / 2
    last = min(max(last, 1.0), limit)
    return _LEARNED_AFTER / 2 * first + (1 - _LEARNED_AFTER / 2) * last


def _peak_rss() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _loggers(config: RunConfig) -> list[str]:
    return [item.name for item in dataclasses.fields(config.logger) if getattr(config.logger, item.name) is not None]


def _tracker_warnings(config: RunConfig) -> Iterator[str]:
    """About trackers that are not there, now: training does not wait for them, and `rlox sync` brings what is missing."""
    for name in _loggers(config):
        package = {"csv": None}.get(name, name)
        if package and importlib.util.find_spec(package) is None:
            yield f'logger={name} needs a package that is not installed; pip install "rlox-cli[{name}]"'
            continue
        address = None
        if name == "mlflow":
            uri = config.logger.mlflow.tracking_uri
            if uri.startswith("sqlite:///"):
                above = machine.standing(Path(uri.removeprefix("sqlite:///")))
                if not os.access(above, os.W_OK):
                    yield f"logger.mlflow.tracking_uri={uri} cannot be written to: {above}"
            else:
                address = uri
        if name == "wandb" and config.logger.wandb.mode == "online":
            address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        if address is not None and not _reachable(address):
            yield (
                f"logger={name}: {address} does not answer within {_TRACKER_S:g} s; training does not wait for it, and "
                "`rlox sync` brings what is missing"
            )


def _reachable(address: str) -> bool:
    """Whether a server takes connections there; looking its name up may hang, and is left behind then."""
    parts, answered = urlsplit(address), threading.Event()

    def ask() -> None:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            with socket.create_connection((parts.hostname, port), timeout=_TRACKER_S):
                answered.set()
        except OSError:
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_TRACKER_S)
    return answered.is_set()


def _duration(seconds: float) -> str:
    """``3.2 s``, ``12 min``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _print(report: Report, n_jobs: int, console: Console) -> None:
    """One block; `n_jobs` jobs of a sweep have it, 0 where it is no sweep."""
    many = f", {n_jobs} jobs" if n_jobs > 1 else ""
    console.print(f"{report.algorithm} on {report.env}{many}", markup=False)
    given, cpu = machine.memory(), sum(report.cpu.values())
    free = "" if given is None else f" ({machine.size(given[0])} free)"
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.cpu.items() if seconds >= 0.05)
    lines = [
        ("spaces", report.spaces),
        ("backend", report.backend),
        ("plan", report.plan),
        ("memory", f"{machine.size(report.memory)}{free}{'; ' * bool(report.memory_note)}{report.memory_note}"),
        ("disk", f"{machine.size(report.disk)} ({machine.size(machine.free_disk(Path(report.folder)))} free)"),
        ("time", f"{_duration(report.wall)}; CPU {cpu:.1f} s: {parts}{'; ' * bool(report.note)}{report.note}"),
        ("folder", report.folder),
        *(("warning", line) for line in report.warnings),
    ]
    for name, value in lines:
        console.print(f"  {name:<12} {value}", soft_wrap=True, markup=False)

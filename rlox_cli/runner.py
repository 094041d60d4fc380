"""One run: from a validated configuration to a trained, logged, checkpointed agent."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from rich.console import Console

from rlox import tracking
from rlox.algorithms import ALGORITHMS, resolve
from rlox.callbacks import (
    AdviceCallback,
    Callback,
    CheckpointCallback,
    EvalCallback,
    TimeLimitCallback,
    TimingCallback,
)
from rlox.checkpoint import load_checkpoint, versions
from rlox.config import BufferConfig, MmapBufferConfig, RunConfig
from rlox.envs import make_vec_env, spec_of
from rlox.logging import RecordLogger
from rlox.offline.dataset import open_dataset
from rlox.tracking.record import FILE, Record
from rlox_cli.errors import Stopped
from rlox_cli.imports import resolve_reward
from rlox_cli.preflight import preflight, time_limit_warnings
from rlox_cli.progress import ProgressCallback


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    steps: int
    seconds: float
    final: dict[str, float]  # summary of the last evaluation; empty if none was made
    best: float | None  # mean return of the best evaluation


class Stopper(Protocol):
    """A callback that says why it stopped a training, if it did."""

    stopped: str | None


class StopOnSignal(Callback):
    """The first Ctrl-C or SIGTERM lets the update finish, so that what is saved is whole; the second stops at once.

    So does the file `flag`, if it comes to be: a sweep's other processes, or machines, cannot be sent a signal.
    """

    def __init__(self, flag: Path | None = None) -> None:
        self.signal_number: int | None = None
        self._flag, self._looked = flag, 0.0

    def on_step(self, **info: Any) -> bool:
        if self._flag is not None and (now := time.monotonic()) - self._looked > 0.5:
            self._looked = now
            if self._flag.exists():
                self.signal_number = signal.SIGINT
        return self.signal_number is None

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number


def resolved(config: RunConfig, algo: str) -> dict[str, Any]:
    """`config` as plain data, the algorithm's name first in its section; what ``config.yaml`` holds."""
    plain = dataclasses.asdict(config)
    plain["algo"] = {"name": algo, **plain["algo"]}
    if plain["init_from"] is not None:
        plain["init_from"] = os.path.abspath(plain["init_from"])
    if plain["buffer"] is not None and plain["buffer"].get("folder") is not None:
        plain["buffer"]["folder"] = os.path.abspath(plain["buffer"]["folder"])
    if plain["dataset"] is not None and os.path.exists(plain["dataset"]["source"]):
        plain["dataset"]["source"] = os.path.abspath(plain["dataset"]["source"])
    mlflow = plain["logger"]["mlflow"]
    if mlflow is not None and mlflow["tracking_uri"].startswith("sqlite:///"):
        # The mirror runs in another process and later: a path must not hang on today's working directory.
        mlflow["tracking_uri"] = "sqlite:///" + os.path.abspath(mlflow["tracking_uri"].removeprefix("sqlite:///"))
    return plain


def _memory(buffer: BufferConfig | None, folder: Path) -> dict[str, BufferConfig]:
    """The argument for an off-policy algorithm's replay memory, whose files lie in the run's folder."""
    if isinstance(buffer, MmapBufferConfig) and buffer.folder is None:
        buffer = dataclasses.replace(buffer, folder=str(folder))
    return {} if buffer is None else {"buffer": buffer}


def run(
    config: RunConfig,
    algo: str,
    folder: Path,
    console: Console,
    stop_flag: Path | None = None,
    again: bool = False,
    more: Sequence[Stopper] = (),
) -> Outcome:
    """Train, evaluate, save.

    Parameters
    ----------
    stop_flag : Path, optional
        A file that stops the training, as Ctrl-C does, once it exists.
    again : bool
        Whether the folder may hold a run that ended before it had saved anything; its next segment starts anew.
    more : sequence of Stopper
        Further callbacks, which may stop the training.

    Raises
    ------
    Stopped
        After Ctrl-C or SIGTERM, with everything saved.
    Exception
        Whatever went wrong; the record says so, and saved checkpoints are untouched.
    """
    found = _size(folder / FILE)
    if found and not again:
        raise ValueError(
            f"{shown(folder)} must be a new folder, but holds a run; choose another hydra.run.dir, or go on with that "
            f"run: rlox train resume={shown(folder)}"
        )
    algorithm = build(config, algo, folder, console)

    def verify() -> None:
        if _size(folder / FILE) != found:
            raise RuntimeError(f"{shown(folder)} was taken by another process meanwhile; try again")

    return _carry_out(algorithm, config, algo, folder, console, verify, stop_flag=stop_flag, more=more)


def build(config: RunConfig, algo: str, folder: Path, console: Console | None = None) -> Any:
    """The algorithm of a new run in `folder`, untrained; what `init_from` leaves out is printed."""
    cls = resolve(ALGORITHMS[algo].cls)
    if config.offline:
        algorithm = _on_dataset(cls, config)
    else:
        env, arguments = config.env, _arguments(config, folder)
        algorithm = cls(env.id, env.n_envs, config.seed, env_kwargs=env.kwargs, **arguments)
    try:
        if config.init_from is not None:
            with _notes("init_from:", console or Console(stderr=True)):
                algorithm.init_from(config.init_from)
    except BaseException:
        algorithm.close()
        raise
    return algorithm


def resume(
    config: RunConfig,
    algo: str,
    checkpoint: Path,
    console: Console,
    changed: Mapping[str, Any],
    trusted: bool,
    stop_flag: Path | None = None,
    more: Sequence[Stopper] = (),
) -> Outcome:
    """Go on with the run that `checkpoint` lies in, as if it had not been stopped; as `run`.

    Parameters
    ----------
    config : RunConfig
        The run's own, with what is to be `changed`: ``{key: [old, new]}``.
    trusted : bool
        Whether the environment may be what the files say, however many there are to be and whatever is imported.
    """
    folder, identity = checkpoint.parent.parent, _identity(checkpoint)
    algorithm = restored(config, algo, checkpoint, console, trusted)

    def verify() -> None:
        if _identity(checkpoint) != identity:
            raise RuntimeError(f"{shown(checkpoint)} was replaced by another process while it was read; try again")

    return _carry_out(algorithm, config, algo, folder, console, verify, changed, True, stop_flag, more)


def restored(config: RunConfig, algo: str, checkpoint: Path, console: Console, trusted: bool) -> Any:
    """The algorithm that `checkpoint` holds, as `resume` goes on with it; what cannot be restored is printed."""
    with _notes("from_checkpoint:", console):
        arguments = _offline_arguments(config) if config.offline else _arguments(config, checkpoint.parent.parent)
        algorithm = resolve(ALGORITHMS[algo].cls).from_checkpoint(
            checkpoint, env_id=config.env.id if trusted else None, **arguments
        )
    if not config.offline and (note := algorithm.collector.restore_note()) is not None:
        console.print(note, soft_wrap=True, markup=False)
    return algorithm


@contextmanager
def _notes(beginning: str, console: Console) -> Iterator[None]:
    """Print the warnings that begin so as plain lines; no others are shown."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", beginning)
        yield
    for warning in warned:
        console.print(str(warning.message), soft_wrap=True, markup=False)


def _size(path: Path) -> int:
    """Of a file that only grows, in bytes; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def _identity(path: Path) -> tuple[int, int, int]:
    """Of a file that is never changed in place, only replaced."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _offline_arguments(config: RunConfig) -> dict[str, Any]:
    """As `_arguments`, of an algorithm that learns from a dataset; the environment is for its evaluation."""
    # Normalised as it is sampled, which is the quickest place for it.
    settings = dataclasses.replace(config.dataset, normalize=config.dataset.normalize or config.algo.normalize_obs)
    return {
        "dataset": open_dataset(settings),
        "device": config.device,
        "backend": config.backend,
        "threads": config.threads,
        "env_wrappers": config.env.wrappers,
        **dataclasses.asdict(config.algo),
    }


def _on_dataset(cls: type, config: RunConfig):
    """An offline algorithm, its sizes and bounds those of the environment."""
    env = make_vec_env(config.env.id, 1, config.seed, config.env.kwargs, config.env.wrappers)
    spec = spec_of(env)
    if hasattr(env, "close"):
        env.close()
    if len(spec.obs_shape) != 1 or spec.n_choices is not None:
        raise ValueError(
            f"env={config.env.id} must have vectors for observations, and numbers or one choice for actions, where the "
            f"algorithm learns from a dataset; got observations {spec.obs_shape} and {spec.describe_actions()}"
        )
    bounds = {"act_low": spec.act_low, "act_high": spec.act_high} if spec.continuous else {}
    return cls(
        obs_dim=spec.obs_dim,
        act_dim=spec.act_dim or spec.n_actions,
        continuous=spec.continuous,
        seed=config.seed,
        env_id=config.env.id,
        env_kwargs=config.env.kwargs,
        **bounds,
        **_offline_arguments(config),
    )


def _arguments(config: RunConfig, folder: Path) -> dict[str, Any]:
    """What an algorithm's constructor and its `from_checkpoint` are both given."""
    if config.dataset is not None and config.dataset.normalize_returns:
        raise ValueError(
            "dataset.normalize_returns must be false where the replay memory holds the environment's own rewards, got "
            "true; dataset.reward_scale and reward_shift are for rewards that were recorded on another scale"
        )
    return {
        "device": config.device,
        "backend": config.backend,
        "threads": config.threads,
        "compile": config.compile,
        "env_wrappers": config.env.wrappers,
        "env_workers": config.env.workers,
        "env_backend": config.env.backend,
        "reward_fn": resolve_reward(config.env.reward_fn, config.imports),
        **_memory(config.buffer, folder),
        **({} if config.dataset is None else {"dataset": open_dataset(config.dataset)}),
        **dataclasses.asdict(config.algo),
    }


def _carry_out(
    algorithm,
    config: RunConfig,
    algo: str,
    folder: Path,
    console: Console,
    verify: Callable[[], None],
    changed: Mapping[str, Any] | None = None,
    resumed: bool = False,
    stop_flag: Path | None = None,
    more: Sequence[Stopper] = (),
) -> Outcome:
    """The training itself, from its beginning or from where the checkpoint left it that `algorithm` was made of."""
    plain = resolved(config, algo)
    # The path that ran, so that this file gives the same run elsewhere.
    plain["backend"] = algorithm.backend
    console.print(f"backend: {algorithm.backend} ({algorithm.backend_reason})", soft_wrap=True)
    try:
        for warning in (*preflight(algorithm, config, folder), *time_limit_warnings(algorithm, config)):
            console.print(f"warning: {warning}", soft_wrap=True, markup=False)
    except BaseException:
        algorithm.close()
        raise
    folder.mkdir(parents=True, exist_ok=True)
    if not resumed:
        _write_config(folder, plain)
    stop = StopOnSignal(stop_flag)
    timing = TimingCallback()
    plan = config.eval
    evaluations = EvalCallback(plan.n_points, plan.n_episodes, config.eval_seed, plan.stop_at, plan.patience)
    time_limit = TimeLimitCallback(config.max_seconds or math.inf, evaluations)
    advice = AdviceCallback(lambda line: console.print(f"advice: {line}", soft_wrap=True, markup=False))
    saving = config.checkpoint
    checkpoints = CheckpointCallback(folder / "checkpoints", saving.every_s, plain, saving.memory, saving.every_steps)
    label = f"{algo} {config.env.id} seed {config.seed}"
    start, unit = algorithm.counters.steps, algorithm.counters.unit
    record = Record(folder, versions=versions(), resume_step=start if resumed else None, changed=changed, verify=verify)
    with record, stop.installed():
        if resumed:
            _write_config(folder, plain)
        _remove_partial(folder / "checkpoints")
        tracking.start_mirrors(folder)
        started = time.perf_counter()
        try:
            with ProgressCallback(console, label, config.total_timesteps, unit) as progress:
                algorithm.callbacks.extend(
                    [timing, RecordLogger(record), evaluations, *more, time_limit, advice, progress, stop, checkpoints]
                )
                if not resumed:
                    algorithm.train(config.total_timesteps, schedule_timesteps=config.schedule_timesteps)
                else:
                    checkpoints.best = max(checkpoints.best, _best_score(folder))
                    algorithm.train(until=config.total_timesteps, schedule_timesteps=config.schedule_timesteps)
        except BaseException as e:
            # On a full disk this fails as well; what is to be told is the first error.
            with suppress(OSError):
                record.end(algorithm.counters.steps, "failed", str(e) or type(e).__name__, may_pass(e))
            if isinstance(e, (FloatingPointError, RuntimeError)):
                e.args = (f"{e}. {_last_good(folder)}",)
            raise
        finally:
            algorithm.close()
        seconds = time.perf_counter() - started
        steps = algorithm.counters.steps
        reasons = (f"max_time={config.max_time} was over" if time_limit.reached else None, evaluations.stopped)
        early = next(filter(None, [*reasons, *(callback.stopped for callback in more)]), None)
        if stop.signal_number:
            record.end(steps, "interrupted")
        else:
            record.end(steps, "finished", f"stopped early: {early}" if early else "")
    final = evaluations.evaluations[-1][1].summary() if evaluations.evaluations else {}
    best = checkpoints.best if evaluations.evaluations else None
    if stop.signal_number:
        console.print(
            f"stopped at {unit[:-1]} {steps:,}; everything up to it is saved. Go on: rlox train resume={shown(folder)}",
            soft_wrap=True,
        )
        _describe(folder, config, best is not None, console)
        raise Stopped(stop.signal_number)
    if early:
        console.print(f"stopped early: {early}", soft_wrap=True)
    console.print(
        f"trained {label}: {steps:,} {unit} in {seconds:.1f} s{f' (from {start:,})' if resumed else ''}, final "
        f"evaluation {final['mean_return']:.1f} ± {final['std_return']:.1f} over {final['n_episodes']} episodes, "
        f"best {best:.1f}",
        soft_wrap=True,
    )
    _describe(folder, config, True, console)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in timing.summary().items() if name != "total_s")
    console.print(f"  {'time':<12} {shares}")
    return Outcome(folder, steps, seconds, final, best)


def may_pass(e: BaseException) -> bool:
    """Whether the same training, tried again, may succeed: not where its input or its numbers are at fault."""
    return isinstance(e, (RuntimeError, OSError, MemoryError)) and not isinstance(e, NotImplementedError)


def _write_config(folder: Path, plain: dict[str, Any]) -> None:
    """Replace ``config.yaml`` in one go."""
    partial = folder / f".config.yaml.{os.getpid()}.partial"
    partial.write_text(yaml.safe_dump(plain, sort_keys=False))
    os.replace(partial, folder / "config.yaml")


def _remove_partial(folder: Path) -> None:
    """Remove what a killed process has not finished writing; the record's lock is held."""
    for path in folder.rglob(".*.partial"):
        path.unlink(missing_ok=True)


def _best_score(folder: Path) -> float:
    """The mean return that ``best.safetensors`` was kept for: it may be newer than what is resumed from."""
    path = folder / "checkpoints" / "best.safetensors"
    return load_checkpoint(path).header["evaluation"]["mean_return"] if path.is_file() else -math.inf


def _last_good(folder: Path) -> str:
    saved = [
        path for path in (folder / "checkpoints" / f"{kind}.safetensors" for kind in ("last", "best")) if path.exists()
    ]
    return f"Saved before that: {', '.join(map(shown, saved))}" if saved else "No checkpoint had been saved yet"


def shown(path: Path) -> str:
    """`path` relative to the working directory where it lies below it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _describe(folder: Path, config: RunConfig, has_best: bool, console: Console) -> None:
    names = ["best", "last"] if has_best else ["last"]
    checkpoints = [shown(folder / "checkpoints" / f"{name}.safetensors") for name in names]
    module = config.env.id.rpartition(":")[0]
    imports = "".join(f" --import {name}" for name in [*config.imports, *([module] if module else [])])
    for name, value in (
        ("checkpoints", ", ".join(checkpoints)),
        ("config", shown(folder / "config.yaml")),
        ("metrics", shown(folder / "metrics.jsonl")),
        ("evaluate", f"rlox eval {checkpoints[0]}{imports}"),
    ):
        console.print(f"  {name:<12} {value}", soft_wrap=True)

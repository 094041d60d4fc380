"""One run: from a validated configuration to a trained, logged, checkpointed agent."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import yaml
from rich.console import Console

from rlox import tracking
from rlox.algorithms import ALGORITHMS, resolve
from rlox.algorithms.trainers import offline_sizes
from rlox.callbacks import (
    AdviceCallback,
    Callback,
    CheckpointCallback,
    EvalCallback,
    TimeLimitCallback,
    TimingCallback,
)
from rlox.callbacks.loggers import RecordLogger
from rlox.checkpoint import load_checkpoint, trained_for, versions
from rlox.config import BufferConfig, MmapBufferConfig, RunConfig
from rlox.envs.failures import failure_of
from rlox.offline.dataset import open_dataset
from rlox.tracking.record import FILE, Record
from rlox_cli.errors import Stopped, UsageError, keep_traceback, summary
from rlox_cli.imports import resolve_reward
from rlox_cli.preflight import preflight, require_memory, time_limit_warnings
from rlox_cli.progress import ProgressCallback
from rlox_cli.signals import Signals, StopAtOnce


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
    """Ends the training at the next update after the first of `signals`, so that what is saved is whole.

    So does the file `flag`, if it comes to be: a sweep's other processes, or machines, cannot be sent a signal.
    """

    def __init__(self, signals: Signals, flag: Path | None = None) -> None:
        self.signals = signals
        self._flag, self._looked, self._flagged = flag, 0.0, False

    @property
    def signal_number(self) -> int | None:
        return self.signals.number or (signal.SIGINT if self._flagged else None)

    def on_step(self, **info: Any) -> bool:
        if self._flag is not None and (now := time.monotonic()) - self._looked > 0.5:
            self._looked, self._flagged = now, self._flag.exists()
        if self.signal_number is None:
            return True
        self.signals.saving()
        return False


def _say(text: str, console: Console) -> None:
    """Also where the console is quiet: whoever presses Ctrl-C waits for an answer."""
    if console.quiet:
        print(text, file=sys.stderr, flush=True)
    else:
        console.print(text, soft_wrap=True, markup=False)


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
    if (wandb := config.logger.wandb) is not None:
        plain["logger"]["wandb"] = None if wandb.in_effect == "disabled" else {**vars(wandb), "mode": wandb.in_effect}
    mlflow = plain["logger"]["mlflow"]
    if mlflow is not None and mlflow["tracking_uri"].startswith("sqlite:///"):
        # The mirror runs in another process and later: a path must not hang on today's working directory.
        mlflow["tracking_uri"] = "sqlite:///" + os.path.abspath(mlflow["tracking_uri"].removeprefix("sqlite:///"))
    return plain


def alone(config: RunConfig) -> RunConfig:
    """`config` for a run beside others, which leave no core free for its evaluations unless that was asked for."""
    return replace(config, eval=replace(config.eval, workers=max(0, config.eval.workers)))


def _memory(buffer: BufferConfig | None, folder: Path) -> dict[str, BufferConfig]:
    """The argument for an off-policy algorithm's replay memory, whose files lie in the run's folder."""
    if isinstance(buffer, MmapBufferConfig) and buffer.folder is None:
        buffer = replace(buffer, folder=str(folder))
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
        require_new(folder)
    with _traceback_kept(folder):
        algorithm = build(config, algo, folder, console)

    def verify() -> None:
        if _size(folder / FILE) != found:
            raise RuntimeError(f"{shown(folder)} was taken by another process meanwhile; try again")

    return _carry_out(algorithm, config, algo, folder, console, verify, stop_flag=stop_flag, more=more)


def build(config: RunConfig, algo: str, folder: Path, console: Console | None = None) -> Any:
    """The algorithm of a new run in `folder`, untrained; what `init_from` leaves out is printed."""
    require_memory(config)
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
            if console is not None:
                header = load_checkpoint(config.init_from).header
                steps, unit = trained_for(header)
                console.print(
                    f"init_from: the networks and normalisation of {header['algorithm']} at {unit[:-1]} {steps:,} are "
                    "taken over, as far as both have them; optimisers, counters and memory start anew",
                    soft_wrap=True,
                    markup=False,
                )
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
    with _traceback_kept(folder):
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


def plan(algorithm: Any, config: RunConfig, console: Console, changed: Mapping[str, Any] | None) -> None:
    """Set the end of the training and of its schedules; where schedules are stretched, that is printed.

    `changed` is None for a new run, and of one that goes on what was typed.

    Raises
    ------
    ValueError
        For a ``schedule_timesteps`` that leaves nothing to learn.
    """
    end, schedule_end = config.total_timesteps, config.schedule_timesteps
    if changed is None:
        algorithm.plan(end, schedule_timesteps=schedule_end)
        return
    if "schedule_timesteps" in changed and schedule_end is None:
        schedule_end = end
    with _notes("train:", console):
        algorithm.plan(until=end, schedule_timesteps=schedule_end)


@contextmanager
def _notes(beginning: str, console: Console) -> Iterator[None]:
    """Print the warnings that begin so as plain lines; no others are shown."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", beginning)
        yield
    for warning in warned:
        console.print(str(warning.message), soft_wrap=True, markup=False)


@contextmanager
def _traceback_kept(folder: Path) -> Iterator[None]:
    """Write the traceback of what comes out of the user's code, or of a bug, into the run's folder."""
    try:
        yield
    except Exception as e:
        keep_traceback(e, folder, shown(folder))
        raise


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
    settings = replace(config.dataset, normalize=config.dataset.normalize or config.algo.normalize_obs)
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
    return cls(
        seed=config.seed,
        env_id=config.env.id,
        env_kwargs=config.env.kwargs,
        **offline_sizes(config.env.id, config.env.kwargs, config.env.wrappers, where="env"),
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
        plan(algorithm, config, console, changed if resumed else None)
        for warning in (*preflight(algorithm, config, folder), *time_limit_warnings(algorithm, config)):
            console.print(f"warning: {warning}", soft_wrap=True, markup=False)
    except BaseException:
        algorithm.close()
        raise
    folder.mkdir(parents=True, exist_ok=True)
    if not resumed:
        _write_config(folder, plain)
    line = "stopping after this update, with everything saved; Ctrl-C once more stops at once"
    stop = StopOnSignal(Signals(lambda text: _say(text, console), line, stop_flag), stop_flag)
    timing = TimingCallback()
    play = config.eval
    evaluations = EvalCallback(
        play.n_points,
        play.n_episodes,
        config.eval_seed,
        play.stop_at,
        play.patience,
        workers=play.workers,
        max_steps=play.max_steps,
        imports=config.imports,
    )
    time_limit = TimeLimitCallback(config.max_seconds or math.inf, evaluations)
    advice = AdviceCallback(lambda line: console.print(f"advice: {line}", soft_wrap=True, markup=False), plan=False)
    saving = config.checkpoint
    checkpoints = CheckpointCallback(folder / "checkpoints", saving.every_s, plain, saving.memory, saving.every_steps)
    label = f"{algo} {config.env.id} seed {config.seed}"
    start, unit = algorithm.counters.steps, algorithm.counters.unit
    record = Record(folder, versions=versions(), resume_step=start if resumed else None, changed=changed, verify=verify)
    with record, stop.signals:
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
                if resumed:
                    checkpoints.best = max(checkpoints.best, _best_score(folder))
                algorithm.train()
        except StopAtOnce as e:
            # Without an end in its record the run counts as killed: it goes on from its last checkpoint.
            last = (folder / "checkpoints" / "last.safetensors").is_file()
            go_on = f". Go on: {resume_command(folder)}" if last else ""
            console.print(f"stopped at once. {_last_good(folder)}{go_on}", soft_wrap=True, markup=False)
            raise Stopped(e.signal_number) from None
        except BaseException as e:
            kept = keep_traceback(e, folder, shown(folder))
            # On a full disk this fails as well; what is to be told is the first error.
            with suppress(OSError):
                record.end(algorithm.counters.steps, "failed", summary(e), may_pass(e), kept)
            found = failure_of(e)
            found.running, found.saved = True, _last_good(folder)
            raise
        finally:
            evaluations.close()
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
            f"stopped at {unit[:-1]} {steps:,}; everything up to it is saved. Go on: {resume_command(folder)}",
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
    played = f"; beside it {evaluations.beside_s:.1f} s of evaluations" if evaluations.beside_s else ""
    console.print(f"  {'time':<12} {shares}{played}", soft_wrap=True)
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


def require_new(folder: Path) -> None:
    """A UsageError where `folder` holds a run or a sweep."""
    for name, what, go_on in (
        (FILE, "run", resume_command(folder)),
        ("sweep.jsonl", "sweep", f"rlox sweep resume {shlex.quote(shown(folder))}"),
    ):
        if (folder / name).exists():
            raise UsageError(
                f"output_dir={shown(folder)} must be a new folder, but holds a {what}; choose another, or go on with "
                f"it: {go_on}"
            )


def resume_command(folder: Path) -> str:
    """What to type to go on with the run in `folder`."""
    return f"rlox train {shlex.quote(f'resume={shown(folder)}')}"


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
        ("evaluate", f"rlox eval {shlex.quote(checkpoints[0])}{imports}"),
    ):
        console.print(f"  {name:<12} {value}", soft_wrap=True)

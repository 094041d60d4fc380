"""One run, from a validated configuration to a trained, logged and checkpointed agent."""

from __future__ import annotations

import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import yaml
from rich.console import Console

from rlox import tracking
from rlox.callbacks import (
    AdviceCallback,
    Callback,
    CheckpointCallback,
    CompletionsCallback,
    EvalCallback,
    PredictionsCallback,
    TimeLimitCallback,
    TimingCallback,
)
from rlox.callbacks.loggers import RecordLogger
from rlox.checkpoint import load_checkpoint, run_files, versions
from rlox.config import RunConfig
from rlox.config.saved import resolved
from rlox.distributed.ranks import RankLost, current
from rlox.envs.registry import imported_module
from rlox.processes.failures import failure_of, no_exit
from rlox.tracking.record import FILE, Record
from rlox.tracking.store import replace_text
from rlox_cli.records.folders import require_new, require_own_files, resume_command
from rlox_cli.run.build import build, plan, restored
from rlox_cli.run.limits import time_limit_warnings, training_warnings
from rlox_cli.run.progress import ProgressCallback
from rlox_cli.terminal.account import keep_traceback, summary
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import Stopped
from rlox_cli.terminal.paths import shown
from rlox_cli.terminal.signals import Signals, StopAtOnce


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    steps: int
    seconds: float
    final: dict[str, float]  # summary of the last evaluation; empty if none was made
    best: float | None  # mean return of the best evaluation


@dataclass(frozen=True)
class Resumption:
    """A run that can be resumed, and what it is resumed with."""

    config: RunConfig
    algo: str
    checkpoint: Path
    changed: Mapping[str, Any]  # {key: [old, new]}, of the run's own configuration
    trusted: bool  # whether the environment may be the one in the files, whatever is imported


class Stopper(Protocol):
    """A callback that has the reason why it stopped a training, if it did."""

    stopped: str | None


class StopOnSignal(Callback):
    """Ends the training at the next update after the first of `signals`, so that a complete state is saved.

    It also does so once the file `flag` exists, since a sweep cannot send signals to other machines.
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


def _print_always(text: str, console: Console) -> None:
    """Print `text` even if the console is quiet: a user who presses Ctrl-C waits for an answer."""
    if console.quiet:
        print_text(text, stderr=True)
    else:
        console.print(text, soft_wrap=True, markup=False)


def without_eval_workers(config: RunConfig) -> RunConfig:
    """Return `config` for a run in parallel with others: no processes for evaluations, unless they were requested."""
    return replace(config, eval=replace(config.eval, workers=max(0, config.eval.workers)))


def run(
    config: RunConfig,
    algo: str,
    folder: Path,
    console: Console,
    stop_flag: Path | None = None,
    again: bool = False,
    more: Sequence[Stopper] = (),
) -> Outcome:
    """Train, evaluate and save.

    Parameters
    ----------
    stop_flag : Path, optional
        A file that stops the training once it exists, as Ctrl-C does.
    again : bool
        Whether the folder may contain a run that ended before it saved anything. Its next segment then starts over.
    more : sequence of Stopper
        Further callbacks, which may stop the training.

    Raises
    ------
    Stopped
        After Ctrl-C or SIGTERM, with everything saved.
    Exception
        If anything fails. The failure is recorded, and saved checkpoints are unchanged.
    """
    require_own_files(folder)
    found = _size(folder / FILE)
    if found and not again:
        require_new(folder)
    with _traceback_kept(folder):
        algorithm = build(config, algo, folder, console)

    def verify() -> None:
        if _size(folder / FILE) != found:
            raise RuntimeError(f"{shown(folder)} was taken by another process in the meantime; try again")

    return _run_training(algorithm, config, algo, folder, console, verify, stop_flag=stop_flag, more=more)


def resume(found: Resumption, console: Console, stop_flag: Path | None = None, more: Sequence[Stopper] = ()) -> Outcome:
    """Continue a run as if it had not been stopped; as `run`."""
    config, algo, checkpoint = found.config, found.algo, found.checkpoint
    folder, identity = checkpoint.parent.parent, _identity(checkpoint)
    require_own_files(folder)
    with _traceback_kept(folder):
        algorithm = restored(config, algo, checkpoint, console, found.trusted)

    def verify() -> None:
        if _identity(checkpoint) != identity:
            raise RuntimeError(f"{shown(checkpoint)} was replaced by another process while it was read; try again")

    return _run_training(algorithm, config, algo, folder, console, verify, found.changed, True, stop_flag, more)


@contextmanager
def _traceback_kept(folder: Path) -> Iterator[None]:
    """Write the traceback of an error in the user's code, or of a bug, into the run's folder."""
    try:
        with no_exit("code outside rlox"):
            yield
    except Exception as e:
        keep_traceback(e, folder, shown(folder))
        raise


def _size(path: Path) -> int:
    """Return the size in bytes of a file that only grows; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def _identity(path: Path) -> tuple[int, int, int]:
    """Return what identifies a file that is never changed in place, only replaced."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _run_training(
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
    """Run the training, from its start or from the checkpoint that `algorithm` was restored from."""
    if algorithm.ranks.rank:
        return _follow(algorithm, config, folder, console, changed if resumed else None)
    plain = resolved(config, algo)
    # The backend that is really used, so that this file gives the same run on another machine.
    plain["backend"] = algorithm.backend
    console.print(f"backend: {algorithm.backend} ({algorithm.backend_reason})", soft_wrap=True)
    try:
        best_before = _best_score(folder) if resumed else -math.inf
        plan(algorithm, config, console, changed if resumed else None)
        for warning in (*training_warnings(algorithm, config, folder), *time_limit_warnings(algorithm, config)):
            console.print(f"warning: {warning}", soft_wrap=True, markup=False)
    except BaseException:
        algorithm.close()
        raise
    folder.mkdir(parents=True, exist_ok=True)
    if not resumed:
        _write_config(folder, plain)
    line = "stopping after this update, with everything saved; press Ctrl-C again to stop at once"
    if getattr(algorithm, "collector", None) is not None:
        algorithm.collector.notify = lambda text: console.print(text, soft_wrap=True, markup=False)
    stop = StopOnSignal(Signals(lambda text: _print_always(text, console), line, stop_flag), stop_flag)
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
    recorder = RecordLogger(record)
    texts: list[Callback] = []
    if config.language:
        texts.append(CompletionsCallback(folder, lambda step, file: record.checkpoint(step, "completions", file)))
    elif hasattr(algorithm.actor, "open_loop"):
        texts.append(
            PredictionsCallback(
                folder,
                # After the rows that wait for an evaluation.
                lambda step, values: recorder.on_step(step=step, metrics=values),
                lambda step, file: record.checkpoint(step, "predictions", file),
            )
        )
    with stop.signals, record:
        if resumed:
            _write_config(folder, plain)
        _remove_partial(folder / "checkpoints")
        tracking.start_mirrors(folder)
        started, closed = time.perf_counter(), False
        try:
            bar = ProgressCallback(console, label, config.total_timesteps, unit)
            with no_exit("code outside rlox"), bar as progress:
                algorithm.callbacks.extend(
                    [
                        timing,
                        recorder,
                        evaluations,
                        *texts,
                        *more,
                        time_limit,
                        advice,
                        progress,
                        stop,
                        checkpoints,
                    ]
                )
                checkpoints.best = max(checkpoints.best, best_before)
                algorithm.train()
                closed = True
                evaluations.close()
                algorithm.close()
        except StopAtOnce as e:
            # Without an end in its record, the run counts as killed: it can be resumed from its last checkpoint.
            console.print(_stopped_at_once(algorithm, folder, e), soft_wrap=True, markup=False)
            raise Stopped(e.signal_number) from None
        except BaseException as e:
            stop.signals.saving()  # after a SIGTERM, as torchrun sends to the other ranks, there is time to report
            kept = keep_traceback(e, folder, shown(folder))
            # On a full disk this fails too; the first error is the one to report.
            with suppress(OSError):
                record.end(algorithm.counters.steps, "failed", summary(e), may_pass(e), kept)
            found = failure_of(e)
            # An error about the files of the replay memory, which are read last, is one about the input.
            found.running = algorithm.counters.steps > start or not isinstance(e, ValueError)
            found.saved = _last_good(folder)
            if isinstance(e, RankLost):
                found.saved += f". Resume with: {_resume_command(folder)}"
            raise
        finally:
            if not closed:
                with suppress(Exception, SystemExit):  # the first error is the one to report
                    evaluations.close()
                    algorithm.close()
        seconds = time.perf_counter() - started
        steps = algorithm.counters.steps
        reasons = (f"max_time={config.max_time} was reached" if time_limit.reached else None, evaluations.stopped)
        early = next(filter(None, [*reasons, *(callback.stopped for callback in more)]), None)
        if stop.signal_number:
            record.end(steps, "interrupted")
        else:
            record.end(steps, "finished", f"stopped early: {early}" if early else "")
    final = evaluations.evaluations[-1][1].summary() if evaluations.evaluations else {}
    best = checkpoints.best if evaluations.evaluations else None
    if stop.signal_number:
        console.print(
            f"stopped at {unit[:-1]} {steps:,}; everything up to it is saved. Resume with: {_resume_command(folder)}",
            soft_wrap=True,
        )
        _describe(folder, config, best is not None, console)
        raise Stopped(stop.signal_number)
    if early:
        console.print(f"stopped early: {early}", soft_wrap=True)
    console.print(
        f"trained {label}: {steps:,} {unit} in {seconds:.1f} s{f' (from {start:,})' if resumed else ''}, final "
        f"evaluation {_score(config, final['mean_return'])} ± {_score(config, final['std_return'])} over "
        f"{final['n_episodes']} {'rows' if config.language else 'episodes'}, best {_score(config, best)}",
        soft_wrap=True,
    )
    _describe(folder, config, True, console)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in timing.summary().items() if name != "total_s")
    played = f"; in parallel, {evaluations.beside_s:.1f} s of evaluations" if evaluations.beside_s else ""
    console.print(f"  {'time':<12} {shares}{played}", soft_wrap=True)
    return Outcome(folder, steps, seconds, final, best)


def _follow(
    algorithm: Any, config: RunConfig, folder: Path, console: Console, changed: Mapping[str, Any] | None
) -> Outcome:
    """Run the training on a rank other than 0. Only rank 0 evaluates, records and saves."""
    stop = StopOnSignal(Signals(lambda text: None))
    started = time.perf_counter()
    with stop.signals:
        try:
            plan(algorithm, config, console, changed)
            algorithm.callbacks.extend([stop])
            algorithm.train()
        except StopAtOnce as e:
            # If rank 0 was killed, it prints nothing.
            if e.signal_number == signal.SIGTERM and algorithm.ranks.first_to_notice():
                _print_always(f"rank {algorithm.ranks.rank}: {_stopped_at_once(algorithm, folder, e)}", console)
            raise Stopped(e.signal_number) from None
        except Exception as e:
            stop.signals.saving()
            failure_of(e).running = True
            if isinstance(e, RankLost):
                failure_of(e).saved = f"{_last_good(folder)}. Resume with: {_resume_command(folder)}"
            raise
        finally:
            algorithm.close()
    if stop.signal_number:
        raise Stopped(stop.signal_number)
    return Outcome(folder, algorithm.counters.steps, time.perf_counter() - started, {}, None)


def _resume_command(folder: Path) -> str:
    """Return the command that resumes this run."""
    ranks = current()
    start = f"torchrun --standalone --nproc-per-node={ranks.size} -m " if ranks.joined else ""
    return start + resume_command(folder)


def _score(config: RunConfig, value: float | None) -> str:
    """Format a score. Rewards and accuracies of language models are usually between 0 and 1."""
    return f"{value:.3f}" if config.language else f"{value:.1f}"


def may_pass(e: BaseException) -> bool:
    """Return whether the same training may succeed when retried: not if its input or its numbers are at fault."""
    return isinstance(e, (RuntimeError, OSError, MemoryError)) and not isinstance(e, NotImplementedError)


def _write_config(folder: Path, plain: dict[str, Any]) -> None:
    """Replace ``config.yaml`` atomically."""
    replace_text(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False))


def _remove_partial(folder: Path) -> None:
    """Remove files that a killed process has not finished writing. The caller holds the record's lock."""
    for path in folder.rglob(".*.partial"):
        path.unlink(missing_ok=True)


def _best_score(folder: Path) -> float:
    """Return the score of ``best.safetensors``, which may be newer than the checkpoint that is resumed."""
    if not run_files.is_file(folder, "checkpoints/best.safetensors"):
        return -math.inf
    path = folder / "checkpoints" / "best.safetensors"
    evaluation = load_checkpoint(path).header.get("evaluation")
    score = evaluation.get("mean_return") if isinstance(evaluation, dict) else None
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise ValueError(f"{shown(path)} must hold the evaluation it was saved for, got none; restore or delete it")
    return score


def _stopped_at_once(algorithm: Any, folder: Path, e: StopAtOnce) -> str:
    by_torchrun = algorithm.ranks.joined and e.signal_number == signal.SIGTERM
    cause = " by SIGTERM, which torchrun also sends when another rank has ended" if by_torchrun else ""
    last = (folder / "checkpoints" / "last.safetensors").is_file()
    return f"stopped at once{cause}. {_last_good(folder)}{f'. Resume with: {_resume_command(folder)}' if last else ''}"


def _last_good(folder: Path) -> str:
    saved = [
        path for path in (folder / "checkpoints" / f"{kind}.safetensors" for kind in ("last", "best")) if path.exists()
    ]
    return f"Saved before that: {', '.join(map(shown, saved))}" if saved else "No checkpoint had been saved yet"


def _describe(folder: Path, config: RunConfig, has_best: bool, console: Console) -> None:
    names = " and ".join(f"{name}.safetensors" for name in (["best", "last"] if has_best else ["last"]))
    module = imported_module(config.env.id)
    imports = "".join(f" --import {name}" for name in [*config.imports, *([module] if module else [])])
    for name, value in (
        ("checkpoints", f"{shown(folder / 'checkpoints')} ({names})"),
        ("config", shown(folder / "config.yaml")),
        ("metrics", shown(folder / "metrics.jsonl")),
        ("evaluate", f"rlox eval {shlex.quote(shown(folder))}{imports}"),
    ):
        console.print(f"  {name:<12} {value}", soft_wrap=True)

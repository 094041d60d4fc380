"""One run, from a validated configuration to a trained, logged and checkpointed agent."""

from __future__ import annotations

import math
import shlex
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml
from rich.console import Console

from rlox import tracking
from rlox.algorithms import entry_of, resolve
from rlox.callbacks import (
    AdviceCallback,
    Callback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    TimeLimitCallback,
    TimingCallback,
)
from rlox.callbacks.loggers import RecordLogger
from rlox.callbacks.run_folder import best_score
from rlox.checkpoint import read_header, run_files, trained_for, versions
from rlox.config import RunConfig
from rlox.config.run import to_plain
from rlox.distributed.ranks import RankLost, current
from rlox.envs.registry import find_module
from rlox.processes.failures import failure_of, no_exit
from rlox.tracking.record import FILE, Record
from rlox_cli.families.family import family_of
from rlox_cli.families.imports import import_words, list_needed_modules
from rlox_cli.families.received import find_doubtful, to_word
from rlox_cli.records.folders import require_new, require_own_files, resume_command
from rlox_cli.run.mirrors import hand_over_password
from rlox_cli.terminal.account import keep_traceback, summary
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import Stopped
from rlox_cli.terminal.paths import output_path, shown
from rlox_cli.terminal.progress import ProgressCallback
from rlox_cli.terminal.signals import Signals, StopAtOnce

_STOPPING = "stopping after this update, with everything saved; press Ctrl-C again to stop at once"


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
    record = folder / FILE
    before = record.stat().st_size if record.exists() else 0  # of a file that only grows
    if before and not again:
        require_new(folder)
    with write_traceback_of(folder):
        if config.deterministic:
            from rlox_cli.run.device import prepare_deterministic

            prepare_deterministic(config)
        algorithm = build(config, algo, folder, console)

    def verify() -> None:
        if (record.stat().st_size if record.exists() else 0) != before:
            raise RuntimeError(f"{shown(folder)} was taken by another process in the meantime; try again")

    return Session(algorithm, config, algo, folder, console, verify, stop_flag, more, again=again).run()


def resume(
    resumption: Resumption, console: Console, stop_flag: Path | None = None, more: Sequence[Stopper] = ()
) -> Outcome:
    """Continue a run as if it had not been stopped; as `run`."""
    checkpoint = resumption.checkpoint
    folder, identity = checkpoint.parent.parent, _identity(checkpoint)
    require_own_files(folder)
    with write_traceback_of(folder):
        if resumption.config.deterministic:
            from rlox_cli.run.device import prepare_deterministic

            prepare_deterministic(resumption.config)
        algorithm = restore(resumption, console)

    def verify() -> None:
        if _identity(checkpoint) != identity:
            raise RuntimeError(f"{shown(checkpoint)} was replaced by another process while it was read; try again")

    config, algo, changed = resumption.config, resumption.algo, resumption.changed
    return Session(algorithm, config, algo, folder, console, verify, stop_flag, more, changed).run()


def build(config: RunConfig, algo: str, folder: Path, console: Console | None = None) -> Any:
    """Return the untrained algorithm of a new run in `folder`. Print what `init_from` leaves out."""
    family = family_of(config.algo, config.env.id)
    algorithm = family.build(resolve(entry_of(algo).cls), config, folder)
    if config.init_from is None:
        return algorithm
    try:
        with _printing_notes("init_from:", console):
            algorithm.init_from(config.init_from)
        if console is not None:
            header = read_header(config.init_from)
            steps, unit = trained_for(header)
            console.print(
                f"init_from: {family.taken_over} of {header['algorithm']} at {unit[:-1]} {steps:,} are taken over, as "
                f"far as both have them; optimisers, counters and {family.starts_fresh}"
            )
    except BaseException:
        algorithm.close()
        raise
    return algorithm


def restore(resumption: Resumption, console: Console) -> Any:
    """Return the algorithm of a run, to train on. Print what cannot be restored."""
    config = resumption.config
    family = family_of(config.algo, config.env.id)
    with _printing_notes("from_checkpoint:", console):
        algorithm = family.restore(config, resumption.checkpoint, resumption.trusted)
    if (note := family.note_on_restoring(algorithm)) is not None:
        console.print(note)
    return algorithm


def replan(algorithm: Any, config: RunConfig, console: Console, changed: Mapping[str, Any]) -> None:
    """Set the end of a resumed training and of its schedules. Print a note if schedules are stretched.

    `changed` is what was typed for it.

    Raises
    ------
    ValueError
        If ``schedule_timesteps`` leaves nothing to learn.
    """
    end, schedule_end = config.total_timesteps, config.schedule_timesteps
    if "schedule_timesteps" in changed and schedule_end is None:
        schedule_end = end
    if schedule_end is not None:  # the last of several trainings in the library did not begin at step 0
        schedule_end -= algorithm.counters.horizon_start
    with _printing_notes("train:", console):
        algorithm.plan(until=end, schedule_timesteps=schedule_end)


def training_warnings(algorithm: Any, config: RunConfig, folder: Path) -> Iterator[str]:
    """Yield warnings, one line each, about a training that begins now.

    Raises
    ------
    UsageError
        If it does not fit this machine, or nobody would name such a folder.
    """
    output_path("output_dir", folder, folder=True)
    family = family_of(config.algo, config.env.id)
    yield from family.warnings(algorithm, config, folder)
    yield from family.time_limit_warnings(algorithm, config)


class Session:
    """A training with its callbacks and its record, from its start or from a checkpoint.

    Parameters
    ----------
    algorithm : Algorithm
        New, or restored from a checkpoint. It is closed at the end.
    verify : callable
        Raises if another process has changed the run since it was read. Called with the record's lock held.
    stop_flag, more
        As for `run`.
    changed : mapping, optional
        What was typed to resume the run; None for a new run.
    again : bool
        As for `run`.
    """

    def __init__(
        self,
        algorithm: Any,
        config: RunConfig,
        algo: str,
        folder: Path,
        console: Console,
        verify: Callable[[], None],
        stop_flag: Path | None = None,
        more: Sequence[Stopper] = (),
        changed: Mapping[str, Any] | None = None,
        again: bool = False,
    ) -> None:
        self.algorithm, self.config, self.folder, self.console = algorithm, config, folder, console
        self.changed, self.more, self._verify, self._again = changed, more, verify, again
        self.family = family_of(config.algo, config.env.id)
        self.label = f"{config.preset or algo} {config.env.id} seed {config.seed}"
        self.start, self.unit = algorithm.counters.steps, algorithm.counters.unit
        self._learn = algorithm.train  # a resumed training goes on to the end that `replan` sets
        if changed is None:
            schedule_end = config.schedule_timesteps
            self._learn = partial(algorithm.train, config.total_timesteps, schedule_timesteps=schedule_end)
        # With the backend that is really used, so that this file gives the same run on another machine.
        self._plain = to_plain(config, algo) | {"backend": str(algorithm.backend)}
        self.stop = StopOnSignal(Signals(self._print_always, _STOPPING, stop_flag), stop_flag)
        self._numerics = ExitStack()  # how the GPU computes until the end of the training
        self._computes_otherwise = config.deterministic or config.matmul_precision != "highest"

    def run(self) -> Outcome:
        """Train, evaluate, record and save. On a rank other than 0, only train."""
        if self.algorithm.ranks.rank:
            return self._follow()
        self.console.print(f"backend: {self.algorithm.backend} ({self.algorithm.backend.reason})")
        known = versions(self.algorithm.device)
        try:
            if self._computes_otherwise:
                from rlox_cli.run.device import set_numerics

                self._numerics.enter_context(set_numerics(self.config, self.algorithm, self._print))
            if self.algorithm.device != "cpu":
                from rlox_cli.run.device import describe_device

                known, lines = describe_device(self.algorithm)
                for name, text in lines:
                    self.console.print(f"{name}: {text}")
            if self.config.logger.mlflow is not None:
                hand_over_password(self.config.logger.mlflow)
            best_before = -math.inf
            if self.changed is not None:
                best_before = best_score(self.folder)
                # A state that does not fit is an error before the record has changed.
                kept = [EvalCallback(), AdviceCallback(), CheckpointCallback(self.folder)]
                CallbackList(kept).set_state(self.algorithm.callbacks.state())
                replan(self.algorithm, self.config, self.console, self.changed)
            for warning in training_warnings(self.algorithm, self.config, self.folder):
                self._print(f"warning: {warning}")
            if getattr(self.algorithm, "collector", None) is not None:
                self.algorithm.collector.notify = self._print
            record = Record(
                self.folder,
                versions=known,
                resume_step=None if self.changed is None else self.start,
                changed=self.changed,
                verify=self._verify,
            )
        except BaseException:
            self._numerics.close()
            self.algorithm.close()
            raise
        with self._numerics, self.stop.signals, record:
            seconds = self._train(record, best_before)
            early = next(filter(None, (callback.stopped for callback in (self.evaluations, *self.more))), None)
            if self.time_limit is not None and self.time_limit.reached:
                early = f"max_time={self.config.max_time} was reached"
            if self.stop.signal_number:
                record.end(self.algorithm.counters.steps, "interrupted")
            else:
                record.end(self.algorithm.counters.steps, "finished", f"stopped early: {early}" if early else "")
        return self._report(seconds, early)

    def _make_callbacks(self, record: Record, best_before: float) -> None:
        config, saving, play, folder = self.config, self.config.checkpoint, self.config.eval, self.folder
        recorder = RecordLogger(record)
        self.timing = TimingCallback()
        self.evaluations = EvalCallback(
            play.n_points,
            play.n_episodes,
            play.seed,
            play.stop_at,
            play.patience,
            workers=play.workers,
            max_steps=play.max_steps,
            imports=config.imports,
        )
        seconds = None if config.max_time is None else config.max_seconds
        self.time_limit = None if seconds is None else TimeLimitCallback(seconds, self.evaluations)
        self.progress = ProgressCallback(
            self.console, self.label, config.total_timesteps, self.unit, self.family.digits, self.family.counted
        )
        self.checkpoints = CheckpointCallback(
            folder / "checkpoints", saving.every_s, self._plain, saving.memory, saving.every_steps
        )
        self.algorithm.callbacks.extend(
            [
                self.timing,
                recorder,
                self.evaluations,
                *self.family.make_callbacks(self.algorithm, folder, recorder),
                *self.more,
                *([] if self.time_limit is None else [self.time_limit]),
                AdviceCallback(lambda line: self._print(f"advice: {line}"), plan=False),
                self.progress,
                self.stop,
                self.checkpoints,
            ]
        )
        self.checkpoints.best = max(self.checkpoints.best, best_before)

    def _train(self, record: Record, best_before: float) -> float:
        """Train and close the algorithm; return how many seconds it took. Record how it failed, if it does."""
        begun = closed = False
        try:
            self._make_callbacks(record, best_before)
            run_files.replace_text(self.folder, "config.yaml", yaml.safe_dump(self._plain, sort_keys=False))
            for path in (self.folder / "checkpoints").rglob(".*.partial"):
                path.unlink(missing_ok=True)  # a killed process has not finished writing it
            if any(settings is not None for settings in self._plain["logger"].values()):
                tracking.start_mirrors(self.folder)
            started = time.perf_counter()
            with no_exit("code outside rlox"), self.progress:
                begun = True
                self._learn()
                closed = True
                self.evaluations.close()
                self.algorithm.close()
            return time.perf_counter() - started
        except StopAtOnce as e:
            # Without an end in its record, the run counts as killed: it can be resumed from its last checkpoint.
            self._print(self._stopped_at_once(e))
            raise Stopped(e.signal_number) from None
        except BaseException as e:
            self.stop.signals.saving()  # after a SIGTERM, as torchrun sends to the other ranks, there is time to report
            kept, steps = keep_traceback(e, self.folder), self.algorithm.counters.steps
            # On a full disk this fails too; the first error is the one to report.
            with suppress(OSError):
                if begun or record.segment or self._again:
                    record.end(steps, "failed", summary(e), may_pass(e), kept)
                else:
                    (self.folder / FILE).unlink()  # nothing was trained: the folder can be used again
            if not begun:
                raise
            failure = failure_of(e)
            # An error about the files of the replay memory, which are read last, is one about the input.
            failure.running = steps > self.start or not isinstance(e, ValueError)
            failure.saved = _last_good(self.folder)
            if isinstance(e, RankLost):
                failure.saved += f". Resume with: {self._resume_command()}"
            raise
        finally:
            if not closed:
                # The first error is the one to report. Without callbacks, there is nothing else to close.
                with suppress(Exception, SystemExit):
                    if begun:
                        self.evaluations.close()
                with suppress(Exception, SystemExit):
                    self.algorithm.close()

    def _report(self, seconds: float, early: str | None) -> Outcome:
        """Print the results. Raise `Stopped` if a signal ended the training."""
        evaluations, steps = self.evaluations, self.algorithm.counters.steps
        final = evaluations.evaluations[-1][1].summary() if evaluations.evaluations else {}
        best = self.checkpoints.best if evaluations.evaluations else None
        if self.stop.signal_number:
            self.console.print(
                f"stopped at {self.unit[:-1]} {steps:,}; everything up to it is saved. Resume with: "
                f"{self._resume_command()}"
            )
        else:
            if early:
                self.console.print(f"stopped early: {early}")
            digits = f".{self.family.digits}f"
            begun = "" if self.changed is None else f" (from {self.start:,})"
            self.console.print(
                f"trained {self.label}: {steps:,} {self.unit} in {seconds:.1f} s{begun}, final evaluation "
                f"{final['mean_return']:{digits}} ± {final['std_return']:{digits}} over {final['n_episodes']} "
                f"{self.family.counted}, best {best:{digits}}"
            )
        names = "last.safetensors" if best is None else "best.safetensors and last.safetensors"
        env = self.config.env
        imports = self._import_words() if self.config.imports or env.wrappers or find_module(env.id) else []
        for name, value in (
            ("checkpoints", f"{shown(self.folder / 'checkpoints')} ({names})"),
            ("config", shown(self.folder / "config.yaml")),
            ("metrics", shown(self.folder / "metrics.jsonl")),
            ("evaluate", shlex.join(["rlox", "eval", shown(self.folder), *imports])),
        ):
            self.console.print(f"  {name:<12} {value}")
        if self.stop.signal_number:
            raise Stopped(self.stop.signal_number)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.timing.summary().items() if name != "total_s")
        played = f"; in parallel, {evaluations.beside_s:.1f} s of evaluations" if evaluations.beside_s else ""
        self.console.print(f"  {'time':<12} {shares}{played}")
        return Outcome(self.folder, steps, seconds, final, best)

    def _follow(self) -> Outcome:
        """Run the training on a rank other than 0. Only rank 0 evaluates, records and saves."""
        algorithm, self.stop = self.algorithm, StopOnSignal(Signals(lambda text: None))
        started = time.perf_counter()
        with self._numerics, self.stop.signals:
            try:
                if self._computes_otherwise:
                    from rlox_cli.run.device import set_numerics

                    self._numerics.enter_context(set_numerics(self.config, algorithm, self._print))
                if self.changed is not None:
                    replan(algorithm, self.config, self.console, self.changed)
                algorithm.callbacks.extend([self.stop])
                self._learn()
            except StopAtOnce as e:
                # If rank 0 was killed, it prints nothing.
                if e.signal_number == signal.SIGTERM and algorithm.ranks.first_to_notice():
                    self._print_always(f"rank {algorithm.ranks.rank}: {self._stopped_at_once(e)}")
                raise Stopped(e.signal_number) from None
            except Exception as e:
                self.stop.signals.saving()
                failure_of(e).running = True
                if isinstance(e, RankLost):
                    failure_of(e).saved = f"{_last_good(self.folder)}. Resume with: {self._resume_command()}"
                raise
            finally:
                algorithm.close()
        if self.stop.signal_number:
            raise Stopped(self.stop.signal_number)
        return Outcome(self.folder, algorithm.counters.steps, time.perf_counter() - started, {}, None)

    def _import_words(self) -> list[str]:
        """Return the words that a command needs to read the run's files."""
        modules = [*list_needed_modules(self._plain["env"], self._plain), *self.config.imports]
        return import_words(dict.fromkeys(modules))

    def _resume_command(self) -> str:
        """Return the command that resumes this run, with the modules and settings that must be typed again."""
        ranks = current()
        start = f"torchrun --standalone --nproc-per-node={ranks.size} -m " if ranks.joined else ""
        again = [to_word(key, value) for key, value, _ in find_doubtful(self._plain, self.folder)]
        return f"{start}{resume_command(self.folder)} {shlex.join([*again, *self._import_words()])}".rstrip()

    def _print(self, text: str) -> None:
        self.console.print(text)

    def _print_always(self, text: str) -> None:
        """Print `text` even if the console is quiet: a user who presses Ctrl-C waits for an answer."""
        if self.console.quiet:
            print_text(text, stderr=True)
        else:
            self._print(text)

    def _stopped_at_once(self, e: StopAtOnce) -> str:
        by_torchrun = self.algorithm.ranks.joined and e.signal_number == signal.SIGTERM
        cause = " by SIGTERM, which torchrun also sends when another rank has ended" if by_torchrun else ""
        last = (self.folder / "checkpoints" / "last.safetensors").is_file()
        more = f". Resume with: {self._resume_command()}" if last else ""
        return f"stopped at once{cause}. {_last_good(self.folder)}{more}"


@contextmanager
def write_traceback_of(folder: Path) -> Iterator[None]:
    """Write the traceback of an error in the user's code, or of a bug, into the run's folder."""
    try:
        with no_exit("code outside rlox"):
            yield
    except Exception as e:
        keep_traceback(e, folder)
        raise


@contextmanager
def _printing_notes(beginning: str, console: Console | None) -> Iterator[None]:
    """Print the warnings whose text starts with `beginning` as plain lines, and hide all others."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", beginning)
        yield
    for warning in warned:
        if console is None:
            print_text(str(warning.message), stderr=True)
        else:
            console.print(str(warning.message))


def _identity(path: Path) -> tuple[int, int, int]:
    """Return what identifies a file that is never changed in place, only replaced."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def may_pass(e: BaseException) -> bool:
    """Return whether the same training may succeed when retried: not if its input or its numbers are at fault."""
    return isinstance(e, (RuntimeError, OSError, MemoryError)) and not isinstance(e, NotImplementedError)


def _last_good(folder: Path) -> str:
    if not (folder / FILE).exists():  # moved or deleted
        return "What was saved before that is in it"
    saved = [
        path for path in (folder / "checkpoints" / f"{kind}.safetensors" for kind in ("last", "best")) if path.exists()
    ]
    return f"Saved before that: {', '.join(map(shown, saved))}" if saved else "No checkpoint had been saved yet"

"""Run the jobs of a sweep with any launcher: skip, start, resume, retry and report them."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from rlox.checkpoint import decode_value, encode_value, run_files
from rlox.processes.interpreter import format_warning
from rlox.tracking.record import FILE as RECORD
from rlox_cli.config.saved import check_saved, configuration
from rlox_cli.config.schema import ray_settings
from rlox_cli.families.received import require_again
from rlox_cli.records.ledger import FILE, STATES, STOP, Progress, Sweep, SweepJob, ask_to_stop
from rlox_cli.records.runs import unit_of
from rlox_cli.run.resume import main as resume
from rlox_cli.run.session import may_pass, run, without_eval_workers
from rlox_cli.sweep.tables import label, resume_hint
from rlox_cli.terminal.account import summary
from rlox_cli.terminal.console import TextConsole
from rlox_cli.terminal.errors import Stopped
from rlox_cli.terminal.signals import AT_ONCE, Signals, StopAtOnce

OUT = "out.txt"  # in a job's folder: the output that a single run prints on the terminal
_POLL_S = 0.5
_SAFE_PATH = "PYTHONSAFEPATH"  # Python 3.11 and later read it

# With Hydra's basic launcher the sweep's parent process runs the jobs itself; other launchers use other processes.
_is_parent = False
_busy = threading.Lock()  # while a launcher's other process has a job


@dataclass
class Work:
    """What a job's process receives in addition to the launcher's own settings."""

    job: SweepJob
    sweep: str  # the sweep's folder
    modules: list[str]  # modules that were typed, and may be imported
    trusted: bool  # whether all of it was typed now, and does not come from a file
    again: list[tuple[str, Any]] = field(default_factory=list)  # settings of jobs that were typed again, key and value

    def __str__(self) -> str:
        # JSON without a $, so that OmegaConf finds nothing to interpolate.
        return json.dumps(encode_value(asdict(self))).replace("$", "\\u0024")

    @classmethod
    def parse(cls, text: str) -> Work:
        plain = decode_value(json.loads(text))
        return cls(**{**plain, "job": SweepJob(**plain["job"])})


class KnownJobs:
    """Replaces Hydra's config loader for launchers: each job comes with its whole configuration.

    Composing it again in the job's process would take as long as a short training, and could give another job later.
    """

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        *task, work = sweep_overrides
        config = copy.deepcopy(master_config)
        with open_dict(config):
            config.hydra.sweep.subdir = Work.parse(work).job.folder
            config.hydra.overrides.task = task
            config.work = work
        return config


def train(cfg: DictConfig) -> dict[str, Any]:
    """Do the rest of a job. Launchers call this function by its name. Return nothing, or how the job failed."""
    if _is_parent:
        return _work(cfg)
    if threading.current_thread() is threading.main_thread():
        # Ctrl-C also reaches a launcher's idle processes. If one of them ended, the launcher would kill the others
        # before they have saved. The stop file stops them instead.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    with _busy:
        return _work(cfg)


@cache
def _end_with_parent() -> None:
    """Let this process of a launcher end when its parent has ended, for example by ``kill -9``, and its job is done."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="rlox-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    with _busy:
        os._exit(1)


def _work(cfg: DictConfig) -> dict[str, Any]:
    warnings.formatwarning = format_warning  # a launcher's processes begin here
    work = Work.parse(cfg.work)
    folder, stop_flag = Path(work.sweep, work.job.folder), Path(work.sweep, STOP)
    if stop_flag.exists() or Progress(folder).scan().state == "finished":
        return {}
    run_files.make_folder(work.sweep, work.job.folder)
    with run_files.open_file(folder, OUT, "a") as out:
        try:
            _train(work, folder, stop_flag, TextConsole(file=out, width=400))
        except Stopped:
            if _is_parent:
                ask_to_stop(stop_flag)
                raise
            # If a launcher received this exception, it would kill its other processes before they have saved.
        except Exception as e:
            traceback.print_exc(file=out)
            return {"id": work.job.id, "message": summary(e), "may_pass": may_pass(e)}
    return {}


def _train(work: Work, folder: Path, stop_flag: Path, console: Console) -> None:
    beside_others = HydraConfig.get().launcher.get("n_jobs", 1) != 1  # on this machine
    more = []
    if "trial" in work.job.extra:
        from rlox_cli.sweep.study import TrialCallback

        more = [TrialCallback(work.job, Path(work.sweep))]
    if run_files.is_file(folder, RECORD) and run_files.is_file(folder, "checkpoints/last.safetensors"):
        fewer = beside_others and work.job.config["eval"].get("workers", -1) < 0
        typed = ["eval.workers=0"] if fewer else []
        resume(str(folder), [], typed, work.modules, console, stop_flag, more, work.trusted, work.again)
        return
    ledger = Path(work.sweep, FILE)
    if not work.trusted:
        require_again(work.job.config, folder, ledger, lambda *setting: setting in work.again)
    config, algo = configuration(work.job.config, work.modules, ledger)
    check_saved(config, algo, ledger)
    config = without_eval_workers(config) if beside_others else config
    run(config, algo, folder, console, stop_flag, True, more)


class Launch:
    """Runs jobs of a sweep with the launcher that a configuration chooses.

    Parameters
    ----------
    sweep : Sweep
        Held by this process.
    config : DictConfig
        Its section ``hydra`` says how jobs are launched.
    modules : list of str
        Modules of the user that were typed.
    trusted : bool
        Whether the jobs were typed now; False if they come from a file.
    reported : sequence of str
        The states that are printed when a job reaches them.
    again : sequence of (str, object)
        Settings of the jobs that were typed again, if they come from a file.
    """

    def __init__(
        self,
        sweep: Sweep,
        config: DictConfig,
        modules: list[str],
        trusted: bool,
        console: Console,
        reported: Sequence[str] = STATES,
        again: Sequence[tuple[str, Any]] = (),
    ):
        self.sweep, self.console = sweep, console
        self._typed = (modules, trusted, [*again])
        self._config = OmegaConf.masked_copy(config, ["hydra"])
        with open_dict(self._config):
            self._config.hydra.sweep.dir = str(sweep.folder)
            self._config.hydra.output_subdir = None  # its content is in the ledger
            # Long texts that launchers would copy for every job.
            self._config.hydra.help.template = self._config.hydra.hydra_help.template = ""
        self._callbacks = Callbacks(self._config)
        context = {"hydra_context": HydraContext(KnownJobs(), self._callbacks), "task_function": train}
        self._close: Callable[[], None] = lambda: None
        if settings := ray_settings(config):
            # Hydra only instantiates plugins of its own packages.
            from rlox_cli.sweep.ray import RayLauncher

            self._launcher = ray = RayLauncher(settings)
            ray.setup(**context, config=self._config)
            self._close = ray.close
        else:
            self._launcher = Plugins.instance().instantiate_launcher(**context, config=self._config)
        self._launched = self._barren = 0  # jobs, and launches in a row that failed before any job began
        self._tries: dict[str, tuple[int, int]] = {}  # id -> newest checkpoint at the last try, tries without a newer
        self._gone_on: set[str] = set()  # jobs that failed for good and were retried once on request
        self._watch = _Watch(sweep, console, reported)
        self.exit_code: int | None = None  # of a requested stop
        line = "stopping: running jobs are saving their state; press Ctrl-C again to stop at once"
        self._signals = Signals(self._ask_to_stop, line)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Print which jobs begin and end, and handle signals, until the end of the block.

        Raises
        ------
        Stopped
            At the end, if the sweep was stopped; all jobs have saved their state.
        """
        global _is_parent
        flag = self.sweep.stop_flag
        if run_files.is_file(flag.parent, flag.name):
            flag.unlink(missing_ok=True)
        _is_parent = True
        self._callbacks.on_multirun_start(config=self._config, config_name=None)
        try:
            with self._signals, self._watch:
                yield
            if self.stopped:
                raise Stopped((self.exit_code or 130) - 128)
        except StopAtOnce:
            ask_to_stop(flag, AT_ONCE)
            raise
        finally:
            _is_parent = False
            self._close()
            self._callbacks.on_multirun_end(config=self._config, config_name=None)
            # Jobs that still run must see it; the next start removes it.
            if not (flag.exists() and flag.stat().st_size):
                flag.unlink(missing_ok=True)

    def _ask_to_stop(self, line: str) -> None:
        ask_to_stop(self.sweep.stop_flag)
        self.console.print(line)

    @property
    def stopped(self) -> bool:
        if self._signals.number is not None:
            self.exit_code = 128 + self._signals.number
        return self.exit_code is not None or self.sweep.stop_flag.exists()

    def run(self, jobs: Sequence[SweepJob], retry_failed: bool = False) -> None:
        """Run `jobs` to their ends, as far as possible. Finished jobs are left alone.

        Parameters
        ----------
        retry_failed : bool
            Whether to retry jobs once that failed for good, because of their input or their numbers.
        """
        size = self.sweep.head.max_batch_size or len(jobs)
        while not self.stopped:
            due = [job for job in jobs if self._is_due(job, retry_failed)]
            if due:
                for start in range(0, len(due), size):
                    if not self.stopped:
                        self._launch(due[start : start + size])
            elif any(self.sweep.progress[job.id].state == "running" for job in jobs):
                time.sleep(_POLL_S)  # in processes that outlived their parent
            else:
                return
        while any(self._watch.update(job).state == "running" for job in jobs):
            time.sleep(_POLL_S)  # they were asked to stop

    def _is_due(self, job: SweepJob, retry_failed: bool) -> bool:
        progress = self._watch.update(job)
        if progress.state in ("finished", "running"):
            return False
        if progress.state == "failed" and not progress.may_pass:
            again = retry_failed and job.id not in self._gone_on
            self._gone_on.add(job.id)
            return again
        saved, tries = self._tries.get(job.id, (progress.saved, 0))
        return progress.saved > saved or tries <= self.sweep.head.retries

    def _launch(self, jobs: list[SweepJob]) -> None:
        attempts = {job.id: self.sweep.progress[job.id].attempts for job in jobs}
        works = [[*job.overrides, str(Work(job, str(self.sweep.folder), *self._typed))] for job in jobs]
        error = None
        self._watch.active = jobs
        try:
            with _without_working_folder():
                results = self._launcher.launch(works, initial_job_idx=self._launched)
        except Stopped as e:
            self.exit_code, results = e.exit_code, []
        except Exception as e:
            error, results = e, []
        self._watch.active = []
        self._launched += len(jobs)
        started = [job for job in jobs if self._watch.update(job).attempts > attempts[job.id]]
        self._barren = 0 if started or error is None else self._barren + 1
        bearable = self.sweep.head.retries if error is not None and may_pass(error) else 0
        if error is not None and not self.stopped and self._barren > bearable:
            raise error  # the launcher itself fails
        for job in started if error is not None else jobs:
            progress = self.sweep.progress[job.id]
            saved, tries = self._tries.get(job.id, (progress.saved, 0))
            self._tries[job.id] = (progress.saved, 1 if progress.saved > saved else tries + 1)
        for job, result in zip(jobs, results, strict=False):
            self._note(job, result, job in started)

    def _note(self, job: SweepJob, result: JobReturn, started: bool) -> None:
        answer = result._return_value
        if result.status is JobStatus.FAILED:
            answer = {"message": summary(answer), "may_pass": may_pass(answer)}
        state = self.sweep.progress[job.id].state
        if "message" in answer and (state == "killed" if started else state not in ("finished", "running")):
            # A failure before the job opened its record is stored nowhere else.
            self.sweep.note_failure(job, answer["message"], answer["may_pass"])
            self._watch.update(job)


@contextmanager
def _without_working_folder() -> Iterator[None]:
    """Keep the working folder out of the import path of new interpreters, where a user's random.py would come first.

    A job adds the folder again when it imports modules of the user.
    """
    path, safe = list(sys.path), os.environ.get(_SAFE_PATH)
    sys.path[:] = [folder for folder in path if folder not in ("", os.getcwd())]
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        sys.path[:] = path
        os.environ.pop(_SAFE_PATH)
        if safe is not None:
            os.environ[_SAFE_PATH] = safe


class _Watch:
    """Prints, in a thread, which jobs began and how they ended, from their records, wherever they run."""

    def __init__(self, sweep: Sweep, console: Console, states: Sequence[str]):
        self.active: list[SweepJob] = []
        self._sweep, self._console, self._states = sweep, console, states
        self._lock = threading.Lock()
        self._last: dict[str, tuple[int, str]] = {}  # id -> attempt and state that were printed last
        self._end = threading.Event()

    def __enter__(self) -> _Watch:
        for key, progress in self._sweep.scan().items():
            self._last[key] = (progress.attempts, progress.state)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(_POLL_S):
            for job in self.active:
                if self._last.get(job.id, (0, "waiting"))[1] != "finished":
                    self.update(job)

    def update(self, job: SweepJob) -> Progress:
        with self._lock:
            progress = self._sweep.progress[job.id].scan()
            now, before = (progress.attempts, progress.state), self._last.get(job.id, (0, "waiting"))
            # Print that a job began only if it does not end right away.
            if now != before and not (progress.state == "running" and time.time() - progress.started < 2 * _POLL_S):
                self._last[job.id] = now
                if progress.state in self._states:
                    self._console.print(_line(self._sweep, job, progress))
        return progress


def _line(sweep: Sweep, job: SweepJob, progress: Progress) -> str:
    unit = unit_of(job.config)
    number = list(sweep.jobs).index(job.id) + 1
    text = progress.state
    if text == "running":
        text = (
            "runs"
            if progress.attempts == 1
            else f"resumes at {unit[:-1]} {progress.began:,}, attempt {progress.attempts}"
        )
    elif text in ("failed", "killed", "interrupted"):
        text += f" at {unit[:-1]} {progress.step:,}" + (f": {progress.message}" if progress.message else "")
        text += f" ({note})" if (note := resume_hint(job, progress)) else ""
    elif text == "finished":
        text = f"{progress.step:,} {unit} in {progress.seconds:.1f} s"
        if progress.last is not None:
            text += f", final evaluation {progress.last:.1f} ± {progress.spread or 0.0:.1f}, best {progress.best:.1f}"
        text += f" ({progress.message})" if progress.message else ""
    return f"[{number:>{len(str(len(sweep.jobs)))}}/{len(sweep.jobs)}] {label(sweep, job)}: {text}"


def launcher_overrides(master: DictConfig, overrides: list[str]) -> list[str]:
    """Return the overrides that choose the launcher again: its name, wherever it came from, and its typed settings."""
    name = f"hydra/launcher={master.hydra.runtime.choices['hydra/launcher']}"
    return [name, *(word for word in overrides if re.match(r"\+*hydra\.launcher\.", word))]

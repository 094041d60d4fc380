"""The ledger of a sweep: one append-only file that lists the runs of the sweep.

``<sweep>/sweep.jsonl`` contains one JSON object per line. The first is the head: what was typed, and the version of
rlox. Each later line is a job (its id, folder, overrides and whole resolved configuration, so that a job that starts
next week is the same as today), or a failure that happened before the job could open its own record. The progress of a
job is stored only in that record, ``<sweep>/<folder>/metrics.jsonl``, so no copy can be stale after a ``kill -9``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlox import __version__
from rlox.checkpoint import decode_value, encode_value, locks, read_header, run_files, trained_for
from rlox.config import is_below
from rlox.tracking.record import FILE as RECORD
from rlox.tracking.record import is_alive, read_rows
from rlox.tracking.store import inside
from rlox_cli.records.folders import require_new
from rlox_cli.terminal.account import paragraph
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

FILE = "sweep.jsonl"
_LOCK = "sweep.lock"
STOP = "stop"  # while this file exists, every job, in any process on any machine, saves and stops
_MOST_BYTES = 1 << 20  # of a line
_HEAD = f"be the head of a sweep, as rlox {__version__} writes it"
STATES = ("waiting", "running", "finished", "failed", "interrupted", "killed")


@dataclass
class SweepJob:
    """One run of a sweep."""

    id: str  # hash of the overrides, in any order
    folder: str  # relative to the sweep's folder
    overrides: list[str]
    config: dict[str, Any]  # resolved, as in the run's config.yaml
    extra: dict[str, Any] = field(default_factory=dict)  # what a sweeper stores about its job


@dataclass
class Head:
    """What was typed, and with which version."""

    version: str  # of rlox
    flags: list[str]
    overrides: list[str]
    imports: list[str]
    launcher: list[str]  # the overrides that choose the launcher and its settings
    retries: int = 2
    max_batch_size: int | None = None
    plot: bool = True
    created: float = 0.0  # seconds since the epoch


@dataclass
class Progress:
    """How far a job has come, according to its own record. `scan` reads the rows added since the last call."""

    folder: Path
    state: str = "waiting"
    step: int = 0
    attempts: int = 0  # segments of the record
    last: float | None = None  # mean return of the last evaluation, and of the best
    best: float | None = None
    spread: float | None = None  # standard deviation of the returns of the last evaluation
    seconds: float = 0.0  # wall time of training
    message: str = ""  # how it failed, or why it stopped early
    may_pass: bool = False  # whether another try may succeed
    saved: int = -1  # step of the newest checkpoint to resume from; -1: there is none
    started: float = 0.0  # when the newest attempt began, in seconds since the epoch
    began: int = 0  # step at which it began
    failure: dict[str, Any] | None = None  # newest failure that is in the ledger, not in the record
    _scores: list[tuple[int, float, float | None]] = field(default_factory=list)  # step, mean and spread
    _end: int = 0
    _status: str | None = None
    _since: float = 0.0

    def scan(self) -> Progress:
        try:
            alive = is_alive(self.folder)  # checked first, so that a run that ends meanwhile is read as ended
            for row, end in read_rows(self.folder / RECORD, self._end):
                self._take(row)
                self._end = end
        except FileNotFoundError:
            pass
        except (ValueError, OSError) as e:  # it cannot be resumed before somebody has looked at it
            is_file = isinstance(e, NotADirectoryError)
            message = f"{shown(self.folder)} must be a folder" if is_file else paragraph(e)
            self.state, self.message, self.may_pass = "failed", message, False
            return self
        self.state = "waiting" if self.attempts == 0 else self._status or ("running" if alive else "killed")
        if self.failure is not None and self.state != "running" and self.failure["time"] >= self._since:
            self.state, self.message = "failed", self.failure["message"]
            self.may_pass = self.failure["may_pass"]
        return self

    @property
    def resumes_at(self) -> int | None:
        """Step of the last checkpoint, at which the job would resume; 0 if it would start over.

        None for a job that is running, is finished, or cannot resume because its checkpoint cannot be read.
        """
        if self.state in ("running", "finished"):
            return None
        path = self.folder / "checkpoints" / "last.safetensors"
        try:
            if self.attempts == 0 or not run_files.is_file(self.folder, "checkpoints/last.safetensors"):
                return 0
            return trained_for(read_header(path))[0]
        except (OSError, ValueError):
            return None

    def _take(self, row: dict[str, Any]) -> None:
        event = row.get("event")
        if event == "start":
            self.attempts, self._status, self.message, self.may_pass = self.attempts + 1, None, "", False
            self._since, self.started, self.began = row["time"], row["time"], row["step"]
            # Later evaluations are repeated.
            self._scores = [score for score in self._scores if score[0] <= self.began]
        elif event == "checkpoint":
            self.saved = max(self.saved, row["step"]) if row["kind"] == "last" else self.saved
            return  # recorded when the file is on disk, which may be after later steps
        elif event == "end":
            self._status, self.message, self.may_pass = row["status"], row["message"], row.get("may_pass", False)
        self.step = row["step"]
        self.seconds += max(0.0, row["time"] - self._since)
        self._since = row["time"]
        if (score := row.get("eval/mean_return")) is not None:
            self._scores.append((self.step, score, row.get("eval/std_return")))
        if event == "start" or score is not None:
            _, self.last, self.spread = self._scores[-1] if self._scores else (0, None, None)
            self.best = max((mean for _, mean, _ in self._scores), default=None)


class Sweep:
    """A sweep in its folder; written by `create` or read by `read`."""

    def __init__(self, folder: Path, head: Head):
        self.folder = folder
        self.stop_flag = folder / STOP
        self.head = head
        self.jobs: dict[str, SweepJob] = {}
        self.progress: dict[str, Progress] = {}
        self._folders: set[str] = set()
        self._lock: locks.Lock | None = None

    @classmethod
    def create(cls, folder: Path, head: Head, jobs: Iterable[SweepJob]) -> Sweep:
        """Write the ledger of a new sweep, and hold it (see `hold`).

        Raises
        ------
        UsageError
            If the folder, or that of a job, contains a run or a sweep.
        """
        sweep = cls(folder.absolute(), head)
        require_new(sweep.folder)
        lines = [{"sweep": 1, **asdict(head)}, *(asdict(job) for job in sweep._add_jobs(jobs, new=True))]
        sweep.folder.mkdir(parents=True, exist_ok=True)
        sweep.hold()
        try:
            require_new(sweep.folder)  # another process may have created it in the meantime
        except UsageError:
            sweep.release()
            raise
        with run_files.replace_file(sweep.folder, FILE) as file:
            file.writelines(_line(item).encode() for item in lines)
            file.flush()
            os.fsync(file.fileno())
        return sweep

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Read the sweep in `folder`.

        Raises
        ------
        UsageError
            If the folder contains no sweep, or the ledger is damaged; the message names the line and the remedy.
        """
        path = folder / FILE
        if not run_files.is_file(folder, FILE):
            raise UsageError(
                f"{shown(folder)} must be the folder of a sweep, with a {FILE}; `rlox train -m …` creates one"
            )
        lines = _read(path)
        _, first = next(lines, (0, None))
        if not isinstance(first, dict) or first.pop("sweep", None) != 1:
            raise _explain_damage(path, 1, _HEAD)
        try:
            head = Head(**first)
            lists = (head.flags, head.overrides, head.imports, head.launcher)
            sound = all(isinstance(x, list) and all(isinstance(word, str) for word in x) for x in lists)
            size = 1 if head.max_batch_size is None else head.max_batch_size
            if not sound or type(head.retries) is not int or type(size) is not int or size < 1:
                raise TypeError
        except TypeError:
            raise _explain_damage(path, 1, _HEAD) from None
        sweep = cls(folder.absolute(), head)
        for number, item in lines:
            if not isinstance(item, dict):
                raise _explain_damage(path, number, "be one JSON object")
            if item.get("event") == "failed":
                progress = sweep.progress.get(str(item.get("id")))
                sound = isinstance(item.get("time"), (int, float)) and isinstance(item.get("message"), str)
                if progress is None or not sound or not isinstance(item.get("may_pass"), bool):
                    raise _explain_damage(path, number, "describe the failure of a job above it")
                progress.failure = item
                continue
            try:
                job = SweepJob(**item)
                sound = isinstance(job.config, dict) and type(job.config.get("total_timesteps")) is int
                sound = sound and isinstance(job.extra, dict) and all(isinstance(x, str) for x in job.overrides)
                if not sound or not re.fullmatch(r"[0-9a-f]{8}(-\d+)?", job.id):
                    raise TypeError
                list(sweep._add_jobs([job]))
                inside(sweep.folder, job.folder)
            except (TypeError, ValueError, AttributeError) as e:
                rule = f": {e}" if isinstance(e, ValueError) else " with id, folder, overrides and configuration"
                raise _explain_damage(path, number, f"be a job{rule}") from None
        # The head and the initial jobs are written together; a kill cannot cut them off.
        if not sweep.jobs:
            with run_files.open_file(folder, FILE) as file:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    raise _explain_damage(path, 1, "be followed by whole lines, one for each job")
        return sweep

    def _add_jobs(self, jobs: Iterable[SweepJob], new: bool = False) -> Iterator[SweepJob]:
        for job in jobs:
            if job.id in self.jobs:
                raise UsageError(f"the id of a job must be unique, got {job.id} twice")
            if not is_below(job.folder):
                raise UsageError(f"hydra.sweep.subdir must be a path below the sweep's folder, got {job.folder!r}")
            if job.folder in self._folders:
                raise UsageError(
                    f"hydra.sweep.subdir must give each job a folder of its own, got {job.folder} twice; "
                    "add ${hydra:job.num} to it"
                )
            if new and os.path.lexists(self.folder / job.folder):
                require_new(self.folder / job.folder)
            self._folders.add(job.folder)
            self.__dict__.pop("shared", None)
            self.jobs[job.id] = job
            self.progress[job.id] = Progress(self.folder / job.folder)
            yield job

    def add(self, jobs: Iterable[SweepJob]) -> None:
        """Append jobs that a sweeper has chosen since. The caller holds the sweep."""
        self._append(asdict(job) for job in self._add_jobs(jobs, new=True))

    def note_failure(self, job: SweepJob, message: str, may_pass: bool) -> None:
        """Append a failure that is not in the job's own record. The caller holds the sweep."""
        event = {"event": "failed", "id": job.id, "time": time.time(), "message": message, "may_pass": may_pass}
        self.progress[job.id].failure = event
        self._append([event])

    def _append(self, items: Iterable[dict[str, Any]]) -> None:
        with run_files.open_file(self.folder, FILE, "r+b") as file:
            # First remove a line that a kill has cut off.
            text = file.read()
            file.truncate(text.rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write("".join(map(_line, items)).encode())
            file.flush()
            os.fsync(file.fileno())

    def scan(self) -> dict[str, Progress]:
        """Return the progress of each job, by its id."""
        return {key: progress.scan() for key, progress in self.progress.items()}

    @cached_property
    def shared(self) -> set[str]:
        """The overrides that all jobs have in common."""
        lists = [set(job.overrides) for job in self.jobs.values()]
        return set.intersection(*lists) if len(lists) > 1 else set()

    def summary(self) -> str:
        """Return a text such as ``12 of 16 jobs are finished; 2 running, 1 waiting, 1 failed``."""
        states = [progress.state for progress in self.progress.values()]
        others = [f"{states.count(state)} {state}" for state in STATES if state != "finished" and state in states]
        more = f"; {', '.join(others)}" if others else ""
        return f"{states.count('finished')} of {len(states)} jobs are finished{more}"

    def hold(self) -> None:
        """Make this process the only one that runs this sweep.

        Raises
        ------
        UsageError
            If another process runs it.
        """
        self._lock = locks.take_lock(self.folder, _LOCK)
        if self._lock is None:
            raise UsageError(f"{shown(self.folder)} is being run by another process; stop it first, or wait")
        _held.add(self._lock)

    def release(self) -> None:
        if self._lock is not None:
            _held.discard(self._lock)
            self._lock.release()
            self._lock = None

    @property
    def is_held(self) -> bool:
        """Whether some process runs the sweep now."""
        return locks.is_locked(self.folder, _LOCK)


def ask_to_stop(flag: Path, text: str = "") -> None:
    """Create the file that stops a sweep's jobs; `text` is ``AT_ONCE`` to stop them without saving."""
    if text or not run_files.is_file(flag.parent, flag.name):
        with run_files.replace_file(flag.parent, flag.name) as file:
            file.write(text.encode())


def job_id(overrides: Iterable[str], taken: Container[str] = ()) -> str:
    """Return eight hexadecimal digits that identify a run: a hash of its overrides in any order, without Hydra's own.

    A second run with the same overrides gets a number appended. `taken` are the ids of the other runs.
    """
    makes = sorted(line for line in overrides if not re.match(r"\+*hydra[./]", line))
    name = hashlib.sha256("\n".join(makes).encode()).hexdigest()[:8]
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(1)))
    return next(each for each in names if each not in taken)


def _line(item: dict[str, Any]) -> str:
    return json.dumps(encode_value(item), separators=(",", ":")) + "\n"


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield numbered lines. A last line without a newline was cut off by a kill and is left out."""
    with run_files.open_file(path.parent, path.name) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_BYTES), b""), 1):
            if not line.endswith(b"\n"):
                if len(line) == _MOST_BYTES:
                    raise _explain_damage(path, number, f"have at most {_MOST_BYTES:,} bytes")
                return
            try:
                yield number, decode_value(json.loads(line))
            except (ValueError, RecursionError):
                raise _explain_damage(path, number, "be one JSON object") from None


def _explain_damage(path: Path, number: int, rule: str) -> UsageError:
    remedy = (
        "restore it; until then each of its runs can be resumed by itself: rlox train resume=RUN"
        if number == 1
        else "repair or delete the line; if it is deleted, its job leaves the sweep, and its run stays"
    )
    return UsageError(f"{shown(path)} is damaged: line {number} must {rule}; {remedy}")


_held: set[locks.Lock] = set()


def _in_child() -> None:
    # A forked worker that outlives its killed parent must not keep the sweep looking alive.
    for lock in _held:
        lock.release()
    _held.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_in_child)

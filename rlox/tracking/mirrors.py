"""The processes that mirror a run's record into trackers: start, follow, report."""

from __future__ import annotations

import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlox.checkpoint import run_files
from rlox.processes.interpreter import python_command
from rlox.tracking import store as stores
from rlox.tracking.loggers import logger_class
from rlox.tracking.record import FILE, Ledger, Record, durable_rows, is_alive, read_rows
from rlox.tracking.writer import explain

__all__ = [
    "Record",
    "Report",
    "durable_rows",
    "is_alive",
    "read_rows",
    "start_mirrors",
    "status",
    "sync",
    "wait",
]

RESPAWNS = 3  # how often `sync` and `wait` replace a writer that was killed

# Python warns about, and leaves as a zombie, a child whose Popen object is dropped too early.
_children: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Report:
    """Progress of one mirror of one run."""

    run: Path
    name: str  # mlflow, wandb, tensorboard, csv, …
    state: str  # complete, live, died (killed; mirrored up to its last checkpoint), failed or behind
    mirrored: int  # bytes of metrics.jsonl that are in the tracker
    total: int  # bytes of metrics.jsonl
    remote_id: str | None
    url: str | None
    error: str | None  # why the last attempt failed, with the remedy

    @property
    def complete(self) -> bool:
        return self.state == "complete"


Progress = Callable[[Report], None]


def _loggers(run: Path) -> Mapping[str, Mapping[str, Any]]:
    loggers = stores.read_config(run).get("logger") or {}
    return {name: settings for name, settings in loggers.items() if settings is not None}


def _store(run: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Return the folder of a logger's store. An exception may also be one of the package that provides the logger."""
    store: Path = logger_class(name).store(settings, run)
    if store.is_relative_to(run):
        stores.inside(run, str(store.relative_to(run) / "pending"))
    return store


def _note(run: Path, name: str, error: Exception) -> str:
    """Store why a mirror could not be started, if that can be written, and return it."""
    text = explain(error, run)
    with suppress(OSError, ValueError):
        stores.write_error(run, name, text)
    return text


def _run_folder(run: str | Path) -> Path:
    run = Path(run).resolve()
    if not run_files.is_file(run, FILE):
        raise ValueError(
            f"rlox.tracking: run must be a run folder with {FILE}, got {run}; open its Record "
            f"first, or name a folder that `rlox train` created"
        )
    for name in ("config.yaml", stores.MIRRORS):
        run_files.check(run, name)
    return run


def _spawn(run: Path, name: str, store: Path) -> subprocess.Popen[bytes]:
    _children[:] = [child for child in _children if child.poll() is None]
    with run_files.open_file(run, f"{stores.MIRRORS}/{name}.log", "ab") as log:
        # A new session, so that Ctrl-C at the trainer's terminal does not reach the writer.
        child = subprocess.Popen(
            python_command("rlox.tracking.writer", "main", name, str(store)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
        )
    _children.append(child)
    return child


def start_mirrors(run: str | Path) -> list[str]:
    """Mirror the run in the background to every logger of its ``config.yaml``.

    Call it after the run's `Record` was opened; it takes milliseconds and imports no tracker. If a mirror cannot be
    started, as with a store that cannot be written, this is a warning and the error of its `Report`.

    Returns
    -------
    list of str
        The loggers' names.
    """
    run = _run_folder(run)
    loggers = _loggers(run)
    for name, settings in loggers.items():
        try:
            store = _store(run, name, settings)
            run_files.make_folder(run, stores.MIRRORS)
            stores.register(store, run)
            # A running writer checks for registrations once more after it has released the store.
            if not stores.is_busy(store):
                _spawn(run, name, store)
        except Exception as e:  # training never waits for a tracker
            warnings.warn(f"{name} is not filled: {_note(run, name, e)}", RuntimeWarning, stacklevel=2)
    return list(loggers)


def _report(run: Path, name: str, waiting: bool = False) -> Report:
    state = stores.read_state(run, name)
    total = (run / FILE).lstat().st_size
    if state.seen == total and state.complete:
        word = "complete"
    elif state.error is not None and not waiting:
        word = "failed"
    elif is_alive(run):
        word = "live"
    elif state.seen == total and state.run == "died":
        word = "died"
    else:
        word = "behind"
    return Report(
        run=run,
        name=name,
        state=word,
        mirrored=state.seen if word == "complete" else state.offset,
        total=total,
        remote_id=state.remote_id,
        url=state.url,
        error=None if word == "complete" else state.error,
    )


def status(run: str | Path) -> dict[str, Report]:
    """Return the progress of each mirror of the run, without contacting trackers."""
    run = _run_folder(run)
    return {name: _report(run, name) for name in _loggers(run)}


class _Follower:
    """Watches one mirror of one run until its writer has finished it."""

    def __init__(self, run: Path, name: str, store: Path, progress: Progress | None):
        self.run, self.name, self.store, self.progress = run, name, store, progress
        self.respawns = 0
        self.idle_since = time.monotonic()
        self.shown: Report | None = None

    def poll(self) -> Report | None:
        """Return the final report, or None while the writer is working."""
        waiting = stores.is_pending(self.store, self.run)
        report = _report(self.run, self.name, waiting)
        if self.progress is not None and report != self.shown:
            self.progress(report)
            self.shown = report
        if not waiting:
            # Read it again, because the writer removes a registration after it wrote the state.
            return _report(self.run, self.name)
        if stores.is_busy(self.store):
            self.idle_since = time.monotonic()
        elif time.monotonic() - self.idle_since > 3.0:  # longer than a writer takes to start
            if self.respawns == RESPAWNS:
                log = self.run / stores.MIRRORS / f"{self.name}.log"
                error = (
                    f"rlox.tracking: the {self.name} writer must stay alive until it is done, got "
                    f"{RESPAWNS + 1} writers that ended early; see {log}, then `rlox sync {self.run}`"
                )
                return replace(report, state="failed", error=error)
            self.respawns += 1
            self.idle_since = time.monotonic()
            _spawn(self.run, self.name, self.store)
        return None


def sync(run: str | Path, progress: Progress | None = None, wait_lock: bool = True) -> dict[str, Report]:
    """Bring every mirror of the run up to date, and return their reports.

    If the run is still training, its mirrors are filled up to its current last durable checkpoint, and
    the background writer continues. A complete mirror is left unchanged; to fill it again (because its
    tracker lost the run), delete ``<run>/mirrors/<name>.json`` first.

    Parameters
    ----------
    progress
        Called with a `Report` whenever a report changed.
    wait_lock
        If false, and the store's writer is busy (with this run or others), queue the run there and
        return without waiting.
    """
    run = _run_folder(run)
    ledger = Ledger(run)
    try:
        ledger.scan()
        target = max((end for _, end in ledger.rows()), default=0)
    except ValueError:
        target = ledger.seen  # a corrupt record: the writer mirrors what it can and reports it
    reports = {}
    for name, settings in _loggers(run).items():
        if (report := _report(run, name)).complete:
            reports[name] = report
            continue
        try:
            store = _store(run, name, settings)
            busy = stores.is_busy(store)
            run_files.make_folder(run, stores.MIRRORS)
            stores.register(store, run)
            _spawn(run, name, store)
        except Exception as e:  # it does not keep the others from being filled
            reports[name] = replace(report, state="failed", error=_note(run, name, e))
            continue
        if busy and not wait_lock:
            reports[name] = _report(run, name, waiting=True)
            continue
        follower = _Follower(run, name, store, progress)
        asked = time.time()
        while (final := follower.poll()) is None:
            state = stores.read_state(run, name)
            failed = state.error is not None and state.updated > asked
            if is_alive(run) and (failed or (state.error is None and state.offset >= target)):
                final = _report(run, name)
                break
            time.sleep(0.05)
        reports[name] = final
    return reports


def wait(runs: Iterable[str | Path], timeout: float, progress: Progress | None = None) -> dict[Path, dict[str, Report]]:
    """Wait until the mirrors of ended runs are complete, have failed, or `timeout` seconds passed.

    Writers that are killed in the meantime are replaced. After the timeout the reports contain the
    progress so far, and the writers continue.
    """
    followers = []
    reports: dict[Path, dict[str, Report]] = {}
    for folder in dict.fromkeys(_run_folder(run) for run in runs):
        for name, settings in _loggers(folder).items():
            found = reports.setdefault(folder, {})
            try:
                followers.append(_Follower(folder, name, _store(folder, name, settings), progress))
            except Exception as e:
                known = _report(folder, name)
                found[name] = known if known.complete else replace(known, state="failed", error=explain(e, folder))
    deadline = time.monotonic() + timeout
    while followers:
        late = time.monotonic() >= deadline
        waiting = []
        for follower in followers:
            report = follower.poll()
            if report is None and late:
                report = _report(follower.run, follower.name, waiting=True)
            if report is None:
                waiting.append(follower)
            else:
                reports[follower.run][follower.name] = report
        followers = waiting
        if followers:
            time.sleep(0.05)
    return reports

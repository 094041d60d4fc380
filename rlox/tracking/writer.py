"""The background writer of a store: a process that calls `main`.

It takes the store's lock (or exits at once, because the process that holds the lock does the work), mirrors all
registered runs, round-robin, and exits when none is left. Killing it at any moment loses nothing: its progress
is in each run's ``mirrors/NAME.json``, and sending a row twice is harmless.

A logger is a class with

``Config``
    optional: a dataclass of its settings, which derives from `rlox.config.Config` and has a default for each field.
``store(settings, run) -> Path``
    static; returns the folder of the store's lock and queue. Called in the trainer: import no tracker here.
``__init__(settings)``
    opens the store, once per writer.
``open(job) -> session``
    finds or creates the remote run; sets ``job.state.remote_id`` and ``url``.

and a session is an object with

``send(rows)``
    mirrors metrics rows, durably when it returns (else `open` must detect that they are missing).
``upload(kind, path)``
    stores a checkpoint; ``session.uploads_while_alive`` determines whether to do so before the end as well.
``finish(status, message, ended)``
    sets the final status (finished, interrupted, failed or died) and the end in seconds since the epoch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlox.checkpoint import locks, run_files
from rlox.config.base import masked
from rlox.tracking import store as stores
from rlox.tracking.loggers import logger_class
from rlox.tracking.record import FILE, Ledger, is_alive

POLL = 0.5  # s between checks of the queue
ROWS_PER_SEND = 200  # between two saves of the state; the successor of a killed writer may send as many again
SENDS_PER_ROUND = 50  # before it is the next run's turn
UPLOAD_EVERY = 60.0  # s between uploads of a live run's checkpoints
RETRY_FIRST, RETRY_LAST = 2.0, 60.0  # s between attempts for a live run whose tracker fails


class Job:
    """One run that is being mirrored into the store.

    Attributes
    ----------
    run
        The run folder.
    config, settings
        Its resolved config, and the part of it under ``logger.<name>``.
    ledger, state
        The rows that may be mirrored, and the progress so far.
    """

    def __init__(self, run: Path, name: str):
        self.run, self.name = run, name
        run_files.check(run, stores.MIRRORS)
        self.state = stores.read_state(run, name)
        self.config = stores.read_config(run)
        settings = (self.config.get("logger") or {}).get(name)
        if settings is None:
            raise ValueError(
                f"rlox.tracking: {run / 'config.yaml'} must have logger.{name}, got none; restore the file"
            )
        self.settings: dict[str, Any] = settings
        self.ledger = Ledger(run)
        self._session: Any = None
        self._next_try = 0.0
        self._delay = RETRY_FIRST
        self._uploaded_at = time.monotonic()
        self._changed = False

    def round(self, logger: Logger) -> str:
        """Mirror new rows. Returns ``"done"``, ``"more"`` (more rows are available now) or ``"idle"``."""
        alive = is_alive(self.run)  # before the scan, so that a dead run's last rows are seen
        if alive and time.monotonic() < self._next_try:
            return "idle"
        try:
            before = self.ledger.seen
            self.ledger.scan()
            if alive and not self.ledger.seen:
                return "idle"
            if self._session is None:
                self._session = logger.mirror(self.settings).open(self)
                self._save()
            elif alive and self.ledger.seen == before and not self._changed:
                return "idle"
            rows = self.ledger.rows(self.state.offset, (self.state.segment, self.state.step))
            for _ in range(SENDS_PER_ROUND):
                batch = list(islice(rows, ROWS_PER_SEND))
                if not batch:
                    break
                self._send(batch)
            else:
                self._changed = True
                return "more"
            over = self.ledger.end is not None or not alive
            self._changed = not self._upload(over)
            if over:
                self._finish()
                return "done"
            if self.state.error is not None:
                self.state.error = None
                self._save()
            self._delay = RETRY_FIRST
            return "idle"
        except Exception as e:
            _log_exception()
            self.state.error = explain(e, self.run)
            self._save()
            # Do not retry if the record cannot be read or the tracker is not installed.
            if not alive or isinstance(e, (ValueError, ImportError)):
                return "done"
            # The session may be unusable (a server that disappeared), so the next attempt opens a new one.
            self._session = None
            self._next_try = time.monotonic() + self._delay
            self._delay = min(2 * self._delay, RETRY_LAST)
            return "idle"

    def _save(self) -> None:
        self.state.seen = self.ledger.seen
        stores.write_state(self.run, self.name, self.state)

    def _send(self, batch: list[tuple[dict[str, Any], int]]) -> None:
        self._session.send([row for row, _ in batch])
        row, self.state.offset = batch[-1]
        self.state.segment, self.state.step = row["segment"], row["step"]
        self.state.complete, self.state.run = False, "running"
        self._save()

    def _upload(self, over: bool) -> bool:
        """Upload new checkpoints if it is time for that. Returns False if some have to wait."""
        new = {
            kind: (end, file)
            for kind, (end, file) in self.ledger.checkpoints.items()
            if self.state.artifacts.get(kind) != end
        }
        if not new or not self.settings.get("artifacts", True):
            return True
        if not over:
            if not self._session.uploads_while_alive:
                return True
            if time.monotonic() - self._uploaded_at < UPLOAD_EVERY:
                return False
        for kind, (end, file) in new.items():
            # The name comes from the record, and only files of this run may be uploaded.
            for path in self._snapshot(stores.inside(self.run, file)):
                self._session.upload(kind, path)
            self.state.artifacts[kind] = end
            self._save()
        self._uploaded_at = time.monotonic()
        return True

    def _snapshot(self, path: Path) -> Iterator[Path]:
        """Yield a second name of the file (nothing if it is gone), which is removed afterwards.

        The trainer replaces a checkpoint by renaming a new file over it. A hard link keeps the old
        version without copying it, which may have gigabytes.
        """
        if not run_files.is_file(self.run, str(path.relative_to(self.run))):
            return
        folder = self.run / stores.MIRRORS / f"{self.name}.upload"
        shutil.rmtree(folder, ignore_errors=True)  # of a writer that was killed
        folder.mkdir()
        try:
            link = folder / path.name
            try:
                os.link(path, link)
            except FileNotFoundError:
                return
            except OSError:  # a file system without hard links
                with open(path, "rb") as source, open(link, "wb") as target:
                    shutil.copyfileobj(source, target)
            yield link
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _finish(self) -> None:
        end = self.ledger.end
        if end is None:
            # A killed trainer's last write is the best estimate of its end.
            ended = (self.run / FILE).stat().st_mtime
            self.state.run = "died"
            self._session.finish("died", "the trainer ended without writing an end row", ended)
        else:
            self.state.run = end["status"]
            self._session.finish(end["status"], end["message"], end["time"])
        self.state.complete = end is not None
        self.state.error = None
        self._save()


class Logger:
    """The store's mirror, which the first run that needs it opens."""

    def __init__(self, name: str):
        self.name = name
        self._mirror: Any = None

    def mirror(self, settings: dict[str, Any]) -> Any:
        if self._mirror is None:
            self._mirror = logger_class(self.name)(settings)
        return self._mirror


# Texts in the messages of HTTP clients that cannot reach the server.
_UNREACHABLE = (
    *("Max retries exceeded", "Connection refused", "Failed to establish a new connection", "timed out"),
    *("Name or service not known", "Temporary failure in name resolution", "Connection reset"),
)


def _log_exception() -> None:
    """Print the traceback to standard error, a file in the run folder, without the passwords of addresses."""
    with suppress(OSError):  # on a full disk, writing to the log may still succeed
        print(masked(traceback.format_exc()), end="", file=sys.stderr, flush=True)


def explain(error: Exception, run: Path) -> str:
    """Return the error as one line with a remedy; rlox's own messages already contain one."""
    text = masked(" ".join(str(error).split()))
    nothing_lost = f"nothing is lost: {run / FILE} has every row. Once the tracker answers: rlox sync {run}"
    if any(sign in text for sign in _UNREACHABLE):
        # urllib3's message repeats itself three times.
        address = re.search(r"host='([^']+)', port=(\d+)|(https?://[^\s'\"]+)", text)
        where = "" if address is None else f" at {address[3] or f'{address[1]}:{address[2]}'}"
        return f"the tracker{where} does not answer; {nothing_lost}"
    if len(text) > 300:
        text = text[:299] + "…"
    if isinstance(error, (ValueError, ImportError)) and "; " in text:
        return text
    return f"{type(error).__name__}: {text}; {nothing_lost}"


def drain(name: str, store: Path) -> None:
    """Mirror every registered run; return when none is left."""
    logger = Logger(name)
    jobs: dict[Path, Job] = {}
    while queue := stores.list_pending_runs(store):
        more = False
        for run, entries in queue.items():
            outcome = "done"
            try:
                if run_files.is_file(run, FILE):  # else the user has deleted it
                    if run not in jobs:
                        jobs[run] = Job(run, name)
                    outcome = jobs[run].round(logger)
            except Exception as e:  # one broken run must not stop the others
                _log_exception()
                jobs.pop(run, None)
                try:
                    stores.write_error(run, name, explain(e, run))
                except Exception:
                    _log_exception()  # a full disk, or a run whose state cannot be read
            if outcome == "done":
                jobs.pop(run, None)
                for entry in entries:
                    entry.unlink(missing_ok=True)
            more |= outcome != "idle"
        if not more:
            time.sleep(POLL)


def main(name: str, folder: str) -> None:
    """Mirror the runs that are registered in the store `folder` to the logger `name`, until there are none."""
    store = Path(folder)
    if hasattr(os, "nice"):  # not on Windows
        os.nice(10)  # training needs the CPU more
    while stores.list_pending_runs(store):
        lock = locks.take_lock(store, stores.LOCK)
        if lock is None:
            return
        try:
            drain(name, store)
        finally:
            lock.release()
        # Check again: a run that registered between the last check and the unlock found the lock taken.

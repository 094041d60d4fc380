"""The record of a run: one append-only JSON-lines file from which everything else is derived.

``<run>/metrics.jsonl`` contains one strict JSON object per line. A metrics row is flat::

    {"segment": 0, "step": 1024, "time": 1732147200.123, "episode/return": 21.3, "loss/policy": null}

(null: the value was not finite) and an event row also has ``"event"``: ``"start"`` (``run_id``, ``pid``,
``versions``; ``changed`` if a resume changed settings), ``"checkpoint"`` (``kind``, ``file``) or ``"end"``
(``status``, ``message``, ``may_pass`` if true, ``traceback`` if a file contains one). A resume starts the next
*segment*; its start row's ``step`` is the step from which it resumed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time as clock
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rlox.checkpoint import is_count, locks, one_line, run_files
from rlox.config import is_below

FILE = run_files.RECORD
LOCK = "run.lock"
RESERVED = ("segment", "step", "time", "event")
KINDS = ("last", "best", "completions", "predictions")
STATUSES = ("finished", "interrupted", "failed")
_RUN_ID = re.compile(r"[\w-]{1,64}")  # part of names and queries in the trackers
_MOST_BYTES = 4 << 20  # maximum of a line
_LATEST = 1e11  # seconds since the epoch: in the year 5138
_EVENTS = {"start": ("run_id",), "checkpoint": ("kind", "file"), "end": ("status", "message")}

_FIELDS: dict[str, Callable[[Any], bool]] = {
    "run_id": lambda x: isinstance(x, str) and _RUN_ID.fullmatch(x) is not None,
    "kind": lambda x: x in KINDS,
    "file": lambda x: isinstance(x, str) and is_below(x),
    "status": lambda x: x in STATUSES,
    "message": lambda x: isinstance(x, str),
    "may_pass": lambda x: isinstance(x, bool),
    "traceback": lambda x: isinstance(x, str) and is_below(x),
}


def _is_number(value: Any, below: float = math.inf) -> bool:
    """Whether `value` is finite as a float, and below a limit. (JSON has integers of any length, and NaN in Python.)"""
    try:
        return type(value) in (int, float) and abs(float(value)) < below
    except OverflowError:
        return False


def is_alive(folder: str | Path) -> bool:
    """Return whether a trainer is currently writing to this run folder."""
    return locks.is_locked(folder, LOCK)


def _corrupt(path: Path, offset: int, rule: str, line: bytes) -> ValueError:
    with run_files.open_file(path.parent, path.name) as file:
        number = file.read(offset).count(b"\n") + 1
    text = one_line(line[:80].decode("utf-8", "replace"))
    return ValueError(f"{path}: line {number} must {rule}, got {text!r}; fix or delete that line, then `rlox sync`")


def _parse(path: Path, offset: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise _corrupt(path, offset, "be one JSON object", line) from None
    if not isinstance(row, dict):
        raise _corrupt(path, offset, "be one JSON object", line)
    if not is_count(row.get("segment")) or not is_count(row.get("step")):
        raise _corrupt(path, offset, "have whole numbers >= 0 as segment and step", line)
    if not _is_number(row.get("time"), below=_LATEST):
        raise _corrupt(path, offset, "have a number as time", line)
    if "event" in row and not all(k in row for k in _EVENTS.get(str(row["event"]), ("event?",))):
        raise _corrupt(path, offset, f"be a whole event, one of {', '.join(_EVENTS)}", line)
    if "event" in row:
        wrong = [key for key, holds in _FIELDS.items() if key in row and not holds(row[key])]
    else:
        wrong = [key for key, value in row.items() if not (value is None or _is_number(value)) or not key.isprintable()]
    if wrong:
        raise _corrupt(path, offset, f"have a valid {one_line(wrong[0], 40)!r}", line)
    return row


def read_rows(path: str | Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield ``(row, end)`` for each complete line from byte `offset` on; `end` is the line's end offset.

    A last line without a newline is still being written (or was cut off by a crash) and is left out.

    Raises
    ------
    ValueError
        If a complete line is not a row; the message names file and line.
    """
    path = Path(path)
    with run_files.open_file(path.parent, path.name) as file:
        file.seek(offset)
        while line := file.readline(_MOST_BYTES):
            if not line.endswith(b"\n"):
                if len(line) == _MOST_BYTES:
                    raise _corrupt(path, offset, f"have at most {_MOST_BYTES:,} bytes", line)
                return
            yield _parse(path, offset, line), offset + len(line)
            offset += len(line)


class Ledger:
    """The rows of a record that may be mirrored; follows a growing file.

    Trackers cannot remove a row again. Two rules ensure that no row ever has to be removed:

    - rows of the last segment wait until a ``last`` checkpoint covers their step. A run that ended
      cleanly (finished or interrupted) releases all of them; a run that failed or was killed
      does not, because a resume will write those steps again;
    - a segment that resumed from step S supersedes rows of earlier segments beyond S.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder) / FILE
        self._first: dict[str, Any] | None = None  # the first segment's start row
        self.seen = 0  # bytes read so far
        self.segment = 0
        self.last = 0  # highest step of a row
        self.durable = 0  # step of the last segment's newest `last` checkpoint
        self.end: dict[str, Any] | None = None  # the last segment's end row
        self.starts: dict[int, dict[str, Any]] = {}  # segment -> its start row, with the step it resumed from
        self.checkpoints: dict[str, tuple[int, str]] = {}  # kind -> (end offset of its row, file)

    def scan(self) -> None:
        """Read the rows appended since the last scan."""
        for row, end in read_rows(self.path, self.seen):
            event = row.get("event")
            if event == "start":
                self._first = self._first or row
                self.segment, self.durable, self.end = row["segment"], row["step"], None
                self.starts[self.segment] = row
            elif event == "checkpoint":
                self.checkpoints[row["kind"]] = (end, row["file"])
                if row["kind"] == "last":
                    self.durable = max(self.durable, row["step"])
            elif event == "end":
                self.end = row
            if row["segment"] not in self.starts:
                line = json.dumps(row).encode()
                raise _corrupt(self.path, self.seen, "follow its segment's start row", line)
            self.seen, self.last = end, max(self.last, row["step"])

    @property
    def run_id(self) -> str:
        """The run's id. Raises ValueError if nothing was recorded."""
        return self._require_start_episodes()["run_id"]

    @property
    def started(self) -> float:
        """Time of the first row, in seconds since the epoch. Raises ValueError if there is none."""
        return self._require_start_episodes()["time"]

    def _require_start_episodes(self) -> dict[str, Any]:
        if self._first is None:
            raise ValueError(
                f"rlox.tracking: {self.path} must begin with a start row, got none; its trainer ended before it "
                "recorded anything: delete the run folder"
            )
        return self._first

    @property
    def ended_cleanly(self) -> bool:
        return self.end is not None and self.end["status"] in ("finished", "interrupted")

    def rows(
        self, offset: int = 0, mark: tuple[int, int] = (-1, -1), provisional: bool = False
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the metrics rows that may be mirrored, with their end offsets.

        Parameters
        ----------
        offset
            Byte to start at: the end offset of the last mirrored row.
        mark
            ``(segment, step)`` of that row. Later segments only add rows beyond that step, so the
            whole stream is monotone in step even if a run went back to an older checkpoint.
        provisional
            Whether to include rows of the last segment that no checkpoint covers yet. They can be shown, but must
            not be mirrored.
        """
        limit, limits = math.inf, {}
        for segment in sorted(self.starts, reverse=True):
            limits[segment] = limit
            limit = min(limit, self.starts[segment]["step"])
        if not self.ended_cleanly and not provisional:
            limits[self.segment] = self.durable
        for row, end in read_rows(self.path, offset):
            if end > self.seen:
                return
            if "event" in row:
                continue
            segment, step = row["segment"], row["step"]
            if step > limits[segment]:
                if segment == self.segment:
                    return
                continue
            if segment > mark[0] and step <= mark[1]:
                continue
            mark = (segment, step)
            yield row, end


def durable_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Return the metrics rows of a run that may be mirrored now, monotone in step."""
    ledger = Ledger(folder)
    ledger.scan()
    return [row for row, _ in ledger.rows()]


class Record(AbstractContextManager["Record", None]):
    """Writer of a run's record; a run folder can have only one living trainer.

    Parameters
    ----------
    folder
        The run folder; created if it does not exist. If it already has a record, the next segment starts.
    versions
        Versions of the packages used by the run, stored in the start row.
    resume_step
        Step of the checkpoint from which this segment continues; None starts from the beginning.
    changed
        Settings that differ from before, ``{key: [old, new]}``, stored in the start row.
    verify
        Called after other trainers were locked out and before anything is written; if it raises, the record is
        unchanged.

    Raises
    ------
    RuntimeError
        If another living process trains in this folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        versions: Mapping[str, str] | None = None,
        resume_step: int | None = None,
        changed: Mapping[str, Any] | None = None,
        verify: Callable[[], None] | None = None,
    ):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / FILE
        self._lock, self._file = locks.take_lock(self.folder, LOCK), -1
        if self._lock is None:
            raise RuntimeError(
                f"Record: folder must have no other living trainer, got {self.folder} held by "
                f"{locks.describe_holder(self.folder, LOCK)}; wait for it, stop it or choose another folder"
            )
        try:
            if verify is not None:
                verify()
            self._lock.write(f"{os.getpid()}\n")
            # Keep existing contents: the repair below must read what a crashed trainer left.
            self._file = run_files.open_descriptor(self.folder, FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self.run_id, self.segment = self._recover()
            self._step = 0 if resume_step is None else int(resume_step)
            start = {"run_id": self.run_id, "pid": os.getpid(), "versions": dict(versions or {})}
            if changed:
                from rlox.checkpoint import encode_value  # with NumPy

                start["changed"] = encode_value(dict(changed))  # a setting may be infinite
            self._write("start", self._step, start)
        except BaseException:
            self.close()
            raise
        _open_records.add(self)

    def _recover(self) -> tuple[str, int]:
        """Remove a partial last line, and return the run's id and this segment's number."""
        run_id, segment, offset = uuid.uuid4().hex, -1, 0
        with open(self._file, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file, offset)
                    break
                # Check for the substring first, because parsing every metrics row of a long run would take seconds.
                if b'"event"' in line:
                    row = _parse(self._path, offset, line)
                    if row.get("event") == "start":
                        run_id, segment = row["run_id"] if segment < 0 else run_id, row["segment"]
                offset += len(line)
        return run_id, segment + 1

    def metrics(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Append one row of metrics; values that are not finite become null.

        Raises
        ------
        ValueError
            If a name is reserved or empty, or `step` decreases within this segment.
        TypeError
            If a value is not a number.
        OSError
            If the file cannot be written (a full disk, a quota), or the run folder was moved or deleted.
        """
        step = int(step)
        if step < self._step:
            raise ValueError(
                f"Record.metrics: step must not decrease within a segment, got {step} after {self._step}; "
                f"open a new Record with resume_step={step}"
            )
        row: dict[str, Any] = {}
        for name, value in values.items():
            if not isinstance(name, str) or not name or name in RESERVED:
                raise ValueError(
                    f"Record.metrics: name must be a text other than {', '.join(RESERVED)}, "
                    f"got {name!r}; rename the metric, for example train/{name}"
                )
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                raise TypeError(
                    f"Record.metrics: {name} must be a number, got {value!r}; log a scalar per name"
                ) from None
            row[name] = number if math.isfinite(number) else None
        self._write(None, step, row, time)
        self._step = step

    def checkpoint(self, step: int, kind: str, file: str) -> None:
        """Record that a checkpoint is safely on disk; call it after the file was renamed into place.

        Parameters
        ----------
        kind
            ``"last"`` (a resume continues from it; releases the rows up to `step` to the mirrors) or ``"best"``; or
            another file for the trackers: ``"completions"``, a table of texts, or ``"predictions"``, a picture.
        file
            Its path, relative to the run folder.
        """
        if kind not in KINDS:
            raise ValueError(f"Record.checkpoint: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self._write("checkpoint", step, {"kind": kind, "file": str(file)})
        if kind == "last":
            os.fsync(self._file)  # rows that a checkpoint covers must survive a power failure, as it does

    def end(
        self, step: int, status: str, message: str = "", may_pass: bool = False, traceback: str | None = None
    ) -> None:
        """Record how the run ended: ``"finished"``, ``"interrupted"`` or ``"failed"``.

        Parameters
        ----------
        may_pass
            Whether another attempt may succeed, for example after a full disk or a lost device.
        traceback
            The file in the run's folder that contains the whole traceback.
        """
        if status not in STATUSES:
            raise ValueError(f"Record.end: status must be one of {', '.join(STATUSES)}, got {status!r}")
        fields: dict[str, Any] = {"status": status, "message": message}
        if may_pass:
            fields["may_pass"] = True
        if traceback is not None:
            fields["traceback"] = traceback
        self._write("end", step, fields)
        os.fsync(self._file)

    def close(self) -> None:
        """Release the run folder. If `end` was not called before, the run counts as killed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, event: str | None, step: int, fields: Mapping[str, Any], time: float | None = None) -> None:
        if self._file < 0:
            raise ValueError(f"Record: {self._path} must be open, got a closed record")
        try:
            os.stat(self._path)
        except FileNotFoundError as e:
            # Checkpoints would be written to a new folder, next to no record.
            raise FileNotFoundError(
                e.errno,
                "Record: the run folder must stay where it is during the training, but was moved or deleted; "
                "move it back, or resume the run where it is now",
                str(self.folder),
            ) from None
        row: dict[str, Any] = {
            "segment": self.segment,
            "step": int(step),
            "time": round(clock.time() if time is None else float(time), 3),
        }
        if event is not None:
            row["event"] = event
        row.update(fields)
        line = json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        written = 0
        try:
            # One write on an O_APPEND descriptor: a reader sees the whole row or a line without
            # its newline, never two rows mixed.
            written = os.write(self._file, line)
            if written < len(line):
                written += os.write(self._file, line[written:])  # raises the reason of the short write
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(
                e.errno,
                f"Record: the disk must have room for the next row, got {e.strerror!r}; "
                f"free some space, then resume the run",
                str(self._path),
            ) from e


_open_records: weakref.WeakSet[Record] = weakref.WeakSet()


def _in_child() -> None:
    # A forked worker that outlives its killed trainer must not keep the run looking alive.
    for record in _open_records:
        record.close()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_in_child)

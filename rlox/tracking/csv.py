"""A CSV table as a mirror: one row per step, the union of all metrics as columns, an empty cell for a missing number.

The table is derived from the whole record each time and replaced atomically, so that a reader (a spreadsheet, pandas)
never sees a partial table.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlox.checkpoint import run_files
from rlox.tracking.record import RESERVED
from rlox.tracking.store import MIRRORS, inside

if TYPE_CHECKING:
    from rlox.tracking.writer import Job

REWRITE_EVERY = 60.0  # s between two tables of a live run
REWRITE_SHARE = 0.02  # largest share of a core, for runs whose table takes long to write


class CsvMirror:
    """The mirror of CSV tables. It has nothing to open: the store is the run folder itself."""

    @staticmethod
    def store(settings: Mapping[str, Any], run: Path) -> Path:
        return run / MIRRORS / "csv.store"

    def __init__(self, settings: Mapping[str, Any]):
        pass

    def open(self, job: Job) -> CsvTable:
        return CsvTable(job)


class CsvTable:
    """The table of one run."""

    uploads_while_alive = False

    def __init__(self, job: Job):
        self._run, self._name = job.run, job.settings.get("file", "metrics.csv")
        self.path = inside(self._run, self._name)
        self._ledger = job.ledger
        self._columns: set[str] = set()
        self._next = time.monotonic() + REWRITE_EVERY
        # An existing table is replaced as a whole, so all rows are sent again.
        job.state.offset, job.state.segment, job.state.step = 0, -1, -1
        job.state.url = str(self.path)

    def send(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._columns.update(row.keys())
        if time.monotonic() >= self._next:
            self._rewrite()

    def upload(self, kind: str, path: Path) -> None:
        """Do nothing: checkpoints are already in the run folder."""

    def finish(self, status: str, message: str, ended: float) -> None:
        self._rewrite()

    def _rewrite(self) -> None:
        started = time.monotonic()
        with run_files.replace_file(self._run, self._name) as file:
            # Rows written since the last `send` may have a new column.
            while not self._write(file):
                pass
        now = time.monotonic()
        self._next = now + max(REWRITE_EVERY, (now - started) / REWRITE_SHARE)

    def _write(self, binary: BinaryIO) -> bool:
        """Write the whole table. If a row has an unknown column, add the column and return False."""
        names = ["step", "time", *sorted(self._columns.difference(RESERVED))]
        binary.seek(0)
        binary.truncate()
        file = io.TextIOWrapper(binary, encoding="utf-8", newline="")
        try:
            table = csv.DictWriter(file, names, lineterminator="\n")
            table.writeheader()
            merged: dict[str, Any] = {}
            for row, _ in self._ledger.rows():
                if not row.keys() <= self._columns:
                    self._columns.update(row.keys())
                    return False
                if merged and row["step"] != merged["step"]:
                    table.writerow(merged)
                    merged = {}
                merged.update({k: v for k, v in row.items() if v is not None and k != "segment"})
            if merged:
                table.writerow(merged)
            return True
        finally:
            file.detach()  # flushes, and leaves the file open

"""A CSV table as a mirror: one row a step, the union of all metrics as columns, an empty cell where there is no number.

The table is derived from the whole record each time and replaced in one go, so that a reader (a spreadsheet, pandas)
never meets half of one.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox.tracking.record import RESERVED
from rlox.tracking.store import MIRRORS, inside

if TYPE_CHECKING:
    from rlox.tracking.writer import Job

REWRITE_EVERY = 60.0  # s between two tables of a live run
REWRITE_SHARE = 0.02  # of a core, for runs whose table takes long to write


class CsvMirror:
    """Needs nothing opened: the store is the run folder itself."""

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
        self.path = inside(job.run, job.settings.get("file", "metrics.csv"))
        self._ledger = job.ledger
        self._columns: set[str] = set()
        self._next = time.monotonic() + REWRITE_EVERY
        # Whatever lies there is replaced as a whole: all rows are sent anew.
        job.state.offset, job.state.segment, job.state.step = 0, -1, -1
        job.state.url = str(self.path)

    def send(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._columns.update(row.keys())
        if time.monotonic() >= self._next:
            self._rewrite()

    def upload(self, kind: str, path: Path) -> None:
        """Checkpoints lie in the run folder already."""

    def finish(self, status: str, message: str, ended: float) -> None:
        self._rewrite()

    def _rewrite(self) -> None:
        started = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            # Rows that came since the last `send` may bring a new column.
            while not self._write(partial):
                pass
            os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)
        now = time.monotonic()
        self._next = now + max(REWRITE_EVERY, (now - started) / REWRITE_SHARE)

    def _write(self, path: Path) -> bool:
        """Write the whole table; False, with the column noted, if a row has one that was not known."""
        names = ["step", "time", *sorted(self._columns.difference(RESERVED))]
        with open(path, "w", encoding="utf-8", newline="") as file:
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

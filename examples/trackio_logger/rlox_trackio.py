"""Trackio as a logger of rlox, from outside: `logger=trackio` copies each run's record into Trackio's local database.

rlox calls this in a background process, never in the training. A writer that is killed is followed by another one, so
rows may be sent twice: each has an id here, and Trackio stores an id once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rlox.config import Config


@dataclass
class TrackioConfig(Config):
    """Trackio as a mirror of the run's record."""

    project: str = "rlox"  # project of the run
    run_name: str | None = None  # name shown in the dashboard; null: the run folder's name

    def rules(self):
        yield "project", bool(self.project), "not be empty"


class TrackioMirror:
    """All runs of one project, which one writer fills."""

    Config = TrackioConfig

    @staticmethod
    def store(settings: Mapping[str, Any], run: Path) -> Path:
        """Return the folder of the writer's lock; called in the training, so Trackio is not imported here."""
        return run / "mirrors" / "trackio.store"

    def __init__(self, settings: Mapping[str, Any]):
        try:
            from trackio.sqlite_storage import SQLiteStorage
        except ImportError as e:
            raise ImportError("logger=trackio needs the package trackio; pip install trackio, then rlox sync") from e
        self.storage = SQLiteStorage

    def open(self, job: Any) -> TrackioRun:
        return TrackioRun(self.storage, job)


class TrackioRun:
    """One run in Trackio."""

    uploads_while_alive = False

    def __init__(self, storage: Any, job: Any):
        self.storage, self.config, self.id = storage, job.config, job.ledger.run_id
        self.project, self.name = job.settings["project"], job.settings["run_name"] or job.run.name
        job.state.remote_id = self.id
        job.state.url = str(storage.get_project_db_path(self.project))

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Store rows of metrics; they are on disk when this returns."""
        self._store(rows, [{key: value for key, value in row.items() if value is not None} for row in rows])

    def upload(self, kind: str, path: Path) -> None:
        """Do nothing: checkpoints stay in the run folder."""

    def finish(self, status: str, message: str, ended: float) -> None:
        """Store how the run ended, as a row after the last one."""
        last = self.storage.get_last_step(self.project, run_id=self.id) or 0
        self._store([{"segment": "end", "step": last, "time": ended}], [{"status": status, "message": message}])

    def _store(self, rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
        self.storage.bulk_log(
            self.project,
            self.name,
            [{key: value for key, value in one.items() if key not in ("segment", "step", "time")} for one in metrics],
            steps=[row["step"] for row in rows],
            timestamps=[datetime.fromtimestamp(row["time"], timezone.utc).isoformat() for row in rows],
            config=self.config,
            log_ids=[f"{self.id}-{row['segment']}-{row['step']}-{row['time']}" for row in rows],
            run_id=self.id,
        )

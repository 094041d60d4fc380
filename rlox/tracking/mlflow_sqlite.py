"""MLflow's SQLite store, written without importing MLflow, which takes seconds.

`SqliteStore` has those methods of ``mlflow.MlflowClient`` that the mirror calls, and writes the same rows. It supports
only the revision of the schema in `mlflow_schema.sql`; for every other revision, MLflow itself is used.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from rlox.config.sqlite import sqlalchemy_uri

SCHEMA = Path(__file__).with_name("mlflow_schema.sql")
PRAGMAS = ("busy_timeout=30000", "journal_mode=WAL", "synchronous=NORMAL")
_DEFAULT = "default"  # the default workspace
_REVISION = re.compile(r"""^(down_revision|revision)(?:\s*:[^=]*)?\s*=\s*(.+?)\s*$""", re.MULTILINE)


def revision() -> str:
    """Return the revision of the schema in `mlflow_schema.sql`."""
    with open(SCHEMA, encoding="utf-8") as file:
        return next(line.split()[-1] for line in file if line.startswith("-- revision:"))


def read_revision() -> str | None:
    """Return the revision that the installed MLflow creates and expects, read from its migrations; None if unclear."""
    found = find_spec("mlflow")
    if found is None or not found.submodule_search_locations:
        return None
    revisions: set[str] = set()
    replaced: set[str] = set()
    for folder in found.submodule_search_locations:
        for path in Path(folder, "store", "db_migrations", "versions").glob("*.py"):
            for kind, value in _REVISION.findall(path.read_text(encoding="utf-8")):
                (revisions if kind == "revision" else replaced).update(re.findall(r"""["'](\w+)["']""", value))
    heads = revisions - replaced
    return heads.pop() if len(heads) == 1 else None


def serves(database: Path) -> bool:
    """Return whether `SqliteStore` can write this file: the installed MLflow expects the schema in `mlflow_schema.sql`,
    and the file has this schema or does not exist."""
    if read_revision() != revision():
        return False
    if not database.exists() or not database.stat().st_size:
        return True
    try:
        connection = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)
        try:
            return connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(revision(),)]
        finally:
            connection.close()
    except sqlite3.Error:
        return False  # MLflow then reports what is wrong with the file


def create(database: Path) -> None:
    """Create a new store. A process that is killed leaves no partial store."""
    partial = database.with_name(f".{database.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    connection = sqlite3.connect(partial)
    now = _now()
    try:
        connection.executescript(SCHEMA.read_text(encoding="utf-8"))
        connection.execute("INSERT INTO alembic_version VALUES (?)", (revision(),))
        connection.execute(
            "INSERT INTO workspaces (name, description) VALUES (?, 'Default workspace for legacy resources')",
            (_DEFAULT,),
        )
        location = (database.parent / "mlruns" / "0").as_uri()
        connection.execute(
            "INSERT INTO experiments VALUES (0, 'Default', ?, 'active', ?, ?, ?)", (location, now, now, _DEFAULT)
        )
        connection.commit()
    finally:
        connection.close()
    os.replace(partial, database)


@dataclass
class Metric:
    """A value at a step; the timestamp is in milliseconds since the epoch."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass
class Param:
    """A setting of a run."""

    key: str
    value: str


@dataclass
class Experiment:
    """The data of an experiment that the mirror reads."""

    experiment_id: str
    lifecycle_stage: str
    artifact_location: str
    tags: dict[str, str] = field(default_factory=dict)


class SqliteStore:
    """The store in `database`, created if it does not exist. Only one process at a time may write it."""

    def __init__(self, database: Path):
        if not database.exists() or not database.stat().st_size:
            create(database)
        self.uri = sqlalchemy_uri(database)
        self._connection = sqlite3.connect(database, timeout=30)
        for pragma in PRAGMAS:
            self._connection.execute(f"PRAGMA {pragma}")

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def _write(self, sql: str, *values: Any) -> None:
        with self._connection:
            self._connection.execute(sql, values)

    def get_experiment_by_name(self, name: str) -> Experiment | None:
        """Return the experiment of this name, even if it is deleted; None if there is none."""
        columns = "experiment_id, lifecycle_stage, artifact_location"
        found = self._rows(f"SELECT {columns} FROM experiments WHERE name = ? AND workspace = ?", name, _DEFAULT)
        if not found:
            return None
        number, stage, location = found[0]
        tags = self._rows("SELECT key, value FROM experiment_tags WHERE experiment_id = ?", number)
        return Experiment(str(number), stage, location, tags=dict(tags))

    def create_experiment(self, name: str, artifact_location: str) -> str:
        """Create an experiment, and return its id."""
        with self._connection:
            cursor = self._connection.execute(
                "INSERT INTO experiments (name, artifact_location, lifecycle_stage, creation_time, last_update_time, "
                "workspace) VALUES (?, ?, 'active', ?, ?, ?)",
                (name, artifact_location, _now(), _now(), _DEFAULT),
            )
        return str(cursor.lastrowid)

    def set_experiment_tag(self, experiment_id: str, key: str, value: str) -> None:
        """Set a tag of an experiment."""
        self._write(
            "INSERT OR REPLACE INTO experiment_tags (key, value, experiment_id) VALUES (?, ?, ?)",
            key, value, int(experiment_id),
        )  # fmt: skip

    def find_run(self, experiment_id: str, run_id: str) -> Any:
        """Return the run whose tag ``rlox.run_id`` is `run_id`; None if there is none."""
        found = self._rows(
            "SELECT run_uuid, status FROM runs JOIN tags USING (run_uuid) WHERE experiment_id = ? "
            "AND lifecycle_stage = 'active' AND key = 'rlox.run_id' AND value = ? ORDER BY start_time DESC LIMIT 1",
            int(experiment_id), run_id,
        )  # fmt: skip
        if not found:
            return None
        run, status = found[0]
        return _run(run, status, dict(self._rows("SELECT key, value FROM params WHERE run_uuid = ?", run)))

    def create_run(self, experiment_id: str, start_time: int, run_name: str, tags: Mapping[str, str]) -> Any:
        """Create a run, and return it as `find_run` does."""
        run_id = uuid.uuid4().hex
        ((location,),) = self._rows("SELECT artifact_location FROM experiments WHERE experiment_id = ?", experiment_id)
        with self._connection:
            self._connection.execute(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status, "
                "start_time, source_version, lifecycle_stage, artifact_uri, experiment_id) "
                "VALUES (?, ?, 'UNKNOWN', '', '', 'unknown', 'RUNNING', ?, '', 'active', ?, ?)",
                (run_id, run_name, start_time, f"{location.rstrip('/')}/{run_id}/artifacts", int(experiment_id)),
            )
            self._connection.executemany(
                "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)",
                [(key, value, run_id) for key, value in {**tags, "mlflow.runName": run_name}.items()],
            )
        return _run(run_id, "RUNNING", {})

    def update_run(self, run_id: str, status: str) -> None:
        """Set the status of a run."""
        self._write("UPDATE runs SET status = ? WHERE run_uuid = ?", status, run_id)

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        """Set the status and the end of a run."""
        self._write("UPDATE runs SET status = ?, end_time = ? WHERE run_uuid = ?", status, end_time, run_id)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        """Set a tag of a run."""
        self._write("INSERT OR REPLACE INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", key, value, run_id)

    def log_batch(self, run_id: str, metrics: Iterable[Metric] = (), params: Iterable[Param] = ()) -> None:
        """Add metrics, except for those that already exist, and new params."""
        rows: list[tuple[Any, ...]] = []
        latest: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}  # by key: the sort key, and the row
        for metric in metrics:
            is_nan = math.isnan(metric.value)
            largest = sys.float_info.max
            value = 0.0 if is_nan else min(max(float(metric.value), -largest), largest)  # as MLflow stores them
            rows.append((metric.key, value, metric.timestamp, run_id, metric.step, is_nan))
            order = (metric.step, metric.timestamp, value)
            if metric.key not in latest or order > latest[metric.key][0]:
                latest[metric.key] = (order, (metric.key, value, metric.timestamp, metric.step, is_nan, run_id))
        with self._connection:
            self._connection.executemany(
                "INSERT OR IGNORE INTO metrics (key, value, timestamp, run_uuid, step, is_nan) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                rows,
            )
            self._connection.executemany(
                "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (key, run_uuid) DO UPDATE SET value = excluded.value, timestamp = excluded.timestamp, "
                "step = excluded.step, is_nan = excluded.is_nan WHERE (excluded.step, excluded.timestamp, "
                "excluded.value) > (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)",
                [row for _, row in latest.values()],
            )
            self._connection.executemany(
                "INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)",
                [(param.key, param.value, run_id) for param in params],
            )

    def log_artifact(self, run_id: str, path: str, folder: str = "") -> None:
        """Copy a file into the artifacts of a run; if these are not on this machine, MLflow does it."""
        ((uri,),) = self._rows("SELECT artifact_uri FROM runs WHERE run_uuid = ?", run_id)
        parts = urlsplit(uri)
        if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
            from mlflow import MlflowClient

            MlflowClient(tracking_uri=self.uri).log_artifact(run_id, path, folder or None)
            return
        target = Path(os.fsdecode(unquote_to_bytes(parts.path)) if parts.scheme else uri, folder)
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def _run(run_id: str, status: str, params: dict[str, str]) -> Any:
    """Return a run with the attributes of MLflow's run class."""
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id, status=status), data=SimpleNamespace(params=params))


def _now() -> int:
    """Return the time in milliseconds since the epoch."""
    return round(1000 * time.time())

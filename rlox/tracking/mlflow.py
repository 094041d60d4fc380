"""MLflow as a mirror; the embedded SQLite store by default."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlox
from rlox.config import MlflowConfig
from rlox.config.base import masked
from rlox.config.sqlite import is_sqlite, sqlalchemy_uri, sqlite_file, sqlite_uri
from rlox.tracking import mlflow_sqlite
from rlox.tracking.store import readable, user_store

if TYPE_CHECKING:
    from rlox.tracking.writer import Job

METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100  # MLflow's limits of one log_batch
KIND = "mlflow.experimentKind"  # tag of an experiment that determines the layout of MLflow's page
MODEL_TRAINING = "workflowType=machine_learning"  # the same as part of a URL; newer versions use only this
MAX_NAME, MAX_PARAM, MAX_TAG = 250, 6000, 8000  # characters
STATUS = {
    "finished": "FINISHED",
    "interrupted": "KILLED",
    "failed": "FAILED",
    "died": "KILLED",
}


def _database(tracking_uri: str) -> Path | None:
    """Return the file of an embedded store, or None for a server."""
    if not is_sqlite(tracking_uri):
        return None
    path = sqlite_file(tracking_uri)
    if not path.is_absolute():
        raise ValueError(
            f"rlox.tracking: logger.mlflow.tracking_uri must name its file by an absolute path, "
            f"got {tracking_uri!r}; try {sqlite_uri(path.resolve())!r}"
        )
    return path


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _name(key: str) -> str:
    """Return `key` with other characters than those that MLflow allows replaced."""
    return re.sub(r"[^\w\-. :/]", "_", key)[:MAX_NAME]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield _name(prefix), _cut(text, MAX_PARAM)


def _client(uri: str, database: Path | None) -> tuple[Any, type, type]:
    """Return MLflow's client, and its classes of a metric and a param."""
    # The writer retries by itself, without delaying the store's other runs.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
    except ImportError as e:
        raise ImportError(
            "rlox.tracking: logger=mlflow needs the package mlflow, got none; "
            'pip install "rlox-cli[mlflow]", then rlox sync'
        ) from e
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if database is not None:
        _tune_sqlite()
        uri = sqlalchemy_uri(database)
    return MlflowClient(tracking_uri=uri), Metric, Param


class MlflowMirror:
    """An MLflow store, opened once; it must be used under the store's lock.

    Processes that open a new SQLite file at the same time break it for good (each runs the migrations).
    """

    @staticmethod
    def store(settings: Mapping[str, Any], run: Path) -> Path:
        database = _database(settings["tracking_uri"])
        if database is None:
            return user_store("mlflow " + settings["tracking_uri"])
        return database.with_name(database.name + ".rlox")

    def __init__(self, settings: Mapping[str, Any]):
        self.uri = MlflowConfig(tracking_uri=settings["tracking_uri"]).in_effect
        self.database = _database(self.uri)
        if self.database is not None:
            self.database.parent.mkdir(parents=True, exist_ok=True)
        if self.database is not None and mlflow_sqlite.serves(self.database):
            self.client: Any = mlflow_sqlite.SqliteStore(self.database)
            self.metric: Any = mlflow_sqlite.Metric
            self.param: Any = mlflow_sqlite.Param
        else:
            self.client, self.metric, self.param = _client(self.uri, self.database)
        self._experiments: dict[str, str] = {}

    def experiment(self, name: str) -> str:
        """Return the experiment's id; create the experiment if it does not exist."""
        if name not in self._experiments:
            existing = self.client.get_experiment_by_name(name)
            if existing is not None and existing.lifecycle_stage == "deleted":
                raise ValueError(
                    f"rlox.tracking: logger.mlflow.experiment must not be deleted, got {name!r}; "
                    f"run `mlflow experiments restore -x {existing.experiment_id}` or choose another name"
                )
            if existing is not None:
                self._experiments[name] = existing.experiment_id
            else:
                # Without a location, MLflow puts artifacts under the writer's working directory.
                location = self.database and (self.database.parent / "mlartifacts").as_uri()
                self._experiments[name] = self.client.create_experiment(name, location)
            # MLflow's page guesses an unknown kind, and may then show the layout for traces of language models.
            known = (existing.tags if existing is not None else {}).get(KIND, "")
            if not known or known.endswith("_inferred") or known == "no_inferred_type":
                self.client.set_experiment_tag(self._experiments[name], KIND, "custom_model_development")
        return self._experiments[name]

    def open(self, job: Job) -> MlflowRun:
        return MlflowRun(self, job)


class MlflowRun:
    """One run in MLflow.

    Rows that were already sent can be sent again: the key of MLflow's metrics table is (run, name,
    time, step, value), and ``log_batch`` skips existing rows. If the state file is lost, the run is
    found by its tag ``rlox.run_id``.
    """

    uploads_while_alive = True

    def __init__(self, mirror: MlflowMirror, job: Job):
        self.client, self.metric, self.param = mirror.client, mirror.metric, mirror.param
        self._names: dict[str, str] = {}
        experiment = mirror.experiment(job.settings["experiment"])
        run = self._find(job, experiment)
        if run is None:
            # Also if the user deleted the database: the mirror is then filled from the start.
            job.state.offset, job.state.segment, job.state.step = 0, -1, -1
            job.state.artifacts = {}
            run = self.client.create_run(
                experiment,
                start_time=round(1000 * job.ledger.started),
                run_name=job.settings.get("run_name") or readable(job.run.name),
                tags={
                    "rlox.run_id": job.ledger.run_id,
                    "rlox.run_dir": _cut(readable(job.run), MAX_TAG),
                    "rlox.version": rlox.__version__,
                },
            )
        elif run.info.status != "RUNNING":
            self.client.update_run(run.info.run_id, status="RUNNING")
        self.id = job.state.remote_id = run.info.run_id
        if mirror.uri.startswith("http"):
            server = masked(mirror.uri.rstrip("/"))
            job.state.url = f"{server}/#/experiments/{experiment}/runs/{self.id}?{MODEL_TRAINING}"
        self._params(job, run.data.params)
        # A resume may have changed the settings.
        if job.settings.get("artifacts", True) and job.state.artifacts.get("config") != job.ledger.segment:
            self.client.log_artifact(self.id, str(job.run / "config.yaml"))
            job.state.artifacts["config"] = job.ledger.segment

    def _find(self, job: Job, experiment: str) -> Any:
        if isinstance(self.client, mlflow_sqlite.SqliteStore):
            return self.client.find_run(experiment, job.ledger.run_id)
        runs = self.client.search_runs([experiment], f"tags.`rlox.run_id` = '{job.ledger.run_id}'", max_results=1)
        return runs[0] if runs else None

    def _params(self, job: Job, present: Mapping[str, str]) -> None:
        params = dict(_flat(job.config))
        new = [self.param(key, value) for key, value in params.items() if key not in present]
        for i in range(0, len(new), PARAMS_PER_BATCH):
            self.client.log_batch(self.id, params=new[i : i + PARAMS_PER_BATCH])
        changed = {k: [present[k], v] for k, v in params.items() if present.get(k, v) != v}
        if changed:
            # MLflow's params cannot be changed, but a resume may change a setting (for example total_timesteps).
            self.client.set_tag(self.id, "rlox.config_changed", _cut(json.dumps(changed), MAX_TAG))

    def send(self, rows: list[dict[str, Any]]) -> None:
        batch = []
        for row in rows:
            step, timestamp = row["step"], round(1000 * row["time"])
            for key, value in row.items():
                if value is None or key in ("segment", "step", "time"):
                    continue
                name = self._names.get(key)
                if name is None:
                    name = self._names[key] = _name(key)
                batch.append(self.metric(name, value, timestamp, step))
        for i in range(0, len(batch), METRICS_PER_BATCH):
            self.client.log_batch(self.id, metrics=batch[i : i + METRICS_PER_BATCH])

    def upload(self, kind: str, path: Path) -> None:
        if kind in ("last", "best"):
            self.client.log_artifact(self.id, str(path), "checkpoints")
            return
        self.client.log_artifact(self.id, str(path))
        if kind != "completions":
            return
        # MLflow's pages show a file with this tag as a table.
        self.client.set_tag(self.id, "mlflow.loggedArtifacts", f'[{{"path": "{path.name}", "type": "table"}}]')

    def finish(self, status: str, message: str, ended: float) -> None:
        if message:
            self.client.set_tag(self.id, "rlox.message", _cut(message, MAX_TAG))
        self.client.set_terminated(self.id, STATUS[status], end_time=round(1000 * ended))


def _tune_sqlite() -> None:
    """Let readers (`mlflow ui`) and the writer work without waiting for each other; commit without a full sync.

    A power failure cannot break the file, but may undo its last commits: after deleting
    ``mirrors/mlflow.json``, `rlox sync` sends the whole record again. WAL requires all users of the file
    to be on one machine.
    """
    from sqlalchemy import Engine, event

    @event.listens_for(Engine, "connect")
    def _on_connect(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for pragma in mlflow_sqlite.PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

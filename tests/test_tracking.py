"""The record and its mirrors, against real stores: MLflow on SQLite, W&B offline, event files, CSV tables."""

import csv
import errno
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec

import numpy as np
import pytest
import record_mlflow_schema
import yaml
from tracker_files import wandb_history, wandb_rows

from rlox import tracking
from rlox.checkpoint import decode_value, locks
from rlox.tracking import (
    Record,
    durable_rows,
    is_alive,
    mirrors,
    mlflow_sqlite,
    read_rows,
    start_mirrors,
    status,
    sync,
    wait,
)
from rlox.tracking import store as stores
from rlox.tracking.record import FILE, LOCK
from rlox.tracking.writer import Job, Logger, drain

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason='pip install "rlox-cli[tensorboard]"')
needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason='pip install "rlox-cli[mlflow]"')
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason='pip install "rlox-cli[wandb]"')


# --- the record --------------------------------------------------------------------------------------------------


def rows_of(run):
    return [row for row, _ in read_rows(run / FILE)]


def metric_rows(run):
    return [row for row in rows_of(run) if "event" not in row]


def test_record_round_trip(tmp_path):
    run = tmp_path / "run"
    with Record(run, versions={"rlox": "0"}, changed={"algo.rho_bar": [float("inf"), 1.0]}) as record:
        assert is_alive(run)
        record.metrics(1, {"episode/return": np.float32(21.5), "n": 3}, time=12.3456)
        record.metrics(1, {"loss/policy": float("nan"), "x": float("inf")})
        record.checkpoint(1, "last", "checkpoints/last.safetensors")
        record.end(2, "finished")
    assert not is_alive(run)
    start, first, second, checkpoint, end = rows_of(run)
    assert start["event"] == "start"
    assert start["run_id"] == record.run_id
    assert start["versions"] == {"rlox": "0"}
    assert decode_value(start["changed"]) == {"algo.rho_bar": [float("inf"), 1.0]}
    assert first == {"segment": 0, "step": 1, "time": 12.346, "episode/return": 21.5, "n": 3.0}
    assert second["loss/policy"] is None
    assert second["x"] is None
    assert (checkpoint["kind"], checkpoint["file"]) == ("last", "checkpoints/last.safetensors")
    assert (end["status"], end["step"]) == ("finished", 2)
    for line in (run / FILE).read_text().splitlines():  # strict JSON without NaN and Infinity
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("name", ["segment", "step", "time", "event", ""])
def test_reserved_metric_names(tmp_path, name):
    with Record(tmp_path) as record:
        with pytest.raises(ValueError, match="rename the metric"):
            record.metrics(0, {name: 1.0})
        with pytest.raises(TypeError, match="loss must be a number"):
            record.metrics(0, {"loss": "low"})


def test_step_does_not_go_back(tmp_path):
    with Record(tmp_path, resume_step=5) as record:
        with pytest.raises(ValueError, match="got 4 after 5"):
            record.metrics(4, {"a": 1.0})
        record.metrics(5, {"a": 1.0})


def test_torn_line_is_dropped(tmp_path):
    with Record(tmp_path) as record:
        record.metrics(1, {"a": 1.0})
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"segment":0,"step":2,"ti')
    assert [row["step"] for row in metric_rows(tmp_path)] == [1]
    with Record(tmp_path, resume_step=1) as again:
        again.metrics(2, {"a": 2.0})
    assert (again.run_id, again.segment) == (record.run_id, 1)
    assert [(r["segment"], r["step"]) for r in metric_rows(tmp_path)] == [(0, 1), (1, 2)]


def test_malformed_line_is_named(tmp_path):
    with Record(tmp_path) as record:
        record.metrics(1, {"a": 1.0})
    with open(tmp_path / FILE, "ab") as file:
        file.write(b"not json\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 3 must be one JSON object, got 'not json'"):
        rows_of(tmp_path)


def test_second_trainer_is_refused(tmp_path):
    with Record(tmp_path), pytest.raises(RuntimeError, match=rf"{tmp_path} held by process {os.getpid()}"):
        Record(tmp_path)
    Record(tmp_path).close()


def test_an_exception_of_verify_does_not_change_the_record(tmp_path):
    with Record(tmp_path) as record:
        record.metrics(1, {"a": 1.0})
    before = (tmp_path / FILE).read_bytes()

    def verify():
        assert is_alive(tmp_path)
        raise RuntimeError("replaced meanwhile")

    with pytest.raises(RuntimeError, match="replaced meanwhile"):
        Record(tmp_path, resume_step=0, verify=verify)
    assert (tmp_path / FILE).read_bytes() == before
    assert not is_alive(tmp_path)


def test_forked_worker_does_not_keep_the_run_alive(tmp_path):
    record = Record(tmp_path)
    stop, hold = os.pipe()
    forked, note = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        os.write(note, b"!")
        os.read(stop, 1)
        os._exit(0)
    os.read(forked, 1)
    record.close()
    assert not is_alive(tmp_path)
    os.close(hold)
    os.waitpid(child, 0)
    for descriptor in (stop, forked, note):
        os.close(descriptor)


def test_full_disk_is_an_error_and_leaves_no_torn_row(tmp_path):
    code = """
        import resource, sys
        from rlox.tracking import Record
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        record = Record(sys.argv[1])
        try:
            for step in range(1000):
                record.metrics(step, {"a": step})
        except OSError as error:
            print(error)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert "must have room" in out
    assert str(tmp_path / FILE) in out
    assert (tmp_path / FILE).read_bytes().endswith(b"}\n")
    steps = [row["step"] for row in metric_rows(tmp_path)]
    assert len(steps) > 20
    assert steps == list(range(len(steps)))


def write(record, steps, value=0.0):
    for step in steps:
        record.metrics(step, {"a": value + step})


def test_only_checkpointed_rows_are_durable(tmp_path):
    with Record(tmp_path) as record:
        write(record, range(1, 4))
        assert durable_rows(tmp_path) == []
        record.checkpoint(3, "last", "l")
        write(record, [3, 4, 5])
        assert [row["step"] for row in durable_rows(tmp_path)] == [1, 2, 3, 3]
        record.checkpoint(5, "best", "b")
        assert len(durable_rows(tmp_path)) == 4
        record.end(5, "failed", "loss is not finite")
        assert len(durable_rows(tmp_path)) == 4
    with Record(tmp_path, resume_step=3) as record:
        assert len(durable_rows(tmp_path)) == 4
        write(record, [4], value=100.0)
        record.end(4, "interrupted")
    assert [row["a"] for row in durable_rows(tmp_path)] == [1.0, 2.0, 3.0, 3.0, 104.0]


def test_mirrored_stream_is_monotone_over_rewinds(tmp_path):
    for segment, (resumed, last) in enumerate([(None, 10), (6, 9), (2, 12), (12, 14)]):
        with Record(tmp_path, resume_step=resumed) as record:
            write(record, range((resumed or 0) + (segment != 3), last + 1), value=100.0 * segment)
    with Record(tmp_path, resume_step=14) as record:
        record.end(14, "finished")
    rows = durable_rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 15))
    # Segment 2 went back to step 2; the row at 12 is from segment 2, not the repetition in segment 3.
    assert [row["segment"] for row in rows] == [0] * 2 + [2] * 10 + [3] * 2


# --- mirrors: helpers --------------------------------------------------------------------------------------------


def mlflow_settings(folder, **changes):
    return {
        "tracking_uri": f"sqlite:///{folder}/mlflow.db",
        "experiment": "rlox",
        "run_name": None,
        "artifacts": True,
        **changes,
    }


def wandb_settings(**changes):
    return {
        "project": "rlox",
        "entity": None,
        "mode": "offline",
        "run_name": None,
        "group": None,
        "tags": ["t"],
        "artifacts": True,
        **changes,
    }


def make_run(folder, name, loggers, **config):
    run = folder / name
    run.mkdir(parents=True)
    (run / "checkpoints").mkdir()
    config = {"seed": 0, "env": {"id": "CartPole-v1"}, "logger": loggers, **config}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def checkpoint(record, step, kind="last"):
    file = f"checkpoints/{kind}.safetensors"
    (record.folder / f"{file}.new").write_bytes(os.urandom(3000))
    os.replace(record.folder / f"{file}.new", record.folder / file)
    record.checkpoint(step, kind, file)


def query(folder, sql, *values):
    with sqlite3.connect(folder / "mlflow.db") as connection:
        return connection.execute(sql, values).fetchall()


def expected(run):
    """The expected contents of a mirror: (name, step, time in ms, value) of every durable row, sorted."""
    return sorted(
        (key, row["step"], round(1000 * row["time"]), value)
        for row in durable_rows(run)
        for key, value in row.items()
        if key not in ("segment", "step", "time") and value is not None
    )


def mirrored(folder, report):
    found = query(folder, "select key, step, timestamp, value from metrics where run_uuid = ?", report.remote_id)
    return sorted(found)


def mlflow_status(folder, report):
    return query(folder, "select status from runs where run_uuid = ?", report.remote_id)[0][0]


def tags(folder, report):
    return dict(query(folder, "select key, value from tags where run_uuid = ?", report.remote_id))


@pytest.fixture(scope="module")
def db(tmp_path_factory):
    """A shared folder with one MLflow database, since creating its tables takes seconds."""
    return tmp_path_factory.mktemp("store")


def finished(run, timeout=60):
    """Wait for the only mirror of the run and return its report."""
    (report,) = wait([run], timeout)[run].values()
    return report


# --- mirrors: MLflow ---------------------------------------------------------------------------------------------


@needs_mlflow
def test_mlflow_equals_the_record(db):
    long = "x" * 7000
    run = make_run(db, "exact", {"mlflow": mlflow_settings(db)}, note=long, empty=None, sizes=[64, 64])
    record = Record(run)
    begin = time.process_time()  # CPU time, whatever else the machine does: importing MLflow alone takes seconds of it
    assert start_mirrors(run) == ["mlflow"]
    assert time.process_time() - begin < 0.5
    rng = random.Random(0)
    for step in range(0, 3000, 10):
        record.metrics(step, {f"g/m {k}": rng.gauss(0, 10.0**k) for k in range(-3, 4)})
        record.metrics(step, {"nan": float("nan"), "odd(name)": 1.0 / (step + 3)})
    checkpoint(record, 2990)
    checkpoint(record, 2990, "best")
    record.end(2990, "finished")
    record.close()
    seen = []
    report = wait([run], 60, seen.append)[run]["mlflow"]
    assert report.state == "complete", report
    assert seen[-1].mirrored <= report.mirrored == report.total
    assert mirrored(db, report) == sorted((k.replace("(", "_").replace(")", "_"), *rest) for k, *rest in expected(run))
    assert mlflow_status(db, report) == "FINISHED"
    assert tags(db, report).items() >= {
        "rlox.run_id": record.run_id, "rlox.run_dir": str(run), "mlflow.runName": "exact",
    }.items()  # fmt: skip
    params = dict(query(db, "select key, value from params where run_uuid = ?", report.remote_id))
    assert params["env.id"] == "CartPole-v1"
    assert params["seed"] == "0"
    assert params["empty"] == "null"
    assert params["sizes"] == "[64, 64]"
    assert len(params["note"]) == 6000
    artifacts = db / "mlartifacts" / report.remote_id / "artifacts"
    for name in ("checkpoints/last.safetensors", "checkpoints/best.safetensors", "config.yaml"):
        assert (artifacts / name).read_bytes() == (run / name).read_bytes()
    assert query(db, "pragma journal_mode") == [("wal",)]
    assert status(run) == sync(run) == {"mlflow": report}  # nothing left to do
    assert not any((run / "mirrors").glob("*.upload"))


@pytest.mark.slow
@needs_mlflow
def test_the_stored_schema_equals_that_of_the_installed_mlflow():
    """For the version in `constraints.txt`; other versions use MLflow's client."""

    def statements(text):
        # MLflow writes the constraints of a table in varying order.
        parts = text.partition("\n")[2].split(";\n")  # without the line with the version
        return [sorted(line.strip().rstrip(",") for line in part.splitlines()) for part in parts]

    assert mlflow_sqlite.read_revision() == mlflow_sqlite.revision()
    assert statements(record_mlflow_schema.schema()) == statements(mlflow_sqlite.SCHEMA.read_text())


ROWS = {
    "alembic_version": "*",
    "workspaces": "*",
    "experiments": "experiment_id, name, lifecycle_stage, workspace",
    "experiment_tags": "*",
    "runs": "name, source_type, source_name, entry_point_name, user_id, status, start_time, end_time, source_version, "
    "lifecycle_stage, experiment_id, deleted_time",
    "metrics": "key, value, timestamp, step, is_nan",
    "latest_metrics": "key, value, timestamp, step, is_nan",
    "params": "key, value",
    "tags": "key, value",
}


@needs_mlflow
@pytest.mark.parametrize("alive", [True, False])
def test_an_empty_record_is_waited_for_while_its_trainer_lives_and_then_an_error(tmp_path, alive):
    run = make_run(tmp_path, "run", {"mlflow": mlflow_settings(tmp_path)})
    (run / "mirrors").mkdir()
    (run / FILE).touch()
    held = locks.take_lock(run, LOCK)
    if not alive:
        held.release()
    answer, state = Job(run, "mlflow").round(Logger("mlflow")), stores.read_state(run, "mlflow")
    if alive:
        held.release()
        assert (answer, state.error, state.remote_id) == ("idle", None, None)
    else:
        assert answer == "done"
        assert state.remote_id is None
        assert f"{run / FILE} must begin with a start row" in state.error


@pytest.mark.slow
@needs_mlflow
def test_the_light_store_writes_the_same_rows_as_mlflow(tmp_path, monkeypatch):
    run = make_run(tmp_path, "run", {"mlflow": mlflow_settings(tmp_path)}, gamma=0.99)
    (run / "mirrors").mkdir()
    with Record(run) as record:
        for step in range(5):
            record.metrics(step, {"loss": 1.0 / (step + 1), "odd(name)": 2.0 * step})
        checkpoint(record, 4)
        record.end(4, "failed", "a message")

    def mirrored_to(database, serves):
        monkeypatch.setattr(mlflow_sqlite, "serves", serves)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["logger"]["mlflow"]["tracking_uri"] = f"sqlite:///{database}"
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / stores.MIRRORS / "mlflow.json").unlink(missing_ok=True)
        logger = Logger("mlflow")
        assert Job(run, "mlflow").round(logger) == "done"
        client = type(logger.mirror({}).client).__name__
        # Once more from the start, as if the state file had been lost: nothing is duplicated.
        (run / stores.MIRRORS / "mlflow.json").unlink()
        assert Job(run, "mlflow").round(logger) == "done"
        mirror, state = logger.mirror({}), stores.read_state(run, "mlflow")
        values = [(math.nan, 0), (math.inf, 1), (-math.inf, 2), (1.5, 2), (0.5, 2), (1.5, 2)]
        mirror.client.log_batch(state.remote_id, metrics=[mirror.metric("edge", value, 7, at) for value, at in values])
        mirror.client.log_batch(state.remote_id, metrics=[mirror.metric("edge", 9.0, 6, 2)])
        with sqlite3.connect(database) as connection:
            rows = {
                table: sorted(connection.execute(f"SELECT {columns} FROM {table}").fetchall(), key=repr)
                for table, columns in ROWS.items()
            }
            ((run_id, uri),) = connection.execute("SELECT run_uuid, artifact_uri FROM runs").fetchall()
        folder = database.parent / "mlartifacts" / run_id / "artifacts"
        assert uri == folder.as_uri()
        kept = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
        params = [row for row in rows["params"] if "tracking_uri" not in row[0]]
        return client, {**rows, "params": params}, kept

    (tmp_path / "light").mkdir()
    light = mirrored_to(tmp_path / "light" / "mlflow.db", mlflow_sqlite.serves)
    (tmp_path / "theirs").mkdir()
    theirs = mirrored_to(tmp_path / "theirs" / "mlflow.db", lambda database: False)
    assert (light[0], theirs[0]) == ("SqliteStore", "MlflowClient")
    assert light[1:] == theirs[1:]
    assert len(light[1]["metrics"]) == 10 + 6
    # MLflow reads the rows of the light store, and the light store continues a run that MLflow created.
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'light' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("rlox").experiment_id])
    assert [m.value for m in client.get_metric_history(found.info.run_id, "loss")] == [1.0 / n for n in range(1, 6)]
    monkeypatch.undo()
    assert mlflow_sqlite.serves(tmp_path / "theirs" / "mlflow.db")


@needs_mlflow
def test_other_schema_revisions_use_mlflows_client(tmp_path, monkeypatch):
    database = tmp_path / "mlflow.db"
    assert mlflow_sqlite.serves(database)  # it does not exist
    mlflow_sqlite.create(database)
    assert mlflow_sqlite.serves(database)
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'older'")
    assert not mlflow_sqlite.serves(database)
    database.write_bytes(b"no database" * 100)
    assert not mlflow_sqlite.serves(database)
    database.unlink()
    monkeypatch.setattr(mlflow_sqlite, "read_revision", lambda: "newer")
    assert not mlflow_sqlite.serves(database)


@pytest.mark.slow
@needs_mlflow
def test_killed_writers_lose_and_repeat_nothing(db):
    run = make_run(db, "killed", {"mlflow": mlflow_settings(db)})
    rng, offset = random.Random(1), 0
    with Record(run) as record:  # stays open, so that no writer can finish before it is killed
        for attempt in range(4):
            for step in range(400 * attempt, 400 * (attempt + 1)):
                record.metrics(step, {f"m{k}": random.random() for k in range(10)})
            record.checkpoint(step, "last", "checkpoints/last.safetensors")  # rows before it may be mirrored
            start_mirrors(run)
            writer = mirrors._children[-1]
            deadline = time.monotonic() + 30
            while stores.read_state(run, "mlflow").offset <= offset and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(0.1 * rng.random())
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            assert stores.read_state(run, "mlflow").offset > offset, attempt
            assert not status(run)["mlflow"].complete
            offset = stores.read_state(run, "mlflow").offset
            if attempt == 1:  # the state is lost too: the run is found by its tag and sent again from the start
                (run / stores.MIRRORS / "mlflow.json").unlink()
                offset = 0
        record.end(step, "finished")
    report = sync(run)["mlflow"]
    assert report.complete, report
    assert mirrored(db, report) == expected(run)
    assert len(query(db, "select 1 from tags where key = 'rlox.run_id' and value = ?", record.run_id)) == 1


TRAINER = """
    import sys, time
    from pathlib import Path
    from rlox.tracking import Record, start_mirrors
    run = Path(sys.argv[1])
    with Record(run) as record:
        start_mirrors(run)
        for step in range(1, 201):
            record.metrics(step, {"a": step / 3, "b": -step})
            time.sleep(0.005)
        (run / "checkpoints" / "last.safetensors").write_bytes(b"weights")
        record.checkpoint(200, "last", "checkpoints/last.safetensors")
        if "die" in sys.argv:
            record.metrics(250, {"a": 1.0})
            time.sleep(60)
        record.end(200, "interrupted")
    assert not {"mlflow", "wandb", "torch", "numpy"} & set(sys.modules)
"""


def trainer(run, *arguments):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(TRAINER), str(run), *arguments])


@pytest.mark.slow
@needs_mlflow
def test_four_trainers_on_a_new_database(tmp_path):
    runs = [make_run(tmp_path, f"run{i}", {"mlflow": mlflow_settings(tmp_path)}) for i in range(4)]
    processes = [trainer(run) for run in runs]
    assert [process.wait() for process in processes] == [0] * 4
    reports = wait(runs, 60)
    for run in runs:
        report = reports[run]["mlflow"]
        assert report.complete, report
        assert mirrored(tmp_path, report) == expected(run)
        assert len(expected(run)) == 400
        assert mlflow_status(tmp_path, report) == "KILLED"
    assert query(tmp_path, "select count(*) from runs") == [(4,)]


@pytest.mark.slow
@needs_mlflow
def test_killed_trainer_and_its_resume(db):
    run = make_run(db, "died", {"mlflow": mlflow_settings(db)}, total_timesteps=200)
    process = trainer(run, "die")
    deadline = time.monotonic() + 30
    while not (run / FILE).exists() or '"step":250' not in (run / FILE).read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    report = finished(run)
    assert report.state == "died", report
    assert mlflow_status(db, report) == "KILLED"
    assert max(step for _, step, *_ in mirrored(db, report)) == 200
    assert mirrored(db, report) == expected(run)

    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "total_timesteps": 300}))
    with Record(run, resume_step=200) as record:
        start_mirrors(run)
        write(record, range(201, 301), value=0.5)
        checkpoint(record, 250)
        live = sync(run)["mlflow"]
        assert live.state == "live"
        assert max(step for _, step, *_ in mirrored(db, live)) == 250
        assert mlflow_status(db, live) == "RUNNING"
        record.end(300, "failed", "out of memory")
    again = finished(run)
    assert again.complete
    assert again.remote_id == report.remote_id
    assert mirrored(db, again) == expected(run)
    assert max(step for _, step, *_ in mirrored(db, again)) == 250
    assert mlflow_status(db, again) == "FAILED"
    assert tags(db, again)["rlox.message"] == "out of memory"
    assert json.loads(tags(db, again)["rlox.config_changed"]) == {"total_timesteps": ["200", "300"]}
    stored = db / "mlartifacts" / again.remote_id / "artifacts" / "config.yaml"
    assert stored.read_bytes() == (run / "config.yaml").read_bytes()


@needs_mlflow
def test_broken_run_does_not_block_the_store(db):
    runs = [make_run(db, f"broken{i}", {"mlflow": mlflow_settings(db)}) for i in range(4)]
    for run in runs:
        with Record(run) as record:
            write(record, range(1, 5))
            record.end(4, "finished")
    with open(runs[0] / FILE, "ab") as file:
        file.write(b"{}\n")
    (runs[1] / "config.yaml").write_text("logger: {}\n")
    store = tracking.logger_class("mlflow").store(mlflow_settings(db), runs[0])
    for run in runs:
        (run / "mirrors").mkdir()
        stores.register(store, run)
    os.rename(runs[2], db / "elsewhere")
    assert sync(runs[3])["mlflow"].complete
    corrupt = finished(runs[0])
    assert corrupt.state == "failed"
    assert "line 7 must have whole numbers >= 0 as segment and step" in corrupt.error
    assert "must have logger.mlflow" in stores.read_state(runs[1], "mlflow").error
    assert stores.list_pending_runs(store) == {}


@pytest.mark.slow
@needs_mlflow
def test_dead_server(tmp_path, db, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = mlflow_settings(tmp_path, tracking_uri="http://127.0.0.1:9")
    run = make_run(tmp_path, "run", {"mlflow": settings})
    with Record(run) as record:
        start_mirrors(run)
        deadline = time.monotonic() + 30
        while stores.read_state(run, "mlflow").error is None and time.monotonic() < deadline:
            record.metrics(record._step + 1, {"a": 1.0})
            time.sleep(0.01)
        assert status(run)["mlflow"].state == "failed"  # only for now: the writer continues to retry
        record.end(record._step, "finished")
    report = finished(run)
    assert report.state == "failed"
    assert f"rlox sync {run}" in report.error
    assert sync(run)["mlflow"].state == "failed"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["logger"]["mlflow"] = mlflow_settings(db)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    report = sync(run)["mlflow"]
    assert report.complete
    assert mirrored(db, report) == expected(run)


# --- mirrors: Weights & Biases -----------------------------------------------------------------------------------


@pytest.mark.slow
@needs_wandb
def test_wandb_offline_holds_the_record(tmp_path):
    run = make_run(tmp_path, "run", {"wandb": wandb_settings()})
    with Record(run) as record:
        start_mirrors(run)
        for step in range(0, 2000, 10):
            record.metrics(step, {"loss/policy": step / 7, "nan": float("nan")}, time=1000.0 + step)
        checkpoint(record, 1990)
        deadline = time.monotonic() + 30
        while stores.read_state(run, "wandb").step < 1990 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(mirrors._children[-1].pid, signal.SIGKILL)
        mirrors._children[-1].wait()
        write(record, [2000])
        record.end(2000, "failed", "why")
    report = sync(run)["wandb"]
    assert report.complete, report
    assert report.remote_id == record.run_id
    history, records = wandb_history(run)
    assert [(h["_step"], h["loss/policy"], h["_timestamp"]) for h in history] == [
        (row["step"], row["loss/policy"], row["time"]) for row in durable_rows(run)
    ]
    assert len(history) == 200
    assert not any("nan" in h for h in history)
    kinds = {r.WhichOneof("record_type") for r in records}
    assert {"run", "history", "exit"} <= kinds
    assert next(r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit") == 1
    config = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert {u.key: json.loads(u.value_json) for u in config.config.update}["env"] == {"id": "CartPole-v1"}
    logged = [r.request.log_artifact.artifact for r in records if r.request.HasField("log_artifact")] + [
        r.artifact for r in records if r.WhichOneof("record_type") == "artifact"
    ]
    assert {a.name for a in logged} == {f"checkpoint-last-{record.run_id}", f"config-{record.run_id}"}


@pytest.mark.slow
@needs_wandb
def test_wandb_offline_rows_that_were_not_uploaded_stay_after_resumes(tmp_path):
    run = make_run(tmp_path, "run", {"wandb": wandb_settings()})

    def segment(first, last):
        with Record(run, resume_step=first - 1 if first else None) as record:
            write(record, range(first, last + 1))
            checkpoint(record, last)
            record.end(last, "finished")
        assert sync(run)["wandb"].complete
        files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        rows = [wandb_rows(path)[0] for path in files]
        assert not any("segment" in row for part in rows for row in part)
        return files, [[row["_step"] for row in part] for part in rows]

    (first,), steps = segment(0, 3)
    assert steps == [[0, 1, 2, 3]]
    first.with_name(f"{first.name}.synced").touch()  # as `wandb sync` does
    assert segment(4, 6)[1] == [[0, 1, 2, 3], [4, 5, 6]]
    assert segment(7, 9)[1] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]


@pytest.mark.slow
@needs_wandb
def test_wandb_online_without_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc, no ~/.config/wandb
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = make_run(tmp_path, "run", {"wandb": wandb_settings(mode="online")})
    with Record(run) as record:
        start_mirrors(run)
        write(record, range(3))
        report = finished(run, timeout=20)
        assert report.state == "failed"
        assert "wandb login, or logger.wandb.mode=offline, then rlox sync" in report.error
        record.end(3, "finished")


# --- mirrors: TensorBoard ----------------------------------------------------------------------------------------


def tensorboard_scalars(folder):
    """The scalars as TensorBoard reads them: (tag, step, time, value), sorted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return sorted(
        (tag, event.step, event.wall_time, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ), events


def expected_scalars(run):
    return [(name, step, ms / 1000, pytest.approx(value, rel=1e-6)) for name, step, ms, value in expected(run)]


@pytest.mark.slow
@needs_tensorboard
def test_tensorboard_holds_the_record_whatever_was_killed(tmp_path):
    run = make_run(tmp_path, "run", {"tensorboard": {"folder": "events"}})
    (run / "events").mkdir()
    (run / "events" / "events.out.tfevents.1.someone.else").touch()
    with Record(run) as record:
        start_mirrors(run)
        for step in range(0, 3000, 10):
            record.metrics(step, {"loss/policy": step / 7, "nan": float("nan")}, time=1000.0 + step)
            record.metrics(step, {"eval/mean_return": -float(step)}, time=1000.5 + step)
        checkpoint(record, 2990)
        deadline = time.monotonic() + 30
        while stores.read_state(run, "tensorboard").step < 2990 and time.monotonic() < deadline:
            time.sleep(0.02)
        live, _ = tensorboard_scalars(run / "events")  # a running TensorBoard sees the durable rows
        assert live == expected_scalars(run)
        os.kill(mirrors._children[-1].pid, signal.SIGKILL)
        mirrors._children[-1].wait()
        write(record, [3000])
        record.end(3000, "finished")
    report = sync(run)["tensorboard"]
    assert report.complete, report
    assert report.url == str(run / "events")
    found, events = tensorboard_scalars(run / "events")
    assert found == expected_scalars(run)
    assert len(found) == 601
    assert len(list((run / "events").glob("events.out.tfevents.*.rlox"))) == 1
    assert (run / "events" / "events.out.tfevents.1.someone.else").exists()
    assert (
        events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].startswith(b"    env:\n      id: CartPole")
    )
    assert events.Tensors("status/text_summary")[0].tensor_proto.string_val[0] == b"    finished"


@needs_tensorboard
def test_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path):
    run = make_run(tmp_path, "run", {"tensorboard": {}})
    with Record(run) as record:
        write(record, [1])
        record.end(1, "finished")
    code = """
        import sys
        from pathlib import Path
        from rlox.tracking import logger_class, writer, store
        run = Path(sys.argv[1])
        place = logger_class("tensorboard").store({}, run)
        (run / "mirrors").mkdir()
        store.register(place, run)
        writer.drain("tensorboard", place)
        print([m for m in ("torch", "tensorflow") if m in sys.modules])
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(run)], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr
    assert status(run)["tensorboard"].complete


# --- mirrors: CSV ------------------------------------------------------------------------------------------------


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def cells(run):
    """The expected cells of the table: (name, step, value), with None for empty cells."""
    return sorted((name, step, value) for name, step, _, value in expected(run))


def test_csv_holds_the_record(tmp_path):
    run = make_run(tmp_path, "run", {"csv": {"file": "tables/all.csv"}})
    rng = random.Random(3)
    with Record(run) as record:
        start_mirrors(run)
        for step in range(0, 1000, 10):
            record.metrics(step, {"loss/policy": rng.gauss(0, 1e-9), "loss/x,y": float("nan") if step % 20 else 1e300})
            if step % 100 == 0:
                record.metrics(step, {"eval/mean_return": rng.random()})
        checkpoint(record, 990)
        write(record, [1000])
        record.end(1000, "finished")
    report = finished(run)
    assert report.complete, report
    rows = table(run / "tables" / "all.csv")
    assert [int(row["step"]) for row in rows] == list(range(0, 1001, 10))
    assert list(rows[0]) == ["step", "time", "a", "eval/mean_return", "loss/policy", "loss/x,y"]
    found = sorted(
        (name, int(row["step"]), float(value))
        for row in rows
        for name, value in row.items()
        if name not in ("step", "time") and value != ""
    )
    assert found == cells(run)  # to the last bit
    assert rows[1]["loss/x,y"] == rows[1]["eval/mean_return"] == ""
    assert [path.name for path in (run / "tables").iterdir()] == ["all.csv"]


def test_csv_of_a_live_run_grows_and_is_always_complete(tmp_path, monkeypatch):
    from rlox.tracking import csv as module
    from rlox.tracking.writer import Job, Logger

    run = make_run(tmp_path, "run", {"csv": {"file": "metrics.csv"}})
    (run / "mirrors").mkdir()
    with Record(run) as record:
        write(record, range(10))
        checkpoint(record, 9)
        job, logger = Job(run, "csv"), Logger("csv")
        job.round(logger)
        assert not (run / "metrics.csv").exists()  # at most once a minute while the run is alive
        monkeypatch.setattr(module.time, "monotonic", lambda: clock() + 61.0)
        record.metrics(10, {"new": 1.0})
        checkpoint(record, 10)
        job.round(logger)
        assert len(table(run / "metrics.csv")) == 11
        first = (run / "metrics.csv").read_bytes()
        record.metrics(11, {"a": 1.0})
        checkpoint(record, 11)
        job.round(logger)
        assert (run / "metrics.csv").read_bytes() == first
    # After a kill and a resume from an older checkpoint, rows of the lost steps are gone.
    with Record(run, resume_step=5) as record:
        write(record, [6, 7], value=100.0)
        record.end(7, "finished")
    assert sync(run)["csv"].complete
    assert [float(row["a"]) for row in table(run / "metrics.csv")] == [0, 1, 2, 3, 4, 5, 106, 107]


clock = time.monotonic


def test_several_mirrors_of_one_run(tmp_path):
    run = make_run(tmp_path, "run", {"csv": {}, "tensorboard": {}, "wandb": None})
    with Record(run) as record:
        assert start_mirrors(run) == ["csv", "tensorboard"]
        write(record, range(5))
        record.end(4, "finished")
    reports = wait([run], 60)[run]
    assert {name: report.state for name, report in reports.items()} == {"csv": "complete", "tensorboard": "complete"}
    assert len(table(run / "metrics.csv")) == 5


# --- errors -----------------------------------------------------------------------------------------------------


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(ValueError, match=r"must be a run folder with metrics\.jsonl"):
        start_mirrors(tmp_path)
    Record(tmp_path).close()
    with pytest.raises(ValueError, match=r"with config.yaml"):
        sync(tmp_path)


def test_unknown_logger_and_relative_database(tmp_path):
    run = make_run(tmp_path, "run", {"comet": {}})
    Record(run).close()
    with pytest.warns(RuntimeWarning, match="comet is not filled: .* one of csv, mlflow, .*, wandb, got 'comet'"):
        start_mirrors(run)
    run = make_run(
        tmp_path, "other", {"mlflow": mlflow_settings(tmp_path, tracking_uri="sqlite:///x.db"), "wandb": None}
    )
    Record(run).close()
    with pytest.warns(RuntimeWarning, match="absolute path"):
        start_mirrors(run)


def test_a_mirror_that_cannot_be_started_is_an_error_of_its_own(tmp_path):
    (tmp_path / "mlflow.db.rlox").write_text("where the store's folder should be")
    run = make_run(tmp_path, "run", {"mlflow": mlflow_settings(tmp_path), "comet": {}, "csv": {}})
    with Record(run) as record:
        with pytest.warns(RuntimeWarning, match="is not filled: ") as warned:
            assert start_mirrors(run) == ["comet", "csv", "mlflow"]
        assert [str(one.message).partition(" ")[0] for one in warned] == ["comet", "mlflow"]
        write(record, range(5))
        record.end(4, "finished")
    for reports in (status(run), wait([run], 60)[run], sync(run)):
        assert {name: reports[name].state for name in ("mlflow", "comet")} == {"mlflow": "failed", "comet": "failed"}
        assert "mlflow.db.rlox" in reports["mlflow"].error
        assert f"rlox sync {run}" in reports["mlflow"].error
        assert "got 'comet'" in reports["comet"].error
    assert reports["csv"].complete
    assert len(table(run / "metrics.csv")) == 5


def test_a_run_whose_state_cannot_be_written_does_not_block_the_store(tmp_path, monkeypatch, capfd):
    runs = [make_run(tmp_path, name, {"csv": {}}) for name in ("file", "unreadable", "whole")]
    store = tmp_path / "store"
    for run in runs:
        with Record(run) as record:
            write(record, range(3))
            record.end(2, "finished")
        stores.register(store, run)
    (runs[0] / "mirrors").write_text("where the folder should be")
    read_state = stores.read_state

    def read(run, name):
        if run == runs[1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_state(run, name)

    monkeypatch.setattr(stores, "read_state", read)
    drain("csv", store)
    assert stores.list_pending_runs(store) == {}
    assert status(runs[2])["csv"].complete
    assert "must be a folder, got a file" in capfd.readouterr().err


def test_run_without_loggers(tmp_path):
    run = make_run(tmp_path, "run", None)
    Record(run).close()
    assert start_mirrors(run) == []
    assert sync(run) == status(run) == {}
    assert wait([run], 1) == {}
    assert (run / LOCK).exists()

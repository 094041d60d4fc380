"""``rlox ui``: MLflow's server for the runs made here."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlox.config import MlflowConfig
from rlox.config.base import masked
from rlox.config.sqlite import is_sqlite, sqlalchemy_uri, sqlite_file
from rlox.tracking.mlflow import MODEL_TRAINING
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import Stopped, UsageError

_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_POLL_S = 0.2
_GRACE_S = 5.0  # for the server's processes to end by themselves
_HERE = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach a server of this machine


def default_store() -> Path:
    """Return the SQLite store of runs that name none. Raises a UsageError if MLFLOW_TRACKING_URI is a server."""
    uri = MlflowConfig().in_effect
    if not is_sqlite(uri):
        raise UsageError(
            f"--store must name a database; the runs are at MLFLOW_TRACKING_URI={masked(uri)}, so open that page"
        )
    return sqlite_file(uri)


def serve(store: Path, port: int, args: list[str]) -> None:
    """Run MLflow's server on the SQLite `store` until it is stopped; all of its processes end with this one.

    Raises
    ------
    Stopped
        After Ctrl-C, SIGTERM or SIGHUP.
    """
    if not store.is_file():
        raise ValueError(f"no MLflow database {store}; train with logger=mlflow first, or name it with --store")
    with store.open("rb") as file:
        if file.read(16) not in (b"SQLite format 3\0", b""):
            raise ValueError(f"--store must be a database of MLflow (SQLite), got {store}")
    if find_spec("mlflow") is None:
        raise UsageError('mlflow must be installed to show its page, but is not; pip install "rlox-cli[mlflow]"')
    host = _host(args)
    _require_free(host, port)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", sqlalchemy_uri(store.absolute())]
    command += ["--default-artifact-root", str(store.absolute().parent / "mlartifacts"), "--port", str(port)]
    # For one user: by default MLflow starts four workers, and eight processes for jobs that only language models need.
    command += ["--workers", "1", *args]
    # The safe path keeps a user's random.py in the working folder out of the server's imports.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONSAFEPATH": "1", **os.environ}

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in _ENDING}
    # The server gets its own process group, to end it as a whole: its workers are not our children.
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        url = f"http://{host}:{port}"
        while server.poll() is None and not _answers(url):
            time.sleep(_POLL_S)
        if server.poll() is None:
            print_text(f"{_page(url)} (Ctrl-C stops it)", stderr=True)
        code = server.wait()
        raise RuntimeError(f"mlflow server ended with exit code {code}; see its output above")
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        _end(server)
        for number, handler in before.items():
            signal.signal(number, handler)


def _host(args: list[str]) -> str:
    """Return the address in the server's own options, as a browser on this machine reaches it."""
    found = "127.0.0.1"
    for word, following in pairwise([*args, ""]):
        if word in ("--host", "-h"):
            found = following
        elif word.startswith("--host="):
            found = word.partition("=")[2]
    return "127.0.0.1" if found in ("", "0.0.0.0", "localhost") else found


def _require_free(host: str, port: int) -> None:
    with socket.socket() as listener:
        # So that the address of a server that was just stopped counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                return  # the server reports what is wrong with its address
            raise UsageError(
                f"--port {port} must be free, but another program listens on it; try --port {port + 1}"
            ) from e


def _answers(url: str) -> bool:
    try:
        with _HERE.open(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def _page(url: str) -> str:
    """Return the address of the runs if there is one experiment, else that of the experiments.

    Without the query, newer versions of MLflow show them as runs of language models, whatever the experiment's tag is.
    """
    query = urllib.parse.urlencode({"max_results": 10})
    try:
        with _HERE.open(f"{url}/api/2.0/mlflow/experiments/search?{query}", timeout=30) as answer:
            known = json.load(answer).get("experiments", [])
    except (OSError, ValueError):
        known = []
    ids = [
        item["experiment_id"] for item in known if item["experiment_id"] != "0"
    ]  # 0 is MLflow's default experiment, which is empty
    runs = f"/{ids[0]}/runs" if len(ids) == 1 else ""
    return f"{url}/#/experiments{runs}?{MODEL_TRAINING}"


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server's whole process group: with SIGTERM, and after a while with SIGKILL."""
    if os.name == "nt":  # where a process can only be ended at once
        server.terminate()
        server.wait()
        return
    deadline = time.monotonic() + _GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            # Wait until the group is empty; the server itself must be reaped.
            while server.poll() is None or time.monotonic() < deadline:
                os.killpg(server.pid, 0)
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_S / 4)
        except ProcessLookupError:
            break
    server.wait()

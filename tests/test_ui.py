"""`rlox ui` with MLflow's real server, and what the end of a run prints about its trackers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import forked
import pytest

from rlox_cli.report.ui import _answers, _page

pytestmark = pytest.mark.slow

RLOX = [sys.executable, "-m", "rlox_cli.main"]
SMALL = ["algo=ppo", "env=CartPole-v1", "total_timesteps=512", "eval.n_points=0", "eval.n_episodes=1"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run in MLflow and, offline, in W&B, with what the command printed."""
    cwd = tmp_path_factory.mktemp("ui")
    words = [*SMALL, "logger=[mlflow,wandb]", "logger.wandb.mode=offline", "hydra.run.dir=run"]
    done = forked.run("train", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd, done.stdout


@pytest.fixture
def port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def members(group: int) -> list[int]:
    """Processes of a session without zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[3]) == group:
            found.append(int(entry.parent.name))
    return found


def test_the_end_of_a_run_names_the_folder_of_wandb(logged):
    cwd, output = logged
    folder = re.search(r"^  wandb +(\S+)$", output, re.MULTILINE)[1]
    assert folder.startswith("run/wandb/offline-run-")
    assert list((cwd / folder).glob("*.wandb"))
    assert f"  upload       wandb sync {folder}\n" in output


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (signal.SIGHUP, signal.SIGTERM))]
)
def test_the_server_ends_with_the_command(logged, port, number, tmp_path):
    cwd, _ = logged
    with open(tmp_path / "log", "w+") as output:
        process = subprocess.Popen(
            [*RLOX, "ui", "--port", str(port)], cwd=cwd, stderr=output, stdout=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 240
            url = None
            while url is None and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                url = re.search(r"^(http\S+) \(Ctrl-C stops it\)$", Path(output.name).read_text(), re.MULTILINE)
            assert url is not None, Path(output.name).read_text()
            # It answers at once, and shows the runs as model training.
            assert url[1] == f"http://127.0.0.1:{port}/#/experiments/1/runs?workflowType=machine_learning"
            api = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get?experiment_id=1"
            with urllib.request.urlopen(api, timeout=60) as answer:
                tags = json.load(answer)["experiment"]["tags"]
            assert {"key": "mlflow.experimentKind", "value": "custom_model_development"} in tags
            second = forked.run("ui", "--port", port, cwd=cwd)
            assert second.returncode == 2
            assert second.stderr == (
                f"rlox ui: --port {port} must be free, but another program listens on it; try --port {port + 1}\n"
            )
            (server,) = [int(one) for one in _children(process.pid)]
            assert len(members(server)) >= 2
            process.send_signal(number)
            assert process.wait(timeout=60) == 128 + number
            assert members(server) == []
        finally:
            if process.poll() is None:
                process.kill()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_does_not_answer_yet_ends_with_the_command(logged, port, number):
    process = forked.Rlox("ui", "--port", port, cwd=logged[0])
    try:
        deadline = time.monotonic() + 60
        while not (found := _children(process.pid)) or _cpu_s(int(found[0])) < 0.3:  # CPU seconds, of about ten
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert members(int(found[0])) == []
    finally:
        process.kill()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_server_that_cannot_start_is_an_error(logged, port):
    cwd, _ = logged
    words = ["ui", "--port", str(port), "--no-such-option"]
    done = forked.run(*words, cwd=cwd)
    assert done.returncode == 1
    assert "rlox ui: mlflow server ended with exit code 2" in done.stderr
    assert "Ctrl-C" not in done.stderr


class Healthy(BaseHTTPRequestHandler):
    """MLflow's server, with one experiment."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"experiments": [{"experiment_id": "7"}]}')

    def log_message(self, *_):
        pass


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert _answers(url)
        assert "#/experiments/7/runs?" in _page(url)
        server.shutdown()

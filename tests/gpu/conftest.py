"""Runs these tests on a GPU; without one, on the pretended GPU of `pretend_cuda`.

``pytest tests/gpu --gpu-report FILE`` also writes versions, the GPU and every test's result as JSON.

The pretended GPU changes PyTorch for the rest of a process. So the tests of each file run in a process of their own, a
second pytest, and the tests here report its results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Set to 1, the pretended GPU is installed in this process: `RLOX_PRETEND_CUDA=1 pytest tests/gpu --pdb`.
PRETEND = "RLOX_PRETEND_CUDA"
_REPORTS = "RLOX_PRETEND_CUDA_REPORTS"  # the descriptor to which the second pytest writes its reports

if os.environ.get(PRETEND):
    import pretend_cuda

    pretend_cuda.install()

HAS_GPU = torch.cuda.is_available()


class SecondPytest:
    """A pytest with the pretended GPU that runs the given tests.

    Parameters
    ----------
    ids : list of str
        The tests, by node id.
    root : Path
        Folder that the ids are relative to.
    """

    def __init__(self, ids: list[str], root: Path):
        reading, writing = os.pipe()
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", *ids]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            words,
            cwd=root,
            env={**environment, PRETEND: "1", _REPORTS: str(writing), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
        )
        os.close(writing)
        self._lines = os.fdopen(reading)
        self._reports: dict[str, list[dict[str, str]]] = {}

    def reports(self, node: str) -> list[dict[str, str]]:
        """Return the reports of a test, of its setup, call and teardown; waits for the last one."""
        while not any(report["when"] == "teardown" for report in self._reports.get(node, [])):
            line = self._lines.readline()
            if not line:
                self._process.wait()
                self._output.seek(0)
                output = self._output.read().decode(errors="replace")
                pytest.fail(f"the process with the pretended GPU ended without a report of {node}:\n{output}", False)
            report = json.loads(line)
            self._reports.setdefault(report["node"], []).append(report)
        return self._reports[node]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._output.close()


_processes: dict[Path, SecondPytest] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, metavar="FILE", help="write versions and results as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu-report", None) is not None:
        config.pluginmanager.register(Results(config.getoption("--gpu-report")))


class Results:
    """Collects the results of all tests, and writes them to `path`."""

    def __init__(self, path: Path):
        self._path = path
        self._tests: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(float(test["seconds"]) + report.duration, 2)
        if report.outcome != "passed":
            text = report.longrepr[2] if report.outcome == "skipped" else report.longreprtext.splitlines()[-1]
            test |= {"outcome": report.outcome, "reason": text.removeprefix("Skipped: ")}

    def pytest_sessionfinish(self) -> None:
        from rlox.checkpoint import versions
        from rlox_cli.bench.machine import provenance

        counts = Counter(str(test["outcome"]) for test in self._tests.values())
        result = {
            **provenance("pytest tests/gpu --gpu-report FILE"),
            "gpu": torch.cuda.get_device_name() if HAS_GPU else "none: pretended, with numbers of the CPU",
            "versions": versions("cuda" if HAS_GPU else "cpu"),
            "counts": dict(sorted(counts.items())),
            "tests": dict(sorted(self._tests.items())),
        }
        self._path.write_text(json.dumps(result, indent=1) + "\n")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("slow")
            # A capture that fails would go on without a graph, with the same results.
            item.add_marker(pytest.mark.filterwarnings("error:.*continuing without"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if HAS_GPU:
        return None
    path = pyfuncitem.path
    if path not in _processes:
        ids = [item.nodeid for item in pyfuncitem.session.items if item.path == path]
        _processes[path] = SecondPytest(ids, pyfuncitem.config.rootpath)
    reports = _processes[path].reports(pyfuncitem.nodeid)
    for report in reports:
        if report["outcome"] == "failed":
            pytest.fail(f"on the pretended GPU:\n{report['text']}", pytrace=False)
        if report["outcome"] == "skipped":
            pytest.skip(report["text"])
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _REPORTS in os.environ:
        text = report.longrepr[2] if report.outcome == "skipped" else report.longreprtext
        line = {"node": report.nodeid, "when": report.when, "outcome": report.outcome, "text": text}
        os.write(int(os.environ[_REPORTS]), (json.dumps(line) + "\n").encode())


def pytest_sessionfinish() -> None:
    for process in _processes.values():
        process.close()


@pytest.fixture
def pretended() -> None:
    """Skips the test on a real GPU."""
    if HAS_GPU and not os.environ.get(PRETEND):
        pytest.skip("needs the pretended GPU")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Leave the CPU to the other tests: small networks are not faster with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

import os
import signal
import sys
from pathlib import Path

import pytest

from rlox.envs.registry import worker_imports

# `import probes` from any test, whatever the import mode.
sys.path.insert(0, str(Path(__file__).parent))

# Here and in every process a test starts: OpenMP threads that spin while another process wants the core make a test ten
# times slower. What is said of threads is tested by setting them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where Python is to write no bytecode, each of the many starts would compile all that it imports, PyTorch above
# all, whose modules `pip install --no-compile` has left as they are. So the bytecode goes to a folder of the tests.
if sys.dont_write_bytecode:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    sys.dont_write_bytecode = False

# No test needs a download; one that looks for what is not there would try again and again without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that runs the tests in the background has Ctrl-C ignored, and so would be every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config):
    """One worker more than there are cores for ``-n auto``: many tests wait, for a process, a port or a timeout."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, config.option.maxprocesses or cores + 1)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """What is exhaustive is slow, and left out by `-m "not slow"`; so is the contract of a world model."""
    for item in items:
        of_a_world = item.path.name == "test_contract.py" and "[dreamer" in item.name
        if of_a_world or item.get_closest_marker("exhaustive"):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _own_worker_imports():
    """What one test's --import named is unknown to the next one's workers."""
    before = [*worker_imports]
    yield
    worker_imports[:] = before


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """The command in this process, since a start of Python for each would take minutes."""
    from rlox_cli.main import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*args: str) -> tuple[int, str, str]:
        code = app(list(args), prog_name="rlox", standalone_mode=False)
        return code, *capfd.readouterr()

    return run

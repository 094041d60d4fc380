import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from rlox.envs.registry import worker_imports

# Lets any test `import probes`, whatever the import mode.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "helpers")]

# For this process and all that tests start: OpenMP threads that spin while another process needs the core make a test
# ten times slower. Tests about threads set their number themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# If Python must not write bytecode, each of the many starts would compile all imported modules, above all those of
# PyTorch after `pip install --no-compile`. So the bytecode is written to a folder of the tests.
if sys.dont_write_bytecode:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    sys.dont_write_bytecode = False

# No test needs a download; without a network, a test that looks for a missing model would retry many times.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that runs the tests in the background ignores Ctrl-C, and all processes of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist, nobody calls it
def pytest_xdist_auto_num_workers(config):
    """For ``-n auto``, use one worker more than cores: many tests wait for a process, a port or a timeout."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, config.option.maxprocesses or cores + 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage while a million objects that stay are imported, later less often, and none of these."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark exhaustive tests and the contract of a world model as slow, so that `-m "not slow"` leaves them out."""
    for item in items:
        of_a_world = item.path.name == "test_contract.py" and "[dreamer" in item.name
        if of_a_world or item.get_closest_marker("exhaustive"):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _own_worker_imports():
    """Forget the modules of --import after each test, so that workers of later tests do not import them."""
    before = [*worker_imports]
    yield
    worker_imports[:] = before


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, since starting Python each time would take minutes."""
    import forked

    from rlox_cli.families import estimate
    from rlox_cli.main import commands

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # A command hands a typed password to its trackers in this variable.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI", ""))
    for name, seconds in forked.BRIEF.items():
        monkeypatch.setattr(estimate, name, seconds)

    def run(*args: str) -> tuple[int, str, str]:
        code = commands()(list(args), prog_name="rlox", standalone_mode=False)
        return code, *capfd.readouterr()

    return run

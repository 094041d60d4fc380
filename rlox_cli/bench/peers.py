"""Find the interpreters of other systems, and run programs with them.

The programs are in benchmarks/peers and benchmarks/llm of a checkout. They import nothing from rlox_cli, which a peer's
interpreter does not have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlox.checkpoint import one_line
from rlox_cli.terminal.errors import UsageError

SYSTEMS = ("rlox", "original", "numpy", "gymnasium", "sb3", "torchrl")  # of `rlox bench data`
_THREADS = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS")
# Prints which systems an interpreter has. The original differs from this rlox in the name of its distribution.
_PROBE = """
import json
from importlib.util import find_spec
from importlib.metadata import PackageNotFoundError, version
modules = {"sb3": "stable_baselines3", "torchrl": "torchrl", "gymnasium": "gymnasium", "trl": "trl"}
found = [system for system, module in modules.items() if find_spec(module)]
try:
    version("rlox")
    found.append("original")
except PackageNotFoundError:
    pass
print(json.dumps(found))
"""


def program(name: str, folder: str = "peers") -> Path:
    """Return the program of that name in a folder of benchmarks/.

    Raises
    ------
    UsageError
        If rlox does not run from a checkout.
    """
    path = Path(__file__).resolve().parents[2] / "benchmarks" / folder / name
    if not path.is_file():
        raise UsageError(
            "`rlox bench data`, `rlox bench train` and --peer-python must run from a checkout of rlox, got a package "
            f"without benchmarks/{folder}/{name}; clone the repository, and run there: pip install -e ."
        )
    return path


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a measured process."""
    return {**os.environ, **dict.fromkeys(_THREADS, str(threads))}


def find_systems(peer_pythons: Iterable[Path], wanted: Iterable[str] = SYSTEMS) -> dict[str, str]:
    """Return the interpreter for each of the systems `wanted`: the first that has it, beginning with this one."""
    interpreters = {"rlox": sys.executable, "numpy": sys.executable}
    for python in (sys.executable, *map(str, peer_pythons)):
        if os.sep in python:
            python = os.path.abspath(os.path.expanduser(python))  # programs run in another folder
        try:
            done = subprocess.run(
                [python, "-c", _PROBE], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
            )
            systems = json.loads(done.stdout) if not done.returncode else None
        except json.JSONDecodeError:
            systems = None
        except (OSError, ValueError, subprocess.TimeoutExpired) as e:
            raise UsageError(f"--peer-python must be a Python interpreter, got {python}: {one_line(e, 100)}") from e
        if not isinstance(systems, list):
            answer = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
            raise UsageError(f"--peer-python must be a Python interpreter, got {python}: {one_line(answer[-1], 100)}")
        for system in systems:
            interpreters.setdefault(system, python)
    return {system: interpreters[system] for system in wanted if system in interpreters}


def ask_worker(python: str, request: dict[str, Any], threads: int, worker: Path | None = None) -> dict[str, Any]:
    """Run `worker`, by default ``trainings.py``, in its own process, and return its answer.

    Raises
    ------
    RuntimeError
        If the process fails, with the last line of its error output.
    """
    # Not in the working directory: in a checkout, ./rlox would come before the original's package.
    done = subprocess.run(
        [python, worker or program("trainings.py"), json.dumps(request)],
        env=environment(threads),
        cwd="/",
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])

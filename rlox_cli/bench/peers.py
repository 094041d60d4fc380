"""Programs that run under a peer's interpreter: which interpreter has which system, and what a program answers.

The programs lie in benchmarks/peers and benchmarks/llm of a checkout. They import nothing of rlox_cli, which a peer's
interpreter lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlox_cli.terminal.errors import UsageError

SYSTEMS = ("rlox", "original", "numpy", "gymnasium", "sb3", "torchrl")  # of `rlox bench data`
_THREADS = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS")
# Prints which systems an interpreter has; the original differs from this rlox by its distribution's name.
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
    """The program of that name in a folder of benchmarks/.

    Raises
    ------
    UsageError
        Where rlox does not run from a checkout.
    """
    path = Path(__file__).resolve().parents[2] / "benchmarks" / folder / name
    if not path.is_file():
        raise UsageError(
            "`rlox bench data`, `rlox bench train` and --peer-python must run from a checkout of rlox, got a package "
            f"without benchmarks/{folder}/{name}; clone the repository, and there: pip install -e ."
        )
    return path


def environment(threads: int) -> dict[str, str]:
    """Of a measured process."""
    return {**os.environ, **dict.fromkeys(_THREADS, str(threads))}


def find_systems(peer_pythons: Iterable[Path], wanted: Iterable[str] = SYSTEMS) -> dict[str, str]:
    """Which interpreter serves each of the systems `wanted`: this one, then those named; the first that has it."""
    found = {"rlox": sys.executable, "numpy": sys.executable}
    for python in (sys.executable, *map(str, peer_pythons)):
        try:
            done = subprocess.run([python, "-c", _PROBE], cwd="/", capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise UsageError(f"--peer-python must be a Python interpreter, got {python}: {e}") from e
        if done.returncode:
            raise UsageError(f"--peer-python must be a Python interpreter, got {python}: {done.stderr[-200:]}")
        for system in json.loads(done.stdout):
            found.setdefault(system, python)
    return {system: found[system] for system in wanted if system in found}


def ask_worker(python: str, request: dict[str, Any], threads: int, worker: Path | None = None) -> dict[str, Any]:
    """What `worker`, by default ``trainings.py``, answers in a process of its own.

    Raises
    ------
    RuntimeError
        If that process fails; its last line of error.
    """
    # Not from the working directory: in a checkout, ./rlox would stand before the original's package.
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

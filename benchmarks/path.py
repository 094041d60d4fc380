"""Count the Python functions and files of rlox that a training passes, and the lines that define PPO.

usage: path.py [CASE …] [--list] [--out FILE]

Each case runs in a process of its own, and is watched by ``sys.setprofile`` in all its threads. Functions and methods
of `rlox` and `rlox_cli` are counted once each. Modules, bodies of classes, lambdas, comprehensions and generator
expressions are left out, and so is what the import of a module calls. `--list` prints the functions by file, in the
order of their first call.

    cli      rlox train algo=ppo env=CartPole-v1 total_timesteps=2048 logger=none tuned=off
    ppo      PPO("CartPole-v1", backend="torch").train(2048)
    sac      SAC("Pendulum-v1").train(2048)
    reading  the files that one reads to understand PPO: those of algorithms, training, collectors and nn of which the
             case ppo executes at least 20 lines; counts all their lines
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(str(ROOT / name) + os.sep for name in ("rlox", "rlox_cli"))
TO_READ = tuple(str(ROOT / "rlox" / name) + os.sep for name in ("algorithms", "training", "collectors", "nn"))
LEAST_LINES = 20  # executed, in a file that one reads
FUNCTION = 0x01  # CO_OPTIMIZED: the local variables of functions are slots, those of classes and modules a dict


def run_cli() -> None:
    from rlox_cli.start import main

    sys.argv = ["rlox", "train", "algo=ppo", "env=CartPole-v1", "total_timesteps=2048", "logger=none", "tuned=off"]
    main()


def run_ppo() -> None:
    import rlox

    rlox.PPO("CartPole-v1", backend="torch").train(2048)


def run_sac() -> None:
    import rlox

    rlox.SAC("Pendulum-v1").train(2048)


CASES = {"cli": run_cli, "ppo": run_ppo, "sac": run_sac, "reading": run_ppo}


def is_function(code) -> bool:
    return code.co_filename.startswith(PACKAGES) and code.co_flags & FUNCTION and not code.co_name.startswith("<")


def is_importing(frame) -> bool:
    """Return whether a module of rlox is being imported."""
    while frame := frame.f_back:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGES):
            return True
    return False


def run(case: str) -> None:
    try:
        CASES[case]()
    except SystemExit as end:
        if end.code:
            raise


def list_functions(case: str) -> dict[str, list[str]]:
    """Run a case in this process, and return the functions that it passed, by file."""
    codes = {}

    def record(frame, event, argument):
        code = frame.f_code
        if event == "call" and code not in codes and is_function(code) and not is_importing(frame):
            codes[code] = True

    threading.setprofile(record)
    sys.setprofile(record)
    run(case)
    sys.setprofile(None)
    functions: dict[str, list[str]] = {}
    for code in codes:
        name = f"{getattr(code, 'co_qualname', code.co_name)}:{code.co_firstlineno}"
        functions.setdefault(os.path.relpath(code.co_filename, ROOT), []).append(name)
    return functions


def count_lines(case: str) -> dict[str, int]:
    """Run a case in this process, and return the numbers of lines of the files that one reads."""
    executed: dict[str, set[int]] = {}

    def enter(frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(TO_READ) or not is_function(code) or is_importing(frame):
            return None
        lines = executed.setdefault(code.co_filename, set())

        def record(frame, event, argument):
            lines.add(frame.f_lineno)
            return record

        return record

    sys.settrace(enter)
    run(case)
    sys.settrace(None)
    files = [path for path, lines in executed.items() if len(lines) >= LEAST_LINES]
    return {os.path.relpath(path, ROOT): Path(path).read_text().count("\n") for path in files}


def measure(case: str) -> dict:
    """Run a case in a process in an empty folder, and return each file's functions (``reading``: number of lines)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts.json")
        command = [sys.executable, __file__, case, "--in-this-process", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{case} ended with code {result.returncode}:\n{result.stdout}{result.stderr}")
        return json.loads(out.read_text())


def count(case: str, files: dict) -> tuple[int, int]:
    """Return the number of functions (or of lines) and that of files."""
    return sum(files.values() if case == "reading" else map(len, files.values())), len(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--list", action="store_true", help="print the functions by file")
    parser.add_argument("--out", type=Path, help="write the functions and lines to this JSON file")
    parser.add_argument("--in-this-process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        (case,) = options.cases
        files = count_lines(case) if case == "reading" else list_functions(case)
        options.in_this_process.write_text(json.dumps(files))
        return
    results = {}
    for case in options.cases or CASES:
        results[case] = files = measure(case)
        n, n_files = count(case, files)
        print(f"{case}: {n} {'lines' if case == 'reading' else 'functions'} in {n_files} files", flush=True)
        for path, entry in files.items() if options.list else ():
            print(f"    {path}", *([entry] if case == "reading" else [f"\n        {name}" for name in entry]))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

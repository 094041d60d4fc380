"""Without what Windows lacks, rlox is imported whole, and its commands work; nothing else in its code needs that."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import like_windows
import pytest

from rlox_cli.bench import train
from rlox_cli.terminal.errors import UsageError

ROOT = Path(__file__).parent.parent
LACKING = {module.__name__: {*names.split()} for module, names in like_windows.OTHERS.items()}
PATHS = re.compile(r"/(dev|proc|sys|tmp|usr|etc|var)\b")
# What the code uses although Windows lacks it, and what keeps Windows from it.
GUARDED = {
    # Children: `Child` refuses to start one there.
    "rlox/distributed/processes.py": {"select.poll"},
    "rlox/processes/child.py": {
        *("/proc", "/proc/self/cmdline", "/proc/self/task", "os.killpg", "os.setpgrp"),
        *("signal.SIGKILL", "signal.SIG_UNBLOCK", "signal.pthread_sigmask"),
    },
    "rlox/processes/parent.py": {"os.killpg", "signal.SIGKILL", "signal.SIG_SETMASK", "signal.pthread_sigmask"},
    # hasattr, AttributeError or ImportError, with another way beside it.
    "rlox/checkpoint/locks.py": {"fcntl", "os.pwrite"},
    "rlox/evaluation/evaluator.py": {"/sys/fs/cgroup/cpu.max", "os.sched_getaffinity"},
    "rlox/processes/memory.py": {"os.memfd_create"},
    "rlox/tracking/record.py": {"os.register_at_fork"},
    "rlox/tracking/writer.py": {"os.nice"},
    "rlox_cli/families/estimate.py": {"/proc/self/status", "resource"},
    "rlox_cli/families/limits.py": {"/proc/", "/proc/meminfo", "/proc/self/task", "/sys/fs/cgroup", "os.sysconf"},
    "rlox_cli/records/ledger.py": {"os.register_at_fork"},
    "rlox_cli/report/machine.py": {"/proc/cpuinfo", "os.sched_getaffinity", "os.sysconf"},
    "rlox_cli/terminal/signals.py": {"os.register_at_fork"},
    # os.name is asked before.
    "rlox/checkpoint/file.py": {"/dev/fd/"},
    "rlox_cli/report/ui.py": {"os.killpg", "signal.SIGKILL"},
    # A file that is missing says nothing.
    "rlox/checkpoint/header.py": {"/proc/driver/nvidia/version"},
}


def uses(code: str) -> Iterator[str]:
    """Names of what Windows lacks in a program, and in the programs that it holds as text."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in like_windows.MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from ([node.module] if node.module in like_windows.MODULES else [])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            is_signal = owner == "signal" and name.startswith("SIG") and name != "SIG_BLOCK"
            if name in LACKING.get(owner, ()) or (is_signal and name not in like_windows.SIGNALS):
                yield f"{owner}.{name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if PATHS.match(node.value):
                yield node.value
            elif "import " in node.value:
                try:
                    yield from uses(node.value)
                except SyntaxError:
                    continue  # no program


@pytest.mark.slow
def test_nothing_needs_what_windows_lacks(tmp_path):
    program = Path(__file__).parent / "helpers" / "like_windows.py"
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert failed == [], done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("done")


def test_every_use_of_what_windows_lacks_is_guarded():
    files = [path for package in ("rlox", "rlox_cli") for path in sorted((ROOT / package).rglob("*.py"))]
    used = {path.relative_to(ROOT).as_posix(): {*uses(path.read_text("utf-8"))} for path in files}
    assert {path: names for path, names in used.items() if names} == GUARDED


def test_a_use_in_a_program_within_a_program_is_seen():
    assert [*uses("CODE = 'import os, resource\\nos.fork()'\nlog = open('/tmp/log')")] == [
        "resource",
        "os.fork",
        "/tmp/log",
    ]


def test_windows_does_not_run_cases_that_count_the_time_of_children(monkeypatch):
    monkeypatch.setattr(train.sys, "platform", "win32")
    with pytest.raises(UsageError, match=r"rlox bench train process: .* needs Linux or macOS, got Windows"):
        train.main(["ppo", "process"], [], 1, [], None)

"""Workers (`rlox worker`) on this machine, for as long as a measurement takes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def workers(env: str, n: int, *words: str) -> Iterator[list[str]]:
    """Start `n` workers with the environment and yield their addresses; `words` are keys of the environment."""
    command = [sys.executable, "-m", "rlox", "worker", "--env", env, "--port", "0", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(n)]
    try:
        yield [_address(process) for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.communicate(timeout=60)


def _address(process: subprocess.Popen) -> str:
    if process.stdout is None:
        raise ValueError("workers: the worker's stdout must be a pipe")
    output = ""
    for line in process.stdout:
        output += line
        for word in line.split():
            host, _, port = word.partition(":")
            if host == "127.0.0.1" and port.isdecimal():
                return word
    raise RuntimeError(f"workers: a worker must print its address, got {output!r}")

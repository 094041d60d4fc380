"""Advisory file locks (flock): held by one process, and released by the kernel however that process ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rlox.checkpoint import run_files


def _flock(descriptor: int, shared: bool) -> bool:
    try:
        import fcntl
    except ImportError as e:
        raise ImportError(
            "rlox.tracking: the platform must have fcntl (Linux, macOS), got one without it; use WSL on Windows"
        ) from e
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def acquire(path: Path, patience: float = 0.25) -> int | None:
    """Take the lock on `path` and return the descriptor that holds it, or None if another process has it.

    A probe (`is_held`) holds the lock for microseconds; waiting for `patience` seconds outlasts it.
    """
    descriptor = run_files.open_descriptor(path.parent, path.name, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + patience
    try:
        while not _flock(descriptor, shared=False):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(0.02)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """Return whether a living process holds the lock on `path`."""
    try:
        descriptor = run_files.open_descriptor(path.parent, path.name)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, shared=True)
    finally:
        os.close(descriptor)

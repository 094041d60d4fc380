"""Locks on files of a run folder, which the operating system releases however their process ends.

With ``flock`` (Linux, macOS), which locks an open descriptor: links are not followed, and a folder that may only be
read can be probed. Where it does not exist (Windows), with the package filelock, which comes with PyTorch.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any, Protocol

from rlox.checkpoint import run_files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PROBE_S = 0.05  # longest time that another probe holds a lock of filelock
_MISSING = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system without locks


class Lock(Protocol):
    """A lock on a file, held until `release` or the end of this process."""

    def write(self, text: str) -> None:
        """Replace the contents of the locked file, for messages of other processes; see `describe_holder`."""

    def release(self) -> None:
        """Release the lock. In a forked child, it only closes the child's copy: the parent keeps the lock."""


class _Flock:
    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def write(self, text: str) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


class _LibraryLock:
    def __init__(self, lock: Any):
        self._lock = lock

    def write(self, text: str) -> None:
        """Do nothing: Windows lets no other process read a locked file."""

    def release(self) -> None:
        self._lock.release(force=True)


def take_lock(folder: str | os.PathLike, name: str, patience: float = 0.25) -> Lock | None:
    """Lock a file below `folder`, which is created; return None if another process has the lock.

    A probe (`is_locked`) holds it for microseconds; waiting for `patience` seconds outlasts it.

    Raises
    ------
    ValueError
        If a part of the file's path is a link or no folder, or it is no regular file.
    OSError
        If it cannot be opened, or its file system has no locks.
    """
    if fcntl is None:
        return _take_with_library(folder, name, patience)
    descriptor = run_files.open_descriptor(folder, name, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + patience
    try:
        while not _flock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(0.02)
    except BaseException as e:
        os.close(descriptor)
        if isinstance(e, OSError) and e.errno in _MISSING:
            raise OSError(
                e.errno,
                f"the file system must have locks, got {os.strerror(e.errno)!r}; mount it with them (Lustre: -o flock; "
                "NFS: with the lock service), or choose a folder on another",
                str(Path(folder, name)),
            ) from None
        raise
    return _Flock(descriptor)


def is_locked(folder: str | os.PathLike, name: str) -> bool:
    """Return whether a living process holds the lock on a file below `folder`; False if its file system has no locks,
    where `take_lock` gives none."""
    if fcntl is None:
        if not run_files.is_file(folder, name):
            return False
        lock = _take_with_library(folder, name, _PROBE_S)
        if lock is not None:
            lock.release()
        return lock is None
    try:
        descriptor = run_files.open_descriptor(folder, name)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH)  # shared: two probes do not see each other
    except OSError as e:
        if e.errno not in _MISSING:
            raise
        return False
    finally:
        os.close(descriptor)


def describe_holder(folder: str | os.PathLike, name: str) -> str:
    """Return ``process 123`` from what the holder of a lock has written, or ``another process``."""
    try:
        number = run_files.read_bytes(folder, name, 100).decode("utf-8", "replace").strip()
    except OSError:
        number = ""
    return f"process {number}" if number else "another process"


def _flock(descriptor: int, kind: int) -> bool:
    """Return whether the lock was taken, without waiting for it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take_with_library(folder: str | os.PathLike, name: str, patience: float) -> Lock | None:
    import filelock

    run_files.is_file(folder, name)  # raises if it is a link
    # Threads share it, as they share a descriptor.
    lock = filelock.FileLock(Path(folder, name), thread_local=False)
    try:
        lock.acquire(timeout=patience, poll_interval=0.01)
    except filelock.Timeout:
        return None
    return _LibraryLock(lock)

"""Locks of run folders, with ``flock`` and with the package that stands for it where it does not exist."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from rlox.checkpoint import locks
from rlox.tracking import Record, is_alive

HOLD = """
import sys
from rlox.checkpoint import locks
if sys.argv[1] == "library":
    locks.fcntl = None
lock = locks.take_lock(sys.argv[2], "run.lock")
print(lock is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["flock", "library"])
def way(request, monkeypatch):
    if request.param == "library":
        monkeypatch.setattr(locks, "fcntl", None)
    return request.param


def test_a_lock_is_held_by_one_until_it_is_released(way, tmp_path):
    assert not locks.is_locked(tmp_path, "run.lock")
    lock = locks.take_lock(tmp_path, "run.lock")
    assert locks.is_locked(tmp_path, "run.lock")
    assert locks.take_lock(tmp_path, "run.lock", 0.02) is None
    lock.release()
    assert not locks.is_locked(tmp_path, "run.lock")
    again = locks.take_lock(tmp_path, "run.lock")
    assert again is not None
    again.release()


@pytest.mark.slow
def test_a_killed_process_leaves_no_lock(way, tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, way, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "True\n"
        assert locks.is_locked(tmp_path, "run.lock")
        assert locks.take_lock(tmp_path, "run.lock", 0.02) is None
    finally:
        holder.kill()
        holder.communicate()
    lock = locks.take_lock(tmp_path, "run.lock")
    assert lock is not None
    lock.release()


def test_a_link_is_not_locked(way, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "run/run.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="got a symbolic link"):
        locks.take_lock(tmp_path / "run", "run.lock")
    with pytest.raises(ValueError, match="got a symbolic link"):
        locks.is_locked(tmp_path / "run", "run.lock")
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_second_trainer_is_refused(way, tmp_path):
    with Record(tmp_path) as record:
        assert is_alive(tmp_path)
        holder = f"process {os.getpid()}" if way == "flock" else "another process"
        with pytest.raises(RuntimeError, match=f"held by {holder}; wait for it"):
            Record(tmp_path)
        record.metrics(1, {"loss": 0.5})
    assert not is_alive(tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_can_be_read(number, tmp_path, monkeypatch):
    """Lustre without `-o flock`, or NFS without its lock service."""
    Record(tmp_path).close()

    def flock(descriptor, kind):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"the file system must have locks, got .*Lustre: -o flock") as caught:
        Record(tmp_path)
    assert caught.value.filename == str(tmp_path / "run.lock")
    assert not is_alive(tmp_path)

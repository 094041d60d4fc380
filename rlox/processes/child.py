"""How a child process of rlox begins and ends, together with the processes that its environments start."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlox.config import shown

# What a terminal sends when it closes, and clusters before a time limit: the command saves and ends, and with it its
# children, which may receive the signal too.
SAVE_AND_END = tuple(
    getattr(signal, name) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU") if hasattr(signal, name)
)
_LOOK_EVERY = 0.5  # seconds between two checks that the parent is alive


def begin_child(parent: int) -> None:
    """Prepare this process, a child of `parent`.

    It gets its own process group, which ends when `parent` ends for any reason. If its interpreter dies, for example of
    a segmentation fault, it prints which code was running.
    """
    faulthandler.enable(2)
    for number in SAVE_AND_END:
        signal.signal(number, signal.SIG_IGN)
    os.setpgrp()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    # This works even while an environment is busy, or a forked child of the parent has the other end of a socket open.
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os.killpg(0, signal.SIGKILL)


def kill_child(process: subprocess.Popen) -> int:
    """Kill a child, if it still runs, and the processes that its environments started. Return its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have called `begin_child` yet
    return process.wait()


def kill_forks() -> None:
    """Kill the children of this process that run the same program, such as those that an environment has forked."""
    with contextlib.suppress(OSError):  # only Linux has these files
        program = Path("/proc/self/cmdline").read_bytes()
        children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        for pid in children:
            with contextlib.suppress(OSError):
                if Path("/proc", pid, "cmdline").read_bytes() == program:
                    os.kill(int(pid), signal.SIGKILL)


def close_quietly(close: Callable[[], None]) -> None:
    """Call `close` at the end of a child. Print one line if that fails, since the parent no longer waits."""
    try:
        close()
    except BaseException as e:
        text = f"closing the environments of process {os.getpid()} failed with {type(e).__name__}: {shown(str(e))}"
        print(f"rlox: {text}", file=sys.stderr)

"""What runs in a child process: how it begins, answers its parent, and ends, with the processes that it started."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rlox.config import shown
from rlox.processes.channel import CREATE, FAILED, Channel, encode
from rlox.processes.failures import pack_exception

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


class Served(Protocol):
    """An object in a child process that answers its parent's messages."""

    def hello(self) -> Any:
        """Return what the parent must know at first."""

    def answer(self, kind: bytes, value: Any) -> Any:
        """Carry out a message and return the value of the answer, which has the same kind."""

    def close(self) -> None:
        """End."""


def serve(sock_fd: int, memory_fd: int, parent: int, module: str, name: str, *ignored: int) -> None:
    """Run a child process: create the object that `rlox.processes.parent.Child` names, and let it answer messages.

    It ends when the parent closes the socket. The parent gets all exceptions, also those that would end this process.
    """
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    begin_child(parent)
    channel, served = Channel(socket.socket(fileno=sock_fd)), None
    try:
        _, order = channel.receive()
        try:
            served = getattr(import_module(module), name)(memory_fd, *order)
            hello = encode(CREATE, served.hello())
        except BaseException as e:
            channel.sock.sendall(encode(FAILED, pack_exception(e)))
            channel.receive()  # until the parent has read this and closes
            return
        channel.sock.sendall(hello)
        while True:
            kind, value = channel.receive()
            try:
                answer = encode(kind, served.answer(kind, value))
            except BaseException as e:
                answer = encode(FAILED, pack_exception(e))
            channel.sock.sendall(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent no longer waits
    finally:
        if served is not None:
            close_quietly(served.close)

"""Child processes as their parent sees them: start, messages, death, end.

A child is a plain interpreter, which does not run the user's main module again. The memory and the sockets that it
shares with its parent have no names, so that nothing is left behind no matter how the processes end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlox.processes.channel import CREATE, Channel, encode
from rlox.processes.interpreter import python_command

_ALIVE_EVERY = 0.5  # seconds between two checks that the other processes are alive
LATE_AFTER = 60.0  # seconds without an answer after which a child is late
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "BLIS_NUM_THREADS")


class ChildDied(RuntimeError):
    """A child process ended without being asked to."""

    def __init__(self, child: Child):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(1.0)
        code = kill_child(child.process)
        self.child = child
        self.how = f"signal {-code}" if code < 0 else f"exit code {code}"
        # A clause on lack of memory, if the system may have killed it.
        self.hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        super().__init__(f"the process (pid {child.process.pid}) died ({self.how}{self.hint})")


class Child:
    """A child process, in which an object answers messages (see `rlox.processes.child.serve`).

    The class `served` is imported by its name and called with the descriptor of `memory`, a file of `open_nameless`
    that the child has open too, and with the items of `order`, which are pickled.
    """

    def __init__(
        self,
        served: type,
        memory: Any,
        order: Sequence[Any] = (),
        ignored: Sequence[int] = (signal.SIGINT,),  # from its first moment on
        one_thread: bool = True,  # of numeric libraries in the child
    ):
        if os.name == "nt":
            raise OSError("rlox: other processes need Linux or macOS, got Windows; use env.workers=0, threads, or WSL")
        ours, theirs = socket.socketpair()
        ours.settimeout(_ALIVE_EVERY)
        command = python_command(
            "rlox.processes.child", "serve", theirs.fileno(), memory.fileno(), os.getpid(),
            served.__module__, served.__name__, *map(int, ignored),
        )  # fmt: skip
        # Blocked signals stay blocked across exec, so they cannot hit the child before it ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory.fileno()),
                env={**os.environ, **dict.fromkeys(_ONE_THREAD if one_thread else (), "1")},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self.sock = ours
        self._channel = Channel(ours)
        self.send(CREATE, tuple(order))

    def send(self, kind: bytes, value: Any = None) -> None:
        """Send a message, even if the busy child takes long to read it. Its death is noticed when it must answer."""
        rest = memoryview(encode(kind, value))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while rest:
                try:
                    rest = rest[self.sock.send(rest) :]
                except TimeoutError:
                    if self.process.poll() is not None:
                        return

    def receive(
        self, siblings: Sequence[Child] = (), on_late: Callable[[Child], None] | None = None
    ) -> tuple[bytes, Any]:
        """Wait for the next message. Raises `ChildDied` if this child, or one of `siblings`, has died meanwhile.

        `on_late` is called once with this child if the message has not come within `LATE_AFTER` seconds.
        """
        started = time.monotonic()
        while (message := self._channel.take()) is None:
            try:
                self._channel.read()
            except TimeoutError:
                # A child process of a dead child may still have the socket open.
                for child in (self, *siblings):
                    if child.process.poll() is not None:
                        raise ChildDied(child) from None
                if time.monotonic() - started > LATE_AFTER and on_late is not None:
                    on_late(self)
                    on_late = None
            except EOFError:
                raise ChildDied(self) from None
        return message

    def peek(self) -> tuple[bytes, Any] | None:
        """Return the next message if it has arrived, else None. Raises `ChildDied` as `receive` does."""
        while (message := self._channel.take()) is None:
            self.sock.settimeout(0.0)
            try:
                self._channel.read()
            except BlockingIOError:
                return None
            except EOFError:
                raise ChildDied(self) from None
            finally:
                self.sock.settimeout(_ALIVE_EVERY)
        return message


def kill_child(process: subprocess.Popen) -> int:
    """Kill a child, if it still runs, and the processes that it started. Return its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have its own process group yet
    return process.wait()


def stop_children(children: list[Any], owner: int, within: float) -> None:
    """End the processes of `children`, kill those that are left after `within` seconds, and empty the list.

    Does nothing unless this process is their `owner`.
    """
    if os.getpid() != owner:
        return  # this is a forked child of the owner
    for child in children:
        # A child that reads end-of-file closes what it has and exits. Unlike close, shutdown also covers copies of the
        # socket in forked processes.
        with contextlib.suppress(OSError):
            child.sock.shutdown(socket.SHUT_RDWR)
        child.sock.close()
    deadline = time.monotonic() + within
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        kill_child(child.process)
    children.clear()

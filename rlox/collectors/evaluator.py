"""Evaluation in a separate process during training, with the same results as in this process.

The evaluation uses a copy of its arguments, made when it starts. The process is a plain interpreter that does not run
the user's main module again. It computes with the same number of threads, ignores Ctrl-C and SIGTERM, and ends when its
parent process ends for any reason.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlox.collectors.evaluation import Evaluation, evaluate, torch_threads, unchecked_distributions
from rlox.collectors.recurrent import RecurrentActor
from rlox.envs import foreign_id
from rlox.envs.parallel_env import packed, raise_packed, sendable, unpacked
from rlox.nn.modules import copied
from rlox.processes.child import begin_child, kill_child
from rlox.processes.interpreter import python_command

_ALIVE_EVERY = 0.5  # seconds between two checks that the other process is alive
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time, and the period that they apply to


def cores() -> int:
    """Return the number of cores that this process may use: its affinity, within a container's quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        found = min(found, int(quota) // int(period))  # "max" is not a number
    return max(1, found)


def make_job(arguments: dict[str, Any], threads: int, imports: Iterable[str] = ()) -> bytes:
    """Pickle a call of `evaluate` with `arguments`, with the policy in its present state.

    Parameters
    ----------
    arguments : dict
        Arguments of `evaluate`.
    threads : int
        PyTorch's CPU threads; 0: the same number as in this process.
    imports : iterable of str
        Modules to import first.

    Raises
    ------
    Exception
        From cloudpickle, if something cannot be pickled.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        threads = threads or torch.get_num_threads()
        if isinstance(arguments["policy"], (torch.nn.Module, RecurrentActor)):
            # Parameters may be views of one block, which a pickle would contain once for each of them.
            arguments = {**arguments, "policy": copied(arguments["policy"])}
    env_id = arguments["env_id"]
    if isinstance(env_id, str) and "gymnasium" in sys.modules:
        env_id = foreign_id(env_id)
    return pickle.dumps((threads, sendable(arguments, env_id, imports)))


def play(job: bytes) -> Evaluation:
    """Run a job of `make_job` in this process."""
    threads, sent = pickle.loads(job)
    arguments = unpacked(sent)
    by = arguments.pop("by", evaluate)  # for several agents, another function
    with torch_threads(threads), unchecked_distributions():
        return by(**arguments)


class WorkerDied(RuntimeError):
    """The process of an evaluation died without reporting an exception."""


class EvaluationWorker:
    """A process that runs one evaluation after another.

    Attributes
    ----------
    busy : bool
        Whether an evaluation is running, or its result has not been fetched.
    """

    def __init__(self) -> None:
        self.busy = False
        self._unread = bytearray()
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(_ALIVE_EVERY)
        command = python_command("rlox.collectors.evaluator", "work", theirs.fileno(), os.getpid())
        # Blocked signals stay blocked across exec, so they cannot hit a worker before it ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        # Also runs at interpreter exit.
        self._finalizer = weakref.finalize(self, _stop, self.process, self._sock, os.getpid())

    def begin(self, job: bytes) -> None:
        """Start `job`. Returns immediately, even if the process is still starting."""
        self.busy = True
        # Send the descriptor of a nameless file: sending the bytes would block until the process reads them.
        with tempfile.TemporaryFile() as file, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            file.write(job)
            file.flush()
            socket.send_fds(self._sock, [b"j"], [file.fileno()])

    def ready(self, wait: bool = False) -> bool:
        """Whether the result is available; with `wait`, block until it is.

        Raises
        ------
        WorkerDied
            If the process died.
        """
        while not self._whole():
            self._sock.settimeout(_ALIVE_EVERY if wait else 0.0)
            try:
                part = self._sock.recv(1 << 16)
            except TimeoutError:
                # A child process of a dead worker may still have the socket open.
                if self.process.poll() is not None:
                    raise self._died() from None
                continue
            except BlockingIOError:
                return False
            except ConnectionResetError:
                part = b""
            if not part:
                raise self._died()
            self._unread += part
        return True

    def _whole(self) -> bool:
        return len(self._unread) >= 8 and len(self._unread) - 8 >= struct.unpack_from("<Q", self._unread)[0]

    def result(self) -> tuple[Evaluation, float]:
        """Return the evaluation, once it is `ready`, and its duration in seconds. Raises its exception if it failed."""
        evaluation, answer = pickle.loads(self._unread[8:])
        self._unread.clear()
        self.busy = False
        if evaluation is None:
            raise_packed(*pickle.loads(answer))
        return evaluation, answer

    def _died(self) -> WorkerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.close()
        code = self.process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return WorkerDied(f"the process (pid {self.process.pid}) died ({how}{hint})")

    def close(self) -> None:
        """Kill the process, even during an evaluation."""
        self._finalizer()


def _stop(process: subprocess.Popen, sock: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return  # this is a forked child of the owner
    sock.close()
    kill_child(process)


def work(sock_fd: int, parent: int) -> None:
    """The main function of a worker."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    begin_child(parent)
    warnings.simplefilter("ignore")  # the parent process issues the same warnings
    sock = socket.socket(fileno=sock_fd)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            started, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if not started:
                return
            with os.fdopen(fds[0], "rb") as file:
                file.seek(0)
                job = file.read()
            begun = time.perf_counter()
            try:
                answer = pickle.dumps((play(job), time.perf_counter() - begun))
            except BaseException as e:
                answer = pickle.dumps((None, packed(e)))
            sock.sendall(struct.pack("<Q", len(answer)) + answer)

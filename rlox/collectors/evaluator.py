"""Evaluation in a process of its own, beside training: the numbers that this process would get.

What is played is a copy, made when the evaluation begins. The process is a plain interpreter: the user's main module is
not run again in it. It computes with as many threads, ignores Ctrl-C and SIGTERM, and ends with the process that made
it, whatever ends that one.
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
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from rlox.collectors.evaluation import Evaluation, evaluate, torch_threads, unchecked_distributions
from rlox.collectors.recurrent import RecurrentActor
from rlox.envs import foreign_id
from rlox.envs.failures import dumps
from rlox.envs.parallel_env import packed, raise_packed
from rlox.nn.modules import copied

_ALIVE_EVERY = 0.5  # seconds between two looks at whether the other end still lives
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time, and in which time


def cores() -> int:
    """How many cores this process may use: its affinity, within a container's quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        found = min(found, int(quota) // int(period))  # "max" is no number
    return max(1, found)


def make_job(arguments: dict[str, Any], threads: int, imports: Iterable[str] = ()) -> bytes:
    """The evaluation that `evaluate` would make of `arguments`, with the policy as it is now.

    Parameters
    ----------
    threads : int
        PyTorch's CPU threads; 0: as many as it has here.
    imports : iterable of str
        Modules that are imported first.

    Raises
    ------
    Exception
        What cloudpickle says of what it cannot send.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        threads = threads or torch.get_num_threads()
        if isinstance(arguments["policy"], (torch.nn.Module, RecurrentActor)):
            # Parameters may be views of a block that a pickle would hold once for each of them.
            arguments = {**arguments, "policy": copied(arguments["policy"])}
    env_id, registered = arguments["env_id"], None
    if isinstance(env_id, str) and "gymnasium" in sys.modules and not env_id.startswith("ALE/"):
        # An id that the user's own code has registered is unknown to a fresh interpreter; ale-py brings its own.
        registered = sys.modules["gymnasium"].registry.get(foreign_id(env_id))
    return dumps((list(imports), registered, threads, dumps(arguments)))


def play(job: bytes) -> Evaluation:
    """Make the evaluation of `make_job` in this process."""
    imports, registered, threads, arguments = pickle.loads(job)
    for name in imports:
        import_module(name)
    if registered is not None:
        import gymnasium

        gymnasium.registry.setdefault(registered.id, registered)
    arguments = pickle.loads(arguments)  # now that what it names can be imported
    by = arguments.pop("by", evaluate)  # of several agents, another function
    with torch_threads(threads), unchecked_distributions():
        return by(**arguments)


class WorkerDied(RuntimeError):
    """An evaluation's process is gone, and not by an exception of its own."""


class EvaluationWorker:
    """A process that plays one evaluation after another.

    Attributes
    ----------
    busy : bool
        Whether a result is still to be taken.
    """

    def __init__(self) -> None:
        self.busy = False
        self._unread = bytearray()
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(_ALIVE_EVERY)
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from rlox.collectors.evaluator import work; "
            f"work({theirs.fileno()}, {os.getpid()})"
        )
        # Blocked signals stay blocked across exec: they cannot hit a worker that has not yet chosen to ignore them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        # Also at the interpreter's end.
        self._finalizer = weakref.finalize(self, _stop, self.process, self._sock, os.getpid())

    def begin(self, job: bytes) -> None:
        """Let it play `job`; returns at once, though the process may still be starting."""
        self.busy = True
        # A file without a name, whose descriptor travels: the bytes themselves would wait for a reader.
        with tempfile.TemporaryFile() as file, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            file.write(job)
            file.flush()
            socket.send_fds(self._sock, [b"j"], [file.fileno()])

    def ready(self, wait: bool = False) -> bool:
        """Whether the result is there; with `wait` only when it is.

        Raises
        ------
        WorkerDied
            If it will never be.
        """
        while not self._whole():
            self._sock.settimeout(_ALIVE_EVERY if wait else 0.0)
            try:
                part = self._sock.recv(1 << 16)
            except TimeoutError:
                # A child of the worker's own may hold the socket that the worker has left.
                if self.process.poll() is not None:
                    raise self._death() from None
                continue
            except BlockingIOError:
                return False
            except ConnectionResetError:
                part = b""
            if not part:
                raise self._death()
            self._unread += part
        return True

    def _whole(self) -> bool:
        return len(self._unread) >= 8 and len(self._unread) - 8 >= struct.unpack_from("<Q", self._unread)[0]

    def result(self) -> tuple[Evaluation, float]:
        """The evaluation, once it is `ready`, and the seconds it took; raises what it raised there."""
        evaluation, answer = pickle.loads(self._unread[8:])
        self._unread.clear()
        self.busy = False
        if evaluation is None:
            raise_packed(*pickle.loads(answer))
        return evaluation, answer

    def _death(self) -> WorkerDied:
        self.close()
        code = self.process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return WorkerDied(f"the process (pid {self.process.pid}) died ({how}{hint})")

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._finalizer()


def _stop(process: subprocess.Popen, sock: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child of the owner, whose worker this is not
    sock.close()
    if process.poll() is None:
        process.kill()
    process.wait()


def work(sock_fd: int, parent: int) -> None:
    """The main function of a worker."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    warnings.simplefilter("ignore")  # what there is to warn of, the other process warns of
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
            except (Exception, SystemExit) as e:
                answer = pickle.dumps((None, packed(e)))
            sock.sendall(struct.pack("<Q", len(answer)) + answer)


def _watch(parent: int) -> None:
    """End this process when its parent is gone, though an environment is busy."""
    while os.getppid() == parent:
        time.sleep(_ALIVE_EVERY)
    os._exit(1)

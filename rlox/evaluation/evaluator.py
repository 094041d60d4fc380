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
import sys
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlox.envs import foreign_id
from rlox.envs.workers import pack_with_imports, unpack_imports
from rlox.evaluation.episodes import Evaluation, evaluate
from rlox.nn.acting import acting_policy
from rlox.nn.modes import skip_distribution_checks, torch_threads
from rlox.processes.channel import CREATE, FAILED
from rlox.processes.failures import raise_packed
from rlox.processes.memory import open_nameless, read_all, write_all
from rlox.processes.parent import Child, ChildDied, stop_children

_PLAY = b"p"  # message to the process: play the job in the shared memory
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time, and the period that they apply to


def cores() -> int:
    """Return the number of cores that this process may use: its affinity, within a container's quota."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        n = min(n, int(quota) // int(period))  # "max" is not a number
    return max(1, n)


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
    # A module itself would be pickled once for each view of the block that its parameters may be.
    arguments = {**arguments, "policy": acting_policy(arguments["policy"], arguments.get("device", "cpu"))}
    env_id = arguments["env_id"]
    if isinstance(env_id, str) and "gymnasium" in sys.modules:
        env_id = foreign_id(env_id)
    return pickle.dumps((threads, pack_with_imports(arguments, env_id, imports)))


def play(job: bytes) -> Evaluation:
    """Run a job of `make_job` in this process."""
    threads, sent = pickle.loads(job)
    arguments = unpack_imports(sent)
    by = arguments.pop("by", evaluate)  # for several agents, another function
    with torch_threads(threads), skip_distribution_checks():
        return by(**arguments)


class EvaluationWorker:
    """A process that runs one evaluation after another.

    Attributes
    ----------
    busy : bool
        Whether an evaluation is running, or its result has not been fetched.
    """

    def __init__(self) -> None:
        self.busy = False
        self._answer: tuple[bytes, Any] | None = None
        self._memory = open_nameless()
        self.children = [Child(_Player, self._memory, (), (signal.SIGINT, signal.SIGTERM), one_thread=False)]
        self.process = self.children[0].process
        # Also runs at interpreter exit.
        self._finalizer = weakref.finalize(self, stop_children, self.children, os.getpid(), 0.0)

    def begin(self, job: bytes) -> None:
        """Start `job`. Returns immediately, even if the process is still starting."""
        self.busy = True
        # In the message itself, the bytes would block until the process reads them.
        write_all(self._memory, job)
        self.children[0].send(_PLAY)

    def ready(self, wait: bool = False) -> bool:
        """Whether the result is available; with `wait`, block until it is.

        Raises
        ------
        ChildDied
            If the process died.
        """
        while self._answer is None:
            try:
                message = self.children[0].receive() if wait else self.children[0].peek()
            except ChildDied:
                self.close()
                raise
            if message is None:
                return False
            if message[0] != CREATE:
                self._answer = message
        return True

    def result(self) -> tuple[Evaluation, float]:
        """Return the evaluation, once it is `ready`, and its duration in seconds. Raises its exception if it failed."""
        assert self._answer is not None
        (kind, value), self._answer = self._answer, None
        self.busy = False
        if kind == FAILED:
            raise_packed(*value)
        return value

    def close(self) -> None:
        """Kill the process, even during an evaluation."""
        self._finalizer()
        self._memory.close()


class _Player:
    """Plays the jobs of an `EvaluationWorker` in its process."""

    def __init__(self, memory_fd: int):
        warnings.simplefilter("ignore")  # the parent process issues the same warnings
        self._memory = os.fdopen(memory_fd, "r+b", buffering=0)

    def hello(self) -> None:
        pass

    def answer(self, kind: bytes, value: Any) -> tuple[Evaluation, float]:
        job = read_all(self._memory)
        start = time.perf_counter()
        return play(job), time.perf_counter() - start

    def close(self) -> None:
        pass

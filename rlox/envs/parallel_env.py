"""Gymnasium environments stepped by worker processes, with exactly the same results as `GymVecEnv`.

Observations, rewards, flags and actions are in memory that all processes share. The sockets only carry one byte for
"step" and one for "done". The memory and the sockets have no names, so that nothing is left behind no matter how the
processes end. Workers are plain interpreters: they do not run the user's main module again.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from rlox.envs.gym_vec_env import EnvGroup, ForeignVecEnv
from rlox.envs.protocols import Layout, step_layout
from rlox.envs.registry import env_name, foreign_id, worker_imports
from rlox.envs.spec import EnvSpec
from rlox.processes.child import begin_child, close_quietly, kill_child
from rlox.processes.failures import dumps, failure_of, frames_of, note_cause, require_exception
from rlox.processes.interpreter import python_command

_ALIVE_EVERY = 0.5  # seconds between two checks that the other processes are alive
_CLOSE_WITHIN = 3.0  # seconds for environments to close before their worker is killed
_CLOSE_AFTER_FAILURE_WITHIN = 0.2  # the same after a failure, when the caller waits for the error
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "BLIS_NUM_THREADS")
_STEP, _RESET, _SAVE, _RESTORE, _RENDER, _SETTLE = b"s", b"r", b"g", b"p", b"v", b"="
_DONE, _DATA, _FAILED = b".", b"d", b"!"
_WITH_FRAME = (_DATA, _FAILED)  # replies followed by a pickled value
_NO_SEED = -1


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker, as printed there; the cause of the exception raised in the parent."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class _Worker:
    index: int
    rows: slice  # its environments
    process: subprocess.Popen
    sock: socket.socket
    unread: bytearray = field(default_factory=bytearray)  # received bytes of replies


class Workers:
    """Processes that each step a part of N environments and share memory with this process.

    A worker ignores Ctrl-C, computes with one thread, and ends when its parent process ends for any reason.

    Parameters
    ----------
    name : str
        The class name at the start of error messages.
    env : str or callable
        The environment, for messages.
    module, function : str
        The function that each worker calls, which passes its arguments to `serve`.
    orders : list
        For each worker, its rows and the pickled order for its environments (see `shared_out`).
    layout : callable
        Returns the shapes and dtypes of the shared arrays, by name, for environments of a spec.

    Attributes
    ----------
    spec
        Spec of the environments, the same in all workers.
    unrestorable_reason : str, optional
        Why the environments cannot be restored exactly.
    stacks : list
        Classes that each environment is built of.
    arrays : dict
        The shared arrays.

    Raises
    ------
    ValueError
        If not all environments have the same spec.
    """

    def __init__(
        self,
        name: str,
        env: Any,
        module: str,
        function: str,
        orders: list[tuple[slice, bytes]],
        layout: Callable[[Any], Layout],
    ):
        self._name, self._env = name, env
        self.workers: list[_Worker] = []
        self._failed = False  # whether a worker died or raised
        self._unsettled = False  # whether replies may be outstanding, because an exception was raised before they came
        # Also runs at interpreter exit. It refers to the list and not to this object, which can therefore be collected.
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, stop_children, self.workers, self._owner, _CLOSE_WITHIN)
        try:
            with nameless_file() as memory:
                for index, (rows, order) in enumerate(orders):
                    process, sock = start_child(module, function, memory)
                    sock.settimeout(_ALIVE_EVERY)
                    self.workers.append(_Worker(index, rows, process, sock))
                    _send(self.workers[-1].sock, order)
                specs, reasons, stacks = zip(*[self._hello(worker) for worker in self.workers], strict=True)
                self.spec, self.unrestorable_reason = specs[0], next(filter(None, reasons), None)
                self.stacks = [stack for share in stacks for stack in share]
                other = next((spec for spec in specs if spec != self.spec), None)
                if other is not None:
                    raise ValueError(f"{name}: all environments must have the same spaces, got {other} and {self.spec}")
                shared = layout(self.spec)
                needed = size_of(shared)
                os.ftruncate(memory.fileno(), needed)
                for worker in self.workers:
                    _send(worker.sock, b"")
                self.arrays = arrays_of(mmap.mmap(memory.fileno(), needed), shared)
        except BaseException:
            self.stop()
            raise

    @property
    def open(self) -> bool:
        return self._finalizer.alive

    def step(self) -> None:
        """Let every worker step its environments."""
        self._command(_STEP)

    def reset(self) -> None:
        """Let every worker start new episodes."""
        self._command(_RESET)

    def get_state(self) -> tuple[list[Any], bytes] | None:
        """Return the states of all environments; None if they cannot be restored, or a worker has died."""
        if not self.open:
            return None
        shares, reasons = zip(*self._command(_SAVE, _DATA), strict=True)
        self.unrestorable_reason = next(filter(None, reasons), None)
        if self.unrestorable_reason is not None:
            return None
        return [node for nodes, _ in shares for node in nodes], b"".join(data for _, data in shares)

    def set_state(self, states: list[Any]) -> None:
        """Send each worker the states of its environments."""
        self._command(_RESTORE, _DONE, [pickle.dumps(states[worker.rows]) for worker in self.workers])

    def render(self) -> Any:
        """Return what the first environment renders."""
        return self._command(_RENDER, _DATA)[0]

    def _command(self, command: bytes, reply: bytes = _DONE, frames: Sequence[bytes] | None = None) -> list[Any]:
        """Send `command` to every worker, with its item of `frames`, and return the answers of all workers."""
        if not self.open:
            raise RuntimeError(f"{self._name}: {env_name(self._env)} is closed; create a new one")
        try:
            self._failed = False
            if self._unsettled:
                self._exchange(_SETTLE, _SETTLE)
            self._unsettled = True
            answers = self._exchange(command, reply, frames)
            self._unsettled = False
        except Exception as e:
            # A state that does not fit, or an exception from a signal handler, leaves the environments unchanged.
            if self._failed and not (command == _RESTORE and isinstance(e, ValueError)):
                self.stop()
            raise
        return answers

    def _exchange(self, command: bytes, reply: bytes, frames: Sequence[bytes] | None = None) -> list[Any]:
        for worker in self.workers:
            data = command if frames is None else command + framed(frames[worker.index])
            try:
                self._send_all(worker, data)
            except (BrokenPipeError, ConnectionResetError):
                raise self._died(worker) from None
            except BaseException:
                if frames is not None:  # the worker would read the rest of a frame as its next command
                    self.stop()
                raise
        answers = []
        for worker in self.workers:
            got, value = self._message(worker)
            while got != reply:
                # Any other reply belongs to a command from before an interrupt.
                if got == _FAILED:
                    self._failed = True
                    raise_packed(*value)
                got, value = self._message(worker)
            answers.append(value)
        return answers

    def _hello(self, worker: _Worker) -> Any:
        got, value = self._message(worker)
        if got == _FAILED:
            raise_packed(*value)
        return value

    def _message(self, worker: _Worker) -> tuple[bytes, Any]:
        """Return the next reply and its value. No part of the reply is lost if an interrupt comes meanwhile."""
        unread = worker.unread
        self._await(worker, 1)
        kind, size, value = bytes(unread[:1]), 1, None
        if kind in _WITH_FRAME:
            self._await(worker, 9)
            size = 9 + struct.unpack_from("<Q", unread, 1)[0]
            self._await(worker, size)
            value = pickle.loads(unread[9:size])
        del unread[:size]
        return kind, value

    def _await(self, worker: _Worker, size: int) -> None:
        """Wait until `size` bytes of the worker's replies have arrived."""
        while (missing := size - len(worker.unread)) > 0:
            try:
                part = worker.sock.recv(missing)
            except TimeoutError:
                self._require_alive()
                continue
            except ConnectionResetError:
                part = b""
            if not part:
                raise self._died(worker)
            worker.unread += part

    def _send_all(self, worker: _Worker, data: bytes) -> None:
        """Send all of `data`, even if a busy worker takes long to read it."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[worker.sock.send(rest) :]
            except TimeoutError:
                self._require_alive()

    def _require_alive(self) -> None:
        # Any worker may have died, also this one if a child process of it still has the socket open.
        for worker in self.workers:
            if worker.process.poll() is not None:
                raise self._died(worker) from None

    def _died(self, worker: _Worker) -> RuntimeError:
        self._failed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(1.0)
        code = kill_child(worker.process)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        hint = "; the system may have run out of memory: try fewer workers or envs" if code == -signal.SIGKILL else ""
        return RuntimeError(
            f"{self._name}: worker {worker.index} (pid {worker.process.pid}) died ({how}) with environments "
            f"{worker.rows.start} to {worker.rows.stop - 1} of {env_name(self._env)}{hint}"
        )

    def close(self) -> None:
        """End the workers; may be called again."""
        if self._unsettled:  # interrupted while workers step: do not wait for them
            self.stop()
        self._finalizer()

    def stop(self) -> None:
        """End the workers without waiting for them to finish."""
        if self._finalizer.detach() is not None:
            stop_children(self.workers, self._owner, _CLOSE_AFTER_FAILURE_WITHIN)


class ParallelGymVecEnv(ForeignVecEnv):
    """N copies of a gymnasium environment, stepped by `workers` processes, with the same results as `GymVecEnv`.

    Parameters
    ----------
    env_id : str or callable
        A gymnasium id, or a callable that returns a ``gymnasium.Env`` and that cloudpickle can pickle.
    n_envs : int
        Number of copies N.
    seed : int
        Copy i is seeded with an independent mix of (seed, i).
    kwargs : dict, optional
        Passed to ``gymnasium.make`` or the callable.
    wrappers : sequence
        See `rlox.envs.gym_make.make_gym_env`.
    workers : int
        Number of processes, at most N. Each steps an equal share of the copies, one after the other.

    Raises
    ------
    ValueError, TypeError, ImportError
        Same as `GymVecEnv`.
    RuntimeError
        If a worker dies. All workers are then stopped.
    Exception
        The exception of an environment, with a `WorkerTraceback` as its cause; a RuntimeError if the exception cannot
        be sent. All workers are then stopped.
    """

    def __init__(
        self,
        env_id: str | Callable[..., Any],
        n_envs: int = 1,
        seed: int = 0,
        kwargs: dict[str, Any] | None = None,
        wrappers: Sequence[Any] = (),
        workers: int = 1,
    ):
        super().__init__(env_id, n_envs, seed)
        if not 1 <= workers <= n_envs:
            raise ValueError(f"ParallelGymVecEnv: workers must be between 1 and n_envs ({n_envs}), got {workers}")
        if isinstance(env_id, str):
            env_id = foreign_id(env_id)
        orders = shared_out("ParallelGymVecEnv", env_id, (env_id, kwargs, wrappers, n_envs), n_envs, workers)

        self._pool = Workers(
            "ParallelGymVecEnv", self.env_id, "rlox.envs.parallel_env", "_work", orders,
            lambda spec: _layout(spec, n_envs),
        )  # fmt: skip
        self._workers, self._shared = self._pool.workers, self._pool.arrays
        self.spec, self._stacks = self._pool.spec, self._pool.stacks
        self.unrestorable_reason = self._pool.unrestorable_reason

    def _reset(self, seeds: list[int | None], obs: np.ndarray) -> None:
        put_seeds(seeds, self._shared["seeds"])
        self._pool.reset()
        obs[...] = self._shared["obs"]

    def _step(self, actions: np.ndarray, out: dict[str, np.ndarray]) -> None:
        self._shared["actions"][...] = actions
        self._pool.step()
        for key, array in out.items():
            array[...] = self._shared[key]

    def _get_state(self) -> tuple[list[Any], bytes] | None:
        found, self.unrestorable_reason = self._pool.get_state(), self._pool.unrestorable_reason
        return found

    def _set_state(self, states: list[Any]) -> None:
        self._pool.set_state(states)

    def _close(self) -> None:
        self._pool.close()


def shared_out(name: str, env: Any, value: Any, n_envs: int, workers: int) -> list[tuple[slice, bytes]]:
    """Return, for each worker, its rows and `value`, pickled: workers get equal shares of N environments.

    Raises
    ------
    TypeError
        If `env` is neither an id nor a callable, or cannot be sent.
    """
    if not isinstance(env, str) and not callable(env):
        raise TypeError(f"{name}: env_id must be an id or a callable, which every worker calls, got {env!r}")
    ends = [n_envs * i // workers for i in range(workers + 1)]
    try:
        made = sendable(value, env)
        return [
            (slice(*pair), pickle.dumps((made, slice(*pair), index)))
            for index, pair in enumerate(itertools.pairwise(ends))
        ]
    except Exception as e:
        raise TypeError(
            f"{name}: env_id {env_name(env)} and its kwargs must be picklable by cloudpickle, to be sent "
            f"to another process: {e}; pass an id, or a function that creates everything itself"
        ) from e


def sendable(value: Any, env_id: Any, imports: Iterable[str] = worker_imports) -> bytes:
    """Pickle `value` for `unpacked` in another process.

    The modules that it must import and the entry of `env_id` in gymnasium's registry are included.
    """
    registered = None
    # A new interpreter does not know ids that the user's code registered; ale-py registers its own.
    if isinstance(env_id, str) and "gymnasium" in sys.modules and not env_id.startswith("ALE/"):
        registered = sys.modules["gymnasium"].registry.get(env_id)
    # The inner pickle may need the modules, which are therefore imported before it is loaded.
    return dumps((list(imports), dumps((value, registered))))


def unpacked(data: bytes) -> Any:
    """Return the value that was given to `sendable`."""
    imports, made = pickle.loads(data)
    for name in imports:
        import_module(name)
    value, registered = pickle.loads(made)
    if registered is not None:
        import gymnasium

        gymnasium.registry.setdefault(registered.id, registered)
    return value


def nameless_file():
    """Return a file that no other process can open, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("rlox"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def start_child(module: str, function: str, memory: Any) -> tuple[subprocess.Popen, socket.socket]:
    """Start a plain interpreter that calls ``module.function(socket, memory, parent)``.

    The arguments are two file descriptors and the process to `begin_child`. Returns the process and this end of the
    socket.
    """
    ours, theirs = socket.socketpair()
    command = python_command(module, function, theirs.fileno(), memory.fileno(), os.getpid())
    # Blocked signals stay blocked across exec, so Ctrl-C cannot hit a worker before it ignores the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), memory.fileno()),
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return process, ours


def stop_children(workers: list[Any], owner: int, within: float) -> None:
    """End the processes of `workers`, each with a ``process`` and a ``sock``; kill those left after `within` seconds.

    Does nothing unless this process is their `owner`.
    """
    if os.getpid() != owner:
        return  # this is a forked child of the owner
    for worker in workers:
        # A worker that reads end-of-file closes its environments and exits. Unlike close, shutdown also covers copies
        # of the socket in forked processes.
        with contextlib.suppress(OSError):
            worker.sock.shutdown(socket.SHUT_RDWR)
        worker.sock.close()
    deadline = time.monotonic() + within
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        kill_child(worker.process)
    workers.clear()


def _send(sock: socket.socket, data: bytes, kind: bytes = b"") -> None:
    # The death of a worker is noticed later, when its answer is awaited.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(kind + framed(data))


def framed(data: bytes) -> bytes:
    """Add a length prefix to `data`, for `receive`."""
    return struct.pack("<Q", len(data)) + data


def _layout(spec: EnvSpec, n: int) -> Layout:
    return {"actions": ((n, *spec.action_shape), spec.action_dtype), "seeds": ((n,), np.int64), **step_layout(spec, n)}


def _offsets(layout: Layout) -> list[int]:
    """Return the offsets of the arrays, aligned to cache lines, and the end of the last one."""
    offsets = [0]
    for shape, dtype in layout.values():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        offsets.append(offsets[-1] + (size + 63) // 64 * 64)
    return offsets


def size_of(layout: Layout) -> int:
    """Return the bytes of memory that the arrays of `layout` take."""
    return _offsets(layout)[-1]


def arrays_of(memory: mmap.mmap, layout: Layout) -> dict[str, np.ndarray]:
    """Return the arrays of `layout` in `memory`."""
    return {
        key: np.ndarray(shape, dtype, memory, offset)
        for (key, (shape, dtype)), offset in zip(layout.items(), _offsets(layout), strict=False)
    }


class Share(Protocol):
    """A worker's environments, created from the value given to `shared_out`, its rows and the worker's number."""

    def hello(self) -> Any:
        """Return what the parent must know about them."""

    def attach(self, memory_fd: int) -> None:
        """Map the shared memory."""

    def step(self) -> None: ...

    def reset(self) -> None: ...

    def save(self) -> Any: ...

    def restore(self, states: list[Any]) -> None: ...

    def render(self) -> Any: ...

    def close(self) -> None: ...


class _GymShare:
    """A worker's gymnasium environments, and their rows of the shared arrays."""

    def __init__(self, value: Any, rows: slice, index: int):
        env, kwargs, wrappers, self._n = value
        self._rows = rows
        process = f"worker {index}, pid {os.getpid()}"
        n = rows.stop - rows.start
        self._group = EnvGroup(env, kwargs, wrappers, n, "ParallelGymVecEnv", rows.start, process)

    def hello(self) -> tuple[EnvSpec, str | None, list[list[str]]]:
        return self._group.adapter.spec, self._group.unrestorable_reason, self._group.stacks

    def attach(self, memory_fd: int) -> None:
        layout = _layout(self._group.adapter.spec, self._n)
        arrays = arrays_of(mmap.mmap(memory_fd, size_of(layout)), layout)
        self._arrays = {key: array[self._rows] for key, array in arrays.items()}

    def step(self) -> None:
        self._group.step(self._arrays["actions"], self._arrays)

    def reset(self) -> None:
        self._group.reset(seeds_of(self._arrays["seeds"]), self._arrays["obs"])

    def save(self) -> Any:
        return self._group.get_state(), self._group.unrestorable_reason

    def restore(self, states: list[Any]) -> None:
        self._group.set_state(states)

    def render(self) -> Any:
        return None

    def close(self) -> None:
        self._group.close()


def seeds_of(numbers: np.ndarray) -> list[int | None]:
    """Return the seeds of a reset from the array that carries them to a worker."""
    return [None if seed == _NO_SEED else seed for seed in numbers.tolist()]


def put_seeds(seeds: list[int | None], to: np.ndarray) -> None:
    """Write the seeds of a reset where `seeds_of` reads them."""
    to[:] = [_NO_SEED if seed is None else seed for seed in seeds]


def _work(sock_fd: int, memory_fd: int, parent: int) -> None:
    """The main function of a worker."""
    serve(sock_fd, memory_fd, parent, _GymShare)


def serve(sock_fd: int, memory_fd: int, parent: int, kind: Callable[[Any, slice, int], Share]) -> None:
    """Create a share of environments and execute the parent's commands until it closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    begin_child(parent)
    sock = socket.socket(fileno=sock_fd)
    share = None
    try:
        share = _made(sock, kind)
        _send(sock, pickle.dumps(share.hello()), _DATA)
        receive(sock)
        share.attach(memory_fd)
        os.close(memory_fd)
        while command := sock.recv(1):
            try:
                if command == _STEP:
                    share.step()
                elif command == _RESET:
                    share.reset()
                elif command == _RESTORE:
                    share.restore(pickle.loads(receive(sock)))
                elif command in (_SAVE, _RENDER):
                    answer = share.save() if command == _SAVE else share.render()
                    _send(sock, pickle.dumps(answer), _DATA)
                    continue
            except BaseException as e:  # also those that would end this process
                _send(sock, packed(e), _FAILED)
            else:
                sock.sendall(_SETTLE if command == _SETTLE else _DONE)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent no longer waits
    finally:
        if share is not None:
            close_quietly(share.close)


def _made(sock: socket.socket, kind: Callable[[Any, slice, int], Share]) -> Share:
    """Create this worker's environments.

    Raises
    ------
    EOFError
        If the parent has ended, or closed the socket after it read the error from here.
    """
    try:
        made, rows, index = pickle.loads(receive(sock))
        return kind(unpacked(made), rows, index)
    except EOFError:
        raise
    except BaseException as e:
        _send(sock, packed(e), _FAILED)
        receive(sock)
        raise EOFError from e


def packed(e: BaseException) -> bytes:
    """Pickle the arguments of `raise_packed`, with which the parent raises `e`; see also `require_exception`."""
    try:
        require_exception(e, "an environment")
    except RuntimeError as ended:
        e = ended
    try:
        # A class from the parent's main script is pickled by value, and becomes the same class again in the parent.
        sent = dumps(e)
        pickle.loads(sent)
    except Exception:  # such as classes whose constructors need other arguments than the message
        sent = None
    message, what = f"{type(e).__name__}: {e}", failure_of(e).what
    frames = frames_of(e.__traceback__)
    if e.__cause__ is not None:
        frames = [*frames_of(e.__cause__.__traceback__), *frames]
    return pickle.dumps((sent, message, what, frames, "".join(traceback.format_exception(e))))


def raise_packed(sent: bytes | None, message: str, what: str, frames: list[Any], trace: str) -> None:
    """Raise an exception that a worker packed with `packed`."""
    try:
        e = RuntimeError(message) if sent is None else pickle.loads(sent)
    except Exception:  # the user's class may not be importable here
        e = RuntimeError(message)
    found = failure_of(e)
    found.frames, found.trace = frames, trace
    if what:
        note_cause(e, what)
    raise e from WorkerTraceback(trace)


def receive(sock: socket.socket) -> bytes:
    """Read one frame. Raises EOFError if the other end has closed."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = sock.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    (size,) = struct.unpack("<Q", read(8))
    return read(size)

"""Actors in processes of this machine, which exchange weights and rollouts with the learner in shared memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np

from rlox.distributed.actor import Actor
from rlox.distributed.protocol import ActorLost, ActorPlan, Trajectory, Weights
from rlox.distributed.snapshots import own_policy, sendable_plan, snapshot
from rlox.envs import EnvSpec
from rlox.envs.parallel_env import (
    framed,
    nameless_file,
    packed,
    raise_packed,
    receive,
    start_child,
    stop_children,
    unpacked,
)
from rlox.processes.child import begin_child, close_quietly, kill_child

_CLOSE_WITHIN = 2.0  # seconds that an actor has to end its rollout when the pool is closed
_ANSWER_WITHIN = 120.0  # timeout in seconds of requests other than rollouts: to start, to save or restore a state
_SLACK = 1 << 16  # bytes by which pickled weights may grow
_HELLO, _ROLLOUT, _STATE, _SET_STATE, _FAILED = "hello", "rollout", "state", "set_state", "failed"


class _Child:
    """The learner's record of one actor process."""

    def __init__(self, process: subprocess.Popen, sock: socket.socket, memory: mmap.mmap, layout: _Layout):
        self.process = process
        self.sock = sock
        self.layout = layout
        self.memory = memory
        self.unread = bytearray()
        self.asked = 0  # rollouts requested since its start; request k uses slot k modulo the number of slots
        self.answers: deque[Trajectory | BaseException] = deque()
        self.others: deque[tuple[str, Any]] = deque()  # answers to requests other than rollouts
        self.gone: str | None = None  # how it ended


class _Layout:
    """Layout of weights and rollouts in an actor's shared memory."""

    def __init__(self, spec: EnvSpec, n_steps: int, n_envs: int, weights: int, slots: int):
        steps = (n_steps, n_envs)
        self.slots = slots
        self.weights = weights
        self.columns: list[tuple[str, tuple[int, ...], Any, int]] = []
        at = 0
        for name, shape, dtype in (
            ("obs", (n_steps + 1, n_envs, *spec.obs_shape), spec.obs_dtype),
            ("actions", (*steps, *spec.action_shape), spec.action_dtype),
            ("log_probs", steps, np.float32),
            ("rewards", steps, np.float32),
            ("terminated", steps, np.bool_),
            ("truncated", steps, np.bool_),
        ):
            self.columns.append((name, shape, dtype, at))
            at += _padded(math.prod(shape) * np.dtype(dtype).itemsize)
        self._rollout = at
        self.size = slots * (at + _padded(weights))

    def arrays(self, memory: mmap.mmap, slot: int) -> dict[str, np.ndarray]:
        """Return views of the rollout in `slot`."""
        start = slot * self._rollout
        return {name: np.ndarray(shape, dtype, memory, start + at) for name, shape, dtype, at in self.columns}

    def weights_at(self, slot: int) -> int:
        """Return the offset of the weights of request `slot`."""
        return self.slots * self._rollout + slot * _padded(self.weights)


def _padded(size: int) -> int:
    return (size + 63) // 64 * 64


class ProcessActors:
    """`n_actors` actors in separate processes (see `rlox.distributed.ActorPool`).

    The processes are plain interpreters with one thread each. They end with the process that created them, however it
    ends, and leave Ctrl-C and SIGTERM to it.

    Parameters
    ----------
    plan : ActorPlan
        Cloudpickle must be able to pickle it.
    n_actors : int
        Number of processes.
    spec : EnvSpec
        Specification of the environments.
    ahead : int
        Maximum number of pending requests per actor.

    Raises
    ------
    TypeError
        If the plan cannot be pickled.
    ActorLost
        If a process ends during its start.
    Exception
        An exception raised by the creation of environments in a process.
    """

    def __init__(self, plan: ActorPlan, n_actors: int, spec: EnvSpec, ahead: int = 1):
        self.n_actors = n_actors
        plan = own_policy(plan)
        moments = {"obs": np.zeros((3, *spec.obs_shape)), "return": np.zeros(3)}
        size = len(pickle.dumps(Weights(0, snapshot(plan.policy), moments), protocol=5)) + _SLACK
        self._layout = _Layout(spec, plan.n_steps, plan.n_envs, size, ahead)
        self._order = sendable_plan("ProcessActors", plan, self._layout)
        self._starts = [0] * n_actors
        self._children: list[_Child] = []
        self._arrived: list[int] = []  # actors that have answered or died, in order of arrival
        self._exact = True
        # Also runs when the interpreter exits. It holds the list, not this object, which can therefore be collected.
        self._finalizer = weakref.finalize(self, stop_children, self._children, os.getpid(), _CLOSE_WITHIN)
        try:
            for actor in range(n_actors):
                self._children.append(self._started(actor))
            for actor in range(n_actors):
                self._exact &= self._wait_until_created(actor)
        except BaseException:
            self.close()
            raise

    @property
    def exact(self) -> bool:
        return self._exact

    def request(self, actor: int, weights: Weights) -> None:
        child = self._children[actor]
        slot = child.asked % self._layout.slots
        data = pickle.dumps(weights, protocol=5)
        if len(data) > self._layout.weights:
            raise ValueError(
                f"ProcessActors.request: weights must fit in the {self._layout.weights:,} bytes of the initial "
                f"weights, got {len(data):,}"
            )
        at = self._layout.weights_at(slot)
        child.memory[at : at + len(data)] = data
        child.asked += 1
        self._send(child, (_ROLLOUT, slot))

    def ready(self, actors: Collection[int], timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            self._read(0.0 if self._first(actors) else left)
            found = self._first(actors)
            if found or left <= 0:
                return found

    def _first(self, actors: Collection[int]) -> list[int]:
        """Return those of `actors` that have answered or died, the earliest first."""
        return [actor for actor in dict.fromkeys(self._arrived) if actor in actors]

    def result(self, actor: int) -> Trajectory:
        child = self._children[actor]
        if not child.answers:
            raise ActorLost("no rollout was requested from it" if child.gone is None else child.gone)
        answer = child.answers.popleft()
        self._arrived.remove(actor)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def restart(self, actor: int) -> None:
        stop_children([self._children[actor]], os.getpid(), 0.0)
        self._arrived = [other for other in self._arrived if other != actor]
        self._starts[actor] += 1
        self._children[actor] = self._started(actor)
        self._wait_until_created(actor)

    def state(self, actor: int) -> dict[str, np.ndarray]:
        self._send(self._children[actor], (_STATE,))
        return self._other(actor, _STATE)

    def set_state(self, actor: int, state: dict[str, np.ndarray]) -> None:
        self._send(self._children[actor], (_SET_STATE, state))
        self._other(actor, _SET_STATE)

    def describe(self, actor: int) -> str:
        pid = f", pid {self._children[actor].process.pid}" if actor < len(self._children) else ""
        return f"actor {actor} (a process{pid})"

    def close(self) -> None:
        self._finalizer()

    def _started(self, actor: int) -> _Child:
        with nameless_file() as file:
            os.ftruncate(file.fileno(), self._layout.size)
            memory = mmap.mmap(file.fileno(), self._layout.size)
            process, sock = start_child("rlox.distributed.processes", "serve", file)
        child = _Child(process, sock, memory, self._layout)
        with contextlib.suppress(OSError):  # a dead process is noticed when its answer is awaited
            sock.sendall(framed(self._order) + framed(struct.pack("<QQ", actor, self._starts[actor])))
        return child

    def _wait_until_created(self, actor: int) -> bool:
        """Wait until the actor has created its environments, and return whether its state can be saved."""
        return self._other(actor, _HELLO)

    def _send(self, child: _Child, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            child.sock.sendall(framed(pickle.dumps(message)))

    def _other(self, actor: int, kind: str) -> Any:
        """Return the answer to a request other than a rollout."""
        child, end = self._children[actor], time.monotonic() + _ANSWER_WITHIN
        while not child.others:
            failed = child.answers[-1] if child.answers else None
            if isinstance(failed, BaseException):
                raise failed
            if child.gone is not None:
                raise ActorLost(child.gone)
            if time.monotonic() > end:
                raise ActorLost(f"{self.describe(actor)} has not answered for {_ANSWER_WITHIN:g} s")
            self._read(0.5)
        got, value = child.others.popleft()
        if got != kind:
            raise ActorLost(f"{self.describe(actor)} answered {got} to {kind}")
        return value

    def _read(self, timeout: float) -> None:
        """Read all available data, waiting up to `timeout` seconds for the first."""
        alive = {child.sock.fileno(): (actor, child) for actor, child in enumerate(self._children) if not child.gone}
        # Unlike select.select, it accepts file descriptors of any value.
        poll = select.poll()
        for descriptor in alive:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(math.ceil(1000 * timeout)):
            actor, child = alive[descriptor]
            try:
                part = child.sock.recv(1 << 20)
            except ConnectionResetError:
                part = b""
            if not part:
                child.gone = self._cause_of_death(actor)
                self._arrived.append(actor)
                continue
            child.unread += part
            self._parse(actor, child)

    def _parse(self, actor: int, child: _Child) -> None:
        while len(child.unread) >= 8:
            (size,) = struct.unpack_from("<Q", child.unread)
            if len(child.unread) < 8 + size:
                return
            kind, value = pickle.loads(child.unread[8 : 8 + size])
            del child.unread[: 8 + size]
            if kind == _ROLLOUT:
                slot, rest = value
                views = self._layout.arrays(child.memory, slot)
                child.answers.append(Trajectory(**{name: view.copy() for name, view in views.items()}, **rest))
                self._arrived.append(actor)
            elif kind == _FAILED:
                try:
                    raise_packed(*value)
                except Exception as e:
                    child.answers.append(e)
                    self._arrived.append(actor)
            else:
                child.others.append((kind, value))

    def _cause_of_death(self, actor: int) -> str:
        process = self._children[actor].process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = kill_child(process)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        hint = "; the system may have run out of memory: try fewer actors" if code == -signal.SIGKILL else ""
        return f"it died ({how}){hint}"


def serve(sock_fd: int, memory_fd: int, parent: int) -> None:
    """The main function of an actor's process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the learner decides when to end, and its own end is noticed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    begin_child(parent)
    sock = socket.socket(fileno=sock_fd)
    actor = None
    try:
        try:
            plan, layout = unpacked(receive(sock))
            index, start = struct.unpack("<QQ", receive(sock))
            actor = Actor(plan, index, start)
            memory = mmap.mmap(memory_fd, layout.size)
        except EOFError:
            raise
        except BaseException as e:
            sock.sendall(framed(pickle.dumps((_FAILED, pickle.loads(packed(e))))))
            receive(sock)  # until the learner closes the connection
            return
        sock.sendall(framed(pickle.dumps((_HELLO, actor.exact))))
        while True:
            sock.sendall(_answer(actor, layout, memory, pickle.loads(receive(sock))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the learner no longer waits
    finally:
        if actor is not None:
            close_quietly(actor.close)


def _answer(actor: Actor, layout: _Layout, memory: mmap.mmap, message: tuple[Any, ...]) -> bytes:
    kind = message[0]
    try:
        if kind == _ROLLOUT:
            slot, at = message[1], layout.weights_at(message[1])
            found = actor.rollout(pickle.loads(memoryview(memory)[at : at + layout.weights]))
            views = layout.arrays(memory, slot)
            for name, view in views.items():
                view[...] = getattr(found, name)
            names = [name for name in Trajectory.__dataclass_fields__ if name not in views]
            value: Any = (slot, {name: getattr(found, name) for name in names})
        elif kind == _STATE:
            value = actor.state()
        else:
            actor.set_state(message[1])
            value = None
    except BaseException as e:  # also those that would end this process
        kind, value = _FAILED, pickle.loads(packed(e))
    return framed(pickle.dumps((kind, value)))

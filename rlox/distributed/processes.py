"""Actors in processes of this machine, which exchange weights and rollouts with the learner in shared memory."""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import time
import weakref
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np

from rlox.distributed.actor import Actor
from rlox.distributed.protocol import ActorLost, ActorPlan, Trajectory, Weights
from rlox.envs import EnvSpec
from rlox.envs.workers import unpack_imports
from rlox.processes.channel import CREATE, FAILED
from rlox.processes.failures import raise_packed
from rlox.processes.memory import Layout, map_arrays, open_nameless
from rlox.processes.parent import Child, ChildDied, stop_children

_CLOSE_WITHIN = 2.0  # seconds that an actor has to end its rollout when the pool is closed
_ANSWER_WITHIN = 120.0  # timeout in seconds of requests other than rollouts: to start, to save or restore a state
_SLACK = 1 << 16  # bytes by which pickled weights may grow
_ROLLOUT, _STATE, _SET_STATE = b"r", b"g", b"p"


def _layout(plan: ActorPlan, spec: EnvSpec, weights: int, slots: int) -> Layout:
    """Return the arrays of an actor's shared memory: the weights and the rollout of each pending request."""
    rollout = {**plan.layout(spec), "weights": ((weights,), np.uint8)}
    return {f"{name}.{slot}": array for slot in range(slots) for name, array in rollout.items()}


def _in_slot(arrays: dict[str, np.ndarray], slot: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the arrays of a rollout by name, and the bytes of its weights."""
    own = {name.partition(".")[0]: array for name, array in arrays.items() if name.endswith(f".{slot}")}
    return own, own.pop("weights")


class _ActorProcess(Child):
    """The learner's record of one actor process."""

    def __init__(self, sent: bytes, layout: Layout, actor: int, start: int):
        with open_nameless() as memory:
            self.arrays = map_arrays(memory.fileno(), layout, enlarge=True)
            # The learner decides when it ends, and notices if it does.
            super().__init__(_ServedActor, memory, (sent, actor, start), (signal.SIGINT, signal.SIGTERM))
        self.asked = 0  # rollouts requested since its start; request k uses slot k modulo the number of slots
        self.answers: deque[Trajectory | BaseException] = deque()
        self.others: deque[tuple[bytes, Any]] = deque()  # answers to requests other than rollouts
        self.gone: str | None = None  # how it ended


class ProcessActors:
    """`n_actors` actors in separate processes (see `rlox.distributed.ActorPool`), with at most `ahead` requests each.

    The processes are plain interpreters with one thread each. They end with the process that created them, however it
    ends, and leave Ctrl-C and SIGTERM to it.

    Raises TypeError if the plan cannot be pickled, ActorLost if a process ends during its start, and the exceptions of
    the creation of environments in a process.
    """

    def __init__(self, plan: ActorPlan, n_actors: int, spec: EnvSpec, ahead: int = 1):
        self.n_actors = n_actors
        plan = plan.copy_policy()
        moments = {"obs": np.zeros((3, *spec.obs_shape)), "return": np.zeros(3)}
        size = len(pickle.dumps(Weights(0, plan.policy.weights(), moments), protocol=5)) + _SLACK
        self._layout, self._n_slots = _layout(plan, spec, size, ahead), ahead
        self._sent = plan.pickle("ProcessActors", self._layout)
        self._starts = [0] * n_actors
        self._children: list[_ActorProcess] = []
        self._arrived: list[int] = []  # actors that have answered or died, in order of arrival
        # Also runs when the interpreter exits. It holds the list, not this object, which can therefore be collected.
        self._finalizer = weakref.finalize(self, stop_children, self._children, os.getpid(), _CLOSE_WITHIN)
        try:
            for actor in range(n_actors):
                self._children.append(_ActorProcess(self._sent, self._layout, actor, 0))
            self.exact = all([self._answer(actor, CREATE) for actor in range(n_actors)])
        except BaseException:
            self.close()
            raise

    def request(self, actor: int, weights: Weights) -> None:
        child = self._children[actor]
        slot = child.asked % self._n_slots
        data = pickle.dumps(weights, protocol=5)
        _, room = _in_slot(child.arrays, slot)
        if len(data) > len(room):
            raise ValueError(
                f"ProcessActors.request: weights must fit in the {len(room):,} bytes of the initial weights, got "
                f"{len(data):,}"
            )
        room[: len(data)] = np.frombuffer(data, np.uint8)
        child.asked += 1
        child.send(_ROLLOUT, slot)

    def ready(self, actors: Collection[int], timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            self._read(0.0 if any(actor in actors for actor in self._arrived) else left)
            ready = [actor for actor in dict.fromkeys(self._arrived) if actor in actors]
            if ready or left <= 0:
                return ready

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
        self._children[actor] = _ActorProcess(self._sent, self._layout, actor, self._starts[actor])
        self._answer(actor, CREATE)

    def state(self, actor: int) -> dict[str, np.ndarray]:
        self._children[actor].send(_STATE)
        return self._answer(actor, _STATE)

    def set_state(self, actor: int, state: dict[str, np.ndarray]) -> None:
        self._children[actor].send(_SET_STATE, state)
        self._answer(actor, _SET_STATE)

    def describe(self, actor: int) -> str:
        pid = f", pid {self._children[actor].process.pid}" if actor < len(self._children) else ""
        return f"actor {actor} (a process{pid})"

    def close(self) -> None:
        self._finalizer()

    def _answer(self, actor: int, kind: bytes) -> Any:
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
            raise ActorLost(f"{self.describe(actor)} answered {got!r} to {kind!r}")
        return value

    def _read(self, timeout: float) -> None:
        """Take all answers that have arrived, waiting up to `timeout` seconds for the first."""
        alive = {child.sock.fileno(): actor for actor, child in enumerate(self._children) if not child.gone}
        # Unlike select.select, it accepts file descriptors of any value.
        poll = select.poll()
        for descriptor in alive:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(math.ceil(1000 * timeout)):
            actor = alive[descriptor]
            child = self._children[actor]
            try:
                while (message := child.peek()) is not None:
                    self._take(actor, child, *message)
            except ChildDied as e:
                child.gone = f"it died ({e.how}){f'{e.hint}: try fewer actors' if e.hint else ''}"
                self._arrived.append(actor)

    def _take(self, actor: int, child: _ActorProcess, kind: bytes, value: Any) -> None:
        if kind == _ROLLOUT:
            slot, rest = value
            views, _ = _in_slot(child.arrays, slot)
            child.answers.append(Trajectory(**{name: view.copy() for name, view in views.items()}, **rest))
        elif kind == FAILED:
            try:
                raise_packed(*value)
            except Exception as e:
                child.answers.append(e)
        else:
            child.others.append((kind, value))
            return
        self._arrived.append(actor)


class _ServedActor:
    """An actor in its process."""

    def __init__(self, memory_fd: int, sent: bytes, index: int, start: int):
        plan, layout = unpack_imports(sent)
        self._actor = Actor(plan, index, start, alone=True)
        self._arrays = map_arrays(memory_fd, layout)

    def hello(self) -> bool:
        """Return whether the actor's state can be saved."""
        return self._actor.exact

    def answer(self, kind: bytes, value: Any) -> Any:
        if kind == _STATE:
            return self._actor.state()
        if kind == _SET_STATE:
            return self._actor.set_state(value)
        views, weights = _in_slot(self._arrays, value)
        rollout = self._actor.rollout(pickle.loads(weights.data))
        for name, view in views.items():
            view[...] = getattr(rollout, name)
        return value, {name: getattr(rollout, name) for name in Trajectory.__dataclass_fields__ if name not in views}

    def close(self) -> None:
        self._actor.close()

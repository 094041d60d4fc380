"""Actors that threads of this process drive.

They run here, where native environments and perceptrons step without holding Python's lock, or on other machines
(`rlox.distributed.grpc_actors`).
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlox.distributed.actor import Actor
from rlox.distributed.protocol import ActorPlan, Trajectory, Weights
from rlox.envs.failures import require_separate

_JOIN_WITHIN = 2.0  # seconds that a thread has to end its rollout when the pool is closed


class _Seat:
    """An actor, or a local representative of a remote one; its thread, and the queues between thread and learner."""

    def __init__(self, actor: Any, index: int, answers: queue.SimpleQueue[tuple[_Seat, Trajectory | BaseException]]):
        self.actor = actor
        self.index = index
        self.requests: queue.SimpleQueue[Weights | None] = queue.SimpleQueue()
        self.answers = answers
        self.over = False  # whether pending requests are dropped
        self.users = [None]  # empty as soon as either the thread or the pool has left
        self.received: deque[Trajectory | BaseException] = deque()
        self.thread = threading.Thread(target=self.serve, name=f"rlox actor {index}", daemon=True)
        self.thread.start()

    def serve(self) -> None:
        """Answer requests until one is None."""
        while (weights := self.requests.get()) is not None and not self.over:
            try:
                self.answers.put((self, self.actor.rollout(weights)))
            except BaseException as e:
                self.answers.put((self, e))
        self.leave()

    def leave(self) -> None:
        """Called by the thread and by the pool when they no longer need the actor; the second call closes it."""
        try:
            self.users.pop()  # atomic
        except IndexError:
            self.actor.close()

    def end(self) -> None:
        """Let the thread end after its current rollout."""
        self.over = True
        self.requests.put(None)


def _abandon(seats: list[_Seat]) -> None:
    """End the threads of a pool that was dropped without `close`, without waiting for them."""
    for seat in seats:
        seat.leave()
        seat.end()


class ThreadActors:
    """`n_actors` actors in threads (see `rlox.distributed.ActorPool`).

    A thread whose environment hangs cannot be ended: it is abandoned, and ends with the process. Raises the same errors
    as `rlox.collectors.RolloutCollector`.
    """

    def __init__(self, plan: ActorPlan, n_actors: int):
        self._begin([partial(Actor, plan.copy_policy(), i) for i in range(n_actors)])
        # Of environments in this process; those in processes are separate.
        envs = [env for seat in self._seats for env in getattr(seat.actor.collector.env, "envs", ())]
        try:
            require_separate(envs, "ThreadActors")
        except ValueError:
            self.close()
            raise

    def _begin(self, makers: Sequence[Callable[[], Any]]) -> None:
        """Create all actors, then start their threads."""
        self.n_actors = len(makers)
        self._answers: queue.SimpleQueue[tuple[_Seat, Trajectory | BaseException]] = queue.SimpleQueue()
        self._arrived: list[int] = []  # the actors of all unread answers, in the order of arrival
        self._seats: list[_Seat] = []
        actors: list[Any] = []
        try:
            for make in makers:
                actors.append(make())
        except BaseException:
            for actor in actors:
                actor.close()
            raise
        if torch := sys.modules.get("torch"):
            # In a forked process, the first operation replaces PyTorch's own threads. It must not run in two threads at
            # once: the second one would fail with "Invalid thread pool".
            torch.set_num_threads(torch.get_num_threads())
        self._seats = [_Seat(actor, i, self._answers) for i, actor in enumerate(actors)]
        # The threads refer to their seats only, so that a pool that nobody refers to is collected.
        self._finalizer = weakref.finalize(self, _abandon, self._seats)
        self._finalizer.atexit = False  # the threads are daemons

    @property
    def exact(self) -> bool:
        return all(seat.actor.exact for seat in self._seats)

    def request(self, actor: int, weights: Weights) -> None:
        self._seats[actor].requests.put(weights)

    def ready(self, actors: Collection[int], timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        while True:
            while not self._answers.empty():
                self._take(*self._answers.get())
            ready = [actor for actor in self._arrived if actor in actors]
            left = end - time.monotonic()
            if ready or left <= 0:
                return list(dict.fromkeys(ready))
            try:
                self._take(*self._answers.get(timeout=left))
            except queue.Empty:
                return []

    def _take(self, seat: _Seat, answer: Trajectory | BaseException) -> None:
        if self._seats[seat.index] is seat:  # the seat was not abandoned
            seat.received.append(answer)
            self._arrived.append(seat.index)

    def result(self, actor: int) -> Trajectory:
        answer = self._seats[actor].received.popleft()
        self._arrived.remove(actor)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def restart(self, actor: int) -> None:
        raise TimeoutError(
            f"{self.describe(actor)} does not answer, and a thread cannot be ended; fix its environment, raise "
            "algo.actor_timeout, or use algo.actors=processes"
        )

    def _replace(self, index: int, actor: Any) -> None:
        """Replace a lost actor by a new one."""
        self._seats[index].requests.put(None)
        self._arrived = [other for other in self._arrived if other != index]
        self._seats[index] = _Seat(actor, index, self._answers)

    def state(self, actor: int) -> dict[str, np.ndarray]:
        return self._seats[actor].actor.state()

    def set_state(self, actor: int, state: dict[str, np.ndarray]) -> None:
        self._seats[actor].actor.set_state(state)

    def describe(self, actor: int) -> str:
        return f"actor {actor} (a thread)"

    def close(self) -> None:
        self._finalizer.detach()
        for seat in self._seats:
            seat.end()
        end = time.monotonic() + _JOIN_WITHIN
        for seat in self._seats:
            seat.thread.join(max(0.0, end - time.monotonic()))
            seat.leave()  # a thread that still steps the environments closes them later
        self._seats = []

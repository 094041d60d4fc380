"""Actors on Ray, on this machine or on the nodes of a cluster."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import queue
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import numpy as np

from rlox.config import RayConfig, RayResources
from rlox.distributed.actor import Actor
from rlox.distributed.protocol import ActorLost, ActorPlan, Trajectory, Weights
from rlox.envs.workers import unpack_imports
from rlox.processes.failures import pack_exception, raise_packed

_ANSWER_WITHIN = 120.0  # timeout in seconds of requests other than rollouts: to save or restore a state
_LISTENS_WITHIN = 10.0  # seconds for a connection to the head of a cluster
_NODE = "ray.io/node-id"  # Ray's label of a node


class _Host:
    """The Ray actor that runs an `Actor` in its own process; it answers calls one after the other."""

    def __init__(self, order: bytes, index: int, start: int, cwd: str):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner decides when to end
        if os.path.isdir(cwd):
            os.chdir(cwd)
        import ray

        node = ray.get_runtime_context().get_node_id()
        self._where = f"node {ray.util.get_node_ip_address()} ({node[:8]}), pid {os.getpid()}"
        self._order, self._index, self._start = order, index, start
        self._actor: Actor | None = None

    def begin(self) -> tuple[bool, Any]:
        """Create the environments; return whether their state can be saved, and where this actor runs."""
        return self._answer_call(lambda: (self._make_actor().exact, self._where))

    def rollout(self, weights: Weights) -> tuple[bool, Any]:
        # Ray's object store is read-only, but the statistics are written to.
        normalization = {name: array.copy() for name, array in weights.normalization.items()}
        own = replace(weights, normalization=normalization)
        return self._answer_call(lambda: (self._make_actor().rollout(own).arrays(), self._where))

    def state(self) -> tuple[bool, Any]:
        return self._answer_call(lambda: self._make_actor().state())

    def set_state(self, state: dict[str, np.ndarray]) -> tuple[bool, Any]:
        own = {name: array.copy() for name, array in state.items()}
        return self._answer_call(lambda: self._make_actor().set_state(own))

    def _make_actor(self) -> Actor:
        if self._actor is None:
            (plan,) = unpack_imports(self._order)
            self._actor = Actor(plan, self._index, self._start, alone=True)
        return self._actor

    def _answer_call(self, call: Any) -> tuple[bool, Any]:
        """Return the result of `call`, or its packed exception with the frames of the user's code."""
        try:
            return True, call()
        except BaseException as e:
            return False, pickle.dumps(pack_exception(e))


class RayActors:
    """`n_actors` actors on Ray (see `rlox.distributed.ActorPool`).

    Weights are put into Ray's object store once, however many actors use them. Ray itself neither restarts actors nor
    repeats rollouts: `restart` starts an actor with another seed, so that no rollout is learned from twice. If the
    process is already connected to Ray, this object uses that connection; it only shuts down a Ray that it started.

    Raises ImportError if Ray is not installed, ConnectionError if there is none at the address, TypeError if the plan
    cannot be pickled, TimeoutError, with their needs and the cluster's resources, if not all actors have started within
    ``start_timeout``, ActorLost if one dies during its start, and the exceptions of the creation of environments.
    """

    def __init__(self, plan: ActorPlan, n_actors: int, settings: RayConfig | None = None):
        self.n_actors = n_actors
        self._settings = settings or RayConfig()
        order = plan.copy_policy().pickle("RayActors")
        started = connect(self._settings, "RayActors: ray.address", math.ceil(n_actors * self._settings.num_cpus))
        import ray

        self._ray = ray
        self._starts = [0] * n_actors
        self._where = [""] * n_actors
        # Futures, which Ray's own thread completes, since `ray.wait` would change the exception of a signal handler.
        self._asked: list[deque[Future]] = [deque() for _ in range(n_actors)]  # requested rollouts, the oldest first
        self._answered: queue.SimpleQueue[tuple[int, Future]] = queue.SimpleQueue()
        self._come: list[int] = []  # actors that have answered, in order of arrival
        self._starting: dict[int, Future] = {}  # by actor, the result of `_Host.begin`
        self._weights: tuple[Weights | None, Any] = (None, None)
        self._hosts: list[Any] = []
        self._group: list[Any] = []
        # Also runs when the interpreter exits. It holds no reference to this object, which can therefore be collected.
        self._finalizer = weakref.finalize(self, _end, self._hosts, self._group, started)
        try:
            self._plan = ray.put(order)
            self._host = ray.remote(max_restarts=0, max_task_retries=0)(_Host)
            self._group.append(self._reserve_resources())
            for actor in range(n_actors):
                self._hosts.append(self._started(actor))
            self.exact = self._wait_until_created()
        except BaseException:
            self.close()
            raise

    def request(self, actor: int, weights: Weights) -> None:
        if self._weights[0] is not weights:
            self._weights = (weights, self._ray.put(weights))
        future, answered = self._hosts[actor].rollout.remote(self._weights[1]).future(), self._answered
        self._asked[actor].append(future)
        future.add_done_callback(lambda done: answered.put((actor, done)))

    def ready(self, actors: Collection[int], timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        while True:
            while not self._answered.empty():
                self._take(*self._answered.get())
            ready = [i for i in dict.fromkeys(self._come) if i in actors and self._asked[i][0].done()]
            left = end - time.monotonic()
            if ready or left <= 0:
                return ready
            with contextlib.suppress(queue.Empty):
                self._take(*self._answered.get(timeout=left))

    def _take(self, actor: int, answer: Future) -> None:
        if any(answer is asked for asked in self._asked[actor]):  # otherwise the actor was restarted since
            self._come.append(actor)

    def result(self, actor: int) -> Trajectory:
        self._come.remove(actor)
        arrays, self._where[actor] = self._value(self._asked[actor].popleft())
        # Copies: arrays in Ray's store are read-only, and stay there as long as they are referenced.
        return Trajectory.of({name: np.array(array) for name, array in arrays.items()})

    def restart(self, actor: int) -> None:
        if actor not in self._starting:
            self._ray.kill(self._hosts[actor], no_restart=True)
            self._asked[actor].clear()
            self._come = [other for other in self._come if other != actor]
            self._starts[actor] += 1
            self._where[actor] = ""
            self._hosts[actor] = self._started(actor)
            self._starting[actor] = self._hosts[actor].begin.remote().future()
        # Other actors' rollouts must not wait for it, since a start may take long if its node is gone.
        if not self._starting[actor].done():
            raise ActorLost("it is starting")
        _, self._where[actor] = self._value(self._starting.pop(actor))

    def state(self, actor: int) -> dict[str, np.ndarray]:
        arrays = self._value(self._hosts[actor].state.remote().future())
        return {name: np.array(array) for name, array in arrays.items()}

    def set_state(self, actor: int, state: dict[str, np.ndarray]) -> None:
        self._value(self._hosts[actor].set_state.remote(state).future())

    def describe(self, actor: int) -> str:
        return f"actor {actor} (Ray{self._where[actor] and f', {self._where[actor]}'})"

    def close(self) -> None:
        self._finalizer()

    def _started(self, actor: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        s = self._settings
        return self._host.options(
            num_cpus=s.num_cpus,
            num_gpus=s.num_gpus,
            resources=s.resources,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group[0], actor),
        ).remote(self._plan, actor, self._starts[actor], os.getcwd())

    def _reserve_resources(self) -> Any:
        """Request a reservation for each actor; Ray makes them when the cluster has room."""
        apart: dict[str, Any] = {}
        if self._settings.learner_apart:
            here = self._ray.get_runtime_context().get_node_id()
            apart["bundle_label_selector"] = [{_NODE: f"!{here}"}] * self.n_actors
        bundles = [self._resources() for _ in range(self.n_actors)]
        return self._ray.util.placement_group(bundles, self._settings.placement.upper(), **apart)

    def _resources(self) -> dict[str, float]:
        """Return what each actor reserves."""
        s = self._settings
        resources = {"CPU": s.num_cpus, "GPU": s.num_gpus, **s.resources}
        return {name: number for name, number in resources.items() if number}

    def _wait_until_created(self) -> bool:
        """Wait until all actors have created their environments, and return whether all their states can be saved."""
        calls = [host.begin.remote().future() for host in self._hosts]
        if wait(calls, self._settings.start_timeout).not_done:
            raise TimeoutError(
                f"RayActors: {self.n_actors} actors must start within ray.start_timeout "
                f"({self._settings.start_timeout:g} s), and have not: {self._describe_shortage()}"
            )
        exact = []
        for actor, call in enumerate(calls):
            is_exact, self._where[actor] = self._value(call)
            exact.append(is_exact)
        return all(exact)

    def _describe_shortage(self) -> str:
        """Compare the resources of the cluster with the needs of the actors, for a message."""
        nodes, apart = [node for node in self._ray.nodes() if node["Alive"]], ""
        if self._settings.learner_apart:
            here, apart = self._ray.get_runtime_context().get_node_id(), " apart from the learner's"
            nodes = [node for node in nodes if node["NodeID"] != here]
        parts = []
        for name, number in self._resources().items():
            total = sum(node["Resources"].get(name, 0.0) for node in nodes)
            parts.append(f"{name} {number:g} each, of {total:g}")
        return (
            f"{self.n_actors} actors reserve {', '.join(parts)} on {len(nodes)} nodes{apart}; try fewer actors "
            "(algo.n_actors), fewer CPUs for each (ray.num_cpus), or more nodes"
        )

    def _value(self, answer: Future) -> Any:
        """Return the answer of an actor, or raise its exception."""
        errors = self._ray.exceptions
        if not wait([answer], _ANSWER_WITHIN).done:
            raise ActorLost(f"it has not answered for {_ANSWER_WITHIN:g} s")
        try:
            sound, value = answer.result()
        except errors.RayTaskError as e:
            raise e.cause from e
        except errors.ActorUnavailableError as e:
            raise ActorLost("Ray cannot reach its process") from e
        except errors.RayError as e:
            raise ActorLost(first_sentence(e)) from e
        if not sound:
            raise_packed(*pickle.loads(value))
        return value


def connect(settings: RayResources, where: str, n_cpus: int | None, **options: Any) -> bool:
    """Connect this process to Ray, unless it is connected; return whether the caller must end the connection.

    `where` starts error messages. A local Ray has at least `n_cpus` CPUs (None: those of this machine), and gets
    `options` as further arguments of ``ray.init``.

    Raises ImportError if Ray is not installed, and ConnectionError if there is no Ray at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray's default of 30 is too short on a busy machine
    try:
        import ray
    except ModuleNotFoundError as e:
        if e.name != "ray":
            raise
        raise ImportError(f'{where}: Ray is not installed; try: pip install "rlox-cli[ray]"') from e
    if ray.is_initialized():
        return False
    arguments: dict[str, Any] = {"runtime_env": settings.runtime_env} if settings.runtime_env else {}
    if settings.address == "local":
        arguments |= {"include_dashboard": False, **options}
        if n_cpus is not None:
            arguments["num_cpus"] = max(n_cpus, os.cpu_count() or 1)
    else:
        _require_listener(settings.address, where)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=settings.address, log_to_driver=False, logging_level=logging.ERROR, **arguments)
    except Exception as e:
        reason = " ".join(str(e).split())
        raise ConnectionError(f"{where}={settings.address}: Ray does not answer: {reason}") from e
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler)  # Ray's own handler exits before anything is saved
    return True


def _require_listener(address: str, where: str) -> None:
    """Raise a ConnectionError if nothing listens at HOST:PORT, since Ray itself would try for more than a minute."""
    host, _, port = address.partition("://")[2 if "://" in address else 0].rpartition(":")
    if not (host and port.isdigit()):
        return  # for example auto, which Ray resolves at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_WITHIN).close()
    except OSError as e:
        raise ConnectionError(f"{where}={address}: no Ray listens there ({e}); `ray status` shows its address") from e


def first_sentence(e: BaseException) -> str:
    """Return the first sentence of a Ray error: the cause of an actor's death, or the text before the log paths."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("The actor is dead because")), lines[0] if lines else "")
    return reason.split(". ")[0].rstrip(".") or type(e).__name__


def _end(hosts: list[Any], group: list[Any], started: bool) -> None:
    """Stop all actors, and the Ray that was started for them."""
    import ray

    if ray.is_initialized():
        for host in hosts:
            ray.kill(host, no_restart=True)
        for reserved in group:
            ray.util.remove_placement_group(reserved)
        if started:
            ray.shutdown()
    hosts.clear()
    group.clear()

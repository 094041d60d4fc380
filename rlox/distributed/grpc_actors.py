"""Actors on workers (`rlox worker`) over gRPC: weights are sent there, and whole rollouts come back.

Messages of the session ``actor`` (see `rlox.envs.remote.server`): Hello has the fields ``n_envs n_steps seed``,
``config`` (the fields of `OnPolicyConfig`, which define the policy), ``sequence_length`` (null, or with a memory the
steps between the states that a rollout has) and ``env`` (as in `rlox.envs.remote.session`). Welcome is the same as in
that session. Then each ``rollout``, with the field ``version`` and the arrays ``policy/NAME`` and
``normalization/NAME``, is answered by a ``trajectory`` with the arrays of a `Trajectory`. The worker creates the policy
itself, and keeps the states of its memory: no code is sent.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rlox.collectors.vec_normalize import MOMENTS
from rlox.compiled import NativePolicy, obstacle
from rlox.config import OnPolicyConfig, RemoteConfig, integer
from rlox.distributed.actor import Actor
from rlox.distributed.protocol import ActorLost, ActorPlan, Trajectory, Weights
from rlox.distributed.threads import ThreadActors
from rlox.envs import EnvSpec
from rlox.envs.remote.client import Connection, WorkerLost
from rlox.envs.remote.codec import LARGEST_MESSAGE, Message, ProtocolError
from rlox.envs.remote.session import EnvSessions
from rlox.envs.remote.spaces import describe, read_spec, require_array
from rlox.kernels.rng import Rng
from rlox.kernels.stats import all_finite
from rlox.nn.acting import ModulePolicy

_GLANCE = 0.2  # seconds that the learner waits for a reconnection, each time it checks
_IMAGE_FEATURES = 4096  # upper bound of the features that a convolutional network computes from an image


class ActorSessions:
    """Creates a worker's actors, of at most `most_envs` of its `envs`, for messages of at most `limit` bytes."""

    def __init__(self, envs: EnvSessions, most_envs: int = 1024, limit: int = LARGEST_MESSAGE):
        self._envs, self._most_envs, self._limit = envs, most_envs, limit

    def __call__(self, hello: Message) -> ActorSession:
        asked, envs = hello.fields, self._envs
        n_envs = integer("hello", "n_envs", asked.get("n_envs"), 1, self._most_envs)
        n_steps = integer("hello", "n_steps", asked.get("n_steps"), 1, 2**20)
        seed = integer("hello", "seed", asked.get("seed"), 0, 2**63 - 1)
        envs.require(asked.get("env"))
        config = OnPolicyConfig.from_dict(asked.get("config"))  # raises if it is invalid
        length = asked.get("sequence_length")
        if length is not None and n_steps % (length := integer("hello", "sequence_length", length, 1, n_steps)):
            raise ValueError(f"hello: sequence_length must divide n_steps={n_steps}, got {length}")
        spec = envs.spec
        if (size := _rollout_bytes(spec, n_steps, n_envs, config)) > self._limit:
            raise ValueError(
                f"hello: n_steps must be such that a rollout fits in a message of {self._limit:,} bytes, got {n_steps} "
                f"in {n_envs} environments, {size:,} bytes"
            )
        most = self._limit // 4
        if (weights := _n_weights(spec, config)) > most:
            raise ValueError(
                f"hello: hidden_sizes must need at most {most:,} weights, which fit in a message of {self._limit:,} "
                f"bytes (--max-message-mb), got {weights:,}"
            )
        if obstacle(spec, config, None) is None:
            policy: Any = NativePolicy.make(spec, config, Rng(0))
        else:
            from rlox.nn.policies import make_policy

            policy = make_policy(spec, config, Rng(0))
        reward_fn, workers = "sign" if asked.get("reward_fn") == "sign" else None, min(envs.workers, n_envs)
        environment = (reward_fn, envs.kwargs, envs.wrappers, workers, envs.backend)
        plan = ActorPlan(envs.env, n_envs, n_steps, seed, policy, config, *environment, sequence_length=length)
        return ActorSession(plan, envs.about)


class ActorSession:
    """One actor of one learner."""

    def __init__(self, plan: ActorPlan, welcome: Message):
        self.welcome = welcome
        self._actor = Actor(plan, 0)

    def handle(self, message: Message) -> Message:
        if message.kind != "rollout":
            raise ProtocolError(f"a message must be rollout, got {message.kind[:40]!r}")
        parts: dict[str, dict[str, np.ndarray]] = {"policy": {}, "normalization": {}}
        for key, array in message.arrays.items():
            section, _, name = key.partition("/")
            if section not in parts:
                raise ProtocolError(f"rollout: arrays must be of policy or normalization, got {key[:80]!r}")
            parts[section][name] = array
        version = integer("rollout", "version", message.fields.get("version"), 0, 2**63 - 1)
        return Message("trajectory", {}, self._actor.rollout(Weights(version, **parts)).arrays())

    def close(self) -> None:
        self._actor.close()


class _RemoteActor:
    """The learner's side of an actor on a worker, driven by a thread."""

    exact = False

    def __init__(self, plan: ActorPlan, index: int, start: int, spec: EnvSpec, remote: RemoteConfig, timeout: float):
        self.address = address_of(remote, index, start)
        self._expected = (plan, spec)
        self._timeout = timeout
        named = {item.name: getattr(plan.config, item.name) for item in fields(OnPolicyConfig)}
        hello = {
            "n_envs": plan.n_envs,
            "n_steps": plan.n_steps,
            "seed": plan.seed_of(index, plan.start + start),
            "config": named,
            "sequence_length": plan.sequence_length,
            "env": describe(str(plan.env_id), plan.env_kwargs, plan.env_wrappers),
            "reward_fn": plan.reward_fn,
        }
        try:
            self._line = Connection(self.address, remote, "actor", hello)
        except WorkerLost as e:
            raise ActorLost(str(e)) from e
        if (theirs := read_spec(self._line.welcome)) != spec:
            self.close()
            raise ValueError(f"worker {self.address} must have the learner's spaces, {spec}, got {theirs}")

    def rollout(self, weights: Weights) -> Trajectory:
        parts = {"policy": weights.policy, "normalization": weights.normalization}
        arrays = {f"{part}/{name}": array for part, named in parts.items() for name, array in named.items()}
        try:
            self._line.send("rollout", {"version": weights.version}, arrays)
        except WorkerLost as e:
            raise ActorLost(str(e)) from e
        except ProtocolError as e:
            raise ValueError(
                f"GrpcActors: hidden_sizes must be such that the weights fit in a message to worker {self.address}: "
                f"{e}; use a smaller policy, or the workers' environments with remote.addresses"
            ) from e
        try:
            answer = self._line.receive(self._timeout)
            return _check_rollout(answer, *self._expected, weights.version)
        except WorkerLost as e:
            raise ActorLost(str(e)) from e
        except ProtocolError as e:
            self.close()
            raise ActorLost(f"worker {self.address} sent an invalid rollout: {e}") from e

    def close(self) -> None:
        self._line.close()


class _Attempt(threading.Thread):
    """Connects to a new actor while the learner continues, since an unreachable machine is detected only slowly."""

    def __init__(self, make: Callable[[], _RemoteActor]):
        super().__init__(name="rlox actor, connecting", daemon=True)
        self._make = make
        self._lock = threading.Lock()
        self._abandoned = False
        self.actor: _RemoteActor | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            actor = self._make()
        except Exception as e:
            self.error = e
            return
        with self._lock:
            if self._abandoned:
                actor.close()
            else:
                self.actor = actor

    def abandon(self) -> None:
        """Close its actor, now or as soon as it is created."""
        with self._lock:
            self._abandoned = True
            if self.actor is not None:
                self.actor.close()


class GrpcActors(ThreadActors):
    """`n_actors` actors on workers (see `rlox.distributed.ActorPool`), spread evenly over their addresses.

    An actor whose worker is lost or unavailable starts on the next address, and so on in turn. The `plan` must have the
    default policy of its configuration, and the workers' environment; a rollout may take `timeout` seconds.

    Raises ValueError or TypeError if a policy or reward function would have to be sent as code, or a worker refuses the
    session, and ActorLost if no worker can be reached.
    """

    def __init__(self, plan: ActorPlan, n_actors: int, spec: EnvSpec, remote: RemoteConfig, timeout: float):
        _require_no_code(plan, spec)
        self._make = partial(_RemoteActor, plan, spec=spec, remote=remote, timeout=timeout)
        self._remote = remote
        self._starts = [0] * n_actors
        self._attempts: dict[int, _Attempt] = {}  # reconnections in progress
        self._begin([partial(self._first, i) for i in range(n_actors)])

    def _first(self, actor: int) -> _RemoteActor:
        """Connect to the actor on its worker, or on the next worker that can be reached."""
        while True:
            try:
                return self._make(actor, self._starts[actor])
            except ActorLost:
                self._starts[actor] += 1
                if self._starts[actor] == len(self._remote.addresses):
                    raise

    def restart(self, actor: int) -> None:
        attempt = self._attempts.get(actor)
        if attempt is None:
            self._seats[actor].actor.close()  # ends the thread's call
            self._starts[actor] += 1
            attempt = self._attempts[actor] = _Attempt(partial(self._make, actor, self._starts[actor]))
        attempt.join(_GLANCE)
        if attempt.is_alive():
            raise ActorLost(f"worker {address_of(self._remote, actor, self._starts[actor])} has not answered yet")
        del self._attempts[actor]
        if attempt.error is not None:
            raise attempt.error
        self._replace(actor, attempt.actor)

    def close(self) -> None:
        for attempt in self._attempts.values():
            attempt.abandon()
        super().close()

    def describe(self, actor: int) -> str:
        start = self._starts[actor] if actor < len(self._starts) else 0
        return f"actor {actor} (on worker {address_of(self._remote, actor, start)})"


def address_of(remote: RemoteConfig, actor: int, start: int) -> str:
    """Return the address of the worker for an actor that was started `start` times before."""
    return remote.addresses[(actor + start) % len(remote.addresses)]


def _require_no_code(plan: ActorPlan, spec: EnvSpec) -> None:
    where = "GrpcActors"
    if callable(plan.reward_fn) or plan.reward_fn not in (None, "sign"):
        raise TypeError(
            f"{where}: reward_fn must be sign or null, got a function, which would have to be sent as code; put it "
            "into the workers' environment as a wrapper, or use their environments with remote.addresses"
        )
    if not isinstance(plan.env_id, str):
        raise TypeError(f"{where}: env_id must be the id of the workers' environment, got {plan.env_id!r}")
    from rlox.nn import policies

    known = (policies.DiscretePolicy, policies.MultiDiscretePolicy, policies.ContinuousPolicy)
    if isinstance(plan.policy, ModulePolicy) and type(plan.policy.module) not in known:
        raise TypeError(
            f"{where}: policy must be one of rlox's own, got {plan.policy}, which would have to be sent "
            "as code; use the workers' environments with remote.addresses"
        )


def _rollout_bytes(spec: EnvSpec, n_steps: int, n_envs: int, config: OnPolicyConfig) -> int:
    """Estimate the bytes of the largest message of a rollout, in which every step is a truncation."""
    obs, mask = spec.obs_dim * np.dtype(spec.obs_dtype).itemsize, sum(spec.choices) if spec.masked else 0
    memory = 0
    if config.recurrent:
        memory = 1 + 2 * (4 * 2 * 2 * config.memory_size * config.memory_layers)  # before and after each step
    return 4096 + (n_steps + 1) * n_envs * (2 * obs + 8 * math.prod(spec.action_shape) + mask + memory + 64)


def _n_weights(spec: EnvSpec, config: OnPolicyConfig) -> int:
    """Return an approximate upper bound of the number of weights of the default policy."""
    n_outputs = spec.n_actions or spec.act_dim or sum(spec.n_choices or ())
    widths = [_IMAGE_FEATURES if spec.image else spec.obs_dim, *config.hidden_sizes]
    n, width = sum((n_in + 1) * n_out for n_in, n_out in pairwise(widths)), widths[-1]
    if config.recurrent:
        for _ in range(config.memory_layers):
            n += 4 * config.memory_size * (width + config.memory_size + 2)
            width = config.memory_size
    return 2 * (n + (width + 1) * n_outputs)


def _are_legal(actions: np.ndarray, masks: np.ndarray, choices: tuple[int, ...]) -> bool:
    """Return whether `masks` (T, N, sum of choices) allow actions (T, N, K) of K components with these choices."""
    first = np.cumsum([0, *choices[:-1]])  # of each component in a mask
    return bool(np.take_along_axis(masks, actions + first, -1).all())


def _check_rollout(message: Message, plan: ActorPlan, spec: EnvSpec, version: int) -> Trajectory:
    """Return the rollout that a worker has sent; raise a ProtocolError if it does not match this learner's request."""
    steps, n_limits = (plan.n_steps, plan.n_envs), len(message.arrays.get("limits", ()))
    n_ended = len(message.arrays.get("episode_returns", ()))
    expected: dict[str, tuple[tuple[int, ...], Any]] = {
        **plan.layout(spec),
        "limits": ((n_limits, 2), np.int64),
        "reached": ((n_limits, *spec.obs_shape), spec.obs_dtype),
        "episode_returns": ((n_ended,), np.float64),
        "episode_lengths": ((n_ended,), np.int64),
        "version": ((), np.int64),
        "seconds": ((), np.float64),
    }
    if plan.policy.state_dim:
        expected["limit_memories"] = ((n_limits, plan.policy.state_dim), np.float32)
    shapes = {"obs": spec.obs_shape, "return": ()}
    moments = {f"moments/{key}_{part}": () if part == "count" else shapes[key] for key in shapes for part in MOMENTS}
    arrays = {name: array for name, array in message.arrays.items() if not name.startswith("moments/")}
    if message.kind != "trajectory" or set(arrays) != set(expected):
        raise ProtocolError(f"it must be a trajectory of {sorted(expected)}, got {message.kind[:40]!r}")
    for name, (shape, dtype) in expected.items():
        require_array(message, name, shape, dtype)
    for name, array in message.arrays.items():
        if name.startswith("moments/") and (
            name not in moments or (array.shape, array.dtype) != (moments[name], float)
        ):
            raise ProtocolError(f"{name[:80]} must be one of {sorted(moments)}, got {array.dtype} {array.shape}")
    numbers = [array for array in message.arrays.values() if array.dtype.kind == "f"]
    if not all(np.isfinite(array).all() if array.ndim == 0 else all_finite(array) for array in numbers):
        raise ProtocolError("its numbers must be finite")
    at = arrays["limits"]
    if n_limits and not ((at >= 0).all() and (at < steps).all()):
        raise ProtocolError(f"limits must be steps and environments of a rollout {steps}")
    top = spec.n_actions if spec.n_choices is None else np.array(spec.n_choices)
    if top is not None and not ((arrays["actions"] >= 0).all() and (arrays["actions"] < top).all()):
        raise ProtocolError("actions must be actions of the environment")
    if spec.masked and not _are_legal(arrays["actions"].reshape(*steps, -1), arrays["masks"], spec.choices):
        raise ProtocolError("actions must be legal by the masks")
    if int(arrays["version"]) != version:
        raise ProtocolError(f"version must be {version}, got {arrays['version']}")
    # Views of a message cannot be written to, about which PyTorch would warn.
    return Trajectory.of({name: array.copy() for name, array in message.arrays.items()})

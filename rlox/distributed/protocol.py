"""Messages between actors and the learner, and the interface of actor pools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.envs import EnvSpec, env_name
from rlox.envs.workers import pack_with_imports
from rlox.kernels.rng import Rng
from rlox.nn.acting import acting_policy

if TYPE_CHECKING:
    from rlox.collectors import RewardFn
    from rlox.config import OnPolicyConfig, RemoteConfig

_MOST_ACTORS = 1 << 20
_OPTIONAL = ("masks", "memories", "is_first", "limit_memories")  # fields of a `Trajectory` that may be missing


class ActorLost(RuntimeError):
    """Raised when an actor's process, machine or connection failed, or it no longer answers.

    It is not raised for errors of its environments. Requested rollouts are lost. A restarted actor starts fresh
    episodes.
    """


@dataclass(frozen=True)
class Weights:
    """The weights that an actor acts with; never changed after creation, so that threads may share them."""

    version: int  # number of updates of the learner that they include
    policy: dict[str, np.ndarray]  # by the names of the policy's ``state_dict``
    normalization: dict[str, np.ndarray] = field(default_factory=dict)  # `VecNormalize.state`; empty: none


@dataclass(frozen=True)
class Trajectory:
    """T steps in the N environments of one actor, as the actor observed them."""

    obs: np.ndarray  # (T + 1, N, *obs_shape), normalised if the actor normalises
    actions: np.ndarray  # (T, N, *action_shape), as sampled
    log_probs: np.ndarray  # (T, N) f32, nats, under the policy that acted
    rewards: np.ndarray  # (T, N) f32, after reward_fn and normalisation
    terminated: np.ndarray  # (T, N) bool
    truncated: np.ndarray  # (T, N) bool
    limits: np.ndarray  # (K, 2) int64: step and environment of each truncation
    reached: np.ndarray  # (K, *obs_shape): the final observation of each truncation
    episode_returns: np.ndarray  # (E,) f64, undiscounted, of the episodes that ended
    episode_lengths: np.ndarray  # (E,) int64
    version: int  # of the weights that acted
    seconds: float = 0.0  # time that the collection took
    moments: dict[str, np.ndarray] = field(default_factory=dict)  # `VecNormalize.since`: new normalisation statistics
    masks: np.ndarray | None = None  # (T, N, n_choices) bool, legal actions; None: all are
    # Of a policy with a memory of S numbers, as the actor had it; None without one:
    memories: np.ndarray | None = None  # (C, N, S) f32, before the first step of each of C equal parts of the steps
    is_first: np.ndarray | None = None  # (T, N) bool, first step of an episode
    limit_memories: np.ndarray | None = None  # (K, S) f32, after each truncated step

    def __len__(self) -> int:
        """Number of environment steps."""
        return self.rewards.size

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all fields that are not None as arrays by name; `of` is the inverse."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "moments"}
        arrays = {name: np.asarray(value) for name, value in values.items() if value is not None}
        return {**arrays, **{f"moments/{name}": array for name, array in self.moments.items()}}

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> Trajectory:
        """Create a trajectory from the result of `arrays`; raise a ValueError or KeyError if they do not fit."""
        moments = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith("moments/")}
        names = [item.name for item in fields(cls) if item.name != "moments"]
        plain: dict[str, Any] = {name: arrays[name] for name in names if name in arrays or name not in _OPTIONAL}
        plain.update(version=int(plain["version"]), seconds=float(plain["seconds"]))
        steps, obs = arrays["rewards"].shape, arrays["obs"]
        if len(steps) != 2 or obs.shape[:2] != (steps[0] + 1, steps[1]) or arrays["actions"].shape[:2] != steps:
            raise ValueError(f"Trajectory: obs and actions must fit rewards {steps}, got {obs.shape}")
        for name in ("log_probs", "terminated", "truncated"):
            if arrays[name].shape != steps:
                raise ValueError(f"Trajectory: {name} must have shape {steps}, got {arrays[name].shape}")
        masks, memories = plain.get("masks"), plain.get("memories")
        if masks is not None and (masks.ndim != 3 or masks.shape[:2] != steps):
            raise ValueError(f"Trajectory: masks must fit rewards {steps}, got {masks.shape}")
        if memories is not None:
            shapes = memories.shape, plain["limit_memories"].shape, plain["is_first"].shape
            n_parts, _, size = shapes[0] if memories.ndim == 3 else (0, 0, 0)
            expected = (n_parts, steps[1], size), (len(plain["limits"]), size), steps
            if not n_parts or steps[0] % n_parts or shapes != expected:
                raise ValueError(f"Trajectory: memories must fit rewards {steps}, got {shapes}")
        return cls(**plain, moments=moments)


def rollout_layout(
    spec: EnvSpec, n_steps: int, n_envs: int, state_dim: int = 0, n_parts: int = 1
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of those arrays of a `Trajectory` that have the same size in each.

    A policy with a memory of `state_dim` numbers has its states before `n_parts` parts of the steps.
    """
    steps = (n_steps, n_envs)
    layout: dict[str, tuple[tuple[int, ...], Any]] = {
        "obs": ((n_steps + 1, n_envs, *spec.obs_shape), spec.obs_dtype),
        "actions": ((*steps, *spec.action_shape), spec.action_dtype),
        "log_probs": (steps, np.float32),
        "rewards": (steps, np.float32),
        "terminated": (steps, np.bool_),
        "truncated": (steps, np.bool_),
    }
    if spec.masked:
        layout["masks"] = ((*steps, sum(spec.choices)), np.bool_)
    if state_dim:
        layout["memories"] = ((n_parts, n_envs, state_dim), np.float32)
        layout["is_first"] = (steps, np.bool_)
    return layout


@dataclass
class ActorPlan:
    """Specification of the actors of a pool."""

    env_id: str | Callable[[], Any]
    n_envs: int  # of each actor
    n_steps: int  # of each rollout
    seed: int
    policy: Any  # an `rlox.nn.acting.ActingPolicy` or a module
    config: OnPolicyConfig
    reward_fn: RewardFn | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    env_wrappers: Sequence[Any] = ()
    env_workers: int = 0
    env_backend: str = "auto"
    remote: RemoteConfig | None = None  # the workers that run the actors or their environments
    start: int = 0  # added to each actor's `start` for `seed_of`, so that a continued run uses new seeds
    sequence_length: int | None = None  # with a memory, steps between the states that a rollout has; None: all steps

    def __post_init__(self) -> None:
        self.policy = acting_policy(self.policy)

    def layout(self, spec: EnvSpec) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return `rollout_layout` of its rollouts in environments of `spec`."""
        n_parts = self.n_steps // (self.sequence_length or self.n_steps)
        return rollout_layout(spec, self.n_steps, self.n_envs, self.policy.state_dim, n_parts)

    def copy_policy(self) -> ActorPlan:
        """Return the same plan with its own copy of the policy, on the CPU."""
        return replace(self, policy=self.policy.copy())

    def pickle(self, where: str, *more: Any) -> bytes:
        """Pickle the plan and `more` for another process (`rlox.envs.workers.unpack_imports`).

        Raises TypeError if cloudpickle cannot send it.
        """
        try:
            return pack_with_imports((self, *more), self.env_id)
        except Exception as e:
            raise TypeError(
                f"{where}: {env_name(self.env_id)}, its kwargs, reward_fn and policy must be such that cloudpickle can "
                f"send them to another process: {e}; pass an id, or use actors=threads"
            ) from e

    def seed_of(self, actor: int, start: int) -> int:
        """Return the seed of an actor's environments and actions, which differs for each of its starts."""
        if actor == start == 0:
            return self.seed
        rng = Rng(self.seed, Stream.ACTORS)
        rng.skip(start * _MOST_ACTORS + actor)
        return int(rng.integers(2**62, 1)[0])


class ActorPool(Protocol):
    """Interface of actor pools: each actor answers requests for rollouts one after the other, in order.

    All methods are called by the learner's thread.
    """

    n_actors: int

    @property
    def exact(self) -> bool:
        """Whether `state` contains everything that a rollout depends on."""
        ...

    def request(self, actor: int, weights: Weights) -> None:
        """Request one more rollout with `weights`, and return at once. `result` raises if the actor is gone."""
        ...

    def ready(self, actors: Collection[int], timeout: float) -> list[int]:
        """Return those of `actors` that have answered, the earliest first; wait up to `timeout` seconds for one."""
        ...

    def result(self, actor: int) -> Trajectory:
        """Return the oldest answer of an actor that is `ready`, or raise an exception of its environments.

        Raises ActorLost if the actor is gone; all its requested rollouts are lost.
        """
        ...

    def restart(self, actor: int) -> None:
        """Stop an actor if it still runs, and start it again with fresh episodes and no requests.

        Raises ActorLost if it cannot be started (yet); call it again to retry.
        """
        ...

    def state(self, actor: int) -> dict[str, np.ndarray]:
        """Return a snapshot of an actor without pending requests, if the pool is `exact`."""
        ...

    def set_state(self, actor: int, state: dict[str, np.ndarray]) -> None:
        """Continue from the result of `state`; raise a ValueError or TypeError if it does not fit."""
        ...

    def describe(self, actor: int) -> str:
        """Describe the actor and where it runs, for messages."""
        ...

    def close(self) -> None:
        """Stop all actors; requested rollouts are dropped."""
        ...

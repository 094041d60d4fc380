"""What actors and the learner send each other, and what every pool of actors does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.kernels.rng import Rng

if TYPE_CHECKING:
    from torch import nn

    from rlox.collectors import RewardFn
    from rlox.config import OnPolicyConfig, RemoteConfig
    from rlox.native import NativePolicy

_MOST_ACTORS = 1 << 20


class ActorLost(RuntimeError):
    """An actor is gone, or no longer answers: its process, machine or connection failed, not its environments.

    The rollout it was asked for is lost with it. An actor that is restarted starts fresh episodes.
    """


@dataclass(frozen=True)
class Weights:
    """What an actor acts with; never changed once it was made, so that threads may share it."""

    version: int  # updates of the learner that it has gone through
    policy: dict[str, np.ndarray]  # by the names of the policy's ``state_dict``
    normalization: dict[str, np.ndarray] = field(default_factory=dict)  # `VecNormalize.state`; empty: none

    @property
    def n_bytes(self) -> int:
        """Size of its arrays."""
        return sum(array.nbytes for part in (self.policy, self.normalization) for array in part.values())


@dataclass(frozen=True)
class Trajectory:
    """T steps in the N environments of one actor, as it saw and took them."""

    obs: np.ndarray  # (T + 1, N, *obs_shape), normalised where the actor normalises
    actions: np.ndarray  # (T, N, *action_shape), as sampled
    log_probs: np.ndarray  # (T, N) f32, nats: of the policy that acted
    rewards: np.ndarray  # (T, N) f32, after reward_fn and normalisation
    terminated: np.ndarray  # (T, N) bool
    truncated: np.ndarray  # (T, N) bool
    limits: np.ndarray  # (K, 2) int64: step and environment of each truncation
    reached: np.ndarray  # (K, *obs_shape): what it truly led to
    episode_returns: np.ndarray  # (E,) f64, undiscounted, of the episodes that ended
    episode_lengths: np.ndarray  # (E,) int64
    version: int  # of the weights that acted
    seconds: float = 0.0  # that it took to collect
    moments: dict[str, np.ndarray] = field(default_factory=dict)  # `VecNormalize.since`: what normalisation has seen

    def __len__(self) -> int:
        """Environment steps."""
        return self.rewards.size

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything in it as arrays by name; `of` is the way back."""
        found = {item.name: np.asarray(getattr(self, item.name)) for item in fields(self) if item.name != "moments"}
        return {**found, **{f"moments/{name}": array for name, array in self.moments.items()}}

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> Trajectory:
        """What `arrays` returned; a ValueError or KeyError where something is missing or fits nothing else."""
        moments = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith("moments/")}
        plain: dict[str, Any] = {item.name: arrays[item.name] for item in fields(cls) if item.name != "moments"}
        plain.update(version=int(plain["version"]), seconds=float(plain["seconds"]))
        made = cls(**plain, moments=moments)
        steps = made.rewards.shape
        if len(steps) != 2 or made.obs.shape[:2] != (steps[0] + 1, steps[1]) or made.actions.shape[:2] != steps:
            raise ValueError(f"Trajectory: obs and actions must fit rewards {steps}, got {made.obs.shape}")
        for name in ("log_probs", "terminated", "truncated"):
            if getattr(made, name).shape != steps:
                raise ValueError(f"Trajectory: {name} must have shape {steps}, got {getattr(made, name).shape}")
        return made


@dataclass
class ActorPlan:
    """What every actor of a pool is made of."""

    env_id: str | Callable[[], Any]
    n_envs: int  # of each actor
    n_steps: int  # of each rollout
    seed: int
    policy: NativePolicy | nn.Module  # a copy, for the actors alone
    config: OnPolicyConfig
    reward_fn: RewardFn | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    env_wrappers: Sequence[Any] = ()
    env_workers: int = 0
    env_backend: str = "auto"
    remote: RemoteConfig | None = None  # the workers that the actors, or their environments, live on
    start: int = 0  # how many actors were started before, in runs that this one continues

    def seed_of(self, actor: int, start: int) -> int:
        """Seed of an actor's environments and actions; another one after each of its starts."""
        if actor == start == 0:
            return self.seed
        rng = Rng(self.seed, Stream.ACTORS)
        rng.skip(start * _MOST_ACTORS + actor)
        return int(rng.integers(2**62, 1)[0])


class ActorPool(Protocol):
    """Actors, wherever they run: each answers requests for rollouts one after the other, in order.

    All methods are called by one thread, the learner's.
    """

    n_actors: int

    @property
    def exact(self) -> bool:
        """Whether `state` gives all that a rollout depends on."""
        ...

    def request(self, actor: int, weights: Weights) -> None:
        """Ask for one more rollout with `weights`; returns at once. An actor that is gone is found by `result`."""
        ...

    def ready(self, actors: Collection[int], timeout: float) -> list[int]:
        """Those of `actors` that have answered, the first to answer first; waits up to `timeout` seconds for one."""
        ...

    def result(self, actor: int) -> Trajectory:
        """The oldest answer of an actor that is `ready`.

        Raises
        ------
        ActorLost
            If the actor is gone; everything it was asked for is lost.
        Exception
            What its environments, or their reward function, have raised.
        """
        ...

    def restart(self, actor: int) -> None:
        """End what is left of an actor and start it anew, with fresh episodes and no requests.

        Raises
        ------
        ActorLost
            If that cannot be done (yet); it may be tried again.
        """
        ...

    def state(self, actor: int) -> dict[str, np.ndarray]:
        """Snapshot of an actor without requests, where the pool is `exact`."""
        ...

    def set_state(self, actor: int, state: dict[str, np.ndarray]) -> None:
        """Continue from what `state` returned; a ValueError or TypeError for what does not fit."""
        ...

    def describe(self, actor: int) -> str:
        """For messages: what and where it is."""
        ...

    def close(self) -> None:
        """End all actors; what they were asked for is given up."""
        ...

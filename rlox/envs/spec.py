"""What an algorithm must know of an environment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import numpy as np

from rlox.kernels.rng import Rng


@dataclass(frozen=True, eq=False)
class EnvSpec:
    """Shapes, sizes and bounds; what does not apply to the environment's actions is None.

    Exactly one kind of action: `n_actions` (one integer), `n_choices` (K integers), or `act_dim` with its bounds.
    """

    obs_shape: tuple[int, ...]  # (D,), or (C, H, W) for images
    obs_dtype: type = np.float32  # np.float32, or np.uint8 for images
    n_stacked: int = 1  # frames in an image that moves on by one frame a step (gymnasium's FrameStackObservation)
    obs_bytes: tuple[int, ...] | None = None  # shape of a uint8 Box that is no image: its numbers are taken as they are
    n_actions: int | None = None  # Discrete: how many actions
    n_choices: tuple[int, ...] | None = None  # MultiDiscrete: how many choices each of the K components has
    act_dim: int | None = None  # Box: length A of an action
    act_low: np.ndarray | None = None  # (A,) f32, -inf where unbounded
    act_high: np.ndarray | None = None  # (A,) f32, inf where unbounded
    # What an observation of several parts is made of: the key of each, and how many numbers it has.
    parts: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnvSpec) and all(
            np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self) if item.compare
        )

    def part(self, i: int) -> str:
        """Where number `i` of an observation comes from: the key of its part and the place in there."""
        for key, size in self.parts:
            if i < size:
                return f"number {i} of {key!r}"
            i -= size
        return f"number {i}"

    @property
    def obs_dim(self) -> int:
        """D; for images the number of values in one."""
        return math.prod(self.obs_shape)

    @property
    def image(self) -> bool:
        return len(self.obs_shape) == 3 and self.obs_dtype == np.uint8

    @property
    def discrete(self) -> bool:
        return self.n_actions is not None

    @property
    def continuous(self) -> bool:
        return self.act_dim is not None

    @property
    def action_kind(self) -> str:
        """``discrete``, ``multi-discrete`` or ``continuous``."""
        return "discrete" if self.discrete else "continuous" if self.continuous else "multi-discrete"

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action: () for Discrete, (K,) for MultiDiscrete, (A,) for Box."""
        if self.n_choices is not None:
            return (len(self.n_choices),)
        return () if self.act_dim is None else (self.act_dim,)

    @property
    def action_dtype(self) -> type:
        return np.float32 if self.continuous else np.int64

    def describe_actions(self) -> str:
        """For messages: ``2 discrete actions``, ``3 components of 2, 2, 5 choices``, ``1 action component``."""
        if self.discrete:
            return f"{self.n_actions} discrete actions"
        if self.n_choices is not None:
            return f"{len(self.n_choices)} components of {', '.join(map(str, self.n_choices))} choices"
        return f"{self.act_dim} action component{'' if self.act_dim == 1 else 's'}"

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """Continuous actions within their bounds; other actions as they are."""
        return np.clip(actions, self.act_low, self.act_high) if self.continuous else actions

    def to_unit(self, actions: np.ndarray) -> np.ndarray:
        """Continuous actions (B, A) within finite bounds as numbers in [-1, 1]."""
        low, high = self.act_low, self.act_high
        return (actions - (high + low) / 2) / ((high - low) / 2)  # type: ignore[operator]  # there where continuous

    def random_actions(self, rng: Rng, n: int) -> np.ndarray:
        """`n` uniformly random actions; continuous ones must be bounded."""
        if self.discrete:
            return rng.integers(self.n_actions, n)
        if self.n_choices is not None:
            return (rng.uniform((n, len(self.n_choices)), dtype=np.float64) * self.n_choices).astype(np.int64)
        # Continuous: there are bounds.
        return self.act_low + (self.act_high - self.act_low) * rng.uniform((n, self.act_dim))  # type: ignore[operator]


def spec_of(vec) -> EnvSpec:
    """The `EnvSpec` of what `make_vec_env` made."""
    from rlox.kernels.envs.vec_env import VecEnv

    if not isinstance(vec, VecEnv):
        return vec.spec
    if vec.discrete:
        return EnvSpec((vec.obs_dim,), n_actions=vec.n_actions)
    return EnvSpec((vec.obs_dim,), act_dim=vec.act_dim, act_low=vec.act_low, act_high=vec.act_high)

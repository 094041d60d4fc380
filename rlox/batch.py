"""The data of one update: a rollout, or a sample of a replay memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.envs import EnvSpec
from rlox.kernels.rng import Rng

# PyTorch is imported where tensors are asked for: what runs natively takes a second less to start without it.
if TYPE_CHECKING:
    import torch


class FrameStacks:
    """B images that are stacks of K frames, each frame stored once however many stacks it is in.

    Behaves as the tensor (B, K * C, H, W) where a rollout's observations are read: ``len``, ``shape``, ``dim()``,
    ``device``, ``split(n)`` and indexing with rows or a slice, which puts the stacks together.

    Parameters
    ----------
    frames : Tensor (M, C, H, W)
        All frames.
    index : Tensor (B, K) int64
        The frames of each stack, oldest first.
    """

    def __init__(self, frames: torch.Tensor, index: torch.Tensor):
        self.frames = frames
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: torch.Tensor | slice) -> torch.Tensor:
        return self.frames[self.index[rows]].flatten(1, 2)

    @property
    def shape(self) -> torch.Size:
        import torch

        stacked = self.index.shape[1] * self.frames.shape[1]
        return torch.Size((len(self), stacked, *self.frames.shape[2:]))

    @property
    def device(self) -> torch.device:
        return self.frames.device

    def dim(self) -> int:
        return 4

    def split(self, n: int) -> Iterator[torch.Tensor]:
        """The stacks in order, `n` at a time."""
        return (self[start : start + n] for start in range(0, len(self), n))


class _Column:
    """A column of a batch: kept as it was given, array or tensor, and read as a tensor that shares its memory."""

    def __init__(self, optional: bool = False):
        self._optional = optional  # None by default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: Any, owner: type | None = None) -> torch.Tensor | None:
        if batch is None and self._optional:
            return None
        if batch is None:
            raise AttributeError(self._name)  # tells dataclass that there is no default
        value = batch.__dict__[self._name]
        if isinstance(value, np.ndarray):
            import torch

            value = batch.__dict__[self._name] = torch.from_numpy(value)
        return value

    def __set__(self, batch: Any, value: Any) -> None:
        batch.__dict__[self._name] = value


class _Columns:
    def array(self, name: str) -> np.ndarray | None:
        """A column on the CPU as a NumPy array that shares its memory."""
        value = self.__dict__[name]
        return value if value is None or isinstance(value, np.ndarray) else value.detach().numpy()


@dataclass
class RolloutBatch(_Columns):
    """B = T * N transitions of T steps in N environments, flat, step after step: row ``t * N + n``.

    The first seven are tensors on the learner's device, and may be given as NumPy arrays. ``dones`` is a NumPy array;
    so are ``episode_*``, of the episodes that ended in this rollout, in the order in which they ended, from the
    environment's own statistics (before any ``reward_fn``).
    """

    obs: torch.Tensor | FrameStacks = _Column()  # (B, D) f32 or (B, C, H, W) uint8, observation before the action
    actions: torch.Tensor = _Column()  # (B,) or (B, K) int64, or (B, A) f32, as sampled
    log_probs: torch.Tensor = _Column()  # (B,) f32, nats
    values: torch.Tensor = _Column()  # (B,) f32
    advantages: torch.Tensor = _Column()  # (B,) f32, not normalised
    returns: torch.Tensor = _Column()  # (B,) f32, advantages + values
    rewards: torch.Tensor = _Column()  # (B,) f32, after reward_fn
    episode_returns: np.ndarray = field(default_factory=lambda: np.empty(0))  # (E,) f64, undiscounted
    episode_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # (E,) int64, steps
    dones: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))  # (B,) bool, terminated or truncated

    def __len__(self) -> int:
        return len(self.__dict__["obs"])

    def explained_variance(self) -> torch.Tensor:
        """Share of the returns' variance that the values explain, (): 1 is perfect, below 0 worse than a constant."""
        return 1.0 - (self.returns - self.values).var() / self.returns.var()

    def sample_minibatches(
        self, batch_size: int, shuffle: bool = True, rng: Rng | None = None
    ) -> Iterator[RolloutBatch]:
        """Yield every transition once, `batch_size` at a time; the last minibatch may be smaller.

        `rng` decides the order; without it a generator seeded from PyTorch's does.

        Raises
        ------
        ValueError
            If `batch_size` < 1.
        """
        if batch_size < 1:
            raise ValueError(f"sample_minibatches: batch_size must be >= 1, got {batch_size}")
        columns = [
            self.obs,
            self.actions,
            self.log_probs,
            self.values,
            self.advantages,
            self.returns,
            self.rewards,
        ]
        if shuffle:
            import torch

            from rlox.networks import rng_from_torch

            order = torch.from_numpy((rng or rng_from_torch()).permutation(len(self))).to(self.obs.device)
            if self.obs.dim() > 2:
                # Images: no second copy of the whole rollout.
                for rows in order.split(batch_size):
                    yield RolloutBatch(*(column[rows] for column in columns))
                return
            # One gather for the whole epoch; the minibatches are then slices of it, without a copy.
            columns = [column[order] for column in columns]
        for parts in zip(*(column.split(batch_size) for column in columns), strict=True):
            yield RolloutBatch(*parts)


@dataclass
class TransitionBatch(_Columns):
    """B transitions from a replay memory: tensors on the learner's device, which may be given as NumPy arrays."""

    obs: torch.Tensor = _Column()  # (B, D) f32 or (B, C, H, W) uint8, observation before the action
    actions: torch.Tensor = _Column()  # (B,) or (B, K) int64, or (B, A) f32
    rewards: torch.Tensor = _Column()  # (B,) f32, or discounted sums of n rewards
    next_obs: torch.Tensor = _Column()  # like obs, what the (last) step truly led to
    discounts: torch.Tensor = _Column()  # (B,) f32, factor of what comes after: gamma^n, 0 where it terminated
    weights: torch.Tensor | None = _Column(optional=True)  # (B,) f32, importance weights; None: all were as likely
    indices: np.ndarray | None = None  # (B,), where the memory wants to be told the new priorities

    def __len__(self) -> int:
        return len(self.__dict__["rewards"])

    @classmethod
    def from_rows(cls, rows: Mapping[str, np.ndarray], gamma: float, spec: EnvSpec, device: str) -> TransitionBatch:
        """What `rlox.buffers.Buffer.sample` returned, in the shapes of `spec`.

        A time limit leaves the discount as it is: only terminations end the value of what comes after.
        """
        n = len(rows["rewards"])

        def column(values: np.ndarray, dtype: type = np.float32, shape: tuple[int, ...] = ()) -> Any:
            found = np.asarray(values, dtype).reshape(n, *shape)
            if device == "cpu":
                return found
            import torch

            return torch.from_numpy(found).to(device)

        discounts = rows["discounts"] if "discounts" in rows else np.float32(gamma)
        return cls(
            obs=column(rows["obs"], spec.obs_dtype, spec.obs_shape),
            actions=column(rows["actions"], spec.action_dtype, spec.action_shape),
            rewards=column(rows["rewards"]),
            next_obs=column(rows["next_obs"], spec.obs_dtype, spec.obs_shape),
            discounts=column(~np.asarray(rows["terminated"], np.bool_) * discounts),
            weights=column(rows["weights"]) if "weights" in rows else None,
            indices=rows.get("indices"),
        )

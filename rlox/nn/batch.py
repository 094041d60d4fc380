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
            raise AttributeError(self._name)  # so dataclass finds no default
        value = batch.__dict__[self._name]
        if isinstance(value, np.ndarray):
            import torch

            value = batch.__dict__[self._name] = torch.from_numpy(value)
        return value

    def __set__(self, batch: Any, value: Any) -> None:
        batch.__dict__[self._name] = value


class _Columns:
    def array(self, name: str) -> np.ndarray | None:
        """A column as a NumPy array, which shares its memory where that is the CPU's."""
        value = self.__dict__[name]
        return value if value is None or isinstance(value, np.ndarray) else value.detach().cpu().numpy()


@dataclass
class RolloutBatch(_Columns):
    """B = T * N transitions of T steps in N environments, flat, step after step: row ``t * N + n``.

    Every column with a row for each transition is read as a tensor on the learner's device, also where it was given as
    a NumPy array, and is in every minibatch. ``episode_*`` have a row for each episode, and are NumPy arrays: of the
    episodes that ended in this rollout, in the order in which they ended, from the environment's own statistics (before
    any ``reward_fn``). A minibatch has none.
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
    dones: torch.Tensor | None = _Column(optional=True)  # (B,) bool, terminated or truncated; None: not given
    taken: int | None = None  # environment steps that were taken for it; None: one for each row

    def __len__(self) -> int:
        return len(self.__dict__["obs"])

    @property
    def n_taken(self) -> int:
        """Environment steps that were taken for this batch: its length, without what was replayed."""
        return len(self) if self.taken is None else self.taken

    def explained_variance(self) -> torch.Tensor:
        """Share of the returns' variance that the values explain, (): 1 is perfect, below 0 worse than a constant."""
        return 1.0 - (self.returns - self.values).var() / self.returns.var()

    def sample_minibatches(
        self, batch_size: int, shuffle: bool = True, rng: Rng | None = None
    ) -> Iterator[RolloutBatch]:
        """Yield every transition once, `batch_size` at a time; the last minibatch may be smaller, or one row larger.

        A single row that would be left over joins the minibatch before it, since one row has no standard deviation
        (PyTorch's is NaN); so there is a minibatch of one row only where `batch_size` is 1, or the rollout has one.
        `rng` decides the order; without it a generator seeded from PyTorch's does.

        Raises
        ------
        ValueError
            If `batch_size` < 1.
        """
        if batch_size < 1:
            raise ValueError(f"sample_minibatches: batch_size must be >= 1, got {batch_size}")
        columns = {name: column for name in _TRANSITION_COLUMNS if (column := getattr(self, name)) is not None}
        slices, order = list(minibatches(len(self), batch_size)), None
        if shuffle:
            import torch

            from rlox.nn.networks import rng_from_torch

            order = torch.from_numpy((rng or rng_from_torch()).permutation(len(self))).to(self.obs.device)
        if self.obs.dim() > 2:
            # Images: no second copy of the whole rollout.
            for rows in slices:
                yield RolloutBatch(**{name: x[rows if order is None else order[rows]] for name, x in columns.items()})
            return
        if order is not None:
            # One gather for the whole epoch; the minibatches are then slices of it, without a copy.
            columns = {name: column[order] for name, column in columns.items()}
        sizes = [rows.stop - rows.start for rows in slices]
        for parts in zip(*(column.split(sizes) for column in columns.values()), strict=True):
            yield RolloutBatch(**dict(zip(columns, parts, strict=True)))


_TRANSITION_COLUMNS = [name for name, item in vars(RolloutBatch).items() if isinstance(item, _Column)]


def minibatches(n: int, batch_size: int) -> Iterator[slice]:
    """The rows of each minibatch of `n` rows; a single one left over joins the minibatch before it.

    >>> [rows.stop - rows.start for rows in minibatches(129, 64)]
    [64, 65]
    """
    start = 0
    while start < n:
        stop = n if n - start - batch_size == 1 and batch_size > 1 else min(start + batch_size, n)
        yield slice(start, stop)
        start = stop


@dataclass
class SequenceBatch(_Columns):
    """B stretches of T consecutive steps from a sequence memory, through the ends of episodes.

    Row t holds an observation, the action taken in it, and the reward that came *with* it. An episode's last
    observation is a row of its own, with an action of zeros, that is terminated or truncated; the next row is_first.
    """

    obs: torch.Tensor = _Column()  # (B, T, D) f32 or (B, T, C, H, W) uint8
    actions: torch.Tensor = _Column()  # (B, T, A) f32, as the model sees them
    rewards: torch.Tensor = _Column()  # (B, T) f32, 0 where is_first
    terminated: torch.Tensor = _Column()  # (B, T) bool, the state after which there is none
    truncated: torch.Tensor = _Column()  # (B, T) bool, the last of an episode that was cut
    is_first: torch.Tensor = _Column()  # (B, T) bool
    state: torch.Tensor = _Column()  # (B, S) f32, the agent's own state before row 0, zeros before an episode
    indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # (B,) int64, where row 0 is in memory

    def __len__(self) -> int:
        return len(self.__dict__["obs"])

    def update_states(self, buffer: Any, states: torch.Tensor | np.ndarray) -> None:
        """Give the memory newer states (B, T, S): row t is the state after row t of the batch, before the next.

        States that are not finite are left out with all others: then the loss is not finite either, and the loop
        raises.
        """
        found = states if isinstance(states, np.ndarray) else states.detach().cpu().numpy()
        if np.isfinite(found).all():
            buffer.update_states(self.indices, found)

    @classmethod
    def from_rows(cls, rows: Mapping[str, np.ndarray], spec: EnvSpec, device: str) -> SequenceBatch:
        """What `rlox.SequenceReplayBuffer.sample` returned, in the shapes of `spec`."""
        columns = {name: rows[name] for name in _SEQUENCE_COLUMNS}
        columns["obs"] = columns["obs"].reshape(*columns["rewards"].shape, *spec.obs_shape)
        if device != "cpu":
            import torch

            columns = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        return cls(**columns, indices=rows["indices"])


_SEQUENCE_COLUMNS = [name for name, item in vars(SequenceBatch).items() if isinstance(item, _Column)]


@dataclass
class TransitionBatch(_Columns):
    """B transitions from a replay memory; every column is read as a tensor on the learner's device, also where it was
    given as a NumPy array."""

    obs: torch.Tensor = _Column()  # (B, D) f32 or (B, C, H, W) uint8, observation before the action
    actions: torch.Tensor = _Column()  # (B,) or (B, K) int64, or (B, A) f32
    rewards: torch.Tensor = _Column()  # (B,) f32, or discounted sums of n rewards
    next_obs: torch.Tensor = _Column()  # like obs, what the (last) step truly led to
    discounts: torch.Tensor = _Column()  # (B,) f32, factor of what comes after: gamma^n, 0 where it terminated
    weights: torch.Tensor | None = _Column(optional=True)  # (B,) f32, importance weights; None: all were as likely
    # (B,) int64, the memory's rows whose priorities this batch updates; a dataset's rows, which come last, have none
    # where a dataset's are among them.
    indices: torch.Tensor | None = _Column(optional=True)

    def __len__(self) -> int:
        return len(self.__dict__["rewards"])

    def update_priorities(self, buffer: Any, td_errors: torch.Tensor | np.ndarray) -> None:
        """Give the memory, a `rlox.buffers.Buffer`, the TD errors (B,) of its rows, where it samples by them.

        Its rows are the batch's first. An error that is NaN or infinite is left out with all others: then the loss is
        not finite either, and the loop raises.
        """
        indices = self.array("indices")
        if indices is None:
            return
        errors = td_errors if isinstance(td_errors, np.ndarray) else td_errors.cpu().numpy()
        errors = errors[: len(indices)]
        if np.isfinite(errors).all():
            buffer.update_priorities(indices, errors.astype(np.float64))

    @classmethod
    def from_rows(cls, rows: Mapping[str, np.ndarray], gamma: float, spec: EnvSpec, device: str) -> TransitionBatch:
        """What `rlox.buffers.Buffer.sample` returned, in the shapes of `spec`.

        A time limit leaves the discount as it is: only terminations end the value of what comes after.
        """
        n = len(rows["rewards"])

        def column(values: np.ndarray, dtype: Any = np.float32, shape: tuple[int, ...] = (), n: int = n) -> Any:
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
            indices=column(rows["indices"], np.int64, n=len(rows["indices"])) if "indices" in rows else None,
        )

"""The data of one update: a rollout, or a sample of a replay memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.envs import EnvSpec
from rlox.kernels.rng import Rng

# PyTorch is imported only when tensors are requested, because native runs start a second faster without it.
if TYPE_CHECKING:
    import torch


class FrameStacks:
    """B images that are stacks of K frames; each frame is stored once, even if it is in several stacks.

    Can be read like the tensor (B, K * C, H, W) of a rollout's observations: ``len``, ``shape``, ``dim()``, ``device``,
    ``split(n)`` and indexing with rows or a slice, which builds the stacks.

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
        """Yield the stacks in order, `n` at a time."""
        return (self[start : start + n] for start in range(0, len(self), n))


class _Column:
    """A column of a batch: stored as the given array or tensor, and read as a tensor that shares its memory."""

    def __init__(self, optional: bool = False):
        self._optional = optional  # None by default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: Any, owner: type | None = None) -> torch.Tensor | None:
        if batch is None and self._optional:
            return None
        if batch is None:
            raise AttributeError(self._name)  # for dataclass: there is no default
        value = batch.__dict__[self._name]
        if isinstance(value, np.ndarray):
            import torch

            value = batch.__dict__[self._name] = torch.from_numpy(value)
        return value

    def __set__(self, batch: Any, value: Any) -> None:
        batch.__dict__[self._name] = value


class _Columns:
    def array(self, name: str) -> np.ndarray | None:
        """Return a column as a NumPy array, which shares its memory if it is on the CPU."""
        value = self.__dict__[name]
        return value if value is None or isinstance(value, np.ndarray) else value.detach().cpu().numpy()


@dataclass
class Rollout(_Columns):
    """B = T * N transitions of T steps in N environments, flat, step after step: row ``t * N + n``.

    Every column with a row for each transition is read as a tensor on the learner's device, even if it was given as a
    NumPy array, and is part of every minibatch. ``episode_*`` are NumPy arrays with a row for each episode that ended
    in this rollout, in the order of their ends, from the environment's own statistics (before any ``reward_fn``).
    Minibatches do not have them.

    The rollout of a group of agents has a row for each step of each living agent: step after step, environment after
    environment, agent after agent. Since dead agents have none, it is not divided into sequences (`n_envs` is None).
    """

    obs: torch.Tensor | FrameStacks = _Column()  # (B, D) f32 or (B, C, H, W) uint8, observation before the action
    actions: torch.Tensor = _Column()  # (B,) or (B, K) int64, or (B, A) f32, as sampled
    log_probs: torch.Tensor = _Column()  # (B,) f32, nats
    values: torch.Tensor = _Column()  # (B,) f32, in the critic's units (normalised by a value norm, if there is one)
    advantages: torch.Tensor = _Column()  # (B,) f32, not normalised, in units of rewards
    returns: torch.Tensor = _Column()  # (B,) f32, advantages + values, in units of rewards
    rewards: torch.Tensor = _Column()  # (B,) f32, after reward_fn
    episode_returns: np.ndarray = field(default_factory=lambda: np.empty(0))  # (E,) f64, undiscounted
    episode_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # (E,) int64, steps
    dones: torch.Tensor | None = _Column(optional=True)  # (B,) bool, terminated or truncated; None: unknown
    taken: int | None = None  # environment steps taken for this batch; None: one for each row
    masks: torch.Tensor | None = _Column(optional=True)  # (B, n_actions) bool, legal actions; None: all are
    states: torch.Tensor | None = _Column(optional=True)  # (B, S) f32, the critic's input; None: `obs`
    is_first: torch.Tensor | None = _Column(optional=True)  # (B,) bool, first step of an episode; None: unknown
    n_envs: int | None = None  # N; None: the rows are no whole sequences

    def __len__(self) -> int:
        return len(self.__dict__["obs"])

    @property
    def n_taken(self) -> int:
        """Environment steps taken for this batch: its length, without replayed rows."""
        return len(self) if self.taken is None else self.taken

    @property
    def players(self) -> list[Rollout | None]:
        """The rollout by players, as with several agents: one agent is one player."""
        return [self]

    def explained_variance(self) -> torch.Tensor:
        """Return the share of the returns' variance that the values explain, (): 1 is perfect, below 0 is worse than a
        constant."""
        return 1.0 - (self.returns - self.values).var() / self.returns.var()

    def sample_minibatches(self, batch_size: int, shuffle: bool = True, rng: Rng | None = None) -> Iterator[Rollout]:
        """Yield every transition once, `batch_size` at a time; the last minibatch may be smaller, or one row larger.

        A single remaining row is added to the previous minibatch, because one row has no standard deviation (PyTorch
        returns NaN). A minibatch of one row therefore occurs only if `batch_size` is 1 or the rollout has one row.
        `rng` determines the order; without it, a generator seeded from PyTorch's is used.

        Raises
        ------
        ValueError
            If `batch_size` < 1.
        """
        if batch_size < 1:
            raise ValueError(f"sample_minibatches: batch_size must be >= 1, got {batch_size}")
        columns = self._present_columns()
        slices, order = list(minibatches(len(self), batch_size)), None
        if shuffle:
            order = _permutation(rng, len(self), self.obs.device)
        if self.obs.dim() > 2:
            # Avoid a second copy of a whole rollout of images.
            for rows in slices:
                yield Rollout(**{name: x[rows if order is None else order[rows]] for name, x in columns.items()})
            return
        if order is not None:
            # Gather once for the whole epoch; the minibatches are then slices without a copy.
            columns = {name: column[order] for name, column in columns.items()}
        sizes = [rows.stop - rows.start for rows in slices]
        for parts in zip(*(column.split(sizes) for column in columns.values()), strict=True):
            yield Rollout(**dict(zip(columns, parts, strict=True)))

    def sample_sequences(self, n_envs: int, rng: Rng | None = None) -> Iterator[Rollout]:
        """Yield the whole sequences of T steps of every environment once, those of `n_envs` environments at a time.

        The columns of a minibatch are flat like those of the rollout, step after step; `steps` returns them as
        (T, n, …). The last minibatch may have fewer environments. `rng` determines the order, as in
        `sample_minibatches`.

        Raises
        ------
        ValueError
            If `n_envs` < 1, or the rollout does not consist of whole sequences.
        """
        if n_envs < 1:
            raise ValueError(f"sample_sequences: n_envs must be >= 1, got {n_envs}")
        if self.n_envs is None:
            raise ValueError("sample_sequences: the rollout must have the steps of whole environments, got single rows")
        order = _permutation(rng, self.n_envs, self.obs.device)
        starts = order.new_tensor(range(0, len(self), self.n_envs))[:, None]  # row of each step's first environment
        columns = self._present_columns()
        for chosen in order.split(n_envs):
            at = (starts + chosen).reshape(-1)
            yield Rollout(**{name: column[at] for name, column in columns.items()}, n_envs=len(chosen))

    def steps(self, name: str) -> torch.Tensor:
        """Return a column as (T, N, …), which shares its memory; only if the rollout has whole sequences."""
        column = getattr(self, name)[:]
        return column.reshape(-1, self.n_envs, *column.shape[1:])

    def _present_columns(self) -> dict[str, Any]:
        return {name: column for name in _TRANSITION_COLUMNS if (column := getattr(self, name)) is not None}


RolloutBatch = Rollout  # its public name, `rlox.RolloutBatch`
_TRANSITION_COLUMNS = [name for name, item in vars(Rollout).items() if isinstance(item, _Column)]


def _permutation(rng: Rng | None, n: int, device: Any) -> torch.Tensor:
    """Return a random order (n,) int64, from a generator that is seeded from PyTorch's if there is no `rng`."""
    import torch

    from rlox.nn.policies import rng_from_torch

    return torch.from_numpy((rng or rng_from_torch()).permutation(n)).to(device)


def minibatches(n: int, batch_size: int) -> Iterator[slice]:
    """Yield the rows of each minibatch of `n` rows; a single remaining row is added to the previous minibatch.

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
    """B sequences of T consecutive steps from a sequence memory, which may cross the ends of episodes.

    Row t contains an observation, the action taken in it, and the reward that came *with* the observation. An episode's
    last observation has a row of its own, with an action of zeros, that is terminated or truncated; the next row
    is_first.
    """

    obs: torch.Tensor = _Column()  # (B, T, D) f32 or (B, T, C, H, W) uint8
    actions: torch.Tensor = _Column()  # (B, T, A) f32, as the model sees them
    rewards: torch.Tensor = _Column()  # (B, T) f32, 0 where is_first
    terminated: torch.Tensor = _Column()  # (B, T) bool, terminal state
    truncated: torch.Tensor = _Column()  # (B, T) bool, last row of a truncated episode
    is_first: torch.Tensor = _Column()  # (B, T) bool
    state: torch.Tensor = _Column()  # (B, S) f32, the agent's own state before row 0, zeros before an episode
    indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # (B,) int64, row 0 in the memory

    def __len__(self) -> int:
        return len(self.__dict__["obs"])

    def update_states(self, buffer: Any, states: torch.Tensor | np.ndarray) -> None:
        """Write newer states (B, T, S) to the memory: row t is the state after row t of the batch, before the next.

        If any state is not finite, none is written: the loss is then not finite either, and the loop raises.
        """
        found = states if isinstance(states, np.ndarray) else states.detach().cpu().numpy()
        if np.isfinite(found).all():
            buffer.update_states(self.indices, found)

    @classmethod
    def from_rows(cls, rows: Mapping[str, np.ndarray], spec: EnvSpec, device: str) -> SequenceBatch:
        """Create a batch from the result of `rlox.SequenceReplayBuffer.sample`, in the shapes of `spec`."""
        columns = {name: rows[name] for name in _SEQUENCE_COLUMNS}
        columns["obs"] = columns["obs"].reshape(*columns["rewards"].shape, *spec.obs_shape)
        if device != "cpu":
            import torch

            columns = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        return cls(**columns, indices=rows["indices"])


_SEQUENCE_COLUMNS = [name for name, item in vars(SequenceBatch).items() if isinstance(item, _Column)]


@dataclass
class TransitionBatch(_Columns):
    """B transitions from a replay memory; every column is read as a tensor on the learner's device, even if it was
    given as a NumPy array."""

    obs: torch.Tensor = _Column()  # (B, D) f32 or (B, C, H, W) uint8, observation before the action
    actions: torch.Tensor = _Column()  # (B,) or (B, K) int64, or (B, A) f32
    rewards: torch.Tensor = _Column()  # (B,) f32, or discounted sums of n rewards
    next_obs: torch.Tensor = _Column()  # like obs, the true observation after the (last) step
    discounts: torch.Tensor = _Column()  # (B,) f32, factor of the value of next_obs: gamma^n, 0 after a termination
    weights: torch.Tensor | None = _Column(optional=True)  # (B,) f32, importance weights; None: all equally likely
    # (B,) int64, the memory's rows whose priorities this batch updates. Rows of a dataset, which come last, have no
    # index.
    indices: torch.Tensor | None = _Column(optional=True)

    def __len__(self) -> int:
        return len(self.__dict__["rewards"])

    def update_priorities(self, buffer: Any, td_errors: torch.Tensor | np.ndarray) -> None:
        """Update the priorities of a memory, a `rlox.buffers.Buffer`, with TD errors (B,), if it samples by them.

        The memory's rows are the first rows of the batch. If any error is NaN or infinite, none is used: the loss is
        then not finite either, and the loop raises.
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
        """Create a batch from the result of `rlox.buffers.Buffer.sample`, in the shapes of `spec`.

        A time limit does not change the discount: only a termination sets it to 0.
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

"""The data of one update from a replay memory, and columns that are read as tensors, of which rollouts consist too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.envs import EnvSpec

# PyTorch is imported only when tensors are requested, because native runs start a second faster without it.
if TYPE_CHECKING:
    import torch

    from rlox.kernels.rng import Rng


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


class Column:
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


class Columns:
    reused = False  # whether the next batch overwrites the memory of these columns

    def columns(self) -> dict[str, Any]:
        """Return the columns that this batch has, by name: tensors, or `FrameStacks`."""
        names = [name for name, item in vars(type(self)).items() if isinstance(item, Column)]
        return {name: column for name in names if (column := getattr(self, name)) is not None}

    def with_columns(self, columns: Mapping[str, Any], reused: bool = False) -> Any:
        """Return a copy of this batch with other columns, by name."""
        other = replace(self, **columns)  # type: ignore[type-var]  # batches are dataclasses
        other.reused = reused
        return other

    def array(self, name: str) -> np.ndarray | None:
        """Return a column as a NumPy array, which shares its memory if it is on the CPU."""
        value = self.__dict__[name]
        return value if value is None or isinstance(value, np.ndarray) else value.detach().cpu().numpy()


@dataclass
class SequenceBatch(Columns):
    """B sequences of T consecutive steps from a sequence memory, which may cross the ends of episodes.

    Row t contains an observation, the action taken in it, and the reward that came *with* the observation. An episode's
    last observation has a row of its own, with an action of zeros, that is terminated or truncated; the next row
    is_first.
    """

    obs: torch.Tensor = Column()  # (B, T, D) f32 or (B, T, C, H, W) uint8
    actions: torch.Tensor = Column()  # (B, T, A) f32, as the model sees them
    rewards: torch.Tensor = Column()  # (B, T) f32, 0 where is_first
    terminated: torch.Tensor = Column()  # (B, T) bool, terminal state
    truncated: torch.Tensor = Column()  # (B, T) bool, last row of a truncated episode
    is_first: torch.Tensor = Column()  # (B, T) bool
    state: torch.Tensor = Column()  # (B, S) f32, the agent's own state before row 0, zeros before an episode
    masks: torch.Tensor | None = Column(optional=True)  # (B, T, A) bool, legal actions; None: all are
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
        """Create a batch from the result of `rlox.SequenceReplayBuffer.sample`, in the shapes of `spec`.

        Where actions have more than their `EnvSpec.model_width` numbers, the rest are the flags of legal actions. The
        columns go to `device` in one copy.
        """
        columns: dict[str, Any] = cls.columns_of(rows, spec)
        if device != "cpu":
            from rlox.nn.transfers import upload

            columns = upload(columns, device)
        return cls(**columns, indices=rows["indices"])

    @staticmethod
    def columns_of(rows: Mapping[str, np.ndarray], spec: EnvSpec) -> dict[str, np.ndarray]:
        """Return the columns of a batch as arrays, from the result of `rlox.SequenceReplayBuffer.sample`."""
        columns = {name: rows[name] for name in _SEQUENCE_COLUMNS if name in rows}
        actions, width = columns["actions"], spec.model_width
        if actions.shape[-1] > width:
            columns |= {"actions": actions[..., :width], "masks": actions[..., width:] != 0}
        columns["obs"] = columns["obs"].reshape(*columns["rewards"].shape, *spec.obs_shape)
        return columns


_SEQUENCE_COLUMNS = [name for name, item in vars(SequenceBatch).items() if isinstance(item, Column)]


@dataclass
class TransitionBatch(Columns):
    """B transitions from a replay memory; every column is read as a tensor on the learner's device, even if it was
    given as a NumPy array."""

    obs: torch.Tensor = Column()  # (B, D) f32 or (B, C, H, W) uint8, observation before the action
    actions: torch.Tensor = Column()  # (B,) or (B, K) int64, or (B, A) f32
    rewards: torch.Tensor = Column()  # (B,) f32, or discounted sums of n rewards
    next_obs: torch.Tensor = Column()  # like obs, the true observation after the (last) step
    discounts: torch.Tensor = Column()  # (B,) f32, factor of the value of next_obs: gamma^n, 0 after a termination
    weights: torch.Tensor | None = Column(optional=True)  # (B,) f32, importance weights; None: all equally likely
    # (B,) int64, the memory's rows whose priorities this batch updates; on the host if the memory is. Rows of a
    # dataset, which come last, have no index.
    indices: torch.Tensor | None = Column(optional=True)
    next_masks: torch.Tensor | None = Column(optional=True)  # (B, n_actions) bool, legal in next_obs; None: all are
    masks: torch.Tensor | None = Column(optional=True)  # (B, n_actions) bool, legal in obs; None: all, or unknown

    def __len__(self) -> int:
        return len(self.__dict__["rewards"])

    def update_priorities(self, buffer: Any, td_errors: torch.Tensor | np.ndarray) -> None:
        """Update the priorities of a memory, a `rlox.buffers.Buffer`, with TD errors (B,), if it samples by them.

        The memory's rows are the first rows of the batch. If any error is NaN or infinite, none is used: the loss is
        then not finite either, and the loop raises.
        """
        indices = self.__dict__["indices"]
        if indices is None:
            return
        if not isinstance(indices, np.ndarray):  # of a memory on the device, which looks at the errors itself
            buffer.update_priorities(indices, td_errors[: len(indices)])
            return
        errors = td_errors if isinstance(td_errors, np.ndarray) else td_errors.cpu().numpy()
        errors = errors[: len(indices)]
        if np.isfinite(errors).all():
            buffer.update_priorities(indices, errors.astype(np.float64))

    @classmethod
    def from_rows(cls, rows: Mapping[str, Any], gamma: float, spec: EnvSpec, device: str) -> TransitionBatch:
        """Create a batch from the result of `rlox.buffers.Buffer.sample`, in the shapes of `spec`.

        A time limit does not change the discount: only a termination sets it to 0. The columns go to `device` in one
        copy; a memory on the device has given tensors.
        """
        if not isinstance(rows["rewards"], np.ndarray) and hasattr(rows["rewards"], "device"):
            return cls.from_tensors(rows, gamma, spec)
        columns: dict[str, Any] = cls.columns_of(rows, gamma, spec)
        if device != "cpu":
            from rlox.nn.transfers import upload

            indices = columns.pop("indices", None)
            columns = {**upload(columns, device), "indices": indices}
        return cls(**columns)

    @staticmethod
    def columns_of(rows: Mapping[str, np.ndarray], gamma: float, spec: EnvSpec) -> dict[str, np.ndarray]:
        """Return the columns of a batch as arrays, from the result of `rlox.buffers.Buffer.sample`."""
        n, rows = len(rows["rewards"]), _part_masks(rows, spec)

        def column(values: np.ndarray, dtype: Any = np.float32, shape: tuple[int, ...] = (), n: int = n) -> np.ndarray:
            return np.asarray(values, dtype).reshape(n, *shape)

        discounts = rows["discounts"] if "discounts" in rows else np.float32(gamma)
        columns = {
            "obs": column(rows["obs"], spec.obs_dtype, spec.obs_shape),
            "actions": column(rows["actions"], spec.action_dtype, spec.action_shape),
            "rewards": column(rows["rewards"]),
            "next_obs": column(rows["next_obs"], spec.obs_dtype, spec.obs_shape),
            "discounts": column(~np.asarray(rows["terminated"], np.bool_) * discounts),
        }
        for name in ("masks", "next_masks"):
            if name in rows:
                columns[name] = column(rows[name], np.bool_, (sum(spec.choices),))
        if "weights" in rows:
            columns["weights"] = column(rows["weights"])
        if "indices" in rows:
            columns["indices"] = column(rows["indices"], np.int64, n=len(rows["indices"]))
        return columns

    @classmethod
    def from_tensors(cls, rows: Mapping[str, torch.Tensor], gamma: float, spec: EnvSpec) -> TransitionBatch:
        """Create a batch like `from_rows` from tensors on the learner's device, all f32 except the indices."""
        rows = _part_masks(rows, spec)
        n, actions = len(rows["rewards"]), rows["actions"]
        if np.dtype(spec.action_dtype) == np.int64:
            actions = actions.long()
        return cls(
            obs=rows["obs"].reshape(n, *spec.obs_shape),
            actions=actions.reshape(n, *spec.action_shape),
            rewards=rows["rewards"],
            next_obs=rows["next_obs"].reshape(n, *spec.obs_shape),
            discounts=(1.0 - rows["terminated"]) * rows.get("discounts", gamma),
            weights=rows.get("weights"),
            indices=rows.get("indices"),
            next_masks=rows.get("next_masks"),
            masks=rows.get("masks"),
        )


def _part_masks(rows: Mapping[str, Any], spec: EnvSpec) -> Mapping[str, Any]:
    """Return rows of a memory with the column ``masks``, if it stores them behind the numbers of an action."""
    n, actions = len(spec.choices), rows["actions"]
    if not spec.masked or actions.shape[1:] != (n + sum(spec.choices),):
        return rows
    return {**rows, "actions": actions[:, :n], "masks": actions[:, n:] != 0}


def draw_order(rng: Rng | None, n: int, device: Any) -> torch.Tensor:
    """Return a random order (n,) int64, from a generator that is seeded from PyTorch's if there is no `rng`."""
    import torch

    from rlox.nn.policies import rng_from_torch

    order: Any = (rng or rng_from_torch()).permutation(n)
    # A generator on the device has drawn a tensor.
    return torch.from_numpy(order).to(device) if isinstance(order, np.ndarray) else order

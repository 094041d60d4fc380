"""Sequences of consecutive steps of a dataset, from which policies with a memory learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.envs import EnvSpec
from rlox.nn.batch import Column, Columns

if TYPE_CHECKING:
    import torch


@dataclass
class DemonstrationBatch(Columns):
    """n sequences of T consecutive steps of a dataset, as B = T * n rows step after step, and the K steps before each.

    A sequence may run over the ends of episodes; `is_first` marks where the next one begins.
    """

    obs: torch.Tensor = Column()  # (B, D) f32
    actions: torch.Tensor = Column()  # (B,) int64, or (B, A) f32
    is_first: torch.Tensor = Column()  # (B,) bool
    obs_before: torch.Tensor = Column()  # (K * n, D) f32
    is_first_before: torch.Tensor = Column()  # (K * n,) bool
    masks: torch.Tensor | None = Column(optional=True)  # (B, n_actions) bool, the legal actions; None: all are
    n: int = 1

    def __len__(self) -> int:
        return len(self.__dict__["obs"])


class SequenceSampler:
    """Draws sequences of `length` consecutive steps, each with the `before` steps that lead up to it.

    The first step is uniform over the dataset, so that every transition counts alike. Sequences run over the ends of
    episodes, and from the dataset's end to its beginning, so that no row is padding.

    Parameters
    ----------
    dataset : OfflineDataset
        With ``get_state()``, whose rows are in the order of their steps.
    length, before : int
        Steps T of a sequence, and K before it.
    where : str
        Name at the beginning of error messages.

    Raises
    ------
    TypeError
        If the dataset does not have its rows in order.
    """

    def __init__(self, dataset: Any, length: int, before: int, where: str):
        if not hasattr(dataset, "get_state"):
            raise TypeError(
                f"{where}: memory must be none for a dataset without get_state(), such as {type(dataset).__name__}, "
                "which only gives samples; rlox.OfflineDatasetBuffer has its rows in order"
            )
        state = dataset.get_state()
        self._columns = {name: state[name] for name in ("obs", "actions", "action_masks") if name in state}
        self._is_first = np.ones(len(state["rewards"]), np.bool_)
        self._is_first[1:] = (state["terminated"] | state["truncated"])[:-1]
        self._steps, self._before, self._where = np.arange(-before, length)[:, None], before, where
        self.length = length

    def __len__(self) -> int:
        return len(self._is_first)

    def gather(self, starts: np.ndarray, spec: EnvSpec, normalize: Any, device: str) -> DemonstrationBatch:
        """Return the sequences that begin in the rows `starts` (n,) int64, with observations as networks see them.

        Raises
        ------
        ValueError
            If a row has numbers that are not finite.
        """
        rows = (starts + self._steps) % len(self)  # (K + T, n)
        n, split = len(starts), self._before * len(starts)
        flat = rows.ravel()
        obs = np.asarray(self._columns["obs"][flat], np.float32)
        actions = np.asarray(self._columns["actions"][flat[split:]])
        for name, column in (("obs", obs), ("actions", actions)):
            if not np.isfinite(column).all():
                wrong = ~np.isfinite(column).reshape(len(column), -1).all(1)
                row = flat[len(flat) - len(column) :][wrong.argmax()]
                raise ValueError(f"{self._where}: {name} must be finite float32 numbers, got others in row {row}")
        obs, is_first = normalize(obs), self._is_first[flat]
        columns = {
            "obs": obs[split:],
            "actions": actions.astype(spec.action_dtype).reshape(-1, *spec.action_shape),
            "is_first": is_first[split:],
            "obs_before": obs[:split],
            "is_first_before": is_first[:split],
        }
        if "action_masks" in self._columns:
            columns["masks"] = self._columns["action_masks"][flat[split:]].astype(np.bool_)
        if device != "cpu":
            from rlox.nn.transfers import upload

            columns = upload(columns, device)
        return DemonstrationBatch(**columns, n=n)

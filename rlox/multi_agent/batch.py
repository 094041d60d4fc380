"""The data of one update of several agents: a batch for each policy, without rows of agents that were not alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlox.kernels.rng import Rng
from rlox.nn.batch import RolloutBatch, _Column, minibatches

if TYPE_CHECKING:
    import torch


@dataclass
class PlayerBatch(RolloutBatch):
    """B steps of the agents that act with one policy.

    The rows are flat: step after step, environment after environment, agent after agent, without rows of agents that
    were not alive. `values` are in the critic's own units (normalised with value_norm), `returns` and `advantages` in
    those of rewards.
    """

    # (B, S) f32, input of the critic; None: `obs`
    states: torch.Tensor | None = _Column(optional=True)  # noqa: RUF009 (a descriptor)
    # (B, n_actions) bool, legal actions; None: all are
    masks: torch.Tensor | None = _Column(optional=True)  # noqa: RUF009

    def explained_variance(self) -> torch.Tensor:
        """Share of the returns' variance that the values explain, (): 1 is perfect, below 0 worse than a constant."""
        return 1.0 - self.advantages.var() / self.returns.var()

    def sample_minibatches(
        self, batch_size: int, shuffle: bool = True, rng: Rng | None = None
    ) -> Iterator[PlayerBatch]:
        """Yield minibatches; see `rlox.nn.batch.RolloutBatch.sample_minibatches`."""
        columns = {name: column for name in _COLUMNS if (column := getattr(self, name)) is not None}
        slices, order = list(minibatches(len(self), batch_size)), None
        if shuffle:
            import torch

            from rlox.nn.networks import rng_from_torch

            order = torch.from_numpy((rng or rng_from_torch()).permutation(len(self))).to(self.obs.device)
        for rows in slices:
            yield type(self)(**{name: x[rows if order is None else order[rows]] for name, x in columns.items()})


_COLUMNS = [
    *("obs", "actions", "log_probs", "values", "advantages", "returns", "rewards", "dones"),
    *("states", "masks"),
]


@dataclass(frozen=True)
class MultiAgentBatch:
    """The batch of each policy from T steps in N environments."""

    players: list[PlayerBatch | None]  # in the order of the policies; None if no agent was alive
    n_taken: int  # environment steps, T * N
    episode_returns: np.ndarray = field(default_factory=lambda: np.empty(0))  # (E,) f64, undiscounted, over all agents
    episode_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # (E,) int64, steps

    def __len__(self) -> int:
        """Number of agent steps over all policies."""
        return sum(len(batch) for batch in self.players if batch is not None)

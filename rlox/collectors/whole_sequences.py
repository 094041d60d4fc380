"""Rows as sequences of steps, from which a policy with a memory learns.

PyTorch is imported where it is used, because native runs do not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlox.nn.batch import Columns, draw_order

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from rlox.kernels.rng import Rng

_OF_ALL_STEPS = ("obs", "states", "is_first", "running")  # columns with rows of steps in which an agent does not act


class SequenceRows(Columns):
    """The part of `rlox.collectors.rollout.Rollout` that divides its rows into sequences."""

    obs: Any
    is_first: Any
    running: Any
    n_envs: int | None
    memories: Any

    def sample_sequences(self, n_sequences: int, rng: Rng | None = None) -> Iterator[Self]:
        """Yield every sequence once, `n_sequences` at a time: the steps of one environment in the whole rollout, or in
        each of the parts that `memories` has.

        The columns of a minibatch are flat like those of the rollout, step after step; `steps` returns them as
        (T, n, …). The last minibatch may have fewer sequences. Sequences in which no agent acts are left out. `rng`
        determines the order, as in `sample_minibatches`.

        Raises
        ------
        ValueError
            If `n_sequences` < 1, or the rollout does not consist of whole sequences.
        """
        if n_sequences < 1:
            raise ValueError(f"sample_sequences: n_sequences must be >= 1, got {n_sequences}")
        if self.n_envs is None:
            raise ValueError("sample_sequences: the rollout must have the steps of whole environments, got single rows")
        import torch

        kind: Any = type(self)
        chosen, n, columns, memories = self._whole_sequences(), self.n_envs, self.columns(), None
        order = draw_order(rng, len(chosen), self.obs.device)
        rows = len(self.obs) // self._n_parts  # of a part
        steps = order.new_tensor(range(0, rows, n))[:, None]
        if self.memories is not None:
            memories = torch.as_tensor(self.memories, device=order.device).flatten(0, 1)
        if self.running is not None:
            order = chosen[order]
            place = self.running.cumsum(0) - 1  # of a running row among the running rows
        for picked in order.split(n_sequences):
            at = (steps + picked.div(n, rounding_mode="floor") * rows + picked % n).reshape(-1)
            acted = at if self.running is None else place[at[self.running[at]]]
            yield kind(
                **{name: column[at if name in _OF_ALL_STEPS else acted] for name, column in columns.items()},
                n_envs=len(picked),
                memories=None if memories is None else memories[None, picked],
            )

    def _whole_sequences(self) -> Any:
        """Return the sequences in which an agent acts, by their numbers: part * N + environment."""
        n, parts = self.n_envs or 1, self._n_parts
        if self.running is None:
            return range(parts * n)
        return self.running.view(parts, -1, n).any(1).view(-1).nonzero()[:, 0]

    @property
    def _n_parts(self) -> int:
        return 1 if self.memories is None else len(self.memories)

    def steps(self, name: str) -> torch.Tensor:
        """Return a column as (T, N, …), which shares its memory; only if the rollout has whole sequences."""
        column = getattr(self, name)[:]
        return column.reshape(-1, self.n_envs, *column.shape[1:])

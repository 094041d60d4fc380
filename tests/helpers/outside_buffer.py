"""A replay memory as another package would write it: plain Python, only the methods of `rlox.buffers.Buffer`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlox.config import BufferConfig

KEYS = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")


class NewestBuffer:
    """A list of transitions; only the newest `window` of them are drawn.

    It accepts all arguments of its configuration and keeps them in ``given``.
    """

    def __init__(self, capacity, obs_dim, act_dim, window=None, **given):
        self.capacity, self.window = capacity, window or capacity
        self.given = {"obs_dim": obs_dim, "act_dim": act_dim, **given}
        self.rows = []

    def push_batch(self, *columns):
        assert [column.dtype for column in columns] == [np.float32] * 4 + [np.bool_] * 2
        self.rows += [tuple(np.array(value) for value in row) for row in zip(*columns, strict=True)]
        del self.rows[: -self.capacity]

    def sample(self, batch_size, seed):
        rows = self.rows[-self.window :]
        chosen = [rows[i] for i in np.random.default_rng(seed).integers(len(rows), size=batch_size)]
        return {key: np.stack(column) for key, column in zip(KEYS, zip(*chosen, strict=True), strict=True)}

    def __len__(self):
        return len(self.rows)

    def get_state(self):
        return {key: np.stack(column) for key, column in zip(KEYS, zip(*self.rows, strict=True), strict=True)}

    def set_state(self, state):
        self.rows = list(zip(*(state[key] for key in KEYS), strict=True))


@dataclass
class NewestConfig(BufferConfig):
    """Draws from the newest transitions only."""

    window: int = 100  # how many of the newest transitions are drawn from

    def rules(self):
        yield from super().rules()
        yield "window", self.window >= 1, "be >= 1"

"""Self-play against earlier policies of the same run: the turns of learning, the opponents, and the ratings.

One player learns at a time. The others act with earlier policies of theirs, drawn at random for each rollout, so that
the learner must succeed against more than the last opponent (Bansal et al. 2018, arXiv:1710.03748). Ratings are Elo
ratings: the side whose agents have the higher mean return wins an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.kernels.rng import Rng

_START, _STEP, _SCALE = 1000.0, 8.0, 400.0  # of Elo ratings: the initial value, the factor of an update, the scale


@dataclass
class EarlierPolicy:
    """An earlier policy of a player."""

    weights: np.ndarray  # (P,) f32
    rating: float


class SelfPlay:
    """The earlier policies of all players, and the order of turns, as a part of a checkpoint."""

    def __init__(
        self,
        names: Sequence[str],
        slots: Sequence[Sequence[int]],  # by player, the indices of its agents among all agents
        parts: Sequence[Any],  # by player, what acts with its current policy
        copies: Sequence[Any],  # by player, what acts with an earlier policy
        most: int,  # earlier policies of each player
        every: int,  # rollouts between two stored policies; the turn then passes to the next player
        seed: int,  # of the choice of opponents
    ):
        self.names = list(names)
        self.learner = 0  # the player whose turn it is
        self.ratings = np.full(len(self.names), _START)
        self.pools: list[list[EarlierPolicy]] = [[] for _ in self.names]
        self._slots = [list(agents) for agents in slots]
        self._parts, self._copies = list(parts), list(copies)
        self._most, self._every, self._seed = most, every, seed
        self._rollouts = 0
        self._chosen = np.zeros(len(self.names), np.int64)  # by player, index of its acting policy in the pool

    def begin(self) -> tuple[list[Any], list[bool]]:
        """Return, by player, the object that acts in the next rollout, and whether the player learns from it."""
        if self._rollouts == 0:
            for p in range(len(self.names)):
                self._keep(p)
        elif self._rollouts % self._every == 0:
            self._keep(self.learner)
            self.learner = (self.learner + 1) % len(self.names)
        rng = Rng(self._seed, Stream.OPPONENTS)
        rng.skip(self._rollouts * 2 * len(self.names))
        shares = rng.uniform((len(self.names),), dtype=np.float64)
        self._chosen = np.array([int(u * len(pool)) for u, pool in zip(shares, self.pools, strict=True)])
        self._rollouts += 1
        for p, copy in enumerate(self._copies):
            if p != self.learner:
                copy.set_flat_weights(self.pools[p][self._chosen[p]].weights)
        learning = [p == self.learner for p in range(len(self.names))]
        return [
            own if learns else old for own, old, learns in zip(self._parts, self._copies, learning, strict=True)
        ], learning

    def _keep(self, p: int) -> None:
        """Add the current policy of player `p` to its pool; drop the oldest if the pool is full."""
        pool = self.pools[p]
        pool.append(EarlierPolicy(self._parts[p].flat_weights(), float(self.ratings[p])))
        del pool[: -self._most]

    def end(self, returns: np.ndarray) -> None:
        """Update the ratings with the returns (E, A) f64 of the episodes that ended in the rollout."""
        others = [p for p in range(len(self.names)) if p != self.learner]
        theirs = [self.pools[p][self._chosen[p]] for p in others]
        apart = [slot for p in others for slot in self._slots[p]]
        for row in returns:
            lead = row[self._slots[self.learner]].mean() - row[apart].mean()
            score = 0.5 if lead == 0 else float(lead > 0)
            opponents = sum(policy.rating for policy in theirs) / len(theirs)
            expected = 1.0 / (1.0 + 10.0 ** ((opponents - self.ratings[self.learner]) / _SCALE))
            moved = _STEP * (score - expected)
            self.ratings[self.learner] += moved
            for policy in theirs:
                policy.rating -= moved / len(theirs)

    def metrics(self) -> dict[str, float]:
        """Return ``rating/<player>``, and ``rating/<player>_kept``, the mean over the stored earlier policies."""
        ratings = {f"rating/{name}": float(rating) for name, rating in zip(self.names, self.ratings, strict=True)}
        for name, pool in zip(self.names, self.pools, strict=True):
            if pool:
                ratings[f"rating/{name}_kept"] = sum(policy.rating for policy in pool) / len(pool)
        return ratings

    def state(self) -> dict[str, np.ndarray]:
        arrays = {
            "turns": np.array([self._rollouts, self.learner], np.int64),
            "ratings": self.ratings.copy(),
            "chosen": self._chosen.copy(),
        }
        for p, pool in enumerate(self.pools):
            size = len(self._parts[p].flat_weights())
            arrays[f"weights.{p}"] = np.array([policy.weights for policy in pool], np.float32).reshape(-1, size)
            arrays[f"ratings.{p}"] = np.array([policy.rating for policy in pool])
        return arrays

    def set_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`; raise a ValueError if it belongs to other players."""
        ours = self.state()
        if arrays.keys() != ours.keys() or any(arrays[name].shape[1:] != x.shape[1:] for name, x in ours.items()):
            raise ValueError(f"it must have the earlier policies of {', '.join(self.names)}, got {sorted(arrays)}")
        self._rollouts, self.learner = (int(number) for number in arrays["turns"])
        self.ratings, self._chosen = arrays["ratings"].copy(), arrays["chosen"].copy()
        for p in range(len(self.names)):
            pairs = zip(arrays[f"weights.{p}"], arrays[f"ratings.{p}"], strict=True)
            self.pools[p] = [EarlierPolicy(weights.copy(), float(rating)) for weights, rating in pairs]

"""Test whether runs come from the same algorithm as nominal runs, by their quantities (`rlox_cli.bench.seeds`).

Many bugs hardly change the score, such as halving the value loss under Adam, or dropping episodes from the statistics.
But they change the losses, gradients, values or counts that a run records, by far more than seeds differ.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from rlox_cli.bench.seeds import round_digits

# How often nominal runs are reported as different, over the whole family of quantities.
LEVEL = 0.01
_PERMUTATIONS = 20_000


@dataclass(frozen=True)
class Quantity:
    """A quantity that differs: medians, the range of 90 % of the nominal runs, the p-value adjusted for all others."""

    name: str
    ours: float
    nominal: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        moved = f"{self.ours:.4g}, nominal {self.nominal:.4g} ({self.low:.4g} to {self.high:.4g})"
        if self.ours == self.nominal:
            return f"{self.name}: {moved}, p = {self.p:.1g}"
        share = f" by {abs(self.ours / self.nominal - 1):.0%}" if self.nominal else ""
        return f"{self.name}: {moved}, {'higher' if self.ours > self.nominal else 'lower'}{share}, p = {self.p:.1g}"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    n_ours: int
    n_nominal: int
    n_quantities: int
    smallest_p: float
    differing: list[Quantity]  # the most certain ones first

    @property
    def differs(self) -> bool:
        return bool(self.differing)


def compare(ours: Sequence[dict[str, float]], nominal: Sequence[dict[str, float]], level: float = LEVEL) -> Comparison:
    """Find the quantities of `ours` whose distribution differs from that of the `nominal` runs.

    This is a permutation test with the largest standardised rank sum over all quantities (Westfall & Young 1993,
    single-step maxT). If both sides have the same distribution, any difference is reported with a probability of at
    most `level`, however many quantities there are and however they depend on each other. Quantities that only one side
    has are left out.

    Parameters
    ----------
    ours, nominal : sequence of dict
        Quantities of each run; NaN counts as below all numbers.
    """
    n, m = len(ours), len(nominal)
    known = set(ours[0]).intersection(*ours, *nominal)
    names = [name for name in ours[0] if name in known]
    table = np.array([[run[name] for name in names] for run in (*ours, *nominal)])
    table = np.where(np.isnan(table), -np.inf, table)
    ranks = stats.rankdata(table, axis=0) - (n + m + 1) / 2
    spread = ranks.std(0)
    vary = spread > 0
    names, table = [name for name, varies in zip(names, vary, strict=True) if varies], table[:, vary]
    if not names:
        return Comparison(n, m, 0, 1.0, [])
    ranks = ranks[:, vary] / (spread[vary] * math.sqrt(n * m / (n + m - 1)))
    sums = np.abs(ranks[:n].sum(0))
    largest = np.sort(np.abs(_splits(n, n + m) @ ranks).max(1))
    p = (1 + len(largest) - np.searchsorted(largest, sums - 1e-9)) / (1 + len(largest))
    order = [k for k in np.argsort(-sums, kind="stable") if p[k] <= level]
    differing = []
    for k in order:
        low, median, high = np.quantile(table[n:, k], [0.05, 0.5, 0.95], method="nearest")
        differing.append(
            Quantity(names[k], float(np.median(table[:n, k])), float(median), float(low), float(high), float(p[k]))
        )
    return Comparison(n, m, len(names), float(p.min()), differing)


def count_fewest(n_nominal: int) -> int:
    """Return how many runs `compare` needs to find any difference from `n_nominal` runs.

    Of all splits, only the one into the lowest and the highest ranks, and its reverse, are the most extreme.
    """
    return next(n for n in itertools.count(2) if 2 / math.comb(n + n_nominal, n) <= LEVEL)


@lru_cache(4)
def _splits(n: int, total: int) -> np.ndarray:
    """Return `_PERMUTATIONS` random choices of `n` from `total` runs, each as a row of zeros and ones."""
    rng = np.random.default_rng(0)
    chosen = np.zeros((_PERMUTATIONS, total))
    np.put_along_axis(chosen, rng.random(chosen.shape).argpartition(n - 1, axis=1)[:, :n], 1.0, axis=1)
    return chosen


def as_table(runs: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Return quantities by seed for JSON: ``names``, and a row of numbers for each seed; null for NaN."""
    names = list(dict.fromkeys(name for one in runs.values() for name in one))
    return {
        "names": names,
        "seeds": {
            str(seed): [None if math.isnan(one.get(name, math.nan)) else round_digits(one[name]) for name in names]
            for seed, one in runs.items()
        },
    }


def from_table(table: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Return the argument of `as_table` from its result."""
    return {
        int(seed): {name: math.nan if value is None else value for name, value in zip(table["names"], row, strict=True)}
        for seed, row in table["seeds"].items()
    }


def nominal_path(algo: str, env: str) -> Path:
    """Return the path of the nominal runs of a cell, whether or not they exist."""
    return Path(str(files("rlox_cli.bench"))) / "nominal" / f"{algo}-{env.replace('/', '_')}.json"


def load_nominal(algo: str, env: str) -> dict[str, Any] | None:
    """Return the shipped nominal runs of a cell, or None: ``settings``, and ``quantities`` as from `as_table`."""
    path = nominal_path(algo, env)
    return json.loads(path.read_text("utf-8")) if path.is_file() else None

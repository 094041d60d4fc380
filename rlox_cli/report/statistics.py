"""Statistics over several seeds: robust means, intervals, differences and profiles of scores.

Agarwal et al. 2021 (arXiv:2108.13264) recommend them for few runs. They use SciPy and are independent of run folders.

``tasks`` is always a sequence of arrays, one per task: (..., S) scores of its S runs, where S may differ between tasks;
a single task is ``[scores]``. Resampling is stratified: runs are resampled within their task. Leading axes are kept,
with the same runs drawn for all of them, so that (K, S) gives a curve of K points with its band. The resamples, and
therefore the results, are the same at every call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

RESAMPLES = 20_000
_BATCH = 4_000_000  # numbers of the resamples that are in memory at once


class Interval(NamedTuple):
    """A statistic and the bounds of its percentile interval; numbers, or arrays of the same shape.

    If some task has fewer than two runs, the bounds are infinite, since one run does not show the spread.
    """

    value: Any
    low: Any
    high: Any


def iqm(scores: ArrayLike, axis: int = -1) -> np.ndarray:
    """Return the interquartile mean, without a quarter of the values (rounded down) at each end."""
    return stats.trim_mean(scores, 0.25, axis=axis)


def interval(
    tasks: Sequence[ArrayLike], statistic: Callable[..., np.ndarray] = iqm, confidence: float = 0.95
) -> Interval:
    """Return `statistic` of all runs together, with its stratified bootstrap interval.

    Parameters
    ----------
    tasks : sequence of (..., S) arrays
        Scores; on the same scale for several tasks.
    statistic : callable
        Takes an array and ``axis``, and returns the array without that axis.
    confidence : float
        In (0, 1).
    """
    return _bootstrap(list(tasks), lambda *drawn: statistic(np.concatenate(drawn, -1), axis=-1), confidence)


def difference(
    ours: Sequence[ArrayLike],
    theirs: Sequence[ArrayLike],
    statistic: Callable[..., np.ndarray] = iqm,
    confidence: float = 0.95,
) -> Interval:
    """Return `statistic` of ours minus that of theirs; both sides are resampled."""

    def of(*drawn: np.ndarray) -> np.ndarray:
        a, b = drawn[: len(ours)], drawn[len(ours) :]
        return statistic(np.concatenate(a, -1), axis=-1) - statistic(np.concatenate(b, -1), axis=-1)

    return _bootstrap([*ours, *theirs], of, confidence)


def improvement(ours: Sequence[ArrayLike], theirs: Sequence[ArrayLike], confidence: float = 0.95) -> Interval:
    """Return the probability that a run of ours beats a run of theirs on the same task, averaged over tasks.

    Ties count half.

    Raises
    ------
    ValueError
        If the sides have different numbers of tasks.
    """
    n = len(ours)
    if len(theirs) != n:
        raise ValueError(f"improvement: theirs must have as many tasks as ours ({n}), got {len(theirs)}")

    def of(*drawn: np.ndarray) -> np.ndarray:
        wins = [
            np.sign(a[..., :, None] - b[..., None, :]).mean((-2, -1)) for a, b in zip(drawn[:n], drawn[n:], strict=True)
        ]
        return 0.5 + 0.5 * np.mean(wins, 0)

    return _bootstrap([*ours, *theirs], of, confidence)


def profile(tasks: Sequence[ArrayLike], thresholds: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return the fraction of all runs above each of (K,) thresholds, (K,), with a pointwise band; each task is (S,)."""
    at = np.asarray(thresholds)[:, None]
    return interval([np.asarray(scores)[None, :] > at for scores in tasks], np.mean, confidence)


def _bootstrap(tasks: Sequence[ArrayLike], statistic: Callable[..., np.ndarray], confidence: float) -> Interval:
    samples = [np.asarray(sample, float) for sample in tasks]
    value = statistic(*samples)
    if min(sample.shape[-1] for sample in samples) < 2:
        return Interval(_plain(value), _plain(np.full_like(value, -np.inf)), _plain(np.full_like(value, np.inf)))
    width = sum(sample.size for sample in samples) * max(sample.shape[-1] for sample in samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # the bounds of NaN are NaN
        limits = stats.bootstrap(
            samples,
            lambda *drawn, axis: statistic(*drawn),
            n_resamples=RESAMPLES,
            batch=max(1, _BATCH // width),
            vectorized=True,
            axis=-1,
            confidence_level=confidence,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
    return Interval(_plain(value), _plain(limits.low), _plain(limits.high))


def to_json_numbers(value: Any) -> Any:
    """Return `value`, nested in dicts and lists, with Python's numbers; None for those that are not finite."""
    if isinstance(value, dict):
        return {key: to_json_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_numbers(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def _plain(value: np.ndarray) -> float | np.ndarray:
    return float(value) if np.ndim(value) == 0 else np.asarray(value)

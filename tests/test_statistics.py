"""`rlox_cli.report.statistics` against closed forms and against all possible resamples."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest

from rlox_cli.report.statistics import Interval, difference, improvement, interval, iqm, profile


def every_resample(*samples):
    """All ordered draws with replacement from each of the samples; all are equally likely."""
    yield from product(*(product(sample, repeat=len(sample)) for sample in samples))


def quantiles(values):
    return np.quantile(list(values), [0.025, 0.975])


def test_the_interquartile_mean_cuts_a_quarter_rounded_down():
    assert iqm([0.0, 2.0, 3.0, 4.0, 1000.0]) == 3.0
    assert iqm([5.0, 7.0, 9.0]) == 7.0
    assert iqm(np.array([[9.0, 1.0, 2.0, 3.0], [0.0, 0.0, 4.0, 4.0]])).tolist() == [2.5, 2.0]


def test_an_interval_equals_that_of_all_resamples():
    scores = [1.0, 4.0, 9.0, 16.0, 25.0]
    found = interval([scores])
    low, high = quantiles(np.sort(drawn)[1:4].mean() for (drawn,) in every_resample(scores))
    assert found.value == pytest.approx(29 / 3)
    # Quantiles of few distinct values: one resample more or less may move them by a step.
    assert found.low == pytest.approx(low, abs=0.7)
    assert found.high == pytest.approx(high, abs=0.7)


def test_resampling_is_within_a_task():
    # Two tasks whose runs agree: without strata the mean would vary, with strata it cannot.
    assert interval([[0.0, 0.0, 0.0], [10.0, 10.0, 10.0]], np.mean) == (5.0, 5.0, 5.0)


def test_a_mean_has_the_interval_of_the_normal_law():
    scores = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found, error = interval([scores], np.mean), scores.std() / 20
    assert found.low == pytest.approx(scores.mean() - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(scores.mean() + 1.96 * error, abs=0.1 * error)


def test_differences_and_improvement_equal_those_of_all_resamples():
    ours, theirs = [1.0, 2.0, 7.0, 7.0], [2.0, 5.0, 3.0]
    draws = list(every_resample(ours, theirs))
    found = difference([ours], [theirs], np.mean)
    assert found.value == pytest.approx(4.25 - 10 / 3)
    assert (found.low, found.high) == pytest.approx(
        tuple(quantiles(np.mean(a) - np.mean(b) for a, b in draws)), abs=0.1
    )
    better = improvement([ours], [theirs])
    assert better.value == pytest.approx(6.5 / 12)

    def wins(a, b):
        return np.mean([(x > y) + 0.5 * (x == y) for x in a for y in b])

    assert (better.low, better.high) == pytest.approx(tuple(quantiles(wins(a, b) for a, b in draws)), abs=0.05)
    # With two tasks the result is the mean: runs of different tasks are never compared.
    assert improvement([[9.0, 9.0], [0.0, 0.0]], [[8.0, 8.0], [1.0, 1.0]]) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"theirs must have as many tasks as ours \(1\), got 2"):
        improvement([ours], [theirs, theirs])


def test_a_profile_is_the_fraction_above():
    found = profile([[1.0, 2.0, 3.0, 4.0]], [0.0, 1.0, 2.5, 4.0])
    assert found.value.tolist() == [1.0, 0.75, 0.5, 0.0]
    # Binomial(4, 3/4) / 4 is 1 with probability 0.32, and at most 1/4 with 0.05.
    assert (found.low[1], found.high[1]) == (0.25, 1.0)
    assert (found.low[0], found.high[3]) == (1.0, 0.0)


def test_a_curve_resamples_the_same_runs_at_all_points():
    runs = np.random.default_rng(0).normal(size=(1, 8))
    curve = interval([np.concatenate([runs, 2 * runs, -runs])])
    assert curve.low[1] == 2 * curve.low[0]
    assert curve.high[2] == pytest.approx(-curve.low[0])
    assert interval([runs[0]]).low == curve.low[0]


def test_one_run_has_an_infinite_interval():
    assert interval([[3.0]]) == Interval(3.0, -inf, inf)
    assert difference([[3.0]], [[1.0, 1.0]]) == (2.0, -inf, inf)

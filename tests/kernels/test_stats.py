"""Running statistics against NumPy over all data, also far from zero."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.kernels.stats import RunningStats, RunningStatsVec


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 300), max_size=6),
    offset=st.sampled_from([0.0, 1e6, -1e9]),
)
def test_updates_in_parts_equal_one_update(seed, sizes, offset):
    rng = np.random.default_rng(seed)
    parts = [offset + rng.normal(size=(n, 3)) for n in sizes]
    whole = np.concatenate([np.zeros((0, 3)), *parts])
    one, vec, merged = RunningStats(), RunningStatsVec(3), RunningStatsVec(3)
    for i, part in enumerate(parts):
        other = RunningStatsVec(3)
        other.batch_update(part)
        merged.merge(other)
        if i % 2:
            for row in part:
                vec.update(row)
                one.update(row[0])
        else:
            vec.batch_update(part.ravel(), len(part))
            one.batch_update(part[:, 0])
    assert one.count() == vec.count() == merged.count() == len(whole)
    if len(whole) == 0:
        assert (one.mean(), one.var(), one.std(), one.normalize(3.0)) == (0.0, 0.0, 0.0, 0.0)
        return
    shifted = whole - offset  # shifted, since NumPy itself loses precision far from zero
    for stats in (vec, merged):
        np.testing.assert_allclose(stats.mean(), whole.mean(axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(stats.var(), shifted.var(axis=0), rtol=1e-6, atol=1e-12)
        np.testing.assert_array_equal(stats.std(), np.sqrt(stats.var()))
    np.testing.assert_allclose(one.mean(), vec.mean()[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(one.var(), shifted[:, 0].var(), rtol=1e-6, atol=1e-12)


def test_large_batches_and_many_dimensions():
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(50_000, 3))
    stats = RunningStats()
    stats.batch_update(x)
    np.testing.assert_allclose([stats.mean(), stats.var()], [x.mean(), x.var()], rtol=1e-12)
    assert stats.count() == x.size
    wide = RunningStatsVec(5000)
    wide.batch_update(x.ravel()[:20_000], 4)
    wide.update(x.ravel()[20_000:25_000])
    rows = x.ravel()[:25_000].reshape(5, 5000)
    np.testing.assert_allclose(wide.var(), rows.var(axis=0), rtol=1e-10)


def test_normalisation():
    x = np.random.default_rng(1).normal(5.0, 3.0, size=(100, 4))
    stats = RunningStatsVec(4)
    stats.batch_update(x)
    expected = (x - x.mean(axis=0)) / x.std(axis=0)
    np.testing.assert_allclose(stats.normalize_batch(x), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(stats.normalize_batch(x.ravel(), 100), expected.ravel(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(stats.normalize(x[7]), expected[7], rtol=1e-10, atol=1e-12)
    one = RunningStats()
    one.batch_update(x[:, 0])
    np.testing.assert_allclose(one.normalize(x[7, 0]), expected[7, 0], rtol=1e-10)


@pytest.mark.parametrize("dim", [1, 3, 4, 17, 32, 33, 70])
@pytest.mark.parametrize("n", [1, 5, 255, 301])
def test_rows_of_a_batch_are_normalised_as_single_ones(dim, n):
    stats, rng = RunningStatsVec(dim), np.random.default_rng(0)
    stats.batch_update(rng.normal(3.0, 2.0, (50, dim)))
    rows = rng.normal(size=(n, dim))
    np.testing.assert_array_equal(stats.normalize_batch(rows), [stats.normalize(row) for row in rows])


@pytest.mark.parametrize("dim", [1, 3, 32, 33])
def test_a_batch_larger_than_the_cache_is_normalised_as_its_parts(dim):
    stats, rng = RunningStatsVec(dim), np.random.default_rng(0)
    stats.batch_update(rng.normal(3.0, 2.0, (50, dim)))
    rows = rng.normal(size=(2_100_005 // dim, dim))
    parts = [stats.normalize_batch(part) for part in np.array_split(rows, 50)]
    np.testing.assert_array_equal(stats.normalize_batch(rows), np.concatenate(parts))


def test_a_constant_column_is_not_divided_by_a_tiny_number():
    stats = RunningStatsVec(1)
    stats.update([1.0])
    np.testing.assert_allclose(stats.normalize([1.5]), 5e7)
    one = RunningStats()
    one.update(1.0)
    assert one.normalize(1.5) == 0.0


def test_recorded_values():
    stats = RunningStatsVec(2)
    stats.update([1.0, 2.0])
    stats.batch_update(np.arange(6.0), 3)
    np.testing.assert_allclose(stats.mean(), [1.75, 2.75])
    np.testing.assert_allclose(stats.var(), [2.1875, 2.1875])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
def test_values_that_are_not_finite_or_too_large_are_errors(bad):
    one, vec = RunningStats(), RunningStatsVec(2)
    one.batch_update([1.0, 3.0])
    vec.batch_update([[1.0, 2.0], [3.0, 2.0]])
    for call in (
        lambda: one.update(bad),
        lambda: one.batch_update([0.0, bad, 1.0]),
        lambda: one.batch_update(np.append(np.zeros(9000), bad)),
        lambda: vec.update([0.0, bad]),
        lambda: vec.batch_update([[0.0, bad]]),
        lambda: vec.batch_update(np.append(np.zeros(9999), bad), 5000),
    ):
        with pytest.raises(ValueError, match="the statistics are unchanged"):
            call()
    assert (one.mean(), one.var(), one.count()) == (2.0, 1.0, 2)
    assert (vec.mean().tolist(), vec.var().tolist(), vec.count()) == ([2.0, 2.0], [1.0, 0.0], 2)


def test_states_continue_exactly():
    x = np.random.default_rng(2).normal(size=(30, 3))
    for new, take in (
        (RunningStats, lambda s, part: s.batch_update(part)),
        (lambda: RunningStatsVec(3), lambda s, part: s.batch_update(part)),
    ):
        first = new()
        take(first, x[:20])
        for copy in (pickle.loads(pickle.dumps(first)), new()):
            copy.set_state(first.get_state())
            other = pickle.loads(pickle.dumps(first))
            take(copy, x[20:])
            take(other, x[20:])
            assert str(copy.get_state()) == str(other.get_state())
        first.reset()
        assert first.count() == 0
        assert str(first.get_state()) == str(new().get_state())


def test_results_are_fresh():
    stats = RunningStatsVec(2)
    stats.mean()[:] = 7
    assert stats.mean().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RunningStatsVec(0), ValueError, "RunningStatsVec: dim must be at least 1"),
        (lambda: RunningStatsVec(2.0), TypeError, "RunningStatsVec: dim must be an integer"),
        (lambda: RunningStats().update("1"), TypeError, "RunningStats.update: value must be a number"),
        (lambda: RunningStats().update(None), TypeError, "value must be a number, got NoneType"),
        (lambda: RunningStats().batch_update(["a"]), TypeError, "values must be an array of numbers"),
        (lambda: RunningStats().merge(3), TypeError, "other must be a RunningStats, got int"),
        (lambda: RunningStats().set_state({}), ValueError, "state must have the keys"),
        (lambda: RunningStats().set_state({"count": 1, "mean": np.nan, "m2": 0.0}), ValueError, "must be finite"),
        (lambda: RunningStatsVec(2).update([1.0]), ValueError, r"values must have shape \(2,\), got \(1,\)"),
        (lambda: RunningStatsVec(2).normalize([[1.0, 2.0]]), ValueError, r"values must have shape \(2,\)"),
        (lambda: RunningStatsVec(2).batch_update(np.zeros(6), 2), ValueError, r"batch_size \* dim = 2 \* 2"),
        (lambda: RunningStatsVec(2).batch_update(np.zeros(6)), TypeError, "batch_size must be given"),
        (lambda: RunningStatsVec(2).batch_update(np.zeros((3, 2)), 2), ValueError, "batch_size must be 3"),
        (lambda: RunningStatsVec(2).batch_update(np.zeros((3, 3))), ValueError, r"data must have shape \(B, 2\)"),
        (lambda: RunningStatsVec(2).normalize_batch(np.zeros((1, 1, 2))), ValueError, "data must be flat"),
        (lambda: RunningStatsVec(2).merge(RunningStatsVec(3)), ValueError, "other must have dim 2, got 3"),
        (lambda: RunningStatsVec(2).set_state({"count": 1, "mean": [0.0], "m2": [0.0]}), ValueError, "shape"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()

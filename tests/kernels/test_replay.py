"""ReplayBuffer against a list of transitions, and all documented forms of its arguments."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from philox import MASK, derive_key
from scipy.stats import chisquare

import rlox
from rlox.kernels.rng import _philox_block

DOMAIN_REPLAY = int.from_bytes(b"REPL", "big")
FULL = os.environ.get("RLOX_HYPOTHESIS") == "full"
# 40 operations per example: 2,000 in all, or 12,000.
MACHINE = settings(
    max_examples=300 if FULL else 50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def draws(seed, n, high):
    """The uniform draws of [0, high) as specified: one 32-bit word each, four to a block."""
    words = [w for i in range(-(-n // 4)) for w in _philox_block(derive_key(seed), i, DOMAIN_REPLAY)]
    return [w * high >> 32 for w in words[:n]]


def transition(i, obs_dim=3, act_dim=2):
    return dict(
        obs=np.arange(i, i + obs_dim, dtype=np.float32),
        action=np.full(act_dim, i / 4, np.float32),
        reward=float(i),
        terminated=i % 5 == 4,
        truncated=i % 7 == 6,
        next_obs=np.arange(i, i + obs_dim, dtype=np.float32) + 0.5,
    )


def fill(buffer, numbers, **dims):
    for i in numbers:
        buffer.push(**transition(i, **dims))
    return buffer


def assert_batch(batch, expected):
    np.testing.assert_array_equal(batch.obs, [t["obs"] for t in expected])
    np.testing.assert_array_equal(batch.actions, [t["action"] for t in expected])
    np.testing.assert_array_equal(batch.rewards, [t["reward"] for t in expected])
    np.testing.assert_array_equal(batch.terminated, [t["terminated"] for t in expected])
    np.testing.assert_array_equal(batch.truncated, [t["truncated"] for t in expected])
    if "next_obs" in batch:
        np.testing.assert_array_equal(batch.next_obs, [t["next_obs"] for t in expected])


def assert_equal(a, b):
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a[name].dtype == b[name].dtype


@pytest.mark.parametrize("pushed", [1, 5, 10, 11, 37])
@pytest.mark.parametrize("n", [1, 3, 16, 17, 64, 600, 1100])
def test_a_sample_is_the_specified_draw(pushed, n):
    buffer = fill(rlox.ReplayBuffer(10, 3, 2), range(pushed))
    stored = [transition(i) for i in range(pushed)][-10:]
    by_slot = stored if pushed <= 10 else stored[-(pushed % 10) :] + stored[: 10 - pushed % 10]
    if pushed > 10 and pushed % 10 == 0:
        by_slot = stored
    assert_batch(buffer.sample(n, 9), [by_slot[k] for k in draws(9, n, len(stored))])


@pytest.mark.parametrize("obs_dim", [1, 2, 3, 4, 5, 11, 17, 32, 33, 40, 376])
@pytest.mark.parametrize("act_dim", [1, 2, 6, 40])
def test_every_width_comes_back(obs_dim, act_dim):
    buffer = fill(rlox.ReplayBuffer(9, obs_dim, act_dim), range(13), obs_dim=obs_dim, act_dim=act_dim)
    for n in (1, 2, 5, 9, 30):
        indices = buffer.sample_indices(n, 3)
        batch = buffer.sample(n, 3)
        expected = [transition(i if i >= 4 else i + 9, obs_dim, act_dim) for i in indices]
        assert_batch(batch, expected)
        assert_equal(buffer.gather(indices), batch)
        rows = buffer.sample_packed(n, 3)
        for name, columns in buffer.columns.items():
            np.testing.assert_array_equal(rows[:, columns].reshape(batch[name].shape), batch[name])
        out = {name: np.zeros_like(value) for name, value in batch.items()}
        assert buffer.sample(n, 3, out=out) is out
        assert_equal(out, batch)


def test_dtypes_and_shapes():
    batch = fill(rlox.ReplayBuffer(9, 3, 2), range(5)).sample(7, 0)
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "obs": ((7, 3), "float32"),
        "next_obs": ((7, 3), "float32"),
        "actions": ((7, 2), "float32"),
        "rewards": ((7,), "float32"),
        "terminated": ((7,), "bool"),
        "truncated": ((7,), "bool"),
    }
    assert isinstance(batch, rlox.Batch)
    assert batch.observations is batch["obs"] is batch.obs
    assert batch.next_observations is batch["next_obs"]
    with pytest.raises(AttributeError, match="weights"):
        _ = batch.weights
    assert_equal(pickle.loads(pickle.dumps(batch)), batch)


@pytest.mark.parametrize(
    ("obs", "action"),
    [
        ([1, 2, 3], 0.5),
        ((1.0, 2.0, 3.0), np.float32(0.5)),
        (np.array([1, 2, 3], np.int32), [0.5]),
        (np.array([9, 1, 9, 2, 9, 3], np.float64)[1::2], np.array(0.5)),
        (np.array([3, 2, 1], np.float32)[::-1], np.array([0.5])),
    ],
)
@pytest.mark.parametrize(
    ("reward", "flag"), [(2, 1), (np.float64(2), np.True_), (np.array(2.0), np.array(True)), (np.int8(2), 1.0)]
)
def test_push_takes_every_form(obs, action, reward, flag):
    buffer = rlox.ReplayBuffer(4, 3, 1)
    buffer.push(obs, action=action, reward=reward, terminated=flag, truncated=False, next_obs=obs)
    batch = buffer.sample(1, 0)
    assert batch.obs.tolist() == batch.next_obs.tolist() == [[1, 2, 3]]
    assert (batch.actions.tolist(), batch.rewards.tolist(), batch.terminated.tolist()) == ([[0.5]], [2.0], [True])
    assert len(buffer) == buffer.len() == 1
    assert buffer.capacity == 4


def test_next_obs_is_given_always_or_never():
    never = rlox.ReplayBuffer(4, 1, 1)
    never.push([1.0], 0, 0.0, False, False)
    batch = never.sample(2, 0)
    with pytest.raises(KeyError, match="absent"):
        batch["next_obs"]
    with pytest.raises(AttributeError, match="absent"):
        _ = batch.next_observations
    assert "next_obs" not in never.columns
    with pytest.raises(ValueError, match="next_obs"):
        never.push([1.0], 0, 0.0, False, False, [1.0])
    always = rlox.ReplayBuffer(4, 1, 1)
    always.push([1.0], 0, 0.0, False, False, [2.0])
    with pytest.raises(ValueError, match="next_obs"):
        always.push([1.0], 0, 0.0, False, False)
    with pytest.raises(ValueError, match="next_obs"):
        always.push_batch([1.0], None, [0.0], [0.0], [False], [False])
    assert len(always) == 1
    always.clear()
    assert len(always) == 0
    always.push([1.0], 0, 0.0, False, False)
    with pytest.raises(ValueError, match="next_obs"):
        rlox.ReplayBuffer(4, 1, 1, n_step=2).push([1.0], 0, 0.0, False, False)


def columns_of(numbers):
    ts = [transition(i) for i in numbers]
    return [np.array([t[k] for t in ts]) for k in ("obs", "next_obs", "action", "reward", "terminated", "truncated")]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("sizes", [[1], [4, 3], [10], [7, 7], [25]])
def test_push_batch_is_many_pushes(flat, sizes):
    one, many = rlox.ReplayBuffer(10, 3, 2), rlox.ReplayBuffer(10, 3, 2)
    start = 0
    for n in sizes:
        columns = columns_of(range(start, start + n))
        many.push_batch(*[c.ravel() for c in columns] if flat else columns)
        fill(one, range(start, start + n))
        start += n
    assert len(one) == len(many)
    assert_equal(one.sample(50, 1), many.sample(50, 1))


# n-step, by hand: rewards 1, 2, 4, 8, ... with gamma 1/2 give sums that are easy to see.


def test_n_step_by_hand():
    buffer = rlox.ReplayBuffer(8, 1, 1, n_step=3, gamma=0.5)
    for i, (term, trunc) in enumerate([(0, 0), (0, 0), (1, 0), (0, 0), (0, 1), (0, 0), (0, 0)]):
        buffer.push([i], 0, 2.0**i, bool(term), bool(trunc), [i + 0.5])
    batch = buffer.gather(np.arange(7))
    #           0+1+2(end)    1+2       2     3+4(cut)  4     5+6 (newest)  6
    assert batch.rewards.tolist() == [1 + 1 + 1, 2 + 2, 4, 8 + 8, 16, 32 + 32, 64]
    assert batch.next_obs[:, 0].tolist() == [2.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5]
    assert batch.discounts.tolist() == [0.125, 0.25, 0.5, 0.25, 0.5, 0.25, 0.5]
    assert batch.terminated.tolist() == [True, True, True, False, False, False, False]
    assert batch.truncated.tolist() == [False, False, False, True, True, False, False]
    assert batch.obs[:, 0].tolist() == list(range(7))
    # Three more: the ring wraps, and the sequence of the newest transition continues.
    for i in (7, 8, 9):
        buffer.push([i], 0, 2.0**i, False, False, [i + 0.5])
    batch = buffer.gather([6, 7, 0, 1])  # transitions 6, 7, 8, 9
    assert batch.rewards.tolist() == [64 * 3, 128 * 3, 256 * 2, 512]
    assert batch.next_obs[:, 0].tolist() == [8.5, 9.5, 9.5, 9.5]
    rows, sample = buffer.sample_packed(20, 5), buffer.sample(20, 5)
    for name, columns in buffer.columns.items():
        np.testing.assert_array_equal(rows[:, columns].reshape(sample[name].shape), sample[name])


@pytest.mark.parametrize("n_envs", [1, 2, 3])
@pytest.mark.parametrize("capacity", [12, 13])
def test_n_step_against_a_walk(n_envs, capacity):
    rng = np.random.default_rng(0)
    buffer = rlox.ReplayBuffer(capacity, 1, 1, n_step=4, gamma=0.9, n_envs=n_envs)
    data = []
    for _ in range(9):
        rows = [(float(len(data) + j), rng.normal(), rng.random() < 0.2, rng.random() < 0.1) for j in range(n_envs)]
        data += rows
        obs, reward, term, trunc = map(np.array, zip(*rows, strict=True))
        buffer.push_batch(obs, obs + 0.5, obs, reward, term, trunc)
    batch = buffer.sample(200, 1)
    for k in range(200):
        at = int(batch.obs[k, 0])
        assert at >= len(data) - capacity
        total, discount = 0.0, 1.0
        for _ in range(4):
            total += discount * data[at][1]
            discount *= 0.9
            last = at
            at += n_envs
            if data[last][2] or data[last][3] or at >= len(data):
                break
        assert batch.rewards[k] == pytest.approx(total, rel=1e-6)
        assert batch.discounts[k] == pytest.approx(discount, rel=1e-6)
        assert (batch.next_obs[k, 0], batch.terminated[k], batch.truncated[k]) == (last + 0.5, *data[last][2:])


def test_sample_recent():
    buffer = fill(rlox.ReplayBuffer(10, 3, 2), range(14))
    assert set(buffer.sample_recent(200, 3, 1).rewards) == {11.0, 12.0, 13.0}
    assert set(buffer.sample_recent(300, 99, 1).rewards) == set(map(float, range(4, 14)))


def test_extra_columns():
    buffer = rlox.ReplayBuffer(3, 3, 2)
    a, b = buffer.register_column("log_prob", 1), buffer.register_column("hidden", 4)
    for i in range(5):
        buffer.push(**transition(i))
        buffer.push_extra(b, np.arange(4) + i)
        if i != 4:
            buffer.push_extra(a, -float(i))
    batch = buffer.sample(50, 2)
    np.testing.assert_array_equal(batch.hidden, batch.rewards[:, None] + np.arange(4))
    np.testing.assert_array_equal(batch.log_prob[:, 0], np.where(batch.rewards == 4, 0, -batch.rewards))
    assert_equal(pickle.loads(pickle.dumps(buffer)).sample(50, 2), batch)
    with pytest.raises(ValueError, match="name"):
        buffer.register_column("late", 1)
    with pytest.raises(IndexError, match="handle"):
        buffer.push_extra(2, 0.0)
    with pytest.raises(ValueError, match="values"):
        buffer.push_extra(b, [1.0])


# Images.


@pytest.mark.parametrize("shape", [(5, 3, 1), (4, 4, 4), (7,)])
def test_bytes_are_stored_as_bytes(shape):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, *shape), np.uint8)
    buffer = rlox.ReplayBuffer(8, None, 2, obs_shape=shape, obs_dtype=np.uint8)
    for i in range(7):
        buffer.push(images[i], [i, -i], i, False, False, images[i + 1])
    batch = buffer.sample(40, 0)
    assert batch.obs.dtype == np.uint8
    assert batch.obs.shape == (40, *shape)
    at = batch.rewards.astype(int)
    np.testing.assert_array_equal(batch.obs, images[at])
    np.testing.assert_array_equal(batch.next_obs, images[at + 1])
    np.testing.assert_array_equal(batch.actions, np.stack([at, -at], 1))
    with pytest.raises(TypeError, match="obs must have dtype uint8"):
        buffer.push(images[0].astype(np.float32), [0, 0], 0, False, False, images[0])
    with pytest.raises(TypeError, match="float32"):
        buffer.sample_packed(3, 0)


def episodes(rng, n, k, shape, padding, values=256):
    """Transitions of stacked frames over several episodes, with the different paddings of environments."""
    out = []
    while len(out) < n:
        frames = [rng.integers(0, values, shape).astype(np.uint8) for _ in range(int(rng.integers(2, 12)))]
        first = {"repeat": frames[0], "zeros": np.zeros(shape, np.uint8), "other": frames[-1]}[padding]
        frames = [first] * (k - 1) + frames
        stacks = [np.concatenate(frames[i : i + k]) for i in range(len(frames) - k + 1)]
        last = len(stacks) - 2
        out += [(stacks[i], stacks[i + 1], i == last and bool(rng.integers(2)), i == last) for i in range(last + 1)]
    return out[:n]


@pytest.mark.parametrize("padding", ["repeat", "zeros", "other"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("has_next", [True, False])
@pytest.mark.parametrize("values", [2, 256])
def test_frame_stacks_come_back_exactly(padding, dtype, has_next, values):
    rng = np.random.default_rng(1)
    k, shape = 3, (1, 2, 2)
    data = episodes(rng, 400, k, shape, padding, values)
    buffer = rlox.ReplayBuffer(50, None, 1, obs_shape=(3, 2, 2), obs_dtype=dtype, n_stacked=k)
    for i, (obs, next_obs, term, trunc) in enumerate(data):
        buffer.push(obs.astype(dtype), 0, i, term, trunc, next_obs.astype(dtype) if has_next else None)
        if i % 7 == 0:
            batch = buffer.sample(20, i)
            drawn = [data[int(reward)] for reward in batch.rewards]
            np.testing.assert_array_equal(batch.obs, [obs for obs, *_ in drawn])
            if has_next:
                np.testing.assert_array_equal(batch.next_obs, [next_obs for _, next_obs, *_ in drawn])
            assert batch.rewards.min() >= i - 49


def test_when_frames_run_out_the_oldest_are_removed():
    rng = np.random.default_rng(2)
    buffer = rlox.ReplayBuffer(500, None, 1, obs_shape=(4, 3, 3), obs_dtype=np.uint8, n_stacked=4)
    stacks = rng.integers(0, 256, (1500, 4, 3, 3), np.uint8)  # no common frames: eight new frames a push
    for i in range(0, 1498):
        buffer.push(stacks[i], 0, i, False, False, stacks[i + 1])
    assert 0 < len(buffer) < 500
    indices = (np.arange(1498 - len(buffer), 1498)) % 500
    batch = buffer.gather(indices)
    np.testing.assert_array_equal(batch.rewards, np.arange(1498 - len(buffer), 1498))
    np.testing.assert_array_equal(batch.obs, stacks[batch.rewards.astype(int)])
    np.testing.assert_array_equal(batch.next_obs, stacks[batch.rewards.astype(int) + 1])
    with pytest.raises(IndexError, match="indices"):
        buffer.gather([(1498 - len(buffer) - 1) % 500])
    again = pickle.loads(pickle.dumps(buffer))
    assert_equal(again.sample(30, 1), buffer.sample(30, 1))
    buffer.push(stacks[0], 0, 0, False, False, stacks[1])
    again.push(stacks[0], 0, 0, False, False, stacks[1])
    assert_equal(again.sample(30, 1), buffer.sample(30, 1))


def test_a_stack_costs_one_frame():
    capacity, frame = 20_000, 32 * 32
    buffer = rlox.ReplayBuffer(capacity, None, 1, obs_shape=(4, 32, 32), obs_dtype=np.uint8, n_stacked=4)
    assert buffer.nbytes < 1.20 * capacity * frame  # 96 bytes of numbers per record, a smaller share at 84 x 84
    atari = rlox.ReplayBuffer(100_000, None, 1, obs_shape=(4, 84, 84), obs_dtype=np.uint8, n_stacked=4)
    assert atari.nbytes < 1.07 * 100_000 * 84 * 84
    rng = np.random.default_rng(0)
    small = rlox.ReplayBuffer(300, None, 1, obs_shape=(4, 8, 8), obs_dtype=np.uint8, n_stacked=4, n_envs=4)
    streams = [episodes(rng, 150, 4, (1, 8, 8), "repeat") for _ in range(4)]
    for step in range(150):
        obs, next_obs, term, trunc = map(np.array, zip(*[s[step] for s in streams], strict=True))
        small.push_batch(obs, next_obs, np.zeros(4), np.arange(4) + 4.0 * step, term, trunc)
    assert len(small) == 300  # all fit, though the frames of four environments are separate
    batch = small.sample(100, 0)
    for row in range(100):
        step, env = divmod(int(batch.rewards[row]), 4)
        np.testing.assert_array_equal(batch.obs[row], streams[env][step][0])
        np.testing.assert_array_equal(batch.next_obs[row], streams[env][step][1])


# Statistics.


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 1000, 2**24 + 1000])
def test_draws_are_uniform(n):
    buffer = rlox.ReplayBuffer(n, 1, 1)
    zeros = np.zeros(n, np.float32)
    buffer.push_batch(zeros, None, zeros, zeros, zeros.astype(bool), zeros.astype(bool))
    counts = np.bincount(buffer.sample_indices(200_000, 5) * min(n, 1000) // n, minlength=min(n, 1000))
    assert 0.001 < chisquare(counts).pvalue < 0.999


def test_neighbouring_seeds_are_independent():
    buffer = fill(rlox.ReplayBuffer(16, 3, 2), range(16))
    table = np.zeros((16, 16))
    for seed in range(400):
        np.add.at(table, (buffer.sample_indices(256, seed), buffer.sample_indices(256, seed + 1)), 1)
    assert 0.001 < chisquare(table.ravel()).pvalue < 0.999


def test_a_smaller_batch_is_a_prefix_of_a_larger_one():
    buffer = fill(rlox.ReplayBuffer(10, 3, 2), range(10))
    large = buffer.sample_indices(2000, 4)
    for n in (1, 4, 15, 16, 17, 33, 512, 513, 1500):
        np.testing.assert_array_equal(buffer.sample_indices(n, 4), large[:n])


# Errors.


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (dict(capacity=0), ValueError),
        (dict(capacity=-1), ValueError),
        (dict(capacity=True), TypeError),
        (dict(capacity=2.0), TypeError),
        (dict(capacity=2**70), ValueError),
        (dict(capacity=2**45), MemoryError),
        (dict(obs_dim=0), ValueError),
        (dict(obs_dim=None), TypeError),
        (dict(obs_dim=2**63), ValueError),
        (dict(act_dim=0), ValueError),
        (dict(act_dim="1"), TypeError),
        (dict(obs_shape=(2, 3)), ValueError),
        (dict(obs_shape=(4, 0)), ValueError),
        (dict(obs_shape=4), TypeError),
        (dict(obs_dtype=np.float64), TypeError),
        (dict(obs_dtype="nonsense"), TypeError),
        (dict(n_stacked=3), ValueError),
        (dict(n_stacked=0), ValueError),
        (dict(n_envs=0), ValueError),
        (dict(n_envs=11), ValueError),
        (dict(n_step=0), ValueError),
        (dict(gamma=1.5), ValueError),
        (dict(gamma=float("nan")), ValueError),
        (dict(gamma="x"), TypeError),
    ],
)
def test_constructor_errors_name_the_argument(change, error):
    with pytest.raises(error, match=next(iter(change))):
        rlox.ReplayBuffer(**{"capacity": 10, "obs_dim": 4, "act_dim": 1, **change})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (dict(obs=[1, 2]), ValueError),
        (dict(obs=[[1, 2], [3]]), ValueError),
        (dict(obs=np.zeros((1, 3))), ValueError),
        (dict(obs=["a", "b", "c"]), TypeError),
        (dict(obs=None), TypeError),
        (dict(obs=np.zeros(3, complex)), TypeError),
        (dict(action=[1]), ValueError),
        (dict(action=1.0), ValueError),
        (dict(action="x"), TypeError),
        (dict(reward="1"), TypeError),
        (dict(reward=None), TypeError),
        (dict(reward=[1.0, 2.0]), TypeError),
        (dict(terminated=2), ValueError),
        (dict(terminated="no"), TypeError),
        (dict(truncated=None), TypeError),
        (dict(truncated=float("nan")), ValueError),
        (dict(next_obs=[1]), ValueError),
    ],
)
def test_push_errors_name_the_argument_and_store_nothing(change, error):
    buffer = fill(rlox.ReplayBuffer(4, 3, 2), range(3))
    before = buffer.get_state()
    with pytest.raises(error, match=next(iter(change))):
        buffer.push(**{**transition(9), **change})
    assert buffer.len() == 3
    np.testing.assert_array_equal(buffer.get_state()["rows"], before["rows"])


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (0, np.zeros((4, 4)), ValueError),
        (0, np.zeros(11), ValueError),
        (1, np.zeros((3, 3)), ValueError),
        (2, np.zeros(4), ValueError),
        (2, None, TypeError),
        (3, np.zeros((4, 1)), ValueError),
        (3, np.zeros(0), ValueError),
        (4, np.zeros(3, bool), ValueError),
        (4, np.full(4, 2), ValueError),
        (5, np.array(["a"] * 4), TypeError),
    ],
)
def test_push_batch_errors_name_the_argument(at, value, error):
    names = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")
    buffer = rlox.ReplayBuffer(10, 3, 2)
    columns = columns_of(range(4))
    columns[at] = value
    with pytest.raises(error, match=names[at]):
        buffer.push_batch(*columns)
    assert len(buffer) == 0


def test_sample_errors_name_the_argument():
    buffer = rlox.ReplayBuffer(10, 3, 2)
    for call in (buffer.sample, buffer.sample_packed, buffer.sample_indices):
        with pytest.raises(ValueError, match="empty"):
            call(4, 0)
    fill(buffer, range(3))
    for call in (buffer.sample, buffer.sample_packed, buffer.sample_indices):
        for size, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError), (None, TypeError)):
            with pytest.raises(error, match="batch_size"):
                call(size, 0)
        for seed, error in ((-1, ValueError), (2**64, ValueError), (0.5, TypeError), (None, TypeError)):
            with pytest.raises(error, match="seed"):
                call(2, seed)
        call(np.int64(2), np.uint64(2**64 - 1))
    with pytest.raises(MemoryError, match="batch_size"):
        buffer.sample(2**62, 0)
    for indices, error in (([3], IndexError), ([-1], IndexError), ([[0]], ValueError), ([0.5], TypeError)):
        with pytest.raises(error, match="indices"):
            buffer.gather(indices)
    assert buffer.gather([]).obs.shape == (0, 3)
    with pytest.raises(ValueError, match="obs"):
        buffer.sample(3, 0, out=buffer.sample(4, 0))
    with pytest.raises(TypeError, match="out"):
        buffer.sample(3, 0, out=[1])
    with pytest.raises(ValueError, match="n_envs"):
        rlox.ReplayBuffer(8, 1, 1, n_envs=2).push_batch([1.0], None, [0.0], [0.0], [False], [False])


def test_states_that_do_not_fit_change_nothing():
    buffer = fill(rlox.ReplayBuffer(10, 3, 2), range(13))
    batch = buffer.sample(20, 1)
    good = buffer.get_state()
    for change in (
        {"rows": good["rows"][:, :-1]},
        {"rows": good["rows"].astype(np.int32)},
        {"rows": np.zeros((11, good["rows"].shape[1]), np.uint8)},
        {"count": 3},
        {"has_next": 0},
        {"has_next": 7},
        {"columns": "__import__('os')"},
        {"config": "another"},
        {"new": 1},
    ):
        with pytest.raises(ValueError, match="state"):
            buffer.set_state({**good, **change})
        assert_equal(buffer.sample(20, 1), batch)
    with pytest.raises(TypeError, match="state"):
        buffer.set_state(None)


def test_import_needs_no_torch():
    program = (
        "import rlox, sys; rlox.ReplayBuffer, rlox.PrioritizedReplayBuffer, rlox.Batch; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


class Machine(RuleBasedStateMachine):
    """Any sequence of operations, compared with a list of (number, transition, extra)."""

    def make(self, **options):
        return rlox.ReplayBuffer(self.capacity, 3, 2, **options)

    def pushed(self, numbers):
        self.model = (self.model + list(numbers))[-self.capacity :]

    @initialize(capacity=st.integers(1, 20), has_next=st.booleans(), extra=st.booleans())
    def start(self, capacity, has_next, extra):
        self.capacity, self.has_next, self.extra = capacity, has_next, extra
        self.buffer = self.make()
        if extra:
            self.buffer.register_column("extra", 2)
        self.model, self.count = [], 0
        self.extras = {}

    def number(self):
        self.count += 1
        return self.count - 1

    def keywords(self, number):
        t = transition(number)
        if not self.has_next:
            del t["next_obs"]
        return t

    @rule(form=st.sampled_from(["arrays", "lists", "float64"]))
    def push(self, form):
        number = self.number()
        t = self.keywords(number)
        for name in ("obs", "action", "next_obs"):
            if name in t and form != "arrays":
                t[name] = t[name].tolist() if form == "lists" else t[name].astype(np.float64)
        self.buffer.push(**t)
        self.pushed([number])

    @precondition(lambda self: self.extra and self.model)
    @rule()
    def push_extra(self):
        self.buffer.push_extra(0, [self.model[-1], 1])
        self.extras[self.model[-1]] = 1

    @rule(n=st.integers(1, 30))
    def push_batch(self, n):
        numbers = [self.number() for _ in range(n)]
        columns = columns_of(numbers)
        if not self.has_next:
            columns[1] = None
        self.buffer.push_batch(*columns)
        self.pushed(numbers)

    def slot(self, number):
        """The slot of a transition: the ring restarts at clear()."""
        return (number - self.base) % self.capacity

    base = 0

    @precondition(lambda self: self.model)
    @rule(n=st.integers(1, 40), seed=st.integers(0, MASK))
    def sample(self, n, seed):
        by_slot = {self.slot(i): i for i in self.model}
        chosen = [by_slot[i] for i in self.buffer.sample_indices(n, seed).tolist()]
        batch = self.buffer.sample(n, seed)
        assert_batch(batch, [transition(i) for i in chosen])
        if self.extra:
            np.testing.assert_array_equal(batch.extra, [[i, 1] if i in self.extras else [0, 0] for i in chosen])

    @precondition(lambda self: self.model)
    @rule(window=st.integers(1, 25), seed=st.integers(0, MASK))
    def sample_recent(self, window, seed):
        assert set(self.buffer.sample_recent(9, window, seed).rewards) <= set(self.model[-window:])

    @rule(through=st.sampled_from(["pickle", "state"]))
    def restore(self, through):
        if through == "pickle":
            self.buffer = pickle.loads(pickle.dumps(self.buffer))
        else:
            other = self.make()
            other.set_state(self.buffer.get_state())
            self.buffer = other

    @rule()
    def clear(self):
        self.buffer.clear()
        self.model, self.base = [], self.count

    @invariant()
    def length(self):
        if hasattr(self, "buffer"):
            assert len(self.buffer) == len(self.model)


TestMachine = Machine.TestCase
TestMachine.settings = MACHINE


def test_as_many_axes_as_a_batch_may_have():
    shape = (1,) * 31
    buffer = rlox.ReplayBuffer(4, None, 1, obs_shape=shape)
    buffer.push(np.ones(shape, np.float32), [0.0], 0.0, False, False)
    assert buffer.sample(2, 0)["obs"].shape == (2, *shape)
    with pytest.raises(ValueError, match="ReplayBuffer: obs_shape must have at most 31 axes, got 32"):
        rlox.ReplayBuffer(4, None, 1, obs_shape=(1, *shape))


def test_saved_rows_depend_on_what_was_pushed_alone():
    """Bytes are padded to whole words."""
    states = []
    for _ in range(2):
        buffer = rlox.ReplayBuffer(3, 5, 1, obs_dtype=np.uint8)
        # The same places are used again, after other bytes.
        for number in (*(range(200, 203) if states else ()), 1, 2, 3):
            buffer.push(np.full(5, number, np.uint8), [0.0], 0.0, False, False, np.full(5, number, np.uint8))
        states.append(buffer.get_state()["rows"])
    np.testing.assert_array_equal(*states)
    padding = np.delete(states[0][0], [*range(5), *range(8, 13)])
    assert set(padding[:6]) == {0}

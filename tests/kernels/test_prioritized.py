"""PrioritizedReplayBuffer against a list of priorities, and its draws against the documented proportions."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scipy.stats import chisquare

import rlox

MASK = 2**64 - 1
# As in test_replay.py.
FULL = os.environ.get("RLOX_HYPOTHESIS") == "full"


def make(priorities, capacity=None, **options):
    """A buffer in which transition i has reward i and the given priority."""
    n = len(priorities)
    buffer = rlox.PrioritizedReplayBuffer(capacity or n, 1, 1, **options)
    numbers = np.arange(n, dtype=np.float32)
    flags = np.zeros(n, bool)
    buffer.push_batch(numbers, numbers + 0.5, numbers, numbers, flags, flags, priorities)
    return buffer


def probabilities(priorities, alpha):
    p = np.asarray(priorities, float) ** alpha * (np.asarray(priorities) > 0)
    return p / p.sum()


def pvalue(counts, expected):
    """Chi-square test; neighbouring cells are merged until at least ten counts are expected."""
    cells, count, expects = [], 0, 0.0
    for c, e in zip(counts.tolist(), expected.tolist(), strict=True):
        count, expects = count + c, expects + e
        if expects >= 10:
            cells.append((count, expects))
            count, expects = 0, 0.0
    cells[-1] = (cells[-1][0] + count, cells[-1][1] + expects)
    return chisquare(*np.array(cells).T).pvalue if len(cells) > 1 else 1.0


RNG = np.random.default_rng(3)
PRIORITIES = {
    "equal": np.ones(300),
    "distinct": RNG.random(3000) + 0.01,
    "extreme": 10.0 ** RNG.uniform(-6, 6, 1000),
    "one large": np.r_[np.full(2000, 1e-6), 1e6, np.full(2000, 1e-6)],
    "many small against one": np.r_[np.full(40_000, 1e-4), 4.0],
    "zeros between": np.where(np.arange(500) % 3 == 0, RNG.random(500), 0.0),
    "one": np.array([2.5]),
    "deep": RNG.random(70_000) ** 4,
}


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("kind", PRIORITIES)
def test_draws_are_in_proportion_and_weights_exact(kind, alpha):
    p = PRIORITIES[kind]
    n = 200_000
    buffer = make(p, alpha=alpha, beta=0.7, eps=0.0)
    batch = buffer.sample(n, 11)
    expected = probabilities(p, alpha)
    counts = np.bincount(batch.indices.astype(int), minlength=len(p))
    assert counts[expected == 0].sum() == 0
    if (expected > 0).sum() > 1:
        assert pvalue(counts, n * expected) > 1e-3
    weights = (len(p) * expected[expected > 0]) ** -0.7
    table = np.zeros(len(p))
    table[expected > 0] = weights / weights.max()
    np.testing.assert_allclose(batch.weights, table[batch.indices.astype(int)], rtol=2e-7)
    assert batch.weights.max() <= 1
    np.testing.assert_array_equal(batch.rewards, batch.indices)
    np.testing.assert_array_equal(batch.next_obs[:, 0], batch.indices + 0.5)


@pytest.mark.parametrize("size", [1_000_003])
def test_a_million_leaves(size):
    p = np.random.default_rng(0).random(size) + 0.1
    batch = make(p, alpha=1.0).sample(1_000_000, 1)
    groups = np.bincount(batch.indices.astype(int) % 1009, minlength=1009)
    assert pvalue(groups, 1e6 * np.bincount(np.arange(size) % 1009, weights=p) / p.sum()) > 1e-3
    groups = np.bincount(batch.indices.astype(int) * 1000 // size, minlength=1000)
    assert pvalue(groups, 1e6 * np.bincount(np.arange(size) * 1000 // size, weights=p) / p.sum()) > 1e-3


def test_neighbouring_seeds_are_independent():
    buffer = make([1.0, 2.0, 3.0, 4.0])
    table = np.zeros((4, 4))
    for seed in range(300):
        pair = [buffer.sample(128, seed + d).indices.astype(int) for d in (0, 1)]
        np.add.at(table, tuple(pair), 1)
    q = probabilities([1, 2, 3, 4], 0.6)
    assert pvalue(table.ravel(), table.sum() * np.outer(q, q).ravel()) > 1e-3


def test_dtypes_and_defaults():
    buffer = rlox.PrioritizedReplayBuffer(capacity=100, obs_dim=2, act_dim=1)
    assert (buffer.alpha, buffer.beta) == (0.6, 0.4)
    buffer.push(np.zeros(2, np.float32), 0.5, 1.0, False, False, np.zeros(2, np.float32))
    batch = buffer.sample(8)
    assert (batch.weights.dtype, batch.indices.dtype) == (np.float32, np.uint64)
    assert list(batch) == [
        "obs", "next_obs", "actions", "rewards", "terminated", "truncated", "weights", "indices"
    ]  # fmt: skip
    buffer.set_beta(0.7)
    assert buffer.beta == 0.7
    out = buffer.sample(8, 1)
    assert buffer.sample(8, 2, out=out) is out
    for name, value in buffer.sample(8, 2).items():
        np.testing.assert_array_equal(out[name], value)


def test_priority_none_is_the_highest_so_far():
    buffer = rlox.PrioritizedReplayBuffer(4, 1, 1, alpha=1.0)
    for priority in (0.5, None, 8.0, None):
        buffer.push([0.0], 0, 0, False, False, priority=priority)
    np.testing.assert_array_equal(buffer.get_state()["leaves"], [0.5, 1, 8, 8])
    buffer.update_priorities([1], [20])
    buffer.push_batch([0.0], None, [0.0], [0.0], [False], [False])
    np.testing.assert_array_equal(buffer.get_state()["leaves"], [20, 8, 8, 20])


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.int32, np.uint8])
def test_update_priorities(dtype):
    p = np.random.default_rng(1).random(200)
    buffer = make(p, alpha=1.0, eps=0.0)
    indices = np.array([3, 150, 3, 0, 199], dtype)
    buffer.update_priorities(indices, np.array([9.0, 0.0, 2.0, 0.5, 1e-3]))
    p[[3, 150, 0, 199]] = [2.0, 0.0, 0.5, 1e-3]
    np.testing.assert_array_equal(buffer.get_state()["leaves"], p.astype(np.float32))
    counts = np.bincount(buffer.sample(100_000, 0).indices.astype(int), minlength=200)
    assert counts[150] == 0
    assert pvalue(counts, 1e5 * p / p.sum()) > 1e-3


def test_many_updates_leave_the_tree_of_a_fresh_buffer():
    rng = np.random.default_rng(2)
    p = rng.random(5000)
    buffer = make(p)
    for _ in range(200):
        indices = rng.integers(0, 5000, 64)
        new = 10.0 ** rng.uniform(-6, 6, 64)
        buffer.update_priorities(indices, new)
        for i, value in zip(indices, new, strict=True):
            p[i] = value
    for name, value in make(p).sample(5000, 7).items():
        np.testing.assert_array_equal(buffer.sample(5000, 7)[name], value, err_msg=name)


def test_n_step_images_and_eviction_work_here_too():
    rng = np.random.default_rng(0)
    buffer = rlox.PrioritizedReplayBuffer(
        300, None, 1, obs_shape=(2, 3, 3), obs_dtype=np.uint8, n_stacked=2, n_step=2, gamma=0.5
    )
    stacks = rng.integers(0, 256, (900, 2, 3, 3), np.uint8)
    for i in range(899):
        buffer.push(stacks[i], 0, i, False, False, stacks[i + 1], priority=1.0 + i % 3)
    assert len(buffer) < 300
    batch = buffer.sample(2000, 1)
    oldest = 899 - len(buffer)
    at = batch.obs.reshape(2000, -1).astype(np.int64)
    table = {s.tobytes(): i for i, s in enumerate(stacks)}
    numbers = np.array([table[o.tobytes()] for o in batch.obs])
    assert numbers.min() == oldest
    assert len(at) == 2000
    steps = np.where(numbers == 898, 1, 2)
    np.testing.assert_array_equal(batch.rewards, numbers + np.where(steps == 2, 0.5 * (numbers + 1), 0))
    np.testing.assert_array_equal(batch.discounts, 0.5**steps)
    np.testing.assert_array_equal(batch.next_obs, stacks[numbers + steps])


def test_all_zero_cannot_be_sampled():
    buffer = make([0.0, 0.0, 0.0], eps=0.0)
    with pytest.raises(ValueError, match="priorities must not all be 0"):
        buffer.sample(2, 0)
    buffer.update_priorities([1], [1.0])
    assert set(buffer.sample(20, 0).indices.tolist()) == {1}
    assert set(buffer.sample(20, 0).weights.tolist()) == {1.0}


def test_transitions_of_priority_zero_are_still_drawn():
    buffer = make([1.0, 2.0, 3.0, 4.0], alpha=1.0, beta=1.0)
    assert buffer.eps == 1e-6
    buffer.update_priorities(np.arange(4), np.zeros(4))
    assert np.bincount(buffer.sample(4000, 0).indices.astype(int)).min() > 800
    buffer = rlox.PrioritizedReplayBuffer(4, 1, 1, alpha=0.5, eps=0.04)
    for priority in (0.0, 0.01, 1.0):
        buffer.push([0.0], 0, 0, False, False, priority=priority)
    buffer.push_batch([0.0], None, [0.0], [0.0], [False], [False], [0.0])
    np.testing.assert_allclose(buffer.get_state()["leaves"], [0.2, 0.2, 1.0, 0.2], rtol=1e-6)
    # Priorities above eps are stored exactly.
    p = 10.0 ** RNG.uniform(-5, 5, 300)
    np.testing.assert_array_equal(make(p, alpha=1.0, eps=1e-6).get_state()["leaves"], p.astype(np.float32))


@pytest.mark.parametrize("norm", ["memory", "batch", "none"])
def test_weight_norm(norm):
    p = np.r_[10.0 ** RNG.uniform(-2, 2, 1000), 1e-5]
    buffer = make(p, beta=0.7, weight_norm=norm)
    q = probabilities(p, 0.6)
    for n in (1, 32, 5000):
        batch = buffer.sample(n, 3)
        expected = (len(p) * q[batch.indices.astype(int)]) ** -0.7
        largest = {"memory": (len(p) * q.min()) ** -0.7, "batch": expected.max(), "none": 1.0}[norm]
        np.testing.assert_allclose(batch.weights, expected / largest, rtol=1e-6)
    assert pickle.loads(pickle.dumps(buffer)).sample(32, 1).weights.tolist() == buffer.sample(32, 1).weights.tolist()


def test_a_pickle_that_names_the_former_module_loads():
    buffer = make([1.0, 2.0, 3.0])
    former = pickle.dumps(buffer, 0).replace(b"rlox.kernels.buffers.prioritized", b"rlox.kernels.buffers.replay")
    assert b"prioritized" not in former
    assert pickle.loads(former).sample(32, 1).indices.tolist() == buffer.sample(32, 1).indices.tolist()


def test_states_from_before_eps_are_accepted():
    """A state of rlox 0.6.0 has neither eps nor weight_norm, and may contain zeros, which are raised to eps."""
    now = make([1.0, 2.0, 3.0, 4.0], alpha=1.0, eps=0.5, weight_norm="batch")
    state = now.get_state()
    config = {k: v for k, v in eval(state["config"]).items() if k not in ("eps", "weight_norm")}
    now.set_state({**state, "config": repr(config), "leaves": np.float32([0, 2, 0.1, 4])})
    np.testing.assert_array_equal(now.get_state()["leaves"], np.float32([0.5, 2, 0.5, 4]))
    assert set(now.sample(100, 0).indices.tolist()) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="state must come from a buffer created with"):
        make([1.0], capacity=4, alpha=1.0, eps=0.1).set_state(state)


@pytest.mark.parametrize("value", [1e-320, 1e-300, 1e-40, 1e38, 1e300, 1.7e308])
def test_priorities_outside_float32_are_clamped(value):
    buffer = make([value, value], alpha=1.0, eps=0.0)
    assert set(buffer.sample(50, 0).indices.tolist()) == {0, 1}
    assert np.isfinite(buffer.sample(50, 0).weights).all()


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, -np.inf])
def test_bad_priorities_change_nothing(bad):
    buffer = make([1.0, 2.0, 3.0], capacity=5)
    before = buffer.get_state()
    with pytest.raises(ValueError, match=r"priorities .*position 1"):
        buffer.update_priorities([0, 1], [5.0, bad])
    with pytest.raises(ValueError, match="priority"):
        buffer.push([0.0], 0, 0, False, False, [0.0], priority=bad)
    with pytest.raises(ValueError, match=r"priorities .*position 0"):
        buffer.push_batch([0.0], [0.0], [0.0], [0.0], [False], [False], [bad])
    after = buffer.get_state()
    np.testing.assert_array_equal(after["leaves"], before["leaves"])
    assert (after["count"], after["highest_priority"]) == (before["count"], before["highest_priority"])


def test_errors_name_the_argument():
    buffer = make([1.0, 2.0, 3.0], capacity=5)
    for indices, error in (([3], IndexError), ([-1], IndexError), ([5], IndexError), ([0.0], TypeError)):
        with pytest.raises(error, match="indices"):
            buffer.update_priorities(indices, [1.0])
    for priorities, error in (([1.0, 2.0], ValueError), ([[1.0]], ValueError), (["a"], TypeError), (1.0, ValueError)):
        with pytest.raises(error, match="priorities"):
            buffer.update_priorities([0], priorities)
    buffer.update_priorities([], [])
    for eps, error in ((-1e-9, ValueError), (np.nan, ValueError), (np.inf, ValueError), ("x", TypeError)):
        with pytest.raises(error, match="eps"):
            rlox.PrioritizedReplayBuffer(4, 1, 1, eps=eps)
    with pytest.raises(ValueError, match="weight_norm must be one of memory, batch, none, got 'max'"):
        rlox.PrioritizedReplayBuffer(4, 1, 1, weight_norm="max")
    for name in ("alpha", "beta"):
        for value, error in ((-0.1, ValueError), (1.1, ValueError), (float("nan"), ValueError), ("x", TypeError)):
            with pytest.raises(error, match=name):
                rlox.PrioritizedReplayBuffer(4, 1, 1, **{name: value})
    with pytest.raises(ValueError, match="beta"):
        buffer.set_beta(2)
    with pytest.raises(TypeError, match="priority"):
        buffer.push([0.0], 0, 0, False, False, [0.0], priority="high")
    with pytest.raises(ValueError, match="empty"):
        rlox.PrioritizedReplayBuffer(4, 1, 1).sample(1, 0)
    with pytest.raises(ValueError, match="state"):
        buffer.set_state({**buffer.get_state(), "leaves": np.array([1, -1, 1], np.float32)})


class Machine(RuleBasedStateMachine):
    """Any sequence of operations, compared with lists of numbers and priorities (alpha = 1, exact in float32)."""

    priority = st.one_of(st.none(), st.integers(0, 1000).map(lambda k: k / 8))

    @initialize(capacity=st.integers(1, 40))
    def start(self, capacity):
        self.capacity = capacity
        self.buffer = rlox.PrioritizedReplayBuffer(capacity, 1, 1, alpha=1.0, beta=1.0, eps=0.0)
        self.numbers, self.priorities = [], []
        self.count = self.base = 0
        self.highest = 1.0

    def add(self, priority):
        if priority is None:
            priority = self.highest
        self.numbers = [*self.numbers, self.count][-self.capacity :]
        self.priorities = [*self.priorities, priority][-self.capacity :]
        self.count += 1
        return priority

    @rule(priority=priority)
    def push(self, priority):
        i = self.count
        self.buffer.push([i], i, i, i % 2, False, [i + 0.5], priority)
        self.highest = max(self.highest, self.add(priority))

    @rule(priorities=st.one_of(st.integers(1, 50), st.lists(st.integers(0, 99), min_size=1, max_size=50)))
    def push_batch(self, priorities):
        n = priorities if isinstance(priorities, int) else len(priorities)
        i = np.arange(self.count, self.count + n)
        given = None if isinstance(priorities, int) else priorities
        self.buffer.push_batch(i, i + 0.5, i, i, i % 2, np.zeros(n, bool), given)
        used = [self.add(p) for p in (given or [None] * n)]
        self.highest = max(self.highest, *used)

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def update(self, data):
        chosen = data.draw(st.lists(st.integers(0, len(self.numbers) - 1), max_size=20))
        new = [data.draw(st.integers(0, 1000)) / 8 for _ in chosen]
        slots = [(self.numbers[k] - self.base) % self.capacity for k in chosen]
        self.buffer.update_priorities(np.array(slots, np.uint64), np.array(new))
        for k, value in zip(chosen, new, strict=True):
            self.priorities[k] = value
        self.highest = max([self.highest, *new])

    @precondition(lambda self: self.numbers)
    @rule(n=st.integers(1, 60), seed=st.integers(0, MASK))
    def sample(self, n, seed):
        if not any(self.priorities):
            with pytest.raises(ValueError, match="priorities"):
                self.buffer.sample(n, seed)
            return
        batch = self.buffer.sample(n, seed)
        at = {(i - self.base) % self.capacity: k for k, i in enumerate(self.numbers)}
        chosen = [at[i] for i in batch.indices.tolist()]
        np.testing.assert_array_equal(batch.rewards, [self.numbers[k] for k in chosen])
        np.testing.assert_array_equal(batch.next_obs[:, 0], [self.numbers[k] + 0.5 for k in chosen])
        p = np.array([self.priorities[k] for k in chosen])
        assert (p > 0).all()
        least = min(p for p in self.priorities if p > 0)
        np.testing.assert_allclose(batch.weights, least / p, rtol=1e-6)
        np.testing.assert_array_equal(self.buffer.sample_indices(n, seed), batch.indices.astype(np.int64))

    @rule()
    def restore(self):
        self.buffer = pickle.loads(pickle.dumps(self.buffer))

    @rule()
    def clear(self):
        self.buffer.clear()
        self.numbers, self.priorities = [], []
        self.base, self.highest = self.count, 1.0

    @invariant()
    def stored(self):
        if hasattr(self, "buffer"):
            state = self.buffer.get_state()
            np.testing.assert_array_equal(state["leaves"], np.array(self.priorities, np.float32))
            assert state["highest_priority"] == self.highest


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=300 if FULL else 50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)

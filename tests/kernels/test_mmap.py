"""MmapReplayBuffer: the same draws as a ReplayBuffer with the same contents, wherever rows are stored."""

import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlox.kernels.buffers.mmap import MmapReplayBuffer
from rlox.kernels.buffers.replay import ReplayBuffer

FULL = os.environ.get("RLOX_FULL_TESTS") == "1"
THOROUGH = os.environ.get("RLOX_HYPOTHESIS") == "full"


def transitions(rng, n, obs_shape, act_dim, dtype, p=0.2):
    """Arguments of push_batch for n transitions."""
    if np.dtype(dtype) == np.uint8:
        obs, after = rng.integers(0, 256, (2, n, *obs_shape), np.uint8)
    else:
        obs, after = rng.normal(size=(2, n, *obs_shape)).astype(np.float32)
    actions = rng.normal(size=(n, act_dim)).astype(np.float32)
    ended, cut = rng.random((2, n)) < p
    return obs, after, actions, rng.normal(size=n).astype(np.float32), ended, cut


def push_one(buffer, batch, i):
    obs, after, actions, rewards, ended, cut = batch
    buffer.push(obs[i], actions[i], rewards[i], ended[i], cut[i], after[i])


def same(a, b):
    assert set(a) == set(b)
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.mark.slow
@settings(deadline=None, max_examples=400 if THOROUGH else 60)
@given(
    seed=st.integers(0, 2**32 - 1),
    hot=st.integers(1, 40),
    cold=st.integers(0, 120),
    obs_shape=st.sampled_from([(1,), (3,), (17,), (2, 3, 4)]),
    act_dim=st.integers(1, 3),
    dtype=st.sampled_from([np.float32, np.uint8]),
    n_envs=st.sampled_from([1, 1, 3]),
    n_step=st.sampled_from([1, 1, 2, 5]),
    batches=st.lists(st.integers(0, 50), min_size=1, max_size=12),
)
def test_draws_equal_those_of_a_replay_buffer(seed, hot, cold, obs_shape, act_dim, dtype, n_envs, n_step, batches):
    rng = np.random.default_rng(seed)
    total = max(hot + cold, n_envs)
    dim = int(np.prod(obs_shape))
    more = {"obs_shape": obs_shape, "obs_dtype": dtype, "n_envs": n_envs, "n_step": n_step, "gamma": 0.9}
    model = ReplayBuffer(total, dim, act_dim, **more)
    with (
        tempfile.TemporaryDirectory() as folder,
        MmapReplayBuffer(hot, total, dim, act_dim, folder, **more) as buffer,
    ):
        for n in batches:
            data = transitions(rng, n * n_envs, obs_shape, act_dim, dtype)
            for b in (buffer, model):
                if n and (n % 3 or n_envs > 1):
                    b.push_batch(*data)
                else:
                    for i in range(n):
                        push_one(b, data, i)
            assert len(buffer) == len(model) == buffer.len()
            if len(model):
                for size in (1, 37, 700):
                    same(buffer.sample(size, seed), model.sample(size, seed))
                    if dtype == np.float32:
                        np.testing.assert_array_equal(buffer.sample_packed(size, seed), model.sample_packed(size, seed))


def row(k, dim):
    """All values of transition k follow from k and are exact in float32."""
    return np.full(dim, k % 4096), [k % 64], k, k % 5 == 4, k % 7 == 6, np.full(dim, k % 4096 + 0.5)


class Machine(RuleBasedStateMachine):
    """Compared with a deque of transition numbers: pushes, wraps, samples, saves, restores, reopens."""

    operations = 0

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.buffer = None
        self.next = 0
        self.named = deque(maxlen=2)  # states that the file must be able to restore
        self.whole = None

    @initialize(hot=st.integers(1, 12), cold=st.integers(0, 40), dim=st.integers(1, 5))
    def start(self, hot, cold, dim):
        self.sizes = hot, hot + cold, dim
        self.model = deque(maxlen=hot + cold)
        self.buffer = self.open()

    def open(self):
        hot, total, dim = self.sizes
        return MmapReplayBuffer(hot, total, dim, 1, self.folder.name)

    @rule(n=st.integers(1, 30))
    def push(self, n):
        for k in range(self.next, self.next + n):
            self.buffer.push(*row(k, self.sizes[2]))
            self.model.append(k)
        self.next += n
        Machine.operations += n

    @rule(n=st.integers(1, 90))
    def push_batch(self, n):
        rows = [row(k, self.sizes[2]) for k in range(self.next, self.next + n)]
        obs, actions, rewards, ended, cut, after = (np.array(column, np.float32) for column in zip(*rows, strict=True))
        self.buffer.push_batch(obs, after, actions, rewards, ended.astype(bool), cut.astype(bool))
        self.model.extend(range(self.next, self.next + n))
        self.next += n
        Machine.operations += 1

    @precondition(lambda self: self.buffer is not None and self.model)
    @rule(n=st.integers(1, 200), seed=st.integers(0, 2**64 - 1))
    def sample(self, n, seed):
        batch = self.buffer.sample(n, seed)
        ks = batch["rewards"].astype(int)
        assert set(ks.tolist()) <= set(self.model)
        for i, k in enumerate(ks.tolist()):
            obs, action, _reward, ended, cut, after = row(k, self.sizes[2])
            np.testing.assert_array_equal(batch["obs"][i], obs)
            np.testing.assert_array_equal(np.ravel(batch["actions"][i]), action)
            np.testing.assert_array_equal(batch["next_obs"][i], after)
            assert (batch["terminated"][i], batch["truncated"][i]) == (ended, cut)
        if n > 20 * len(self.model):
            assert len(set(ks.tolist())) > len(self.model) // 2
        Machine.operations += 1

    @rule()
    def save_whole(self):
        self.whole = self.buffer.get_state(), list(self.model), self.next
        Machine.operations += 1

    @precondition(lambda self: self.whole is not None)
    @rule(other=st.booleans())
    def restore_whole(self, other):
        if other:
            self.buffer.close(keep=True)
            self.buffer = self.open()
            self.named.clear()
        state, model, self.next = self.whole
        self.buffer.set_state(state)
        self.model = deque(model, maxlen=self.sizes[1])
        Machine.operations += 1

    @rule()
    def save_named(self):
        self.named.append((self.buffer.get_state(include_cold=False), list(self.model), self.next))
        Machine.operations += 1

    @precondition(lambda self: self.named)
    @rule(which=st.integers(0, 1), reopen=st.booleans())
    def restore_named(self, which, reopen):
        state, model, number = self.named[which % len(self.named)]
        if reopen:
            self.buffer.close()
            self.buffer = self.open()
        self.buffer.set_state(state)
        self.model = deque(model, maxlen=self.sizes[1])
        self.next = number
        kept = self.named[which % len(self.named)]
        self.named.clear()
        self.named.append(kept)
        Machine.operations += 1

    @invariant()
    def length(self):
        if self.buffer is not None:
            assert len(self.buffer) == len(self.model)

    def teardown(self):
        if self.buffer is not None:
            self.buffer.close()
        self.folder.cleanup()


@pytest.mark.slow
def test_against_a_model():
    Machine.operations = 0
    steps = settings(deadline=None, max_examples=150 if THOROUGH else 25, stateful_step_count=50 if THOROUGH else 25)
    while Machine.operations < (10_000 if THOROUGH else 1_000):
        run_state_machine_as_test(Machine, settings=steps)


MEMORY = """
    import re, sys
    import numpy as np
    from rlox.kernels.buffers.mmap import MmapReplayBuffer

    def anonymous():
        with open("/proc/self/status") as status:
            return 1024 * int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1])

    folder, count, hot, side = sys.argv[1], *map(int, sys.argv[2:])
    shape = side, side, 4
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (64, *shape), np.uint8)
    small = MmapReplayBuffer(10, 100, 12, 1, folder, obs_shape=(3, 4), obs_dtype=np.uint8)
    for k in range(100):  # whatever a first use allocates
        small.push(frames[0, :3, 0], 0.0, k, False, False, frames[1, :3, 0])
    small.sample(256, 0)
    small.close()

    before = anonymous()
    buffer = MmapReplayBuffer(hot, count, side * side * 4, 1, folder, obs_shape=shape, obs_dtype=np.uint8)
    peak = 0
    for k in range(count):
        buffer.push(frames[k % 64], k % 6, k, False, False, frames[(k + 1) % 64])
        if k % (count // 50) == 0:
            batch = buffer.sample(32, k)
            numbers = batch["rewards"].astype(int)
            assert (batch["obs"] == frames[numbers % 64]).all()
            assert (batch["next_obs"] == frames[(numbers + 1) % 64]).all()
            del batch
            peak = max(peak, anonymous() - before)
    assert len(buffer) == count
    print(peak, buffer.ram_budget, count * 2 * side * side * 4)
"""


def memory(folder, count, hot, side):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(folder), str(count), str(hot), str(side)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return map(int, done.stdout.split())


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer allocates its own memory")
def test_anonymous_memory_stays_within_the_budget(tmp_path):
    peak, budget, stored = memory(tmp_path, 10_000, 2_000, 42)
    assert stored > 4 * budget
    assert 0.9 * budget < peak <= 1.05 * budget
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not FULL, reason="writes 5.6 GB; set RLOX_FULL_TESTS=1 to run it")
def test_anonymous_memory_at_full_size(tmp_path):
    """10**5 transitions of 84x84x4 bytes with next observations: 5.6 GB, a tenth of it in memory."""
    peak, budget, stored = memory(tmp_path, 100_000, 10_000, 84)
    assert stored > 5.6e9
    print(f"peak {peak:_} of {budget:_} bytes")
    assert 0.9 * budget < peak <= 1.05 * budget


def test_a_million_frames_take_no_memory_until_written(tmp_path):
    with MmapReplayBuffer(100, 1_000_000, 84 * 84 * 4, 1, tmp_path, obs_shape=(84, 84, 4), obs_dtype=np.uint8) as b:
        status = os.stat(b.cold_path)
        assert status.st_size > 5.6e10
        assert status.st_blocks * 512 < 100_000
        frame = np.arange(84 * 84 * 4, dtype=np.uint8).reshape(84, 84, 4)
        for k in range(300):
            b.push(frame + np.uint8(k % 256), 0, k, False, False, frame)
        batch = b.sample(64, 0)
        np.testing.assert_array_equal(
            batch["obs"], frame + (batch["rewards"] % 256).astype(np.uint8)[:, None, None, None]
        )
        assert os.stat(b.cold_path).st_blocks * 512 < 310 * 2 * frame.nbytes


# Arguments.

GOOD = {"hot_capacity": 4, "total_capacity": 10, "obs_dim": 6, "act_dim": 1}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[(name, value, ValueError) for name in GOOD for value in (0, -1, 1 << 70)],
        *[(name, value, TypeError) for name in (*GOOD, "n_envs", "n_step") for value in (None, True, 2.0, "4", [4])],
        ("hot_capacity", 11, ValueError),
        ("total_capacity", 1 << 61, ValueError),
        ("obs_dim", 1 << 61, ValueError),
        ("n_envs", 11, ValueError),
        ("n_step", 0, ValueError),
        ("gamma", 1.5, ValueError),
        ("gamma", float("nan"), ValueError),
        ("gamma", "0.9", TypeError),
        ("obs_shape", (2, 2), ValueError),
        ("obs_shape", (-2, -3), ValueError),
        ("obs_shape", 6, TypeError),
        ("obs_shape", (2.0, 3), TypeError),
        ("obs_dtype", np.float64, TypeError),
        ("obs_dtype", "nothing", TypeError),
        ("max_ram", 100, ValueError),
        ("max_ram", 1.5, TypeError),
        ("n_stacked", 4, TypeError),
    ],
)
def test_wrong_sizes_name_the_argument(tmp_path, name, value, error):
    with pytest.raises(error, match=name):
        MmapReplayBuffer(**{**GOOD, "cold_path": tmp_path, name: value})
    assert os.listdir(tmp_path) == []


def test_impossible_sizes_are_errors(tmp_path):
    with pytest.raises(MemoryError, match="hot_capacity"):
        MmapReplayBuffer(1 << 50, 1 << 50, 4, 1, tmp_path)
    assert os.listdir(tmp_path) == []


def test_max_ram_limits_the_hot_rows(tmp_path):
    with pytest.raises(ValueError, match=r"hot_capacity=3$"):
        MmapReplayBuffer(4, 10, 4, 1, tmp_path, max_ram=255)
    with MmapReplayBuffer(3, 10, 4, 1, tmp_path, max_ram=255) as buffer:
        assert 3 * 64 <= buffer.ram_budget < 1000


PUSH = {"obs": np.zeros(6, np.float32), "action": 0.0, "reward": 0.0, "terminated": False, "truncated": False}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[(name, np.zeros(5), ValueError) for name in ("obs", "next_obs")],
        *[(name, np.zeros((6, 1)), ValueError) for name in ("obs", "next_obs")],
        *[(name, "abc", TypeError) for name in ("obs", "next_obs", "action", "reward", "terminated", "truncated")],
        *[(name, None, TypeError) for name in ("obs", "action", "reward", "terminated", "truncated")],
        ("obs", [[1], [2, 3]], ValueError),
        ("obs", np.zeros(6, complex), TypeError),
        ("action", np.zeros(2), ValueError),
        ("action", [], ValueError),
        ("reward", [1, 2], TypeError),
        ("terminated", 2, ValueError),
        ("truncated", float("nan"), ValueError),
    ],
)
def test_a_wrong_push_names_the_argument_and_stores_nothing(tmp_path, name, value, error):
    with MmapReplayBuffer(4, 10, 6, 1, tmp_path) as buffer:
        for k in range(9):
            buffer.push(np.full(6, k), k, k, False, False, np.full(6, k))
        before = buffer.sample(50, 0)
        with pytest.raises(error, match=name):
            buffer.push(**{"next_obs": np.zeros(6), **PUSH, name: value})
        assert len(buffer) == 9
        same(buffer.sample(50, 0), before)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[(name, np.zeros((4, 6)), ValueError) for name in ("obs", "next_obs")],
        *[(name, np.zeros((6, 3)), ValueError) for name in ("obs", "next_obs")],
        *[(name, np.zeros(4), ValueError) for name in ("actions", "terminated", "truncated")],
        ("rewards", np.zeros((3, 1)), ValueError),
        ("rewards", np.zeros(0), ValueError),
        ("rewards", 1.0, ValueError),
        ("terminated", np.array([0, 1, 2]), ValueError),
        ("truncated", np.array([0, 0, np.nan]), ValueError),
        *[(name, np.array(["a"] * 3), TypeError) for name in ("actions", "rewards", "terminated", "truncated")],
    ],
)
def test_a_wrong_batch_names_the_argument_and_stores_nothing(tmp_path, name, value, error):
    good = {
        "obs": np.zeros((3, 6)),
        "next_obs": np.zeros((3, 6)),
        "actions": np.zeros(3),
        "rewards": np.zeros(3),
        "terminated": np.zeros(3, bool),
        "truncated": np.zeros(3, bool),
    }
    with MmapReplayBuffer(4, 10, 6, 1, tmp_path) as buffer:
        with pytest.raises(error, match=name):
            buffer.push_batch(**{**good, name: value})
        assert len(buffer) == 0
        buffer.push_batch(**good)
        assert len(buffer) == 3


def test_forms_that_push_accepts(tmp_path):
    with MmapReplayBuffer(2, 10, 3, 2, tmp_path) as buffer:
        buffer.push([1, 2, 3], (4, 5), np.float64(6), np.True_, 0, [7, 8, 9])
        buffer.push(np.arange(6.0)[::2], np.array([4, 5]), 6, 1.0, False, np.array([7, 8, 9], ">f4"))
        buffer.push(np.full(3, np.nan), np.array([np.inf, 0]), np.nan, False, True, np.zeros(3, int))
        batch = buffer.sample(100, 3)
        first = np.flatnonzero(batch.obs[:, 0] == 1)[0]
        assert batch.observations[first].tolist() == [1, 2, 3]
        assert batch.next_observations[first].tolist() == [7, 8, 9]
        assert batch.actions[first].tolist() == [4, 5]
        assert (batch.rewards[first], batch.terminated[first], batch.truncated[first]) == (6, True, False)
        last = np.flatnonzero(np.isnan(batch.rewards))[0]
        assert np.isnan(batch.obs[last]).all()
        assert batch.actions[last, 0] == np.inf
        assert batch.truncated[last]


def test_next_obs_always_or_never(tmp_path):
    with MmapReplayBuffer(2, 10, 6, 1, tmp_path) as buffer:
        for _ in range(8):
            buffer.push(**PUSH)
        batch = buffer.sample(4, 0)
        assert "next_obs" not in batch
        with pytest.raises(KeyError, match="next_obs"):
            batch["next_obs"]
        assert buffer.sample_packed(4, 0).shape == (4, 10)
        with pytest.raises(ValueError, match="next_obs"):
            buffer.push(**PUSH, next_obs=np.zeros(6))
    with MmapReplayBuffer(2, 10, 6, 1, tmp_path) as buffer:
        buffer.push(**PUSH, next_obs=np.zeros(6))
        with pytest.raises(ValueError, match="next_obs"):
            buffer.push(**PUSH)
    with (
        MmapReplayBuffer(2, 10, 6, 1, tmp_path, n_step=3) as buffer,
        pytest.raises(ValueError, match="next_obs"),
    ):
        buffer.push(**PUSH)


def test_wrong_samples(tmp_path):
    with MmapReplayBuffer(4, 10, 6, 1, tmp_path) as buffer:
        for method in (buffer.sample, buffer.sample_packed):
            with pytest.raises(ValueError, match="empty"):
                method(4, 0)
        buffer.push(**PUSH)
        for method in (buffer.sample, buffer.sample_packed):
            for size, error in ((0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)):
                with pytest.raises(error, match="batch_size"):
                    method(size, 0)
            for seed, error in ((-1, ValueError), (1 << 64, ValueError), (None, TypeError), (0.5, TypeError)):
                with pytest.raises(error, match="seed"):
                    method(4, seed)
    with MmapReplayBuffer(4, 10, 6, 1, tmp_path, obs_dtype=np.uint8) as buffer:
        with pytest.raises(TypeError, match="obs"):
            buffer.push(**{**PUSH, "obs": np.full(6, 300)})
        buffer.push(**{**PUSH, "obs": np.full(6, 255, np.uint8)})
        with pytest.raises(ValueError, match="obs_dtype"):
            buffer.sample_packed(4, 0)


# States.


@pytest.mark.parametrize("include_cold", [True, False])
def test_a_wrong_state_is_an_error_and_changes_nothing(tmp_path, include_cold):
    with (
        MmapReplayBuffer(4, 10, 3, 1, tmp_path) as other,
        MmapReplayBuffer(4, 10, 3, 1, tmp_path) as buffer,
    ):
        for k in range(23):
            other.push(*row(k, 3))
        for k in range(7):
            buffer.push(*row(k + 100, 3))
        state = other.get_state(include_cold=include_cold)
        other.close(keep=True)
        before = buffer.sample(50, 0)
        wrong = [{**state, key: value} for key in state for value in (None, 3.5, [], -5, "x")]
        wrong += [{k: v for k, v in state.items() if k != key} for key in state]
        wrong += [{**state, key: 1 << 70} for key in ("head", "n", "next")]
        wrong += [
            {**state, "more": 1},
            {**state, "head": 9},
            {**state, "n": 9},
            {**state, "next": -1},
            {**state, "records": state["records"][1:]},
            {**state, "records": state["records"].astype(int)},
            {**state, "config": state["config"].replace('"act_dim": 1', '"act_dim": 2')},
            None,
            [],
        ]
        if not include_cold:
            wrong += [
                {**state, "cold_id": "0" * 16},
                {**state, "cold_serial": 7},
                {**state, "cold_written": state["cold_written"] + 1},
                {**state, "cold_blocks": state["cold_blocks"] + 1000},
                {**state, "cold_blocks": state["cold_blocks"][::-1][:1]},
                {**state, "config": state["config"].replace('"hot_capacity": 4', '"hot_capacity": 5')},
            ]
        for damaged in wrong:
            if isinstance(damaged, dict) and damaged.get("cold_path") == "x":
                continue  # the file in the folder is found anyway
            with pytest.raises((ValueError, TypeError)):
                buffer.set_state(damaged)
            assert len(buffer) == 7
            same(buffer.sample(50, 0), before)
        buffer.set_state(state)
        assert set(buffer.sample(400, 0)["rewards"]) == set(range(13, 23))
        buffer.close(keep=False)


def test_a_complete_state_fits_any_hot_size(tmp_path):
    """A state does not contain where rows are stored."""
    rng = np.random.default_rng(0)
    data = transitions(rng, 77, (3,), 2, np.float32)
    more = transitions(rng, 30, (3,), 2, np.float32)
    buffers = [MmapReplayBuffer(hot, 50, 3, 2, tmp_path / str(hot), n_step=3) for hot in (1, 7, 32, 50)]
    buffers[0].push_batch(*data)
    state = buffers[0].get_state()
    assert all(isinstance(v, (np.ndarray, int, str)) for v in state.values())
    for other in buffers[1:]:
        other.set_state(state)
        same(other.sample(99, 5), buffers[0].sample(99, 5))
    for b in buffers:
        b.push_batch(*more)
    for other in buffers[1:]:
        same(other.sample(99, 6), buffers[0].sample(99, 6))
    again = MmapReplayBuffer.from_state(state, tmp_path)
    assert len(again) == 50
    with pytest.raises(ValueError, match="cold_path"):
        MmapReplayBuffer.from_state(state)
    for b in (*buffers, again):
        b.close()


def test_pickling_is_an_error(tmp_path):
    with MmapReplayBuffer(4, 10, 3, 1, tmp_path) as buffer, pytest.raises(TypeError, match="get_state"):
        pickle.dumps(buffer)


def test_sampling_is_uniform_over_both_tiers(tmp_path):
    from scipy.stats import chisquare

    with MmapReplayBuffer(30, 200, 3, 1, tmp_path) as buffer:
        for k in range(333):
            buffer.push(*row(k, 3))
        counts = np.bincount(buffer.sample(200_000, 7)["rewards"].astype(int), minlength=333)
        assert not counts[:133].any()
        assert chisquare(counts[133:]).pvalue > 1e-4


def test_threads_sample_the_same(tmp_path):
    with MmapReplayBuffer(100, 5000, 50, 1, tmp_path) as buffer:
        data = transitions(np.random.default_rng(1), 6000, (50,), 1, np.float32)
        buffer.push_batch(*data)
        expected = [buffer.sample(3000, seed) for seed in range(8)]
        wrong = []

        def work(seed):
            for _ in range(5):
                batch = buffer.sample(3000, seed)
                if any((batch[k] != expected[seed][k]).any() for k in batch):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_threads_that_push_write_complete_blocks(tmp_path):
    """Two threads reach the end of a block together; afterwards all transitions are complete."""
    with MmapReplayBuffer(300, 20_000, 40, 1, tmp_path) as buffer:

        def work(first):
            for k in range(first, first + 4000):
                buffer.push(np.full(40, k), k, k, False, False, np.full(40, k))

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 4000, 8000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(buffer) == 12_000
        rows = np.ascontiguousarray(buffer.get_state()["records"]).view(np.float32)[:, :82]
        assert (rows == rows[:, :1]).all()
        np.testing.assert_array_equal(np.sort(rows[:, 0]), np.arange(12_000))

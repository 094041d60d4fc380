"""SequenceReplayBuffer against a Python deque of steps for each environment."""

import os
import pickle
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scipy.stats import chisquare

import rlox
from rlox import SequenceReplayBuffer

FULL = os.environ.get("RLOX_HYPOTHESIS") == "full"
KEYS = ("obs", "actions", "rewards", "terminated", "truncated", "is_first", "next_obs", "state")


class Machine(RuleBasedStateMachine):
    @initialize(
        per_env=st.integers(1, 12),
        n_envs=st.integers(1, 3),
        images=st.booleans(),
        state_dim=st.sampled_from([0, 2]),
        with_next=st.booleans(),
    )
    def make(self, per_env, n_envs, images, state_dim, with_next):
        self.kind = {"n_envs": n_envs, "obs_dtype": np.uint8 if images else np.float32, "state_dim": state_dim}
        self.kind |= {"obs_shape": (2, 3) if images else (4,)}
        self.capacity = per_env * n_envs + n_envs - 1
        self.buffer = SequenceReplayBuffer(self.capacity, act_dim=2, **self.kind)
        self.model = [deque(maxlen=per_env) for _ in range(n_envs)]
        self.starting, self.with_next, self.count = [True] * n_envs, with_next, 0

    def step(self, env, terminated, truncated, is_first):
        """One step whose values identify it."""
        self.count += 1
        c = self.count % 120
        obs = (np.arange(np.prod(self.kind["obs_shape"])) + c).reshape(self.kind["obs_shape"])
        row = {"obs": obs.astype(self.kind["obs_dtype"]), "actions": np.float32([c, -c]), "rewards": c / 2}
        row |= {"terminated": terminated, "truncated": truncated, "is_first": is_first or self.starting[env]}
        if self.with_next:
            row["next_obs"] = row["obs"] + 1
        if self.kind["state_dim"]:
            row["state"] = np.float32([c, 1])
        self.starting[env] = terminated or truncated
        self.model[env].append(row)
        return row

    @rule(data=st.data(), ends=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)))
    def push(self, data, ends):
        env = data.draw(st.integers(0, self.kind["n_envs"] - 1))
        terminated, truncated, first = (x == 0 for x in ends)
        row = self.step(env, terminated, truncated, first)
        extra = {} if not self.with_next else {"next_obs": row["next_obs"]}
        extra |= {"state": row["state"]} if "state" in row else {}
        self.buffer.push(
            row["obs"], row["actions"], row["rewards"], terminated, truncated, env=env, is_first=first, **extra
        )

    @rule(steps=st.integers(0, 15), seed=st.integers(0, 99), flat=st.booleans())
    def push_batch(self, steps, seed, flat):
        n = self.kind["n_envs"]
        terminated, truncated, first = np.random.default_rng(seed).random((3, steps, n)) < 0.15
        rows = [self.step(e, terminated[t, e], truncated[t, e], first[t, e]) for t in range(steps) for e in range(n)]
        stack = {k: np.array([row[k] for row in rows]) for k in rows[0]} if rows else {}
        if not rows:
            width = int(np.prod(self.kind["obs_shape"]))
            stack = {k: np.zeros((0, width), self.kind["obs_dtype"]) for k in ("obs", "next_obs")}
            stack |= {"actions": np.zeros((0, 2)), "rewards": np.zeros(0), "state": np.zeros((0, 2))}
        args = [stack["obs"], stack["next_obs"] if self.with_next else None, stack["actions"], stack["rewards"]]
        args = [x if x is None else x.ravel() if flat else x for x in args]
        state = stack["state"] if self.kind["state_dim"] else None
        self.buffer.push_batch(*args, terminated, truncated, is_first=first, state=state)

    @rule()
    def refused(self):
        """A push that fails halfway does not remove the oldest step."""
        with pytest.raises((ValueError, TypeError)):
            self.buffer.push(np.zeros(self.kind["obs_shape"], self.kind["obs_dtype"]), [9, 9], np.nan, False, False)

    @rule(length=st.integers(1, 14), seed=st.integers(0, 2**64 - 1), cross=st.booleans(), by_time=st.booleans())
    def sample(self, length, seed, cross, by_time):
        starts = [
            (env, s)
            for env, steps in enumerate(self.model)
            for s in range(max(0, len(steps) - length + 1) if cross else len(steps))
        ]
        if not starts:
            with pytest.raises(ValueError, match=r"SequenceReplayBuffer\.sample: "):
                self.buffer.sample(3, length, seed, cross_episodes=cross)
            return
        b = 9
        batch = self.buffer.sample(b, length, seed, cross_episodes=cross, time_major=by_time)
        again = self.buffer.sample(b, length, seed, cross_episodes=cross)
        for k in batch:
            if by_time and k != "state":
                np.testing.assert_array_equal(np.swapaxes(batch[k], 0, 1), again[k])
        batch = again
        assert set(batch) == set(KEYS[:6]) | ({"next_obs"} if self.with_next else set()) | (
            {"state"} if self.kind["state_dim"] else set()
        ) | ({"mask"} if not cross else set())
        for i in range(b):
            options = []
            for env, s in starts:
                steps, stretch = list(self.model[env]), []
                for t in range(s, min(s + length, len(steps))):
                    if not cross and stretch and steps[t]["is_first"]:
                        break
                    stretch.append(steps[t])
                    if not cross and (steps[t]["terminated"] or steps[t]["truncated"]):
                        break
                options.append(stretch)
            used = int(batch["mask"][i].sum()) if not cross else length
            assert any(self.same(batch, i, used, stretch) for stretch in options)

    def same(self, batch, i, used, stretch):
        if used != len(stretch):
            return False
        for k in KEYS[:7]:
            if k in batch:
                if not np.array_equal(batch[k][i, :used], np.array([row[k] for row in stretch])):
                    return False
                assert not batch[k][i, used:].any()
        if "mask" in batch:
            assert not batch["mask"][i, used:].any()
        return "state" not in batch or np.array_equal(batch["state"][i], stretch[0]["state"])

    @rule(pickled=st.booleans())
    def restore(self, pickled):
        old = self.buffer
        if pickled:
            self.buffer = pickle.loads(pickle.dumps(old))
        else:
            self.buffer = SequenceReplayBuffer(self.capacity, act_dim=2, **self.kind)
            self.buffer.set_state(old.get_state())
        assert self.buffer.capacity == old.capacity
        if len(old):
            a, b = (x.sample(20, 3, 5, cross_episodes=False) for x in (old, self.buffer))
            for k in a:
                np.testing.assert_array_equal(a[k], b[k])

    @rule()
    def clear(self):
        self.buffer.clear()
        for steps in self.model:
            steps.clear()
        self.starting = [True] * len(self.model)

    @invariant()
    def count_steps(self):
        if hasattr(self, "model"):
            assert len(self.buffer) == self.buffer.len() == sum(map(len, self.model))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=250 if FULL else 50, stateful_step_count=50, deadline=None)


def filled(steps=(20, 20), capacity=32, ends=(6, 13)):
    """Two environments; reward 100 * env + step; both wrap around after 16 steps."""
    buffer = SequenceReplayBuffer(capacity, 1, 1, n_envs=len(steps))
    for env, n in enumerate(steps):
        for t in range(n):
            buffer.push([t], t, 100 * env + t, t in ends, False, env=env)
    return buffer


def test_starts_are_uniform():
    for seed in (1, 2):
        first = filled().sample(40_000, 5, seed)["rewards"][:, 0].astype(int)
        names, counts = np.unique(first, return_counts=True)
        assert names.tolist() == [*range(4, 16), *range(104, 116)]  # 16 stored steps, 12 starts of sequences of 5
        assert chisquare(counts).pvalue > 1e-4
        first = filled((20, 3)).sample(40_000, 5, seed, cross_episodes=False)["rewards"][:, 0].astype(int)
        names, counts = np.unique(first, return_counts=True)
        assert names.tolist() == [*range(4, 20), 100, 101, 102]
        assert chisquare(counts).pvalue > 1e-4


def test_neighbours_in_a_batch_are_independent():
    first = filled((16,), 16).sample(40_000, 1, 3)["rewards"][:, 0].astype(int)
    pairs = np.bincount(first[::2] * 16 + first[1::2], minlength=256)
    assert chisquare(pairs).pvalue > 1e-4


def test_a_smaller_batch_is_a_prefix_of_a_larger_one():
    buffer = filled()
    large = buffer.sample(2000, 4, 9)
    for b in (1, 31, 32, 33, 511, 513):
        np.testing.assert_array_equal(buffer.sample(b, 4, 9)["rewards"], large["rewards"][:b])
    assert (buffer.sample(50, 4, 10)["rewards"] != large["rewards"][:50]).any()


def test_steps_and_ends_as_documented():
    buffer = SequenceReplayBuffer(10, 1, 1, seq_len=5)
    for t in range(3):
        buffer.push([t], 10 + t, 20 + t, t == 2, False)
    for t in range(2):
        buffer.push([100 + t], t, t, False, t == 1)
    batch = buffer.sample(1, seed=0)
    assert batch["obs"][0, :, 0].tolist() == [0, 1, 2, 100, 101]
    assert batch["rewards"][0].tolist() == [20, 21, 22, 0, 1]
    assert batch["is_first"][0].tolist() == [True, False, False, True, False]
    assert batch["terminated"][0].tolist() == [False, False, True, False, False]
    assert batch["truncated"][0].tolist() == [False, False, False, False, True]
    alone = buffer.sample(200, seed=0, cross_episodes=False)
    whole = alone["is_first"][:, 0]
    assert set(alone["mask"][whole].sum(1)) == {3, 2}
    assert "next_obs" not in batch


def test_threads_may_sample_together():
    from concurrent.futures import ThreadPoolExecutor

    buffer = filled((5000, 5000), 10_000)
    expected = buffer.sample(512, 64, 7)["rewards"]
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: buffer.sample(512, 64, 7)["rewards"], range(20)):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"capacity": -3}, ValueError, "capacity must be at least 1"),
        ({"capacity": 2.0}, TypeError, "capacity must be an integer"),
        ({"capacity": True}, TypeError, "capacity must be an integer"),
        ({"capacity": 3, "n_envs": 4}, ValueError, "capacity must be at least one step per environment"),
        ({"n_envs": 0}, ValueError, "n_envs must be at least 1"),
        ({"obs_dim": None}, ValueError, "obs_dim must be given, or obs_shape"),
        ({"obs_shape": (2,)}, ValueError, "obs_dim must be given, .* got both"),
        ({"obs_dim": None, "obs_shape": ()}, TypeError, "obs_shape must be a tuple"),
        ({"obs_dim": None, "obs_shape": (2, 0)}, ValueError, "obs_shape must be at least 1"),
        ({"act_dim": 0}, ValueError, "act_dim must be at least 1"),
        ({"seq_len": 11}, ValueError, "seq_len must be at most the 10 steps"),
        ({"state_dim": -1}, ValueError, "state_dim must be at least 1"),
        ({"obs_dtype": "float64"}, TypeError, "obs_dtype must be float32 or uint8"),
        ({"capacity": 2**39, "obs_dim": 2**39}, MemoryError, "capacity must fit into memory"),
    ],
)
def test_errors_of_the_constructor(arguments, error, message):
    with pytest.raises(error, match="SequenceReplayBuffer: " + message):
        SequenceReplayBuffer(**{"capacity": 10, "obs_dim": 3, "act_dim": 1} | arguments)


ROW = {"obs": [1, 2], "action": 0, "reward": 0.0, "terminated": False, "truncated": False}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: b.push(**ROW | {"obs": [1]}), ValueError, "push: obs must have 2 numbers"),
        (lambda b: b.push(**ROW | {"obs": [np.nan, 0]}), ValueError, "push: obs must be finite"),
        (lambda b: b.push(**ROW | {"action": "a"}), TypeError, "push: action must be numbers"),
        (lambda b: b.push(**ROW | {"reward": np.inf}), ValueError, "push: reward must be a finite"),
        (lambda b: b.push(**ROW, env=2), IndexError, r"push: env must lie in \[0, 2\), got 2"),
        (lambda b: b.push(**ROW, env=-1), IndexError, "push: env must lie"),
        (lambda b: b.push(**ROW, env=0.0), TypeError, "push: env must be an integer"),
        (lambda b: b.push(**ROW, is_first=3), ValueError, "push: is_first must be True or False"),
        (lambda b: b.push(**ROW, state=[1]), ValueError, "push: state must be None"),
        (lambda b: b.push(**ROW, next_obs=[1, 2]), ValueError, "push: next_obs must be given for every step"),
        (lambda b: b.push_batch(np.zeros(6), None, np.zeros(3), np.zeros(3), [0] * 3, [0] * 3), ValueError,
         "push_batch: rewards must have a multiple of the 2"),
        (lambda b: b.push_batch(np.zeros(5), None, np.zeros(2), np.zeros(2), [0] * 2, [0] * 2), ValueError,
         "push_batch: obs must have 2 rows"),
        (lambda b: b.push_batch(np.zeros(4), None, np.zeros(2), np.zeros(2), [0, 2], [0] * 2), ValueError,
         "push_batch: terminated must hold only 0 and 1"),
        (lambda b: b.sample(0, 1, 1), ValueError, "sample: batch_size must be at least 1"),
        (lambda b: b.sample(1, 0, 1), ValueError, "sample: seq_len must be at least 1"),
        (lambda b: b.sample(1, 1, -1), ValueError, "sample: seed must be at least 0"),
        (lambda b: b.sample(1, 1), TypeError, "sample: seed must be an integer, got NoneType"),
        (lambda b: b.sample(1, seed=1), TypeError, "sample: seq_len must be given"),
        (lambda b: b.sample(1, 4, 1), ValueError, r"sample: seq_len must be at most .* \(2 stored\), got 4"),
        (lambda b: b.sample(2**39, 2**39, 1, cross_episodes=False), ValueError, "batch_size \\* seq_len must be"),
        (lambda b: b.sample(1, 1, 1, cross_episodes="no"), TypeError, "cross_episodes must be True or False"),
        (lambda b: b.set_state({}), ValueError, "set_state: state must have the keys"),
        (lambda b: b.set_state({**b.get_state(), "capacity": 3}), ValueError, "capacity must be this buffer's 10"),
        (lambda b: b.set_state({**b.get_state(), "sizes": np.array([9, 9])}), ValueError, "sizes must lie in"),
        (lambda b: b.set_state({**b.get_state(), "obs": np.zeros((2, 2, 2))}), ValueError, "obs must have shape"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_change_nothing(call, error, message):
    buffer = SequenceReplayBuffer(10, 2, 1, n_envs=2)
    for _ in range(2):
        buffer.push(**ROW)
        buffer.push(**ROW, env=1)
    before = buffer.get_state()
    with pytest.raises(error, match=r"SequenceReplayBuffer\..*" + message):
        call(buffer)
    after = buffer.get_state()
    for k in before:
        np.testing.assert_array_equal(before[k], after[k])


def test_images_must_be_bytes_and_sampling_an_empty_buffer_is_an_error():
    buffer = SequenceReplayBuffer(10, obs_shape=(2, 2), obs_dtype=np.uint8, state_dim=3)
    with pytest.raises(ValueError, match="the buffer must hold steps to sample, got none"):
        buffer.sample(1, 1, 1)
    with pytest.raises(ValueError, match="state must be given"):
        buffer.push(np.zeros((2, 2), np.uint8), 0, 0.0, False, False)
    for bad in (np.zeros((2, 2)), [[0, 0], [0, 0]]):
        with pytest.raises(TypeError, match="obs must have dtype uint8"):
            buffer.push(bad, 0, 0.0, False, False, state=[0, 0, 0])
    buffer.push(np.full((2, 2), 255, np.uint8), 0, 0.0, False, False, state=[0, 0, 0])
    assert buffer.sample(2, 1, 1)["obs"].shape == (2, 1, 2, 2)
    assert buffer.sample(2, 1, 1)["obs"].dtype == np.uint8
    assert rlox.SequenceReplayBuffer is SequenceReplayBuffer


def counted(steps, capacity=32, ends=(), **kind):
    """Two environments of `steps` rows; obs and state are the number of the step, plus 100 in the second."""
    buffer = SequenceReplayBuffer(capacity, 1, 1, n_envs=2, state_dim=1, **kind)
    for t in range(steps):
        rows = np.float32([t, 100 + t])
        buffer.push_batch(rows, None, rows, rows, [t in ends] * 2, [False] * 2, state=rows)
    return buffer


def test_new_steps_come_first_once_each_without_overlap():
    buffer = counted(10)
    batch = buffer.sample(5, 4, 1, online=True, with_indices=True)
    # Both environments have two complete new sequences; the fifth is drawn at random.
    assert batch["obs"][:4, :, 0].tolist() == [
        [0, 1, 2, 3], [100, 101, 102, 103], [4, 5, 6, 7], [104, 105, 106, 107],
    ]  # fmt: skip
    assert batch["indices"][:4].tolist() == [0, 1, 8, 9]
    uniform = buffer.sample(1, 4, 1, with_indices=True)
    for name in uniform:
        np.testing.assert_array_equal(batch[name][4:], uniform[name])
    # Nothing is new: all are drawn at random, as without the queue.
    again, plain = buffer.sample(3, 4, 2, online=True), buffer.sample(3, 4, 2)
    assert set(again) == set(plain) == {*KEYS[:6], "state"}
    np.testing.assert_array_equal(again["obs"], plain["obs"])
    buffer.push(**ROW | {"obs": [10], "action": 10}, state=[10])
    buffer.push(**ROW | {"obs": [11], "action": 11}, state=[11])
    assert buffer.sample(1, 4, 3, online=True)["obs"][0, :, 0].tolist() == [8, 9, 10, 11]


def test_steps_replaced_before_they_were_sampled_are_skipped():
    buffer = counted(25, capacity=20)  # 10 stored steps of each
    batch = buffer.sample(4, 5, 0, online=True)
    assert batch["obs"][:, 0, 0].tolist() == [15, 115, 20, 120]


def test_the_state_includes_the_queue():
    buffer = counted(21)
    buffer.sample(3, 4, 0, online=True)
    other = SequenceReplayBuffer(32, 1, 1, n_envs=2, state_dim=1)
    other.set_state(buffer.get_state())
    assert other.n_pushed == buffer.n_pushed == 42
    copied = pickle.loads(pickle.dumps(buffer))
    for _ in range(3):
        expected = buffer.sample(4, 4, 5, online=True, with_indices=True)
        for found in (x.sample(4, 4, 5, online=True, with_indices=True) for x in (other, copied)):
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name])
    old = buffer.get_state()
    del old["pushed"], old["queued"]
    other.set_state(old)  # state of an older version: nothing is new
    assert len(other) == 32
    np.testing.assert_array_equal(other.sample(3, 4, 7, online=True)["obs"], other.sample(3, 4, 7)["obs"])


@pytest.mark.parametrize("steps", [9, 40])
def test_states_are_written_to_the_next_step(steps):
    buffer = counted(steps, ends=(4,) if steps == 9 else (34,))
    batch = buffer.sample(64, 4, 3, with_indices=True)
    fresh = 1000 + batch["obs"] + 1  # the states before the next step
    buffer.update_states(batch["indices"], fresh)
    kept = buffer.get_state()
    number, state, first = kept["obs"][..., 0], kept["state"][..., 0], kept["is_first"]
    before = set(number[state == number])
    rows = {int(x) for x in fresh.ravel() - 1000}
    held = {int(x) for x in number.ravel()}
    begins = {int(x) for x in number[first]}
    assert begins >= ({5, 105} if steps == 9 else {35, 135})
    assert {int(x) for x in number[state == 1000 + number]} == (rows & held) - begins
    assert before == held - (rows - begins)


def test_states_of_missing_rows_are_ignored():
    buffer = counted(16)
    early = buffer.sample(1, 4, 0, online=True, with_indices=True)["indices"]  # number 0
    for t in range(16, 19):
        buffer.push(**ROW | {"obs": [t]}, state=[t])
    buffer.update_states(early, np.float32([[[91], [92], [93], [94]]]))  # 0 to 2 have been replaced
    state = buffer.get_state()["state"][0, :, 0]
    assert state.tolist() == [93, 94, *range(5, 19)]
    buffer.update_states(np.array([18 * 2]), np.float32([[[7], [8]]]))
    assert buffer.get_state()["state"][0, :, 0].tolist() == state.tolist()


def test_rows_may_name_their_environments():
    buffer = SequenceReplayBuffer(20, 1, 1, n_envs=2)
    rows = np.arange(5.0)
    buffer.push_batch(rows, None, rows, rows, [0] * 5, [0, 0, 1, 0, 0], envs=[0, 1, 1, 1, 0])
    state = buffer.get_state()
    assert state["sizes"].tolist() == [2, 3]
    assert state["obs"][..., 0].tolist() == [[0, 4, 0], [1, 2, 3]]
    assert state["is_first"].tolist() == [[True, False, False], [True, False, True]]


def test_a_cut_episode_is_truncated_where_it_did_not_end():
    buffer = SequenceReplayBuffer(20, 1, 1, n_envs=3)
    buffer.push_batch([[1], [2]], None, [0, 0], [0, 0], [False, True], [False, False], envs=[0, 1])
    buffer.cut(truncated=True)
    buffer.push_batch([[3], [4], [5]], None, [0] * 3, [0] * 3, [False] * 3, [False] * 3)
    state = buffer.get_state()
    assert state["truncated"][:, 0].tolist() == [True, False, False]
    assert state["terminated"][:, 0].tolist() == [False, True, False]
    assert state["is_first"][:2].all()
    buffer.cut()
    assert not buffer.get_state()["truncated"][:, 1].any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: b.sample(1, 2, 0, online=True, cross_episodes=False), ValueError, "sample: online must be False"),
        (lambda b: b.update_states([0], np.zeros((1, 2, 3))), ValueError, r"states must have shape \(B, T, 1\)"),
        (lambda b: b.update_states([0], np.full((1, 2, 1), np.nan)), ValueError, "states must be finite"),
        (lambda b: b.update_states([0, 1], np.zeros((1, 2, 1))), TypeError, "indices must be integers of shape"),
        (lambda b: b.update_states([-1], np.zeros((1, 2, 1))), ValueError, r"indices must lie in \[0, "),
        (lambda b: b.update_states([99], np.zeros((1, 2, 1))), ValueError, r"indices must lie in \[0, "),
        (lambda b: b.push_batch([[1]], None, [1], [1], [0], [0], state=[[1]], envs=[2]), ValueError,
         r"push_batch: envs must lie in \[0, 2\), got 2"),
        (lambda b: b.push_batch([[1]], None, [1], [1], [0], [0], state=[[1]], envs=[0.5]), TypeError,
         "push_batch: envs must be integers"),
        (lambda b: b.set_state({**b.get_state(), "queued": np.array([9, 9])}), ValueError, "pushed must be at least"),
        (lambda b: b.set_state({**b.get_state(), "pushed": np.array([0, 0])}), ValueError, "pushed must be at least"),
    ],
)  # fmt: skip
def test_errors_of_the_queue_and_of_states(call, error, message):
    buffer = counted(4)
    before = buffer.get_state()
    with pytest.raises(error, match=r"SequenceReplayBuffer\." + ".*" + message):
        call(buffer)
    after = buffer.get_state()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    with pytest.raises(ValueError, match="update_states: the buffer must be created with a state_dim"):
        filled().update_states([0], np.zeros((1, 1, 1)))

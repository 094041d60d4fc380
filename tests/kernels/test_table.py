"""ExperienceTable against a Python list of rows."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import rlox
from rlox import ExperienceTable

FULL = os.environ.get("RLOX_HYPOTHESIS") == "full"
D, A = 3, 2


def make_rows(first, n):
    """Rows whose values identify them."""
    at = np.arange(first, first + n, dtype=np.float32)
    return {
        "obs": at[:, None] + np.arange(D, dtype=np.float32) / 8,
        "next_obs": at[:, None] + 1000 + np.arange(D, dtype=np.float32) / 8,
        "actions": at[:, None] - np.arange(A, dtype=np.float32) / 8,
        "rewards": at / 2,
        "terminated": at % 5 == 0,
        "truncated": at % 7 == 0,
    }


ORDER = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table, self.count, self.next = ExperienceTable(D, A), 0, None
        self.model = {name: [] for name in ORDER}
        self.views = []

    def note(self, rows, with_next):
        self.next = with_next
        self.count += len(rows["rewards"])
        for name in ORDER:
            self.model[name] += rows[name].tolist()

    @rule(with_next=st.booleans(), form=st.sampled_from(["f4", "f8", "list"]))
    def push(self, with_next, form):
        rows = make_rows(self.count, 1)
        args = [rows[k][0].astype(form) if form != "list" else rows[k][0].tolist() for k in ("obs", "actions")]
        args += [rows["rewards"][0], rows["terminated"][0], bool(rows["truncated"][0])]
        args += [rows["next_obs"][0]] if with_next else []
        if self.next not in (None, with_next):
            with pytest.raises(ValueError, match="next_obs must be given for every row or for none"):
                self.table.push(*args)
        else:
            self.table.push(*args)
            self.note(rows, with_next)

    @rule(n=st.integers(0, 100), flat=st.booleans(), with_next=st.booleans())
    def push_batch(self, n, flat, with_next):
        rows = make_rows(self.count, n)
        args = [rows[k].ravel() if flat else rows[k] for k in ORDER]
        if not with_next:
            args[1] = None
        if n and self.next not in (None, with_next):
            with pytest.raises(ValueError, match="next_obs must be given"):
                self.table.push_batch(*args)
        else:
            self.table.push_batch(*args)
            self.note(rows, with_next if n else self.next)

    @rule()
    def look(self):
        for view in (self.table.observations(), self.table.rewards(), self.table.truncated()):
            assert not view.flags.writeable
            self.views.append((view, view.copy()))

    @rule()
    def clear(self):
        self.table.clear()
        self.count, self.next = 0, None
        self.model = {name: [] for name in ORDER}

    @rule(pickled=st.booleans())
    def restore(self, pickled):
        if pickled:
            self.table = pickle.loads(pickle.dumps(self.table))
        else:
            state, self.table = self.table.get_state(), ExperienceTable(D, A)
            self.table.push([0] * D, [1] * A, 2, True, False)
            self.table.set_state(state)
        if not self.count:
            self.next = None

    @precondition(lambda self: self.next is not None)
    @rule()
    def next_observations(self):
        if self.next:
            np.testing.assert_array_equal(self.table.next_observations(), np.reshape(self.model["next_obs"], (-1, D)))
        else:
            with pytest.raises(ValueError, match="next_obs must be pushed"):
                self.table.next_observations()

    @invariant()
    def columns(self):
        n = len(self.model["rewards"])
        assert len(self.table) == self.table.len() == n
        assert np.array_equal(self.table.observations(), np.reshape(self.model["obs"], (n, D)))
        assert np.array_equal(self.table.actions(), np.reshape(self.model["actions"], (n, A)))
        for name in ("rewards", "terminated", "truncated"):
            assert np.array_equal(getattr(self.table, name)(), self.model[name]), name
        for view, copy in self.views:
            assert np.array_equal(view, copy)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200 if FULL else 40, stateful_step_count=60, deadline=None)


def test_dtypes_and_forms():
    table = ExperienceTable(2, 1)
    table.push([0, 1], 1, 2, 0, 1)
    table.push((0.5, 1), np.int64(3), np.float64(0.5), np.True_, np.False_, next_obs=None)
    table.push(np.zeros((1, 2)), [4], np.array([1.0]), False, False)
    assert table.actions().tolist() == [[1], [3], [4]]
    assert table.truncated().tolist() == [True, False, False]
    assert [x.dtype for x in (table.observations(), table.rewards(), table.terminated())] == ["f4", "f4", "?"]


GOOD = {"obs": [0, 1], "action": 1.0, "reward": 0.0, "terminated": False, "truncated": False, "next_obs": [0, 1]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"obs": [1, 2, 3]}, ValueError, r"obs must have 2 numbers, got shape \(3,\)"),
        ({"obs": []}, ValueError, "obs must have 2 numbers"),
        ({"obs": None}, TypeError, "obs must be an array of numbers"),
        ({"obs": "ab"}, TypeError, "obs must be numbers"),
        ({"obs": [1, [2, 3]]}, ValueError, "obs must be an array of numbers"),
        ({"obs": [1, 2j]}, TypeError, "obs must be an array of numbers, got dtype complex"),
        ({"obs": np.array([1, np.nan], "f4")}, ValueError, "obs must be finite float32 numbers, got nan at index 1"),
        ({"obs": [1, 1e300]}, ValueError, "obs must be finite float32 numbers, got inf"),
        ({"next_obs": [np.inf, 0]}, ValueError, "next_obs must be finite"),
        ({"next_obs": None}, ValueError, "next_obs must be given for every row"),
        ({"action": np.nan}, ValueError, "action must be a finite"),
        ({"action": [1, 2]}, ValueError, "action must have 1 numbers"),
        ({"reward": np.nan}, ValueError, "reward must be a finite"),
        ({"reward": 1e300}, ValueError, "reward must be a finite"),
        ({"reward": "1"}, TypeError, "reward must be a number"),
        ({"reward": True}, TypeError, "reward must be a number"),
        ({"reward": None}, TypeError, "reward must be a number"),
        ({"reward": np.zeros(2)}, ValueError, "reward must be one number"),
        ({"terminated": 2}, ValueError, "terminated must be True or False, got 2"),
        ({"terminated": "no"}, TypeError, "terminated must be True or False"),
        ({"truncated": None}, TypeError, "truncated must be True or False"),
        ({"truncated": np.zeros(2, bool)}, TypeError, "truncated must be True or False"),
    ],
)
def test_errors_of_push_name_the_argument_and_change_nothing(change, error, message):
    table = ExperienceTable(2, 1)
    table.push(**GOOD)
    with pytest.raises(error, match="ExperienceTable.push: " + message):
        table.push(**GOOD | change)
    assert table.observations().tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"obs": np.zeros(5)}, ValueError, r"obs must have 3 rows \(as rewards\) of 2 numbers, got shape \(5,\)"),
        ({"obs": [[0, 0], [0, np.nan], [0, 0]]}, ValueError, "obs must be finite float32 numbers, got nan in row 1"),
        ({"actions": np.zeros((2, 1))}, ValueError, "actions must have 3 rows"),
        ({"rewards": [0, 0, np.inf]}, ValueError, "rewards must be finite float32 numbers, got inf in row 2"),
        ({"rewards": "abc"}, TypeError, "rewards must be an array of numbers"),
        ({"terminated": [0, 2, 0]}, ValueError, "terminated must hold only 0 and 1, got 2 in row 1"),
        ({"truncated": np.full(3, 3, np.uint8)}, ValueError, "truncated must hold only 0 and 1, got 3 in row 0"),
        ({"truncated": np.zeros(2)}, ValueError, "truncated must have one entry per row"),
        ({"next_obs": np.zeros((3, 3))}, ValueError, "next_obs must have 3 rows"),
    ],
)
def test_errors_of_push_batch(change, error, message):
    table = ExperienceTable(2, 1)
    good = {"obs": np.zeros((3, 2)), "next_obs": None, "actions": [1, 2, 3], "rewards": np.zeros(3)}
    good |= {"terminated": np.zeros(3), "truncated": np.zeros(3, bool)}
    table.push_batch(**good)
    with pytest.raises(error, match="ExperienceTable.push_batch: " + message):
        table.push_batch(**good | change)
    assert len(table) == 3


def test_errors_of_the_rest():
    for bad, error in ((0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="ExperienceTable: obs_dim must be"):
            ExperienceTable(bad, 1)
        with pytest.raises(error, match="ExperienceTable: act_dim must be"):
            ExperienceTable(1, bad)
    with pytest.raises(ValueError, match="act_dim must be at least 1 and at most"):
        ExperienceTable(1, 2**62)
    table = ExperienceTable(2, 1)
    with pytest.raises(ValueError, match="next_obs must be pushed with every row, got no row yet"):
        table.next_observations()
    with pytest.raises(ValueError, match="state must have the keys"):
        table.set_state({})
    state = ExperienceTable(3, 1).get_state()
    with pytest.raises(ValueError, match=r"obs must have shape \(0, 2\)"):
        table.set_state(state)
    with pytest.raises(ValueError, match=r"obs must have shape .* float32, got .* float64"):
        table.set_state({**table.get_state(), "obs": np.zeros((0, 2))})
    assert rlox.ExperienceTable is ExperienceTable

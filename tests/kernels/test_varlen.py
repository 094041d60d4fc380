"""VarLenStore against a Python list of lists."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import rlox
from rlox import VarLenStore

FULL = os.environ.get("RLOX_HYPOTHESIS") == "full"
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.store, self.model = VarLenStore(), []

    @rule(seq=TOKENS, as_array=st.booleans())
    def push(self, seq, as_array):
        self.store.push(np.array(seq, np.uint32) if as_array else seq)
        self.model.append(seq)

    @rule(repeats=st.integers(1, 300), length=st.integers(0, 3000))
    def push_many(self, repeats, length):
        seq = np.arange(length, dtype=np.uint32)
        for _ in range(repeats // (1 + length // 100) + 1):
            self.store.push(seq)
            self.model.append(seq.tolist())

    @rule(seqs=st.lists(TOKENS, max_size=5))
    def push_batch(self, seqs):
        self.store.push_batch(seqs)
        self.model += seqs

    @rule(seq=TOKENS)
    def refused(self, seq):
        with pytest.raises(ValueError, match="seqs"):
            self.store.push_batch([seq, [-1]])

    @rule(data=st.data())
    def get(self, data):
        if self.model:
            i = data.draw(st.integers(-len(self.model), len(self.model) - 1))
            assert self.store.get(i).tolist() == self.model[i]

    @rule(data=st.data(), left=st.booleans())
    def padded(self, data, left):
        if self.model:
            chosen = data.draw(st.lists(st.integers(-len(self.model), len(self.model) - 1), max_size=5))
            tokens, mask = self.store.padded(chosen, 7, left=left)
            width = max((len(self.model[i]) for i in chosen), default=0)
            assert tokens.shape == mask.shape == (len(chosen), width)
            for i, row, kept in zip(chosen, tokens, mask, strict=True):
                seq, fill = self.model[i], [7] * (width - len(self.model[i]))
                assert row.tolist() == (fill + seq if left else seq + fill)
                assert row[kept].tolist() == seq

    @rule()
    def clear(self):
        self.store.clear()
        self.model = []

    @rule(pickled=st.booleans())
    def restore(self, pickled):
        if pickled:
            self.store = pickle.loads(pickle.dumps(self.store))
        else:
            state, self.store = self.store.get_state(), VarLenStore()
            self.store.push([1, 2])
            self.store.set_state(state)

    @invariant()
    def counts(self):
        assert len(self.store) == self.store.num_sequences() == len(self.model)
        assert self.store.total_elements() == sum(map(len, self.model))
        if self.model:
            assert self.store.get(0).tolist() == self.model[0]
            assert self.store.get(-1).tolist() == self.model[-1]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200 if FULL else 40, stateful_step_count=60, deadline=None)


def test_all_sequences_survive_growth():
    rng = np.random.default_rng(0)
    seqs = [rng.integers(0, 2**32, size=n, dtype=np.uint32) for n in rng.integers(0, 5000, size=2000)]
    store = VarLenStore()
    for seq in seqs:
        store.push(seq)
    for got, seq in zip(store, seqs, strict=True):
        np.testing.assert_array_equal(got, seq)
    assert store[-1].dtype == np.uint32


def test_push_and_get_copy():
    store, seq = VarLenStore(), np.arange(4, dtype=np.uint32)
    store.push(seq)
    seq[:] = 0
    store.get(0)[:] = 9
    assert store.get(0).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64", "float32"])
def test_dtypes(dtype):
    store = VarLenStore(dtype)
    store.push(np.array([1, 2, 3], np.int8))
    store.push(np.arange(10)[::3])
    store.push_batch(np.arange(6).reshape(2, 3))
    again = pickle.loads(pickle.dumps(store))
    assert [x.tolist() for x in again] == [[1, 2, 3], [0, 3, 6, 9], [0, 1, 2], [3, 4, 5]]
    assert again.get(0).dtype == dtype
    assert again.padded([])[0].shape == (0, 0)


def test_float_stores_accept_every_float():
    store = VarLenStore("float32")
    store.push([1, 0.5, np.nan, np.inf])
    np.testing.assert_array_equal(store.get(0), np.float32([1, 0.5, np.nan, np.inf]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.push([-1]), ValueError, r"push: seq must hold integers in \[0, 4294967295\].*got -1"),
        (lambda s: s.push([2**32]), ValueError, "seq must hold integers"),
        (lambda s: s.push([10**30]), TypeError, "seq must hold integers, got dtype object"),
        (lambda s: s.push([1.5]), TypeError, "seq must hold integers, got dtype float64"),
        (lambda s: s.push([True]), TypeError, "seq must hold integers, got dtype bool"),
        (lambda s: s.push([[1, 2]]), ValueError, r"seq must be 1-D, got shape \(1, 2\)"),
        (lambda s: s.push([[1], [1, 2]]), ValueError, "seq must be an array of numbers"),
        (lambda s: s.push(3), ValueError, r"seq must be 1-D, got shape \(\)"),
        (lambda s: s.push("ab"), ValueError, "seq must be 1-D"),
        (lambda s: s.push(None), ValueError, "seq must be 1-D"),
        (lambda s: s.push_batch(None), TypeError, "seqs must be a list"),
        (lambda s: s.push_batch([[1], [0.5]]), TypeError, r"seqs\[1\] must hold integers"),
        (lambda s: s.get(2), IndexError, r"get: index must lie in \[-2, 2\), got 2"),
        (lambda s: s.get(-3), IndexError, "index must lie"),
        (lambda s: s.get(10**30), IndexError, "index must lie"),
        (lambda s: s.get(1.0), TypeError, "index must be an integer, got float"),
        (lambda s: s.get(True), TypeError, "index must be an integer, got bool"),
        (lambda s: s[None], TypeError, "index must be an integer"),
        (lambda s: s.padded([0, 5]), IndexError, r"indices must lie in \[-2, 2\), got 5"),
        (lambda s: s.padded([[0]]), ValueError, r"indices must have shape \(B,\)"),
        (lambda s: s.padded([0.5]), TypeError, "indices must be integers"),
        (lambda s: s.padded([0], -1), ValueError, "pad must hold integers"),
        (lambda s: VarLenStore("float64"), ValueError, "dtype must be one of uint32"),
        (lambda s: VarLenStore("nonsense"), TypeError, "dtype must be one of uint32"),
        (lambda s: s.set_state({}), ValueError, "state must have the keys"),
        (lambda s: s.set_state(VarLenStore("int64").get_state()), ValueError, "elements must be 1-D of dtype uint32"),
        (lambda s: s.set_state({**s.get_state(), "lengths": np.array([1, 1])}), ValueError, "lengths must .* sum to"),
        (lambda s: s.set_state({**s.get_state(), "lengths": np.array([-1, 4])}), ValueError, "lengths must"),
        (lambda s: s.set_state({**s.get_state(), "lengths": np.array([1.0, 2])}), ValueError, "lengths must be 1-D"),
    ],
)
def test_errors_name_the_argument_and_change_nothing(call, error, message):
    store = VarLenStore()
    store.push_batch([[1, 2], [3]])
    with pytest.raises(error, match="VarLenStore.*: .*" + message.replace("push: ", "").replace("get: ", "")):
        call(store)
    assert [x.tolist() for x in store] == [[1, 2], [3]]


def test_exported():
    assert rlox.VarLenStore is VarLenStore

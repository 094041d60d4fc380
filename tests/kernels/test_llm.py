"""Token KL, group advantages, packing and preference pairs: recorded values, NumPy oracles, known results."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.kernels import llm

GOLDEN = json.loads((Path(__file__).parent / "golden_llm.json").read_text())
INF = float("inf")
SINGLE = {
    llm.compute_token_kl: ("kl", 1e-14), llm.compute_token_kl_f32: ("kl", 1e-6),
    llm.compute_token_kl_schulman: ("k3", 1e-14), llm.compute_token_kl_schulman_f32: ("k3", 1e-6),
}  # fmt: skip
BATCH = {
    llm.compute_batch_token_kl: llm.compute_token_kl,
    llm.compute_batch_token_kl_f32: llm.compute_token_kl_f32,
    llm.compute_batch_token_kl_schulman: llm.compute_token_kl_schulman,
    llm.compute_batch_token_kl_schulman_f32: llm.compute_token_kl_schulman_f32,
}


def terms(kind, p, q):
    p, q = p.astype(np.longdouble), q.astype(np.longdouble)
    return np.exp(p) * (p - q) if kind == "kl" else np.expm1(q - p) - (q - p)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["function"])
def test_recorded_values(case):
    got = getattr(llm, case["function"])(**case["args"])
    np.testing.assert_allclose(got, case["result"], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", SINGLE, ids=lambda f: f.__name__)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 2100), scale=st.sampled_from([1e-3, 1.0, 30.0, 400.0]))
def test_token_kl_agrees_with_the_oracle(function, seed, n, scale):
    kind, tolerance = SINGLE[function]
    rng = np.random.default_rng(seed)
    if function.__name__.endswith("f32"):
        scale = min(scale, 25.0)  # exp(r) must be a float32
    p, q = -np.abs(rng.normal(size=(2, n))) * scale
    if function.__name__.endswith("f32"):
        p, q = p.astype("f4"), q.astype("f4")
        # The difference itself is rounded to float32 before exp magnifies it.
        tolerance *= 1 + scale
    if kind == "k3":
        q = np.minimum(q, p + 80)
    t = terms(kind, p, q)
    assert isinstance(function(p, q), float)
    np.testing.assert_allclose(
        function(p, q), float(t.sum()), rtol=tolerance * (1 + scale), atol=tolerance * float(np.abs(t).sum())
    )


def test_small_differences_keep_their_precision():
    for r in (1e-3, 1e-6, 1e-9, -1e-9):
        series = r * r * (1 / 2 + r / 6 + r * r / 24 + r**3 / 120)
        np.testing.assert_allclose(llm.compute_token_kl_schulman([0.0], [r]), series, rtol=1e-14)


@pytest.mark.parametrize("filler", [0, 1, 15, 40, 1500])
@pytest.mark.parametrize(
    ("p", "q", "kl", "k3"),
    [
        (-INF, -1.0, 0.0, INF),
        (-1.0, -INF, INF, INF),
        (-INF, -INF, 0.0, 0.0),
        (-800.0, -800.0, 0.0, 0.0),
        (-1.0, -800.0, np.exp(-1) * 799, 798.0),
        (-800.0, -1.0, 0.0, INF),
        (np.nan, -1.0, np.nan, np.nan),
        (-1.0, np.nan, np.nan, np.nan),
    ],
)
def test_extreme_tokens(p, q, kl, k3, filler):
    p, q = np.append(np.zeros(filler), p), np.append(np.zeros(filler), q)
    for function, (kind, tolerance) in SINGLE.items():
        expected = kl if kind == "kl" else k3
        if expected == INF:
            assert function(p, q) == INF
        else:
            np.testing.assert_allclose(function(p, q), expected, rtol=tolerance, atol=1e-300)


@pytest.mark.parametrize("function", BATCH, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("b", "t"), [(1, 1), (3, 7), (5, 64), (2, 1500), (0, 4)])
def test_batches_equal_their_sequences(function, b, t):
    rng = np.random.default_rng(b)
    p, q = -np.abs(rng.normal(size=(2, b, t)))
    dtype = np.float32 if function.__name__.endswith("f32") else np.float64
    expected = np.array([BATCH[function](x, y) for x, y in zip(p, q, strict=True)], dtype)
    for got in (function(p.ravel(), q.ravel(), t), function(p, q), function(p, q, t)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)
    lengths = rng.integers(0, t + 1, size=b)
    q[np.arange(t) >= lengths[:, None]] = np.nan
    expected = [BATCH[function](x[:n], y[:n]) for x, y, n in zip(p, q, lengths, strict=True)]
    np.testing.assert_allclose(function(p, q, lengths=lengths), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("args", "kw", "error", "message"),
    [
        ((np.zeros(2), np.zeros(3)), {"seq_len": 1}, ValueError, "log_q must have the shape of log_p"),
        ((np.zeros(6), np.zeros(6)), {"seq_len": 4}, ValueError, "seq_len must be at least 1 and divide"),
        ((np.zeros(6), np.zeros(6)), {"seq_len": 0}, ValueError, "seq_len must be at least 1"),
        ((np.zeros(6), np.zeros(6)), {}, TypeError, "seq_len must be given"),
        ((np.zeros(6), np.zeros(6)), {"seq_len": 2.0}, TypeError, "seq_len must be an integer"),
        ((np.zeros((2, 3)), np.zeros((2, 3))), {"seq_len": 2}, ValueError, "seq_len must be 3"),
        ((np.zeros((2, 3)), np.zeros((2, 3))), {"lengths": [1]}, ValueError, "lengths must have one entry"),
        ((np.zeros((2, 3)), np.zeros((2, 3))), {"lengths": [1, 4]}, ValueError, r"lengths must lie in \[0, 3\]"),
        ((np.zeros((2, 3)), np.zeros((2, 3))), {"lengths": [0.5, 1]}, TypeError, "lengths must be integers"),
        ((np.zeros((1, 2, 3)),) * 2, {}, ValueError, "log_p must be 1-D"),
        ((["a"], [0.0]), {"seq_len": 1}, TypeError, "log_p must be an array of numbers"),
        ((None, [0.0]), {"seq_len": 1}, TypeError, "log_p must be an array of numbers"),
    ],
)
def test_token_kl_errors_name_the_argument(args, kw, error, message):
    for function in BATCH:
        with pytest.raises(error, match=f"{function.__name__}: .*{message}"):
            function(*args, **kw)
    with pytest.raises(ValueError, match="compute_token_kl: log_p must be 1-D"):
        llm.compute_token_kl(0.0, 0.0)


# Group advantages.


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(0, 9), size=st.integers(1, 70))
def test_group_advantages_agree_with_the_oracle(seed, groups, size):
    r = np.random.default_rng(seed).normal(size=(groups, size))
    std = r.std(axis=1, keepdims=True)
    expected = np.where(std < 1e-8, 0.0, (r - r.mean(axis=1, keepdims=True)) / np.maximum(std, 1e-8))
    got = llm.compute_batch_group_advantages(r.ravel(), size)
    np.testing.assert_allclose(got, expected.ravel(), rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(llm.compute_batch_group_advantages(r).ravel(), got)
    small = llm.compute_batch_group_advantages(r.astype("f4"), group_size=size)
    assert small.dtype == np.float32
    np.testing.assert_allclose(small, expected, rtol=1e-3, atol=1e-4)
    for row, own in zip(r, got.reshape(r.shape), strict=True):
        np.testing.assert_array_equal(llm.compute_group_advantages(row), own)


@pytest.mark.parametrize("value", [0.1, 1e10 / 3, -1e300])
@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_equal_rewards_have_no_advantage(value, size):
    assert (llm.compute_group_advantages(np.full(size, value)) == 0).all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", [2, 6, 8, 33])
def test_rewards_that_differ_by_rounding_of_float32_have_no_advantage(size, dtype):
    random = np.random.default_rng(size)
    around = random.normal(size=(200, 1)) * 10.0 ** random.integers(-6, 7, (200, 1))
    rounded = (around * (1 + random.integers(-3, 4, (200, size)) * 2.0**-23)).astype(np.float32).astype(dtype)
    assert (llm.compute_batch_group_advantages(rounded) == 0).all()
    apart = rounded + 1e-5 * np.abs(around).astype(dtype) * np.arange(size, dtype=dtype)
    std = np.std(apart.astype(float), 1, keepdims=True)
    expected = np.where(std < 1e-8, 0.0, (apart - apart.mean(1, keepdims=True, dtype=float)) / std)
    np.testing.assert_allclose(llm.compute_batch_group_advantages(apart), expected, rtol=1e-5, atol=1e-5)


def test_the_documented_group():
    got = llm.compute_group_advantages([0.9, 0.3, 0.7, 0.1])
    np.testing.assert_allclose(got, np.array([0.4, -0.2, 0.2, -0.4]) / np.sqrt(0.1), rtol=1e-12)
    assert np.isnan(llm.compute_group_advantages([1.0, np.nan, 2.0])).all()
    assert llm.compute_group_advantages([]).shape == (0,)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((np.zeros(6), 4), ValueError, "group_size must be at least 1 and divide"),
        ((np.zeros(6), 0), ValueError, "group_size must be at least 1"),
        ((np.zeros(6), None), TypeError, "group_size must be given"),
        ((np.zeros(6), True), TypeError, "group_size must be an integer, got bool"),
        ((np.zeros((2, 3)), 2), ValueError, "group_size must be 3"),
        ((np.zeros((1, 2, 3)), 2), ValueError, "rewards must be 1-D"),
        ((["a"], 1), TypeError, "rewards must be an array of numbers"),
    ],
)
def test_group_errors_name_the_argument(args, error, message):
    with pytest.raises(error, match="compute_batch_group_advantages: .*" + message):
        llm.compute_batch_group_advantages(*args)
    with pytest.raises(ValueError, match="compute_group_advantages: rewards must be 1-D"):
        llm.compute_group_advantages(np.zeros((2, 3)))


# Packing.


def first_fit_decreasing(lengths, capacity):
    bins = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for b in bins:
            if sum(lengths[j] for j in b) + lengths[i] <= capacity:
                b.append(i)
                break
        else:
            bins.append([i])
    return bins


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(0, 12), max_size=60), capacity=st.integers(12, 40))
def test_both_forms_are_first_fit_decreasing(lengths, capacity):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 2**32, n, dtype=np.uint32) for n in lengths]
    expected = first_fit_decreasing(lengths, capacity)
    rows = llm.pack_sequences(sequences, capacity)
    assert [row["sequence_index"].tolist() for row in rows] == expected
    packed, masks, positions = llm.pack_sequences(np.array(lengths, int), capacity)
    assert packed.shape == masks.shape == positions.shape == (len(expected), capacity)
    for b, row in zip(expected, rows, strict=True):
        parts = [sequences[i] for i in b]
        np.testing.assert_array_equal(row["input_ids"], np.concatenate(parts))
        np.testing.assert_array_equal(row["position_ids"], np.concatenate([np.arange(len(x)) for x in parts]))
        np.testing.assert_array_equal(row["sequence_starts"], np.cumsum([0, *(len(x) for x in parts[:-1])]))
        assert (row["attention_mask"] == 1).all()
        assert [row[k].dtype.name for k in row] == ["uint32", "uint32", "uint32", "uint64", "int64"]
        r = expected.index(b)
        used = len(row["input_ids"])
        assert masks[r].sum() == used
        np.testing.assert_array_equal(packed[r, :used], np.repeat(b, [len(x) for x in parts]))
        np.testing.assert_array_equal(positions[r, :used], row["position_ids"])
        assert (packed[r, used:] == -1).all()
        assert not masks[r, used:].any()


def test_packing_many_sequences_is_fast_and_complete():
    lengths = np.random.default_rng(0).integers(1, 65, 100_000)
    packed, masks, _ = llm.pack_sequences(lengths, 64)
    np.testing.assert_array_equal(np.bincount(packed[masks], minlength=len(lengths)), lengths)
    assert len(packed) <= 11 / 9 * lengths.sum() / 64 + 1


@pytest.mark.parametrize("causal", [True, False])
def test_attention_stays_within_a_sequence(causal):
    packed, masks, _ = llm.pack_sequences([3, 4, 2, 2, 5, 1], 8)
    expected = (packed[:, :, None] == packed[:, None, :]) & masks[:, :, None]
    if causal:
        expected &= np.tri(8, dtype=bool)
    np.testing.assert_array_equal(llm.packed_attention_mask(packed, causal), expected)
    with pytest.raises(ValueError, match="packed must be 2-D"):
        llm.packed_attention_mask(packed[0])
    with pytest.raises(TypeError, match="packed must contain integers"):
        llm.packed_attention_mask(masks)
    for wrong, error in (("no", TypeError), (None, TypeError), (2, ValueError), (float("nan"), ValueError)):
        with pytest.raises(error, match="packed_attention_mask: causal must be True or False"):
            llm.packed_attention_mask(packed, wrong)


def test_packing_accepts_other_integers_and_empty_input():
    rows = llm.pack_sequences([[1, 2], np.array([3]), np.arange(8)[::4]], 5)
    assert rows[0]["input_ids"].tolist() == [1, 2, 0, 4, 3]
    assert llm.pack_sequences([], 8) == []
    assert [x.shape for x in llm.pack_sequences(np.zeros(0, int), 8)] == [(0, 8)] * 3


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (([np.arange(9)], 8), ValueError, r"sequences\[0\] must have at most max_length 8 tokens, got 9"),
        (([3, 9], 8), ValueError, r"sequences\[1\] must have at most max_length 8 tokens, got 9"),
        (([3, -1], 8), ValueError, "the lengths in sequences must be at least 0, got -1 at 1"),
        (([3, 10**30], 8), ValueError, r"sequences\[1\] must have at most max_length"),
        (([3, np.arange(2)], 8), TypeError, r"sequences\[1\] must be an integer"),
        (([np.arange(2), 3], 8), ValueError, r"sequences\[1\] must be 1-D"),
        (([np.zeros(2)], 8), TypeError, r"sequences\[0\] must contain integer token ids, got dtype float64"),
        (([np.array([-1])], 8), ValueError, r"sequences\[0\] must contain token ids"),
        ((np.zeros(3), 8), TypeError, "the lengths in sequences must be integers"),
        (([], 0), ValueError, "max_length must be at least 1"),
        (([], 8.0), TypeError, "max_length must be an integer"),
        ((5, 8), TypeError, "sequences must be a list"),
    ],
)
def test_packing_errors_name_the_argument(args, error, message):
    with pytest.raises(error, match="pack_sequences: " + message):
        llm.pack_sequences(*args)


# Preference pairs.


def test_a_pair_keeps_its_own_tokens():
    prompt = np.array([1, 2, 3], np.uint32)
    pair = llm.DPOPair(prompt_tokens=prompt, chosen_tokens=[4, 5, 6, 7], rejected_tokens=np.array([8, 9]))
    prompt[0] = 99
    assert (pair.prompt_len(), pair.chosen_len(), pair.rejected_len()) == (3, 4, 2)
    assert pair.prompt_tokens.tolist() == [1, 2, 3]
    assert pair.chosen_tokens.dtype == np.uint32
    with pytest.raises(ValueError, match="read-only"):
        pair.chosen_tokens[0] = 1
    assert repr(pair) == "DPOPair(prompt_tokens=[1, 2, 3], chosen_tokens=[4, 5, 6, 7], rejected_tokens=[8, 9])"
    assert pickle.loads(pickle.dumps(pair)) == pair
    assert pair != llm.DPOPair([1, 2, 3], [4, 5, 6, 7], [8])
    assert pair != 3


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (([[1]], [], []), ValueError, "prompt_tokens must be 1-D"),
        (([], [1.5], []), TypeError, "chosen_tokens must contain integer"),
        (([], [], [-1]), ValueError, "rejected_tokens must contain token ids"),
        (([], [2**32], []), ValueError, "chosen_tokens must contain token ids"),
        ((None, [], []), ValueError, "prompt_tokens must be 1-D"),
    ],
)
def test_pair_errors_name_the_argument(args, error, message):
    with pytest.raises(error, match="DPOPair: " + message):
        llm.DPOPair(*args)

"""GAE against recorded values, a NumPy oracle, and cases with a known result."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.kernels.advantage.gae import compute_gae, compute_gae_batched, compute_gae_batched_f32

GOLDEN = json.loads((Path(__file__).parent / "golden_gae.json").read_text())
FUNCTIONS = {"compute_gae": compute_gae, "compute_gae_batched": compute_gae_batched}


def oracle(r, v, done, last, gamma, lam, cut, after):
    """Equation 16 in float64, one step at a time."""
    advantages, trace, following = np.zeros(len(r)), 0.0, last
    for t in reversed(range(len(r))):
        following = 0.0 if done[t] else after[t] if cut[t] else following
        delta = r[t] + gamma * following - v[t]
        trace = delta + (0.0 if done[t] or cut[t] else gamma * lam * trace)
        advantages[t], following = trace, v[t]
    return advantages, advantages + v


def rollout(seed, n_steps, n, p=0.2):
    rng = np.random.default_rng(seed)
    r, v, after = rng.normal(size=(3, n_steps, n))
    done, cut = rng.random((2, n_steps, n)) < p
    return r, v, done, cut, after, rng.normal(size=n)


def flat(x):
    """Reorder (T, N) to the env-major layout."""
    return np.ascontiguousarray(x.T).ravel()


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['function']}-{len(c['args']['rewards'])}")
def test_recorded_values(case):
    result = FUNCTIONS[case["function"]](**case["args"])
    np.testing.assert_allclose(result, case["result"], rtol=1e-12, atol=1e-13)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_steps=st.integers(0, 40),
    n=st.integers(1, 19),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    with_cut=st.booleans(),
)
def test_every_form_agrees_with_the_oracle(seed, n_steps, n, gamma, lam, p, with_cut):
    r, v, done, cut, after, last = rollout(seed, n_steps, n, p)
    if not with_cut:
        cut[:] = False
    expected = [oracle(r[:, i], v[:, i], done[:, i], last[i], gamma, lam, cut[:, i], after[:, i]) for i in range(n)]
    expected = np.array(expected).transpose(1, 2, 0)  # (2, T, N)
    extra = {"truncated": cut, "next_values": after} if with_cut else {}
    flat_extra = {name: flat(x) for name, x in extra.items()}

    rows = compute_gae_batched(r, v, done, last, None, gamma, lam, **extra)
    np.testing.assert_allclose(rows, expected, rtol=1e-11, atol=1e-11)

    flats = compute_gae_batched(flat(r), flat(v), flat(done), last, n_steps, gamma, lam, **flat_extra)
    np.testing.assert_allclose(flats, [flat(x) for x in expected], rtol=1e-11, atol=1e-11)

    singles = compute_gae(
        r[:, 0], v[:, 0], done[:, 0], last[0], gamma, lam,
        **{name: x[:, 0] for name, x in extra.items()},
    )  # fmt: skip
    np.testing.assert_allclose(singles, expected[:, :, 0], rtol=1e-11, atol=1e-11)

    for form, arguments, more in (
        (rows, (r, v, done, last, n_steps), extra),
        (flats, (flat(r), flat(v), flat(done), last, n_steps), flat_extra),
    ):
        small = compute_gae_batched_f32(*arguments, gamma, lam, **more)
        assert small[0].dtype == np.float32
        assert small[0].shape == form[0].shape
        np.testing.assert_allclose(small, form, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32, np.float64])
def test_flags_of_every_dtype_mean_the_same(dtype):
    r, v, done, cut, after, last = rollout(1, 33, 5)
    kw = {"truncated": cut, "next_values": after}
    expected = compute_gae_batched(r, v, done, last, None, 0.99, 0.95, **kw)
    kw = {"truncated": cut.astype(dtype), "next_values": after}
    got = compute_gae_batched(r, v, done.astype(dtype), last, None, 0.99, 0.95, **kw)
    np.testing.assert_array_equal(got, expected)


def test_inputs_of_other_layouts_and_dtypes_are_converted():
    r, v, done, _, _, last = rollout(2, 20, 6)
    expected = compute_gae_batched(r, v, done, last, 20, 0.99, 0.95)
    strided = [np.repeat(x, 2, axis=1)[:, ::2] for x in (r, v, done)]
    np.testing.assert_array_equal(compute_gae_batched(*strided, last, 20, 0.99, 0.95), expected)
    fortran = [np.asfortranarray(x) for x in (r, v, done)]
    np.testing.assert_array_equal(compute_gae_batched(*fortran, last, 20, 0.99, 0.95), expected)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (r, v)]
    np.testing.assert_array_equal(compute_gae_batched(*swapped, done.astype(">f8"), last, 20, 0.99, 0.95), expected)
    lists = compute_gae(r[:, 0].tolist(), v[:, 0].tolist(), done[:, 0].tolist(), last[0], 0.99, 0.95)
    np.testing.assert_allclose(lists, np.array(expected)[:, :, 0], rtol=1e-12)


def test_lambda_zero_is_the_td_residual():
    r, v, *_ = rollout(3, 50, 1)
    r, v = r[:, 0], v[:, 0]
    advantages, returns = compute_gae(r, v, np.zeros(50), 0.7, 0.9, 0.0)
    np.testing.assert_allclose(advantages, r + 0.9 * np.append(v[1:], 0.7) - v, rtol=1e-13)
    np.testing.assert_array_equal(returns, advantages + v)


def test_lambda_one_returns_are_discounted_sums():
    advantages, returns = compute_gae(np.ones(5), np.arange(5.0), np.zeros(5), 8.0, 0.5, 1.0)
    # 1 + 8/2 = 5; 1 + 5/2 = 3.5; ...
    np.testing.assert_allclose(returns, [2.1875, 2.375, 2.75, 3.5, 5.0])
    np.testing.assert_allclose(advantages, returns - np.arange(5.0))


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_time_limits_leave_no_advantage_where_the_value_is_right(lam):
    # With reward 1 and V = 1 / (1 - gamma) every advantage is 0, whatever the time limits, although the
    # first value after each limit belongs to another episode (here it is meaningless).
    gamma, n_steps, n = 0.99, 90, 3
    v = np.full((n_steps, n), 1 / (1 - gamma))
    cut = np.zeros((n_steps, n), bool)
    cut[9::10] = True
    advantages, returns = compute_gae_batched(
        np.ones((n_steps, n)), v, np.zeros((n_steps, n)), v[-1], None, gamma, lam,
        truncated=cut, next_values=v,
    )  # fmt: skip
    np.testing.assert_allclose(advantages, 0, atol=1e-11)
    np.testing.assert_allclose(returns, v)
    single = compute_gae(
        np.ones(n_steps), v[:, 0], np.zeros(n_steps), np.nan, gamma, lam,
        truncated=cut[:, 0], next_values=v[:, 0],
    )  # fmt: skip
    np.testing.assert_allclose(single[0], 0, atol=1e-11)


def test_irrelevant_values_are_not_read():
    # next_values are NaN where no episode is truncated and after a termination; last_value is NaN after a done step.
    for n_steps in (1, 4, 7, 8):
        after = np.full(n_steps, np.nan)
        done = np.zeros(n_steps, bool)
        cut = np.zeros(n_steps, bool)
        done[-1] = cut[-1] = True
        args = (np.ones(n_steps), np.zeros(n_steps), done, np.nan, 0.9, 0.9)
        advantages, _ = compute_gae(*args, truncated=cut, next_values=after)
        np.testing.assert_allclose(advantages, (1 - 0.81 ** np.arange(n_steps, 0, -1)) / 0.19)
        rows = compute_gae_batched(
            np.ones((n_steps, 1)), np.zeros((n_steps, 1)), done[:, None], [np.nan], None, 0.9, 0.9,
            truncated=cut[:, None], next_values=after[:, None],
        )  # fmt: skip
        np.testing.assert_allclose(rows[0][:, 0], advantages)


def test_episodes_do_not_leak_into_each_other():
    r, v, done, cut, after, last = rollout(4, 30, 2, p=0.0)
    done[10, 0] = cut[10, 1] = True
    kw = {"truncated": cut, "next_values": after}
    before = compute_gae_batched(r, v, done, last, None, 0.99, 0.95, **kw)[0]
    r[11:] += 100.0
    v[11:] -= 100.0
    later = compute_gae_batched(r, v, done, last, None, 0.99, 0.95, **kw)[0]
    np.testing.assert_array_equal(later[:11], before[:11])
    assert (later[11:] != before[11:]).all()


def test_out_is_written_and_returned():
    r, v, done, _, _, last = rollout(5, 16, 4)
    for function, dtype in ((compute_gae_batched, "f8"), (compute_gae_batched_f32, "f4")):
        out = (np.full((16, 4), np.nan, dtype), np.full((16, 4), np.nan, dtype))
        got = function(r, v, done, last, 16, 0.99, 0.95, out=out)
        assert got[0] is out[0]
        assert got[1] is out[1]
        np.testing.assert_array_equal(out, function(r, v, done, last, 16, 0.99, 0.95))


def test_inputs_are_not_changed():
    arrays = rollout(6, 12, 3)
    copies = [x.copy() for x in arrays]
    r, v, done, cut, after, last = arrays
    compute_gae_batched(r, v, done, last, None, 0.99, 0.95, truncated=cut, next_values=after)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_empty_trajectories():
    for result in (
        compute_gae([], [], [], 1.0, 0.99, 0.95),
        compute_gae_batched([], [], [], [1.0, 2.0], 0, 0.99, 0.95),
    ):
        assert [x.shape for x in result] == [(0,), (0,)]
    empty = np.empty((0, 3))
    assert compute_gae_batched(empty, empty, empty, np.ones(3), None, 0.9, 0.9)[0].shape == (0, 3)
    empty = np.empty((5, 0))
    assert compute_gae_batched(empty, empty, empty, [], 5, 0.9, 0.9)[1].shape == (5, 0)


Z = np.zeros(6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gamma": 1.01}, ValueError, r"gamma must lie in \[0, 1\], got 1.01"),
        ({"lam": float("nan")}, ValueError, r"lam must lie in \[0, 1\], got nan"),
        ({"lam": "a"}, TypeError, "lam must be a number"),
        ({"values": np.zeros(5)}, ValueError, r"values must have the shape of rewards \(6,\)"),
        ({"dones": np.zeros(7)}, ValueError, r"dones must have the shape of rewards"),
        ({"dones": np.full(6, 0.5)}, ValueError, "dones must hold only 0 and 1, got 0.5"),
        ({"dones": np.full(6, np.nan)}, ValueError, "dones must hold only 0 and 1, got nan"),
        ({"dones": np.full(6, 2, np.uint8)}, ValueError, "dones must hold only 0 and 1, got 2"),
        ({"dones": ["x"] * 6}, TypeError, "dones must be bool, uint8 or float"),
        ({"rewards": ["x"] * 6}, TypeError, "rewards must be an array of numbers"),
        ({"rewards": Z + 1j}, TypeError, "rewards must be an array of numbers, got dtype complex"),
        ({"rewards": np.zeros((2, 3))}, ValueError, "use compute_gae_batched"),
        ({"last_value": "a"}, TypeError, "last_value must be a number"),
        ({"truncated": Z}, ValueError, "next_values must be given with truncated"),
        ({"truncated": Z, "next_values": Z[1:]}, ValueError, "next_values must have the shape"),
        ({"truncated": Z[1:], "next_values": Z}, ValueError, "truncated must have the shape"),
        ({"out": np.zeros((2, 6))}, TypeError, "out must be a tuple"),
        ({"out": (np.empty(6), np.empty(5))}, ValueError, r"out\[1\] must have shape \(6,\)"),
        ({"out": (np.empty(6), np.empty(6, "f4"))}, TypeError, r"out\[1\] must have dtype float64"),
        ({"out": (np.empty(12)[::2], np.empty(6))}, ValueError, r"out\[0\] must be C-contiguous"),
        ({"out": (Z, np.empty(6))}, ValueError, "share no memory"),
        ({"out": (np.empty(6), Z)}, ValueError, "share no memory"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    args = {"rewards": Z, "values": Z, "dones": Z, "last_value": 0.0, "gamma": 0.9, "lam": 0.9}
    with pytest.raises(error, match="compute_gae: .*" + message):
        compute_gae(**args | change)


def test_the_same_array_twice_in_out_is_an_error():
    out = np.empty(6)
    with pytest.raises(ValueError, match="share no memory"):
        compute_gae(Z, Z, Z, 0.0, 0.9, 0.9, out=(out, out))


@pytest.mark.parametrize(
    ("shape", "change", "error", "message"),
    [
        (
            6,
            {"n_steps": 4},
            ValueError,
            "n_steps must divide the length of the flat rewards 6, got 4",
        ),
        (6, {"n_steps": -1}, ValueError, "n_steps must divide"),
        (6, {"n_steps": 0}, ValueError, "n_steps must divide"),
        (6, {"n_steps": None}, TypeError, "n_steps must be given for flat"),
        (6, {"n_steps": 2.0}, TypeError, "n_steps must be an integer, got float"),
        (6, {"last_values": np.zeros(3)}, ValueError, r"last_values must have .* shape \(2,\)"),
        (6, {"last_values": 0.0}, ValueError, r"last_values must have shape \(N,\)"),
        ((3, 2), {"n_steps": 2}, ValueError, r"n_steps must be 3 for rewards of shape \(T, N\)"),
        ((3, 2, 1), {}, ValueError, "rewards must be 1-D .* or 2-D"),
    ],
)
def test_batched_errors(shape, change, error, message):
    z = np.zeros(shape)
    args = {
        "rewards": z, "values": z, "dones": z, "last_values": np.zeros(2), "n_steps": 3,
        "gamma": 0.9, "lam": 0.9,
    }  # fmt: skip
    for function in (compute_gae_batched, compute_gae_batched_f32):
        with pytest.raises(error, match=f"{function.__name__}: .*{message}"):
            function(**args | change)


def test_memory_of_large_results_is_reused_only_when_unreferenced():
    n = 40_000
    r, v = np.random.default_rng(0).normal(size=(2, n))
    z = np.zeros(n)
    first = compute_gae(r, v, z, 0.0, 0.9, 0.9)
    address = first[0].ctypes.data
    assert address % 64 == 0
    view, copy = first[0][10:], first[0][10:].copy()
    del first
    others = [compute_gae(v, r, z, 0.0, 0.9, 0.9) for _ in range(20)]
    np.testing.assert_array_equal(view, copy)  # the view keeps the memory
    spans = sorted((x.ctypes.data, x.nbytes) for pair in others for x in pair)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    del view
    again = compute_gae(r, v, z, 0.0, 0.9, 0.9)
    assert address in (again[0].ctypes.data, again[1].ctypes.data)
    np.testing.assert_array_equal(again[0][10:], copy)

"""V-trace against recorded values, a NumPy oracle, and cases with a known result."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.kernels.advantage import compute_gae, compute_vtrace

GOLDEN = json.loads((Path(__file__).parent / "golden_vtrace.json").read_text())
INF = float("inf")


def oracle(log_rho, r, v, done, last, gamma, rho_bar, c_bar, cut, after, lam=1.0):
    """Equation 1 in float64, one step at a time."""
    ratio = np.exp(log_rho)
    rho, c = np.minimum(ratio, rho_bar), lam * np.minimum(ratio, c_bar)
    vs, pg, x, v_next, vs_next = np.zeros(len(r)), np.zeros(len(r)), 0.0, last, last
    for t in reversed(range(len(r))):
        if done[t] or cut[t]:
            v_next = vs_next = 0.0 if done[t] else after[t]
            x = 0.0
        pg[t] = rho[t] * (r[t] + gamma * vs_next - v[t])
        x = rho[t] * (r[t] + gamma * v_next - v[t]) + gamma * c[t] * x
        vs[t] = v[t] + x
        v_next, vs_next = v[t], vs[t]
    return vs, pg


def rollout(seed, n_steps, n, p=0.2):
    rng = np.random.default_rng(seed)
    log_rho, r, v, after = rng.normal(size=(4, n_steps, n))
    done, cut = rng.random((2, n_steps, n)) < p
    return 0.5 * log_rho, r, v, done, cut, after, rng.normal(size=n)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{len(c['args']['rewards'])}-{c['args']['rho_bar']}")
def test_recorded_values(case):
    args = {k: np.array(x, np.float32) if isinstance(x, list) else x for k, x in case["args"].items()}
    result = compute_vtrace(**args)
    assert result[0].dtype == np.float32
    np.testing.assert_allclose(result, case["result"], rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_steps=st.integers(0, 50),
    n=st.integers(1, 19),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    rho_bar=st.sampled_from([0.0, 0.7, 1.0, 2.0, INF]),
    c_bar=st.sampled_from([0.0, 0.5, 1.0, INF]),
    p=st.sampled_from([0.0, 0.1, 1.0]),
    with_cut=st.booleans(),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_both_forms_agree_with_the_oracle(seed, n_steps, n, gamma, rho_bar, c_bar, p, with_cut, lam):
    log_rho, r, v, done, cut, after, last = rollout(seed, n_steps, n, p)
    if not with_cut:
        cut[:] = False
    columns = [
        oracle(*(x[:, i] for x in (log_rho, r, v, done)), last[i], gamma, rho_bar, c_bar, cut[:, i], after[:, i], lam)
        for i in range(n)
    ]
    expected = np.array(columns).transpose(1, 2, 0)
    kw = {"truncated": cut, "next_values": after} if with_cut else {}
    rows = compute_vtrace(log_rho, r, v, done, last, gamma, rho_bar, c_bar, gae_lambda=lam, **kw)
    np.testing.assert_allclose(rows, expected, rtol=1e-10, atol=1e-10)
    kw = {name: x[:, 0] for name, x in kw.items()}
    single = compute_vtrace(
        *(x[:, 0] for x in (log_rho, r, v)),
        done[:, 0].astype(float),
        last[0],
        gamma,
        rho_bar,
        c_bar,
        gae_lambda=lam,
        **kw,
    )
    np.testing.assert_allclose(single, expected[:, :, 0], rtol=1e-10, atol=1e-10)
    small = compute_vtrace(
        log_rho[:, 0].astype("f4"), r[:, 0], v[:, 0], done[:, 0], last[0], gamma, rho_bar, c_bar, gae_lambda=lam, **kw
    )
    assert small[1].dtype == np.float32
    scale = 1 + np.abs(expected[:, :, 0]).max(initial=0)
    np.testing.assert_allclose(small, expected[:, :, 0], rtol=1e-4, atol=1e-5 * scale)


def test_on_policy_without_clipping_is_gae_with_lambda_one():
    _, r, v, done, cut, after, last = rollout(1, 100, 1)
    arrays = [x[:, 0] for x in (r, v, done)]
    kw = {"truncated": cut[:, 0], "next_values": after[:, 0]}
    vs, _ = compute_vtrace(np.zeros(100), *arrays, last[0], 0.99, INF, INF, **kw)
    advantages, returns = compute_gae(*arrays, last[0], 0.99, 1.0, **kw)
    np.testing.assert_allclose(vs, returns, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(vs - arrays[1], advantages, rtol=1e-9, atol=1e-12)


def test_large_ratios_are_clipped():
    # Behaviour log-probability -10, target 0; one step, reward 1, then the end.
    clipped, _ = compute_vtrace([10.0], [1.0], [0.0], [1.0], 0.0, 0.99)
    free, _ = compute_vtrace([10.0], [1.0], [0.0], [1.0], 0.0, 0.99, INF, INF)
    assert clipped[0] == 1.0
    np.testing.assert_allclose(free, np.exp(10), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("n", [1, 7, 16, 40])
def test_ratios_beyond_what_exp_can_hold(dtype, n):
    ones = np.ones(n, dtype)
    # exp(1000) is inf and clipped to 1, as on-policy. exp(-1000) is 0, so the targets are the values.
    vs, pg = compute_vtrace(1000 * ones, ones, 0 * ones, 0 * ones, 0.0, 0.5)
    np.testing.assert_allclose(vs, 2 * (1 - 0.5 ** np.arange(n, 0, -1)), rtol=1e-5)
    np.testing.assert_allclose(pg, vs, rtol=1e-5)
    for low in (-1000.0, -INF):
        vs, pg = compute_vtrace(low * ones, ones, 3 * ones, 0 * ones, 0.0, 0.5)
        assert (vs == 3).all()
        assert (pg == 0).all()
    # NaN is not clipped away.
    assert np.isnan(compute_vtrace(np.nan * ones, ones, ones, 0 * ones, 0.0, 0.5)[0]).all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_exp_is_accurate_from_end_to_end_of_its_range(dtype):
    # vs of a one-step episode with reward 1 and no clipping is exp(log_rho) itself.
    limit = 87.3 if dtype == "f4" else 708.3
    x = np.linspace(-limit, limit, 4001).astype(dtype)
    one = np.ones_like(x)
    vs, _ = compute_vtrace(x, one, 0 * one, one, 0.0, 0.9, INF, INF)
    np.testing.assert_allclose(vs, np.exp(x.astype(np.longdouble)), rtol=4e-7 if dtype == "f4" else 1e-15)
    tiny = np.array([-100.0] if dtype == "f4" else [-740.0], dtype)  # subnormal
    vs, _ = compute_vtrace(tiny, one[:1], 0 * one[:1], one[:1], 0.0, 0.9, INF, INF)
    np.testing.assert_allclose(vs, np.exp(tiny), rtol=0.05)
    assert vs[0] > 0


def test_irrelevant_values_are_not_read():
    for n in (1, 5, 8, 16, 17):
        nan = np.full(n, np.nan)
        done = np.zeros(n, bool)
        done[-1] = True
        one, zero = np.ones(n), np.zeros(n)
        vs, pg = compute_vtrace(zero, one, zero, done, np.nan, 0.5, truncated=done, next_values=nan)
        np.testing.assert_allclose(vs, 2 * (1 - 0.5 ** np.arange(n, 0, -1)))
        np.testing.assert_allclose(pg, vs)
        rows = compute_vtrace(
            *(x[:, None] for x in (zero, one, zero, done)), [np.nan], 0.5,
            truncated=done[:, None], next_values=nan[:, None],
        )  # fmt: skip
        np.testing.assert_allclose(rows[0][:, 0], vs)


def test_time_limits_leave_no_advantage_where_the_value_is_right():
    v = np.full(90, 100.0)
    cut = np.zeros(90, bool)
    cut[9::10] = True
    ratios = np.random.default_rng(0).normal(size=90)
    vs, pg = compute_vtrace(ratios, np.ones(90), v, 0 * v, np.nan, 0.99, truncated=cut, next_values=v)
    np.testing.assert_allclose(vs, v)
    np.testing.assert_allclose(pg, 0, atol=1e-11)


def test_out_is_written_and_returned():
    log_rho, r, v, done, _, _, last = rollout(2, 30, 4)
    for dtype in ("f4", "f8"):
        out = (np.empty((30, 4), dtype), np.empty((30, 4), dtype))
        got = compute_vtrace(log_rho.astype(dtype), r, v, done, last, 0.9, out=out)
        assert got[0] is out[0]
        assert got[1] is out[1]
        np.testing.assert_array_equal(out, compute_vtrace(log_rho.astype(dtype), r, v, done, last, 0.9))


def test_inputs_are_not_changed_and_may_be_lists():
    arrays = rollout(3, 21, 2)
    copies = [x.copy() for x in arrays]
    log_rho, r, v, done, cut, after, last = arrays
    compute_vtrace(log_rho, r, v, done, last, 0.9, truncated=cut, next_values=after)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    lists = compute_vtrace(*(x[:, 0].tolist() for x in (log_rho, r, v, done)), float(last[0]), 0.9)
    np.testing.assert_array_equal(lists, compute_vtrace(*(x[:, 0] for x in (log_rho, r, v, done)), last[0], 0.9))


def test_empty_trajectories():
    assert [x.shape for x in compute_vtrace([], [], [], [], 0.0, 0.9)] == [(0,), (0,)]
    for shape in ((0, 3), (3, 0)):
        z = np.empty(shape)
        assert compute_vtrace(z, z, z, z, np.zeros(shape[1]), 0.9)[1].shape == shape


Z = np.zeros(6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gamma": -0.1}, ValueError, r"gamma must lie in \[0, 1\]"),
        ({"rho_bar": -1.0}, ValueError, "rho_bar must be at least 0"),
        ({"c_bar": float("nan")}, ValueError, "c_bar must be at least 0"),
        ({"c_bar": "1"}, TypeError, "c_bar must be a number"),
        ({"rewards": np.zeros(5)}, ValueError, r"rewards must have the shape of log_rhos \(6,\)"),
        ({"values": np.zeros((6, 1))}, ValueError, "values must have the shape"),
        ({"dones": Z + 0.5}, ValueError, "dones must hold only 0 and 1"),
        ({"log_rhos": np.zeros((1, 2, 3))}, ValueError, "log_rhos must be 1-D"),
        ({"log_rhos": 0.0}, ValueError, "log_rhos must be 1-D"),
        ({"log_rhos": ["a"] * 6}, TypeError, "log_rhos must be an array of numbers"),
        ({"bootstrap_value": None}, TypeError, "bootstrap_value must be a number, got NoneType"),
        ({"bootstrap_value": np.zeros(2)}, TypeError, "bootstrap_value must be a number"),
        ({"truncated": Z}, ValueError, "next_values must be given"),
        ({"truncated": Z, "next_values": Z[1:]}, ValueError, "next_values must have the shape"),
        ({"out": 3}, TypeError, "out must be a tuple"),
        ({"out": (np.empty(6), Z)}, ValueError, "share no memory"),
        ({"out": (np.empty(6), np.empty(6, "f4"))}, TypeError, r"out\[1\] must have dtype float64"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    args = {"log_rhos": Z, "rewards": Z, "values": Z, "dones": Z, "bootstrap_value": 0.0, "gamma": 0.9}
    with pytest.raises(error, match="compute_vtrace: .*" + message):
        compute_vtrace(**args | change)


def test_bootstrap_of_columns_is_checked():
    z = np.zeros((3, 2))
    with pytest.raises(ValueError, match=r"bootstrap_value must have one entry per column, shape \(2,\)"):
        compute_vtrace(z, z, z, z, np.zeros(3), 0.9)

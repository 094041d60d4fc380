"""The norm and gate of a transformer layer and their derivatives, against NumPy in float64."""

import numpy as np
import pytest

from rlox.kernels.llm.parts import rms_norm, rms_norm_gradient, swiglu, swiglu_gradient

WIDTHS = [1, 7, 16, 64, 83]


def normals(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_and_its_derivatives_agree_with_the_oracle(width):
    x, weight, slopes, eps = 3 * normals(0, 19, width), normals(1, width), normals(2, 19, width), 1e-2
    out, d_x = np.full_like(x, np.nan), np.full_like(x, np.nan)
    scales = rms_norm(x, weight, eps, out)
    d_weight = rms_norm_gradient(x, weight, scales, slopes, d_x)
    exact, w, dy = x.astype("f8"), weight.astype("f8"), slopes.astype("f8")
    scale = 1 / np.sqrt((exact**2).mean(1, keepdims=True) + eps)
    np.testing.assert_allclose(scales, scale[:, 0], rtol=1e-6)
    np.testing.assert_allclose(out, exact * scale * w, rtol=1e-5, atol=1e-6)
    expected = scale * dy * w - exact * scale**3 * (dy * w * exact).mean(1, keepdims=True)
    np.testing.assert_allclose(d_x, expected, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(d_weight, (dy * exact * scale).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_gate_and_its_derivatives_agree_with_the_oracle(width):
    gate, up, slopes = 6 * normals(3, width), normals(4, width), normals(5, width)
    gate[0] = -95.0  # exp(95) is infinite in float32
    out, d_gate, d_up = (np.full_like(gate, np.nan) for _ in range(3))
    swiglu(gate, up, out)
    swiglu_gradient(gate, up, slopes, d_gate, d_up)
    g, u, dy = (x.astype("f8") for x in (gate, up, slopes))
    share = 1 / (1 + np.exp(-g))
    np.testing.assert_allclose(out, g * share * u, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_up, dy * g * share, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_gate, dy * u * share * (1 + g * (1 - share)), rtol=1e-5, atol=1e-6)


def test_nan_stays_nan():
    bad = np.array([[1.0, np.nan, 2.0]], np.float32)
    out = np.empty_like(bad)
    rms_norm(bad, np.ones(3, np.float32), 0.0, out)
    assert np.isnan(out).all()
    swiglu(bad[0], np.ones(3, np.float32), out[0])
    assert np.isnan(out[0]).tolist() == [False, True, False]


def test_the_parts_name_a_wrong_argument():
    x, weight, row = normals(0, 3, 4), normals(1, 4), normals(2, 4)
    out, scales = np.empty_like(x), np.ones(3, np.float32)
    for function, given, words in (
        (rms_norm, (x[0], weight, 0.1, out), r"x must have shape \(R, H\)"),
        (rms_norm, (x, weight[:3], 0.1, out), r"weight must have shape \(4,\)"),
        (rms_norm, (x, weight.astype("f8"), 0.1, out), "weight must have dtype float32"),
        (rms_norm, (x, weight, -0.1, out), "eps must be finite"),
        (rms_norm, (x, weight, 0.1, out[:2]), "out must have shape"),
        (rms_norm_gradient, (x, weight, scales[:2], x, out), "scales must have shape"),
        (rms_norm_gradient, (x, weight, scales, x[:2], out), "slopes must have shape"),
        (swiglu, (row, row[:2], row.copy()), "up must have shape"),
        (swiglu, (row, row, row[::2]), "out must have shape"),
        (swiglu_gradient, (row, row, row[:1], row.copy(), row.copy()), "slopes must have shape"),
        (swiglu_gradient, (row, row, row, row.copy(), out), "d_up must have shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"{function.__name__}: {words}"):
            function(*given)

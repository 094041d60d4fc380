"""The element-wise parts of the world model and their gradients, each in one pass over memory.

The same formulas in PyTorch, in `rlox.world_models.cells`, define the results.
"""

import numpy as np

cimport numpy as cnp

from rlox.kernels.types cimport f32, i64

cnp.import_array()

cdef extern from "cells.h":
    void rlox_norm_silu(const f32*, const f32*, f32, Py_ssize_t, Py_ssize_t, f32*, f32*) noexcept nogil
    void rlox_norm_silu_backward(const f32*, const f32*, const f32*, const f32*, Py_ssize_t, Py_ssize_t, f32*,
                                 f32*) noexcept nogil
    void rlox_gates(const f32*, const f32*, Py_ssize_t, Py_ssize_t, Py_ssize_t, f32*) noexcept nogil
    void rlox_gates_backward(const f32*, const f32*, const f32*, Py_ssize_t, Py_ssize_t, Py_ssize_t, f32*,
                             f32*) noexcept nogil
    void rlox_pick(const f32*, const f32*, f32, Py_ssize_t, Py_ssize_t, f32*, f32*) noexcept nogil
    void rlox_pick_backward(const f32*, const f32*, f32, Py_ssize_t, Py_ssize_t, f32*) noexcept nogil
    void rlox_two_hot(const f32*, const i64*, const f32*, Py_ssize_t, Py_ssize_t, Py_ssize_t, f32*, f32*) noexcept nogil
    void rlox_two_hot_backward(const f32*, const i64*, const f32*, const f32*, const f32*, Py_ssize_t, Py_ssize_t,
                               Py_ssize_t, f32*) noexcept nogil
    void rlox_two_hot_mean(const f32*, const f32*, Py_ssize_t, Py_ssize_t, f32*, f32*) noexcept nogil


cdef inline cnp.ndarray rows_of(object given, str where, str name):
    """Return `given` if it is a C-contiguous f32 array, else raise TypeError."""
    if not isinstance(given, np.ndarray) or given.dtype != np.float32 or not given.flags.c_contiguous:
        raise TypeError(f"{where}: {name} must be a C-contiguous float32 array, got {type(given).__name__} "
                        f"{getattr(given, 'dtype', '')}")
    return given


cdef inline cnp.ndarray sized(object given, Py_ssize_t size, str where, str name):
    cdef cnp.ndarray array = rows_of(given, where, name)
    if cnp.PyArray_SIZE(array) != size:
        raise ValueError(f"{where}: {name} must hold {size} numbers, got {cnp.PyArray_SIZE(array)}")
    return array


cdef inline f32* p(cnp.ndarray array) noexcept nogil:
    return <f32*>cnp.PyArray_DATA(array)


def norm_silu(x, scale, eps):
    """Compute the SiLU of x / sqrt(mean(x**2) + eps) * scale.

    Parameters
    ----------
    x
        (..., N) float32.
    scale
        (N,) float32.
    eps
        A number.

    Returns
    -------
    out
        Like x.
    inverse
        (...) float32: 1 / sqrt(mean(x**2) + eps), for `norm_silu_backward`.
    """
    cdef str where = "norm_silu"
    cdef cnp.ndarray x_ = rows_of(x, where, "x")
    cdef Py_ssize_t n = x.shape[x.ndim - 1]
    cdef Py_ssize_t rows = cnp.PyArray_SIZE(x_) // max(1, n)
    cdef cnp.ndarray scale_ = sized(scale, n, where, "scale")
    cdef cnp.ndarray out = np.empty_like(x)
    cdef cnp.ndarray inverse = np.empty(rows, np.float32)
    cdef f32 eps_ = eps
    with nogil:
        rlox_norm_silu(p(x_), p(scale_), eps_, rows, n, p(out), p(inverse))
    return out, inverse


def norm_silu_backward(x, scale, inverse, d):
    """Return the gradients of `norm_silu` with respect to `x` and `scale`; `d`, like x, is that of its output."""
    cdef str where = "norm_silu_backward"
    cdef cnp.ndarray x_ = rows_of(x, where, "x")
    cdef Py_ssize_t n = x.shape[x.ndim - 1]
    cdef Py_ssize_t rows = cnp.PyArray_SIZE(x_) // max(1, n)
    cdef cnp.ndarray scale_ = sized(scale, n, where, "scale")
    cdef cnp.ndarray inverse_ = sized(inverse, rows, where, "inverse")
    cdef cnp.ndarray d_ = sized(d, rows * n, where, "d")
    cdef cnp.ndarray dx = np.empty_like(x)
    cdef cnp.ndarray d_scale = np.zeros(n, np.float32)
    with nogil:
        rlox_norm_silu_backward(p(x_), p(scale_), p(inverse_), p(d_), rows, n, p(dx), p(d_scale))
    return dx, d_scale


def gates(x, h):
    """Return the next state (B, D) of a block GRU, from gates (G, B, 3 D / G) of the blocks and the state (B, D)."""
    cdef str where = "gates"
    cdef cnp.ndarray x_ = rows_of(x, where, "x")
    cdef Py_ssize_t groups = x.shape[0], rows = x.shape[1], w = x.shape[2] // 3
    cdef cnp.ndarray h_ = sized(h, groups * rows * w, where, "h")
    cdef cnp.ndarray out = np.empty_like(h)
    with nogil:
        rlox_gates(p(x_), p(h_), groups, rows, w, p(out))
    return out


def gates_backward(x, h, d):
    """Return the gradients of `gates` with respect to `x` and `h`; `d`, like h, is that of its output."""
    cdef str where = "gates_backward"
    cdef cnp.ndarray x_ = rows_of(x, where, "x")
    cdef Py_ssize_t groups = x.shape[0], rows = x.shape[1], w = x.shape[2] // 3
    cdef cnp.ndarray h_ = sized(h, groups * rows * w, where, "h")
    cdef cnp.ndarray d_ = sized(d, groups * rows * w, where, "d")
    cdef cnp.ndarray dx = np.empty_like(x)
    cdef cnp.ndarray dh = np.empty_like(h)
    with nogil:
        rlox_gates_backward(p(x_), p(h_), p(d_), groups, rows, w, p(dx), p(dh))
    return dx, dh


def pick(logits, uniform, mix):
    """Draw one-hot samples from softmax(logits), mixed with the share `mix` of the uniform distribution.

    Parameters
    ----------
    logits
        (..., K C) float32, C classes of each of K categoricals.
    uniform
        (..., K) float32 in (0, 1).
    mix
        In [0, 1).

    Returns
    -------
    drawn, probs
        Like logits: one-hot, and the softmax for `pick_backward`.
    """
    cdef str where = "pick"
    cdef cnp.ndarray logits_ = rows_of(logits, where, "logits")
    cdef cnp.ndarray uniform_ = rows_of(uniform, where, "uniform")
    cdef Py_ssize_t rows = cnp.PyArray_SIZE(uniform_)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(logits_) // max(1, rows)
    sized(logits, rows * n, where, "logits")
    cdef cnp.ndarray drawn = np.empty_like(logits)
    cdef cnp.ndarray probs = np.empty_like(logits)
    cdef f32 mix_ = mix
    with nogil:
        rlox_pick(p(logits_), p(uniform_), mix_, rows, n, p(drawn), p(probs))
    return drawn, probs


def pick_backward(probs, d, classes, mix):
    """Return the gradient of `pick` with respect to the logits; `d`, like probs, is that of the mixed probabilities."""
    cdef str where = "pick_backward"
    cdef cnp.ndarray probs_ = rows_of(probs, where, "probs")
    cdef Py_ssize_t n = classes
    cdef Py_ssize_t rows = cnp.PyArray_SIZE(probs_) // n
    cdef cnp.ndarray d_ = sized(d, rows * n, where, "d")
    cdef cnp.ndarray dx = np.empty_like(probs)
    cdef f32 mix_ = mix
    with nogil:
        rlox_pick_backward(p(probs_), p(d_), mix_, rows, n, p(dx))
    return dx


cdef cnp.ndarray places(object at, Py_ssize_t n, str where):
    """Return the classes of targets, (..., S) int64 in [0, n - 2], after checking them."""
    if not isinstance(at, np.ndarray) or at.dtype != np.int64 or not at.flags.c_contiguous:
        raise TypeError(f"{where}: at must be a C-contiguous int64 array, got {type(at).__name__}")
    if at.size and not 0 <= at.min() <= at.max() < n - 1:
        raise ValueError(f"{where}: at must lie in [0, {n - 2}], got {at.min()} to {at.max()}")
    return at


def two_hot(logits, at, share):
    """Compute the cross-entropies of softmax(logits) with S targets per row.

    Parameters
    ----------
    logits
        (..., N) float32.
    at
        (..., S) int64: a target is split between the classes at and at + 1.
    share
        (..., S) float32 in [0, 1]: the share of the second class.

    Returns
    -------
    out, lse
        (..., S) float32, and log(sum(exp(logits))) of each row for `two_hot_backward`.
    """
    cdef str where = "two_hot"
    cdef cnp.ndarray x = rows_of(logits, where, "logits")
    cdef Py_ssize_t n = logits.shape[logits.ndim - 1], targets = at.shape[at.ndim - 1]
    cdef Py_ssize_t rows = cnp.PyArray_SIZE(x) // n
    cdef cnp.ndarray at_ = places(at, n, where)
    cdef cnp.ndarray share_ = sized(share, rows * targets, where, "share")
    if at.size != rows * targets:
        raise ValueError(f"{where}: at must hold {rows * targets} numbers, got {at.size}")
    cdef cnp.ndarray out = np.empty_like(share)
    cdef cnp.ndarray lse = np.empty(rows, np.float32)
    with nogil:
        rlox_two_hot(p(x), <const i64*>cnp.PyArray_DATA(at_), p(share_), rows, n, targets, p(out), p(lse))
    return out, lse


def two_hot_backward(logits, at, share, lse, d):
    """Return the gradient of `two_hot` with respect to the logits; `d` (..., S) is that of the cross-entropies."""
    cdef str where = "two_hot_backward"
    cdef cnp.ndarray x = rows_of(logits, where, "logits")
    cdef Py_ssize_t n = logits.shape[logits.ndim - 1], targets = at.shape[at.ndim - 1]
    cdef Py_ssize_t rows = cnp.PyArray_SIZE(x) // n
    cdef cnp.ndarray at_ = places(at, n, where)
    cdef cnp.ndarray share_ = sized(share, rows * targets, where, "share")
    cdef cnp.ndarray lse_ = sized(lse, rows, where, "lse")
    cdef cnp.ndarray d_ = sized(d, rows * targets, where, "d")
    cdef cnp.ndarray dx = np.empty_like(logits)
    with nogil:
        rlox_two_hot_backward(p(x), <const i64*>cnp.PyArray_DATA(at_), p(share_), p(lse_), p(d_), rows, n, targets,
                              p(dx))
    return dx


def two_hot_mean(logits, values):
    """Return the mean (...) of `values` (N,), symmetric about 0, under softmax(logits), (..., N); float32, N odd."""
    cdef str where = "two_hot_mean"
    cdef cnp.ndarray x = rows_of(logits, where, "logits")
    cdef Py_ssize_t n = logits.shape[logits.ndim - 1]
    cdef Py_ssize_t rows = cnp.PyArray_SIZE(x) // n
    cdef cnp.ndarray values_ = sized(values, n, where, "values")
    if n % 2 == 0:
        raise ValueError(f"{where}: values must have an odd length, got {n}")
    cdef cnp.ndarray room = np.empty(n, np.float32)
    cdef cnp.ndarray out = np.empty(logits.shape[: logits.ndim - 1], np.float32)
    with nogil:
        rlox_two_hot_mean(p(x), p(values_), rows, n, p(room), p(out))
    return out

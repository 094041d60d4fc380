"""Parts of a transformer layer, norm and gate, and their gradients, each in one pass over the rows."""

import numpy as np

cimport numpy as cnp

from rlox.kernels.checks cimport check_out
from rlox.kernels.nn.layers cimport given, number
from rlox.kernels.types cimport f32, f64
cimport rlox.kernels.vexp

cnp.import_array()

cdef extern from "parts.h":
    f32 rlox_rms_norm(Py_ssize_t n, const f32* x, const f32* weight, f32 eps, f32* to) noexcept nogil
    void rlox_rms_norm_back(Py_ssize_t n, const f32* x, const f32* weight, f32 scale, const f32* dy, f32* dx,
                            f64* d_weight) noexcept nogil
    void rlox_gated(Py_ssize_t n, const f32* gate, const f32* up, f32* to) noexcept nogil
    void rlox_gated_back(Py_ssize_t n, const f32* gate, const f32* up, const f32* dy, f32* d_gate,
                         f32* d_up) noexcept nogil


cdef inline const f32* at(cnp.ndarray array) noexcept nogil:
    return <const f32*>cnp.PyArray_DATA(array)


cdef f32* into(object array, tuple shape, str where, str name) except NULL:
    """Return the data of an output after checking it."""
    check_out(array, cnp.NPY_FLOAT32, "float32", shape, where, name)
    return <f32*>cnp.PyArray_DATA(<cnp.ndarray>array)


cdef tuple rows_of(object x, str where):
    """Return `x`, (R, H) float32, and its shape after checking it."""
    shape = np.shape(x)
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"{where}: x must have shape (R, H), got {shape}")
    return given(x, cnp.NPY_FLOAT32, "float32", shape, where, "x"), shape


def rms_norm(x, weight, eps, out) -> cnp.ndarray:
    """Compute ``x / rms(x) * weight`` of each row.

    Parameters
    ----------
    x : array (R, H) float32
    weight : array (H,) float32
    eps : float
        Added to the mean square.
    out : array (R, H) float32
        Receives the result; may be `x`.

    Returns
    -------
    array (R,) float32
        ``1 / rms(x)``, for `rms_norm_gradient`.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape.
    """
    cdef str where = "rms_norm"
    rows, shape = rows_of(x, where)
    cdef Py_ssize_t m = shape[0], n = shape[1], i
    cdef cnp.ndarray w = given(weight, cnp.NPY_FLOAT32, "float32", (n,), where, "weight")
    cdef f32* to = into(out, shape, where, "out")
    cdef f32 added = <f32>number(eps, 0.0, where, "eps")
    cdef cnp.ndarray scales = np.empty(m, np.float32)
    cdef const f32* from_ = at(rows)
    cdef const f32* weights = at(w)
    cdef f32* scale = <f32*>cnp.PyArray_DATA(scales)
    with nogil:
        for i in range(m):
            scale[i] = rlox_rms_norm(n, from_ + i * n, weights, added, to + i * n)
    return scales


def rms_norm_gradient(x, weight, scales, slopes, out) -> cnp.ndarray:
    """Compute the gradients of `rms_norm`.

    Parameters
    ----------
    x, weight
        The arguments of `rms_norm`.
    scales : array (R,) float32
        Its return value.
    slopes : array (R, H) float32
        The gradient with respect to its output.
    out : array (R, H) float32
        Receives the gradient with respect to `x`; must share no memory with an input.

    Returns
    -------
    array (H,) float32
        The gradient with respect to `weight`, summed in float64.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape.
    """
    cdef str where = "rms_norm_gradient"
    rows, shape = rows_of(x, where)
    cdef Py_ssize_t m = shape[0], n = shape[1], i
    cdef cnp.ndarray w = given(weight, cnp.NPY_FLOAT32, "float32", (n,), where, "weight")
    cdef cnp.ndarray s = given(scales, cnp.NPY_FLOAT32, "float32", (m,), where, "scales")
    cdef cnp.ndarray d = given(slopes, cnp.NPY_FLOAT32, "float32", shape, where, "slopes")
    cdef f32* to = into(out, shape, where, "out")
    cdef cnp.ndarray sums = np.zeros(n)
    cdef const f32* from_ = at(rows)
    cdef const f32* weights = at(w)
    cdef const f32* scale = at(s)
    cdef const f32* slope = at(d)
    cdef f64* sum_ = <f64*>cnp.PyArray_DATA(sums)
    with nogil:
        for i in range(m):
            rlox_rms_norm_back(n, from_ + i * n, weights, scale[i], slope + i * n, to + i * n, sum_)
    return sums.astype(np.float32)


def swiglu(gate, up, out) -> None:
    """Compute ``silu(gate) * up`` elementwise.

    Parameters
    ----------
    gate, up : arrays (N,) float32
    out : array (N,) float32
        Receives the result.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape.
    """
    cdef str where = "swiglu"
    cdef Py_ssize_t n = np.size(gate)
    cdef cnp.ndarray g = given(gate, cnp.NPY_FLOAT32, "float32", (n,), where, "gate")
    cdef cnp.ndarray u = given(up, cnp.NPY_FLOAT32, "float32", (n,), where, "up")
    cdef f32* to = into(out, (n,), where, "out")
    with nogil:
        rlox_gated(n, at(g), at(u), to)


def swiglu_gradient(gate, up, slopes, d_gate, d_up) -> None:
    """Compute the gradients of `swiglu`.

    Parameters
    ----------
    gate, up
        The arguments of `swiglu`.
    slopes : array (N,) float32
        The gradient with respect to its output.
    d_gate, d_up : arrays (N,) float32
        Receive the gradients with respect to `gate` and `up`.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape.
    """
    cdef str where = "swiglu_gradient"
    cdef Py_ssize_t n = np.size(gate)
    cdef cnp.ndarray g = given(gate, cnp.NPY_FLOAT32, "float32", (n,), where, "gate")
    cdef cnp.ndarray u = given(up, cnp.NPY_FLOAT32, "float32", (n,), where, "up")
    cdef cnp.ndarray d = given(slopes, cnp.NPY_FLOAT32, "float32", (n,), where, "slopes")
    cdef f32* to_gate = into(d_gate, (n,), where, "d_gate")
    cdef f32* to_up = into(d_up, (n,), where, "d_up")
    with nogil:
        rlox_gated_back(n, at(g), at(u), at(d), to_gate, to_up)

"""Linear layers of an ensemble, with ReLU after them if wanted, and their gradients.

`rlox.nn.critics.layers.linear` uses them. Letters: N networks, B rows, I and O inputs and outputs of a layer.
"""

import numpy as np

cimport numpy as cnp
from libc.string cimport memcpy

from rlox.kernels.nn.layers cimport (
    RLOX_BIAS, RLOX_BIAS_RELU, RLOX_STORE, given, padded, rlox_gemm, rlox_pack, rlox_pack_transposed,
)
from rlox.kernels.types cimport f32

cnp.import_array()

cdef extern from *:
    """
    #include <stddef.h>
    #include <string.h>

    /* As many rows are summed in float before they are added up in double. */
    enum { RLOX_ROWS = 64 };

    /* The gradient (rows, width) before a ReLU with outputs y, or d itself if y is NULL; its sums over rows go to
       `sums`, through `total` (width) and `part` (width). */
    static void rlox_before_relu(const float *d, const float *y, ptrdiff_t rows, ptrdiff_t width, float *to,
                                 double *total, float *part, float *sums)
    {
        memset(total, 0, width * sizeof *total);
        for (ptrdiff_t first = 0; first < rows; first += RLOX_ROWS) {
            const ptrdiff_t last = first + RLOX_ROWS < rows ? first + RLOX_ROWS : rows;
            memset(part, 0, width * sizeof *part);
            for (ptrdiff_t i = first; i < last; i++) {
                const float *from = d + i * width, *after = y ? y + i * width : NULL;
                if (after)
                    for (ptrdiff_t k = 0; k < width; k++) {
                        const float kept = after[k] <= 0.0f ? 0.0f : from[k]; /* NaN stays */
                        to[i * width + k] = kept;
                        part[k] += kept;
                    }
                else
                    for (ptrdiff_t k = 0; k < width; k++)
                        part[k] += from[k];
            }
            for (ptrdiff_t k = 0; k < width; k++)
                total[k] += part[k];
        }
        for (ptrdiff_t k = 0; k < width; k++)
            sums[k] = (float)total[k];
    }
    """
    void rlox_before_relu(const f32*, const f32*, Py_ssize_t, Py_ssize_t, f32*, double*, f32*, f32*) noexcept nogil


cdef void multiply(Py_ssize_t rows, Py_ssize_t n, Py_ssize_t k_size, const f32* a, Py_ssize_t a_row, Py_ssize_t a_col,
                   const f32* b, Py_ssize_t ldb, f32* c, int after, const f32* bias, f32* wide) noexcept nogil:
    """Write after(a (rows, k_size) @ b (k_size, n)) to c (rows, n), through `wide` (rows, padded n) if n has padding."""
    cdef Py_ssize_t n_pad = padded(n), i
    rlox_gemm(rows, n_pad, k_size, a, a_row, a_col, b, ldb, c if n == n_pad else wide, n_pad, after, bias, NULL, 0)
    if n != n_pad:
        for i in range(rows):
            memcpy(c + i * n, wide + i * n_pad, n * sizeof(f32))


cdef tuple sizes(x, weight, str where):
    """Return N, B, I and O of x (N, B, I) and weight (N, I, O)."""
    of_x, of_weight = np.shape(x), np.shape(weight)
    if len(of_x) != 3 or len(of_weight) != 3 or min(of_x) < 1 or min(of_weight) < 1:
        raise ValueError(f"{where}: x must be (N, B, I) and weight (N, I, O), none of them empty, got {of_x}, {of_weight}")
    return of_x[0], of_x[1], of_x[2], of_weight[2]


def forward(x, weight, bias, relu):
    """Return ``x @ weight + bias`` of each network, with ReLU after it if `relu`.

    Parameters
    ----------
    x
        (N, B, I) float32.
    weight
        (N, I, O) float32.
    bias
        (N, O) float32, or None.
    relu
        Whether negative results become 0; it needs a bias.

    Returns
    -------
    y
        (N, B, O) float32.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape, or `relu` without a bias.
    """
    cdef str where = "forward"
    cdef Py_ssize_t n, rows, n_in, n_out, i
    n, rows, n_in, n_out = sizes(x, weight, where)
    if relu and bias is None:
        raise ValueError(f"{where}: relu needs a bias")
    cdef Py_ssize_t out_pad = padded(n_out)
    cdef bint has_bias = bias is not None
    cdef cnp.ndarray x_ = given(x, cnp.NPY_FLOAT32, "float32", (n, rows, n_in), where, "x")
    cdef cnp.ndarray weight_ = given(weight, cnp.NPY_FLOAT32, "float32", (n, n_in, n_out), where, "weight")
    cdef cnp.ndarray bias_ = x_
    if has_bias:
        bias_ = given(bias, cnp.NPY_FLOAT32, "float32", (n, n_out), where, "bias")
        if out_pad != n_out:
            bias_ = np.pad(bias_, ((0, 0), (0, out_pad - n_out)))
    cdef bint fits = out_pad == n_out
    cdef cnp.ndarray y = np.empty((n, rows, n_out), np.float32)
    cdef cnp.ndarray panels = np.empty(0 if fits else n_in * out_pad, np.float32)
    cdef cnp.ndarray wide = np.empty(0 if fits else rows * out_pad, np.float32)
    cdef const f32* from_ = <const f32*>cnp.PyArray_DATA(x_)
    cdef const f32* weights = <const f32*>cnp.PyArray_DATA(weight_)
    cdef const f32* biases = <const f32*>cnp.PyArray_DATA(bias_) if has_bias else NULL
    cdef f32* packed = <f32*>cnp.PyArray_DATA(panels)
    cdef f32* room = <f32*>cnp.PyArray_DATA(wide)
    cdef f32* to = <f32*>cnp.PyArray_DATA(y)
    cdef const f32* factor
    cdef int after = (RLOX_BIAS_RELU if relu else RLOX_BIAS) if has_bias else RLOX_STORE
    with nogil:
        for i in range(n):
            factor = weights + i * n_in * n_out
            if not fits:
                rlox_pack(factor, n_in, n_out, packed)
            multiply(rows, n_out, n_in, from_ + i * rows * n_in, n_in, 1, factor if fits else packed,
                     n_out if fits else 0, to + i * rows * n_out, after, biases + i * out_pad if has_bias else NULL, room)
    return y


def gradient(d_y, x, weight, y, needs_x, needs_weight):
    """Return the gradients of a loss with respect to what `forward` took.

    Parameters
    ----------
    d_y
        (N, B, O) float32, of the loss with respect to the results.
    x, weight
        As given to `forward`.
    y
        (N, B, O) float32, the results, if ReLU was applied; otherwise None.
    needs_x, needs_weight
        Whether `d_x` and `d_weight` are wanted.

    Returns
    -------
    d_x
        (N, B, I) float32, or None.
    d_weight
        (N, I, O) float32, or None.
    d_bias
        (N, O) float32.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape.
    """
    cdef str where = "gradient"
    cdef Py_ssize_t n, rows, n_in, n_out, i
    n, rows, n_in, n_out = sizes(x, weight, where)
    of_x, of_weight, of_y = (n, rows, n_in), (n, n_in, n_out), (n, rows, n_out)
    cdef bint relu = y is not None, wanted = needs_x, learns = needs_weight
    cdef cnp.ndarray d_ = given(d_y, cnp.NPY_FLOAT32, "float32", of_y, where, "d_y")
    cdef cnp.ndarray x_ = given(x, cnp.NPY_FLOAT32, "float32", of_x, where, "x")
    cdef cnp.ndarray weight_ = given(weight, cnp.NPY_FLOAT32, "float32", of_weight, where, "weight")
    cdef cnp.ndarray y_ = given(y, cnp.NPY_FLOAT32, "float32", of_y, where, "y") if relu else d_
    cdef Py_ssize_t in_pad = padded(n_in), out_pad = padded(n_out)
    cdef bint fits = out_pad == n_out
    cdef cnp.ndarray d_x = np.empty(of_x if wanted else (0, 0, 0), np.float32)
    cdef cnp.ndarray d_weight = np.empty(of_weight if learns else (0, 0, 0), np.float32)
    cdef cnp.ndarray d_bias = np.empty((n, n_out), np.float32)
    cdef cnp.ndarray masked = np.empty(rows * n_out if relu else 0, np.float32)
    cdef cnp.ndarray panels = np.empty(max(n_out * in_pad, 0 if fits else rows * out_pad), np.float32)
    cdef cnp.ndarray wide = np.empty(max(rows * in_pad, n_in * out_pad), np.float32)
    cdef cnp.ndarray total = np.empty(n_out), part = np.empty(n_out, np.float32)
    cdef const f32* outer = <const f32*>cnp.PyArray_DATA(d_)
    cdef const f32* inputs = <const f32*>cnp.PyArray_DATA(x_)
    cdef const f32* weights = <const f32*>cnp.PyArray_DATA(weight_)
    cdef const f32* results = <const f32*>cnp.PyArray_DATA(y_)
    cdef const f32* of_net
    cdef const f32* d
    cdef f32* before = <f32*>cnp.PyArray_DATA(masked)
    cdef f32* packed = <f32*>cnp.PyArray_DATA(panels)
    cdef f32* room = <f32*>cnp.PyArray_DATA(wide)
    cdef f32* to_x = <f32*>cnp.PyArray_DATA(d_x)
    cdef f32* to_weight = <f32*>cnp.PyArray_DATA(d_weight)
    cdef f32* to_bias = <f32*>cnp.PyArray_DATA(d_bias)
    cdef double* total_ = <double*>cnp.PyArray_DATA(total)
    cdef f32* part_ = <f32*>cnp.PyArray_DATA(part)
    with nogil:
        for i in range(n):
            d = outer + i * rows * n_out
            of_net = inputs + i * rows * n_in
            rlox_before_relu(d, results + i * rows * n_out if relu else NULL, rows, n_out, before, total_, part_,
                             to_bias + i * n_out)
            if relu:
                d = before
            if learns:
                if not fits:
                    rlox_pack(d, rows, n_out, packed)
                multiply(n_in, n_out, rows, of_net, 1, n_in, d if fits else packed, n_out if fits else 0,
                         to_weight + i * n_in * n_out, RLOX_STORE, NULL, room)
            if wanted:
                rlox_pack_transposed(weights + i * n_in * n_out, n_in, n_out, packed)
                multiply(rows, n_in, n_out, d, n_out, 1, packed, 0, to_x + i * rows * n_in, RLOX_STORE, NULL, room)
    return d_x if wanted else None, d_weight if learns else None, d_bias

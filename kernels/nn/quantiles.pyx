"""Huber quantile losses and their gradients, without the array of all pairs of quantiles and samples.

`rlox.nn.value_distributions.pairwise_quantile_losses` defines them.
"""

import numpy as np

cimport numpy as cnp
from libc.string cimport memcpy

from rlox.kernels.nn.layers cimport given, number
from rlox.kernels.types cimport f32

cnp.import_array()

cdef extern from *:
    """
    #include <stddef.h>
    #include <string.h>

    enum { RLOX_LANES = 16 };

    typedef float rlox_lanes __attribute__((vector_size(4 * RLOX_LANES)));
    typedef int rlox_flags __attribute__((vector_size(4 * RLOX_LANES)));

    /* `a` where the flags are set, else `b`. */
    static inline rlox_lanes rlox_either(rlox_flags flags, rlox_lanes a, rlox_lanes b)
    {
        return (rlox_lanes)((flags & (rlox_flags)a) | (~flags & (rlox_flags)b));
    }

    static inline float rlox_total(rlox_lanes x)
    {
        double sum = 0.0;
        for (int k = 0; k < RLOX_LANES; k++)
            sum += x[k];
        return (float)sum;
    }

    /* Of one row: `q` (n), samples `z` (padded to whole vectors; m of them count), gradient `d_q` (n). Returns the loss. */
    static float rlox_quantile_row(const float *q, const float *z, ptrdiff_t n, ptrdiff_t m, float kappa, float *d_q)
    {
        const rlox_lanes zero = {0}, high = zero + kappa, low = zero - kappa;
        const float scale = 1.0f / (kappa * (float)m);
        rlox_lanes counts = zero; /* of the last vector: 1 for samples, 0 for padding */
        double loss = 0.0;
        const ptrdiff_t last = (m - 1) / RLOX_LANES * RLOX_LANES;
        for (ptrdiff_t k = 0; k < m - last; k++)
            counts[k] = 1.0f;
        for (ptrdiff_t i = 0; i < n; i++) {
            const float fraction = ((float)i + 0.5f) / (float)n;
            const rlox_lanes quantile = zero + q[i], above = zero + fraction, below = zero + (1.0f - fraction);
            rlox_lanes losses = zero, slopes = zero;
            for (ptrdiff_t j = 0; j <= last; j += RLOX_LANES) {
                rlox_lanes u, slope, weight;
                memcpy(&u, z + j, sizeof u);
                u -= quantile;
                slope = rlox_either(u > high, high, rlox_either(u < low, low, u)); /* NaN stays */
                weight = rlox_either(u < zero, below, above);
                if (j == last)
                    weight *= counts;
                losses += weight * slope * (u - 0.5f * slope);
                slopes += weight * slope;
            }
            loss += rlox_total(losses);
            d_q[i] = -scale * rlox_total(slopes);
        }
        return (float)(loss * scale);
    }
    """
    enum:
        RLOX_LANES
    f32 rlox_quantile_row(const f32*, const f32*, Py_ssize_t, Py_ssize_t, f32, f32*) noexcept nogil


def quantile_losses(quantiles, samples, kappa):
    """Return the losses of quantiles against samples, and their gradients.

    Parameters
    ----------
    quantiles
        (B, N) float32, at the fractions (i + 1/2) / N.
    samples
        (B, M) float32, M >= 1, of the distributions to learn.
    kappa
        The error up to which the loss is quadratic, > 0.

    Returns
    -------
    losses
        (B,) float32: sums over quantiles of means over samples. NaN in a row makes its loss NaN.
    gradients
        (B, N) float32, of each row's loss with respect to its quantiles.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape, or a kappa that is not positive.
    """
    cdef str where = "quantile_losses"
    shape = np.shape(quantiles), np.shape(samples)
    if [len(one) for one in shape] != [2, 2] or shape[1][1] < 1:
        raise ValueError(f"{where}: quantiles and samples must be (B, N) and (B, M), got {shape[0]} and {shape[1]}")
    cdef cnp.ndarray q = given(quantiles, cnp.NPY_FLOAT32, "float32", shape[0], where, "quantiles")
    cdef Py_ssize_t rows = cnp.PyArray_DIM(q, 0), n = cnp.PyArray_DIM(q, 1), m = shape[1][1], i
    cdef cnp.ndarray z = given(samples, cnp.NPY_FLOAT32, "float32", (rows, m), where, "samples")
    cdef f32 limit = number(kappa, 0.0, where, "kappa")
    if limit == 0.0:
        raise ValueError(f"{where}: kappa must be > 0, got {kappa}")
    cdef cnp.ndarray losses = np.empty(rows, np.float32), gradients = np.empty((rows, n), np.float32)
    cdef cnp.ndarray padded = np.zeros(m + RLOX_LANES, np.float32)
    cdef const f32* q_ = <const f32*>cnp.PyArray_DATA(q)
    cdef const f32* z_ = <const f32*>cnp.PyArray_DATA(z)
    cdef f32* row = <f32*>cnp.PyArray_DATA(padded)
    cdef f32* losses_ = <f32*>cnp.PyArray_DATA(losses)
    cdef f32* gradients_ = <f32*>cnp.PyArray_DATA(gradients)
    with nogil:
        for i in range(rows):
            memcpy(row, z_ + i * m, m * sizeof(f32))
            losses_[i] = rlox_quantile_row(q_ + i * n, row, n, m, limit, gradients_ + i * n)
    return losses, gradients

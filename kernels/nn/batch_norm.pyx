"""Batch normalisation and its gradient, each array read from memory once.

`rlox.nn.critics.norms.BatchNorm` defines them. Letters: N networks, B rows, F features.
"""

import numpy as np

cimport numpy as cnp

from rlox.kernels.nn.layers cimport given, number
from rlox.kernels.types cimport f32

cnp.import_array()

cdef extern from *:
    """
    #include <math.h>
    #include <stddef.h>

    /* Features are worked on in blocks that stay in the second level of the cache over all sweeps. Sums of as many rows
       are taken in float before they are added up in double. */
    enum { RLOX_BLOCK = 64, RLOX_PART = 64 };

    /* The parts of features, (N, F) each, in this order. */
    enum { RLOX_MEAN, RLOX_VAR, RLOX_INVERSE, RLOX_SLOPE, RLOX_BASE, RLOX_STRETCH, RLOX_OFFSET, RLOX_PARTS };

    typedef struct {
        const float *scale, *shift, *running_mean, *running_var; /* the last two are NULL without renormalisation */
        float *parts;                                            /* MEAN of these features */
        ptrdiff_t between;                                       /* from one part to the next */
        float epsilon, most_stretch, most_shift;
    } rlox_norm;

    static inline float rlox_within(float x, float low, float high)
    {
        return x < low ? low : x > high ? high : x; /* NaN stays */
    }

    static inline __attribute__((always_inline)) void
    rlox_norm_block(const float *x, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width, const rlox_norm *norm, float *y)
    {
        float mean[RLOX_BLOCK], slope[RLOX_BLOCK], base[RLOX_BLOCK];
        double sum[RLOX_BLOCK] = {0.0}, squares[RLOX_BLOCK] = {0.0};
        for (ptrdiff_t first = 0; first < rows; first += RLOX_PART) {
            const ptrdiff_t last = first + RLOX_PART < rows ? first + RLOX_PART : rows;
            float part[RLOX_BLOCK] = {0.0f};
            for (ptrdiff_t i = first; i < last; i++)
                for (ptrdiff_t k = 0; k < width; k++)
                    part[k] += x[i * stride + k];
            for (ptrdiff_t k = 0; k < width; k++)
                sum[k] += part[k];
        }
        for (ptrdiff_t k = 0; k < width; k++)
            mean[k] = (float)(sum[k] / (double)rows);
        for (ptrdiff_t first = 0; first < rows; first += RLOX_PART) {
            const ptrdiff_t last = first + RLOX_PART < rows ? first + RLOX_PART : rows;
            float part[RLOX_BLOCK] = {0.0f};
            for (ptrdiff_t i = first; i < last; i++)
                for (ptrdiff_t k = 0; k < width; k++) {
                    const float u = x[i * stride + k] - mean[k];
                    part[k] += u * u;
                }
            for (ptrdiff_t k = 0; k < width; k++)
                squares[k] += part[k];
        }
        for (ptrdiff_t k = 0; k < width; k++) {
            float *of = norm->parts + k;
            const float var = (float)(squares[k] / (double)rows), deviation = sqrtf(var + norm->epsilon);
            float stretch = 1.0f, offset = 0.0f;
            if (norm->running_var) {
                const float running = sqrtf(norm->running_var[k] + norm->epsilon);
                stretch = rlox_within(deviation / running, 1.0f / norm->most_stretch, norm->most_stretch);
                offset = (mean[k] - norm->running_mean[k]) / running;
                offset = rlox_within(offset, -norm->most_shift, norm->most_shift);
            }
            slope[k] = norm->scale[k] * stretch / deviation;
            base[k] = norm->shift[k] + offset * norm->scale[k];
            of[RLOX_MEAN * norm->between] = mean[k];
            of[RLOX_VAR * norm->between] = var;
            of[RLOX_INVERSE * norm->between] = 1.0f / deviation;
            of[RLOX_SLOPE * norm->between] = slope[k];
            of[RLOX_BASE * norm->between] = base[k];
            of[RLOX_STRETCH * norm->between] = stretch;
            of[RLOX_OFFSET * norm->between] = offset;
        }
        for (ptrdiff_t i = 0; i < rows; i++)
            for (ptrdiff_t k = 0; k < width; k++)
                y[i * stride + k] = (x[i * stride + k] - mean[k]) * slope[k] + base[k];
    }

    /* Networks (n, rows, width), with `norm` of the first feature of the first one. */
    static void rlox_normalize(const float *x, ptrdiff_t n, ptrdiff_t rows, ptrdiff_t width, rlox_norm norm, float *y)
    {
        for (ptrdiff_t i = 0; i < n; i++)
            for (ptrdiff_t k = 0; k < width; k += RLOX_BLOCK) {
                const ptrdiff_t at = i * width + k, from = i * rows * width + k;
                rlox_norm block = norm;
                block.scale += at;
                block.shift += at;
                block.parts += at;
                if (norm.running_var) {
                    block.running_mean += at;
                    block.running_var += at;
                }
                if (width - k >= RLOX_BLOCK)
                    rlox_norm_block(x + from, rows, width, RLOX_BLOCK, &block, y + from);
                else
                    rlox_norm_block(x + from, rows, width, width - k, &block, y + from);
            }
    }

    static inline __attribute__((always_inline)) void
    rlox_gradient_block(const float *d, const float *x, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width,
                        const float *parts, ptrdiff_t between, float *d_x, float *d_scale, float *d_shift)
    {
        float mean[RLOX_BLOCK], inverse[RLOX_BLOCK], slope[RLOX_BLOCK], level[RLOX_BLOCK], tilt[RLOX_BLOCK];
        double sum[RLOX_BLOCK] = {0.0}, along[RLOX_BLOCK] = {0.0};
        for (ptrdiff_t k = 0; k < width; k++) {
            mean[k] = parts[RLOX_MEAN * between + k];
            inverse[k] = parts[RLOX_INVERSE * between + k];
            slope[k] = parts[RLOX_SLOPE * between + k];
        }
        for (ptrdiff_t first = 0; first < rows; first += RLOX_PART) {
            const ptrdiff_t last = first + RLOX_PART < rows ? first + RLOX_PART : rows;
            float part[RLOX_BLOCK] = {0.0f}, product[RLOX_BLOCK] = {0.0f};
            for (ptrdiff_t i = first; i < last; i++)
                for (ptrdiff_t k = 0; k < width; k++) {
                    part[k] += d[i * stride + k];
                    product[k] += d[i * stride + k] * ((x[i * stride + k] - mean[k]) * inverse[k]);
                }
            for (ptrdiff_t k = 0; k < width; k++) {
                sum[k] += part[k];
                along[k] += product[k];
            }
        }
        for (ptrdiff_t k = 0; k < width; k++) {
            const float stretch = parts[RLOX_STRETCH * between + k], offset = parts[RLOX_OFFSET * between + k];
            d_shift[k] = (float)sum[k];
            d_scale[k] = (float)(along[k] * stretch + sum[k] * offset);
            level[k] = (float)(sum[k] / (double)rows);
            tilt[k] = (float)(along[k] / (double)rows) * inverse[k];
        }
        if (d_x)
            for (ptrdiff_t i = 0; i < rows; i++)
                for (ptrdiff_t k = 0; k < width; k++)
                    d_x[i * stride + k] =
                        slope[k] * (d[i * stride + k] - level[k] - (x[i * stride + k] - mean[k]) * tilt[k]);
    }

    static void rlox_normalize_gradient(const float *d, const float *x, ptrdiff_t n, ptrdiff_t rows, ptrdiff_t width,
                                        const float *parts, float *d_x, float *d_scale, float *d_shift)
    {
        for (ptrdiff_t i = 0; i < n; i++)
            for (ptrdiff_t k = 0; k < width; k += RLOX_BLOCK) {
                const ptrdiff_t at = i * width + k, from = i * rows * width + k;
                float *to = d_x ? d_x + from : NULL;
                if (width - k >= RLOX_BLOCK)
                    rlox_gradient_block(d + from, x + from, rows, width, RLOX_BLOCK, parts + at, n * width, to,
                                        d_scale + at, d_shift + at);
                else
                    rlox_gradient_block(d + from, x + from, rows, width, width - k, parts + at, n * width, to,
                                        d_scale + at, d_shift + at);
            }
    }
    """
    enum:
        RLOX_PARTS

    ctypedef struct rlox_norm:
        const f32 *scale
        const f32 *shift
        const f32 *running_mean
        const f32 *running_var
        f32 *parts
        Py_ssize_t between
        f32 epsilon
        f32 most_stretch
        f32 most_shift

    void rlox_normalize(const f32*, Py_ssize_t, Py_ssize_t, Py_ssize_t, rlox_norm, f32*) noexcept nogil
    void rlox_normalize_gradient(
        const f32*, const f32*, Py_ssize_t, Py_ssize_t, Py_ssize_t, const f32*, f32*, f32*, f32*
    ) noexcept nogil


def normalize(x, scale, shift, running_mean, running_var, epsilon, most_stretch, most_shift):
    """Return batches normalised by their own statistics.

    Parameters
    ----------
    x
        (N, B, F) float32, B >= 1.
    scale, shift
        (N, F) float32.
    running_mean, running_var
        (N, F) float32 for batch renormalisation; None, both, for batch normalisation.
    epsilon
        Added to variances, >= 0.
    most_stretch, most_shift
        Bounds of renormalisation: r in [1/most_stretch, most_stretch], d in [-most_shift, most_shift].

    Returns
    -------
    y
        (N, B, F) float32.
    parts
        (7, N, F) float32: mean and biased variance of the batches, and what `gradient` takes.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape, or a number out of range.
    """
    cdef str where = "normalize"
    shape = np.shape(x)
    if len(shape) != 3 or shape[1] < 1:
        raise ValueError(f"{where}: x must be (N, B, F) with B >= 1, got {shape}")
    cdef Py_ssize_t n = shape[0], rows = shape[1], width = shape[2]
    features = (n, width)
    cdef cnp.ndarray x_ = given(x, cnp.NPY_FLOAT32, "float32", shape, where, "x")
    cdef cnp.ndarray scale_ = given(scale, cnp.NPY_FLOAT32, "float32", features, where, "scale")
    cdef cnp.ndarray shift_ = given(shift, cnp.NPY_FLOAT32, "float32", features, where, "shift")
    cdef cnp.ndarray mean_ = scale_, var_ = scale_
    cdef bint renormalizes = running_var is not None
    if renormalizes:
        mean_ = given(running_mean, cnp.NPY_FLOAT32, "float32", features, where, "running_mean")
        var_ = given(running_var, cnp.NPY_FLOAT32, "float32", features, where, "running_var")
    cdef cnp.ndarray y = np.empty(shape, np.float32), parts = np.empty((RLOX_PARTS, n, width), np.float32)
    cdef rlox_norm norm
    norm.epsilon = number(epsilon, 0.0, where, "epsilon")
    norm.most_stretch = number(most_stretch, 1.0, where, "most_stretch")
    norm.most_shift = number(most_shift, 0.0, where, "most_shift")
    norm.between = n * width
    norm.scale = <const f32*>cnp.PyArray_DATA(scale_)
    norm.shift = <const f32*>cnp.PyArray_DATA(shift_)
    norm.running_mean = <const f32*>cnp.PyArray_DATA(mean_) if renormalizes else NULL
    norm.running_var = <const f32*>cnp.PyArray_DATA(var_) if renormalizes else NULL
    norm.parts = <f32*>cnp.PyArray_DATA(parts)
    cdef const f32* from_ = <const f32*>cnp.PyArray_DATA(x_)
    cdef f32* to = <f32*>cnp.PyArray_DATA(y)
    with nogil:
        rlox_normalize(from_, n, rows, width, norm, to)
    return y, parts


def gradient(d_y, x, parts, needs_x):
    """Return the gradients of a loss with respect to what `normalize` took.

    Parameters
    ----------
    d_y
        (N, B, F) float32, of the loss with respect to the results.
    x
        (N, B, F) float32, as given to `normalize`.
    parts
        (7, N, F) float32, from `normalize`.
    needs_x
        Whether `d_x` is wanted.

    Returns
    -------
    d_x
        (N, B, F) float32, or None.
    d_scale, d_shift
        (N, F) float32.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape.
    """
    cdef str where = "gradient"
    shape = np.shape(x)
    if len(shape) != 3 or shape[1] < 1:
        raise ValueError(f"{where}: x must be (N, B, F) with B >= 1, got {shape}")
    cdef Py_ssize_t n = shape[0], rows = shape[1], width = shape[2]
    cdef cnp.ndarray d_ = given(d_y, cnp.NPY_FLOAT32, "float32", shape, where, "d_y")
    cdef cnp.ndarray x_ = given(x, cnp.NPY_FLOAT32, "float32", shape, where, "x")
    cdef cnp.ndarray parts_ = given(parts, cnp.NPY_FLOAT32, "float32", (RLOX_PARTS, n, width), where, "parts")
    cdef bint wanted = needs_x
    cdef cnp.ndarray d_x = np.empty(shape if wanted else (0, 0, 0), np.float32)
    cdef cnp.ndarray d_scale = np.empty((n, width), np.float32), d_shift = np.empty((n, width), np.float32)
    cdef const f32* d_y_ = <const f32*>cnp.PyArray_DATA(d_)
    cdef const f32* from_ = <const f32*>cnp.PyArray_DATA(x_)
    cdef const f32* kept = <const f32*>cnp.PyArray_DATA(parts_)
    cdef f32* to = <f32*>cnp.PyArray_DATA(d_x) if wanted else NULL
    cdef f32* to_scale = <f32*>cnp.PyArray_DATA(d_scale)
    cdef f32* to_shift = <f32*>cnp.PyArray_DATA(d_shift)
    with nogil:
        rlox_normalize_gradient(d_y_, from_, n, rows, width, kept, to, to_scale, to_shift)
    return d_x if wanted else None, d_scale, d_shift

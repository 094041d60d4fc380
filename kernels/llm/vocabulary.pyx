"""Computations over a whole vocabulary: drawing and scoring tokens, in one or two passes over the logits."""

import numpy as np

cimport numpy as cnp
from libc.string cimport memset

from rlox.kernels.checks cimport check_out
from rlox.kernels.nn.layers cimport given, number, numbers_below
from rlox.kernels.types cimport f32, f64, i64
cimport rlox.kernels.vexp

cnp.import_array()

cdef extern from *:
    """
    #include <math.h>
    #define RLOX_LANES RLOX_XLANES_f32
    #define RLOX_RUN 64  /* exponentials that are summed in float32 before they are added in float64 */

    static inline float rlox_greatest(ptrdiff_t n, const float *x) {
        float top = -INFINITY;
        ptrdiff_t i = 0;
        if (n >= RLOX_LANES) {
            rlox_xf32 most = *(const rlox_xuf32 *)x;
            for (i = RLOX_LANES; i + RLOX_LANES <= n; i += RLOX_LANES) {
                const rlox_xf32 v = *(const rlox_xuf32 *)(x + i);
                const rlox_xi32 more = v > most;
                most = (rlox_xf32)((more & (rlox_xi32)v) | (~more & (rlox_xi32)most));
            }
            for (int k = 0; k < RLOX_LANES; k++) top = most[k] > top ? most[k] : top;
        }
        for (; i < n; i++) top = x[i] > top ? x[i] : top;
        return top;
    }

    static inline __attribute__((always_inline)) rlox_xf32 rlox_loaded(const float *x, ptrdiff_t left, float rest) {
        if (left >= RLOX_LANES) return *(const rlox_xuf32 *)x;
        rlox_xf32 v;
        for (int k = 0; k < RLOX_LANES; k++) v[k] = k < left ? x[k] : rest;
        return v;
    }

    static inline __attribute__((always_inline)) float rlox_sum_of(rlox_xf32 x) {
        for (int step = RLOX_LANES / 2; step > 0; step /= 2)
            for (int k = 0; k < step; k++) x[k] += x[k + step];
        return x[0];
    }

    /* Writes exp((x - top) * scale) of a run of at most RLOX_RUN numbers to e, then zeros; returns their sum. */
    static inline float rlox_run(ptrdiff_t n, const float *x, float top, float scale, float *e) {
        rlox_xf32 sum = {0};
        for (ptrdiff_t i = 0; i < RLOX_RUN; i += RLOX_LANES) {
            const rlox_xf32 y = rlox_exp_full_f32((rlox_loaded(x + i, n - i, -INFINITY) - top) * scale);
            *(rlox_xuf32 *)(e + i) = y;
            sum += y;
        }
        return rlox_sum_of(sum);
    }

    /* Returns the token at which the distribution function reaches `noise`, and writes its log-probability. */
    static ptrdiff_t rlox_draw(ptrdiff_t n, const float *x, double noise, float scale, float *log_prob) {
        const float top = rlox_greatest(n, x);
        float e[RLOX_RUN];
        double total = 0.0, reached = 0.0;
        for (ptrdiff_t i = 0; i < n; i += RLOX_RUN)
            total += rlox_run(n - i, x + i, top, scale, e);
        ptrdiff_t token = n - 1;
        const double wanted = noise * total;
        for (ptrdiff_t i = 0; i < n; i += RLOX_RUN) {
            const double before = reached;
            reached += rlox_run(n - i, x + i, top, scale, e);
            if (!(reached >= wanted)) continue;
            double within = before;
            ptrdiff_t end = n - i < RLOX_RUN ? n - i : RLOX_RUN;
            /* Due to rounding, adding the numbers of a run one by one may not reach `wanted`: then the token is the
               last one with a probability above 0. */
            for (ptrdiff_t k = 0; k < end && !(within >= wanted); k++)
                if (e[k] > 0) {
                    within += e[k];
                    token = i + k;
                }
            break;
        }
        *log_prob = (x[token] - top) * scale - (float)log(total);
        return token;
    }

    /* Log-probability of the target, the logarithm of the sum of all exponentials, and the entropy. */
    static void rlox_score(ptrdiff_t n, const float *x, ptrdiff_t target, float scale, float *log_prob, float *total,
                           float *entropy) {
        const float top = rlox_greatest(n, x);
        double sum = 0.0, moment = 0.0;
        for (ptrdiff_t i = 0; i < n; i += RLOX_RUN) {
            rlox_xf32 run = {0}, weighted = {0};
            for (ptrdiff_t k = i; k < n && k < i + RLOX_RUN; k += RLOX_LANES) {
                const rlox_xf32 below = (rlox_loaded(x + k, n - k, -INFINITY) - top) * scale;
                const rlox_xf32 e = rlox_exp_full_f32(below);
                /* A logit of minus infinity has probability 0, but 0 * inf would be NaN. */
                const rlox_xi32 none = below < -1e30f;
                run += e;
                weighted += e * (rlox_xf32)((rlox_xi32)below & ~none);
            }
            sum += rlox_sum_of(run);
            moment += rlox_sum_of(weighted);
        }
        const double size = log(sum);
        *total = (float)(top * (double)scale + size);
        *log_prob = (float)((x[target] - top) * (double)scale - size);
        *entropy = (float)(size - moment / sum);
    }

    /* Writes slope * scale * (one-hot target - probabilities) to d. */
    static void rlox_unscore(ptrdiff_t n, const float *x, ptrdiff_t target, float scale, float total, float slope,
                             float *d) {
        const float factor = slope * scale;
        ptrdiff_t i = 0;
        for (; i + RLOX_LANES <= n; i += RLOX_LANES)
            *(rlox_xuf32 *)(d + i) = -factor * rlox_exp_full_f32(*(const rlox_xuf32 *)(x + i) * scale - total);
        if (i < n) {
            const rlox_xf32 rest = -factor * rlox_exp_full_f32(rlox_loaded(x + i, n - i, -INFINITY) * scale - total);
            memcpy(d + i, &rest, (n - i) * sizeof(float));
        }
        d[target] += factor;
    }
    """
    Py_ssize_t rlox_draw(Py_ssize_t n, const f32* x, f64 noise, f32 scale, f32* log_prob) noexcept nogil
    void rlox_score(Py_ssize_t n, const f32* x, Py_ssize_t target, f32 scale, f32* log_prob, f32* total,
                    f32* entropy) noexcept nogil
    void rlox_unscore(Py_ssize_t n, const f32* x, Py_ssize_t target, f32 scale, f32 total, f32 slope,
                      f32* d) noexcept nogil


cdef cnp.ndarray rows_of(object array, str where):
    """Return `logits`, (M, V) float32 with contiguous rows, after checking it."""
    if not isinstance(array, cnp.ndarray):
        raise TypeError(f"{where}: logits must be a NumPy array, got {type(array).__name__}")
    cdef cnp.ndarray x = array
    if cnp.PyArray_TYPE(x) != cnp.NPY_FLOAT32:
        raise TypeError(f"{where}: logits must have dtype float32, got {array.dtype}")
    if cnp.PyArray_NDIM(x) != 2 or cnp.PyArray_DIM(x, 1) < 1:
        raise ValueError(f"{where}: logits must have shape (M, V), got {array.shape}")
    if cnp.PyArray_STRIDE(x, 1) != sizeof(f32) or cnp.PyArray_STRIDE(x, 0) % sizeof(f32):
        return np.ascontiguousarray(array)
    return x


cdef f32 inverse_of(object temperature, str where) except -1:
    cdef f64 x = number(temperature, 0.0, where, "temperature")
    if x == 0.0:
        raise ValueError(f"{where}: temperature must be > 0, got {temperature}")
    return <f32>(1.0 / x)


def draw_tokens(logits, noise, temperature=1.0) -> tuple[cnp.ndarray, cnp.ndarray]:
    """Draw one token per row: the first one at which the distribution function reaches `noise`.

    Parameters
    ----------
    logits : array (M, V) float32
        Rows need not be adjacent in memory.
    noise : array (M,) float64
        In (0, 1].
    temperature : float
        Above 0; the logits are divided by it.

    Returns
    -------
    tokens : array (M,) int64
    log_probs : array (M,) float32
        NaN where a logit is NaN or plus infinity.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape.
    """
    cdef str where = "draw_tokens"
    cdef cnp.ndarray x = rows_of(logits, where)
    cdef Py_ssize_t m = cnp.PyArray_DIM(x, 0), n = cnp.PyArray_DIM(x, 1), i
    cdef Py_ssize_t ld = cnp.PyArray_STRIDE(x, 0) // <Py_ssize_t>sizeof(f32)
    cdef cnp.ndarray u = given(noise, cnp.NPY_FLOAT64, "float64", (m,), where, "noise")
    cdef f32 scale = inverse_of(temperature, where)
    cdef cnp.ndarray tokens = np.empty(m, np.int64), log_probs = np.empty(m, np.float32)
    cdef const f32* rows = <const f32*>cnp.PyArray_DATA(x)
    cdef const f64* numbers = <const f64*>cnp.PyArray_DATA(u)
    cdef i64* to = <i64*>cnp.PyArray_DATA(tokens)
    cdef f32* said = <f32*>cnp.PyArray_DATA(log_probs)
    with nogil:
        for i in range(m):
            to[i] = rlox_draw(n, rows + i * ld, numbers[i], scale, said + i)
    return tokens, log_probs


def score_tokens(logits, rows, targets, temperature=1.0) -> tuple[cnp.ndarray, cnp.ndarray, cnp.ndarray]:
    """Return the log-probabilities of tokens and the entropies of their distributions.

    Parameters
    ----------
    logits : array (M, V) float32
    rows : array (N,) int64
        The row of the logits for each token.
    targets : array (N,) int64
        The ids of the tokens.
    temperature : float
        Above 0; the logits are divided by it.

    Returns
    -------
    log_probs, totals, entropies : arrays (N,) float32
        `totals` are the logarithms of the sums of all exponentials. Entropies are in nats.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape, and for rows or ids out of range.
    """
    cdef str where = "score_tokens"
    cdef cnp.ndarray x = rows_of(logits, where)
    cdef Py_ssize_t m = cnp.PyArray_DIM(x, 0), v = cnp.PyArray_DIM(x, 1), n = np.size(targets), i
    cdef Py_ssize_t ld = cnp.PyArray_STRIDE(x, 0) // <Py_ssize_t>sizeof(f32)
    cdef cnp.ndarray chosen = numbers_below(rows, n, m, where, "rows"), ids = numbers_below(targets, n, v, where, "targets")
    cdef f32 scale = inverse_of(temperature, where)
    cdef cnp.ndarray found = np.empty((3, n), np.float32)
    cdef const f32* data = <const f32*>cnp.PyArray_DATA(x)
    cdef const i64* r = <const i64*>cnp.PyArray_DATA(chosen)
    cdef const i64* t = <const i64*>cnp.PyArray_DATA(ids)
    cdef f32* to = <f32*>cnp.PyArray_DATA(found)
    with nogil:
        for i in range(n):
            rlox_score(v, data + r[i] * ld, t[i], scale, to + i, to + n + i, to + 2 * n + i)
    return found[0], found[1], found[2]


def score_gradient(logits, rows, targets, totals, slopes, out, temperature=1.0) -> None:
    """Compute the gradient of the sum of ``slopes * log_probs`` with respect to the logits (see `score_tokens`).

    Parameters
    ----------
    logits, rows, targets, temperature
        The arguments of `score_tokens`; every row at most once.
    totals : array (N,) float32
        As returned by `score_tokens`.
    slopes : array (N,) float32
        The gradient with respect to the log-probabilities.
    out : array (M, V) float32
        Receives the gradient, which is 0 in rows without a token.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape, rows or ids out of range, and a row that occurs twice.
    """
    cdef str where = "score_gradient"
    cdef cnp.ndarray x = rows_of(logits, where)
    cdef Py_ssize_t m = cnp.PyArray_DIM(x, 0), v = cnp.PyArray_DIM(x, 1), n = np.size(targets), i
    cdef Py_ssize_t ld = cnp.PyArray_STRIDE(x, 0) // <Py_ssize_t>sizeof(f32)
    cdef cnp.ndarray chosen = numbers_below(rows, n, m, where, "rows"), ids = numbers_below(targets, n, v, where, "targets")
    cdef cnp.ndarray sums = given(totals, cnp.NPY_FLOAT32, "float32", (n,), where, "totals")
    cdef cnp.ndarray weights = given(slopes, cnp.NPY_FLOAT32, "float32", (n,), where, "slopes")
    check_out(out, cnp.NPY_FLOAT32, "float32", (m, v), where, "out")
    cdef f32 scale = inverse_of(temperature, where)
    cdef cnp.ndarray of = np.full(m, -1, np.int64)
    cdef const f32* data = <const f32*>cnp.PyArray_DATA(x)
    cdef const i64* r = <const i64*>cnp.PyArray_DATA(chosen)
    cdef const i64* t = <const i64*>cnp.PyArray_DATA(ids)
    cdef const f32* total = <const f32*>cnp.PyArray_DATA(sums)
    cdef const f32* slope = <const f32*>cnp.PyArray_DATA(weights)
    cdef i64* token = <i64*>cnp.PyArray_DATA(of)
    cdef f32* d = <f32*>cnp.PyArray_DATA(<cnp.ndarray>out)
    cdef i64 k
    for i in range(n):
        if token[r[i]] >= 0:
            raise ValueError(f"{where}: rows must be distinct, got {r[i]} twice")
        token[r[i]] = i
    with nogil:
        for i in range(m):
            k = token[i]
            if k < 0:
                memset(d + i * v, 0, v * sizeof(f32))
            else:
                rlox_unscore(v, data + i * ld, t[k], scale, total[k], slope[k], d + i * v)

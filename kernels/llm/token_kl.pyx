"""Kullback-Leibler divergence between two language models, from the log-probabilities of tokens.

    exact   sum_t exp(log p_t) (log p_t - log q_t)
    k3      sum_t exp(r_t) - r_t - 1,   r_t = log q_t - log p_t     (Schulman 2020)

`k3` is unbiased for KL(p, q) when the tokens were drawn from p, never negative, and of low variance:
http://joschu.net/blog/kl-approx.html
"""

cimport numpy as cnp

from rlox.kernels.checks cimport as_array, as_index, as_real, same_shape
from rlox.kernels.types cimport f32, f64, i64
cimport rlox.kernels.vexp

cnp.import_array()

# Sums over whole vectors in chunks of 1024, which are added up in float64. A chunk is first computed with the fast exp
# and, only if a number is outside its range, once more with the full exp.
cdef extern from *:
    """
    #ifndef __clang__
    #pragma GCC push_options
    #pragma GCC optimize("fp-contract=fast")
    #endif
    #define RLOX_KL_X(p, q) p
    #define RLOX_KL_FAST(S, p, q) rlox_exp_fast_##S(p) * (p - q)
    /* Probability 0 counts 0, whatever q is. */
    #define RLOX_KL_FULL(S, IS, p, q)                                                                   \\
        (rlox_x##S)((rlox_x##IS)(rlox_exp_full_##S(p) * (p - q)) & ~(p == -(rlox_x##S){0} - __builtin_inf##S()))
    #define RLOX_K3_X(p, q) (q - p)
    #define RLOX_K3_FAST(S, p, q) rlox_k3_fast_##S(q - p)
    #define RLOX_K3_FULL(S, IS, p, q) rlox_k3_full_##S(p, q)
    #define __builtin_inff64() __builtin_inf()
    #define __builtin_inff32() __builtin_inff()

    #define RLOX_K3_FOR(S, IS)                                                                          \\
    static inline __attribute__((always_inline)) rlox_x##S rlox_k3_full_##S(rlox_x##S p, rlox_x##S q) { \\
        rlox_x##S r = q - p, zero = {0};                                                                \\
        rlox_x##IS inside = ~rlox_exp_outside_##S(r), huge = r > RLOX_EXP_RANGE_##S;                    \\
        rlox_x##S near_ = rlox_k3_fast_##S((rlox_x##S)((rlox_x##IS)r & inside));                        \\
        /* inf - inf must not occur: the subtracted number stays finite where exp is infinite. */       \\
        rlox_x##S less = (rlox_x##S)(((rlox_x##IS)r & ~huge)                                            \\
                                     | ((rlox_x##IS)(zero + RLOX_EXP_RANGE_##S) & huge));               \\
        rlox_x##S far_ = rlox_exp_full_##S(r) - less - 1;                                               \\
        rlox_x##S k3 = (rlox_x##S)(((rlox_x##IS)near_ & inside) | ((rlox_x##IS)far_ & ~inside));        \\
        return (rlox_x##S)((rlox_x##IS)k3 & ~(p == q));                                                 \\
    }
    RLOX_K3_FOR(f64, i64)
    RLOX_K3_FOR(f32, i32)

    #define RLOX_TOKENS(NAME, REAL, S, IS, KIND)                                                        \\
    static double NAME(ptrdiff_t n, const REAL *p, const REAL *q) {                                     \\
        double total = 0;                                                                               \\
        REAL lanes[RLOX_XLANES_##S], pads[2][RLOX_XLANES_##S];                                          \\
        for (ptrdiff_t start = 0; start < n; start += 1024) {                                           \\
            ptrdiff_t end = n - start < 1024 ? n : start + 1024, i = start;                             \\
            rlox_x##S sum = {0}, a, b;                                                                  \\
            rlox_x##IS bad = {0};                                                                       \\
            for (; i + RLOX_XLANES_##S <= end; i += RLOX_XLANES_##S) {                                  \\
                a = *(const rlox_xu##S *)(p + i), b = *(const rlox_xu##S *)(q + i);                     \\
                sum += RLOX_##KIND##_FAST(S, a, b);                                                     \\
                bad |= rlox_exp_outside_##S(RLOX_##KIND##_X(a, b));                                     \\
            }                                                                                           \\
            if (i < end) {                                                                              \\
                memset(pads, 0, sizeof pads);  /* log-probabilities 0 and 0 count 0 */                  \\
                memcpy(pads[0], p + i, (end - i) * sizeof(REAL));                                       \\
                memcpy(pads[1], q + i, (end - i) * sizeof(REAL));                                       \\
                a = *(const rlox_xu##S *)pads[0], b = *(const rlox_xu##S *)pads[1];                     \\
                sum += RLOX_##KIND##_FAST(S, a, b);                                                     \\
                bad |= rlox_exp_outside_##S(RLOX_##KIND##_X(a, b));                                     \\
            }                                                                                           \\
            if (rlox_any_##S(bad)) {                                                                    \\
                sum = (rlox_x##S){0};                                                                   \\
                for (i = start; i + RLOX_XLANES_##S <= end; i += RLOX_XLANES_##S) {                     \\
                    a = *(const rlox_xu##S *)(p + i), b = *(const rlox_xu##S *)(q + i);                 \\
                    sum += RLOX_##KIND##_FULL(S, IS, a, b);                                             \\
                }                                                                                       \\
                if (i < end) {                                                                          \\
                    a = *(const rlox_xu##S *)pads[0], b = *(const rlox_xu##S *)pads[1];                 \\
                    sum += RLOX_##KIND##_FULL(S, IS, a, b);                                             \\
                }                                                                                       \\
            }                                                                                           \\
            *(rlox_xu##S *)lanes = sum;                                                                 \\
            for (int step = RLOX_XLANES_##S / 2; step > 0; step /= 2)                                   \\
                for (int k = 0; k < step; k++) lanes[k] += lanes[k + step];                             \\
            total += lanes[0];                                                                          \\
        }                                                                                               \\
        return total;                                                                                   \\
    }
    RLOX_TOKENS(rlox_kl_f64, double, f64, i64, KL)
    RLOX_TOKENS(rlox_kl_f32, float, f32, i32, KL)
    RLOX_TOKENS(rlox_k3_f64, double, f64, i64, K3)
    RLOX_TOKENS(rlox_k3_f32, float, f32, i32, K3)
    #ifndef __clang__
    #pragma GCC pop_options
    #endif
    """
    f64 rlox_kl_f64(Py_ssize_t, const f64*, const f64*) noexcept nogil
    f64 rlox_kl_f32(Py_ssize_t, const f32*, const f32*) noexcept nogil
    f64 rlox_k3_f64(Py_ssize_t, const f64*, const f64*) noexcept nogil
    f64 rlox_k3_f32(Py_ssize_t, const f32*, const f32*) noexcept nogil


cdef inline f64 divergence(bint k3, int type_num, Py_ssize_t n, const void* p, const void* q) noexcept nogil:
    if type_num == cnp.NPY_FLOAT64:
        if k3:
            return rlox_k3_f64(n, <const f64*>p, <const f64*>q)
        return rlox_kl_f64(n, <const f64*>p, <const f64*>q)
    if k3:
        return rlox_k3_f32(n, <const f32*>p, <const f32*>q)
    return rlox_kl_f32(n, <const f32*>p, <const f32*>q)


cdef void sequences(bint k3, int type_num, Py_ssize_t n, Py_ssize_t length, const i64* lengths, const char* p,
                    const char* q, void* out) noexcept nogil:
    """Compute one sum per sequence; `lengths` is NULL if every sequence has full length."""
    cdef Py_ssize_t i
    cdef Py_ssize_t stride = length * (8 if type_num == cnp.NPY_FLOAT64 else 4)
    cdef f64 sum_
    for i in range(n):
        sum_ = divergence(k3, type_num, length if lengths == NULL else <Py_ssize_t>lengths[i], p + i * stride,
                          q + i * stride)
        if type_num == cnp.NPY_FLOAT64:
            (<f64*>out)[i] = sum_
        else:
            (<f32*>out)[i] = <f32>sum_


cdef object single(str where, bint k3, int type_num, object log_p, object log_q):
    cdef cnp.ndarray p = as_real(log_p, type_num, where, "log_p")
    cdef cnp.ndarray q = as_real(log_q, type_num, where, "log_q")
    if cnp.PyArray_NDIM(p) != 1:
        raise ValueError(f"{where}: log_p must be 1-D (T,), got shape {(<object>p).shape}")
    same_shape(q, p, where, "log_q", "log_p")
    cdef Py_ssize_t n = cnp.PyArray_DIM(p, 0)
    cdef const void* p_data = cnp.PyArray_DATA(p)
    cdef const void* q_data = cnp.PyArray_DATA(q)
    cdef f64 result
    if n <= 8192:  # releasing the GIL would cost more than it gains
        return divergence(k3, type_num, n, p_data, q_data)
    with nogil:
        result = divergence(k3, type_num, n, p_data, q_data)
    return result


cdef object batch(str where, bint k3, int type_num, object log_p, object log_q, object seq_len, object lengths):
    cdef cnp.ndarray p = as_real(log_p, type_num, where, "log_p")
    cdef cnp.ndarray q = as_real(log_q, type_num, where, "log_q")
    cdef int ndim = cnp.PyArray_NDIM(p)
    cdef Py_ssize_t length
    cdef cnp.npy_intp n
    cdef cnp.ndarray result
    cdef cnp.ndarray ends = None
    cdef const i64* ends_data = NULL
    if ndim != 1 and ndim != 2:
        raise ValueError(f"{where}: log_p must be 1-D (B * T,) or 2-D (B, T), got shape {(<object>p).shape}")
    same_shape(q, p, where, "log_q", "log_p")
    if ndim == 2:
        n, length = cnp.PyArray_DIM(p, 0), cnp.PyArray_DIM(p, 1)
        if seq_len is not None and as_index(seq_len, where, "seq_len") != length:
            raise ValueError(
                f"{where}: seq_len must be {length} for log_p of shape {(<object>p).shape}, got {seq_len}; "
                "leave it out, or pass flat arrays"
            )
    else:
        if seq_len is None:
            raise TypeError(f"{where}: seq_len must be given for flat log_p, got None")
        wanted = as_index(seq_len, where, "seq_len")
        if wanted < 1 or cnp.PyArray_DIM(p, 0) % wanted:
            raise ValueError(
                f"{where}: seq_len must be at least 1 and divide the length of log_p {cnp.PyArray_DIM(p, 0)}, "
                f"got {wanted}"
            )
        length = wanted
        n = cnp.PyArray_DIM(p, 0) // length
    if lengths is not None:
        import numpy as np

        ends = as_array(lengths, where, "lengths")
        if ends.dtype.kind not in "iu":
            raise TypeError(f"{where}: lengths must be integers, got dtype {ends.dtype}")
        if (<object>ends).shape != (n,):
            raise ValueError(
                f"{where}: lengths must have one entry per sequence, shape ({n},), got {(<object>ends).shape}"
            )
        if n and not (0 <= ends.min() and ends.max() <= length):
            raise ValueError(f"{where}: lengths must lie in [0, {length}], got {ends.min()} to {ends.max()}")
        ends = np.ascontiguousarray(ends, np.int64)
        ends_data = <const i64*>cnp.PyArray_DATA(ends)
    result = cnp.PyArray_EMPTY(1, &n, type_num, 0)
    cdef const char* p_data = <const char*>cnp.PyArray_DATA(p)
    cdef const char* q_data = <const char*>cnp.PyArray_DATA(q)
    cdef void* out = cnp.PyArray_DATA(result)
    if cnp.PyArray_SIZE(p) <= 8192:
        sequences(k3, type_num, n, length, ends_data, p_data, q_data, out)
    else:
        with nogil:
            sequences(k3, type_num, n, length, ends_data, p_data, q_data, out)
    return result


def compute_token_kl(log_p, log_q):
    """Return ``sum(exp(log_p) * (log_p - log_q))`` in float64.

    Parameters
    ----------
    log_p, log_q
        (T,) log-probabilities under the policy and under the reference.

    Returns
    -------
    float
        0.0 for T = 0. A token with log_p = -inf counts 0; log_q = -inf with p > 0 makes the sum inf; NaN
        stays NaN. With only one sampled token per step, the sum is not a divergence and may be negative.

    Raises
    ------
    ValueError
        If `log_p` is not 1-D, or `log_q` has another shape.
    TypeError
        If an argument cannot be converted to numbers.
    """
    return single("compute_token_kl", False, cnp.NPY_FLOAT64, log_p, log_q)


def compute_token_kl_f32(log_p, log_q):
    """Like `compute_token_kl`, with float32 terms (other inputs are converted), summed in float32 by 1024."""
    return single("compute_token_kl_f32", False, cnp.NPY_FLOAT32, log_p, log_q)


def compute_token_kl_schulman(log_p, log_q):
    """Return ``sum(exp(r) - r - 1)`` with ``r = log_q - log_p``, in float64.

    Schulman's k3 estimator of KL(p, q) for tokens drawn from p: http://joschu.net/blog/kl-approx.html.
    Small differences do not suffer from cancellation (r = 1e-9 gives 5e-19).

    Parameters
    ----------
    log_p, log_q
        (T,) log-probabilities under the policy that drew the tokens, and under the reference.

    Returns
    -------
    float
        At least 0; 0.0 for T = 0. Equal entries count 0, even if both are -inf; a single infinite entry makes
        the sum inf; NaN stays NaN.

    Raises
    ------
    ValueError, TypeError
        As for `compute_token_kl`.
    """
    return single("compute_token_kl_schulman", True, cnp.NPY_FLOAT64, log_p, log_q)


def compute_token_kl_schulman_f32(log_p, log_q):
    """Like `compute_token_kl_schulman`, with float32 terms, summed in float32 by 1024."""
    return single("compute_token_kl_schulman_f32", True, cnp.NPY_FLOAT32, log_p, log_q)


def compute_batch_token_kl(log_p, log_q, seq_len=None, *, lengths=None):
    """Return `compute_token_kl` of B sequences at once.

    Parameters
    ----------
    log_p, log_q
        (B * T,), one sequence after the other, or (B, T).
    seq_len
        T; optional for (B, T).
    lengths
        (B,) integers in [0, T]: only the first `lengths[b]` tokens of sequence b count; the rest is padding
        and is not read.

    Returns
    -------
    numpy.ndarray
        (B,) float64.

    Raises
    ------
    ValueError, TypeError
        As for `compute_token_kl`, and if `seq_len` or `lengths` does not match.
    """
    return batch("compute_batch_token_kl", False, cnp.NPY_FLOAT64, log_p, log_q, seq_len, lengths)


def compute_batch_token_kl_f32(log_p, log_q, seq_len=None, *, lengths=None):
    """Like `compute_batch_token_kl`, with float32 terms; returns (B,) float32."""
    return batch("compute_batch_token_kl_f32", False, cnp.NPY_FLOAT32, log_p, log_q, seq_len, lengths)


def compute_batch_token_kl_schulman(log_p, log_q, seq_len=None, *, lengths=None):
    """Return `compute_token_kl_schulman` of B sequences at once. Arguments as for `compute_batch_token_kl`."""
    return batch("compute_batch_token_kl_schulman", True, cnp.NPY_FLOAT64, log_p, log_q, seq_len, lengths)


def compute_batch_token_kl_schulman_f32(log_p, log_q, seq_len=None, *, lengths=None):
    """Like `compute_batch_token_kl_schulman`, with float32 terms; returns (B,) float32."""
    return batch("compute_batch_token_kl_schulman_f32", True, cnp.NPY_FLOAT32, log_p, log_q, seq_len, lengths)

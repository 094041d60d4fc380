"""V-trace (Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and sec. 4.2).

    rho_t = min(rho_bar, pi/mu)    c_t = min(c_bar, pi/mu)
    delta_t = rho_t (r_t + gamma v'_t - V_t)
    vs_t - V_t = delta_t + gamma c_t (vs_{t+1} - V_{t+1})     (no trace across a boundary)
    pg_t = rho_t (r_t + gamma vs'_t - V_t)

v'_t is 0 where the episode terminated, next_values[t] where a time limit truncated it, else V_{t+1} (at the last
step: bootstrap_value); vs'_t is the same with vs_{t+1} instead of V_{t+1}.
"""

from rlox.kernels.memory import empty

cimport numpy as cnp

from rlox.kernels.advantage.suffix cimport RLOX_LANES_F32, RLOX_LANES_F64, RLOX_SUFFIX
from rlox.kernels.checks cimport as_flags, as_fraction, as_number, as_real, check_apart, check_out, same_shape
from rlox.kernels.outputs cimport fresh
from rlox.kernels.types cimport f32, f64, real, u8
cimport rlox.kernels.vexp

cnp.import_array()


# exp of an array (`RLOX_EXP`), and the recurrence over whole registers (`RLOX_VTRACE`, see suffix.pxd), which
# reads pi/mu from `pg` and writes the advantages there. `carry` holds vs_n - V_n, then vs_0 - V_0.
cdef extern from *:
    """
    #ifndef __clang__
    #pragma GCC push_options
    #pragma GCC optimize("fp-contract=fast")
    #endif
    #define RLOX_EXP(NAME, REAL, S, IS)                                                                 \\
    static void NAME(ptrdiff_t n, const REAL *x, REAL *y) {                                             \\
        REAL padded[RLOX_XLANES_##S] = {0};                                                             \\
        ptrdiff_t i = 0;                                                                                \\
        for (; i + RLOX_XLANES_##S <= n; i += RLOX_XLANES_##S) {                                        \\
            rlox_x##S value = *(const rlox_xu##S *)(x + i);                                             \\
            *(rlox_xu##S *)(y + i) = rlox_exp_full_##S(value);                                          \\
        }                                                                                               \\
        if (i < n) {                                                                                    \\
            memcpy(padded, x + i, (n - i) * sizeof(REAL));                                              \\
            *(rlox_xu##S *)padded = rlox_exp_full_##S(*(const rlox_xu##S *)padded);                     \\
            memcpy(y + i, padded, (n - i) * sizeof(REAL));                                              \\
        }                                                                                               \\
    }
    #if RLOX_SUFFIX
    #define RLOX_VTRACE(NAME, REAL, S, IS, CUT)                                                         \\
    static void NAME(ptrdiff_t n, const REAL *r, const REAL *v, const uint8_t *done,                    \\
                     const uint8_t *cut, const REAL *next, REAL last, REAL gamma, REAL rho_bar,         \\
                     REAL c_bar, REAL lam, REAL *restrict vs, REAL *restrict pg, REAL *carry) {         \\
        RLOX_FUSED                                                                                      \\
        typedef rlox_v##S Real;                                                                         \\
        typedef rlox_u##S Loose;                                                                        \\
        typedef rlox_v##IS Mask;                                                                        \\
        const Real zero = {0}, rhos = zero + rho_bar, cs = zero + c_bar;                                \\
        REAL x = *carry;                                                                                \\
        for (ptrdiff_t t = n - RLOX_LANES_##S; t >= 0; t -= RLOX_LANES_##S) {                           \\
            Real ratio = *(const Loose *)(pg + t), value = *(const Loose *)(v + t);                     \\
            Mask off = rlox_off_u8_##S(done + t), on = off;                                             \\
            Mask after = t == n - RLOX_LANES_##S ? (Mask)rlox_up_##S(value, zero + last)                \\
                                                 : (Mask)*(const Loose *)(v + t + 1);                   \\
            if (CUT) {                                                                                  \\
                Mask whole = rlox_off_u8_##S(cut + t);                                                  \\
                after = (after & whole) | ((Mask)*(const Loose *)(next + t) & ~whole);                  \\
                on &= whole;                                                                            \\
            }                                                                                           \\
            Mask big = ratio > rhos, cuts = ratio > cs;  /* false for NaN, which stays */               \\
            Real rho = (Real)(((Mask)ratio & ~big) | ((Mask)rhos & big));                               \\
            Real c = (Real)((((Mask)ratio & ~cuts) | ((Mask)cs & cuts)) & on);                          \\
            Real delta = rho * (*(const Loose *)(r + t) + gamma * (Real)(after & off) - value);         \\
            Real e = delta, p = (gamma * lam) * c;                                                      \\
            rlox_suffix_##S(&e, &p);                                                                    \\
            Real a = e + p * x;                                                                         \\
            Real later = (Real)((Mask)rlox_up_##S(a, zero + x) & on);                                   \\
            x = e[0] + p[0] * x;                                                                        \\
            *(Loose *)(vs + t) = a + value;                                                             \\
            *(Loose *)(pg + t) = delta + rho * (gamma * later);                                         \\
        }                                                                                               \\
        *carry = x;                                                                                     \\
    }
    #else
    #define RLOX_VTRACE(NAME, REAL, S, IS, CUT)                                                         \\
    static void NAME(ptrdiff_t n, const REAL *r, const REAL *v, const uint8_t *done,                    \\
                     const uint8_t *cut, const REAL *next, REAL last, REAL gamma, REAL rho_bar,         \\
                     REAL c_bar, REAL lam, REAL *vs, REAL *pg, REAL *carry) {}
    #endif
    RLOX_EXP(rlox_exp_array_f64, double, f64, i64)
    RLOX_EXP(rlox_exp_array_f32, float, f32, i32)
    RLOX_VTRACE(rlox_vtrace_f64, double, f64, i64, 0)
    RLOX_VTRACE(rlox_vtrace_f64_cut, double, f64, i64, 1)
    RLOX_VTRACE(rlox_vtrace_f32, float, f32, i32, 0)
    RLOX_VTRACE(rlox_vtrace_f32_cut, float, f32, i32, 1)
    #ifndef __clang__
    #pragma GCC pop_options
    #endif

    /* One step of all columns; `trace` holds vs_{t+1} - V_{t+1}, then vs_t - V_t. */
    #define RLOX_VTRACE_ROW(NAME, REAL)                                                                 \\
    static void NAME(ptrdiff_t n, const REAL *__restrict__ r, const REAL *__restrict__ v,               \\
                     const uint8_t *__restrict__ done, const uint8_t *__restrict__ cut,                 \\
                     const REAL *__restrict__ next, const REAL *__restrict__ v_after, REAL gamma,       \\
                     REAL rho_bar, REAL c_bar, REAL lam, REAL *__restrict__ trace,                      \\
                     REAL *__restrict__ vs, REAL *__restrict__ pg) {                                    \\
        for (ptrdiff_t i = 0; i < n; i++) {                                                             \\
            REAL ratio = pg[i];                                                                         \\
            REAL rho = ratio > rho_bar ? rho_bar : ratio, c = ratio > c_bar ? c_bar : ratio;            \\
            REAL after = cut[i] ? next[i] : v_after[i];                                                 \\
            REAL later = done[i] | cut[i] ? 0 : gamma * trace[i];                                       \\
            REAL delta = rho * (r[i] + gamma * (done[i] ? 0 : after) - v[i]);                           \\
            REAL x = delta + lam * c * later;                                                           \\
            trace[i] = x;                                                                               \\
            vs[i] = v[i] + x;                                                                           \\
            pg[i] = delta + rho * later;                                                                \\
        }                                                                                               \\
    }
    RLOX_VTRACE_ROW(rlox_vtrace_row_f64, double)
    RLOX_VTRACE_ROW(rlox_vtrace_row_f32, float)
    """
    void rlox_exp_array_f64(Py_ssize_t, const f64*, f64*) noexcept nogil
    void rlox_exp_array_f32(Py_ssize_t, const f32*, f32*) noexcept nogil
    void rlox_vtrace_f64(Py_ssize_t, const f64*, const f64*, const u8*, const u8*, const f64*, f64, f64,
                         f64, f64, f64, f64*, f64*, f64*) noexcept nogil
    void rlox_vtrace_f64_cut(Py_ssize_t, const f64*, const f64*, const u8*, const u8*, const f64*, f64,
                             f64, f64, f64, f64, f64*, f64*, f64*) noexcept nogil
    void rlox_vtrace_f32(Py_ssize_t, const f32*, const f32*, const u8*, const u8*, const f32*, f32, f32,
                         f32, f32, f32, f32*, f32*, f32*) noexcept nogil
    void rlox_vtrace_f32_cut(Py_ssize_t, const f32*, const f32*, const u8*, const u8*, const f32*, f32,
                             f32, f32, f32, f32, f32*, f32*, f32*) noexcept nogil
    void rlox_vtrace_row_f64(Py_ssize_t, const f64*, const f64*, const u8*, const u8*, const f64*,
                             const f64*, f64, f64, f64, f64, f64*, f64*, f64*) noexcept nogil
    void rlox_vtrace_row_f32(Py_ssize_t, const f32*, const f32*, const u8*, const u8*, const f32*,
                             const f32*, f32, f32, f32, f32, f32*, f32*, f32*) noexcept nogil


# Cores. `truncated` is NULL if there are no truncations; `next_values` is not read then.

cdef void trajectory(Py_ssize_t n, const real* log_rhos, const real* rewards, const real* values,
                     const u8* done, const u8* truncated, const real* next_values, real last, real gamma,
                     real rho_bar, real c_bar, real lam, real* vs, real* pg) noexcept nogil:
    cdef Py_ssize_t lanes = RLOX_LANES_F64 if real is f64 else RLOX_LANES_F32
    cdef Py_ssize_t whole = n // lanes * lanes if RLOX_SUFFIX else 0
    cdef Py_ssize_t t
    cdef real x = 0, rho, c, delta, later, ratio, after
    cdef bint cut
    if real is f64:
        rlox_exp_array_f64(n, log_rhos, pg)
    else:
        rlox_exp_array_f32(n, log_rhos, pg)
    for t in range(n - 1, whole - 1, -1):
        ratio = pg[t]
        rho = rho_bar if ratio > rho_bar else ratio
        c = c_bar if ratio > c_bar else ratio
        cut = truncated != NULL and truncated[t] != 0
        after = 0 if done[t] else next_values[t] if cut else last
        later = 0 if done[t] or cut else gamma * x
        delta = rho * (rewards[t] + gamma * after - values[t])
        x = delta + lam * c * later
        last = values[t]
        vs[t] = x + last
        pg[t] = delta + rho * later
    if whole == 0:
        return
    if real is f64:
        if truncated == NULL:
            rlox_vtrace_f64(whole, rewards, values, done, NULL, NULL, last, gamma, rho_bar, c_bar, lam, vs, pg, &x)
        else:
            rlox_vtrace_f64_cut(whole, rewards, values, done, truncated, next_values, last, gamma, rho_bar,
                                c_bar, lam, vs, pg, &x)
    else:
        if truncated == NULL:
            rlox_vtrace_f32(whole, rewards, values, done, NULL, NULL, last, gamma, rho_bar, c_bar, lam, vs, pg, &x)
        else:
            rlox_vtrace_f32_cut(whole, rewards, values, done, truncated, next_values, last, gamma, rho_bar,
                                c_bar, lam, vs, pg, &x)


cdef void sweep(Py_ssize_t n_steps, Py_ssize_t n, const real* log_rhos, const real* rewards,
                const real* values, const u8* done, const u8* truncated, const real* next_values,
                const real* last, real gamma, real rho_bar, real c_bar, real lam, real* x,
                real* vs, real* pg) noexcept nogil:
    """Process time-major data: rows from the last to the first, each vectorised over its columns."""
    cdef Py_ssize_t t, at
    if real is f64:
        rlox_exp_array_f64(n_steps * n, log_rhos, pg)
    else:
        rlox_exp_array_f32(n_steps * n, log_rhos, pg)
    for t in range(n_steps - 1, -1, -1):
        at = t * n
        if real is f64:
            rlox_vtrace_row_f64(n, rewards + at, values + at, done + at, truncated + at, next_values + at,
                                last, gamma, rho_bar, c_bar, lam, x, vs + at, pg + at)
        else:
            rlox_vtrace_row_f32(n, rewards + at, values + at, done + at, truncated + at, next_values + at,
                                last, gamma, rho_bar, c_bar, lam, x, vs + at, pg + at)
        last = values + at


cdef inline void run(bint columns, int type_num, Py_ssize_t length, Py_ssize_t n, const void* log_rhos,
                     const void* rewards, const void* values, const u8* done, const u8* truncated,
                     const void* next_values, const void* last, f64 gamma, f64 rho_bar, f64 c_bar, f64 lam,
                     void* x, void* vs, void* pg) noexcept nogil:
    if type_num == cnp.NPY_FLOAT64:
        if columns:
            sweep[f64](length, n, <const f64*>log_rhos, <const f64*>rewards, <const f64*>values, done,
                       truncated, <const f64*>next_values, <const f64*>last, gamma, rho_bar, c_bar, lam, <f64*>x,
                       <f64*>vs, <f64*>pg)
        else:
            trajectory[f64](length, <const f64*>log_rhos, <const f64*>rewards, <const f64*>values, done,
                            truncated, <const f64*>next_values, (<const f64*>last)[0], gamma, rho_bar, c_bar, lam,
                            <f64*>vs, <f64*>pg)
    else:
        if columns:
            sweep[f32](length, n, <const f32*>log_rhos, <const f32*>rewards, <const f32*>values, done,
                       truncated, <const f32*>next_values, <const f32*>last, <f32>gamma, <f32>rho_bar,
                       <f32>c_bar, <f32>lam, <f32*>x, <f32*>vs, <f32*>pg)
        else:
            trajectory[f32](length, <const f32*>log_rhos, <const f32*>rewards, <const f32*>values, done,
                            truncated, <const f32*>next_values, (<const f32*>last)[0], <f32>gamma,
                            <f32>rho_bar, <f32>c_bar, <f32>lam, <f32*>vs, <f32*>pg)


# Wrapper.

cdef f64 as_bar(object value, str name) except -1:
    cdef f64 number = as_number(value, "compute_vtrace", name)
    if not number >= 0.0:
        raise ValueError(f"compute_vtrace: {name} must be at least 0 (inf: no clipping), got {number}")
    return number


def compute_vtrace(log_rhos, rewards, values, dones, bootstrap_value, gamma, rho_bar=1.0, c_bar=1.0, *,
                   truncated=None, next_values=None, gae_lambda=1.0, out=None):
    """Estimate V-trace targets and policy-gradient advantages from off-policy data.

    Computes in float32 if `log_rhos` is a float32 array, else in float64; other arguments are converted.

    Parameters
    ----------
    log_rhos
        (T,) or time-major (T, N): log pi(a_t|s_t) - log mu(a_t|s_t), target over behaviour policy.
    rewards, values
        r_t and V(s_t), of the same shape.
    dones
        Terminations, 0 or 1 as bool, uint8 or float: nothing bootstraps across them.
    bootstrap_value
        V of the observation after the last step: a number, or (N,) for (T, N); not used where that step is
        done or truncated.
    gamma
        Discount, in [0, 1].
    rho_bar, c_bar
        Values >= 0 at which the ratios in delta and in the trace are clipped; inf does not clip. rho_bar determines
        what the targets converge to (inf: the value of pi), c_bar how fast.
    truncated
        Truncations by a time limit, 0 or 1: the trace stops, and the step bootstraps from `next_values`.
    next_values
        V of the true next observation; read only where truncated and not done.
    gae_lambda
        Decay of the trace in [0, 1]: its coefficients are ``gae_lambda * min(c_bar, ratio)``.
    out
        Arrays (vs, pg_advantages) to write to, C-contiguous. They must share no memory with the inputs.

    Returns
    -------
    vs, pg_advantages
        The value targets and ``rho_t (r_t + gamma vs'_t - V_t)``. If log_rhos is 0 and nothing is clipped below 1,
        ``vs - values`` is GAE with the same gae_lambda. NaN or infinity in the ratio, reward or value of a step spreads
        to that step and to the earlier steps of its episode, and without an axis of environments to earlier episodes.

    Raises
    ------
    ValueError
        For shapes that differ, gamma or gae_lambda outside [0, 1], a negative or NaN rho_bar or c_bar, flags other
        than 0 and 1, truncated without next_values, or an unusable `out`.
    TypeError
        If an argument cannot be converted to numbers.

    References
    ----------
    Espeholt et al. 2018, "IMPALA: Scalable distributed deep-RL with importance weighted actor-learner
    architectures", arXiv:1802.01561, eq. 1 and sec. 4.2.
    """
    cdef str where = "compute_vtrace"
    cdef int type_num = cnp.NPY_FLOAT64
    if isinstance(log_rhos, cnp.ndarray) and cnp.PyArray_TYPE(<cnp.ndarray>log_rhos) == cnp.NPY_FLOAT32:
        type_num = cnp.NPY_FLOAT32
    cdef f64 gamma_ = as_fraction(gamma, where, "gamma")
    cdef f64 rho_bar_ = as_bar(rho_bar, "rho_bar")
    cdef f64 c_bar_ = as_bar(c_bar, "c_bar")
    cdef f64 lam_ = as_fraction(gae_lambda, where, "gae_lambda")
    cdef cnp.ndarray l = as_real(log_rhos, type_num, where, "log_rhos")
    cdef int ndim = cnp.PyArray_NDIM(l)
    if ndim != 1 and ndim != 2:
        raise ValueError(f"{where}: log_rhos must be 1-D (T,) or 2-D (T, N), got shape {(<object>l).shape}")
    cdef cnp.ndarray r = as_real(rewards, type_num, where, "rewards")
    cdef cnp.ndarray v = as_real(values, type_num, where, "values")
    cdef cnp.ndarray d = as_flags(dones, where, "dones")
    cdef cnp.ndarray cut = None, nexts = None, last = None, trace = None
    cdef cnp.ndarray vs, pg
    same_shape(r, l, where, "rewards", "log_rhos")
    same_shape(v, l, where, "values", "log_rhos")
    same_shape(d, l, where, "dones", "log_rhos")
    if truncated is not None:
        if next_values is None:
            raise ValueError(
                f"{where}: next_values must be given with truncated (the values of the true final "
                "observations), got None"
            )
        cut = as_flags(truncated, where, "truncated")
        same_shape(cut, l, where, "truncated", "log_rhos")
        nexts = as_real(next_values, type_num, where, "next_values")
        same_shape(nexts, l, where, "next_values", "log_rhos")

    cdef Py_ssize_t length = cnp.PyArray_DIM(l, 0)
    cdef Py_ssize_t n = 1
    cdef f64 last64 = 0.0
    cdef f32 last32 = 0.0
    cdef void* last_data
    if ndim == 1:
        if isinstance(bootstrap_value, cnp.ndarray) and cnp.PyArray_SIZE(<cnp.ndarray>bootstrap_value) == 1:
            bootstrap_value = bootstrap_value.item()
        last64 = as_number(bootstrap_value, where, "bootstrap_value")
        last32 = <f32>last64
        last_data = <void*>&last64 if type_num == cnp.NPY_FLOAT64 else <void*>&last32
    else:
        n = cnp.PyArray_DIM(l, 1)
        last = as_real(bootstrap_value, type_num, where, "bootstrap_value")
        if cnp.PyArray_NDIM(last) != 1 or cnp.PyArray_DIM(last, 0) != n:
            raise ValueError(
                f"{where}: bootstrap_value must have one entry per column, shape ({n},), got "
                f"{(<object>last).shape}"
            )
        last_data = cnp.PyArray_DATA(last)
        trace = cnp.PyArray_ZEROS(1, cnp.PyArray_DIMS(l) + 1, type_num, 0)
        if cut is None:  # the row loop always reads the flags: data without any is too rare for a second loop
            cut = cnp.PyArray_ZEROS(2, cnp.PyArray_DIMS(l), cnp.NPY_UINT8, 0)

    if out is None:
        vs = fresh(empty, ndim, cnp.PyArray_DIMS(l), type_num)
        pg = fresh(empty, ndim, cnp.PyArray_DIMS(l), type_num)
        out = (vs, pg)
    else:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"{where}: out must be a tuple (vs, pg_advantages), got {out!r}")
        dtype = "float32" if type_num == cnp.NPY_FLOAT32 else "float64"
        shape = (<object>l).shape
        check_out(out[0], type_num, dtype, shape, where, "out[0]")
        check_out(out[1], type_num, dtype, shape, where, "out[1]")
        vs, pg = out
        check_apart(vs, pg, (l, r, v, d, last, cut, nexts), where)

    cdef const u8* cut_data = NULL
    if cut is not None:
        cut_data = <const u8*>cnp.PyArray_DATA(cut)
    cdef const void* l_data = cnp.PyArray_DATA(l)
    cdef const void* r_data = cnp.PyArray_DATA(r)
    cdef const void* v_data = cnp.PyArray_DATA(v)
    cdef const u8* d_data = <const u8*>cnp.PyArray_DATA(d)
    # Without truncations, next_values is not read, and without columns, the trace is a register: then any array
    # serves as a placeholder.
    cdef const void* nexts_data = cnp.PyArray_DATA(v if nexts is None else nexts)
    cdef void* vs_data = cnp.PyArray_DATA(vs)
    cdef void* pg_data = cnp.PyArray_DATA(pg)
    cdef void* trace_data = cnp.PyArray_DATA(vs if trace is None else trace)
    if cnp.PyArray_SIZE(l) <= 4096:  # releasing the GIL would cost more than it gains
        run(ndim == 2, type_num, length, n, l_data, r_data, v_data, d_data, cut_data, nexts_data, last_data,
            gamma_, rho_bar_, c_bar_, lam_, trace_data, vs_data, pg_data)
    else:
        with nogil:
            run(ndim == 2, type_num, length, n, l_data, r_data, v_data, d_data, cut_data, nexts_data,
                last_data, gamma_, rho_bar_, c_bar_, lam_, trace_data,
                vs_data, pg_data)
    return out

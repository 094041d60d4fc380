"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma * v'_t - v_t
    A_t     = delta_t + gamma * lam * A_{t+1}     (no trace across a boundary)

v'_t is 0 where the episode terminated, next_values[t] where a time limit truncated it, else v_{t+1} (at the last
step: last_value). Terminations, truncations and the values of the true next observations are separate arguments, so
a truncated episode never bootstraps from the first observation of the next episode.
"""

from rlox.kernels.memory import empty

cimport numpy as cnp

from rlox.kernels.advantage.suffix cimport RLOX_LANES_F32, RLOX_LANES_F64, RLOX_SUFFIX
from rlox.kernels.checks cimport (
    as_flags, as_fraction, as_index, as_number, as_real, check_apart, check_out, same_shape, to_flags,
)
from rlox.kernels.outputs cimport fresh
from rlox.kernels.types cimport f32, f64, real, u8

cnp.import_array()


# The recurrence over whole registers (`RLOX_GAE`, see suffix.pxd) and for one row of the time-major form
# (`RLOX_ROW`). `next` and `cut` are read only with CUT, and `wrong` stays 0 for byte flags.
cdef extern from *:
    """
    #if RLOX_SUFFIX
    #ifndef __clang__
    #pragma GCC push_options
    #pragma GCC optimize("fp-contract=fast")
    #endif
    /* GAE over whole registers, from the last of the `n` steps (a multiple of the lanes) to the first. `last`
       is the value after them; `carry` holds A_n, then A_0. Returns whether every flag was 0 or 1. */
    #define RLOX_GAE(NAME, REAL, S, IS, FLAG, FS, CUT)                                                  \\
    static int NAME(ptrdiff_t n, const REAL *r, const REAL *v, const FLAG *done, const uint8_t *cut,    \\
                    const REAL *next, REAL last, REAL gamma, REAL decay, REAL *restrict advantages,                \\
                    REAL *restrict returns, REAL *carry) {                                              \\
        RLOX_FUSED                                                                                      \\
        typedef rlox_v##S Real;                                                                         \\
        typedef rlox_u##S Loose;                                                                        \\
        typedef rlox_v##IS Mask;                                                                        \\
        const Real zero = {0};                                                                          \\
        const Mask decays = (Mask)(zero + decay);                                                       \\
        REAL x = *carry;                                                                                \\
        Mask wrong = (Mask)zero;                                                                        \\
        for (ptrdiff_t t = n - RLOX_LANES_##S; t >= 0; t -= RLOX_LANES_##S) {                           \\
            /* Five streams are more than the hardware prefetches: 10 to 25 % faster at any size. */    \\
            ptrdiff_t ahead = t - 32 * RLOX_LANES_##S;                                                  \\
            __builtin_prefetch(r + ahead);                                                              \\
            __builtin_prefetch(v + ahead);                                                              \\
            __builtin_prefetch(done + ahead);                                                           \\
            __builtin_prefetch(advantages + ahead, 1);                                                  \\
            __builtin_prefetch(returns + ahead, 1);                                                     \\
            Mask off = rlox_off_##FS##_##S(done + t);                                                   \\
            RLOX_WRONG_##FS(Loose, done + t, off)                                                       \\
            Real value = *(const Loose *)(v + t);                                                       \\
            Mask after = t == n - RLOX_LANES_##S ? (Mask)rlox_up_##S(value, zero + last)                \\
                                                 : (Mask)*(const Loose *)(v + t + 1);                   \\
            Mask on = off;                                                                              \\
            if (CUT) {                                                                                  \\
                Mask whole = rlox_off_u8_##S(cut + t);                                                  \\
                after = (after & whole) | ((Mask)*(const Loose *)(next + t) & ~whole);                  \\
                on &= whole;                                                                            \\
            }                                                                                           \\
            Real e = *(const Loose *)(r + t) + gamma * (Real)(after & off) - value;                     \\
            Real p = (Real)(on & decays);                                                               \\
            rlox_suffix_##S(&e, &p);                                                                    \\
            Real a = e + p * x;                                                                         \\
            x = e[0] + p[0] * x;                                                                        \\
            *(Loose *)(advantages + t) = a;                                                             \\
            *(Loose *)(returns + t) = a + value;                                                        \\
        }                                                                                               \\
        *carry = x;                                                                                     \\
        for (int i = 1; i < RLOX_LANES_##S; i++) wrong[0] |= wrong[i];                                  \\
        return !wrong[0];                                                                               \\
    }
    #ifndef __clang__
    #define RLOX_POP _Pragma("GCC pop_options")
    #else
    #define RLOX_POP
    #endif
    #else
    #define RLOX_GAE(NAME, REAL, S, IS, FLAG, FS, CUT)                                                  \\
    static int NAME(ptrdiff_t n, const REAL *r, const REAL *v, const FLAG *done, const uint8_t *cut,    \\
                    const REAL *next, REAL last, REAL gamma, REAL decay, REAL *advantages,              \\
                    REAL *returns, REAL *carry) { return 1; }
    #define RLOX_POP
    #endif
    RLOX_GAE(rlox_gae_f64_u8, double, f64, i64, uint8_t, u8, 0)
    RLOX_GAE(rlox_gae_f64_f64, double, f64, i64, double, f64, 0)
    RLOX_GAE(rlox_gae_f64_cut, double, f64, i64, uint8_t, u8, 1)
    RLOX_GAE(rlox_gae_f32_u8, float, f32, i32, uint8_t, u8, 0)
    RLOX_GAE(rlox_gae_f32_f32, float, f32, i32, float, f32, 0)
    RLOX_GAE(rlox_gae_f32_cut, float, f32, i32, uint8_t, u8, 1)
    RLOX_POP

    #define RLOX_ROW(NAME, REAL, CUT)                                                                   \\
    static void NAME(ptrdiff_t n, const REAL *__restrict__ r, const REAL *__restrict__ v,               \\
                     const uint8_t *__restrict__ done, const uint8_t *__restrict__ cut,                 \\
                     const REAL *__restrict__ next, const REAL *__restrict__ v_after,                   \\
                     const REAL *__restrict__ a_after, REAL gamma, REAL decay,                          \\
                     REAL *__restrict__ advantages, REAL *__restrict__ returns) {                       \\
        for (ptrdiff_t i = 0; i < n; i++) {                                                             \\
            REAL after = CUT && cut[i] ? next[i] : v_after[i];                                          \\
            REAL trace = done[i] | (CUT && cut[i]) ? 0 : decay;                                         \\
            REAL a = r[i] + gamma * (done[i] ? 0 : after) - v[i] + trace * a_after[i];                  \\
            advantages[i] = a;                                                                          \\
            returns[i] = a + v[i];                                                                      \\
        }                                                                                               \\
    }
    RLOX_ROW(rlox_row_f64, double, 0)
    RLOX_ROW(rlox_row_f64_cut, double, 1)
    RLOX_ROW(rlox_row_f32, float, 0)
    RLOX_ROW(rlox_row_f32_cut, float, 1)
    """
    int rlox_gae_f64_u8(Py_ssize_t, const f64*, const f64*, const u8*, const u8*, const f64*,
                        f64, f64, f64, f64*, f64*, f64*) noexcept nogil
    int rlox_gae_f64_f64(Py_ssize_t, const f64*, const f64*, const f64*, const u8*, const f64*,
                         f64, f64, f64, f64*, f64*, f64*) noexcept nogil
    int rlox_gae_f64_cut(Py_ssize_t, const f64*, const f64*, const u8*, const u8*, const f64*,
                         f64, f64, f64, f64*, f64*, f64*) noexcept nogil
    int rlox_gae_f32_u8(Py_ssize_t, const f32*, const f32*, const u8*, const u8*, const f32*,
                        f32, f32, f32, f32*, f32*, f32*) noexcept nogil
    int rlox_gae_f32_f32(Py_ssize_t, const f32*, const f32*, const f32*, const u8*, const f32*,
                         f32, f32, f32, f32*, f32*, f32*) noexcept nogil
    int rlox_gae_f32_cut(Py_ssize_t, const f32*, const f32*, const u8*, const u8*, const f32*,
                         f32, f32, f32, f32*, f32*, f32*) noexcept nogil
    void rlox_row_f64(Py_ssize_t, const f64*, const f64*, const u8*, const u8*, const f64*,
                      const f64*, const f64*, f64, f64, f64*, f64*) noexcept nogil
    void rlox_row_f64_cut(Py_ssize_t, const f64*, const f64*, const u8*, const u8*, const f64*,
                          const f64*, const f64*, f64, f64, f64*, f64*) noexcept nogil
    void rlox_row_f32(Py_ssize_t, const f32*, const f32*, const u8*, const u8*, const f32*,
                      const f32*, const f32*, f32, f32, f32*, f32*) noexcept nogil
    void rlox_row_f32_cut(Py_ssize_t, const f32*, const f32*, const u8*, const u8*, const f32*,
                          const f32*, const f32*, f32, f32, f32*, f32*) noexcept nogil


# Cores. `truncated` is NULL if there are no truncations; `next_values` is not read then.

cdef inline real bootstrap(real next_value, const u8* done, const u8* truncated,
                           const real* next_values, Py_ssize_t t) noexcept nogil:
    """Return v'_t. Uses selects instead of products, because values that must not count may be NaN."""
    if truncated != NULL and truncated[t]:
        next_value = next_values[t]
    return 0 if done[t] else next_value


cdef inline real trace(real decay, const u8* done, const u8* truncated, Py_ssize_t t) noexcept nogil:
    """Return gamma * lam, or 0 where the trace stops."""
    return 0 if done[t] or (truncated != NULL and truncated[t]) else decay


cdef real scan(Py_ssize_t n_steps, const real* rewards, const real* values, const u8* done,
               const u8* truncated, const real* next_values, real next_value, real advantage,
               real gamma, real decay, real* advantages, real* returns) noexcept nogil:
    """Process part of a trajectory, four steps at a time; return its first advantage.

    A_t = delta_t + c_t * A_{t+1} is a dependency chain of one multiply and one add per step. Within four steps, e and
    p with A_i = e_i + p_i * A_{t+4} do not depend on the chain, so it advances only once per four steps.
    """
    cdef Py_ssize_t t = n_steps
    cdef Py_ssize_t j
    cdef real[4] e
    cdef real[4] p
    cdef real sum_, product, c
    while t & 3:
        t -= 1
        advantage = (rewards[t] + gamma * bootstrap(next_value, done, truncated, next_values, t)
                     - values[t] + trace(decay, done, truncated, t) * advantage)
        next_value = values[t]
        advantages[t] = advantage
        returns[t] = advantage + values[t]
    while t > 0:
        t -= 4
        sum_ = 0
        product = 1
        for j in range(3, -1, -1):
            c = trace(decay, done, truncated, t + j)
            sum_ = (rewards[t + j]
                    + gamma * bootstrap(next_value, done, truncated, next_values, t + j)
                    - values[t + j] + c * sum_)
            product = product * c
            next_value = values[t + j]
            e[j] = sum_
            p[j] = product
        for j in range(4):
            sum_ = e[j] + p[j] * advantage
            advantages[t + j] = sum_
            returns[t + j] = sum_ + values[t + j]
        advantage = e[0] + p[0] * advantage
    return advantage


cdef inline const u8* after(const u8* flags, Py_ssize_t n) noexcept nogil:
    """Return flags + n, or NULL for NULL, which means that there are no flags."""
    if flags == NULL:
        return NULL
    return flags + n


cdef bint trajectory(Py_ssize_t n_steps, const real* rewards, const real* values, const u8* done,
                     const real* float_done, const u8* truncated, const real* next_values,
                     real last_value, real gamma, real decay, real* advantages,
                     real* returns) noexcept nogil:
    """Process one trajectory. Return False if a flag in `float_done` (read if `done` is NULL) is neither 0 nor 1."""
    cdef Py_ssize_t lanes = RLOX_LANES_F64 if real is f64 else RLOX_LANES_F32
    cdef Py_ssize_t whole = n_steps // lanes * lanes if RLOX_SUFFIX else 0
    cdef Py_ssize_t t = n_steps
    cdef Py_ssize_t length
    cdef real advantage = 0
    cdef real next_value = last_value
    cdef bint good = True
    cdef u8[256] flags
    if done != NULL:
        advantage = scan(t - whole, rewards + whole, values + whole, done + whole, after(truncated, whole),
                         next_values + whole, next_value, advantage, gamma, decay, advantages + whole,
                         returns + whole)
        if t > whole:
            next_value = values[whole]
    else:
        while t > whole:
            length = min(t - whole, 256)
            t -= length
            good &= to_flags(float_done + t, length, flags)
            advantage = scan(length, rewards + t, values + t, flags, NULL, next_values, next_value,
                             advantage, gamma, decay, advantages + t, returns + t)
            next_value = values[t]
    if whole == 0:
        return good
    if real is f64:
        if done == NULL:
            good &= rlox_gae_f64_f64(whole, rewards, values, float_done, NULL, NULL, next_value, gamma, decay,
                                     advantages, returns, &advantage)
        elif truncated == NULL:
            rlox_gae_f64_u8(whole, rewards, values, done, NULL, NULL, next_value, gamma, decay, advantages, returns,
                            &advantage)
        else:
            rlox_gae_f64_cut(whole, rewards, values, done, truncated, next_values, next_value, gamma, decay,
                             advantages, returns, &advantage)
    else:
        if done == NULL:
            good &= rlox_gae_f32_f32(whole, rewards, values, float_done, NULL, NULL, next_value, gamma, decay,
                                     advantages, returns, &advantage)
        elif truncated == NULL:
            rlox_gae_f32_u8(whole, rewards, values, done, NULL, NULL, next_value, gamma, decay, advantages, returns,
                            &advantage)
        else:
            rlox_gae_f32_cut(whole, rewards, values, done, truncated, next_values, next_value, gamma, decay,
                             advantages, returns, &advantage)
    return good


cdef void sweep(Py_ssize_t n_steps, Py_ssize_t n, const real* rewards, const real* values,
                const u8* done, const u8* truncated, const real* next_values,
                const real* last_values, const real* zeros, real gamma, real decay,
                real* advantages, real* returns) noexcept nogil:
    """Process time-major data: rows from the last to the first, each vectorised over the environments."""
    cdef Py_ssize_t t, at
    cdef const real* values_after = last_values
    cdef const real* advantages_after = zeros
    for t in range(n_steps - 1, -1, -1):
        at = t * n
        if real is f64:
            if truncated == NULL:
                rlox_row_f64(n, rewards + at, values + at, done + at, NULL, NULL, values_after,
                             advantages_after, gamma, decay, advantages + at, returns + at)
            else:
                rlox_row_f64_cut(n, rewards + at, values + at, done + at, truncated + at, next_values + at,
                                 values_after, advantages_after, gamma, decay, advantages + at, returns + at)
        else:
            if truncated == NULL:
                rlox_row_f32(n, rewards + at, values + at, done + at, NULL, NULL, values_after,
                             advantages_after, gamma, decay, advantages + at, returns + at)
            else:
                rlox_row_f32_cut(n, rewards + at, values + at, done + at, truncated + at, next_values + at,
                                 values_after, advantages_after, gamma, decay, advantages + at, returns + at)
        values_after = values + at
        advantages_after = advantages + at


cdef bint run(bint time_major, Py_ssize_t n_steps, Py_ssize_t n, const real* rewards,
              const real* values, const u8* done, const real* float_done, const u8* truncated,
              const real* next_values, const real* last_values, const real* zeros, real gamma,
              real decay, real* advantages, real* returns) noexcept nogil:
    cdef Py_ssize_t i, at
    cdef bint good = True
    if time_major:
        sweep(n_steps, n, rewards, values, done, truncated, next_values, last_values, zeros,
              gamma, decay, advantages, returns)
        return True
    for i in range(n):
        at = i * n_steps
        good &= trajectory(n_steps, rewards + at, values + at, after(done, at), float_done + at,
                           after(truncated, at), next_values + at, last_values[i], gamma, decay,
                           advantages + at, returns + at)
    return good


# Wrappers.

cdef (Py_ssize_t, Py_ssize_t) batch_shape(cnp.ndarray rewards, object n_steps,
                                          cnp.ndarray last_values, str where):
    """Return (T, N) of a batch after checking that `n_steps` and `last_values` agree with it."""
    cdef Py_ssize_t size = cnp.PyArray_SIZE(rewards)
    cdef Py_ssize_t length, n
    shape = (<object>rewards).shape
    if cnp.PyArray_NDIM(last_values) != 1:
        raise ValueError(
            f"{where}: last_values must have shape (N,), got {(<object>last_values).shape}"
        )
    if cnp.PyArray_NDIM(rewards) == 2:
        length, n = cnp.PyArray_DIM(rewards, 0), cnp.PyArray_DIM(rewards, 1)
        if n_steps is not None and as_index(n_steps, where, "n_steps") != length:
            raise ValueError(
                f"{where}: n_steps must be {length} for rewards of shape (T, N) = {shape}, got "
                f"{n_steps}; pass None, or flat env-major arrays"
            )
    else:
        if n_steps is None:
            raise TypeError(f"{where}: n_steps must be given for flat (env-major) rewards, got None")
        wanted = as_index(n_steps, where, "n_steps")
        if wanted < 0 or (size % wanted if wanted else size):
            raise ValueError(
                f"{where}: n_steps must divide the length of the flat rewards {size}, got {wanted}"
            )
        length = wanted
        n = size // length if length else cnp.PyArray_DIM(last_values, 0)
    if cnp.PyArray_DIM(last_values, 0) != n:
        raise ValueError(
            f"{where}: last_values must have one entry per environment, shape ({n},), got "
            f"{(<object>last_values).shape}"
        )
    return length, n


cdef inline bint run_any(int type_num, bint time_major, Py_ssize_t n_steps, Py_ssize_t n,
                         const void* rewards, const void* values, const u8* done, const void* float_done,
                         const u8* truncated, const void* next_values, const void* last_values,
                         const void* zeros, f64 gamma, f64 decay, void* advantages,
                         void* returns) noexcept nogil:
    if type_num == cnp.NPY_FLOAT64:
        return run[f64](time_major, n_steps, n, <const f64*>rewards, <const f64*>values, done,
                        <const f64*>float_done, truncated, <const f64*>next_values,
                        <const f64*>last_values, <const f64*>zeros, gamma, decay, <f64*>advantages,
                        <f64*>returns)
    return run[f32](time_major, n_steps, n, <const f32*>rewards, <const f32*>values, done,
                    <const f32*>float_done, truncated, <const f32*>next_values, <const f32*>last_values,
                    <const f32*>zeros, <f32>gamma, <f32>decay, <f32*>advantages, <f32*>returns)


cdef tuple estimate(str where, int type_num, object rewards, object values, object dones,
                    object last, bint single, object n_steps, object gamma, object lam,
                    object truncated, object next_values, object out):
    """Check the arguments of one of the three functions, allocate the results, and run the core."""
    cdef f64 gamma_ = as_fraction(gamma, where, "gamma")
    cdef f64 decay = gamma_ * as_fraction(lam, where, "lam")
    cdef cnp.ndarray r = as_real(rewards, type_num, where, "rewards")
    cdef int ndim = cnp.PyArray_NDIM(r)
    cdef cnp.ndarray v, d, advantages, returns
    cdef cnp.ndarray last_values = None, cut = None, nexts = None, zeros = None
    cdef bint time_major = ndim == 2
    cdef Py_ssize_t length, n
    cdef f64 single_last = 0.0
    cdef void* last_data
    if ndim != 1 and (single or ndim != 2):
        raise ValueError(
            f"{where}: rewards must be 1-D{'' if single else ' (env-major) or 2-D (T, N)'}, "
            f"got shape {(<object>r).shape}" + ("; use compute_gae_batched" if single and ndim == 2 else "")
        )
    v = as_real(values, type_num, where, "values")
    same_shape(v, r, where, "values", "rewards")
    # Float flags of the documented form are read directly, which saves a pass over them.
    cdef bint floats = (
        not time_major and truncated is None and isinstance(dones, cnp.ndarray)
        and cnp.PyArray_TYPE(<cnp.ndarray>dones) == type_num and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>dones)
    )
    d = dones if floats else as_flags(dones, where, "dones")
    same_shape(d, r, where, "dones", "rewards")
    if truncated is not None:
        if next_values is None:
            raise ValueError(
                f"{where}: next_values must be given with truncated (the values of the true final "
                "observations), got None"
            )
        cut = as_flags(truncated, where, "truncated")
        same_shape(cut, r, where, "truncated", "rewards")
        nexts = as_real(next_values, type_num, where, "next_values")
        same_shape(nexts, r, where, "next_values", "rewards")

    if single:
        length, n = cnp.PyArray_DIM(r, 0), 1
        single_last = as_number(last, where, "last_value")
        last_data = &single_last
    else:
        last_values = as_real(last, type_num, where, "last_values")
        length, n = batch_shape(r, n_steps, last_values, where)
        last_data = cnp.PyArray_DATA(last_values)

    if out is None:
        advantages = fresh(empty, ndim, cnp.PyArray_DIMS(r), type_num)
        returns = fresh(empty, ndim, cnp.PyArray_DIMS(r), type_num)
        out = (advantages, returns)
    else:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"{where}: out must be a tuple (advantages, returns), got {out!r}")
        dtype = "float32" if type_num == cnp.NPY_FLOAT32 else "float64"
        shape = (<object>r).shape
        check_out(out[0], type_num, dtype, shape, where, "out[0]")
        check_out(out[1], type_num, dtype, shape, where, "out[1]")
        advantages, returns = out
        check_apart(advantages, returns, (r, v, d, last_values, cut, nexts), where)
    if time_major:
        zeros = cnp.PyArray_ZEROS(1, cnp.PyArray_DIMS(r) + 1, type_num, 0)

    cdef const void* r_data = cnp.PyArray_DATA(r)
    cdef const void* v_data = cnp.PyArray_DATA(v)
    cdef const u8* done = NULL
    if not floats:
        done = <const u8*>cnp.PyArray_DATA(d)
    cdef const void* float_done = cnp.PyArray_DATA(d if floats else v)
    # Without truncations, next_values is never read, and only the time-major sweep reads `zeros`: otherwise any array
    # serves as a placeholder.
    cdef const u8* cut_data = NULL
    if cut is not None:
        cut_data = <const u8*>cnp.PyArray_DATA(cut)
    cdef const void* nexts_data = cnp.PyArray_DATA(v if nexts is None else nexts)
    cdef const void* zero_data = cnp.PyArray_DATA(v if zeros is None else zeros)
    cdef void* adv_data = cnp.PyArray_DATA(advantages)
    cdef void* ret_data = cnp.PyArray_DATA(returns)
    cdef bint good
    if cnp.PyArray_SIZE(r) <= 4096:  # a microsecond or two: releasing the GIL would cost more than it gains
        good = run_any(type_num, time_major, length, n, r_data, v_data, done, float_done, cut_data, nexts_data,
                       last_data, zero_data, gamma_, decay, adv_data, ret_data)
    else:
        with nogil:
            good = run_any(type_num, time_major, length, n, r_data, v_data, done, float_done, cut_data,
                           nexts_data, last_data, zero_data, gamma_, decay, adv_data, ret_data)
    if not good:
        as_flags(dones, where, "dones")  # raises
    return out


def compute_gae(rewards, values, dones, last_value, gamma, lam, *, truncated=None, next_values=None,
                out=None):
    """Estimate advantages and returns of one trajectory, in float64.

    Parameters
    ----------
    rewards, values
        (T,) r_t and V(s_t). Other dtypes and layouts are converted.
    dones
        (T,) terminations, 0 or 1 as bool, uint8 or float: nothing bootstraps across them.
    last_value
        V of the observation after the last step; not used if that step is done or truncated.
    gamma, lam
        Discount and GAE's lambda, both in [0, 1]. lam=0 is the TD residual, lam=1 the Monte-Carlo return.
    truncated
        (T,) truncations by a time limit, 0 or 1: the trace stops, and the step bootstraps from `next_values`.
    next_values
        (T,) V of the true next observation; read only where truncated and not done.
    out
        Arrays (advantages, returns) to write to, float64 and C-contiguous. They must share no memory with the inputs.

    Returns
    -------
    advantages, returns
        (T,) float64 each; returns = advantages + values.

    Raises
    ------
    ValueError
        For shapes that differ, gamma or lam outside [0, 1], flags other than 0 and 1, truncated without
        next_values, or an unusable `out`.
    TypeError
        If an argument cannot be converted to numbers.

    References
    ----------
    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation",
    arXiv:1506.02438, eq. 16. Time limits: Pardo et al. 2018, arXiv:1712.00378, sec. 2.3.
    """
    return estimate("compute_gae", cnp.NPY_FLOAT64, rewards, values, dones, last_value, True, None,
                    gamma, lam, truncated, next_values, out)


def compute_gae_batched(rewards, values, dones, last_values, n_steps, gamma, lam, *, truncated=None,
                        next_values=None, out=None):
    """Estimate advantages and returns of N environments over T steps, in float64.

    Like `compute_gae`, for arrays in one of two layouts; the results have the layout of `rewards`:

    - flat (N * T,): env-major, [env0_step0, env0_step1, ..., env1_step0, ...];
    - (T, N): time-major, one row per step.

    Parameters
    ----------
    last_values
        (N,) V of the observation after the last step of each environment.
    n_steps
        T; None is allowed for (T, N) arrays.

    Raises
    ------
    ValueError, TypeError
        As for `compute_gae`, and if `n_steps` or the length of `last_values` does not match `rewards`.
    """
    return estimate("compute_gae_batched", cnp.NPY_FLOAT64, rewards, values, dones, last_values, False,
                    n_steps, gamma, lam, truncated, next_values, out)


def compute_gae_batched_f32(rewards, values, dones, last_values, n_steps, gamma, lam, *,
                            truncated=None, next_values=None, out=None):
    """Estimate advantages and returns of N environments over T steps, all in float32.

    Arguments, layouts and errors as for `compute_gae_batched`. Needs half the memory traffic; the relative error is
    about 1e-6.
    """
    return estimate("compute_gae_batched_f32", cnp.NPY_FLOAT32, rewards, values, dones, last_values,
                    False, n_steps, gamma, lam, truncated, next_values, out)

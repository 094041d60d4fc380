"""Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2).

    A_i = (R_i - mean(R)) / std(R)   over the completions of one prompt, population std

Rewards that differ only by rounding would get advantages of full size, because they are divided by their deviation.
All advantages of a group are therefore 0 if std < 1e-8 or std <= EQUAL * |mean|, where EQUAL is 2^-21, four units in
the last place of a float32. Reward models compute in float32, and the reward of a completion differs by a few units
between batches.
"""

from rlox.kernels.memory import empty

cimport numpy as cnp

from rlox.kernels.checks cimport as_index, as_real
from rlox.kernels.outputs cimport fresh
from rlox.kernels.types cimport f32, f64

cnp.import_array()

# A sum is a dependency chain of additions, which compilers must not reorder; eight partial sums, one per lane, break it
# up. Everything is measured relative to the first reward of the group, so that equal rewards deviate by exactly 0,
# however large they are. `RLOX_GROUP_LOAD` widens float32, so that all sums are float64.
cdef extern from *:
    """
    #include <math.h>
    typedef double rlox_g64 __attribute__((vector_size(64)));
    typedef float rlox_g32 __attribute__((vector_size(32)));
    typedef rlox_g64 rlox_gu64 __attribute__((aligned(8), may_alias));
    typedef rlox_g32 rlox_gu32 __attribute__((aligned(4), may_alias));
    #define RLOX_GROUP_LOAD_f64(p) (*(const rlox_gu64 *)(p))
    #define RLOX_GROUP_LOAD_f32(p) __builtin_convertvector(*(const rlox_gu32 *)(p), rlox_g64)
    #define RLOX_GROUP_STORE_f64(p, x) *(rlox_gu64 *)(p) = x
    #define RLOX_GROUP_STORE_f32(p, x) *(rlox_gu32 *)(p) = __builtin_convertvector(x, rlox_g32)
    #define RLOX_GROUP_EQUAL 0x1p-21
    #define RLOX_GROUP_ADD(x) (((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])))

    #define RLOX_GROUPS(NAME, REAL, S)                                                                  \\
    static inline __attribute__((always_inline)) void                                                   \\
    NAME##_of(ptrdiff_t n, ptrdiff_t size, const REAL *x, REAL *out) {                                  \\
        const double part = 1.0 / (double)size;                                                         \\
        const ptrdiff_t whole = size & ~(ptrdiff_t)7;                                                   \\
        for (ptrdiff_t g = 0; g < n; g++, x += size, out += size) {                                     \\
            const double first = x[0];                                                                  \\
            rlox_g64 sums = {0}, squares = {0};                                                         \\
            double sum = 0, square = 0, mean, std, factor;                                              \\
            ptrdiff_t i;                                                                                \\
            for (i = 0; i < whole; i += 8) sums += RLOX_GROUP_LOAD_##S(x + i) - first;                  \\
            for (; i < size; i++) sum += (double)x[i] - first;                                          \\
            if (whole) sum += RLOX_GROUP_ADD(sums);                                                     \\
            mean = first + sum * part;                                                                  \\
            for (i = 0; i < whole; i += 8) {                                                            \\
                rlox_g64 d = RLOX_GROUP_LOAD_##S(x + i) - mean;                                         \\
                squares += d * d;                                                                       \\
            }                                                                                           \\
            for (; i < size; i++) square += ((double)x[i] - mean) * ((double)x[i] - mean);              \\
            if (whole) square += RLOX_GROUP_ADD(squares);                                               \\
            std = sqrt(square * part);                                                                  \\
            factor = std < 1e-8 || std <= RLOX_GROUP_EQUAL * fabs(mean) ? 0.0 : 1.0 / std;              \\
            for (i = 0; i < whole; i += 8) {                                                            \\
                rlox_g64 d = (RLOX_GROUP_LOAD_##S(x + i) - mean) * factor;                              \\
                RLOX_GROUP_STORE_##S(out + i, d);                                                       \\
            }                                                                                           \\
            for (; i < size; i++) out[i] = (REAL)(((double)x[i] - mean) * factor);                      \\
        }                                                                                               \\
    }                                                                                                   \\
    static void NAME(ptrdiff_t n, ptrdiff_t size, const REAL *x, REAL *out) {                           \\
        /* The usual sizes as constants, so that the compiler unrolls all loops within a group. */      \\
        if (size == 4) NAME##_of(n, 4, x, out);                                                         \\
        else if (size == 8) NAME##_of(n, 8, x, out);                                                    \\
        else if (size == 16) NAME##_of(n, 16, x, out);                                                  \\
        else NAME##_of(n, size, x, out);                                                                \\
    }
    RLOX_GROUPS(rlox_groups_f64, double, f64)
    RLOX_GROUPS(rlox_groups_f32, float, f32)
    """
    void rlox_groups_f64(Py_ssize_t, Py_ssize_t, const f64*, f64*) noexcept nogil
    void rlox_groups_f32(Py_ssize_t, Py_ssize_t, const f32*, f32*) noexcept nogil


cdef inline void groups(int type_num, Py_ssize_t n, Py_ssize_t size, const void* rewards,
                        void* out) noexcept nogil:
    if type_num == cnp.NPY_FLOAT64:
        rlox_groups_f64(n, size, <const f64*>rewards, <f64*>out)
    else:
        rlox_groups_f32(n, size, <const f32*>rewards, <f32*>out)


cdef object advantages(str where, object rewards, object group_size, bint single):
    cdef int type_num = cnp.NPY_FLOAT64
    if isinstance(rewards, cnp.ndarray) and cnp.PyArray_TYPE(<cnp.ndarray>rewards) == cnp.NPY_FLOAT32:
        type_num = cnp.NPY_FLOAT32
    cdef cnp.ndarray r = as_real(rewards, type_num, where, "rewards")
    cdef int ndim = cnp.PyArray_NDIM(r)
    cdef Py_ssize_t total = cnp.PyArray_SIZE(r)
    cdef Py_ssize_t size
    if ndim != 1 and (single or ndim != 2):
        raise ValueError(
            f"{where}: rewards must be 1-D (K,)" + ("" if single else " (groups in turn) or 2-D (G, K)")
            + f", got shape {(<object>r).shape}"
        )
    if single:
        size = total
    elif ndim == 2:
        size = cnp.PyArray_DIM(r, 1)
        if group_size is not None and as_index(group_size, where, "group_size") != size:
            raise ValueError(
                f"{where}: group_size must be {size} for rewards of shape {(<object>r).shape}, got {group_size}"
            )
    else:
        if group_size is None:
            raise TypeError(f"{where}: group_size must be given for flat rewards, got None")
        wanted = as_index(group_size, where, "group_size")
        if wanted < 1 or total % wanted:
            raise ValueError(
                f"{where}: group_size must be at least 1 and divide the length of rewards {total}, got {wanted}"
            )
        size = wanted
    cdef cnp.ndarray out = fresh(empty, ndim, cnp.PyArray_DIMS(r), type_num)
    if total == 0:
        return out
    cdef const void* r_data = cnp.PyArray_DATA(r)
    cdef void* out_data = cnp.PyArray_DATA(out)
    if total <= 4096:  # giving up the GIL would cost more than it gains
        groups(type_num, total // size, size, r_data, out_data)
    else:
        with nogil:
            groups(type_num, total // size, size, r_data, out_data)
    return out


def compute_group_advantages(rewards):
    """Normalise the rewards of one group: ``(rewards - mean) / std``.

    Parameters
    ----------
    rewards
        (K,) rewards of K completions of one prompt. float32 is kept, everything else becomes float64; sums are
        always float64.

    Returns
    -------
    numpy.ndarray
        (K,) with mean 0 and population std 1; zeros if the std is below 1e-8, or at most 2^-21 (4.8e-7) of the mean's
        magnitude, since rewards of float32 that are this close differ by rounding. One NaN or inf makes all NaN.

    Raises
    ------
    ValueError
        If `rewards` is not 1-D.
    TypeError
        If `rewards` cannot be converted to numbers.

    References
    ----------
    Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, sec. 4.1.2.
    """
    return advantages("compute_group_advantages", rewards, None, True)


def compute_batch_group_advantages(rewards, group_size=None):
    """Normalise each group of rewards separately, like `compute_group_advantages`.

    Parameters
    ----------
    rewards
        (G * K,), one group after the other, or (G, K); the result has the same shape and dtype.
    group_size
        K; optional for (G, K).

    Raises
    ------
    ValueError, TypeError
        As for `compute_group_advantages`, and if `group_size` does not match.
    """
    return advantages("compute_batch_group_advantages", rewards, group_size, False)

"""Names for the C types of arrays passed between Python and C, and pointer types that promise not to alias."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

ctypedef uint8_t u8
ctypedef uint32_t u32
ctypedef uint64_t u64
ctypedef int64_t i64
ctypedef float f32
ctypedef double f64

ctypedef fused real:
    f32
    f64

# A loop over several arrays is vectorised only if the compiler knows that a store through one pointer
# cannot change what another reads. Cython has no `restrict`, so these C typedefs carry it into the
# parameter lists of the loops that need it. The caller must pass arrays that do not overlap.
cdef extern from *:
    """
    #ifndef RLOX_RESTRICT_POINTERS
    #define RLOX_RESTRICT_POINTERS
    #include <stdint.h>
    typedef double *__restrict__ rlox_f64_r;
    typedef float *__restrict__ rlox_f32_r;
    typedef int64_t *__restrict__ rlox_i64_r;
    typedef uint8_t *__restrict__ rlox_u8_r;
    typedef const double *__restrict__ rlox_cf64_r;
    typedef const float *__restrict__ rlox_cf32_r;
    typedef const int64_t *__restrict__ rlox_ci64_r;
    typedef const uint8_t *__restrict__ rlox_cu8_r;
    #endif
    """
    ctypedef f64* f64_r "rlox_f64_r"
    ctypedef f32* f32_r "rlox_f32_r"
    ctypedef i64* i64_r "rlox_i64_r"
    ctypedef u8* u8_r "rlox_u8_r"
    ctypedef const f64* cf64_r "rlox_cf64_r"
    ctypedef const f32* cf32_r "rlox_cf32_r"
    ctypedef const i64* ci64_r "rlox_ci64_r"
    ctypedef const u8* cu8_r "rlox_cu8_r"

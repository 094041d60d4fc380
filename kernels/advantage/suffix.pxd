"""Backward recurrences x_t = b_t + c_t * x_{t+1} in vector registers.

The recurrence is a dependency chain of one multiply and one add per step. A suffix scan (Hillis and Steele 1986)
breaks the chain up: within one register, log2(lanes) rounds of shift, multiply and add give e and p with
x_i = e_i + p_i * x_{t+lanes}, and only lane 0 has to wait for the register after it. The C code below does this with
the vector extensions of GCC and Clang, at 512 or 256 bits, without intrinsics. `RLOX_SUFFIX` is 0 if the registers are
shorter (their shuffles would cost more than they save) or the compiler has no `__builtin_shufflevector`; kernels then
use their scalar loops.
"""

from rlox.kernels.types cimport f32, f64, u8

cdef extern from *:
    """
    #ifndef RLOX_SUFFIX
    #include <stdint.h>
    #include <string.h>
    #if defined(__has_builtin)
    #if __has_builtin(__builtin_shufflevector) && (defined(__AVX512F__) || defined(__AVX2__))
    #define RLOX_SUFFIX 1
    #endif
    #endif
    #ifndef RLOX_SUFFIX
    #define RLOX_SUFFIX 0
    #endif

    #if RLOX_SUFFIX
    #define RLOX_UP4(a, b, k) __builtin_shufflevector(a, b, k, k + 1, k + 2, k + 3)
    #define RLOX_UP8(a, b, k) __builtin_shufflevector(a, b, k, k + 1, k + 2, k + 3, k + 4, k + 5, k + 6, k + 7)
    #define RLOX_UP16(a, b, k) __builtin_shufflevector(a, b, k, k + 1, k + 2, k + 3, k + 4, k + 5, k + 6, \\
        k + 7, k + 8, k + 9, k + 10, k + 11, k + 12, k + 13, k + 14, k + 15)

    #ifdef __AVX512F__
    enum {RLOX_LANES_F64 = 8, RLOX_LANES_F32 = 16};
    #define RLOX_UP_F64 RLOX_UP8
    #define RLOX_UP_F32 RLOX_UP16
    #define RLOX_BYTES 64
    #else
    enum {RLOX_LANES_F64 = 4, RLOX_LANES_F32 = 8};
    #define RLOX_UP_F64 RLOX_UP4
    #define RLOX_UP_F32 RLOX_UP8
    #define RLOX_BYTES 32
    #endif
    typedef double rlox_vf64 __attribute__((vector_size(RLOX_BYTES)));
    typedef float rlox_vf32 __attribute__((vector_size(RLOX_BYTES)));
    typedef int64_t rlox_vi64 __attribute__((vector_size(RLOX_BYTES)));
    typedef int32_t rlox_vi32 __attribute__((vector_size(RLOX_BYTES)));
    typedef rlox_vf64 rlox_uf64 __attribute__((aligned(8), may_alias));
    typedef rlox_vf32 rlox_uf32 __attribute__((aligned(4), may_alias));

    /* Multiply-adds may be fused here. This halves the latency of the chain, but results differ between levels in
       the last bits (within one level a result depends only on its arguments). */
    #ifdef __clang__
    #define RLOX_FUSED _Pragma("clang fp contract(fast)")
    #else
    #define RLOX_FUSED
    #pragma GCC push_options
    #pragma GCC optimize("fp-contract=fast")
    #endif

    /* All ones where the flag is 0. For byte flags, every lane gets all flags and picks its own. */
    static inline rlox_vi64 rlox_off_u8_f64(const uint8_t *flag) {
    #ifdef __AVX512F__
        int64_t w;
        memcpy(&w, flag, 8);
        const rlox_vi64 own = {0xff, 0xff00, 0xff0000, 0xff000000LL, 0xff00000000LL, 0xff0000000000LL,
                               0xff000000000000LL, (int64_t)0xff00000000000000ULL};
    #else
        int32_t w;
        memcpy(&w, flag, 4);
        const rlox_vi64 own = {0xff, 0xff00, 0xff0000, 0xff000000LL};
    #endif
        return (((rlox_vi64){0} + w) & own) == 0;
    }
    /* Pack eight bytes of 0 and 1 into eight bits: the multiplication puts byte i at bit 56 + i, without carries. */
    static inline int32_t rlox_bits(const uint8_t *flag) {
        uint64_t w;
        memcpy(&w, flag, 8);
        return (int32_t)((w * 0x0102040810204080ULL) >> 56);
    }
    static inline rlox_vi32 rlox_off_u8_f32(const uint8_t *flag) {
        int32_t bits = rlox_bits(flag);
    #ifdef __AVX512F__
        bits |= rlox_bits(flag + 8) << 8;
        const rlox_vi32 own = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    #else
        const rlox_vi32 own = {1, 2, 4, 8, 16, 32, 64, 128};
    #endif
        return (((rlox_vi32){0} + bits) & own) == 0;
    }
    static inline rlox_vi64 rlox_off_f64_f64(const double *flag) { return *(const rlox_uf64 *)flag == 0; }
    static inline rlox_vi32 rlox_off_f32_f32(const float *flag) { return *(const rlox_uf32 *)flag == 0; }

    /* Byte flags are checked before; for float flags, `wrong` collects the lanes that are neither 0 nor 1. */
    #define RLOX_WRONG_u8(V, flag, off)
    #define RLOX_WRONG_f64(V, flag, off) wrong |= ~off & (*(const V *)(flag) != 1);
    #define RLOX_WRONG_f32(V, flag, off) wrong |= ~off & (*(const V *)(flag) != 1);

    static inline void rlox_suffix_f64(rlox_vf64 *e, rlox_vf64 *p) {
        RLOX_FUSED
        const rlox_vf64 zero = {0}, one = zero + 1;
        *e += *p * RLOX_UP_F64(*e, zero, 1);
        *p *= RLOX_UP_F64(*p, one, 1);
        *e += *p * RLOX_UP_F64(*e, zero, 2);
        *p *= RLOX_UP_F64(*p, one, 2);
    #ifdef __AVX512F__
        *e += *p * RLOX_UP_F64(*e, zero, 4);
        *p *= RLOX_UP_F64(*p, one, 4);
    #endif
    }
    static inline void rlox_suffix_f32(rlox_vf32 *e, rlox_vf32 *p) {
        RLOX_FUSED
        const rlox_vf32 zero = {0}, one = zero + 1;
        *e += *p * RLOX_UP_F32(*e, zero, 1);
        *p *= RLOX_UP_F32(*p, one, 1);
        *e += *p * RLOX_UP_F32(*e, zero, 2);
        *p *= RLOX_UP_F32(*p, one, 2);
        *e += *p * RLOX_UP_F32(*e, zero, 4);
        *p *= RLOX_UP_F32(*p, one, 4);
    #ifdef __AVX512F__
        *e += *p * RLOX_UP_F32(*e, zero, 8);
        *p *= RLOX_UP_F32(*p, one, 8);
    #endif
    }

    /* The values shifted by one step; `next` supplies the value after the register. */
    static inline rlox_vf64 rlox_up_f64(rlox_vf64 x, rlox_vf64 next) { return RLOX_UP_F64(x, next, 1); }
    static inline rlox_vf32 rlox_up_f32(rlox_vf32 x, rlox_vf32 next) { return RLOX_UP_F32(x, next, 1); }

    #define RLOX_LANES_f64 RLOX_LANES_F64
    #define RLOX_LANES_f32 RLOX_LANES_F32
    #ifndef __clang__
    #pragma GCC pop_options
    #endif
    #else
    enum {RLOX_LANES_F64 = 1, RLOX_LANES_F32 = 1};
    #endif
    #endif
    """
    const bint RLOX_SUFFIX
    const Py_ssize_t RLOX_LANES_F64, RLOX_LANES_F32

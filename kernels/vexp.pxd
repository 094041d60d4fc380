"""exp of whole vectors, without the C library.

    x = k log 2 + r,  |r| <= log(2) / 2,   exp(x) = 2**k (1 + r + r**2 g(r))

`g` is the minimax polynomial of degree 9 (float64, 4e-18) or 4 (float32, 3e-9) for the relative error of exp;
the remaining error is rounding, about 1 unit in the last place. `fast` requires all lanes to lie in
[-RLOX_EXP_RANGE, RLOX_EXP_RANGE], where 2**k is a normal number. `full` accepts every x: it underflows gradually
to 0, overflows to inf and keeps NaN. The C library's exp differs from machine to machine and prevents vectorisation.

Vectors are as wide as the registers of the CPU level, because compilers spill parts of wider ones. Multiply-adds are
fused where the level supports it, so results differ between levels in the last bits.
"""

from rlox.kernels.types cimport f32, f64

cdef extern from *:
    """
    #ifndef RLOX_VEXP
    #define RLOX_VEXP
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>
    #ifdef __clang__
    #define RLOX_VEXP_FUSED _Pragma("clang fp contract(fast)")
    #else
    #define RLOX_VEXP_FUSED
    #pragma GCC push_options
    #pragma GCC optimize("fp-contract=fast")
    /* Vectors are only ever parameters of inlined functions. */
    #pragma GCC diagnostic ignored "-Wpsabi"
    #endif
    #if defined(__AVX512F__)
    #define RLOX_XBYTES 64
    #elif defined(__AVX__)
    #define RLOX_XBYTES 32
    #else
    #define RLOX_XBYTES 16
    #endif
    typedef double rlox_xf64 __attribute__((vector_size(RLOX_XBYTES)));
    typedef float rlox_xf32 __attribute__((vector_size(RLOX_XBYTES)));
    typedef int64_t rlox_xi64 __attribute__((vector_size(RLOX_XBYTES)));
    typedef int32_t rlox_xi32 __attribute__((vector_size(RLOX_XBYTES)));
    typedef rlox_xf64 rlox_xuf64 __attribute__((aligned(8), may_alias));
    typedef rlox_xf32 rlox_xuf32 __attribute__((aligned(4), may_alias));
    #define RLOX_XLANES_f64 (RLOX_XBYTES / 8)
    #define RLOX_XLANES_f32 (RLOX_XBYTES / 4)
    #define RLOX_EXP_RANGE_f64 708.0
    #define RLOX_EXP_RANGE_f32 87.0f

    /* g(r) */
    static inline __attribute__((always_inline)) rlox_xf64 rlox_exp_g_f64(rlox_xf64 r) {
        RLOX_VEXP_FUSED
        return ((((((((2.5000023940315812e-08 * r + 2.763030624035685e-07) * r + 2.7557586783278443e-06) * r
            + 2.4801492949750686e-05) * r + 0.00019841269505802478) * r + 0.001388888894375978) * r
            + 0.008333333333494961) * r + 0.04166666666652973) * r + 0.1666666666666641) * r
            + 0.5000000000000011;
    }
    static inline __attribute__((always_inline)) rlox_xf32 rlox_exp_g_f32(rlox_xf32 r) {
        RLOX_VEXP_FUSED
        return (((0.0013814535729759897f * r + 0.008368745149348863f) * r + 0.041668390865111864f) * r
            + 0.16666520398731471f) * r + 0.49999993431811696f;
    }

    /* Adding MAGIC (1.5 * 2**52 or 1.5 * 2**23) rounds to the nearest integer, whose bits are then the lowest bits of
       the sum. Shifted into the exponent they wrap as needed, so no conversion to an integer is required. */
    #define RLOX_VEXP_FOR(S, IS, REAL, MAGIC, LOG2E, LN2_HIGH, LN2_LOW, MANTISSA, ONE, LOW, HIGH)          \\
    static inline __attribute__((always_inline)) void                                                     \\
    rlox_exp_reduce_##S(rlox_x##S x, rlox_x##S *shifted, rlox_x##S *r) {                                  \\
        RLOX_VEXP_FUSED                                                                                   \\
        *shifted = x * LOG2E + MAGIC;                                                                     \\
        rlox_x##S k = *shifted - MAGIC;                                                                   \\
        *r = (x - k * LN2_HIGH) - k * LN2_LOW;                                                            \\
    }                                                                                                     \\
    static inline __attribute__((always_inline)) rlox_x##S rlox_exp_fast_##S(rlox_x##S x) {               \\
        RLOX_VEXP_FUSED                                                                                   \\
        rlox_x##S shifted, r;                                                                             \\
        rlox_exp_reduce_##S(x, &shifted, &r);                                                             \\
        rlox_x##S y = rlox_exp_g_##S(r) * (r * r) + r + 1;                                                \\
        return (rlox_x##S)((rlox_x##IS)y + ((rlox_x##IS)shifted << MANTISSA));                            \\
    }                                                                                                     \\
    static inline __attribute__((always_inline)) rlox_x##S rlox_exp_full_##S(rlox_x##S x) {               \\
        RLOX_VEXP_FUSED                                                                                   \\
        const rlox_x##S zero = {0};                                                                       \\
        rlox_x##IS under = x < LOW, over = x > HIGH;                                                      \\
        x = (rlox_x##S)(((rlox_x##IS)x & ~(under | over)) | ((rlox_x##IS)(zero + LOW) & under)            \\
                        | ((rlox_x##IS)(zero + HIGH) & over));                                            \\
        rlox_x##S shifted, r;                                                                             \\
        rlox_exp_reduce_##S(x, &shifted, &r);                                                             \\
        rlox_x##S y = rlox_exp_g_##S(r) * (r * r) + r + 1;                                                \\
        /* 2**k as a product of two powers: one alone would not reach the subnormal numbers. */           \\
        rlox_x##S k = shifted - MAGIC;                                                                    \\
        rlox_x##S half = k * (REAL)0.5 + MAGIC;                                                           \\
        rlox_x##S rest = (k - (half - MAGIC)) + MAGIC;                                                    \\
        return y * (rlox_x##S)(((rlox_x##IS)half << MANTISSA) + ONE)                                      \\
                 * (rlox_x##S)(((rlox_x##IS)rest << MANTISSA) + ONE);                                     \\
    }                                                                                                     \\
    /* exp(x) - 1 - x without cancellation: for |x| <= log(2) / 2 it is r**2 g(r) alone. */               \\
    static inline __attribute__((always_inline)) rlox_x##S rlox_k3_fast_##S(rlox_x##S x) {                \\
        RLOX_VEXP_FUSED                                                                                   \\
        rlox_x##S shifted, r;                                                                             \\
        rlox_exp_reduce_##S(x, &shifted, &r);                                                             \\
        rlox_x##S s = (rlox_x##S)(((rlox_x##IS)shifted << MANTISSA) + ONE);                               \\
        return s * (rlox_exp_g_##S(r) * (r * r)) + ((s - 1) + (s * r - x));                               \\
    }                                                                                                     \\
    static inline __attribute__((always_inline)) rlox_x##IS rlox_exp_outside_##S(rlox_x##S x) {           \\
        return ~((x <= RLOX_EXP_RANGE_##S) & (x >= -RLOX_EXP_RANGE_##S));                                 \\
    }                                                                                                     \\
    static inline __attribute__((always_inline)) int rlox_any_##S(rlox_x##IS mask) {                      \\
        for (int i = 1; i < RLOX_XLANES_##S; i++) mask[0] |= mask[i];                                     \\
        return mask[0] != 0;                                                                              \\
    }
    RLOX_VEXP_FOR(f64, i64, double, 6755399441055744.0, 1.4426950408889634, 6.93147180369123816490e-01,
                  1.90821492927058770002e-10, 52, 0x3FF0000000000000LL, -746.0, 710.0)
    RLOX_VEXP_FOR(f32, i32, float, 12582912.0f, 1.44269504f, 0.693359375f, -2.12194440e-4f, 23,
                  0x3F800000, -104.0f, 89.0f)
    #ifndef __clang__
    #pragma GCC pop_options
    #endif
    #endif
    """

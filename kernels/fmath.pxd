"""Branch-free sin, cos and log in plain IEEE arithmetic.

The C library's versions differ from machine to machine (glibc picks FMA variants by CPU) and prevent
vectorisation. These use only +, -, *, / and bit operations, so they vectorise and give the same bits at
every CPU level and on every IEEE machine, provided that the build does not fuse multiply-adds
(`-ffp-contract=off`, set in setup.py). Polynomials: Sun's fdlibm (k_sin.c, k_cos.c, e_log.c).
"""

from libc.string cimport memcpy

from rlox.kernels.types cimport f64, u64


cdef inline u64 bits_of(f64 x) noexcept nogil:
    cdef u64 bits
    memcpy(&bits, &x, sizeof(bits))
    return bits


cdef inline f64 from_bits(u64 bits) noexcept nogil:
    cdef f64 x
    memcpy(&x, &bits, sizeof(x))
    return x


cdef inline void sincos(f64 x, f64* sin_x, f64* cos_x) noexcept nogil:
    """Sine and cosine of `x` radians, absolute error <= 2.3e-16 for |x| <= 1e6.

    Cody-Waite reduction by pi/2 = P1 + P2 + P3 with 33-bit heads: n * P1 and n * P2 are exact for
    |n| < 2**20, which limits the range of `x`.
    """
    cdef f64 magic = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to the nearest integer
    cdef f64 shifted = x * 6.36619772367581382433e-01 + magic
    cdef f64 n = shifted - magic
    cdef u64 quadrant = bits_of(shifted)
    cdef f64 r = x - n * 1.57079632673412561417e+00
    r = r - n * 6.07710050630396597660e-11
    r = r - n * 2.02226624879595063154e-21
    cdef f64 z = r * r
    cdef f64 s = r + r * z * (
        -1.66666666666666324348e-01 + z * (8.33333333332248946124e-03
        + z * (-1.98412698298579493134e-04 + z * (2.75573137070700676789e-06
        + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))))
    cdef f64 half_z = 0.5 * z
    cdef f64 w = 1.0 - half_z
    cdef f64 c = w + (((1.0 - w) - half_z) + z * z * (
        4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03
        + z * (2.48015872894767294178e-05 + z * (-2.75573143513906633035e-07
        + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11))))))
    # Odd quadrants swap sine and cosine, and the quadrant determines the signs. Uses masks, because
    # branches would keep the loop scalar.
    cdef u64 swap = -(quadrant & 1)
    cdef u64 bits_s = bits_of(s)
    cdef u64 bits_c = bits_of(c)
    cdef u64 toggle = (bits_s ^ bits_c) & swap
    sin_x[0] = from_bits((bits_s ^ toggle) ^ ((quadrant & 2) << 62))
    cos_x[0] = from_bits((bits_c ^ toggle) ^ (((quadrant + 1) & 2) << 62))


cdef inline f64 log_positive(f64 x) noexcept nogil:
    """Natural logarithm of a positive, normal, finite `x`; error below 1 ulp."""
    # x = 2**k * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)): moving the exponent by the bits of
    # sqrt(1/2) makes the carry into the exponent field choose k.
    cdef u64 moved = bits_of(x) + <u64>0x0009_5F62_0000_0000
    cdef u64 mantissa = (moved & <u64>0x000F_FFFF_FFFF_FFFF) + <u64>0x3FE6_A09E_0000_0000
    # The 11-bit exponent goes to f64 by OR-ing it into 2**52: AVX2 has no u64 -> f64 conversion.
    cdef f64 k = from_bits((moved >> 52) | <u64>0x4330_0000_0000_0000) - (4503599627370496.0 + 1023.0)
    cdef f64 f = from_bits(mantissa) - 1.0
    cdef f64 half_square = 0.5 * f * f
    cdef f64 s = f / (2.0 + f)
    cdef f64 z = s * s
    cdef f64 w = z * z
    cdef f64 even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01
        + w * 1.531383769920937332e-01))
    cdef f64 odd = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01
        + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)))
    return (s * (half_square + (even + odd)) + k * 1.90821492927058770002e-10
        - half_square + f + k * 6.93147180369123816490e-01)

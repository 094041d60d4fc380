"""Random numbers: the generator Philox4x32-10, and the conversion of its words to floats.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A block is a pure
function of a 64-bit key and a 128-bit counter, so nothing has to be stored to draw it again. The high
half of the counter is the domain of the draw, so that equal keys in two places never share numbers.
"""

from libc.math cimport sqrt

from rlox.kernels.fmath cimport log_positive, sincos
from rlox.kernels.types cimport f32, f64, i64, u32, u64


cdef enum Domain:
    DOMAIN_RNG = 0
    DOMAIN_ENV_RESET = 1
    DOMAIN_ENV_STEP = 2
    DOMAIN_OFFLINE_TRANSITIONS = 32
    DOMAIN_OFFLINE_TRAJECTORIES = 33
    DOMAIN_SEQUENCES = 34


cdef struct Block:
    u32 a
    u32 b
    u32 c
    u32 d


cdef inline u64 splitmix64(u64 x) noexcept nogil:
    """First output of the SplitMix64 generator with state `x`; a bijection on 64 bits."""
    x += <u64>0x9E37_79B9_7F4A_7C15
    x = (x ^ (x >> 30)) * <u64>0xBF58_476D_1CE4_E5B9
    x = (x ^ (x >> 27)) * <u64>0x94D0_49BB_1331_11EB
    return x ^ (x >> 31)


cdef inline u64 derive_key(u64 seed, u64 index) noexcept nogil:
    """Key number `index` of `seed`: SplitMix64's output `index` from the state splitmix64(seed).

    Keys of one seed are distinct, and neighbouring seeds share none (`seed + index` would).
    """
    return splitmix64(splitmix64(seed) + index * <u64>0x9E37_79B9_7F4A_7C15)


cdef inline Block philox(u64 key, u64 counter, u64 domain) noexcept nogil:
    """Philox4x32-10 block at counter words (counter low, counter high, domain low, domain high)."""
    cdef Block x
    cdef u32 k0 = <u32>key
    cdef u32 k1 = <u32>(key >> 32)
    cdef u64 m0, m1
    cdef int r
    x.a = <u32>counter
    x.b = <u32>(counter >> 32)
    x.c = <u32>domain
    x.d = <u32>(domain >> 32)
    for r in range(10):
        m0 = <u64>x.a * <u64>0xD251_1F53
        m1 = <u64>x.c * <u64>0xCD9E_8D57
        x.a = <u32>(m1 >> 32) ^ x.b ^ k0
        x.b = <u32>m1
        x.c = <u32>(m0 >> 32) ^ x.d ^ k1
        x.d = <u32>m0
        k0 += <u32>0x9E37_79B9
        k1 += <u32>0xBB67_AE85
    return x


cdef inline void philox_lanes(u64 key, u64 counter, u64 domain, int n, u32* a, u32* b, u32* c, u32* d) noexcept nogil:
    """Compute blocks counter ... counter + n - 1, with one array per word.

    Pass a literal `n` and local arrays, so that the loops vectorise: the ten rounds of one block depend on each other.
    """
    cdef u32 k0 = <u32>key
    cdef u32 k1 = <u32>(key >> 32)
    cdef u32 h0, l0, h1, l1
    cdef int i, r
    for i in range(n):
        a[i] = <u32>(counter + <u64>i)
        b[i] = <u32>((counter + <u64>i) >> 32)
        c[i] = <u32>domain
        d[i] = <u32>(domain >> 32)
    for r in range(10):
        for i in range(n):
            h0 = <u32>((<u64>a[i] * <u64>0xD251_1F53) >> 32)
            l0 = a[i] * <u32>0xD251_1F53
            h1 = <u32>((<u64>c[i] * <u64>0xCD9E_8D57) >> 32)
            l1 = c[i] * <u32>0xCD9E_8D57
            a[i] = h1 ^ b[i] ^ k0
            b[i] = l1
            c[i] = h0 ^ d[i] ^ k1
            d[i] = l0
        k0 += <u32>0x9E37_79B9
        k1 += <u32>0xBB67_AE85


cdef inline u64 join(u32 low, u32 high) noexcept nogil:
    return (<u64>high << 32) | low


cdef inline f32 unit_f32(u32 x) noexcept nogil:
    """Number in [0, 1) on a grid of 2**-24, the precision of f32, so that rounding cannot give 1.0."""
    return <f32>(x >> 8) * <f32>5.9604644775390625e-08


cdef inline f64 unit_f64(u64 x) noexcept nogil:
    """Number in [0, 1) on a grid of 2**-53."""
    return <f64>(x >> 11) * 1.1102230246251565e-16


cdef inline f64 open_unit(u32 x) noexcept nogil:
    """Number in (0, 1), symmetric about 1/2, on a grid of 2**-32."""
    return (<f64>x + 0.5) * 2.3283064365386963e-10


cdef inline void box_muller(f64 u, f64 v, f64* first, f64* second) noexcept nogil:
    """Two independent standard normals from `u` in (0, 1] and `v` in [0, 1)."""
    cdef f64 s, c
    cdef f64 radius = sqrt(-2.0 * log_positive(u))
    sincos(6.28318530717958647693 * v, &s, &c)
    first[0] = radius * c
    second[0] = radius * s


cdef inline f64 gumbel(u32 x) noexcept nogil:
    """Standard Gumbel, always finite: -log(-log u) with u in [2**-33, 1 - 2**-33]."""
    return -log_positive(-log_positive(open_unit(x)))


cdef inline u64 below(u64 x, u64 high) noexcept nogil:
    """Integer in [0, high): the high half of the 128-bit product (Lemire's multiply-shift).

    The bias is at most high / 2**64 and no draw is rejected, so every integer costs one word pair.
    """
    cdef u64 x0 = x & <u64>0xFFFF_FFFF
    cdef u64 x1 = x >> 32
    cdef u64 h0 = high & <u64>0xFFFF_FFFF
    cdef u64 h1 = high >> 32
    cdef u64 middle = x1 * h0 + ((x0 * h0) >> 32)
    cdef u64 carry = (middle & <u64>0xFFFF_FFFF) + x0 * h1
    return x1 * h1 + (middle >> 32) + (carry >> 32)


# Each function writes n numbers, starting at block `position`. It draws whole blocks, (n + 3) // 4 of them
# ((n + 1) // 2 for integers), and drops the unused words.

cdef inline void fill_uniform_f32(f32* out, Py_ssize_t n, u64 key, u64 position) noexcept nogil:
    cdef Py_ssize_t i
    cdef Block x
    for i in range(0, n - 3, 4):
        x = philox(key, position, DOMAIN_RNG)
        position += 1
        out[i] = unit_f32(x.a)
        out[i + 1] = unit_f32(x.b)
        out[i + 2] = unit_f32(x.c)
        out[i + 3] = unit_f32(x.d)
    i = n & ~<Py_ssize_t>3
    if i < n:
        x = philox(key, position, DOMAIN_RNG)
        out[i] = unit_f32(x.a)
        if i + 1 < n:
            out[i + 1] = unit_f32(x.b)
        if i + 2 < n:
            out[i + 2] = unit_f32(x.c)


cdef inline void fill_normal_f32(f32* out, Py_ssize_t n, u64 key, u64 position) noexcept nogil:
    cdef Py_ssize_t i
    cdef Block x
    cdef f64 p, q, r, s
    for i in range(0, n, 4):
        x = philox(key, position, DOMAIN_RNG)
        position += 1
        box_muller(open_unit(x.a), open_unit(x.b), &p, &q)
        box_muller(open_unit(x.c), open_unit(x.d), &r, &s)
        out[i] = <f32>p
        if i + 1 < n:
            out[i + 1] = <f32>q
        if i + 2 < n:
            out[i + 2] = <f32>r
        if i + 3 < n:
            out[i + 3] = <f32>s


cdef inline void fill_integers(i64* out, Py_ssize_t n, u64 high, u64 key, u64 position) noexcept nogil:
    """Numbers in [0, high)."""
    cdef Py_ssize_t i
    cdef Block x
    for i in range(0, n, 2):
        x = philox(key, position, DOMAIN_RNG)
        position += 1
        out[i] = <i64>below(join(x.a, x.b), high)
        if i + 1 < n:
            out[i + 1] = <i64>below(join(x.c, x.d), high)


cdef inline void fill_permutation(i64* out, Py_ssize_t n, u64 key, u64 position) noexcept nogil:
    """Fisher-Yates from the front, element i going to a place in [0, i] (the "inside-out" form)."""
    cdef Py_ssize_t i, j
    cdef Block x
    cdef u64 word
    for i in range(n):
        if i & 1:
            word = join(x.c, x.d)
        else:
            x = philox(key, position, DOMAIN_RNG)
            position += 1
            word = join(x.a, x.b)
        j = <Py_ssize_t>below(word, <u64>i + 1)
        out[i] = out[j]
        out[j] = i

"""Drawing many uniform indices at once, and copying the rows that they refer to."""

from libc.string cimport memcpy

from rlox.kernels.philox cimport below, join, philox, philox_lanes
from rlox.kernels.prefetch cimport prefetch
from rlox.kernels.types cimport i64, u32, u64

cdef enum:
    LANES = 32             # Philox blocks side by side, two indices each; GCC unrolls 16 instead of vectorising
    CHUNK = 512            # indices drawn at a time, on the stack; a multiple of 2 * LANES
    PREFETCH_AHEAD = 24    # rows; enough to hide the latency of a cache miss


cdef inline void draw_lanes(u64 high, u64 key, u64 position, u64 domain, i64* out) noexcept nogil:
    """Write 2 * LANES indices in [0, high), high < 2**32, the same as `below` of the two halves of each block.

    With a `high` of 32 bits no product exceeds 64 bits.
    """
    cdef u32[LANES] a
    cdef u32[LANES] b
    cdef u32[LANES] c
    cdef u32[LANES] d
    cdef int i
    philox_lanes(key, position, domain, LANES, a, b, c, d)
    for i in range(LANES):
        out[2 * i] = <i64>((<u64>b[i] * high + ((<u64>a[i] * high) >> 32)) >> 32)
        out[2 * i + 1] = <i64>((<u64>d[i] * high + ((<u64>c[i] * high) >> 32)) >> 32)


cdef inline i64 draw_one(u64 high, u64 key, u64 number, u64 domain) noexcept nogil:
    """Return index `number` of the stream, from half (number & 1) of block number // 2."""
    x = philox(key, number >> 1, domain)
    if number & 1:
        return <i64>below(join(x.c, x.d), high)
    return <i64>below(join(x.a, x.b), high)


cdef inline void draw_indices(u64 high, u64 key, u64 first, u64 domain, i64* out,
                              Py_ssize_t n) noexcept nogil:
    """Write indices first ... first + n - 1 of the stream of indices in [0, high); `first` must be even.

    An index depends only on (high, key, its place in the stream, domain).
    """
    cdef Py_ssize_t i = 0
    cdef i64[2 * LANES] last
    if high <= <u64>0xFFFF_FFFF:
        while i + 2 * LANES <= n:
            draw_lanes(high, key, (first + <u64>i) >> 1, domain, out + i)
            i += 2 * LANES
        if n - i > 8:  # fewer are faster one by one
            draw_lanes(high, key, (first + <u64>i) >> 1, domain, last)
            memcpy(out + i, last, (n - i) * sizeof(i64))
            return
    while i < n:
        out[i] = draw_one(high, key, first + <u64>i, domain)
        i += 1


cdef inline void gather_pairs(const char* first, const char* second, Py_ssize_t size, const i64* indices,
                              Py_ssize_t n, char* out, char* other) noexcept nogil:
    """Copy rows of two arrays by the same indices. Pass a literal `size`, so that a copy is a few moves, not a call."""
    cdef Py_ssize_t i, at
    for i in range(n):
        if i + PREFETCH_AHEAD < n:
            at = indices[i + PREFETCH_AHEAD] * size
            prefetch(first + at)
            prefetch(second + at)
            if size > 64:
                prefetch(first + at + size - 1)
                prefetch(second + at + size - 1)
        at = indices[i] * size
        memcpy(out + i * size, first + at, size)
        memcpy(other + i * size, second + at, size)


cdef inline void gather_two(const char* first, const char* second, Py_ssize_t size, const i64* indices,
                            Py_ssize_t n, char* out, char* other) noexcept nogil:
    """out[i] = first[indices[i]], other[i] = second[indices[i]] for rows of `size` bytes."""
    cdef Py_ssize_t i, j, at
    if size == 4:
        gather_pairs(first, second, 4, indices, n, out, other)
    elif size == 8:
        gather_pairs(first, second, 8, indices, n, out, other)
    elif size == 12:
        gather_pairs(first, second, 12, indices, n, out, other)
    elif size == 16:
        gather_pairs(first, second, 16, indices, n, out, other)
    elif size == 24:
        gather_pairs(first, second, 24, indices, n, out, other)
    elif size == 32:
        gather_pairs(first, second, 32, indices, n, out, other)
    elif size == 44:
        gather_pairs(first, second, 44, indices, n, out, other)
    elif size == 68:
        gather_pairs(first, second, 68, indices, n, out, other)
    else:
        for i in range(n):
            if i + PREFETCH_AHEAD // 2 < n:
                at = indices[i + PREFETCH_AHEAD // 2] * size
                # The first lines of a long row; the hardware prefetcher continues from there.
                for j in range(0, min(size, <Py_ssize_t>256), 64):
                    prefetch(first + at + j)
                    prefetch(second + at + j)
            at = indices[i] * size
            memcpy(out + i * size, first + at, size)
            memcpy(other + i * size, second + at, size)

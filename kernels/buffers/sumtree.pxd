"""A 16-ary tree of sums and minima over priorities, without Python objects.

Leaves are float32, 16 to a cache line (a "block"); everything above is float64. A node stores the exclusive prefix
sums of its 16 children, so descending one level takes six comparisons in one node. Sums of float32 numbers in float64
are exact unless the numbers differ by a factor of more than 2**29, and a draw has 53 bits. Therefore even among
millions of leaves, each is drawn in proportion to its value; with float32 sums and draws (24 bits) it would not be.

Every inner value is recomputed from its children when one of them changes, so nothing drifts and the tree is a pure
function of its leaves. A leaf of 0 is never drawn and does not count for the minimum.
"""

from libc.string cimport memcpy, memset

from rlox.kernels.fmath cimport bits_of, from_bits, log_positive
from rlox.kernels.types cimport f32, f64, i64, u32, u64

cdef enum:
    MAX_LEVELS = 12  # 16**13 leaves


ctypedef f64* f64_row
ctypedef u32* u32_row


cdef struct SumTree:
    i64 n_blocks
    int n_levels
    f32* leaves  # (n_blocks, 16)
    # Level 0 is over the blocks, level l + 1 over the nodes of level l; the last has one node.
    i64[MAX_LEVELS] n_children
    f64_row[MAX_LEVELS] totals  # of each child
    f64_row[MAX_LEVELS] before  # (nodes, 16) sums of the children before each
    u32_row[MAX_LEVELS] minima  # bits of the smallest positive leaf below each child, 0 if none
    u32_row[MAX_LEVELS] stamps  # epoch of each child's last recomputation
    u32 epoch
    f64 total
    u32 minimum  # bits, as `minima`


cdef inline f64 exp_moderate(f64 x) noexcept nogil:
    """Return e**x for |x| <= 700, in arithmetic that vectorises; relative error below 1e-11, for float32 results."""
    cdef f64 magic = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to the nearest integer
    cdef f64 shifted = x * 1.44269504088896338700e+00 + magic
    cdef f64 n = shifted - magic
    cdef f64 r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    # Taylor series to degree 9: for |r| <= ln(2) / 2 the error is 7e-12.
    cdef f64 y = 1.0 / 362880.0
    y = y * r + 1.0 / 40320.0
    y = y * r + 1.0 / 5040.0
    y = y * r + 1.0 / 720.0
    y = y * r + 1.0 / 120.0
    y = y * r + 1.0 / 24.0
    y = y * r + 1.0 / 6.0
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    # The low bits of `shifted` hold n; 1.5 * 2**52 contributes zeros to the twelve that matter.
    return y * from_bits(bits_of(shifted + 1023.0) << 52)


cdef inline f32 leaf_value(f64 priority, f64 alpha) noexcept nogil:
    """Return priority**alpha as float32, clamped to its normal range; 0 stays 0."""
    cdef f64 p = priority if priority > 2.3e-308 else 2.3e-308
    cdef f64 exponent = alpha * log_positive(p)
    exponent = exponent if exponent > -87.3 else -87.3
    exponent = exponent if exponent < 88.7 else 88.7
    cdef f64 power = exp_moderate(exponent)
    return <f32>(power if priority > 0.0 else 0.0)


cdef inline f32 importance(f32 leaf, f64 log_unit, f64 beta, f64 most) noexcept nogil:
    """Return (leaf / unit) ** -beta, at most e**most."""
    cdef f64 x = beta * (log_unit - log_positive(<f64>leaf))
    x = x if x < most else most
    x = x if x > -700.0 else -700.0
    return <f32>exp_moderate(x)


cdef extern from *:
    """
    typedef float rlox_block_f4 __attribute__((vector_size(16), aligned(4), may_alias));
    typedef double rlox_block_d4 __attribute__((vector_size(32)));
    #define RLOX_WIDEN(x) __builtin_convertvector(*(const rlox_block_f4 *)(x), rlox_block_d4)
    /* Otherwise compilers convert the sixteen numbers one by one, which takes longer than everything else. */
    static inline void rlox_sum_groups(const float *x, double *sums) {
        const rlox_block_d4 s = RLOX_WIDEN(x) + RLOX_WIDEN(x + 4) + RLOX_WIDEN(x + 8) + RLOX_WIDEN(x + 12);
        sums[0] = s[0];
        for (int q = 1; q < 4; q++) sums[q] = sums[q - 1] + s[q];
    }
    """
    # Running sums of a block's four groups; group q consists of leaves q, q + 4, q + 8, q + 12.
    void sum_groups "rlox_sum_groups"(const f32* x, f64* sums) noexcept nogil


cdef inline u32 smallest16(const void* x) noexcept nogil:
    """Return the bits of the smallest positive number among 16 non-negative floats, 0 if there is none.

    Non-negative floats are ordered like their bits; subtracting 1 from the bits turns zero into the largest value.
    """
    cdef u32[16] bits
    cdef u32 smallest = 0xFFFF_FFFF
    cdef int j
    memcpy(bits, x, 64)
    for j in range(16):
        smallest = bits[j] - <u32>1 if bits[j] - <u32>1 < smallest else smallest
    return smallest + <u32>1


cdef inline void sum_block(SumTree* tree, i64 block) noexcept nogil:
    cdef const f32* x = tree.leaves + 16 * block
    cdef f64[4] sums
    sum_groups(x, sums)
    tree.totals[0][block] = sums[3]
    tree.minima[0][block] = smallest16(x)


cdef inline void sum_node(SumTree* tree, int level, i64 node) noexcept nogil:
    cdef const f64* totals = tree.totals[level] + 16 * node
    cdef f64* before = tree.before[level] + 16 * node
    cdef f64 sum_ = 0.0
    cdef int j
    cdef u32 minimum = smallest16(tree.minima[level] + 16 * node)
    for j in range(16):
        before[j] = sum_
        sum_ = sum_ + totals[j]
    if level + 1 < tree.n_levels:
        tree.totals[level + 1][node] = sum_
        tree.minima[level + 1][node] = minimum
    else:
        tree.total = sum_
        tree.minimum = minimum


cdef inline void sum_range(SumTree* tree, i64 first, i64 last) noexcept nogil:
    """Recompute everything above leaves first .. last."""
    cdef i64 a = first >> 4
    cdef i64 b = last >> 4
    cdef i64 i
    cdef int level
    for i in range(a, b + 1):
        sum_block(tree, i)
    for level in range(tree.n_levels):
        a >>= 4
        b >>= 4
        for i in range(a, b + 1):
            sum_node(tree, level, i)


cdef inline void sum_above(SumTree* tree, const i64* slots, Py_ssize_t n, i64* work) noexcept nogil:
    """Recompute everything above these leaves, each inner value once.

    `work` has room for n_blocks + 1 numbers: a repeated block is written past the end of the list and then dropped.
    """
    cdef Py_ssize_t i, m, kept
    cdef i64 child
    cdef int level
    tree.epoch += 1
    if tree.epoch == 0:  # after 2**32 updates the stamps start again
        for level in range(tree.n_levels):
            memset(tree.stamps[level], 0, tree.n_children[level] * sizeof(u32))
        tree.epoch = 1
    m = 0
    for i in range(n):
        child = slots[i] >> 4
        work[m] = child
        m += tree.stamps[0][child] != tree.epoch
        tree.stamps[0][child] = tree.epoch
    for i in range(m):
        sum_block(tree, work[i])
    for level in range(tree.n_levels):
        if level + 1 < tree.n_levels:
            kept = 0
            for i in range(m):
                child = work[i] >> 4
                work[kept] = child
                kept += tree.stamps[level + 1][child] != tree.epoch
                tree.stamps[level + 1][child] = tree.epoch
            m = kept
        else:
            work[0] = 0
            m = 1
        for i in range(m):
            sum_node(tree, level, work[i])


cdef inline f64 inside(f64 target, f64 total) noexcept nogil:
    """Return `target` limited to below its node's total despite rounding, so that it leads to a non-empty child."""
    cdef f64 most = total * (1.0 - 2.220446049250313e-16)
    return target if target < most else most


cdef inline i64 find_leaf(const SumTree* tree, i64 block, f64 target) noexcept nogil:
    """Return the leaf of a block that `target` in [0, total of the block) falls into."""
    cdef const f32* x = tree.leaves + 16 * block
    cdef f64[5] sums
    cdef f64 a, b, c
    cdef int q
    sums[0] = 0.0
    sum_groups(x, sums + 1)
    target = inside(target, sums[4])
    q = (sums[1] <= target) + (sums[2] <= target) + (sums[3] <= target)
    x += q
    a = <f64>x[0]
    b = a + <f64>x[4]
    c = b + <f64>x[8]
    target = inside(target - sums[q], c + <f64>x[12])
    return 16 * block + q + 4 * ((a <= target) + (b <= target) + (c <= target))

"""The layout of records of `MmapReplayBuffer`, and reading batches of them."""

from libc.string cimport memcpy

from rlox.kernels.buffers.seams cimport next_seam
from rlox.kernels.buffers.store cimport CHUNK, DOMAIN_REPLAY, draw_below
from rlox.kernels.buffers.tiers cimport Tiers, find
from rlox.kernels.prefetch cimport prefetch
from rlox.kernels.types cimport f32, f64, i64, u8, u64


# Copying columns out of and into records. Common small sizes are literals, so that a copy is a few moves, not a call.

cdef inline void out_fixed(const u8** rows, Py_ssize_t offset, Py_ssize_t size, Py_ssize_t n,
                           u8* out) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        memcpy(out + i * size, rows[i] + offset, size)


cdef inline void copy_out(const u8** rows, Py_ssize_t offset, Py_ssize_t size, Py_ssize_t n,
                          u8* out) noexcept nogil:
    if size == 1:
        out_fixed(rows, offset, 1, n, out)
    elif size == 4:
        out_fixed(rows, offset, 4, n, out)
    elif size == 8:
        out_fixed(rows, offset, 8, n, out)
    elif size == 12:
        out_fixed(rows, offset, 12, n, out)
    elif size == 16:
        out_fixed(rows, offset, 16, n, out)
    elif size == 24:
        out_fixed(rows, offset, 24, n, out)
    else:
        out_fixed(rows, offset, size, n, out)


cdef inline void in_fixed(u8* rows, Py_ssize_t stride, Py_ssize_t size, Py_ssize_t n,
                          const u8* data) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        memcpy(rows + i * stride, data + i * size, size)


cdef inline void copy_in(u8* rows, Py_ssize_t stride, Py_ssize_t size, Py_ssize_t n,
                         const u8* data) noexcept nogil:
    if size == 1:
        in_fixed(rows, stride, 1, n, data)
    elif size == 4:
        in_fixed(rows, stride, 4, n, data)
    elif size == 8:
        in_fixed(rows, stride, 8, n, data)
    elif size == 12:
        in_fixed(rows, stride, 12, n, data)
    elif size == 16:
        in_fixed(rows, stride, 16, n, data)
    elif size == 24:
        in_fixed(rows, stride, 24, n, data)
    else:
        in_fixed(rows, stride, size, n, data)


cdef inline void flags_in(u8* rows, Py_ssize_t stride, Py_ssize_t n, const u8* flags) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        (<f32*>(rows + i * stride))[0] = flags[i]


cdef enum:
    GROUP = 64        # records looked up and prefetched together: as many as a core can have in flight
    LINES = 4         # cache lines of each; the hardware prefetcher continues from there


cdef struct Layout:
    # [obs | next_obs | mask | actions | reward | terminated | truncated], all float32 except the observations and the
    # mask, which is bytes. Offsets:
    Py_ssize_t next_obs, masks, actions, rewards, flags
    Py_ssize_t mask_dim  # flags of a mask; 0: there are none
    Py_ssize_t row    # bytes of a record in use
    Py_ssize_t obs_bytes, action_bytes
    Py_ssize_t stride
    const i64* seams
    Py_ssize_t n_seams


cdef struct Columns:
    u8* packed        # whole records; NULL if the columns below are filled instead
    u8* obs
    u8* next_obs
    u8* masks         # NULL if there are none
    u8* actions
    f32* rewards
    u8* terminated
    u8* truncated
    f32* discounts    # only if n_step > 1
    bint with_next


cdef inline i64 walk(const Tiers* t, const Layout* layout, i64 number, i64 n_envs, i64 n_step, f64 gamma,
                     f32* reward, f32* discount) noexcept nogil:
    """Sum up to n_step rewards of one environment from transition `number` on; return the last transition counted.

    The sum stops at a termination, at a truncation, before a seam and at the newest transition.
    """
    cdef i64 end = next_seam(layout.seams, layout.n_seams, number, t.head)
    cdef const u8* record = find(t, number)
    cdef f64 sum_ = 0.0, factor = 1.0
    cdef i64 k
    for k in range(n_step):
        record = find(t, number)
        sum_ += factor * (<const f32*>(record + layout.rewards))[0]
        factor *= gamma
        if k + 1 == n_step or number + n_envs >= end or (
            (<const f32*>(record + layout.flags))[0] != 0 or (<const f32*>(record + layout.flags))[1] != 0
        ):
            break
        number += n_envs
    reward[0] = <f32>sum_
    discount[0] = <f32>factor
    return number


cdef inline void locate(const Tiers* t, const Layout* layout, const i64* slots, Py_ssize_t n,
                        const u8** rows, i64* numbers) noexcept nogil:
    """Find the records of up to GROUP slots and prefetch their first lines."""
    cdef i64 lap = t.head - t.head % t.total_capacity
    cdef Py_ssize_t i, line
    cdef i64 number
    cdef Py_ssize_t lines = min(<Py_ssize_t>LINES, (layout.row + 63) // 64)
    for i in range(n):
        # Slots are those of a ring of total_capacity: transition k is in slot k % total_capacity.
        number = lap + slots[i]
        number -= t.total_capacity if number >= t.head else 0
        numbers[i] = number
        rows[i] = find(t, number)
        prefetch(rows[i])
        for line in range(1, lines):
            prefetch(rows[i] + 64 * line)


cdef inline void flags_out(const u8** rows, Py_ssize_t offset, Py_ssize_t n, u8* out) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        out[i] = (<const f32*>(rows[i] + offset))[0] != 0


cdef inline void gather(const Tiers* t, const Layout* layout, Py_ssize_t n, u64 key, i64 n_envs, i64 n_step, f64 gamma,
                 Columns to) noexcept nogil:
    """Draw n transitions and write their columns, or whole records (without masks) if `to.packed` is given."""
    cdef const u8* rows[GROUP]
    cdef i64[GROUP] numbers
    cdef i64[CHUNK] slots
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t i, m, k
    cdef i64 length = t.head - t.first
    # Of a full memory all slots are drawn. After `take_back` some of the oldest transitions are missing.
    cdef i64 start = 0 if length == min(t.head, t.total_capacity) else t.first % t.total_capacity
    cdef Py_ssize_t width = layout.row - (0 if to.with_next else layout.obs_bytes) + (4 if n_step > 1 else 0)
    cdef u8* row
    while at < n:
        if at % CHUNK == 0:
            draw_below(key, DOMAIN_REPLAY, at, min(<Py_ssize_t>CHUNK, n - at), <u64>length, start, t.total_capacity,
                       slots)
        m = min(<Py_ssize_t>GROUP, n - at)
        locate(t, layout, slots + at % CHUNK, m, rows, numbers)
        if to.packed != NULL:
            for i in range(m):
                row = to.packed + (at + i) * width
                k = layout.obs_bytes
                memcpy(row, rows[i], k)
                if n_step > 1:
                    numbers[i] = walk(t, layout, numbers[i], n_envs, n_step, gamma,
                                      <f32*>(row + width - 16), <f32*>(row + width - 4))
                    memcpy(row + width - 16 - layout.action_bytes, rows[i] + layout.actions, layout.action_bytes)
                    rows[i] = find(t, numbers[i])
                    memcpy(row + width - 12, rows[i] + layout.flags, 8)
                    if to.with_next:
                        memcpy(row + k, rows[i] + layout.next_obs, layout.obs_bytes)
                elif to.with_next:
                    memcpy(row + k, rows[i] + k, layout.row - k)
                else:
                    memcpy(row + k, rows[i] + layout.actions, layout.row - layout.actions)
            at += m
            continue
        copy_out(rows, 0, layout.obs_bytes, m, to.obs + at * layout.obs_bytes)
        copy_out(rows, layout.actions, layout.action_bytes, m, to.actions + at * layout.action_bytes)
        if n_step == 1:
            copy_out(rows, layout.rewards, 4, m, <u8*>(to.rewards + at))
        else:
            for i in range(m):
                numbers[i] = walk(t, layout, numbers[i], n_envs, n_step, gamma, to.rewards + at + i,
                                  to.discounts + at + i)
                rows[i] = find(t, numbers[i])
        if to.with_next:
            copy_out(rows, layout.next_obs, layout.obs_bytes, m, to.next_obs + at * layout.obs_bytes)
        if to.masks != NULL:
            copy_out(rows, layout.masks, layout.mask_dim, m, to.masks + at * layout.mask_dim)
        flags_out(rows, layout.flags, m, to.terminated + at)
        flags_out(rows, layout.flags + 4, m, to.truncated + at)
        at += m

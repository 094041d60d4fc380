"""The layout of transitions in memory, and the loops that draw and gather them, without Python objects.

There is one record per transition, so that a sample touches one cache line (or a few adjacent ones) instead of one per
field:

    [obs | next_obs | mask M | actions A | reward | terminated | truncated | extra columns]      plain
    [K frame numbers | K frame numbers | frame floor | mask M | actions A | ...]                 frame stacks

The mask, of the legal actions in next_obs, is bytes and padded to whole words. Everything after it is float32, flags
included (0 or 1). The base is 64-byte aligned.
"""

from libc.string cimport memcmp, memcpy

from rlox.kernels.buffers.seams cimport next_seam
from rlox.kernels.philox cimport Block, below, join, philox, philox_lanes
from rlox.kernels.prefetch cimport prefetch
from rlox.kernels.types cimport f32, f64, i64, u8, u32, u64

cdef enum:
    CHUNK = 512  # indices drawn at a time, on the stack
    AHEAD = 24  # records requested before they are read
    LANES = 8  # Philox blocks computed side by side

# The letters "REPL" and "PRIO", so that they cannot collide with domains that are numbered in sequence.
cdef enum:
    DOMAIN_REPLAY = 0x5245_504C
    DOMAIN_PRIORITY = 0x5052_494F


cdef struct Layout:
    i64 capacity
    Py_ssize_t stride  # bytes from one record to the next
    Py_ssize_t row  # bytes of a record that are in use
    Py_ssize_t obs_bytes  # of one observation as the user sees it
    Py_ssize_t next_at  # byte offset of next_obs; 0: none
    Py_ssize_t mask_at  # byte offset of the mask
    Py_ssize_t mask_dim  # M; 0: none
    Py_ssize_t tail_at  # byte offset of the actions
    Py_ssize_t act_dim
    Py_ssize_t extra_dim
    char* base
    # Frame stacks only (n_stacked > 1).
    Py_ssize_t n_stacked
    Py_ssize_t frame_bytes
    i64 n_frames  # slots of the frame ring; frame number f is in slot f % n_frames
    i64 next_frame  # number of the next new frame
    i64 reach  # a stack may refer to frames at most this much older than next_frame
    char* frames
    # N-step returns.
    i64 n_step
    i64 n_envs
    f64 gamma
    i64 head  # transitions pushed by the time that rows are gathered
    const i64* seams
    Py_ssize_t n_seams


cdef struct Dest:
    char* obs
    char* next_obs  # NULL if there is none
    u8* masks  # NULL if there are none
    f32* actions
    f32* rewards
    u8* terminated
    u8* truncated
    f32* discounts  # NULL unless n_step > 1
    f32* extra  # (B, E) scratch or NULL


# Indices.

cdef inline void words_of_lanes(u64 key, u64 counter, u64 domain, u32* out) noexcept nogil:
    """Write LANES consecutive blocks in order, 4 words each."""
    cdef u32[LANES] a
    cdef u32[LANES] b
    cdef u32[LANES] c
    cdef u32[LANES] d
    cdef int j
    philox_lanes(key, counter, domain, LANES, a, b, c, d)
    for j in range(LANES):
        out[4 * j] = a[j]
        out[4 * j + 1] = b[j]
        out[4 * j + 2] = c[j]
        out[4 * j + 3] = d[j]


cdef inline void draw_words(u64 key, u64 counter, u64 domain, Py_ssize_t n, u32* out) noexcept nogil:
    """Write the first `n` words from block `counter` on. `out` needs room for n rounded up to 4 * LANES."""
    cdef Py_ssize_t i = 0
    cdef Block x
    if n <= 16:  # a few blocks are faster one by one
        while i < n:
            x = philox(key, counter, domain)
            counter += 1
            out[i] = x.a
            out[i + 1] = x.b
            out[i + 2] = x.c
            out[i + 3] = x.d
            i += 4
        return
    while i < n:
        words_of_lanes(key, counter, domain, out + i)
        counter += LANES
        i += 4 * LANES


cdef inline void draw_below(u64 key, u64 domain, Py_ssize_t first, Py_ssize_t n, u64 high, i64 start,
                            i64 capacity, i64* out) noexcept nogil:
    """Write draws first .. first + n - 1 of uniform slots: start + [0, high), wrapped at `capacity`.

    `n` <= CHUNK and `first` is a multiple of CHUNK. For `high` up to 2**24, a draw takes one 32-bit word, by
    multiply-shift: the relative error of a slot's probability is at most high / 2**32 (0.02 % for one million). For
    larger `high`, a draw takes two words, with an error of at most high / 2**64.
    """
    cdef u32[CHUNK * 2 + 4 * LANES] words
    cdef Py_ssize_t i
    cdef i64 slot
    if high <= <u64>1 << 24:
        draw_words(key, <u64>(first >> 2), domain, n, words)
        for i in range(n):
            slot = start + <i64>((<u64>words[i] * high) >> 32)
            out[i] = slot - (capacity if slot >= capacity else 0)
        return
    draw_words(key, <u64>(first >> 1), domain, 2 * n, words)
    for i in range(n):
        slot = start + <i64>below(join(words[2 * i], words[2 * i + 1]), high)
        out[i] = slot - (capacity if slot >= capacity else 0)


# Records.

cdef inline char* record(const Layout* layout, i64 slot) noexcept nogil:
    return layout.base + slot * layout.stride


cdef inline void copy(char* target, const char* source, Py_ssize_t n) noexcept nogil:
    """Copy n bytes, without calling memcpy for a few whole words."""
    cdef Py_ssize_t i = 0
    if n > 128 or n & 3:
        memcpy(target, source, n)
        return
    while i + 16 <= n:
        memcpy(target + i, source + i, 16)
        i += 16
    if n & 8:
        memcpy(target + i, source + i, 8)
        i += 8
    if n & 4:
        memcpy(target + i, source + i, 4)


cdef inline const char* frame(const Layout* layout, i64 number) noexcept nogil:
    # Unsigned, so that even a number that another thread has half written maps into the ring.
    return layout.frames + <i64>(<u64>number % <u64>layout.n_frames) * layout.frame_bytes


cdef inline void copy_obs(const Layout* layout, const char* source, char* target) noexcept nogil:
    """Write the observation that is stored at `source`, as bytes or as frame numbers."""
    cdef const i64* numbers = <const i64*>source
    cdef Py_ssize_t j
    if layout.n_stacked == 1:
        memcpy(target, source, layout.obs_bytes)
        return
    for j in range(layout.n_stacked):
        memcpy(target + j * layout.frame_bytes, frame(layout, numbers[j]), layout.frame_bytes)


cdef inline void copy_mask(const Layout* layout, const char* r, u8* target) noexcept nogil:
    copy(<char*>target, r + layout.mask_at, layout.mask_dim)


cdef inline void request(const Layout* layout, i64 slot) noexcept nogil:
    """Prefetch a record, or the first lines of a long one, which start the hardware prefetcher."""
    cdef const char* r = record(layout, slot)
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t end = layout.row if layout.row < 256 else 256
    while at < end:
        prefetch(r + at)
        at += 64


cdef inline i64 walk(const Layout* layout, i64 slot, i64 newer, f64* reward, f64* discount) noexcept nogil:
    """Sum the discounted rewards of up to n_step transitions; return the slot of the last one.

    `newer` is the number of transitions pushed after this one. The sum stops at a termination, at a truncation, before
    a seam and at the environment's newest transition; discount = gamma ** (transitions used).
    """
    cdef i64 number = layout.head - 1 - newer
    if layout.n_seams:
        newer = next_seam(layout.seams, layout.n_seams, number, layout.head) - 1 - number
    cdef const f32* tail = <const f32*>(record(layout, slot) + layout.tail_at) + layout.act_dim
    cdef i64 step = 1
    reward[0] = tail[0]
    discount[0] = layout.gamma
    while step < layout.n_step and tail[1] == 0 and tail[2] == 0 and newer >= layout.n_envs:
        newer -= layout.n_envs
        slot += layout.n_envs
        if slot >= layout.capacity:
            slot -= layout.capacity
        tail = <const f32*>(record(layout, slot) + layout.tail_at) + layout.act_dim
        reward[0] += discount[0] * tail[0]
        discount[0] *= layout.gamma
        step += 1
    return slot


cdef inline i64 pushed_after(const Layout* layout, i64 slot, i64 newest) noexcept nogil:
    """Return how many transitions are newer than the one in `slot`."""
    cdef i64 newer = newest - slot
    return newer + (layout.capacity if newer < 0 else 0)


cdef inline void gather_whole(const Layout* layout, const i64* slots, Py_ssize_t n, Py_ssize_t ahead, Py_ssize_t at,
                              const Dest* out, Py_ssize_t vectors, Py_ssize_t act_dim) noexcept nogil:
    """Fill rows at .. at + n - 1 in whole vectors, without extra columns and masks, except the last four of `out`.

    Bytes written past the end of a row are overwritten by the rows that follow, which is why the last rows are
    excluded: a row of one word is followed by 12 such bytes. Pass literals for `vectors` and `act_dim` where speed
    matters. The loop reads only locals: flags are written through a byte pointer, which may point at anything, so the
    compiler would otherwise reload all fields for every row. `slots` has `ahead` more entries after the first n.
    """
    cdef Py_ssize_t stride = layout.stride
    cdef Py_ssize_t next_at = layout.next_at
    cdef Py_ssize_t tail_at = layout.tail_at
    cdef Py_ssize_t bytes_ = layout.obs_bytes
    cdef const char* base = layout.base
    cdef char* obs = out.obs + at * bytes_
    cdef char* next_obs = out.next_obs + at * bytes_
    cdef f32* actions = out.actions + at * act_dim
    cdef f32* rewards = out.rewards + at
    cdef u8* terminated = out.terminated + at
    cdef u8* truncated = out.truncated + at
    cdef const char* r
    cdef const f32* tail
    cdef Py_ssize_t i, j
    for i in range(n):
        if i + AHEAD < n + ahead:
            request(layout, slots[i + AHEAD])
        r = base + slots[i] * stride
        tail = <const f32*>(r + tail_at)
        memcpy(obs, r, 16 * vectors)
        memcpy(next_obs, r + next_at, 16 * vectors)  # without next_obs, this copies obs to the same place again
        obs += bytes_
        next_obs += bytes_
        for j in range(act_dim):
            actions[j] = tail[j]
        actions += act_dim
        rewards[i] = tail[act_dim]
        terminated[i] = tail[act_dim + 1] != 0
        truncated[i] = tail[act_dim + 2] != 0


cdef inline void gather_words(const Layout* layout, const i64* slots, Py_ssize_t n, Py_ssize_t at,
                              Py_ssize_t end, Dest* out) noexcept nogil:
    """Fill rows at .. at + n - 1 of `out`, which has `end` rows in total, for float32 observations and n_step 1."""
    cdef Py_ssize_t i, j
    cdef Py_ssize_t bytes_ = layout.obs_bytes
    cdef Py_ssize_t vectors = (bytes_ + 15) >> 4
    cdef Py_ssize_t act_dim = layout.act_dim
    cdef Py_ssize_t whole = 0
    cdef const char* r
    cdef const f32* tail
    for i in range(n if n < AHEAD else AHEAD):
        request(layout, slots[i])
    if vectors <= 8 and layout.extra_dim == 0 and layout.mask_dim == 0 and end - at > 4:
        whole = n if n < end - at - 4 else end - at - 4
        if vectors == 1 and act_dim == 1:
            gather_whole(layout, slots, whole, n - whole, at, out, 1, 1)
        elif vectors == 1:
            gather_whole(layout, slots, whole, n - whole, at, out, 1, act_dim)
        elif vectors == 2:
            gather_whole(layout, slots, whole, n - whole, at, out, 2, act_dim)
        elif vectors == 3:
            gather_whole(layout, slots, whole, n - whole, at, out, 3, act_dim)
        elif vectors == 4:
            gather_whole(layout, slots, whole, n - whole, at, out, 4, act_dim)
        else:
            gather_whole(layout, slots, whole, n - whole, at, out, vectors, act_dim)
    for i in range(whole, n):
        if i + AHEAD < n:
            request(layout, slots[i + AHEAD])
        r = record(layout, slots[i])
        tail = <const f32*>(r + layout.tail_at)
        copy(out.obs + (at + i) * bytes_, r, bytes_)
        if layout.next_at:
            copy(out.next_obs + (at + i) * bytes_, r + layout.next_at, bytes_)
        if layout.mask_dim:
            copy_mask(layout, r, out.masks + (at + i) * layout.mask_dim)
        copy(<char*>(out.actions + (at + i) * act_dim), <const char*>tail, act_dim * 4)
        tail += act_dim
        out.rewards[at + i] = tail[0]
        out.terminated[at + i] = tail[1] != 0
        out.truncated[at + i] = tail[2] != 0
        for j in range(layout.extra_dim):
            out.extra[(at + i) * layout.extra_dim + j] = tail[3 + j]


cdef inline void gather_any(const Layout* layout, const i64* slots, Py_ssize_t n, i64 newest, Py_ssize_t at,
                            Dest* out) noexcept nogil:
    """Fill rows at .. at + n - 1 of `out`, for any layout and n_step; `newest` is the slot pushed last."""
    cdef Py_ssize_t i, j
    cdef i64 last
    cdef f64 reward, discount
    cdef const char* r
    cdef const f32* tail
    for i in range(n):
        if i + 4 < n:
            request(layout, slots[i + 4])
        r = record(layout, slots[i])
        copy_obs(layout, r, out.obs + at * layout.obs_bytes)
        tail = <const f32*>(r + layout.tail_at)
        memcpy(out.actions + at * layout.act_dim, tail, layout.act_dim * sizeof(f32))
        tail += layout.act_dim
        for j in range(layout.extra_dim):
            out.extra[at * layout.extra_dim + j] = tail[3 + j]
        if layout.n_step > 1:
            last = walk(layout, slots[i], pushed_after(layout, slots[i], newest), &reward, &discount)
            r = record(layout, last)
            tail = <const f32*>(r + layout.tail_at) + layout.act_dim
            out.discounts[at] = <f32>discount
            out.rewards[at] = <f32>reward
        else:
            out.rewards[at] = tail[0]
        out.terminated[at] = tail[1] != 0
        out.truncated[at] = tail[2] != 0
        if layout.next_at:
            copy_obs(layout, r + layout.next_at, out.next_obs + at * layout.obs_bytes)
        if layout.mask_dim:
            copy_mask(layout, r, out.masks + at * layout.mask_dim)
        at += 1


cdef inline void gather_rows(const Layout* layout, const i64* slots, Py_ssize_t n, i64 newest,
                             f32* out) noexcept nogil:
    """Copy whole records with float32 observations and no masks; n_step > 1 adds a column, the discounts."""
    cdef Py_ssize_t width = (layout.row >> 2) + (layout.n_step > 1)
    cdef Py_ssize_t row = layout.row
    cdef Py_ssize_t i
    cdef i64 last
    cdef f64 reward, discount
    cdef f32* tail
    cdef const f32* source
    for i in range(n if n < AHEAD else AHEAD):
        request(layout, slots[i])
    for i in range(n):
        if i + AHEAD < n:
            request(layout, slots[i + AHEAD])
        if row == 48:  # the size for CartPole, as a constant that the compiler can use
            memcpy(out, record(layout, slots[i]), 48)
        else:
            copy(<char*>out, record(layout, slots[i]), row)
        if layout.n_step > 1:
            last = walk(layout, slots[i], pushed_after(layout, slots[i], newest), &reward, &discount)
            source = <const f32*>(record(layout, last) + layout.tail_at) + layout.act_dim
            tail = out + (layout.tail_at >> 2) + layout.act_dim
            tail[0] = <f32>reward
            tail[1] = source[1]
            tail[2] = source[2]
            out[width - 1] = <f32>discount
            if layout.next_at:
                memcpy(<char*>out + layout.next_at, record(layout, last) + layout.next_at, layout.obs_bytes)
        out += width


# Frame stacks.

cdef inline bint same_frame(const Layout* layout, const char* pushed, i64 number, i64 floor) noexcept nogil:
    return number >= floor and memcmp(pushed, frame(layout, number), layout.frame_bytes) == 0


cdef inline void encode(Layout* layout, const char* stack, const i64* reference, i64 floor,
                        Py_ssize_t shift, i64* numbers) noexcept nogil:
    """Write the frame numbers of a pushed stack, storing the frames that are not in the ring yet.

    A frame may equal those of `reference` (the previous stack) at the same place or one place further, of which the
    one at distance `shift` is tried first, or the frame before it in the stack (padding repeats frames). All are
    compared byte by byte, so the stack that is read back is the one pushed, whatever the environment does.
    """
    cdef Py_ssize_t k = layout.n_stacked
    cdef Py_ssize_t j, first, second
    cdef const char* pushed = stack
    for j in range(k):
        first = j + shift
        second = j + 1 - shift
        if first < k and same_frame(layout, pushed, reference[first], floor):
            numbers[j] = reference[first]
        elif second < k and same_frame(layout, pushed, reference[second], floor):
            numbers[j] = reference[second]
        elif j > 0 and same_frame(layout, pushed, numbers[j - 1], floor):
            numbers[j] = numbers[j - 1]
        else:
            memcpy(<char*>frame(layout, layout.next_frame), pushed, layout.frame_bytes)
            numbers[j] = layout.next_frame
            layout.next_frame += 1
        pushed += layout.frame_bytes

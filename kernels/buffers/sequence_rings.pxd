"""Sequences of consecutive steps in one ring per environment: which are drawn, and copying them."""

from libc.string cimport memcpy, memset

from rlox.kernels.buffers.gather cimport CHUNK, draw_indices
from rlox.kernels.philox cimport DOMAIN_SEQUENCES
from rlox.kernels.prefetch cimport prefetch
from rlox.kernels.types cimport i64, u8, u64

cdef enum:
    OBS = 0
    ACTIONS = 1
    REWARDS = 2
    TERMINATED = 3
    TRUNCATED = 4
    IS_FIRST = 5
    NEXT_OBS = 6
    STATE = 7
    N_COLUMNS = 8
    AHEAD = 4  # of how many sequences ahead the first rows are prefetched


cdef struct Rings:
    Py_ssize_t n_envs
    Py_ssize_t slots              # of one environment; one more than the steps it can store
    const i64* heads              # (N) the free slot for the next step
    const i64* sizes              # (N) steps stored, the newest just before the head
    const i64* pushed             # (N) steps pushed so far, which is the number of the next step
    u8* changed                   # (N, slots) whether a step's state was replaced since the last mark
    char* columns[8]              # (N, slots, row) each; NULL: not stored
    Py_ssize_t sizes_of[8]        # bytes of a row


cdef inline Py_ssize_t within_episode(const Rings* rings, Py_ssize_t base, Py_ssize_t at,
                                      Py_ssize_t most) noexcept nogil:
    """Return how many of the next `most` steps belong to the episode of the first one."""
    cdef const u8* terminated = <const u8*>rings.columns[TERMINATED] + base
    cdef const u8* truncated = <const u8*>rings.columns[TRUNCATED] + base
    cdef const u8* is_first = <const u8*>rings.columns[IS_FIRST] + base
    cdef Py_ssize_t j
    for j in range(most):
        if j and is_first[at]:
            return j
        if terminated[at] | truncated[at]:
            return j + 1
        at += 1
        if at == rings.slots:
            at = 0
    return most


cdef inline void copy_steps(const char* ring, Py_ssize_t slots, Py_ssize_t at, Py_ssize_t used,
                            Py_ssize_t length, Py_ssize_t row, Py_ssize_t step, char* out) noexcept nogil:
    """Copy `used` consecutive steps, padded with zeros to `length`, to destinations `step` bytes apart."""
    cdef Py_ssize_t j
    cdef Py_ssize_t before = min(used, slots - at)
    if step == row:
        memcpy(out, ring + at * row, before * row)
        if used > before:
            memcpy(out + before * row, ring, (used - before) * row)
        if length > used:
            memset(out + used * row, 0, (length - used) * row)
        return
    for j in range(length):
        if j >= used:
            memset(out, 0, row)
        else:
            memcpy(out, ring + at * row, row)
            at += 1
            if at == slots:
                at = 0
        out += step


cdef inline Py_ssize_t slot_of(const Rings* rings, Py_ssize_t e, i64 number) noexcept nogil:
    """Return the slot of step `number` of an environment, which must still be stored."""
    cdef Py_ssize_t at = rings.heads[e] - <Py_ssize_t>(rings.pushed[e] - number)
    return at + rings.slots if at < 0 else at


cdef inline Py_ssize_t take_queued(const Rings* rings, i64* queued, Py_ssize_t length, i64* indices,
                                   Py_ssize_t most) noexcept nogil:
    """Take up to `most` sequences of steps that were not taken before, oldest first; return how many were taken.

    `queued` (N) counts the steps of each environment that were taken, or replaced before they could be taken.
    """
    cdef Py_ssize_t k, e, best
    cdef i64 oldest
    for k in range(most):
        best = -1
        for e in range(rings.n_envs):
            oldest = rings.pushed[e] - rings.sizes[e]
            if queued[e] < oldest:
                queued[e] = oldest
            if queued[e] + length <= rings.pushed[e] and (best < 0 or queued[e] < queued[best]):
                best = e
        if best < 0:
            return k
        indices[k] = queued[best] * rings.n_envs + best
        queued[best] += length
    return most


cdef inline i64 count_starts(const Rings* rings, Py_ssize_t length, bint cross, i64* offsets) noexcept nogil:
    """Return the number of steps at which a sequence may start.

    `offsets` (N + 1), unless NULL, takes the number of such steps in the environments before each environment.
    """
    cdef i64 total = 0
    cdef Py_ssize_t e
    for e in range(rings.n_envs):
        if offsets != NULL:
            offsets[e] = total
        total += max(<i64>0, rings.sizes[e] - length + 1) if cross else rings.sizes[e]
    if offsets != NULL:
        offsets[rings.n_envs] = total
    return total


cdef inline void draw_starts(const Rings* rings, const i64* offsets, u64 key, i64* indices,
                             Py_ssize_t b) noexcept nogil:
    """Draw `b` starts; `offsets` (N + 1) are those of `count_starts`."""
    cdef i64[CHUNK] starts
    cdef Py_ssize_t base = 0
    cdef Py_ssize_t i, n, low, high, middle
    while base < b:
        n = min(<Py_ssize_t>CHUNK, b - base)
        draw_indices(<u64>offsets[rings.n_envs], key, <u64>base, DOMAIN_SEQUENCES, starts, n)
        for i in range(n):
            low, high = 0, rings.n_envs - 1
            while low < high:
                middle = (low + high) >> 1
                if offsets[middle + 1] > starts[i]:
                    high = middle
                else:
                    low = middle + 1
            # Counted from the oldest step of the environment.
            indices[base + i] = (rings.pushed[low] - rings.sizes[low] + starts[i] - offsets[low]) * rings.n_envs + low
        base += n


cdef inline void copy_sequences(const Rings* rings, const i64* indices, Py_ssize_t b, Py_ssize_t length, bint cross,
                                bint time_major, char** out, u8* mask) noexcept nogil:
    """Copy the `b` sequences that start at `indices`; an index is the step's number times N, plus the environment."""
    cdef Py_ssize_t j, k, e, at, used, row, soon
    cdef i64 number
    for k in range(b):
        if k + AHEAD < b:
            e, number = indices[k + AHEAD] % rings.n_envs, indices[k + AHEAD] // rings.n_envs
            soon = e * rings.slots + slot_of(rings, e, number)
            for j in range(STATE):
                if out[j] != NULL:
                    prefetch(rings.columns[j] + soon * rings.sizes_of[j])
        e, number = indices[k] % rings.n_envs, indices[k] // rings.n_envs
        at = slot_of(rings, e, number)
        used = length
        if not cross:
            used = within_episode(rings, e * rings.slots, at, min(length, rings.pushed[e] - number))
        for j in range(STATE):
            row = rings.sizes_of[j]
            if out[j] != NULL:
                copy_steps(rings.columns[j] + e * rings.slots * row, rings.slots, at, used, length, row,
                           b * row if time_major else row,
                           out[j] + (k if time_major else k * length) * row)
        if out[STATE] != NULL:
            row = rings.sizes_of[STATE]
            memcpy(out[STATE] + k * row, rings.columns[STATE] + (e * rings.slots + at) * row, row)
        if mask != NULL:
            for j in range(length):
                mask[j * b + k if time_major else k * length + j] = j < used


cdef inline void write_states(const Rings* rings, const i64* indices, Py_ssize_t b, Py_ssize_t length,
                              const char* states) noexcept nogil:
    """Replace the states of the `length` steps after each of `indices` with states (b, length).

    Skips steps that are not stored or that begin an episode.
    """
    cdef Py_ssize_t j, k, e, at
    cdef Py_ssize_t row = rings.sizes_of[STATE]
    cdef i64 number
    for k in range(b):
        e, number = indices[k] % rings.n_envs, indices[k] // rings.n_envs
        for j in range(length):
            number += 1
            if number >= rings.pushed[e]:
                break
            if number < rings.pushed[e] - rings.sizes[e]:
                continue
            at = e * rings.slots + slot_of(rings, e, number)
            if not (<const u8*>rings.columns[IS_FIRST])[at]:
                memcpy(rings.columns[STATE] + at * row, states + (k * length + j) * row, row)
                rings.changed[at] = 1

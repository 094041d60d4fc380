"""Records of one size in two tiers: the newest in memory, all older ones in a mapped file."""

cimport numpy as cnp

from rlox.kernels.types cimport i64, u8

cdef enum:
    # A file has room for the ring and for two states that name it.
    COPIES = 3


cdef struct Tiers:
    # Transitions are numbered from 0 in the order of their pushes. The newest `hot_capacity` lie in a ring in
    # memory. Blocks of 1 << shift consecutive ones are copied to the file before their places in the ring are
    # needed; table[b % n_table] says where in the file block b lies.
    u8* hot
    const u8* cold
    i64* table
    i64 stride
    i64 hot_capacity
    i64 total_capacity
    i64 n_table      # 0 if all is in memory
    int shift
    i64 head         # number of the next transition
    i64 first        # number of the oldest that may be sampled
    i64 hot_at       # head % hot_capacity
    i64 n_written    # number of the next block
    i64 table_at     # n_written % n_table


cdef inline const u8* find(const Tiers* t, i64 number) noexcept nogil:
    """The record of a transition. No division: a subtraction and, in the file, a look-up."""
    cdef i64 block
    cdef i64 at = t.hot_at - (t.head - number)
    if t.head - number <= t.hot_capacity:
        if at < 0:
            at += t.hot_capacity
        return t.hot + at * t.stride
    block = number >> t.shift
    at = t.table_at - (t.n_written - block)
    if at < 0:
        at += t.n_table
    return t.cold + ((t.table[at] << t.shift) + (number & ((<i64>1 << t.shift) - 1))) * t.stride


cdef class Store:
    cdef Tiers tiers
    cdef object __weakref__
    cdef object cold          # ColdFile, or None once closed or forked
    cdef int fd               # its
    cdef i64 size             # two
    cdef i64 checked_at       # millisecond
    cdef bint forked
    cdef cnp.ndarray hot      # keeps tiers.hot alive, as `rows` and `table` do for theirs
    cdef cnp.ndarray rows
    cdef cnp.ndarray table
    cdef cnp.ndarray users    # (COPIES * n_table,) uint8: who needs a block of the file
    cdef i64 free_from        # no block below it is free
    cdef list named           # serial numbers of the states that own bits 1 and 2, or None
    cdef object lock

    cdef inline i64 length(self) noexcept:
        return self.tiers.head - self.tiers.first

    cdef inline i64 room(self) except -1:
        """How many records can follow, one after the other from `place`; at least 1.

        OSError, and nothing changed, if the disk does not take the block that must make way.
        """
        cdef Tiers* t = &self.tiers
        cdef i64 until_end = t.hot_capacity - t.hot_at
        cdef i64 until_block
        if t.n_table == 0:
            return until_end
        until_block = (t.n_written << t.shift) + t.hot_capacity - t.head
        if until_block <= 0:
            self.write_block()
            until_block = (t.n_written << t.shift) + t.hot_capacity - t.head
        return min(until_end, until_block)

    cdef inline u8* place(self) noexcept:
        return self.tiers.hot + self.tiers.hot_at * self.tiers.stride

    cdef inline void advance(self, i64 n) noexcept:
        """Count `n` <= room() records that were written at `place`."""
        cdef Tiers* t = &self.tiers
        t.head += n
        t.hot_at += n
        if t.hot_at == t.hot_capacity:
            t.hot_at = 0
        t.first = max(t.first, t.head - t.total_capacity)

    cdef inline int check_open(self, str method) except -1:
        if self.cold is None:
            self.refuse(method)
        return 0

    cdef int bind(self, object cold) except -1
    cdef int write_block(self) except -1
    cdef int refuse(self, str method) except -1
    cdef int check_whole(self) except -1
    cdef void give_up(self) noexcept
    cdef int close(self, object keep) except -1
    cdef cnp.ndarray blocks(self)
    cdef cnp.ndarray copy_records(self, i64 first)
    cdef dict save(self, bint include_cold)
    cdef int restart(self, i64 first) except -1
    cdef int fill(self, i64 first, cnp.ndarray records) except -1
    cdef int adopt(self, dict state) except -1
    cdef int put_newest(self, i64 head, cnp.ndarray records) except -1

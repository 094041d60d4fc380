"""Records of one size in two tiers: the newest in memory, all older ones in a mapped file."""

cimport numpy as cnp

from rlox.kernels.types cimport i64, u8

cdef enum:
    # The file has room for the blocks in use and for those of two saved states that refer to it.
    COPIES = 3


cdef struct Tiers:
    # Transitions are numbered from 0 in the order of their pushes. The newest `hot_capacity` are in a ring in
    # memory. Blocks of 1 << shift consecutive transitions are copied to the file before their places in the ring
    # are reused; table[b % n_table] is the position of block b in the file.
    u8* hot
    const u8* cold
    i64* table
    i64 stride
    i64 hot_capacity
    i64 total_capacity
    i64 n_table      # 0 if everything is in memory
    int shift
    i64 head         # number of the next transition
    i64 first        # number of the oldest that may be sampled
    i64 hot_at       # head % hot_capacity
    i64 n_written    # number of the next block
    i64 table_at     # n_written % n_table


cdef inline const u8* find(const Tiers* t, i64 number) noexcept nogil:
    """Return the record of a transition. Takes a subtraction and, in the file, a look-up, but no division."""
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
    cdef int fd               # of `cold`
    cdef i64 size             # of `cold`, in bytes
    cdef i64 checked_at       # time of the last size check, in milliseconds
    cdef bint forked
    cdef cnp.ndarray hot      # keeps tiers.hot alive, as `rows` and `table` do for tiers.cold and tiers.table
    cdef cnp.ndarray rows
    cdef cnp.ndarray table
    cdef cnp.ndarray users    # (COPIES * n_table,) uint8: bits for who needs each block of the file
    cdef i64 free_from        # no block below it is free
    cdef list named           # serial numbers of the states that own bits 1 and 2, or None
    cdef object lock

    cdef inline i64 length(self) noexcept:
        return self.tiers.head - self.tiers.first

    cdef inline i64 room(self) except -1:
        """Return how many consecutive records can be written at `place`; at least 1.

        Raises OSError, without changing anything, if the block that must make room cannot be written to the disk.
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
        """Append the `n` <= room() records that were written at `place`."""
        cdef Tiers* t = &self.tiers
        t.head += n
        t.hot_at += n
        if t.hot_at == t.hot_capacity:
            t.hot_at = 0
        t.first = max(t.first, t.head - t.total_capacity)

    cdef int take_back(self, i64 n) except -1

    cdef inline int check_open(self, str method) except -1:
        if self.cold is None:
            self.refuse(method)
        return 0

    cdef int bind(self, object cold) except -1
    cdef int write_block(self) except -1
    cdef int refuse(self, str method) except -1
    cdef int check_whole(self) except -1
    cdef void release(self) noexcept
    cdef int close(self, object keep) except -1
    cdef cnp.ndarray blocks(self)
    cdef cnp.ndarray copy_records(self, i64 first)
    cdef dict save(self, bint include_cold)
    cdef int restart(self, i64 first) except -1
    cdef int fill(self, i64 first, cnp.ndarray records) except -1
    cdef int adopt(self, dict state) except -1
    cdef int put_newest(self, i64 head, cnp.ndarray records) except -1

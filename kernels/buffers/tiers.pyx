"""Records of one size in two tiers: the newest in memory, all older ones in a mapped file."""

import errno
import os
import threading
import weakref

import numpy as np

cimport numpy as cnp
from libc.string cimport memcpy
from posix.stat cimport fstat, struct_stat
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from rlox.kernels.buffers.cold_file import ColdFile

from rlox.kernels.types cimport i64, u8

cnp.import_array()

# A block is what is written to the file at once. With 32 KiB the time of a push_batch is even; with 128 transitions
# the writes stay out of the 99th percentile of a push; 8 MiB (2 ms, image stacks of 84x84x4) limit the time of a push.
cdef enum:
    BLOCK_BYTES = 1 << 15
    BLOCK_ROWS = 128
    MAX_BLOCK_BYTES = 1 << 23
    CURRENT = 4  # bits of `users`, who needs a block of the file: this one for the buffer itself, 1 and 2 for states

# The open buffers of this process, which a forked child must not use.
OPEN = weakref.WeakSet()


def _disown_all() -> None:
    for buffer in list(OPEN):
        buffer._disown()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_disown_all)


cdef class Store:
    """The records of an `MmapReplayBuffer`, in memory and in the file, as opaque bytes."""

    def __init__(self, cold_path, str record, i64 stride, i64 hot_capacity, i64 total_capacity, bint preallocate):
        cdef Tiers* t = &self.tiers
        cdef i64 rows = min(max(BLOCK_BYTES // stride, min(BLOCK_ROWS, MAX_BLOCK_BYTES // stride)), hot_capacity)
        t.stride = stride
        t.hot_capacity = hot_capacity
        t.total_capacity = total_capacity
        while 2 << t.shift <= rows:
            t.shift += 1
        t.n_table = 0
        if total_capacity > hot_capacity:
            # One more than the blocks that fit: the oldest and the newest block are both partly in use.
            t.n_table = ((total_capacity - hot_capacity - 1) >> t.shift) + 2
        self.lock = threading.Lock()
        self.table = np.full(t.n_table, -1, np.int64)
        self.users = np.zeros(COPIES * t.n_table, np.uint8)
        try:
            # Zeros, which cost nothing until touched, because unused places of a block may be written to the file.
            memory = np.zeros(hot_capacity * stride + 64, np.uint8)
        except MemoryError as e:
            raise MemoryError(
                f"MmapReplayBuffer: hot_capacity must fit in memory, got {hot_capacity} transitions of {stride} bytes"
            ) from e
        self.hot = memory[-memory.ctypes.data % 64 :][: hot_capacity * stride]
        t.hot = <u8*>cnp.PyArray_DATA(self.hot)
        t.table = <i64*>cnp.PyArray_DATA(self.table)
        self.named = [None, None]
        self.bind(ColdFile.create(
            cold_path, record, stride, 1 << t.shift, COPIES * t.n_table, t.n_table if preallocate else 0
        ))
        OPEN.add(self)

    cdef int bind(self, object cold) except -1:
        self.cold = cold
        self.rows = cold.rows
        self.fd = cold.fd
        self.size = cold.size
        self.tiers.cold = <const u8*>cnp.PyArray_DATA(self.rows)
        return 0

    cdef int write_block(self) except -1:
        cdef Tiers* t = &self.tiers
        cdef u8* users = <u8*>cnp.PyArray_DATA(self.users)
        cdef i64 first, at, n, block, old
        with self.lock:
            self.check_open("push")
            # Another thread may have written it while this one waited.
            first = t.n_written << t.shift
            if t.head - t.hot_capacity < first:
                return 0
            n = 1 << t.shift
            at = t.hot_at - (t.head - first)
            if at < 0:
                at += t.hot_capacity
            # The block that this table entry refers to so far, if any, is older than what may be sampled.
            old = t.table[t.table_at]
            # Find the lowest block that is not needed. There is one, because two states and the rest of the table
            # together need fewer than the COPIES * n_table blocks.
            block = self.free_from
            if old >= 0 and users[old] == CURRENT and old < block:
                block = old
            while block != old and users[block] or block == old and users[block] != CURRENT:
                block += 1
            end = min(at + n, t.hot_capacity)
            parts = [self.hot[at * t.stride : end * t.stride]]
            if end < at + n:
                parts.append(self.hot[: (at + n - end) * t.stride])
            self.cold.write(block, parts)
            if old >= 0:
                users[old] &= ~CURRENT
            users[block] |= CURRENT
            self.free_from = block + 1 if old < 0 or users[old] else min(block + 1, old)
            t.table[t.table_at] = block
            t.n_written += 1
            t.table_at += 1
            if t.table_at == t.n_table:
                t.table_at = 0
        return 0

    cdef int take_back(self, i64 n) except -1:
        """Drop the `n` newest transitions, all of which are newer than any saved state.

        Their places get back what they had before, from the file. What became too old since then is lost.
        """
        cdef Tiers* t = &self.tiers
        cdef u8* users = <u8*>cnp.PyArray_DATA(self.users)
        cdef i64 head = t.head - n, number, block
        if n == 0:
            return 0
        self.check_whole()
        with self.lock:
            for number in range(max(head - t.hot_capacity, t.first), min(t.head - t.hot_capacity, head)):
                memcpy(t.hot + number % t.hot_capacity * t.stride, find(t, number), t.stride)
            # Blocks with one of them are in memory again, as a whole.
            while t.n_written << t.shift > head:
                t.n_written -= 1
                t.table_at = (t.table_at if t.table_at else t.n_table) - 1
                block = t.table[t.table_at]
                users[block] &= ~CURRENT
                self.free_from = min(self.free_from, block)
                t.table[t.table_at] = -1
            t.head = head
            t.hot_at = head % t.hot_capacity
        return 0

    cdef int refuse(self, str method) except -1:
        raise ValueError(
            f"MmapReplayBuffer.{method}: the buffer must be "
            + ("used in the process that created it, got a fork of it" if self.forked else "open, got a closed one")
        )

    cdef int check_whole(self) except -1:
        """Raise if the file was cut short: reading past its end through the map would kill the process.

        Checks at most once per millisecond, since the system call takes as long as a small sample.
        """
        cdef timespec now
        cdef struct_stat status
        clock_gettime(CLOCK_MONOTONIC, &now)
        cdef i64 milliseconds = now.tv_sec * 1000 + now.tv_nsec // 1000000
        if milliseconds == self.checked_at:
            return 0
        if fstat(self.fd, &status) != 0 or status.st_size < self.size:
            raise OSError(
                errno.EIO, "MmapReplayBuffer: cold_path must not be modified, got a file that was cut short",
                self.cold.path,
            )
        self.checked_at = milliseconds
        return 0

    cdef void release(self) noexcept:
        self.cold = None
        self.rows = None
        self.hot = None
        self.tiers.cold = NULL
        self.tiers.hot = NULL

    def _disown(self):
        """Release the file in a forked child; it still belongs to the parent."""
        cold = self.cold
        if cold is not None:
            self.forked = True
            self.release()
            cold.close()

    cdef int close(self, object keep) except -1:
        with self.lock:
            cold = self.cold
            if cold is not None:
                self.release()
                cold.close(keep)
        return 0

    cdef cnp.ndarray blocks(self):
        """Return the positions in the file of the blocks with transitions from `tiers.first` on, oldest first."""
        cdef Tiers* t = &self.tiers
        cdef i64 n = max(t.n_written - (t.first >> t.shift), 0)
        if n == 0:
            return np.empty(0, np.int64)
        return self.table[np.arange(t.table_at - n, t.table_at) % t.n_table]

    cdef cnp.ndarray copy_records(self, i64 first):
        """Return the records from number `first` on, (n, stride) uint8."""
        cdef Tiers* t = &self.tiers
        cdef cnp.ndarray records = np.empty((t.head - first, t.stride), np.uint8)
        cdef u8* to = <u8*>cnp.PyArray_DATA(records)
        cdef i64 number
        with nogil:
            for number in range(first, t.head):
                memcpy(to + (number - first) * t.stride, find(t, number), t.stride)
        return records

    cdef dict save(self, bint include_cold):
        cdef Tiers* t = &self.tiers
        cdef u8 bit
        with self.lock:
            self.check_open("get_state")
            if include_cold:
                self.check_whole()
                return {"head": t.head, "n": self.length(), "records": self.copy_records(t.first)}
            blocks = self.blocks()
            records = self.copy_records(max(t.first, t.head - t.hot_capacity))
            # The new state replaces the older of the two; the blocks of that are free once the header is written.
            which = 0 if self.named[0] is None else 1 if self.named[1] is None else self.named.index(min(self.named))
            serial = self.cold.header["serial"] + 1
            other = self.named[1 - which]
            self.cold.name([serial] if other is None else [other, serial])
            bit = 1 << which
            self.users &= 255 ^ bit
            self.users[blocks] |= bit
            self.free_from = 0
            self.named[which] = serial
            return {
                "head": t.head,
                "n": self.length(),
                "records": records,
                "cold_id": self.cold.id,
                "cold_path": self.cold.path,
                "cold_serial": serial,
                "cold_blocks": blocks,
                "cold_written": t.n_written,
            }

    cdef int restart(self, i64 first) except -1:
        """Drop all records; the next transition gets the number `first`."""
        cdef Tiers* t = &self.tiers
        t.head = t.first = first
        t.hot_at = first % t.hot_capacity
        t.n_written = first >> t.shift
        t.table_at = t.n_written % t.n_table if t.n_table else 0
        self.table = np.full(t.n_table, -1, np.int64)  # a new array: another thread may still read the old one
        t.table = <i64*>cnp.PyArray_DATA(self.table)
        self.users &= 255 ^ CURRENT
        self.free_from = 0
        return 0

    cdef int fill(self, i64 first, cnp.ndarray records) except -1:
        """Replace everything by `records`, numbered from `first`. Empty if they cannot be written to the disk."""
        cdef Tiers* t = &self.tiers
        cdef const u8* data = <const u8*>cnp.PyArray_DATA(records)
        cdef i64 n = records.shape[0]
        cdef i64 done = 0, chunk
        self.restart(first)
        try:
            while done < n:
                chunk = min(self.room(), n - done)
                memcpy(self.place(), data + done * t.stride, chunk * t.stride)
                self.advance(chunk)
                done += chunk
        except OSError:
            self.restart(0)
            raise
        return 0

    cdef int adopt(self, dict state) except -1:
        """Continue with the file that `state` refers to. Changes nothing if that is impossible."""
        cdef Tiers* t = &self.tiers
        cdef i64 head = state["head"], first = head - state["n"], n_written = state["cold_written"]
        cdef i64 newest = max(head - first - t.hot_capacity, 0)  # number of transitions that are only in the file
        where = "MmapReplayBuffer.set_state"
        blocks = state["cold_blocks"]
        serial = state["cold_serial"]
        lowest = first >> t.shift
        if not (
            isinstance(blocks, np.ndarray) and blocks.dtype == np.int64 and blocks.ndim == 1
            and len(blocks) <= t.n_table and len(set(blocks.tolist())) == len(blocks)
            and (len(blocks) == 0 or (blocks.min() >= 0 and blocks.max() < len(self.users)))
        ):
            raise ValueError(f"{where}: cold_blocks must be distinct blocks of the file, got {blocks!r}")
        if max(n_written - lowest, 0) != len(blocks) or n_written << t.shift > head or (
            newest and n_written << t.shift < first + newest
        ):
            raise ValueError(f"{where}: cold_written must fit head and cold_blocks, got {n_written}")
        with self.lock:
            if state["cold_id"] == self.cold.id:
                cold = self.cold
                if serial not in cold.header["named"]:
                    raise ValueError(
                        f"{where}: state must be one of the two newest that refer to {cold.path!r} "
                        f"({cold.header['named']}), got number {serial}, whose transitions may have been overwritten"
                    )
            else:
                folder = os.path.dirname(self.cold.path)
                path = state["cold_path"]
                cold = ColdFile.adopt(
                    [os.path.join(folder, os.path.basename(path)), path], state["cold_id"], serial
                )
                mine = self.cold.header
                for key in ("record", "stride", "block_rows", "n_blocks"):
                    if cold.header[key] != mine[key]:
                        cold.close(keep=True)
                        raise ValueError(
                            f"{where}: state must be of a buffer like this one, with {key} {mine[key]!r}, got "
                            f"{cold.header[key]!r}"
                        )
            cold.name([serial])
            if cold is not self.cold:
                old = self.cold
                self.bind(cold)
                old.close()
            self.users[:] = 0
            self.restart(first)
            self.users[blocks] = CURRENT | 1
            self.named = [serial, None]
            t.n_written = n_written
            t.table_at = n_written % t.n_table if t.n_table else 0
            if len(blocks):
                self.table[np.arange(n_written - len(blocks), n_written) % t.n_table] = blocks
            self.put_newest(head, state["records"])
        return 0

    cdef int put_newest(self, i64 head, cnp.ndarray records) except -1:
        """Copy `records`, the newest ones, into the ring in memory without writing to the file."""
        cdef Tiers* t = &self.tiers
        cdef const u8* data = <const u8*>cnp.PyArray_DATA(records)
        cdef i64 n = records.shape[0]
        cdef i64 k
        for k in range(n):
            memcpy(t.hot + (head - n + k) % t.hot_capacity * t.stride, data + k * t.stride, t.stride)
        t.head = head
        t.hot_at = head % t.hot_capacity
        return 0

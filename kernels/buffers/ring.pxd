"""A ring of transitions in memory: how they are pushed and saved. store.pxd describes the layout of a record."""

cimport numpy as cnp

from rlox.kernels.buffers.store cimport Layout
from rlox.kernels.types cimport f32, i64

cdef enum:
    UNDECIDED = -1


cdef inline i64 first_slot(i64 capacity, i64 size, i64 cursor) noexcept nogil:
    """Return the slot of draw 0. In a full ring this is slot 0."""
    if size == capacity:
        return 0
    cdef i64 slot = cursor - size
    return slot + (capacity if slot < 0 else 0)


cdef inline i64 last_slot(i64 capacity, i64 cursor) noexcept nogil:
    return (cursor if cursor else capacity) - 1


cdef inline void write_tail(const Layout* layout, char* r, const f32* action, f32 reward, int term,
                            int trunc) noexcept nogil:
    """Write the fields after the observations of a record."""
    cdef f32* tail = <f32*>(r + layout.tail_at)
    cdef Py_ssize_t j
    for j in range(layout.act_dim):
        tail[j] = action[j]
    tail += layout.act_dim
    tail[0] = reward
    tail[1] = <f32>term
    tail[2] = <f32>trunc
    for j in range(layout.extra_dim):
        tail[3 + j] = 0


cdef inline void took_one(i64 capacity, i64* count, i64* size, i64* cursor) noexcept nogil:
    count[0] += 1
    cursor[0] += 1
    if cursor[0] == capacity:
        cursor[0] = 0
    if size[0] < capacity:
        size[0] += 1


cdef class Ring:
    cdef Layout layout
    cdef i64 count  # transitions pushed since the start or clear()
    cdef i64 size  # how many of them are still stored
    cdef i64 cursor  # count % capacity, the slot of the next transition
    cdef int has_next  # UNDECIDED, 0 or 1
    cdef int obs_type
    cdef tuple shape
    cdef Py_ssize_t obs_dim_
    cdef cnp.ndarray memory
    cdef cnp.ndarray frame_memory
    cdef cnp.ndarray seams_
    cdef cnp.ndarray previous  # (n_envs, K) frame numbers of each environment's last stack
    cdef dict column_dims
    cdef dict config
    cdef str name
    # Prefixes of error messages. They are created once, because creating one takes longer than a call.
    cdef str in_sample, in_packed, in_batch, in_update

    cdef inline i64 oldest(self) noexcept nogil:
        return first_slot(self.layout.capacity, self.size, self.cursor)

    cdef inline i64 newest(self) noexcept nogil:
        return last_slot(self.layout.capacity, self.cursor)

    cdef object positive(self, object value, str label)
    cdef int too_large(self, what, nbytes) except -1
    cdef cnp.ndarray reserve(self, nbytes)
    cdef int arrange(self) except -1
    cdef int allocate(self) except -1
    cdef void set_seams(self, cnp.ndarray seams)
    cdef void reset(self)
    cdef int decide(self, bint has_next) except -1
    cdef void left(self, i64 slot) noexcept
    cdef int wrong_obs(self, object array, str where, str label) except -1
    cdef cnp.ndarray as_obs(self, object value, str label)
    cdef cnp.ndarray as_action(self, object value)
    cdef i64 store(self, object obs, object action, object reward, object terminated, object truncated,
                   object next_obs) except -1
    cdef i64 write(self, const char* obs, const char* next_obs, const f32* action, f32 reward, int term,
                   int trunc) noexcept
    cdef cnp.ndarray as_rows(self, object value, Py_ssize_t n, str label)
    cdef Py_ssize_t store_batch(self, object obs, object next_obs, object actions, object rewards,
                                object terminated, object truncated, object next_masks) except -1
    cdef tuple state_keys(self)

"""Declarations of the uniform replay memory, from which the prioritised one is derived."""

cimport numpy as cnp

from rlox.kernels.buffers.access cimport rlox_replay_access
from rlox.kernels.buffers.ring cimport Ring
from rlox.kernels.buffers.store cimport Layout
from rlox.kernels.types cimport i64, u64


# The parts of a buffer that another kernel may use without a lock and without touching Python objects.
cdef struct Shared:
    Layout* layout
    i64* count
    i64* size
    i64* cursor


cdef class ReplayBuffer(Ring):
    cdef Shared shared
    cdef rlox_replay_access ways
    cdef bint weighted  # draws use a tree that other threads may change, and so need the GIL

    cdef int ready(self, str where) except -1
    cdef Py_ssize_t as_batch_size(self, object batch_size, str where) except -1
    cdef void draw(self, u64 key, Py_ssize_t first, Py_ssize_t n, i64* slots) noexcept nogil
    cdef cnp.ndarray output(self, object given, str key, int type_num, object dtype, tuple shape)
    cdef object gather_batch(self, Py_ssize_t n, const i64* slots, u64 key, i64 window, object out)
    cdef cnp.ndarray occupied(self, object indices, str where)
    cdef int check_packed(self, str where) except -1

"""Seams: the ascending numbers of transitions that do not continue the ones pushed before them."""

import numpy as np

cimport numpy as cnp
from rlox.kernels.types cimport i64


cdef inline i64 next_seam(const i64* seams, Py_ssize_t n, i64 number, i64 head) noexcept nogil:
    """Return the first seam after transition `number`, or `head` if there is none before it."""
    cdef Py_ssize_t low = 0, high = n, middle
    while low < high:
        middle = (low + high) >> 1
        if seams[middle] > number:
            high = middle
        else:
            low = middle + 1
    return seams[low] if low < n and seams[low] < head else head


cdef inline cnp.ndarray no_seams():
    return np.empty(0, np.int64)


cdef inline cnp.ndarray with_seam(cnp.ndarray seams, i64 oldest, i64 head):
    """Return a new array with the seams among the transitions from `oldest` on, and a seam before transition `head`."""
    if head == oldest:
        return no_seams()
    return np.append(seams[(seams > oldest) & (seams < head)], np.int64(head))


cdef inline cnp.ndarray as_seams(object value, i64 head, str where):
    """Return a copy of the seams of a saved state; states of rlox 0.6.0 have none (None)."""
    if value is None:
        return no_seams()
    if not (
        isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim == 1
        and bool(np.all(np.diff(value) > 0)) and bool(np.all((value > 0) & (value <= head)))
    ):
        raise ValueError(f"{where}: state['seams'] must be ascending numbers in [1, {head}], got {value!r}")
    return value.copy()

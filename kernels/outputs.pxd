"""Allocation of the arrays that kernels return."""

cimport numpy as cnp


cdef inline cnp.ndarray fresh(object empty, int ndim, cnp.npy_intp* dims, int type_num):
    """Return an uninitialised float array of one or two dimensions.

    Large arrays come from `empty`. Pass rlox.kernels.memory.empty, which a .pxd cannot import itself.
    """
    cdef Py_ssize_t size = dims[0] * (dims[1] if ndim == 2 else 1)
    if size < 16384:  # the C library itself reuses smaller blocks
        return cnp.PyArray_EMPTY(ndim, dims, type_num, 0)
    return empty(dims[0], dims[1] if ndim == 2 else -1, type_num)

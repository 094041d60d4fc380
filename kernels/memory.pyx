"""Memory of large results, used again once no one holds the result.

A fresh array of some hundred kilobytes costs more than what most kernels do with it: the C library gives
such memory back to the system when it is freed, and the next array gets it page by page, each by a fault and
filled with zeros. A training loop makes results of the same few sizes again and again, so their memory is
kept here instead, at most 32 MiB in all.

An array from `empty` has a `Block` as its base; views of it, and what other libraries make from it without
copying, hold that base. The block puts its memory back when its reference count reaches zero, so memory
that anyone can still reach is never given out again. All of it happens under the GIL.
"""

cimport cython
cimport numpy as cnp

cnp.import_array()

cdef Py_ssize_t LIMIT = 32 << 20  # bytes kept in all
cdef list free = []  # uint8 arrays that no result uses, the last one given back at the end
cdef Py_ssize_t kept = 0  # their bytes


@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class Block:
    """The base of one result: owns its memory, and gives it back at the end."""

    cdef cnp.ndarray memory

    def __dealloc__(self):
        global kept
        cdef Py_ssize_t size
        if free is None or self.memory is None:  # the interpreter is shutting down
            return
        size = cnp.PyArray_SIZE(self.memory)
        if size > LIMIT // 2:
            return
        while free and kept + size > LIMIT:
            kept -= cnp.PyArray_SIZE(<cnp.ndarray>free[0])
            del free[0]
        free.append(self.memory)
        kept += size


def empty(length: int, width: int, type_num: int) -> cnp.ndarray:
    """Return an uninitialised C-contiguous array, aligned to 64 bytes.

    Its `base` is a `Block`, so ``flags.owndata`` is False; in every other respect it is an ordinary array.

    Parameters
    ----------
    length, width
        The shape (length, width), or (length,) where width is -1; neither is checked.
    type_num
        NumPy's number of float32 or float64.
    """
    global kept
    cdef Py_ssize_t i
    cdef cnp.npy_intp[2] dims = [length, width]
    cdef Py_ssize_t size = dims[0] * (1 if width < 0 else dims[1]) * (4 if type_num == cnp.NPY_FLOAT32 else 8)
    cdef cnp.npy_intp padded = size + 64
    cdef Block block = Block.__new__(Block)
    for i in range(len(free) - 1, -1, -1):
        if cnp.PyArray_SIZE(<cnp.ndarray>free[i]) == padded:
            block.memory = free.pop(i)
            kept -= padded
            break
    else:
        block.memory = cnp.PyArray_EMPTY(1, &padded, cnp.NPY_UINT8, 0)
    cdef size_t start = (<size_t>cnp.PyArray_DATA(block.memory) + 63) & ~<size_t>63
    result = cnp.PyArray_SimpleNewFromData(1 if width < 0 else 2, dims, type_num, <void*>start)
    cnp.set_array_base(result, block)
    return result

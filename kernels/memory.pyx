"""Reuse of the memory of large results, and of PyTorch's tensors, that are no longer referenced.

Allocating an array of a few hundred kilobytes takes longer than most kernels need to fill it: the C library returns
such memory to the system when it is freed, and the next array gets it page by page, each with a page fault and filled
with zeros. A training loop creates results of the same few sizes again and again, so this module keeps their memory
instead, at most 32 MiB in total.

The base of an array from `empty` is a `Block`. Views of the array, and objects that other libraries create from it
without copying, refer to that block. It returns its memory to this module when its reference count reaches zero, so
memory that is still reachable is never handed out again. All of this happens under the GIL.
"""

cimport cython
cimport numpy as cnp

cnp.import_array()

cdef extern from *:
    """
    #include <stdlib.h>
    #ifdef __GLIBC__
    #include <malloc.h>

    static void rlox_keep_freed(void)
    {
        /* What the user has set takes precedence. */
        if (getenv("MALLOC_TRIM_THRESHOLD_") || getenv("MALLOC_MMAP_THRESHOLD_") || getenv("GLIBC_TUNABLES"))
            return;
        mallopt(M_MMAP_THRESHOLD, 32 << 20); /* the largest value allowed */
        mallopt(M_TRIM_THRESHOLD, 256 << 20);
    }
    #else
    static void rlox_keep_freed(void) {}
    #endif
    """
    void rlox_keep_freed() noexcept nogil

cdef Py_ssize_t LIMIT = 32 << 20  # bytes kept in total
cdef list free = []  # uint8 arrays that no result uses, the most recently returned one last
cdef Py_ssize_t kept = 0  # total size of `free` in bytes


@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class Block:
    """The base of one result: owns its memory and returns it when the result is freed."""

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
        The shape (length, width), or (length,) if width is -1. Neither is checked.
    type_num
        NumPy's type number of float32 or float64.
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


def keep_freed() -> None:
    """Let the C library keep 256 MiB of freed memory for later, instead of returning it to the system.

    A training creates tensors of the same few megabytes at each update. Memory that was returned comes back page by page,
    which costs 6 of 33 ms of an update of two critics with 512-512 units on an AMD EPYC. Only glibc has this
    setting.
    """
    rlox_keep_freed()

"""Conversions and checks of pushed data, one row or many, with error messages in rlox's format."""

import numpy as np

cimport numpy as cnp
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.long cimport PyLong_CheckExact
from libc.string cimport memcpy

from rlox.kernels.checks cimport as_array, as_flags, as_index, as_real, as_seed, show
from rlox.kernels.philox cimport derive_key
from rlox.kernels.types cimport f32, f64, u8, u32, u64

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1


cdef inline Py_ssize_t first_not_finite(const f32* values, Py_ssize_t n) noexcept nogil:
    """Return the index of the first NaN or infinity, or -1."""
    cdef const u32* bits = <const u32*>values
    cdef Py_ssize_t i, start, stop
    cdef u32 bad
    for start in range(0, n, 4096):
        stop = min(start + 4096, n)
        bad = 0
        for i in range(start, stop):
            bad |= (bits[i] & <u32>0x7F80_0000) == <u32>0x7F80_0000
        if bad:
            for i in range(start, stop):
                if (bits[i] & <u32>0x7F80_0000) == <u32>0x7F80_0000:
                    return i
    return -1


cdef inline object real_array(object value, str where, str name):
    """Return `value` as float32, or uint8 for images; not copied if it already is that and C-contiguous."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and name.endswith("obs"):
        return np.asarray(value, order="C")
    with np.errstate(over="ignore"):  # overflow gives infinity, which the check for finite numbers then reports
        return as_real(value, cnp.NPY_FLOAT32, where, name)


cdef inline cnp.ndarray as_values(object value, int type_num, str where, str name):
    """Return `value` as a C-contiguous float32 array, or as uint8, for which no other dtype is converted."""
    if type_num != cnp.NPY_UINT8:
        return as_real(value, type_num, where, name)
    if not isinstance(value, cnp.ndarray) or cnp.PyArray_TYPE(<cnp.ndarray>value) != cnp.NPY_UINT8:
        kind = value.dtype if isinstance(value, cnp.ndarray) else type(value).__name__
        raise TypeError(
            f"{where}: {name} must have dtype uint8, the buffer's obs_dtype, got {kind}; "
            "bytes are stored unchanged, never scaled or cast"
        )
    return np.asarray(value, order="C")


cdef inline object as_obs_dtype(object value, str where):
    """Return the NumPy dtype that observations are stored in, float32 or uint8."""
    try:
        dtype = np.dtype(value)
    except Exception as e:
        raise TypeError(f"{where}: obs_dtype must be float32 or uint8, got {show(value)}") from e
    if dtype not in (np.float32, np.uint8):
        raise TypeError(f"{where}: obs_dtype must be float32 or uint8, got {dtype}")
    return dtype


cdef inline Py_ssize_t as_size(object value, str where, str name) except -1:
    """Return an integer of at least 1 and at most 2**40."""
    cdef int overflow = 0
    cdef long long small
    if PyLong_CheckExact(value):
        small = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and 1 <= small <= <long long>1 << 40:
            return small
    number = as_index(value, where, name)
    if not 1 <= number <= 1 << 40:
        raise ValueError(f"{where}: {name} must be at least 1 and at most 2**40, got {show(number)}")
    return number


cdef inline u64 seed_key(object seed, str where) except? 0:
    """Return the generator's key of a seed in [0, 2**64)."""
    cdef int overflow = 0
    cdef long long small
    if PyLong_CheckExact(seed):
        small = PyLong_AsLongLongAndOverflow(seed, &overflow)
        if not overflow and small >= 0:
            return derive_key(<u64>small, 0)
    return derive_key(as_seed(seed, where, "seed"), 0)


cdef inline object read_only(object array):
    """Return a read-only view."""
    view = array.view()
    view.flags.writeable = False
    return view


cdef inline int put_row(f32* out, Py_ssize_t width, object value, str where, str name) except -1:
    """Write one row of `width` finite numbers. A float32 array of that size is copied at once, others are converted."""
    cdef cnp.ndarray array
    cdef f64 number
    cdef Py_ssize_t bad
    if isinstance(value, cnp.ndarray):
        array = value
        if (cnp.PyArray_TYPE(array) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISCARRAY_RO(array)
                or cnp.PyArray_SIZE(array) != width):
            array = row_array(value, width, where, name)
    elif PyFloat_CheckExact(value) and width == 1:
        out[0] = <f32>PyFloat_AS_DOUBLE(value)
        if out[0] - out[0] != 0:
            raise ValueError(f"{where}: {name} must be a finite float32 number, got {value}")
        return 0
    else:
        array = row_array(value, width, where, name)
    memcpy(out, cnp.PyArray_DATA(array), width * sizeof(f32))
    bad = first_not_finite(out, width)
    if bad >= 0:
        raise ValueError(f"{where}: {name} must be finite float32 numbers, got {out[bad]} at index {bad}")
    return 0


cdef inline cnp.ndarray row_array(object value, Py_ssize_t width, str where, str name):
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{where}: {name} must be numbers, got {show(value)}")
    cdef cnp.ndarray array = np.asarray(real_array(value, where, name), np.float32, order="C")
    if cnp.PyArray_SIZE(array) != width:
        raise ValueError(f"{where}: {name} must have {width} numbers, got shape {(<object>array).shape}")
    return array


cdef inline int put_image(u8* out, Py_ssize_t width, object value, str where, str name) except -1:
    """Write one row of `width` bytes."""
    cdef cnp.ndarray array = as_values(value, cnp.NPY_UINT8, where, name)
    if cnp.PyArray_SIZE(array) != width:
        raise ValueError(f"{where}: {name} must have {width} numbers, got shape {(<object>array).shape}")
    memcpy(out, cnp.PyArray_DATA(array), width)
    return 0


cdef inline f32 as_reward(object value, str where, str name) except? -1:
    cdef f64 number
    cdef f32 result
    if PyFloat_CheckExact(value):
        number = PyFloat_AS_DOUBLE(value)
    elif isinstance(value, (str, bytes, bool)):
        raise TypeError(f"{where}: {name} must be a number, got {show(value)}")
    elif isinstance(value, np.ndarray) and value.size != 1:
        raise ValueError(f"{where}: {name} must be one number, got shape {value.shape}")
    else:
        try:
            number = float(value.item() if isinstance(value, np.ndarray) else value)
        except Exception as e:
            raise TypeError(f"{where}: {name} must be a number, got {type(value).__name__}") from e
    result = <f32>number
    if result - result != 0:
        raise ValueError(f"{where}: {name} must be a finite float32 number, got {show(value)}")
    return result


cdef inline cnp.ndarray batch_rows(object value, Py_ssize_t n, Py_ssize_t width, bint images, str where, str name):
    """Return n rows of `width` finite numbers as C-contiguous float32 or bytes; `value` is (n, ...) or flat."""
    cdef cnp.ndarray array
    cdef Py_ssize_t bad
    if images:
        array = as_values(value, cnp.NPY_UINT8, where, name)
    else:
        array = np.asarray(real_array(value, where, name), np.float32, order="C")
    if cnp.PyArray_SIZE(array) != n * width:
        raise ValueError(
            f"{where}: {name} must have {n} rows (as rewards) of {width} numbers, got shape {(<object>array).shape}"
        )
    if not images:
        bad = first_not_finite(<const f32*>cnp.PyArray_DATA(array), n * width)
        if bad >= 0:
            raise ValueError(
                f"{where}: {name} must be finite float32 numbers, got {array.ravel()[bad]} in row {bad // width}"
            )
    return array


cdef inline cnp.ndarray batch_flags(object value, Py_ssize_t n, str where, str name):
    """Return n flags as bytes 0 and 1."""
    cdef cnp.ndarray array = as_flags(value, where, name)
    if cnp.PyArray_SIZE(array) != n:
        raise ValueError(
            f"{where}: {name} must have one entry per row ({n}, as rewards), got shape {(<object>array).shape}"
        )
    return array


cdef inline cnp.ndarray batch_masks(object value, Py_ssize_t n, Py_ssize_t mask_dim, str where):
    """Return masks (n, mask_dim) bool after checking them; None if `mask_dim` is 0."""
    if (value is None) != (mask_dim == 0):
        raise ValueError(
            f"{where}: next_masks must be {'None' if mask_dim == 0 else 'given'} with mask_dim {mask_dim}, got "
            f"{'None' if value is None else 'masks'}"
        )
    if value is None:
        return None
    array = as_array(value, where, "next_masks")
    if array.dtype != np.bool_:
        raise TypeError(f"{where}: next_masks must be bool, got {array.dtype}")
    if array.shape != (n, mask_dim):
        raise ValueError(f"{where}: next_masks must have shape {(n, mask_dim)}, got {array.shape}")
    return np.ascontiguousarray(array)


cdef inline cnp.ndarray state_array(dict state, str key, object dtype, object shape, str where):
    """Return a copy of an array of a saved state after checking its dtype and shape."""
    array = as_array(state[key], where, key)
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"{where}: {key} must have shape {shape} and dtype {np.dtype(dtype)}, got shape {array.shape} of "
            f"{array.dtype}"
        )
    return np.array(array, order="C")

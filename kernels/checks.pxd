"""Argument checks that several kernels' wrappers share; they raise the house's error messages."""

cimport numpy as cnp

from kernels.types cimport i64, u64


cdef inline object as_index(object value, str where, str name):
    """Return `value` as a Python int; TypeError for what is no integer (bool included)."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        try:
            return value.__index__()
        except TypeError:  # an array of several numbers has the method too
            pass
    raise TypeError(f"{where}: {name} must be an integer, got {type(value).__name__}")


cdef inline u64 as_seed(object seed, str where, str name) except? 0:
    """Return a seed as 64 bits; ValueError outside [0, 2**64)."""
    value = as_index(seed, where, name)
    if value < 0 or value >= 1 << 64:
        raise ValueError(
            f"{where}: {name} must be at least 0 and below 2**64, got {value}; "
            f"take abs({name}) or {name} % 2**64"
        )
    return <u64>value


cdef inline str describe(cnp.ndarray array):
    """Return shape and dtype for an error message."""
    return f"shape {(<object>array).shape} of {array.dtype}"


cdef inline int check_out(object array, int type_num, object dtype, tuple shape, str where,
                          str name) except -1:
    """Raise unless `array` can be written as a C-contiguous array of this dtype and shape."""
    if not isinstance(array, cnp.ndarray):
        raise TypeError(f"{where}: {name} must be a NumPy array, got {type(array).__name__}")
    if cnp.PyArray_TYPE(<cnp.ndarray>array) != type_num:
        raise TypeError(f"{where}: {name} must have dtype {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{where}: {name} must have shape {shape}, got {array.shape}")
    if not cnp.PyArray_ISCARRAY(<cnp.ndarray>array):
        raise ValueError(
            f"{where}: {name} must be C-contiguous, aligned and writeable, got {describe(array)} that "
            "is not; allocate it with numpy.empty"
        )
    return 0

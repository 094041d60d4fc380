"""Argument checks shared by the wrappers of several kernels, with error messages in rlox's format.

A .pxd has no module of its own, so each slow path that needs NumPy imports it itself.
"""

cimport numpy as cnp

from rlox.kernels.types cimport f32, f64, i64, real, u8, u64


cdef inline str show(object value):
    """Return `value` as text of at most 200 characters for an error message, whatever its ``__repr__`` does."""
    try:
        text = repr(value)
    except Exception:  # also for integers of more digits than Python prints
        text = f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= 200 else f"{text[:197]}..."


cdef inline object as_state(object state, tuple keys, str where):
    """Return `state` if it is a dict with these keys. Raise ValueError otherwise."""
    if isinstance(state, dict) and set(state) == set(keys):
        return state
    got = f"[{', '.join(sorted(map(show, state)))}]" if isinstance(state, dict) else type(state).__name__
    raise ValueError(f"{where}: state must have the keys {sorted(keys)}, got {got}; pass what get_state returned")


cdef inline object as_array(object value, str where, str name):
    """Return ``numpy.asarray(value)``. Raise ValueError, with the argument's name, if that fails for any reason."""
    import numpy as np

    try:
        return np.asarray(value)
    except MemoryError:
        raise
    except Exception as e:  # ragged lists, and whatever the value's own ``__array__`` or ``__len__`` raises
        raise ValueError(f"{where}: {name} must be an array of numbers, got {show(value)}") from e


cdef inline object as_index(object value, str where, str name):
    """Return `value` as a Python int. Raise TypeError for anything that is not an integer, bools included."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{where}: {name} must be an integer, got {type(value).__name__}")
    try:
        return value.__index__()
    except Exception as e:  # arrays of every dtype have the method
        raise TypeError(f"{where}: {name} must be an integer, got {type(value).__name__}") from e


cdef inline u64 as_seed(object seed, str where, str name) except? 0:
    """Return a seed as 64 bits. Raise ValueError outside [0, 2**64)."""
    value = as_index(seed, where, name)
    if value < 0 or value >= 1 << 64:
        raise ValueError(
            f"{where}: {name} must be at least 0 and below 2**64, got {show(value)}; "
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


cdef inline bint to_flags(const real* source, Py_ssize_t n, u8* flags) noexcept nogil:
    """Write source != 0 to `flags`; return False if an entry is neither 0 nor 1."""
    cdef Py_ssize_t i
    cdef int bad = 0
    for i in range(n):
        flags[i] = source[i] != 0
        bad |= (source[i] != 0) & (source[i] != 1)
    return not bad


cdef inline cnp.ndarray as_real(object value, int type_num, str where, str name):
    """Return `value` as a C-contiguous array of this type; `value` itself if it already is one."""
    cdef cnp.ndarray array
    if isinstance(value, cnp.ndarray):
        array = value
        if cnp.PyArray_TYPE(array) == type_num and cnp.PyArray_ISCARRAY_RO(array):
            return array
    import numpy as np

    array = as_array(value, where, name)
    if array.dtype.kind in "biuf":
        # Not ascontiguousarray, which would turn a scalar into a 1-D array.
        dtype = np.float32 if type_num == cnp.NPY_FLOAT32 else np.float64
        return np.asarray(array, dtype, order="C")
    raise TypeError(f"{where}: {name} must be an array of numbers, got dtype {array.dtype}")


cdef inline cnp.ndarray as_flags(object value, str where, str name):
    """Return `value` as a C-contiguous array of bytes 0 and 1; `value` itself if it already is one."""
    cdef cnp.ndarray array, given
    cdef cnp.ndarray flags
    cdef Py_ssize_t n, i
    cdef const u8* bytes_
    cdef bint good = True
    if isinstance(value, cnp.ndarray) and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>value):
        array = value
    else:
        import numpy as np

        array = as_array(value, where, name)
        array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    given = array
    n = cnp.PyArray_SIZE(array)
    cdef int type_num = cnp.PyArray_TYPE(array)
    if type_num == cnp.NPY_BOOL:
        return array
    if type_num == cnp.NPY_UINT8:
        bytes_ = <const u8*>cnp.PyArray_DATA(array)
        for i in range(n):
            good &= bytes_[i] <= 1
        flags = array
    else:
        if type_num != cnp.NPY_FLOAT64 and type_num != cnp.NPY_FLOAT32:
            if array.dtype.kind not in "iuf":
                raise TypeError(
                    f"{where}: {name} must be bool, uint8 or float flags, got dtype {array.dtype}"
                )
            array = array.astype("f8")
            type_num = cnp.NPY_FLOAT64
        flags = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(array), cnp.PyArray_DIMS(array), cnp.NPY_UINT8, 0)
        if type_num == cnp.NPY_FLOAT64:
            good = to_flags(<const f64*>cnp.PyArray_DATA(array), n, <u8*>cnp.PyArray_DATA(flags))
        else:
            good = to_flags(<const f32*>cnp.PyArray_DATA(array), n, <u8*>cnp.PyArray_DATA(flags))
    if not good:
        wrong = (array != 0) & (array != 1)
        row = f" in row {(<object>wrong).nonzero()[0][0]}" if cnp.PyArray_NDIM(array) else ""
        raise ValueError(f"{where}: {name} must hold only 0 and 1, got {(<object>given)[wrong][0]}{row}")
    return flags


cdef inline f64 as_number(object value, str where, str name) except? -1:
    """Return `value` as a float (NaN and infinity included). Raise TypeError unless it is a single number."""
    if isinstance(value, float):
        return value
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{where}: {name} must be a number, got {show(value)}")
    if isinstance(value, cnp.ndarray):
        if cnp.PyArray_SIZE(<cnp.ndarray>value) != 1:
            raise TypeError(f"{where}: {name} must be a number, got {describe(value)}")
        value = value.item()
    try:
        return value
    except OverflowError as e:
        raise ValueError(f"{where}: {name} must fit a float, got {show(value)}") from e
    except Exception as e:
        raise TypeError(f"{where}: {name} must be a number, got {type(value).__name__}") from e


cdef inline int as_flag(object value, str where, str name) except -1:
    """Return a flag as 1 or 0: True, False, the numbers 1 and 0, or an array of one such number."""
    cdef f64 number
    if value is True:
        return 1
    if value is False:
        return 0
    try:
        number = as_number(value, where, name)
    except (TypeError, ValueError) as e:
        raise type(e)(f"{where}: {name} must be True or False, got {show(value)}") from e
    if number != 0 and number != 1:
        raise ValueError(f"{where}: {name} must be True or False, got {show(value)}")
    return number != 0


cdef inline f64 as_fraction(object value, str where, str name) except -1:
    """Return a number in [0, 1]. Raise ValueError for NaN and other numbers, TypeError for anything else."""
    cdef f64 number = as_number(value, where, name)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{where}: {name} must lie in [0, 1], got {number}")
    return number


cdef inline bint share_memory(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Return whether two C-contiguous arrays overlap. NumPy's test takes longer than a short trajectory."""
    cdef const char* first = <const char*>cnp.PyArray_DATA(a)
    cdef const char* second = <const char*>cnp.PyArray_DATA(b)
    return first < second + cnp.PyArray_NBYTES(b) and second < first + cnp.PyArray_NBYTES(a)


cdef inline int same_shape(cnp.ndarray array, cnp.ndarray model, str where, str name, str model_name) except -1:
    """Raise unless `array` has the shape of `model`, an array of one or two dimensions."""
    cdef int ndim = cnp.PyArray_NDIM(model)
    if (cnp.PyArray_NDIM(array) == ndim
            and cnp.PyArray_DIM(array, 0) == cnp.PyArray_DIM(model, 0)
            and cnp.PyArray_DIM(array, ndim - 1) == cnp.PyArray_DIM(model, ndim - 1)):
        return 0
    raise ValueError(
        f"{where}: {name} must have the shape of {model_name} {(<object>model).shape}, "
        f"got {(<object>array).shape}"
    )


cdef inline int check_apart(cnp.ndarray first, cnp.ndarray second, tuple inputs, str where) except -1:
    """Raise if two outputs overlap each other or one of the inputs (None for absent inputs)."""
    overlap = share_memory(first, second)
    for array in inputs:
        if array is not None:
            overlap = overlap or share_memory(first, array) or share_memory(second, array)
    if overlap:
        raise ValueError(f"{where}: out must be two arrays that share no memory with an input")
    return 0

"""Layers of LSTM and GRU over sequences in which episodes begin and agents pause, with their gradients.

The loop over steps in PyTorch, in `rlox.nn.memory`, defines the results. Letters: T steps, N sequences, D inputs,
H units, G gates: 4 of an LSTM (input, forget, cell, output), 3 of a GRU (reset, update, candidate), as in PyTorch.
A state (N, S) is an LSTM's output and cell, S = 2 H, or a GRU's output, S = H.
"""

import numpy as np

cimport numpy as cnp

from rlox.kernels.memory import empty

from rlox.kernels.outputs cimport fresh
from rlox.kernels.types cimport f32, u8

cnp.import_array()

cdef enum:
    CHUNK = 256  # rows of the products over many steps, so that their operands stay in the cache


cdef inline f32* p(cnp.ndarray array) noexcept nogil:
    return <f32*>cnp.PyArray_DATA(array)


cdef cnp.ndarray checked(object array, int type_num, str dtype, int ndim, Py_ssize_t a, Py_ssize_t b, Py_ssize_t c,
                         str where, str name):
    """Return `array` after checking its dtype and its shape (a,), (a, b) or (a, b, c); a strided one as a copy."""
    cdef cnp.ndarray given
    cdef Py_ssize_t[3] shape = [a, b, c]
    cdef int i
    if not isinstance(array, cnp.ndarray):
        raise TypeError(f"{where}: {name} must be a NumPy array, got {type(array).__name__}")
    given = array
    if cnp.PyArray_TYPE(given) != type_num:
        raise TypeError(f"{where}: {name} must have dtype {dtype}, got {array.dtype}")
    cdef bint fits = cnp.PyArray_NDIM(given) == ndim
    for i in range(ndim):
        fits = fits and cnp.PyArray_DIM(given, i) == shape[i]
    if not fits:
        raise ValueError(f"{where}: {name} must have shape {(a, b, c)[:ndim]}, got {array.shape}")
    return given if cnp.PyArray_ISCARRAY_RO(given) else np.ascontiguousarray(array)


cdef inline cnp.ndarray numbers(object array, int ndim, Py_ssize_t a, Py_ssize_t b, Py_ssize_t c, str where, str name):
    return checked(array, cnp.NPY_FLOAT32, "float32", ndim, a, b, c, where, name)


cdef int measure(Sequences* s, object kind, object x, object w_hh, str where) except -1:
    """Set sizes from the shapes of x (T, N, D) and w_hh (G H, H)."""
    if kind != "lstm" and kind != "gru":
        raise ValueError(f"{where}: kind must be lstm or gru, got {kind!r}")
    if not isinstance(x, cnp.ndarray) or cnp.PyArray_NDIM(<cnp.ndarray>x) != 3 or not cnp.PyArray_SIZE(<cnp.ndarray>x):
        raise ValueError(f"{where}: x must be an array (T, N, D) that is not empty, got {np.shape(x)}")
    if not isinstance(w_hh, cnp.ndarray) or cnp.PyArray_NDIM(<cnp.ndarray>w_hh) != 2:
        raise ValueError(f"{where}: w_hh must be an array of two dimensions, got {np.shape(w_hh)}")
    s.n_gates = 4 if kind == "lstm" else 3
    s.n_steps, s.n_rows, s.n_inputs = cnp.PyArray_DIM(x, 0), cnp.PyArray_DIM(x, 1), cnp.PyArray_DIM(x, 2)
    s.size = cnp.PyArray_DIM(w_hh, 1)
    if s.size < 1:
        raise ValueError(f"{where}: w_hh must have at least one column, got {np.shape(w_hh)}")
    s.wide, s.in_wide = rlox_multiple(s.size), rlox_multiple(s.n_inputs)
    s.chunk = max(1, CHUNK // s.n_rows)
    return 0


cdef inline Py_ssize_t state_size(const Sequences* s) noexcept nogil:
    return 2 * s.size if s.n_gates == 4 else s.size


cdef inline Py_ssize_t kept_size(const Sequences* s) noexcept nogil:
    cdef Py_ssize_t rows = s.n_steps * s.n_rows, states = rows + s.n_rows
    return s.wide * (rows * (s.n_gates + 1) + states * (2 if s.n_gates == 4 else 1))


cdef inline void lay_out(const Sequences* s, Kept* kept, f32* at) noexcept nogil:
    """Set the positions in an array of `kept_size` numbers."""
    cdef Py_ssize_t rows = s.n_steps * s.n_rows, states = rows + s.n_rows
    kept.gates = at
    kept.inner = kept.gates + rows * s.n_gates * s.wide
    kept.h = kept.inner + rows * s.wide
    kept.c = kept.h + states * s.wide if s.n_gates == 4 else NULL


cdef tuple flags(Sequences* s, object is_first, object running, str where):
    """Set the flags (T, N); return the arrays that hold them."""
    is_first = checked(is_first, cnp.NPY_BOOL, "bool", 2, s.n_steps, s.n_rows, 0, where, "is_first")
    s.is_first, s.running = <const u8*>cnp.PyArray_DATA(is_first), NULL
    if running is not None:
        running = checked(running, cnp.NPY_BOOL, "bool", 2, s.n_steps, s.n_rows, 0, where, "running")
        s.running = <const u8*>cnp.PyArray_DATA(running)
    return is_first, running


cdef inline cnp.ndarray rows_of(Py_ssize_t n, Py_ssize_t width):
    cdef cnp.npy_intp[2] dims = [n, width]
    return fresh(empty, 2, dims, cnp.NPY_FLOAT32)


cdef inline cnp.ndarray room_for(Py_ssize_t n):
    return empty(n, -1, cnp.NPY_FLOAT32)  # aligned, which rows of vectors need to be fast


def run(kind, x, state, is_first, running, w_ih, w_hh, b_ih, b_hh):
    """Run one layer over all steps.

    Parameters
    ----------
    kind
        ``lstm`` or ``gru``.
    x
        (T, N, D) float32.
    state
        (N, S) float32, before the first step.
    is_first
        (T, N) bool: the state before the step counts as zero.
    running
        (T, N) bool, or None: where false, the state stays as it is and the output is zeros.
    w_ih, w_hh, b_ih, b_hh
        (G H, D), (G H, H), (G H,) and (G H,) float32.

    Returns
    -------
    outputs, last
        (T, N, H) and (N, S) float32: the outputs, and the state after the last step.
    kept
        One-dimensional float32, for `go_back`. Its layout depends on the CPU level.
    """
    cdef str where = "recurrent.run"
    cdef Sequences s
    measure(&s, kind, x, w_hh, where)
    cdef Py_ssize_t gates = s.n_gates * s.size, states = state_size(&s)
    cdef cnp.ndarray x_ = numbers(x, 3, s.n_steps, s.n_rows, s.n_inputs, where, "x")
    cdef cnp.ndarray state_ = numbers(state, 2, s.n_rows, states, 0, where, "state")
    cdef cnp.ndarray w_ih_ = numbers(w_ih, 2, gates, s.n_inputs, 0, where, "w_ih")
    cdef cnp.ndarray w_hh_ = numbers(w_hh, 2, gates, s.size, 0, where, "w_hh")
    cdef cnp.ndarray b_ih_ = numbers(b_ih, 1, gates, 0, 0, where, "b_ih")
    cdef cnp.ndarray b_hh_ = numbers(b_hh, 1, gates, 0, 0, where, "b_hh")
    cdef tuple held = flags(&s, is_first, running, where)
    cdef cnp.ndarray outputs = rows_of(s.n_steps * s.n_rows, s.size)
    cdef cnp.ndarray last = rows_of(s.n_rows, states)
    cdef cnp.ndarray kept_ = room_for(kept_size(&s))
    cdef cnp.ndarray room = room_for(rlox_forward_room(&s))
    cdef Kept kept
    lay_out(&s, &kept, p(kept_))
    with nogil:
        rlox_recurrent_forward(&s, p(x_), p(state_), p(w_ih_), p(w_hh_), p(b_ih_), p(b_hh_), p(room), &kept, p(outputs),
                               p(last))
    return (<object>outputs).reshape(s.n_steps, s.n_rows, s.size), last, kept_


def go_back(kind, x, is_first, running, w_ih, w_hh, kept, d_outputs, d_last, wants_x=True, wants_weights=True):
    """Return the gradients of `run`, by back-propagation through time.

    Parameters
    ----------
    kind, x, is_first, running, w_ih, w_hh
        The arguments of `run`.
    kept
        Its result; only read.
    d_outputs, d_last
        (T, N, H) and (N, S) float32: gradients with respect to its other results, or None for zeros.
    wants_x, wants_weights
        Whether the gradients with respect to x, and to weights and biases, are computed.

    Returns
    -------
    d_x, d_state, d_w_ih, d_w_hh, d_b_ih, d_b_hh
        Like the arguments of `run`; None where not wanted.
    """
    cdef str where = "recurrent.go_back"
    cdef Sequences s
    measure(&s, kind, x, w_hh, where)
    cdef Py_ssize_t gates = s.n_gates * s.size, states = state_size(&s)
    cdef cnp.ndarray x_ = numbers(x, 3, s.n_steps, s.n_rows, s.n_inputs, where, "x")
    cdef cnp.ndarray w_ih_ = numbers(w_ih, 2, gates, s.n_inputs, 0, where, "w_ih")
    cdef cnp.ndarray w_hh_ = numbers(w_hh, 2, gates, s.size, 0, where, "w_hh")
    cdef cnp.ndarray kept_ = numbers(kept, 1, kept_size(&s), 0, 0, where, "kept")
    cdef tuple held = flags(&s, is_first, running, where)
    cdef cnp.ndarray by, last
    cdef f32* d_outputs_ = NULL
    cdef f32* d_last_ = NULL
    if d_outputs is not None:
        by = numbers(d_outputs, 3, s.n_steps, s.n_rows, s.size, where, "d_outputs")
        d_outputs_ = p(by)
    if d_last is not None:
        last = numbers(d_last, 2, s.n_rows, states, 0, where, "d_last")
        d_last_ = p(last)
    cdef Gradients wanted
    cdef cnp.ndarray d_state = rows_of(s.n_rows, states)
    cdef cnp.ndarray room = room_for(rlox_backward_room(&s))
    cdef object d_x = None, d_w_ih = None, d_w_hh = None, d_b_ih = None, d_b_hh = None
    wanted.x = wanted.w_ih = wanted.w_hh = wanted.b_ih = wanted.b_hh = NULL
    wanted.state = p(d_state)
    if wants_x:
        d_x = rows_of(s.n_steps * s.n_rows, s.n_inputs)
        wanted.x = p(d_x)
        d_x = d_x.reshape(s.n_steps, s.n_rows, s.n_inputs)
    if wants_weights:
        d_w_ih, d_w_hh = rows_of(gates, s.n_inputs), rows_of(gates, s.size)
        d_b_ih, d_b_hh = np.empty(gates, np.float32), np.empty(gates, np.float32)
        wanted.w_ih, wanted.w_hh, wanted.b_ih, wanted.b_hh = p(d_w_ih), p(d_w_hh), p(d_b_ih), p(d_b_hh)
    cdef Kept read
    lay_out(&s, &read, p(kept_))
    with nogil:
        rlox_recurrent_backward(&s, p(x_), p(w_ih_), p(w_hh_), &read, d_outputs_, d_last_, p(room), &wanted)
    return d_x, d_state, d_w_ih, d_w_hh, d_b_ih, d_b_hh


def step(kind, x, state, is_first, running, w_ih, w_hh, b_ih, b_hh):
    """Run one layer over a single step without keeping anything for its gradient: arguments as of `run` with T = 1.

    Returns
    -------
    outputs, last
        (1, N, H) and (N, S) float32.
    """
    cdef str where = "recurrent.step"
    cdef Sequences s
    measure(&s, kind, x, w_hh, where)
    cdef Py_ssize_t gates = s.n_gates * s.size, states = state_size(&s)
    cdef cnp.ndarray x_ = numbers(x, 3, 1, s.n_rows, s.n_inputs, where, "x")
    cdef cnp.ndarray state_ = numbers(state, 2, s.n_rows, states, 0, where, "state")
    cdef cnp.ndarray w_ih_ = numbers(w_ih, 2, gates, s.n_inputs, 0, where, "w_ih")
    cdef cnp.ndarray w_hh_ = numbers(w_hh, 2, gates, s.size, 0, where, "w_hh")
    cdef cnp.ndarray b_ih_ = numbers(b_ih, 1, gates, 0, 0, where, "b_ih")
    cdef cnp.ndarray b_hh_ = numbers(b_hh, 1, gates, 0, 0, where, "b_hh")
    cdef tuple held = flags(&s, is_first, running, where)
    cdef cnp.npy_intp[3] dims = [1, s.n_rows, s.size]
    cdef cnp.ndarray outputs = cnp.PyArray_EMPTY(3, dims, cnp.NPY_FLOAT32, 0)
    cdef cnp.ndarray last = rows_of(s.n_rows, states)
    cdef cnp.ndarray room = room_for(rlox_step_room(&s))
    with nogil:
        rlox_recurrent_step(&s, p(x_), p(state_), p(w_ih_), p(w_hh_), p(b_ih_), p(b_hh_), p(room), p(outputs), p(last))
    return outputs, last

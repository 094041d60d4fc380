"""Networks of a perceptron, layers of LSTM or GRU, and a linear layer, over sequences in which episodes begin and agents
pause: outputs, gradients, and single steps of acting.

The modules and the loop over steps in PyTorch, in `rlox.nn.memory`, define the results. Letters: T steps, N sequences,
B = T * N rows step after step, D inputs, H units, G gates: 4 of an LSTM (input, forget, cell, output), 3 of a GRU (reset,
update, candidate), as in PyTorch. A state (N, S) has layer after layer an LSTM's output and cell, or a GRU's output.
"""

import threading

import numpy as np

cimport numpy as cnp
from libc.string cimport memcpy, memset

from rlox.kernels.memory import empty

from rlox.kernels.checks cimport as_index
from rlox.kernels.nn.layers cimport (
    CHUNK, MAX_LAYERS, Layer, Net, backward, backward_to_input, build, clear_padded, forward, given, last_of, pack,
    padded, scratch, size_of, unpad,
)
from rlox.kernels.outputs cimport fresh
from rlox.kernels.types cimport f32, u8

cnp.import_array()

cdef enum:
    ROWS = 256  # of the products over many steps, so that their operands stay in the cache
    FEW = 8     # rows of a single step, up to which packing weights for a product takes longer than it saves


cdef inline f32* p(cnp.ndarray array) noexcept nogil:
    return <f32*>cnp.PyArray_DATA(array)


cdef inline cnp.ndarray numbers(object array, tuple shape, str where, str name):
    return given(array, cnp.NPY_FLOAT32, "float32", shape, where, name)


cdef inline cnp.ndarray rows_of(Py_ssize_t n, Py_ssize_t width):
    cdef cnp.npy_intp[2] dims = [n, width]
    return fresh(empty, 2, dims, cnp.NPY_FLOAT32)


cdef inline cnp.ndarray room_for(Py_ssize_t n):
    return empty(n, -1, cnp.NPY_FLOAT32)  # aligned, which rows of vectors need to be fast


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


cdef void mark(Sequences* s, cnp.ndarray is_first, cnp.ndarray running):
    """Set the flags."""
    s.is_first = <const u8*>cnp.PyArray_DATA(is_first)
    if running is not None:
        s.running = <const u8*>cnp.PyArray_DATA(running)


cdef class Trace:
    """What the gradient needs of `RecurrentNetwork.forward`, and on what it depends. Only the network reads it."""

    cdef tuple shape            # of the network
    cdef Py_ssize_t n_steps
    cdef Py_ssize_t n_rows
    cdef cnp.ndarray x          # (B, D)
    cdef cnp.ndarray is_first   # (B,)
    cdef cnp.ndarray running    # (B,), or None
    cdef list inputs            # (B, …) of each layer of the memory
    cdef list kept              # of each layer, in a form that depends on the CPU level
    cdef cnp.ndarray h          # (R, H): inputs of the last layer, or None


cdef class RecurrentNetwork:
    """A perceptron, layers of LSTM or GRU, and a linear layer; the parameters are arguments of each call.

    Calls may come from several threads, one after the other. A pickle has only the shape.

    Parameters
    ----------
    kind
        ``lstm`` or ``gru``.
    widths
        The perceptron's: its inputs D and its hidden layers, with an activation after each. Without hidden layers, the
        memory reads the inputs.
    size, n_layers
        Units H of each layer of the memory, and the number of its layers.
    n_outputs
        Outputs of the linear layer; 0: there is none, and the outputs are those of the memory.
    activation
        ``tanh`` or ``relu``.

    Attributes
    ----------
    shape
        The arguments that it was created with.
    n_inputs, state_dim
        D, and S, the numbers of a state.
    n_parameters
        Numbers of all parameters.
    """

    cdef readonly tuple shape
    cdef readonly Py_ssize_t state_dim
    cdef readonly Py_ssize_t n_parameters
    cdef bint lstm
    cdef readonly Py_ssize_t n_inputs
    cdef Py_ssize_t n_read      # inputs of the memory
    cdef Py_ssize_t size
    cdef int n_layers
    cdef Py_ssize_t n_outputs
    cdef Py_ssize_t block_size
    cdef Net trunk
    cdef Net head
    cdef f32* block             # parameters of trunk and head
    cdef f32* gradient          # of the block
    cdef f32* padded_x          # (CHUNK, inputs of a perceptron, padded)
    cdef f32* padded_d
    cdef list parameters        # (name, shape) of each
    cdef list packed            # weights of each layer of the memory for `step`; None: not packed
    cdef list held
    cdef object lock

    def __init__(self, kind, widths, size, n_layers, n_outputs=0, activation="tanh"):
        cdef str where = "RecurrentNetwork"
        if kind not in ("lstm", "gru"):
            raise ValueError(f"{where}: kind must be lstm or gru, got {kind!r}")
        if activation not in ("tanh", "relu"):
            raise ValueError(f"{where}: activation must be tanh or relu, got {activation!r}")
        cdef list sizes = [as_index(width, where, "widths") for width in widths]
        self.size, self.n_layers = as_index(size, where, "size"), as_index(n_layers, where, "n_layers")
        self.n_outputs = as_index(n_outputs, where, "n_outputs")
        if not 1 <= len(sizes) <= MAX_LAYERS + 1 or min(sizes + [self.size, self.n_layers]) < 1 or self.n_outputs < 0:
            raise ValueError(
                f"{where}: sizes must be >= 1 and widths at most {MAX_LAYERS + 1}, got {sizes}, {size} and {n_layers}"
            )
        self.shape = (kind, tuple(sizes), self.size, self.n_layers, self.n_outputs, activation)
        self.lstm, self.n_inputs, self.n_read = kind == "lstm", sizes[0], sizes[len(sizes) - 1]
        self.state_dim = self.n_layers * self.size * (2 if self.lstm else 1)
        self.held, self.packed, self.lock = [], None, threading.Lock()
        cdef list last = [self.size, self.n_outputs] if self.n_outputs else [self.size]
        self.block_size = size_of(sizes) + size_of(last)
        self.block, self.gradient = scratch(self.held, self.block_size), scratch(self.held, self.block_size)
        cdef bint tanh = activation == "tanh"
        cdef Py_ssize_t at = build(&self.trunk, sizes, tanh, self.block, self.gradient, 0, self.held, inner=True)
        self.trunk.activated = True
        build(&self.head, last, tanh, self.block, self.gradient, at, self.held, inner=True)
        cdef Py_ssize_t most = CHUNK * max(padded(self.n_inputs), padded(self.size))
        self.padded_x, self.padded_d = scratch(self.held, most), scratch(self.held, most)
        cdef Py_ssize_t gates = (4 if self.lstm else 3) * self.size
        self.parameters = perceptron("trunk", sizes)
        for layer in range(self.n_layers):
            inputs = self.size if layer else self.n_read
            shapes = ((gates, inputs), (gates, self.size), (gates,), (gates,))
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            self.parameters += [(f"{name}_l{layer}", shape) for name, shape in zip(names, shapes)]
        self.parameters += perceptron("head", last)
        self.n_parameters = sum([int(np.prod(shape)) for _, shape in self.parameters])

    def __reduce__(self):
        return RecurrentNetwork, self.shape

    cdef list taken(self, object parameters, str where):
        """Return the parameters, in the order of the modules, after checking them."""
        cdef list arrays = list(parameters)
        if len(arrays) != len(self.parameters):
            raise ValueError(f"{where}: there must be {len(self.parameters)} parameters, got {len(arrays)}")
        return [numbers(array, shape, where, name) for array, (name, shape) in zip(arrays, self.parameters)]

    cdef void load(self, list arrays):
        """Copy the parameters of the perceptrons into the block, and pack them; those of `pack` no longer hold."""
        cdef cnp.ndarray array
        self.packed = None
        cdef f32* to = self.block
        cdef int first = 2 * self.trunk.n_layers
        for array in arrays[:first] + arrays[first + 4 * self.n_layers:]:
            memcpy(to, p(array), cnp.PyArray_NBYTES(array))
            to += cnp.PyArray_SIZE(array)
        pack(&self.trunk, True)
        pack(&self.head, True)

    cdef Sequences sequences(self, int layer, Py_ssize_t n_steps, Py_ssize_t n_rows, Py_ssize_t state_ld):
        """Return the sizes of a layer of the memory."""
        cdef Sequences s
        memset(&s, 0, sizeof(s))
        s.n_gates, s.size, s.wide = 4 if self.lstm else 3, self.size, rlox_multiple(self.size)
        s.n_inputs = self.size if layer else self.n_read
        s.in_wide = rlox_multiple(s.n_inputs)
        s.n_steps, s.n_rows, s.state_ld, s.chunk = n_steps, n_rows, state_ld, max(1, ROWS // n_rows)
        return s

    cdef cnp.ndarray packed_layer(self, const Sequences* s, list arrays, int layer):
        """Return the packed weights of a layer of the memory."""
        cdef cnp.ndarray w_ih, w_hh, b_ih, b_hh, packed = room_for(rlox_packed_size(s))
        cdef int at = 2 * self.trunk.n_layers + 4 * layer
        w_ih, w_hh, b_ih, b_hh = arrays[at], arrays[at + 1], arrays[at + 2], arrays[at + 3]
        with nogil:
            rlox_recurrent_pack(s, p(w_ih), p(w_hh), p(b_ih), p(b_hh), p(packed))
        return packed

    cdef void climb(self, const f32* x, Py_ssize_t rows, f32* to) noexcept nogil:
        """Write the trunk's outputs (rows, n_read) for inputs (rows, D)."""
        cdef Py_ssize_t start, n, wide = last_of(&self.trunk).out_pad
        start = 0
        while start < rows:
            n = min(<Py_ssize_t>CHUNK, rows - start)
            rlox_narrow_rows(n, self.n_read, forward(&self.trunk, x + start * self.n_inputs, self.n_inputs, n), wide,
                             to + start * self.n_read, self.n_read)
            start += n

    cdef void finish(self, const f32* h, Py_ssize_t rows, f32* to) noexcept nogil:
        """Write the head's outputs (rows, n_outputs) for outputs (rows, H) of the memory."""
        cdef Py_ssize_t start, n, wide = last_of(&self.head).out_pad
        start = 0
        while start < rows:
            n = min(<Py_ssize_t>CHUNK, rows - start)
            rlox_narrow_rows(n, self.n_outputs, forward(&self.head, h + start * self.size, self.size, n), wide,
                             to + start * self.n_outputs, self.n_outputs)
            start += n

    cdef cnp.ndarray run_layers(self, cnp.ndarray read, Py_ssize_t n_steps, cnp.ndarray state, cnp.ndarray last,
                                Py_ssize_t first, cnp.ndarray is_first, Trace trace, list arrays, bint few):
        """Run the layers of the memory over T steps, and return the outputs (B, H) of the last one.

        Their states are those in `state` from column `first` on, and are written to the same columns of `last`. Without
        `arrays` the weights are those of `pack`; with `few` they are not packed, which needs a single step and no
        `trace`.
        """
        cdef Py_ssize_t n = cnp.PyArray_DIM(state, 0), ld = cnp.PyArray_DIM(state, 1), at
        cdef cnp.ndarray outputs = read, room = None, packed, w_ih, w_hh, b_ih, b_hh
        cdef Sequences s
        cdef Kept kept
        cdef int layer, k
        for layer in range(self.n_layers):
            s = self.sequences(layer, n_steps, n, ld)
            mark(&s, is_first, None if trace is None else trace.running)
            outputs = rows_of(n_steps * n, self.size)
            if room is None or trace is not None:
                room = room_for(rlox_step_room(&s) if few else kept_size(&s))
            at = first + layer * self.state_dim // self.n_layers
            if few:
                k = 2 * self.trunk.n_layers + 4 * layer
                w_ih, w_hh, b_ih, b_hh = arrays[k], arrays[k + 1], arrays[k + 2], arrays[k + 3]
                rlox_recurrent_step(&s, p(read), p(state) + at, p(w_ih), p(w_hh), p(b_ih), p(b_hh), p(room),
                                    p(outputs), p(last) + at)
            else:
                packed = self.packed[layer] if arrays is None else self.packed_layer(&s, arrays, layer)
                lay_out(&s, &kept, p(room))
                if n_steps == 1:  # too short to let another thread run, which may then keep this one waiting
                    rlox_recurrent_forward(&s, p(read), p(state) + at, p(packed), &kept, p(outputs), p(last) + at)
                else:
                    with nogil:
                        rlox_recurrent_forward(&s, p(read), p(state) + at, p(packed), &kept, p(outputs), p(last) + at)
            if trace is not None:
                trace.inputs.append(read)
                trace.kept.append(room)
            read = outputs
        return outputs

    def forward(self, parameters, x, state, is_first, running=None):
        """Run the network over the T steps of N sequences.

        Parameters
        ----------
        parameters
            Weights and biases in the order of the modules, float32.
        x
            (B, D) float32.
        state
            (N, S) float32, before the first step.
        is_first
            (B,) bool: the state before the step counts as zero.
        running
            (B,) bool, or None: where false, the state stays as it is.

        Returns
        -------
        outputs
            (R, n_outputs) float32 for the R running rows. Without the linear layer (B, H), zeros in other rows.
        last
            (N, S) float32, the state after the last step.
        trace
            For `backward`.
        """
        cdef str where = "RecurrentNetwork.forward"
        cdef list arrays = self.taken(parameters, where)
        cdef Py_ssize_t rows = len_of(x, where, "x"), n_rows = len_of(state, where, "state")
        if rows % n_rows:
            raise ValueError(f"{where}: x must have as many rows for each of {n_rows} sequences, got {rows}")
        cdef Trace trace = Trace.__new__(Trace)
        trace.shape, trace.n_steps, trace.n_rows = self.shape, rows // n_rows, n_rows
        trace.x = numbers(x, (rows, self.n_inputs), where, "x")
        cdef cnp.ndarray state_ = numbers(state, (n_rows, self.state_dim), where, "state")
        trace.is_first = given(is_first, cnp.NPY_BOOL, "bool", (rows,), where, "is_first")
        if running is not None:
            trace.running = given(running, cnp.NPY_BOOL, "bool", (rows,), where, "running")
        cdef cnp.ndarray read = trace.x, outputs, last = rows_of(n_rows, self.state_dim)
        trace.inputs, trace.kept = [], []
        with self.lock:
            self.load(arrays)
            if self.trunk.n_layers:
                read = rows_of(rows, self.n_read)
                with nogil:
                    self.climb(p(trace.x), rows, p(read))
            outputs = self.run_layers(read, trace.n_steps, state_, last, 0, trace.is_first, trace, arrays, False)
            if self.n_outputs:
                trace.h = outputs if running is None else (<object>outputs)[trace.running]
                outputs = rows_of(len(trace.h), self.n_outputs)
                with nogil:
                    self.finish(p(trace.h), cnp.PyArray_DIM(trace.h, 0), p(outputs))
        return outputs, last, trace

    def backward(self, parameters, Trace trace not None, d_outputs, d_last, wants_x=True, wants_weights=True):
        """Return the gradients of `forward`, by back-propagation through time.

        Parameters
        ----------
        parameters
            As in `forward`.
        trace
            Its result; only read.
        d_outputs, d_last
            Like its other results, float32: gradients with respect to these, or None for zeros.
        wants_x, wants_weights
            Whether the gradients with respect to x and to the parameters are computed.

        Returns
        -------
        d_x, d_state
            (B, D) and (N, S) float32; d_x is None if it is not wanted.
        d_parameters
            (`n_parameters`,) float32, in the order of the parameters; None if it is not wanted.
        """
        cdef str where = "RecurrentNetwork.backward"
        cdef list arrays = self.taken(parameters, where)
        if trace.shape != self.shape:
            raise ValueError(f"{where}: trace must be one of a network {self.shape}, got {trace.shape}")
        cdef Py_ssize_t n_rows = trace.n_rows, rows = trace.n_steps * n_rows
        cdef Py_ssize_t live = len(trace.h) if self.n_outputs else rows
        cdef Py_ssize_t width = self.n_outputs if self.n_outputs else self.size
        cdef cnp.ndarray by = None, last = None, d_x = None, gradient = None, full, w_ih, w_hh, kept_, room
        if d_outputs is not None:
            by = numbers(d_outputs, (live, width), where, "d_outputs")
        if d_last is not None:
            last = numbers(d_last, (n_rows, self.state_dim), where, "d_last")
        cdef cnp.ndarray d_state = rows_of(n_rows, self.state_dim)
        cdef bint weights = wants_weights, inputs = wants_x
        cdef Sequences s
        cdef Kept kept
        cdef Gradients wanted
        cdef f32* grads = NULL
        cdef f32* own
        cdef int layer, first = 2 * self.trunk.n_layers
        cdef Py_ssize_t at, n_trunk = self.block_size
        if self.n_outputs:
            n_trunk -= (self.size + 1) * self.n_outputs
        if weights:
            gradient = room_for(self.n_parameters)
            grads = p(gradient)
        with self.lock:
            self.load(arrays)
            memset(self.gradient, 0, self.block_size * sizeof(f32))
            clear_padded(&self.trunk)
            clear_padded(&self.head)
            if self.n_outputs and by is not None:
                full = rows_of(live, self.size)
                with nogil:
                    self.finish_back(p(trace.h), live, p(by), p(full))
                by = full
                if trace.running is not None:
                    by = np.zeros((rows, self.size), np.float32)
                    (<object>by)[trace.running] = full
            own = grads + self.n_parameters - (self.block_size - n_trunk) if weights else NULL
            for layer in range(self.n_layers - 1, -1, -1):
                s = self.sequences(layer, trace.n_steps, n_rows, self.state_dim)
                mark(&s, trace.is_first, trace.running)
                at = layer * self.state_dim // self.n_layers
                w_ih, w_hh = arrays[first + 4 * layer], arrays[first + 4 * layer + 1]
                kept_, room = trace.kept[layer], room_for(rlox_backward_room(&s))
                lay_out(&s, &kept, p(kept_))
                memset(&wanted, 0, sizeof(wanted))
                d_x = None
                if layer or (self.trunk.n_layers and weights) or inputs:
                    d_x = rows_of(rows, s.n_inputs)
                    wanted.x = p(d_x)
                wanted.state = p(d_state) + at
                if weights:
                    wanted.b_hh = own - s.n_gates * s.size
                    wanted.b_ih = wanted.b_hh - s.n_gates * s.size
                    wanted.w_hh = wanted.b_ih - s.n_gates * s.size * s.size
                    wanted.w_ih = wanted.w_hh - s.n_gates * s.size * s.n_inputs
                    own = wanted.w_ih
                full = trace.inputs[layer]
                with nogil:
                    rlox_recurrent_backward(&s, p(full), p(w_ih), p(w_hh), &kept, NULL if by is None else p(by),
                                            NULL if last is None else p(last) + at, p(room), &wanted)
                by = d_x
            if self.trunk.n_layers and by is not None:
                d_x = rows_of(rows, self.n_inputs) if inputs else None
                with nogil:
                    self.climb_back(p(trace.x), rows, p(by), NULL if d_x is None else p(d_x))
            unpad(&self.trunk)
            unpad(&self.head)
            if weights:
                memcpy(grads, self.gradient, n_trunk * sizeof(f32))
                memcpy(grads + self.n_parameters - (self.block_size - n_trunk), self.gradient + n_trunk,
                       (self.block_size - n_trunk) * sizeof(f32))
        return d_x if inputs else None, d_state, gradient

    cdef void finish_back(self, const f32* h, Py_ssize_t rows, const f32* d_outputs, f32* to) noexcept nogil:
        """Add the head's gradients, from those of its outputs; write those of its inputs (rows, H)."""
        cdef Py_ssize_t start, n
        cdef Layer* layer = last_of(&self.head)
        start = 0
        while start < rows:
            n = min(<Py_ssize_t>CHUNK, rows - start)
            rlox_widen_rows(n, self.size, h + start * self.size, self.size, self.padded_x, layer.in_pad)
            rlox_widen_rows(n, self.n_outputs, d_outputs + start * self.n_outputs, self.n_outputs, layer.d_out,
                            layer.out_pad)
            backward(&self.head, self.padded_x, layer.in_pad, n)
            backward_to_input(&self.head, n, self.padded_d)
            rlox_narrow_rows(n, self.size, self.padded_d, layer.in_pad, to + start * self.size, self.size)
            start += n

    cdef void climb_back(self, const f32* x, Py_ssize_t rows, const f32* by, f32* d_x) noexcept nogil:
        """Add the trunk's gradients, from those of its outputs; write those of its inputs (rows, D) unless NULL.

        The outputs of its layers are computed again, a chunk at a time, so that they stay in the cache.
        """
        cdef Py_ssize_t start, n, i, wide = self.trunk.layers[0].in_pad
        cdef Layer* last = last_of(&self.trunk)
        cdef f32 y
        start = 0
        while start < rows:
            n = min(<Py_ssize_t>CHUNK, rows - start)
            rlox_widen_rows(n, self.n_inputs, x + start * self.n_inputs, self.n_inputs, self.padded_x, wide)
            forward(&self.trunk, self.padded_x, wide, n)
            rlox_widen_rows(n, self.n_read, by + start * self.n_read, self.n_read, last.d_out, last.out_pad)
            for i in range(n * last.out_pad):
                y = last.out[i]
                last.d_out[i] *= (<f32>1.0 - y * y) if self.trunk.tanh else <f32>(y > 0.0)
            backward(&self.trunk, self.padded_x, wide, n)
            if d_x != NULL:
                backward_to_input(&self.trunk, n, self.padded_d)
                rlox_narrow_rows(n, self.n_inputs, self.padded_d, wide, d_x + start * self.n_inputs, self.n_inputs)
            start += n

    def pack(self, parameters):
        """Prepare parameters, as in `forward`, for many calls of `step`, which then do not see their changes."""
        cdef list arrays = self.taken(parameters, "RecurrentNetwork.pack"), packed = []
        cdef Sequences s
        cdef int layer
        with self.lock:
            self.load(arrays)
            for layer in range(self.n_layers):
                s = self.sequences(layer, 1, 1, self.state_dim)
                packed.append(self.packed_layer(&s, arrays, layer))
            self.packed = packed

    def step(self, x, state, is_first, after, column=0, parameters=None):
        """Run the network through a single step.

        Parameters
        ----------
        x
            (N, D) float32.
        state
            (N, S') float32: the S numbers from `column` on are the state before the step.
        is_first
            (N,) bool: that state counts as zero.
        after
            (N, S') float32, into which the state after the step is written, at the same place.
        column
            Where the state begins.
        parameters
            As in `forward`; None: those of the last call of `pack`.

        Returns
        -------
        outputs
            (N, n_outputs) float32, or (N, H) without the linear layer.
        """
        cdef str where = "RecurrentNetwork.step"
        cdef Py_ssize_t n = len_of(x, where, "x"), first = as_index(column, where, "column")
        cdef cnp.ndarray x_ = numbers(x, (n, self.n_inputs), where, "x")
        cdef Py_ssize_t ld = state.shape[1] if isinstance(state, np.ndarray) and state.ndim == 2 else self.state_dim
        if first < 0 or ld < first + self.state_dim:
            raise ValueError(f"{where}: state must have {self.state_dim} columns from {first} on, got {ld} in all")
        cdef cnp.ndarray state_ = numbers(state, (n, ld), where, "state"), after_ = numbers(after, (n, ld), where, "after")
        if after_ is not after or not cnp.PyArray_ISWRITEABLE(after_) or after_ is state_:
            raise ValueError(f"{where}: after must be contiguous, writeable and another array than state")
        cdef cnp.ndarray first_ = given(is_first, cnp.NPY_BOOL, "bool", (n,), where, "is_first")
        cdef list arrays = None if parameters is None else self.taken(parameters, where)
        cdef bint few = arrays is not None and n <= FEW
        cdef cnp.ndarray read = x_, outputs
        with self.lock:
            if arrays is not None:
                self.load(arrays)
            elif self.packed is None:
                raise ValueError(f"{where}: parameters must be given or packed before")
            if self.trunk.n_layers:
                read = rows_of(n, self.n_read)
                self.climb(p(x_), n, p(read))
            read = outputs = self.run_layers(read, 1, state_, after_, first, first_, None, arrays, few)
            if self.n_outputs:
                outputs = rows_of(n, self.n_outputs)
                self.finish(p(read), n, p(outputs))
        return outputs


cdef list perceptron(str name, list widths):
    """Return names and shapes of the parameters of a perceptron."""
    cdef list parameters = []
    for i, (n_in, n_out) in enumerate(zip(widths, widths[1:])):
        parameters += [(f"{name}.{i}.weight", (n_out, n_in)), (f"{name}.{i}.bias", (n_out,))]
    return parameters


cdef Py_ssize_t len_of(object array, str where, str name) except -1:
    """Return the number of rows of an array of two dimensions that is not empty."""
    if not isinstance(array, np.ndarray) or array.ndim != 2 or not array.size:
        raise ValueError(f"{where}: {name} must be an array of two dimensions that is not empty, got {np.shape(array)}")
    return array.shape[0]

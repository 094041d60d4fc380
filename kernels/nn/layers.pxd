"""Perceptrons on a flat block of parameters, on which the native updates of all algorithms are built.

Parameters are one flat float32 block in the order of the module's ``parameters()``, each weight (n_out, n_in) as in
PyTorch. A .pxd has no module of its own, so each function that needs NumPy imports it itself.
"""

cimport numpy as cnp
from libc.math cimport fabsf, isfinite, sqrt, sqrtf
from libc.string cimport memcpy, memset

from rlox.kernels.types cimport cf32_r, f32, f32_r, f64, i64

cdef extern from "gemm.h":
    enum:
        PAD
        RLOX_STORE
        RLOX_ADD
        RLOX_BIAS
        RLOX_BIAS_TANH
        RLOX_BIAS_RELU
        RLOX_DTANH
        RLOX_DRELU
    void rlox_gemm(Py_ssize_t rows, Py_ssize_t n, Py_ssize_t k_size, const f32* a, Py_ssize_t a_row,
                   Py_ssize_t a_col, const f32* b, Py_ssize_t ldb, f32* c, Py_ssize_t ldc, int after,
                   const f32* bias, const f32* h, Py_ssize_t ldh) noexcept nogil
    void rlox_pack_transposed(const f32* w, Py_ssize_t n_out, Py_ssize_t n_in, f32* to) noexcept nogil
    void rlox_pack(const f32* w, Py_ssize_t n_out, Py_ssize_t n_in, f32* to) noexcept nogil

cdef enum:
    MAX_LAYERS = 9
    CHUNK = 256


cdef struct Layer:
    Py_ssize_t n_in
    Py_ssize_t n_out
    Py_ssize_t in_pad
    Py_ssize_t out_pad
    f32* weight         # (n_out, n_in), in the block; (n_in, n_out) if the net is `by_input`
    f32* bias           # (n_out)
    f32* d_weight       # the same positions in the gradient
    f32* d_bias
    f32* forward        # room for panels of the transposed weight
    f32* backward       # room for panels of the weight; NULL for a first layer whose input has no gradient
    const f32* x_to_out # what the products read: panels, or the weight itself if its rows need no packing
    const f32* out_to_x
    Py_ssize_t x_to_out_ld  # distance of the rows of the weight; 0: panels
    Py_ssize_t out_to_x_ld
    f32* padded_bias    # (out_pad)
    f32* out            # (CHUNK, out_pad), or as many rows as passed to `build`
    f32* d_out          # likewise
    f32* d_padded       # (n_out, in_pad) if in_pad != n_in; by input: (n_in, out_pad) if out_pad != n_out


cdef struct Net:
    int n_layers
    bint tanh
    bint activated      # whether there is an activation after the last layer too
    bint by_input       # weights are (n_in, n_out), as in `x @ weight`
    Layer[MAX_LAYERS] layers


cdef inline Py_ssize_t padded(Py_ssize_t n) noexcept nogil:
    return (n + PAD - 1) // PAD * PAD


cdef inline Layer* last_of(Net* net) noexcept nogil:
    return &net.layers[net.n_layers - 1]


cdef inline Py_ssize_t direct_ld(const f32* weight, Py_ssize_t width) noexcept nogil:
    """Return the distance of the rows of a weight if the products can read it in place, else 0."""
    # Vectors across two cache lines would cost more than packing.
    return width if width % PAD == 0 and <size_t>weight % 64 == 0 else 0


cdef inline void pack(Net* net, bint backward) noexcept nogil:
    """Convert the weights to the form that the products read."""
    cdef int l
    cdef Layer* layer
    cdef Py_ssize_t direct
    for l in range(net.n_layers):
        layer = &net.layers[l]
        memcpy(layer.padded_bias, layer.bias, layer.n_out * sizeof(f32))
        direct = direct_ld(layer.weight, layer.n_out if net.by_input else layer.n_in)
        layer.x_to_out, layer.x_to_out_ld = layer.forward, 0
        if not net.by_input:
            rlox_pack_transposed(layer.weight, layer.n_out, layer.n_in, layer.forward)
        elif direct:
            layer.x_to_out, layer.x_to_out_ld = layer.weight, direct
        else:
            rlox_pack(layer.weight, layer.n_in, layer.n_out, layer.forward)
        if not backward or layer.backward == NULL:
            continue
        layer.out_to_x, layer.out_to_x_ld = layer.backward, 0
        if net.by_input:
            rlox_pack_transposed(layer.weight, layer.n_in, layer.n_out, layer.backward)
        elif direct:
            layer.out_to_x, layer.out_to_x_ld = layer.weight, direct
        else:
            rlox_pack(layer.weight, layer.n_out, layer.n_in, layer.backward)


cdef inline const f32* forward(Net* net, const f32* x, Py_ssize_t ldx, Py_ssize_t rows) noexcept nogil:
    """Return outputs (rows, out_pad) of the last layer for inputs (rows, ldx), at most as many rows as in `build`."""
    cdef int l, after
    cdef Layer* layer
    for l in range(net.n_layers):
        layer = &net.layers[l]
        after = RLOX_BIAS
        if l < net.n_layers - 1 or net.activated:
            after = RLOX_BIAS_TANH if net.tanh else RLOX_BIAS_RELU
        rlox_gemm(rows, layer.out_pad, layer.n_in, x, ldx, 1, layer.x_to_out, layer.x_to_out_ld, layer.out,
                  layer.out_pad, after, layer.padded_bias, NULL, 0)
        x = layer.out
        ldx = layer.out_pad
    return x


cdef inline void add_column_sums(cf32_r x, Py_ssize_t rows, Py_ssize_t ld, Py_ssize_t n, f32_r to) noexcept nogil:
    cdef Py_ssize_t i, j, width, at = 0
    cdef f32[64] sums
    while at < n:
        width = min(<Py_ssize_t>64, n - at)
        # Summed separately: otherwise small numbers are rounded to the precision of the sum of all chunks before.
        memset(sums, 0, sizeof(sums))
        for i in range(rows):
            for j in range(width):
                sums[j] += x[i * ld + at + j]
        for j in range(width):
            to[at + j] += sums[j]
        at += width


cdef inline void weight_gradient(Layer* layer, bint by_input, const f32* h, Py_ssize_t ldh,
                                 Py_ssize_t rows) noexcept nogil:
    """Add the gradients of weight and bias, from d_out (rows, out_pad) and the inputs h (rows, ldh)."""
    cdef f32* to = layer.d_weight if layer.d_padded == NULL else layer.d_padded
    # Reading by columns transposes: (n_out, rows) @ (rows, n_in), or (n_in, rows) @ (rows, n_out).
    if by_input:
        rlox_gemm(layer.n_in, layer.out_pad, rows, h, 1, ldh, layer.d_out, layer.out_pad,
                  to, layer.out_pad if to == layer.d_padded else layer.n_out, RLOX_ADD, NULL, NULL, 0)
    else:
        rlox_gemm(layer.n_out, layer.in_pad, rows, layer.d_out, 1, layer.out_pad, h, ldh,
                  to, layer.in_pad if to == layer.d_padded else layer.n_in, RLOX_ADD, NULL, NULL, 0)
    add_column_sums(layer.d_out, rows, layer.out_pad, layer.n_out, layer.d_bias)


cdef inline void descend(Net* net, int l, Py_ssize_t rows) noexcept nogil:
    """Compute d_out of layer l - 1 from that of layer l."""
    cdef Layer* layer = &net.layers[l]
    cdef Layer* below_ = &net.layers[l - 1]
    rlox_gemm(rows, layer.in_pad, layer.n_out, layer.d_out, layer.out_pad, 1, layer.out_to_x, layer.out_to_x_ld,
              below_.d_out, below_.out_pad, RLOX_DTANH if net.tanh else RLOX_DRELU, NULL, below_.out, below_.out_pad)


cdef inline void backward(Net* net, const f32* x, Py_ssize_t ldx, Py_ssize_t rows) noexcept nogil:
    """Add the gradients of the last `forward`, from d_out of the last layer; x (rows, ldx) is padded with zeros."""
    cdef int l
    for l in range(net.n_layers - 1, 0, -1):
        weight_gradient(&net.layers[l], net.by_input, net.layers[l - 1].out, net.layers[l - 1].out_pad, rows)
        descend(net, l, rows)
    if net.n_layers:
        weight_gradient(&net.layers[0], net.by_input, x, ldx, rows)


cdef inline void backward_to_input(Net* net, Py_ssize_t rows, f32* to) noexcept nogil:
    """Write only the gradient with respect to the inputs, (rows, in_pad), from d_out of the last layer."""
    cdef int l
    cdef Layer* first = &net.layers[0]
    for l in range(net.n_layers - 1, 0, -1):
        descend(net, l, rows)
    rlox_gemm(rows, first.in_pad, first.n_out, first.d_out, first.out_pad, 1, first.out_to_x, first.out_to_x_ld, to,
              first.in_pad, RLOX_STORE, NULL, NULL, 0)


cdef inline void input_gradient(Net* net, Py_ssize_t rows, Net* below, f32* to) noexcept nogil:
    """Continue the last `backward` into `below`, whose activated outputs were the inputs: write its d_out to `to`."""
    cdef Layer* first = &net.layers[0]
    cdef Layer* last = &below.layers[below.n_layers - 1]
    rlox_gemm(rows, first.in_pad, first.n_out, first.d_out, first.out_pad, 1, first.out_to_x, first.out_to_x_ld, to,
              last.out_pad, RLOX_DTANH if below.tanh else RLOX_DRELU, NULL, last.out, last.out_pad)


cdef inline Py_ssize_t padded_size(Net* net, Layer* layer) noexcept nogil:
    return layer.n_in * layer.out_pad if net.by_input else layer.n_out * layer.in_pad


cdef inline void clear_padded(Net* net) noexcept nogil:
    cdef int l
    cdef Layer* layer
    for l in range(net.n_layers):
        layer = &net.layers[l]
        if layer.d_padded != NULL:
            memset(layer.d_padded, 0, padded_size(net, layer) * sizeof(f32))


cdef inline void unpad(Net* net) noexcept nogil:
    """Copy the gradients that were added up in padded rows to their positions."""
    cdef int l
    cdef Py_ssize_t i, rows, width, ld
    cdef Layer* layer
    for l in range(net.n_layers):
        layer = &net.layers[l]
        if layer.d_padded == NULL:
            continue
        rows, width, ld = layer.n_out, layer.n_in, layer.in_pad
        if net.by_input:
            rows, width, ld = layer.n_in, layer.n_out, layer.out_pad
        for i in range(rows):
            memcpy(layer.d_weight + i * width, layer.d_padded + i * ld, width * sizeof(f32))


cdef inline f64 bounded(f64 x, f64 low, f64 high) noexcept nogil:
    """Return `x` clipped to [low, high]; NaN stays NaN, so that it is noticed."""
    if x < low:
        return low
    return high if x > high else x


cdef inline f64 legal(f64 x, f64 low, f64 high) noexcept nogil:
    """Return `x` clipped to [low, high], and `low` for NaN, which no environment may be given."""
    return (x if x < high else high) if x > low else low


cdef inline f64 norm_of(cf32_r x, Py_ssize_t n) noexcept nogil:
    """Return the Euclidean norm, with sixteen partial sums in float64."""
    cdef Py_ssize_t i, j
    cdef f64[16] sums
    cdef f64 total = 0.0
    for j in range(16):
        sums[j] = 0.0
    for i in range(0, n - 15, 16):
        for j in range(16):
            sums[j] += <f64>x[i + j] * x[i + j]
    for i in range(n & ~<Py_ssize_t>15, n):
        total += <f64>x[i] * x[i]
    for j in range(16):
        total += sums[j]
    return sqrt(total)


cdef inline void adam(f32_r p, cf32_r g, f32_r m, f32_r v, Py_ssize_t n, f32 clip, f32 step_size, f32 root2,
               f32 eps) noexcept nogil:
    """Kingma & Ba 2015 with PyTorch's order of operations: sqrt(v) / sqrt(1 - beta2^t) + eps.

    Moments of dead units decay below 1e-38, where arithmetic is ten times slower, so they are set to 0 before that.
    """
    cdef Py_ssize_t i
    cdef f32 gradient, first, second
    for i in range(n):
        gradient = g[i] * clip
        first = m[i] + <f32>0.1 * (gradient - m[i])
        second = <f32>0.999 * v[i] + <f32>0.001 * gradient * gradient
        m[i] = <f32>0.0 if fabsf(first) < <f32>1e-30 else first
        v[i] = <f32>0.0 if second < <f32>1e-36 else second
        p[i] = p[i] - step_size * m[i] / (sqrtf(v[i]) / root2 + eps)


cdef inline void rmsprop(f32_r p, cf32_r g, f32_r v, Py_ssize_t n, f32 clip, f32 step_size, f32 eps) noexcept nogil:
    cdef Py_ssize_t i
    cdef f32 gradient
    for i in range(n):
        gradient = g[i] * clip
        v[i] = <f32>0.99 * v[i] + <f32>0.01 * gradient * gradient
        p[i] = p[i] - step_size * gradient / (sqrtf(v[i]) + eps)


cdef inline void lerp(f32_r to, cf32_r source, Py_ssize_t n, f32 tau) noexcept nogil:
    """Move `to` towards `source` by the fraction tau, computed from the nearer end as in torch.lerp."""
    cdef Py_ssize_t i
    if tau == <f32>1.0:
        memcpy(to, source, n * sizeof(f32))
    elif tau < <f32>0.5:
        for i in range(n):
            to[i] = to[i] + tau * (source[i] - to[i])
    else:
        for i in range(n):
            to[i] = source[i] - (source[i] - to[i]) * (<f32>1.0 - tau)


cdef inline object given(object array, int type_num, object dtype, tuple shape, str where, str name):
    """Return `array` after checking its dtype and shape; a strided one as a C-contiguous copy."""
    if not isinstance(array, cnp.ndarray):
        raise TypeError(f"{where}: {name} must be a NumPy array, got {type(array).__name__}")
    if cnp.PyArray_TYPE(<cnp.ndarray>array) != type_num:
        raise TypeError(f"{where}: {name} must have dtype {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{where}: {name} must have shape {shape}, got {array.shape}")
    if cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>array):
        return array
    import numpy as np

    return np.ascontiguousarray(array)


cdef inline object numbers_below(object array, Py_ssize_t n, Py_ssize_t limit, str where, str name):
    """Return `array`, (n,) int64, after checking that each number is in [0, limit)."""
    cdef cnp.ndarray found = given(array, cnp.NPY_INT64, "int64", (n,), where, name)
    cdef const i64* x = <const i64*>cnp.PyArray_DATA(found)
    cdef Py_ssize_t i
    for i in range(n):
        if x[i] < 0 or x[i] >= limit:
            raise ValueError(f"{where}: {name} must be in [0, {limit}), got {x[i]}")
    return found


cdef inline f64 number(object value, f64 low, str where, str name) except? -1.0:
    """Return `value` after checking that it is a finite number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        import numpy as np

        if not isinstance(value, (np.integer, np.floating)):
            raise TypeError(f"{where}: {name} must be a number, got {type(value).__name__}")
    cdef f64 x = value
    if not isfinite(x) or x < low:
        raise ValueError(f"{where}: {name} must be finite and >= {low:g}, got {value}")
    return x


cdef inline object size_of(list widths):
    """Return the number of parameters of a perceptron."""
    return sum([(n_in + 1) * n_out for n_in, n_out in zip(widths, widths[1:])])


cdef inline f32* scratch(list held, Py_ssize_t n):
    """Return zeros that start on a cache line, in an array that `held` keeps."""
    import numpy as np

    cdef cnp.ndarray array = np.zeros(n + 16, np.float32)
    cdef size_t address = <size_t>cnp.PyArray_DATA(array)
    held.append(array)
    return <f32*>((address + 63) & ~<size_t>63)


cdef inline Py_ssize_t build(Net* net, list sizes, bint tanh, f32* block, f32* gradient, Py_ssize_t at, list held,
                              bint inner=False, bint by_input=False, Py_ssize_t rows=CHUNK):
    """Set up a perceptron with widths `sizes` whose parameters begin at `at`; return where they end.

    `inner`: whether gradients with respect to its inputs are needed too. `rows`: maximum number of rows per call.
    """
    cdef Layer* layer
    cdef int l
    net.n_layers = len(sizes) - 1
    net.tanh, net.by_input = tanh, by_input
    net.activated = False
    for l in range(net.n_layers):
        layer = &net.layers[l]
        layer.n_in, layer.n_out = sizes[l], sizes[l + 1]
        layer.in_pad, layer.out_pad = padded(layer.n_in), padded(layer.n_out)
        layer.weight, layer.d_weight = block + at, gradient + at
        at += layer.n_in * layer.n_out
        layer.bias, layer.d_bias = block + at, gradient + at
        at += layer.n_out
        layer.forward = scratch(held, layer.n_in * layer.out_pad)
        layer.backward = scratch(held, layer.n_out * layer.in_pad) if l or inner else NULL
        layer.padded_bias = scratch(held, layer.out_pad)
        layer.out = scratch(held, rows * layer.out_pad)
        layer.d_out = scratch(held, rows * layer.out_pad)
        layer.d_padded = NULL
        if layer.out_pad != layer.n_out if by_input else layer.in_pad != layer.n_in:
            layer.d_padded = scratch(held, padded_size(net, layer))
    return at

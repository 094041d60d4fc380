"""Logits of the next token for many rows at once, for Llama-style language models.

    x   = embedding[token]
    x  += output(attend(rotate(query(h)), rotate(key(h)), value(h)))     h = norm(x)       in each layer
    x  += down(silu(gate(h)) * up(h))                                   h = norm(x)
    logits = head(norm(x))

Weights are packed once into the panels that `gemm.h` reads. Keys and values of a prompt are stored once for all its
completions; those of a completion are adjacent in memory, so that its attention reads them sequentially. A row that is
not part of a call costs nothing. The result of a row does not depend on the other rows, to the last bit.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport sqrt
from libc.string cimport memcpy

from rlox.kernels.checks cimport as_index
from rlox.kernels.nn.layers cimport (
    RLOX_ADD, RLOX_BIAS, given, number, numbers_below, padded, rlox_gemm, rlox_pack_transposed, scratch,
)
from rlox.kernels.types cimport f32, i64
cimport rlox.kernels.vexp

cnp.import_array()

cdef extern from "decoder.h":
    ctypedef struct Span "rlox_span":
        const f32* keys
        const f32* values
        const f32* after
        i64 n
    f32 rlox_rms_norm(Py_ssize_t n, const f32* x, const f32* weight, f32 eps, f32* to) noexcept nogil
    void rlox_rotate(Py_ssize_t d, f32* x, const f32* cosine, const f32* sine) noexcept nogil
    void rlox_put_key(Py_ssize_t d, const f32* key, f32* tiles, Py_ssize_t t) noexcept nogil
    void rlox_gated(Py_ssize_t n, const f32* gate, const f32* up, f32* to) noexcept nogil
    void rlox_attend(Py_ssize_t group, Py_ssize_t d, const f32* q, const Span* spans, f32 scale, f32* scores,
                     f32* to) noexcept nogil

# Names of the arrays of a layer.
NORMS = ("input_norm", "post_norm", "query_norm", "key_norm")  # the last two are per head and may be None
PRODUCTS = ("query", "key", "value", "output", "gate", "up", "down")

# Their indices in these tuples.
cdef enum:
    INPUT_NORM, POST_NORM, QUERY_NORM, KEY_NORM, N_NORMS

cdef enum:
    QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, N_PRODUCTS


# x @ weight.T + bias
cdef struct Product:
    Py_ssize_t n_in
    Py_ssize_t width    # of the output, padded
    const f32* panels
    const f32* bias     # (width,); zeros if there is none


cdef struct Block:
    const f32* norms[N_NORMS]       # NULL: none
    Product[N_PRODUCTS] products


cdef inline void product(const Product* p, Py_ssize_t rows, const f32* x, Py_ssize_t ldx, f32* to, Py_ssize_t ld,
                         int after) noexcept nogil:
    rlox_gemm(rows, p.width, p.n_in, x, ldx, 1, p.panels, 0, to, ld, after, p.bias, NULL, 0)


cdef class Decoder:
    """The weights of a language model, and the keys and values of the rows that it continues.

    Calls on one decoder must not overlap.

    Parameters
    ----------
    embedding : array (V, H) float32
        Kept and used in place, without a copy.
    layers : sequence of dict
        float32 arrays by name: ``input_norm`` and ``post_norm`` (H,); ``query_norm`` and ``key_norm`` (D,), or None;
        and pairs (weight (n_out, n_in), bias (n_out,) or None): ``query``, ``key``, ``value``, ``output``, ``gate``,
        ``up``, ``down``.
    norm : array (H,) float32
        Weights of the last norm.
    head : array (V, H) float32
        May be the embedding.
    head_dim : int
        D, even; the widths of ``query`` and ``key`` must be multiples of it.
    eps : float
        Number that the norms add to the mean square.

    Raises
    ------
    TypeError, ValueError
        For arrays of another dtype or shape.
    """

    cdef readonly Py_ssize_t n_layers
    cdef readonly Py_ssize_t vocabulary
    cdef readonly Py_ssize_t hidden
    cdef readonly Py_ssize_t head_dim
    cdef readonly Py_ssize_t n_heads
    cdef readonly Py_ssize_t n_key_heads
    cdef list held              # the arrays that own the memory of pointers
    cdef Block* blocks
    cdef Product head
    cdef const f32* embedding
    cdef const f32* norm
    cdef f32 eps
    cdef Py_ssize_t key_at      # start of the keys in a row of `projected`
    cdef Py_ssize_t value_at    # start of the values
    cdef Py_ssize_t wide        # width of `projected`
    cdef Py_ssize_t inner       # padded width of the gate
    # Set by `begin`.
    cdef readonly Py_ssize_t n_prompts
    cdef readonly Py_ssize_t n_rows
    cdef readonly Py_ssize_t room
    cdef Py_ssize_t n           # completions of each prompt
    cdef Py_ssize_t width       # of the longest prompt
    cdef list begun
    cdef i64* lengths           # (n_prompts,) tokens of each prompt
    cdef i64* written           # (n_rows,) tokens of each row after the prompt
    cdef const f32* cosine      # (width + room, D)
    cdef const f32* sine
    cdef f32* prompt_keys       # (n_layers, n_prompts, n_key_heads) tiles
    cdef f32* prompt_values     # (n_layers, n_prompts, n_key_heads, width, padded D)
    cdef f32* own_keys          # (n_layers, n_rows, n_key_heads) tiles
    cdef f32* own_values        # (n_layers, n_rows, n_key_heads, room, padded D)
    cdef f32* x                 # (n_rows, padded H)
    cdef f32* normed
    cdef f32* projected         # (n_rows, query + key + value), each part padded
    cdef f32* seen              # (n_rows, padded n_heads * D)
    cdef f32* mlp               # (n_rows, gate + up)
    cdef f32* scores
    cdef cnp.ndarray logits     # (n_rows, padded V)
    cdef f32* found             # pointer to the logits

    def __init__(self, embedding, layers, norm, head, head_dim, eps):
        cdef str where = "Decoder"
        cdef Block* block
        cdef cnp.ndarray room
        shape = np.shape(embedding)
        if len(shape) != 2 or min(shape) < 1 or not len(layers):
            raise ValueError(
                f"{where}: embedding must be (V, H) and layers must contain at least one layer, got {shape} and "
                f"{len(layers)}"
            )
        self.held, self.begun = [], []
        self.n_layers, self.n_rows = len(layers), 0
        self.vocabulary, self.hidden = shape
        self.head_dim = as_index(head_dim, where, "head_dim")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"{where}: head_dim must be even and >= 2, got {head_dim}")
        self.eps = <f32>number(eps, 0.0, where, "eps")
        self.embedding = self.vector(embedding, shape, "embedding")
        self.norm = self.vector(norm, (self.hidden,), "norm")
        self.head = self.packed((head, None), self.vocabulary, self.hidden, "head")
        room = np.zeros(self.n_layers * sizeof(Block), np.uint8)
        self.held.append(room)
        self.blocks = <Block*>cnp.PyArray_DATA(room)
        for l, layer in enumerate(layers):
            if set(layer) != {*NORMS, *PRODUCTS}:
                raise ValueError(
                    f"{where}: layers[{l}] must have the keys {', '.join(NORMS + PRODUCTS)}, got {', '.join(layer)}"
                )
        widths = [np.shape(layers[0][name][0])[0] for name in ("query", "key", "gate")]
        if widths[0] % self.head_dim or widths[1] % self.head_dim or widths[1] < 1 or widths[0] % widths[1]:
            raise ValueError(
                f"{where}: query and key must have widths that are multiples of head_dim {self.head_dim}, and that of "
                f"query must be a multiple of that of key, got {widths[0]} and {widths[1]}"
            )
        self.n_heads, self.n_key_heads = widths[0] // self.head_dim, widths[1] // self.head_dim
        self.key_at = padded(widths[0])
        self.value_at = self.key_at + padded(widths[1])
        self.wide, self.inner = self.value_at + padded(widths[1]), padded(widths[2])
        sizes = {
            "query": (widths[0], self.hidden), "key": (widths[1], self.hidden), "value": (widths[1], self.hidden),
            "output": (self.hidden, widths[0]), "gate": (widths[2], self.hidden), "up": (widths[2], self.hidden),
            "down": (self.hidden, widths[2]),
        }
        for l, layer in enumerate(layers):
            block = self.blocks + <Py_ssize_t>l
            for k, name in enumerate(NORMS):
                if layer[name] is not None or k < QUERY_NORM:
                    size = self.hidden if k < QUERY_NORM else self.head_dim
                    block.norms[<int>k] = self.vector(layer[name], (size,), f"layers[{l}].{name}")
            for k, name in enumerate(PRODUCTS):
                n_out, n_in = sizes[name]
                block.products[<int>k] = self.packed(layer[name], n_out, n_in, f"layers[{l}].{name}")

    cdef const f32* vector(self, array, tuple shape, str name) except NULL:
        """Return the data of an array after checking it, and keep the array."""
        cdef cnp.ndarray taken = given(array, cnp.NPY_FLOAT32, "float32", shape, "Decoder", name)
        self.held.append(taken)
        return <const f32*>cnp.PyArray_DATA(taken)

    cdef Product packed(self, pair, Py_ssize_t n_out, Py_ssize_t n_in, str name) except *:
        """Return a weight (n_out, n_in) and its bias (n_out,), or None, in the form that `product` reads."""
        cdef Product p
        cdef f32* panels
        cdef f32* bias
        cdef cnp.ndarray weight = given(pair[0], cnp.NPY_FLOAT32, "float32", (n_out, n_in), "Decoder", name)
        cdef cnp.ndarray added
        p.n_in, p.width = n_in, padded(n_out)
        panels, bias = self.fresh(self.held, p.width * n_in), scratch(self.held, p.width)
        rlox_pack_transposed(<const f32*>cnp.PyArray_DATA(weight), n_out, n_in, panels)
        if pair[1] is not None:
            added = given(pair[1], cnp.NPY_FLOAT32, "float32", (n_out,), "Decoder", f"{name}'s bias")
            memcpy(bias, cnp.PyArray_DATA(added), n_out * sizeof(f32))
        p.panels, p.bias = panels, bias
        return p

    cdef f32* fresh(self, list held, Py_ssize_t n) except NULL:
        """Return room for n numbers that starts on a cache line, in an array that `held` keeps."""
        cdef cnp.ndarray array = np.empty(n + 16, np.float32)
        held.append(array)
        return <f32*>((<size_t>cnp.PyArray_DATA(array) + 63) & ~<size_t>63)

    def begin(self, keys, values, padding, n, room, cosine, sine) -> None:
        """Take the keys and values of prompts; each prompt is continued by `n` rows of at most `room` tokens.

        Parameters
        ----------
        keys, values : sequence of arrays (B, n_key_heads, P, D) float32
            One array per layer, keys after their rotation by position.
        padding : array (B,) int64
            Number of padding columns on the left of each prompt.
        cosine, sine : array (P + room or more, D) float32
            Of the rotation angles of the positions from 0.

        Raises
        ------
        TypeError, ValueError
            For arrays of another dtype or shape, and for a prompt without tokens.
        """
        cdef str where = "Decoder.begin"
        cdef cnp.ndarray k, v, left, lengths, written
        cdef Py_ssize_t l, b, width, d = self.head_dim
        if len(keys) != self.n_layers or len(values) != self.n_layers:
            raise ValueError(f"{where}: keys and values must contain {self.n_layers} arrays, got {len(keys)} and "
                             f"{len(values)}")
        shape = np.shape(keys[0])
        if len(shape) != 4 or shape[1] != self.n_key_heads or shape[3] != d or min(shape) < 1:
            raise ValueError(f"{where}: keys must have shape (B, {self.n_key_heads}, P, {d}), got {shape}")
        self.n_rows = 0
        self.n, self.room = as_index(n, where, "n"), as_index(room, where, "room")
        if self.n < 1 or self.room < 1:
            raise ValueError(f"{where}: n and room must be >= 1, got {n} and {room}")
        self.n_prompts, width = shape[0], shape[2]
        self.width = width
        left = given(padding, cnp.NPY_INT64, "int64", (self.n_prompts,), where, "padding")
        if np.min(left) < 0 or np.max(left) >= width:
            raise ValueError(f"{where}: padding must be in [0, {width}), got {np.min(left)} to {np.max(left)}")
        turned = np.shape(cosine)
        if len(turned) != 2 or turned[0] < width + self.room:
            raise ValueError(f"{where}: cosine must have shape ({width + self.room}, {d}), got {turned}")
        self.begun = begun = []
        cosine = given(cosine, cnp.NPY_FLOAT32, "float32", (turned[0], d), where, "cosine")
        sine = given(sine, cnp.NPY_FLOAT32, "float32", (turned[0], d), where, "sine")
        lengths, written = width - left, np.zeros(self.n_prompts * self.n, np.int64)
        begun += [cosine, sine, lengths, written]
        self.cosine, self.sine = (<const f32*>cnp.PyArray_DATA(<cnp.ndarray>cosine),
                                  <const f32*>cnp.PyArray_DATA(<cnp.ndarray>sine))
        self.lengths, self.written = <i64*>cnp.PyArray_DATA(lengths), <i64*>cnp.PyArray_DATA(written)
        cdef Py_ssize_t rows = self.n_prompts * self.n, of_prompts, of_rows
        of_prompts, of_rows = (self.n_layers * self.n_prompts * self.n_key_heads,
                               self.n_layers * rows * self.n_key_heads)
        self.prompt_keys = self.fresh(begun, of_prompts * padded(width) * d)
        self.prompt_values = self.fresh(begun, of_prompts * width * padded(d))
        self.own_keys = self.fresh(begun, of_rows * padded(self.room) * d)
        self.own_values = self.fresh(begun, of_rows * self.room * padded(d))
        self.x = scratch(begun, rows * padded(self.hidden))
        self.normed = scratch(begun, rows * padded(self.hidden))
        self.projected = scratch(begun, rows * self.wide)
        self.seen = scratch(begun, rows * padded(self.n_heads * d))
        self.mlp = scratch(begun, rows * 2 * self.inner)
        self.scores = scratch(begun, padded(width) + padded(self.room))
        self.logits = np.empty((rows, self.head.width), np.float32)
        self.found = <f32*>cnp.PyArray_DATA(self.logits)
        shape = (self.n_prompts, self.n_key_heads, width, d)
        for l in range(self.n_layers):
            k = given(keys[l], cnp.NPY_FLOAT32, "float32", shape, where, f"keys[{l}]")
            v = given(values[l], cnp.NPY_FLOAT32, "float32", shape, where, f"values[{l}]")
            for b in range(self.n_prompts):
                self.take_prompt(l, b, <const f32*>cnp.PyArray_DATA(k), <const f32*>cnp.PyArray_DATA(v))
        self.n_rows = rows

    cdef void take_prompt(self, Py_ssize_t l, Py_ssize_t b, const f32* keys, const f32* values) noexcept nogil:
        cdef Py_ssize_t head, t, at, d = self.head_dim, dp = padded(self.head_dim), width = self.width
        cdef Py_ssize_t skipped = width - self.lengths[b]
        cdef f32* to_keys
        cdef f32* to_values
        for head in range(self.n_key_heads):
            at = (l * self.n_prompts + b) * self.n_key_heads + head
            to_keys = self.prompt_keys + at * padded(width) * d
            to_values = self.prompt_values + at * width * dp
            at = ((b * self.n_key_heads + head) * width + skipped) * d
            for t in range(self.lengths[b]):
                rlox_put_key(d, keys + at + t * d, to_keys, t)
                memcpy(to_values + t * dp, values + at + t * d, d * sizeof(f32))

    def again(self, tokens) -> cnp.ndarray:
        """Return logits (B, V) float32 after the last token (B,) int64 of each prompt, which is read a second time.

        They can be compared with the logits of the model that computed the keys. Call it right after `begin`.
        """
        cdef cnp.ndarray ids = self.checked(tokens, self.n_prompts, self.vocabulary, "again", "tokens")
        cdef cnp.ndarray rows = np.arange(0, self.n_rows, self.n)
        cdef Py_ssize_t b
        for b in range(self.n_prompts):
            self.lengths[b] -= 1
        with nogil:
            self.step(<const i64*>cnp.PyArray_DATA(ids), <const i64*>cnp.PyArray_DATA(rows), self.n_prompts)
        for b in range(self.n_prompts):
            self.lengths[b] += 1
            self.written[b * self.n] = 0
        return self.logits[:self.n_prompts, :self.vocabulary]

    def next(self, tokens, rows) -> cnp.ndarray:
        """Return the logits after one more token in some rows.

        Parameters
        ----------
        tokens : array (M,) int64
            Ids.
        rows : array (M,) int64
            The rows of these tokens, ascending; row r continues prompt r // n.

        Returns
        -------
        array (M, V) float32
            Overwritten by the next call.

        Raises
        ------
        TypeError, ValueError
            For arrays of another dtype or shape, ids out of range, and a row that has no room left.
        """
        cdef Py_ssize_t m = np.size(rows), i
        cdef cnp.ndarray ids = self.checked(tokens, m, self.vocabulary, "next", "tokens")
        cdef cnp.ndarray chosen = self.checked(rows, m, self.n_rows, "next", "rows")
        cdef const i64* r = <const i64*>cnp.PyArray_DATA(chosen)
        for i in range(m):
            if i and r[i] <= r[i - 1]:
                raise ValueError(f"Decoder.next: rows must be ascending, got {r[i]} after {r[i - 1]}")
            if self.written[r[i]] >= self.room:
                raise ValueError(f"Decoder.next: rows must have room left, got {r[i]}, which has {self.room} tokens")
        with nogil:
            self.step(<const i64*>cnp.PyArray_DATA(ids), r, m)
        return self.logits[:m, :self.vocabulary]

    cdef cnp.ndarray checked(self, array, Py_ssize_t m, Py_ssize_t limit, str method, str name):
        """Return numbers (m,) int64 after checking that they are in [0, limit)."""
        cdef str where = f"Decoder.{method}"
        if self.n_rows == 0:
            raise ValueError(f"{where}: there must be rows to continue, got none; call begin first")
        return numbers_below(array, m, limit, where, name)

    cdef void step(self, const i64* tokens, const i64* rows, Py_ssize_t m) noexcept nogil:
        """Compute the logits of m rows after one more token each."""
        cdef Py_ssize_t i, l, ld = padded(self.hidden), inner = 2 * self.inner
        cdef const Block* block
        for i in range(m):
            memcpy(self.x + i * ld, self.embedding + tokens[i] * self.hidden, self.hidden * sizeof(f32))
        for l in range(self.n_layers):
            block = self.blocks + l
            self.normalize(block.norms[INPUT_NORM], m)
            product(&block.products[QUERY], m, self.normed, ld, self.projected, self.wide, RLOX_BIAS)
            product(&block.products[KEY], m, self.normed, ld, self.projected + self.key_at, self.wide, RLOX_BIAS)
            product(&block.products[VALUE], m, self.normed, ld, self.projected + self.value_at, self.wide, RLOX_BIAS)
            self.attention(l, rows, m)
            product(&block.products[OUTPUT], m, self.seen, padded(self.n_heads * self.head_dim), self.x, ld, RLOX_ADD)
            self.normalize(block.norms[POST_NORM], m)
            product(&block.products[GATE], m, self.normed, ld, self.mlp, inner, RLOX_BIAS)
            product(&block.products[UP], m, self.normed, ld, self.mlp + self.inner, inner, RLOX_BIAS)
            for i in range(m):
                rlox_gated(self.inner, self.mlp + i * inner, self.mlp + i * inner + self.inner, self.mlp + i * inner)
            product(&block.products[DOWN], m, self.mlp, inner, self.x, ld, RLOX_ADD)
        self.normalize(self.norm, m)
        product(&self.head, m, self.normed, ld, self.found, self.head.width, RLOX_BIAS)
        for i in range(m):
            self.written[rows[i]] = self.written[rows[i]] + 1

    cdef void normalize(self, const f32* weight, Py_ssize_t m) noexcept nogil:
        cdef Py_ssize_t i, ld = padded(self.hidden)
        for i in range(m):
            rlox_rms_norm(self.hidden, self.x + i * ld, weight, self.eps, self.normed + i * ld)

    cdef void attention(self, Py_ssize_t l, const i64* rows, Py_ssize_t m) noexcept nogil:
        """Write the attention of the queries in `projected` to `seen`, and store keys and values."""
        cdef Py_ssize_t i, j, head, first = 0, last
        cdef Py_ssize_t prompt
        while first < m:
            prompt = rows[first] // self.n
            last = first + 1
            while last < m and rows[last] // self.n == prompt:
                last += 1
            for i in range(first, last):
                self.turn(&self.blocks[l], i, self.lengths[prompt] + self.written[rows[i]])
            # Head after head, so that keys and values of the prompt stay in the cache while its rows attend to them.
            for head in range(self.n_key_heads):
                for j in range(first, last):
                    self.attend(l, head, prompt, j, rows[j], rows[j + 1] if j + 1 < last else rows[j])
            first = last

    cdef void turn(self, const Block* block, Py_ssize_t i, Py_ssize_t position) noexcept nogil:
        """Normalise and rotate the queries and keys of row i."""
        cdef Py_ssize_t head, d = self.head_dim
        cdef const f32* cosine = self.cosine + position * d
        cdef const f32* sine = self.sine + position * d
        cdef f32* at = self.projected + i * self.wide
        for head in range(self.n_heads):
            if block.norms[QUERY_NORM] != NULL:
                rlox_rms_norm(d, at + head * d, block.norms[QUERY_NORM], self.eps, at + head * d)
            rlox_rotate(d, at + head * d, cosine, sine)
        at += self.key_at
        for head in range(self.n_key_heads):
            if block.norms[KEY_NORM] != NULL:
                rlox_rms_norm(d, at + head * d, block.norms[KEY_NORM], self.eps, at + head * d)
            rlox_rotate(d, at + head * d, cosine, sine)

    cdef void attend(self, Py_ssize_t l, Py_ssize_t head, Py_ssize_t prompt, Py_ssize_t i, i64 row,
                     i64 following) noexcept nogil:
        """Store key and value of one head of row i, and compute the attention of its queries.

        `following` is the row that is processed next.
        """
        cdef Py_ssize_t d = self.head_dim, dp = padded(self.head_dim), t = self.written[row]
        cdef Py_ssize_t group = self.n_heads // self.n_key_heads
        cdef Py_ssize_t of_prompt = (l * self.n_prompts + prompt) * self.n_key_heads + head
        cdef Py_ssize_t own = (l * self.n_rows + row) * self.n_key_heads + head
        cdef f32* keys = self.own_keys + own * padded(self.room) * d
        cdef f32* values = self.own_values + own * self.room * dp
        cdef const f32* at = self.projected + i * self.wide
        cdef const f32* key = at + self.key_at + head * d
        cdef const f32* value = at + self.value_at + head * d
        cdef Span[2] spans
        rlox_put_key(d, key, keys, t)
        memcpy(values + t * dp, value, d * sizeof(f32))
        spans[0].keys = self.prompt_keys + of_prompt * padded(self.width) * d
        spans[0].values = self.prompt_values + of_prompt * self.width * dp
        spans[0].n = self.lengths[prompt]
        spans[1].keys, spans[1].values, spans[1].n = keys, values, t + 1
        spans[1].after = keys + (following - row) * self.n_key_heads * padded(self.room) * d
        rlox_attend(group, d, at + head * group * d, spans, <f32>(1.0 / sqrt(<double>d)), self.scores,
                    self.seen + i * padded(self.n_heads * d) + head * group * d)

"""Packing token sequences into rows of equal length, and preference pairs."""

import numpy as np

cimport numpy as cnp
from libc.string cimport memcpy, memset

from rlox.kernels.checks cimport as_array, as_flag, as_index
from rlox.kernels.types cimport i64, u8, u32, u64

cnp.import_array()


cdef Py_ssize_t fit(Py_ssize_t n, i64 capacity, const i64* lengths, const i64* order, i64* room,
                    Py_ssize_t leaves, i64* bin_of, i64* start) noexcept nogil:
    """First fit: put each sequence, in `order`, into the first bin with room for it; return the number of bins.

    `room` is a binary tree over the bins (node i has the children 2i and 2i + 1, and the bins are the last
    `leaves` nodes). A node contains the largest room of all bins below it, so that the first bin that fits is found in
    log(n) steps.
    """
    cdef Py_ssize_t i, node
    cdef Py_ssize_t bins = 0
    cdef i64 length
    for node in range(1, 2 * leaves):
        room[node] = capacity
    for i in range(n):
        length = lengths[order[i]]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        bin_of[order[i]] = node - leaves
        start[order[i]] = capacity - room[node]
        bins = max(bins, node - leaves + 1)
        room[node] -= length
        node //= 2
        while node >= 1:
            length = max(room[2 * node], room[2 * node + 1])
            if room[node] == length:
                break
            room[node] = length
            node //= 2
    return bins


cdef cnp.ndarray place(cnp.ndarray lengths, i64 capacity, Py_ssize_t* bins):
    """Fit sequences in order of decreasing length; equal ones stay in order.

    Returns one int64 array with the order (n), the bin of each sequence (n), its start in the bin (n), 2n places for
    the caller, and the tree. For a short list, allocating several arrays would take longer than the rest.
    """
    cdef Py_ssize_t n = cnp.PyArray_DIM(lengths, 0)
    cdef const i64* length = <const i64*>cnp.PyArray_DATA(lengths)
    cdef Py_ssize_t leaves = 1
    cdef Py_ssize_t i, j
    while leaves < n:
        leaves *= 2
    cdef cnp.npy_intp size = 5 * n + 2 * leaves
    cdef cnp.ndarray memory = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
    cdef i64* order = <i64*>cnp.PyArray_DATA(memory)
    if n <= 32:  # insertion sort: calling NumPy would take longer
        for i in range(n):
            j = i
            while j > 0 and length[order[j - 1]] < length[i]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = i
    else:
        memory[:n] = np.argsort(-(<object>lengths), kind="stable")
    with nogil:
        bins[0] = fit(n, capacity, length, order, order + 5 * n, leaves, order + n, order + 2 * n)
    return memory


cdef cnp.ndarray as_tokens(object value, str where, str name):
    """Return `value` as a C-contiguous uint32 array (T,); `value` itself if it already is one."""
    cdef cnp.ndarray array
    if isinstance(value, cnp.ndarray):
        array = value
        if (cnp.PyArray_TYPE(array) == cnp.NPY_UINT32 and cnp.PyArray_NDIM(array) == 1
                and cnp.PyArray_ISCARRAY_RO(array)):
            return array
    array = as_array(value, where, name)
    if array.ndim != 1:
        raise ValueError(f"{where}: {name} must be 1-D (T,), got shape {(<object>array).shape}")
    if array.size == 0:
        return np.zeros(0, np.uint32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{where}: {name} must contain integer token ids, got dtype {array.dtype}")
    low, high = array.min(), array.max()
    if low < 0 or high >= 1 << 32:
        raise ValueError(f"{where}: {name} must contain token ids in [0, 2**32), got {low if low < 0 else high}")
    return np.ascontiguousarray(array, np.uint32)


cdef void check_lengths(cnp.ndarray lengths, i64 capacity) except *:
    cdef const i64* length = <const i64*>cnp.PyArray_DATA(lengths)
    cdef Py_ssize_t i
    for i in range(cnp.PyArray_DIM(lengths, 0)):
        if length[i] < 0:
            raise ValueError(f"pack_sequences: the lengths in sequences must be at least 0, got {length[i]} at {i}")
        if length[i] > capacity:
            raise ValueError(
                f"pack_sequences: sequences[{i}] must have at most max_length {capacity} tokens, got {length[i]}; "
                "shorten it, or increase max_length"
            )


cdef list pack_tokens(object sequences, i64 capacity):
    cdef cnp.npy_intp n = len(sequences)
    cdef list arrays = [None] * n
    cdef cnp.ndarray lengths = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT64, 0)
    cdef i64* length = <i64*>cnp.PyArray_DATA(lengths)
    cdef Py_ssize_t i, j, bins, place_
    cdef cnp.npy_intp size
    cdef cnp.ndarray tokens, ids, mask, positions, starts, indices
    cdef u32* positions_data
    cdef u32* mask_data
    for i in range(n):
        tokens = as_tokens(sequences[i], "pack_sequences", f"sequences[{i}]")
        arrays[i] = tokens
        length[i] = cnp.PyArray_DIM(tokens, 0)
    if n == 0:
        return []
    check_lengths(lengths, capacity)
    cdef cnp.ndarray memory = place(lengths, capacity, &bins)
    cdef const i64* order_data = <const i64*>cnp.PyArray_DATA(memory)
    cdef const i64* bin_data = order_data + n
    cdef const i64* start_data = order_data + 2 * n
    # Per bin: the number of tokens, and of sequences; the latter then becomes the index of its next sequence. There are
    # at most n bins.
    cdef i64* tokens_in = <i64*>order_data + 3 * n
    cdef i64* sequences_in = tokens_in + n
    memset(tokens_in, 0, 2 * n * sizeof(i64))
    for i in range(n):
        tokens_in[bin_data[i]] += length[i]
        sequences_in[bin_data[i]] += 1
    cdef list result = [None] * bins
    for i in range(bins):
        size = tokens_in[i]
        ids = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT32, 0)
        mask = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT32, 0)
        positions = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT32, 0)
        mask_data = <u32*>cnp.PyArray_DATA(mask)
        for j in range(size):
            mask_data[j] = 1
        size = sequences_in[i]
        starts = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT64, 0)
        indices = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
        result[i] = {
            "input_ids": ids, "attention_mask": mask, "position_ids": positions, "sequence_starts": starts,
            "sequence_index": indices,
        }
        sequences_in[i] = 0
    cdef dict row
    for i in range(n):
        j = order_data[i]
        row = result[bin_data[j]]
        place_ = sequences_in[bin_data[j]]
        sequences_in[bin_data[j]] += 1
        (<u64*>cnp.PyArray_DATA(<cnp.ndarray>row["sequence_starts"]))[place_] = <u64>start_data[j]
        (<i64*>cnp.PyArray_DATA(<cnp.ndarray>row["sequence_index"]))[place_] = j
        if length[j]:
            memcpy((<u32*>cnp.PyArray_DATA(<cnp.ndarray>row["input_ids"])) + start_data[j],
                   cnp.PyArray_DATA(<cnp.ndarray>arrays[j]), length[j] * sizeof(u32))
        positions_data = (<u32*>cnp.PyArray_DATA(<cnp.ndarray>row["position_ids"])) + start_data[j]
        for place_ in range(length[j]):
            positions_data[place_] = <u32>place_
    return result


cdef tuple pack_lengths(cnp.ndarray lengths, i64 capacity):
    cdef Py_ssize_t n = cnp.PyArray_DIM(lengths, 0)
    cdef Py_ssize_t i, j, bins
    cdef i64 at
    check_lengths(lengths, capacity)
    cdef cnp.ndarray memory = place(lengths, capacity, &bins)
    packed = np.full((bins, capacity), -1, np.int64)
    positions = np.zeros((bins, capacity), np.int64)
    cdef i64* index_data = <i64*>cnp.PyArray_DATA(<cnp.ndarray>packed)
    cdef i64* position_data = <i64*>cnp.PyArray_DATA(<cnp.ndarray>positions)
    cdef const i64* length = <const i64*>cnp.PyArray_DATA(lengths)
    cdef const i64* bin_data = <const i64*>cnp.PyArray_DATA(memory) + n
    cdef const i64* start_data = bin_data + n
    with nogil:
        for i in range(n):
            at = bin_data[i] * capacity + start_data[i]
            for j in range(length[i]):
                index_data[at + j] = i
                position_data[at + j] = j
    return packed, packed >= 0, positions


def pack_sequences(sequences, max_length):
    """Pack sequences into few rows of at most `max_length` tokens, with the first-fit-decreasing algorithm.

    Each sequence, longest first (equal ones in order), goes into the first row with room for it. This takes at most
    11/9 of the best possible number of rows, plus one (Dósa 2007). The time for n sequences is O(n log n).

    Parameters
    ----------
    sequences
        Either a list of 1-D integer arrays of token ids in [0, 2**32), or the (n,) lengths of sequences as
        integers.
    max_length
        Row length, >= 1.

    Returns
    -------
    list of dict
        For sequences: one dict per row, without padding, with `input_ids`, `attention_mask` (ones) and
        `position_ids` (from 0 in each sequence), uint32 (L,); and `sequence_starts` uint64 and
        `sequence_index` int64, (number of sequences,): where each sequence begins, and its index in `sequences`.
        [] for [].
    packed, masks, positions
        For lengths: (rows, max_length) each. `packed` int64 is the index of the sequence at each slot, or -1 for
        padding; `masks` bool is True where there is a token; `positions` int64 counts from 0 in each sequence and is 0
        for padding.

    Raises
    ------
    ValueError
        If a sequence is longer than max_length or not 1-D, a token id is out of range, or max_length < 1.
    TypeError
        If token ids or lengths are not integers, or the two forms are mixed.
    """
    cdef i64 capacity
    wanted = as_index(max_length, "pack_sequences", "max_length")
    if not 1 <= wanted < 1 << 31:
        raise ValueError(f"pack_sequences: max_length must be at least 1 and below 2**31, got {wanted}")
    capacity = wanted
    if isinstance(sequences, list) and sequences and isinstance(sequences[0], cnp.ndarray):
        return pack_tokens(sequences, capacity)
    if isinstance(sequences, cnp.ndarray) and sequences.ndim == 1 and sequences.dtype.kind != "O":
        if sequences.dtype.kind not in "iu" and sequences.size:
            raise TypeError(f"pack_sequences: the lengths in sequences must be integers, got dtype {sequences.dtype}")
        return pack_lengths(np.ascontiguousarray(sequences, np.int64), capacity)
    if not hasattr(sequences, "__len__") or isinstance(sequences, (str, bytes, dict)):
        raise TypeError(
            "pack_sequences: sequences must be a list of arrays, or of lengths, got "
            f"{type(sequences).__name__}"
        )
    if len(sequences) and hasattr(sequences[0], "__index__") and not isinstance(sequences[0], cnp.ndarray):
        lengths = [as_index(length, "pack_sequences", f"sequences[{i}]") for i, length in enumerate(sequences)]
        # Clamped, because lengths that do not fit into 63 bits do not fit into max_length either.
        return pack_lengths(np.array([min(max(x, -1), 1 << 40) for x in lengths], np.int64), capacity)
    return pack_tokens(sequences, capacity)


cdef void block_mask(Py_ssize_t rows, Py_ssize_t length, const i64* index, bint causal, u8* mask) noexcept nogil:
    cdef Py_ssize_t i, j, first, end
    for i in range(rows):
        first = 0
        while first < length:
            end = first + 1
            while end < length and index[end] == index[first]:
                end += 1
            if index[first] >= 0:
                for j in range(first, end):
                    memset(mask + j * length + first, 1, (j + 1 if causal else end) - first)
            first = end
        index += length
        mask += length * length


def packed_attention_mask(packed, causal=True):
    """Return the mask with which slots attend only to slots of the same sequence.

    Parameters
    ----------
    packed
        (rows, L) integers as from ``pack_sequences(lengths, L)[0]``: the sequence at each slot, -1 for
        padding. The slots of a sequence are adjacent.
    causal
        Whether a slot attends only to itself and to earlier slots: True or False.

    Returns
    -------
    numpy.ndarray
        (rows, L, L) bool, True at [b, i, j] where slot i attends to slot j. Padding attends to nothing and
        nothing attends to it, so the softmax over its rows is undefined: mask the result there.

    Raises
    ------
    ValueError
        If `packed` is not 2-D, or `causal` is a number other than 0 and 1.
    TypeError
        If `packed` does not contain integers, or `causal` is not a flag.
    """
    indices = as_array(packed, "packed_attention_mask", "packed")
    if indices.ndim != 2:
        raise ValueError(f"packed_attention_mask: packed must be 2-D (rows, L), got shape {indices.shape}")
    if indices.dtype.kind not in "iu":
        raise TypeError(f"packed_attention_mask: packed must contain integers, got dtype {indices.dtype}")
    cdef cnp.ndarray index = np.ascontiguousarray(indices, np.int64)
    cdef Py_ssize_t rows = cnp.PyArray_DIM(index, 0)
    cdef Py_ssize_t length = cnp.PyArray_DIM(index, 1)
    mask = np.zeros((rows, length, length), bool)
    cdef u8* mask_data = <u8*>cnp.PyArray_DATA(<cnp.ndarray>mask)
    cdef const i64* index_data = <const i64*>cnp.PyArray_DATA(index)
    cdef bint causal_ = as_flag(causal, "packed_attention_mask", "causal")
    with nogil:
        block_mask(rows, length, index_data, causal_, mask_data)
    return mask


cdef class DPOPair:
    """A prompt with a preferred and a dispreferred completion (Rafailov et al. 2023, arXiv:2305.18290).

    Parameters
    ----------
    prompt_tokens, chosen_tokens, rejected_tokens
        (P,), (C,), (R,) token ids in [0, 2**32), as lists or arrays of any integer dtype; copied.

    Attributes
    ----------
    prompt_tokens, chosen_tokens, rejected_tokens
        Views of the copies, uint32 and read-only.

    Raises
    ------
    ValueError
        If an argument is not 1-D, or a token id is out of range.
    TypeError
        If token ids are not integers.
    """

    cdef cnp.ndarray memory  # all three, one after the other, in one allocation; attributes are created on access
    cdef Py_ssize_t prompt
    cdef Py_ssize_t chosen
    cdef Py_ssize_t rejected

    __hash__ = None

    def __cinit__(self, prompt_tokens, chosen_tokens, rejected_tokens):
        cdef cnp.ndarray prompt = as_tokens(prompt_tokens, "DPOPair", "prompt_tokens")
        cdef cnp.ndarray chosen = as_tokens(chosen_tokens, "DPOPair", "chosen_tokens")
        cdef cnp.ndarray rejected = as_tokens(rejected_tokens, "DPOPair", "rejected_tokens")
        self.prompt = cnp.PyArray_DIM(prompt, 0)
        self.chosen = cnp.PyArray_DIM(chosen, 0)
        self.rejected = cnp.PyArray_DIM(rejected, 0)
        cdef cnp.npy_intp size = self.prompt + self.chosen + self.rejected
        self.memory = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT32, 0)
        cdef u32* data = <u32*>cnp.PyArray_DATA(self.memory)
        memcpy(data, cnp.PyArray_DATA(prompt), self.prompt * sizeof(u32))
        memcpy(data + self.prompt, cnp.PyArray_DATA(chosen), self.chosen * sizeof(u32))
        memcpy(data + self.prompt + self.chosen, cnp.PyArray_DATA(rejected), self.rejected * sizeof(u32))
        cnp.PyArray_CLEARFLAGS(self.memory, cnp.NPY_ARRAY_WRITEABLE)

    @property
    def prompt_tokens(self) -> np.ndarray:
        return self.memory[:self.prompt]

    @property
    def chosen_tokens(self) -> np.ndarray:
        return self.memory[self.prompt:self.prompt + self.chosen]

    @property
    def rejected_tokens(self) -> np.ndarray:
        return self.memory[self.prompt + self.chosen:]

    def prompt_len(self) -> int:
        """Return the number of prompt tokens."""
        return self.prompt

    def chosen_len(self) -> int:
        """Return the number of tokens of the preferred completion."""
        return self.chosen

    def rejected_len(self) -> int:
        """Return the number of tokens of the dispreferred completion."""
        return self.rejected

    def __eq__(self, other):
        if not isinstance(other, DPOPair):
            return NotImplemented
        return all([np.array_equal(a, b) for a, b in zip(self.__reduce__()[1], other.__reduce__()[1])])

    def __repr__(self) -> str:
        return (
            f"DPOPair(prompt_tokens={self.prompt_tokens.tolist()}, "
            f"chosen_tokens={self.chosen_tokens.tolist()}, rejected_tokens={self.rejected_tokens.tolist()})"
        )

    def __reduce__(self):
        return DPOPair, (self.prompt_tokens, self.chosen_tokens, self.rejected_tokens)

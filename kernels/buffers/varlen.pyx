"""Sequences of different lengths, such as tokenised prompts and completions."""

import numpy as np

cimport numpy as cnp
from cpython.long cimport PyLong_CheckExact
from libc.string cimport memcpy

from rlox.kernels.checks cimport as_array, as_state, as_index
from rlox.kernels.types cimport i64, u8, u64

cnp.import_array()

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1

DTYPES = {name: np.dtype(name) for name in ("uint32", "int32", "int64", "float32")}

cdef Py_ssize_t FIRST_SEGMENT = 4096  # bytes
cdef Py_ssize_t LARGEST_SEGMENT = 1 << 26


cdef void fill(char* out, Py_ssize_t n, const char* item, Py_ssize_t itemsize) noexcept nogil:
    """Write `item` n times."""
    cdef Py_ssize_t i
    for i in range(n):
        memcpy(out + i * itemsize, item, itemsize)


cdef class VarLenStore:
    """An append-only list of 1-D sequences, stored end to end in a few large arrays.

    `push` copies sequences in and `get` copies them out, so no memory is shared with the caller. Stored elements never
    move, so the amortised cost of a push is only the copy of its own elements.

    Parameters
    ----------
    dtype
        ``uint32`` (the default: token ids), ``int32``, ``int64`` or ``float32``.

    Raises
    ------
    ValueError
        For another dtype.

    Examples
    --------
    >>> store = VarLenStore()
    >>> store.push([5, 6, 7])
    >>> store.push([8])
    >>> store.get(-1)
    array([8], dtype=uint32)
    >>> store.padded([0, 1], pad=0)[0].tolist()
    [[5, 6, 7], [8, 0, 0]]
    """

    cdef readonly object dtype
    cdef int type_num
    cdef Py_ssize_t itemsize
    # Start and length of each sequence; both arrays grow by doubling.
    cdef cnp.ndarray addresses, lengths
    cdef Py_ssize_t n, total
    # The segments own the memory that `addresses` points into.
    cdef list segments
    cdef char* free_
    cdef Py_ssize_t room  # bytes left at free_

    def __init__(self, dtype=np.uint32) -> None:
        try:
            kind = np.dtype(dtype)
        except TypeError as e:
            raise TypeError(f"VarLenStore: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}") from e
        if dtype is None or kind.name not in DTYPES:
            raise ValueError(f"VarLenStore: dtype must be one of {', '.join(DTYPES)}, got {dtype}")
        self.dtype = DTYPES[kind.name]
        self.type_num = self.dtype.num
        self.itemsize = self.dtype.itemsize
        self.clear()

    def clear(self) -> None:
        """Remove all sequences and free the memory."""
        self.addresses = np.empty(8, np.uint64)
        self.lengths = np.empty(8, np.int64)
        self.n = self.total = self.room = 0
        self.segments = []
        self.free_ = NULL

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"VarLenStore({self.n} sequences, {self.total} elements, dtype={self.dtype})"

    def __reduce__(self):
        return VarLenStore, (self.dtype.name,), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    def __iter__(self):
        return map(self.get, range(self.n))

    def len(self) -> int:
        """Return the number of sequences, like ``len(store)``."""
        return self.n

    def num_sequences(self) -> int:
        """Return the number of sequences."""
        return self.n

    def total_elements(self) -> int:
        """Return the total number of elements of all sequences."""
        return self.total

    def push(self, seq) -> None:
        """Append a copy of a 1-D sequence, which may be empty.

        Parameters
        ----------
        seq
            (L,) array or list. Integer stores take integers that fit the dtype (an array of exactly that
            dtype is the fast form); a float32 store takes any real numbers, NaN and infinities included.

        Raises
        ------
        ValueError
            For more than one dimension, or an integer that does not fit.
        TypeError
            If the elements are not numbers, or are floats or bools in an integer store.
        """
        cdef cnp.ndarray array
        if (isinstance(seq, cnp.ndarray) and cnp.PyArray_TYPE(<cnp.ndarray>seq) == self.type_num
                and cnp.PyArray_NDIM(<cnp.ndarray>seq) == 1 and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>seq)):
            array = seq
        else:
            array = self.convert(seq, "VarLenStore.push", "seq")
        self.append(array)

    def push_batch(self, seqs) -> None:
        """Append copies of several sequences, or none of them if one is invalid.

        Parameters
        ----------
        seqs
            List of sequences, each as for `push`. A (B, L) array is also accepted, as a list of its rows.

        Raises
        ------
        ValueError, TypeError
            As for `push`; the message names the sequence, as in ``seqs[3]``.
        """
        try:
            items = list(seqs)
        except Exception as e:
            raise TypeError(
                f"VarLenStore.push_batch: seqs must be a list of sequences, got {type(seqs).__name__}"
            ) from e
        arrays = [self.convert(seq, "VarLenStore.push_batch", f"seqs[{i}]") for i, seq in enumerate(items)]
        for array in arrays:
            self.append(array)

    def get(self, index) -> np.ndarray:
        """Return sequence `index` as a new array (L,) of the store's dtype.

        Negative indices count from the end. Raises IndexError outside [-n, n), and TypeError if the index is not an
        integer.
        """
        cdef Py_ssize_t i = self.place(index, "VarLenStore.get", "index")
        cdef Py_ssize_t length = (<i64*>cnp.PyArray_DATA(self.lengths))[i]
        cdef cnp.npy_intp shape = length
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &shape, self.type_num, 0)
        cdef const char* source = <const char*>(<u64*>cnp.PyArray_DATA(self.addresses))[i]
        if length:
            memcpy(cnp.PyArray_DATA(out), source, length * self.itemsize)
        return out

    def __getitem__(self, index) -> np.ndarray:
        return self.get(index)

    def padded(self, indices, pad=0, *, bint left=False) -> tuple[np.ndarray, np.ndarray]:
        """Return several sequences as the rows of one array, padded to the longest of them.

        Parameters
        ----------
        indices
            (B,) integers, each as for `get`; repeats are allowed.
        pad
            The element to pad with; must fit the store's dtype.
        left
            True puts the padding in front, as needed for generation from prompts of different lengths.

        Returns
        -------
        tokens
            (B, L) of the store's dtype, where L is the length of the longest sequence (0 without indices).
        mask
            (B, L) bool, True at the elements of sequences, False at padding.

        Raises
        ------
        IndexError
            If an index lies outside [-n, n).
        ValueError, TypeError
            If `indices` is not a list of integers, or `pad` does not fit the dtype.
        """
        cdef cnp.ndarray filler = self.convert([pad], "VarLenStore.padded", "pad")
        cdef cnp.ndarray chosen = as_array(indices, "VarLenStore.padded", "indices")
        if cnp.PyArray_NDIM(chosen) != 1:
            raise ValueError(
                f"VarLenStore.padded: indices must have shape (B,), got {(<object>chosen).shape}"
            )
        cdef Py_ssize_t b = cnp.PyArray_SIZE(chosen)
        if chosen.dtype.kind not in "iu" and b:
            raise TypeError(f"VarLenStore.padded: indices must be integers, got dtype {chosen.dtype}")
        wrong = (chosen < -self.n) | (chosen >= self.n)
        if wrong.any():
            raise IndexError(
                f"VarLenStore.padded: indices must lie in [-{self.n}, {self.n}), got {chosen[wrong][0]}"
            )
        cdef cnp.ndarray places = np.ascontiguousarray(np.where(chosen < 0, chosen + self.n, chosen), np.int64)
        cdef const i64* at = <const i64*>cnp.PyArray_DATA(places)
        cdef const i64* lengths = <const i64*>cnp.PyArray_DATA(self.lengths)
        cdef const u64* addresses = <const u64*>cnp.PyArray_DATA(self.addresses)
        cdef Py_ssize_t width = 0
        cdef Py_ssize_t i, start, length
        for i in range(b):
            width = max(width, <Py_ssize_t>lengths[at[i]])
        cdef cnp.ndarray tokens = np.empty((b, width), self.dtype)
        cdef cnp.ndarray mask = np.zeros((b, width), np.bool_)
        cdef char* out = <char*>cnp.PyArray_DATA(tokens)
        cdef u8* flags = <u8*>cnp.PyArray_DATA(mask)
        cdef const char* item = <const char*>cnp.PyArray_DATA(filler)
        cdef Py_ssize_t size = self.itemsize
        cdef Py_ssize_t j
        with nogil:
            for i in range(b):
                length = lengths[at[i]]
                start = width - length if left else 0
                if length:
                    memcpy(out + start * size, <const char*>addresses[at[i]], length * size)
                for j in range(start, start + length):
                    flags[j] = 1
                if left:
                    fill(out, start, item, size)
                else:
                    fill(out + length * size, width - length, item, size)
                out += width * size
                flags += width
        return tokens, mask

    def get_state(self) -> dict:
        """Return ``{"elements": (total,), "lengths": (n,) int64}`` as new arrays."""
        cdef cnp.ndarray elements = np.empty(self.total, self.dtype)
        cdef char* out = <char*>cnp.PyArray_DATA(elements)
        cdef const i64* lengths = <const i64*>cnp.PyArray_DATA(self.lengths)
        cdef const u64* addresses = <const u64*>cnp.PyArray_DATA(self.addresses)
        cdef Py_ssize_t i, nbytes
        with nogil:
            for i in range(self.n):
                nbytes = lengths[i] * self.itemsize
                if nbytes:
                    memcpy(out, <const char*>addresses[i], nbytes)
                    out += nbytes
        return {"elements": elements, "lengths": self.lengths[: self.n].copy()}

    def set_state(self, dict state not None) -> None:
        """Replace everything by a state from `get_state` of a store of the same dtype.

        Raises ValueError for other keys, dtypes or lengths, and then leaves the store unchanged.
        """
        where = "VarLenStore.set_state"
        as_state(state, ("elements", "lengths"), where)
        elements, lengths = as_array(state["elements"], where, "elements"), as_array(state["lengths"], where, "lengths")
        if elements.dtype != self.dtype or elements.ndim != 1:
            raise ValueError(
                f"{where}: elements must be 1-D of dtype {self.dtype}, got shape {elements.shape} of "
                f"{elements.dtype}; create the store with that dtype"
            )
        if lengths.dtype != np.int64 or lengths.ndim != 1:
            raise ValueError(
                f"{where}: lengths must be 1-D of dtype int64, got shape {lengths.shape} of {lengths.dtype}"
            )
        # Each length is checked first, so that their sum cannot wrap around to the right total.
        if ((lengths < 0) | (lengths > elements.size)).any() or sum(lengths.tolist()) != elements.size:
            raise ValueError(
                f"{where}: lengths must be at least 0 and sum to the {elements.size} elements, got a sum of "
                f"{sum(lengths.tolist())}"
            )
        # The copy is the only segment; later pushes open another one.
        cdef cnp.ndarray data = np.array(elements, order="C")
        cdef Py_ssize_t n = len(lengths)
        self.clear()
        self.addresses = np.empty(max(8, n), np.uint64)
        self.lengths = np.empty(max(8, n), np.int64)
        self.lengths[:n] = lengths
        ends = np.cumsum(lengths)
        self.addresses[:n] = <u64>cnp.PyArray_DATA(data) + ((ends - lengths) * self.itemsize).astype(np.uint64)
        self.segments.append(data)
        self.n = n
        self.total = elements.size

    cdef Py_ssize_t place(self, object index, str where, str name) except -1:
        cdef Py_ssize_t i
        cdef int overflow = 0
        if PyLong_CheckExact(index):
            i = PyLong_AsLongLongAndOverflow(index, &overflow)
        else:
            index = as_index(index, where, name)
            i = PyLong_AsLongLongAndOverflow(index, &overflow)
        if overflow or not -self.n <= i < self.n:
            raise IndexError(f"{where}: {name} must lie in [-{self.n}, {self.n}), got {index}")
        return i + self.n if i < 0 else i

    cdef cnp.ndarray convert(self, object seq, str where, str name):
        """Return `seq` as a C-contiguous 1-D array of the store's dtype."""
        array = as_array(seq, where, name)
        if array.ndim != 1:
            raise ValueError(f"{where}: {name} must be 1-D, got shape {array.shape}")
        if array.dtype.kind not in ("iu" if self.dtype.kind in "iu" else "iuf"):
            if array.size:
                rule = "integers" if self.dtype.kind in "iu" else "real numbers"
                raise TypeError(f"{where}: {name} must hold {rule}, got dtype {array.dtype}")
            array = array.astype(self.dtype)  # an empty list is float64 to NumPy
        if self.dtype.kind in "iu" and array.dtype != self.dtype and array.size:
            limits = np.iinfo(self.dtype)
            for extreme in (int(array.min()), int(array.max())):
                if not limits.min <= extreme <= limits.max:
                    raise ValueError(
                        f"{where}: {name} must hold integers in [{limits.min}, {limits.max}] "
                        f"(the store's dtype {self.dtype}), got {extreme}"
                    )
        return np.ascontiguousarray(array, self.dtype)

    cdef int append(self, cnp.ndarray array) except -1:
        cdef Py_ssize_t length = cnp.PyArray_SIZE(array)
        cdef Py_ssize_t nbytes = length * self.itemsize
        cdef char* target
        if self.n == cnp.PyArray_SIZE(self.addresses):
            self.addresses = np.concatenate([self.addresses, np.empty_like(self.addresses)])
            self.lengths = np.concatenate([self.lengths, np.empty_like(self.lengths)])
        target = self.allocate(nbytes)
        if nbytes:
            memcpy(target, cnp.PyArray_DATA(array), nbytes)
        (<u64*>cnp.PyArray_DATA(self.addresses))[self.n] = <u64>target
        (<i64*>cnp.PyArray_DATA(self.lengths))[self.n] = length
        self.n += 1
        self.total += length
        return 0

    cdef char* allocate(self, Py_ssize_t nbytes) except? NULL:
        """Return room for `nbytes` that never moves.

        Segments grow with the amount stored, so that their number and the unused space at their ends stay small. A
        sequence longer than the next segment gets a segment of its own, and the open one stays open.
        """
        cdef char* target
        cdef Py_ssize_t size
        cdef cnp.ndarray segment
        cdef cnp.npy_intp shape
        if nbytes > self.room:
            size = min(max(2 * self.total * self.itemsize, FIRST_SEGMENT), LARGEST_SEGMENT)
            shape = max(size, nbytes)
            segment = cnp.PyArray_EMPTY(1, &shape, cnp.NPY_UINT8, 0)
            self.segments.append(segment)
            target = <char*>cnp.PyArray_DATA(segment)
            if nbytes >= size:
                return target
            self.free_ = target
            self.room = size
        target = self.free_
        self.free_ += nbytes
        self.room -= nbytes
        return target

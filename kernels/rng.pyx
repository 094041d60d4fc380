"""A counter-based random number generator, whose whole state is two integers."""


import numpy as np

cimport numpy as cnp

from rlox.kernels.checks cimport as_index, as_seed, as_state, check_out
from rlox.kernels.philox cimport (
    DOMAIN_RNG, Block, box_muller, derive_key, fill_integers, fill_normal_f32, fill_permutation, fill_uniform_f32, gumbel,
    join, philox, unit_f64,
)
from rlox.kernels.types cimport f32, f64, i64, u64

cnp.import_array()


def _philox_block(key: int, counter: int = 0, domain: int = 0) -> tuple[int, int, int, int]:
    """Return one raw Philox4x32-10 block, for tests against published vectors.

    `key`, `counter` and `domain` are 64 bits each, low word first: (key, counter, domain) are the
    paper's key words 0-1, counter words 0-1 and counter words 2-3.
    """
    cdef Block x = philox(<u64>key, <u64>counter, <u64>domain)
    return x.a, x.b, x.c, x.d


# One loop per distribution. Each writes n numbers, starting at block `position`, and draws only whole blocks: the
# unused words of the last block are dropped, so that a result depends only on (key, position) and its own length.

cdef void fill_uniform_f64(f64* out, Py_ssize_t n, u64 key, u64 position) noexcept nogil:
    cdef Py_ssize_t i
    cdef Block x
    for i in range(0, n - 1, 2):
        x = philox(key, position, DOMAIN_RNG)
        position += 1
        out[i] = unit_f64(join(x.a, x.b))
        out[i + 1] = unit_f64(join(x.c, x.d))
    if n & 1:
        x = philox(key, position, DOMAIN_RNG)
        out[n - 1] = unit_f64(join(x.a, x.b))


cdef void fill_normal_f64(f64* out, Py_ssize_t n, u64 key, u64 position) noexcept nogil:
    cdef Py_ssize_t i
    cdef Block x
    cdef f64 p, q
    for i in range(0, n, 2):
        x = philox(key, position, DOMAIN_RNG)
        position += 1
        # 1 - [0, 1) is (0, 1], so that the logarithm stays finite.
        box_muller(1.0 - unit_f64(join(x.a, x.b)), unit_f64(join(x.c, x.d)), &p, &q)
        out[i] = p
        if i + 1 < n:
            out[i + 1] = q


cdef void fill_gumbel_f32(f32* out, Py_ssize_t n, u64 key, u64 position) noexcept nogil:
    cdef Py_ssize_t i
    cdef Block x
    for i in range(0, n, 4):
        x = philox(key, position, DOMAIN_RNG)
        position += 1
        out[i] = <f32>gumbel(x.a)
        if i + 1 < n:
            out[i + 1] = <f32>gumbel(x.b)
        if i + 2 < n:
            out[i + 2] = <f32>gumbel(x.c)
        if i + 3 < n:
            out[i + 3] = <f32>gumbel(x.d)


cdef class Rng:
    """Counter-based random numbers (Philox4x32-10): the same key and position give the same numbers.

    Every call draws a whole number of 128-bit blocks and advances `position` by that number. Its result therefore
    depends only on (key, position) and the call itself, never on how earlier numbers were requested. The
    arithmetic does not use the C library, so the numbers are the same on every machine and CPU level.

    Parameters
    ----------
    seed
        0 <= seed < 2**64.
    stream
        0 <= stream < 2**64. Different streams of one seed are independent generators; use constants for them.

    Attributes
    ----------
    key, position
        The state: 64 bits that never change, and the number of blocks drawn so far.

    Raises
    ------
    ValueError
        If `seed` or `stream` lies outside [0, 2**64).
    TypeError
        If `seed` or `stream` is not an integer.
    """

    cdef readonly u64 key
    cdef readonly u64 position

    def __init__(self, seed: int, stream: int = 0) -> None:
        self.key = derive_key(as_seed(seed, "Rng", "seed"), as_seed(stream, "Rng", "stream"))
        self.position = 0

    def __repr__(self) -> str:
        return f"Rng(key={self.key:#018x}, position={self.position})"

    def __reduce__(self):
        return Rng, (0,), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    def get_state(self) -> dict[str, int]:
        """Return a dict with the keys ``key`` and ``position``, two ints below 2**64."""
        return {"key": self.key, "position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        """Restore a state from `get_state`. Raises ValueError for other keys or values."""
        as_state(state, ("key", "position"), "Rng.set_state")
        key = as_seed(state["key"], "Rng.set_state", "key")
        position = as_seed(state["position"], "Rng.set_state", "position")
        self.key = key
        self.position = position

    def skip(self, blocks: int) -> None:
        """Advance by `blocks` >= 0 blocks, as if they had been drawn."""
        self.position += as_seed(blocks, "Rng.skip", "blocks")

    def uniform(self, size=None, out=None, dtype=np.float32):
        """Draw uniform numbers in [0, 1).

        Parameters
        ----------
        size
            Int or tuple of ints; None for one Python float (or, with `out`, for the shape of `out`).
        out
            C-contiguous array of `dtype` to write to; it is then also the return value.
        dtype
            float32 (a grid of 2**-24, four numbers per block) or float64 (2**-53, two per block).

        Returns
        -------
        float or numpy.ndarray

        Raises
        ------
        ValueError, TypeError
            If `size` is negative, `dtype` is neither float32 nor float64, or `out` has another dtype, shape or layout.
        """
        cdef cnp.ndarray array = self._array(size, out, dtype, "Rng.uniform")
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef void* data = cnp.PyArray_DATA(array)
        if cnp.PyArray_TYPE(array) == cnp.NPY_FLOAT32:
            with nogil:
                fill_uniform_f32(<f32*>data, n, self.key, self.position)
            self.position += <u64>(n + 3) // 4
        else:
            with nogil:
                fill_uniform_f64(<f64*>data, n, self.key, self.position)
            self.position += <u64>(n + 1) // 2
        return self._result(array, size, out)

    def normal(self, size=None, out=None, dtype=np.float32):
        """Draw standard normal numbers (Box-Muller in float64, then rounded to `dtype`).

        Arguments, result and errors as for `uniform`. Values reach ±6.8 in float32 (32-bit uniforms, four
        numbers per block) and ±8.6 in float64 (53-bit, two per block).
        """
        cdef cnp.ndarray array = self._array(size, out, dtype, "Rng.normal")
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef void* data = cnp.PyArray_DATA(array)
        if cnp.PyArray_TYPE(array) == cnp.NPY_FLOAT32:
            with nogil:
                fill_normal_f32(<f32*>data, n, self.key, self.position)
            self.position += <u64>(n + 3) // 4
        else:
            with nogil:
                fill_normal_f64(<f64*>data, n, self.key, self.position)
            self.position += <u64>(n + 1) // 2
        return self._result(array, size, out)

    def gumbel(self, size=None, out=None):
        """Draw standard Gumbel numbers -log(-log u) as float32, always finite (-3.2 to 22.9).

        ``argmax(logits + gumbel)`` samples the categorical distribution of the logits. Arguments, result
        and errors as for `uniform`; four numbers per block.
        """
        cdef cnp.ndarray array = self._array(size, out, np.float32, "Rng.gumbel")
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef f32* data = <f32*>cnp.PyArray_DATA(array)
        with nogil:
            fill_gumbel_f32(data, n, self.key, self.position)
        self.position += <u64>(n + 3) // 4
        return self._result(array, size, out)

    def integers(self, high: int, size=None, out=None):
        """Draw int64 numbers in [0, high), 1 <= high <= 2**63, two per block.

        Uses multiply-shift on 64 bits, with a bias of at most high / 2**64, which no run can detect. The other
        arguments, the result (an int for size None) and errors are as for `uniform`.
        """
        bound = as_index(high, "Rng.integers", "high")
        if not 1 <= bound <= 1 << 63:
            raise ValueError(f"Rng.integers: high must be at least 1 and at most 2**63, got {bound}")
        cdef cnp.ndarray array = self._array(size, out, np.int64, "Rng.integers")
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef i64* data = <i64*>cnp.PyArray_DATA(array)
        cdef u64 limit = bound
        with nogil:
            fill_integers(data, n, limit, self.key, self.position)
        self.position += <u64>(n + 1) // 2
        return self._result(array, size, out)

    def permutation(self, n: int, out=None) -> np.ndarray:
        """Return a random permutation of 0 ... n - 1, int64 (n,); two elements per block.

        Raises ValueError for n < 0 and for an `out` of another dtype, shape or layout.
        """
        n = as_index(n, "Rng.permutation", "n")
        if n < 0:
            raise ValueError(f"Rng.permutation: n must be at least 0, got {n}")
        cdef cnp.ndarray array = self._array(n, out, np.int64, "Rng.permutation")
        cdef Py_ssize_t length = n
        cdef i64* data = <i64*>cnp.PyArray_DATA(array)
        with nogil:
            fill_permutation(data, length, self.key, self.position)
        self.position += <u64>(length + 1) // 2
        return array

    cdef cnp.ndarray _array(self, object size, object out, object dtype, str where):
        """Return the array to fill: a new one, or `out` after checking it."""
        cdef int type_num
        if dtype is np.float32:
            type_num = cnp.NPY_FLOAT32
        elif dtype is np.float64:
            type_num = cnp.NPY_FLOAT64
        elif dtype is np.int64:
            type_num = cnp.NPY_INT64
        else:
            kind = np.dtype(dtype)
            if kind not in (np.float32, np.float64):
                raise ValueError(f"{where}: dtype must be float32 or float64, got {kind}")
            return self._array(size, out, kind.type, where)
        if out is not None and size is None:
            shape = out.shape if isinstance(out, np.ndarray) else ()
        elif size is None:
            shape = ()
        else:
            shape = size if isinstance(size, tuple) else (size,)
            shape = tuple([as_index(length, where, "size") for length in shape])
            if any([length < 0 for length in shape]):
                raise ValueError(f"{where}: size must have no negative entry, got {size}")
        if out is not None:
            check_out(out, type_num, np.dtype(dtype), shape, where, "out")
            return out
        return np.empty(shape, dtype)

    cdef object _result(self, cnp.ndarray array, object size, object out):
        return array.item() if size is None and out is None else array

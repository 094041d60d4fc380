"""Running mean and variance (Welford 1962; merging: Chan, Golub, LeVeque 1979, eq. 2.1).

Only the count, the mean and the sum of squared deviations are kept. Nothing cancels, however far the mean is from
zero, and the statistics of two parts of the data can be merged. Variances are population variances.
"""

import numpy as np

from rlox.kernels.memory import empty

cimport numpy as cnp
from libc.math cimport isfinite, sqrt
from libc.string cimport memcpy, memset

from rlox.kernels.checks cimport as_index, as_number, as_real, as_seed, as_state
from rlox.kernels.fmath cimport bits_of
from rlox.kernels.outputs cimport fresh
from rlox.kernels.stream cimport stream, stream_end
from rlox.kernels.types cimport cf64_r, f32, f64, f64_r, i64, real, u64

cnp.import_array()

cdef extern from *:
    """
    typedef double rlox_s64 __attribute__((vector_size(64)));
    typedef rlox_s64 rlox_su64 __attribute__((aligned(8), may_alias));

    static inline double rlox_lanes(const rlox_s64 x) {
        return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
    }
    /* sum(x) and sum((x - mean)**2), in as many independent chains of additions as the processor can run at once. */
    static double rlox_sum(ptrdiff_t n, const double *x) {
        rlox_s64 a = {0}, b = {0}, c = {0}, d = {0};
        double total = 0;
        ptrdiff_t i = 0;
        for (; i + 32 <= n; i += 32) {
            a += *(const rlox_su64 *)(x + i);
            b += *(const rlox_su64 *)(x + i + 8);
            c += *(const rlox_su64 *)(x + i + 16);
            d += *(const rlox_su64 *)(x + i + 24);
        }
        for (; i + 8 <= n; i += 8) a += *(const rlox_su64 *)(x + i);
        for (; i < n; i++) total += x[i];
        return total + rlox_lanes((a + b) + (c + d));
    }
    static double rlox_squares(ptrdiff_t n, const double *x, double mean) {
        rlox_s64 a = {0}, b = {0}, c = {0}, d = {0}, e;
        double total = 0;
        ptrdiff_t i = 0;
        for (; i + 32 <= n; i += 32) {
            e = *(const rlox_su64 *)(x + i) - mean; a += e * e;
            e = *(const rlox_su64 *)(x + i + 8) - mean; b += e * e;
            e = *(const rlox_su64 *)(x + i + 16) - mean; c += e * e;
            e = *(const rlox_su64 *)(x + i + 24) - mean; d += e * e;
        }
        for (; i + 8 <= n; i += 8) { e = *(const rlox_su64 *)(x + i) - mean; a += e * e; }
        for (; i < n; i++) total += (x[i] - mean) * (x[i] - mean);
        return total + rlox_lanes((a + b) + (c + d));
    }
    """
    f64 rlox_sum(Py_ssize_t, const f64*) noexcept nogil
    f64 rlox_squares(Py_ssize_t, const f64*, f64) noexcept nogil


cdef struct Moments:
    f64 count
    f64 mean
    f64 m2  # sum of squared deviations from the mean


cdef inline Moments merged(Moments a, Moments b) noexcept nogil:
    """Merge two sets of moments (Chan et al., eq. 2.1)."""
    cdef Moments all_
    cdef f64 delta = b.mean - a.mean
    if a.count == 0.0:
        return b
    if b.count == 0.0:
        return a
    all_.count = a.count + b.count
    all_.mean = a.mean + delta * (b.count / all_.count)
    all_.m2 = a.m2 + b.m2 + delta * delta * (a.count * (b.count / all_.count))
    return all_


cdef Moments with_values(Moments moments, Py_ssize_t n, const f64* x) noexcept nogil:
    """Add n values, in chunks that stay in the first-level cache for the second pass."""
    cdef Moments chunk
    cdef Py_ssize_t i, length
    for i in range(0, n, 2048):
        length = min(n - i, 2048)
        chunk.count = <f64>length
        chunk.mean = rlox_sum(length, x + i) / chunk.count
        chunk.m2 = rlox_squares(length, x + i, chunk.mean)
        moments = merged(moments, chunk)
    return moments



cdef object not_finite(str where, str name, object values):
    """Return the error for values that would make the statistics non-finite from then on."""
    bad = np.asarray(values)[~np.isfinite(values)]
    if bad.size:
        return ValueError(f"{where}: {name} must be finite, got {bad.flat[0]}; the statistics are unchanged")
    return ValueError(
        f"{where}: {name} must be below 1e150 in magnitude, so that variances are finite, got "
        f"{np.abs(values).max()}; the statistics are unchanged"
    )


cdef class RunningStats:
    """Mean and population variance of all numbers seen, in float64.

    Examples
    --------
    >>> stats = RunningStats()
    >>> stats.batch_update([1.0, 2.0, 3.0])
    >>> stats.mean(), stats.count()
    (2.0, 3)
    """

    cdef Moments moments

    def __repr__(self) -> str:
        return f"RunningStats(count={self.count()}, mean={self.mean()}, std={self.std()})"

    def __reduce__(self):
        return RunningStats, (), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    def update(self, value) -> None:
        """Add one number below 1e150 in magnitude. Others, NaN and inf raise ValueError and change nothing."""
        cdef f64 x = as_number(value, "RunningStats.update", "value")
        if not -1e150 < x < 1e150:
            raise not_finite("RunningStats.update", "value", x)
        cdef f64 delta = x - self.moments.mean
        self.moments.count += 1.0
        self.moments.mean += delta / self.moments.count
        self.moments.m2 += delta * (x - self.moments.mean)

    def batch_update(self, values) -> None:
        """Add all numbers of an array of any shape.

        Raises
        ------
        ValueError
            If a value is NaN or inf; nothing is added then.
        TypeError
            If the values cannot be converted to numbers.
        """
        cdef cnp.ndarray array = as_real(values, cnp.NPY_FLOAT64, "RunningStats.batch_update", "values")
        cdef const f64* x = <const f64*>cnp.PyArray_DATA(array)
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef Moments moments = self.moments
        if n <= 8192:  # releasing the GIL would cost more than it gains
            moments = with_values(moments, n, x)
        else:
            with nogil:
                moments = with_values(moments, n, x)
        if not isfinite(moments.m2):
            raise not_finite("RunningStats.batch_update", "values", array)
        self.moments = moments

    def merge(self, other: RunningStats) -> None:
        """Add everything that `other` has seen."""
        if not isinstance(other, RunningStats):
            raise TypeError(f"RunningStats.merge: other must be a RunningStats, got {type(other).__name__}")
        self.moments = merged(self.moments, (<RunningStats>other).moments)

    def count(self) -> int:
        """Return the number of values added."""
        return <u64>self.moments.count

    def mean(self) -> float:
        """Return the mean; 0.0 before the first number."""
        return self.moments.mean

    def var(self) -> float:
        """Return the population variance; 0.0 before the second number."""
        return self.moments.m2 / self.moments.count if self.moments.count > 0.0 else 0.0

    def std(self) -> float:
        """Return the population standard deviation; 0.0 before the second number."""
        return sqrt(self.moments.m2 / self.moments.count) if self.moments.count > 0.0 else 0.0

    def normalize(self, value) -> float:
        """Return ``(value - mean) / std``, or 0.0 if std is below 1e-8. Otherwise NaN stays NaN."""
        cdef f64 x = as_number(value, "RunningStats.normalize", "value")
        cdef f64 std = sqrt(self.moments.m2 / self.moments.count) if self.moments.count > 0.0 else 0.0
        return 0.0 if std < 1e-8 else (x - self.moments.mean) / std

    def reset(self) -> None:
        """Forget everything."""
        memset(&self.moments, 0, sizeof(self.moments))

    def get_state(self) -> dict:
        """Return ``{"count": int, "mean": float, "m2": float}``, where m2 is the sum of squared deviations."""
        return {"count": self.count(), "mean": self.moments.mean, "m2": self.moments.m2}

    def set_state(self, state) -> None:
        """Restore a state from `get_state`. Raises ValueError for anything else."""
        cdef str where = "RunningStats.set_state"
        cdef Moments moments
        state = as_state(state, ("count", "mean", "m2"), where)
        moments.count = <f64>as_seed(state["count"], where, "count")
        moments.mean = as_number(state["mean"], where, "mean")
        moments.m2 = as_number(state["m2"], where, "m2")
        if not (isfinite(moments.mean) and isfinite(moments.m2) and moments.m2 >= 0.0):
            raise ValueError(
                f"{where}: mean and m2 must be finite and m2 at least 0, got {moments.mean} and {moments.m2}"
            )
        self.moments = moments


# Statistics per dimension, in rows of D numbers.

cdef inline void add_one(Py_ssize_t d, f64 count, cf64_r x, f64_r mean, f64_r m2) noexcept nogil:
    """Add one sample (Welford); `count` includes it."""
    cdef Py_ssize_t j
    cdef f64 delta
    cdef f64 part = 1.0 / count
    for j in range(d):
        delta = x[j] - mean[j]
        mean[j] += delta * part
        m2[j] += delta * (x[j] - mean[j])


cdef inline void add_row(Py_ssize_t d, cf64_r x, f64_r total) noexcept nogil:
    cdef Py_ssize_t j
    for j in range(d):
        total[j] += x[j]


cdef inline void add_squares(Py_ssize_t d, cf64_r x, cf64_r mean, f64_r total) noexcept nogil:
    cdef Py_ssize_t j
    cdef f64 delta
    for j in range(d):
        delta = x[j] - mean[j]
        total[j] += delta * delta


cdef enum:
    TILE = 64  # numbers
    LINE = 8  # numbers in a cache line
    SHORT = 32  # numbers in a row, half a TILE
    LONGEST = 256  # LINE rows of SHORT numbers
    CACHED = 2_000_000  # numbers


cdef inline void standardise(Py_ssize_t d, cf64_r x, cf64_r mean, cf64_r factor, f64_r out) noexcept nogil:
    cdef Py_ssize_t j
    for j in range(d):
        out[j] = (x[j] - mean[j]) * factor[j]


cdef void standardise_rows(Py_ssize_t n, Py_ssize_t d, const f64* x, const f64* mean, const f64* factor,
                           f64* out) noexcept nogil:
    """Standardise n numbers, in rows of d. Rows too short for vectors are processed several at a time."""
    cdef f64[LONGEST + LINE] means
    cdef f64[LONGEST + LINE] factors
    cdef f64[LONGEST + 2] block
    cdef f64* at = block + (<size_t>block // sizeof(f64)) % 2  # 16-byte aligned
    cdef bint streamed = n > CACHED and d <= SHORT
    cdef Py_ssize_t width = d
    cdef Py_ssize_t i = 0
    if n >= 2 * TILE and d <= SHORT:
        # Whole cache lines for `stream`.
        width = LINE * d if streamed else TILE // d * d
        memcpy(means, mean, d * sizeof(f64))
        memcpy(factors, factor, d * sizeof(f64))
        for i in range(d, width + LINE):
            means[i], factors[i] = means[i - d], factors[i - d]
        # Then start where a cache line of `out` starts, so that no vector is written to two of them.
        i = (LINE - (<size_t>out // sizeof(f64)) % LINE) % LINE
        standardise(i, <cf64_r>x, <cf64_r>means, <cf64_r>factors, <f64_r>out)
        mean, factor = means + i, factors + i
    if streamed:
        while i + width <= n:
            standardise(width, <cf64_r>(x + i), <cf64_r>mean, <cf64_r>factor, <f64_r>at)
            stream(out + i, at, width)
            i += width
        stream_end()
    while i < n:
        width = min(width, n - i)
        standardise(width, <cf64_r>(x + i), <cf64_r>mean, <cf64_r>factor, <f64_r>(out + i))
        i += width


cdef void add_batch(Py_ssize_t n, Py_ssize_t d, const f64* x, f64* count, f64* mean, f64* m2, f64* chunk_mean,
                    f64* chunk_m2) noexcept nogil:
    """Add rows, in chunks of about 16 KiB, which stay in the first-level cache for the second pass."""
    cdef Py_ssize_t step = max(1, 2048 // d)
    cdef Py_ssize_t i, j, k, length
    cdef f64 total, delta, share
    i = 0
    while i < n:  # not range(): without a constant step, Cython would use Python's
        length = min(n - i, step)
        memset(chunk_mean, 0, d * sizeof(f64))
        memset(chunk_m2, 0, d * sizeof(f64))
        for k in range(i, i + length):
            add_row(d, <cf64_r>(x + k * d), <f64_r>chunk_mean)
        for j in range(d):
            chunk_mean[j] /= <f64>length
        for k in range(i, i + length):
            add_squares(d, <cf64_r>(x + k * d), <cf64_r>chunk_mean, <f64_r>chunk_m2)
        total = count[0] + <f64>length
        share = <f64>length / total
        for j in range(d):
            delta = chunk_mean[j] - mean[j]
            mean[j] += delta * share
            m2[j] += chunk_m2[j] + delta * delta * (count[0] * share)
        count[0] = total
        i += length


cdef inline bint all_usual(Py_ssize_t n, const f64* x) noexcept nogil:
    """Return whether every |x| < 1e150. Compares bits, in lanes as wide as the numbers, and so runs at memory speed."""
    cdef Py_ssize_t j
    cdef i64 limit = <i64>bits_of(1e150) - 1
    cdef i64 beyond = 0
    for j in range(n):
        beyond |= limit - <i64>(bits_of(x[j]) & <u64>0x7FFF_FFFF_FFFF_FFFF)
    return beyond >= 0


cdef inline bint finite(Py_ssize_t n, const real* x) noexcept nogil:
    cdef Py_ssize_t j
    cdef int bad = 0
    for j in range(n):
        bad |= not (x[j] - x[j] == 0.0)
    return not bad


def all_finite(numbers) -> bool:
    """Return whether an array of any shape is free of NaN and infinity; always True for integers and bools."""
    cdef cnp.ndarray array = np.ascontiguousarray(numbers)
    cdef int kind = cnp.PyArray_TYPE(array)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
    if kind == cnp.NPY_FLOAT32:
        return finite(n, <const f32*>cnp.PyArray_DATA(array))
    if kind == cnp.NPY_FLOAT64:
        return finite(n, <const f64*>cnp.PyArray_DATA(array))
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


cdef Py_ssize_t row_step(Py_ssize_t d) noexcept:
    """Return the distance of rows of d numbers in memory.

    Long rows are a quarter of 4096 bytes from a multiple of it: a load waits for a store to an address that differs by
    such a multiple, although it is another one.
    """
    cdef Py_ssize_t page = 512  # numbers
    if d < LINE:
        return d
    d = (d + LINE - 1) // LINE * LINE
    if d < page // 4:
        return d
    return d + (page // 4 - d % page + page) % page


cdef class RunningStatsVec:
    """Mean and population variance of each of D dimensions, in float64.

    Parameters
    ----------
    dim
        D >= 1.
    """

    cdef Py_ssize_t d
    cdef Py_ssize_t step  # numbers from one row to the next
    cdef f64 n
    cdef cnp.ndarray memory  # (6, D): mean, m2, and four scratch rows
    cdef f64* rows

    def __init__(self, dim: int) -> None:
        size = as_index(dim, "RunningStatsVec", "dim")
        if not 1 <= size < 1 << 40:
            raise ValueError(f"RunningStatsVec: dim must be at least 1 and below 2**40, got {size}")
        self.d = size
        self.step = row_step(size)
        # Rows start where a cache line does, so that no vector is in two of them.
        cdef cnp.ndarray block = np.zeros(6 * self.step + LINE)
        cdef Py_ssize_t first = (LINE - (<size_t>cnp.PyArray_DATA(block) // sizeof(f64)) % LINE) % LINE
        self.memory = block[first : first + 6 * self.step].reshape(6, self.step)[:, :size]
        self.rows = <f64*>cnp.PyArray_DATA(self.memory)
        self.n = 0.0

    def __repr__(self) -> str:
        return f"RunningStatsVec(dim={self.d}, count={self.count()})"

    def __reduce__(self):
        return RunningStatsVec, (self.d,), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    cdef cnp.ndarray _one(self, object values, str where):
        cdef cnp.ndarray array = as_real(values, cnp.NPY_FLOAT64, where, "values")
        if cnp.PyArray_NDIM(array) != 1 or cnp.PyArray_DIM(array, 0) != self.d:
            raise ValueError(f"{where}: values must have shape ({self.d},), got {(<object>array).shape}")
        return array

    cdef cnp.ndarray _batch(self, object data, object batch_size, str where):
        """Return data as float64 (B * D,) or (B, D), after checking that batch_size agrees."""
        cdef cnp.ndarray array = as_real(data, cnp.NPY_FLOAT64, where, "data")
        cdef int ndim = cnp.PyArray_NDIM(array)
        if ndim == 2:
            if cnp.PyArray_DIM(array, 1) != self.d:
                raise ValueError(f"{where}: data must have shape (B, {self.d}), got {(<object>array).shape}")
            if batch_size is not None and as_index(batch_size, where, "batch_size") != cnp.PyArray_DIM(array, 0):
                raise ValueError(
                    f"{where}: batch_size must be {cnp.PyArray_DIM(array, 0)} for data of shape "
                    f"{(<object>array).shape}, got {batch_size}"
                )
            return array
        if ndim != 1:
            raise ValueError(f"{where}: data must be flat (B * D,) or (B, D), got shape {(<object>array).shape}")
        if batch_size is None:
            raise TypeError(f"{where}: batch_size must be given for flat data, got None")
        size = as_index(batch_size, where, "batch_size")
        if size < 0 or size * self.d != cnp.PyArray_DIM(array, 0):
            raise ValueError(
                f"{where}: data must have batch_size * dim = {size} * {self.d} entries, got "
                f"{cnp.PyArray_DIM(array, 0)}"
            )
        return array

    cdef void _commit(self, f64 n) noexcept:
        """Take over the mean and m2 that were computed in rows 2 and 3."""
        memcpy(self.rows, self.rows + 2 * self.step, 2 * self.step * sizeof(f64))
        self.n = n

    def update(self, values) -> None:
        """Add one sample (D,), below 1e150 in magnitude. Other values and NaN raise ValueError and change nothing."""
        cdef cnp.ndarray array = self._one(values, "RunningStatsVec.update")
        if not all_usual(self.d, <const f64*>cnp.PyArray_DATA(array)):
            raise not_finite("RunningStatsVec.update", "values", array)
        self.n += 1.0
        add_one(self.d, self.n, <cf64_r>cnp.PyArray_DATA(array), <f64_r>self.rows, <f64_r>(self.rows + self.step))

    def batch_update(self, data, batch_size=None) -> None:
        """Add B samples.

        Parameters
        ----------
        data
            (B * D,), one sample after the other, or (B, D).
        batch_size
            B; optional for (B, D).

        Raises
        ------
        ValueError
            If lengths do not match, or a value is NaN or inf; nothing is added then.
        TypeError
            If the data cannot be converted to numbers.
        """
        cdef cnp.ndarray array = self._batch(data, batch_size, "RunningStatsVec.batch_update")
        cdef Py_ssize_t d = self.d, step = self.step
        cdef f64* work = self.rows + 2 * step
        cdef f64 n = self.n
        # The GIL is not released, because the scratch rows belong to the object.
        memcpy(work, self.rows, 2 * step * sizeof(f64))
        add_batch(cnp.PyArray_SIZE(array) // d, d, <const f64*>cnp.PyArray_DATA(array), &n, work, work + step,
                  work + 2 * step, work + 3 * step)
        if not finite(d, <const f64*>work + step):
            raise not_finite("RunningStatsVec.batch_update", "data", array)
        self._commit(n)

    def merge(self, other: RunningStatsVec) -> None:
        """Add everything that `other`, of the same dim, has seen."""
        if not isinstance(other, RunningStatsVec):
            raise TypeError(f"RunningStatsVec.merge: other must be a RunningStatsVec, got {type(other).__name__}")
        cdef RunningStatsVec b = other
        if b.d != self.d:
            raise ValueError(f"RunningStatsVec.merge: other must have dim {self.d}, got {b.d}")
        cdef Py_ssize_t j
        cdef Moments one, two
        for j in range(self.d):
            one = Moments(self.n, self.rows[j], self.rows[self.step + j])
            two = Moments(b.n, b.rows[j], b.rows[b.step + j])
            one = merged(one, two)
            self.rows[j] = one.mean
            self.rows[self.step + j] = one.m2
        self.n += b.n

    def dim(self) -> int:
        """Return D."""
        return self.d

    def count(self) -> int:
        """Return the number of samples added."""
        return <u64>self.n

    cdef cnp.ndarray _row(self):
        cdef cnp.npy_intp d = self.d
        return cnp.PyArray_EMPTY(1, &d, cnp.NPY_FLOAT64, 0)

    def mean(self) -> np.ndarray:
        """Return the means as a new array (D,); 0 before the first sample."""
        cdef cnp.ndarray result = self._row()
        memcpy(cnp.PyArray_DATA(result), self.rows, self.d * sizeof(f64))
        return result

    def var(self) -> np.ndarray:
        """Return the population variances as a new array (D,); 0 before the second sample."""
        cdef cnp.ndarray result = self._row()
        cdef f64* out = <f64*>cnp.PyArray_DATA(result)
        cdef Py_ssize_t j
        cdef f64 n = max(self.n, 1.0)
        for j in range(self.d):
            out[j] = self.rows[self.step + j] / n
        return result

    def std(self) -> np.ndarray:
        """Return the population standard deviations as a new array (D,); 0 before the second sample."""
        cdef cnp.ndarray result = self._row()
        cdef f64* out = <f64*>cnp.PyArray_DATA(result)
        cdef Py_ssize_t j
        cdef f64 n = max(self.n, 1.0)
        for j in range(self.d):
            out[j] = sqrt(self.rows[self.step + j] / n)
        return result

    cdef void _factors(self) noexcept:
        """Write 1 / max(std, 1e-8) into row 2."""
        cdef Py_ssize_t j
        cdef f64 n = max(self.n, 1.0)
        for j in range(self.d):
            self.rows[2 * self.step + j] = 1.0 / max(sqrt(self.rows[self.step + j] / n), 1e-8)

    def normalize(self, values) -> np.ndarray:
        """Return ``(values - mean) / max(std, 1e-8)`` of one sample (D,) as a new array. NaN stays NaN."""
        cdef cnp.ndarray array = self._one(values, "RunningStatsVec.normalize")
        cdef cnp.ndarray result = self._row()
        self._factors()
        standardise(self.d, <cf64_r>cnp.PyArray_DATA(array), <cf64_r>self.rows, <cf64_r>(self.rows + 2 * self.step),
                    <f64_r>cnp.PyArray_DATA(result))
        return result

    def normalize_batch(self, data, batch_size=None) -> np.ndarray:
        """Normalize B samples as `normalize` does, in the shape of `data`. Arguments as for `batch_update`."""
        cdef cnp.ndarray array = self._batch(data, batch_size, "RunningStatsVec.normalize_batch")
        cdef cnp.ndarray result = fresh(empty, cnp.PyArray_NDIM(array), cnp.PyArray_DIMS(array), cnp.NPY_FLOAT64)
        self._factors()
        standardise_rows(cnp.PyArray_SIZE(array), self.d, <const f64*>cnp.PyArray_DATA(array), self.rows,
                         self.rows + 2 * self.step, <f64*>cnp.PyArray_DATA(result))
        return result

    def reset(self) -> None:
        """Forget everything."""
        memset(self.rows, 0, 2 * self.step * sizeof(f64))
        self.n = 0.0

    def get_state(self) -> dict:
        """Return ``{"count": int, "mean": (D,), "m2": (D,)}``, where m2 are the sums of squared deviations."""
        return {"count": self.count(), "mean": self.memory[0].copy(), "m2": self.memory[1].copy()}

    def set_state(self, state) -> None:
        """Restore a state from `get_state` of the same dim. Raises ValueError for anything else."""
        cdef str where = "RunningStatsVec.set_state"
        state = as_state(state, ("count", "mean", "m2"), where)
        count = as_seed(state["count"], where, "count")
        mean = self._one(state["mean"], where)
        m2 = self._one(state["m2"], where)
        if not (np.isfinite(mean).all() and np.isfinite(m2).all() and (<object>m2 >= 0).all()):
            raise ValueError(f"{where}: mean and m2 must be finite and m2 at least 0, got {mean} and {m2}")
        self.memory[0] = mean
        self.memory[1] = m2
        self.n = <f64>count

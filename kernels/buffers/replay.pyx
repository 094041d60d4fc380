"""The uniform replay memory. Pushing and saving are in ring.pyx, the layout of a record in store.pxd."""

import numpy as np

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_New

from rlox.kernels.buffers.access cimport RLOX_REPLAY_CAPSULE, rlox_replay_access
from rlox.kernels.buffers.ring cimport UNDECIDED, Ring, first_slot, last_slot, took_one, write_tail
from rlox.kernels.buffers.rows cimport seed_key
from rlox.kernels.buffers.store cimport (
    CHUNK, DOMAIN_REPLAY, Dest, Layout, copy, draw_below, gather_any, gather_rows, gather_words, record,
)
from rlox.kernels.checks cimport as_array, as_index, check_out
from rlox.kernels.philox cimport derive_key
from rlox.kernels.types cimport f32, i64, u8, u64

from rlox.kernels.buffers.batch import Batch

cnp.import_array()

# Bytes to copy. Below, releasing the GIL for other threads costs more than it gains.
cdef Py_ssize_t RELEASE_GIL_FROM = 1 << 17


cdef cnp.ndarray as_slots(object indices, i64 capacity, str where, str name):
    """Return 1-D integers in [0, capacity) as int64. Raises IndexError for others."""
    cdef cnp.ndarray array
    cdef const i64* data
    cdef Py_ssize_t i, n
    cdef u64 worst = 0
    if isinstance(indices, cnp.ndarray):
        array = indices
    else:
        array = as_array(indices, where, name)
        if array.size == 0:
            array = array.astype(np.int64)
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(f"{where}: {name} must be one-dimensional, got shape {(<object>array).shape}")
    cdef int type_num = cnp.PyArray_TYPE(array)
    if (type_num != cnp.NPY_INT64 and type_num != cnp.NPY_UINT64) or not cnp.PyArray_ISCARRAY_RO(array):
        if array.dtype.kind not in "iu":
            raise TypeError(f"{where}: {name} must be integers, got dtype {array.dtype}")
        array = np.asarray(array, np.int64 if array.dtype.kind == "i" else np.uint64, order="C")
    # Interpreted as unsigned, negative numbers are also too large.
    data = <const i64*>cnp.PyArray_DATA(array)
    n = cnp.PyArray_DIM(array, 0)
    for i in range(n):
        worst = worst if worst >= <u64>data[i] else <u64>data[i]
    if n and worst >= <u64>capacity:
        for i in range(n):
            if <u64>data[i] >= <u64>capacity:
                raise IndexError(
                    f"{where}: {name} must lie in [0, {capacity}), got {array[i]} at position {i}"
                )
    return array


cdef void fill(const Layout* layout, Py_ssize_t n, const i64* slots, u64 key, i64 high, i64 start, i64 newest,
               Dest* dest) noexcept nogil:
    """Gather n rows at `slots`, or if NULL, at random ones of the `high` slots from `start` on."""
    cdef i64[CHUNK] drawn
    cdef const i64* chunk
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t m
    cdef bint words = (layout.obs_bytes & 3) == 0 and layout.n_stacked == 1 and layout.n_step == 1
    while at < n:
        m = n - at if n - at < CHUNK else CHUNK
        chunk = drawn
        if slots != NULL:
            chunk = slots + at
        else:
            draw_below(key, DOMAIN_REPLAY, at, m, <u64>high, start, layout.capacity, drawn)
        if words:
            gather_words(layout, chunk, m, at, n, dest)
        else:
            gather_any(layout, chunk, m, newest, at, dest)
        at += m


cdef void fill_rows(const Layout* layout, Py_ssize_t n, const i64* slots, u64 key, i64 high, i64 start, i64 newest,
                    f32* data, Py_ssize_t width) noexcept nogil:
    """Like `fill`, for whole records."""
    cdef i64[CHUNK] drawn
    cdef const i64* chunk
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t m
    while at < n:
        m = n - at if n - at < CHUNK else CHUNK
        chunk = drawn
        if slots != NULL:
            chunk = slots + at
        else:
            draw_below(key, DOMAIN_REPLAY, at, m, <u64>high, start, layout.capacity, drawn)
        gather_rows(layout, chunk, m, newest, data + at * width)
        at += m


cdef void push_rows(void* self, i64 n, const f32* obs, const f32* next_obs, const f32* actions, const f32* rewards,
                    const u8* terminated, const u8* truncated) noexcept nogil:
    cdef Shared* ring = <Shared*>self
    cdef Layout* layout = ring.layout
    cdef Py_ssize_t dim = layout.obs_bytes // sizeof(f32)
    cdef char* r
    cdef i64 i
    for i in range(n):
        r = record(layout, ring.cursor[0])
        copy(r, <const char*>(obs + i * dim), layout.obs_bytes)
        copy(r + layout.next_at, <const char*>(next_obs + i * dim), layout.obs_bytes)
        write_tail(layout, r, actions + i * layout.act_dim, rewards[i], terminated[i], truncated[i])
        took_one(layout.capacity, ring.count, ring.size, ring.cursor)


cdef void sample_rows(void* self, i64 n, u64 seed, f32* obs, f32* next_obs, f32* actions, f32* rewards,
                      u8* terminated, u8* truncated, f32* discounts) noexcept nogil:
    cdef Shared* ring = <Shared*>self
    cdef i64 capacity = ring.layout.capacity, size = ring.size[0], cursor = ring.cursor[0]
    cdef Dest dest
    dest.obs, dest.next_obs = <char*>obs, <char*>next_obs
    dest.actions, dest.rewards, dest.terminated, dest.truncated = actions, rewards, terminated, truncated
    dest.discounts = discounts if ring.layout.n_step > 1 else NULL
    dest.extra = NULL
    dest.masks = NULL
    ring.layout.head = ring.count[0]
    fill(ring.layout, n, NULL, derive_key(seed, 0), size, first_slot(capacity, size, cursor),
         last_slot(capacity, cursor), &dest)


def __getattr__(name):
    # Pickles of rlox 0.7 and earlier refer to `PrioritizedReplayBuffer` in this module.
    from rlox.kernels.buffers import prioritized

    return getattr(prioritized, name)


def _rebuild(cls, config):
    return cls(**config)


cdef class ReplayBuffer(Ring):
    """A ring of the newest transitions, drawn from uniformly with replacement.

    Parameters
    ----------
    capacity
        Number of transitions to keep, at least 1. Memory is reserved at once but becomes resident only as
        transitions arrive.
    obs_dim
        D, numbers per observation; or the shape of an observation.
    act_dim
        A, numbers per action, at least 1; a discrete action is one number.
    obs_shape
        Shape of one observation in a batch; its product is D. Default (D,).
    obs_dtype
        numpy.float32, or numpy.uint8 for images, which are stored and returned as bytes.
    n_stacked
        K > 1: an observation is a stack of K frames along its first axis, oldest first, and each frame is
        stored once. Frames are recognised by content, so a batch contains exactly what was pushed. The
        ring has room for 4 % more frames than transitions (+ 48 K n_envs); if short episodes need
        more, the oldest transitions are dropped early.
    n_envs
        Transitions come from N environments in turn: the successor of a transition is pushed N pushes later.
    n_step
        n > 1: `sample` returns n-step transitions (Sutton and Barto 2018, eq. 7.1).
    gamma
        Discount in [0, 1] of the n-step sums.
    mask_dim
        M > 0: with each transition, `push_batch` takes and `sample` returns a mask (M,) of the actions that are legal
        in `next_obs`.

    Notes
    -----
    Sampling is a pure function of the contents and the seed, the same on every machine. Other threads can run while
    `sample` copies a large batch. Pushing from another thread meanwhile is memory-safe but may mix an old and a new
    transition: use a lock. NaN and infinity are stored unchanged.

    Raises
    ------
    ValueError, TypeError
        If an argument is out of range or of the wrong kind.
    MemoryError
        If the machine cannot reserve enough memory.
    """

    cdef int ready(self, str where) except -1:
        """Prepare for a draw; called before every one."""
        if self.size == 0:
            raise ValueError(f"{where}: the buffer must hold a transition, got an empty one; push first")
        return 0

    def access(self):
        """Return a capsule with which another kernel fills and samples this memory. Internal.

        Returns None unless the memory has plain float32 transitions that are drawn uniformly. The capsule is valid as
        long as the memory lives; no other thread may use the memory meanwhile.
        """
        if type(self) is not ReplayBuffer:  # the methods of a subclass may do more
            return None
        if (self.layout.n_stacked > 1 or self.layout.extra_dim or self.layout.mask_dim
                or self.obs_type != cnp.NPY_FLOAT32):
            return None
        if self.has_next == UNDECIDED:
            self.decide(True)
        if self.has_next != 1:
            return None
        self.shared = Shared(layout=&self.layout, count=&self.count, size=&self.size, cursor=&self.cursor)
        self.ways = rlox_replay_access(
            self=&self.shared, obs_dim=self.obs_dim_, act_dim=self.layout.act_dim, n_step=self.layout.n_step,
            push=push_rows, sample=sample_rows,
        )
        return PyCapsule_New(&self.ways, RLOX_REPLAY_CAPSULE, NULL)

    cdef Py_ssize_t as_batch_size(self, object batch_size, str where) except -1:
        cdef Py_ssize_t n
        value = batch_size
        if type(batch_size) is not int:
            value = as_index(batch_size, where, "batch_size")
        if value < 1:
            raise ValueError(f"{where}: batch_size must be at least 1, got {value}")
        if value >= 1 << 40:
            raise MemoryError(f"{where}: batch_size must fit in memory, got {value}")
        n = value
        self.ready(where)
        return n

    cdef void draw(self, u64 key, Py_ssize_t first, Py_ssize_t n, i64* slots) noexcept nogil:
        draw_below(key, DOMAIN_REPLAY, first, n, <u64>self.size, self.oldest(), self.layout.capacity, slots)

    cdef cnp.ndarray output(self, object given, str key, int type_num, object dtype, tuple shape):
        """Return a new array, or the caller's array after checking it."""
        cdef cnp.npy_intp[32] dims
        cdef int ndim = len(shape)
        if given is not None:
            if not isinstance(given, dict):
                raise TypeError(
                    f"{self.name}.sample: out must be a Batch or dict of arrays, got {type(given).__name__}"
                )
            if key not in given:
                raise ValueError(f"{self.name}.sample: out must have the key {key!r}, got {sorted(given)}")
            array = given[key]
            check_out(array, type_num, dtype, shape, self.in_sample, f"out[{key!r}]")
            return array
        for i in range(ndim):
            dims[i] = shape[i]
        return cnp.PyArray_EMPTY(ndim, dims, type_num, 0)

    cdef object gather_batch(self, Py_ssize_t n, const i64* slots, u64 key, i64 window, object out):
        """Allocate and fill n rows: those at `slots`, or if NULL, drawn from the `window` newest (0: from all)."""
        # A copy, taken while no other thread can change it.
        cdef Layout layout = self.layout
        cdef cnp.npy_intp[2] dims
        cdef Dest dest
        cdef cnp.ndarray obs, next_obs, masks, actions, rewards, term, trunc, discounts, extra
        cdef cnp.ndarray memory = self.memory  # kept alive while other threads run
        cdef cnp.ndarray frames = self.frame_memory
        cdef cnp.ndarray seams = self.seams_
        cdef object given = out
        cdef object dtype = "float32" if self.obs_type == cnp.NPY_FLOAT32 else "uint8"
        dims[0] = n
        dims[1] = self.obs_dim_
        if given is None and len(self.shape) == 1:
            obs = cnp.PyArray_EMPTY(2, dims, self.obs_type, 0)
            next_obs = cnp.PyArray_EMPTY(2, dims, self.obs_type, 0) if layout.next_at else None
        else:
            shape = (n, *self.shape)
            obs = self.output(given, "obs", self.obs_type, dtype, shape)
            next_obs = None
            if layout.next_at:
                next_obs = self.output(given, "next_obs", self.obs_type, dtype, shape)
        if given is None:
            dims[1] = layout.act_dim
            actions = cnp.PyArray_EMPTY(2, dims, cnp.NPY_FLOAT32, 0)
            rewards = cnp.PyArray_EMPTY(1, dims, cnp.NPY_FLOAT32, 0)
            term = cnp.PyArray_EMPTY(1, dims, cnp.NPY_BOOL, 0)
            trunc = cnp.PyArray_EMPTY(1, dims, cnp.NPY_BOOL, 0)
            out = Batch()
        else:
            actions = self.output(given, "actions", cnp.NPY_FLOAT32, "float32", (n, layout.act_dim))
            rewards = self.output(given, "rewards", cnp.NPY_FLOAT32, "float32", (n,))
            term = self.output(given, "terminated", cnp.NPY_BOOL, "bool", (n,))
            trunc = self.output(given, "truncated", cnp.NPY_BOOL, "bool", (n,))
        dest.obs = <char*>cnp.PyArray_DATA(obs)
        dest.next_obs = <char*>cnp.PyArray_DATA(obs if next_obs is None else next_obs)
        dest.actions = <f32*>cnp.PyArray_DATA(actions)
        dest.rewards = <f32*>cnp.PyArray_DATA(rewards)
        dest.terminated = <u8*>cnp.PyArray_DATA(term)
        dest.truncated = <u8*>cnp.PyArray_DATA(trunc)
        dest.discounts = NULL
        dest.extra = NULL
        dest.masks = NULL
        masks = None
        if layout.mask_dim:
            masks = self.output(given, "next_masks", cnp.NPY_BOOL, "bool", (n, layout.mask_dim))
            dest.masks = <u8*>cnp.PyArray_DATA(masks)
        discounts = None
        if layout.n_step > 1:
            discounts = self.output(given, "discounts", cnp.NPY_FLOAT32, "float32", (n,))
            dest.discounts = <f32*>cnp.PyArray_DATA(discounts)
        extra = None
        if layout.extra_dim:
            dims[1] = layout.extra_dim
            extra = cnp.PyArray_EMPTY(2, dims, cnp.NPY_FLOAT32, 0)
            dest.extra = <f32*>cnp.PyArray_DATA(extra)
        cdef dict columns = {}
        if extra is not None and given is not None:
            for name, dim in self.column_dims.items():
                columns[name] = self.output(given, name, cnp.NPY_FLOAT32, "float32", (n, dim))
        cdef i64 high, start, newest
        if slots == NULL:
            self.ready(self.in_sample)
        layout.head = self.count
        high = self.size
        start = self.oldest()
        newest = self.newest()
        if window:
            high = window if window < high else high
            start = (self.count - high) % layout.capacity
        if n * layout.row >= RELEASE_GIL_FROM:
            with nogil:
                fill(&layout, n, slots, key, high, start, newest, &dest)
        else:
            fill(&layout, n, slots, key, high, start, newest, &dest)
        if given is None:
            out["obs"] = obs
            if next_obs is not None:
                out["next_obs"] = next_obs
            if masks is not None:
                out["next_masks"] = masks
            out["actions"] = actions
            out["rewards"] = rewards
            out["terminated"] = term
            out["truncated"] = trunc
            if discounts is not None:
                out["discounts"] = discounts
        if extra is not None:
            at = 0
            for name, dim in self.column_dims.items():
                part = extra[:, at : at + dim]
                at += dim
                if given is None:
                    out[name] = np.ascontiguousarray(part)
                else:
                    columns[name][...] = part
        return out

    def sample(self, batch_size, seed, out=None):
        """Draw `batch_size` transitions uniformly, with replacement.

        Parameters
        ----------
        batch_size
            B, at least 1.
        seed
            0 <= seed < 2**64. Equal contents and seeds give equal batches; a smaller batch is the beginning of a
            larger one.
        out
            An earlier batch of the same size to write to; it is then also the return value.

        Returns
        -------
        Batch
            obs, next_obs (B, *obs_shape), actions (B, A), rewards (B,), terminated, truncated (B,) bool, with
            `mask_dim` next_masks (B, M) bool, and the extra columns (B, dim). With n_step > 1, rewards are
            sum_k gamma**k r_k over the steps used, next_obs, next_masks, terminated and truncated are those of the
            last step used, and `discounts` (B,) = gamma ** (steps used) is the factor of the bootstrap value. The sum stops at a termination, at a truncation,
            at a `cut` and at the environment's newest transition.

        Raises
        ------
        ValueError
            If the buffer is empty, batch_size < 1, the seed is out of range, or `out` is unusable.
        """
        cdef Py_ssize_t n = self.as_batch_size(batch_size, self.in_sample)
        cdef u64 key = seed_key(seed, self.in_sample)
        return self.gather_batch(n, NULL, key, 0, out)

    def sample_recent(self, batch_size, window_size, seed):
        """Like `sample`, from only the newest `window_size` transitions (all of them if there are fewer)."""
        cdef str where = f"{self.name}.sample_recent"
        cdef Py_ssize_t n = self.as_batch_size(batch_size, where)
        window = as_index(window_size, where, "window_size")
        if window < 1:
            raise ValueError(f"{where}: window_size must be at least 1, got {window}")
        cdef u64 key = seed_key(seed, where)
        return self.gather_batch(n, NULL, key, min(window, self.size), None)

    def sample_indices(self, batch_size, seed):
        """Return the indices (B,) int64 of the transitions that `sample` with this seed returns, for `gather`."""
        cdef str where = f"{self.name}.sample_indices"
        cdef Py_ssize_t n = self.as_batch_size(batch_size, where)
        cdef u64 key = seed_key(seed, where)
        cdef cnp.npy_intp size = n
        cdef cnp.ndarray slots = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
        cdef i64* data = <i64*>cnp.PyArray_DATA(slots)
        cdef Py_ssize_t at = 0
        self.ready(where)  # again, because another thread may have emptied the buffer meanwhile
        while at < n:
            self.draw(key, at, n - at if n - at < CHUNK else CHUNK, data + at)
            at += CHUNK
        return slots

    cdef cnp.ndarray occupied(self, object indices, str where):
        """Return `indices` as slots after checking that each contains a transition."""
        cdef cnp.ndarray slots = as_slots(indices, self.layout.capacity, where, "indices")
        cdef const i64* data = <const i64*>cnp.PyArray_DATA(slots)
        cdef i64 start = self.oldest()
        cdef i64 offset
        cdef Py_ssize_t i
        if self.size == self.layout.capacity:
            return slots
        for i in range(cnp.PyArray_DIM(slots, 0)):
            offset = data[i] - start
            if offset < 0:
                offset += self.layout.capacity
            if offset >= self.size:
                raise IndexError(
                    f"{where}: indices must name stored transitions, got {data[i]} at position {i} "
                    f"({self.size} are stored)"
                )
        return slots

    def gather(self, indices):
        """Return the Batch of the transitions at `indices` (B,), any integer dtype, in the form of `sample`.

        A transition keeps its index until it is dropped. Raises IndexError for an index without a transition.
        """
        cdef cnp.ndarray slots = self.occupied(indices, f"{self.name}.gather")
        return self.gather_batch(cnp.PyArray_DIM(slots, 0), <const i64*>cnp.PyArray_DATA(slots), 0, 0, None)

    cdef int check_packed(self, str where) except -1:
        if self.obs_type != cnp.NPY_FLOAT32 or self.layout.n_stacked > 1 or self.layout.mask_dim:
            raise TypeError(
                f"{where}: obs_dtype must be float32, n_stacked 1 and mask_dim 0, got {self.config['obs_dtype']}, "
                f"{self.layout.n_stacked} and {self.layout.mask_dim}; use sample"
            )
        return 0

    @property
    def columns(self):
        """Slices of the fields in the rows of `sample_packed`, by name. Known after the first push."""
        self.check_packed(f"{self.name}.columns")
        if self.has_next == UNDECIDED:
            raise ValueError(f"{self.name}.columns: the buffer must have seen a push, got none yet")
        names = [("obs", self.obs_dim_)]
        if self.has_next:
            names.append(("next_obs", self.obs_dim_))
        names += [("actions", self.layout.act_dim), ("rewards", 1), ("terminated", 1), ("truncated", 1)]
        names += self.column_dims.items()
        if self.layout.n_step > 1:
            names.append(("discounts", 1))
        result = {}
        at = 0
        for name, width in names:
            result[name] = slice(at, at + width)
            at += width
        return result

    def sample_packed(self, batch_size, seed):
        """Like `sample`, but return whole rows (B, R) float32, with the fields at the slices in `columns`.

        Flags are 0 and 1. This is the fastest form: one array is filled, and its columns are views.
        """
        cdef str where = self.in_packed
        cdef Py_ssize_t n = self.as_batch_size(batch_size, where)
        cdef u64 key = seed_key(seed, where)
        cdef cnp.npy_intp[2] dims
        self.check_packed(where)
        cdef Layout layout = self.layout
        cdef cnp.ndarray memory = self.memory
        cdef cnp.ndarray seams = self.seams_
        layout.head = self.count
        dims[0] = n
        dims[1] = (layout.row >> 2) + (layout.n_step > 1)
        cdef cnp.ndarray rows = cnp.PyArray_EMPTY(2, dims, cnp.NPY_FLOAT32, 0)
        cdef f32* data = <f32*>cnp.PyArray_DATA(rows)
        cdef cnp.ndarray drawn = None
        cdef const i64* slots = NULL
        if self.weighted:
            drawn = self.sample_indices(n, seed)
            slots = <const i64*>cnp.PyArray_DATA(drawn)
        else:
            self.ready(where)
        cdef i64 high = self.size
        cdef i64 start = self.oldest()
        cdef i64 newest = self.newest()
        if n * layout.row >= RELEASE_GIL_FROM:
            with nogil:
                fill_rows(&layout, n, slots, key, high, start, newest, data, dims[1])
        else:
            fill_rows(&layout, n, slots, key, high, start, newest, data, dims[1])
        return rows

    def __reduce__(self):
        return _rebuild, (type(self), self.config), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

"""Replay memories: uniform and prioritised. Their records are described in store.pxd, the tree in sumtree.pxd."""

import numpy as np

cimport numpy as cnp
from cpython.float cimport PyFloat_AsDouble, PyFloat_CheckExact
from cpython.pycapsule cimport PyCapsule_New
from libc.string cimport memcpy, memset

from rlox.kernels.buffers.access cimport RLOX_REPLAY_CAPSULE, rlox_replay_access
from rlox.kernels.buffers.rows cimport as_values, batch_flags, seed_key
from rlox.kernels.buffers.seams cimport as_seams, no_seams, with_seam
from rlox.kernels.buffers.store cimport (
    CHUNK, DOMAIN_PRIORITY, DOMAIN_REPLAY, Dest, Layout, copy, draw_below, draw_words, encode, gather_any,
    gather_rows, gather_words, record,
)
from rlox.kernels.buffers.sumtree cimport (
    MAX_LEVELS, SumTree, find_leaf, importance, inside, leaf_value, sum_above, sum_range,
)
from rlox.kernels.checks cimport as_flag, as_fraction, as_index, as_number, check_out
from rlox.kernels.fmath cimport log_positive
from rlox.kernels.philox cimport derive_key, join, unit_f64
from rlox.kernels.prefetch cimport prefetch
from rlox.kernels.types cimport f32, f64, i64, u8, u32, u64

from rlox.kernels.buffers.batch import Batch

cnp.import_array()

cdef enum:
    UNDECIDED = -1

# What importance weights are divided by, in the order of its names.
cdef enum:
    BY_MEMORY = 0
    BY_BATCH = 1
    BY_NOTHING = 2

WEIGHT_NORMS = ("memory", "batch", "none")

# Below this much data to move, letting another thread run costs more than it gives.
cdef Py_ssize_t RELEASE_GIL_FROM = 1 << 17

cdef tuple STANDARD = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated", "discounts",
                       "weights", "indices")


cdef cnp.ndarray as_slots(object indices, i64 capacity, str where, str name):
    """Return 1-D integers in [0, capacity) as int64; IndexError for others."""
    cdef cnp.ndarray array
    cdef const i64* data
    cdef Py_ssize_t i, n
    cdef u64 worst = 0
    if isinstance(indices, cnp.ndarray):
        array = indices
    else:
        array = np.asarray(indices)
        if array.size == 0:
            array = array.astype(np.int64)
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(f"{where}: {name} must be one-dimensional, got shape {(<object>array).shape}")
    cdef int type_num = cnp.PyArray_TYPE(array)
    if (type_num != cnp.NPY_INT64 and type_num != cnp.NPY_UINT64) or not cnp.PyArray_ISCARRAY_RO(array):
        if array.dtype.kind not in "iu":
            raise TypeError(f"{where}: {name} must be integers, got dtype {array.dtype}")
        array = np.asarray(array, np.int64 if array.dtype.kind == "i" else np.uint64, order="C")
    # Read as unsigned, a negative number and one above 2**63 are both too large.
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
    """n rows: of `slots`, or (NULL) drawn from the `high` places from `start` on."""
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
    """As `fill`, whole records."""
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


cdef inline i64 first_slot(i64 capacity, i64 size, i64 cursor) noexcept nogil:
    """The slot that draw 0 means; a full ring is drawn from slot 0 on."""
    if size == capacity:
        return 0
    cdef i64 slot = cursor - size
    return slot + (capacity if slot < 0 else 0)


cdef inline i64 last_slot(i64 capacity, i64 cursor) noexcept nogil:
    return (cursor if cursor else capacity) - 1


cdef inline void write_tail(const Layout* layout, char* r, const f32* action, f32 reward, int term,
                            int trunc) noexcept nogil:
    """What comes after the observations of a record."""
    cdef f32* tail = <f32*>(r + layout.tail_at)
    cdef Py_ssize_t j
    for j in range(layout.act_dim):
        tail[j] = action[j]
    tail += layout.act_dim
    tail[0] = reward
    tail[1] = <f32>term
    tail[2] = <f32>trunc
    for j in range(layout.extra_dim):
        tail[3 + j] = 0


cdef inline void took_one(i64 capacity, i64* count, i64* size, i64* cursor) noexcept nogil:
    count[0] += 1
    cursor[0] += 1
    if cursor[0] == capacity:
        cursor[0] = 0
    if size[0] < capacity:
        size[0] += 1


# A buffer as another kernel sees it, which holds no lock and touches no Python object.
cdef struct Ring:
    Layout* layout
    i64* count
    i64* size
    i64* cursor


cdef void push_rows(void* self, i64 n, const f32* obs, const f32* next_obs, const f32* actions, const f32* rewards,
                    const u8* terminated, const u8* truncated) noexcept nogil:
    cdef Ring* ring = <Ring*>self
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
    cdef Ring* ring = <Ring*>self
    cdef i64 capacity = ring.layout.capacity, size = ring.size[0], cursor = ring.cursor[0]
    cdef Dest dest
    dest.obs, dest.next_obs = <char*>obs, <char*>next_obs
    dest.actions, dest.rewards, dest.terminated, dest.truncated = actions, rewards, terminated, truncated
    dest.discounts = discounts if ring.layout.n_step > 1 else NULL
    dest.extra = NULL
    ring.layout.head = ring.count[0]
    fill(ring.layout, n, NULL, derive_key(seed, 0), size, first_slot(capacity, size, cursor),
         last_slot(capacity, cursor), &dest)


def _rebuild(cls, config):
    return cls(**config)


cdef class ReplayBuffer:
    """A ring of the newest transitions, drawn from uniformly with replacement.

    Parameters
    ----------
    capacity
        Transitions that fit, at least 1. Memory is reserved at once but becomes resident only as
        transitions arrive.
    obs_dim
        D, numbers per observation; or the shape of one.
    act_dim
        A, numbers per action, at least 1; a discrete action is one number.
    obs_shape
        Shape of one observation as it is returned; its product is D. Default (D,).
    obs_dtype
        numpy.float32, or numpy.uint8 for images, which are stored and returned as bytes.
    n_stacked
        K > 1: an observation is a stack of K frames along its first axis, oldest first, and each frame is
        stored once. Frames are recognised by content, so what is returned is exactly what was pushed. The
        ring has room for 4 % more frames than transitions (+ 48 K n_envs); when short episodes need
        more, the oldest transitions leave early.
    n_envs
        Transitions come from N environments in turn: the successor of one is pushed N pushes later.
    n_step
        n > 1: `sample` returns n-step transitions (Sutton and Barto 2018, eq. 7.1).
    gamma
        Discount in [0, 1] of the n-step sums.

    Notes
    -----
    Sampling is a pure function of the contents and the seed, the same on every machine. A sample lets
    other threads run while it copies a large batch; pushing from another thread meanwhile is safe for
    memory, but may mix an old and a new transition: use a lock. NaN and infinity are stored as given.

    Raises
    ------
    ValueError, TypeError
        Arguments out of range or of the wrong kind.
    MemoryError
        More than the machine can reserve.
    """

    cdef Layout layout
    cdef i64 count  # transitions pushed since the start or clear()
    cdef i64 size  # of them still here
    cdef i64 cursor  # count % capacity, the slot of the next one
    cdef int has_next  # UNDECIDED, 0 or 1
    cdef int obs_type
    cdef tuple shape
    cdef Py_ssize_t obs_dim_
    cdef cnp.ndarray memory
    cdef Ring ring
    cdef rlox_replay_access ways
    cdef cnp.ndarray frame_memory
    cdef cnp.ndarray seams_
    cdef cnp.ndarray previous  # (n_envs, K) frame numbers of each environment's last stack
    cdef dict column_dims
    cdef dict config
    cdef str name
    cdef bint weighted  # draws go by a tree, which other threads may change: only with the GIL
    # What error messages begin with; made once, because a call takes less time than making one.
    cdef str in_sample, in_packed, in_batch, in_update

    def __init__(self, capacity, obs_dim, act_dim, *, obs_shape=None, obs_dtype=np.float32, n_stacked=1,
                 n_envs=1, n_step=1, gamma=0.99):
        cdef str where = type(self).__name__
        self.name = where
        self.in_sample = where + ".sample"
        self.in_packed = where + ".sample_packed"
        self.in_batch = where + ".push_batch"
        self.in_update = where + ".update_priorities"
        capacity = self.positive(capacity, "capacity")
        act_dim = self.positive(act_dim, "act_dim")
        n_stacked = self.positive(n_stacked, "n_stacked")
        n_envs = self.positive(n_envs, "n_envs")
        n_step = self.positive(n_step, "n_step")
        if isinstance(obs_dim, (tuple, list)) and obs_shape is None:
            obs_shape, obs_dim = obs_dim, None
        if obs_shape is not None:
            if not isinstance(obs_shape, (tuple, list)) or not len(obs_shape):
                raise TypeError(f"{where}: obs_shape must be a tuple of integers, got {obs_shape!r}")
            obs_shape = tuple([self.positive(d, "obs_shape") for d in obs_shape])
        if obs_dim is not None or obs_shape is None:
            obs_dim = self.positive(obs_dim, "obs_dim")
            obs_shape = obs_shape or (obs_dim,)
        product = 1
        for d in obs_shape:
            product *= d
        if obs_dim is not None and obs_dim != product:
            raise ValueError(
                f"{where}: obs_dim must be the product of obs_shape {obs_shape}, {product}, got {obs_dim}"
            )
        try:
            dtype = np.dtype(obs_dtype)
        except TypeError as e:
            raise TypeError(f"{where}: obs_dtype must be float32 or uint8, got {obs_dtype!r}") from e
        if dtype != np.float32 and dtype != np.uint8:
            raise TypeError(f"{where}: obs_dtype must be float32 or uint8, got {dtype}")
        if obs_shape[0] % n_stacked:
            raise ValueError(
                f"{where}: n_stacked must divide the first axis of obs_shape {obs_shape}, got {n_stacked}"
            )
        if n_envs > capacity:
            raise ValueError(f"{where}: n_envs must be at most capacity {capacity}, got {n_envs}")
        gamma = as_fraction(gamma, where, "gamma")
        for label, number in (("capacity", capacity), ("obs_dim", product), ("act_dim", act_dim),
                              ("n_step", n_step)):
            if number >= 1 << 48:
                self.too_large(f"{label} = {number}", number)
        self.config = dict(
            capacity=capacity, obs_dim=product, act_dim=act_dim, obs_shape=obs_shape, obs_dtype=dtype.name,
            n_stacked=n_stacked, n_envs=n_envs, n_step=n_step, gamma=gamma,
        )
        self.obs_type = cnp.NPY_FLOAT32 if dtype == np.float32 else cnp.NPY_UINT8
        self.shape = obs_shape
        self.obs_dim_ = product
        self.column_dims = {}
        cdef Layout* layout = &self.layout
        memset(layout, 0, sizeof(Layout))
        layout.capacity = capacity
        layout.act_dim = act_dim
        layout.obs_bytes = product * dtype.itemsize
        layout.n_stacked = n_stacked
        layout.n_envs = n_envs
        layout.n_step = n_step
        layout.gamma = gamma
        self.previous = np.full((n_envs, n_stacked), -1, np.int64)
        self.reset()
        self.allocate()
        if n_stacked > 1:
            layout.frame_bytes = layout.obs_bytes // n_stacked
            # What n_envs resets at once can put between two uses of a frame, with room to spare.
            layout.reach = 32 * n_stacked * n_envs
            layout.n_frames = capacity + capacity // 25 + 48 * n_stacked * n_envs
            self.frame_memory = self.reserve(int(layout.n_frames) * layout.frame_bytes)
            layout.frames = <char*>cnp.PyArray_DATA(self.frame_memory)

    # Set-up.

    cdef object positive(self, object value, str label):
        value = as_index(value, self.name, label)
        if value < 1:
            raise ValueError(f"{self.name}: {label} must be at least 1, got {value}")
        return value

    cdef int too_large(self, what, nbytes) except -1:
        raise MemoryError(
            f"{self.name}: {what} must fit in memory, got {nbytes / 2**30:.1f} GiB to reserve; lower capacity, "
            "store images as obs_dtype=numpy.uint8 with n_stacked, or use rlox.MmapReplayBuffer"
        )

    cdef cnp.ndarray reserve(self, nbytes):
        """Untouched bytes: the system gives pages when they are first written."""
        if nbytes >= 1 << 62:
            self.too_large("the buffer", nbytes)
        try:
            return np.empty(nbytes, np.uint8)
        except (MemoryError, ValueError):
            self.too_large("the buffer", nbytes)

    cdef int arrange(self) except -1:
        """Set the places in a record; before the first push there is room for next_obs."""
        cdef Layout* layout = &self.layout
        cdef Py_ssize_t head = (layout.obs_bytes + 3) & ~3
        if layout.n_stacked > 1:
            head = layout.n_stacked * sizeof(i64)
        layout.next_at = 0 if self.has_next == 0 else head
        layout.tail_at = head + layout.next_at
        if layout.n_stacked > 1:
            layout.tail_at += sizeof(i64)  # the frame floor
        layout.extra_dim = sum(self.column_dims.values())
        layout.row = layout.tail_at + 4 * (layout.act_dim + 3 + layout.extra_dim)
        # A record never straddles more lines than it must: a power of two up to a line, then whole lines.
        layout.stride = 16
        while layout.stride < layout.row and layout.stride < 64:
            layout.stride *= 2
        if layout.row > 64:
            layout.stride = (layout.row + 63) & ~63
        return 0

    cdef int allocate(self) except -1:
        self.arrange()
        # A line to align with and one that whole-vector reads may run into.
        self.memory = self.reserve(int(self.layout.capacity) * self.layout.stride + 128)
        cdef u64 address = <u64>cnp.PyArray_DATA(self.memory)
        self.layout.base = <char*>cnp.PyArray_DATA(self.memory) + ((64 - address % 64) % 64)
        return 0

    cdef void set_seams(self, cnp.ndarray seams):
        self.layout.n_seams = 0
        self.seams_ = seams
        self.layout.seams = <const i64*>cnp.PyArray_DATA(seams)
        self.layout.n_seams = len(seams)

    cdef void reset(self):
        self.set_seams(no_seams())
        self.count = 0
        self.size = 0
        self.cursor = 0
        self.has_next = UNDECIDED
        self.layout.next_frame = 0
        self.previous.fill(-1)

    cdef int decide(self, bint has_next) except -1:
        """The first push says whether there are next observations; the others must agree."""
        if self.has_next == UNDECIDED:
            if not has_next and self.layout.n_step > 1:
                raise ValueError(
                    f"{self.name}: next_obs must be given with n_step {self.layout.n_step}, got None"
                )
            self.has_next = has_next
            self.arrange()
            return 0
        if has_next:
            raise ValueError(
                f"{self.name}: next_obs must be None, as in the first push, got one; give it always or never "
                "(clear() starts anew)"
            )
        raise ValueError(
            f"{self.name}: next_obs must be given, as in the first push, got None; give it always or never "
            "(clear() starts anew)"
        )

    # What a priority tree has to know.

    cdef void left(self, i64 slot) noexcept:
        """A transition is dropped before its place is needed."""

    cdef int ready(self, str where) except -1:
        """Before every draw."""
        if self.size == 0:
            raise ValueError(f"{where}: the buffer must hold a transition, got an empty one; push first")
        return 0

    cdef inline i64 oldest(self) noexcept nogil:
        return first_slot(self.layout.capacity, self.size, self.cursor)

    cdef inline i64 newest(self) noexcept nogil:
        return last_slot(self.layout.capacity, self.cursor)

    # Pushing.

    cdef int wrong_obs(self, object array, str where, str label) except -1:
        flat = f"({self.obs_dim_},)"
        raise ValueError(
            f"{where}: {label} must have shape {self.shape}{'' if len(self.shape) == 1 else ' or ' + flat}, "
            f"got {array.shape}"
        )

    cdef cnp.ndarray as_obs(self, object value, str label):
        cdef str where = f"{self.name}.push"
        cdef cnp.ndarray array = as_values(value, self.obs_type, where, label)
        shape = (<object>array).shape
        if shape != self.shape and shape != (self.obs_dim_,):
            self.wrong_obs(array, where, label)
        return array

    cdef inline bint plain(self, object value) noexcept:
        """True for a 1-D array that can be copied as it is."""
        return (
            type(value) is cnp.ndarray
            and cnp.PyArray_TYPE(<cnp.ndarray>value) == self.obs_type
            and cnp.PyArray_NDIM(<cnp.ndarray>value) == 1
            and cnp.PyArray_DIM(<cnp.ndarray>value, 0) == self.obs_dim_
            and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>value)
        )

    cdef cnp.ndarray as_action(self, object value):
        cdef str where = f"{self.name}.push"
        cdef cnp.ndarray array = as_values(value, cnp.NPY_FLOAT32, where, "action")
        if cnp.PyArray_SIZE(array) != self.layout.act_dim or cnp.PyArray_NDIM(array) > 1:
            raise ValueError(
                f"{where}: action must have shape ({self.layout.act_dim},)"
                f"{' or be a number' if self.layout.act_dim == 1 else ''}, got {(<object>array).shape}"
            )
        return array

    cdef i64 store(self, object obs, object action, object reward, object terminated, object truncated,
                   object next_obs) except -1:
        """Check, then write one transition; return its slot."""
        cdef f32 number
        cdef const f32* action_data = &number
        cdef f64 reward_value
        cdef int term, trunc
        cdef bint has_next = next_obs is not None
        if not self.plain(obs):
            obs = self.as_obs(obs, "obs")
        if has_next and not self.plain(next_obs):
            next_obs = self.as_obs(next_obs, "next_obs")
        if self.layout.act_dim == 1 and PyFloat_CheckExact(action):
            number = <f32>PyFloat_AsDouble(action)
        else:
            if not (
                type(action) is cnp.ndarray
                and cnp.PyArray_TYPE(<cnp.ndarray>action) == cnp.NPY_FLOAT32
                and cnp.PyArray_NDIM(<cnp.ndarray>action) == 1
                and cnp.PyArray_DIM(<cnp.ndarray>action, 0) == self.layout.act_dim
                and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>action)
            ):
                action = self.as_action(action)
            action_data = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>action)
        if PyFloat_CheckExact(reward):
            reward_value = PyFloat_AsDouble(reward)
        else:
            reward_value = as_number(reward, f"{self.name}.push", "reward")
        term = 1 if terminated is True else 0
        if not term and terminated is not False:
            term = as_flag(terminated, f"{self.name}.push", "terminated")
        trunc = 1 if truncated is True else 0
        if not trunc and truncated is not False:
            trunc = as_flag(truncated, f"{self.name}.push", "truncated")
        if self.has_next != <int>has_next:
            self.decide(has_next)
        cdef const char* next_data = NULL
        if has_next:
            next_data = <const char*>cnp.PyArray_DATA(<cnp.ndarray>next_obs)
        return self.write(<const char*>cnp.PyArray_DATA(<cnp.ndarray>obs), next_data, action_data,
                          <f32>reward_value, term, trunc)

    cdef i64 write(self, const char* obs, const char* next_obs, const f32* action, f32 reward, int term,
                   int trunc) noexcept:
        """Append one transition; return its slot."""
        cdef Layout* layout = &self.layout
        cdef i64 slot = self.cursor
        cdef char* r = record(layout, slot)
        if layout.n_stacked > 1:
            self.write_stacks(r, obs, next_obs)
        else:
            copy(r, obs, layout.obs_bytes)
            if layout.next_at:
                copy(r + layout.next_at, next_obs, layout.obs_bytes)
        write_tail(layout, r, action, reward, term, trunc)
        took_one(layout.capacity, &self.count, &self.size, &self.cursor)
        return slot

    cdef void write_stacks(self, char* r, const char* obs, const char* next_obs) noexcept:
        cdef Layout* layout = &self.layout
        cdef i64 env = self.count % layout.n_envs
        cdef i64* previous = <i64*>cnp.PyArray_DATA(self.previous) + env * layout.n_stacked
        cdef i64* numbers = <i64*>r
        cdef i64 floor = layout.next_frame - layout.reach
        cdef i64 slot
        # The record about to be overwritten leaves first, then those whose frames this push may need.
        if self.size == layout.capacity:
            self.size -= 1
        while self.size:
            slot = (self.count - self.size) % layout.capacity
            if (((<i64*>(record(layout, slot) + layout.tail_at)) - 1)[0]
                    > layout.next_frame + 2 * layout.n_stacked - 1 - layout.n_frames):
                break
            self.left(slot)
            self.size -= 1
        if floor < 0:
            floor = 0
        # Within an episode obs is the previous next_obs itself, or, without next_obs, one frame further.
        encode(layout, obs, previous, floor, 0 if layout.next_at else 1, numbers)
        if layout.next_at:
            encode(layout, next_obs, numbers, floor, 1, <i64*>(r + layout.next_at))
            numbers = <i64*>(r + layout.next_at)
        memcpy(previous, numbers, layout.n_stacked * sizeof(i64))
        (<i64*>(r + layout.tail_at) - 1)[0] = floor

    def push(self, obs, action, reward, terminated, truncated, next_obs=None):
        """Append one transition; the oldest leaves when the buffer is full.

        Parameters
        ----------
        obs, next_obs
            Arrays, lists or tuples of shape `obs_shape` or (D,), any real dtype (uint8 where that is
            stored). `next_obs` is the true next observation, of the old episode where one ended. It is
            given always or never: the first push decides.
        action
            A number, or A numbers.
        reward
            A number.
        terminated, truncated
            Did the environment end the episode; did a time limit cut it.

        Raises
        ------
        ValueError, TypeError
            Shapes, kinds or values that do not fit; nothing is stored then.
        """
        self.store(obs, action, reward, terminated, truncated, next_obs)

    cdef cnp.ndarray as_rows(self, object value, Py_ssize_t n, str label):
        """(n, *obs_shape), (n, D) or flat observations."""
        cdef str where = self.in_batch
        cdef cnp.ndarray array = as_values(value, self.obs_type, where, label)
        shape = (<object>array).shape
        if (n, *self.shape) != shape and (n, self.obs_dim_) != shape and (n * self.obs_dim_,) != shape:
            raise ValueError(
                f"{where}: {label} must have shape {(n, *self.shape)} or ({n * self.obs_dim_},), got {shape}"
            )
        return array

    cdef Py_ssize_t store_batch(self, object obs, object next_obs, object actions, object rewards,
                                object terminated, object truncated) except -1:
        """Check, then append n rows; return n. Their slots are the last n before `count`."""
        cdef str where = self.in_batch
        cdef cnp.ndarray rewards_ = as_values(rewards, cnp.NPY_FLOAT32, where, "rewards")
        if cnp.PyArray_NDIM(rewards_) != 1:
            raise ValueError(f"{where}: rewards must have shape (n,), got {(<object>rewards_).shape}")
        cdef Py_ssize_t n = cnp.PyArray_DIM(rewards_, 0)
        cdef Py_ssize_t act_dim = self.layout.act_dim
        cdef Py_ssize_t obs_bytes = self.layout.obs_bytes
        cdef bint has_next = next_obs is not None
        if n == 0:
            raise ValueError(f"{where}: rewards must not be empty, got shape (0,)")
        if self.layout.n_envs > 1 and (n % self.layout.n_envs or self.count % self.layout.n_envs):
            raise ValueError(
                f"{where}: rewards must have a whole number of rows of n_envs = {self.layout.n_envs} "
                f"(after {self.count} transitions), got {n}; row i of every {self.layout.n_envs} is environment i"
            )
        cdef cnp.ndarray obs_ = self.as_rows(obs, n, "obs")
        cdef cnp.ndarray next_ = self.as_rows(next_obs, n, "next_obs") if has_next else None
        cdef cnp.ndarray actions_ = as_values(actions, cnp.NPY_FLOAT32, where, "actions")
        shape = (<object>actions_).shape
        if shape != (n, act_dim) and shape != (n * act_dim,):
            raise ValueError(
                f"{where}: actions must have shape ({n}, {act_dim}) or ({n * act_dim},), got {shape}"
            )
        cdef cnp.ndarray term_ = batch_flags(terminated, n, where, "terminated")
        cdef cnp.ndarray trunc_ = batch_flags(truncated, n, where, "truncated")
        if self.has_next != <int>has_next:
            self.decide(has_next)
        cdef const char* o = <const char*>cnp.PyArray_DATA(obs_)
        cdef const char* next_data = NULL
        if has_next:
            next_data = <const char*>cnp.PyArray_DATA(next_)
        cdef const f32* a = <const f32*>cnp.PyArray_DATA(actions_)
        cdef const f32* r = <const f32*>cnp.PyArray_DATA(rewards_)
        cdef const u8* term = <const u8*>cnp.PyArray_DATA(term_)
        cdef const u8* trunc = <const u8*>cnp.PyArray_DATA(trunc_)
        cdef Py_ssize_t i
        for i in range(n):
            self.write(o, next_data, a, r[i], term[i] != 0, trunc[i] != 0)
            o += obs_bytes
            if has_next:
                next_data += obs_bytes
            a += act_dim
        return n

    def push_batch(self, obs, next_obs, actions, rewards, terminated, truncated):
        """Append n transitions, row 0 first.

        Parameters
        ----------
        obs, next_obs
            ``(n, *obs_shape)``, (n, D) or flat; `next_obs` may be None, always or never.
        actions
            (n, A) or flat.
        rewards
            (n,); its length is n.
        terminated, truncated
            (n,) flags.

        With n_envs > 1, n is a multiple of it: one row per environment in the same order each time, and
        several time steps one after the other.

        Raises
        ------
        ValueError, TypeError
            As `push`; nothing is stored then.
        """
        self.store_batch(obs, next_obs, actions, rewards, terminated, truncated)

    def cut(self):
        """Say that the next transitions do not follow on from the last ones: no n-step return reaches across.

        To be called where environments start afresh though their episodes have not ended (a reset by hand, other
        environments, transitions from elsewhere). The sums before it stop and bootstrap there, as they do at the
        newest transition; nothing is stored as truncated.
        """
        self.set_seams(with_seam(self.seams_, self.count - self.size, self.count))

    def access(self):
        """How another kernel fills and samples this memory, or None where it is not plain float32 transitions drawn
        alike. Valid as long as the memory lives; no other thread may use that meanwhile. Internal.
        """
        if type(self) is not ReplayBuffer:  # whose methods may do more
            return None
        if self.layout.n_stacked > 1 or self.layout.extra_dim or self.obs_type != cnp.NPY_FLOAT32:
            return None
        if self.has_next == UNDECIDED:
            self.decide(True)
        if self.has_next != 1:
            return None
        self.ring = Ring(layout=&self.layout, count=&self.count, size=&self.size, cursor=&self.cursor)
        self.ways = rlox_replay_access(
            self=&self.ring, obs_dim=self.obs_dim_, act_dim=self.layout.act_dim, n_step=self.layout.n_step,
            push=push_rows, sample=sample_rows,
        )
        return PyCapsule_New(&self.ways, RLOX_REPLAY_CAPSULE, NULL)

    def register_column(self, name, dim):
        """Add `dim` float32 numbers to every transition; `sample` returns them under `name`.

        Before the first push. Returns the handle for `push_extra`; without a `push_extra` they are 0.

        Raises
        ------
        ValueError
            After a push, for a name that is taken, or for dim < 1.
        """
        cdef str where = f"{self.name}.register_column"
        if not isinstance(name, str):
            raise TypeError(f"{where}: name must be a str, got {type(name).__name__}")
        if name in STANDARD or name in self.column_dims or not name:
            raise ValueError(f"{where}: name must be new, got {name!r}")
        dim = as_index(dim, where, "dim")
        if not 1 <= dim < 1 << 32:
            raise ValueError(f"{where}: dim must be at least 1, got {dim}")
        if self.count:
            raise ValueError(f"{where}: name must be registered before the first push, got {name!r} after it")
        self.column_dims[name] = dim
        try:
            self.allocate()
        except MemoryError:
            del self.column_dims[name]
            self.allocate()
            raise
        return len(self.column_dims) - 1

    def push_extra(self, handle, values):
        """Set an extra column of the transition pushed last to `values`, a number or (dim,).

        Raises
        ------
        IndexError
            No such handle.
        ValueError
            Nothing pushed yet, or another number of values.
        """
        cdef str where = f"{self.name}.push_extra"
        handle = as_index(handle, where, "handle")
        if not 0 <= handle < len(self.column_dims):
            raise IndexError(f"{where}: handle must come from register_column, got {handle}")
        if not self.size:
            raise ValueError(f"{where}: handle must follow a push, got {handle} for an empty buffer")
        cdef cnp.ndarray array = as_values(values, cnp.NPY_FLOAT32, where, "values")
        dims = list(self.column_dims.values())
        if cnp.PyArray_SIZE(array) != dims[handle] or cnp.PyArray_NDIM(array) > 1:
            raise ValueError(f"{where}: values must have shape ({dims[handle]},), got {(<object>array).shape}")
        cdef Py_ssize_t at = self.layout.act_dim + 3 + sum(dims[:handle])
        memcpy(<f32*>(record(&self.layout, self.newest()) + self.layout.tail_at) + at,
               cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))

    # Sampling.

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
        """A new array, or the caller's after a check."""
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
        """Allocate and fill n rows: the given slots; else drawn from the `window` newest (0: from all)."""
        # What the rows are read by, taken while no other thread can change it.
        cdef Layout layout = self.layout
        cdef cnp.npy_intp[2] dims
        cdef Dest dest
        cdef cnp.ndarray obs, next_obs, actions, rewards, term, trunc, discounts, extra
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
        if extra is not None:
            at = 0
            for name, dim in self.column_dims.items():
                if given is not None:
                    columns[name] = self.output(given, name, cnp.NPY_FLOAT32, "float32", (n, dim))
                at += dim
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
            0 <= seed < 2**64. Equal contents and seed give equal batches, of which a smaller one is the
            beginning of a larger one.
        out
            An earlier batch of the same size to write into, and the return value then.

        Returns
        -------
        Batch
            obs, next_obs (B, *obs_shape), actions (B, A), rewards (B,), terminated, truncated (B,) bool,
            and the extra columns (B, dim). With n_step > 1 rewards are sum_k gamma**k r_k over the steps
            used, next_obs, terminated and truncated those of the last step used, and there is
            `discounts` (B,) = gamma ** (steps used), the factor of the bootstrap: the sum stops at a
            termination, at a truncation, at a `cut` and at the environment's newest transition.

        Raises
        ------
        ValueError
            Empty buffer, batch_size < 1, seed out of range, an unusable `out`.
        """
        cdef Py_ssize_t n = self.as_batch_size(batch_size, self.in_sample)
        cdef u64 key = seed_key(seed, self.in_sample)
        return self.gather_batch(n, NULL, key, 0, out)

    def sample_recent(self, batch_size, window_size, seed):
        """As `sample`, from the newest `window_size` transitions only (all, if there are fewer)."""
        cdef str where = f"{self.name}.sample_recent"
        cdef Py_ssize_t n = self.as_batch_size(batch_size, where)
        window = as_index(window_size, where, "window_size")
        if window < 1:
            raise ValueError(f"{where}: window_size must be at least 1, got {window}")
        cdef u64 key = seed_key(seed, where)
        return self.gather_batch(n, NULL, key, min(window, self.size), None)

    def sample_indices(self, batch_size, seed):
        """Return the places (B,) int64 that `sample` with this seed reads, for `gather`."""
        cdef str where = f"{self.name}.sample_indices"
        cdef Py_ssize_t n = self.as_batch_size(batch_size, where)
        cdef u64 key = seed_key(seed, where)
        cdef cnp.npy_intp size = n
        cdef cnp.ndarray slots = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
        cdef i64* data = <i64*>cnp.PyArray_DATA(slots)
        cdef Py_ssize_t at = 0
        self.ready(where)  # once more: another thread may have emptied the buffer meanwhile
        while at < n:
            self.draw(key, at, n - at if n - at < CHUNK else CHUNK, data + at)
            at += CHUNK
        return slots

    cdef cnp.ndarray occupied(self, object indices, str where):
        """Slots that hold a transition."""
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
        """Return the Batch of the transitions at `indices` (B,), any integer dtype, as `sample` would.

        A transition keeps its index until it leaves. Raises IndexError for a place that holds none.
        """
        cdef cnp.ndarray slots = self.occupied(indices, f"{self.name}.gather")
        return self.gather_batch(cnp.PyArray_DIM(slots, 0), <const i64*>cnp.PyArray_DATA(slots), 0, 0, None)

    cdef int check_packed(self, str where) except -1:
        if self.obs_type != cnp.NPY_FLOAT32 or self.layout.n_stacked > 1:
            raise TypeError(
                f"{where}: obs_dtype must be float32 and n_stacked 1, got {self.config['obs_dtype']} and "
                f"{self.layout.n_stacked}; use sample"
            )
        return 0

    @property
    def columns(self):
        """Where each field lies in the rows of `sample_packed`: name -> slice. Known after a push."""
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
        """As `sample`, with whole rows (B, R) float32: `columns` says where each field lies.

        Flags are 0 and 1. The fastest form: one array is filled, and its columns are views.
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

    # Size and state.

    def __len__(self):
        return self.size

    def len(self):
        """Number of transitions stored."""
        return self.size

    @property
    def n_pushed(self):
        """Transitions pushed so far, since the last `clear`."""
        return self.count

    @property
    def seams(self):
        """Where `cut` was called: numbers (S,) int64, ascending, of the transitions after it that are stored or next.
        """
        return self.seams_[self.seams_ > self.count - self.size]

    @property
    def frame_slots(self):
        """How many frames a memory of frame stacks holds; 0 for others."""
        return self.layout.n_frames if self.layout.n_stacked > 1 else 0

    @property
    def capacity(self):
        """Transitions that fit."""
        return self.layout.capacity

    @property
    def n_step(self):
        return self.layout.n_step

    @property
    def gamma(self):
        return self.layout.gamma

    @property
    def nbytes(self):
        """Bytes reserved; those never pushed to are not resident."""
        total = self.memory.nbytes
        if self.frame_memory is not None:
            total += self.frame_memory.nbytes
        return total

    def __repr__(self):
        config = ", ".join([f"{k}={v!r}" for k, v in self.config.items()])
        return f"{self.name}({config}): {self.size} stored, {self.nbytes / 2**20:.1f} MiB"

    def clear(self):
        """Forget every transition; extra columns stay, and the next push decides about next_obs."""
        self.reset()
        self.arrange()

    def get_state(self, since=0, since_frame=None):
        """Return everything stored as a dict of arrays, numbers and strings (a copy).

        Parameters
        ----------
        since
            Leave out the ``rows`` of the first `since` transitions that were ever pushed.
        since_frame
            Of a memory of frame stacks: ``frames`` (K, bytes) are those from this number on, in the order of their
            numbers, up to ``next_frame``. None: as `set_state` takes them, frame f in row ``f % frame_slots``.
        """
        cdef Layout* layout = &self.layout
        cdef str where = f"{self.name}.get_state"
        cdef i64 first = max(<i64>as_index(since, where, "since"), self.count - self.size), i
        cdef cnp.ndarray rows = np.empty((max(self.count - first, 0), layout.row), np.uint8)
        cdef char* data = <char*>cnp.PyArray_DATA(rows)
        for i in range(self.count - first):
            memcpy(data + i * layout.row, record(layout, (first + i) % layout.capacity), layout.row)
        state = {
            "config": repr(self.config), "columns": repr(self.column_dims), "count": int(self.count),
            "has_next": int(self.has_next), "rows": rows,
        }
        if len(seams := self.seams):
            state["seams"] = seams
        if layout.n_stacked > 1:
            frames = self.frame_memory.reshape(layout.n_frames, layout.frame_bytes)
            if since_frame is None:
                state["frames"] = frames[: min(layout.next_frame, layout.n_frames)].copy()
            else:
                oldest = max(as_index(since_frame, where, "since_frame"), layout.next_frame - layout.n_frames)
                state["frames"] = frames[np.arange(oldest, layout.next_frame) % layout.n_frames]
            state["next_frame"] = int(layout.next_frame)
            state["previous"] = np.array(self.previous)
        return state

    cdef tuple state_keys(self):
        keys = ("config", "columns", "count", "has_next", "rows")
        return keys + ("frames", "next_frame", "previous") if self.layout.n_stacked > 1 else keys

    def set_state(self, state):
        """Continue from what `get_state` of an equally configured buffer returned.

        Extra columns are registered as they were. Samples and pushes go on exactly as they would have.

        Raises
        ------
        ValueError, TypeError
            A state of another configuration, or one that is incomplete or inconsistent; nothing is changed.
        """
        cdef str where = f"{self.name}.set_state"
        cdef Layout* layout = &self.layout
        cdef i64 i
        if not isinstance(state, dict):
            raise TypeError(f"{where}: state must be a dict, got {type(state).__name__}")
        if set(state) - {"seams"} != set(self.state_keys()):
            raise ValueError(
                f"{where}: state must have the keys {sorted(self.state_keys())}, got {sorted(state)}"
            )
        if state["config"] != repr(self.config):
            raise ValueError(
                f"{where}: state must come from a buffer made with {self.config!r}, got {state['config']}"
            )
        count = as_index(state["count"], where, "state['count']")
        has_next = as_index(state["has_next"], where, "state['has_next']")
        columns = read_columns(state["columns"], where)
        rows = state["rows"]
        seams = as_seams(state.get("seams"), count, where)
        # The places of this state, found on a buffer without memory, so that an error changes nothing.
        before = (self.has_next, self.column_dims)
        self.has_next, self.column_dims = has_next, columns
        self.arrange()
        wanted = layout.row
        self.has_next, self.column_dims = before
        self.arrange()
        good = (
            has_next in (UNDECIDED, 0, 1) and isinstance(rows, np.ndarray) and rows.dtype == np.uint8
            and rows.ndim == 2 and rows.shape[1] == wanted and 0 <= rows.shape[0] <= min(count, layout.capacity)
            and count < 1 << 62 and (has_next != UNDECIDED or count == 0) and (count == 0 or rows.shape[0] > 0)
        )
        if good and layout.n_stacked > 1:
            frames, previous = state["frames"], state["previous"]
            next_frame = as_index(state["next_frame"], where, "state['next_frame']")
            good = (
                0 <= next_frame < 1 << 62
                and isinstance(frames, np.ndarray) and frames.dtype == np.uint8
                and frames.shape == (min(next_frame, layout.n_frames), layout.frame_bytes)
                and isinstance(previous, np.ndarray) and previous.dtype == np.int64
                and previous.shape == (layout.n_envs, layout.n_stacked)
                and (previous.size == 0 or (previous.min() >= -1 and previous.max() < max(next_frame, 1)))
            )
        if not good:
            raise ValueError(f"{where}: state must be what get_state returned, got parts that do not fit together")
        if columns != self.column_dims:
            self.column_dims = columns
            self.has_next = UNDECIDED
            self.allocate()
        self.has_next = has_next
        self.arrange()
        cdef cnp.ndarray source = np.ascontiguousarray(rows)
        cdef const char* data = <const char*>cnp.PyArray_DATA(source)
        self.set_seams(seams)
        self.count = count
        self.cursor = count % layout.capacity
        self.size = rows.shape[0]
        for i in range(self.size):
            memcpy(record(layout, (self.count - self.size + i) % layout.capacity), data + i * layout.row, layout.row)
        if layout.n_stacked > 1:
            layout.next_frame = next_frame
            self.previous[...] = previous
            self.frame_memory[: frames.size] = frames.ravel()

    def __reduce__(self):
        return _rebuild, (type(self), self.config), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)


cdef dict read_columns(object text, str where):
    """Parse what repr(column_dims) wrote, without evaluating anything."""
    import ast

    try:
        columns = ast.literal_eval(text)
        good = isinstance(columns, dict) and all(
            [isinstance(k, str) and k and k not in STANDARD and type(v) is int and 1 <= v < 1 << 32
             for k, v in columns.items()]
        )
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        good = False
    if not good:
        raise ValueError(f"{where}: state['columns'] must be what get_state returned, got {text!r}")
    return columns


cdef cnp.ndarray as_priorities(object value, Py_ssize_t n, f64 alpha, f64 eps, str where, f64* highest):
    """Return (n,) priorities ** alpha as leaves, none below `eps`, and the highest; ValueError for bad ones."""
    cdef cnp.ndarray array
    cdef cnp.npy_intp size = n
    cdef cnp.ndarray leaves
    cdef const f64* p
    cdef f32* leaf
    cdef Py_ssize_t i
    cdef f64 most = 0.0
    cdef int bad = 0
    if isinstance(value, cnp.ndarray):
        array = value
    else:
        array = np.asarray(value)
    if cnp.PyArray_NDIM(array) != 1 or cnp.PyArray_DIM(array, 0) != n:
        raise ValueError(f"{where}: priorities must have shape ({n},), got {(<object>array).shape}")
    if cnp.PyArray_TYPE(array) != cnp.NPY_FLOAT64 or not cnp.PyArray_ISCARRAY_RO(array):
        if array.dtype.kind not in "iuf" and n:
            raise TypeError(f"{where}: priorities must be real numbers, got dtype {array.dtype}")
        array = np.asarray(array, np.float64, order="C")
    leaves = cnp.PyArray_EMPTY(1, &size, cnp.NPY_FLOAT32, 0)
    p = <const f64*>cnp.PyArray_DATA(array)
    leaf = <f32*>cnp.PyArray_DATA(leaves)
    for i in range(n):
        # Not (0 <= p <= largest), which NaN fails too.
        bad |= (not p[i] >= 0.0) | (not p[i] <= 1.7976931348623157e308)
        most = most if most > p[i] else p[i]
    if bad:
        for i in range(n):
            if not (p[i] >= 0.0 and p[i] <= 1.7976931348623157e308):
                raise ValueError(
                    f"{where}: priorities must be finite and at least 0, got {p[i]} at position {i}"
                )
    powers(p, n, alpha, eps, leaf)
    highest[0] = most
    return leaves


cdef void powers(const f64* p, Py_ssize_t n, f64 alpha, f64 eps, f32* leaf) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        leaf[i] = leaf_value(p[i] if p[i] > eps else eps, alpha)


cdef void weigh(const f32* leaf, Py_ssize_t n, f64 log_unit, f64 beta, bint above, f32* weights) noexcept nogil:
    cdef f64 most = 700.0 if above else 0.0
    cdef Py_ssize_t i
    for i in range(n):
        weights[i] = importance(leaf[i], log_unit, beta, most)


cdef void search(const SumTree* tree, const u32* words, Py_ssize_t n, i64* slots) noexcept nogil:
    """The leaves of n <= CHUNK draws of two words each, one level of all of them at a time.

    The draws of a level do not depend on each other, so the processor works on many at once.
    """
    cdef f64[CHUNK] targets
    cdef const f64* before
    cdef const f64* totals
    cdef f64 target
    cdef Py_ssize_t i
    cdef i64 node, k
    cdef int level
    for i in range(n):
        targets[i] = inside(tree.total * unit_f64(join(words[2 * i], words[2 * i + 1])), tree.total)
        slots[i] = 0
    for level in range(tree.n_levels - 1, -1, -1):
        totals = tree.totals[level]
        for i in range(n):
            target = targets[i]
            node = 16 * slots[i]
            before = tree.before[level] + node
            # Of four, then within four: half the work of comparing all, and quicker than a vector's sum.
            k = 4 * ((before[4] <= target) + (before[8] <= target) + (before[12] <= target))
            k += (before[k + 1] <= target) + (before[k + 2] <= target) + (before[k + 3] <= target)
            node += k
            targets[i] = inside(target - before[k], totals[node])
            slots[i] = node
            if level == 0:
                prefetch(tree.leaves + 16 * node)
    for i in range(n):
        slots[i] = find_leaf(tree, slots[i], targets[i])


cdef class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws transition i with probability P(i) = p_i**alpha / sum_k p_k**alpha.

    Draws are independent and with replacement (not stratified). p**alpha is kept as float32, clamped to
    [1.2e-38, 3.4e38]. Everything else, n-step returns and images included, is as there.

    Parameters
    ----------
    capacity, obs_dim, act_dim
        As `ReplayBuffer`, as are further keywords.
    alpha
        In [0, 1]: 0 draws uniformly.
    beta
        In [0, 1]: exponent of the importance weights, annealed to 1 by `set_beta`.
    eps
        The smallest priority, finite and at least 0: one below it counts as `eps`, so that a transition whose error
        was 0 is still drawn. (Schaul et al. add it; here a priority above it is kept as it is given.) With 0 a
        priority of 0 takes a transition out of the draw until it is raised again.
    weight_norm
        What the importance weights are divided by: ``memory``, the largest weight of any transition stored; ``batch``,
        the largest of the batch; ``none``, nothing.

    References
    ----------
    Schaul, Quan, Antonoglou, Silver 2016, "Prioritized experience replay", arXiv:1511.05952, eq. 1 and
    sec. 3.4.
    """

    cdef SumTree tree
    cdef cnp.ndarray tree_memory
    cdef cnp.ndarray work
    cdef f64 alpha_
    cdef f64 beta_
    cdef f64 eps_
    cdef int scale  # what the weights are divided by
    cdef f64 highest  # the largest priority ever given, at least 1
    cdef f64 last_priority  # and its leaf: most pushes repeat one priority
    cdef f32 last_leaf
    cdef i64 summed  # transitions pushed that the tree's sums know

    def __init__(self, capacity, obs_dim, act_dim, alpha=0.6, beta=0.4, eps=1e-6, weight_norm="memory", **keywords):
        cdef str where = type(self).__name__
        alpha = as_fraction(alpha, where, "alpha")
        self.alpha_ = alpha
        self.eps_ = as_number(eps, where, "eps")
        if not (0.0 <= self.eps_ <= 1.7976931348623157e308):
            raise ValueError(f"{where}: eps must be finite and at least 0, got {eps}")
        if weight_norm not in WEIGHT_NORMS:
            raise ValueError(f"{where}: weight_norm must be one of {', '.join(WEIGHT_NORMS)}, got {weight_norm!r}")
        self.scale = WEIGHT_NORMS.index(weight_norm)
        ReplayBuffer.__init__(self, capacity, obs_dim, act_dim, **keywords)
        self.set_beta(beta)
        self.config.update(alpha=alpha, eps=self.eps_, weight_norm=weight_norm)
        self.weighted = True
        self.plant()

    cdef int plant(self) except -1:
        """An empty tree. Its memory is zero pages until it is written to.

        The present tree serves other threads until the new one is whole.
        """
        cdef SumTree planted
        cdef SumTree* tree = &planted
        cdef cnp.ndarray memory, work
        cdef i64 n = (self.layout.capacity + 15) >> 4
        cdef i64 padded, nodes
        cdef int level = 0
        memset(tree, 0, sizeof(SumTree))
        tree.n_blocks = n
        total = 64 * int(n) + 64
        while True:
            nodes = (n + 15) >> 4
            padded = 16 * nodes
            tree.n_children[level] = padded
            total += int(padded) * 24 + 64
            level += 1
            n = nodes
            if nodes == 1:
                break
        tree.n_levels = level
        try:
            memory = np.zeros(total, np.uint8)
            work = np.empty(tree.n_blocks + 1, np.int64)
        except MemoryError:
            self.too_large("the priorities", total)
        cdef char* at = <char*>cnp.PyArray_DATA(memory)
        at += (64 - <u64>at % 64) % 64
        tree.leaves = <f32*>at
        at += 64 * tree.n_blocks
        for level in range(tree.n_levels):
            padded = tree.n_children[level]
            tree.before[level] = <f64*>at
            tree.totals[level] = <f64*>(at + 8 * padded)
            tree.minima[level] = <u32*>(at + 16 * padded)
            tree.stamps[level] = <u32*>(at + 20 * padded)
            at += 24 * padded
        self.tree = planted
        self.tree_memory = memory
        self.work = work
        self.summed = 0
        self.highest = 1.0
        self.last_priority = 1.0
        self.last_leaf = leaf_value(1.0 if self.eps_ < 1.0 else self.eps_, self.alpha_)
        return 0

    cdef void left(self, i64 slot) noexcept:
        self.tree.leaves[slot] = 0
        sum_range(&self.tree, slot, slot)

    cdef int ready(self, str where) except -1:
        """Bring the sums up to what was pushed since the last draw."""
        cdef i64 first, last
        cdef i64 capacity = self.layout.capacity
        ReplayBuffer.ready(self, where)
        if self.summed < self.count:
            if self.count - self.summed >= capacity:
                sum_range(&self.tree, 0, capacity - 1)
            else:
                first = self.summed % capacity
                last = (self.count - 1) % capacity
                if first <= last:
                    sum_range(&self.tree, first, last)
                else:
                    sum_range(&self.tree, first, capacity - 1)
                    sum_range(&self.tree, 0, last)
            self.summed = self.count
        if not self.tree.total > 0.0:
            raise ValueError(
                f"{where}: priorities must not all be 0, got 0 for each of {self.size} transitions; "
                "update_priorities with a small positive number, or make the buffer with eps > 0"
            )
        return 0

    cdef void draw(self, u64 key, Py_ssize_t first, Py_ssize_t n, i64* slots) noexcept nogil:
        cdef u32[CHUNK * 2 + 64] words
        draw_words(key, <u64>(first >> 1), DOMAIN_PRIORITY, 2 * n, words)
        search(&self.tree, words, n, slots)

    cdef f32 leaf_of(self, object priority, str where) except -1:
        """The leaf of one priority; None is the highest so far."""
        cdef f64 p
        if priority is None:
            p = self.highest
        else:
            p = as_number(priority, where, "priority")
            if not (p >= 0.0 and p <= 1.7976931348623157e308):
                raise ValueError(f"{where}: priority must be finite and at least 0, got {p}")
        if p != self.last_priority:
            self.last_leaf = leaf_value(p if p > self.eps_ else self.eps_, self.alpha_)
            self.last_priority = p
        return self.last_leaf

    def push(self, obs, action, reward, terminated, truncated, next_obs=None, priority=1.0):
        """Append one transition as `ReplayBuffer.push` does, with a priority.

        Parameters
        ----------
        priority
            Finite, at least 0; None for the highest priority given so far (at least 1), as in Schaul et al.
        """
        cdef f32 leaf
        if PyFloat_CheckExact(priority) and PyFloat_AsDouble(priority) == self.last_priority:
            leaf = self.last_leaf
        else:
            leaf = self.leaf_of(priority, f"{self.name}.push")
        cdef i64 slot = self.store(obs, action, reward, terminated, truncated, next_obs)
        self.tree.leaves[slot] = leaf
        if self.last_priority > self.highest:
            self.highest = self.last_priority

    def push_batch(self, obs, next_obs, actions, rewards, terminated, truncated, priorities=None):
        """Append n transitions as `ReplayBuffer.push_batch` does.

        Parameters
        ----------
        priorities
            (n,) finite, at least 0; None for the highest priority given so far (at least 1).
        """
        cdef str where = self.in_batch
        cdef f64 highest = 0.0
        cdef cnp.ndarray leaves = None
        cdef f32 leaf = 0
        cdef Py_ssize_t n, i
        if priorities is None:
            leaf = self.leaf_of(None, where)
        else:
            leaves = as_priorities(priorities, np.size(rewards), self.alpha_, self.eps_, where, &highest)
        n = self.store_batch(obs, next_obs, actions, rewards, terminated, truncated)
        for i in range(n):
            if leaves is not None:
                leaf = (<const f32*>cnp.PyArray_DATA(leaves))[i]
            # Of a batch beyond what is stored, the rows that have left already count for nothing.
            if n - i <= self.size:
                self.tree.leaves[(self.count - n + i) % self.layout.capacity] = leaf
        if highest > self.highest:
            self.highest = highest

    def sample(self, batch_size, seed=42, out=None):
        """Draw `batch_size` transitions in proportion to priority**alpha, independently.

        As `ReplayBuffer.sample`, and in the batch besides

        weights
            (B,) float32, (N P(i))**-beta divided by what `weight_norm` says: by the largest such weight of the whole
            buffer or of the batch, so in (0, 1], or by nothing.
        indices
            (B,) uint64, for `update_priorities`.

        Raises
        ------
        ValueError
            Also if every priority is 0, which only ``eps=0`` allows.
        """
        cdef str where = self.in_sample
        cdef Py_ssize_t n = self.as_batch_size(batch_size, where)
        cdef u64 key = seed_key(seed, where)
        cdef cnp.npy_intp size = n
        cdef cnp.ndarray indices, weights
        if out is None:
            indices = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT64, 0)
            weights = cnp.PyArray_EMPTY(1, &size, cnp.NPY_FLOAT32, 0)
        else:
            indices = self.output(out, "indices", cnp.NPY_UINT64, "uint64", (n,))
            weights = self.output(out, "weights", cnp.NPY_FLOAT32, "float32", (n,))
        cdef i64* slots = <i64*>cnp.PyArray_DATA(indices)
        # With the GIL held: another thread's update in the middle of a search would lead it astray.
        self.ready(where)
        self.draw_weighted(n, key, slots, <f32*>cnp.PyArray_DATA(weights))
        batch = self.gather_batch(n, slots, 0, 0, out)
        if out is None:
            batch["weights"] = weights
            batch["indices"] = indices
        return batch

    cdef void draw_weighted(self, Py_ssize_t n, u64 key, i64* slots, f32* weights) noexcept nogil:
        cdef f32 minimum
        cdef f64 log_unit  # of the leaf whose weight is 1
        cdef f32[CHUNK] leaf
        cdef Py_ssize_t at = 0
        cdef Py_ssize_t m, i
        while at < n:
            m = n - at if n - at < CHUNK else CHUNK
            self.draw(key, at, m, slots + at)
            at += m
        if self.scale == BY_NOTHING:
            log_unit = log_positive(self.tree.total / <f64>self.size)
        elif self.scale == BY_BATCH:
            minimum = self.tree.leaves[slots[0]]
            for i in range(1, n):
                minimum = min(minimum, self.tree.leaves[slots[i]])
            log_unit = log_positive(<f64>minimum)
        else:
            memcpy(&minimum, &self.tree.minimum, sizeof(minimum))
            log_unit = log_positive(<f64>minimum)
        at = 0
        while at < n:
            m = n - at if n - at < CHUNK else CHUNK
            for i in range(m):
                leaf[i] = self.tree.leaves[slots[at + i]]
            weigh(leaf, m, log_unit, self.beta_, self.scale == BY_NOTHING, weights + at)
            at += m

    def update_priorities(self, indices, priorities):
        """Set the priorities of transitions, such as ``|TD error|`` + a small number.

        Parameters
        ----------
        indices
            (n,) integers of any dtype, from ``batch["indices"]``. If one comes twice, the later counts.
        priorities
            (n,) finite, at least 0.

        Raises
        ------
        IndexError
            An index of no stored transition; nothing is changed then.
        ValueError, TypeError
            A priority that is negative, infinite or NaN, lengths that differ; nothing is changed then.
        """
        cdef str where = self.in_update
        cdef cnp.ndarray slots_ = self.occupied(indices, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(slots_, 0)
        cdef f64 highest = 0.0
        cdef cnp.ndarray leaves_ = as_priorities(priorities, n, self.alpha_, self.eps_, where, &highest)
        cdef const i64* slots = <const i64*>cnp.PyArray_DATA(slots_)
        cdef const f32* leaves = <const f32*>cnp.PyArray_DATA(leaves_)
        cdef Py_ssize_t i
        for i in range(n):
            self.tree.leaves[slots[i]] = leaves[i]
        if n:
            sum_above(&self.tree, slots, n, <i64*>cnp.PyArray_DATA(self.work))
        if highest > self.highest:
            self.highest = highest

    def set_beta(self, beta):
        """Set the exponent of the importance weights, in [0, 1]."""
        self.beta_ = as_fraction(beta, f"{self.name}.set_beta", "beta")

    @property
    def alpha(self):
        return self.alpha_

    @property
    def beta(self):
        return self.beta_

    @property
    def eps(self):
        return self.eps_

    @property
    def nbytes(self):
        """Bytes reserved for transitions and priorities; those never pushed to are not resident."""
        return ReplayBuffer.nbytes.__get__(self) + self.tree_memory.nbytes + self.work.nbytes

    def clear(self):
        """Forget every transition and priority."""
        self.plant()
        ReplayBuffer.clear(self)

    def get_state(self, since=0, since_frame=None):
        """As `ReplayBuffer.get_state`, with all leaves (size,) float32 of the tree, oldest first."""
        cdef i64 i
        cdef cnp.ndarray leaves = np.empty(self.size, np.float32)
        for i in range(self.size):
            (<f32*>cnp.PyArray_DATA(leaves))[i] = self.tree.leaves[
                (self.count - self.size + i) % self.layout.capacity
            ]
        state = ReplayBuffer.get_state(self, since, since_frame)
        state.update(leaves=leaves, beta=self.beta_, highest_priority=self.highest)
        return state

    def set_state(self, state):
        """Continue from what `get_state` of an equally configured buffer returned; see `ReplayBuffer.set_state`."""
        cdef str where = f"{self.name}.set_state"
        cdef i64 i
        cdef cnp.ndarray leaves
        if not isinstance(state, dict):
            raise TypeError(f"{where}: state must be a dict, got {type(state).__name__}")
        own = {"leaves", "beta", "highest_priority"}
        if not own <= set(state):
            raise ValueError(f"{where}: state must have the keys {sorted(own)}, got {sorted(state)}")
        value = state["leaves"]
        beta = as_number(state["beta"], where, "state['beta']")
        highest = as_number(state["highest_priority"], where, "state['highest_priority']")
        if not (
            isinstance(value, np.ndarray) and value.dtype == np.float32
            and value.shape == np.shape(state.get("rows"))[:1]
            and bool(np.all(np.isfinite(value) & (value >= 0))) and 0 <= beta <= 1 and 1 <= highest < np.inf
        ):
            raise ValueError(f"{where}: state must be what get_state returned, got parts that do not fit together")
        # Of a buffer that had eps=0, or of rlox 0.6.0, which had none: what would never be drawn again is.
        leaves = np.maximum(value, np.float32(leaf_value(self.eps_, self.alpha_)))
        state = {k: v for k, v in state.items() if k not in own}
        if state.get("config") == repr({k: v for k, v in self.config.items() if k not in ("eps", "weight_norm")}):
            state["config"] = repr(self.config)
        ReplayBuffer.set_state(self, state)
        self.plant()
        for i in range(min(self.size, cnp.PyArray_DIM(leaves, 0))):
            self.tree.leaves[(self.count - self.size + i) % self.layout.capacity] = (
                <const f32*>cnp.PyArray_DATA(leaves))[i]
        if self.size:
            sum_range(&self.tree, 0, self.layout.capacity - 1)
        self.summed = self.count
        self.beta_ = beta
        self.highest = highest

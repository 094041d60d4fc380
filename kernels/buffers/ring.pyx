"""A ring of transitions in memory: how they are pushed and saved. store.pxd describes the layout of a record."""

import numpy as np

cimport numpy as cnp
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from libc.string cimport memcpy, memset

from rlox.kernels.buffers.rows cimport as_obs_dtype, as_values, batch_flags, batch_masks
from rlox.kernels.buffers.seams cimport as_seams, no_seams, with_seam
from rlox.kernels.buffers.store cimport Layout, copy, encode, record
from rlox.kernels.checks cimport as_flag, as_fraction, as_index, as_number, show
from rlox.kernels.types cimport f32, f64, i64, u8, u64

cnp.import_array()

# Keys of a batch, which extra columns must not use.
cdef tuple STANDARD = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated", "discounts",
                       "weights", "indices", "next_masks")


cdef inline bint plain(Ring self, object value) noexcept:
    """Return whether `value` is an observation as a 1-D array that can be copied without conversion."""
    return (
        type(value) is cnp.ndarray
        and cnp.PyArray_TYPE(<cnp.ndarray>value) == self.obs_type
        and cnp.PyArray_NDIM(<cnp.ndarray>value) == 1
        and cnp.PyArray_DIM(<cnp.ndarray>value, 0) == self.obs_dim_
        and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>value)
    )


cdef void write_stacks(Ring self, char* r, const char* obs, const char* next_obs) noexcept:
    cdef Layout* layout = &self.layout
    cdef i64 env = self.count % layout.n_envs
    cdef i64* previous = <i64*>cnp.PyArray_DATA(self.previous) + env * layout.n_stacked
    cdef i64* numbers = <i64*>r
    cdef i64 floor = layout.next_frame - layout.reach
    cdef i64 slot
    # Drop the record about to be overwritten, then those whose frames this push may overwrite.
    if self.size == layout.capacity:
        self.size -= 1
    while self.size:
        slot = (self.count - self.size) % layout.capacity
        if (((<i64*>(record(layout, slot) + layout.mask_at)) - 1)[0]
                > layout.next_frame + 2 * layout.n_stacked - 1 - layout.n_frames):
            break
        self.left(slot)
        self.size -= 1
    if floor < 0:
        floor = 0
    # Within an episode, obs equals the previous next_obs or, without next_obs, is one frame further.
    encode(layout, obs, previous, floor, 0 if layout.next_at else 1, numbers)
    if layout.next_at:
        encode(layout, next_obs, numbers, floor, 1, <i64*>(r + layout.next_at))
        numbers = <i64*>(r + layout.next_at)
    memcpy(previous, numbers, layout.n_stacked * sizeof(i64))
    (<i64*>(r + layout.mask_at) - 1)[0] = floor


cdef inline i64 append(Ring self, const char* obs, const char* next_obs, const u8* mask, const f32* action,
                       f32 reward, int term, int trunc) noexcept:
    """Append one transition; return its slot. `mask` is NULL if there is none."""
    cdef Layout* layout = &self.layout
    cdef i64 slot = self.cursor
    cdef char* r = record(layout, slot)
    if layout.n_stacked > 1:
        write_stacks(self, r, obs, next_obs)
    else:
        # Padding is zero, so that saved rows depend on what was pushed alone.
        if layout.obs_bytes & 3:
            memset(r + (layout.obs_bytes & ~3), 0, 4)
            if layout.next_at:
                memset(r + layout.next_at + (layout.obs_bytes & ~3), 0, 4)
        copy(r, obs, layout.obs_bytes)
        if layout.next_at:
            copy(r + layout.next_at, next_obs, layout.obs_bytes)
    if mask != NULL:
        memset(r + layout.tail_at - 4, 0, 4)
        copy(r + layout.mask_at, <const char*>mask, layout.mask_dim)
    write_tail(layout, r, action, reward, term, trunc)
    took_one(layout.capacity, &self.count, &self.size, &self.cursor)
    return slot


cdef dict read_columns(object text, str where):
    """Parse the output of repr(column_dims) without evaluating code."""
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


cdef class Ring:
    """The newest transitions, each in its slot; the base class of replay memories."""

    def __init__(self, capacity, obs_dim, act_dim, *, obs_shape=None, obs_dtype=np.float32, n_stacked=1,
                 n_envs=1, n_step=1, gamma=0.99, mask_dim=0):
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
            if len(obs_shape) > 31:  # `output` has room for one more, the rows of a batch
                raise ValueError(f"{where}: obs_shape must have at most 31 axes, got {len(obs_shape)}")
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
        dtype = as_obs_dtype(obs_dtype, where)
        if obs_shape[0] % n_stacked:
            raise ValueError(
                f"{where}: n_stacked must divide the first axis of obs_shape {obs_shape}, got {n_stacked}"
            )
        if n_envs > capacity:
            raise ValueError(f"{where}: n_envs must be at most capacity {capacity}, got {n_envs}")
        gamma = as_fraction(gamma, where, "gamma")
        for label, number in (("capacity", capacity), ("obs_dim", product), ("act_dim", act_dim),
                              ("n_step", n_step), ("mask_dim", mask_dim)):
            if number >= 1 << 48:
                self.too_large(f"{label} = {number}", number)
        self.config = dict(
            capacity=capacity, obs_dim=product, act_dim=act_dim, obs_shape=obs_shape, obs_dtype=dtype.name,
            n_stacked=n_stacked, n_envs=n_envs, n_step=n_step, gamma=gamma,
        )
        if mask_dim:  # left out without masks, so that older states have this configuration
            self.config["mask_dim"] = self.positive(mask_dim, "mask_dim")
        self.obs_type = cnp.NPY_FLOAT32 if dtype == np.float32 else cnp.NPY_UINT8
        self.shape = obs_shape
        self.obs_dim_ = product
        self.column_dims = {}
        cdef Layout* layout = &self.layout
        memset(layout, 0, sizeof(Layout))
        layout.capacity = capacity
        layout.act_dim = act_dim
        layout.mask_dim = mask_dim
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
            # More than the frames that n_envs simultaneous resets can add between two uses of a frame.
            layout.reach = 32 * n_stacked * n_envs
            layout.n_frames = capacity + capacity // 25 + 48 * n_stacked * n_envs
            self.frame_memory = self.reserve(int(layout.n_frames) * layout.frame_bytes)
            layout.frames = <char*>cnp.PyArray_DATA(self.frame_memory)

    # Set-up.

    cdef object positive(self, object value, str label):
        value = as_index(value, self.name, label)
        if not 1 <= value < 1 << 63:
            raise ValueError(f"{self.name}: {label} must be at least 1 and below 2**63, got {show(value)}")
        return value

    cdef int too_large(self, what, nbytes) except -1:
        raise MemoryError(
            f"{self.name}: {what} must fit in memory, got {nbytes / 2**30:.1f} GiB to reserve; lower capacity, "
            "store images as obs_dtype=numpy.uint8 with n_stacked, or use rlox.MmapReplayBuffer"
        )

    cdef cnp.ndarray reserve(self, nbytes):
        """Return untouched bytes: the system provides pages when they are first written."""
        if nbytes >= 1 << 62:
            self.too_large("the buffer", nbytes)
        try:
            return np.empty(nbytes, np.uint8)
        except (MemoryError, ValueError):
            self.too_large("the buffer", nbytes)

    cdef int arrange(self) except -1:
        """Compute the layout of a record; before the first push it has room for next_obs."""
        cdef Layout* layout = &self.layout
        cdef Py_ssize_t head = (layout.obs_bytes + 3) & ~3
        if layout.n_stacked > 1:
            head = layout.n_stacked * sizeof(i64)
        layout.next_at = 0 if self.has_next == 0 else head
        layout.mask_at = head + layout.next_at
        if layout.n_stacked > 1:
            layout.mask_at += sizeof(i64)  # the frame floor
        layout.tail_at = layout.mask_at + ((layout.mask_dim + 3) & ~3)
        layout.extra_dim = sum(self.column_dims.values())
        layout.row = layout.tail_at + 4 * (layout.act_dim + 3 + layout.extra_dim)
        # Powers of two up to a cache line, then whole lines, so that a record spans as few cache lines as possible.
        layout.stride = 16
        while layout.stride < layout.row and layout.stride < 64:
            layout.stride *= 2
        if layout.row > 64:
            layout.stride = (layout.row + 63) & ~63
        return 0

    cdef int allocate(self) except -1:
        self.arrange()
        # One extra line for alignment, and one because whole-vector reads may run past the last record.
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
        """Decide at the first push whether there are next observations, and raise if a later push differs."""
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
                f"{self.name}: next_obs must be None, as in the first push, got one; pass it always or never "
                "(after clear(), the next push decides again)"
            )
        raise ValueError(
            f"{self.name}: next_obs must be given, as in the first push, got None; pass it always or never "
            "(after clear(), the next push decides again)"
        )

    cdef void left(self, i64 slot) noexcept:
        """Called when a transition is dropped before its slot is reused, so that a priority tree can drop it too."""

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
        """Check and write one transition; return its slot."""
        cdef f32 number
        cdef const f32* action_data = &number
        cdef f64 reward_value
        cdef int term, trunc
        cdef bint has_next = next_obs is not None
        if self.layout.mask_dim:
            raise ValueError(
                f"{self.name}.push: mask_dim must be 0, got {self.layout.mask_dim}; push_batch takes next_masks"
            )
        if not plain(self, obs):
            obs = self.as_obs(obs, "obs")
        if has_next and not plain(self, next_obs):
            next_obs = self.as_obs(next_obs, "next_obs")
        if self.layout.act_dim == 1 and PyFloat_CheckExact(action):
            number = <f32>PyFloat_AS_DOUBLE(action)
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
            reward_value = PyFloat_AS_DOUBLE(reward)
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
        """Append one transition; return its slot. It is no part of `store`, whose checks are faster alone."""
        return append(self, obs, next_obs, NULL, action, reward, term, trunc)

    def push(self, obs, action, reward, terminated, truncated, next_obs=None):
        """Append one transition; a full buffer drops the oldest one.

        Parameters
        ----------
        obs, next_obs
            Arrays, lists or tuples of shape `obs_shape` or (D,), of any real dtype (uint8 if that is the obs_dtype).
            `next_obs` is the true next observation, also at the end of an episode. Pass it always or never: the
            first push decides.
        action
            A number, or A numbers.
        reward
            A number.
        terminated, truncated
            Whether the environment ended the episode; whether a time limit did.

        Raises
        ------
        ValueError, TypeError
            If a shape, kind or value does not match; nothing is stored then.
        """
        self.store(obs, action, reward, terminated, truncated, next_obs)

    cdef cnp.ndarray as_rows(self, object value, Py_ssize_t n, str label):
        """Return observations of shape (n, *obs_shape), (n, D) or flat, after checking them."""
        cdef str where = self.in_batch
        cdef cnp.ndarray array = as_values(value, self.obs_type, where, label)
        shape = (<object>array).shape
        if (n, *self.shape) != shape and (n, self.obs_dim_) != shape and (n * self.obs_dim_,) != shape:
            raise ValueError(
                f"{where}: {label} must have shape {(n, *self.shape)} or ({n * self.obs_dim_},), got {shape}"
            )
        return array

    cdef Py_ssize_t store_batch(self, object obs, object next_obs, object actions, object rewards,
                                object terminated, object truncated, object next_masks) except -1:
        """Check and append n rows; return n. They are the last n transitions before number `count`."""
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
        cdef cnp.ndarray masks_ = batch_masks(next_masks, n, self.layout.mask_dim, where)
        if self.has_next != <int>has_next:
            self.decide(has_next)
        cdef const char* o = <const char*>cnp.PyArray_DATA(obs_)
        cdef const u8* mask = NULL
        if masks_ is not None:
            mask = <const u8*>cnp.PyArray_DATA(masks_)
        cdef const char* next_data = NULL
        if has_next:
            next_data = <const char*>cnp.PyArray_DATA(next_)
        cdef const f32* a = <const f32*>cnp.PyArray_DATA(actions_)
        cdef const f32* r = <const f32*>cnp.PyArray_DATA(rewards_)
        cdef const u8* term = <const u8*>cnp.PyArray_DATA(term_)
        cdef const u8* trunc = <const u8*>cnp.PyArray_DATA(trunc_)
        cdef Py_ssize_t i
        for i in range(n):
            append(self, o, next_data, mask, a, r[i], term[i] != 0, trunc[i] != 0)
            o += obs_bytes
            if mask != NULL:
                mask += self.layout.mask_dim
            if has_next:
                next_data += obs_bytes
            a += act_dim
        return n

    def push_batch(self, obs, next_obs, actions, rewards, terminated, truncated, *, next_masks=None):
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
        next_masks
            (n, M) bool, the legal actions in `next_obs`, if `mask_dim` is not 0.

        With n_envs > 1, n must be a multiple of it: one row per environment, always in the same order, and one time
        step after the other.

        Raises
        ------
        ValueError, TypeError
            As for `push`; nothing is stored then.
        """
        self.store_batch(obs, next_obs, actions, rewards, terminated, truncated, next_masks)

    def cut(self):
        """Mark that the next transitions do not continue the last ones, so that no n-step return crosses this point.

        Call it when environments restart although their episodes have not ended (a manual reset, other
        environments, transitions from another source). n-step sums before this point stop and bootstrap here, as they
        do at the newest transition; nothing is stored as truncated.
        """
        self.set_seams(with_seam(self.seams_, self.count - self.size, self.count))

    def register_column(self, name, dim):
        """Add `dim` float32 numbers to every transition; `sample` returns them under `name`.

        Call it before the first push. Returns the handle for `push_extra`; without a `push_extra`, the numbers are 0.

        Raises
        ------
        ValueError
            After a push, if the name is taken, or if dim < 1.
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
            If the handle does not exist.
        ValueError
            If nothing was pushed yet, or the number of values is wrong.
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

    # Size and state.

    def __len__(self):
        return self.size

    def len(self):
        """Return the number of transitions stored."""
        return self.size

    @property
    def n_pushed(self):
        """Transitions pushed since the last `clear`."""
        return self.count

    @property
    def seams(self):
        """Where `cut` was called: ascending numbers (S,) int64 of the transitions after it that are stored or next."""
        return self.seams_[self.seams_ > self.count - self.size]

    @property
    def frame_slots(self):
        """Number of frames that a memory of frame stacks has room for; 0 for other memories."""
        return self.layout.n_frames if self.layout.n_stacked > 1 else 0

    @property
    def capacity(self):
        """Maximum number of transitions."""
        return self.layout.capacity

    @property
    def n_step(self):
        return self.layout.n_step

    @property
    def gamma(self):
        return self.layout.gamma

    @property
    def mask_dim(self):
        return self.layout.mask_dim

    @property
    def nbytes(self):
        """Bytes reserved; those never written to are not resident."""
        total = self.memory.nbytes
        if self.frame_memory is not None:
            total += self.frame_memory.nbytes
        return total

    def __repr__(self):
        config = ", ".join([f"{k}={v!r}" for k, v in self.config.items()])
        return f"{self.name}({config}): {self.size} stored, {self.nbytes / 2**20:.1f} MiB"

    def clear(self):
        """Remove all transitions. Extra columns stay, and the next push decides again about next_obs."""
        self.reset()
        self.arrange()

    def get_state(self, since=0, since_frame=None):
        """Return a copy of everything stored as a dict of arrays, numbers and strings.

        Parameters
        ----------
        since
            Leave out the ``rows`` of the first `since` transitions that were ever pushed.
        since_frame
            For a memory of frame stacks: return as ``frames`` (K, bytes) only those from this number up to
            ``next_frame``, in order. None returns the form that `set_state` takes: frame f in row ``f % frame_slots``.
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
        """Restore a state from `get_state` of a buffer with the same configuration.

        Extra columns are registered as they were. Samples and pushes continue exactly as in the saved buffer.

        Raises
        ------
        ValueError, TypeError
            If the state has another configuration, is incomplete or inconsistent; nothing is changed then.
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
                f"{where}: state must come from a buffer created with {self.config!r}, got {state['config']}"
            )
        count = as_index(state["count"], where, "state['count']")
        has_next = as_index(state["has_next"], where, "state['has_next']")
        columns = read_columns(state["columns"], where)
        rows = state["rows"]
        seams = as_seams(state.get("seams"), count, where)
        # Compute the row size of this state without touching the memory, so that an error changes nothing.
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

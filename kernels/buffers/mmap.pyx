"""A replay memory larger than RAM: the newest transitions in memory, the older ones in a mapped file."""

import json
import os

import numpy as np

cimport numpy as cnp
from cpython.dict cimport PyDict_SetItem
from libc.string cimport memcpy

from rlox.kernels.buffers.batch import Batch

from rlox.kernels.buffers.mmap_records cimport Columns, Layout, copy_in, flags_in, gather
from rlox.kernels.buffers.rows cimport as_obs_dtype, as_values, batch_flags, batch_masks, seed_key
from rlox.kernels.buffers.seams cimport as_seams, no_seams, with_seam
from rlox.kernels.buffers.tiers cimport COPIES, Store, Tiers
from rlox.kernels.checks cimport as_flag, as_fraction, as_index, as_number, as_real
from rlox.kernels.types cimport f32, f64, i64, u8, u64

cnp.import_array()

cdef enum:
    RELEASE_GIL_FROM = 1 << 16  # bytes; below, taking the GIL back costs more than other threads gain


cdef i64 as_size(object value, str name, i64 lowest, str where="MmapReplayBuffer") except? -1:
    number = as_index(value, where, name)
    if not lowest <= number < 1 << 62:
        raise ValueError(f"{where}: {name} must be at least {lowest} and below 2**62, got {number}")
    return number


cdef class MmapReplayBuffer:
    """A replay memory larger than RAM: the newest transitions in memory, the older ones in a mapped file.

    Its draws are those of a `ReplayBuffer` of `total_capacity` with the same contents. The newest `hot_capacity`
    transitions are in anonymous memory. Blocks of older ones are written to a sparse file and read through a read-only
    map. What is mapped or written there is page cache: the operating system reclaims it when it needs the memory, and
    only anonymous memory counts towards the memory budget (`ram_budget`). Rows are stored byte for byte: NaN is stored
    and returned unchanged.

    The file belongs to this process alone. It is removed by `close`, when the buffer is garbage-collected and when the
    interpreter exits, unless a state refers to it (`get_state(include_cold=False)`). It then stays until
    `clean_cold_files` is called and no checkpoint needs it. After the process was killed, the next buffer in the same
    folder removes the files that no state has ever referred to.

    One thread may sample while another closes the buffer. Pushing while another thread samples is safe too, but a
    batch may then contain rows that mix an old and a new transition.

    Parameters
    ----------
    hot_capacity, total_capacity
        Number of transitions in memory, and in total; 1 <= hot_capacity <= total_capacity.
    obs_dim, act_dim
        Numbers in an observation (D) and an action (A).
    cold_path
        The file, or an existing folder, such as that of the run, in which ``replay-<id>.cold`` is created. An existing
        file is replaced only if it is a cold file that a killed process left behind and no state refers to. The file's
        apparent size is three times that of the older transitions, for two saved states in addition to the running
        one; disk space is taken as blocks are written.
    obs_shape
        Shape of an observation in a batch, with product `obs_dim`; None for (D,).
    obs_dtype
        float32 or uint8.
    n_envs
        Number of environments that push in turn: transition k belongs to environment k % n_envs.
    n_step, gamma
        Number of rewards to sum, and their discount. A sum stops at a termination, at a truncation, at a `cut` and at
        the newest transition.
    mask_dim
        Flags of a mask of the actions that are legal in `next_obs`, which `push_batch` takes; 0: there are none.
    max_ram
        Bytes that `ram_budget` must not exceed; None for no limit.
    preallocate
        Take the disk space at once, so that a full disk is noticed now and not on a later push.

    Raises
    ------
    ValueError, TypeError
        For an invalid size, shape, dtype or path.
    OSError
        If the file cannot be created: no such folder (FileNotFoundError), a file in the way (FileExistsError), ...
    """

    cdef Store store
    cdef Layout layout
    cdef object __weakref__
    cdef readonly i64 hot_capacity, total_capacity, obs_dim, act_dim, n_envs, n_step, mask_dim
    cdef readonly f64 gamma
    cdef readonly tuple obs_shape
    cdef readonly object obs_dtype
    cdef int obs_type
    cdef int with_next      # whether rows have next_obs: -1 until the first push, then 0 or 1
    cdef cnp.ndarray seams_
    cdef str record

    def __init__(
        self, hot_capacity: int, total_capacity: int, obs_dim: int, act_dim: int, cold_path: str | os.PathLike, *,
        obs_shape: tuple[int, ...] | None = None, obs_dtype=np.float32, n_envs: int = 1, n_step: int = 1,
        gamma: float = 0.99, mask_dim: int = 0, max_ram: int | None = None, preallocate: bool = False,
    ) -> None:
        where = "MmapReplayBuffer"
        cdef Layout* layout = &self.layout
        self.hot_capacity = as_size(hot_capacity, "hot_capacity", 1)
        self.total_capacity = as_size(total_capacity, "total_capacity", 1)
        if self.hot_capacity > self.total_capacity:
            raise ValueError(
                f"{where}: hot_capacity must be at most total_capacity ({total_capacity}), got {hot_capacity}"
            )
        self.obs_dim = as_size(obs_dim, "obs_dim", 1)
        self.act_dim = as_size(act_dim, "act_dim", 1)
        self.n_envs = as_size(n_envs, "n_envs", 1)
        self.n_step = as_size(n_step, "n_step", 1)
        self.mask_dim = as_size(mask_dim, "mask_dim", 0)
        if self.n_envs > self.total_capacity:
            raise ValueError(f"{where}: n_envs must be at most total_capacity {total_capacity}, got {n_envs}")
        self.gamma = as_fraction(gamma, where, "gamma")
        if obs_shape is None:
            obs_shape = (self.obs_dim,)
        elif not isinstance(obs_shape, (tuple, list)):
            raise TypeError(f"{where}: obs_shape must be a tuple, got {type(obs_shape).__name__}")
        self.obs_shape = tuple([as_size(length, "obs_shape", 1) for length in obs_shape])
        product = 1
        for length in self.obs_shape:
            product *= length
        if product != self.obs_dim:
            raise ValueError(f"{where}: obs_shape must have the product {obs_dim}, got {self.obs_shape}")
        self.obs_dtype = as_obs_dtype(obs_dtype, where)
        self.obs_type = self.obs_dtype.num
        for name, number in (("obs_dim", self.obs_dim), ("act_dim", self.act_dim), ("n_step", self.n_step),
                             ("mask_dim", self.mask_dim)):
            if number >= 1 << 40:
                raise ValueError(f"{where}: {name} must be below 2**40, got {number}")
        # In Python integers, which do not overflow.
        row = 8 * int(self.obs_dim) + 4 * int(self.act_dim) + int(self.mask_dim) + 128
        if int(self.total_capacity) * COPIES * row >= 1 << 62:
            raise ValueError(
                f"{where}: total_capacity must be such that the file stays below 2**62 bytes, got {total_capacity}"
            )
        layout.obs_bytes = self.obs_dim * self.obs_dtype.itemsize
        layout.action_bytes = 4 * self.act_dim
        layout.next_obs = layout.obs_bytes
        layout.masks = 2 * layout.obs_bytes
        layout.mask_dim = self.mask_dim
        layout.actions = (layout.masks + self.mask_dim + 3) // 4 * 4
        layout.rewards = layout.actions + layout.action_bytes
        layout.flags = layout.rewards + 4
        # Whole cache lines, so that a small record takes exactly one.
        layout.row = layout.flags + 8
        layout.stride = (layout.row + 63) // 64 * 64
        self.record = (
            f"obs, next_obs {self.obs_dtype}{list(self.obs_shape)}, "
            f"{f'next_masks bool[{self.mask_dim}], ' if self.mask_dim else ''}actions float32[{act_dim}], "
            "rewards float32, terminated, truncated float32"
        )
        budget = self.hot_capacity * layout.stride
        if max_ram is not None and budget > as_size(max_ram, "max_ram", 0):
            raise ValueError(
                f"{where}: max_ram must fit hot_capacity transitions of {layout.stride} bytes ({budget}), got "
                f"{max_ram}; use hot_capacity={max_ram // layout.stride}"
            )
        self.with_next = -1
        self.set_seams(no_seams())
        self.store = Store(
            cold_path, self.record, layout.stride, self.hot_capacity, self.total_capacity, bool(preallocate)
        )

    def __repr__(self) -> str:
        if self.store.cold is None:
            return "MmapReplayBuffer(closed)"
        return f"MmapReplayBuffer({len(self)} of {self.total_capacity}, cold_path={self.cold_path!r})"

    def __reduce__(self):
        raise TypeError(
            "MmapReplayBuffer: a buffer that owns a file must not be pickled; pass its get_state() instead and create "
            "another one with MmapReplayBuffer.from_state"
        )

    def __enter__(self):
        self.store.check_open("__enter__")
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self, keep: bool | None = None) -> None:
        """Unmap the file, and remove it unless a state refers to it. Afterwards only `close` works and does nothing.

        If `keep` is True or False, it decides whether the file stays. A thread that is sampling finishes its batch
        first.
        """
        if keep is not None and not isinstance(keep, bool):
            raise TypeError(f"MmapReplayBuffer.close: keep must be a bool or None, got {type(keep).__name__}")
        self.store.close(keep)

    @property
    def cold_path(self) -> str:
        """Path of the file."""
        self.store.check_open("cold_path")
        return self.store.cold.path

    @property
    def cold_id(self) -> str:
        """Id by which checkpoints refer to the file: 16 hexadecimal digits."""
        self.store.check_open("cold_id")
        return self.store.cold.id

    @property
    def ram_budget(self) -> int:
        """Bytes of anonymous memory: `hot_capacity` records, plus 11 bytes per block of older transitions.

        A record has 2 D observation numbers, A action numbers, the reward and the flags, rounded up to a multiple of
        64 bytes. A block has up to 128 records, or more if records are small.
        """
        return self.hot_capacity * self.layout.stride + (8 + COPIES) * self.store.tiers.n_table

    def __len__(self) -> int:
        self.store.check_open("__len__")
        return self.store.length()

    def len(self) -> int:
        """Return the number of transitions that can be sampled."""
        return self.__len__()

    cdef cnp.ndarray as_obs(self, object value, i64 n, str where, str name):
        """Return `value` as C-contiguous observations; `value` itself if it already is that."""
        cdef cnp.ndarray array
        if isinstance(value, cnp.ndarray):
            array = value
            if (cnp.PyArray_TYPE(array) == self.obs_type and cnp.PyArray_ISCARRAY_RO(array)
                    and cnp.PyArray_SIZE(array) == n * self.obs_dim
                    and (cnp.PyArray_NDIM(array) == 1 or n == 1 and cnp.PyArray_NDIM(array) == 0)):
                return array
        array = as_values(value, self.obs_type, where, name)
        if n < 0:
            allowed = (self.obs_shape, (self.obs_dim,))
        else:
            allowed = ((n, *self.obs_shape), (n, self.obs_dim), (n * self.obs_dim,))
        shape = (<object>array).shape
        if shape not in allowed and not (n < 0 and self.obs_dim == 1 and shape == ()):
            raise ValueError(f"{where}: {name} must have shape {allowed[0]}, got {shape}")
        return array

    def push(self, obs, action, reward, terminated, truncated, next_obs=None) -> None:
        """Store one transition.

        Parameters
        ----------
        obs, next_obs
            (D,) or `obs_shape`, arrays or lists. Pass `next_obs` always or never.
        action
            A numbers, or one number if A is 1.
        reward
            A number.
        terminated, truncated
            Bools, or 0 and 1.

        Raises
        ------
        ValueError, TypeError
            For an invalid shape, dtype or value, if only some transitions have `next_obs`, or if the buffer is closed.
        OSError
            If the disk is full. The buffer is unchanged; free some space and push again.
        """
        where = "MmapReplayBuffer.push"
        cdef Store store = self.store
        cdef const Layout* layout = &self.layout
        cdef cnp.ndarray o, a, after = None
        cdef u8* to
        cdef f32 r
        cdef u8 ended, cut
        store.check_open("push")
        if self.mask_dim:
            raise ValueError(f"{where}: mask_dim must be 0, got {self.mask_dim}; push_batch takes next_masks")
        o = self.as_obs(obs, -1, where, "obs") if not self.is_obs(obs) else obs
        if next_obs is not None:
            after = self.as_obs(next_obs, -1, where, "next_obs") if not self.is_obs(next_obs) else next_obs
        if isinstance(action, cnp.ndarray) and cnp.PyArray_TYPE(<cnp.ndarray>action) == cnp.NPY_FLOAT32 and (
            cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>action)
        ) and cnp.PyArray_SIZE(<cnp.ndarray>action) == self.act_dim and cnp.PyArray_NDIM(<cnp.ndarray>action) <= 1:
            a = action
        else:
            a = as_real(action, cnp.NPY_FLOAT32, where, "action")
            if (<object>a).shape != (self.act_dim,) and not (self.act_dim == 1 and (<object>a).shape == ()):
                raise ValueError(f"{where}: action must have shape ({self.act_dim},), got {(<object>a).shape}")
        r = as_number(reward, where, "reward")
        ended = as_flag(terminated, where, "terminated")
        cut = as_flag(truncated, where, "truncated")
        self.check_next(after is not None, where)
        store.room()
        to = store.place()
        memcpy(to, cnp.PyArray_DATA(o), layout.obs_bytes)
        if after is not None:
            memcpy(to + layout.next_obs, cnp.PyArray_DATA(after), layout.obs_bytes)
        memcpy(to + layout.actions, cnp.PyArray_DATA(a), layout.action_bytes)
        (<f32*>(to + layout.rewards))[0] = r
        (<f32*>(to + layout.flags))[0] = ended
        (<f32*>(to + layout.flags))[1] = cut
        self.with_next = after is not None
        store.advance(1)

    cdef inline bint is_obs(self, object value):
        return (isinstance(value, cnp.ndarray) and cnp.PyArray_TYPE(<cnp.ndarray>value) == self.obs_type
                and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>value)
                and cnp.PyArray_NDIM(<cnp.ndarray>value) == 1
                and cnp.PyArray_DIM(<cnp.ndarray>value, 0) == self.obs_dim)

    cdef inline int check_next(self, bint given, str where) except -1:
        if not given and self.n_step > 1:
            raise ValueError(f"{where}: next_obs must be given with n_step {self.n_step}, got None")
        if self.with_next == 1 - given:
            raise ValueError(
                f"{where}: next_obs must be "
                + ("given, as in the first push, got None; pass it always or never" if self.with_next else
                   "None, as in the first push, got one; pass it always or never")
            )
        return 0

    def push_batch(self, obs, next_obs, actions, rewards, terminated, truncated, *, next_masks=None) -> None:
        """Store N transitions, oldest first.

        Parameters
        ----------
        obs, next_obs
            (N, D), ``(N, *obs_shape)`` or flat (N * D,); `next_obs` or None, as in `push`.
        actions
            (N, A) or flat (N * A,).
        rewards, terminated, truncated
            (N,) each; flags as bools, or 0 and 1.
        next_masks
            (N, M) bool, the legal actions in `next_obs`, if `mask_dim` is not 0.

        Raises
        ------
        ValueError, TypeError, OSError
            As for `push`, and if lengths differ. If the disk is full, the transitions before that point stay stored, with
            several environments in whole rows of them: `n_pushed` counts them.
        """
        where = "MmapReplayBuffer.push_batch"
        cdef Store store = self.store
        cdef const Layout* layout = &self.layout
        cdef cnp.ndarray o, a, r, ended, cut, masks, after = None
        cdef i64 n, done = 0, m
        cdef u8* to
        store.check_open("push_batch")
        r = as_real(rewards, cnp.NPY_FLOAT32, where, "rewards")
        if cnp.PyArray_NDIM(r) != 1:
            raise ValueError(f"{where}: rewards must be 1-D, got shape {(<object>r).shape}")
        n = cnp.PyArray_SIZE(r)
        if n == 0:
            raise ValueError(f"{where}: rewards must not be empty, got shape (0,)")
        o = self.as_obs(obs, n, where, "obs")
        if next_obs is not None:
            after = self.as_obs(next_obs, n, where, "next_obs")
        a = as_real(actions, cnp.NPY_FLOAT32, where, "actions")
        if (<object>a).shape != (n, self.act_dim) and (<object>a).shape != (n * self.act_dim,):
            raise ValueError(f"{where}: actions must have shape {(n, self.act_dim)}, got {(<object>a).shape}")
        ended = batch_flags(terminated, n, where, "terminated")
        cut = batch_flags(truncated, n, where, "truncated")
        masks = batch_masks(next_masks, n, self.mask_dim, where)
        if self.n_envs > 1 and (n % self.n_envs or store.tiers.head % self.n_envs):
            raise ValueError(
                f"{where}: rewards must have a whole number of rows of n_envs = {self.n_envs} (after "
                f"{store.tiers.head} transitions), got {n}"
            )
        self.check_next(after is not None, where)
        self.with_next = after is not None
        while done < n:
            try:
                m = min(store.room(), n - done)
            except OSError:
                store.take_back(done % self.n_envs)
                raise
            to = store.place()
            copy_in(to, layout.stride, layout.obs_bytes, m, <const u8*>cnp.PyArray_DATA(o) + done * layout.obs_bytes)
            if after is not None:
                copy_in(to + layout.next_obs, layout.stride, layout.obs_bytes, m,
                        <const u8*>cnp.PyArray_DATA(after) + done * layout.obs_bytes)
            if masks is not None:
                copy_in(to + layout.masks, layout.stride, layout.mask_dim, m,
                        <const u8*>cnp.PyArray_DATA(masks) + done * layout.mask_dim)
            copy_in(to + layout.actions, layout.stride, layout.action_bytes, m,
                    <const u8*>cnp.PyArray_DATA(a) + done * layout.action_bytes)
            copy_in(to + layout.rewards, layout.stride, 4, m, <const u8*>cnp.PyArray_DATA(r) + done * 4)
            flags_in(to + layout.flags, layout.stride, m, <const u8*>cnp.PyArray_DATA(ended) + done)
            flags_in(to + layout.flags + 4, layout.stride, m, <const u8*>cnp.PyArray_DATA(cut) + done)
            store.advance(m)
            done += m

    def sample(self, batch_size: int, seed: int) -> Batch:
        """Draw `batch_size` transitions uniformly, with replacement. A pure function of the contents and the seed.

        Returns
        -------
        Batch
            ``obs``, ``next_obs`` ``(B, *obs_shape)``, ``actions`` (B, A) float32, ``rewards`` (B,) float32,
            ``terminated``, ``truncated`` (B,) bool, and with `mask_dim` ``next_masks`` (B, M) bool. With n_step > 1,
            rewards are sums; next_obs, next_masks, terminated and truncated are those of the last transition summed;
            and ``discounts`` (B,) float32 is the factor of the bootstrap value.

        Raises
        ------
        ValueError
            If the buffer is empty or closed, batch_size is below 1, or the seed lies outside [0, 2**64).
        TypeError
            If an argument is not an integer.
        OSError
            If the file was cut short.
        """
        where = "MmapReplayBuffer.sample"
        cdef Store store = self.store
        cdef i64 n = as_size(batch_size, "batch_size", 1, where)
        cdef u64 key = seed_key(seed, where)
        cdef Columns to
        cdef cnp.npy_intp[2] dims
        cdef cnp.ndarray obs, next_obs = None, masks, actions, rewards, ended, cut, discounts
        self.check_sample(where)
        dims[0] = n
        dims[1] = self.act_dim
        obs = self.empty_obs(n)
        actions = cnp.PyArray_EMPTY(2, dims, cnp.NPY_FLOAT32, 0)
        rewards = cnp.PyArray_EMPTY(1, dims, cnp.NPY_FLOAT32, 0)
        ended = cnp.PyArray_EMPTY(1, dims, cnp.NPY_BOOL, 0)
        cut = cnp.PyArray_EMPTY(1, dims, cnp.NPY_BOOL, 0)
        to.packed = NULL
        to.masks = NULL
        to.obs = <u8*>cnp.PyArray_DATA(obs)
        to.actions = <u8*>cnp.PyArray_DATA(actions)
        to.rewards = <f32*>cnp.PyArray_DATA(rewards)
        to.terminated = <u8*>cnp.PyArray_DATA(ended)
        to.truncated = <u8*>cnp.PyArray_DATA(cut)
        batch = Batch()
        PyDict_SetItem(batch, "obs", obs)
        if self.with_next:
            next_obs = self.empty_obs(n)
            to.next_obs = <u8*>cnp.PyArray_DATA(next_obs)
            PyDict_SetItem(batch, "next_obs", next_obs)
        if self.mask_dim:
            masks = np.empty((n, self.mask_dim), np.bool_)
            to.masks = <u8*>cnp.PyArray_DATA(masks)
            PyDict_SetItem(batch, "next_masks", masks)
        PyDict_SetItem(batch, "actions", actions)
        PyDict_SetItem(batch, "rewards", rewards)
        PyDict_SetItem(batch, "terminated", ended)
        PyDict_SetItem(batch, "truncated", cut)
        if self.n_step > 1:
            discounts = cnp.PyArray_EMPTY(1, dims, cnp.NPY_FLOAT32, 0)
            to.discounts = <f32*>cnp.PyArray_DATA(discounts)
            PyDict_SetItem(batch, "discounts", discounts)
        self.draw(n, key, &to)
        return batch

    cdef cnp.ndarray empty_obs(self, i64 n):
        cdef cnp.npy_intp[2] dims
        if len(self.obs_shape) != 1:
            return np.empty((n, *self.obs_shape), self.obs_dtype)
        dims[0] = n
        dims[1] = self.obs_dim
        return cnp.PyArray_EMPTY(2, dims, self.obs_type, 0)

    def sample_packed(self, batch_size: int, seed: int) -> np.ndarray:
        """Draw as `sample` does, into one array.

        Returns
        -------
        numpy.ndarray
            (B, W) float32 with the columns obs (D), next_obs (D, if there is one), actions (A), reward,
            terminated, truncated and, with n_step > 1, discount. Views of its columns cost nothing.

        Raises
        ------
        ValueError, TypeError, OSError
            As for `sample`, and for uint8 observations.
        """
        where = "MmapReplayBuffer.sample_packed"
        cdef i64 n = as_size(batch_size, "batch_size", 1, where)
        cdef u64 key = seed_key(seed, where)
        cdef Columns to
        cdef cnp.npy_intp[2] dims
        cdef cnp.ndarray packed
        if self.obs_type != cnp.NPY_FLOAT32:
            raise ValueError(f"{where}: obs_dtype must be float32, got {self.obs_dtype}; use sample")
        if self.mask_dim:
            raise ValueError(f"{where}: mask_dim must be 0, got {self.mask_dim}; use sample")
        self.check_sample(where)
        dims[0] = n
        dims[1] = (2 if self.with_next else 1) * self.obs_dim + self.act_dim + 3 + (self.n_step > 1)
        packed = cnp.PyArray_EMPTY(2, dims, cnp.NPY_FLOAT32, 0)
        to.packed = <u8*>cnp.PyArray_DATA(packed)
        self.draw(n, key, &to)
        return packed

    cdef void set_seams(self, cnp.ndarray seams):
        self.layout.n_seams = 0
        self.seams_ = seams
        self.layout.seams = <const i64*>cnp.PyArray_DATA(seams)
        self.layout.n_seams = len(seams)

    def cut(self) -> None:
        """Mark that the next transitions do not continue the last ones, so that no n-step return crosses this point.

        Like `ReplayBuffer.cut`.
        """
        self.store.check_open("cut")
        self.set_seams(with_seam(self.seams_, self.store.tiers.first, self.store.tiers.head))

    @property
    def n_pushed(self) -> int:
        """Transitions pushed so far."""
        return self.store.tiers.head

    @property
    def seams(self) -> np.ndarray:
        """Where `cut` was called, like `ReplayBuffer.seams`."""
        return self.seams_[self.seams_ > self.store.tiers.first]

    cdef int check_sample(self, str where) except -1:
        self.store.check_open(where.rpartition(".")[2])
        if self.store.length() == 0:
            raise ValueError(f"{where}: the buffer must hold a transition, got an empty one; push first")
        return 0

    cdef int draw(self, i64 n, u64 key, Columns* to) except -1:
        cdef Store store = self.store
        cdef Tiers tiers = store.tiers
        # While the GIL is released, another thread may close the buffer: these keep its memory and map alive.
        hot, rows, table, seams = store.hot, store.rows, store.table, self.seams_
        cdef Layout layout = self.layout
        if tiers.head - tiers.first > tiers.hot_capacity:
            store.check_whole()
        to.with_next = self.with_next == 1
        if n * self.layout.row >= RELEASE_GIL_FROM:
            with nogil:
                gather(&tiers, &layout, n, key, self.n_envs, self.n_step, self.gamma, to[0])
        else:
            gather(&tiers, &layout, n, key, self.n_envs, self.n_step, self.gamma, to[0])
        return 0

    def get_state(self, include_cold: bool = True) -> dict:
        """Return everything that future results depend on, for `set_state` of a buffer with the same arguments.

        Parameters
        ----------
        include_cold
            True returns all transitions as arrays. False returns those in memory as arrays, and a reference to the
            file for the others. At least the two newest states that refer to the file can be restored, however much is
            pushed afterwards (blocks that a state relies on are not overwritten). `set_state` rejects older states.
            What was written to the file is on the disk when this method returns (fsync).

        Returns
        -------
        dict
            ``kind``, ``config`` (the arguments, as JSON), ``next`` (whether there is a next_obs: 0, 1 or -1 for
            undecided), ``head`` (transitions pushed so far), ``n``, ``records`` (n, bytes of a record) uint8, and
            ``seams`` if there are any. With include_cold=False, ``records`` are only the newest ones, and there are
            also ``cold_id``, ``cold_path``, ``cold_serial``, ``cold_blocks`` and ``cold_written``.

        Raises
        ------
        ValueError
            If the buffer is closed.
        OSError
            If the header or unwritten blocks cannot be written to the disk.
        """
        if not isinstance(include_cold, (bool, np.bool_)):
            raise TypeError(
                f"MmapReplayBuffer.get_state: include_cold must be a bool, got {type(include_cold).__name__}"
            )
        state = self.store.save(include_cold)
        if len(seams := self.seams):
            state["seams"] = seams
        return {"kind": "MmapReplayBuffer", "config": self.config(), "next": self.with_next, **state}

    cdef str config(self):
        config = {
            "hot_capacity": self.hot_capacity, "total_capacity": self.total_capacity, "obs_dim": self.obs_dim,
            "act_dim": self.act_dim, "obs_shape": self.obs_shape, "obs_dtype": str(self.obs_dtype),
            "n_envs": self.n_envs, "n_step": self.n_step, "gamma": self.gamma,
        }
        # Left out without masks, so that older states have this configuration.
        return json.dumps({**config, "mask_dim": self.mask_dim} if self.mask_dim else config)

    def set_state(self, state: dict) -> None:
        """Restore a state from `get_state` exactly.

        If the state refers to a file, this buffer becomes its owner. The file is searched in this buffer's folder and
        then at its old path. The buffer's previous file is removed. Of the states that refer to the adopted file, only
        this one remains valid, until two newer ones exist.

        Raises
        ------
        ValueError, TypeError
            If the state is damaged or belongs to a buffer with other arguments (hot_capacity may differ if the state
            contains all transitions), or if the file is gone, damaged, in use, or no longer contains what the state
            relies on. Nothing is changed then.
        OSError
            If the disk is full. The buffer is then empty if the state contains all transitions, else unchanged.
        """
        where = "MmapReplayBuffer.set_state"
        cdef i64 head, n, next_
        self.store.check_open("set_state")
        if not isinstance(state, dict):
            raise TypeError(f"{where}: state must be a dict, got {type(state).__name__}")
        keys = {"kind", "config", "next", "head", "n", "records"}
        cold_keys = {"cold_id", "cold_path", "cold_serial", "cold_blocks", "cold_written"}
        if set(state) - {"seams"} not in (keys, keys | cold_keys):
            raise ValueError(
                f"{where}: state must have the keys {sorted(keys)}, and all or none of the cold_ keys, got "
                f"{sorted(map(str, state))}; pass what get_state returned"
            )
        for name in ("kind", "config", "cold_id", "cold_path"):
            if name in state and not isinstance(state[name], str):
                raise TypeError(f"{where}: {name} must be a string, got {type(state[name]).__name__}")
        if state["kind"] != "MmapReplayBuffer":
            raise ValueError(f"{where}: kind must be 'MmapReplayBuffer', got {state['kind']!r}")
        try:
            theirs = json.loads(state["config"])
        except ValueError as e:
            raise ValueError(f"{where}: config must be JSON, got {state['config']!r}") from e
        named = "cold_id" in state
        theirs = {"mask_dim": 0, **theirs} if isinstance(theirs, dict) else {}
        for name, value in {"mask_dim": 0, **json.loads(self.config())}.items():
            if (named or name != "hot_capacity") and theirs.get(name) != value:
                raise ValueError(
                    f"{where}: state must come from a buffer with {name}={value}, got {theirs.get(name)}"
                )
        head = as_size(state["head"], "head", 0, where)
        n = as_size(state["n"], "n", 0, where)
        seams = as_seams(state.get("seams"), head, where)
        missing = min(head, self.total_capacity) - n  # after a full disk, less than a row of environments
        if not 0 <= missing < self.n_envs:
            raise ValueError(f"{where}: n must be min(head, total_capacity), got {n} for head {head}")
        next_ = as_size(state["next"], "next", -1, where)
        if next_ > 1 or (next_ < 0 and n):
            raise ValueError(f"{where}: next must be 0 or 1, or -1 in an empty buffer, got {next_}")
        records = state["records"]
        if not isinstance(records, np.ndarray) or records.dtype != np.uint8:
            raise TypeError(f"{where}: records must be an array of uint8, got {getattr(records, 'dtype', records)}")
        shape = (min(n, self.hot_capacity) if named else n, self.layout.stride)
        if records.shape != shape:
            raise ValueError(f"{where}: records must have shape {shape}, got {records.shape}")
        records = np.ascontiguousarray(records)
        if named:
            as_size(state["cold_serial"], "cold_serial", 1, where)
            as_size(state["cold_written"], "cold_written", 0, where)
            self.store.adopt({**state, "records": records})
        else:
            self.store.fill(head - n, records)
        self.with_next = next_
        self.set_seams(seams)

    @classmethod
    def from_state(cls, state: dict, cold_path: str | os.PathLike | None = None) -> MmapReplayBuffer:
        """Create a buffer from a state of `get_state`. Pass `cold_path` if the state does not refer to a file.

        Raises the errors of the constructor and of `set_state`.
        """
        where = "MmapReplayBuffer.from_state"
        if not isinstance(state, dict) or not isinstance(state.get("config"), str):
            raise TypeError(f"{where}: state must be what get_state returned, got {type(state).__name__}")
        if cold_path is None:
            if not isinstance(state.get("cold_path"), str):
                raise ValueError(f"{where}: cold_path must be given, since the state does not refer to a file")
            cold_path = os.path.dirname(state["cold_path"])
        try:
            config = json.loads(state["config"])
            dtype = config.pop("obs_dtype")
            hot, total, dim, act = [config.pop(k) for k in ("hot_capacity", "total_capacity", "obs_dim", "act_dim")]
            if set(config) - {"mask_dim"} != {"obs_shape", "n_envs", "n_step", "gamma"}:
                raise ValueError(sorted(config))
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise ValueError(f"{where}: config must be what get_state returned, got {state['config']!r}") from e
        buffer = cls(hot, total, dim, act, cold_path, obs_dtype=dtype, **config)
        try:
            buffer.set_state(state)
        except BaseException:
            buffer.close()
            raise
        return buffer

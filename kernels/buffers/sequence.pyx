"""Replay of consecutive steps, for recurrent and model-based agents (R2D2, DreamerV3)."""

import numpy as np

from rlox.kernels.buffers.batch import Batch

cimport numpy as cnp
from libc.string cimport memcpy, memset

from rlox.kernels.buffers.gather cimport CHUNK, draw_indices
from rlox.kernels.buffers.rows cimport (
    as_obs_dtype, as_reward, as_size, batch_flags, batch_rows, put_image, put_row, seed_key, state_array,
)
from rlox.kernels.checks cimport as_flag, as_index
from rlox.kernels.philox cimport DOMAIN_SEQUENCES
from rlox.kernels.types cimport f32, i64, u8, u64

cnp.import_array()

cdef Py_ssize_t RELEASE_GIL_FROM = 1 << 15

cdef enum:
    OBS = 0
    ACTIONS = 1
    REWARDS = 2
    TERMINATED = 3
    TRUNCATED = 4
    IS_FIRST = 5
    NEXT_OBS = 6
    STATE = 7
    N_COLUMNS = 8

NAMES = ("obs", "actions", "rewards", "terminated", "truncated", "is_first", "next_obs", "state")


cdef struct Rings:
    Py_ssize_t n_envs
    Py_ssize_t slots              # of one environment; one more than it may hold
    const i64* heads              # (N) the free slot that the next step goes to
    const i64* sizes              # (N) steps held, the newest just before the head
    char* columns[8]              # (N, slots, row) each; NULL: not stored
    Py_ssize_t sizes_of[8]        # bytes of a row


cdef inline Py_ssize_t within_episode(const Rings* rings, Py_ssize_t base, Py_ssize_t at,
                                      Py_ssize_t most) noexcept nogil:
    """How many of the next `most` steps belong to the episode of the first of them."""
    cdef const u8* terminated = <const u8*>rings.columns[TERMINATED] + base
    cdef const u8* truncated = <const u8*>rings.columns[TRUNCATED] + base
    cdef const u8* is_first = <const u8*>rings.columns[IS_FIRST] + base
    cdef Py_ssize_t j
    for j in range(most):
        if j and is_first[at]:
            return j
        if terminated[at] | truncated[at]:
            return j + 1
        at += 1
        if at == rings.slots:
            at = 0
    return most


cdef inline void copy_steps(const char* ring, Py_ssize_t slots, Py_ssize_t at, Py_ssize_t used,
                            Py_ssize_t length, Py_ssize_t row, Py_ssize_t step, char* out) noexcept nogil:
    """Copy `used` consecutive steps, padded with zeros to `length`, to places `step` bytes apart."""
    cdef Py_ssize_t j
    cdef Py_ssize_t before = min(used, slots - at)
    if step == row:
        memcpy(out, ring + at * row, before * row)
        memcpy(out + before * row, ring, (used - before) * row)
        memset(out + used * row, 0, (length - used) * row)
        return
    for j in range(length):
        if j >= used:
            memset(out, 0, row)
        else:
            memcpy(out, ring + at * row, row)
            at += 1
            if at == slots:
                at = 0
        out += step


cdef void sample_steps(const Rings* rings, const i64* offsets, u64 key, Py_ssize_t b, Py_ssize_t length,
                       bint cross, bint time_major, char** out, u8* mask) noexcept nogil:
    """`offsets` (N + 1) counts the possible starts of the environments before each."""
    cdef i64[CHUNK] starts
    cdef Py_ssize_t base = 0
    cdef Py_ssize_t i, j, k, n, low, high, middle, at, used, row
    while base < b:
        n = min(<Py_ssize_t>CHUNK, b - base)
        draw_indices(<u64>offsets[rings.n_envs], key, <u64>base, DOMAIN_SEQUENCES, starts, n)
        for i in range(n):
            low, high = 0, rings.n_envs - 1
            while low < high:
                middle = (low + high) >> 1
                if offsets[middle + 1] > starts[i]:
                    high = middle
                else:
                    low = middle + 1
            # Counted from the oldest step of the environment.
            j = starts[i] - offsets[low]
            at = rings.heads[low] - rings.sizes[low] + j
            if at < 0:
                at += rings.slots
            if at >= rings.slots:
                at -= rings.slots
            used = length
            if not cross:
                used = within_episode(rings, low * rings.slots, at, min(length, rings.sizes[low] - j))
            k = base + i
            for j in range(STATE):
                row = rings.sizes_of[j]
                if out[j] != NULL:
                    copy_steps(rings.columns[j] + low * rings.slots * row, rings.slots, at, used, length, row,
                               b * row if time_major else row,
                               out[j] + (k if time_major else k * length) * row)
            if out[STATE] != NULL:
                row = rings.sizes_of[STATE]
                memcpy(out[STATE] + k * row, rings.columns[STATE] + (low * rings.slots + at) * row, row)
            if mask != NULL:
                for j in range(length):
                    mask[j * b + k if time_major else k * length + j] = j < used
        base += n


cdef class SequenceReplayBuffer:
    """A ring of steps per environment, sampled as stretches of consecutive steps.

    **What a step is.** Row t holds obs_t, the action_t taken in it, and the reward_t, terminated_t and
    truncated_t that followed; is_first_t says that obs_t is the first of an episode. (DreamerV3 writes the
    reward with the observation that follows it: its r_t is reward_{t-1} here.) The observation after an
    episode's last step is not a row; give `next_obs` with every step to have it, at twice the memory.

    A step begins an episode if it is the first of its environment, if the step before it was terminated or
    truncated, or if it was pushed with ``is_first=True`` (a reset by hand).

    Not to be pushed to by one thread while another samples.

    Parameters
    ----------
    capacity
        Steps over all environments; each holds ``capacity // n_envs``, the oldest is replaced first.
    obs_dim
        D; None with `obs_shape`.
    act_dim
        A.
    seq_len
        What `sample` takes for its `seq_len` by default.
    n_envs
        N.
    obs_shape
        Shape of an observation, in place of `obs_dim`.
    obs_dtype
        float32, or uint8 for images (pushed as uint8 arrays only).
    state_dim
        S > 0 stores with every step the recurrent state the agent was in *before* it saw obs_t.

    Attributes
    ----------
    capacity
        As it is held: a multiple of `n_envs`.
    n_envs, obs_shape, obs_dim, act_dim, seq_len, state_dim, obs_dtype
        As given.

    Raises
    ------
    ValueError
        A capacity below `n_envs`, a dimension below 1, `seq_len` beyond what an environment holds, neither
        or both of `obs_dim` and `obs_shape`.
    TypeError
        A size that is no integer, another dtype.

    References
    ----------
    Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (R2D2: stored
    state and burn-in). Hafner et al. 2023, "Mastering diverse domains through world models" (DreamerV3),
    arXiv:2301.04104.
    """

    cdef readonly Py_ssize_t capacity, n_envs, obs_dim, act_dim, state_dim
    cdef readonly tuple obs_shape
    cdef readonly object seq_len, obs_dtype
    cdef bint images
    cdef Rings rings
    # -1 until the first step has said whether next_obs is given, then 0 or 1.
    cdef int with_next
    cdef Py_ssize_t total
    # These own the memory that `rings` points into.
    cdef list columns
    cdef cnp.ndarray heads, sizes, starting

    def __init__(self, capacity, obs_dim=None, act_dim=1, *, seq_len=None, n_envs=1, obs_shape=None,
                 obs_dtype=np.float32, state_dim=0) -> None:
        where = "SequenceReplayBuffer"
        cdef Py_ssize_t capacity_ = as_size(capacity, where, "capacity")
        self.n_envs = as_size(n_envs, where, "n_envs")
        if capacity_ < self.n_envs:
            raise ValueError(f"{where}: capacity must be at least one step per environment ({n_envs}), got {capacity}")
        if (obs_dim is None) == (obs_shape is None):
            raise ValueError(
                f"{where}: obs_dim must be given, or obs_shape in its place, got "
                f"{'neither' if obs_dim is None else 'both'}"
            )
        if obs_shape is None:
            self.obs_shape = (as_size(obs_dim, where, "obs_dim"),)
        else:
            if not isinstance(obs_shape, (tuple, list)) or not obs_shape:
                raise TypeError(f"{where}: obs_shape must be a tuple of integers, got {obs_shape!r}")
            self.obs_shape = tuple([as_size(length, where, "obs_shape") for length in obs_shape])
        width = 1
        for length in self.obs_shape:
            width *= length
        self.obs_dim = as_size(width, where, "obs_shape")
        self.act_dim = as_size(act_dim, where, "act_dim")
        number = as_index(state_dim, where, "state_dim")
        if number:
            as_size(number, where, "state_dim")
        self.state_dim = number
        self.obs_dtype = as_obs_dtype(obs_dtype, where)
        self.images = self.obs_dtype == np.uint8
        cdef Py_ssize_t held = capacity_ // self.n_envs
        if seq_len is not None and as_size(seq_len, where, "seq_len") > held:
            raise ValueError(
                f"{where}: seq_len must be at most the {held} steps that one environment holds, got {seq_len}"
            )
        self.seq_len = seq_len
        self.capacity = held * self.n_envs
        self.rings.n_envs = self.n_envs
        # One slot is always free: a push that fails half-way has then overwritten nothing.
        self.rings.slots = held + 1
        self.clear()

    def clear(self) -> None:
        """Remove all steps and give the memory back; `next_obs` may then be given or not anew."""
        self.columns = [None] * N_COLUMNS
        self.heads = np.zeros(self.n_envs, np.int64)
        self.sizes = np.zeros(self.n_envs, np.int64)
        self.starting = np.ones(self.n_envs, np.uint8)
        self.rings.heads = <const i64*>cnp.PyArray_DATA(self.heads)
        self.rings.sizes = <const i64*>cnp.PyArray_DATA(self.sizes)
        self.total = 0
        self.with_next = -1
        cdef int i
        for i in range(N_COLUMNS):
            self.rings.columns[i] = NULL
            self.rings.sizes_of[i] = 0
            if i != NEXT_OBS and (i != STATE or self.state_dim):
                self.allocate(i)

    def __len__(self) -> int:
        return self.total

    def __repr__(self) -> str:
        return (f"SequenceReplayBuffer({self.total} of {self.capacity} steps, n_envs={self.n_envs}, "
                f"obs_shape={self.obs_shape}, obs_dtype={self.obs_dtype}, act_dim={self.act_dim})")

    def __reduce__(self):
        return _remake, (self.capacity, self.act_dim, self.seq_len, self.n_envs, self.obs_shape, self.obs_dtype.name,
                        self.state_dim), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    def len(self) -> int:
        """Return the number of steps held over all environments, as ``len(buffer)``."""
        return self.total

    def push(self, obs, action, reward, terminated, truncated, next_obs=None, *, env=0, is_first=False,
             state=None) -> None:
        """Append one step of one environment.

        Parameters
        ----------
        obs, next_obs
            Finite numbers (uint8 for images), as many as `obs_shape` has. `next_obs`, the true next
            observation, is given for every step or for none.
        action
            A finite numbers, or one number where A is 1.
        reward
            A finite number.
        terminated, truncated
            True or False.
        env
            The environment, 0 <= env < N.
        is_first
            True after a reset that no end of an episode announced.
        state
            (S,) recurrent state before `obs`; given exactly if the buffer has a `state_dim`.

        Raises
        ------
        ValueError
            A wrong count of numbers, NaN or infinity, `next_obs` given for some steps only.
        IndexError
            No such `env`.
        TypeError
            What cannot be read as numbers or flags.
        """
        where = "SequenceReplayBuffer.push"
        cdef Py_ssize_t e = 0
        if env is not 0:
            number = as_index(env, where, "env")
            if not 0 <= number < self.n_envs:
                raise IndexError(f"{where}: env must lie in [0, {self.n_envs}), got {number}")
            e = number
        self.agree(next_obs is not None, state is not None, where)
        cdef Py_ssize_t slot = e * self.rings.slots + (<i64*>cnp.PyArray_DATA(self.heads))[e]
        self.put_obs(OBS, slot, obs, where, "obs")
        put_row(<f32*>self.rings.columns[ACTIONS] + slot * self.act_dim, self.act_dim, action, where, "action")
        (<f32*>self.rings.columns[REWARDS])[slot] = as_reward(reward, where, "reward")
        (<u8*>self.rings.columns[TERMINATED])[slot] = as_flag(terminated, where, "terminated")
        (<u8*>self.rings.columns[TRUNCATED])[slot] = as_flag(truncated, where, "truncated")
        (<u8*>self.rings.columns[IS_FIRST])[slot] = as_flag(is_first, where, "is_first")
        if next_obs is not None:
            self.put_obs(NEXT_OBS, slot, next_obs, where, "next_obs")
        if state is not None:
            put_row(<f32*>self.rings.columns[STATE] + slot * self.state_dim, self.state_dim, state, where, "state")
        self.with_next = next_obs is not None
        self.commit(e, slot)

    def push_batch(self, obs, next_obs, actions, rewards, terminated, truncated, *, is_first=None,
                   state=None) -> None:
        """Append steps of all environments, all of them or, where one is wrong, none.

        The rows come time-major: row r is environment ``r % N``. So (N, ...) arrays are one step of every
        environment, (T, N, ...) arrays are T of them, and flat arrays are read alike.

        Parameters
        ----------
        obs, next_obs
            (N, D), (T, N, D) or flat; `next_obs` may be None (then always).
        actions
            (N, A), (T, N, A) or flat.
        rewards, terminated, truncated
            (N,), (T, N) or flat.
        is_first
            As `rewards`, or None for no resets by hand.
        state
            (N, S) or (T, N, S), given exactly if the buffer has a `state_dim`.

        Raises
        ------
        ValueError, TypeError
            As `push`, and for a number of rows that is no multiple of N.
        """
        where = "SequenceReplayBuffer.push_batch"
        cdef cnp.ndarray r = batch_rows(rewards, np.size(rewards), 1, False, where, "rewards")
        cdef Py_ssize_t n = cnp.PyArray_SIZE(r)
        if n % self.n_envs:
            raise ValueError(f"{where}: rewards must have a multiple of the {self.n_envs} environments, got {n}")
        cdef list rows = [
            batch_rows(obs, n, self.obs_dim, self.images, where, "obs"),
            batch_rows(actions, n, self.act_dim, False, where, "actions"),
            r,
            batch_flags(terminated, n, where, "terminated"),
            batch_flags(truncated, n, where, "truncated"),
            np.zeros(n, np.uint8) if is_first is None else batch_flags(is_first, n, where, "is_first"),
            None if next_obs is None else batch_rows(next_obs, n, self.obs_dim, self.images, where, "next_obs"),
            None if state is None else batch_rows(state, n, self.state_dim, False, where, "state"),
        ]
        if n == 0:
            return
        self.agree(next_obs is not None, state is not None, where)
        self.with_next = next_obs is not None
        cdef const char* sources[8]
        cdef i64* heads = <i64*>cnp.PyArray_DATA(self.heads)
        cdef Py_ssize_t i, e, slot, size
        cdef int c
        for c in range(N_COLUMNS):
            sources[c] = NULL
            if rows[c] is not None:
                sources[c] = <const char*>cnp.PyArray_DATA(rows[c])
        for i in range(n):
            e = i % self.n_envs
            slot = e * self.rings.slots + heads[e]
            for c in range(N_COLUMNS):
                if sources[c] != NULL:
                    size = self.rings.sizes_of[c]
                    memcpy(self.rings.columns[c] + slot * size, sources[c] + i * size, size)
            self.commit(e, slot)

    def cut(self) -> None:
        """Let the next step of every environment begin an episode, as after a reset of all of them by hand."""
        self.starting[:] = 1

    def sample(self, batch_size, seq_len=None, seed=None, *, cross_episodes=True, time_major=False):
        """Draw stretches of consecutive steps of one environment each, with replacement.

        Parameters
        ----------
        batch_size
            B, at least 1.
        seq_len
            T; None for the buffer's own.
        seed
            0 <= seed < 2**64. The same contents and seed give the same batch.
        cross_episodes
            True: T steps as they happened, through the ends of episodes, which ``is_first`` marks (where a
            recurrent state must be reset). The first step is uniform over all from which T steps remain.
            False: the stretch stops with its episode and is padded to T: ``mask`` is False there and
            everything else 0. The first step is uniform over all steps held.
        time_major
            True returns (T, B, ...) in place of (B, T, ...).

        Returns
        -------
        Batch
            Fresh arrays ``obs`` (B, T, \\*obs_shape), ``actions`` (B, T, A), ``rewards`` (B, T) float32,
            ``terminated``, ``truncated``, ``is_first`` (B, T) bool; ``next_obs`` where it was pushed;
            ``mask`` (B, T) bool with ``cross_episodes=False``; ``state`` (B, S), the recurrent state before
            the first step, with a `state_dim`.

        Raises
        ------
        ValueError
            Nothing to draw from (empty, or no environment holds T steps), an argument out of range.
        TypeError
            No `seed` or no `seq_len` at all, or one that is no integer.
        """
        where = "SequenceReplayBuffer.sample"
        cdef Py_ssize_t b = as_size(batch_size, where, "batch_size")
        if seq_len is None:
            seq_len = self.seq_len
            if seq_len is None:
                raise TypeError(f"{where}: seq_len must be given here or to the buffer, got None")
        cdef Py_ssize_t length = as_size(seq_len, where, "seq_len")
        cdef u64 key = seed_key(seed, where)
        cdef bint cross = as_flag(cross_episodes, where, "cross_episodes")
        cdef bint by_time = as_flag(time_major, where, "time_major")
        if b > (1 << 40) // length:
            raise ValueError(f"{where}: batch_size * seq_len must be at most 2**40, got {b} * {length}")
        cdef cnp.npy_intp[3] shape
        shape[0] = self.n_envs + 1
        cdef cnp.ndarray offsets = cnp.PyArray_EMPTY(1, shape, cnp.NPY_INT64, 0)
        cdef i64* before = <i64*>cnp.PyArray_DATA(offsets)
        cdef Py_ssize_t e
        before[0] = 0
        for e in range(self.n_envs):
            before[e + 1] = before[e] + (max(<i64>0, self.rings.sizes[e] - length + 1) if cross
                                         else self.rings.sizes[e])
        if before[self.n_envs] == 0:
            if self.total == 0:
                raise ValueError(f"{where}: the buffer must hold steps to sample, got none; push some first")
            raise ValueError(
                f"{where}: seq_len must be at most the steps of one environment "
                f"({self.sizes.max()} held), got {length}; push more, or take cross_episodes=False"
            )
        if by_time:
            shape[0], shape[1] = length, b
        else:
            shape[0], shape[1] = b, length
        batch = Batch()
        cdef char* out[8]
        cdef cnp.ndarray array
        cdef int c
        for c in range(STATE):
            out[c] = NULL
            if c == NEXT_OBS and self.with_next != 1:
                continue
            if c == ACTIONS:
                shape[2] = self.act_dim
                array = cnp.PyArray_EMPTY(3, shape, cnp.NPY_FLOAT32, 0)
            elif c == OBS or c == NEXT_OBS:
                if len(self.obs_shape) == 1:
                    shape[2] = self.obs_dim
                    array = cnp.PyArray_EMPTY(3, shape, cnp.NPY_UINT8 if self.images else cnp.NPY_FLOAT32, 0)
                else:
                    array = np.empty((shape[0], shape[1], *self.obs_shape), self.obs_dtype)
            else:
                array = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32 if c == REWARDS else cnp.NPY_BOOL, 0)
            batch[NAMES[c]] = array
            out[c] = <char*>cnp.PyArray_DATA(array)
        cdef u8* mask = NULL
        if not cross:
            array = cnp.PyArray_EMPTY(2, shape, cnp.NPY_BOOL, 0)
            batch["mask"] = array
            mask = <u8*>cnp.PyArray_DATA(array)
        out[STATE] = NULL
        if self.state_dim:
            array = np.empty((b, self.state_dim), np.float32)
            batch["state"] = array
            out[STATE] = <char*>cnp.PyArray_DATA(array)
        if b * length * self.rings.sizes_of[OBS] < RELEASE_GIL_FROM:
            sample_steps(&self.rings, before, key, b, length, cross, by_time, out, mask)
        else:
            with nogil:
                sample_steps(&self.rings, before, key, b, length, cross, by_time, out, mask)
        return batch

    def get_state(self) -> dict:
        """Return everything held, from the oldest step to the newest.

        Returns
        -------
        dict
            The columns as (N, L, ...) with L the most steps that an environment holds (0 behind the steps
            of one that holds fewer), ``sizes`` (N,) int64, ``starting`` (N,) bool (whether its next step
            begins an episode), and the ints ``capacity`` and ``n_envs``.
        """
        cdef Py_ssize_t longest = int(self.sizes.max())
        state = {"capacity": int(self.capacity), "n_envs": int(self.n_envs), "sizes": self.sizes.copy(),
                 "starting": self.starting.astype(np.bool_)}
        for c, column in enumerate(self.columns):
            if column is None or (c == NEXT_OBS and self.with_next != 1):
                continue
            ordered = np.zeros((self.n_envs, longest, *column.shape[2:]), column.dtype)
            for e in range(self.n_envs):
                at = (self.heads[e] - self.sizes[e] + np.arange(self.sizes[e])) % self.rings.slots
                ordered[e, : self.sizes[e]] = column[e, at]
            state[NAMES[c]] = ordered
        return state

    def set_state(self, dict state not None) -> None:
        """Replace everything by what `get_state` of a buffer of the same sizes returned.

        Samples are then what they were there. Raises ValueError for other keys, sizes, shapes or dtypes; the
        buffer is then as it was.
        """
        where = "SequenceReplayBuffer.set_state"
        wanted = {"capacity", "n_envs", "sizes", "starting", *NAMES[:NEXT_OBS]} | ({"state"} if self.state_dim else set())
        if set(state) - {"next_obs"} != wanted:
            raise ValueError(
                f"{where}: state must have the keys {', '.join(sorted(wanted))} (and next_obs), got "
                f"{sorted(map(str, state))}; pass what get_state returned"
            )
        for name, own in (("capacity", self.capacity), ("n_envs", self.n_envs)):
            if state[name] != own:
                raise ValueError(f"{where}: {name} must be this buffer's {own}, got {state[name]}")
        sizes = state_array(state, "sizes", np.int64, (self.n_envs,), where)
        starting = state_array(state, "starting", np.bool_, (self.n_envs,), where)
        if ((sizes < 0) | (sizes >= self.rings.slots)).any():
            raise ValueError(f"{where}: sizes must lie in [0, {self.rings.slots - 1}], got {sizes.tolist()}")
        cdef Py_ssize_t longest = int(sizes.max())
        shapes = (self.obs_shape, (self.act_dim,), (), (), (), (), self.obs_shape, (self.state_dim,))
        arrays = {}
        for c, name in enumerate(NAMES):
            if name in state:
                dtype = self.obs_dtype if name in ("obs", "next_obs") else np.bool_ if 3 <= c <= 5 else np.float32
                arrays[c] = state_array(state, name, dtype, (self.n_envs, longest, *shapes[c]), where)
        self.clear()
        for c, array in arrays.items():
            if self.columns[c] is None:
                self.allocate(c)
            self.columns[c][:, :longest] = array
        self.sizes[:] = sizes
        self.heads[:] = sizes  # at most slots - 1, the last slot
        self.starting[:] = starting
        self.total = int(sizes.sum())
        self.with_next = -1 if self.total == 0 else "next_obs" in state

    cdef int allocate(self, int c) except -1:
        """Make a column; the pages are zero and taken from the system as they are first written."""
        shape = (self.n_envs, self.rings.slots)
        try:
            if c == OBS or c == NEXT_OBS:
                array = np.zeros(shape + self.obs_shape, self.obs_dtype)
            elif c == ACTIONS:
                array = np.zeros((*shape, self.act_dim), np.float32)
            elif c == STATE:
                array = np.zeros((*shape, self.state_dim), np.float32)
            else:
                array = np.zeros(shape, np.float32 if c == REWARDS else np.bool_)
        except (ValueError, MemoryError) as e:
            raise MemoryError(
                f"SequenceReplayBuffer: capacity must fit into memory, got {self.capacity} steps of "
                f"{self.obs_shape} {self.obs_dtype}"
            ) from e
        self.columns[c] = array
        self.rings.columns[c] = <char*>cnp.PyArray_DATA(array)
        self.rings.sizes_of[c] = array[0, 0].nbytes
        return 0

    cdef int agree(self, bint with_next, bint with_state, str where) except -1:
        """Check that `next_obs` is given always or never, and `state` if there is a place for it."""
        if self.with_next >= 0 and self.with_next != with_next:
            raise ValueError(
                f"{where}: next_obs must be given for every step or for none, got "
                + ("one after steps without" if with_next else "none after steps with one")
            )
        if with_state != (self.state_dim > 0):
            raise ValueError(
                f"{where}: state must " + ("be given, for the buffer has a state_dim" if self.state_dim else
                                           "be None, for the buffer was made without a state_dim")
            )
        if with_next and self.columns[NEXT_OBS] is None:
            self.allocate(NEXT_OBS)
        return 0

    cdef int put_obs(self, int c, Py_ssize_t slot, object obs, str where, str name) except -1:
        if self.images:
            return put_image(<u8*>self.rings.columns[c] + slot * self.obs_dim, self.obs_dim, obs, where, name)
        return put_row(<f32*>self.rings.columns[c] + slot * self.obs_dim, self.obs_dim, obs, where, name)

    cdef void commit(self, Py_ssize_t e, Py_ssize_t slot) noexcept:
        """Make the written slot the environment's newest step."""
        cdef i64* heads = <i64*>cnp.PyArray_DATA(self.heads)
        cdef i64* sizes = <i64*>cnp.PyArray_DATA(self.sizes)
        cdef u8* starting = <u8*>cnp.PyArray_DATA(self.starting)
        (<u8*>self.rings.columns[IS_FIRST])[slot] |= starting[e]
        starting[e] = ((<u8*>self.rings.columns[TERMINATED])[slot] | (<u8*>self.rings.columns[TRUNCATED])[slot])
        heads[e] += 1
        if heads[e] == self.rings.slots:
            heads[e] = 0
        if sizes[e] < self.rings.slots - 1:
            sizes[e] += 1
            self.total += 1


def _remake(capacity, act_dim, seq_len, n_envs, obs_shape, obs_dtype, state_dim):
    """What a pickle calls: the constructor takes some arguments by keyword only."""
    return SequenceReplayBuffer(capacity, None, act_dim, seq_len=seq_len, n_envs=n_envs, obs_shape=obs_shape,
                                obs_dtype=obs_dtype, state_dim=state_dim)

"""Replay of consecutive steps, for recurrent and model-based agents (R2D2, DreamerV3)."""

import numpy as np

from rlox.kernels.buffers.batch import Batch

cimport numpy as cnp
from libc.string cimport memcpy

from rlox.kernels.buffers.rows cimport (
    as_obs_dtype, as_reward, as_size, batch_flags, batch_rows, put_image, put_row, seed_key, state_array,
)
from rlox.kernels.buffers.sequence_rings cimport (
    ACTIONS, IS_FIRST, N_COLUMNS, NEXT_OBS, OBS, REWARDS, STATE, TERMINATED, TRUNCATED, Rings, copy_sequences,
    count_starts, draw_starts, take_queued, write_states,
)
from rlox.kernels.checks cimport as_array, as_flag, as_index
from rlox.kernels.types cimport f32, i64, u8, u64

cnp.import_array()

cdef Py_ssize_t RELEASE_GIL_FROM = 1 << 15
cdef Py_ssize_t MARKS = 0  # number of marks set in this process, over all buffers

cdef tuple NAMES = ("obs", "actions", "rewards", "terminated", "truncated", "is_first", "next_obs", "state")


cdef class SequenceReplayBuffer:
    """A ring of steps per environment, sampled as sequences of consecutive steps.

    **Steps.** Row t contains obs_t, the action_t taken at it, and the reward_t, terminated_t and truncated_t
    that followed; is_first_t marks obs_t as the first of an episode. The observation after the last step of an episode
    is not a row; to have it, pass `next_obs` with every step, at twice the memory.

    DreamerV3 pushes rows of another kind: row t contains the reward that came with obs_t, and the last
    observation of an episode is a row of its own, with an action of zeros, that is terminated or truncated.

    A step begins an episode if it is the first of its environment, if the step before it was terminated or
    truncated, or if it was pushed with ``is_first=True`` (a manual reset).

    **Numbers.** The steps of an environment are numbered from 0 in the order of their pushes; steps that were replaced
    also count. The index of a step is ``number * N + env``.

    One thread must not push while another one samples.

    Parameters
    ----------
    capacity
        Steps over all environments. Each environment stores ``capacity // n_envs``; the oldest step is replaced first.
    obs_dim
        D; None if `obs_shape` is given.
    act_dim
        A.
    seq_len
        Default of `seq_len` in `sample`.
    n_envs
        N.
    obs_shape
        Shape of an observation, instead of `obs_dim`.
    obs_dtype
        float32, or uint8 for images (pushed as uint8 arrays only).
    state_dim
        S > 0 stores with every step the recurrent state that the agent was in *before* it saw obs_t.

    Attributes
    ----------
    capacity
        The actual capacity, a multiple of `n_envs`.
    n_envs, obs_shape, obs_dim, act_dim, seq_len, state_dim, obs_dtype
        As given.
    n_pushed
        Number of steps ever pushed, over all environments.
    mark
        For `get_news`.
    nbytes
        Bytes of its arrays at full capacity; the system provides them when they are first written.

    Raises
    ------
    ValueError
        If the capacity is below `n_envs`, a dimension is below 1, `seq_len` exceeds the capacity of an environment, or
        neither or both of `obs_dim` and `obs_shape` are given.
    TypeError
        If a size is not an integer, or for another dtype.

    References
    ----------
    Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (R2D2: stored
    state and burn-in). Hafner et al. 2023, "Mastering diverse domains through world models" (DreamerV3),
    arXiv:2301.04104.
    """

    cdef readonly Py_ssize_t capacity, n_envs, obs_dim, act_dim, state_dim
    cdef readonly tuple obs_shape
    cdef readonly object seq_len, obs_dtype
    cdef readonly Py_ssize_t mark
    cdef bint images
    cdef Rings rings
    # Whether steps have next_obs: -1 until the first step, then 0 or 1.
    cdef int with_next
    cdef Py_ssize_t total
    # These own the memory that `rings` points into.
    cdef list columns
    cdef cnp.ndarray heads, sizes, starting, pushed, queued, marked, changed
    cdef cnp.ndarray offsets  # (N + 1), scratch memory of `sample`

    def __init__(self, capacity, obs_dim=None, act_dim=1, *, seq_len=None, n_envs=1, obs_shape=None,
                 obs_dtype=np.float32, state_dim=0) -> None:
        where = "SequenceReplayBuffer"
        cdef Py_ssize_t capacity_ = as_size(capacity, where, "capacity")
        self.n_envs = as_size(n_envs, where, "n_envs")
        if capacity_ < self.n_envs:
            raise ValueError(f"{where}: capacity must be at least one step per environment ({n_envs}), got {capacity}")
        if (obs_dim is None) == (obs_shape is None):
            raise ValueError(
                f"{where}: obs_dim must be given, or obs_shape instead, got "
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
                f"{where}: seq_len must be at most the {held} steps that one environment can store, got {seq_len}"
            )
        self.seq_len = seq_len
        self.capacity = held * self.n_envs
        self.rings.n_envs = self.n_envs
        # One slot is always free, so that a push that fails half-way has overwritten nothing.
        self.rings.slots = held + 1
        self.clear()

    def clear(self) -> None:
        """Remove all steps and free the memory. The next push decides again whether steps have `next_obs`."""
        self.columns = [None] * N_COLUMNS
        self.heads = np.zeros(self.n_envs, np.int64)
        self.sizes = np.zeros(self.n_envs, np.int64)
        self.starting = np.ones(self.n_envs, np.uint8)
        self.rings.heads = <const i64*>cnp.PyArray_DATA(self.heads)
        self.rings.sizes = <const i64*>cnp.PyArray_DATA(self.sizes)
        self.pushed = np.zeros(self.n_envs, np.int64)
        self.offsets = np.empty(self.n_envs + 1, np.int64)
        self.queued = np.zeros(self.n_envs, np.int64)  # steps that sample(online=True) has taken or lost
        self.rings.pushed = <const i64*>cnp.PyArray_DATA(self.pushed)
        self.changed = np.zeros((self.n_envs, self.rings.slots if self.state_dim else 0), np.uint8)
        self.rings.changed = <u8*>cnp.PyArray_DATA(self.changed)
        self.set_mark()
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
        """Return the number of steps stored over all environments, like ``len(buffer)``."""
        return self.total

    @property
    def n_pushed(self):
        return int(self.pushed.sum())

    @property
    def nbytes(self):
        return sum([column.nbytes for column in self.columns if column is not None])

    def push(self, obs, action, reward, terminated, truncated, next_obs=None, *, env=0, is_first=False,
             state=None) -> None:
        """Append one step of one environment.

        Parameters
        ----------
        obs, next_obs
            Finite numbers (uint8 for images), as many as `obs_shape` has. `next_obs`, the true next
            observation, must be given for every step or for none.
        action
            A finite numbers, or one number if A is 1.
        reward
            A finite number.
        terminated, truncated
            True or False.
        env
            The environment, 0 <= env < N.
        is_first
            True after a reset without the end of an episode before it.
        state
            (S,) recurrent state before `obs`; required if the buffer has a `state_dim`, else not allowed.

        Raises
        ------
        ValueError
            For a wrong number of values, NaN or infinity, or if only some steps have `next_obs`.
        IndexError
            If `env` does not exist.
        TypeError
            If a value cannot be converted to numbers or flags.
        """
        where = "SequenceReplayBuffer.push"
        cdef Py_ssize_t e = 0
        if env is not 0:
            number = as_index(env, where, "env")
            if not 0 <= number < self.n_envs:
                raise IndexError(f"{where}: env must lie in [0, {self.n_envs}), got {number}")
            e = number
        self.require_same_columns(next_obs is not None, state is not None, where)
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
                   state=None, envs=None) -> None:
        """Append steps of all environments, or none of them if one is invalid.

        Rows are time-major: row r belongs to environment ``r % N``. (N, ...) arrays are one step of every
        environment, (T, N, ...) arrays are T steps, and flat arrays have the same order. With `envs`, row r belongs to
        environment ``envs[r]``, and there may be any number R of rows.

        Parameters
        ----------
        obs, next_obs
            (N, D), (T, N, D) or flat; `next_obs` may be None, but then always.
        actions
            (N, A), (T, N, A) or flat.
        rewards, terminated, truncated
            (N,), (T, N) or flat.
        is_first
            Like `rewards`, or None for no manual resets.
        state
            (N, S) or (T, N, S); required if the buffer has a `state_dim`, else not allowed.
        envs
            (R,) integers in [0, N), or None.

        Raises
        ------
        ValueError, TypeError
            As for `push`, if the number of rows is not a multiple of N, and for environments that do not exist.
        """
        where = "SequenceReplayBuffer.push_batch"
        cdef cnp.ndarray r = batch_rows(rewards, np.size(rewards), 1, False, where, "rewards")
        cdef Py_ssize_t n = cnp.PyArray_SIZE(r)
        cdef const i64* named = NULL
        cdef cnp.ndarray numbers
        if envs is not None:
            numbers = self.places(envs, (n,), self.n_envs, where, "envs")
            named = <const i64*>cnp.PyArray_DATA(numbers)
        elif n % self.n_envs:
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
        self.require_same_columns(next_obs is not None, state is not None, where)
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
            e = i % self.n_envs if named == NULL else <Py_ssize_t>named[i]
            slot = e * self.rings.slots + heads[e]
            for c in range(N_COLUMNS):
                if sources[c] != NULL:
                    size = self.rings.sizes_of[c]
                    memcpy(self.rings.columns[c] + slot * size, sources[c] + i * size, size)
            self.commit(e, slot)

    def cut(self, truncated=False) -> None:
        """Let the next step of every environment begin an episode, as after a manual reset of all environments.

        With `truncated`, the newest step of each environment also becomes the end of a truncated episode, unless it
        already ended one.
        """
        cdef Py_ssize_t e
        if as_flag(truncated, "SequenceReplayBuffer.cut", "truncated"):
            for e in range(self.n_envs):
                if self.sizes[e] and not self.starting[e]:
                    self.columns[TRUNCATED][e, self.heads[e] - 1] = True
        self.starting[:] = 1

    def clear_queue(self) -> None:
        """Mark all steps stored so far as not new to ``sample(online=True)``."""
        self.queued[:] = self.pushed

    def update_states(self, indices, states) -> None:
        """Replace the states of the steps after those at which the sequences of a batch begin.

        If a step occurs more than once, its last state counts. Steps that begin an episode keep their state. Steps that
        are no longer stored, or not yet pushed, are skipped.

        Parameters
        ----------
        indices
            (B,) as returned by `sample`.
        states
            (B, T, S) finite numbers: row t is the state before the step that comes t + 1 steps after the first.

        Raises
        ------
        ValueError, TypeError
            For other shapes, non-finite numbers, indices that were never pushed to, or a buffer without `state_dim`.
        """
        where = "SequenceReplayBuffer.update_states"
        if not self.state_dim:
            raise ValueError(f"{where}: the buffer must be created with a state_dim to store states, got 0")
        shape = np.shape(states)
        if len(shape) != 3 or shape[2] != self.state_dim:
            raise ValueError(f"{where}: states must have shape (B, T, {self.state_dim}), got {shape}")
        cdef Py_ssize_t b = shape[0], length = shape[1]
        cdef cnp.ndarray rows = batch_rows(states, b * length, self.state_dim, False, where, "states")
        most = int((self.pushed * self.n_envs + np.arange(self.n_envs)).max()) if self.total else 0
        cdef cnp.ndarray numbers = self.places(indices, (b,), most, where, "indices")
        if (numbers // self.n_envs >= self.pushed[numbers % self.n_envs]).any():
            raise ValueError(f"{where}: indices must be those of pushed steps; pass what sample returned")
        with nogil:
            write_states(&self.rings, <const i64*>cnp.PyArray_DATA(numbers), b, length,
                         <const char*>cnp.PyArray_DATA(rows))

    def sample(self, batch_size, seq_len=None, seed=None, *, cross_episodes=True, time_major=False, online=False,
               with_indices=False):
        """Draw sequences of consecutive steps, each from one environment, with replacement.

        Parameters
        ----------
        batch_size
            B, at least 1.
        seq_len
            T; None for that of the buffer.
        seed
            0 <= seed < 2**64. The same contents and seed give the same batch.
        cross_episodes
            True: T steps as they happened, across the ends of episodes; ``is_first`` marks where a recurrent state
            must be reset. The first step is uniform over all steps from which T steps remain.
            False: a sequence stops at the end of its episode and is padded to T: ``mask`` is False there and
            everything else 0. The first step is uniform over all stored steps.
        time_major
            True returns (T, B, ...) instead of (B, T, ...).
        online
            True: the batch starts with the steps pushed since the last such call, as sequences that do not overlap,
            oldest first and each once; only the rest of the batch is drawn. A call then changes what the next one
            returns, also in a buffer restored by `set_state`.
        with_indices
            True adds ``indices``.

        Returns
        -------
        Batch
            New arrays ``obs`` (B, T, \\*obs_shape), ``actions`` (B, T, A), ``rewards`` (B, T) float32,
            ``terminated``, ``truncated``, ``is_first`` (B, T) bool; ``next_obs`` if it was pushed;
            ``mask`` (B, T) bool with ``cross_episodes=False``; ``state`` (B, S), the recurrent state before
            the first step, with a `state_dim`; ``indices`` (B,) int64 of the first steps, with `with_indices`.

        Raises
        ------
        ValueError
            If there is nothing to draw from (the buffer is empty, or no environment has T steps), an argument is out of
            range, or `online` is used without `cross_episodes`.
        TypeError
            If `seed` or `seq_len` is missing or not an integer.
        """
        where = "SequenceReplayBuffer.sample"
        cdef Py_ssize_t b = as_size(batch_size, where, "batch_size")
        if seq_len is None:
            seq_len = self.seq_len
            if seq_len is None:
                raise TypeError(f"{where}: seq_len must be given here or to the constructor, got None")
        cdef Py_ssize_t length = as_size(seq_len, where, "seq_len")
        cdef u64 key = seed_key(seed, where)
        cdef bint cross = as_flag(cross_episodes, where, "cross_episodes")
        cdef bint by_time = as_flag(time_major, where, "time_major")
        cdef bint newest = as_flag(online, where, "online")
        cdef bint places = as_flag(with_indices, where, "with_indices")
        if newest and not cross:
            raise ValueError(f"{where}: online must be False with cross_episodes=False, got True")
        if b > (1 << 40) // length:
            raise ValueError(f"{where}: batch_size * seq_len must be at most 2**40, got {b} * {length}")
        cdef cnp.npy_intp[3] shape
        if count_starts(&self.rings, length, cross, NULL) == 0:
            if self.total == 0:
                raise ValueError(f"{where}: the buffer must hold steps to sample, got none; push some first")
            raise ValueError(
                f"{where}: seq_len must be at most the steps of one environment "
                f"({self.sizes.max()} stored), got {length}; push more, or use cross_episodes=False"
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
        shape[0] = b
        cdef cnp.ndarray indices = cnp.PyArray_EMPTY(1, shape, cnp.NPY_INT64, 0)
        cdef i64* first = <i64*>cnp.PyArray_DATA(indices)
        cdef i64* before = <i64*>cnp.PyArray_DATA(self.offsets)
        cdef Py_ssize_t n = 0
        if newest:
            n = take_queued(&self.rings, <i64*>cnp.PyArray_DATA(self.queued), length, first, b)
        # Nothing between these two calls lets another thread run.
        count_starts(&self.rings, length, cross, before)
        draw_starts(&self.rings, before, key, first + n, b - n)
        if places:
            batch["indices"] = indices
        if b * length * self.rings.sizes_of[OBS] < RELEASE_GIL_FROM:
            copy_sequences(&self.rings, first, b, length, cross, by_time, out, mask)
        else:
            with nogil:
                copy_sequences(&self.rings, first, b, length, cross, by_time, out, mask)
        return batch

    def get_state(self) -> dict:
        """Return everything stored, from the oldest step to the newest.

        Returns
        -------
        dict
            The columns as (N, L, ...), where L is the largest number of steps in an environment (shorter ones are
            padded with 0 at the end), ``sizes`` (N,) int64, ``starting`` (N,) bool (whether the next step begins an
            episode), ``pushed`` (N,) int64 (steps ever pushed), ``queued`` (N,) int64 (how many of them
            ``sample(online=True)`` no longer has to take), and the ints ``capacity`` and ``n_envs``.
        """
        cdef Py_ssize_t longest = int(self.sizes.max())
        state = self.values()
        for c, column in enumerate(self.columns):
            if column is None or (c == NEXT_OBS and self.with_next != 1):
                continue
            ordered = np.zeros((self.n_envs, longest, *column.shape[2:]), column.dtype)
            for e in range(self.n_envs):
                at = (self.heads[e] - self.sizes[e] + np.arange(self.sizes[e])) % self.rings.slots
                ordered[e, : self.sizes[e]] = column[e, at]
            state[NAMES[c]] = ordered
        return state

    def get_news(self, mark=None, all_states=False) -> dict:
        """Return what was added or changed since the call that returned `mark`, and set a new mark.

        Parameters
        ----------
        mark
            From the last call, or the attribute ``mark`` after `set_state`. None, or any other mark, returns
            everything.
        all_states
            True returns the states of all steps, not only of new and changed ones.

        Returns
        -------
        dict
            ``values``: what `get_state` returns in addition to the columns. ``whole``: whether this is everything.
            ``rows``: the columns of M steps by name, without the states, and the indices ``places`` (M,) int64 of these
            steps, which include the newest step before the mark. ``states``: the states (K, S) as ``state``, and their
            ``places``; empty without a `state_dim`. ``mark``: for the next call.
        """
        cdef bint whole = mark is None or mark != self.mark
        values = self.values()
        parts, places = [], ([], [])
        for e in range(self.n_envs):
            numbers = np.arange(self.pushed[e] - self.sizes[e], self.pushed[e])
            slots = (self.heads[e] - self.pushed[e] + numbers) % self.rings.slots
            new = numbers >= (0 if whole else self.marked[e] - 1)
            old = new | (self.changed[e, slots] != 0) | all_states if self.state_dim else new[:0]
            parts.append((slots[new], slots[old] if self.state_dim else slots[:0]))
            for kind, chosen in zip(places, (numbers[new], numbers[old] if self.state_dim else numbers[:0])):
                kind.append(chosen * self.n_envs + e)
        rows, states = ({"places": np.concatenate(kind)} for kind in places)
        for c, column in enumerate(self.columns):
            if column is not None and (c != NEXT_OBS or self.with_next == 1):
                kind = states if c == STATE else rows
                kind[NAMES[c]] = np.concatenate([column[e, parts[e][c == STATE]] for e in range(self.n_envs)])
        self.set_mark()
        return {"values": values, "whole": whole, "rows": rows, "states": states, "mark": self.mark}

    cdef dict values(self):
        """Return the contents of a state other than the columns."""
        return {"capacity": int(self.capacity), "n_envs": int(self.n_envs), "sizes": self.sizes.copy(),
                "starting": self.starting.astype(np.bool_), "pushed": self.pushed.copy(), "queued": self.queued.copy()}

    cdef void set_mark(self):
        """Count everything from now on as new."""
        global MARKS
        MARKS += 1
        self.mark = MARKS
        self.marked = self.pushed.copy()
        self.changed[:] = 0

    def set_state(self, dict state not None) -> None:
        """Replace everything by a state from `get_state` of a buffer of the same sizes.

        Samples are then the same as there. Raises ValueError for other keys, sizes, shapes or dtypes, and then leaves
        the buffer unchanged.
        """
        where = "SequenceReplayBuffer.set_state"
        # States from before version 0.7 do not count pushes.
        if isinstance(state, dict) and not {"pushed", "queued"} & set(state) and "sizes" in state:
            state = {**state, "pushed": state["sizes"], "queued": state["sizes"]}
        wanted = {"capacity", "n_envs", "sizes", "starting", "pushed", "queued", *NAMES[:NEXT_OBS]}
        wanted |= {"state"} if self.state_dim else set()
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
        pushed = state_array(state, "pushed", np.int64, (self.n_envs,), where)
        queued = state_array(state, "queued", np.int64, (self.n_envs,), where)
        if (pushed < sizes).any() or (queued < 0).any() or (queued > pushed).any() or (pushed > 1 << 40).any():
            raise ValueError(f"{where}: pushed must be at least sizes and queued, got {pushed.tolist()}")
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
        self.pushed[:] = pushed
        self.queued[:] = queued
        self.set_mark()
        self.total = int(sizes.sum())
        self.with_next = -1 if self.total == 0 else "next_obs" in state

    cdef int allocate(self, int c) except -1:
        """Allocate a column; its pages are zero, and the system provides them when they are first written."""
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

    cdef int require_same_columns(self, bint with_next, bint with_state, str where) except -1:
        """Check that all steps have `next_obs` or none has, and that `state` is given if the buffer has a state_dim."""
        if self.with_next >= 0 and self.with_next != with_next:
            raise ValueError(
                f"{where}: next_obs must be given for every step or for none, got "
                + ("one after steps without one" if with_next else "none after steps with one")
            )
        if with_state != (self.state_dim > 0):
            raise ValueError(
                f"{where}: state must " + ("be given, because the buffer has a state_dim" if self.state_dim else
                                           "be None, because the buffer was created without a state_dim")
            )
        if with_next and self.columns[NEXT_OBS] is None:
            self.allocate(NEXT_OBS)
        return 0

    cdef cnp.ndarray places(self, object values, tuple shape, object end, str where, str name):
        """Return integers in [0, end) as a C-contiguous int64 array of this shape."""
        array = as_array(values, where, name)
        if array.dtype.kind not in "iu" or array.shape != shape:
            raise TypeError(f"{where}: {name} must be integers of shape {shape}, got {array.dtype} {array.shape}")
        array = np.ascontiguousarray(array, np.int64)
        if array.size and not 0 <= array.min() <= array.max() < end:
            bad = array[(array < 0) | (array >= end)][0]
            raise ValueError(f"{where}: {name} must lie in [0, {end}), got {bad}")
        return array

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
        if self.state_dim:
            self.rings.changed[slot] = 0
        starting[e] = ((<u8*>self.rings.columns[TERMINATED])[slot] | (<u8*>self.rings.columns[TRUNCATED])[slot])
        (<i64*>cnp.PyArray_DATA(self.pushed))[e] += 1
        heads[e] += 1
        if heads[e] == self.rings.slots:
            heads[e] = 0
        if sizes[e] < self.rings.slots - 1:
            sizes[e] += 1
            self.total += 1


def _remake(capacity, act_dim, seq_len, n_envs, obs_shape, obs_dtype, state_dim):
    """Rebuild a buffer from a pickle, since the constructor takes some arguments by keyword only."""
    return SequenceReplayBuffer(capacity, None, act_dim, seq_len=seq_len, n_envs=n_envs, obs_shape=obs_shape,
                                obs_dtype=obs_dtype, state_dim=state_dim)

"""Transitions in the order of their pushes, for on-policy learning."""

import numpy as np

cimport numpy as cnp
from cpython.ref cimport Py_REFCNT
from libc.string cimport memcpy

from rlox.kernels.buffers.rows cimport as_reward, as_size, batch_flags, batch_rows, put_row, state_array
from rlox.kernels.checks cimport as_flag
from rlox.kernels.types cimport f32, u8

cnp.import_array()

cdef Py_ssize_t FIRST_ROWS = 64

NAMES = ("obs", "actions", "rewards", "terminated", "truncated", "next_obs")


cdef class ExperienceTable:
    """An append-only table of transitions, one array per column.

    Columns are returned as **read-only views, without a copy**. A view shows the rows that existed when it was created
    and never changes, whatever is pushed, cleared or restored later. ``np.array(view)`` returns a writeable array.

    Parameters
    ----------
    obs_dim, act_dim
        D and A, at least 1.

    Attributes
    ----------
    obs_dim, act_dim
        As given.

    Raises
    ------
    ValueError
        If a dimension is below 1.
    TypeError
        If a dimension is not an integer.

    Examples
    --------
    >>> table = ExperienceTable(obs_dim=2, act_dim=1)
    >>> table.push([0.0, 1.0], 1, 0.5, False, False)
    >>> table.observations()
    array([[0., 1.]], dtype=float32)
    """

    cdef readonly Py_ssize_t obs_dim, act_dim
    cdef Py_ssize_t n, capacity
    # Whether rows have next_obs: -1 until the first row, then 0 or 1.
    cdef int with_next
    cdef cnp.ndarray obs, acts, reward, done, cut, nexts

    def __init__(self, obs_dim, act_dim) -> None:
        self.obs_dim = as_size(obs_dim, "ExperienceTable", "obs_dim")
        self.act_dim = as_size(act_dim, "ExperienceTable", "act_dim")
        self.n = self.capacity = 0
        self.with_next = -1
        self.allocate(FIRST_ROWS, 0)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"ExperienceTable({self.n} rows, obs_dim={self.obs_dim}, act_dim={self.act_dim})"

    def __reduce__(self):
        return ExperienceTable, (self.obs_dim, self.act_dim), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    def len(self) -> int:
        """Return the number of rows, like ``len(table)``."""
        return self.n

    def clear(self) -> None:
        """Remove all rows; existing views keep theirs. The next push decides again whether rows have `next_obs`."""
        self.n = 0
        self.with_next = -1
        # If a view still refers to these arrays, it keeps them, and new rows go into new arrays.
        if (Py_REFCNT(self.obs) > 1 or Py_REFCNT(self.acts) > 1 or Py_REFCNT(self.reward) > 1
                or Py_REFCNT(self.done) > 1 or Py_REFCNT(self.cut) > 1
                or (self.nexts is not None and Py_REFCNT(self.nexts) > 1)):
            self.allocate(self.capacity, 0)

    def push(self, obs, action, reward, terminated, truncated, next_obs=None) -> None:
        """Append one transition.

        Parameters
        ----------
        obs, next_obs
            D finite numbers. A float32 array is the fast form; lists and other real dtypes are converted.
            `next_obs` must be given for every row or for none.
        action
            A finite numbers, or one number if A is 1.
        reward
            A finite number, stored as float32.
        terminated, truncated
            True or False, or 1 and 0.

        Raises
        ------
        ValueError
            For a wrong number of values, NaN or infinity, or if only some rows have `next_obs`.
        TypeError
            If a value cannot be converted to numbers or flags.
        """
        cdef Py_ssize_t n = self.n
        if (self.with_next >= 0 and self.with_next != (next_obs is not None)) or n == self.capacity:
            self.prepare(1, next_obs is not None, "ExperienceTable.push")
        put_row(<f32*>cnp.PyArray_DATA(self.obs) + n * self.obs_dim, self.obs_dim, obs, "ExperienceTable.push",
                "obs")
        put_row(<f32*>cnp.PyArray_DATA(self.acts) + n * self.act_dim, self.act_dim, action,
                "ExperienceTable.push", "action")
        (<f32*>cnp.PyArray_DATA(self.reward))[n] = as_reward(reward, "ExperienceTable.push", "reward")
        (<u8*>cnp.PyArray_DATA(self.done))[n] = as_flag(terminated, "ExperienceTable.push", "terminated")
        (<u8*>cnp.PyArray_DATA(self.cut))[n] = as_flag(truncated, "ExperienceTable.push", "truncated")
        if next_obs is not None:
            if self.nexts is None:
                self.nexts = np.empty((self.capacity, self.obs_dim), np.float32)
            put_row(<f32*>cnp.PyArray_DATA(self.nexts) + n * self.obs_dim, self.obs_dim, next_obs,
                    "ExperienceTable.push", "next_obs")
        self.with_next = next_obs is not None
        self.n = n + 1

    def push_batch(self, obs, next_obs, actions, rewards, terminated, truncated) -> None:
        """Append N transitions, or none of them if one is invalid.

        Parameters
        ----------
        obs, next_obs
            (N, D) or flat (N * D,); `next_obs` may be None, but then for every row.
        actions
            (N, A) or flat (N * A,).
        rewards, terminated, truncated
            (N,); N may be 0. Values as for `push`.

        Raises
        ------
        ValueError, TypeError
            As for `push`; the message names the row.
        """
        where = "ExperienceTable.push_batch"
        cdef cnp.ndarray r = batch_rows(rewards, np.size(rewards), 1, False, where, "rewards")
        cdef Py_ssize_t n = cnp.PyArray_SIZE(r)
        cdef cnp.ndarray o = batch_rows(obs, n, self.obs_dim, False, where, "obs")
        cdef cnp.ndarray a = batch_rows(actions, n, self.act_dim, False, where, "actions")
        cdef cnp.ndarray d = batch_flags(terminated, n, where, "terminated")
        cdef cnp.ndarray t = batch_flags(truncated, n, where, "truncated")
        cdef cnp.ndarray x = None
        if next_obs is not None:
            x = batch_rows(next_obs, n, self.obs_dim, False, where, "next_obs")
        if n == 0:
            return
        self.prepare(n, x is not None, where)
        cdef Py_ssize_t at = self.n
        memcpy(<f32*>cnp.PyArray_DATA(self.obs) + at * self.obs_dim, cnp.PyArray_DATA(o), cnp.PyArray_NBYTES(o))
        memcpy(<f32*>cnp.PyArray_DATA(self.acts) + at * self.act_dim, cnp.PyArray_DATA(a), cnp.PyArray_NBYTES(a))
        memcpy(<f32*>cnp.PyArray_DATA(self.reward) + at, cnp.PyArray_DATA(r), cnp.PyArray_NBYTES(r))
        memcpy(<u8*>cnp.PyArray_DATA(self.done) + at, cnp.PyArray_DATA(d), n)
        memcpy(<u8*>cnp.PyArray_DATA(self.cut) + at, cnp.PyArray_DATA(t), n)
        if x is not None:
            if self.nexts is None:
                self.nexts = np.empty((self.capacity, self.obs_dim), np.float32)
            memcpy(<f32*>cnp.PyArray_DATA(self.nexts) + at * self.obs_dim, cnp.PyArray_DATA(x), cnp.PyArray_NBYTES(x))
        self.with_next = x is not None
        self.n = at + n

    def observations(self) -> np.ndarray:
        """Return the observations, (n, D) float32, as a read-only view (see the class)."""
        return self.view(self.obs, self.obs_dim)

    def actions(self) -> np.ndarray:
        """Return the actions, (n, A) float32, read-only."""
        return self.view(self.acts, self.act_dim)

    def rewards(self) -> np.ndarray:
        """Return the rewards, (n,) float32, read-only."""
        return self.view(self.reward, 0)

    def terminated(self) -> np.ndarray:
        """Return which transitions terminated their episode, (n,) bool, read-only."""
        return self.view(self.done, 0)

    def truncated(self) -> np.ndarray:
        """Return which transitions were truncated, (n,) bool, read-only."""
        return self.view(self.cut, 0)

    def next_observations(self) -> np.ndarray:
        """Return the next observations, (n, D) float32, read-only.

        Raises ValueError if the rows were pushed without `next_obs`, or if there are no rows.
        """
        if self.with_next != 1:
            raise ValueError(
                "ExperienceTable.next_observations: next_obs must be pushed with every row, got "
                + ("none with any" if self.n else "no row yet")
            )
        return self.view(self.nexts, self.obs_dim)

    def get_state(self) -> dict:
        """Return a dict of the columns as new arrays; ``next_obs`` only if rows have one."""
        state = {"obs": self.observations().copy(), "actions": self.actions().copy(),
                 "rewards": self.rewards().copy(), "terminated": self.terminated().copy(),
                 "truncated": self.truncated().copy()}
        if self.with_next == 1:
            state["next_obs"] = self.next_observations().copy()
        return state

    def set_state(self, dict state not None) -> None:
        """Replace all rows by those of a state from `get_state` of a table with the same dimensions.

        Raises ValueError for other keys, shapes or dtypes, and then leaves the table unchanged.
        """
        where = "ExperienceTable.set_state"
        if set(state) not in (set(NAMES), set(NAMES[:5])):
            raise ValueError(
                f"{where}: state must have the keys {', '.join(NAMES)} (the last may be absent), got "
                f"{sorted(map(str, state))}; pass what get_state returned"
            )
        cdef Py_ssize_t n = np.size(state["rewards"])
        # The capacity is that of the arrays; the next push doubles it.
        obs = state_array(state, "obs", np.float32, (n, self.obs_dim), where)
        actions = state_array(state, "actions", np.float32, (n, self.act_dim), where)
        rewards = state_array(state, "rewards", np.float32, (n,), where)
        terminated = state_array(state, "terminated", np.bool_, (n,), where)
        truncated = state_array(state, "truncated", np.bool_, (n,), where)
        nexts = None
        if "next_obs" in state:
            nexts = state_array(state, "next_obs", np.float32, (n, self.obs_dim), where)
        self.obs, self.acts, self.reward, self.done, self.cut, self.nexts = (
            obs, actions, rewards, terminated, truncated, nexts)
        self.n = self.capacity = n
        self.with_next = -1 if n == 0 else nexts is not None

    cdef cnp.ndarray view(self, cnp.ndarray column, Py_ssize_t width):
        cdef cnp.npy_intp[2] shape
        shape[0], shape[1] = self.n, width
        cdef cnp.ndarray array = cnp.PyArray_SimpleNewFromData(
            2 if width else 1, shape, cnp.PyArray_TYPE(column), cnp.PyArray_DATA(column))
        cnp.set_array_base(array, column)
        cnp.PyArray_CLEARFLAGS(array, cnp.NPY_ARRAY_WRITEABLE)
        return array

    cdef int prepare(self, Py_ssize_t n, bint with_next, str where) except -1:
        """Check that all rows have `next_obs` or none has, and make room for n more rows."""
        if self.with_next >= 0 and self.with_next != with_next:
            raise ValueError(
                f"{where}: next_obs must be given for every row or for none, got "
                + ("one after rows without one" if with_next else "none after rows with one")
            )
        if self.n + n > self.capacity:
            self.allocate(max(2 * self.capacity, self.n + n, FIRST_ROWS), self.n)
        return 0

    cdef int allocate(self, Py_ssize_t capacity, Py_ssize_t keep) except -1:
        """Allocate new arrays for this many rows and copy the first `keep`; views keep the old arrays."""
        try:
            columns = [np.empty((capacity, self.obs_dim), np.float32), np.empty((capacity, self.act_dim), np.float32),
                       np.empty(capacity, np.float32), np.empty(capacity, np.bool_), np.empty(capacity, np.bool_),
                       None if self.nexts is None else np.empty((capacity, self.obs_dim), np.float32)]
        except ValueError as e:  # more bytes than the address space has
            raise MemoryError(f"ExperienceTable: {capacity} rows are more than memory can hold") from e
        for old, new in zip((self.obs, self.acts, self.reward, self.done, self.cut, self.nexts), columns):
            if keep and new is not None:
                new[:keep] = old[:keep]
        self.obs, self.acts, self.reward, self.done, self.cut, self.nexts = columns
        self.capacity = capacity
        return 0

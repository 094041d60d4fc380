"""Stepping environments that are Python objects, one after the other, into the rows of arrays."""

import numpy as np

cimport numpy as cnp
from cpython.dict cimport PyDict_CheckExact, PyDict_Contains
from cpython.list cimport PyList_GET_SIZE
from cpython.tuple cimport PyTuple_CheckExact, PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.string cimport memcpy

from rlox.kernels.types cimport f32, f64, i64, u8

cnp.import_array()


cdef class ForeignSteps:
    """Steps several gymnasium environments, with everything but their own code compiled.

    Parameters
    ----------
    envs : list
        The N environments.
    to_env : callable
        Converts a row of the actions to the action that an environment takes.
    row : callable
        Converts an observation to the row to write; raises if it is not a valid observation.
    vectors : bool
        Whether `row` leaves f32 and f64 vectors of the right length unchanged. They are then copied without calling it.
    first_action : int, optional
        For Discrete actions: the environments' first action, from which they count. `to_env` is then not called.
    no_answers : frozenset
        Types that are neither a reward nor a flag, although `float` or `bool` accepts them.
    unanswered : object
        Value of `answer` until an environment has returned.
    take_mask : callable, optional
        ``take_mask(i, obs, info, terminated)`` receives what each step of environment `i` returned, before the next one
        is stepped. It reads the mask of legal actions, or refuses one; None: actions cannot have masks.
    masked : bool
        Whether to call `take_mask` in every step. Otherwise only an info with a mask is passed to it.

    Attributes
    ----------
    at : int
        The environment that is being stepped.
    answer : Any
        The return value of its ``step``.
    rewards, terminated, truncated : arrays (N,) f64, bool, bool
        Of the last step.
    returns, lengths : arrays (N,) f64, i64
        Of the running episodes, including the last step. The caller sets them to 0 where an episode starts.
    """

    cdef list _envs
    cdef object _to_env, _row, _no_answers, _unanswered, _take_mask
    cdef bint _vectors, _discrete, _masked
    cdef i64 _first_action
    cdef public Py_ssize_t at
    cdef public object answer
    cdef readonly cnp.ndarray rewards, terminated, truncated, returns, lengths

    def __init__(self, list envs not None, to_env, row, bint vectors, first_action, no_answers, unanswered,
                 take_mask=None, bint masked=False):
        cdef Py_ssize_t n = len(envs)
        self._envs, self._to_env, self._row, self._vectors = envs, to_env, row, vectors
        self._discrete = first_action is not None
        self._first_action = first_action if self._discrete else 0
        self._no_answers, self._unanswered = no_answers, unanswered
        self._take_mask, self._masked = take_mask, masked
        self.rewards, self.returns = np.zeros(n), np.zeros(n)
        self.terminated, self.truncated = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        self.lengths = np.zeros(n, np.int64)

    def step(self, cnp.ndarray actions not None, cnp.ndarray reached):
        """Take one step in each environment.

        Parameters
        ----------
        actions : array (N,) or (N, K) i64, or (N, A) f32
        reached : array (N, …), optional
            Receives the observations that the steps led to.

        Returns
        -------
        list of int
            The environments whose episode has ended.

        Raises
        ------
        TypeError
            If a reward is not a number, or a flag not a bool.
        Exception
            From an environment; `at` is its number, and `answer` what it had returned.
        """
        cdef Py_ssize_t i, n = len(self._envs), width = 0
        cdef bint ended, cut, direct
        cdef f64 reward
        cdef f64* rewards = <f64*>cnp.PyArray_DATA(self.rewards)
        cdef f64* returns = <f64*>cnp.PyArray_DATA(self.returns)
        cdef i64* lengths = <i64*>cnp.PyArray_DATA(self.lengths)
        cdef u8* terminated = <u8*>cnp.PyArray_DATA(self.terminated)
        cdef u8* truncated = <u8*>cnp.PyArray_DATA(self.truncated)
        cdef i64* chosen = NULL
        cdef f32* rows = NULL
        cdef list over = []
        if actions.ndim < 1 or actions.shape[0] != n:
            raise ValueError(f"ForeignSteps.step: actions must have {n} rows, got {actions.ndim and actions.shape[0]}")
        if reached is not None and (reached.ndim < 1 or reached.shape[0] != n):
            raise ValueError(f"ForeignSteps.step: reached must have {n} rows, got {reached.ndim and reached.shape[0]}")
        if self._discrete:
            if actions.ndim != 1 or cnp.PyArray_TYPE(actions) != cnp.NPY_INT64 or not cnp.PyArray_IS_C_CONTIGUOUS(actions):
                raise TypeError("ForeignSteps.step: actions must be a C-contiguous int64 array (N,)")
            chosen = <i64*>cnp.PyArray_DATA(actions)
        if (
            self._vectors and reached is not None and reached.ndim == 2 and cnp.PyArray_TYPE(reached) == cnp.NPY_FLOAT32
            and cnp.PyArray_IS_C_CONTIGUOUS(reached)
        ):
            rows, width = <f32*>cnp.PyArray_DATA(reached), reached.shape[1]
        for i in range(n):
            # An environment may have changed the list, which the caller can see.
            if PyList_GET_SIZE(self._envs) <= i:
                raise RuntimeError(f"ForeignSteps.step: envs must keep its {n} environments, got {len(self._envs)} in the step")
            self.at, self.answer = i, self._unanswered
            action = chosen[i] + self._first_action if chosen != NULL else self._to_env(actions[i])
            self.answer = answer = self._envs[i].step(action)
            if PyTuple_CheckExact(answer) and PyTuple_GET_SIZE(answer) == 5:
                obs, given = <object>PyTuple_GET_ITEM(answer, 0), <object>PyTuple_GET_ITEM(answer, 1)
                one, other = <object>PyTuple_GET_ITEM(answer, 2), <object>PyTuple_GET_ITEM(answer, 3)
                info = <object>PyTuple_GET_ITEM(answer, 4)
            else:
                obs, given, one, other, info = answer
            if type(given) is not float and type(given) in self._no_answers:
                raise TypeError("step must return a number and two flags")
            reward = float(given)
            ended, cut = self._flag(one), self._flag(other)
            rewards[i], terminated[i], truncated[i] = reward, ended, cut
            returns[i] += reward
            lengths[i] += 1
            # Write the observation before the reset, which may reuse the environment's array.
            direct = rows != NULL and type(obs) is cnp.ndarray and _copied(<cnp.ndarray>obs, rows + i * width, width)
            if not direct:
                row = self._row(obs)
                if reached is not None:
                    reached[i] = row
            if self._take_mask is not None and (
                self._masked or (PyDict_CheckExact(info) and PyDict_Contains(info, "action_mask"))
            ):
                self._take_mask(i, obs, info, ended)
            if ended or cut:
                over.append(i)
        return over

    cdef bint _flag(self, value) except -1:
        if value is True:
            return True
        if value is False:
            return False
        if type(value) in self._no_answers:
            raise TypeError("step must return a number and two flags")
        return bool(value)


cdef inline bint _copied(cnp.ndarray obs, f32* row, Py_ssize_t width) noexcept:
    """Copy `obs` to `row` if it is a vector of `width` floats; return whether it is."""
    cdef Py_ssize_t k
    cdef const f64* wide
    if obs.ndim != 1 or obs.shape[0] != width or not cnp.PyArray_ISCARRAY_RO(obs):
        return False
    if cnp.PyArray_TYPE(obs) == cnp.NPY_FLOAT32:
        memcpy(row, cnp.PyArray_DATA(obs), width * sizeof(f32))
        return True
    if cnp.PyArray_TYPE(obs) == cnp.NPY_FLOAT64:
        wide = <const f64*>cnp.PyArray_DATA(obs)
        for k in range(width):
            row[k] = <f32>wide[k]
        return True
    return False

"""N copies of a native environment: actions in, output arrays, state. The loop itself is in episodes.pxd."""

import numpy as np

cimport numpy as cnp
from cpython.dict cimport PyDict_Copy, PyDict_GetItemWithError
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject

from rlox.kernels.checks cimport as_index, check_out
from rlox.kernels.envs.base cimport rlox_env_v1
from rlox.kernels.envs.episodes cimport Envs, Outputs, advance, first_bad_action, observe_all, start_all
from rlox.kernels.envs.native_env cimport NativeEnvs
from rlox.kernels.types cimport f32, f64, i64, u8

cnp.import_array()

# A smaller batch takes less than a microsecond or two: too short for another thread to use, while
# releasing the GIL and taking it back costs 40 ns, and far more when another thread wants it.
cdef enum:
    RELEASE_GIL_FROM = 256


def __getattr__(name):
    # Pickles of rlox 0.7 and before look for `Env` and its kinds here.
    from rlox.kernels.envs import env

    return getattr(env, name)


cdef struct Stepped:
    const rlox_env_v1* spec
    Envs* envs


cdef void step_through(void* self, const void* actions, f32* obs, f64* rewards, u8* terminated, u8* truncated,
                       f32* final_obs, f64* episode_return, i64* episode_length) noexcept nogil:
    cdef Stepped* stepped = <Stepped*>self
    cdef Outputs out = Outputs(obs=obs, rewards=rewards, terminated=terminated, truncated=truncated,
                               final_obs=final_obs, episode_return=episode_return, episode_length=episode_length,
                               central=NULL, final_central=NULL)
    advance(stepped.spec, stepped.envs, actions, &out)


cdef class VecEnv(NativeEnvs):
    """N copies of one native environment, stepped together, each restarting as soon as it ends.

    Every environment has its own 64-bit key, mixed from (seed, index), and a count of its resets. The
    start of episode k of environment i is a pure function of (key_i, k): it does not depend on the other
    environments, on N, or on what was played before.

    Parameters
    ----------
    n
        Number of environments, at least 1.
    seed
        0 <= seed < 2**64.
    env_id
        One of `native_ids()`, or a PyCapsule named ``rlox.env.v1`` with an environment from outside.

    Attributes
    ----------
    n_envs, env_id, seed
        As given (`seed` follows `reset_all`).
    obs_dim
        D, the length of an observation.
    discrete, n_actions, act_dim
        True, the number of actions and 1 for an environment with discrete actions (one integer per
        environment); False, None and the length of an action for continuous ones.
    act_low, act_high
        (act_dim,) float32 bounds of a continuous action, None for discrete ones. Actions beyond them are
        clipped by the dynamics.
    max_episode_steps
        The time limit, None without one.

    Raises
    ------
    ValueError
        `n` below 1, a seed out of range, an `env_id` that is not native, a capsule that breaks a rule of
        ``rlox_native.h``.
    TypeError
        `n` or `seed` is no integer, `env_id` neither a str nor a capsule.
    """

    cdef tuple scratch   # what a caller does not ask for
    cdef Outputs sink
    cdef Stepped stepped
    cdef dict views      # what copy=False returns, and where its arrays lie
    cdef Outputs viewed
    cdef cnp.ndarray choices  # (N,) int64, holds the actions of a list
    cdef bint busy       # a step without the GIL is under way

    def __cinit__(self, n: int, seed: int = 0, env_id="CartPole-v1") -> None:
        count_ = as_index(n, "VecEnv", "n")
        if count_ < 1:
            raise ValueError(f"VecEnv: n must be at least 1, got {count_}")
        self.choose(env_id, "VecEnv")
        if count_ * max(self.spec.state_size, self.spec.obs_dim, self.spec.act_dim) >= 1 << 59:
            raise ValueError(f"VecEnv: n must be such that the arrays fit into memory, got {count_}")
        self.hold(count_, (count_,), seed, "VecEnv")
        cdef cnp.ndarray obs = np.empty((count_, self.spec.obs_dim), np.float32)
        cdef cnp.ndarray rewards = np.empty(count_)
        cdef cnp.ndarray flags = np.empty((2, count_), np.bool_)
        self.scratch = (obs, rewards, flags)
        self.sink = Outputs(
            obs=<f32*>cnp.PyArray_DATA(obs),
            rewards=<f64*>cnp.PyArray_DATA(rewards),
            terminated=<u8*>cnp.PyArray_DATA(flags),
            truncated=<u8*>cnp.PyArray_DATA(flags) + self.n_envs,
            final_obs=NULL, episode_return=NULL, episode_length=NULL, central=NULL, final_central=NULL,
        )

    def __repr__(self) -> str:
        return f"VecEnv(n={self.n_envs}, seed={self.seed}, env_id={self.env_id!r})"

    def __reduce__(self):
        return VecEnv, (self.n_envs, self.seed, self.env_id), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    def reset_all(self, seed: int | None = None) -> np.ndarray:
        """Start a new episode in every environment.

        Parameters
        ----------
        seed
            New keys, and episodes counted from 0 again. None keeps both, so that the next episodes of the
            same sequences start.

        Returns
        -------
        obs
            (N, D) float32, the first observations.

        Raises
        ------
        ValueError, TypeError
            A seed out of range, or no integer.
        """
        cdef cnp.ndarray obs = np.empty((self.n_envs, self.spec.obs_dim), np.float32)
        if self.busy:
            self.refuse("reset_all")
        if seed is not None:
            self.rekey(seed, "VecEnv.reset_all")
        start_all(&self.spec, &self.envs, <f32*>cnp.PyArray_DATA(obs))
        self.ready = True
        return obs

    def observe(self) -> np.ndarray:
        """Return the current observations, (N, D) float32, recomputed from the state.

        Raises ValueError before the first `reset_all`.
        """
        cdef cnp.ndarray obs = np.empty((self.n_envs, self.spec.obs_dim), np.float32)
        if self.busy:
            self.refuse("observe")
        self.require_ready("observe")
        observe_all(&self.spec, &self.envs, <f32*>cnp.PyArray_DATA(obs))
        return obs

    def step_all(self, actions, dict out=None, bint copy=True) -> dict[str, np.ndarray]:
        """Take one step in every environment; those that end start their next episode at once.

        Without a `reset_all` before it, the first call starts the first episodes by itself.

        Parameters
        ----------
        actions
            Discrete: N integers in [0, n_actions), as a list or an array of any integer dtype (int64 is
            the fast one). Continuous: (N, A) numbers, taken as float32 (the fast dtype); (N,) too for A = 1.
        out
            Dict with any of the keys below and arrays to write into: C-contiguous, of exactly the dtype
            and shape below, sharing no memory. Keys that are absent are not produced.
        copy
            False: the arrays are the object's own, the same in every call, and **the next step overwrites
            them**; copy what must last. Faster, above all for many environments. Not together with `out`.

        Returns
        -------
        dict
            `out` itself, or a fresh dict of fresh arrays (of reused ones with ``copy=False``):

            - ``obs`` (N, D) float32: what to act on next; the first observation of the new episode where
              one ended;
            - ``rewards`` (N,) float64;
            - ``terminated``, ``truncated`` (N,) bool: ended by the task, cut by the time limit (both are
              set when they coincide);
            - ``final_obs`` (N, D) float32: the true next observation, before any reset;
            - ``episode_return`` (N,) float64, ``episode_length`` (N,) int64: totals, this step included,
              of the episode that this step belongs to.

        Raises
        ------
        ValueError
            A wrong number of actions; an action out of range or NaN; an
            `out` with another key, shape or layout, or together with ``copy=False``. Nothing has moved then.
        TypeError
            Actions of another kind; an `out` array of another dtype.
        RuntimeError
            Another thread is taking a step of these environments.
        """
        cdef cnp.ndarray held
        cdef Outputs outputs
        cdef Py_ssize_t bad
        if self.busy:
            self.refuse("step_all")
        held = self.as_actions(actions)
        cdef const void* action_data = cnp.PyArray_DATA(held)
        bad = first_bad_action(&self.spec, action_data, self.n_envs)
        if bad >= 0:
            raise ValueError(
                f"VecEnv.step_all: actions must be "
                + (f"in [0, {self.spec.n_actions})" if self.spec.n_actions else "numbers, not NaN")
                + f", got {held[bad // self.spec.act_dim]} at index {bad // self.spec.act_dim}"
            )
        if out is not None:
            if not copy:
                raise ValueError("VecEnv.step_all: copy must be True where out says where the arrays are, got False")
            outputs = self.sink
            self.bind(out, &outputs)
        elif copy:
            out = self.fresh(&outputs)
        else:
            if self.views is None:
                self.views = self.fresh(&self.viewed)
                # Held apart, so that a caller who deletes or replaces what is in the dict takes no memory away.
                self.scratch += tuple(self.views.values())
            outputs = self.viewed
            out = PyDict_Copy(self.views)
        if not self.ready:
            self.reset_all()
        if self.n_envs < RELEASE_GIL_FROM:
            advance(&self.spec, &self.envs, action_data, &outputs)
        else:
            self.busy = True
            with nogil:
                advance(&self.spec, &self.envs, action_data, &outputs)
            self.busy = False
        return out

    cdef int refuse(self, str method) except -1:
        raise RuntimeError(
            f"VecEnv.{method}: only one thread may use these environments at a time; make a VecEnv per thread"
        )

    cdef cnp.ndarray as_actions(self, object actions):
        """Return `actions` as N contiguous int64 or N * A float32 numbers, itself where it is that already."""
        cdef int type_num = cnp.NPY_INT64 if self.spec.n_actions else cnp.NPY_FLOAT32
        cdef cnp.ndarray array
        if isinstance(actions, cnp.ndarray):
            array = actions
        elif (PyList_CheckExact(actions) and self.spec.n_actions and PyList_GET_SIZE(actions) == self.n_envs
                and self.read_list(actions)):
            return self.choices
        else:
            array = np.asarray(actions)
        cdef int ndim = cnp.PyArray_NDIM(array)
        cdef bint rows = ndim == 2 and not self.spec.n_actions and cnp.PyArray_DIM(array, 1) == self.spec.act_dim
        if (not (rows or (ndim == 1 and self.spec.act_dim == 1))
                or cnp.PyArray_DIM(array, 0) != self.n_envs):
            forms = [f"({self.n_envs},)"] if self.spec.act_dim == 1 else []
            if not self.spec.n_actions:
                forms.append(f"({self.n_envs}, {self.spec.act_dim})")
            raise ValueError(
                f"VecEnv.step_all: actions must have shape {' or '.join(forms)}, one per environment, "
                f"got {(<object>array).shape}"
            )
        if cnp.PyArray_TYPE(array) == type_num and cnp.PyArray_ISCARRAY_RO(array):
            return array
        kind = array.dtype.kind
        if self.spec.n_actions:
            if kind not in "iu":
                raise TypeError(
                    "VecEnv.step_all: actions must be integers (the environment is discrete), got dtype "
                    f"{array.dtype}"
                )
        elif kind not in "iuf":
            raise TypeError(f"VecEnv.step_all: actions must be real numbers, got dtype {array.dtype}")
        return cnp.PyArray_FROM_OTF(array, type_num, cnp.NPY_ARRAY_CARRAY_RO | cnp.NPY_ARRAY_FORCECAST)

    cdef int read_list(self, list actions) except -1:
        """Fill `choices` from N plain ints (ten times faster than NumPy does it); 0 if there is something else."""
        cdef Py_ssize_t i
        cdef int overflow = 0
        cdef i64* choices
        cdef PyObject* item
        if self.choices is None:
            self.choices = np.empty(self.n_envs, np.int64)
        choices = <i64*>cnp.PyArray_DATA(self.choices)
        for i in range(self.n_envs):
            item = PyList_GET_ITEM(actions, i)
            if not PyLong_CheckExact(<object>item):
                return 0
            choices[i] = PyLong_AsLongLongAndOverflow(<object>item, &overflow)
            if overflow:
                raise ValueError(
                    f"VecEnv.step_all: actions must be in [0, {self.spec.n_actions}), got {actions[i]} at index {i}"
                )
        return 1

    cdef dict fresh(self, Outputs* to):
        """Return a dict of new arrays, and where they lie."""
        cdef cnp.npy_intp[2] shape
        shape[0] = self.n_envs
        shape[1] = self.spec.obs_dim
        cdef cnp.ndarray obs = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        cdef cnp.ndarray rewards = cnp.PyArray_EMPTY(1, shape, cnp.NPY_FLOAT64, 0)
        cdef cnp.ndarray terminated = cnp.PyArray_EMPTY(1, shape, cnp.NPY_BOOL, 0)
        cdef cnp.ndarray truncated = cnp.PyArray_EMPTY(1, shape, cnp.NPY_BOOL, 0)
        cdef cnp.ndarray final_obs = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        cdef cnp.ndarray episode_return = cnp.PyArray_EMPTY(1, shape, cnp.NPY_FLOAT64, 0)
        cdef cnp.ndarray episode_length = cnp.PyArray_EMPTY(1, shape, cnp.NPY_INT64, 0)
        to.obs = <f32*>cnp.PyArray_DATA(obs)
        to.rewards = <f64*>cnp.PyArray_DATA(rewards)
        to.terminated = <u8*>cnp.PyArray_DATA(terminated)
        to.truncated = <u8*>cnp.PyArray_DATA(truncated)
        to.final_obs = <f32*>cnp.PyArray_DATA(final_obs)
        to.episode_return = <f64*>cnp.PyArray_DATA(episode_return)
        to.episode_length = <i64*>cnp.PyArray_DATA(episode_length)
        return {
            "obs": obs,
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "final_obs": final_obs,
            "episode_return": episode_return,
            "episode_length": episode_length,
        }

    cdef int bind(self, dict out, Outputs* to) except -1:
        """Point `to` at the arrays of `out`; what `out` lacks stays as it is."""
        cdef Outputs unused
        cdef Py_ssize_t found = 0
        found += self.take(out, "obs", cnp.NPY_FLOAT32, 2, <void**>&to.obs)
        found += self.take(out, "rewards", cnp.NPY_FLOAT64, 1, <void**>&to.rewards)
        found += self.take(out, "terminated", cnp.NPY_BOOL, 1, <void**>&to.terminated)
        found += self.take(out, "truncated", cnp.NPY_BOOL, 1, <void**>&to.truncated)
        found += self.take(out, "final_obs", cnp.NPY_FLOAT32, 2, <void**>&to.final_obs)
        found += self.take(out, "episode_return", cnp.NPY_FLOAT64, 1, <void**>&to.episode_return)
        found += self.take(out, "episode_length", cnp.NPY_INT64, 1, <void**>&to.episode_length)
        if found != len(out):
            known = list(self.fresh(&unused))
            wrong = [key for key in out if key not in known]
            raise ValueError(f"VecEnv.step_all: out must have keys among {known}, got {wrong}")
        # The arrays of one dtype and shape are the ones that can be given twice by mistake.
        if (to.obs == to.final_obs or to.rewards == to.episode_return
                or to.terminated == to.truncated):
            raise ValueError(
                "VecEnv.step_all: out must hold a different array under every key, got one twice"
            )
        return 0

    cdef inline int take(self, dict out, str key, int type_num, int ndim, void** data) except -1:
        cdef Outputs unused
        cdef PyObject* item = PyDict_GetItemWithError(out, key)
        cdef cnp.ndarray array
        if item == NULL:
            return 0
        if isinstance(<object>item, cnp.ndarray):
            array = <cnp.ndarray>item
            if (cnp.PyArray_TYPE(array) == type_num and cnp.PyArray_ISCARRAY(array)
                    and cnp.PyArray_NDIM(array) == ndim
                    and cnp.PyArray_DIM(array, 0) == self.n_envs
                    and (ndim == 1 or cnp.PyArray_DIM(array, 1) == self.spec.obs_dim)):
                data[0] = cnp.PyArray_DATA(array)
                return 1
        model = self.fresh(&unused)[key]
        check_out(<object>item, type_num, model.dtype, model.shape, "VecEnv.step_all", f"out[{key!r}]")
        raise AssertionError("check_out refuses what take refuses")

    def stepper(self):
        """How another kernel steps these environments; valid as long as they live. Internal.

        Raises ValueError before the first `reset_all`.
        """
        self.stepped = Stepped(spec=&self.spec, envs=&self.envs)
        return self.stepper_of(&self.stepped, self.n_envs, step_through)

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of everything that the future depends on (S state components, N environments).

        ``state`` (S, N) float64 physics, ``keys`` (N,) uint64, ``episodes`` (N,) uint64 resets so far,
        ``steps`` (N,) int64 and ``returns`` (N,) float64 of the running episodes.
        """
        if self.busy:
            self.refuse("get_state")
        return self.snapshot()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue exactly from what `get_state` returned, of any VecEnv of this env_id and size.

        Environments that have begun no episode (``episodes`` 0) leave the whole in need of `reset_all`.
        With equal ``keys`` and ``episodes`` 0 ... N-1, a following `reset_all` without a seed starts the
        first N episodes of one environment, side by side.

        Raises
        ------
        ValueError
            Other keys, shapes, values that are not finite, steps outside [0, max_episode_steps).
        TypeError
            Another dtype, or no array.
        """
        if self.busy:
            self.refuse("set_state")
        self.put_back(state, "VecEnv.set_state")

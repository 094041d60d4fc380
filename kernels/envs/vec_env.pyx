"""N copies of a native environment: actions in, output arrays, state. The loop itself is in episodes.pxd."""

import numpy as np

cimport numpy as cnp
from cpython.dict cimport PyDict_Copy, PyDict_GetItemWithError
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject

from rlox.kernels.checks cimport as_array, as_index, check_out, show
from rlox.kernels.envs.base cimport flags_of, rlox_env_v1
from rlox.kernels.envs.episodes cimport (
    Envs, Outputs, advance, first_bad_action, mask_all, observe_all, start_all,
)
from rlox.kernels.envs.native_env cimport NativeEnvs
from rlox.kernels.types cimport f32, f64, i64, u8

cnp.import_array()

# A smaller batch takes less than one or two microseconds, too short for another thread to use, while
# releasing the GIL and taking it back costs 40 ns, and far more if another thread wants it.
cdef enum:
    RELEASE_GIL_FROM = 256

MASK_NAMES = ("action_mask", "final_action_mask")


def __getattr__(name):
    # Pickles of rlox 0.7 and earlier refer to `Env` and its subclasses in this module.
    from rlox.kernels.envs import env

    return getattr(env, name)


cdef struct Stepped:
    const rlox_env_v1* spec
    Envs* envs
    u8* masks  # (2, N, n_actions): after and before any reset


cdef void step_through(void* self, const void* actions, f32* obs, f64* rewards, u8* terminated, u8* truncated,
                       f32* final_obs, f64* episode_return, i64* episode_length) noexcept nogil:
    cdef Stepped* stepped = <Stepped*>self
    cdef Outputs out = Outputs(obs=obs, rewards=rewards, terminated=terminated, truncated=truncated,
                               final_obs=final_obs, episode_return=episode_return, episode_length=episode_length,
                               central=NULL, final_central=NULL, mask=stepped.masks,
                               final_mask=stepped.masks + stepped.envs.n * flags_of(stepped.spec))
    advance(stepped.spec, stepped.envs, actions, &out)


cdef class VecEnv(NativeEnvs):
    """N copies of one native environment, stepped together. Each restarts as soon as its episode ends.

    Every environment has its own 64-bit key, derived from (seed, index), and a count of its resets. The
    start of episode k of environment i is a pure function of (key_i, k): it does not depend on the other
    environments, on N, or on earlier episodes.

    Parameters
    ----------
    n
        Number of environments, at least 1.
    seed
        0 <= seed < 2**64.
    env_id
        One of `native_ids()`, or a PyCapsule named ``rlox.env.v1`` with an external environment.

    Attributes
    ----------
    n_envs, env_id, seed
        As given (`reset_all` with a seed changes `seed`).
    num_envs
        `n_envs` under gymnasium's name, which can also be called.
    obs_dim
        D, the length of an observation.
    discrete, n_actions, act_dim
        For discrete actions (one integer per environment): True, the number of actions, and 1. For continuous
        actions: False, None, and the length of an action.
    act_low, act_high
        (act_dim,) float32 bounds of continuous actions; None for discrete actions. The dynamics clip actions outside
        the bounds.
    max_episode_steps
        The time limit; None if there is none.

    Raises
    ------
    ValueError
        If `n` is below 1, the seed is out of range, `env_id` is not native, or a capsule breaks a rule of
        ``rlox_native.h``.
    TypeError
        If `n` or `seed` is not an integer, or `env_id` is neither a str nor a capsule.
    """

    cdef cnp.ndarray masks  # (2, N, n_actions) bool, legal actions in obs and final_obs; (2, N, 0) without masks
    cdef tuple scratch   # arrays for results that the caller does not want
    cdef Outputs sink
    cdef Stepped stepped
    cdef dict views      # the arrays that copy=False returns, and pointers to them
    cdef Outputs viewed
    cdef cnp.ndarray choices  # (N,) int64, the actions of a list
    cdef bint busy       # whether a step without the GIL is in progress

    def __cinit__(self, n: int, seed: int = 0, env_id="CartPole-v1") -> None:
        count_ = as_index(n, "VecEnv", "n")
        if count_ < 1:
            raise ValueError(f"VecEnv: n must be at least 1, got {count_}")
        self.choose(env_id, "VecEnv")
        if count_ * max(self.spec.state_size, self.spec.obs_dim, self.spec.act_dim, flags_of(&self.spec)) >= 1 << 59:
            raise ValueError(f"VecEnv: n must be such that the arrays fit into memory, got {count_}")
        self.hold(count_, (count_,), seed, "VecEnv")
        cdef cnp.ndarray obs = np.empty((count_, self.spec.obs_dim), np.float32)
        cdef cnp.ndarray rewards = np.empty(count_)
        cdef cnp.ndarray flags = np.empty((2, count_), np.bool_)
        self.masks = np.ones((2, count_, flags_of(&self.spec)), np.bool_)
        self.scratch = (obs, rewards, flags)
        self.sink = Outputs(
            obs=<f32*>cnp.PyArray_DATA(obs),
            rewards=<f64*>cnp.PyArray_DATA(rewards),
            terminated=<u8*>cnp.PyArray_DATA(flags),
            truncated=<u8*>cnp.PyArray_DATA(flags) + self.n_envs,
            final_obs=NULL, episode_return=NULL, episode_length=NULL, central=NULL, final_central=NULL,
            mask=self.mask_data(), final_mask=self.mask_data() + self.n_envs * flags_of(&self.spec),
        )

    cdef u8* mask_data(self):
        return <u8*>cnp.PyArray_DATA(self.masks)

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
            Gives the environments new keys and restarts their episode counts at 0. None keeps both and starts the next
            episodes of the same sequences.

        Returns
        -------
        obs
            (N, D) float32, the first observations.

        Raises
        ------
        ValueError, TypeError
            If the seed is out of range or not an integer.
        """
        cdef cnp.ndarray obs = np.empty((self.n_envs, self.spec.obs_dim), np.float32)
        if self.busy:
            self.refuse("reset_all")
        if seed is not None:
            self.rekey(seed, "VecEnv.reset_all")
        start_all(&self.spec, &self.envs, <f32*>cnp.PyArray_DATA(obs))
        self.ready = True
        self.read_masks("VecEnv.reset_all")
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

    def action_masks(self) -> np.ndarray | None:
        """Return the legal actions of the current observations, (N, n_actions) bool; None without masks.

        Raises ValueError before the first `reset_all`.
        """
        if not self.masked:
            return None
        self.require_ready("action_masks")
        return self.masks[0].copy()

    cdef int read_masks(self, str where) except -1:
        """Compute the masks of the current states again, if there are masks."""
        if not flags_of(&self.spec):
            return 0
        mask_all(&self.spec, &self.envs, self.mask_data())
        self.masks[1] = self.masks[0]
        return self.require_legal(where)

    cdef int require_legal(self, str where) except -1:
        for name, rows in (("the current state", self.masks[0]), ("the state that the step led to", self.masks[1])):
            if not rows.any(1).all():
                i = int(rows.any(1).argmin())
                raise ValueError(
                    f"{where}: {self.env_id}: mask_n must allow at least one action, got none in {name} (environment {i} "
                    f"at step {self.steps[i]} of its episode)"
                )
        return 0

    cdef int give_masks(self, dict out) except -1:
        """Copy the masks of the last step to `out`, where it has arrays for them."""
        self.require_legal("VecEnv.step_all")
        for k, name in enumerate(MASK_NAMES):
            if name in out:
                out[name][:] = self.masks[k]
        return 0

    def step_all(self, actions, dict out=None, bint copy=True) -> dict[str, np.ndarray]:
        """Take one step in every environment. Those whose episode ends start the next one at once.

        Without a `reset_all` before it, the first call starts the first episodes.

        Parameters
        ----------
        actions
            Discrete: N integers in [0, n_actions), as a list or an array of any integer dtype (int64 is
            the fast one). Continuous: (N, A) numbers, converted to float32 (the fast dtype); also (N,) for A = 1.
        out
            Dict with any of the keys below and arrays to write to: C-contiguous, of exactly the dtype
            and shape below, and sharing no memory. Results for absent keys are not written.
        copy
            False returns arrays that the object reuses in every call: **the next step overwrites them**, so copy what
            must last. This is faster, above all for many environments. Not allowed together with `out`.

        Returns
        -------
        dict
            `out` itself, or a new dict of new arrays (of reused arrays with ``copy=False``):

            - ``obs`` (N, D) float32: the observations to act on next; after the end of an episode, the first
              observation of the next one;
            - ``rewards`` (N,) float64;
            - ``terminated``, ``truncated`` (N,) bool: ended by the task, or by the time limit (both are set if they
              coincide);
            - ``final_obs`` (N, D) float32: the true next observation, before any reset;
            - ``episode_return`` (N,) float64, ``episode_length`` (N,) int64: totals of the episode that this step
              belongs to, including this step;
            - with masks, ``action_mask`` and ``final_action_mask`` (N, n_actions) bool: the legal actions in ``obs`` and
              in ``final_obs``, all of them after a termination.

        Raises
        ------
        ValueError
            For a wrong number of actions, an action out of range or NaN, or an `out` with another key, shape or layout
            or together with ``copy=False``. No environment is stepped then.
        TypeError
            For actions of another kind, or an `out` array of another dtype.
        RuntimeError
            If another thread is stepping these environments.
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
                raise ValueError("VecEnv.step_all: copy must be True if out is given, got False")
            outputs = self.sink
            self.bind(out, &outputs)
        elif copy:
            out = self.fresh(&outputs)
        else:
            if self.views is None:
                self.views = self.fresh(&self.viewed)
                # Referenced here too, so that deleting or replacing entries of the dict does not free the memory.
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
        if flags_of(&self.spec):
            self.give_masks(out)
        return out

    cdef int refuse(self, str method) except -1:
        raise RuntimeError(
            f"VecEnv.{method}: only one thread may use these environments at a time; create a VecEnv per thread"
        )

    cdef cnp.ndarray as_actions(self, object actions):
        """Return `actions` as N contiguous int64 or N * A float32 numbers; `actions` itself if it already is that."""
        cdef int type_num = cnp.NPY_INT64 if self.spec.n_actions else cnp.NPY_FLOAT32
        cdef cnp.ndarray array
        if isinstance(actions, cnp.ndarray):
            array = actions
        elif (PyList_CheckExact(actions) and self.spec.n_actions and PyList_GET_SIZE(actions) == self.n_envs
                and self.read_list(actions)):
            return self.choices
        else:
            array = as_array(actions, "VecEnv.step_all", "actions")
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
        """Fill `choices` from N plain ints (ten times faster than NumPy). Return 0 if there is anything else."""
        cdef Py_ssize_t i = 0
        cdef i64* choices
        cdef PyObject* item
        if self.choices is None:
            self.choices = np.empty(self.n_envs, np.int64)
        choices = <i64*>cnp.PyArray_DATA(self.choices)
        try:
            for i in range(self.n_envs):
                item = PyList_GET_ITEM(actions, i)
                if not PyLong_CheckExact(<object>item):
                    return 0
                choices[i] = <object>item
        except OverflowError:
            raise ValueError(
                f"VecEnv.step_all: actions must be in [0, {self.spec.n_actions}), got {show(actions[i])} at index {i}"
            ) from None
        return 1

    cdef dict fresh(self, Outputs* to):
        """Return a dict of new arrays, and point `to` at them."""
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
        to.mask = self.sink.mask
        to.final_mask = self.sink.final_mask
        cdef dict results = {
            "obs": obs,
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "final_obs": final_obs,
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        if flags_of(&self.spec):
            for name in MASK_NAMES:
                results[name] = np.empty_like(self.masks[0])
        return results

    cdef int bind(self, dict out, Outputs* to) except -1:
        """Point `to` at the arrays of `out`; pointers for absent keys stay unchanged."""
        cdef Outputs unused
        cdef Py_ssize_t found = 0
        found += self.take(out, "obs", cnp.NPY_FLOAT32, 2, <void**>&to.obs)
        found += self.take(out, "rewards", cnp.NPY_FLOAT64, 1, <void**>&to.rewards)
        found += self.take(out, "terminated", cnp.NPY_BOOL, 1, <void**>&to.terminated)
        found += self.take(out, "truncated", cnp.NPY_BOOL, 1, <void**>&to.truncated)
        found += self.take(out, "final_obs", cnp.NPY_FLOAT32, 2, <void**>&to.final_obs)
        found += self.take(out, "episode_return", cnp.NPY_FLOAT64, 1, <void**>&to.episode_return)
        found += self.take(out, "episode_length", cnp.NPY_INT64, 1, <void**>&to.episode_length)
        if flags_of(&self.spec):
            for name in MASK_NAMES:
                if name in out:
                    check_out(out[name], cnp.NPY_BOOL, "bool", (<object>self.masks[0]).shape, "VecEnv.step_all",
                              f"out[{name!r}]")
                    found += 1
        if found != len(out):
            known = list(self.fresh(&unused))
            wrong = [key for key in out if key not in known]
            raise ValueError(f"VecEnv.step_all: out must have keys among {known}, got {wrong}")
        # Only arrays of the same dtype and shape can be passed twice by mistake.
        if (to.obs == to.final_obs or to.rewards == to.episode_return
                or to.terminated == to.truncated):
            raise ValueError(
                "VecEnv.step_all: out must contain a different array under every key, got one twice"
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
        raise AssertionError("check_out must raise for the same arrays as take")

    def stepper(self):
        """Return a capsule with which another kernel steps these environments, valid as long as they live. Internal.

        Raises ValueError before the first `reset_all`.
        """
        self.stepped = Stepped(spec=&self.spec, envs=&self.envs, masks=self.mask_data())
        return self.stepper_of(&self.stepped, self.n_envs, step_through)

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of the complete state (S state components, N environments).

        ``state`` (S, N) float64 physics, ``keys`` (N,) uint64, ``episodes`` (N,) uint64 resets so far,
        ``steps`` (N,) int64 and ``returns`` (N,) float64 of the running episodes.
        """
        if self.busy:
            self.refuse("get_state")
        return self.snapshot()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore exactly a state from `get_state` of any VecEnv of this env_id and size.

        If an environment has not started an episode (``episodes`` 0), `reset_all` is required first.
        With equal ``keys`` and ``episodes`` 0 ... N-1, a following `reset_all` without a seed starts the
        first N episodes of one environment in parallel.

        Raises
        ------
        ValueError
            For other keys or shapes, values that are not finite, or steps outside [0, max_episode_steps).
        TypeError
            If a value is not an array or has another dtype.
        """
        if self.busy:
            self.refuse("set_state")
        self.put_back(state, "VecEnv.set_state")
        if self.ready:
            self.read_masks("VecEnv.set_state")

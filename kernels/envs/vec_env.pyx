"""The loop that all native environments share: auto-reset, time limit, statistics and output arrays."""

import secrets

import numpy as np

cimport numpy as cnp
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.string cimport memcpy

from kernels.checks cimport as_index, as_seed, check_out
from kernels.envs cimport cartpole, pendulum
from kernels.envs.base cimport EnvSpec
from kernels.philox cimport derive_key
from kernels.types cimport cf64_r, f32, f64, f64_r, i64, i64_r, u8, u8_r, u64

cnp.import_array()

# A new environment is one .pxd file and one line here (and one more of N_SPECS).
cdef enum:
    N_SPECS = 2
cdef EnvSpec[N_SPECS] SPECS
SPECS[0] = cartpole.spec()
SPECS[1] = pendulum.spec()

NATIVE_ENVS: tuple[str, ...] = tuple([SPECS[k].env_id.decode() for k in range(N_SPECS)])

# A smaller batch takes less than a microsecond or two: too short for another thread to use, while
# releasing the GIL and taking it back costs 40 ns, and far more when another thread wants it.
cdef Py_ssize_t RELEASE_GIL_FROM = 256


cdef struct Outputs:
    f32* obs
    f64* rewards
    u8* terminated
    u8* truncated
    f32* final_obs       # the last three may be NULL: not wanted
    f64* episode_return
    i64* episode_length


cdef struct Envs:
    Py_ssize_t n
    f64* state
    u64* keys
    u64* episodes
    i64* steps
    f64* returns


cdef inline void start_episode(const EnvSpec* spec, Envs* envs, Py_ssize_t i, f32* obs) noexcept nogil:
    spec.reset(envs.state, envs.n, i, envs.keys[i], envs.episodes[i])
    envs.episodes[i] += 1
    envs.steps[i] = 0
    envs.returns[i] = 0.0
    spec.observe(envs.state, envs.n, i, obs + i * spec.obs_dim)


cdef inline int count(Py_ssize_t n, i64 limit, cf64_r rewards, u8_r terminated, u8_r truncated,
                      i64_r steps, f64_r returns) noexcept nogil:
    """Advance the statistics and apply the time limit; nonzero if an episode ended."""
    cdef Py_ssize_t i
    cdef u8 ended = 0
    for i in range(n):
        returns[i] += rewards[i]
    for i in range(n):
        steps[i] += 1
        truncated[i] = steps[i] >= limit
    for i in range(n):
        ended |= terminated[i] | truncated[i]
    return ended


cdef void advance(const EnvSpec* spec, Envs* envs, const void* actions, Outputs* out) noexcept nogil:
    """One step of every environment, with same-step auto-reset."""
    cdef Py_ssize_t n = envs.n
    cdef Py_ssize_t i
    cdef int ended
    spec.step(n, envs.state, actions, out.obs, out.rewards, out.terminated)
    ended = count(n, spec.max_episode_steps, out.rewards, out.terminated, out.truncated, envs.steps,
                  envs.returns)
    if out.final_obs != NULL:
        memcpy(out.final_obs, out.obs, n * spec.obs_dim * sizeof(f32))
    if out.episode_return != NULL:
        memcpy(out.episode_return, envs.returns, n * sizeof(f64))
    if out.episode_length != NULL:
        memcpy(out.episode_length, envs.steps, n * sizeof(i64))
    if ended:
        for i in range(n):
            if out.terminated[i] | out.truncated[i]:
                start_episode(spec, envs, i, out.obs)


cdef Py_ssize_t first_bad_action(const EnvSpec* spec, const void* actions, Py_ssize_t n) noexcept nogil:
    """Return the index of the first action that is out of range or NaN, or -1."""
    cdef const i64* choices = <const i64*>actions
    cdef const f32* values = <const f32*>actions
    cdef Py_ssize_t i
    cdef int bad = 0
    if spec.n_actions:
        for i in range(n):
            bad |= <u64>choices[i] >= <u64>spec.n_actions  # a negative one is huge when unsigned
    else:
        for i in range(n):
            bad |= values[i] != values[i]
    if not bad:
        return -1
    for i in range(n):
        if (<u64>choices[i] >= <u64>spec.n_actions) if spec.n_actions else (values[i] != values[i]):
            return i
    return -1


cdef inline const EnvSpec* find_spec(object env_id) except NULL:
    if env_id not in NATIVE_ENVS:
        raise ValueError(
            f"VecEnv: env_id must be a native environment, got {env_id!r}; try one of "
            f"{', '.join(NATIVE_ENVS)}, or rlox.GymVecEnv, which serves every other gymnasium id"
        )
    return &SPECS[NATIVE_ENVS.index(env_id)]


cdef class VecEnv:
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
        One of `NATIVE_ENVS`.

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
        The time limit.

    Raises
    ------
    ValueError
        `n` below 1, a seed out of range, an `env_id` that is not native.
    TypeError
        `n` or `seed` is no integer.
    """

    cdef const EnvSpec* spec
    cdef Envs envs
    cdef bint ready
    cdef readonly Py_ssize_t n_envs
    cdef readonly u64 seed
    # The arrays own the memory that `envs` points into; `scratch` takes what a caller does not ask for.
    cdef cnp.ndarray state, keys, episodes, steps, returns
    cdef tuple scratch
    cdef Outputs sink

    def __cinit__(self, n: int, seed: int = 0, env_id: str = "CartPole-v1") -> None:
        count_ = as_index(n, "VecEnv", "n")
        if count_ < 1:
            raise ValueError(f"VecEnv: n must be at least 1, got {count_}")
        self.spec = find_spec(env_id)
        self.n_envs = count_
        self.state = np.zeros((self.spec.state_size, count_))
        self.keys = np.empty(count_, np.uint64)
        self.episodes = np.zeros(count_, np.uint64)
        self.steps = np.zeros(count_, np.int64)
        self.returns = np.zeros(count_)
        self.envs = Envs(
            n=self.n_envs,
            state=<f64*>cnp.PyArray_DATA(self.state),
            keys=<u64*>cnp.PyArray_DATA(self.keys),
            episodes=<u64*>cnp.PyArray_DATA(self.episodes),
            steps=<i64*>cnp.PyArray_DATA(self.steps),
            returns=<f64*>cnp.PyArray_DATA(self.returns),
        )
        cdef cnp.ndarray obs = np.empty((count_, self.spec.obs_dim), np.float32)
        cdef cnp.ndarray rewards = np.empty(count_)
        cdef cnp.ndarray flags = np.empty((2, count_), np.bool_)
        self.scratch = (obs, rewards, flags)
        self.sink = Outputs(
            obs=<f32*>cnp.PyArray_DATA(obs),
            rewards=<f64*>cnp.PyArray_DATA(rewards),
            terminated=<u8*>cnp.PyArray_DATA(flags),
            truncated=<u8*>cnp.PyArray_DATA(flags) + self.n_envs,
            final_obs=NULL, episode_return=NULL, episode_length=NULL,
        )
        self.rekey(seed, "VecEnv")

    cdef int rekey(self, object seed, str where) except -1:
        cdef Py_ssize_t i
        self.seed = as_seed(seed, where, "seed")
        for i in range(self.n_envs):
            self.envs.keys[i] = derive_key(self.seed, i)
            self.envs.episodes[i] = 0
        return 0

    def __len__(self) -> int:
        return self.n_envs

    def __repr__(self) -> str:
        return f"VecEnv(n={self.n_envs}, seed={self.seed}, env_id={self.env_id!r})"

    def __reduce__(self):
        return VecEnv, (self.n_envs, self.seed, self.env_id), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    @property
    def env_id(self) -> str:
        return self.spec.env_id.decode()

    @property
    def obs_dim(self) -> int:
        return self.spec.obs_dim

    @property
    def discrete(self) -> bool:
        return self.spec.n_actions > 0

    @property
    def n_actions(self) -> int | None:
        return self.spec.n_actions or None

    @property
    def act_dim(self) -> int:
        return 1

    @property
    def act_low(self) -> np.ndarray | None:
        return None if self.discrete else np.array([-self.spec.act_high], np.float32)

    @property
    def act_high(self) -> np.ndarray | None:
        return None if self.discrete else np.array([self.spec.act_high], np.float32)

    @property
    def max_episode_steps(self) -> int:
        return self.spec.max_episode_steps

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
        cdef Py_ssize_t i
        cdef cnp.ndarray obs = np.empty((self.n_envs, self.spec.obs_dim), np.float32)
        if seed is not None:
            self.rekey(seed, "VecEnv.reset_all")
        for i in range(self.n_envs):
            start_episode(self.spec, &self.envs, i, <f32*>cnp.PyArray_DATA(obs))
        self.ready = True
        return obs

    def observe(self) -> np.ndarray:
        """Return the current observations, (N, D) float32, recomputed from the state.

        Raises ValueError before the first `reset_all`.
        """
        cdef Py_ssize_t i
        cdef cnp.ndarray obs = np.empty((self.n_envs, self.spec.obs_dim), np.float32)
        cdef f32* data = <f32*>cnp.PyArray_DATA(obs)
        if not self.ready:
            raise ValueError("VecEnv.observe: the environments must be reset first; call reset_all()")
        for i in range(self.n_envs):
            self.spec.observe(self.envs.state, self.n_envs, i, data + i * self.spec.obs_dim)
        return obs

    def step_all(self, actions, dict out=None) -> dict[str, np.ndarray]:
        """Take one step in every environment; those that end start their next episode at once.

        Without a `reset_all` before it, the first call starts the first episodes by itself.

        Parameters
        ----------
        actions
            Discrete: N integers in [0, n_actions), as a list or an array of any integer dtype (int64 is
            the fast one). Continuous: N numbers, (N,) or (N, 1), taken as float32 (the fast dtype).
        out
            Dict with any of the keys below and arrays to write into: C-contiguous, of exactly the dtype
            and shape below, sharing no memory. Keys that are absent are not produced.

        Returns
        -------
        dict
            `out` itself, or a fresh dict of fresh arrays:

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
            `out` with another key, shape or layout. Nothing has moved then.
        TypeError
            Actions of another kind; an `out` array of another dtype.
        """
        cdef cnp.ndarray held
        cdef Outputs outputs
        cdef Py_ssize_t bad
        held = self.as_actions(actions)
        cdef const void* action_data = cnp.PyArray_DATA(held)
        bad = first_bad_action(self.spec, action_data, self.n_envs)
        if bad >= 0:
            raise ValueError(
                f"VecEnv.step_all: actions must be "
                + (f"in [0, {self.spec.n_actions})" if self.spec.n_actions else "numbers, not NaN")
                + f", got {held.flat[bad]} at index {bad}"
            )
        if out is None:
            out = self.fresh()
        outputs = self.sink
        self.bind(out, &outputs)
        if not self.ready:
            self.reset_all()
        if self.n_envs < RELEASE_GIL_FROM:
            advance(self.spec, &self.envs, action_data, &outputs)
        else:
            with nogil:
                advance(self.spec, &self.envs, action_data, &outputs)
        return out

    cdef cnp.ndarray as_actions(self, object actions):
        """Return `actions` as N contiguous int64 or float32 numbers, itself where it is that already."""
        cdef int type_num = cnp.NPY_INT64 if self.spec.n_actions else cnp.NPY_FLOAT32
        cdef cnp.ndarray array
        if isinstance(actions, cnp.ndarray):
            array = actions
        else:
            array = np.asarray(actions)
        cdef int ndim = cnp.PyArray_NDIM(array)
        cdef bint column = ndim == 2 and not self.spec.n_actions and cnp.PyArray_DIM(array, 1) == 1
        if not (ndim == 1 or column) or cnp.PyArray_DIM(array, 0) != self.n_envs:
            also = "" if self.spec.n_actions else f" or ({self.n_envs}, 1)"
            raise ValueError(
                f"VecEnv.step_all: actions must have shape ({self.n_envs},){also}, one per environment, "
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
            return np.ascontiguousarray(array, np.int64)
        if kind not in "iuf":
            raise TypeError(f"VecEnv.step_all: actions must be real numbers, got dtype {array.dtype}")
        return np.ascontiguousarray(array, np.float32)

    cdef dict fresh(self):
        cdef cnp.npy_intp[2] shape
        shape[0] = self.n_envs
        shape[1] = self.spec.obs_dim
        return {
            "obs": cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0),
            "rewards": cnp.PyArray_EMPTY(1, shape, cnp.NPY_FLOAT64, 0),
            "terminated": cnp.PyArray_EMPTY(1, shape, cnp.NPY_BOOL, 0),
            "truncated": cnp.PyArray_EMPTY(1, shape, cnp.NPY_BOOL, 0),
            "final_obs": cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0),
            "episode_return": cnp.PyArray_EMPTY(1, shape, cnp.NPY_FLOAT64, 0),
            "episode_length": cnp.PyArray_EMPTY(1, shape, cnp.NPY_INT64, 0),
        }

    cdef int bind(self, dict out, Outputs* to) except -1:
        """Point `to` at the arrays of `out`; what `out` lacks stays as it is."""
        cdef Py_ssize_t found = 0
        found += self.take(out, "obs", cnp.NPY_FLOAT32, 2, <void**>&to.obs)
        found += self.take(out, "rewards", cnp.NPY_FLOAT64, 1, <void**>&to.rewards)
        found += self.take(out, "terminated", cnp.NPY_BOOL, 1, <void**>&to.terminated)
        found += self.take(out, "truncated", cnp.NPY_BOOL, 1, <void**>&to.truncated)
        found += self.take(out, "final_obs", cnp.NPY_FLOAT32, 2, <void**>&to.final_obs)
        found += self.take(out, "episode_return", cnp.NPY_FLOAT64, 1, <void**>&to.episode_return)
        found += self.take(out, "episode_length", cnp.NPY_INT64, 1, <void**>&to.episode_length)
        if found != len(out):
            known = list(self.fresh())
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
        model = self.fresh()[key]
        check_out(<object>item, type_num, model.dtype, model.shape, "VecEnv.step_all", f"out[{key!r}]")
        raise AssertionError("check_out refuses what take refuses")

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of everything that the future depends on (S state components, N environments).

        ``state`` (S, N) float64 physics, ``keys`` (N,) uint64, ``episodes`` (N,) uint64 resets so far,
        ``steps`` (N,) int64 and ``returns`` (N,) float64 of the running episodes.
        """
        return {
            "state": self.state.copy(),
            "keys": self.keys.copy(),
            "episodes": self.episodes.copy(),
            "steps": self.steps.copy(),
            "returns": self.returns.copy(),
        }

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
        where = "VecEnv.set_state"
        mine = {"state": self.state, "keys": self.keys, "episodes": self.episodes,
                "steps": self.steps, "returns": self.returns}
        if set(state) != set(mine):
            raise ValueError(
                f"{where}: state must have the keys {sorted(mine)}, got {sorted(state)}; pass what "
                "get_state returned"
            )
        for name, array in mine.items():
            given = state[name]
            if not isinstance(given, np.ndarray) or given.dtype != array.dtype:
                got = getattr(given, "dtype", type(given).__name__)
                raise TypeError(f"{where}: {name} must be an array of {array.dtype}, got {got}")
            if given.shape != array.shape:
                raise ValueError(f"{where}: {name} must have shape {array.shape}, got {given.shape}")
            if not np.isfinite(given).all():
                raise ValueError(f"{where}: {name} must be finite, got {given[~np.isfinite(given)][0]}")
        steps = state["steps"]
        wrong = (steps < 0) | (steps >= self.max_episode_steps)
        if wrong.any():
            raise ValueError(
                f"{where}: steps must lie in [0, {self.max_episode_steps}), got {steps[wrong][0]}"
            )
        for name, array in mine.items():
            array[...] = state[name]
        self.ready = bool(self.episodes.all())


cdef class CartPole:
    """One CartPole-v1 without auto-reset, for reading and trying things out.

    ``CartPole(seed=s)`` plays the same episodes as environment 0 of ``VecEnv(1, seed=s)``.

    Parameters
    ----------
    seed
        0 <= seed < 2**64; None takes one from the operating system.
    """

    cdef f64[4] state
    cdef Envs env
    cdef u64 key, episode
    cdef i64 length
    cdef f64 total
    cdef bint running

    def __cinit__(self, seed: int | None = None) -> None:
        self.env.n = 1
        self.env.state = &self.state[0]
        self.env.keys = &self.key
        self.env.episodes = &self.episode
        self.env.steps = &self.length
        self.env.returns = &self.total
        self.rekey(seed if seed is not None else secrets.randbits(64), "CartPole")

    cdef int rekey(self, object seed, str where) except -1:
        self.key = derive_key(as_seed(seed, where, "seed"), 0)
        self.episode = 0
        return 0

    def __repr__(self) -> str:
        return f"CartPole(episode={self.episode}, step={self.length})"

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Start the next episode, or with a seed the first one of that seed; return (4,) float32.

        Raises ValueError for a seed outside [0, 2**64).
        """
        cdef cnp.ndarray obs = np.empty(4, np.float32)
        if seed is not None:
            self.rekey(seed, "CartPole.reset")
        start_episode(&SPECS[0], &self.env, 0, <f32*>cnp.PyArray_DATA(obs))
        self.running = True
        return obs

    def step(self, action: int) -> dict:
        """Push the cart left (0) or right (1).

        Returns
        -------
        dict
            ``obs`` (4,) float32, ``reward`` float, ``terminated`` and ``truncated`` bool.

        Raises
        ------
        ValueError
            No episode is running, or the action is neither 0 nor 1.
        TypeError
            The action is no integer.
        """
        if not self.running:
            raise ValueError("CartPole.step: an episode must be running; call reset() first")
        cdef i64 choice
        value = as_index(action, "CartPole.step", "action")
        if value != 0 and value != 1:
            raise ValueError(f"CartPole.step: action must be 0 or 1, got {value}")
        choice = value
        cdef cnp.ndarray obs = np.empty(4, np.float32)
        cdef f64 reward
        cdef u8 terminated, truncated
        SPECS[0].step(1, &self.state[0], &choice, <f32*>cnp.PyArray_DATA(obs), &reward, &terminated)
        self.running = not count(1, SPECS[0].max_episode_steps, &reward, &terminated, &truncated,
                                 &self.length, &self.total)
        return {
            "obs": obs,
            "reward": reward,
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }

    def get_state(self) -> dict:
        """Return everything that the future depends on, as plain Python numbers."""
        return {
            "state": [self.state[0], self.state[1], self.state[2], self.state[3]],
            "key": self.key,
            "episode": self.episode,
            "step": self.length,
            "return": self.total,
            "running": bool(self.running),
        }

    def set_state(self, state: dict) -> None:
        """Continue exactly from what `get_state` returned; raises ValueError for other keys or values."""
        where = "CartPole.set_state"
        if set(state) != set(self.get_state()):
            raise ValueError(
                f"{where}: state must have the keys {sorted(self.get_state())}, got {sorted(state)}; "
                "pass what get_state returned"
            )
        physics = np.asarray(state["state"], np.float64)
        if physics.shape != (4,) or not np.isfinite(physics).all():
            raise ValueError(f"{where}: state must be 4 finite numbers, got {state['state']}")
        key = as_seed(state["key"], where, "key")
        episode = as_seed(state["episode"], where, "episode")
        step = as_index(state["step"], where, "step")
        if not 0 <= step <= SPECS[0].max_episode_steps:
            raise ValueError(
                f"{where}: step must lie in [0, {SPECS[0].max_episode_steps}], got {step}"
            )
        total = float(state["return"])
        self.state = physics.tolist()
        self.key = key
        self.episode = episode
        self.length = step
        self.total = total
        self.running = bool(state["running"])

"""The loop that all native environments share: auto-reset, time limit, statistics and output arrays."""

import secrets

import numpy as np

cimport numpy as cnp
from cpython.dict cimport PyDict_Copy, PyDict_GetItemWithError
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.pycapsule cimport (
    PyCapsule_New,
    PyCapsule_CheckExact, PyCapsule_GetName, PyCapsule_GetPointer, PyCapsule_IsValid,
)
from libc.stdint cimport INT64_MAX
from libc.string cimport memcpy

from rlox.kernels.checks cimport as_index, as_seed, check_out
from rlox.kernels.envs.acrobot cimport spec as acrobot
from rlox.kernels.envs.base cimport RLOX_ENV_CAPSULE, rlox_batch_v1, rlox_env_v1
from rlox.kernels.envs.cartpole cimport spec as cartpole
from rlox.kernels.envs.gridworld cimport Params as Grid, spec as gridworld
from rlox.kernels.envs.mountain_car cimport spec as mountain_car
from rlox.kernels.envs.mountain_car_continuous cimport spec as mountain_car_continuous
from rlox.kernels.envs.pendulum cimport spec as pendulum
from rlox.kernels.envs.stepper cimport RLOX_STEPPER_CAPSULE, rlox_stepper
from rlox.kernels.philox cimport derive_key
from rlox.kernels.types cimport cf64_r, f32, f64, f64_r, i64, i64_r, u8, u8_r, u64

cnp.import_array()

# A new environment is one .pxd file and one line here (and one more of N_SPECS).
cdef enum:
    N_SPECS = 6
cdef Grid GRID_5X5 = Grid(rows=5, columns=5)
cdef rlox_env_v1[N_SPECS] SPECS
SPECS[0] = cartpole()
SPECS[1] = pendulum()
SPECS[2] = mountain_car()
SPECS[3] = mountain_car_continuous()
SPECS[4] = acrobot()
SPECS[5] = gridworld(&GRID_5X5)

NATIVE_ENVS: tuple[str, ...] = tuple([SPECS[k].env_id.decode() for k in range(N_SPECS)])

REGISTERED = {}  # env_id -> capsule, of environments from outside

# A smaller batch takes less than a microsecond or two: too short for another thread to use, while
# releasing the GIL and taking it back costs 40 ns, and far more when another thread wants it.
cdef enum:
    RELEASE_GIL_FROM = 256

# Environments are stepped in blocks, each with its own (S, block) state, so that the passes over a block (step,
# statistics, copies, resets) find it in the first-level cache.
cdef enum:
    BLOCK = 256


def native_ids() -> tuple[str, ...]:
    """Return every id that `VecEnv` takes: `NATIVE_ENVS`, then those that `register_native` added."""
    return NATIVE_ENVS + tuple(REGISTERED)


def register_native(capsule) -> str:
    """Let an environment from outside be known by its id, as the built-in ones are.

    Parameters
    ----------
    capsule
        A PyCapsule named ``rlox.env.v1`` that holds the address of an ``rlox_env_v1`` (see ``rlox_native.h``).
        It is kept for the life of the process.

    Returns
    -------
    env_id
        The id inside the capsule. Registering the same environment again changes nothing.

    Raises
    ------
    TypeError
        `capsule` is no PyCapsule.
    ValueError
        A capsule of another name, a field that breaks a rule of ``rlox_native.h``, or an id that another
        environment has.
    """
    env_id = env_of(capsule, "register_native").env_id.decode()
    REGISTERED.setdefault(env_id, capsule)
    return env_id


cdef const rlox_env_v1* env_of(object capsule, str where) except NULL:
    """Return the struct in `capsule` once every field has been found in order."""
    if not PyCapsule_CheckExact(capsule):
        raise TypeError(
            f"{where}: capsule must be a PyCapsule named {RLOX_ENV_CAPSULE.decode()!r}, got "
            f"{type(capsule).__name__}"
        )
    cdef const char* name = PyCapsule_GetName(capsule)
    if not PyCapsule_IsValid(capsule, RLOX_ENV_CAPSULE):
        got = "one without a name" if name == NULL else repr(name.decode(errors="replace"))
        raise ValueError(f"{where}: capsule must be named {RLOX_ENV_CAPSULE.decode()!r}, got {got}")
    cdef const rlox_env_v1* env = <const rlox_env_v1*>PyCapsule_GetPointer(capsule, RLOX_ENV_CAPSULE)
    if env.struct_size < sizeof(rlox_env_v1):
        raise ValueError(
            f"{where}: struct_size must be at least {sizeof(rlox_env_v1)}, got {env.struct_size}; set it to "
            "sizeof(rlox_env_v1) and build against this rlox's rlox_native.h"
        )
    if env.flags != 0:
        raise ValueError(f"{where}: flags must be 0, got {env.flags}")
    if env.env_id == NULL or env.env_id[0] == 0:
        raise ValueError(f"{where}: env_id must be a name, got {'NULL' if env.env_id == NULL else 'an empty one'}")
    try:
        env_id = env.env_id.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{where}: env_id must be UTF-8, got {bytes(env.env_id)!r}") from e
    where = f"{where}: {env_id}"
    for field, value, least in (("state_size", env.state_size, 1), ("obs_dim", env.obs_dim, 1),
                                ("act_dim", env.act_dim, 1), ("n_actions", env.n_actions, 0),
                                ("max_episode_steps", env.max_episode_steps, 0)):
        if not least <= value <= 1 << 40:
            raise ValueError(f"{where}: {field} must be at least {least} and at most 2**40, got {value}")
    cdef bint bounds = env.act_low != NULL and env.act_high != NULL
    cdef i64 k
    if env.n_actions:
        if env.act_dim != 1:
            raise ValueError(f"{where}: act_dim must be 1 where n_actions is not 0, got {env.act_dim}")
        if env.act_low != NULL or env.act_high != NULL:
            raise ValueError(f"{where}: act_low and act_high must be NULL where n_actions is not 0, got bounds")
    elif not bounds:
        raise ValueError(f"{where}: act_low and act_high must hold bounds where n_actions is 0, got NULL")
    else:
        for k in range(env.act_dim):
            if not env.act_low[k] < env.act_high[k]:
                raise ValueError(
                    f"{where}: act_low must be below act_high, got {env.act_low[k]} and {env.act_high[k]} at {k}"
                )
    for field, missing in (("reset_n", env.reset_n == NULL), ("step_n", env.step_n == NULL),
                           ("observe_n", env.observe_n == NULL)):
        if missing:
            raise ValueError(f"{where}: {field} must be a function, got NULL")
    if env_id in NATIVE_ENVS:
        raise ValueError(f"{where}: env_id must not be that of a built-in environment; choose another id")
    known = REGISTERED.get(env_id)
    if known is not None and env != <const rlox_env_v1*>PyCapsule_GetPointer(known, RLOX_ENV_CAPSULE):
        raise ValueError(f"{where}: env_id must be new, got one that is registered with another environment")
    return env


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
    f64* state     # block after block, component after component within a block
    u64* keys
    u64* episodes  # number of the running episode; 2**64 - 1 before the first
    i64* steps
    f64* returns


cdef inline Py_ssize_t n_blocks(Py_ssize_t n) noexcept nogil:
    return (n + BLOCK - 1) // BLOCK


cdef inline rlox_batch_v1 block_of(const rlox_env_v1* spec, Envs* envs, Py_ssize_t start) noexcept nogil:
    """The block of environments that begins with number `start`, a multiple of BLOCK."""
    cdef rlox_batch_v1 batch
    batch.n = min(<Py_ssize_t>BLOCK, envs.n - start)
    batch.state = envs.state + start * spec.state_size
    batch.keys = envs.keys + start
    batch.episodes = envs.episodes + start
    batch.steps = envs.steps + start
    return batch


cdef inline void start_episodes(const rlox_env_v1* spec, Envs* envs, Py_ssize_t start, const rlox_batch_v1* batch,
                                i64 m, const i64* index, f32* obs) noexcept nogil:
    """Start the next episodes of the environments index[0..m) of a block, whose observations `obs` is."""
    cdef i64 j
    for j in range(m):
        envs.episodes[start + index[j]] += 1
        envs.steps[start + index[j]] = 0
        envs.returns[start + index[j]] = 0.0
    spec.reset_n(spec.params, batch, m, index, obs)


cdef void start_all(const rlox_env_v1* spec, Envs* envs, f32* obs) noexcept nogil:
    cdef i64[BLOCK] index
    cdef i64 i
    cdef Py_ssize_t k, start
    cdef rlox_batch_v1 batch
    for i in range(BLOCK):
        index[i] = i
    for k in range(n_blocks(envs.n)):
        start = k * BLOCK
        batch = block_of(spec, envs, start)
        start_episodes(spec, envs, start, &batch, batch.n, &index[0], obs + start * spec.obs_dim)


cdef void observe_all(const rlox_env_v1* spec, Envs* envs, f32* obs) noexcept nogil:
    cdef Py_ssize_t k, start
    cdef rlox_batch_v1 batch
    for k in range(n_blocks(envs.n)):
        start = k * BLOCK
        batch = block_of(spec, envs, start)
        spec.observe_n(spec.params, &batch, obs + start * spec.obs_dim)


cdef inline int count(Py_ssize_t n, i64 limit, cf64_r rewards, u8_r terminated, u8_r truncated, i64_r steps,
                      f64_r returns) noexcept nogil:
    """Advance the statistics and apply the time limit; nonzero if an episode ended."""
    cdef Py_ssize_t i
    cdef u8 ended = 0
    for i in range(n):
        returns[i] += rewards[i]
    for i in range(n):
        steps[i] += 1
        truncated[i] = steps[i] >= limit
    for i in range(n):
        terminated[i] = terminated[i] != 0  # a byte of 2 from outside would be no bool
        ended |= terminated[i] | truncated[i]
    return ended


cdef void advance(const rlox_env_v1* spec, Envs* envs, const void* actions, Outputs* out) noexcept nogil:
    """One step of every environment, with same-step auto-reset."""
    cdef Py_ssize_t action_size = sizeof(i64) if spec.n_actions else spec.act_dim * sizeof(f32)
    cdef Py_ssize_t row = spec.obs_dim
    cdef i64 limit = spec.max_episode_steps or INT64_MAX
    cdef i64[BLOCK] index
    cdef rlox_batch_v1 batch
    cdef Py_ssize_t k, start, n
    cdef i64 i, j, m
    cdef u64 some, more
    cdef f32* obs
    cdef u8* terminated
    cdef u8* truncated
    for k in range(n_blocks(envs.n)):
        start = k * BLOCK
        batch = block_of(spec, envs, start)
        n = batch.n
        obs = out.obs + start * row
        terminated = out.terminated + start
        truncated = out.truncated + start
        spec.step_n(spec.params, &batch, <const char*>actions + start * action_size, obs, out.rewards + start,
                    terminated)
        m = count(n, limit, out.rewards + start, terminated, truncated, envs.steps + start, envs.returns + start)
        if out.final_obs != NULL:
            memcpy(out.final_obs + start * row, obs, n * row * sizeof(f32))
        if out.episode_return != NULL:
            memcpy(out.episode_return + start, envs.returns + start, n * sizeof(f64))
        if out.episode_length != NULL:
            memcpy(out.episode_length + start, envs.steps + start, n * sizeof(i64))
        if m:
            m = 0
            # Eight flags at a time, for most of them are 0.
            for i in range(0, n - 7, 8):
                memcpy(&some, terminated + i, 8)
                memcpy(&more, truncated + i, 8)
                if some | more:
                    for j in range(i, i + 8):
                        index[m] = j
                        m += terminated[j] | truncated[j]
            for j in range(n & ~7, n):
                index[m] = j
                m += terminated[j] | truncated[j]
            start_episodes(spec, envs, start, &batch, m, &index[0], obs)


cdef struct Stepped:
    const rlox_env_v1* spec
    Envs* envs


cdef void step_through(void* self, const void* actions, f32* obs, f64* rewards, u8* terminated, u8* truncated,
                       f32* final_obs, f64* episode_return, i64* episode_length) noexcept nogil:
    cdef Stepped* stepped = <Stepped*>self
    cdef Outputs out = Outputs(obs=obs, rewards=rewards, terminated=terminated, truncated=truncated,
                               final_obs=final_obs, episode_return=episode_return, episode_length=episode_length)
    advance(stepped.spec, stepped.envs, actions, &out)


cdef Py_ssize_t first_bad_action(const rlox_env_v1* spec, const void* actions, Py_ssize_t n) noexcept nogil:
    """Return the index of the first action that is out of range or NaN, or -1."""
    cdef const i64* choices = <const i64*>actions
    cdef const f32* values = <const f32*>actions
    cdef u64 limit = <u64>spec.n_actions
    cdef Py_ssize_t i
    cdef int bad = 0
    if limit:
        for i in range(n):
            bad |= <u64>choices[i] >= limit  # a negative one is huge when unsigned
    else:
        n *= spec.act_dim
        for i in range(n):
            bad |= values[i] != values[i]
    if not bad:
        return -1
    for i in range(n):
        if (<u64>choices[i] >= limit) if limit else (values[i] != values[i]):
            return i // spec.act_dim
    return -1


cdef class NativeEnv:
    """What `VecEnv` and `Env` say of the environment they play."""

    cdef rlox_env_v1 spec
    cdef object capsule  # what keeps an environment from outside alive

    def __cinit__(self, *args, **kwargs) -> None:
        self.spec = SPECS[0]  # so that nothing is NULL before `choose`

    cdef int choose(self, object env_id, str where) except -1:
        """Take the environment that `env_id`, an id or a capsule, stands for."""
        cdef const rlox_env_v1* found
        if isinstance(env_id, str):
            if env_id in NATIVE_ENVS:
                self.spec = SPECS[NATIVE_ENVS.index(env_id)]
                return 0
            if env_id not in REGISTERED:
                from rlox.envs.registry import register_offered

                register_offered(env_id)
            self.capsule = REGISTERED.get(env_id)
            if self.capsule is None:
                raise ValueError(
                    f"{where}: env_id must be a native environment, got {env_id!r}; try one of "
                    f"{', '.join(native_ids())}, or rlox.GymVecEnv, which serves every other gymnasium id; "
                    "register_native comes first for one from outside"
                )
        elif PyCapsule_CheckExact(env_id):
            self.capsule = env_id
        else:
            raise TypeError(f"{where}: env_id must be an id or a PyCapsule, got {type(env_id).__name__}")
        found = env_of(self.capsule, where)
        self.spec = found[0]
        return 0

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
        return self.spec.act_dim

    @property
    def act_low(self) -> np.ndarray | None:
        return None if self.discrete else np.array([self.spec.act_low[k] for k in range(self.spec.act_dim)], np.float32)

    @property
    def act_high(self) -> np.ndarray | None:
        return None if self.discrete else np.array([self.spec.act_high[k] for k in range(self.spec.act_dim)], np.float32)

    @property
    def max_episode_steps(self) -> int | None:
        return self.spec.max_episode_steps or None


cdef class VecEnv(NativeEnv):
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

    cdef Envs envs
    cdef bint ready
    cdef readonly Py_ssize_t n_envs
    cdef readonly u64 seed
    # The arrays own the memory that `envs` points into; `scratch` takes what a caller does not ask for.
    cdef cnp.ndarray state, keys, episodes, steps, returns
    cdef tuple scratch
    cdef Outputs sink
    cdef Stepped stepped
    cdef rlox_stepper access
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
        self.n_envs = count_
        self.state = np.zeros(count_ * self.spec.state_size)
        self.keys = np.empty(count_, np.uint64)
        self.episodes = np.empty(count_, np.uint64)
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
            self.envs.episodes[i] = <u64>-1
        return 0

    def __len__(self) -> int:
        return self.n_envs

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
        if not self.ready:
            raise ValueError("VecEnv.observe: the environments must be reset first; call reset_all()")
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
                + f", got {held[bad]} at index {bad}"
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
        if not self.ready:
            raise ValueError("VecEnv.stepper: the environments must be reset first; call reset_all()")
        self.stepped = Stepped(spec=&self.spec, envs=&self.envs)
        self.access = rlox_stepper(
            self=&self.stepped, n=self.n_envs, obs_dim=self.spec.obs_dim, n_actions=self.spec.n_actions,
            act_dim=self.spec.act_dim, max_episode_steps=self.spec.max_episode_steps,
            act_low=self.spec.act_low, act_high=self.spec.act_high, step=step_through,
        )
        return PyCapsule_New(&self.access, RLOX_STEPPER_CAPSULE, NULL)

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of everything that the future depends on (S state components, N environments).

        ``state`` (S, N) float64 physics, ``keys`` (N,) uint64, ``episodes`` (N,) uint64 resets so far,
        ``steps`` (N,) int64 and ``returns`` (N,) float64 of the running episodes.
        """
        if self.busy:
            self.refuse("get_state")
        state = np.empty((self.spec.state_size, self.n_envs))
        for start, stop, block in self.blocks():
            state[:, start:stop] = block
        return {
            "state": state,
            "keys": self.keys.copy(),
            "episodes": self.episodes + np.uint64(1),
            "steps": self.steps.copy(),
            "returns": self.returns.copy(),
        }

    def blocks(self):
        """Yield (start, stop, the block's state (S, stop - start))."""
        size = self.spec.state_size
        for start in range(0, self.n_envs, BLOCK):
            stop = min(start + BLOCK, self.n_envs)
            yield start, stop, self.state[start * size : stop * size].reshape(size, stop - start)

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
        if self.busy:
            self.refuse("set_state")
        mine = {"state": np.broadcast_to(0.0, (self.spec.state_size, self.n_envs)), "keys": self.keys,
                "episodes": self.episodes, "steps": self.steps, "returns": self.returns}
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
        limit = self.spec.max_episode_steps or INT64_MAX
        wrong = (steps < 0) | (steps >= limit)
        if wrong.any():
            raise ValueError(f"{where}: steps must lie in [0, {limit}), got {steps[wrong][0]}")
        for start, stop, block in self.blocks():
            block[...] = state["state"][:, start:stop]
        self.keys[...] = state["keys"]
        self.episodes[...] = state["episodes"] - np.uint64(1)
        self.steps[...] = steps
        self.returns[...] = state["returns"]
        self.ready = bool(state["episodes"].all())


cdef class Env(NativeEnv):
    """One native environment without auto-reset, for reading and trying things out.

    ``Env(env_id, seed=s)`` plays the same episodes as environment 0 of ``VecEnv(1, seed=s, env_id=env_id)``.

    Parameters
    ----------
    env_id
        As for `VecEnv`.
    seed
        0 <= seed < 2**64; None takes one from the operating system.

    Attributes
    ----------
    env_id, obs_dim, discrete, n_actions, act_dim, act_low, act_high, max_episode_steps
        As those of `VecEnv`.
    """

    cdef Envs env
    cdef cnp.ndarray physics  # (S,) float64
    cdef u64 key, episode
    cdef i64 length
    cdef f64 total
    cdef bint running

    def __cinit__(self, *args, **kwargs) -> None:
        self.begin(0)

    def __init__(self, env_id, seed: int | None = None) -> None:
        self.choose(env_id, self.name())
        self.begin(seed)

    cdef int begin(self, object seed) except -1:
        """Build what the chosen environment needs."""
        key = seed if seed is not None else secrets.randbits(64)
        self.running = False
        self.physics = np.zeros(self.spec.state_size)
        self.length = 0
        self.total = 0.0
        self.env = Envs(
            n=1, state=<f64*>cnp.PyArray_DATA(self.physics), keys=&self.key, episodes=&self.episode,
            steps=&self.length, returns=&self.total,
        )
        self.rekey(key, self.name())
        return 0

    cdef int rekey(self, object seed, str where) except -1:
        self.key = derive_key(as_seed(seed, where, "seed"), 0)
        self.episode = <u64>-1
        return 0

    cdef str name(self):
        return type(self).__name__

    def __repr__(self) -> str:
        return f"{self.name()}(episode={<u64>(self.episode + 1)}, step={self.length})"

    def __reduce__(self):
        return Env, (self.env_id, 0), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Start the next episode, or with a seed the first one of that seed; return (D,) float32.

        Raises ValueError for a seed outside [0, 2**64).
        """
        cdef cnp.ndarray obs = np.empty(self.spec.obs_dim, np.float32)
        if seed is not None:
            self.rekey(seed, self.name() + ".reset")
        start_all(&self.spec, &self.env, <f32*>cnp.PyArray_DATA(obs))
        self.running = True
        return obs

    def observe(self) -> np.ndarray:
        """Return the current observation, (D,) float32; raises ValueError before the first `reset`."""
        if self.episode == <u64>-1:
            raise ValueError(f"{self.name()}.observe: an episode must have begun; call reset() first")
        cdef cnp.ndarray obs = np.empty(self.spec.obs_dim, np.float32)
        observe_all(&self.spec, &self.env, <f32*>cnp.PyArray_DATA(obs))
        return obs

    def step(self, action) -> dict:
        """Take one step; the first one begins the first episode, if `reset` has not.

        Parameters
        ----------
        action
            Discrete: an integer in [0, n_actions). Continuous: (A,) numbers, or one number where A = 1; they
            are taken as float32, and those beyond the bounds are clipped by the dynamics.

        Returns
        -------
        dict
            ``obs`` (D,) float32, ``reward`` float, ``terminated`` and ``truncated`` bool.

        Raises
        ------
        ValueError
            The episode has ended, or the action is out of range, NaN or of another shape.
        TypeError
            The action is no integer, or not made of real numbers.
        """
        if not self.running and self.episode != <u64>-1:
            raise ValueError(f"{self.name()}.step: an episode must be running; call reset() first")
        cdef i64 choice
        cdef const void* data = <const void*>&choice
        cdef cnp.ndarray values
        if self.spec.n_actions:
            value = action if PyLong_CheckExact(action) else as_index(action, self.name() + ".step", "action")
            if not 0 <= value < self.spec.n_actions:
                names = "0 or 1" if self.spec.n_actions == 2 else f"in [0, {self.spec.n_actions})"
                raise ValueError(f"{self.name()}.step: action must be {names}, got {value}")
            choice = value
        else:
            values = self.as_action(action)
            data = cnp.PyArray_DATA(values)
        if self.episode == <u64>-1:
            self.reset()
        cdef cnp.npy_intp length = self.spec.obs_dim
        cdef cnp.ndarray obs = cnp.PyArray_EMPTY(1, &length, cnp.NPY_FLOAT32, 0)
        cdef rlox_batch_v1 batch = block_of(&self.spec, &self.env, 0)
        cdef f64 reward
        cdef u8 terminated, truncated
        self.spec.step_n(self.spec.params, &batch, data, <f32*>cnp.PyArray_DATA(obs), &reward, &terminated)
        self.running = not count(1, self.spec.max_episode_steps or INT64_MAX, &reward, &terminated, &truncated,
                                 &self.length, &self.total)
        return {
            "obs": obs,
            "reward": reward,
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }

    cdef cnp.ndarray as_action(self, object action):
        """Return a continuous action as (A,) float32."""
        where = self.name() + ".step"
        array = np.asarray(action)
        if array.dtype.kind not in "iuf":
            raise TypeError(f"{where}: action must be made of real numbers, got dtype {array.dtype}")
        if array.shape != (self.spec.act_dim,) and (self.spec.act_dim > 1 or array.shape != ()):
            raise ValueError(f"{where}: action must have shape ({self.spec.act_dim},), got {array.shape}")
        array = np.ascontiguousarray(array, np.float32).reshape(self.spec.act_dim)
        if np.isnan(array).any():
            raise ValueError(f"{where}: action must be numbers, not NaN, got {action}")
        return array

    def get_state(self) -> dict:
        """Return everything that the future depends on, as plain Python numbers."""
        return {
            "state": self.physics.tolist(),
            "key": self.key,
            "episode": <u64>(self.episode + 1),
            "step": self.length,
            "return": self.total,
            "running": bool(self.running),
        }

    def set_state(self, state: dict) -> None:
        """Continue exactly from what `get_state` returned; raises ValueError for other keys or values."""
        where = self.name() + ".set_state"
        if set(state) != set(self.get_state()):
            raise ValueError(
                f"{where}: state must have the keys {sorted(self.get_state())}, got {sorted(state)}; "
                "pass what get_state returned"
            )
        physics = np.asarray(state["state"], np.float64)
        if physics.shape != (self.spec.state_size,) or not np.isfinite(physics).all():
            raise ValueError(f"{where}: state must be {self.spec.state_size} finite numbers, got {state['state']}")
        key = as_seed(state["key"], where, "key")
        episode = as_seed(state["episode"], where, "episode")
        step = as_index(state["step"], where, "step")
        limit = self.spec.max_episode_steps or INT64_MAX
        if not 0 <= step <= limit:
            raise ValueError(f"{where}: step must lie in [0, {limit}], got {step}")
        total = float(state["return"])
        self.physics[...] = physics
        self.key = key
        self.episode = episode - 1 if episode else <u64>-1
        self.length = step
        self.total = total
        self.running = bool(state["running"])


cdef class CartPole(Env):
    """One CartPole-v1 without auto-reset, for reading and trying things out.

    ``CartPole(seed=s)`` plays the same episodes as environment 0 of ``VecEnv(1, seed=s)``.

    Parameters
    ----------
    seed
        0 <= seed < 2**64; None takes one from the operating system.
    """

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "CartPole-v1", seed)


cdef class Pendulum(Env):
    """One Pendulum-v1 without auto-reset; parameters and methods as those of `CartPole`."""

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "Pendulum-v1", seed)


cdef class MountainCar(Env):
    """One MountainCar-v0 without auto-reset; parameters and methods as those of `CartPole`."""

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "MountainCar-v0", seed)


cdef class MountainCarContinuous(Env):
    """One MountainCarContinuous-v0 without auto-reset; parameters and methods as those of `CartPole`."""

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "MountainCarContinuous-v0", seed)


cdef class Acrobot(Env):
    """One Acrobot-v1 without auto-reset; parameters and methods as those of `CartPole`."""

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "Acrobot-v1", seed)


cdef class GridWorld(Env):
    """A grid to walk on, with a goal in the last corner; its first episode begins with the construction.

    Observations are (row, column), each divided by its largest value. Actions are 0 up, 1 right, 2 down, 3 left;
    walls hold the walker back. A step costs 0.01, the one that reaches the goal gives 1 and ends the episode, and
    4 * rows * cols steps cut it. It starts on any cell but the goal, all equally likely.

    Parameters
    ----------
    rows, cols
        1 to 4096 each, but not both 1.
    seed
        0 <= seed < 2**64; None takes one from the operating system.

    Raises
    ------
    ValueError
        A size or seed out of range.
    TypeError
        A size or seed that is no integer.
    """

    cdef Grid grid

    def __init__(self, rows: int = 5, cols: int = 5, seed: int | None = None) -> None:
        sizes = {"rows": as_index(rows, "GridWorld", "rows"), "cols": as_index(cols, "GridWorld", "cols")}
        for name, value in sizes.items():
            if not 1 <= value <= 4096:
                raise ValueError(f"GridWorld: {name} must be at least 1 and at most 4096, got {value}")
        if sizes["rows"] * sizes["cols"] == 1:
            raise ValueError("GridWorld: rows and cols must make at least 2 cells, got 1; the goal takes one")
        self.grid = Grid(rows=sizes["rows"], columns=sizes["cols"])
        self.spec = gridworld(&self.grid)
        self.begin(seed)
        self.reset()

    def __reduce__(self):
        return GridWorld, (self.grid.rows, self.grid.columns, 0), self.get_state()

    def __repr__(self) -> str:
        return f"GridWorld(rows={self.grid.rows}, cols={self.grid.columns}, pos={self.pos})"

    def set_state(self, state: dict) -> None:
        """As `Env.set_state`; raises ValueError for a position that is no cell of this grid, too."""
        try:
            row, column = state["state"]
            inside = row in range(self.grid.rows) and column in range(self.grid.columns)
        except (KeyError, TypeError, ValueError):
            inside = True  # Env.set_state has the error for it
        if not inside:
            raise ValueError(
                f"GridWorld.set_state: state must be a cell of the grid of {self.grid.rows} x "
                f"{self.grid.columns}, got {state['state']}"
            )
        Env.set_state(self, state)

    @property
    def rows(self) -> int:
        return self.grid.rows

    @property
    def cols(self) -> int:
        return self.grid.columns

    @property
    def pos(self) -> tuple[int, int]:
        """(row, column) of the walker; can be set to any cell but the goal."""
        return int(self.env.state[0]), int(self.env.state[1])

    @pos.setter
    def pos(self, cell) -> None:
        row, column = self.on_grid(cell, "GridWorld.pos")
        self.env.state[0] = row
        self.env.state[1] = column

    cdef tuple on_grid(self, object cell, str where):
        """Return `cell` as a pair of ints; ValueError unless it is a cell that one can stand on."""
        if not isinstance(cell, tuple | list) or len(cell) != 2:
            raise TypeError(f"{where}: the position must be a pair (row, column), got {cell!r}")
        row, column = as_index(cell[0], where, "row"), as_index(cell[1], where, "column")
        if not 0 <= row < self.grid.rows or not 0 <= column < self.grid.columns:
            raise ValueError(
                f"{where}: the position must lie on the grid of {self.grid.rows} x {self.grid.columns}, got {cell!r}"
            )
        if (row, column) == (self.grid.rows - 1, self.grid.columns - 1):
            raise ValueError(f"{where}: the position must not be the goal, got {cell!r}")
        return row, column

    def render(self) -> str:
        """Return the grid, a line per row: ``A`` the walker, ``G`` the goal, ``.`` any other cell."""
        rows, columns = self.rows, self.cols
        marks = {(rows - 1, columns - 1): "G", self.pos: "A"}
        return "".join(["".join([marks.get((r, c), ".") for c in range(columns)]) + "\n" for r in range(rows)])

"""The native environments there are: the built-in ones, and those that are registered from outside."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport INT64_MAX
from libc.string cimport memcpy, memset

from cpython.pycapsule cimport (
    PyCapsule_CheckExact, PyCapsule_GetName, PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New,
)

from rlox.kernels.checks cimport as_seed
from rlox.kernels.envs.acrobot cimport spec as acrobot
from rlox.kernels.envs.base cimport (
    RLOX_ENV_AGENTS,
    RLOX_ENV_CAPSULE,
    RLOX_ENV_V1_ONE_AGENT,
    agents_of,
    rlox_env_v1,
)
from rlox.kernels.envs.cartpole cimport spec as cartpole
from rlox.kernels.envs.episodes cimport BLOCK, Envs
from rlox.kernels.envs.gridworld cimport Params as Grid, spec as gridworld
from rlox.kernels.envs.mountain_car cimport spec as mountain_car
from rlox.kernels.envs.mountain_car_continuous cimport spec as mountain_car_continuous
from rlox.kernels.envs.pendulum cimport spec as pendulum
from rlox.kernels.envs.stepper cimport RLOX_STEPPER_CAPSULE, rlox_stepper, rows_step_f
from rlox.kernels.philox cimport derive_key
from rlox.kernels.types cimport f64, i64, u64

from rlox.kernels.envs.snapshot import restore, saved

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

# Those with several agents, which `AgentVecEnv` plays; their parameters make the struct (kernels/envs/multi_agent.pyx).
NATIVE_MULTI_AGENT_ENVS: tuple[str, ...] = ("GridPursuit-v0",)

REGISTERED = {}  # env_id -> capsule, of environments from outside


def native_ids() -> tuple[str, ...]:
    """Return every id that `VecEnv` takes: `NATIVE_ENVS`, then those with one agent that `register_native` added."""
    return NATIVE_ENVS + tuple([env_id for env_id, capsule in REGISTERED.items() if not has_agents(capsule)])


def native_multi_agent_ids() -> tuple[str, ...]:
    """Return every id that `AgentVecEnv` takes: `NATIVE_MULTI_AGENT_ENVS`, then those that `register_native` added."""
    return NATIVE_MULTI_AGENT_ENVS + tuple([env_id for env_id, capsule in REGISTERED.items() if has_agents(capsule)])


cdef bint has_agents(object capsule) except -1:
    return (<const rlox_env_v1*>PyCapsule_GetPointer(capsule, RLOX_ENV_CAPSULE)).flags & RLOX_ENV_AGENTS


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


def capsule_id(capsule) -> str:
    """Return the id inside a capsule; raises as `register_native` does."""
    return env_of(capsule, "register_env").env_id.decode()


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
    # A struct that was built before there were several agents ends before their fields, and has no flags.
    cdef size_t least = RLOX_ENV_V1_ONE_AGENT
    if env.struct_size >= least and env.flags & RLOX_ENV_AGENTS:
        least = sizeof(rlox_env_v1)
    if env.struct_size < least:
        raise ValueError(
            f"{where}: struct_size must be at least {least}, got {env.struct_size}; set it to "
            "sizeof(rlox_env_v1) and build against this rlox's rlox_native.h"
        )
    if env.flags & ~RLOX_ENV_AGENTS:
        raise ValueError(f"{where}: flags must be 0 or RLOX_ENV_AGENTS ({RLOX_ENV_AGENTS}), got {env.flags}")
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
    if env.flags & RLOX_ENV_AGENTS:
        if not 1 <= env.n_agents <= 1 << 20:
            raise ValueError(f"{where}: n_agents must be at least 1 and at most 2**20, got {env.n_agents}")
        if not 0 <= env.central_dim <= 1 << 40:
            raise ValueError(f"{where}: central_dim must be at least 0 and at most 2**40, got {env.central_dim}")
        if (env.central_n == NULL) != (env.central_dim == 0):
            raise ValueError(
                f"{where}: central_n must be "
                + ("a function where central_dim is not 0, got NULL" if env.central_dim
                   else "NULL where central_dim is 0, got a function")
            )
    if env_id in NATIVE_ENVS or env_id in NATIVE_MULTI_AGENT_ENVS:
        raise ValueError(f"{where}: env_id must not be that of a built-in environment; choose another id")
    known = REGISTERED.get(env_id)
    if known is not None and env != <const rlox_env_v1*>PyCapsule_GetPointer(known, RLOX_ENV_CAPSULE):
        raise ValueError(f"{where}: env_id must be new, got one that is registered with another environment")
    return env


cdef class NativeEnv:
    """What `VecEnv`, `AgentVecEnv` and `Env` say of the environment they play."""

    def __cinit__(self, *args, **kwargs) -> None:
        self.spec = SPECS[0]  # so that nothing is NULL before `choose`

    cdef int choose(self, object env_id, str where) except -1:
        """Take the environment with one agent that `env_id`, an id or a capsule, stands for."""
        self.find(env_id, where)
        if self.capsule is not None and has_agents(self.capsule):
            raise ValueError(
                f"{where}: env_id must be an environment with one agent, got {self.env_id!r}, which has "
                f"{agents_of(&self.spec)}; rlox.multi_agent.make_multi_agent_env plays it"
            )
        return 0

    cdef int find(self, object env_id, str where) except -1:
        """Take the environment that `env_id`, an id or a capsule, stands for, whatever number of agents it has."""
        cdef const rlox_env_v1* found
        if isinstance(env_id, str):
            if env_id in NATIVE_ENVS:
                self.spec = SPECS[NATIVE_ENVS.index(env_id)]
                return 0
            if env_id in NATIVE_MULTI_AGENT_ENVS:
                raise ValueError(
                    f"{where}: env_id must be an environment with one agent, got {env_id!r}; "
                    "rlox.multi_agent.make_multi_agent_env plays it"
                )
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
        memset(&self.spec, 0, sizeof(rlox_env_v1))
        memcpy(&self.spec, found, min(<size_t>found.struct_size, sizeof(rlox_env_v1)))
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


cdef class NativeEnvs(NativeEnv):
    """N copies of one native environment: their memory, keys and snapshots.

    Attributes
    ----------
    n_envs, seed
        As given (`seed` follows a reset with another one).
    """

    cdef int hold(self, object n, tuple shape, object seed, str where) except -1:
        """Make the memory of n copies of the chosen environment, with returns of this shape; none has begun."""
        self.n_envs = n
        self.state = np.zeros(n * self.spec.state_size)
        self.keys = np.empty(n, np.uint64)
        self.episodes = np.empty(n, np.uint64)
        self.steps = np.zeros(n, np.int64)
        self.returns = np.zeros(shape)
        self.envs = Envs(
            n=self.n_envs,
            state=<f64*>cnp.PyArray_DATA(self.state),
            keys=<u64*>cnp.PyArray_DATA(self.keys),
            episodes=<u64*>cnp.PyArray_DATA(self.episodes),
            steps=<i64*>cnp.PyArray_DATA(self.steps),
            returns=<f64*>cnp.PyArray_DATA(self.returns),
        )
        return self.rekey(seed, where)

    cdef int rekey(self, object seed, str where) except -1:
        """Give every copy a key of its own, and count its episodes from 0 again."""
        cdef Py_ssize_t i
        self.seed = as_seed(seed, where, "seed")
        for i in range(self.n_envs):
            self.envs.keys[i] = derive_key(self.seed, i)
            self.envs.episodes[i] = <u64>-1
        return 0

    def __len__(self) -> int:
        return self.n_envs

    cdef int require_ready(self, str method) except -1:
        if not self.ready:
            raise ValueError(
                f"{type(self).__name__}.{method}: the environments must be reset first; call reset_all()"
            )
        return 0

    cdef object stepper_of(self, void* stepped, Py_ssize_t n, rows_step_f step):
        """How another kernel steps these environments, by calling `step` with `stepped`, on arrays of n rows."""
        self.require_ready("stepper")
        self.access = rlox_stepper(
            self=stepped, n=n, obs_dim=self.spec.obs_dim, n_actions=self.spec.n_actions, act_dim=self.spec.act_dim,
            max_episode_steps=self.spec.max_episode_steps, act_low=self.spec.act_low, act_high=self.spec.act_high,
            step=step,
        )
        return PyCapsule_New(&self.access, RLOX_STEPPER_CAPSULE, NULL)

    cdef dict arrays(self):
        """What a snapshot holds, by the names that it has there."""
        return {"state": self.state, "keys": self.keys, "episodes": self.episodes, "steps": self.steps,
                "returns": self.returns}

    cdef dict snapshot(self):
        return saved(self.arrays(), self.spec.state_size, BLOCK)

    cdef int put_back(self, state, str where) except -1:
        """Continue from a snapshot; raises as `rlox.kernels.envs.snapshot.restore`."""
        self.ready = restore(self.arrays(), state, self.spec.state_size, BLOCK,
                             self.spec.max_episode_steps or INT64_MAX, where)
        return 0

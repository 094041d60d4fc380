"""The available native environments: the built-in ones, and those registered by other packages."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport INT64_MAX
from libc.string cimport memcpy, memset

from cpython.pycapsule cimport (
    PyCapsule_CheckExact, PyCapsule_GetName, PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New,
)

from rlox.kernels.checks cimport as_seed
from rlox.kernels.envs.acrobot cimport constants as acrobot_constants, spec as acrobot
from rlox.kernels.envs.base cimport (
    RLOX_ENV_AGENTS,
    RLOX_ENV_CAPSULE,
    RLOX_ENV_MASKS,
    RLOX_ENV_V1_NO_MASKS,
    RLOX_ENV_V1_ONE_AGENT,
    agents_of,
    rlox_env_v1,
)
from rlox.kernels.envs.cartpole cimport constants as cartpole_constants, spec as cartpole
from rlox.kernels.envs.episodes cimport BLOCK, Envs
from rlox.kernels.envs.gridworld cimport Params as Grid, constants as gridworld_constants, spec as gridworld
from rlox.kernels.envs.mountain_car cimport constants as mountain_car_constants, spec as mountain_car
from rlox.kernels.envs.mountain_car_continuous cimport (
    constants as mountain_car_continuous_constants,
    spec as mountain_car_continuous,
)
from rlox.kernels.envs.pendulum cimport constants as pendulum_constants, spec as pendulum
from rlox.kernels.envs.pursuit cimport constants as pursuit_constants
from rlox.kernels.envs.stepper cimport RLOX_STEPPER_CAPSULE, rlox_stepper, rows_step_f
from rlox.kernels.philox cimport derive_key
from rlox.kernels.types cimport f64, i64, u64

from rlox.kernels.envs.snapshot import restore, saved

cnp.import_array()

# To add an environment, add a .pxd file and a line here, and increase N_SPECS.
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

# Built-in environments with several agents, for `AgentVecEnv`. Their structs depend on parameters: see multi_agent.pyx.
NATIVE_MULTI_AGENT_ENVS: tuple[str, ...] = ("GridPursuit-v0",)

# By id: the numbers that define the built-in environments, for their versions of tensors.
CONSTANTS: dict[str, dict[str, float]] = {
    "CartPole-v1": cartpole_constants(),
    "Pendulum-v1": pendulum_constants(),
    "MountainCar-v0": mountain_car_constants(),
    "MountainCarContinuous-v0": {**mountain_car_constants(), **mountain_car_continuous_constants()},
    "Acrobot-v1": acrobot_constants(),
    "GridWorld-v0": {**gridworld_constants(), **GRID_5X5},
    "GridPursuit-v0": pursuit_constants(),
}

REGISTERED = {}  # env_id -> capsule, of external environments


def native_ids() -> tuple[str, ...]:
    """Return all ids that `VecEnv` accepts: `NATIVE_ENVS`, then the single-agent ones added by `register_native`."""
    return NATIVE_ENVS + tuple([env_id for env_id, capsule in REGISTERED.items() if not has_agents(capsule)])


def native_multi_agent_ids() -> tuple[str, ...]:
    """Return all ids that `AgentVecEnv` accepts: `NATIVE_MULTI_AGENT_ENVS`, then those added by `register_native`."""
    return NATIVE_MULTI_AGENT_ENVS + tuple([env_id for env_id, capsule in REGISTERED.items() if has_agents(capsule)])


cdef bint has_agents(object capsule) except -1:
    return (<const rlox_env_v1*>PyCapsule_GetPointer(capsule, RLOX_ENV_CAPSULE)).flags & RLOX_ENV_AGENTS


def register_native(capsule) -> str:
    """Register an external environment, so that it can be used by its id like the built-in ones.

    Parameters
    ----------
    capsule
        A PyCapsule named ``rlox.env.v1`` that contains the address of an ``rlox_env_v1`` (see ``rlox_native.h``).
        It is kept until the process ends.

    Returns
    -------
    env_id
        The id inside the capsule. Registering the same environment again changes nothing.

    Raises
    ------
    TypeError
        If `capsule` is not a PyCapsule.
    ValueError
        If the capsule has another name, a field breaks a rule of ``rlox_native.h``, or another environment has the
        same id.
    """
    env_id = env_of(capsule, "register_native").env_id.decode()
    REGISTERED.setdefault(env_id, capsule)
    return env_id


def capsule_id(capsule) -> str:
    """Return the id inside a capsule. Raises the same errors as `register_native`."""
    return env_of(capsule, "register_env").env_id.decode()


cdef const rlox_env_v1* env_of(object capsule, str where) except NULL:
    """Return the struct in `capsule` after checking all its fields."""
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
    # A struct compiled before multi-agent support ends before n_agents, and has no flags; one compiled before masks ends
    # before mask_n.
    cdef size_t least = RLOX_ENV_V1_ONE_AGENT
    if env.struct_size >= least and env.flags & RLOX_ENV_MASKS:
        least = sizeof(rlox_env_v1)
    elif env.struct_size >= least and env.flags & RLOX_ENV_AGENTS:
        least = RLOX_ENV_V1_NO_MASKS
    if env.struct_size < least:
        raise ValueError(
            f"{where}: struct_size must be at least {least}, got {env.struct_size}; set it to "
            "sizeof(rlox_env_v1) and build against this rlox's rlox_native.h"
        )
    if env.flags not in (0, RLOX_ENV_AGENTS, RLOX_ENV_MASKS):
        raise ValueError(
            f"{where}: flags must be 0, RLOX_ENV_AGENTS ({RLOX_ENV_AGENTS}) or RLOX_ENV_MASKS ({RLOX_ENV_MASKS}), got "
            f"{env.flags}"
        )
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
            raise ValueError(f"{where}: act_dim must be 1 if n_actions is not 0, got {env.act_dim}")
        if env.act_low != NULL or env.act_high != NULL:
            raise ValueError(f"{where}: act_low and act_high must be NULL if n_actions is not 0, got bounds")
    elif not bounds:
        raise ValueError(f"{where}: act_low and act_high must point to bounds if n_actions is 0, got NULL")
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
                + ("a function if central_dim is not 0, got NULL" if env.central_dim
                   else "NULL if central_dim is 0, got a function")
            )
    if env.flags & RLOX_ENV_MASKS:
        if env.mask_n == NULL:
            raise ValueError(f"{where}: mask_n must be a function with RLOX_ENV_MASKS, got NULL")
        if not env.n_actions:
            raise ValueError(f"{where}: n_actions must not be 0 with RLOX_ENV_MASKS, got continuous actions")
    if env_id in NATIVE_ENVS or env_id in NATIVE_MULTI_AGENT_ENVS:
        raise ValueError(f"{where}: env_id must not be the id of a built-in environment; choose another id")
    known = REGISTERED.get(env_id)
    if known is not None and env != <const rlox_env_v1*>PyCapsule_GetPointer(known, RLOX_ENV_CAPSULE):
        raise ValueError(f"{where}: env_id must be new, got one that is registered for another environment")
    return env


cdef class NativeEnv:
    """Base class of `VecEnv`, `AgentVecEnv` and `Env` with the properties of the environment they run."""

    def __cinit__(self, *args, **kwargs) -> None:
        self.spec = SPECS[0]  # so that nothing is NULL before `choose`

    cdef int choose(self, object env_id, str where) except -1:
        """Use the single-agent environment that `env_id`, an id or a capsule, refers to."""
        self.find(env_id, where)
        if self.capsule is not None and has_agents(self.capsule):
            raise ValueError(
                f"{where}: env_id must be an environment with one agent, got {self.env_id!r}, which has "
                f"{agents_of(&self.spec)}; use rlox.multi_agent.make_multi_agent_env"
            )
        return 0

    cdef int find(self, object env_id, str where) except -1:
        """Use the environment that `env_id`, an id or a capsule, refers to, with any number of agents."""
        cdef const rlox_env_v1* found
        if isinstance(env_id, str):
            if env_id in NATIVE_ENVS:
                self.spec = SPECS[NATIVE_ENVS.index(env_id)]
                return 0
            if env_id in NATIVE_MULTI_AGENT_ENVS:
                raise ValueError(
                    f"{where}: env_id must be an environment with one agent, got {env_id!r}; "
                    "use rlox.multi_agent.make_multi_agent_env"
                )
            if env_id not in REGISTERED:
                from rlox.envs.registry import register_offered

                register_offered(env_id)
            self.capsule = REGISTERED.get(env_id)
            if self.capsule is None:
                raise ValueError(
                    f"{where}: env_id must be a native environment, got {env_id!r}; try one of "
                    f"{', '.join(native_ids())}, or rlox.GymVecEnv, which runs every other gymnasium id; "
                    "register an external environment with register_native first"
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
    def masked(self) -> bool:
        return self.spec.flags & RLOX_ENV_MASKS != 0

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


class Count(int):
    """An int that can also be called: ``num_envs`` is an attribute in gymnasium and a method in the original rlox."""

    def __call__(self) -> int:
        return int(self)


cdef class NativeEnvs(NativeEnv):
    """N copies of one native environment: their memory, keys and snapshots.

    Attributes
    ----------
    n_envs, seed
        As given (a reset with a seed changes `seed`).
    num_envs
        `n_envs` under gymnasium's name, which can also be called.
    """

    cdef int hold(self, object n, tuple shape, object seed, str where) except -1:
        """Allocate the memory of n copies of the chosen environment, with returns of this shape and no episodes yet."""
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
        """Give every copy a new key, and restart its episode count at 0."""
        cdef Py_ssize_t i
        self.seed = as_seed(seed, where, "seed")
        for i in range(self.n_envs):
            self.envs.keys[i] = derive_key(self.seed, i)
            self.envs.episodes[i] = <u64>-1
        return 0

    def __len__(self) -> int:
        return self.n_envs

    @property
    def num_envs(self) -> Count:
        return Count(self.n_envs)

    cdef int require_ready(self, str method) except -1:
        if not self.ready:
            raise ValueError(
                f"{type(self).__name__}.{method}: the environments must be reset first; call reset_all()"
            )
        return 0

    cdef object stepper_of(self, void* stepped, Py_ssize_t n, rows_step_f step):
        """Return a capsule with which another kernel steps these environments: `step(stepped, ...)`, on n rows."""
        self.require_ready("stepper")
        self.access = rlox_stepper(
            self=stepped, n=n, obs_dim=self.spec.obs_dim, n_actions=self.spec.n_actions, act_dim=self.spec.act_dim,
            max_episode_steps=self.spec.max_episode_steps, act_low=self.spec.act_low, act_high=self.spec.act_high,
            step=step,
        )
        return PyCapsule_New(&self.access, RLOX_STEPPER_CAPSULE, NULL)

    cdef dict arrays(self):
        """Return the arrays of a snapshot by name."""
        return {"state": self.state, "keys": self.keys, "episodes": self.episodes, "steps": self.steps,
                "returns": self.returns}

    cdef dict snapshot(self):
        return saved(self.arrays(), self.spec.state_size, BLOCK)

    cdef int put_back(self, state, str where) except -1:
        """Restore a snapshot. Raises the errors of `rlox.kernels.envs.snapshot.restore`."""
        self.ready = restore(self.arrays(), state, self.spec.state_size, BLOCK,
                             self.spec.max_episode_steps or INT64_MAX, where)
        return 0

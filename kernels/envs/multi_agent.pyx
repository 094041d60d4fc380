"""N copies of a native environment with several agents. The loop itself is in episodes.pxd, as for one agent."""

import numpy as np

cimport numpy as cnp

from rlox.kernels.checks cimport as_fraction, as_index, check_out
from rlox.kernels.envs.base cimport RLOX_ENV_AGENTS, agents_of, rlox_env_v1
from rlox.kernels.envs.episodes cimport (
    Envs, Outputs, advance, central_all, first_bad_action, observe_all, start_all,
)
from rlox.kernels.envs.native_env cimport NativeEnvs
from rlox.kernels.envs.pursuit cimport MOST_PURSUERS, Params as Pursuit, spec as pursuit
from rlox.kernels.types cimport f32, f64, i64, u8, u64

from rlox.kernels.envs.native_env import NATIVE_MULTI_AGENT_ENVS, native_multi_agent_ids

cnp.import_array()

# Parameters of built-in environments: name -> default.
PARAMS = {
    "GridPursuit-v0": {"size": 8, "n_pursuers": 3, "n_catchers": 2, "max_cycles": 50, "randomness": 0.2},
}


cdef Pursuit pursuit_of(dict params, str where) except *:
    """Return the struct of a pursuit with these parameters."""
    cdef Pursuit grid
    sizes = {}
    limits = {"size": (2, 1 << 10), "n_pursuers": (1, MOST_PURSUERS), "n_catchers": (1, MOST_PURSUERS),
              "max_cycles": (1, 1 << 31)}
    for name, (least, most) in limits.items():
        sizes[name] = as_index(params[name], where, name)
        if not least <= sizes[name] <= most:
            raise ValueError(f"{where}: {name} must be at least {least} and at most {most}, got {sizes[name]}")
    if sizes["n_catchers"] > sizes["n_pursuers"]:
        raise ValueError(
            f"{where}: n_catchers must be at most n_pursuers ({sizes['n_pursuers']}), got {sizes['n_catchers']}"
        )
    grid.size = sizes["size"]
    grid.n_pursuers = sizes["n_pursuers"]
    grid.n_catchers = sizes["n_catchers"]
    grid.max_cycles = sizes["max_cycles"]
    grid.random_below = <u64>(as_fraction(params["randomness"], where, "randomness") * 4294967296.0)
    return grid


cdef struct Stepped:
    const rlox_env_v1* spec
    Envs* envs
    u8* flags       # (2, N): terminated and truncated of the environments
    i64* lengths    # (N)
    f32* central    # (2, N, C)


cdef void step_rows(void* self, const void* actions, f32* obs, f64* rewards, u8* terminated, u8* truncated,
                    f32* final_obs, f64* episode_return, i64* episode_length) noexcept nogil:
    """Step all environments once; the rows of the arrays are the N * A agents."""
    cdef Stepped* stepped = <Stepped*>self
    cdef Py_ssize_t n = stepped.envs.n, agents = agents_of(stepped.spec), i, a
    cdef Outputs out = Outputs(obs=obs, rewards=rewards, terminated=stepped.flags, truncated=stepped.flags + n,
                               final_obs=final_obs, episode_return=episode_return, episode_length=stepped.lengths,
                               central=stepped.central, final_central=stepped.central + n * stepped.spec.central_dim,
                               mask=NULL, final_mask=NULL)
    advance(stepped.spec, stepped.envs, actions, &out)
    for i in range(n):
        for a in range(i * agents, (i + 1) * agents):
            terminated[a] = out.terminated[i]
            truncated[a] = out.truncated[i]
            episode_length[a] = out.episode_length[i]


cdef class AgentVecEnv(NativeEnvs):
    """N copies of one native environment with A agents each, stepped together. Each restarts when its episode ends.

    The randomness of environment i is determined as in `VecEnv`: the start of episode k is a pure function of k and of
    the environment's key, which is derived from (seed, i). The randomness of a step is a pure function of the key, k
    and the number of the step.

    Parameters
    ----------
    n
        Number of environments N, at least 1.
    seed
        0 <= seed < 2**64.
    env_id
        One of `native_multi_agent_ids()`, or a PyCapsule named ``rlox.env.v1`` with an external multi-agent
        environment.
    params
        Parameters of a built-in environment that differ from the defaults in `PARAMS`.

    Attributes
    ----------
    n_envs, n_agents, seed, env_id, params
        As given (`params` with the defaults).
    obs_dim, n_actions, discrete, act_dim, act_low, act_high, max_episode_steps
        Of one agent, as in `VecEnv`.
    central_dim
        C, the number of inputs of a central critic; 0 if it sees the observations of all agents.

    Raises
    ------
    ValueError, TypeError
        For a number out of range or of another kind, an unknown id or parameter, or a capsule that breaks a rule of
        ``rlox_native.h``.
    """

    cdef Pursuit grid
    cdef readonly Py_ssize_t n_agents, central_dim
    cdef readonly dict params
    # The arrays own the memory that `stepped` points into.
    cdef cnp.ndarray flags, lengths, central_views
    cdef Stepped stepped

    def __cinit__(self, n: int, seed: int = 0, env_id="GridPursuit-v0", params: dict | None = None) -> None:
        where = "AgentVecEnv"
        count_ = as_index(n, where, "n")
        if count_ < 1:
            raise ValueError(f"{where}: n must be at least 1, got {count_}")
        self.play(env_id, dict(params or {}), where)
        rows = count_ * self.n_agents
        if max(count_ * max(self.spec.state_size, self.central_dim),
               rows * max(self.spec.obs_dim, self.spec.act_dim)) >= 1 << 59:
            raise ValueError(f"{where}: n must be such that the arrays fit into memory, got {count_}")
        self.hold(count_, (count_, self.n_agents), seed, where)
        self.flags = np.zeros((2, count_), np.bool_)
        self.lengths = np.zeros(count_, np.int64)
        self.central_views = np.zeros((2, count_, self.central_dim), np.float32)
        self.stepped = Stepped(
            spec=&self.spec, envs=&self.envs, flags=<u8*>cnp.PyArray_DATA(self.flags),
            lengths=<i64*>cnp.PyArray_DATA(self.lengths), central=<f32*>cnp.PyArray_DATA(self.central_views),
        )

    cdef int play(self, object env_id, dict params, str where) except -1:
        """Use the environment that `env_id`, an id or a capsule, refers to."""
        if isinstance(env_id, str) and env_id in NATIVE_MULTI_AGENT_ENVS:
            defaults = PARAMS[env_id]
            for name in params:
                if name not in defaults:
                    raise ValueError(f"{where}: params must have keys among {', '.join(defaults)}, got {name!r}")
            self.params = defaults | params
            self.grid = pursuit_of(self.params, f"{where}: {env_id}")
            self.spec = pursuit(&self.grid)
        else:
            self.find(env_id, where)
            if not self.spec.flags & RLOX_ENV_AGENTS:
                raise ValueError(
                    f"{where}: env_id must be an environment with several agents, got {self.env_id!r}; try one of "
                    f"{', '.join(native_multi_agent_ids())}, or rlox.VecEnv for one agent"
                )
            if params:
                raise ValueError(f"{where}: params must be empty for {self.env_id}, got {params}")
            self.params = {}
        self.n_agents = self.spec.n_agents
        self.central_dim = self.spec.central_dim
        return 0

    def __repr__(self) -> str:
        return f"AgentVecEnv(n={self.n_envs}, seed={self.seed}, env_id={self.env_id!r}, params={self.params})"

    def reset_all(self, seed: int | None = None) -> np.ndarray:
        """Start a new episode in every environment; with a seed, the first episodes of that seed.

        Returns the first observations, (N, A, D) float32. Raises ValueError or TypeError if the seed is out of range or
        not an integer.
        """
        cdef cnp.ndarray obs = np.empty((self.n_envs, self.n_agents, self.spec.obs_dim), np.float32)
        if seed is not None:
            self.rekey(seed, "AgentVecEnv.reset_all")
        start_all(&self.spec, &self.envs, <f32*>cnp.PyArray_DATA(obs))
        self.ready = True
        return obs

    def observe(self) -> np.ndarray:
        """Return the current observations, (N, A, D) float32, recomputed from the state.

        Raises ValueError before the first `reset_all`.
        """
        cdef cnp.ndarray obs = np.empty((self.n_envs, self.n_agents, self.spec.obs_dim), np.float32)
        self.require_ready("observe")
        observe_all(&self.spec, &self.envs, <f32*>cnp.PyArray_DATA(obs))
        return obs

    def central(self) -> np.ndarray:
        """Return the current inputs of a central critic, (N, C) float32, or all agents' observations if C is 0.

        Raises ValueError before the first `reset_all`.
        """
        cdef cnp.ndarray central
        if not self.central_dim:
            return self.observe().reshape(self.n_envs, -1)
        self.require_ready("central")
        central = np.empty((self.n_envs, self.central_dim), np.float32)
        central_all(&self.spec, &self.envs, <f32*>cnp.PyArray_DATA(central))
        return central

    def step_into(self, actions, obs, rewards, terminated, truncated, final_obs, episode_return, episode_length,
                  central=None, final_central=None) -> None:
        """Take one step in every environment and write the results. Those whose episode ends start the next at once.

        Parameters
        ----------
        actions
            (N, A) int64 in [0, n_actions), or (N, A, act_dim) float32; C-contiguous.
        obs, final_obs
            (N, A, D) float32: the observations to act on next, and those that the step led to, before any reset.
        rewards, terminated, truncated
            (N, A) float64, bool, bool; the flags of an environment are those of all its agents.
        episode_return, episode_length
            (N, A) float64 and (N,) int64: totals of the episode that this step belongs to, including this step.
        central, final_central
            (N, C) float32, if C is not 0: the inputs of a central critic for obs and for final_obs.

        Raises
        ------
        ValueError, TypeError
            For an array of another shape or dtype, an action out of range or NaN, or before the first `reset_all`. No
            environment is stepped then.
        """
        cdef Py_ssize_t n = self.n_envs, i, j
        cdef str where = "AgentVecEnv.step_into"
        cdef tuple per_agent = (n, self.n_agents), observed = (n, self.n_agents, self.spec.obs_dim)
        cdef tuple seen = (n, self.central_dim)
        cdef Outputs out
        cdef const void* taken
        cdef u8* ended
        cdef u8* cut
        self.require_ready("step_into")
        if self.spec.n_actions:
            check_out(actions, cnp.NPY_INT64, "int64", per_agent, where, "actions")
        else:
            check_out(actions, cnp.NPY_FLOAT32, "float32", (*per_agent, self.spec.act_dim), where, "actions")
        taken = cnp.PyArray_DATA(<cnp.ndarray>actions)
        i = first_bad_action(&self.spec, taken, n * self.n_agents)
        if i >= 0:
            j = i // self.spec.act_dim
            raise ValueError(
                f"{where}: actions must be "
                + (f"in [0, {self.spec.n_actions})" if self.spec.n_actions else "numbers, not NaN")
                + f", got {actions.reshape(-1)[i]} of agent {j % self.n_agents} in environment {j // self.n_agents}"
            )
        check_out(obs, cnp.NPY_FLOAT32, "float32", observed, where, "obs")
        check_out(rewards, cnp.NPY_FLOAT64, "float64", per_agent, where, "rewards")
        check_out(terminated, cnp.NPY_BOOL, "bool", per_agent, where, "terminated")
        check_out(truncated, cnp.NPY_BOOL, "bool", per_agent, where, "truncated")
        check_out(final_obs, cnp.NPY_FLOAT32, "float32", observed, where, "final_obs")
        check_out(episode_return, cnp.NPY_FLOAT64, "float64", per_agent, where, "episode_return")
        check_out(episode_length, cnp.NPY_INT64, "int64", (n,), where, "episode_length")
        ended = <u8*>cnp.PyArray_DATA(<cnp.ndarray>terminated)
        cut = <u8*>cnp.PyArray_DATA(<cnp.ndarray>truncated)
        out = Outputs(
            obs=<f32*>cnp.PyArray_DATA(<cnp.ndarray>obs), rewards=<f64*>cnp.PyArray_DATA(<cnp.ndarray>rewards),
            terminated=self.stepped.flags, truncated=self.stepped.flags + n,
            final_obs=<f32*>cnp.PyArray_DATA(<cnp.ndarray>final_obs),
            episode_return=<f64*>cnp.PyArray_DATA(<cnp.ndarray>episode_return),
            episode_length=<i64*>cnp.PyArray_DATA(<cnp.ndarray>episode_length),
            central=NULL, final_central=NULL, mask=NULL, final_mask=NULL,
        )
        if self.central_dim:
            check_out(central, cnp.NPY_FLOAT32, "float32", seen, where, "central")
            check_out(final_central, cnp.NPY_FLOAT32, "float32", seen, where, "final_central")
            out.central = <f32*>cnp.PyArray_DATA(<cnp.ndarray>central)
            out.final_central = <f32*>cnp.PyArray_DATA(<cnp.ndarray>final_central)
        with nogil:
            advance(&self.spec, &self.envs, taken, &out)
            for i in range(n):
                for j in range(i * self.n_agents, (i + 1) * self.n_agents):
                    ended[j] = out.terminated[i]
                    cut[j] = out.truncated[i]

    def stepper(self):
        """Return a capsule with which another kernel steps these environments, with N * A agents as rows. Internal.

        It is valid as long as the environments live. Raises ValueError before the first `reset_all`.
        """
        return self.stepper_of(&self.stepped, self.n_envs * self.n_agents, step_rows)

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of the complete state (S state components, N environments).

        ``state`` (S, N) float64, ``keys`` and ``episodes`` (N,) uint64, ``steps`` (N,) int64 and ``returns`` (N, A)
        float64 of the running episodes.
        """
        return self.snapshot()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore exactly a state from `get_state` of equally many of these environments.

        Raises ValueError or TypeError for other keys, shapes or dtypes, and for invalid values.
        """
        self.put_back(state, "AgentVecEnv.set_state")

"""A single native environment without auto-reset, for learning and experiments."""

import secrets

import numpy as np

cimport numpy as cnp
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport INT64_MAX

from rlox.kernels.checks cimport as_array, as_state, as_index, as_real, as_seed, show
from rlox.kernels.envs.base cimport rlox_batch_v1
from rlox.kernels.envs.episodes cimport Envs, block_of, count, observe_all, start_all
from rlox.kernels.envs.gridworld cimport Params as Grid, spec as gridworld
from rlox.kernels.envs.native_env cimport NativeEnv
from rlox.kernels.philox cimport derive_key
from rlox.kernels.types cimport f32, f64, i64, u8, u64

cnp.import_array()


cdef class Env(NativeEnv):
    """A single native environment without auto-reset, for learning and experiments.

    ``Env(env_id, seed=s)`` has the same episodes as environment 0 of ``VecEnv(1, seed=s, env_id=env_id)``.

    Parameters
    ----------
    env_id
        As for `VecEnv`.
    seed
        0 <= seed < 2**64; None takes one from the operating system.

    Attributes
    ----------
    env_id, obs_dim, discrete, n_actions, act_dim, act_low, act_high, max_episode_steps
        As in `VecEnv`.
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
        """Set up the memory of the chosen environment."""
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
        """Start the next episode, or with a seed, the first one of that seed. Returns the observation, (D,) float32.

        Raises ValueError for a seed outside [0, 2**64).
        """
        cdef cnp.ndarray obs = np.empty(self.spec.obs_dim, np.float32)
        if seed is not None:
            self.rekey(seed, self.name() + ".reset")
        start_all(&self.spec, &self.env, <f32*>cnp.PyArray_DATA(obs))
        self.running = True
        return obs

    def observe(self) -> np.ndarray:
        """Return the current observation, (D,) float32. Raises ValueError before the first `reset`."""
        if self.episode == <u64>-1:
            raise ValueError(f"{self.name()}.observe: an episode must have started; call reset() first")
        cdef cnp.ndarray obs = np.empty(self.spec.obs_dim, np.float32)
        observe_all(&self.spec, &self.env, <f32*>cnp.PyArray_DATA(obs))
        return obs

    def step(self, action) -> dict:
        """Take one step. Without a `reset` before it, the first step starts the first episode.

        Parameters
        ----------
        action
            Discrete: an integer in [0, n_actions). Continuous: (A,) numbers, or one number if A = 1. They are
            converted to float32, and the dynamics clip those outside the bounds.

        Returns
        -------
        dict
            ``obs`` (D,) float32, ``reward`` float, ``terminated`` and ``truncated`` bool.

        Raises
        ------
        ValueError
            If the episode has ended, or the action is out of range, NaN or of another shape.
        TypeError
            If a discrete action is not an integer, or a continuous one is not made of real numbers.
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
        self.running = not count(1, 1, self.spec.max_episode_steps or INT64_MAX, &reward, &terminated, &truncated,
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
        array = as_array(action, where, "action")
        if array.dtype.kind not in "iuf":
            raise TypeError(f"{where}: action must be made of real numbers, got dtype {array.dtype}")
        if array.shape != (self.spec.act_dim,) and (self.spec.act_dim > 1 or array.shape != ()):
            raise ValueError(f"{where}: action must have shape ({self.spec.act_dim},), got {array.shape}")
        array = np.ascontiguousarray(array, np.float32).reshape(self.spec.act_dim)
        if np.isnan(array).any():
            raise ValueError(f"{where}: action must be numbers, not NaN, got {show(action)}")
        return array

    def get_state(self) -> dict:
        """Return the complete state as plain Python numbers."""
        return {
            "state": self.physics.tolist(),
            "key": self.key,
            "episode": <u64>(self.episode + 1),
            "step": self.length,
            "return": self.total,
            "running": bool(self.running),
        }

    def set_state(self, state: dict) -> None:
        """Restore a state from `get_state` exactly. Raises ValueError for other keys or values."""
        where = self.name() + ".set_state"
        as_state(state, tuple(self.get_state()), where)
        cdef object physics = as_real(state["state"], cnp.NPY_FLOAT64, where, "state")
        if physics.shape != (self.spec.state_size,) or not np.isfinite(physics).all():
            raise ValueError(f"{where}: state must be {self.spec.state_size} finite numbers, got {show(state['state'])}")
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
    """A single CartPole-v1 without auto-reset, for learning and experiments.

    ``CartPole(seed=s)`` has the same episodes as environment 0 of ``VecEnv(1, seed=s)``.

    Parameters
    ----------
    seed
        0 <= seed < 2**64; None takes one from the operating system.
    """

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "CartPole-v1", seed)


cdef class Pendulum(Env):
    """A single Pendulum-v1 without auto-reset. Parameters and methods as in `CartPole`."""

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "Pendulum-v1", seed)


cdef class MountainCar(Env):
    """A single MountainCar-v0 without auto-reset. Parameters and methods as in `CartPole`."""

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "MountainCar-v0", seed)


cdef class MountainCarContinuous(Env):
    """A single MountainCarContinuous-v0 without auto-reset. Parameters and methods as in `CartPole`."""

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "MountainCarContinuous-v0", seed)


cdef class Acrobot(Env):
    """A single Acrobot-v1 without auto-reset. Parameters and methods as in `CartPole`."""

    def __init__(self, seed: int | None = None) -> None:
        Env.__init__(self, "Acrobot-v1", seed)


cdef class GridWorld(Env):
    """A grid with a goal in the last corner. The constructor starts the first episode.

    Observations are (row, column), each divided by its largest value. Actions are 0 up, 1 right, 2 down, 3 left;
    walls block moves. A step has reward -0.01; the step that reaches the goal has reward 1 and terminates the episode,
    which is truncated after 4 * rows * cols steps. An episode starts on any cell but the goal, all equally likely.

    Parameters
    ----------
    rows, cols
        1 to 4096 each, but not both 1.
    seed
        0 <= seed < 2**64; None takes one from the operating system.

    Raises
    ------
    ValueError
        If a size or the seed is out of range.
    TypeError
        If a size or the seed is not an integer.
    """

    cdef Grid grid

    def __init__(self, rows: int = 5, cols: int = 5, seed: int | None = None) -> None:
        sizes = {"rows": as_index(rows, "GridWorld", "rows"), "cols": as_index(cols, "GridWorld", "cols")}
        for name, value in sizes.items():
            if not 1 <= value <= 4096:
                raise ValueError(f"GridWorld: {name} must be at least 1 and at most 4096, got {value}")
        if sizes["rows"] * sizes["cols"] == 1:
            raise ValueError("GridWorld: rows and cols must give at least 2 cells, got 1; the goal takes one")
        self.grid = Grid(rows=sizes["rows"], columns=sizes["cols"])
        self.spec = gridworld(&self.grid)
        self.begin(seed)
        self.reset()

    def __reduce__(self):
        return GridWorld, (self.grid.rows, self.grid.columns, 0), self.get_state()

    def __repr__(self) -> str:
        return f"GridWorld(rows={self.grid.rows}, cols={self.grid.columns}, pos={self.pos})"

    def set_state(self, state: dict) -> None:
        """Like `Env.set_state`, but also raises ValueError for a position outside this grid."""
        try:
            row, column = state["state"]
            inside = row in range(self.grid.rows) and column in range(self.grid.columns)
        except (KeyError, TypeError, ValueError):
            inside = True  # Env.set_state raises the error
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
        """Position (row, column) of the walker; can be set to any cell but the goal."""
        return int(self.env.state[0]), int(self.env.state[1])

    @pos.setter
    def pos(self, cell) -> None:
        row, column = self.on_grid(cell, "GridWorld.pos")
        self.env.state[0] = row
        self.env.state[1] = column

    cdef tuple on_grid(self, object cell, str where):
        """Return `cell` as a pair of ints. Raises ValueError unless it is a cell of the grid other than the goal."""
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
        """Return the grid as text with a line per row: ``A`` is the walker, ``G`` the goal, ``.`` any other cell."""
        rows, columns = self.rows, self.cols
        marks = {(rows - 1, columns - 1): "G", self.pos: "A"}
        return "".join(["".join([marks.get((r, c), ".") for c in range(columns)]) + "\n" for r in range(rows)])

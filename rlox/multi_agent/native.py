"""Native environments with several agents, as the arrays of a `MultiAgentStep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlox.config.arguments import warn_renamed
from rlox.envs.registry import is_native_multi_agent
from rlox.envs.spec import native_spec
from rlox.kernels.envs.multi_agent import AgentVecEnv
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep, check_group_actions, group_agents, step_layout

# Names of the agents of rlox's own environments; agents of other environments are agent_0, agent_1, …
_NAMES = {"GridPursuit-v0": "pursuer"}

_CELL = 40  # pixels
_PAPER, _LINE, _PREY = (250, 250, 248), (215, 215, 210), (214, 69, 65)
_PURSUERS = ((38, 93, 171), (22, 133, 112), (128, 74, 161), (180, 120, 20), (70, 70, 75))


class NativeMultiAgentVecEnv:
    """N copies of a native environment with A agents, which start and end their episode together.

    Parameters
    ----------
    env_id : str
        ``GridPursuit-v0``, or the id of an external environment (`rlox.register_env`).
    n_envs : int
        Number of copies N.
    seed : int
        Copy i is seeded with an independent mix of (seed, i).
    kwargs : dict, optional
        Arguments of the environment: ``size``, ``n_pursuers``, ``n_catchers``, ``max_cycles`` and ``randomness`` of
        GridPursuit-v0 (see kernels/envs/pursuit.pxd); external environments have none.
    state : str
        Input of a central critic: ``environment``, ``observations`` (of all agents, joined), or ``auto``: the state of
        the environment if it has a function for it.

    Raises
    ------
    ValueError, TypeError
        If the id does not exist, a number is out of range, or an argument is unknown.
    """

    native = True
    device: str | None = None
    unrestorable_reason: str | None = None

    @property
    def why_not(self) -> str | None:
        """Former name of `unrestorable_reason`."""
        warn_renamed("why_not", "unrestorable_reason", "0.14.0")
        return self.unrestorable_reason

    def __init__(
        self, env_id: str, n_envs: int = 1, seed: int = 0, kwargs: dict[str, Any] | None = None, state: str = "auto"
    ):
        where = "NativeMultiAgentVecEnv"
        arguments = dict(kwargs or {})
        mode = arguments.pop("render_mode", None)
        if mode not in (None, "rgb_array"):
            raise ValueError(f"{where}: render_mode must be None or 'rgb_array', got {mode!r}")
        if state not in ("auto", "environment", "observations"):
            raise ValueError(f"{where}: state must be one of auto, environment, observations, got {state!r}")
        is_native_multi_agent(env_id)  # registers the environment that an installed package offers under this id
        self.kernel = AgentVecEnv(n_envs, seed, env_id, arguments)
        if state == "environment" and not self.kernel.central_dim:
            raise ValueError(
                f"{where}: state must be observations if the environment has no state of its own, like {env_id}, got "
                f"{state!r}"
            )
        n, own = self.kernel.n_agents, native_spec(self.kernel)
        agents = tuple(f"{_NAMES.get(env_id, 'agent')}_{a}" for a in range(n))
        self._has_central = bool(self.kernel.central_dim) and state != "observations"
        self.spec = MultiAgentSpec(
            agents,
            group_agents(agents, [0] * n, [own] * n),
            self.kernel.central_dim if self._has_central else n * own.obs_dim,
            "environment" if self._has_central else "observations",
        )
        self.env_id = env_id
        self.n_envs = n_envs
        self._draws = mode is not None
        self._started = False
        # Whether each array of a step is in a list by group, its shape and its dtype.
        self._layout = {
            name.partition(".")[0]: ("." in name, *like) for name, like in step_layout(self.spec, n_envs).items()
        }
        # A place for the environment's own state if it is not used.
        self._unused = np.empty((2, n_envs, self.kernel.central_dim), np.float32)

    @property
    def seed(self) -> int:
        return self.kernel.seed

    def __len__(self) -> int:
        return self.n_envs

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_all(self, seed: int | None = None) -> MultiAgentStep:
        """Start a new episode in all copies; with a seed, the first episodes of that seed."""
        out = MultiAgentStep.empty(self.spec, self.n_envs)
        out.obs[0][...] = self.kernel.reset_all(seed)
        out.alive[0].fill(True)
        out.state[...] = self.kernel.central() if self._has_central else out.obs[0].reshape(self.n_envs, -1)
        self._started = True
        return out

    def step_all(self, actions: Sequence[Any], out: MultiAgentStep | None = None) -> MultiAgentStep:
        """Step every copy once; see `MultiAgentVecEnv.step_all`."""
        if not self._started:
            self.reset_all()
        group = self.spec.groups[0].spec
        own = actions[0] if len(actions) == 1 else actions
        shape = (self.n_envs, self.spec.n_agents, *group.action_shape)
        # The kernel checks the numbers; other types and shapes are converted here.
        if not isinstance(own, np.ndarray) or own.dtype != group.action_dtype or own.shape != shape:
            (own,) = check_group_actions(self.spec, actions, self.n_envs, None, "NativeMultiAgentVecEnv.step_all")
        if out is None:
            # All these numbers are written below.
            arrays: dict[str, Any] = {
                name: [np.empty(shape, dtype)] if grouped else np.empty(shape, dtype)
                for name, (grouped, shape, dtype) in self._layout.items()
            }
            out = MultiAgentStep(masks=[None], **arrays)
        unused, has = self._unused, self._has_central
        central, final = (out.state, out.final_state) if has else (unused[0], unused[1])
        self.kernel.step_into(
            np.ascontiguousarray(own), out.obs[0], out.rewards[0], out.terminated[0], out.truncated[0],
            out.final_obs[0], out.episode_returns, out.episode_lengths, central, final,
        )  # fmt: skip
        out.alive[0].fill(True)
        if not has:
            out.state[...] = out.obs[0].reshape(self.n_envs, -1)
            out.final_state[...] = out.final_obs[0].reshape(self.n_envs, -1)
        np.logical_or(out.terminated[0][:, 0], out.truncated[0][:, 0], out=out.ended)
        going = ~out.ended
        out.episode_returns[going] = np.nan
        out.episode_lengths[going] = 0
        return out

    def get_state(self) -> dict[str, np.ndarray] | None:
        """Return everything that the future of the running episodes depends on; None before the first episode."""
        return self.kernel.get_state() if self._started else None

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Return whether `state` comes from environments like these, so that `set_state` may succeed."""
        mine = self.kernel.get_state()
        return all(getattr(state.get(key), "shape", None) == array.shape for key, array in mine.items())

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue exactly from the result of `get_state`; raise a ValueError if it does not fit the environments."""
        self.kernel.set_state(state)
        self._started = bool(state["episodes"].all())

    def action_masks(self) -> None:
        """Return None: masks of legal actions are part of what `reset_all` and `step_all` return."""

    def render(self) -> np.ndarray | None:
        """Return a picture of environment 0, (H, W, 3) uint8; None without ``render_mode="rgb_array"``."""
        if not self._draws or self.kernel.env_id != "GridPursuit-v0":
            return None
        return draw_pursuit(self.kernel.central()[0], self.kernel.params["size"])

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""


def draw_pursuit(state: np.ndarray, size: int) -> np.ndarray:
    """Draw GridPursuit-v0 as (H, W, 3) uint8: the prey is a red disc, the pursuers are squares of other colours.

    `state` (2 * (A + 1),) has row and column of each pursuer, then of the prey, divided by size - 1.
    """
    cells = np.rint(np.asarray(state, np.float64).reshape(-1, 2) * (size - 1)).astype(int)
    frame = np.empty((size * _CELL + 1, size * _CELL + 1, 3), np.uint8)
    frame[...] = _PAPER
    frame[::_CELL] = frame[:, ::_CELL] = _LINE
    offsets = np.arange(_CELL) - (_CELL - 1) / 2
    disc = np.hypot(*np.meshgrid(offsets, offsets)) <= 0.36 * _CELL

    def corner(cell: np.ndarray) -> tuple[slice, slice]:
        row, column = cell * _CELL + 1
        return slice(row, row + _CELL - 1), slice(column, column + _CELL - 1)

    frame[corner(cells[-1])][disc[:-1, :-1]] = _PREY
    n = len(cells) - 1
    side = int(_CELL * 0.4)
    for a, cell in enumerate(cells[:-1]):
        # Pursuers in the same cell are drawn on top of each other, each shifted a little.
        shift = 4 + (_CELL - side - 8) * a // max(n - 1, 1)
        frame[corner(cell)][shift : shift + side, shift : shift + side] = _PURSUERS[a % len(_PURSUERS)]
    return frame

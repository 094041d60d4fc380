"""The interface of every vector environment, and the arrays of a step."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from rlox.envs.spec import EnvSpec
from rlox.processes.memory import Layout


class VecEnv(Protocol):
    """N copies of an environment that are stepped together. Each restarts in the step in which its episode ends.

    With several agents (see `rlox.multi_agent`), `spec` is a `MultiAgentSpec`, and the arrays of a step and the actions
    are lists with an item for each group of agents.

    Attributes
    ----------
    spec : EnvSpec
        Shapes, sizes and bounds.
    n_envs : int
        N.
    native : bool
        Whether kernels step the copies. They then have `stepper`, and `observe` recomputes the current observations.
    device : str, optional
        None if observations, actions and the arrays of a step are NumPy arrays on the host. Otherwise they are tensors
        on this device, and no method but `get_state` and `set_state` waits for it.
    unrestorable_reason : str, optional
        Why the state cannot be saved and restored exactly; None if it can.
    """

    spec: Any
    n_envs: int
    native: bool
    device: str | None
    unrestorable_reason: str | None

    def reset_all(self, seed: int | None = None) -> Any:
        """Start a new episode in every copy and return the observations (N, *obs_shape).

        The first call seeds the copies; later calls do only if `seed` is given.
        """

    def step_all(self, actions: Any, out: Any = None) -> Any:
        """Step every copy once. The first call starts the first episodes unless `reset_all` did.

        Parameters
        ----------
        actions : array (N, *action_shape)
            In the environment's units. Continuous actions are not clipped here.
        out : dict, optional
            Arrays to write into, by the keys of `step_layout`; only these are filled, and `out` is returned.

        Returns
        -------
        dict
            The arrays of `step_arrays`. ``obs`` comes from the next episode if one ended, ``final_obs`` is what the
            step led to, and the totals are those of the episode that the step belongs to.
        """

    def action_masks(self) -> np.ndarray | None:
        """Return the legal actions of the current observations, (N, sum(choices)) bool; None unless `spec.masked`.

        It may be called after `reset_all`, `step_all` and `set_state`, and the caller may keep the array.
        """

    def get_state(self) -> dict[str, np.ndarray] | None:
        """Return everything that the future of the running episodes depends on; None if they cannot be restored."""

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue exactly from the result of `get_state`; raise a ValueError if it does not fit the environments."""

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Return whether `state` comes from environments like these, so that `set_state` may succeed."""

    def render(self) -> np.ndarray | None:
        """Return a picture of copy 0, (H, W, 3) uint8; None if it is not drawn."""

    def close(self) -> None:
        """Close the copies and their processes. May be called again."""


# The numbers of a step beside observations, one for each copy, with their types.
RESULTS: dict[str, type] = {
    "rewards": np.float64,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "episode_return": np.float64,
    "episode_length": np.int64,
}


def step_layout(spec: EnvSpec, n: int) -> Layout:
    """Return the shape and dtype of each array that `VecEnv.step_all` of N copies fills.

    ``action_mask`` is True for the actions that are legal in ``obs``, and ``final_action_mask`` for those that are
    legal in ``final_obs``; all are after a termination. The flags of several components follow each other.
    """
    obs = ((n, *spec.obs_shape), spec.obs_dtype)
    layout: Layout = {"obs": obs, "final_obs": obs, **{name: ((n,), dtype) for name, dtype in RESULTS.items()}}
    if spec.masked:
        layout["action_mask"] = layout["final_action_mask"] = ((n, sum(spec.choices)), np.bool_)
    return layout


def step_arrays(spec: EnvSpec, n: int) -> dict[str, np.ndarray]:
    """Return new arrays for the results of `VecEnv.step_all`, see `step_layout`."""
    return {name: np.empty(shape, dtype) for name, (shape, dtype) in step_layout(spec, n).items()}

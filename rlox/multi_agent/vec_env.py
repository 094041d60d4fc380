"""The interface of N environments with several agents, and the function that creates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rlox.config import integer
from rlox.config.base import choice
from rlox.envs.protocols import VecEnv
from rlox.envs.registry import env_name, is_native_multi_agent
from rlox.envs.tensor.table import REGISTERED_AGENTS
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep

BACKENDS = ("auto", "native", "pettingzoo")


class MultiAgentVecEnv(VecEnv, Protocol):
    """N environments with up to A agents each, with same-step auto-reset.

    An agent is alive before a step if it acts in it. After the step it continues, is terminated, or is truncated. An
    agent that the environment no longer lists and that has no flag counts as terminated. An agent that is listed again
    later is alive again, as if it were another agent: nothing is carried across the gap. The episode ends when no agent
    is left.
    """

    spec: MultiAgentSpec

    @property
    def seed(self) -> int:
        """Seed of the copies."""

    def reset_all(self, seed: int | None = None) -> MultiAgentStep:
        """Start a new episode in all copies; only the first call, and calls with `seed`, seed them."""

    def step_all(self, actions: Sequence[np.ndarray], out: MultiAgentStep | None = None) -> MultiAgentStep:
        """Step every copy once; the first call starts the first episodes if `reset_all` did not.

        Parameters
        ----------
        actions : sequence of arrays
            By group (N, A_g) integers from 0 for Discrete actions, (N, A_g, K) for MultiDiscrete, (N, A_g, D) floats
            for Box, in the environment's units and not clipped here. Rows of dead agents are ignored.
        out : MultiAgentStep, optional
            Arrays to write to and return (see `MultiAgentStep.empty`); by default new arrays.

        Raises
        ------
        ValueError
            If actions have the wrong shape or are out of range, or the environment breaks PettingZoo's interface.
        FloatingPointError
            If an observation, reward or state is not finite. The message names the agent.
        """


def make_multi_agent_env(
    env: str | Callable[..., Any],
    n_envs: int,
    seed: int,
    kwargs: dict[str, Any] | None = None,
    workers: int = 0,
    backend: str = "auto",
    state: str = "auto",
) -> MultiAgentVecEnv:
    """Create N copies of an environment with several agents.

    Parameters
    ----------
    env : str or callable
        ``pettingzoo:package.module`` (a module with ``parallel_env``, or with ``env`` of an AEC environment),
        ``package.module:factory``, a native id such as ``GridPursuit-v0``, a registered tensor environment, or a
        callable that returns a PettingZoo environment.
    n_envs, seed : int
        Number of copies N, and their seed. Results are the same with and without workers.
    kwargs : dict, optional
        Arguments of the environment.
    workers : int
        Number of processes that step the copies of a PettingZoo environment; 0: this process steps them.
    backend : str
        ``native``, ``pettingzoo`` (which runs a native environment through PettingZoo's interface), or ``auto``:
        native if the environment is native.
    state : str
        Input of a central critic: ``environment`` (its ``state()``), ``observations`` (of all agents, joined), or
        ``auto``: the state of the environment if it has one.

    Raises
    ------
    ValueError, TypeError, ImportError
        If the environment cannot be created, or breaks PettingZoo's interface. The message says what is wrong.
    """
    where = "make_multi_agent_env"
    n_envs = integer(where, "n_envs", n_envs, 1)
    seed = integer(where, "seed", seed, 0, 2**64 - 1)
    if not 0 <= integer(where, "workers", workers, 0) <= n_envs:
        raise ValueError(f"{where}: workers must be between 0 and n_envs ({n_envs}), got {workers}")
    choice(where, "backend", backend, BACKENDS)
    native = is_native_multi_agent(env)
    if backend == "native" and not native:
        raise ValueError(f"{where}: env must be native with backend=native, got {env_name(env)}; use backend=auto")
    if native and backend != "pettingzoo":
        if workers:
            raise ValueError(
                f"{where}: workers must be 0 for {env}, whose copies are stepped by compiled code, got {workers}; "
                "or use backend=pettingzoo"
            )
        from rlox.multi_agent.native import NativeMultiAgentVecEnv

        return NativeMultiAgentVecEnv(env, n_envs, seed, kwargs, state)  # type: ignore[arg-type]  # an id
    if env in REGISTERED_AGENTS and not workers and backend == "auto":
        from rlox.multi_agent.tensor import TensorMultiAgentVecEnv

        return TensorMultiAgentVecEnv(env, n_envs, seed, kwargs)
    if workers:
        from rlox.multi_agent.workers import ParallelPettingZooVecEnv

        return ParallelPettingZooVecEnv(env, n_envs, seed, kwargs, workers, state)
    from rlox.multi_agent.pettingzoo import PettingZooVecEnv

    return PettingZooVecEnv(env, n_envs, seed, kwargs, state)

"""PettingZoo environments stepped by worker processes, with bit-identical results to `PettingZooVecEnv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlox.envs.state import first_seeds
from rlox.envs.workers import Share, WorkerGroup
from rlox.multi_agent.pettingzoo import ForeignMultiAgentVecEnv
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep, action_layout, step_layout
from rlox.multi_agent.zoo_copies import ZooCopies
from rlox.processes.memory import Layout

_NAME = "ParallelPettingZooVecEnv"


class ParallelPettingZooVecEnv(ForeignMultiAgentVecEnv):
    """N copies of a PettingZoo environment, stepped by `workers` processes, with the same results for a seed.

    Parameters
    ----------
    env, n_envs, seed, kwargs, state
        As for `PettingZooVecEnv`; cloudpickle must be able to pickle a callable.
    workers : int
        Number of processes, at most N; each steps an equal share of the copies, one after the other.

    Raises
    ------
    ValueError, TypeError, ImportError
        The same errors as `PettingZooVecEnv`.
    RuntimeError
        If a worker dies. All workers are then stopped.
    Exception
        The exception of an environment, from a `WorkerTraceback`; a RuntimeError if it cannot be pickled. All workers
        are then stopped.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        n_envs: int = 1,
        seed: int = 0,
        kwargs: dict[str, Any] | None = None,
        workers: int = 1,
        state: str = "auto",
    ):
        super().__init__(env, n_envs, seed)
        value = (env, kwargs, first_seeds(seed, n_envs), state)
        self._hold(WorkerGroup(_NAME, env, ZooShare, value, n_envs, workers))
        self._actions, self._shared = _split(self._group.arrays)

    def _reset(self, seeds: list[int | None], out: MultiAgentStep) -> None:
        self._group.reset(seeds)
        out.take(self._shared)

    def _step(self, actions: list[np.ndarray], out: MultiAgentStep) -> None:
        for shared, taken in zip(self._actions, actions, strict=True):
            shared[...] = taken
        self._group.step()
        out.take(self._shared)


def _split(arrays: dict[str, np.ndarray]) -> tuple[list[np.ndarray], MultiAgentStep]:
    """Return the actions by group, and the arrays of a step."""
    actions = [array for key, array in arrays.items() if key.startswith("actions.")]
    step = {key: array for key, array in arrays.items() if key != "seeds" and not key.startswith("actions.")}
    return actions, MultiAgentStep.over(step)


class ZooShare(Share):
    """A worker's PettingZoo environments, and their rows of the shared arrays."""

    @staticmethod
    def layout(spec: MultiAgentSpec, n: int) -> Layout:
        return {"seeds": ((n,), np.int64), **action_layout(spec, n), **step_layout(spec, n)}

    def make(self, value: Any, process: str) -> ZooCopies:
        env, kwargs, seeds, state = value
        return ZooCopies(env, kwargs, seeds[self.rows], _NAME, self.rows.start, process, state)

    def select(self, arrays: dict[str, np.ndarray]) -> tuple[Any, Any, Any, Any]:
        own = {key: array[self.rows] for key, array in arrays.items()}
        actions, step = _split(own)
        return own["seeds"], actions, step, step

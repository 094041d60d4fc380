"""Gymnasium environments stepped by worker processes, with exactly the same results as `GymVecEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlox.envs.gym_vec_env import EnvGroup, ForeignVecEnv
from rlox.envs.masks import MASK
from rlox.envs.protocols import step_layout
from rlox.envs.registry import foreign_id
from rlox.envs.spec import EnvSpec
from rlox.envs.workers import RESET, RESTORE, Share, WorkerGroup
from rlox.processes.memory import Layout


class ParallelGymVecEnv(ForeignVecEnv):
    """N copies of a gymnasium environment, stepped by `workers` processes, with the same results as `GymVecEnv`.

    Parameters
    ----------
    env_id, n_envs, seed, kwargs, wrappers
        As for `GymVecEnv`; cloudpickle must be able to pickle a callable.
    workers : int
        Number of processes, at most N. Each steps an equal share of the copies, one after the other.

    Raises
    ------
    ValueError, TypeError, ImportError
        Same as `GymVecEnv`.
    RuntimeError
        If a worker dies. All workers are then stopped.
    Exception
        The exception of an environment, with a `WorkerTraceback` as its cause; a RuntimeError if the exception cannot
        be sent. All workers are then stopped.
    """

    def __init__(
        self,
        env_id: str | Callable[..., Any],
        n_envs: int = 1,
        seed: int = 0,
        kwargs: dict[str, Any] | None = None,
        wrappers: Sequence[Any] = (),
        workers: int = 1,
    ):
        super().__init__(env_id, n_envs, seed)
        if isinstance(env_id, str):
            env_id = foreign_id(env_id)
        value = (env_id, kwargs, wrappers, self._first_seeds())
        self._hold(WorkerGroup("ParallelGymVecEnv", self.env_id, GymShare, value, n_envs, workers))
        self._shared = self._group.arrays

    def _reset(self, seeds: list[int | None], obs: np.ndarray) -> None:
        self._group.reset(seeds)
        obs[...] = self._shared["obs"]

    def _step(self, actions: np.ndarray, out: dict[str, np.ndarray]) -> None:
        self._shared["actions"][...] = actions
        self._group.step()
        for key, array in out.items():
            array[...] = self._shared[key]

    def _get_masks(self) -> np.ndarray:
        return self._shared[MASK].copy()


class GymShare(Share):
    """A worker's gymnasium environments, and their rows of the shared arrays."""

    @staticmethod
    def layout(spec: EnvSpec, n: int) -> Layout:
        actions = ((n, *spec.action_shape), spec.action_dtype)
        return {"actions": actions, "seeds": ((n,), np.int64), **step_layout(spec, n)}

    def make(self, value: Any, process: str) -> EnvGroup:
        env, kwargs, wrappers, seeds = value
        n, first = self.rows.stop - self.rows.start, self.rows.start
        return EnvGroup(env, kwargs, wrappers, n, "ParallelGymVecEnv", first, process, seeds[first])

    def answer(self, kind: bytes, value: Any) -> Any:
        answer = super().answer(kind, value)
        if kind in (RESET, RESTORE) and self.group.spec.masked:  # a step writes them itself
            self._out[MASK][...] = self.group.action_masks()
        return answer

    def select(self, arrays: dict[str, np.ndarray]) -> tuple[Any, Any, Any, Any]:
        own = {key: array[self.rows] for key, array in arrays.items()}
        return own["seeds"], own["actions"], own, own["obs"]

"""PettingZoo environments stepped by worker processes, with bit-identical results to `PettingZooVecEnv`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from rlox.envs.parallel_env import (
    Workers,
    arrays_of,
    put_seeds,
    seeds_of,
    serve,
    shared_out,
    size_of,
)
from rlox.envs.protocols import Layout
from rlox.multi_agent.pettingzoo import ForeignMultiAgentVecEnv, ZooCopies, zoo_seeds
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep, action_arrays, step_arrays

_NAME = "ParallelPettingZooVecEnv"


class ParallelPettingZooVecEnv(ForeignMultiAgentVecEnv):
    """N copies of a PettingZoo environment, stepped by `workers` processes.

    Results for a seed are the same as with `PettingZooVecEnv`.

    Parameters
    ----------
    env : str or callable
        See `rlox.multi_agent.pettingzoo.make_zoo_env`; cloudpickle must be able to pickle a callable.
    n_envs : int
        Number of copies N.
    seed : int
        Copy i is seeded with an independent mix of (seed, i).
    kwargs : dict, optional
        Arguments of the environment.
    workers : int
        Number of processes, at most N; each steps an equal share of the copies, one after the other.
    state : str
        ``environment``, ``observations`` or ``auto``; see `rlox.multi_agent.make_multi_agent_env`.

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
        if not 1 <= workers <= n_envs:
            raise ValueError(f"{_NAME}: workers must be between 1 and n_envs ({n_envs}), got {workers}")
        order = (env, kwargs, zoo_seeds(seed, n_envs), state)
        orders = shared_out(_NAME, env, order, n_envs, workers)

        self._pool = Workers(
            _NAME, env, "rlox.multi_agent.workers", "_work", orders, lambda spec: _layout(spec, n_envs)
        )
        self._workers = self._pool.workers
        self.spec, self._stacks = self._pool.spec, self._pool.stacks
        self.unrestorable_reason = self._pool.unrestorable_reason
        self._seeds, self._actions, self._shared = _parted(self._pool.arrays)

    def _reset(self, seeds: list[int | None], out: MultiAgentStep) -> None:
        put_seeds(seeds, self._seeds)
        self._pool.reset()
        out.take(self._shared)

    def _step(self, actions: list[np.ndarray], out: MultiAgentStep) -> None:
        for shared, given in zip(self._actions, actions, strict=True):
            shared[...] = given
        self._pool.step()
        out.take(self._shared)

    def _get_state(self) -> tuple[list[Any], bytes] | None:
        found, self.unrestorable_reason = self._pool.get_state(), self._pool.unrestorable_reason
        return found

    def _restore_states(self, states: list[Any]) -> None:
        self._pool.set_state(states)

    def render(self) -> np.ndarray | None:
        """Return a picture of environment 0, (H, W, 3) uint8; None without ``render_mode="rgb_array"``."""
        return self._pool.render()

    def _close(self) -> None:
        self._pool.close()


def _layout(spec: MultiAgentSpec, n: int) -> Layout:
    return {"seeds": ((n,), np.int64), **action_arrays(spec, n), **step_arrays(spec, n)}


def _parted(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, list[np.ndarray], MultiAgentStep]:
    """Return the seeds, the actions by group, and the arrays of a step."""
    actions = [array for key, array in arrays.items() if key.startswith("actions.")]
    step = {key: array for key, array in arrays.items() if key != "seeds" and not key.startswith("actions.")}
    return arrays["seeds"], actions, MultiAgentStep.over(step)


class _ZooShare:
    """A worker's PettingZoo environments, and their rows of the shared arrays."""

    def __init__(self, value: Any, rows: slice, index: int):
        env, kwargs, seeds, state = value
        self._n, self._rows, self._first = len(seeds), rows, index == 0
        process = f"worker {index}, pid {os.getpid()}"
        self._copies = ZooCopies(env, kwargs, seeds[rows], _NAME, rows.start, process, state)

    def hello(self) -> tuple[MultiAgentSpec, str | None, list[list[str]]]:
        return self._copies.spec, self._copies.unrestorable_reason, self._copies.stacks

    def attach(self, memory_fd: int) -> None:
        layout = _layout(self._copies.spec, self._n)
        seeds, actions, step = _parted(arrays_of(mmap.mmap(memory_fd, size_of(layout)), layout))
        self._seeds, self._actions = seeds[self._rows], [array[self._rows] for array in actions]
        self._out = step.rows(self._rows)

    def step(self) -> None:
        self._copies.step(self._actions, self._out)

    def reset(self) -> None:
        self._copies.reset(seeds_of(self._seeds), self._out)

    def save(self) -> Any:
        return self._copies.get_state(), self._copies.unrestorable_reason

    def restore(self, states: list[Any]) -> None:
        self._copies.set_state(states)

    def render(self) -> Any:
        return self._copies.render() if self._first else None

    def close(self) -> None:
        self._copies.close()


def _work(sock_fd: int, memory_fd: int, parent: int) -> None:
    """The main function of a worker."""
    serve(sock_fd, memory_fd, parent, _ZooShare)

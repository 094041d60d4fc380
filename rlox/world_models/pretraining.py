"""Fill a sequence memory with a dataset's episodes, for a model to learn from before the agent acts."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlox.envs import EnvSpec

_AT_ONCE = 65_536  # transitions that are converted to rows together


def n_rows(dataset: Any) -> int:
    """Return the number of rows that `fill` pushes: one for each transition and each episode's last observation."""
    return len(dataset) + dataset.n_episodes()


def fill(buffer: Any, dataset: Any, spec: EnvSpec) -> None:
    """Push a dataset's episodes one after the other, spread evenly over the memory's environments.

    The agent's states consist of zeros and the previous action, as for random actions. No row counts as new: batches
    draw these rows like any others. An episode without an end in the data counts as truncated.
    """
    data = dataset.get_state()
    terminated, truncated = np.asarray(data["terminated"], np.bool_), np.asarray(data["truncated"], np.bool_).copy()
    if len(truncated) and not terminated[-1]:
        truncated[-1] = True
    n, width, state_dim = buffer.n_envs, spec.model_width, buffer.state_dim
    stops = np.flatnonzero(terminated | truncated) + 1
    starts = np.append(0, stops[:-1])
    filled = np.zeros(n, np.int64)
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        env = int(filled.argmin())
        filled[env] += stop - start + 1
        for at in range(start, stop, _AT_ONCE):
            end = min(at + _AT_ONCE, stop)
            last, rows = end == stop, np.arange(at, end)
            actions = spec.to_model(_actions(data["actions"][rows], spec))
            m = len(rows) + last
            taken, before = np.zeros((m, width), np.float32), np.zeros((m, state_dim), np.float32)
            taken[: len(rows)] = actions
            before[1:, state_dim - width :] = actions[: m - 1]
            rewards, over = np.zeros(m, np.float32), np.zeros((2, m), np.bool_)
            rewards[1:] = data["rewards"][rows[: m - 1]]
            if at > start:  # the previous piece ended in the middle of the episode
                rewards[0] = data["rewards"][at - 1]
                before[0, state_dim - width :] = spec.to_model(_actions(data["actions"][at - 1 : at], spec))[0]
            obs = np.asarray(data["obs"][rows], spec.obs_dtype).reshape(len(rows), -1)
            if last:
                final = np.asarray(data["next_obs"][stop - 1], spec.obs_dtype).reshape(1, -1)
                obs, over[:, -1] = np.concatenate([obs, final]), (terminated[stop - 1], truncated[stop - 1])
            first = np.zeros(m, np.bool_)
            first[0] = at == start
            buffer.push_batch(
                obs, None, taken, rewards, *over, is_first=first, state=before, envs=np.full(m, env, np.int64)
            )
    buffer.clear_queue()


def _actions(actions: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """Return a dataset's actions in the environment's shape and dtype."""
    return np.asarray(actions).reshape(-1, *spec.action_shape).astype(spec.action_dtype)

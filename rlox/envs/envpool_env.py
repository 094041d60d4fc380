"""N EnvPool environments, stepped in EnvPool's C++ threads, with the same arrays as the native `VecEnv`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from typing import Any

import numpy as np

from rlox.config import nearest
from rlox.envs.gym_vec_env import ForeignVecEnv, GymVecEnv
from rlox.envs.registry import VecEnv, is_native
from rlox.envs.spec import SpaceAdapter
from rlox.envs.state import first_seeds

# Arguments of envpool.make about its threads, which gymnasium environments do not have.
_THREAD_KWARGS = ("num_threads", "thread_affinity_offset")

# Arguments of envpool.make that rlox sets.
_OWN_KWARGS = {
    "num_envs": "it is set by n_envs",
    "batch_size": "all environments are stepped together",
    "seed": "it follows from the run's seed",
    "env_seed": "it follows from the run's seed",
    "max_num_players": "rlox supports one player",
    "gym_reset_return_info": "EnvPool's default is required",
}


def _envpool():
    try:
        import envpool
    except ImportError as e:
        raise ImportError(
            "EnvPoolVecEnv: the backend envpool needs EnvPool, which is not installed; "
            'pip install "rlox-cli[envpool]" (Python 3.11 or later)'
        ) from e
    return envpool


def check_envpool_id(env_id: Any) -> None:
    """Raise TypeError, ValueError or ImportError unless EnvPool has such an environment other than an Atari game."""
    if not isinstance(env_id, str):
        raise TypeError(f"EnvPoolVecEnv: env_id must be an EnvPool id, got {env_id!r}; pass backend='gymnasium'")
    known = _envpool().list_all_envs()
    if game := _atari_game(env_id, known):
        # EnvPool's games have other observations than ALE's with gymnasium's wrappers, and evaluation needs the same.
        raise ValueError(
            f"EnvPoolVecEnv: env_id must not be an Atari game, got {env_id!r}: rlox evaluates in gymnasium, which "
            f"does not have EnvPool's versions of the games; take ALE/{game}-v5 with env.backend=gymnasium, and "
            "env.workers=N to step it in N processes"
        )
    if env_id not in known:
        from gymnasium import registry

        hint = nearest(env_id, [id for id in known if id in registry or is_native(id)])
        remedy = hint if hint.startswith("did") else "envpool.list_all_envs() lists the ids"
        raise ValueError(f"EnvPoolVecEnv: env_id must be a known EnvPool id, got {env_id!r}; {remedy}")


def _atari_game(env_id: str, known: Collection[str]) -> str | None:
    """Return the name of the Atari game of an id of EnvPool, ALE or old gym; None if it is none."""
    from gymnasium import registry

    match = re.fullmatch(r"(?:ALE/)?(\w+?)(?:-ram)?(?:NoFrameskip|Deterministic)?-v\d+", env_id)
    if match is None or (id := f"{match[1]}-v5") not in known or id in registry:
        return None
    return match[1] if type(_envpool().make_spec(id)).__name__ == "AtariEnvSpec" else None


def evaluation_kwargs(pool: EnvPoolVecEnv) -> dict[str, Any]:
    """Return the kwargs that evaluation passes to ``gymnasium.make``: those of `pool` without the ones about threads.

    The gymnasium environment is created once, so that an error is raised before training if it is missing, or has other
    observations or actions.
    """
    env_id, spec = pool.env_id, pool.spec
    kwargs = {key: value for key, value in pool.kwargs.items() if key not in _THREAD_KWARGS}
    try:
        env = VecEnv(1, 0, env_id) if is_native(env_id) and not kwargs else GymVecEnv(env_id, 1, 0, kwargs)
    except (ValueError, ImportError) as e:
        from gymnasium import registry

        if env_id not in registry:
            raise ValueError(
                f"EnvPoolVecEnv: {env_id} must exist in gymnasium too, where evaluation runs it, but gymnasium has no "
                "such id; take an environment of gymnasium with env.backend=gymnasium, and env.workers=N to step it in "
                "N processes"
            ) from e
        kind = ImportError if isinstance(e, ImportError) else ValueError
        raise kind(
            f"EnvPoolVecEnv: {env_id} must exist in gymnasium too, where evaluation runs it with kwargs {kwargs}: {e}"
        ) from e
    theirs, parts = env.spec, [] if env.native else _parts(env.envs[0].observation_space)
    env.close()
    if parts != _parts(pool.observation_space):
        raise ValueError(
            f"EnvPoolVecEnv: the parts of an observation of {env_id} must be the same and in the same order in EnvPool "
            f"and in gymnasium, where evaluation runs it, got {_parts(pool.observation_space)} and {parts}"
        )
    if theirs != spec:
        raise ValueError(
            f"EnvPoolVecEnv: {env_id} must be the same in EnvPool and in gymnasium, where evaluation runs it, got "
            f"observations {spec.obs_shape} and {spec.describe_actions()} in EnvPool, {theirs.obs_shape} and "
            f"{theirs.describe_actions()} in gymnasium (bounds and dtypes count too); pass kwargs that make them equal"
        )
    return kwargs


def _parts(space: Any) -> list[Any]:
    """Return the names of the parts of a Dict, in the order in which observations are flattened."""
    spaces = getattr(space, "spaces", None)
    return [(key, _parts(part)) for key, part in spaces.items()] if isinstance(spaces, dict) else []


def _sort_parts(space: Any) -> Any:
    """Return `space` with the parts of a Dict in the order that gymnasium uses in its own environments."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        return space
    return spaces.Dict({key: _sort_parts(part) for key, part in space.spaces.items()})


def _item(batch: Any, i: int) -> Any:
    """Return the observation of environment i from an array of N observations, or from a dict of such arrays."""
    return {key: _item(part, i) for key, part in batch.items()} if isinstance(batch, dict) else batch[i]


class EnvPoolVecEnv(ForeignVecEnv):
    """N copies of an EnvPool environment, with same-step auto-reset.

    EnvPool itself starts a new episode in the step after the one that ended it. Here, copies whose episode
    ended are reset in the same step. Rewards of EnvPool are float32. If an episode terminates in the same step that
    reaches its time limit, EnvPool reports only the truncation. Training uses EnvPool; evaluation runs one copy of
    gymnasium's environment of the same id, or of the native one. EnvPool's Atari games are refused, because gymnasium
    has no environments with the same observations.

    `env_id` is one of ``envpool.list_all_envs()``, and `kwargs` are passed to ``envpool.make``: ``num_threads`` is 1
    unless given, and 0 lets EnvPool choose. The number of threads does not change the trajectories.

    Raises
    ------
    ImportError
        If EnvPool is not installed.
    TypeError, ValueError
        For an unknown id, arguments that EnvPool rejects, or spaces that `SpaceAdapter` does not support.
    """

    def __init__(self, env_id: str, n_envs: int = 1, seed: int = 0, kwargs: dict[str, Any] | None = None):
        super().__init__(env_id, n_envs, seed)
        self.unrestorable_reason = "EnvPool does not expose their state"
        check_envpool_id(env_id)
        self.kwargs = {"num_threads": 1, **(kwargs or {})}
        for key, why in _OWN_KWARGS.items():
            if key in self.kwargs:
                raise ValueError(f"EnvPoolVecEnv: kwargs must not contain {key}, {why}; got {kwargs}")
        threads = self.kwargs["num_threads"]
        if not isinstance(threads, int) or threads < 0:
            # EnvPool would end the process on such a value.
            raise ValueError(f"EnvPoolVecEnv: num_threads must be an integer >= 0, got {threads!r}")
        self._pool: Any = self._make_pool(first_seeds(seed, n_envs)[0])
        if self._pool.config["max_num_players"] > 1:
            raise ValueError(
                f"EnvPoolVecEnv: env_id must be an environment for one player, got {env_id!r} for "
                f"{self._pool.config['max_num_players']}"
            )
        space = self.observation_space
        self._adapter = SpaceAdapter(space, self._act_space, "EnvPoolVecEnv")
        self.spec = self._adapter.spec
        from gymnasium import spaces

        self._plain = isinstance(space, spaces.Box) and len(space.shape) == 1
        self._returns = np.zeros(n_envs)
        self._lengths = np.zeros(n_envs, np.int64)

    def _make_pool(self, seed: int) -> Any:
        n = self.n_envs
        self._pool_seed = seed
        try:
            # Copy i is seeded with `seed` + i, which must stay a 32-bit integer.
            pool = _envpool().make(
                self.env_id, env_type="gymnasium", num_envs=n, seed=seed % (2**31 - n), **self.kwargs
            )
        except (TypeError, ValueError, AssertionError, RuntimeError) as e:
            why = str(e).strip().partition("\n")[0]
            raise ValueError(f"EnvPoolVecEnv: {self.env_id} does not take kwargs {self.kwargs}: {why}") from e
        with warnings.catch_warnings():
            # gymnasium warns about the precision of EnvPool's bounds when the spaces are first created.
            warnings.simplefilter("ignore", UserWarning)
            self.observation_space, self._act_space = _sort_parts(pool.observation_space), pool.action_space
        return pool

    def _require_open(self) -> None:
        if self._pool is None:
            raise ValueError(f"EnvPoolVecEnv: {self.env_id} must be open, but was closed; create a new one")

    def _reset(self, seeds: list[int | None], obs: np.ndarray) -> None:
        self._require_open()
        if seeds[0] is not None and (self._started or seeds[0] != self._pool_seed):
            self._pool = self._make_pool(seeds[0])  # EnvPool is only seeded when it is created
        first, _ = self._pool.reset()
        self._observe(first, obs, np.arange(self.n_envs))
        self._returns[:], self._lengths[:] = 0.0, 0

    def _step(self, actions: np.ndarray, out: dict[str, np.ndarray]) -> None:
        self._require_open()
        pool, space = self._pool, self._act_space
        taken = actions.reshape(self.n_envs, *space.shape) + getattr(space, "start", 0)
        raw, rewards, terminated, truncated, _ = pool.step(taken.astype(space.dtype))
        self._returns += rewards
        self._lengths += 1
        numbers = {
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "episode_return": self._returns,
            "episode_length": self._lengths,
        }
        for key in numbers.keys() & out.keys():
            out[key][:] = numbers[key]
        reached = [out[key] for key in ("final_obs", "obs") if key in out]
        if reached:
            self._observe(raw, reached[0], np.arange(self.n_envs))
            for other in reached[1:]:
                other[:] = reached[0]
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            first, _ = pool.reset(ended.astype(np.int32))
            if "obs" in out:
                self._observe(first, out["obs"], ended)
            self._returns[ended], self._lengths[ended] = 0.0, 0

    def _observe(self, raw: Any, out: np.ndarray, rows: np.ndarray) -> None:
        """Write EnvPool's observations of the environments `rows`, in this order, to their rows of `out`."""
        if self._plain:
            out[rows] = raw
            return
        for i, row in enumerate(rows):
            out[row] = self._adapter.observe(_item(raw, i))

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

"""EnvPool's environments, N of them stepped in C++ threads of its own, with the arrays of the native `VecEnv`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.config import nearest
from rlox.envs.gym_vec_env import ForeignVecEnv, GymVecEnv
from rlox.envs.registry import is_native
from rlox.envs.spec import SpaceAdapter, spec_of
from rlox.kernels.envs.vec_env import VecEnv
from rlox.kernels.rng import Rng

# Arguments of envpool.make about its threads, which no environment of gymnasium takes.
_THREAD_KWARGS = ("num_threads", "thread_affinity_offset")

# Arguments of envpool.make that follow from what rlox is asked for.
_OWN_KWARGS = {
    "num_envs": "it is n_envs",
    "batch_size": "all environments are stepped together",
    "seed": "it follows from the run's seed",
    "env_seed": "it follows from the run's seed",
    "max_num_players": "a policy plays alone",
    "gym_reset_return_info": "EnvPool's own default is needed",
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
    """Raise unless EnvPool has an environment of this id.

    Raises
    ------
    TypeError
        If it is no id.
    ValueError
        If EnvPool does not know it; names the nearest one that it does.
    ImportError
        If EnvPool is not installed.
    """
    if not isinstance(env_id, str):
        raise TypeError(f"EnvPoolVecEnv: env_id must be an id of EnvPool's, got {env_id!r}; pass backend='gymnasium'")
    known = _envpool().list_all_envs()
    if env_id not in known:
        hint = nearest(env_id, known)
        remedy = hint if hint.startswith("did") else "envpool.list_all_envs() lists the ids"
        raise ValueError(f"EnvPoolVecEnv: env_id must be one that EnvPool has, got {env_id!r}; {remedy}")


def evaluation_kwargs(pool: EnvPoolVecEnv) -> dict[str, Any]:
    """What evaluation passes to ``gymnasium.make`` beside training on `pool`: its kwargs without those about threads.

    Makes the environment once, so that a missing one is an error before training.

    Raises
    ------
    ValueError
        If gymnasium has no such environment, or one with other observations or actions.
    ImportError
        If it needs a package that is not installed.
    """
    env_id, spec = pool.env_id, pool.spec
    kwargs = {key: value for key, value in pool.kwargs.items() if key not in _THREAD_KWARGS}
    try:
        env = VecEnv(1, 0, env_id) if is_native(env_id) and not kwargs else GymVecEnv(env_id, 1, 0, kwargs)
    except (ValueError, ImportError) as e:
        kind = ImportError if isinstance(e, ImportError) else ValueError
        raise kind(
            f"EnvPoolVecEnv: {env_id} must exist in gymnasium too, where evaluation plays it with kwargs {kwargs}: {e}"
        ) from e
    theirs, parts = spec_of(env), []
    if isinstance(env, GymVecEnv):
        parts = _parts(env.envs[0].observation_space)
        env.close()
    if parts != _parts(pool.observation_space):
        raise ValueError(
            f"EnvPoolVecEnv: the parts of an observation of {env_id} must be the same and in the same order in EnvPool "
            f"and in gymnasium, where evaluation plays it, got {_parts(pool.observation_space)} here, {parts} there"
        )
    if theirs != spec:
        raise ValueError(
            f"EnvPoolVecEnv: {env_id} must be the same in EnvPool and in gymnasium, where evaluation plays it, got "
            f"observations {spec.obs_shape} and {spec.describe_actions()} here, {theirs.obs_shape} and "
            f"{theirs.describe_actions()} there (bounds and dtypes count too); pass kwargs that make them equal"
        )
    return kwargs


def _parts(space: Any) -> list[Any]:
    """Names of what a Dict is made of, in the order in which observations are flattened."""
    spaces = getattr(space, "spaces", None)
    return [(key, _parts(part)) for key, part in spaces.items()] if isinstance(spaces, dict) else []


def _sorted(space: Any) -> Any:
    """`space` with the parts of a Dict in the order that gymnasium gives to those of its own environments."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        return space
    return spaces.Dict({key: _sorted(part) for key, part in space.spaces.items()})


def _item(batch: Any, i: int) -> Any:
    """Environment i's observation out of N: of an array, or of arrays in a dict."""
    return {key: _item(part, i) for key, part in batch.items()} if isinstance(batch, dict) else batch[i]


class EnvPoolVecEnv(ForeignVecEnv):
    """N copies of one of EnvPool's environments, with same-step auto-reset.

    EnvPool itself would start an episode with the step after the one that ended it; here those copies, and no others,
    are reset at once. Its rewards are float32. Where an episode fails in the very step that reaches its time limit,
    EnvPool says truncated only. Training uses it; evaluation plays gymnasium's environment of the same id, one copy,
    or the native one.

    Parameters
    ----------
    env_id : str
        One of ``envpool.list_all_envs()``.
    n_envs : int
        Number of copies N.
    seed : int
        EnvPool is given one integer that follows from it; the number of threads does not change a trajectory.
    kwargs : dict, optional
        Passed to ``envpool.make``. ``num_threads`` is 1 unless given; 0 lets EnvPool choose.

    Raises
    ------
    ImportError
        If EnvPool is not installed.
    TypeError, ValueError
        For what is no id of EnvPool's, arguments that it refuses, or spaces that `SpaceAdapter` does not serve.
    """

    def __init__(self, env_id: str, n_envs: int = 1, seed: int = 0, kwargs: dict[str, Any] | None = None):
        super().__init__(env_id, n_envs, seed)
        self.why_not = "EnvPool keeps their state to itself"
        check_envpool_id(env_id)
        self.kwargs = {"num_threads": 1, **(kwargs or {})}
        for key, why in _OWN_KWARGS.items():
            if key in self.kwargs:
                raise ValueError(f"EnvPoolVecEnv: kwargs must not hold {key}, {why}; got {kwargs}")
        threads = self.kwargs["num_threads"]
        if not isinstance(threads, int) or threads < 0:
            # EnvPool would end the process.
            raise ValueError(f"EnvPoolVecEnv: num_threads must be an integer >= 0, got {threads!r}")
        self._pool: Any = self._made(Rng(seed, Stream.FOREIGN_ENVS).integers(2**31, n_envs).tolist()[0])
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

    def _made(self, seed: int) -> Any:
        n = self.n_envs
        try:
            # Copy i is seeded with `seed` + i, which must stay a 32-bit integer.
            pool = _envpool().make(
                self.env_id, env_type="gymnasium", num_envs=n, seed=seed % (2**31 - n), **self.kwargs
            )
        except (TypeError, ValueError, AssertionError, RuntimeError) as e:
            why = str(e).strip().partition("\n")[0]
            raise ValueError(f"EnvPoolVecEnv: {self.env_id} does not take kwargs {self.kwargs}: {why}") from e
        with warnings.catch_warnings():
            # gymnasium remarks on the precision of bounds that EnvPool chose, whenever its spaces are first made.
            warnings.simplefilter("ignore", UserWarning)
            self.observation_space, self._act_space = _sorted(pool.observation_space), pool.action_space
        return pool

    def _open(self) -> Any:
        if self._pool is None:
            raise ValueError(f"EnvPoolVecEnv: {self.env_id} must be open, got it after close(); make another")
        return self._pool

    def _reset(self, seeds: list[int | None], obs: np.ndarray) -> None:
        self._open()
        if seeds[0] is not None and self._started:
            self._pool = self._made(seeds[0])  # EnvPool seeds only what it makes
        first, _ = self._pool.reset()
        self._observe(first, obs, np.arange(self.n_envs))
        self._returns[:], self._lengths[:] = 0.0, 0

    def _step(self, actions: np.ndarray, out: dict[str, np.ndarray]) -> None:
        pool, space = self._open(), self._act_space
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
        """Write EnvPool's observations of the environments `rows`, in this order, where they belong."""
        if self._plain:
            out[rows] = raw
            return
        for i, row in enumerate(rows):
            out[row] = self._adapter.observe(_item(raw, i))

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

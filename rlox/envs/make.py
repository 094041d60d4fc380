"""The one place that chooses how an environment is implemented."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlox.config import ENV_BACKENDS, integer, nearest
from rlox.config.remote import RemoteConfig
from rlox.envs.registry import ZOO, env_name, is_native, is_native_multi_agent


def make_vec_env(
    env: str | Callable[..., Any],
    n_envs: int,
    seed: int,
    kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
    workers: int = 0,
    backend: str = "auto",
    remote: RemoteConfig | None = None,
):
    """N environments behind ``reset_all`` and ``step_all(actions, out=None)``, whatever implements them.

    Parameters
    ----------
    env : str, callable or gymnasium.Env
        An id, a callable that returns an environment, or (for `n_envs` 1, without workers) an environment. A native id
        from outside (see `register_env`) that comes with arguments, wrappers or workers is played by
        `rlox.envs.gymnasium_envs.NativeEnv`.
    n_envs, seed : int
        Number of copies N, and what decides their randomness.
    kwargs : dict, optional
        Arguments of ``gymnasium.make``, of the callable or of ``envpool.make``.
    wrappers : sequence
        See `rlox.envs.gym_make.make_gym_env`.
    workers : int
        Processes that step the copies; 0: this one does.
    backend : str
        ``gymnasium``, ``envpool`` (see `rlox.envs.envpool_env`), or ``auto``: native where there is one, else
        gymnasium.
    remote : RemoteConfig, optional
        Where it has addresses, workers on other machines play the environments (see `rlox.envs.remote.RemoteEnvPool`);
        `env` is an id then, and they must serve it with the same `kwargs` and `wrappers`.

    Returns
    -------
    VecEnv, GymVecEnv, ParallelGymVecEnv, EnvPoolVecEnv or RemoteEnvPool
        With ``auto`` the native one where `env` is a native id and comes without arguments, wrappers and
        workers. A seed gives the same trajectories with and without workers.

    Raises
    ------
    ValueError
        For an id that gymnasium does not know either, a space that no policy serves, an unknown backend, or wrappers
        or workers with ``envpool``.
    """
    n_envs = integer("make_vec_env", "n_envs", n_envs, 1)
    seed = integer("make_vec_env", "seed", seed, 0, 2**64 - 1)
    if not 0 <= integer("make_vec_env", "workers", workers, 0) <= n_envs:
        raise ValueError(f"make_vec_env: workers must be between 0 and n_envs ({n_envs}), got {workers}")
    if backend not in ENV_BACKENDS:
        raise ValueError(
            f"make_vec_env: backend must be one of {', '.join(ENV_BACKENDS)}, got {backend!r}; "
            f"{nearest(str(backend), ENV_BACKENDS)}"
        )
    if remote is not None and remote.addresses:
        if not isinstance(env, str) or workers or backend != "auto":
            raise ValueError(
                "make_vec_env: env must be an id, workers 0 and backend auto with remote.addresses, since it is the "
                f"workers that make the environments, got {env_name(env)}, {workers} and {backend}"
            )
        from rlox.envs.remote.pool import RemoteEnvPool

        return RemoteEnvPool(None, env, n_envs, seed, remote, kwargs, wrappers)
    if backend == "envpool":
        if wrappers or workers:
            raise ValueError(
                "make_vec_env: wrappers must be empty and workers 0 with envpool, which has threads of its own "
                f"(kwargs num_threads), got {list(wrappers)} and {workers}; or pass backend='gymnasium'"
            )
        from rlox.envs.envpool_env import EnvPoolVecEnv

        return EnvPoolVecEnv(env, n_envs, seed, kwargs)  # type: ignore[arg-type]  # it says what it does not take
    if backend == "auto" and not (kwargs or wrappers or workers) and is_native(env):
        from rlox.kernels.envs.vec_env import VecEnv

        return VecEnv(n_envs, seed, env)
    if is_native_multi_agent(env) or (isinstance(env, str) and env.startswith(ZOO)):
        raise ValueError(
            f"make_vec_env: env must be an environment with one agent, got {env}; train one with several by "
            "algo=mappo, or make it by rlox.multi_agent.make_multi_agent_env"
        )
    if workers:
        from rlox.envs.parallel_env import ParallelGymVecEnv

        return ParallelGymVecEnv(env, n_envs, seed, kwargs, wrappers, workers)
    from rlox.envs.gym_vec_env import GymVecEnv

    return GymVecEnv(env, n_envs, seed, kwargs, wrappers)

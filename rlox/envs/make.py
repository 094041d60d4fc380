"""The arguments with which environments are created, and the choice of their implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlox.config import ENV_BACKENDS, choice, integer, nearest, shown
from rlox.config.run import RemoteConfig
from rlox.envs import registry
from rlox.envs.protocols import VecEnv
from rlox.envs.registry import env_name, is_multi_agent, is_native, is_vectorised
from rlox.envs.tensor.table import REGISTERED


@dataclass
class EnvOptions:
    """How the environments of a training are created."""

    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of ``gymnasium.make``
    wrappers: list[Any] = field(default_factory=list)  # gymnasium wrappers, in order, by name
    workers: int = 0  # processes that step foreign environments
    backend: str = "auto"
    remote: RemoteConfig | None = None  # workers on other machines that run them
    eval_kwargs: dict[str, Any] = field(default_factory=dict)  # `kwargs` of an evaluation's environments
    device: str | None = None  # where environments of `rlox.envs.tensor` live; None: they are others
    compiled: bool = False  # whether ``torch.compile`` fuses their steps

    @classmethod
    def of(
        cls,
        where: str,
        kwargs: Any,
        wrappers: Any,
        workers: Any = 0,
        backend: Any = "auto",
        remote: Any = None,
        n_envs: int = 1,
    ) -> EnvOptions:
        """Check arguments of a constructor for `n_envs` environments; raise TypeError or ValueError for wrong ones."""
        if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
            raise TypeError(f"{where}: env_kwargs must be a dict of keyword arguments, got {shown(kwargs)}")
        if not isinstance(wrappers, (list, tuple)):
            raise TypeError(f"{where}: env_wrappers must be a list, got {shown(wrappers)}")
        wrappers = [_named(item, where) for item in wrappers]
        if remote is not None and not isinstance(remote, RemoteConfig):
            raise TypeError(f"{where}: remote must be a RemoteConfig, got {shown(remote)}")
        workers = integer(where, "env_workers", workers, 0, n_envs)
        backend, given = choice(where, "env_backend", backend, ENV_BACKENDS), dict(kwargs or {})
        return cls(given, wrappers, workers, backend, remote, eval_kwargs=given)

    def make(self, env_id: Any, n_envs: int, seed: int, n_ranks: int = 1) -> VecEnv:
        """Create the `n_envs` environments of one of `n_ranks`, which share the workers."""
        if self.device is not None:
            from rlox.envs.tensor.vec_env import make_on_device

            return make_on_device(env_id, n_envs, seed, self.device, self.compiled, self.kwargs)
        workers = -(-self.workers // n_ranks)
        return make_vec_env(env_id, n_envs, seed, self.kwargs, self.wrappers, workers, self.backend, self.remote)

    def for_actors(self) -> dict[str, Any]:
        """Return these options as arguments of a collector whose actors create their environments themselves."""
        names = {"kwargs": "env_kwargs", "wrappers": "env_wrappers", "workers": "env_workers", "backend": "env_backend"}
        return {named: getattr(self, name) for name, named in names.items()} | {"remote": self.remote}


def _named(item: Any, where: str) -> Any:
    """Return an item of `env_wrappers` with the name of its class, with which workers and checkpoints find it."""
    if isinstance(item, Mapping) and len(item) == 1:
        ((wrapper, arguments),) = item.items()
        return {_named(wrapper, where): arguments}
    if isinstance(item, type):
        if "<locals>" in item.__qualname__:
            raise ValueError(
                f"{where}: env_wrappers must contain classes at the top of a module, which others can import, got "
                f"{item.__qualname__}; move it there, or wrap in env_id=lambda: {item.__name__}(gymnasium.make(…))"
            )
        from gymnasium import wrappers

        own = getattr(wrappers, item.__name__, None) is item
        return item.__name__ if own else f"{item.__module__}:{item.__qualname__}"
    if not isinstance(item, (str, Mapping)):
        raise TypeError(
            f"{where}: env_wrappers must contain classes, their names or {{class: {{argument: value}}}}, got "
            f"{shown(item)}; for a function, pass env_id=lambda: …"
        )
    return item


def make_vec_env(
    env: str | Callable[..., Any],
    n_envs: int,
    seed: int,
    kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
    workers: int = 0,
    backend: str = "auto",
    remote: RemoteConfig | None = None,
    device: str | None = None,
) -> VecEnv:
    """Create N environments, in any implementation.

    Parameters
    ----------
    env : str, callable or gymnasium.Env
        An id, a callable that returns an environment, or (for `n_envs` 1, without workers) an environment. The native
        environment of an external package (see `register_env`) runs in `rlox.envs.gymnasium_envs.NativeEnv` if it has
        arguments, wrappers or workers.
    n_envs, seed : int
        Number of copies N, and the seed of their randomness.
    kwargs : dict, optional
        Arguments of ``gymnasium.make``, of the callable or of ``envpool.make``.
    wrappers : sequence
        See `rlox.envs.gym_make.make_gym_env`.
    workers : int
        Processes that step the copies; 0: this process.
    backend : str
        ``gymnasium``, ``envpool`` (see `rlox.envs.envpool_env`), ``tensor`` (see `rlox.envs.tensor.vec_env`), or
        ``auto``: native if available, else gymnasium.
    remote : RemoteConfig, optional
        If it has addresses, workers on other machines run the environments (see `rlox.envs.remote.RemoteEnvPool`).
        `env` must then be an id, and the workers must serve it with the same `kwargs` and `wrappers`.
    device : str, optional
        Where copies with ``tensor`` live, ``cpu`` by default; with ``auto``, a device selects ``tensor``.

    Returns
    -------
    VecEnv, GymVecEnv, ParallelGymVecEnv, EnvPoolVecEnv, RemoteEnvPool or TensorVecEnv
        With ``auto``, the native `VecEnv` if `env` is a native id without arguments, wrappers and workers. The same
        seed gives the same trajectories with and without workers.

    Raises
    ------
    ValueError
        For an id that neither rlox nor gymnasium knows, a space that no policy supports, an unknown backend, wrappers
        or workers with ``envpool``, an id without a tensor version with ``tensor``, or a device with another backend.
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
        if not isinstance(env, str) or workers or backend != "auto" or device is not None:
            raise ValueError(
                "make_vec_env: env must be an id, workers 0, backend auto and no device with remote.addresses, as "
                f"the remote workers create the environments, got {env_name(env)}, {workers}, {backend} and {device}"
            )
        from rlox.envs.remote.pool import RemoteEnvPool

        return RemoteEnvPool(None, env, n_envs, seed, remote, kwargs, wrappers)
    if backend == "tensor" or device is not None:
        if kwargs or wrappers or workers or backend not in ("tensor", "auto"):
            raise ValueError(
                "make_vec_env: kwargs and wrappers must be empty, workers 0 and backend auto or tensor for "
                f"environments on a device, got {kwargs or {}}, {list(wrappers)}, {workers} and {backend}"
            )
        from rlox.envs.tensor.vec_env import make_on_device

        return make_on_device(env, n_envs, seed, device or "cpu")  # type: ignore[arg-type]  # refuses other types
    if backend == "envpool":
        if wrappers or workers:
            raise ValueError(
                "make_vec_env: wrappers must be empty and workers 0 with envpool, which has its own threads "
                f"(kwargs num_threads), got {list(wrappers)} and {workers}; or pass backend='gymnasium'"
            )
        from rlox.envs.envpool_env import EnvPoolVecEnv

        return EnvPoolVecEnv(env, n_envs, seed, kwargs)  # type: ignore[arg-type]  # raises an error for other types
    plain = backend == "auto" and not (kwargs or wrappers or workers)
    if plain and is_native(env):
        return registry.VecEnv(n_envs, seed, env)
    if plain and is_vectorised(env):
        from rlox.envs.tensor.vec_env import HostVecEnv

        return HostVecEnv(n_envs, seed, env)  # type: ignore[arg-type]  # an id
    if isinstance(env, str) and env in REGISTERED and not is_native(env):
        import gymnasium

        if env not in gymnasium.registry:
            raise ValueError(
                f"make_vec_env: kwargs and wrappers must be empty, workers 0 and backend auto or tensor for {env}, "
                "whose copies are stepped together as tensors, got "
                f"{kwargs or {}}, {list(wrappers)}, {workers} and {backend}"
            )
    if is_multi_agent(env):
        raise ValueError(
            f"make_vec_env: env must be an environment with one agent, got {env}; train several agents with "
            "algo=mappo, or create it with rlox.multi_agent.make_multi_agent_env"
        )
    if workers:
        from rlox.envs.parallel_env import ParallelGymVecEnv

        return ParallelGymVecEnv(env, n_envs, seed, kwargs, wrappers, workers)
    from rlox.envs.gym_vec_env import GymVecEnv

    return GymVecEnv(env, n_envs, seed, kwargs, wrappers)

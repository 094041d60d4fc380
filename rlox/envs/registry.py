"""Native environments: their ids, their names in gymnasium's registry, and N copies that kernels step."""

from __future__ import annotations

import functools
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from rlox.config.offers import load, offers
from rlox.envs.spec import native_spec
from rlox.envs.tensor import table as tensor_table
from rlox.kernels.envs import NATIVE_ENVS, vec_env
from rlox.kernels.envs.native_env import native_ids, native_multi_agent_ids, register_native

ENV_GROUP = "rlox.envs"
REWARD_GROUP = "rlox.rewards"

worker_imports: list[str] = []  # modules of ``--import``, which processes of `env_workers` import first


def register_offered(env_id: str) -> bool:
    """Register the native environment that an installed package offers under `env_id`; False if none does.

    Raises
    ------
    ValueError
        If the package's object is not an environment of this id.
    ImportError
        If the package's code fails.
    """
    if not _ID.fullmatch(env_id) or env_id not in offers(ENV_GROUP):
        return False
    where = f"{ENV_GROUP}: {env_id} ({offers(ENV_GROUP)[env_id].value})"
    given = load(ENV_GROUP, env_id)
    if env_id not in (*native_ids(), *native_multi_agent_ids()):  # importing the package may have registered it
        made = given() if callable(given) else given
        try:
            given = None if made is None else register_native(made)
        except (TypeError, ValueError) as e:
            raise ValueError(f"{where} must be a capsule of an environment, or return one: {e}") from e
        if env_id not in (*native_ids(), *native_multi_agent_ids()):
            raise ValueError(f"{where} must provide the environment {env_id}, got {given}")
    return True


def get_include() -> str:
    """Return the folder of ``rlox_native.h``, the C interface for external environments and rewards."""
    import rlox.kernels

    return str(Path(rlox.kernels.__file__).parent / "include")


# (namespace/)name-vN, which gymnasium and the command line accept; a colon would name a module to import.
_ID = re.compile(r"([\w-]+/)?[\w.-]+-v\d+")

# rlox's environments that are written in Python: entry point and step limit of each.
TASKS: dict[str, tuple[str, int | None]] = {
    "rlox/CartPoleHidden-v1": ("rlox.envs.memory_tasks:cart_pole_hidden", 500),
    "rlox/DrawnCatch-v0": ("rlox.envs.memory_tasks:DrawnCatch", None),
    "rlox/InvalidActions-v0": ("rlox.envs.mask_tasks:InvalidActions", None),
    "rlox/MaskedBandit-v0": ("rlox.envs.mask_tasks:MaskedBandit", None),
    "rlox/MaskedTMaze-v0": ("rlox.envs.mask_tasks:MaskedTMaze", None),
    "rlox/MountainCarContinuousHidden-v0": ("rlox.envs.memory_tasks:mountain_car_continuous_hidden", 999),
    "rlox/PendulumHidden-v1": ("rlox.envs.memory_tasks:pendulum_hidden", 200),
    "rlox/TMaze-v0": ("rlox.envs.memory_tasks:TMaze", None),
}

# Module that registered each external id, for processes that must import it.
_ORIGINS: dict[str, str] = {}


def gym_id(env_id: str) -> str:
    """Return the name of a native id in gymnasium's registry: ``CartPole-v1`` is ``rlox/CartPole-v1``.

    An external id that has a namespace keeps it, since gymnasium allows only one.
    """
    return env_id if "/" in env_id else f"rlox/{env_id}"


_REGISTERING = threading.RLock()  # gymnasium's registry must not change while another thread of a worker searches it


def announce(env_id: str, module: str | None = None) -> None:
    """Register one native id with gymnasium, if gymnasium is imported. May be called again.

    `module` is the module that another process must import to register the id.
    """
    registration = sys.modules.get("gymnasium.envs.registration")
    if registration is None:
        return
    name = gym_id(env_id)
    with _REGISTERING:
        if "/" in env_id and name in registration.registry:
            return
        registration.registry.pop(name, None)
        registration.register(
            name,
            entry_point="rlox.envs.gymnasium_envs:NativeEnv",
            vector_entry_point="rlox.envs.gymnasium_envs:NativeVectorEnv",
            kwargs={"env_id": env_id, **({} if module is None else {"module": module})},
        )


def register_env(capsule: Any, module: str | None = None) -> str:
    """Register a custom environment: a native one, or one in tensor operations.

    A native environment is given as a ``rlox.env.v1`` capsule (rlox_native.h).

    Its id can then be used wherever native ids are accepted: in `VecEnv`, `make_vec_env`, algorithms, evaluation,
    ``rlox train --import``, and ``gymnasium.make_vec("rlox/<id>")``. An environment with several agents can be used in
    `rlox.multi_agent.make_multi_agent_env` and everything that builds on it. An installed package does not need this
    call: it offers ids as entry points in the group ``rlox.envs``, ``"<id>" = "module:capsule"`` or a function that
    returns a capsule.

    A tensor environment is given as a subclass of `rlox.envs.tensor.base.TensorEnv` that takes no arguments. Its id can
    be used with ``device=`` and ``env_backend=tensor``. If no native environment has this id too, it is also the one
    that runs on the CPU.

    Parameters
    ----------
    capsule : PyCapsule or type
        Contains the address of a `rlox_env_v1`, to which a reference is kept; or a subclass of `TensorEnv`.
    module : str, optional
        Module that worker processes import to register the id too; the default is the calling module.

    Returns
    -------
    str
        The id.

    Raises
    ------
    TypeError
        If `capsule` is neither a PyCapsule nor such a class.
    ValueError
        For a capsule of another kind, a struct or class that breaks the contract, or an id that is invalid or already
        taken.
    """
    from rlox.kernels.envs.native_env import capsule_id

    if module is None:
        module = sys._getframe(1).f_globals.get("__name__")
    tensor = isinstance(capsule, type)
    if tensor:
        from rlox.envs.tensor.check import check_tensor_env

        made = check_tensor_env(capsule, "register_env")
        env_id = made.env_id
    else:
        env_id = capsule_id(capsule) if type(capsule).__name__ == "PyCapsule" else ""
    if env_id and not _ID.fullmatch(env_id):
        raise ValueError(
            f"register_env: env_id must be a name and a version such as 'Mine-v0' or 'my_lab/Mine-v0', got {env_id!r}"
        )
    if tensor:
        tensor_table.register(env_id, capsule, made.agents is not None, "register_env")
    else:
        env_id = register_native(capsule)
    if module is not None and module != "__main__":
        _ORIGINS[env_id] = module
    if env_id in native_ids():
        announce(env_id, origin(env_id))
    return env_id


def origin(env_id: str) -> str | None:
    """Return the module that another process must import to register an external id; None if there is none."""
    return _ORIGINS.get(env_id)


def native_env_ids() -> list[str]:
    """Return all native ids: built in, registered in this process, or offered by an installed package."""
    return [env_id for env_id in dict.fromkeys([*native_ids(), *offers(ENV_GROUP)]) if _ID.fullmatch(env_id)]


def is_native(env: Any) -> bool:
    """Whether `env` is a native id. If an installed package offers the id, it is registered.

    Raises
    ------
    ValueError
        If the package's object is not an environment of this id.
    ImportError
        If the package's code fails.
    """
    if not isinstance(env, str):
        return False
    if env not in native_ids():
        if env in native_multi_agent_ids() or not register_offered(env) or env not in native_ids():
            return False
        announce(env)
    return True


def is_vectorised(env: Any) -> bool:
    """Return whether rlox steps all copies of an id itself: of a native one, or a user's tensor environment.

    Raises
    ------
    ValueError, ImportError
        Same as `is_native`.
    """
    return isinstance(env, str) and (env in tensor_table.REGISTERED or is_native(env))


def is_native_multi_agent(env: Any) -> bool:
    """Whether `env` is the id of a native environment with several agents; `is_native` is False for such ids.

    Raises
    ------
    ValueError, ImportError
        Same as `is_native`.
    """
    if not isinstance(env, str) or env.startswith(ZOO) or env in native_ids():
        return False
    return env in native_multi_agent_ids() or (register_offered(env) and env in native_multi_agent_ids())


def is_multi_agent(env: Any) -> bool:
    """Return whether an id names an environment with several agents: ``pettingzoo:…``, a native id, or a user's tensor
    environment."""
    if not isinstance(env, str) or env in native_ids():
        return False
    return env.startswith(ZOO) or env in tensor_table.REGISTERED_AGENTS or is_native_multi_agent(env)


def announce_all() -> None:
    """Register `TASKS` and all native ids with gymnasium, if gymnasium is imported.

    Native ids are built in, registered so far, or offered by an installed package.
    """
    for env_id in native_env_ids():
        announce(env_id, origin(env_id))
    registration: Any = sys.modules.get("gymnasium.envs.registration")
    if registration is None:
        return
    with _REGISTERING:
        for env_id, (entry_point, limit) in TASKS.items():
            if env_id not in registration.registry:
                registration.register(env_id, entry_point=entry_point, max_episode_steps=limit)


def foreign_id(env_id: str) -> str:
    """Return the id under which gymnasium knows an environment; external native ids are registered by rlox."""
    if env_id not in TASKS and (env_id in NATIVE_ENVS or not is_native(env_id)):
        return env_id
    import gymnasium

    if env_id in TASKS:
        announce_all()
        return env_id

    if gym_id(env_id) not in gymnasium.registry:
        announce_all()
    return gym_id(env_id) if gym_id(env_id) in gymnasium.registry else env_id


ZOO = "pettingzoo:"  # prefix of PettingZoo environments: "pettingzoo:mpe2.simple_spread_v3"
_ZOO_PACKAGES = ("mpe2", "pettingzoo")  # installed by rlox-cli[multi-agent]


def find_module(env_id: str) -> str:
    """Return the third-party module that creating `env_id` imports, which users must trust; empty if there is none."""
    if not env_id.startswith(ZOO):
        return env_id.rpartition(":")[0]
    module = env_id.removeprefix(ZOO).partition(":")[0]
    return "" if module.partition(".")[0] in _ZOO_PACKAGES else module


def find_unimported_module(env_id: str) -> str:
    """Return `find_module` if it is not imported yet, since a file that names it must not cause the import."""
    module = find_module(env_id)
    return "" if module in sys.modules else module


def env_name(env: Any) -> str:
    """Return the id itself, or the name of a callable or of an environment's class."""
    return env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)


# ---- native environments as a `rlox.envs.protocols.VecEnv`


class VecEnv(vec_env.VecEnv):
    __doc__ = vec_env.VecEnv.__doc__

    native = True
    unrestorable_reason = None
    device = None

    def __new__(cls, n: int, seed: int = 0, env_id: Any = "CartPole-v1", device: str | None = None):
        """Create the copies: on the host, or with a `device` as tensors there, a `TensorVecEnv`."""
        if device is None:
            return super().__new__(cls, n, seed, env_id)
        from rlox.envs.tensor.vec_env import make_on_device

        return make_on_device(env_id, n, seed, device)

    def __reduce__(self):
        return _make_again, (type(self), self.n_envs, self.seed, self.env_id), self.get_state()

    spec = functools.cached_property(native_spec)

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Return whether `state` comes from native environments."""
        return not state.keys().isdisjoint(self.get_state())

    def render(self) -> None:
        """Return None: native environments are not drawn."""

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""


def _make_again(kind: type[VecEnv], n_envs: int, seed: int, env_id: str) -> VecEnv:
    """Create the environments of a copy or a pickle, which contain the id alone."""
    if not is_native(env_id):
        raise ValueError(
            f"{kind.__name__}: the environment of a copy or pickle must be registered in this process, got {env_id!r}; "
            "call rlox.register_env with its capsule first"
        )
    return kind(n_envs, seed, env_id)

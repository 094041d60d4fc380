"""The table of tensor environments: id to class."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlox.envs.tensor.base import TensorEnv

TENSOR_ENVS: dict[str, str] = {
    "CartPole-v1": "rlox.envs.tensor.cartpole:CartPole",
    "Pendulum-v1": "rlox.envs.tensor.pendulum:Pendulum",
    "MountainCar-v0": "rlox.envs.tensor.mountain_car:MountainCar",
    "MountainCarContinuous-v0": "rlox.envs.tensor.mountain_car:MountainCarContinuous",
    "Acrobot-v1": "rlox.envs.tensor.acrobot:Acrobot",
    "GridWorld-v0": "rlox.envs.tensor.gridworld:GridWorld",
}
# Those with several agents, which take arguments.
TENSOR_AGENT_ENVS: dict[str, str] = {"GridPursuit-v0": "rlox.envs.tensor.pursuit:GridPursuit"}
# Environments of users, by id, with one agent and with several.
REGISTERED: dict[str, Callable[[], TensorEnv]] = {}
REGISTERED_AGENTS: dict[str, Callable[[], TensorEnv]] = {}
# What creates N copies of an id that live on a device, for environments of other packages.
VEC_ENVS: dict[str, Callable[[int, int, str], Any]] = {}


def is_only_on_device(env_id: str) -> bool:
    """Return whether `register_vec_env` alone knows an id, so that even an evaluation must create its copies there."""
    if env_id not in VEC_ENVS:
        return False
    import gymnasium

    return env_id.rpartition(":")[2] not in gymnasium.registry


def tensor_env_ids() -> list[str]:
    """Return the ids with one agent whose copies can live on a device: built in, then registered."""
    return [*TENSOR_ENVS, *REGISTERED, *VEC_ENVS]


def tensor_agent_ids() -> list[str]:
    """Return the ids with several agents whose copies can live on a device: built in, then registered."""
    return [*TENSOR_AGENT_ENVS, *REGISTERED_AGENTS]


def register_vec_env(env_id: str, create: Callable[[int, int, str], Any]) -> None:
    """Register environments of another package under an id, for ``env_backend=tensor``.

    Parameters
    ----------
    env_id : str
        The id.
    create : callable
        ``create(n_envs, seed, device)`` returns a vector environment, such as a `TorchVecEnv` or a `JaxVecEnv` of
        `rlox.envs.tensor.adapters`.

    Raises
    ------
    ValueError
        If another environment has this id.
    """
    known = (*TENSOR_ENVS, *REGISTERED, *tensor_agent_ids())
    if env_id in known or VEC_ENVS.get(env_id, create) is not create:
        raise ValueError(f"register_vec_env: env_id must be new, got {env_id!r}, which another environment has")
    VEC_ENVS[env_id] = create


def register(env_id: str, create: Callable[[], TensorEnv], several: bool, where: str) -> None:
    """Add a checked environment with one agent or `several`; raise a ValueError if another one has this id."""
    mine, other = (REGISTERED_AGENTS, REGISTERED) if several else (REGISTERED, REGISTERED_AGENTS)
    taken = (*TENSOR_ENVS, *TENSOR_AGENT_ENVS, *VEC_ENVS, *other)
    if env_id in taken or mine.get(env_id, create) is not create:
        raise ValueError(f"{where}: env_id must be new, got {env_id!r}, which belongs to another tensor environment")
    mine[env_id] = create


def create(env_id: str, **arguments: Any) -> TensorEnv:
    """Create the tensor environment of an id, with the arguments that one with several agents may take.

    Raises
    ------
    ValueError
        If there is none; the message names the known ids.
    """
    given = REGISTERED.get(env_id) or REGISTERED_AGENTS.get(env_id)
    if given is not None:
        return given()
    path = (TENSOR_ENVS | TENSOR_AGENT_ENVS).get(env_id)
    if path is None:
        raise ValueError(
            f"TensorVecEnv: env must have a tensor version, got {env_id!r}; those that have one are "
            f"{', '.join([*tensor_env_ids(), *tensor_agent_ids()])}; leave device out, or write one (see "
            "rlox.envs.tensor.base.TensorEnv)"
        )
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)(**arguments)

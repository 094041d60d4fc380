"""Native environments: one file of inline functions for each, and one vectorised loop for all."""

from rlox.kernels import prefer_level

prefer_level(__path__, "envs")

# Found only once the level is on the path.
from rlox.kernels.envs.env import (  # noqa: E402
    Acrobot,
    CartPole,
    Env,
    GridWorld,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
)
from rlox.kernels.envs.multi_agent import AgentVecEnv  # noqa: E402
from rlox.kernels.envs.native_env import (  # noqa: E402
    NATIVE_ENVS,
    NATIVE_MULTI_AGENT_ENVS,
    native_ids,
    native_multi_agent_ids,
    register_native,
)
from rlox.kernels.envs.vec_env import VecEnv  # noqa: E402

__all__ = [
    "NATIVE_ENVS",
    "NATIVE_MULTI_AGENT_ENVS",
    "Acrobot",
    "AgentVecEnv",
    "CartPole",
    "Env",
    "GridWorld",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
    "VecEnv",
    "native_ids",
    "native_multi_agent_ids",
    "register_native",
]

"""Native environments: one file of inline functions each, one vectorised loop for all."""

from rlox.kernels import prefer_level

prefer_level(__path__, "envs")

from rlox.kernels.envs.vec_env import (  # noqa: E402 - found only once the level is on the path
    NATIVE_ENVS,
    Acrobot,
    CartPole,
    Env,
    GridWorld,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
    VecEnv,
    native_ids,
    register_native,
)

__all__ = [
    "NATIVE_ENVS",
    "Acrobot",
    "CartPole",
    "Env",
    "GridWorld",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
    "VecEnv",
    "native_ids",
    "register_native",
]

"""rlox: reinforcement learning with a compiled data plane and a Python control plane.

Every public name is imported when it is first used (PEP 562), so that ``import rlox`` needs neither NumPy nor PyTorch.
"""

from importlib import import_module

# In a checkout, `python -m …` puts ./rlox before the installed package, which alone maps kernels/ in.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)

__version__ = "0.3.0.dev0"

_EXPORTS = {
    "A2C": "rlox.algorithms.a2c",
    "A2CConfig": "rlox.config",
    "A2CTrainer": "rlox.trainers",
    "Acrobot": "rlox.kernels.envs.vec_env",
    "BufferConfig": "rlox.config",
    "CartPole": "rlox.kernels.envs.vec_env",
    "GridWorld": "rlox.kernels.envs.vec_env",
    "MountainCar": "rlox.kernels.envs.vec_env",
    "MountainCarContinuous": "rlox.kernels.envs.vec_env",
    "Pendulum": "rlox.kernels.envs.vec_env",
    "VecEnv": "rlox.kernels.envs.vec_env",
    "VecNormalize": "rlox.vec_normalize",
    "compute_gae": "rlox.kernels.advantage.gae",
    "compute_gae_batched": "rlox.kernels.advantage.gae",
    "compute_gae_batched_f32": "rlox.kernels.advantage.gae",
    "ContinuousPolicy": "rlox.policies",
    "DQN": "rlox.algorithms.dqn",
    "DQNConfig": "rlox.config",
    "DQNTrainer": "rlox.trainers",
    "DiscretePolicy": "rlox.policies",
    "GymVecEnv": "rlox.gym_vec_env",
    "PPO": "rlox.algorithms.ppo",
    "PPOConfig": "rlox.config",
    "PPOLoss": "rlox.losses",
    "PPOTrainer": "rlox.trainers",
    "QNetwork": "rlox.networks",
    "ReplayCollector": "rlox.collectors",
    "Batch": "rlox.kernels.buffers.batch",
    "PrioritizedReplayBuffer": "rlox.kernels.buffers.replay",
    "ReplayBuffer": "rlox.kernels.buffers.replay",
    "RolloutBatch": "rlox.batch",
    "RolloutCollector": "rlox.collectors",
    "evaluate": "rlox.evaluation",
    "register_buffer": "rlox.buffers",
    "tuned": "rlox.config",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rlox' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

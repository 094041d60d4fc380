"""rlox: reinforcement learning with a compiled data plane and a Python control plane.

Every public name is imported when it is first used (PEP 562), so that ``import rlox`` needs neither NumPy nor PyTorch.
"""

from importlib import import_module

# In a checkout, `python -m …` puts ./rlox before the installed package, which alone maps kernels/ in.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)

__version__ = "0.7.0"

_EXPORTS = {
    "A2C": "rlox.algorithms.a2c",
    "A2CConfig": "rlox.config",
    "A2CTrainer": "rlox.trainers",
    "Acrobot": "rlox.kernels.envs.vec_env",
    "AdviceCallback": "rlox.callbacks",
    "Batch": "rlox.kernels.buffers.batch",
    "BC": "rlox.algorithms.bc",
    "BCConfig": "rlox.config",
    "BufferConfig": "rlox.config",
    "Callback": "rlox.callbacks",
    "CallbackList": "rlox.callbacks",
    "CandleCollector": "rlox.candle",
    "CartPole": "rlox.kernels.envs.vec_env",
    "Checkpoint": "rlox.checkpoint",
    "CheckpointCallback": "rlox.callbacks",
    "clean_cold_files": "rlox.kernels.buffers.cold_file",
    "compute_batch_group_advantages": "rlox.kernels.llm.group",
    "compute_batch_token_kl": "rlox.kernels.llm.token_kl",
    "compute_batch_token_kl_f32": "rlox.kernels.llm.token_kl",
    "compute_batch_token_kl_schulman": "rlox.kernels.llm.token_kl",
    "compute_batch_token_kl_schulman_f32": "rlox.kernels.llm.token_kl",
    "compute_gae": "rlox.kernels.advantage.gae",
    "compute_gae_batched": "rlox.kernels.advantage.gae",
    "compute_gae_batched_f32": "rlox.kernels.advantage.gae",
    "compute_group_advantages": "rlox.kernels.llm.group",
    "compute_token_kl": "rlox.kernels.llm.token_kl",
    "compute_token_kl_f32": "rlox.kernels.llm.token_kl",
    "compute_token_kl_schulman": "rlox.kernels.llm.token_kl",
    "compute_token_kl_schulman_f32": "rlox.kernels.llm.token_kl",
    "compute_vtrace": "rlox.kernels.advantage.vtrace",
    "ContinuousPolicy": "rlox.policies",
    "CQL": "rlox.algorithms.cql",
    "CQLConfig": "rlox.config",
    "DatasetConfig": "rlox.config",
    "DeterministicPolicy": "rlox.policies",
    "DiscretePolicy": "rlox.policies",
    "DiscreteQNetwork": "rlox.networks",
    "DPOPair": "rlox.kernels.llm.packing",
    "DQN": "rlox.algorithms.dqn",
    "DQNConfig": "rlox.config",
    "DQNTrainer": "rlox.trainers",
    "EarlyStoppingCallback": "rlox.callbacks",
    "EvalCallback": "rlox.callbacks",
    "evaluate": "rlox.evaluation",
    "ExperienceTable": "rlox.kernels.buffers.table",
    "get_include": "rlox.plugins",
    "GridWorld": "rlox.kernels.envs.vec_env",
    "GymVecEnv": "rlox.gym_vec_env",
    "HybridPPO": "rlox.algorithms.hybrid_ppo",
    "IQL": "rlox.algorithms.iql",
    "IQLConfig": "rlox.config",
    "load_checkpoint": "rlox.checkpoint",
    "LoggerCallback": "rlox.logging",
    "MmapReplayBuffer": "rlox.kernels.buffers.mmap",
    "MountainCar": "rlox.kernels.envs.vec_env",
    "MountainCarContinuous": "rlox.kernels.envs.vec_env",
    "NativeReward": "rlox.kernels.reward",
    "normalized_score": "rlox.offline.scores",
    "OfflineAlgorithm": "rlox.algorithms.offline",
    "OfflineDataset": "rlox.buffers",
    "OfflineDatasetBuffer": "rlox.kernels.buffers.offline",
    "open_dataset": "rlox.offline.dataset",
    "pack_sequences": "rlox.kernels.llm.packing",
    "packed_attention_mask": "rlox.kernels.llm.packing",
    "Pendulum": "rlox.kernels.envs.vec_env",
    "PPO": "rlox.algorithms.ppo",
    "PPOConfig": "rlox.config",
    "PPOLoss": "rlox.losses",
    "PPOTrainer": "rlox.trainers",
    "PrioritizedReplayBuffer": "rlox.kernels.buffers.replay",
    "ProgressCallback": "rlox.callbacks",
    "QNetwork": "rlox.networks",
    "RecordLogger": "rlox.logging",
    "register_buffer": "rlox.buffers",
    "register_env": "rlox.envs",
    "ReplayBuffer": "rlox.kernels.buffers.replay",
    "ReplayCollector": "rlox.collectors",
    "RolloutBatch": "rlox.batch",
    "RolloutCollector": "rlox.collectors",
    "RunningStats": "rlox.kernels.stats",
    "RunningStatsVec": "rlox.kernels.stats",
    "SAC": "rlox.algorithms.sac",
    "SACConfig": "rlox.config",
    "SACTrainer": "rlox.trainers",
    "SequenceReplayBuffer": "rlox.kernels.buffers.sequence",
    "SquashedGaussianPolicy": "rlox.policies",
    "TD3": "rlox.algorithms.td3",
    "TD3BC": "rlox.algorithms.td3_bc",
    "TD3BCConfig": "rlox.config",
    "TD3Config": "rlox.config",
    "TD3Trainer": "rlox.trainers",
    "TimeLimitCallback": "rlox.callbacks",
    "TimingCallback": "rlox.callbacks",
    "Trainer": "rlox.trainers",
    "tuned": "rlox.config",
    "VarLenStore": "rlox.kernels.buffers.varlen",
    "VecEnv": "rlox.kernels.envs.vec_env",
    "VecNormalize": "rlox.vec_normalize",
    "VideoCallback": "rlox.callbacks",
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


# "rlox/CartPole-v1" in gymnasium.make_vec, whichever of the two packages is imported first.
import_module("rlox.gym_registration").follow_gymnasium()

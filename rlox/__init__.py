"""rlox: reinforcement learning with a compiled data plane and a Python control plane.

Every public name is imported when it is first used (PEP 562), so that ``import rlox`` needs neither NumPy nor PyTorch.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

# In a checkout, `python -m …` puts ./rlox before the installed package, but only the installed one maps kernels/ in.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)

__version__ = "0.13.0"

_EXPORTS = {
    "A2C": "rlox.algorithms.a2c",
    "A2CConfig": "rlox.config",
    "APPO": "rlox.algorithms.appo",
    "APPOConfig": "rlox.config",
    "A2CTrainer": "rlox.algorithms.trainers",
    "Acrobot": "rlox.kernels.envs.env",
    "AdviceCallback": "rlox.callbacks",
    "Batch": "rlox.kernels.buffers.batch",
    "BC": "rlox.algorithms.bc",
    "BCConfig": "rlox.config",
    "BestOfN": "rlox.algorithms.best_of_n",
    "BufferConfig": "rlox.config",
    "Callback": "rlox.callbacks",
    "CallbackList": "rlox.callbacks",
    "CandleCollector": "rlox.collectors.candle",
    "CartPole": "rlox.kernels.envs.env",
    "Checkpoint": "rlox.checkpoint",
    "CheckpointCallback": "rlox.callbacks",
    "clean_cold_files": "rlox.kernels.buffers.cold_file",
    "CompletionsCallback": "rlox.callbacks",
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
    "ContinuousPolicy": "rlox.nn.policies",
    "CQL": "rlox.algorithms.cql",
    "CQLConfig": "rlox.config",
    "DatasetConfig": "rlox.config",
    "DeterministicPolicy": "rlox.nn.actors",
    "DiscretePolicy": "rlox.nn.policies",
    "DiscreteQNetwork": "rlox.nn.actors",
    "DPO": "rlox.algorithms.dpo",
    "DPOConfig": "rlox.config",
    "DPOPair": "rlox.kernels.llm.packing",
    "DQN": "rlox.algorithms.dqn",
    "DQNConfig": "rlox.config",
    "DQNTrainer": "rlox.algorithms.trainers",
    "DreamerConfig": "rlox.config",
    "DreamerV3": "rlox.algorithms.dreamer",
    "EarlyStoppingCallback": "rlox.callbacks",
    "EvalCallback": "rlox.callbacks",
    "evaluate": "rlox.evaluation.episodes",
    "export": "rlox.exporting.write",
    "ExperienceTable": "rlox.kernels.buffers.table",
    "get_include": "rlox.envs.registry",
    "GridWorld": "rlox.kernels.envs.env",
    "GRPO": "rlox.algorithms.grpo",
    "GRPOConfig": "rlox.config",
    "GymVecEnv": "rlox.envs.gym_vec_env",
    "History": "rlox.callbacks.base",
    "HybridPPO": "rlox.algorithms.hybrid_ppo",
    "IMPALA": "rlox.algorithms.impala",
    "IMPALAConfig": "rlox.config",
    "IQL": "rlox.algorithms.iql",
    "IQLConfig": "rlox.config",
    "LLMAlgorithm": "rlox.training.post_training",
    "load": "rlox.algorithms.table",
    "load_checkpoint": "rlox.checkpoint",
    "LoggerCallback": "rlox.callbacks.loggers",
    "MAPPO": "rlox.algorithms.mappo",
    "MAPPOConfig": "rlox.config",
    "MmapReplayBuffer": "rlox.kernels.buffers.mmap",
    "MountainCar": "rlox.kernels.envs.env",
    "MountainCarContinuous": "rlox.kernels.envs.env",
    "NativeReward": "rlox.kernels.reward",
    "normalized_score": "rlox.offline.scores",
    "OfflineAlgorithm": "rlox.training.offline",
    "OfflineDataset": "rlox.buffers",
    "OfflineDatasetBuffer": "rlox.kernels.buffers.offline",
    "OnlineDPO": "rlox.algorithms.online_dpo",
    "OnlineDPOConfig": "rlox.config",
    "open_dataset": "rlox.offline.dataset",
    "pack_sequences": "rlox.kernels.llm.packing",
    "packed_attention_mask": "rlox.kernels.llm.packing",
    "Pendulum": "rlox.kernels.envs.env",
    "PPO": "rlox.algorithms.ppo",
    "PPOConfig": "rlox.config",
    "PPOLoss": "rlox.nn.losses",
    "PPOTrainer": "rlox.algorithms.trainers",
    "PredictionsCallback": "rlox.callbacks",
    "PrioritizedReplayBuffer": "rlox.kernels.buffers.prioritized",
    "ProgressCallback": "rlox.callbacks",
    "QNetwork": "rlox.nn.actors",
    "RemoteConfig": "rlox.config",
    "RemoteEnvPool": "rlox.envs.remote",
    "RecordLogger": "rlox.callbacks.loggers",
    "register_buffer": "rlox.buffers",
    "register_env": "rlox.envs",
    "ReplayBuffer": "rlox.kernels.buffers.replay",
    "ReplayCollector": "rlox.collectors",
    "RewardModel": "rlox.algorithms.reward_model",
    "RewardModelConfig": "rlox.config",
    "RolloutBatch": "rlox.collectors.rollout",
    "RolloutCollector": "rlox.collectors",
    "RunningStats": "rlox.kernels.stats",
    "RunningStatsVec": "rlox.kernels.stats",
    "SAC": "rlox.algorithms.sac",
    "SACConfig": "rlox.config",
    "SACTrainer": "rlox.algorithms.trainers",
    "SequenceReplayBuffer": "rlox.kernels.buffers.sequence",
    "SFT": "rlox.algorithms.sft",
    "SFTConfig": "rlox.config",
    "SquashedGaussianPolicy": "rlox.nn.actors",
    "TD3": "rlox.algorithms.td3",
    "TD3BC": "rlox.algorithms.td3_bc",
    "TD3BCConfig": "rlox.config",
    "TD3Config": "rlox.config",
    "TD3Trainer": "rlox.algorithms.trainers",
    "TimeLimitCallback": "rlox.callbacks",
    "TimingCallback": "rlox.callbacks",
    "Trainer": "rlox.algorithms.trainers",
    "preset": "rlox.config",
    "tuned": "rlox.config",
    "VarLenStore": "rlox.kernels.buffers.varlen",
    "VecEnv": "rlox.envs.registry",
    "VecNormalize": "rlox.collectors.vec_normalize",
    "VideoCallback": "rlox.callbacks",
}

# Module names of the library's first layout, which its documents import, and the modules that provide them now.
_ALIASES = {
    "rlox.batch": ["rlox.nn.batch", "rlox.collectors.rollout"],
    "rlox.gym_vec_env": ["rlox.envs.gym_vec_env"],
    "rlox.llm.reward_models": ["rlox.llm.rewards.models", "rlox.llm.rewards.http"],
    "rlox.losses": ["rlox.nn.losses", "rlox.nn.value_losses", "rlox.nn.critics.losses"],
    "rlox.networks": ["rlox.nn.policies", "rlox.nn.actors", "rlox.nn.critics.ensemble"],
    "rlox.policies": ["rlox.nn.policies", "rlox.nn.actors"],
    "rlox.trainers": ["rlox.algorithms.trainers"],
}


def lazy(package: str, exports: dict[str, str]):
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports a name's module on first use.

    `exports` maps names to modules.
    """

    def getattr_(name: str):
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(exports[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    names = sorted(exports)
    return getattr_, lambda: names, names


class _Alias(ModuleType):
    """Alias of one or more modules, imported on first attribute access. Setting an attribute sets it there."""

    def _modules(self) -> list[ModuleType]:
        return [import_module(module) for module in _ALIASES[self.__name__]]

    def _holder(self, name: str) -> ModuleType:
        """The module that has this name, or the first."""
        return next((module for module in self._modules() if hasattr(module, name)), self._modules()[0])

    @property
    def __dict__(self):  # type: ignore[override]
        # Code that patches a name, such as a test, looks here for the value to restore.
        return {name: value for module in reversed(self._modules()) for name, value in vars(module).items()}

    def __getattr__(self, name: str):
        if not name.startswith("__") and hasattr(holder := self._holder(name), name):
            return getattr(holder, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self._holder(name), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._holder(name), name)

    def __dir__(self) -> list[str]:
        return sorted(vars(self))


def _alias(name: str) -> ModuleType:
    module = _Alias(name, f"Alias of {', '.join(_ALIASES[name])}.")
    module.__spec__ = ModuleSpec(name, None)
    return module


__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
__all__ += ["__version__"]
for _name in _ALIASES:
    sys.modules[_name] = _alias(_name)
    if _name.count(".") == 1:  # `import` finds deeper modules in sys.modules
        globals()[_name.partition(".")[2]] = sys.modules[_name]

if "gymnasium" in sys.modules:
    import_module("rlox.envs.gym")  # registers "rlox/CartPole-v1" and the other native ids

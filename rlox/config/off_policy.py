"""Hyper-parameters of the off-policy algorithms, and settings of their replay memories."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from rlox.config.base import (
    ACTIVATIONS,
    DISCOUNTS,
    DISTRIBUTIONS,
    LARGEST_COUNT,
    LEARNING_RATES,
    MOST_AT_ONCE,
    MOST_ATOMS,
    MOST_NOISE,
    PRECISIONS,
    Q_LOSSES,
    SCHEDULES,
    TARGET_SHARES,
    WEIGHT_NORMS,
    Config,
    _width_rules,
    bounds_rules,
    lack_memory,
    memory_rules,
    operational,
    searched,
)
from rlox.config.critics import CriticConfig

MOST_HELD = 10_000  # steps for which noise can be held

# Of algorithms whose agents have no memory.
SINGLE_TRANSITIONS = lack_memory(
    "an update learns from single transitions, without the steps before them that a memory would have seen"
)


@dataclass
class BatchConfig(Config):
    """Settings shared by all algorithms that learn from samples of stored transitions."""

    largest = LARGEST_COUNT
    schedules: ClassVar[tuple[str, ...]] = SCHEDULES

    learning_rate: float = searched(1e-4, LEARNING_RATES)  # step size of the optimiser at the start
    learning_rate_schedule: str = "constant"  # constant, or linear: to 0 at total_timesteps
    batch_size: int = searched(64, "32,64,128,256,512")  # transitions per update
    max_grad_norm: float | None = 10.0  # global gradient norm is clipped to this; null: off
    hidden_sizes: list[int] = searched([256, 256], "[64,64],[256,256],[400,300]")  # units per hidden layer
    activation: str = "relu"  # tanh or relu
    normalize_obs: bool = False  # observations with mean 0 and variance 1

    def rules(self):
        yield "learning_rate", 0 < self.learning_rate < float("inf"), "be > 0 and finite"
        yield (
            "learning_rate_schedule",
            self.learning_rate_schedule in self.schedules,
            f"be one of {', '.join(self.schedules)}",
        )
        yield "batch_size", self.batch_size >= 1, "be >= 1"
        yield "batch_size", self.batch_size <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"
        yield (
            "max_grad_norm",
            self.max_grad_norm is None or 0 < self.max_grad_norm < float("inf"),
            "be > 0 and finite, or null",
        )
        yield from _width_rules(self.hidden_sizes)
        yield "activation", self.activation in ACTIVATIONS, f"be one of {', '.join(ACTIVATIONS)}"


@dataclass
class OffPolicyConfig(BatchConfig):
    """Settings shared by all off-policy algorithms; the replay memory is set by a `BufferConfig`."""

    replays = "transitions"

    gamma: float = searched(0.99, DISCOUNTS)  # discount factor per step, in [0, 1]
    learning_starts: int = 1000  # environment steps of random actions, stored in the memory, before the first update
    train_freq: int = searched(1, "1,4,8,16,64,256")  # environment steps, over all environments, per round of updates
    gradient_steps: int = searched(1, "1,4,8,16,64,-1")  # updates per round; -1: one per step since the last round
    normalize_obs: bool = False  # running mean and variance of observations, frozen in evaluation
    clip_obs: float = 10.0  # normalised observations are clipped to this, in standard deviations
    precision: str = "float32"  # of losses on a GPU: float32, bfloat16, or auto: bfloat16 on GPUs that support it

    def rules(self):
        yield from super().rules()
        yield "precision", self.precision in PRECISIONS, f"be one of {', '.join(PRECISIONS)}"
        yield "clip_obs", self.clip_obs > 0, "be > 0"
        yield "gamma", 0 <= self.gamma <= 1, "be in [0, 1]"
        yield "learning_starts", self.learning_starts >= 0, "be >= 0"
        yield "train_freq", self.train_freq >= 1, "be >= 1"
        yield "train_freq", self.train_freq <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"
        yield "gradient_steps", self.gradient_steps >= 1 or self.gradient_steps == -1, "be >= 1, or -1"
        yield "gradient_steps", self.gradient_steps <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"

    def conditions(self):
        yield from super().conditions()
        yield "clip_obs", self.normalize_obs, "normalize_obs=true"


@dataclass
class DQNConfig(OffPolicyConfig):
    """Deep Q-Network (Mnih et al. 2015, doi:10.1038/nature14236), with parts of Rainbow (arXiv:1710.02298).

    With a memory it is R2D2 (Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX) in one process.
    """

    double_dqn: bool = True  # the online network chooses the next action, the target network values it
    dueling: bool = searched(False, "true,false")  # separate streams for the state's value and the actions' advantages
    loss: str = "huber"  # huber (quadratic to an error of 1, then linear) or mse (the squared error, no factor 1/2)
    target_update_freq: int = searched(1000, "1,250,1000,10000")  # environment steps per update of the target network
    tau: float = 1.0  # share of the online network mixed into the target per target update; 1: a copy
    exploration_fraction: float = searched(
        0.1, "interval(0.01, 0.5)"
    )  # part of total_timesteps over which epsilon falls linearly
    exploration_initial_eps: float = 1.0  # probability of a random action at the start
    exploration_final_eps: float = searched(0.05, "interval(0.0, 0.2)")  # probability of a random action after that
    distribution: str = "none"  # of each return, beyond its mean: none, quantile (QR-DQN) or categorical (C51)
    n_atoms: int = 51  # with a distribution, the numbers that describe that of one action
    v_min: float = -10.0  # with distribution=categorical, the lowest return; lower ones count as this
    v_max: float = 10.0  # with distribution=categorical, the highest return; higher ones count as this
    huber_kappa: float = 1.0  # with distribution=quantile, the error up to which the loss is quadratic, then linear
    noisy: bool = False  # explore by learned noise on all weights, new in every step; epsilon comes on top of it
    noisy_sigma: float = 0.5  # with noisy, the initial deviation of that noise, times 1/sqrt(inputs of the layer)
    layer_norm: bool = False  # normalise the outputs of each hidden layer before the activation
    adam_eps: float = 1e-8  # added to the denominator of Adam's steps; the distributional papers take 0.01/batch_size
    memory: str = "none"  # none, lstm or gru: after the perceptron, learned from sequences as by R2D2
    memory_size: int = 64  # units of each layer of the memory
    memory_layers: int = 1  # layers of the memory
    memory_horizon: int | None = None  # initial gates keep what was seen for 1 to so many steps; null: for few steps
    sequence_length: int = 40  # with a memory, steps of each sequence in a batch, which has batch_size steps in all
    burn_in: int = 8  # with a memory, the first steps of each sequence, which only warm up its stored state

    def rules(self):
        yield from super().rules()
        yield from memory_rules(self)
        length = self.sequence_length
        yield "sequence_length", 1 <= length <= MOST_AT_ONCE, f"be in [1, {MOST_AT_ONCE:,}]"
        yield "burn_in", self.burn_in >= 0, "be >= 0"
        yield "burn_in", self.burn_in < length or not self.recurrent, f"be below sequence_length ({length})"
        yield "batch_size", self.batch_size >= length or not self.recurrent, f"be >= sequence_length ({length})"
        yield "loss", self.loss in Q_LOSSES, f"be one of {', '.join(Q_LOSSES)}"
        yield from self._network_rules()
        yield "target_update_freq", self.target_update_freq >= 1, "be >= 1"
        yield "tau", 0 < self.tau <= 1, "be in (0, 1]"
        yield "exploration_fraction", 0 <= self.exploration_fraction <= 1, "be in [0, 1]"
        yield "exploration_initial_eps", 0 <= self.exploration_initial_eps <= 1, "be in [0, 1]"
        yield "exploration_final_eps", 0 <= self.exploration_final_eps <= 1, "be in [0, 1]"

    def conditions(self):
        yield from super().conditions()
        for name in ("sequence_length", "burn_in"):
            yield name, self.recurrent, "memory=lstm or gru"
        yield "n_atoms", self.distribution != "none", "distribution=quantile or categorical"
        for name in ("v_min", "v_max"):
            yield name, self.distribution == "categorical", "distribution=categorical"
        yield "huber_kappa", self.distribution == "quantile", "distribution=quantile"
        yield "noisy_sigma", self.noisy, "noisy=true"

    @property
    def value_option(self) -> str | None:
        """The first option that needs a `rlox.nn.value_networks.ValueNetwork`; None: values of a plain perceptron."""
        options = (self.distribution != "none", f"distribution={self.distribution}"), (self.noisy, "noisy layers")
        return next((name for given, name in (*options, (self.layer_norm, "layer_norm")) if given), None)

    def _network_rules(self):
        learns_mean, plain = self.distribution == "none", self.memory == "none"
        yield "distribution", self.distribution in DISTRIBUTIONS, f"be one of {', '.join(DISTRIBUTIONS)}"
        yield "distribution", learns_mean or plain, f"be none with memory={self.memory}"
        yield "loss", self.loss == "huber" or learns_mean, f"be huber with distribution={self.distribution}"
        yield "n_atoms", 2 <= self.n_atoms <= MOST_ATOMS, f"be in [2, {MOST_ATOMS:,}]"
        yield from bounds_rules(self)
        yield "huber_kappa", 0 < self.huber_kappa < math.inf, "be > 0 and finite"
        yield "noisy", not self.noisy or plain, f"be false with memory={self.memory}"
        yield "noisy_sigma", 0 <= self.noisy_sigma <= MOST_NOISE, f"be in [0, {MOST_NOISE}]"
        yield "layer_norm", not self.layer_norm or plain, f"be false with memory={self.memory}"
        yield "adam_eps", 0 < self.adam_eps < math.inf, "be > 0 and finite"


@dataclass
class TwinCriticConfig(CriticConfig, OffPolicyConfig):
    """Settings shared by SAC and TD3."""

    uses_dataset = "may"
    lacks = SINGLE_TRANSITIONS
    schedules = (*SCHEDULES, "cosine")

    learning_rate_schedule: str = "constant"  # constant, or linear or cosine: to learning_rate_end at total_timesteps
    batch_size: int = searched(256, "64,128,256,512,1024")  # transitions per update
    learning_starts: int = 100  # environment steps of random actions, stored in the memory, before the first update
    max_grad_norm: float | None = None  # gradient norms of policy and critics are clipped to this; null: off
    tau: float = searched(0.005, TARGET_SHARES)  # share of the online networks mixed into the targets per update
    exploration_noise: float = 0.0  # standard deviation of the noise added to the actions taken, scaled to [-1, 1]
    noise_correlation: float = 0.0  # correlation of that noise from one step of an episode to the next; 0: independent
    normalize_rewards: bool = False  # learn from rewards divided by the standard deviation of their discounted sum
    fit_rewards: bool = False  # divide them by more if their discounted sums have been larger than v_max times that
    dataset_share: float = 0.5  # with dataset=: part of each batch drawn from it, the rest from the replay memory

    def rules(self):
        yield from super().rules()
        yield "tau", 0 < self.tau <= 1, "be in (0, 1]"
        for name, widths in (("hidden_sizes", self.hidden_sizes), ("critic_hidden_sizes", self.critic_hidden_sizes)):
            one = self.residual_blocks == 0 or widths is None or len(widths) == 1
            yield name, one, f"be one width with residual_blocks={self.residual_blocks}"
        alone = self.batch_size == 1 and self.actor_norm in ("batch", "batch_renorm")
        yield "batch_size", not alone, f"be >= 2 with actor_norm={self.actor_norm}"
        fits = self.fit_rewards
        yield "fit_rewards", not fits or self.normalize_rewards, "be false unless normalize_rewards is true"
        yield "fit_rewards", not fits or self.v_max > 0, f"be false with v_max={self.v_max:g}, which is not above 0"
        yield "dataset_share", 0 < self.dataset_share < 1, "be in (0, 1)"
        yield "exploration_noise", 0 <= self.exploration_noise <= MOST_NOISE, f"be in [0, {MOST_NOISE}]"
        yield "noise_correlation", 0 <= self.noise_correlation < 1, "be in [0, 1)"
        correlated = self.noise_correlation > 0
        yield "exploration_noise", self.exploration_noise > 0 or not correlated, "be > 0 if noise_correlation is"

    def conditions(self):
        yield from super().conditions()
        yield "tau", self.target_network, "target_network=true"

    @property
    def critic_widths(self) -> list[int]:
        """Units per hidden layer of the critics."""
        return self.hidden_sizes if self.critic_hidden_sizes is None else self.critic_hidden_sizes


@dataclass
class EntropyConfig(Config):
    """Settings of the temperature of SAC and CQL."""

    auto_entropy: bool = True  # learn the weight of the entropy so that the entropy approaches target_entropy
    ent_coef: float = 1.0  # weight of the policy's entropy, per nat; with auto_entropy: the initial weight
    target_entropy: float | None = None  # nats, for actions scaled to [-1, 1]; null: minus the number of components

    def rules(self):
        yield from super().rules()
        yield "ent_coef", 0 <= self.ent_coef < math.inf, "be >= 0 and finite"
        yield "ent_coef", self.ent_coef > 0 or not self.auto_entropy, "be > 0 if auto_entropy is true"
        yield "target_entropy", self.target_entropy is None or math.isfinite(self.target_entropy), "be finite, or null"

    def conditions(self):
        yield from super().conditions()
        yield "target_entropy", self.auto_entropy, "auto_entropy=true"


@dataclass
class DelayConfig(Config):
    """Delayed policy updates and target smoothing of TD3 and TD3+BC."""

    policy_delay: int = searched(2, "1,2,4")  # critic updates per update of the policy and all targets
    target_noise: float = searched(
        0.2, "interval(0.0, 0.5)"
    )  # standard deviation of the noise on target actions, which are in [-1, 1]
    noise_clip: float = 0.5  # target noise is clipped to this

    def rules(self):
        yield from super().rules()
        yield "policy_delay", self.policy_delay >= 1, "be >= 1"
        yield "target_noise", 0 <= self.target_noise <= MOST_NOISE, f"be in [0, {MOST_NOISE}]"
        yield "noise_clip", 0 <= self.noise_clip < math.inf, "be >= 0 and finite"

    def conditions(self):
        yield from super().conditions()
        yield "noise_clip", self.target_noise > 0, "target_noise above 0"


@dataclass
class SACConfig(EntropyConfig, TwinCriticConfig):
    """Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1812.05905)."""

    learning_rate: float = searched(3e-4, LEARNING_RATES)  # step size of policy, critics and temperature at the start
    policy_delay: int = 1  # critic updates per update of policy and temperature
    hold_noise: int = 0  # most steps for which the policy's noise stays the same, n in proportion to 1/n²; 0: off
    entropy_per_action: float = -1.0  # nats per component of an action, of target_entropy=null
    entropy_fraction: float = 0.5  # with discrete actions, part of the largest entropy, for target_entropy=null

    def rules(self):
        yield from super().rules()
        yield "policy_delay", self.policy_delay >= 1, "be >= 1"
        yield "hold_noise", 0 <= self.hold_noise <= MOST_HELD, f"be in [0, {MOST_HELD:,}]"
        yield "hold_noise", self.hold_noise < 2 or self.exploration_noise == 0, "be 0 if exploration_noise is above 0"
        yield "entropy_per_action", math.isfinite(self.entropy_per_action), "be finite"
        yield "entropy_fraction", 0 <= self.entropy_fraction <= 1, "be in [0, 1]"

    def conditions(self):
        yield from super().conditions()
        for name in ("entropy_per_action", "entropy_fraction"):
            yield name, self.auto_entropy, "auto_entropy=true"
            yield name, self.target_entropy is None, "target_entropy=null"

    def find_torch_option(self):
        return super().find_torch_option() or (None if self.policy_delay == 1 else f"policy_delay={self.policy_delay}")


@dataclass
class TD3Config(DelayConfig, TwinCriticConfig):
    """Twin Delayed DDPG (Fujimoto et al. 2018, arXiv:1802.09477)."""

    learning_rate: float = searched(1e-3, LEARNING_RATES)  # step size of policy and critics at the start
    exploration_noise: float = searched(
        0.1, "interval(0.0, 0.5)"
    )  # standard deviation of the noise added to the actions taken, scaled to [-1, 1]


# ---- replay memories


@dataclass
class BufferConfig(Config):
    """Uniform: every transition is equally likely to be drawn. Base class of the other memories' settings."""

    name: str = "uniform"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    size: int = 1_000_000  # transitions it holds; the oldest are then overwritten
    n_step: int = searched(1, "1,3,5")  # steps of a return before it bootstraps; episode ends and time limits cut it
    device: str = operational("auto")  # whose memory: cpu (the host's) or cuda (the GPU's); auto: the learner's

    frame_stacks: ClassVar[bool] = True  # whether its class takes n_stacked, to store each frame of stacked frames once
    holds: ClassVar[str] = "transitions"  # what is sampled from it: transitions or sequences, see `Config.replays`

    def rules(self):
        yield "device", self.device in ("auto", "cpu", "cuda"), "be one of auto, cpu, cuda"
        yield "name", bool(self.name), "not be empty"
        yield "size", self.size >= 1, "be >= 1"
        yield "n_step", self.n_step >= 1, "be >= 1"
        yield "n_step", self.n_step <= self.size, f"be at most size ({self.size})"

    def arguments(self) -> dict[str, Any]:
        """Return the buffer's arguments, without shapes and n-step returns: ``capacity`` and all other fields."""
        given = {key: value for key, value in asdict(self).items() if key not in ("name", "size", "n_step", "device")}
        return {"capacity": self.size, **given}


@dataclass
class OutsideBufferConfig(BufferConfig):
    """A registered memory without its own configuration class."""

    name: str = "outside"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of its class

    frame_stacks = False

    def arguments(self):
        return {"capacity": self.size, **self.kwargs}


@dataclass
class PrioritizedBufferConfig(BufferConfig):
    """Prioritised: drawn in proportion to a power of the last TD error (Schaul et al. 2016, arXiv:1511.05952)."""

    name: str = "prioritized"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    alpha: float = searched(0.6, "interval(0.3, 0.9)")  # exponent of the priorities: 0 draws uniformly, 1 in proportion
    beta: float = 0.4  # exponent of the importance weights at the start; it rises to 1 at total_timesteps, linearly
    eps: float = 1e-2  # smallest priority: smaller TD errors count as this, so that no transition is lost
    weight_norm: str = "none"  # divide importance weights by the largest one of: batch, memory; none: not divided

    def rules(self):
        yield from super().rules()
        yield "alpha", 0 <= self.alpha <= 1, "be in [0, 1]"
        yield "beta", 0 <= self.beta <= 1, "be in [0, 1]"
        yield "eps", 0 <= self.eps < math.inf, "be >= 0 and finite"
        yield "weight_norm", self.weight_norm in WEIGHT_NORMS, f"be one of {', '.join(WEIGHT_NORMS)}"


@dataclass
class MmapBufferConfig(BufferConfig):
    """Uniform, with the newest transitions in memory and older ones in a file."""

    name: str = "mmap"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    hot_size: int | None = operational(None)  # transitions held in memory; null: 10_000, or size if that is smaller
    folder: str | None = operational(None)  # folder of the file; null: the run folder (library: a temporary folder)

    frame_stacks = False

    def rules(self):
        yield from super().rules()
        yield "hot_size", 1 <= self.n_hot <= self.size, f"be between 1 and size ({self.size}), or null"

    @property
    def n_hot(self) -> int:
        """`hot_size`, or its default if that is null."""
        return min(10_000, self.size) if self.hot_size is None else self.hot_size

    def arguments(self):
        return {"hot_capacity": self.n_hot, "total_capacity": self.size, "cold_path": self.folder}


@dataclass
class SequenceBufferConfig(BufferConfig):
    """Sequences of consecutive steps, for agents that carry a state from step to step (DreamerV3)."""

    name: str = "sequence"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    size: int = 1_000_000  # steps it holds, over all environments; the oldest are then overwritten
    n_step: int = 1  # always 1: sequences contain single steps
    online: bool = True  # each batch first takes steps not used before; the rest is drawn uniformly

    frame_stacks = False
    holds = "sequences"

    def rules(self):
        yield from super().rules()
        yield "n_step", self.n_step == 1, "be 1, since sequences contain single steps"

    def arguments(self):
        return {"capacity": self.size}

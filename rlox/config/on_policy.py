"""Hyper-parameters of the on-policy algorithms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlox.config.base import (
    ACTIVATIONS,
    DISCOUNTS,
    ENTROPY_WEIGHTS,
    LARGEST_COUNT,
    LEARNING_RATES,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    TRACE_DECAYS,
    Config,
    _width_rules,
    memory_rules,
    searched,
)

CRITICS = ("central", "local")
VALUE_LOSSES = ("mse", "huber")


@dataclass
class OnPolicyConfig(Config):
    """Settings shared by all on-policy actor-critics."""

    largest = LARGEST_COUNT

    n_steps: int = searched(128, "32,64,128,256,512,1024,2048")  # steps per environment in one rollout
    learning_rate: float = searched(2.5e-4, LEARNING_RATES)  # step size of the optimiser at the start
    learning_rate_schedule: str = "constant"  # constant, or linear: to 0 at total_timesteps
    gamma: float = searched(0.99, DISCOUNTS)  # discount factor per step, in [0, 1]
    gae_lambda: float = searched(0.95, TRACE_DECAYS)  # decay of the advantage trace per step, in [0, 1]
    ent_coef: float = searched(0.01, ENTROPY_WEIGHTS)  # weight of the entropy bonus, per nat
    vf_coef: float = searched(0.5, "interval(0.1, 1.0)")  # weight of the squared value error
    max_grad_norm: float | None = searched(0.5, "0.3,0.5,1,2,5")  # global gradient norm is clipped to this; null: off
    optimizer: str = "adam"  # adam or rmsprop, both with eps 1e-5
    normalize_advantages: bool = searched(True, "true,false")  # zero mean, unit variance in each minibatch
    hidden_sizes: list[int] = searched([64, 64], "[64,64],[256,256]")  # units per hidden layer, for actor and critic
    activation: str = searched("tanh", "tanh,relu")  # tanh or relu
    ortho_init: bool = True  # orthogonal weights (gain sqrt 2; 0.01 at the policy head), else uniform 1/sqrt(fan_in)
    log_std_init: float = 0.0  # initial log standard deviation of continuous actions
    memory: str = "none"  # none, lstm or gru: after the perceptron, with a state that lasts for an episode
    memory_size: int = 64  # units of each layer of the memory
    memory_layers: int = 1  # layers of the memory
    memory_horizon: int | None = None  # initial gates keep what was seen for 1 to so many steps; null: for few steps
    normalize_obs: bool = False  # running mean and variance of observations, frozen in evaluation
    normalize_rewards: bool = False  # divide rewards by the running deviation of their discounted sum
    clip_obs: float = 10.0  # normalised observations are clipped to this, in standard deviations
    clip_rewards: float = 10.0  # normalised rewards are clipped to this, in standard deviations
    precision: str = "float32"  # of losses on a GPU: float32, bfloat16, or auto: bfloat16 on GPUs that support it

    def rules(self):
        yield "n_steps", self.n_steps >= 1, "be >= 1"
        yield "learning_rate", 0 < self.learning_rate < float("inf"), "be > 0 and finite"
        yield (
            "learning_rate_schedule",
            self.learning_rate_schedule in SCHEDULES,
            f"be one of {', '.join(SCHEDULES)}",
        )
        yield "optimizer", self.optimizer in OPTIMIZERS, f"be one of {', '.join(OPTIMIZERS)}"
        yield "gamma", 0 <= self.gamma <= 1, "be in [0, 1]"
        yield "gae_lambda", 0 <= self.gae_lambda <= 1, "be in [0, 1]"
        yield "ent_coef", 0 <= self.ent_coef < float("inf"), "be >= 0 and finite"
        yield "vf_coef", 0 <= self.vf_coef < float("inf"), "be >= 0 and finite"
        yield (
            "max_grad_norm",
            self.max_grad_norm is None or 0 < self.max_grad_norm < float("inf"),
            "be > 0 and finite, or null",
        )
        yield from _width_rules(self.hidden_sizes)
        yield "activation", self.activation in ACTIVATIONS, f"be one of {', '.join(ACTIVATIONS)}"
        yield "clip_obs", self.clip_obs > 0, "be > 0"
        yield "clip_rewards", self.clip_rewards > 0, "be > 0"
        yield "log_std_init", -20 <= self.log_std_init <= 2, "be in [-20, 2]"
        yield from memory_rules(self)
        yield "precision", self.precision in PRECISIONS, f"be one of {', '.join(PRECISIONS)}"

    def conditions(self):
        yield from super().conditions()
        yield "clip_obs", self.normalize_obs, "normalize_obs=true"
        yield "clip_rewards", self.normalize_rewards, "normalize_rewards=true"


@dataclass
class PPOConfig(OnPolicyConfig):
    """Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347)."""

    n_epochs: int = searched(4, "1,4,10,20")  # passes over each rollout
    batch_size: int = searched(256, "32,64,128,256,512")  # transitions per gradient step
    clip_eps: float = searched(0.2, "0.1,0.2,0.3,0.4")  # the probability ratio is clipped to [1 - eps, 1 + eps]
    clip_eps_schedule: str = "constant"  # constant, or linear: to 0 at total_timesteps
    clip_vf: float | None = None  # value changes are clipped to this, as in Stable-Baselines3 (no maximum); null: off
    target_kl: float | None = (
        None  # in nats: stop the epochs once the KL to the old policy exceeds 1.5 times this; null: off
    )
    sequence_length: int | None = None  # with a memory, steps of each sequence in a minibatch; null: n_steps

    def rules(self):
        yield from super().rules()
        yield "n_epochs", self.n_epochs >= 1, "be >= 1"
        yield "batch_size", self.batch_size >= 2, "be >= 2"
        yield "clip_eps", 0 < self.clip_eps < 1, "be in (0, 1)"
        yield (
            "clip_eps_schedule",
            self.clip_eps_schedule in SCHEDULES,
            f"be one of {', '.join(SCHEDULES)}",
        )
        yield "clip_vf", self.clip_vf is None or 0 < self.clip_vf < math.inf, "be > 0 and finite, or null"
        yield "target_kl", self.target_kl is None or 0 < self.target_kl < math.inf, "be > 0 and finite, or null"
        length = self.sequence_length
        yield "sequence_length", length is None or self.recurrent, "be null without a memory"
        whole = length is None or (length >= 1 and self.n_steps % length == 0)
        yield "sequence_length", whole, f"divide n_steps={self.n_steps}"


@dataclass
class MAPPOConfig(PPOConfig):
    """Multi-agent PPO (Yu et al. 2022, arXiv:2103.01955); the same as PPO with one agent."""

    several_agents = True

    n_steps: int = searched(64, "25,32,64,128,256")  # steps per environment in one rollout
    batch_size: int = searched(128, "128,512,2048,8192")  # agent steps per gradient step of a shared policy
    share_parameters: bool = True  # agents with equal spaces share a policy; false: each has its own
    agent_id: bool = False  # agents that share a policy observe their index, as a one-hot vector
    critic: str = "central"  # central: the critic sees the state of all agents; local: its agent's observation (IPPO)
    value_norm: bool = False  # the critic predicts returns normalised by their running mean and deviation
    value_loss: str = searched("mse", "mse,huber")  # mse: e^2; huber: e^2 / 2, linear beyond huber_delta
    huber_delta: float = 10.0  # error at which value_loss=huber becomes linear, in the critic's units
    clip_vf_max: bool = False  # with clip_vf, the greater of clipped and plain value loss, as in OpenAI's PPO2
    self_play: bool = False  # one group learns at a time, against earlier policies of this run
    self_play_pool: int = 10  # earlier policies kept per group
    self_play_every: int = 10  # updates between two stored policies; then another group learns

    def rules(self):
        yield from super().rules()
        yield "critic", self.critic in CRITICS, f"be one of {', '.join(CRITICS)}"
        yield "value_loss", self.value_loss in VALUE_LOSSES, f"be one of {', '.join(VALUE_LOSSES)}"
        yield "huber_delta", 0 < self.huber_delta < math.inf, "be > 0 and finite"
        yield "clip_vf_max", not self.clip_vf_max or self.clip_vf is not None, "be false if clip_vf is null"
        yield "agent_id", not self.agent_id or self.share_parameters, "be false if share_parameters is false"
        yield "self_play_pool", 1 <= self.self_play_pool <= 1000, "be in [1, 1000]"
        yield "self_play_every", self.self_play_every >= 1, "be >= 1"

    def conditions(self):
        yield from super().conditions()
        yield "huber_delta", self.value_loss == "huber", "value_loss=huber"
        for name in ("self_play_pool", "self_play_every"):
            yield name, self.self_play, "self_play=true"


@dataclass
class A2CConfig(OnPolicyConfig):
    """Advantage Actor-Critic, synchronous (Mnih et al. 2016, arXiv:1602.01783)."""

    n_steps: int = searched(5, "5,8,16,32,64,128")  # steps per environment in one rollout, which is one gradient step
    learning_rate: float = searched(7e-4, LEARNING_RATES)  # step size of the optimiser at the start
    gae_lambda: float = searched(1.0, TRACE_DECAYS)  # decay of the advantage trace per step, in [0, 1]
    ent_coef: float = searched(0.0, ENTROPY_WEIGHTS)  # weight of the entropy bonus, per nat
    optimizer: str = searched("rmsprop", "adam,rmsprop")  # adam or rmsprop, both with eps 1e-5
    normalize_advantages: bool = searched(False, "true,false")  # zero mean, unit variance in each rollout

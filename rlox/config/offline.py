"""Hyper-parameters of the algorithms that learn from a dataset, and settings of the dataset."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlox.config.base import (
    DISCOUNTS,
    LEARNING_RATES,
    MOST_AT_ONCE,
    POLICY_SCHEDULES,
    TARGET_SHARES,
    Config,
    memory_rules,
    searched,
)
from rlox.config.off_policy import SINGLE_TRANSITIONS, BatchConfig, DelayConfig, EntropyConfig


@dataclass
class OfflineConfig(BatchConfig):
    """Settings shared by all algorithms that learn from a dataset; total_timesteps counts updates."""

    uses_dataset = "must"

    learning_rate: float = searched(3e-4, LEARNING_RATES)  # step size of every network at the start
    batch_size: int = searched(256, "64,128,256,512,1024")  # transitions per update
    max_grad_norm: float | None = None  # each optimiser's gradient norm is clipped to this; null: off
    normalize_obs: bool = False  # observations with the dataset's mean 0 and deviation 1, in training and afterwards


@dataclass
class OfflineCriticConfig(OfflineConfig):
    """Settings shared by TD3+BC, IQL and CQL."""

    lacks = SINGLE_TRANSITIONS

    gamma: float = searched(0.99, DISCOUNTS)  # discount factor per step, in [0, 1]
    tau: float = searched(0.005, TARGET_SHARES)  # share of the online networks mixed into the targets per update

    def rules(self):
        yield from super().rules()
        yield "gamma", 0 <= self.gamma <= 1, "be in [0, 1]"
        yield "tau", 0 < self.tau <= 1, "be in (0, 1]"


@dataclass
class BCConfig(OfflineConfig):
    """Behavioural cloning: the dataset's actions, learned as labels (Pomerleau 1988, ALVINN)."""

    memory: str = "none"  # none, lstm or gru: after the perceptron, with a state that lasts for an episode
    memory_size: int = 64  # units of each layer of the memory
    memory_layers: int = 1  # layers of the memory
    memory_horizon: int | None = None  # initial gates keep what was seen for 1 to so many steps; null: for few steps
    sequence_length: int | None = None  # with a memory, steps of each sequence in a batch; null: 64, or batch_size
    burn_in: int | None = None  # steps before a sequence that only set the memory's state; null: sequence_length

    def rules(self):
        yield from super().rules()
        yield from memory_rules(self)
        for name, least in (("sequence_length", 1), ("burn_in", 0)):
            value = getattr(self, name)
            yield name, value is None or self.recurrent, "be null without a memory"
            yield name, value is None or value >= least, f"be >= {least}, or null"
        length = self.sequence_length
        yield "sequence_length", length is None or length <= self.batch_size, f"be at most batch_size={self.batch_size}"
        yield "burn_in", self.burn_in is None or self.burn_in <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"

    @property
    def steps_per_sequence(self) -> int:
        """Steps of each sequence in a batch."""
        return min(64, self.batch_size) if self.sequence_length is None else self.sequence_length

    @property
    def steps_before(self) -> int:
        """Steps before each sequence that only set the memory's state."""
        return self.steps_per_sequence if self.burn_in is None else self.burn_in


@dataclass
class TD3BCConfig(DelayConfig, OfflineCriticConfig):
    """TD3 with a behaviour-cloning term (Fujimoto and Gu 2021, arXiv:2106.06860)."""

    alpha: float = searched(
        2.5, "tag(log, interval(0.1, 10.0))"
    )  # weight of the values, scaled to mean size 1, relative to the squared distance to the data
    normalize_obs: bool = True  # observations with the dataset's mean 0 and deviation 1, in training and afterwards

    def rules(self):
        yield from super().rules()
        yield "alpha", 0 <= self.alpha < math.inf, "be >= 0 and finite"


@dataclass
class IQLConfig(OfflineCriticConfig):
    """Implicit Q-Learning (Kostrikov et al. 2021, arXiv:2110.06169)."""

    expectile: float = searched(
        0.7, "interval(0.5, 0.95)"
    )  # expectile of the values of the data's actions that V learns: 0.5: mean, towards 1: maximum
    temperature: float = searched(
        3.0, "tag(log, interval(0.1, 10.0))"
    )  # beta: actions weigh exp(beta * advantage); 0 clones the data
    max_weight: float = 100.0  # weights of actions are clipped to this
    policy_schedule: str = searched(
        "constant", "constant,cosine"
    )  # schedule of the policy's step size: constant, or cosine: to 0 at total_timesteps

    def rules(self):
        yield from super().rules()
        yield "expectile", 0 < self.expectile < 1, "be in (0, 1)"
        yield "temperature", 0 <= self.temperature < math.inf, "be >= 0 and finite"
        yield "max_weight", 0 < self.max_weight < math.inf, "be > 0 and finite"
        yield "policy_schedule", self.policy_schedule in POLICY_SCHEDULES, f"be one of {', '.join(POLICY_SCHEDULES)}"


@dataclass
class CQLConfig(EntropyConfig, OfflineCriticConfig):
    """Conservative Q-Learning, CQL(H) (Kumar et al. 2020, arXiv:2006.04779)."""

    cql_alpha: float = searched(
        5.0, "tag(log, interval(0.1, 20.0))"
    )  # weight of the penalty relative to the squared TD error; with auto_alpha: the initial weight
    n_random_actions: int = 10  # uniform actions per state in the penalty, and the same number from the policy
    auto_alpha: bool = False  # learn this weight so that the penalty approaches cql_target_value (or less, at weight 0)
    cql_target_value: float = -1.0  # target of the penalty, in units of return; 0: all actions have the same value

    def rules(self):
        yield from super().rules()
        yield "cql_alpha", 0 <= self.cql_alpha < math.inf, "be >= 0 and finite"
        yield "cql_alpha", self.cql_alpha > 0 or not self.auto_alpha, "be > 0 if auto_alpha is true"
        yield "n_random_actions", self.n_random_actions >= 1, "be >= 1"
        yield "n_random_actions", self.n_random_actions <= 1000, "be at most 1,000"
        yield "cql_target_value", math.isfinite(self.cql_target_value), "be finite"

    def conditions(self):
        yield from super().conditions()
        yield "cql_target_value", self.auto_alpha, "auto_alpha=true"


@dataclass
class DatasetConfig(Config):
    """Recorded transitions to learn from."""

    source: str  # a file (.arrow .feather .ipc .parquet .npz .h5 .hdf5), or minari:ID; chosen by dataset=SOURCE
    normalize: bool = False  # standardise observations by the dataset's mean and deviation
    max_transitions: int | None = None  # use only this many rows, from the beginning; null: all
    reward_scale: float = 1.0  # rewards are multiplied by this,
    reward_shift: float = 0.0  # then this is added
    normalize_returns: bool = False  # first scale rewards so that best and worst episode differ by 1000, as in IQL

    def rules(self):
        yield "source", bool(self.source) and "\0" not in self.source, "be a file or minari:ID"
        yield "max_transitions", self.max_transitions is None or self.max_transitions >= 1, "be >= 1, or null"
        yield "reward_scale", math.isfinite(self.reward_scale) and self.reward_scale != 0, "be finite and not 0"
        yield "reward_shift", math.isfinite(self.reward_shift), "be finite"

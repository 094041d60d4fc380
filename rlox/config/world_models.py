"""Hyper-parameters of the algorithms that learn a model of the world."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from rlox.config.base import (
    LARGEST_COUNT,
    LEARNING_RATES,
    MOST_AT_ONCE,
    PRECISIONS,
    SCHEDULES,
    Config,
    lack_memory,
    searched,
)


class Size(NamedTuple):
    """Widths of a world model."""

    deter: int  # of the deterministic state
    units: int  # of every hidden layer
    stoch: int  # categorical latents
    classes: int  # of each


# From "1m" on, the sizes of the author's code. Each name is the approximate number of parameters with vector
# observations.
SIZES = {
    "200k": Size(128, 64, 8, 8),
    "1m": Size(512, 64, 32, 4),
    "12m": Size(2048, 256, 32, 16),
    "25m": Size(3072, 384, 32, 24),
    "50m": Size(4096, 512, 32, 32),
    "100m": Size(6144, 768, 32, 48),
    "200m": Size(8192, 1024, 32, 64),
}
BLOCKS = 8  # of the recurrent state's block-diagonal weights


@dataclass
class DreamerConfig(Config):
    """DreamerV3 (Hafner et al. 2023, arXiv:2301.04104), with the constants of the author's present code."""

    largest = LARGEST_COUNT
    replays = "sequences"
    lacks = lack_memory("the world model is a memory already, which cannot be switched off")
    uses_dataset = "may"

    size: str = searched("200k", "200k,1m,12m")  # widths of the model: 200k, 1m, 12m, 25m, 50m, 100m or 200m
    deter_dim: int | None = None  # width of the deterministic state, a multiple of 8; null: set by size
    stoch_dim: int | None = None  # number of categorical latents; null: set by size
    stoch_classes: int | None = None  # classes of each latent; null: set by size
    hidden_dim: int | None = None  # units of every hidden layer; null: set by size

    batch_size: int = searched(16, "8,16,32")  # sequences per update
    seq_len: int = searched(16, "16,32,64")  # steps of each sequence
    replay_ratio: float = searched(128.0, "16,32,64,128,256,512")  # replayed steps per environment step
    pretrain_updates: int = 0  # with dataset=: updates on its episodes before the first environment step
    learning_starts: int = 1000  # environment steps of random actions before the first update
    imagination_horizon: int = searched(15, "5,10,15")  # imagined steps that the actor and the critic learn from

    learning_rate: float = searched(1e-3, LEARNING_RATES)  # step size of the optimiser, which trains all networks
    learning_rate_schedule: str = "linear"  # constant, or linear: to 0 at total_timesteps
    warmup_updates: int = 100  # updates over which the step size rises from 0
    gradient_clip: float = 0.3  # each tensor's gradient norm is clipped to this share of the tensor's norm

    precision: str = "auto"  # of forward and backward: bfloat16, float32, or auto: bfloat16 on GPUs that support it

    gamma: float = searched(1 - 1 / 333, "0.99,0.997,0.999")  # discount factor per step, in [0, 1]
    gae_lambda: float = searched(0.95, "0.9,0.95,0.98")  # decay of the returns' traces, in [0, 1]
    ent_coef: float = searched(1e-2, "tag(log, interval(1e-4, 3e-2))")  # weight of the policy's entropy
    vf_coef: float = 1.0  # weight of the critic's loss on imagined states
    replay_vf_coef: float = 0.3  # weight of the critic's loss on replayed states
    slow_rate: float = 0.02  # share of the critic mixed into its slow copy per update
    slow_coef: float = 1.0  # weight of the critic's loss towards its slow copy
    return_rate: float = 0.01  # share of a batch's percentiles mixed into the scale of returns

    vector_coef: float = 10.0  # weight of the squared prediction errors of vectors; those of images have weight 1
    kl_balance: float = 1 / 1.1  # share of the KL weight that trains the prior; the rest trains the posterior
    kl_coef: float = 1.1  # weight of the KL
    free_nats: float = 1.0  # KL, in nats, below which it is not reduced further
    unimix: float = 0.01  # share of the uniform distribution in latents and discrete actions

    @property
    def shape(self) -> Size:
        """Widths of the model: those of `size`, unless overridden."""
        own = (self.deter_dim, self.hidden_dim, self.stoch_dim, self.stoch_classes)
        usual = SIZES[self.size]
        return Size(*(there if mine is None else mine for mine, there in zip(own, usual, strict=True)))

    @property
    def update_rows(self) -> int:
        """Replayed steps per update."""
        return self.batch_size * self.seq_len

    def rules(self):
        yield "size", self.size in SIZES, f"be one of {', '.join(SIZES)}"
        for name, most in (("deter_dim", 2**16), ("stoch_dim", 1024), ("stoch_classes", 1024), ("hidden_dim", 2**14)):
            value = getattr(self, name)
            yield name, value is None or 1 <= value <= most, f"be between 1 and {most:,}, or null"
        deter = self.deter_dim
        yield "deter_dim", deter is None or deter % BLOCKS == 0, f"be a multiple of {BLOCKS}"
        for name in ("batch_size", "imagination_horizon"):
            yield name, 1 <= getattr(self, name) <= MOST_AT_ONCE, f"be between 1 and {MOST_AT_ONCE:,}"
        yield "seq_len", 2 <= self.seq_len <= MOST_AT_ONCE, f"be between 2 and {MOST_AT_ONCE:,}"
        rows = self.batch_size * self.seq_len
        yield "seq_len", rows <= MOST_AT_ONCE, f"make batch_size * seq_len at most {MOST_AT_ONCE:,}"
        yield "replay_ratio", 0 < self.replay_ratio <= MOST_AT_ONCE, f"be > 0 and at most {MOST_AT_ONCE:,}"
        for name in ("pretrain_updates", "learning_starts"):
            yield name, getattr(self, name) >= 0, "be >= 0"
        yield "learning_rate", 0 < self.learning_rate < math.inf, "be > 0 and finite"
        yield (
            "learning_rate_schedule",
            self.learning_rate_schedule in SCHEDULES,
            f"be one of {', '.join(SCHEDULES)}",
        )
        yield "warmup_updates", self.warmup_updates >= 0, "be >= 0"
        yield "precision", self.precision in PRECISIONS, f"be one of {', '.join(PRECISIONS)}"
        yield "gradient_clip", 0 < self.gradient_clip < math.inf, "be > 0 and finite"
        for name in ("gamma", "gae_lambda", "kl_balance"):
            yield name, 0 <= getattr(self, name) <= 1, "be in [0, 1]"
        for name in ("ent_coef", "vf_coef", "replay_vf_coef", "slow_coef", "vector_coef", "kl_coef", "free_nats"):
            yield name, 0 <= getattr(self, name) < math.inf, "be >= 0 and finite"
        for name in ("slow_rate", "return_rate"):
            yield name, 0 < getattr(self, name) <= 1, "be in (0, 1]"
        yield "unimix", 0 <= self.unimix < 1, "be in [0, 1)"

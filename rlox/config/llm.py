"""Hyper-parameters of the post-training of language models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlox.config.base import MOST_AT_ONCE, PRECISIONS, SCHEDULES, Config, searched

GRPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust")
REWARD_SCALES = ("group", "batch", "none")
BASELINES = ("mean", "leave_one_out")
RATIO_LEVELS = ("token", "sequence")
SAMPLER_CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_RATES = "tag(log, interval(1e-6, 1e-3))"
_BETAS = "tag(log, interval(0.01, 1.0))"


@dataclass
class LLMConfig(Config):
    """What every algorithm shares that trains a language model; total_timesteps counts its updates."""

    uses_dataset = "text"
    largest = MOST_AT_ONCE

    learning_rate: float = searched(1e-6, _RATES)  # AdamW's step size at the start
    learning_rate_schedule: str = "constant"  # constant, or linear: down to 0
    warmup: float = 0.0  # share of the training over which the learning rate rises from 0
    weight_decay: float = 0.0  # AdamW's: share of each weight, times the learning rate, taken away per step
    batch_size: int = 8  # rows of the dataset per update: prompts, pairs or texts
    accumulation: int = 1  # parts a batch is differentiated in, one after the other: less memory, the same gradient
    max_grad_norm: float | None = 1.0  # the gradient's norm is clipped to this; null: off
    packing: bool = False  # several sequences a row in place of padding; Hugging Face models only
    gradient_checkpointing: bool = False  # compute activations twice in place of keeping them: less memory, more time
    precision: str = "auto"  # of the passes: bfloat16, float32, or auto: bfloat16 on a GPU that has it
    lora_rank: int | None = None  # train low-rank adapters (peft) of this rank in place of the weights; null: off
    lora_alpha: float = 16.0  # scale of the adapters' output, divided by their rank
    lora_targets: list[str] | None = None  # modules that get one, by the ends of their names; null: all linear ones

    def rules(self):
        yield "learning_rate", 0 < self.learning_rate < math.inf, "be > 0 and finite"
        yield "learning_rate_schedule", self.learning_rate_schedule in SCHEDULES, f"be one of {', '.join(SCHEDULES)}"
        yield "warmup", 0 <= self.warmup < 1, "be in [0, 1)"
        yield "weight_decay", 0 <= self.weight_decay < math.inf, "be >= 0 and finite"
        yield "batch_size", self.batch_size >= 1, "be >= 1"
        yield "accumulation", self.accumulation >= 1, "be >= 1"
        yield "max_grad_norm", self.max_grad_norm is None or 0 < self.max_grad_norm < math.inf, "be > 0, or null"
        yield "precision", self.precision in PRECISIONS, f"be one of {', '.join(PRECISIONS)}"
        yield "lora_rank", self.lora_rank is None or self.lora_rank >= 1, "be >= 1, or null"
        yield "lora_alpha", 0 < self.lora_alpha < math.inf, "be > 0 and finite"
        yield "lora_targets", self.lora_targets is None or self.lora_rank is not None, "be null where lora_rank is"


@dataclass
class SamplingConfig(LLMConfig):
    """What the algorithms share that sample completions."""

    max_new_tokens: int = 64  # most tokens of a completion
    temperature: float = 1.0  # the logits are divided by it, in sampling and in learning
    top_k: int = 0  # sample among the k likeliest tokens; 0: all
    top_p: float = 1.0  # sample among the likeliest tokens that together have this probability
    min_p: float = 0.0  # sample among tokens with this share of the likeliest one's probability
    stop: list[str] = field(default_factory=list)  # texts, one token each, that end a completion like EOS

    def rules(self):
        yield from super().rules()
        yield "max_new_tokens", self.max_new_tokens >= 1, "be >= 1"
        yield "temperature", 0 < self.temperature < math.inf, "be > 0 and finite: at 0 all completions would be equal"
        yield "top_k", self.top_k >= 0, "be >= 0"
        yield "top_p", 0 < self.top_p <= 1, "be in (0, 1]"
        yield "min_p", 0 <= self.min_p < 1, "be in [0, 1)"


@dataclass
class ReferenceConfig(Config):
    """What the algorithms share that keep near a reference model."""

    ref_sync_every: int | None = None  # updates after which the reference moves towards the policy; null: never
    ref_sync_share: float = 0.6  # how far it then moves: 1 makes it the policy (TR-DPO, arXiv:2404.09656)

    def rules(self):
        yield from super().rules()
        yield "ref_sync_every", self.ref_sync_every is None or self.ref_sync_every >= 1, "be >= 1, or null"
        yield "ref_sync_share", 0 < self.ref_sync_share <= 1, "be in (0, 1]"


@dataclass
class SFTConfig(LLMConfig):
    """Supervised fine-tuning: the likelihood of the dataset's completions."""

    learning_rate: float = searched(2e-5, _RATES)  # AdamW's step size at the start


@dataclass
class RewardModelConfig(LLMConfig):
    """A reward model from preferences (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1)."""

    learning_rate: float = searched(1e-5, _RATES)  # AdamW's step size at the start
    center: float = 0.0  # weight of the squared sum of a pair's rewards, which keeps them near 0

    def rules(self):
        yield from super().rules()
        yield "center", 0 <= self.center < math.inf, "be >= 0 and finite"
        yield "packing", not self.packing, "be false: a reward is read at the end of its row"


@dataclass
class DPOConfig(ReferenceConfig, LLMConfig):
    """Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290)."""

    beta: float = searched(0.1, _BETAS)  # how strongly the policy is held to the reference
    loss_type: str = "sigmoid"  # sigmoid, hinge, ipo, or robust: unbiased where label_smoothing of the labels are wrong
    label_smoothing: float = 0.0  # share of the labels that are taken to be wrong, in [0, 0.5)

    def rules(self):
        yield from super().rules()
        yield "beta", 0 < self.beta < math.inf, "be > 0 and finite"
        yield "loss_type", self.loss_type in DPO_LOSSES, f"be one of {', '.join(DPO_LOSSES)}"
        yield "label_smoothing", 0 <= self.label_smoothing < 0.5, "be in [0, 0.5)"
        smooth = self.label_smoothing == 0 or self.loss_type in ("sigmoid", "robust")
        yield "label_smoothing", smooth, "be 0 with hinge and ipo"
        yield "label_smoothing", self.label_smoothing > 0 or self.loss_type != "robust", "be above 0 with robust"


@dataclass
class OnlineDPOConfig(DPOConfig, SamplingConfig):
    """DPO on pairs of the policy's own completions (Guo et al. 2024, arXiv:2402.04792)."""


@dataclass
class GRPOConfig(ReferenceConfig, SamplingConfig):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300)."""

    group_size: int = searched(4, "4,8,16")  # completions per prompt
    kl_coef: float = searched(0.04, "0.0,0.001,0.01,0.04,0.1")  # weight of the KL to the reference; 0: none is kept
    ent_coef: float = 0.0  # weight of the entropy bonus
    clip_eps: float = 0.2  # how far ratios may fall below 1
    clip_eps_high: float | None = None  # how far they may rise above it; null: as far as clip_eps (DAPO: 0.28)
    delta: float | None = None  # upper bound of the ratio where the advantage is negative too; null: none
    n_epochs: int = 1  # passes over an update's completions
    n_minibatches: int = 1  # optimiser steps per pass
    loss_type: str = "dapo"  # mean over: grpo sequences, then tokens; dapo tokens; bnpo tokens of a part; dr_grpo none
    scale_rewards: str = "group"  # what advantages are divided by: deviation of the group, of the batch, or none
    baseline: str = "mean"  # what is taken from rewards: the group's mean, or leave_one_out: that of the others (RLOO)
    importance_sampling_level: str = "token"  # ratios of each token, or of the whole sequence (GSPO)
    sampler_correction: str = "none"  # importance weights for a sampler that is another program: token_truncate, ...
    sampler_cap: float = 3.0  # their bound
    max_turns: int = 8  # of a conversation, where an environment answers; max_new_tokens is for each
    mask_truncated: bool = False  # leave completions that max_new_tokens cut off out of the loss (DAPO)

    def rules(self):
        yield from super().rules()
        yield "group_size", self.group_size >= 2, "be >= 2: one completion alone has no advantage"
        yield "kl_coef", 0 <= self.kl_coef < math.inf, "be >= 0 and finite"
        yield "ent_coef", 0 <= self.ent_coef < math.inf, "be >= 0 and finite"
        yield "clip_eps", 0 < self.clip_eps < 1, "be in (0, 1)"
        high = self.clip_eps_high
        yield "clip_eps_high", high is None or 0 < high < math.inf, "be > 0 and finite, or null"
        least = 1 + (self.clip_eps if high is None else high)
        yield "delta", self.delta is None or least < self.delta < math.inf, "be above 1 + clip_eps_high, or null"
        yield "n_epochs", self.n_epochs >= 1, "be >= 1"
        yield "n_minibatches", self.n_minibatches >= 1, "be >= 1"
        few = self.n_minibatches * self.accumulation <= self.batch_size * self.group_size
        yield "n_minibatches", few, "leave a completion for each part: at most batch_size * group_size / accumulation"
        for name, choices in (
            ("loss_type", GRPO_LOSSES),
            ("scale_rewards", REWARD_SCALES),
            ("baseline", BASELINES),
            ("importance_sampling_level", RATIO_LEVELS),
            ("sampler_correction", SAMPLER_CORRECTIONS),
        ):
            yield name, getattr(self, name) in choices, f"be one of {', '.join(choices)}"
        yield "max_turns", 1 <= self.max_turns <= 1024, "be between 1 and 1,024"
        yield "sampler_cap", 1 <= self.sampler_cap < math.inf, "be >= 1 and finite"

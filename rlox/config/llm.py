"""Hyper-parameters of the post-training of language models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlox.config.base import MOST_AT_ONCE, PRECISIONS, SCHEDULES, Config, operational, searched

GRPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust")
REWARD_SCALES = ("group", "batch", "none")
BASELINES = ("mean", "leave_one_out")
RATIO_LEVELS = ("token", "sequence")
SAMPLE_CACHES = ("auto", "static", "dynamic")
SAMPLER_CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_RATES = "tag(log, interval(1e-6, 1e-3))"
_BETAS = "tag(log, interval(0.01, 1.0))"


@dataclass
class LLMConfig(Config):
    """Settings shared by all algorithms that train a language model; total_timesteps counts updates."""

    uses_dataset = "text"
    largest = MOST_AT_ONCE

    learning_rate: float = searched(1e-6, _RATES)  # AdamW's step size at the start
    learning_rate_schedule: str = "constant"  # constant, or linear: down to 0 after the warm-up
    warmup: float = 0.0  # share of the training over which the learning rate rises from 0
    weight_decay: float = 0.0  # of AdamW: share of each weight, times the learning rate, subtracted per step
    batch_size: int = 8  # rows of the dataset per update: prompts, pairs or texts
    accumulation: int = operational(1)  # parts that a batch is split into, for gradient accumulation: less memory
    max_grad_norm: float | None = 1.0  # the gradient's norm is clipped to this; null: off
    packing: bool = False  # several sequences per row instead of padding; Hugging Face models only
    gradient_checkpointing: bool = operational(False)  # recompute activations: less memory, more time
    precision: str = "auto"  # of forward and backward: bfloat16, float32, or auto: bfloat16 on GPUs that support it
    lora_rank: int | None = None  # train low-rank adapters (peft) of this rank instead of the weights; null: off
    lora_alpha: float = 16.0  # scale of the adapters' output, divided by their rank
    lora_targets: list[str] | None = None  # modules with an adapter, by name suffix; null: all linear modules

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
        yield "lora_targets", self.lora_targets is None or self.lora_rank is not None, "be null if lora_rank is null"

    def conditions(self):
        yield from super().conditions()
        yield "lora_alpha", self.lora_rank is not None, "lora_rank"


@dataclass
class SamplingConfig(LLMConfig):
    """Settings shared by all algorithms that sample completions."""

    max_new_tokens: int = 64  # maximum tokens of a completion
    temperature: float = 1.0  # divisor of the logits, in sampling and in learning
    top_k: int = 0  # sample among the k likeliest tokens; 0: all
    top_p: float = 1.0  # sample among the likeliest tokens that together have this probability
    min_p: float = 0.0  # sample among tokens with at least this share of the likeliest token's probability
    stop: list[str] = field(default_factory=list)  # strings of one token each that end a completion, like EOS
    sample_cache: str = operational("auto")  # of keys and values: static (graphs), dynamic; auto: static on a GPU

    def rules(self):
        yield from super().rules()
        yield "max_new_tokens", self.max_new_tokens >= 1, "be >= 1"
        yield "temperature", 0 < self.temperature < math.inf, "be > 0 and finite: at 0 all completions would be equal"
        yield "top_k", self.top_k >= 0, "be >= 0"
        yield "top_p", 0 < self.top_p <= 1, "be in (0, 1]"
        yield "min_p", 0 <= self.min_p < 1, "be in [0, 1)"
        yield "sample_cache", self.sample_cache in SAMPLE_CACHES, f"be one of {', '.join(SAMPLE_CACHES)}"


@dataclass
class ReferenceConfig(Config):
    """Settings shared by all algorithms that keep the policy near a reference model."""

    ref_sync_every: int | None = None  # updates between two moves of the reference towards the policy; null: never
    ref_sync_share: float = 0.6  # how far it moves each time: 1 copies the policy (TR-DPO, arXiv:2404.09656)

    def rules(self):
        yield from super().rules()
        yield "ref_sync_every", self.ref_sync_every is None or self.ref_sync_every >= 1, "be >= 1, or null"
        yield "ref_sync_share", 0 < self.ref_sync_share <= 1, "be in (0, 1]"

    def conditions(self):
        yield from super().conditions()
        yield "ref_sync_share", self.ref_sync_every is not None, "ref_sync_every"


@dataclass
class SFTConfig(LLMConfig):
    """Supervised fine-tuning: maximise the likelihood of the dataset's completions."""

    learning_rate: float = searched(2e-5, _RATES)  # AdamW's step size at the start


@dataclass
class RewardModelConfig(LLMConfig):
    """Reward model learned from preferences (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1)."""

    learning_rate: float = searched(1e-5, _RATES)  # AdamW's step size at the start
    center: float = 0.0  # weight of the squared sum of a pair's rewards, a penalty that keeps rewards near 0

    def rules(self):
        yield from super().rules()
        yield "center", 0 <= self.center < math.inf, "be >= 0 and finite"
        yield "packing", not self.packing, "be false: a reward is read at the end of its row"


@dataclass
class DPOConfig(ReferenceConfig, LLMConfig):
    """Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290)."""

    beta: float = searched(0.1, _BETAS)  # how strongly the policy is held to the reference
    loss_type: str = "sigmoid"  # sigmoid, hinge, ipo, or robust: unbiased if a share label_smoothing of labels is wrong
    label_smoothing: float = 0.0  # share of the labels assumed to be wrong, in [0, 0.5)

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
    kl_coef: float = searched(0.04, "0.0,0.001,0.01,0.04,0.1")  # weight of the KL to the reference; 0: no reference
    ent_coef: float = 0.0  # weight of the entropy bonus
    clip_eps: float = 0.2  # how far ratios may fall below 1
    clip_eps_high: float | None = None  # how far ratios may rise above 1; null: same as clip_eps (DAPO: 0.28)
    delta: float | None = None  # upper bound of the ratio that also holds for negative advantages; null: none
    n_epochs: int = 1  # passes over an update's completions
    n_minibatches: int = 1  # optimiser steps per pass
    loss_type: str = "dapo"  # mean over: grpo sequences, then tokens; dapo tokens; bnpo tokens of a part; dr_grpo none
    scale_rewards: str = "group"  # advantages are divided by the deviation of: group, batch; none: not divided
    baseline: str = "mean"  # subtracted from rewards: mean of the group, or leave_one_out: mean of the others (RLOO)
    importance_sampling_level: str = "token"  # ratios per token, or per sequence (GSPO, with loss_type=grpo)
    sampler_correction: str = "none"  # importance weights for an external sampler: token_truncate, ...
    sampler_cap: float = 3.0  # bound of these weights
    max_turns: int = 8  # turns of a conversation with an environment; max_new_tokens applies to each turn
    mask_truncated: bool = False  # exclude completions cut off by max_new_tokens from the loss (DAPO)

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
        synced = self.ref_sync_every is not None
        yield "ref_sync_every", self.kl_coef > 0 or not synced, "be null with kl_coef=0, which needs no reference"
        most, accumulation = self.batch_size * self.group_size, self.accumulation
        yield "accumulation", accumulation <= most, "be at most batch_size * group_size, a completion for each part"
        few = self.n_minibatches * accumulation <= most
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

    def conditions(self):
        yield from super().conditions()
        yield "sampler_cap", self.sampler_correction != "none", "sampler_correction"

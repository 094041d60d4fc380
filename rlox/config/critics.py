"""Options of SAC and TD3 with which they learn from fewer environment steps; kernels compute the defaults only."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rlox.config.base import LARGEST_COUNT, Config, _width_rules, bounds_rules

NORMS = ("none", "layer", "batch", "batch_renorm")
HEADS = ("mean", "categorical", "quantile")
MOST_CRITICS, MOST_OUTPUTS, MOST_BLOCKS = 100, 1001, 100


@dataclass
class CriticConfig(Config):
    """Critics, their targets and their optimiser, as far as PyTorch alone computes other values than the defaults."""

    critic_hidden_sizes: list[int] | None = None  # units per hidden layer of the critics; null: hidden_sizes
    n_critics: int = 2  # critics, of whose values the smallest is the target
    n_target_critics: int | None = None  # so many of them, drawn anew for each update, make the target; null: all
    policy_value: str = "min"  # what the policy climbs: min or mean of the critics' values; TD3's min: the first's
    critic_norm: str = "none"  # none, layer, batch, or batch_renorm: how the critics' hidden layers are normalised
    actor_norm: str = "none"  # the same for the policy
    residual_blocks: int = 0  # of policy and critics, each of layers of 4 d and d units; d is their only hidden size
    norm_after: bool = False  # normalise after the activation instead of before it
    dropout: float = 0.0  # probability with which an output of the critics' hidden layers is set to 0 in an update
    renorm_warmup: int = 100_000  # updates in which batch_renorm is batch
    critic_head: str = "mean"  # what critics predict of the return: mean, categorical (shares of bins) or quantile
    n_bins: int = 101  # bins of critic_head=categorical
    v_min: float = -5.0  # return of the first bin
    v_max: float = 5.0  # return of the last bin
    n_quantiles: int = 25  # quantiles of critic_head=quantile
    drop_quantiles: int = 2  # largest quantiles that targets leave out, for each critic
    target_network: bool = True  # targets from a slow copy of the critics, which tau moves; false: from themselves
    unit_norm: bool = False  # after each step, scale the weights of each unit to the norm 1, with blocks all norms, too
    actor_learning_rate: float | None = None  # step size of the policy at the start; null: learning_rate
    critic_learning_rate: float | None = None  # step size of the critics at the start; null: learning_rate
    learning_rate_end: float = 0.0  # part of each step size that is left at the end of its schedule
    adam_beta1: float = 0.9  # decay of the mean of gradients, of policy and critics
    adam_beta2: float = 0.999  # decay of the mean of squared gradients, of policy and critics
    weight_decay: float = 0.0  # part of each weight, times the step size, that a step of policy or critics subtracts

    def rules(self):
        yield from super().rules()
        if self.critic_hidden_sizes is not None:
            for _, holds, rule in _width_rules(self.critic_hidden_sizes):
                yield "critic_hidden_sizes", holds, rule
        blocks = self.residual_blocks
        yield "residual_blocks", 0 <= blocks <= MOST_BLOCKS, f"be in [0, {MOST_BLOCKS}]"
        n = self.n_critics
        yield "n_critics", 1 <= n <= MOST_CRITICS, f"be in [1, {MOST_CRITICS}]"
        some = self.n_target_critics
        yield "n_target_critics", some is None or 1 <= some <= n, f"be in [1, n_critics ({n})], or null"
        yield "policy_value", self.policy_value in ("min", "mean"), "be min or mean"
        for name in ("critic_norm", "actor_norm"):
            yield name, getattr(self, name) in NORMS, f"be one of {', '.join(NORMS)}"
        yield "dropout", 0 <= self.dropout < 1, "be in [0, 1)"
        yield "renorm_warmup", 0 <= self.renorm_warmup <= LARGEST_COUNT, "be >= 0"
        yield "critic_head", self.critic_head in HEADS, f"be one of {', '.join(HEADS)}"
        yield "n_bins", 2 <= self.n_bins <= MOST_OUTPUTS, f"be in [2, {MOST_OUTPUTS}]"
        yield from bounds_rules(self)
        quantiles = self.n_quantiles
        yield "n_quantiles", 2 <= quantiles <= MOST_OUTPUTS, f"be in [2, {MOST_OUTPUTS}]"
        yield "drop_quantiles", 0 <= self.drop_quantiles < quantiles, f"be in [0, n_quantiles ({quantiles}))"
        for name in ("actor_learning_rate", "critic_learning_rate"):
            rate = getattr(self, name)
            yield name, rate is None or 0 < rate < math.inf, "be > 0 and finite, or null"
        yield "learning_rate_end", 0 <= self.learning_rate_end <= 1, "be in [0, 1]"
        for name in ("adam_beta1", "adam_beta2"):
            yield name, 0 <= getattr(self, name) < 1, "be in [0, 1)"
        yield "weight_decay", 0 <= self.weight_decay < math.inf, "be >= 0 and finite"

    def conditions(self):
        yield from super().conditions()
        norms = {self.critic_norm, self.actor_norm}
        yield "norm_after", norms != {"none"}, "critic_norm or actor_norm"
        yield "renorm_warmup", "batch_renorm" in norms, "critic_norm=batch_renorm or actor_norm=batch_renorm"
        for name in ("n_bins", "v_min"):
            yield name, self.critic_head == "categorical", "critic_head=categorical"
        scales = getattr(self, "fit_rewards", False)
        yield "v_max", self.critic_head == "categorical" or scales, "critic_head=categorical or fit_rewards=true"
        for name in ("n_quantiles", "drop_quantiles"):
            yield name, self.critic_head == "quantile", "critic_head=quantile"
        falls = getattr(self, "learning_rate_schedule", "constant") != "constant"
        yield "learning_rate_end", falls, "learning_rate_schedule=linear or cosine"

    def find_torch_option(self) -> str | None:
        """Return the first option that has an effect and that only PyTorch computes, as ``name=value``, or None."""
        names = [item.name for item in fields(CriticConfig) if getattr(self, item.name) != item.default]
        idle = self.idle() if names else {}
        if self.critic_head != "categorical":
            names = [name for name in names if name != "v_max"]  # of fit_rewards, which is no part of the networks
        return next((f"{name}={getattr(self, name)}" for name in names if name not in idle), None)

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether policy or critics are normalised by the statistics of a batch."""
        return not {"batch", "batch_renorm"}.isdisjoint((self.critic_norm, self.actor_norm))

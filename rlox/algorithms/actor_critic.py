"""What SAC and TD3 share: critics, their targets and their optimisers, by the options of `CriticConfig`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.checkpoint.counters import follow_schedule, scheduled
from rlox.checkpoint.streams import Stream
from rlox.compiled import NativeAdam
from rlox.kernels.nn.twin_critics import METRICS
from rlox.kernels.rng import Rng
from rlox.training.off_policy import OffPolicyAlgorithm
from rlox.training.replay import Rounds

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.nn.critics.ensemble import CriticEnsemble, Dropout
    from rlox.nn.optimizers import FlatOptimizer


class ActorCriticAlgorithm(OffPolicyAlgorithm):
    """Base class of SAC and TD3.

    Attributes
    ----------
    critics, target : CriticEnsemble
        Online and target network. The target's parameters are views of one flat tensor, as the online parameters are
        views of their optimiser's. Without a target network, `target` is `critics`.
    """

    critics: CriticEnsemble
    target: CriticEnsemble
    critic_optimizer: FlatOptimizer | NativeAdam
    _target_block: torch.Tensor | None  # None: there is no target network

    # ---- networks and optimisers

    def _make_net(self, rng: Rng) -> nn.Module | None:
        c, spec, kind = self.config, self.spec, self.Policy
        if kind is None or (c.actor_norm == "none" and not c.residual_blocks):
            return None
        from rlox.nn.critics.blocks import make_net

        return make_net(c, spec.obs_dim, kind.outputs_per_action * spec.act_dim, rng)

    def _find_policy_option(self) -> str | None:
        c, plain = self.config, {"actor_norm": "none", "residual_blocks": 0, "unit_norm": False}
        changed = (f"{name}={getattr(c, name)}" for name, value in plain.items() if getattr(c, name) != value)
        return next(changed, None)

    def _make_critics(self, rng: Rng) -> None:
        """Create critics and, unless it is switched off, their target network; checkpoints store both.

        The target is copied before the optimisers move the online networks' parameters into one block.
        """
        from rlox.nn.critics.ensemble import Dropout
        from rlox.nn.critics.norms import scale_units_
        from rlox.nn.modules import flat_copy

        c = self.config
        if self.ranks.joined and c.uses_batch_statistics:
            raise ValueError(
                f"{type(self).__name__}: critic_norm and actor_norm must be none or layer with distributed=ddp, since "
                "each rank would have the statistics of its own part of a batch"
            )
        dropout = Dropout(c.dropout, self.ranks.rng(self.seed, Stream.DROPOUT)) if c.dropout else None
        self.critics = self.keep("critics", self._make_ensemble(rng, dropout).to(self.device))
        if c.unit_norm:
            self.critics.scale_units_()
            scale_units_(self.policy)
        self.target, self._target_block = self.critics, None
        if c.target_network:
            self.target, self._target_block = flat_copy(self.critics)
            self.keep("target", self.target)
        if dropout is not None:
            self.target.dropout = self.keep("dropout", dropout, switch="dropout")  # one generator for both networks

    def _make_ensemble(self, rng: Rng, dropout: Dropout | None) -> CriticEnsemble:
        """Create the critics, of what `critic_head` says."""
        from rlox.nn.critics.ensemble import CriticEnsemble
        from rlox.nn.critics.heads import CategoricalHead, Head, MeanHead, QuantileHead

        c, spec = self.config, self.spec
        head: Head = MeanHead()
        if c.critic_head == "categorical":
            head = CategoricalHead(c.n_bins, c.v_min, c.v_max)
        elif c.critic_head == "quantile":
            head = QuantileHead(c.n_quantiles, c.drop_quantiles)
        sizes = (spec.obs_dim, spec.act_dim, c.critic_widths, c.activation, rng, c.n_critics)
        return CriticEnsemble(*sizes, head, c.critic_norm, c.norm_after, dropout, c.residual_blocks)

    def adam(self, block: str, parameters: Iterable[nn.Parameter]) -> FlatOptimizer | NativeAdam:
        c = self.config
        own = {"policy": c.actor_learning_rate, "critics": c.critic_learning_rate}
        rate = c.learning_rate if own.get(block) is None else own[block]
        made: FlatOptimizer | NativeAdam
        if self.backend == "native":  # whose optimisers have the plain settings
            made = NativeAdam(parameters, block, rate)
        else:
            from rlox.nn.optimizers import FlatOptimizer

            options = {"betas": (c.adam_beta1, c.adam_beta2), "weight_decay": c.weight_decay} if block in own else {}
            made = FlatOptimizer(parameters, rate, eps=1e-8, **options)
        self._optimizers.append(made)
        return made

    def schedule_values(self, progress: float) -> dict[str, float]:
        values, c = super().schedule_values(progress), self.config
        for name in ("learning_rate", "actor_learning_rate", "critic_learning_rate"):
            if (rate := getattr(c, name)) is not None:
                values[name] = scheduled(rate, c.learning_rate_schedule, progress, c.learning_rate_end)
        return values

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        """Return why the kernel cannot compute these networks and this update exactly; None if it can."""
        option = self.config.find_torch_option()
        return super()._kernel_obstacle(policy) if option is None else f"only PyTorch computes {option}"

    def _network_sizes(self) -> tuple[int, int]:
        (policy, critics), c = super()._network_sizes(), self.config
        if c.find_torch_option() is None:
            return policy, critics
        from rlox.nn.critics.blocks import count_parameters, layer_sizes

        n_outputs = {"mean": 1, "categorical": c.n_bins, "quantile": c.n_quantiles}[c.critic_head]
        n_in, n_actions, n_blocks = self.spec.obs_dim, self.spec.act_dim, c.residual_blocks
        if n_blocks:
            assert self.Policy is not None
            n_actor_outputs = self.Policy.outputs_per_action * n_actions
            policy = count_parameters(layer_sizes(n_in, c.hidden_sizes, n_blocks, n_actor_outputs))
        critic = count_parameters(layer_sizes(n_in + n_actions, c.critic_widths, n_blocks, n_outputs))
        return policy, c.n_critics * critic

    # ---- parts of an update

    @property
    def _moves_policy(self) -> bool:
        """Whether the next update is one of those, every `policy_delay`-th, that move the policy."""
        return (self.counters.updates + 1) % self.config.policy_delay == 0

    @property
    def _renormalizes(self) -> bool:
        """Whether norms that can renormalise a batch do so in the next update, instead of only normalising it."""
        c = self.config
        return "batch_renorm" in (c.critic_norm, c.actor_norm) and self.counters.updates >= c.renorm_warmup

    def _branch(self) -> tuple[bool, ...]:
        return self._moves_policy, self._renormalizes

    def _capture_obstacle(self) -> str | None:
        if self.config.dropout:
            return "the host draws what dropout drops"
        chosen = self.config.n_target_critics not in (None, self.config.n_critics)
        return "the host draws the critics of the targets" if chosen else super()._capture_obstacle()

    # ---- whole rounds in a kernel

    def _actor_critic_rounds(self, n_steps: int, names: Iterable[str] = (), **arguments: Any) -> Rounds:
        """Run `_rounds` as a kernel call of an algorithm with twin critics, with its additional hyper-parameters
        `names` and `arguments`."""
        counters, delay = self.counters, getattr(self.config, "policy_delay", 1)
        first = counters.updates + 1
        taken, table, update_s, returns, lengths = self._kernel_rounds(
            n_steps, ("tau", "max_grad_norm", *names), **arguments
        )
        counters.env_steps += taken
        counters.in_round = self._round_steps()
        counters.updates += len(table)
        follow_schedule(self._optimizers, self.config, counters.progress)
        # A delayed policy reports metrics only for the updates in which it is updated.
        own = (first + np.arange(len(table))) % delay == 0
        columns = {name: x[own] if name.startswith("policy") else x for name, x in zip(METRICS, table.T, strict=False)}
        return Rounds(taken, returns, lengths, {name: x for name, x in columns.items() if len(x)}, update_s)

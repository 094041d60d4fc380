"""Conservative Q-Learning, CQL(H) on Soft Actor-Critic (Kumar, Zhou, Tucker and Levine 2020, "Conservative Q-learning
for offline reinforcement learning", arXiv:2006.04779).

As in the paper's reference implementation, the critics' targets have no entropy term, and the squared TD error is added
to the penalty without a factor 1/2. The soft maximum is estimated from 2 M actions in each state: M uniform actions and
M actions of the policy (appendix F). The reference implementation adds M of the policy's actions at the next state,
which is a third more work.
Departures: the penalty is measured against uniform actions (`rlox.nn.value_losses.conservative_penalty`), so that
``cql_target_value`` has the same meaning for any number of actions; critics are updated before the policy, as in
`rlox.algorithms.sac`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rlox.checkpoint.counters import follow_schedule
from rlox.config import CQLConfig
from rlox.kernels.nn.cql import NativeCQL
from rlox.kernels.rng import Rng
from rlox.nn.actors import SquashedGaussianPolicy
from rlox.nn.batch import TransitionBatch
from rlox.nn.critics.ensemble import TwinQNetwork
from rlox.nn.value_losses import conservative_q_loss, soft_policy_loss
from rlox.training.offline import OfflineAlgorithm

_ROWS = 800  # pairs of state and action that go through the critics at a time
_LARGEST = math.log(1e6)  # largest logarithm of a learned penalty weight, as in the reference implementation


class CQL(OfflineAlgorithm):
    """CQL for bounded continuous actions; see `rlox.config.CQLConfig`. With ``cql_alpha=0`` it is SAC without the
    entropy term in the targets.

    Attributes
    ----------
    critics, target : TwinQNetwork
        Online and target network.
    log_alpha, log_cql_alpha : nn.Parameter
        Logarithms of SAC's temperature and of the penalty's weight, ().
    """

    name = "cql"
    Config = CQLConfig

    critics: TwinQNetwork

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        self.policy = SquashedGaussianPolicy(**self._policy_arguments(), rng=rng)

    def setup(self, rng: Rng) -> None:
        c = self.config
        self._make_critics(rng)
        self.optimizer = self.adam("policy", self.policy.parameters())
        self.critic_optimizer = self.keep("critic_optimizer", self.adam("critics", self.critics.parameters()))
        self._backprop = _Backprop(self.critics, c.activation)
        self.target_entropy = -float(self.spec.act_dim) if c.target_entropy is None else c.target_entropy
        self.log_alpha, self.alpha_optimizer = self._weight("alpha", c.ent_coef, "auto_entropy")
        self.log_cql_alpha, self.cql_alpha_optimizer = self._weight("cql_alpha", c.cql_alpha, "auto_alpha")
        if self.backend == "native":
            self._use_kernel(partial(NativeCQL, n_random_actions=c.n_random_actions), policy=self.optimizer.flat,
                            critics=self.critic_optimizer.flat, target=self._target_block,
                            log_alpha=self.log_alpha.data.view(1),
                            log_cql_alpha=self.log_cql_alpha.data.view(1))  # fmt: skip

    def _weight(self, name: str, start: float, switch: str) -> tuple[nn.Parameter, Any]:
        """Return the logarithm of a weight, and its optimiser (None unless the hyper-parameter `switch` is true)."""
        learned = getattr(self.config, switch)
        value = math.log(start) if start > 0 else -math.inf
        log = nn.Parameter(torch.tensor(value, dtype=torch.float32, device=self.device), learned)
        if not learned:
            return log, None
        optimizer = self.keep(f"{name}_optimizer", self.adam(f"log_{name}", [log]), switch)
        self.keep(f"log_{name}", nn.ParameterDict({"log": log}), switch)
        return log, optimizer

    def _noise_shape(self, n: int) -> tuple[int, ...]:
        return 2 + self.config.n_random_actions, n, self.spec.act_dim

    def _uniform_shape(self, n: int) -> tuple[int, ...]:
        return self.config.n_random_actions, n, self.spec.act_dim

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """Take one step of critics, policy, temperature and penalty weight. Returns metrics as scalar tensors."""
        c, actions, n = self.config, self.policy.to_unit(batch.actions), self.config.n_random_actions
        follow_schedule(self.optimizers, c, self.counters.progress)
        noise, ahead, own = self._draw_noise(len(batch)).split([1, 1, n])
        alpha, cql_alpha = self.log_alpha.detach().exp(), self.log_cql_alpha.detach().exp()

        with torch.no_grad():
            next_actions, _ = self.policy.unit_sample(batch.next_obs, ahead[0])
            targets = torch.addcmul(batch.rewards, batch.discounts, self.target(batch.next_obs, next_actions).amin(0))
            own_actions, own_log_probs = self.policy.unit_sample(batch.obs, own)
            uniform = 2.0 * self._draw_uniform(len(batch)) - 1.0
            # Densities relative to the density of uniform actions, 2^-A.
            log_ratios = own_log_probs + self.spec.act_dim * math.log(2.0)
            log_ratios = torch.cat([torch.zeros_like(log_ratios), log_ratios])
            candidates = torch.cat([uniform, own_actions])

        # The gradient of `conservative_q_loss` is accumulated over parts of the states: on a CPU, the activations of
        # all their actions together would not fit into the cache.
        everyone = torch.cat([actions.unsqueeze(0), candidates])
        pairs = torch.cat([batch.obs.expand(len(everyone), -1, -1), everyone], -1)
        total = [torch.zeros_like(p) for p in self.critic_optimizer.parameters]
        history = []
        n_parts = 1 if self.device == "cuda" else math.ceil(len(pairs) * len(batch) / _ROWS)
        parts = (pairs.chunk(n_parts, 1), targets.chunk(n_parts), log_ratios.chunk(n_parts, 1))
        for part, its_targets, its_ratios in zip(*parts, strict=True):
            share = len(its_targets) / len(batch)
            values = self._backprop.forward(part.flatten(0, 1)).view(2, *part.shape[:2]).requires_grad_()
            loss, of_part = conservative_q_loss(values, its_targets, its_ratios, cql_alpha)
            (slopes,) = torch.autograd.grad(share * loss, values)
            self._backprop.backward(slopes.flatten(1), total)
            history.append({name: share * value for name, value in of_part.items()})
        metrics = {name: sum(of_part[name] for of_part in history) for name in history[0]}
        metrics["grad_norm"] = self.critic_optimizer.descend(total, c.max_grad_norm)

        loss, policy_metrics = soft_policy_loss(self.policy, self.critics, batch.obs, noise[0], alpha)
        # The optimiser differentiates by the policy's parameters only; the critics' parameters get no gradient here.
        policy_metrics["policy_grad_norm"] = self.optimizer.step(loss, c.max_grad_norm)
        if c.auto_entropy:
            self.alpha_optimizer.descend([policy_metrics["entropy"] - self.target_entropy])
        if c.auto_alpha:
            # Dual ascent on the logarithm (appendix F): the weight grows while the penalty is too large.
            self.cql_alpha_optimizer.descend([cql_alpha * (c.cql_target_value - metrics["cql_penalty"])])
            self.log_cql_alpha.data.clamp_(max=_LARGEST)
        self._target_block.lerp_(self.critic_optimizer.flat, c.tau)
        return {**metrics, **policy_metrics, "alpha": alpha, "cql_alpha": cql_alpha}

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """Run `update` as a single kernel call. Returns the same metrics."""
        c, n = self.config, len(batch)
        follow_schedule(self.optimizers, c, self.counters.progress)
        noise = self.rng.normal(self._noise_shape(n))
        uniform = 2.0 * self.rng.uniform(self._uniform_shape(n)) - 1.0
        metrics, _ = self._net.update(
            batch.array("obs"),
            self.spec.to_unit(batch.array("actions")),
            *map(batch.array, ("rewards", "next_obs", "discounts")),
            noise,
            uniform,
            learning_rate=self.optimizer.learning_rate,
            target_entropy=self.target_entropy if c.auto_entropy else None,
            cql_target_value=c.cql_target_value if c.auto_alpha else None,
            tau=c.tau,
            max_grad_norm=c.max_grad_norm,
        )
        return metrics


class _Backprop:
    """Values of twin critics and their gradient, computed in memory that is reused.

    The memory that autograd allocates for each part of a batch soon goes back to the system, and an eighth of the time
    would be spent on page faults.
    """

    def __init__(self, critics: TwinQNetwork, activation: str):
        self._weights, self._biases = critics.weights, critics.biases
        self._activation = activation
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def _room(self, use: str, layer: int, n: int, width: int) -> torch.Tensor:
        kept = self._kept.get((use, layer))
        if kept is None or kept.numel() < 2 * n * width:
            kept = self._kept[use, layer] = self._biases[0].new_empty(2 * n * width)
        return kept[: 2 * n * width].view(2, n, width)

    @torch.no_grad()
    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the values (2, N) of pairs (N, D + A) of state and action."""
        x = pairs.expand(2, -1, -1)
        self._inputs = []
        for i, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            if i:
                x = getattr(torch, f"{self._activation}_")(x)
            self._inputs.append(x)
            x = torch.baddbmm(bias, x, weight, out=self._room("outputs", i, len(pairs), weight.shape[2]))
        return x.squeeze(-1)

    @torch.no_grad()
    def backward(self, slopes: torch.Tensor, to: Sequence[torch.Tensor]) -> None:
        """Add the parameters' gradients to `to`; `slopes` are the gradients (2, N) by the last `forward`'s values."""
        slopes, n = slopes.unsqueeze(-1), len(self._weights)
        for i in reversed(range(n)):
            x = self._inputs[i]
            to[i].baddbmm_(x.mT, slopes)
            to[n + i].add_(slopes.sum(1, keepdim=True))
            if i:
                slopes = torch.bmm(slopes, self._weights[i].mT, out=self._room("slopes", i, *x.shape[1:]))
                if self._activation == "relu":
                    torch.ops.aten.threshold_backward.grad_input(slopes, x, 0, grad_input=slopes)
                else:
                    torch.ops.aten.tanh_backward.grad_input(slopes, x, grad_input=slopes)

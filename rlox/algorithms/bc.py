"""Behavioural cloning (Pomerleau 1988, "ALVINN: an autonomous land vehicle in a neural network", NIPS 1)."""

from __future__ import annotations

import torch
from torch import nn

from rlox.checkpoint.counters import follow_schedule
from rlox.config import BCConfig
from rlox.kernels.nn.bc import NativeBC
from rlox.kernels.rng import Rng
from rlox.nn.actors import CategoricalPolicy, DeterministicPolicy
from rlox.nn.batch import TransitionBatch
from rlox.nn.value_losses import cloning_loss, label_loss
from rlox.training.offline import OfflineAlgorithm


class BC(OfflineAlgorithm):
    """Learns the dataset's actions as labels: continuous actions by squared distance, discrete actions by
    cross-entropy. See `rlox.config.BCConfig`."""

    name = "bc"
    Config = BCConfig
    actions = ("continuous", "discrete")
    _has_critics = False

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        c, spec = self.config, self.spec
        if spec.continuous:
            self.policy = DeterministicPolicy(**self._policy_arguments(), rng=rng)
        else:
            self.policy = CategoricalPolicy(spec.obs_dim, spec.n_actions, c.hidden_sizes, c.activation, rng)

    def setup(self, rng: Rng) -> None:
        self.optimizer = self.adam("policy", self.policy.parameters())
        if self.backend == "native":
            spec, c, block = self.spec, self.config, self.optimizer.flat.detach().numpy()
            n_outputs = spec.n_actions if spec.discrete else spec.act_dim
            self._net = NativeBC(block, spec.obs_dim, n_outputs, c.hidden_sizes, c.activation, spec.discrete)
            self.optimizer.net = self._net  # type: ignore[union-attr]  # a NativeAdam

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """Take one step of the policy. Returns metrics as scalar tensors."""
        c = self.config
        follow_schedule(self.optimizers, c, self.counters.progress)
        if self.spec.discrete:
            loss, metrics = label_loss(self.policy, batch.obs, batch.actions)
        else:
            loss, metrics = cloning_loss(self.policy, batch.obs, self.policy.to_unit(batch.actions))
        return {**metrics, "grad_norm": self.optimizer.step(loss, c.max_grad_norm)}

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """Run `update` as a single kernel call. Returns the same metrics."""
        c, actions = self.config, batch.array("actions")
        follow_schedule(self.optimizers, c, self.counters.progress)
        return self._net.update(
            batch.array("obs"),
            actions if self.spec.discrete else self.spec.to_unit(actions),
            learning_rate=self.optimizer.learning_rate,
            max_grad_norm=c.max_grad_norm,
        )

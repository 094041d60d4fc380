"""Behavioural cloning (Pomerleau 1988, "ALVINN: an autonomous land vehicle in a neural network", NIPS 1)."""

from __future__ import annotations

import torch

from rlox.config import BCConfig
from rlox.kernels.nn.ac_learner import NativeBC
from rlox.kernels.rng import Rng
from rlox.nn.batch import TransitionBatch
from rlox.nn.losses import cloning_loss, label_loss
from rlox.nn.policies import CategoricalPolicy, DeterministicPolicy
from rlox.training.offline import OfflineAlgorithm


class BC(OfflineAlgorithm):
    """Learns the dataset's actions as labels: continuous ones by their squared distance, discrete ones by
    cross-entropy. See `rlox.config.BCConfig`."""

    name = "bc"
    Config = BCConfig
    actions = ("continuous", "discrete")

    def _make_policy(self, rng: Rng) -> DeterministicPolicy | CategoricalPolicy:
        if self.spec.continuous:
            return DeterministicPolicy(**self._policy_arguments(), rng=rng)
        c = self.config
        return CategoricalPolicy(self.spec.obs_dim, self.spec.n_actions, c.hidden_sizes, c.activation, rng)

    def _setup(self, rng: Rng) -> None:
        self.optimizer = self._adam("policy", self.policy)
        self._loss = cloning_loss if self.spec.continuous else label_loss
        if self.backend == "native":
            spec, c, block = self.spec, self.config, self.optimizer.flat.detach().numpy()
            n_outputs = spec.n_actions if spec.discrete else spec.act_dim
            self.net = NativeBC(block, spec.obs_dim, n_outputs, c.hidden_sizes, c.activation, spec.discrete)
            self.optimizer.net = self.net

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """One step of the policy; metrics as tensors ()."""
        self._follow_schedule()
        loss, metrics = self._loss(self.policy, batch.obs, self._unit(batch.actions))
        return {**metrics, "grad_norm": self.optimizer.step(loss, self.config.max_grad_norm)}

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """`update` in one call of the kernel; the same metrics."""
        self._follow_schedule()
        actions = batch.array("actions")
        return self.net.update(
            batch.array("obs"),
            actions if self.spec.discrete else self._unit_array(actions),
            learning_rate=self.optimizer.learning_rate,
            max_grad_norm=self.config.max_grad_norm,
        )

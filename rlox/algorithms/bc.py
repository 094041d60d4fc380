"""Behavioural cloning (Pomerleau 1988, "ALVINN: an autonomous land vehicle in a neural network", NIPS 1).

With a memory, a batch is sequences of consecutive steps that begin anywhere in the data, also in the middle of an
episode. The memory first reads the steps before, without a gradient, as in R2D2 (Kapturowski et al. 2019, "Recurrent
experience replay in distributed reinforcement learning", section 3: burn-in); before those its state is zero. A state
is exact if the episode began in one of these steps.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.checkpoint.counters import follow_schedule
from rlox.config import BCConfig
from rlox.kernels.nn.bc import NativeBC
from rlox.kernels.rng import Rng
from rlox.nn.actors import CategoricalPolicy, DeterministicPolicy
from rlox.nn.batch import TransitionBatch
from rlox.nn.memory import Sequences
from rlox.nn.policies import NetworkSpec, memory_of
from rlox.nn.value_losses import cloning_loss, label_loss
from rlox.offline.sequences import DemonstrationBatch, SequenceSampler
from rlox.training.offline import N_COMPARED, OfflineAlgorithm


class BC(OfflineAlgorithm):
    """Learns the dataset's actions as labels: continuous actions by squared distance, discrete actions by
    cross-entropy. See `rlox.config.BCConfig`."""

    name = "bc"
    Config = BCConfig
    actions = ("continuous", "discrete")
    _has_critics = False
    _masks = True

    _compared_sequences: DemonstrationBatch | None = None

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        c, spec = self.config, self.spec
        net, memory = None, memory_of(c)
        if memory is not None:
            layers = NetworkSpec(spec.obs_dim, c.hidden_sizes, c.activation, False, rng, memory)
            net = layers.network(spec.n_actions if spec.discrete else spec.act_dim)
        if spec.continuous:
            self.policy = DeterministicPolicy(**self._policy_arguments(), rng=rng, net=net)
        else:
            self.policy = CategoricalPolicy(spec.obs_dim, spec.n_actions, c.hidden_sizes, c.activation, rng, net)

    def setup(self, rng: Rng) -> None:
        c = self.config
        self.optimizer = self.adam("policy", self.policy.parameters())
        if c.recurrent:
            _ = self._sampler  # which refuses data without sequences
        if self.backend == "native":
            spec, block = self.spec, self.optimizer.flat.detach().numpy()
            n_outputs = spec.n_actions if spec.discrete else spec.act_dim
            self._net = NativeBC(block, spec.obs_dim, n_outputs, c.hidden_sizes, c.activation, spec.discrete)
            self.optimizer.net = self._net  # type: ignore[union-attr]  # a NativeAdam

    @functools.cached_property
    def _sampler(self) -> SequenceSampler | None:
        """Samples sequences for a policy with a memory; None without one, or without data."""
        c = self.config
        if not c.recurrent or self.dataset is None:
            return None
        return SequenceSampler(self.dataset, c.steps_per_sequence, c.steps_before, type(self).__name__)

    def sample(self) -> Any:
        """Return the transitions of the next update or, with a memory, as many sequences as have `batch_size` steps."""
        sampler, c = self._sampler, self.config
        if sampler is None:
            return super().sample()
        starts = self.rng.integers(len(sampler), max(1, c.batch_size // c.steps_per_sequence))
        return self._gather(sampler, starts)

    def _gather(self, sampler: SequenceSampler, starts: np.ndarray) -> DemonstrationBatch:
        return sampler.gather(starts, self.spec, self.normalizer.normalize, self.device)

    def _loss(self, batch: TransitionBatch | DemonstrationBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a batch and its metrics."""
        sequences = self._read_before(batch) if self.policy.state_dim else None
        if self.spec.discrete:
            return label_loss(self.policy, batch.obs, batch.actions, batch.masks, sequences)
        return cloning_loss(self.policy, batch.obs, self.policy.to_unit(batch.actions), sequences)

    @torch.no_grad()
    def _read_before(self, batch: Any) -> Sequences:
        """Return how the rows are sequences, with the memory's state after the steps before each."""
        state = batch.obs.new_zeros(batch.n, self.policy.state_dim)
        if len(batch.obs_before):
            state = self.policy.follow(batch.obs_before, Sequences(state, batch.is_first_before))[1]
        return Sequences(state, batch.is_first)

    def update(self, batch: TransitionBatch | DemonstrationBatch) -> dict[str, torch.Tensor]:
        """Take one step of the policy. Returns metrics as scalar tensors."""
        c = self.config
        follow_schedule(self.optimizers, c, self.counters.progress)
        loss, metrics = self._loss(batch)
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

    @torch.no_grad()
    def _compare_with_data(self) -> dict[str, torch.Tensor]:
        sampler, ordered = self._sampler, hasattr(self.dataset, "get_state")
        if sampler is None and not (ordered and getattr(self.dataset, "masked", False)):
            return super()._compare_with_data()
        if self._compared_sequences is None:
            sampler = sampler or SequenceSampler(self.dataset, 1, 0, type(self).__name__)
            n = max(1, min(N_COMPARED, len(sampler)) // sampler.length)
            self._compared_sequences = self._gather(sampler, np.linspace(0, len(sampler) - 1, n).astype(np.int64))
        loss = self._loss(self._compared_sequences)[0]
        return {"dataset/log_prob": -loss} if self.spec.discrete else {"dataset/mse": loss}

"""What SAC and TD3 share beside `OffPolicyAlgorithm`: bounded actions, twin critics and their targets."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rlox.algorithms.base import load_weights_, weights_of
from rlox.algorithms.off_policy import OffPolicyAlgorithm
from rlox.batch import TransitionBatch
from rlox.checkpoint import Checkpoint, load_checkpoint
from rlox.exploration import ActionNoise
from rlox.kernels.nn.ac_learner import METRICS, n_parameters
from rlox.kernels.rng import Rng
from rlox.loops import Rounds, scheduled
from rlox.losses import twin_q_loss
from rlox.native import NativeAdam, NativeBoundedPolicy, bounded_obstacle
from rlox.networks import TwinQNetwork
from rlox.optimizers import FlatOptimizer, flatten_
from rlox.policies import BoundedPolicy
from rlox.streams import Stream


class TwinCriticAlgorithm(OffPolicyAlgorithm):
    """Base of algorithms whose policy learns from the smaller of two values of its actions.

    The memory holds actions in the environment's units, as they were taken; policy and critics see them in [-1, 1].

    Attributes
    ----------
    critics, target : TwinQNetwork
        Online and target network; the target's parameters are views of one flat tensor, as the online ones are of
        their optimiser's.
    optimizer, critic_optimizer : FlatOptimizer, or NativeAdam
        Adam for the policy, and for both critics together.
    """

    actions = ("continuous",)
    Policy: ClassVar[type[BoundedPolicy]]
    outputs: ClassVar[str]  # what a network of the policy returns, for messages

    native: NativeBoundedPolicy | None = None

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        return bounded_obstacle(self.config, policy)

    def _kernel_size(self) -> int:
        hidden, spec = self.config.hidden_sizes, self.spec
        return sum(n_parameters(spec.obs_dim, spec.act_dim, hidden, self.Policy.outputs_per_action == 2))

    def _make_policy(self, policy: nn.Module | None) -> None:
        c, spec, where = self.config, self.spec, type(self).__name__
        low, high = spec.act_low, spec.act_high
        with np.errstate(over="ignore", invalid="ignore"):
            width = high - low
        if not (np.isfinite(width) & (width > 0)).all():
            raise ValueError(
                f"{where}: the bounds of the environment's actions must be finite and apart, got {low.tolist()} to "
                f"{high.tolist()}; wrap it so that its action_space is such a Box, or take PPO, which needs no bounds"
            )
        if spec.image:
            raise ValueError(
                f"{where}: the environment's observations must be vectors, got images of shape {spec.obs_shape}; take "
                "PPO, which learns from images, or flatten small ones (env_wrappers=['FlattenObservation'])"
            )
        rng = Rng(self.seed, Stream.INIT)
        if policy is None:
            policy = self.Policy(spec.obs_dim, spec.act_dim, c.hidden_sizes, c.activation, rng=rng)
        elif not isinstance(policy, nn.Module):
            raise TypeError(f"{where}: policy must be a torch.nn.Module, got {type(policy).__name__}")
        elif not isinstance(policy, self.Policy):
            policy = self.Policy(spec.obs_dim, spec.act_dim, net=policy)
        policy.bound_(low, high)
        self._require_outputs(policy, self.Policy.outputs_per_action * spec.act_dim, self.outputs)
        self.policy = policy
        if self.backend == "native":
            self.native = NativeBoundedPolicy(policy)
        self.critics = TwinQNetwork(spec.obs_dim, spec.act_dim, c.hidden_sizes, c.activation, rng)

    def _setup(self) -> None:
        self.critics.to(self.device)
        # Copies come before the optimisers, which lay the online networks' parameters out anew.
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self._target_block = flatten_(list(self.target.parameters()))
        self._saved: dict[str, nn.Module | FlatOptimizer | NativeAdam] = {
            "critics": self.critics,
            "target": self.target,
        }
        self._optimizers: list[FlatOptimizer | NativeAdam] = []
        self.optimizer = self._adam("policy", self.policy.parameters())
        self.critic_optimizer = self._saved["critic_optimizer"] = self._adam("critics", self.critics.parameters())

    def _adam(self, block: str, parameters: Iterable[nn.Parameter]) -> FlatOptimizer | NativeAdam:
        """One more optimiser that follows the schedule of the learning rate."""
        rate = self.config.learning_rate
        native = self.native is not None
        self._optimizers.append(
            NativeAdam(parameters, block, rate) if native else FlatOptimizer(parameters, rate, eps=1e-8)
        )
        return self._optimizers[-1]

    def _add_noise(self) -> None:
        """Let the collector add noise to the policy's actions, as the configuration describes it."""
        c = self.config
        self.collector.action_noise = ActionNoise(self.spec, self.n_envs, c.exploration_noise, c.noise_correlation)

    def _use(self, kernel: type, **blocks: torch.Tensor) -> None:
        """Let `kernel` compute from now on, on the memory of the networks; `blocks` in its constructor's words."""
        spec, c = self.spec, self.config
        blocks = {"policy": self.optimizer.flat, "critics": self.critic_optimizer.flat, **blocks}
        arrays = {name: block.detach().numpy() for name, block in {**blocks, "target": self._target_block}.items()}
        net = kernel(
            **arrays, obs_dim=spec.obs_dim, act_dim=spec.act_dim, hidden_sizes=c.hidden_sizes, activation=c.activation
        )
        for part in (self.native, *self._optimizers):
            part.net = net

    def _learn_native(self, batch: TransitionBatch, noise: np.ndarray, **options: Any) -> dict[str, float]:
        """One update by the kernel."""
        self._follow_schedule()
        c = self.config
        metrics, td_errors = self.native.net.update(
            batch.array("obs"),
            self.native.to_unit(batch.array("actions")),
            *map(batch.array, ("rewards", "next_obs", "discounts")),
            noise,
            batch.array("weights"),
            learning_rate=self.optimizer.learning_rate,
            tau=c.tau,
            max_grad_norm=c.max_grad_norm,
            **options,
        )
        if batch.indices is not None:
            self.buffer.update_priorities(batch.indices, td_errors.astype(np.float64))
        return metrics

    def _rounds(self, n_steps: int, names: Iterable[str] = (), **arguments: Any) -> Rounds:
        """As `rounds`, with what the kernel is told beside that of both algorithms."""
        taken, table, update_s, returns, lengths = self._kernel_rounds(
            n_steps, ("tau", "max_grad_norm", *names), **arguments
        )
        self.counters.env_steps += taken
        self.counters.updates += len(table)
        self._follow_schedule()
        # A delayed policy tells nothing of an update that was not its own; a loss that is NaN is told by the critics.
        columns = zip(METRICS, table.T, strict=False)
        told = {name: x[~np.isnan(x)] if name.startswith("policy") else x for name, x in columns}
        return Rounds(taken, returns, lengths, {name: x for name, x in told.items() if len(x)}, update_s)

    def _follow_schedule(self) -> None:
        c = self.config
        learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)
        for optimizer in self._optimizers:
            optimizer.learning_rate = learning_rate

    def _noise(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers (*shape, A) from the run's own generator."""
        return torch.from_numpy(self.rng.normal((*shape, self.spec.act_dim))).to(self.device)

    def _fit_critics(self, batch: TransitionBatch, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """One step of both critics towards `targets` (B,); their metrics."""
        loss, metrics = self.compiled(twin_q_loss)(
            self.critics, batch.obs, self.policy.to_unit(batch.actions), targets, batch.weights
        )
        grad_norm = self.critic_optimizer.step(loss, self.config.max_grad_norm)
        td_errors = metrics.pop("td_errors")
        if batch.indices is not None:
            self.buffer.update_priorities(batch.indices, td_errors.double().cpu().numpy())
        return {**metrics, "td_error": td_errors.mean(), "grad_norm": grad_norm}

    def _move_target(self) -> None:
        """The target critics go the share `tau` of the way to the online ones."""
        self._target_block.lerp_(self.critic_optimizer.flat, self.config.tau)

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        info, tensors = super()._own_state()
        own = {name: weights_of(x) if isinstance(x, nn.Module) else x.state() for name, x in self._saved.items()}
        noise = self.collector.action_noise
        return info, {**tensors, **own, **({} if noise is None else {"action_noise": noise.state()})}

    def _restore(self, checkpoint: Checkpoint, same_env: bool) -> bool:
        exact = super()._restore(checkpoint, same_env)
        noise, saved = self.collector.action_noise, checkpoint.tensors.get("action_noise")
        if exact and noise is not None and saved is not None:
            noise.set_state(saved)
        for name, part in self._saved.items():
            arrays = checkpoint.tensors.get(name)
            if arrays is None:
                continue  # what this run learns beside: the temperature, where the saved run had a fixed one
            if isinstance(part, nn.Module):
                load_weights_(part, arrays, f"{type(self).__name__}: from_checkpoint: {name}")
            else:
                part.set_state(arrays)
        return exact

    def init_from(self, path: str | os.PathLike) -> None:
        """As `OnlineAlgorithm.init_from`, with the critics' weights too: new ones would spoil the policy."""
        super().init_from(path)
        critics = load_checkpoint(path).tensors.get("critics", {})
        load_weights_(self.critics, critics, f"{type(self).__name__}: init_from {path}: critics")
        self._target_block.copy_(self.critic_optimizer.flat)

"""What SAC and TD3 share beside `OffPolicyAlgorithm`: bounded actions, twin critics and their targets."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rlox.buffers import OfflineDataset
from rlox.checkpoint import Checkpoint, load_checkpoint, one_line
from rlox.checkpoint.streams import Stream
from rlox.collectors.exploration import ActionNoise
from rlox.kernels.nn.ac_learner import METRICS, n_parameters
from rlox.kernels.rng import Rng
from rlox.native import NativeAdam, NativeBoundedPolicy, bounded_obstacle
from rlox.nn.batch import TransitionBatch
from rlox.nn.losses import twin_q_loss
from rlox.nn.networks import TwinQNetwork
from rlox.nn.optimizers import FlatOptimizer, flatten_
from rlox.nn.policies import BoundedPolicy
from rlox.offline.mixing import identity, joined, require_mixable
from rlox.training.loops import Rounds
from rlox.training.off_policy import OffPolicyAlgorithm
from rlox.training.parts import load_weights_, weights_of
from rlox.training.schedules import scheduled


class TwinCriticAlgorithm(OffPolicyAlgorithm):
    """Base of algorithms whose policy learns from the smaller of two values of its actions.

    The memory holds actions in the environment's units, as they were taken; policy and critics see them in [-1, 1].

    With a dataset, round(`dataset_share` * B) of every batch's B rows are drawn from it and the rest from the memory,
    by the run's own generator: the symmetric sampling of RLPD (Ball et al. 2023, arXiv:2302.02948, section 4.1).
    Updates begin after `learning_starts`, once the memory has as many transitions as a batch takes from it. The
    dataset's rows are single steps and drawn uniformly, whatever the memory's returns and priorities are, and its
    rewards must be on the environment's scale. For a policy from `init_from` set ``learning_starts=0``, so that it acts
    from the first step.

    Parameters
    ----------
    *arguments, **options
        As `OffPolicyAlgorithm` takes them.
    dataset : OfflineDataset, optional
        Such as `rlox.open_dataset` returns, with observations as they are (``normalize=False``). No checkpoint holds
        it: to train on, the same is given to `from_checkpoint`.

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

    def __init__(self, *arguments: Any, dataset: OfflineDataset | None = None, **options: Any):
        self.dataset = dataset
        self._mixed: Any = None  # by what the dataset is known again, also where a checkpoint's is not at hand
        super().__init__(*arguments, **options)
        if dataset is None:
            return
        where, c = type(self).__name__, self.config
        require_mixable(dataset, self.spec, where)
        if self.collector.reward_fn is not None:
            raise ValueError(f"{where}: reward_fn must be None beside a dataset, which holds the environment's rewards")
        if not 0 < self._n_mixed < c.batch_size:
            raise ValueError(
                f"{where}: dataset_share must leave at least one row of a batch of {c.batch_size} to the dataset and "
                f"one to the replay memory, got {c.dataset_share}"
            )
        self.min_rows = c.batch_size - self._n_mixed
        self._mixed = identity(dataset)

    @property
    def _n_mixed(self) -> int:
        """Rows of a batch that are the dataset's."""
        return round(self.config.dataset_share * self.config.batch_size)

    def _step_by_step(self) -> str | None:
        return super()._step_by_step() if self.dataset is None else "a dataset is mixed into the batches"

    def _rows(self, n: int) -> Mapping[str, np.ndarray]:
        if self.dataset is None:
            return super()._rows(n)
        online = super()._rows(n - self._n_mixed)
        return joined(online, self.dataset.sample(self._n_mixed, self.rng.integers(2**63)), self.config.gamma)

    def train(
        self, total_timesteps: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> dict[str, float]:
        """As `OnlineAlgorithm.train`; also a ValueError where a checkpoint's dataset was not given again."""
        if self.dataset is None and self._mixed is not None:
            raise ValueError(
                f"{type(self).__name__}.train: the checkpoint was trained with a dataset that it cannot hold, "
                f"{one_line(self._mixed, 200)}; pass it to from_checkpoint(dataset=...)"
            )
        return super().train(total_timesteps, until=until, schedule_timesteps=schedule_timesteps)

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
        self.collector.action_noise = self._new_noise(self.n_envs)

    def _new_noise(self, n_envs: int) -> ActionNoise:
        c = self.config
        return ActionNoise(self.spec, n_envs, c.exploration_noise, c.noise_correlation)

    def make_noise(self, n_envs: int) -> ActionNoise | None:
        return None if self.collector.action_noise is None else self._new_noise(n_envs)

    def _use(self, kernel: type, **blocks: torch.Tensor) -> None:
        """Let `kernel` compute from now on, on the memory of the networks; `blocks` in its constructor's words."""
        spec, c = self.spec, self.config
        blocks = {"policy": self.optimizer.flat, "critics": self.critic_optimizer.flat, **blocks}
        arrays = {name: block.detach().numpy() for name, block in {**blocks, "target": self._target_block}.items()}
        sizes = {"obs_dim": spec.obs_dim, "act_dim": spec.act_dim, "hidden_sizes": c.hidden_sizes}
        self.native.use(kernel, arrays, **sizes, activation=c.activation)
        for optimizer in self._optimizers:
            optimizer.net = self.native.net

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
        self._tell_priorities(batch, td_errors)
        return metrics

    def _rounds(self, n_steps: int, names: Iterable[str] = (), **arguments: Any) -> Rounds:
        """As `rounds`; `names` and `arguments` are what the kernel of one of the two algorithms takes in addition."""
        first, delay = self.counters.updates + 1, getattr(self.config, "policy_delay", 1)
        taken, table, update_s, returns, lengths = self._kernel_rounds(
            n_steps, ("tau", "max_grad_norm", *names), **arguments
        )
        self.counters.env_steps += taken
        self.counters.in_round = self.round_steps
        self.counters.updates += len(table)
        self._follow_schedule()
        # A delayed policy tells nothing of an update that was not its own.
        own = (first + np.arange(len(table))) % delay == 0
        told = {name: x[own] if name.startswith("policy") else x for name, x in zip(METRICS, table.T, strict=False)}
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
            self._tell_priorities(batch, td_errors.cpu().numpy())
        return {**metrics, "td_error": td_errors.mean(), "grad_norm": grad_norm}

    def _move_target(self) -> None:
        """The target critics go the share `tau` of the way to the online ones."""
        self._target_block.lerp_(self.critic_optimizer.flat, self.config.tau)

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        info, tensors = super()._own_state()
        own = {name: weights_of(x) if isinstance(x, nn.Module) else x.state() for name, x in self._saved.items()}
        noise = self.collector.action_noise
        if self._mixed is not None:
            info["dataset"] = self._mixed
        return info, {**tensors, **own, **({} if noise is None else {"action_noise": noise.state()})}

    def _restore(self, checkpoint: Checkpoint, same_env: bool) -> bool:
        mixed = checkpoint.header.get("dataset")
        if self.dataset is not None and self._mixed != mixed:
            raise ValueError(
                f"the dataset must be the one that was trained with, {one_line(mixed or 'none', 200)}, got "
                f"{self._mixed}; a new training can start from a checkpoint by init_from"
            )
        self._mixed = mixed
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
        """As `OnlineAlgorithm.init_from`, with the critics' weights too: new ones would spoil the policy.

        The checkpoint may be one of SAC, TD3, TD3BC, CQL or IQL. What its policy does without noise is always taken
        over; `_fitted` says what becomes of standard deviations. IQL's V has no place here.
        """
        checkpoint, where = load_checkpoint(path), f"{type(self).__name__}: init_from {path}"
        critics, activation = checkpoint.tensors.get("critics"), checkpoint.header["config"].get("activation")
        if not critics:
            raise ValueError(
                f"{where}: it must hold critics, without which its policy would soon be spoilt, got one of "
                f"{one_line(checkpoint.header['algorithm'])}; TD3, SAC, TD3BC, CQL and IQL have some"
            )
        if activation != self.config.activation:
            raise ValueError(f"{where}: activation must be the checkpoint's, {one_line(activation)}")
        super().init_from(path)
        load_weights_(self.critics, critics, f"{where}: critics")
        self._target_block.copy_(self.critic_optimizer.flat)

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A checkpoint's policy with as many outputs for each action as this one's.

        Its means stay. Standard deviations are left out where this policy has none. Where it has and the checkpoint's
        has not, they start at 1 before the tanh; at IQL's, which lie behind it, where these are: near a mean of 0,
        where tanh is the identity, that is the same.
        """
        layers = [int(found[1]) for name in arrays if (found := re.fullmatch(r"net\.(\d+)\.weight", name))]
        weight, bias = (f"net.{max(layers, default=0)}.{kind}" for kind in ("weight", "bias"))
        if self._own_policy or not {weight, bias} <= arrays.keys():
            return arrays
        n, wide = self.spec.act_dim, self.Policy.outputs_per_action == 2
        fitted, log_std = dict(arrays), arrays.get("log_std")
        fitted.pop("log_std", None)
        was_wide = len(arrays[weight]) == 2 * n
        if was_wide and not wide:
            fitted |= {name: arrays[name][:n] for name in (weight, bias)}
        elif wide and len(arrays[weight]) == n:
            new = np.zeros(n, np.float32) if log_std is None else log_std
            fitted[weight] = np.concatenate([arrays[weight], np.zeros_like(arrays[weight])])
            fitted[bias] = np.concatenate([arrays[bias], new])
        told = was_wide or log_std is not None
        if told is not wide:
            why = "for exploration_noise replaces them" if told else "for it has none: they start at 1, before the tanh"
            warnings.warn(
                f"init_from: the standard deviations are not those of the checkpoint's policy, {why}",
                RuntimeWarning,
                stacklevel=4,
            )
        return fitted

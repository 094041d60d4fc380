"""Deep Q-Network (Mnih et al. 2015, doi:10.1038/nature14236) with the parts of Rainbow (Hessel et al. 2018,
arXiv:1710.02298) that work independently of each other: double DQN, dueling, n-step returns, prioritised replay,
distributions of returns (quantiles or categories) and noisy layers.

With a memory it is R2D2 (Kapturowski et al. 2019) without its distributed actors: a recurrent network that learns from
sequences of steps, each from the state of the memory that was stored with its first step and that `burn_in` steps bring
up to date.

Departures: Adam instead of RMSprop; the target network is updated every `target_update_freq` environment steps, not
updates, as in Stable-Baselines3; time limits bootstrap and are not terminations. From R2D2: values are not rescaled,
sequences are drawn uniformly and may cross the ends of episodes, and the network sees no earlier actions and rewards.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.checkpoint import Checkpoint
from rlox.checkpoint.counters import interpolate, scheduled
from rlox.collectors import ReplayCollector, RewardFn
from rlox.compiled import NativeActor, NativeOptimizer, NativeQPolicy, q_obstacle
from rlox.config import DQNConfig
from rlox.kernels.nn.dqn import METRICS, n_parameters
from rlox.kernels.rng import Rng
from rlox.nn.batch import SequenceBatch, TransitionBatch
from rlox.nn.modules import load_weights_, weights_of
from rlox.training.off_policy import OffPolicyAlgorithm
from rlox.training.replay import Rounds
from rlox.training.sequences import require_room

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.nn.actors import QPolicy


class DQN(OffPolicyAlgorithm):
    """DQN for discrete actions; see `rlox.config.DQNConfig`, and `OffPolicyAlgorithm` for ``buffer`` and related ones.

    A custom `policy` is a module from observations to the values of all actions, ``(B, D) -> (B, n_actions)``; with a
    memory, one that also has ``state_dim`` and ``follow``, as `rlox.nn.actors.RecurrentQNetwork`. With a memory,
    `update` receives a `rlox.nn.batch.SequenceBatch`.
    """

    name = "dqn"
    Config = DQNConfig
    _data_parallel = True
    _masks = True
    actions = ("discrete",)

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        return q_obstacle(self.spec, self.config, policy)

    def _network_sizes(self) -> tuple[int, int]:
        c = self.config
        return n_parameters(self.spec.obs_dim, self.spec.n_actions, c.hidden_sizes, c.dueling), 0

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        c, spec = self.config, self.spec
        if self.backend == "native":
            self.native = (
                NativeQPolicy.make(spec, c, rng) if policy is None else NativeQPolicy.adopt(policy, spec, c.adam_eps)
            )
            return
        from torch import nn

        from rlox.nn.actors import DiscreteQNetwork, QPolicy, RecurrentQNetwork
        from rlox.nn.policies import memory_of
        from rlox.nn.value_networks import create_value_policy

        if policy is None:
            obs = spec.obs_shape[0] if len(spec.obs_shape) == 1 else spec.obs_shape
            sizes = (obs, spec.n_actions, c.hidden_sizes, c.activation, c.dueling)
            memory = memory_of(c)
            if c.value_option is not None:
                policy = create_value_policy(*sizes, c, rng)
            else:
                policy = RecurrentQNetwork(*sizes, memory, rng) if memory else DiscreteQNetwork(*sizes, rng)
        elif not isinstance(policy, nn.Module):
            raise TypeError(f"DQN: policy must be a torch.nn.Module, got {type(policy).__name__}")
        elif (option := c.value_option or ("dueling" if c.dueling else None)) is not None:
            raise ValueError(f"DQN: policy must be left out with {option}, got a {type(policy).__name__}")
        self.policy = policy if isinstance(policy, QPolicy) else QPolicy(policy, spec.n_actions)
        if bool(self.policy.state_dim) is not self.config.recurrent:
            rule = "lstm or gru for a policy with one" if self.policy.state_dim else "none for a policy without one"
            raise ValueError(f"DQN: memory must be {rule}, got {c.memory}")
        self._require_outputs(self.policy, spec.n_actions, "the values of all actions")

    # ---- sequences, with a memory

    @property
    def _state_dim(self) -> int:  # type: ignore[override]  # a number that the network determines
        return self.policy.state_dim if self.config.recurrent else 0

    @property
    def _n_rows_in_sequence(self) -> int:
        """Rows of a sequence: its steps, and one more for the observation after the last of them."""
        return self.config.sequence_length + 1

    def _make_collector(self, n: int, reward_fn: RewardFn | None) -> ReplayCollector:
        if not self.config.recurrent:
            return super()._make_collector(n, reward_fn)
        from rlox.collectors.sequences import RecurrentCollector

        envs = self.env_options.make(self.env_id, n, self.seed, self.ranks.size)
        return RecurrentCollector(envs, n, self.seed, reward_fn=reward_fn)

    def _require_room(self, where: str) -> None:
        if not self.config.recurrent:
            return super()._require_room(where)
        memory, length = self._memory.config, self._n_rows_in_sequence
        if memory is not None and memory.name != "uniform":
            raise ValueError(
                f"{where}: buffer must be uniform with a memory, which learns from sequences that are all equally "
                f"likely, got {memory.name}"
            )
        if memory is not None and memory.device == "cuda":
            raise ValueError(
                f"{where}: buffer.device must be auto or cpu with a memory, whose sequences the host stores"
            )
        self._min_rows = length * self.collector.n_envs
        width = self.spec.n_actions * (2 if self.spec.masked else 1)
        require_room(self, where, width, length, f"sequence_length + 1 ({length})")

    def sample(self) -> TransitionBatch | SequenceBatch:  # type: ignore[override]
        """Return what the next update learns from: transitions or, with a memory, sequences."""
        if not self.config.recurrent:
            return super().sample()
        length = self.config.sequence_length
        rows = self.buffer.sample(
            max(1, self._n_rows // length), length + 1, self.rng.integers(2**63), with_indices=True
        )
        if self.normalizer is not None:
            rows = {**rows, "obs": self.normalizer.normalize(rows["obs"])}
        return SequenceBatch.from_rows(rows, self.spec, self.device)

    def setup(self, rng: Rng) -> None:
        c = self.config
        if self.native is not None:
            self.optimizer = NativeOptimizer(self.native.net, c.learning_rate)
        else:
            from rlox.nn.optimizers import FlatOptimizer

            # Copy it before the optimiser moves the online network's parameters into one block.
            self._target = copy.deepcopy(self.policy).requires_grad_(False).eval()
            self.optimizer = FlatOptimizer(self.policy.parameters(), c.learning_rate, eps=c.adam_eps)
        self._target_period = 0  # environment steps // target_update_freq when the target was last updated
        self._explore()

    @property
    def target(self) -> QPolicy:  # type: ignore[override]  # of the critics of others
        """The target network. With the native backend it is built on first access; its parameters are views."""
        return self._target if self.native is None else self.native.target()

    def _explore(self) -> None:
        self.actor.epsilon = self._epsilon(self.counters.progress)

    def schedule_values(self, progress: float) -> dict[str, float]:
        return {**super().schedule_values(progress), "exploration/epsilon": self._epsilon(progress)}

    def _epsilon(self, progress: float) -> float:
        c = self.config
        return interpolate(c.exploration_initial_eps, c.exploration_final_eps, progress, c.exploration_fraction)

    def _move_target_when_due(self) -> None:
        """Update the target network if another `target_update_freq` environment steps have been taken."""
        if self._branch()[0]:
            self._move_target(self.config.tau)
            self._follow_replay()

    def _branch(self) -> tuple[bool, ...]:
        return (self.counters.env_steps // self.config.target_update_freq != self._target_period,)

    def _follow_replay(self) -> None:
        self._target_period = self.counters.env_steps // self.config.target_update_freq

    def _move_target(self, tau: float) -> None:
        if self.native is not None:
            self.native.net.move_target(tau)
            return
        from rlox.nn.actors import polyak_update

        polyak_update(self.policy, self.target, tau)

    def update(self, batch: TransitionBatch | SequenceBatch) -> dict[str, torch.Tensor]:
        """Take one gradient step. Returns metrics as scalar tensors."""
        from rlox.nn.sequence_losses import sequence_q_loss
        from rlox.nn.value_distributions import distributional_q_loss
        from rlox.nn.value_losses import q_loss

        c = self.config
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)
        self._move_target_when_due()
        if isinstance(batch, SequenceBatch):
            n_step = self.collector.n_step
            loss, metrics = sequence_q_loss(
                self.policy, self.target, batch, c.gamma, n_step, c.burn_in, c.double_dqn, c.loss
            )
            return {**metrics, "grad_norm": self.optimizer.step(loss, c.max_grad_norm)}
        columns = (batch.obs, batch.actions, batch.rewards, batch.next_obs, batch.discounts, batch.weights)
        if c.value_option is None:
            loss, metrics = self.backend.compiled(q_loss)(
                self.policy, self.target, *columns, c.double_dqn, c.loss, batch.next_masks
            )
        else:
            noise = self._draw_noise(self._n_rows) if c.noisy else None
            loss, metrics = self.backend.compiled(distributional_q_loss)(
                self.policy.q, self.target.q, *columns, noise, c.double_dqn, c.loss, c.huber_kappa, batch.next_masks
            )
        grad_norm = self.optimizer.step(loss, c.max_grad_norm)
        td_errors = metrics.pop("td_errors")
        batch.update_priorities(self.buffer, metrics.pop("priorities", td_errors))
        return {**metrics, "td_error": td_errors.mean(), "grad_norm": grad_norm}

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """Run `update` as a single kernel call. Returns the same metrics."""
        c = self.config
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)
        self._move_target_when_due()
        columns = ("obs", "actions", "rewards", "next_obs", "discounts", "weights", "next_masks")
        metrics, td_errors = self.native.net.update(
            *map(batch.array, columns),
            learning_rate=self.optimizer.learning_rate,
            double_dqn=c.double_dqn,
            loss=c.loss,
            max_grad_norm=c.max_grad_norm,
        )
        batch.update_priorities(self.buffer, td_errors)
        return metrics

    def _noise_shape(self, n: int) -> tuple[int, ...]:
        return (3 if self.config.double_dqn else 2, self.policy.n_noise) if self.config.noisy else ()

    def _make_follower(self, block: np.ndarray) -> NativeActor:
        spec, c = self.spec, self.config
        return NativeQPolicy(spec.obs_dim, spec.n_actions, c.hidden_sizes, c.activation, c.dueling, block)

    def _rounds(self, n_steps: int) -> Rounds:
        c, counters = self.config, self.counters
        taken, table, self._target_period, update_s, returns, lengths = self._kernel_rounds(
            n_steps,
            ("double_dqn", "loss", "max_grad_norm", "tau", "target_update_freq"),
            target_period=self._target_period,
            epsilon=(c.exploration_initial_eps, c.exploration_final_eps, c.exploration_fraction),
        )
        # The exploration rate is the one from before the last step.
        counters.env_steps += taken - self.n_envs
        self._explore()
        counters.env_steps += self.n_envs
        counters.in_round = self._round_steps()
        counters.updates += len(table)
        metrics = dict(zip(METRICS, table.T, strict=True)) if len(table) else {}
        return Rounds(taken, returns, lengths, metrics, update_s)

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        info, tensors = super()._own_state()
        target = weights_of(self.target) if self.native is None else self.native.target_weights()
        return info, {**tensors, "target": target}

    def _restore(self, checkpoint: Checkpoint, same_env: bool = False) -> bool:
        exact = super()._restore(checkpoint, same_env)
        arrays, what = checkpoint.tensors["target"], "DQN: from_checkpoint: the target network"
        if self.native is not None:
            self.native.load_target(arrays, what)
        else:
            load_weights_(self.target, arrays, what)
        self._target_period = self.counters.env_steps // self.config.target_update_freq
        self._explore()
        return exact

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        super()._load_weights(arrays, where)
        self._move_target(1.0)

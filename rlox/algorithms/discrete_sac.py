"""SAC for discrete actions (Christodoulou 2019, arXiv:1910.07207): the critics value all actions at once, so that
targets, the policy's loss and the entropy are sums over actions, without samples.

Departures: illegal actions have the probability 0 everywhere, and the entropy to which the temperature is tuned is a
part of the largest one that the legal actions of a state allow; the gradient of the temperature's loss is taken by its
logarithm; time limits bootstrap and are not terminations.
"""

from __future__ import annotations

import torch
from torch import nn

from rlox.algorithms.sac import SAC
from rlox.checkpoint.counters import follow_schedule
from rlox.kernels.rng import Rng
from rlox.nn.actors import CategoricalPolicy
from rlox.nn.batch import TransitionBatch
from rlox.nn.critics.blocks import count_parameters, layer_sizes, make_net
from rlox.nn.critics.discrete import ActionCritics, action_critic_loss, expected_policy_loss, log_probabilities
from rlox.nn.critics.ensemble import CriticEnsemble, Dropout, draw_critics, follow_critics_
from rlox.nn.critics.norms import batch_statistics, scale_units_


class DiscreteSAC(SAC):
    """The class of `SAC` for an environment with discrete actions: ``SAC("CartPole-v1")`` is one of these.

    A custom `policy` is a `rlox.nn.actors.CategoricalPolicy`, or a module from observations to the logits of all
    actions, ``(B, D) -> (B, n_actions)``. With masks of legal actions, the replay memory also keeps those of the
    observations that were acted on.

    Attributes
    ----------
    critics, target : ActionCritics
        See `rlox.algorithms.actor_critic.ActorCriticAlgorithm`.
    """

    actions = ("discrete",)
    _masks = True
    _keeps_masks = True
    Policy = None  # type: ignore[assignment]  # `make_policy` creates another kind
    policy: CategoricalPolicy
    critics: ActionCritics
    target: ActionCritics

    # ---- construction

    def _require_fitting_spec(self, where: str) -> None:
        super()._require_fitting_spec(where)
        c, image = self.config, self.spec.image
        for name, holds, rule in (
            (
                "critic_head",
                c.critic_head == "mean",
                "be mean with discrete actions, so TQC, XQC and FlashSAC are for continuous ones",
            ),
            ("exploration_noise", c.exploration_noise == 0, "be 0 with discrete actions, which the policy samples"),
            ("hold_noise", c.hold_noise < 2, "be 0 with discrete actions"),
            (
                "entropy_per_action",
                c.entropy_per_action == type(c).entropy_per_action,
                "be left out with discrete actions, for which entropy_fraction sets the entropy",
            ),
            ("actor_norm", c.actor_norm == "none" or not image, "be none for images"),
            ("residual_blocks", c.residual_blocks == 0 or not image, "be 0 for images"),
            ("unit_norm", not c.unit_norm or not image, "be false for images, whose convolutions it would not scale"),
        ):
            if not holds:
                raise ValueError(f"{where}: {name} must {rule}, got {getattr(c, name)}")
        if self._dataset is not None and self.spec.masked:
            raise ValueError(f"{where}: dataset must be None with action masks, which are stored with each own step")

    def _native_obstacle(self, policy: nn.Module | None, device: str, requested: str) -> str | None:
        return self._kernel_obstacle(policy)

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        return "only PyTorch computes SAC with discrete actions"

    def _network_sizes(self) -> tuple[int, int]:
        c, body = self.config, self.policy.body
        n_features = self.spec.obs_dim if body is None else 512
        own = count_parameters(layer_sizes(n_features, c.critic_widths, c.residual_blocks, self.spec.n_actions))
        convolutions = 0 if body is None else sum(p.numel() for p in body.parameters())
        return sum(p.numel() for p in self.policy.parameters()), c.n_critics * (own + convolutions)

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        c, spec, where = self.config, self.spec, type(self).__name__
        obs = spec.obs_shape if spec.image else spec.obs_dim
        if policy is None:
            net = make_net(c, spec.obs_dim, spec.n_actions, rng)
            policy = CategoricalPolicy(obs, spec.n_actions, c.hidden_sizes, c.activation, rng, net)
        elif not isinstance(policy, nn.Module):
            raise TypeError(f"{where}: policy must be a torch.nn.Module, got {type(policy).__name__}")
        elif not isinstance(policy, CategoricalPolicy):
            policy = CategoricalPolicy(obs, spec.n_actions, net=policy)
        if policy.state_dim:
            raise ValueError(f"{where}: policy must have no memory, since SAC learns from single transitions")
        if self._own_policy:
            self._require_outputs(policy, spec.n_actions, "the logits of all actions")
        self._policy = policy

    def _make_ensemble(self, rng: Rng, dropout: Dropout | None) -> CriticEnsemble:
        c, spec = self.config, self.spec
        return ActionCritics(
            spec.obs_shape if spec.image else spec.obs_dim,
            spec.n_actions,
            c.critic_widths,
            c.activation,
            rng,
            c.n_critics,
            c.critic_norm,
            c.norm_after,
            dropout,
            c.residual_blocks,
        )

    # ---- updates

    def _find_target_entropy(self, masks: torch.Tensor | None) -> torch.Tensor | float:
        """Return the entropy to which the temperature is tuned, in nats, for B states with `masks` (B, n_actions): the
        mean over states, of which those with fewer legal actions allow less."""
        if masks is None or self.config.target_entropy is not None:
            return self._target_entropy
        return self.config.entropy_fraction * masks.sum(-1).float().log().mean()

    def _noise_shape(self, n: int) -> tuple[int, ...]:
        return ()

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """Take one step of the critics and, in every `policy_delay`-th update, of policy and temperature. Returns
        metrics as scalar tensors."""
        c = self.config
        follow_schedule(self.optimizers, c, self.counters.progress)
        alpha = self.log_alpha.detach().exp()

        with torch.no_grad():
            next_log_probs = log_probabilities(self.policy, batch.next_obs, batch.next_masks)
        loss, metrics = self.backend.compiled(action_critic_loss)(
            self.critics, self.target, batch.obs, batch.actions, batch.rewards, batch.next_obs, batch.discounts,
            batch.weights, next_log_probs, alpha, draw_critics(c, self.rng, self.device), self._renormalizes,
        )  # fmt: skip
        metrics["grad_norm"] = self.critic_optimizer.step(loss, c.max_grad_norm)
        if c.unit_norm:
            self.critics.scale_units_()
        td_errors = metrics.pop("td_errors")
        batch.update_priorities(self.buffer, td_errors)
        metrics["td_error"] = td_errors.mean()
        if not self._moves_policy:
            follow_critics_(self.target, self._target_block, self.critics, self.critic_optimizer.flat, c.tau)
            return {**metrics, "alpha": alpha}

        with batch_statistics(self.policy, self._renormalizes):
            loss, policy_metrics = self.backend.compiled(expected_policy_loss)(
                self.policy, self.critics, batch.obs, batch.masks, alpha, c.policy_value == "mean"
            )
        policy_metrics["policy_grad_norm"] = self.optimizer.step(loss, c.max_grad_norm)
        if c.unit_norm:
            scale_units_(self.policy)
        if c.auto_entropy:
            # d/d log(alpha) of log(alpha) (entropy - target entropy), averaged
            self._alpha_optimizer.descend([policy_metrics["entropy"] - self._find_target_entropy(batch.masks)])
        follow_critics_(self.target, self._target_block, self.critics, self.critic_optimizer.flat, c.tau)
        return {**metrics, **policy_metrics, "alpha": alpha}

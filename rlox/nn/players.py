"""Policies of several agents in PyTorch: the modules, their actions and values, and the loss of MAPPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlox.config import MAPPOConfig
from rlox.envs.spec import EnvSpec
from rlox.kernels.rng import Rng
from rlox.nn.losses import actor_critic_loss, ppo_clip
from rlox.nn.modules import copied
from rlox.nn.networks import mlp, rng_from_torch
from rlox.nn.policies import ActorCritic, make_policy, policy_outputs

_CHUNK, _IMAGE_CHUNK = 8192, 512  # rows for which values and log-probabilities are computed at once
_LOWEST = -1e9  # logit of an illegal action, which makes its probability 0


class PlayerPolicies(nn.Module):
    """The actor-critics of all players, in the order of the players, named from ``players.0`` on."""

    def __init__(self, policies: Sequence[ActorCritic]):
        super().__init__()
        self.players = nn.ModuleList(policies)


def make_player_policy(spec: EnvSpec, state_dim: int | None, config: MAPPOConfig, rng: Rng) -> ActorCritic:
    """Create the default policy of agents with this `spec`; a central critic reads `state_dim` numbers, a local critic
    (None) the actor's observations."""
    if state_dim is None:
        return make_policy(spec, config, rng)
    # These weights are replaced below; uniform weights are faster to draw.
    policy = make_policy(spec, replace(config, ortho_init=False), Rng(0))
    c, n_outputs = config, policy.actor[-1].out_features
    policy.actor = mlp([spec.obs_dim, *c.hidden_sizes, n_outputs], c.activation, 0.01, c.ortho_init, rng)
    policy.critic = mlp([state_dim, *c.hidden_sizes, 1], c.activation, 1.0, c.ortho_init, rng)
    return policy


def _outputs(policy: ActorCritic, features: torch.Tensor, masks: torch.Tensor | None) -> torch.Tensor:
    """Return the actor's outputs (B, n_outputs), with those of illegal actions so low that they are never taken."""
    outputs = policy.actor(features)
    return outputs if masks is None else outputs.masked_fill(~masks, _LOWEST)


class ModulePart:
    """Actions, log-probabilities and values of one player, computed by a module from arrays to arrays.

    Parameters
    ----------
    policy : ActorCritic
        A policy from `make_player_policy`.
    device : str
        Device of the policy and of batches.
    """

    def __init__(self, policy: ActorCritic, device: str = "cpu"):
        self.policy = policy
        self.device = device

    def __reduce__(self) -> Any:
        # Copy the policy: its parameters may be views of one block, which a pickle would contain once per view.
        return ModulePart, (copied(self.policy), self.device)

    def place(self, column: np.ndarray | None) -> Any:
        """Return a column of a batch as a tensor on the learner's device."""
        return None if column is None else torch.from_numpy(np.ascontiguousarray(column)).to(self.device)

    def flat(self) -> np.ndarray:
        """Return a copy of all parameters, (P,) f32."""
        return torch.cat([p.detach().reshape(-1) for p in self.policy.parameters()]).cpu().numpy()

    @torch.no_grad()
    def set_flat(self, weights: np.ndarray) -> None:
        """Load the result of `flat`."""
        at = 0
        for p in self.policy.parameters():
            p.copy_(torch.from_numpy(weights[at : at + p.numel()]).view_as(p))
            at += p.numel()

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return self.policy.noise_shape(n)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        self.policy.fill_noise(rng, out)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, noise: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
        """Return sampled actions (B, …)."""
        rows, drawn = self.place(obs), self.place(noise)
        if masks is None:
            return self.policy.act(rows, drawn).cpu().numpy()
        return (self._outputs(rows, masks) + drawn).argmax(-1).cpu().numpy()

    @torch.inference_mode()
    def mode(self, obs: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
        """Return the most likely actions (B, …)."""
        rows = self.place(obs)
        if masks is None:
            return self.policy.mode(rows).cpu().numpy()
        return self._outputs(rows, masks).argmax(-1).cpu().numpy()

    def sample(self, obs: np.ndarray, masks: np.ndarray | None, rng: Rng | None = None) -> np.ndarray:
        """Return actions like `act`, with noise drawn from `rng`, or else from PyTorch's generator."""
        noise = np.empty(self.noise_shape(len(obs)), np.float32)
        self.fill_noise(rng or rng_from_torch(), noise)
        return self.act(obs, noise, masks)

    def _outputs(self, rows: torch.Tensor, masks: np.ndarray) -> torch.Tensor:
        return _outputs(self.policy, self.policy.features(rows), self.place(masks))

    @torch.no_grad()
    def evaluate_actions(
        self,
        obs: np.ndarray,
        states: np.ndarray | None,
        masks: np.ndarray | None,
        actions: np.ndarray,
        after: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return log-probabilities (B,) of the taken actions, values (B,), and values of the states `after` (K, …), all
        f32."""
        seen = self.place(obs)
        judged = seen if states is None else self.place(states)
        rows = _IMAGE_CHUNK if judged.dim() > 2 else _CHUNK
        parts = [part for block in (judged, self.place(after)) for part in block.split(rows)]
        values = torch.cat([self.policy.get_value(part) for part in parts]).cpu().numpy()
        legal = [None] * len(seen.split(rows)) if masks is None else self.place(masks).split(rows)
        log_probs = [
            self.policy.distribution(_outputs(self.policy, self.policy.features(part), allowed), taken)[0]
            for part, allowed, taken in zip(seen.split(rows), legal, self.place(actions).split(rows), strict=True)
        ]
        return torch.cat(log_probs).cpu().numpy(), values[: len(obs)], values[len(obs) :]


def critic_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    old_values: torch.Tensor,
    clip_vf: float | None = None,
    maximum: bool = False,
    huber_delta: float | None = None,
) -> torch.Tensor:
    """Return the mean error of the values: squares, or with `huber_delta` the Huber loss, which is e^2 / 2 up to that
    error. All tensors are (B,).

    With `clip_vf` the values move at most that far from `old_values`: the loss is that of the clipped values or, with
    `maximum`, the larger of the clipped and the unclipped loss in each row, as in the code of Yu et al. 2022
    (arXiv:2103.01955).
    """

    def errors(of: torch.Tensor) -> torch.Tensor:
        if huber_delta is None:
            return (of - returns).square()
        return F.huber_loss(of, returns, reduction="none", delta=huber_delta)

    if clip_vf is None:
        return errors(values).mean()
    clipped = errors(old_values + (values - old_values).clamp(-clip_vf, clip_vf))
    return (torch.maximum(errors(values), clipped) if maximum else clipped).mean()


class MAPPOLoss:
    """``policy_loss + vf_coef * value_loss - ent_coef * entropy`` of the agents that share one policy.

    Parameters
    ----------
    clip_eps : float
        Clip range of the probability ratio.
    vf_coef, ent_coef : float
        Weights of `critic_loss` and of the entropy bonus.
    clip_vf, maximum, huber_delta
        As in `critic_loss`.
    """

    def __init__(
        self,
        clip_eps: float,
        vf_coef: float,
        ent_coef: float,
        clip_vf: float | None = None,
        maximum: bool = False,
        huber_delta: float | None = None,
    ):
        self.clip_eps = clip_eps
        self.vf_coef = vf_coef
        self.ent_coef = ent_coef
        self.clip_vf = clip_vf
        self.maximum = maximum
        self.huber_delta = huber_delta

    def __call__(
        self,
        policy: nn.Module,
        obs: torch.Tensor,
        states: torch.Tensor | None,
        masks: torch.Tensor | None,
        actions: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        old_values: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a minibatch of B steps of living agents; `returns` and `old_values` in the critic's units.

        Returns
        -------
        loss : Tensor ()
            Differentiable.
        metrics : dict of Tensor ()
            ``policy_loss value_loss entropy approx_kl clip_fraction``, detached.
        """
        if states is None and masks is None:
            log_probs, entropy, values = policy_outputs(policy, obs, actions)
        else:
            features = policy.features(obs)
            log_probs, entropy = policy.distribution(_outputs(policy, features, masks), actions)
            values = policy.critic(features if states is None else states).squeeze(-1)
        policy_loss, metrics = ppo_clip(log_probs, old_log_probs, advantages, self.clip_eps)
        v_loss = critic_loss(values, returns, old_values, self.clip_vf, self.maximum, self.huber_delta)
        loss, terms = actor_critic_loss(policy_loss, v_loss, entropy, self.vf_coef, self.ent_coef)
        return loss, {**terms, **metrics}

"""DreamerV3 (Hafner et al. 2023, arXiv:2301.04104), with the constants of the author's current code.

A recurrent world model is learned from replayed sequences; actor and critic learn from trajectories that it imagines.
The model is in `rlox.world_models.rssm`, the acting policy in `rlox.world_models.acting`, and the whole update here.

Departures: vectors are normalised to mean 0 and standard deviation 1 before symlog, and their prediction errors have a
larger weight (small numbers, such as a pole's angle, were lost otherwise); a deterministic evaluation samples the
latents, with its own seed, and takes the most likely actions. The learning rate is larger, 1e-3 decaying to 0 instead
of 4e-5, for trainings of a few thousand updates. At that rate the policy would settle on one action before the model
can predict the outcome of the others, so the entropy coefficient is 1e-2 instead of 3e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlox.checkpoint.counters import scheduled
from rlox.config import DreamerConfig, integer
from rlox.envs import EnvSpec
from rlox.envs.spec import require_bounds
from rlox.gpu.numerics import autocast
from rlox.kernels.rng import Rng
from rlox.nn.batch import SequenceBatch
from rlox.nn.modules import flat_copy
from rlox.nn.transfers import upload
from rlox.training.sequences import SequenceAlgorithm
from rlox.world_models.acting import DreamerPolicy, WorldModelActor
from rlox.world_models.laprop import LaProp
from rlox.world_models.rssm import MLP, Decoder, Latents, TwoHot


class Heads(nn.Module):
    """Predictions from features: observations, rewards, whether the episode continues, and returns."""

    def __init__(self, spec: EnvSpec, config: DreamerConfig, n_features: int, rng: Rng):
        super().__init__()
        units = config.shape.units
        self.decoder = Decoder(spec, n_features, units, rng)
        self.reward = TwoHot(n_features, units, 1, rng)
        self.continues = MLP(n_features, units, 1, 1, rng)
        self.critic = TwoHot(n_features, units, 3, rng)


class Returns(nn.Module):
    """Running 5th and 95th percentiles of the imagined returns, whose difference scales the advantages."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("high", torch.zeros((), dtype=torch.float32, device="cpu"))
        # A tensor that moves with the module: made from Python numbers, it would be a copy from the host each time.
        shares = torch.tensor([0.05, 0.95], dtype=torch.float64, device="cpu")
        self.register_buffer("shares", shares, persistent=False)

    def scale(self, returns: Tensor, rate: float) -> Tensor:
        """Update the percentiles with a batch's returns, and return the scale, (), at least 1."""
        low, high = torch.quantile(returns, self.shares.to(returns.dtype))
        self.low.lerp_(low, rate)
        self.high.lerp_(high, rate)
        return (self.high - self.low).clamp(min=1.0)


def lambda_returns(rewards: Tensor, discounts: Tensor, values: Tensor, traces: Tensor | float, last: Tensor) -> Tensor:
    """Return R_t = r_{t+1} + d_{t+1} ((1 - l_{t+1}) v_{t+1} + l_{t+1} R_{t+1}), with R_T = `last`.

    Parameters
    ----------
    rewards, discounts, values : Tensor (T, ...)
        Row t contains r_{t+1}, d_{t+1} and v_{t+1}, which belong to the state reached at t + 1.
    traces : Tensor (T, ...) or float
        l_{t+1}.
    last : Tensor (...)
        The return of the last state.

    Returns
    -------
    Tensor (T, ...)
    """
    known, decays = rewards + discounts * (1 - traces) * values, discounts * traces
    found = []
    for reward, decay in zip(known.flip(0), decays.flip(0), strict=True):
        last = torch.addcmul(reward, decay, last)
        found.append(last)
    return torch.stack(found[::-1])


class DreamerV3(SequenceAlgorithm):
    """DreamerV3; see `rlox.config.DreamerConfig`, and `OffPolicyAlgorithm` for arguments not listed here.

    Parameters
    ----------
    env_id, n_envs, seed, logger, callbacks, buffer, buffer_size, **arguments
        As for `OffPolicyAlgorithm`; the replay buffer stores sequences.
    latent_dim : int, optional
        Ignored: the widths of the model determine it.
    obs_dim, n_actions : int, optional
        Checked against the environment, which determines them; `n_actions` is the length of a continuous action.

    Attributes
    ----------
    policy : DreamerPolicy
        Encoder, recurrent model and actor.
    heads : Heads
        Predict observations, rewards, continuation and returns.
    slow_critic : TwoHot
        A running mean of the critic.
    optimizer : LaProp
        One optimiser for all of them.
    """

    name = "dreamer"
    Config = DreamerConfig
    _mixed_images = True

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int = 1,
        seed: int = 42,
        *,
        latent_dim: int | None = None,
        obs_dim: int | None = None,
        n_actions: int | None = None,
        **arguments: Any,
    ):
        sizes = {"latent_dim": latent_dim, "obs_dim": obs_dim, "n_actions": n_actions}
        for name, given in sizes.items():
            sizes[name] = None if given is None else integer("DreamerV3", name, given, 1)
        super().__init__(env_id, n_envs, seed, **arguments)
        own = self.spec.n_actions or self.spec.act_dim or len(self.spec.choices)
        for name, found in (("obs_dim", self.spec.obs_dim), ("n_actions", own)):
            if sizes[name] not in (None, found):
                raise ValueError(
                    f"DreamerV3: {name} must be the environment's {found}, got {sizes[name]}; leave it out"
                )

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        if policy is not None and not isinstance(policy, DreamerPolicy):
            raise TypeError(f"DreamerV3: policy must be a DreamerPolicy, got {type(policy).__name__}")
        require_bounds(self.spec, "DreamerV3")
        self.policy = DreamerPolicy(self.spec, self.config, rng) if policy is None else policy

    def setup(self, rng: Rng) -> None:
        c = self.config
        self.heads = self.keep("heads", Heads(self.spec, c, self.policy.n_features, rng).to(self.device))
        self.returns = self.keep("returns", Returns().to(self.device))
        trained = [*self.policy.parameters(), *self.heads.parameters()]
        self.optimizer = LaProp(trained, c.learning_rate, c.gradient_clip, c.warmup_updates)
        self.slow_critic, self.slow_block = flat_copy(self.heads.critic)
        self.critic_block = self.optimizer.flat[-len(self.slow_block) :]  # the critic comes last
        self.keep("slow_critic", self.slow_critic)
        self._actor = WorldModelActor(self.policy, self.heads.decoder, self.device)

    @property
    def actor(self) -> WorldModelActor:
        """The actor of collection and evaluation."""
        return self._actor

    def update(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """Take one step of model, actor and critic together. Returns metrics as scalar tensors."""
        c, policy = self.config, self.policy
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)
        # Sequences arrive as (B, T, ...) and are processed as (T, B, ...).
        columns = (batch.obs, batch.actions, batch.rewards, batch.is_first, batch.terminated, batch.truncated)
        obs, actions, *marks = (x.transpose(0, 1) for x in columns)
        policy.encoder.see(obs)
        with autocast(self.config.precision, self.device):
            loss, metrics = self.backend.compiled(self.loss)(
                obs, actions, *marks, *policy.unpack(batch.state), *self.draw_numbers()
            )
        metrics["grad_norm"] = self.optimizer.step(loss, None)
        self.slow_block.lerp_(self.critic_block, c.slow_rate)
        batch.update_states(self.buffer, metrics.pop("states").transpose(0, 1))
        return metrics

    def loss(
        self,
        obs: Tensor,
        actions: Tensor,
        rewards: Tensor,
        is_first: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        start: Latents,
        before: Tensor,
        draws: Tensor,
        imagined_draws: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of model, actor and critic on sequences (T, B, ...), metrics (), and the states of each step.

        Parameters
        ----------
        obs, actions, rewards, is_first, terminated, truncated : Tensor (T, B, ...)
            As in `SequenceBatch`.
        start, before : Latents (B, ...) and Tensor (B, A)
            The state before the first step, and the action that led to it.
        draws, imagined_draws, noise : Tensor (T, B, K), (H, T B, K) and (H, T B, ...)
            Random numbers that select the observed latents, the imagined latents and the imagined actions.
        """
        c, policy, heads = self.config, self.policy, self.heads
        rssm, actor, critic = policy.rssm, policy.actor, heads.critic
        live, going = 1.0 - terminated.float(), 1.0 - (terminated | truncated).float()

        # The model: states of the observed steps, and predictions from these states.
        before = torch.cat([before[None], actions[:-1]])
        states, post = rssm.observe(policy.encoder(obs), before, is_first, start, draws)
        feat = states.feat
        dyn, rep, prior_entropy, post_entropy = rssm.kl(states.deter, post, c.free_nats)
        numbers, pixels = heads.decoder.errors(feat, policy.encoder.scaled(obs))
        losses = {
            "reconstruction_loss": (numbers + pixels).mean(),
            "reward_loss": heads.reward.loss(heads.reward(feat), rewards).mean(),
            # The discount is learned as a chance that the episode ends, so imagined returns need no other discount.
            "continue_loss": F.binary_cross_entropy_with_logits(heads.continues(feat)[..., 0], c.gamma * live),
            "dynamics_loss": dyn.mean(),
            "representation_loss": rep.mean(),
        }
        model_loss = (
            c.vector_coef * numbers.mean() + pixels.mean() + losses["reward_loss"] + losses["continue_loss"]
            + c.kl_coef * (c.kl_balance * losses["dynamics_loss"] + (1 - c.kl_balance) * losses["representation_loss"])
        )  # fmt: skip

        # Imagination from every state, without gradients: H actions, H + 1 states.
        imagined, taken = self.imagine(states.flat_states(), imagined_draws, noise)
        with torch.no_grad():
            reached = imagined[1:]
            continues = heads.continues(imagined)[..., 0].sigmoid()
            rewarded = heads.reward.mean(heads.reward(reached))
            slow_values = self.slow_critic.mean(self.slow_critic(imagined[:-1]))
            weights = continues.cumprod(0)[:-1]
        value_logits = critic(imagined)
        values = critic.mean(value_logits)
        returns = lambda_returns(rewarded, continues[1:], values[1:], c.gae_lambda, values[-1])

        # Actor: REINFORCE for every kind of actions, with an entropy bonus.
        advantages = (returns - values[:-1]) / self.returns.scale(returns, c.return_rate)
        log_probs, entropy = actor.distribution(imagined[:-1], taken)
        losses["policy_loss"] = -(weights * (log_probs * advantages + c.ent_coef * entropy)).mean()

        # Critic: towards the returns, and towards its slow copy.
        errors = critic.loss(value_logits[:-1], returns, slow_values)
        losses["value_loss"] = (weights * (errors[..., 0] + c.slow_coef * errors[..., 1])).mean()

        # The critic on the observed states, with each state's imagined return as bootstrap. Gradients reach the model.
        ahead = returns[0].view(rewards.shape)
        replayed = critic(feat)
        with torch.no_grad():
            slow_values = self.slow_critic.mean(self.slow_critic(feat))[:-1]
            seen = lambda_returns(rewards[1:], c.gamma * live[1:], ahead[1:], c.gae_lambda * going[1:], ahead[-1])
        errors = critic.loss(replayed[:-1], seen, slow_values)
        losses["replay_value_loss"] = (going[:-1] * (errors[..., 0] + c.slow_coef * errors[..., 1])).mean()

        loss = (
            model_loss + losses["policy_loss"] + c.vf_coef * losses["value_loss"]
            + c.replay_vf_coef * losses["replay_value_loss"]
        )  # fmt: skip
        return loss, {
            **{name: value.detach() for name, value in losses.items()},
            "entropy": entropy.detach().mean(),
            "prior_entropy": prior_entropy.mean(),
            "posterior_entropy": post_entropy.mean(),
            "imagined_return": returns.mean(),
            "imagined_reward": rewarded.mean(),
            "return_scale": (self.returns.high - self.returns.low).clone(),
            "states": policy.packed(states, actions),
        }

    @torch.no_grad()
    def imagine(self, state: Latents, draws: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Act in the model for H steps from M states. Returns features (H + 1, M, F) and actions (H, M, A)."""
        rssm, actor = self.policy.rssm, self.policy.actor
        feats, taken = [state.feat], []
        for uniform, numbers in zip(draws, noise, strict=True):
            taken.append(actor.sample(feats[-1], numbers))
            deter = rssm.step(state, rssm.embed(taken[-1]))
            state = Latents(deter, rssm.draw(rssm.prior(deter), uniform))
            feats.append(state.feat)
        return torch.stack(feats), torch.stack(taken)

    def _host_numbers(self) -> dict[str, np.ndarray]:
        c, rng, n_latents = self.config, self.rng, self.policy.rssm.stoch
        imagined = c.imagination_horizon, c.seq_len * c.batch_size
        return {
            "draws": rng.uniform((c.seq_len, c.batch_size, n_latents)),
            "imagined_draws": rng.uniform((*imagined, n_latents)),
            "noise": self.policy.actor.fill_noise(rng, imagined).numpy(),
        }

    def draw_numbers(self) -> list[Tensor]:
        """Return the random numbers of an update, as `loss` takes them, from this run's generator, on its device."""
        if self._captured is not None and self._captured.running:
            return [self._captured.inputs[name] for name in ("draws", "imagined_draws", "noise")]
        return list(upload(self._host_numbers(), self.device).values())

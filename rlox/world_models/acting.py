"""The acting part of DreamerV3: encoder, recurrent model and actor, one step at a time, with arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlox.config.world_models import DreamerConfig
from rlox.envs import EnvSpec
from rlox.envs.tensor.sums import cumulative_sums
from rlox.kernels.rng import Rng
from rlox.nn.acting import ActingPolicy, Inputs
from rlox.nn.graphed_acting import GraphedCalls
from rlox.nn.modules import copy_module
from rlox.world_models.rssm import MLP, RSSM, Decoder, Encoder, Latents


class ActorHead(nn.Module):
    """A distribution over actions for each feature (..., F).

    Discrete: a categorical distribution for each component, mixed with a uniform distribution. Continuous: a normal
    distribution with mean tanh(m) in [-1, 1] and standard deviation 0.9 sigmoid(s + 2) + 0.1, whose samples may exceed
    that range.
    """

    def __init__(self, spec: EnvSpec, n_in: int, units: int, unimix: float, rng: Rng):
        super().__init__()
        self.choices, self.unimix = spec.choices, unimix
        self.width = spec.model_width
        self.n_noise = len(self.choices) or self.width  # random numbers per action
        self.mlp = MLP(n_in, units, 3, self.width if self.choices else 2 * self.width, rng, scale=0.01)

    def fill_noise(self, rng: Rng, shape: tuple[int, ...]) -> Tensor:
        """Return noise (*shape, n_noise): uniform for choices, standard normal for continuous actions."""
        shape = (*shape, self.n_noise)
        return torch.from_numpy(rng.uniform(shape) if self.choices else rng.normal(shape))

    def _normal(self, out: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = out.chunk(2, -1)
        return mean.tanh(), 0.9 * torch.sigmoid(deviation + 2) + 0.1

    def _log_probs(self, out: Tensor) -> list[Tensor]:
        parts = out.split(self.choices, -1)
        return [((1 - self.unimix) * x.softmax(-1) + self.unimix / x.shape[-1]).log() for x in parts]

    @torch.no_grad()
    def sample(self, feat: Tensor, noise: Tensor) -> Tensor:
        """Sample actions (B, A) in the model's form."""
        out = self.mlp(feat)
        if not self.choices:
            mean, deviation = self._normal(out)
            return mean + deviation * noise
        blocks = []
        for log_probs, uniform in zip(self._log_probs(out), noise.unbind(-1), strict=True):
            index = (cumulative_sums(log_probs.exp())[..., :-1] < uniform[..., None]).sum(-1)
            blocks.append(F.one_hot(index, log_probs.shape[-1]).to(out.dtype))
        return torch.cat(blocks, -1)

    @torch.no_grad()
    def mode(self, feat: Tensor) -> Tensor:
        """Return the most likely actions (B, A)."""
        out = self.mlp(feat)
        if not self.choices:
            return self._normal(out)[0]
        parts = out.split(self.choices, -1)
        return torch.cat([F.one_hot(x.argmax(-1), x.shape[-1]).to(out.dtype) for x in parts], -1)

    def distribution(self, feat: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability of `actions` (..., A) and entropy, both (...) in nats, over all components."""
        out = self.mlp(feat)
        if not self.choices:
            mean, deviation = self._normal(out)
            normal = torch.distributions.Normal(mean, deviation, validate_args=False)
            return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)
        pairs = list(zip(self._log_probs(out), actions.split(self.choices, -1), strict=True))
        log_prob = sum((log_probs * taken).sum(-1) for log_probs, taken in pairs)
        return log_prob, -sum((log_probs.exp() * log_probs).sum(-1) for log_probs, _ in pairs)


class DreamerPolicy(nn.Module):
    """Encoder, recurrent model and actor for an environment of `spec`, with initial weights from `rng`."""

    def __init__(self, spec: EnvSpec, config: DreamerConfig, rng: Rng):
        super().__init__()
        size = config.shape
        self.spec, self.n_features = spec, size.deter + size.stoch * size.classes
        self.encoder = Encoder(spec, size.units, rng)
        self.rssm = RSSM(size, self.encoder.n_tokens, spec.model_width, config.unimix, rng)
        self.actor = ActorHead(spec, self.n_features, size.units, config.unimix, rng)

    @property
    def n_carried(self) -> int:
        """S, the size of a carry: h, the class of each latent from 1 (0: not drawn yet), and the previous action."""
        return self.rssm.deter + self.rssm.stoch + self.actor.width

    def packed(self, states: Latents, actions: Tensor) -> Tensor:
        """Return carries (..., S) after `states` and the `actions` (..., A) taken in them, without gradients."""
        classes = states.stoch.detach().unflatten(-1, (self.rssm.stoch, self.rssm.classes)).argmax(-1) + 1
        return torch.cat([states.deter.detach(), classes.to(actions.dtype), actions], -1)

    def unpack(self, carry: Tensor) -> tuple[Latents, Tensor]:
        """Return states (B, ...) and actions (B, A) of carries (B, S)."""
        rssm = self.rssm
        deter, classes, actions = carry.split([rssm.deter, rssm.stoch, self.actor.width], -1)
        drawn = F.one_hot(classes.long(), rssm.classes + 1)[..., 1:].flatten(-2)
        return Latents(deter, drawn.to(carry.dtype)), actions


class WorldModelActor(ActingPolicy):
    """Acts in N environments with a `DreamerPolicy`, whose memory of each environment is a row of the state.

    It draws the latents of its state also when it takes the most likely actions: a model that was trained with drawn
    latents acts much better with drawn latents. The policy is read at every step, so that training takes effect.
    """

    def __init__(self, policy: DreamerPolicy, decoder: Decoder, device: str = "cpu"):
        self.policy, self.decoder, self.device = policy, decoder, device
        self.state_dim, self.n_state_noise = policy.n_carried, policy.rssm.stoch
        self._calls = GraphedCalls(device, "WorldModelActor.act") if device != "cpu" else None

    def __reduce__(self) -> Any:
        # Copies: parameters may be views of one block, which a pickle would contain once per view.
        return WorldModelActor, (copy_module(self.policy), copy_module(self.decoder), self.device)

    def initial(self, n: int) -> np.ndarray:
        return np.zeros((n, self.state_dim), np.float32)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.n_state_noise + self.policy.actor.n_noise)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        n = self.n_state_noise
        out[..., :n] = rng.uniform((*out.shape[:-1], n))
        if out.shape[-1] > n:
            out[..., n:] = self.policy.actor.fill_noise(rng, out.shape[:-1]).numpy()

    def act(self, inputs: Inputs, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = self.n_state_noise
        return self._act(inputs, noise[:, :n], noise[:, n:])

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        return self._act(inputs, noise, None)

    @torch.inference_mode()
    def _act(
        self, inputs: Inputs, state_noise: np.ndarray | None, noise: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return actions (N, …) and the next states (N, S), whose last numbers are these actions in the model's form.

        Without `state_noise` or `noise`, latents or actions are the most likely ones. On a GPU it is one graph.
        """
        policy = self.policy
        if inputs.mask is not None:
            self._require_logits()
        carry = self.initial(len(inputs.obs)) if inputs.state is None else inputs.state
        if inputs.is_first is not None:
            carry = np.where(inputs.is_first[:, None], np.float32(0), carry)
        arrays = {"obs": np.ascontiguousarray(inputs.obs, policy.spec.obs_dtype), "carry": carry}
        drawn = {"state_noise": state_noise, "noise": noise}
        arrays |= {name: np.ascontiguousarray(numbers) for name, numbers in drawn.items() if numbers is not None}
        key = " ".join(arrays)

        def advance(*tensors: Tensor) -> Tensor:
            return self._advance(**dict(zip(arrays, tensors, strict=True)))

        if self._calls is not None and type(policy) is DreamerPolicy:
            after = self._calls(key, advance, arrays)
        else:
            after = advance(*(torch.from_numpy(x).to(self.device) for x in arrays.values())).cpu().numpy()
        return policy.spec.from_model(after[:, -policy.actor.width :]), after

    def _advance(
        self, obs: Tensor, carry: Tensor, state_noise: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Return the states (N, S) after those in `carry`, given the observations that followed."""
        policy, rssm = self.policy, self.policy.rssm
        state, before = policy.unpack(carry)
        deter = rssm.step(state, rssm.embed(before))
        logits = rssm.posterior(deter, F.linear(policy.encoder(obs), rssm.post_tokens))
        stoch = rssm.mode(logits) if state_noise is None else rssm.draw(logits, state_noise)
        state = Latents(deter, stoch)
        actor = policy.actor
        taken = actor.mode(state.feat) if noise is None else actor.sample(state.feat, noise)
        return policy.packed(state, taken)

    @torch.inference_mode()
    def open_loop(
        self, carry: np.ndarray, obs: np.ndarray, actions: np.ndarray, context: int, rng: Rng, n_futures: int = 16
    ) -> np.ndarray:
        """Predict observations (B, T - C, ...) f32 after `context`, C, observed steps, in the environment's units.

        They are the mean of several drawn futures, which minimises the squared error. `carry` (B, S) is what `act` was
        given in the first step (zeros if that step starts an episode). `obs` (B, T, ...) are used up to the context;
        row t of `actions` (B, T, A), in the model's form, was taken after observation t.
        """
        policy, rssm, n_steps = self.policy, self.policy.rssm, actions.shape[1]
        seen = np.ascontiguousarray(obs[:, :context], policy.spec.obs_dtype)
        tokens = F.linear(policy.encoder(torch.from_numpy(seen).to(self.device)), rssm.post_tokens)
        start, before = policy.unpack(torch.from_numpy(carry).to(self.device))
        taken = torch.from_numpy(np.ascontiguousarray(actions)).to(self.device)
        embedded = rssm.embed(torch.cat([before[:, None], taken[:, :-1]], 1))
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for _ in range(n_futures):
            state, feats = start, []
            draws = torch.from_numpy(rng.uniform((n_steps, len(obs), rssm.stoch))).to(self.device)
            for t in range(n_steps):
                deter = rssm.step(state, embedded[:, t])
                logits = rssm.posterior(deter, tokens[:, t]) if t < context else rssm.prior(deter)
                state = Latents(deter, rssm.draw(logits, draws[t]))
                feats.append(state.feat)
            total = total + policy.encoder.unscaled(self.decoder(torch.stack(feats[context:], 1)))
        return (total / n_futures).cpu().numpy()

"""Updates of SAC, TD3 and SAC with discrete actions with the options of CrossQ, DroQ, FlashSAC, REDQ, TQC and XQC: the
weights after several of them against separate networks in float64, written as in the papers.

All of an update is computed in float64 here, so that rounding is far below the size of a step.
"""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import probes
import pytest
import torch
from board_games import Corridor
from torch import nn

from rlox import SAC, TD3, preset
from rlox.algorithms import DiscreteSAC
from rlox.checkpoint.streams import Stream
from rlox.kernels.rng import Rng
from rlox.nn.actors import DeterministicPolicy, SquashedGaussianPolicy
from rlox.nn.batch import TransitionBatch
from rlox.nn.critics.norms import BatchNorm, LayerNorm, RMSNorm

B, N_UPDATES, SCHEDULE_STEPS = 12, 6, 10
BATCHED = ("batch", "batch_renorm")


# ---- the classes in float64


class Exact:
    """The same algorithm with networks of float64."""

    def make_policy(self, rng, policy):
        super().make_policy(rng, policy)
        self._policy.double()

    def _make_ensemble(self, rng, dropout):
        return super()._make_ensemble(rng, dropout).double()

    def _draw_noise(self, n):
        return super()._draw_noise(n).double()


class ExactGaussian(SquashedGaussianPolicy):
    def forward(self, obs):
        return self.net(obs)


class ExactDeterministic(DeterministicPolicy):
    def forward(self, obs):
        return self.net(obs)


class ExactSAC(Exact, SAC):
    Policy = ExactGaussian


class ExactTD3(Exact, TD3):
    Policy = ExactDeterministic


class ExactDiscreteSAC(Exact, DiscreteSAC):
    pass


# ---- the reference


class Norm:
    """A copy of a layer of normalisation, or of its part at the index `k`, which belongs to one of several networks."""

    def __init__(self, layer, k):
        part = {name: x[k].detach().clone() for name, x in layer.state_dict().items()}
        self.kind = type(layer)
        self.parameters = [part.pop(name).requires_grad_() for name in ("scale", "shift") if name in part]
        self.running = list(part.values())

    def __call__(self, x, by, learn):
        if self.kind is RMSNorm:
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.parameters[0]
        scale, shift = self.parameters
        if self.kind is LayerNorm:
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale + shift
        running_mean, running_var = self.running
        if by == "running":
            return (x - running_mean) / (running_var + 1e-3).sqrt() * scale + shift
        mean, var = x.mean(0), x.var(0, correction=0)
        y = (x - mean) / (var + 1e-3).sqrt()
        if by == "batch_renorm":  # Ioffe 2017, algorithm 1: r and d are constants
            r = ((var + 1e-3) / (running_var + 1e-3)).sqrt().detach().clamp(1 / 3, 3)
            d = ((mean - running_mean) / (running_var + 1e-3).sqrt()).detach().clamp(-5, 5)
            y = y * r + d
        if learn:
            self.running = [0.99 * running_mean + 0.01 * mean.detach(), 0.99 * running_var + 0.01 * var.detach()]
        return y * scale + shift


class Net:
    """One network, of copies of `weights` (n_in, n_out), of `biases` of the last layers or of all, and of `norms`."""

    def __init__(self, c, norm, widths, weights, biases, norms):
        self.c, self.norm = c, norm
        widths = [*widths, *[4 * widths[0], widths[0]] * c.residual_blocks]
        assert [weight.shape[1] for weight in weights[:-1]] == widths
        self.weights, self.biases = ([x.detach().clone().requires_grad_() for x in part] for part in (weights, biases))
        self.norms = norms
        unbiased = len(weights) - 1 if norm in BATCHED and not c.norm_after else 0
        assert len(biases) == len(weights) - unbiased
        n_hidden, n_last = len(weights) - 1 - bool(c.residual_blocks), bool(c.residual_blocks)
        assert len(norms) == (0 if norm == "none" else n_hidden + (norm in BATCHED)) + n_last

    @classmethod
    def of_policy(cls, c, net):
        layers = [*net.modules()]
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        biases = [layer.bias for layer in linear if layer.bias is not None]
        norms = [Norm(layer, 0) for layer in layers if isinstance(layer, (BatchNorm, LayerNorm))]
        last = [Norm(layer, 0) for layer in layers if isinstance(layer, RMSNorm)]
        return cls(c, c.actor_norm, c.hidden_sizes, [layer.weight.T for layer in linear], biases, norms + last)

    @classmethod
    def of_critic(cls, c, critics, k):
        layers = [*critics.norms, *([] if critics.last_norm is None else [critics.last_norm])]
        parts = ([x[k] for x in part] for part in (critics.weights, [bias[:, 0] for bias in critics.biases]))
        widths = c.hidden_sizes if c.critic_hidden_sizes is None else c.critic_hidden_sizes
        return cls(c, c.critic_norm, widths, *parts, [Norm(layer, (k, 0)) for layer in layers])

    @property
    def parameters(self):
        return [*self.weights, *self.biases, *(p for norm in self.norms for p in norm.parameters)]

    @property
    def tensors(self):
        return [*self.parameters, *(x for norm in self.norms for x in norm.running)]

    def linear(self, x, i):
        bias = i - len(self.weights) + len(self.biases)
        return x @ self.weights[i] + (self.biases[bias] if bias >= 0 else 0.0)

    def __call__(self, x, by="running", learn=False, kept=()):
        """Return the outputs for `x`, normalised `by` running statistics or those of the batch; `kept` are factors of
        the units of each hidden layer."""
        norms, kept, last = iter(self.norms), iter(kept), len(self.weights) - 1
        activate = getattr(torch, self.c.activation)

        def hidden(x, i):
            x = self.linear(x, i)
            x = x * next(kept, 1.0)
            if self.norm == "none":
                return activate(x)
            norm = next(norms)
            return norm(activate(x), by, learn) if self.c.norm_after else activate(norm(x, by, learn))

        if self.norm in BATCHED:
            x = next(norms)(x, by, learn)
        if self.c.residual_blocks:
            x = self.linear(x, 0)
            for i in range(1, last, 2):
                x = x + hidden(hidden(x, i), i + 1)
            x = next(norms)(x, by, learn)
        else:
            for i in range(last):
                x = hidden(x, i)
        return self.linear(x, last)

    @torch.no_grad()
    def scale_units(self):
        """Scale each unit's weights, with its bias, to the norm 1; with blocks each norm to that of its width."""
        blocks, n_unbiased = self.c.residual_blocks, len(self.weights) - len(self.biases)
        for i, weight in enumerate(self.weights):
            parts = [weight] if blocks or i < n_unbiased else [weight, self.biases[i - n_unbiased][None]]
            lengths = torch.cat(parts).norm(dim=0)
            for part in parts:
                part /= lengths
        for norm in self.norms if blocks else ():
            length = torch.cat(norm.parameters).norm() / math.sqrt(len(norm.parameters[0]))
            for p in norm.parameters:
                p /= length

    @torch.no_grad()
    def follow(self, online, tau):
        for ours, theirs in zip(self.parameters, online.parameters, strict=True):
            ours.copy_((1 - tau) * ours + tau * theirs)
        for ours, theirs in zip(self.norms, online.norms, strict=True):
            ours.running = list(theirs.running)


class Reference:
    """What the three algorithms have in common: critics, their targets and their loss, and steps."""

    def __init__(self, agent):
        c = self.c = agent.config
        self.spec, self.n_updates = agent.spec, 0
        self.policy = Net.of_policy(c, agent.policy.net)
        self.critics = [Net.of_critic(c, agent.critics, k) for k in range(c.n_critics)]
        self.targets = self.critics
        if c.target_network:
            self.targets = [Net.of_critic(c, agent.target, k) for k in range(c.n_critics)]
        self.rng, self.dropout_rng = Rng(0), Rng(agent.seed, Stream.DROPOUT)
        self.rng.set_state(agent.rng.get_state())
        self.bins = torch.linspace(c.v_min, c.v_max, c.n_bins, dtype=torch.float64)
        self.adams, self.rates = {}, {}
        usual = {"betas": (c.adam_beta1, c.adam_beta2), "weight_decay": c.weight_decay}
        critics = [p for q in self.critics for p in q.parameters]
        self.make_adam("policy", self.policy.parameters, c.actor_learning_rate, **usual)
        self.make_adam("critics", critics, c.critic_learning_rate, **usual)
        if c.unit_norm:  # from the start
            for net in (self.policy, *self.critics):
                net.scale_units()
            Reference.compare(self, agent)

    def make_adam(self, name, parameters, rate=None, weight_decay=0.0, **options):
        self.rates[name] = self.c.learning_rate if rate is None else rate
        self.adams[name] = torch.optim.AdamW(parameters, self.rates[name], weight_decay=weight_decay, **options)

    def descend(self, name, loss):
        c, adam, done = self.c, self.adams[name], self.n_updates / SCHEDULE_STEPS
        (group,) = adam.param_groups
        falls = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
        left = falls[c.learning_rate_schedule]
        end = 1.0 if c.learning_rate_schedule == "constant" else c.learning_rate_end
        group["lr"] = self.rates[name] * (end + (1.0 - end) * left)
        for p, grad in zip(group["params"], torch.autograd.grad(loss, group["params"]), strict=True):
            p.grad = grad
        if c.max_grad_norm is not None and name != "alpha":
            nn.utils.clip_grad_norm_(group["params"], c.max_grad_norm)
        adam.step()

    @property
    def moves_policy(self):
        return (self.n_updates + 1) % self.c.policy_delay == 0

    def statistics(self, norm):
        """What batches are normalised by: a batch_renorm begins as batch."""
        return "batch" if norm == "batch_renorm" and self.n_updates < self.c.renorm_warmup else norm

    def ask(self, critics, x, by="running", learn=False):
        """Return the outputs (N, B, K) of critics, of which dropout has set some units to 0."""
        kept, c = [()] * len(critics), self.c
        if c.dropout:
            widths = [weight.shape[1] for weight in critics[0].weights[bool(c.residual_blocks) : -1]]
            drawn = [torch.from_numpy(self.dropout_rng.uniform((len(critics), len(x), width))) for width in widths]
            kept = [[(one[k] >= c.dropout).double() / (1 - c.dropout) for one in drawn] for k in range(len(critics))]
        return torch.stack([q(x, by, learn, one) for q, one in zip(critics, kept, strict=True)])

    def ahead_and_now(self, x, next_x):
        """Return the outputs of the critics of the target in the next states, and of all critics."""
        c, by = self.c, self.statistics(self.c.critic_norm)
        chosen = range(c.n_critics)
        if c.n_target_critics not in (None, c.n_critics):
            chosen = self.rng.permutation(c.n_critics)[: c.n_target_critics].tolist()
        if c.critic_norm in BATCHED:  # Bhatt et al. 2024, section 3.2: one batch of both, also for a target network
            both = torch.cat([x, next_x])
            now, ahead = self.ask(self.critics, both, by, learn=True).split(B, 1)
            if c.target_network:
                ahead = self.ask(self.targets, both, by).split(B, 1)[1]
            ahead = ahead[list(chosen)]
        else:
            ahead = self.ask([self.targets[k] for k in chosen], next_x)
            now = self.ask(self.critics, x)
        return ahead.detach(), now

    def fit_critics(self, batch, actions, next_actions, penalties):
        x, next_x = torch.cat([batch.obs, actions], 1), torch.cat([batch.next_obs, next_actions], 1)
        ahead, now = self.ahead_and_now(x, next_x)
        loss = {"mean": self.mean_loss, "quantile": self.quantile_loss, "categorical": self.categorical_loss}
        self.step_critics((batch.weights * loss[self.c.critic_head](batch, ahead, now, penalties)).mean())

    def step_critics(self, loss):
        self.descend("critics", loss)
        if self.c.unit_norm:
            for q in self.critics:
                q.scale_units()

    def step_policy(self, loss):
        self.descend("policy", loss)
        if self.c.unit_norm:
            self.policy.scale_units()

    def mean_loss(self, batch, ahead, now, penalties):
        targets = batch.rewards + batch.discounts * (ahead[..., 0].min(0).values - penalties)
        return (now[..., 0] - targets) ** 2

    def quantile_loss(self, batch, ahead, now, penalties):
        """Kuznetsov et al. 2020, eq. 11 to 14."""
        m, _, k = ahead.shape
        pool = torch.cat(list(ahead), 1).sort(1).values[:, : m * (k - self.c.drop_quantiles)]
        targets = batch.rewards[:, None] + batch.discounts[:, None] * (pool - penalties[:, None])
        levels = (2 * torch.arange(k, dtype=torch.float64) + 1) / (2 * k)
        u = targets[None, :, None] - now[..., None]  # (N, B, K, J)
        huber = torch.where(u.abs() < 1, u**2 / 2, u.abs() - 0.5)
        return ((levels[:, None] - (u < 0).double()).abs() * huber).mean((2, 3))

    def categorical_loss(self, batch, ahead, now, penalties):
        """Bellemare et al. 2017, eq. 7, from the critic with the smallest mean."""
        shares = ahead.softmax(-1)
        least = (shares * self.bins).sum(-1).argmin(0)
        shares = shares[least, range(B)]
        places = batch.rewards[:, None] + batch.discounts[:, None] * (self.bins - penalties[:, None])
        places = places.clamp(self.c.v_min, self.c.v_max)
        width = (self.c.v_max - self.c.v_min) / (self.c.n_bins - 1)
        near = (1 - (places[:, None] - self.bins[:, None]).abs() / width).clamp(min=0)  # (B, to, from)
        return -((near * shares[:, None]).sum(-1) * now.log_softmax(-1)).sum(-1)

    def values(self, critics, obs, actions):
        """Return the expected returns (N, B), by running statistics."""
        outputs = self.ask(critics, torch.cat([obs, actions], 1))
        if self.c.critic_head == "categorical":
            return (outputs.softmax(-1) * self.bins).sum(-1)
        return outputs.mean(-1)  # over quantiles, or of one

    def follow(self):
        if self.c.target_network:
            for target, q in zip(self.targets, self.critics, strict=True):
                target.follow(q, self.c.tau)

    def to_unit(self, actions):
        low, high = (torch.from_numpy(bound).double() for bound in (self.spec.act_low, self.spec.act_high))
        return 2 * (actions - low) / (high - low) - 1

    def compare(self, agent):
        c = self.c
        pairs = {"policy": (Net.of_policy(c, agent.policy.net), self.policy)}
        for k in range(c.n_critics):
            pairs[f"critic {k}"] = Net.of_critic(c, agent.critics, k), self.critics[k]
            pairs[f"target {k}"] = Net.of_critic(c, agent.target, k), self.targets[k]
        self.agree(pairs)

    def agree(self, pairs):
        for name, (ours, theirs) in pairs.items():
            for i, (a, b) in enumerate(zip(ours.tensors, theirs.tensors, strict=True)):
                assert a.dtype == torch.float64
                # A step is about 0.01; the temperature, which is float32, makes differences of up to 2e-9.
                difference = (a - b).abs().max().item()
                assert difference < 1e-7, f"{name}, tensor {i}, update {self.n_updates}: {difference}"


class SoftReference(Reference):
    """Haarnoja et al. 2018, arXiv:1812.05905, with a temperature whose logarithm is learned."""

    def __init__(self, agent):
        super().__init__(agent)
        self.log_alpha = agent.log_alpha.detach().double().requires_grad_()
        self.make_adam("alpha", [self.log_alpha])

    def sample(self, outputs, noise):
        mean, log_std = outputs.chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        x = mean + normal.stddev * noise
        return x.tanh(), (normal.log_prob(x) - (1 - x.tanh() ** 2).log()).sum(1)

    def update(self, batch):
        c, alpha = self.c, self.log_alpha.detach().exp()
        noise, next_noise = torch.from_numpy(self.rng.normal((2, B, 2))).double()
        with torch.no_grad():
            next_actions, next_log_probs = self.sample(self.policy(batch.next_obs), next_noise)
        self.fit_critics(batch, self.to_unit(batch.actions), next_actions, alpha * next_log_probs)
        if self.moves_policy:
            outputs = self.policy(batch.obs, self.statistics(c.actor_norm), learn=True)
            actions, log_probs = self.sample(outputs, noise)
            values = self.values(self.critics, batch.obs, actions)
            value = values.mean(0) if c.policy_value == "mean" else values.min(0).values
            self.step_policy((alpha * log_probs - value).mean())
            self.descend("alpha", -self.log_alpha * (log_probs.detach().mean() + 2 * c.entropy_per_action))
        self.follow()

    def compare(self, agent):
        super().compare(agent)
        assert agent.log_alpha.item() == pytest.approx(self.log_alpha.item(), rel=1e-5)


class DiscreteReference(SoftReference):
    """Christodoulou 2019, with sums over actions of the probability that legal ones share."""

    def choose(self, outputs, masks):
        masks = torch.ones_like(outputs, dtype=torch.bool) if masks is None else masks
        return torch.distributions.Categorical(logits=outputs.masked_fill(~masks, -torch.inf))

    def update(self, batch):
        c, alpha = self.c, self.log_alpha.detach().exp()
        with torch.no_grad():
            next_choice = self.choose(self.policy(batch.next_obs), batch.next_masks)
        ahead, now = self.ahead_and_now(batch.obs, batch.next_obs)
        soft = (next_choice.probs * ahead.min(0).values).sum(1) + alpha * next_choice.entropy()
        errors = now[:, range(B), batch.actions] - (batch.rewards + batch.discounts * soft)
        self.step_critics((batch.weights * errors**2).mean())
        if self.moves_policy:
            choice = self.choose(self.policy(batch.obs, self.statistics(c.actor_norm), learn=True), batch.masks)
            values = self.ask(self.critics, batch.obs).detach()
            value = values.mean(0) if c.policy_value == "mean" else values.min(0).values
            self.step_policy(-((choice.probs * value).sum(1) + alpha * choice.entropy()).mean())
            n_legal = torch.tensor(3.0) if batch.masks is None else batch.masks.sum(1).double()
            wanted = c.entropy_fraction * n_legal.log().mean()
            self.descend("alpha", self.log_alpha * (choice.entropy().detach().mean() - wanted))
        self.follow()


class DelayedReference(Reference):
    """Fujimoto et al. 2018, algorithm 1."""

    def __init__(self, agent):
        super().__init__(agent)
        self.target_policy = Net.of_policy(self.c, agent.target_policy.net) if self.c.target_network else self.policy

    def update(self, batch):
        c = self.c
        noise = torch.from_numpy(self.rng.normal((B, 2))).double()
        with torch.no_grad():
            smoothing = (c.target_noise * noise).clamp(-c.noise_clip, c.noise_clip)
            next_actions = (self.target_policy(batch.next_obs).tanh() + smoothing).clamp(-1, 1)
        self.fit_critics(batch, self.to_unit(batch.actions), next_actions, torch.zeros(B))
        if not self.moves_policy:
            return
        actions = self.policy(batch.obs, self.statistics(c.actor_norm), learn=True).tanh()
        asked = self.critics if c.policy_value == "mean" else self.critics[:1]
        self.step_policy(-self.values(asked, batch.obs, actions).mean())
        self.follow()
        if c.target_network:
            self.target_policy.follow(self.policy, c.tau)

    def compare(self, agent):
        super().compare(agent)
        self.agree({"target policy": (Net.of_policy(self.c, agent.target_policy.net), self.target_policy)})


# ---- updates

SMALL = {"batch_size": B, "buffer_size": 100, "seed": 3, "backend": "torch", "learning_rate": 0.01, "tau": 0.1}
NARROW = {"hidden_sizes": [6, 5], "critic_hidden_sizes": [7, 6]}
BINS = {"n_bins": 7, "v_min": -3.0, "v_max": 3.0}
CASES = {
    "crossq": {**preset("crossq"), **NARROW, "renorm_warmup": 3},
    "droq": {**preset("droq"), **NARROW, "dropout": 0.25, "policy_delay": 2},
    "flashsac": {**preset("flashsac"), **BINS, "hidden_sizes": [4], "critic_hidden_sizes": [5]},
    "redq": {**preset("redq"), **NARROW, "n_critics": 4, "policy_delay": 2},
    "tqc": {**preset("tqc"), **NARROW, "n_quantiles": 5},
    "xqc": {**preset("xqc"), **BINS, "hidden_sizes": [6, 5, 4]},
    "targets": {**NARROW, "critic_norm": "batch_renorm", "actor_norm": "batch_renorm", "renorm_warmup": 2,
                "n_critics": 3, "n_target_critics": 1, "unit_norm": True, "policy_delay": 1, "max_grad_norm": 0.3},
    "layers": {**NARROW, "critic_norm": "layer", "actor_norm": "layer", "norm_after": True, "n_critics": 3,
               "activation": "tanh", "policy_delay": 2, "weight_decay": 0.5, "adam_beta2": 0.9, "adam_beta1": 0.7,
               "actor_learning_rate": 0.02, "critic_learning_rate": 0.005},
    "some": {**NARROW, "critic_head": "quantile", "n_quantiles": 4, "drop_quantiles": 1, "n_critics": 4,
             "n_target_critics": 3, "dropout": 0.2, "critic_norm": "batch", "unit_norm": True, "policy_delay": 3},
    "policy": {**NARROW, "critic_norm": "batch", "actor_norm": "batch_renorm", "renorm_warmup": 3, "policy_delay": 1},
    "critics": {**NARROW, "critic_norm": "batch_renorm", "actor_norm": "batch", "renorm_warmup": 3, "policy_delay": 1},
}  # fmt: skip
MASKED = ("redq", "targets")  # cases whose batches have masks of legal actions
OF_CONTINUOUS = ("critic_head", "entropy_per_action", "hold_noise")


def transitions(seed, n_actions=None, masked=False):
    """Random transitions of `probes.Levers`, or of a game with so many actions, a third of which terminate."""
    rng = np.random.default_rng(seed)
    n_obs = 3 if n_actions is None else 7
    columns = {
        "obs": 2 * rng.normal(size=(B, n_obs)) + 1,  # neither mean nor deviation is that of new running statistics
        "actions": rng.uniform([-2, 0], [2, 1], (B, 2)) if n_actions is None else rng.integers(n_actions, size=B),
        "rewards": 2 * rng.normal(size=B),
        "next_obs": 2 * rng.normal(size=(B, n_obs)) - 1,
        "discounts": np.where(rng.random(B) < 1 / 3, 0.0, 0.9),
        "weights": rng.uniform(0.2, 1.0, B),
    }
    if masked:
        masks, next_masks = rng.random((2, B, n_actions)) < 0.5
        masks[range(B), columns["actions"]] = next_masks[:, 1] = True
        columns |= {"masks": masks, "next_masks": next_masks}
    return TransitionBatch(**{name: torch.from_numpy(x) for name, x in columns.items()})


def make(cls, env, case):
    """An algorithm with those options of a case that it has, and with targets that differ from the online networks."""
    known = {item.name for item in fields(cls.Config)} - set(OF_CONTINUOUS if cls is ExactDiscreteSAC else ())
    agent = cls(env, **{**{name: x for name, x in CASES[case].items() if name in known}, **SMALL})
    agent.counters.schedule_steps = SCHEDULE_STEPS
    rng = torch.Generator().manual_seed(1)
    if agent.config.target_network:
        with torch.no_grad():
            for target in (agent.target, getattr(agent, "target_policy", nn.Module())):
                for p in target.parameters():
                    p += 0.1 * torch.randn(p.shape, generator=rng, dtype=p.dtype)
    return agent


def follow_updates(cls, reference_cls, env, case, n_actions=None):
    agent = make(cls, env, case)
    reference = reference_cls(agent)
    for i in range(N_UPDATES):
        batch = transitions(i, n_actions, n_actions is not None and case in MASKED)
        reference.update(batch)
        agent.update(batch)
        agent.counters.updates += 1  # as in the training loop, with an environment step for each update
        agent.counters.env_steps += 1
        reference.n_updates += 1
        reference.compare(agent)


@pytest.mark.parametrize("case", CASES)
def test_updates_of_sac_are_those_of_the_definitions(case):
    follow_updates(ExactSAC, SoftReference, probes.Levers, case)


@pytest.mark.parametrize("case", CASES)
def test_updates_of_td3_are_those_of_the_definitions(case):
    follow_updates(ExactTD3, DelayedReference, probes.Levers, case)


@pytest.mark.parametrize("case", [case for case in CASES if case != "tqc"])  # of which nothing would be left
def test_updates_of_sac_with_discrete_actions_are_those_of_the_definitions(case):
    follow_updates(ExactDiscreteSAC, DiscreteReference, Corridor, case, 3)

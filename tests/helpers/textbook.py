"""The common parts of the updates of SAC, TD3 and related offline algorithms, as in their papers: separate networks of
PyTorch layers, with Adam and autograd. For observations and actions of `probes.Levers`."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

import rlox
from rlox.kernels import CPU_LEVEL
from rlox.kernels.rng import Rng
from rlox.nn.batch import TransitionBatch

LOW, HIGH = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])


def transitions(n: int = 32, seed: int = 0, weighted: bool = False) -> TransitionBatch:
    """Random transitions, of which a third terminate."""
    rng = np.random.default_rng(seed)
    columns = {
        "obs": rng.normal(size=(n, 3)),
        "actions": rng.uniform(LOW, HIGH, size=(n, 2)),
        "rewards": 2 * rng.normal(size=n),
        "next_obs": rng.normal(size=(n, 3)),
        "discounts": np.where(rng.random(n) < 1 / 3, 0.0, 0.9),
    }
    if weighted:
        columns["weights"] = np.linspace(0.1, 1.0, n)
    return TransitionBatch(**{name: torch.from_numpy(x.astype(np.float32)) for name, x in columns.items()})


def on_levers(cls, n=64, **settings):
    """An algorithm on random transitions of the shape of `probes.Levers`."""
    rng = np.random.default_rng(5)
    obs, next_obs = rng.normal(size=(2, n, 3)).astype(np.float32)
    actions = rng.uniform(LOW, HIGH, size=(n, 2)).astype(np.float32)
    ends = rng.random(n) < 0.1
    data = rlox.OfflineDatasetBuffer(obs, next_obs, actions, rng.normal(size=n).astype(np.float32), ends, ends & ~ends)
    sizes = {"act_low": LOW.numpy(), "act_high": HIGH.numpy(), "hidden": 32, "batch_size": 32}
    return cls(data, 3, 2, seed=0, **{**sizes, **settings})


def unit(actions):
    return 2 * (actions - LOW) / (HIGH - LOW) - 1


def coming_noise(algorithm, *shape: int) -> torch.Tensor:
    """The next normal numbers of the algorithm's generator, (*shape, 2)."""
    rng = Rng(0)
    rng.set_state(algorithm.rng.get_state())
    return torch.from_numpy(rng.normal((*shape, 2)))


def perceptron(twin, k: int) -> nn.Sequential:
    """The `k`-th of two stacked networks as a separate module."""
    layers: list[nn.Module] = []
    for weight, bias in zip(twin.weights, twin.biases, strict=True):
        layer = nn.Linear(*weight.shape[1:])
        layer.load_state_dict({"weight": weight[k].T, "bias": bias[k, 0]})
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Textbook:
    """A copy of an algorithm's networks, and the part of the update that the papers have in common."""

    def __init__(self, algorithm):
        self.c = algorithm.config
        self.actor = copy.deepcopy(algorithm.policy.net)
        self.critics = [perceptron(algorithm.critics, k) for k in range(2)]
        self.targets = [perceptron(algorithm.target, k) for k in range(2)]
        self.actor_adam, self.critic_adam = (
            torch.optim.Adam(parameters, self.c.learning_rate)
            for parameters in (self.actor.parameters(), [p for q in self.critics for p in q.parameters()])
        )

    @staticmethod
    def value(q: nn.Module, obs: torch.Tensor, unit_actions: torch.Tensor) -> torch.Tensor:
        return q(torch.cat([obs, unit_actions], 1))[:, 0]

    def descend(self, adam: torch.optim.Adam, loss: torch.Tensor) -> None:
        adam.zero_grad()
        loss.backward()
        if self.c.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(adam.param_groups[0]["params"], self.c.max_grad_norm)
        adam.step()

    def fit_critics(self, batch: TransitionBatch, targets: torch.Tensor) -> None:
        weights = 1.0 if batch.weights is None else batch.weights
        losses = [
            (weights * 0.5 * (self.value(q, batch.obs, unit(batch.actions)) - targets) ** 2).mean()
            for q in self.critics
        ]
        self.descend(self.critic_adam, losses[0] + losses[1])

    def follow(self, target: nn.Module, online: nn.Module) -> None:
        with torch.no_grad():
            for theirs, ours in zip(target.parameters(), online.parameters(), strict=True):
                theirs.copy_((1 - self.c.tau) * theirs + self.c.tau * ours)

    def compare(self, algorithm) -> None:
        """Check that the networks agree: differences are at most 1e-5 of the largest entry of each tensor."""
        pairs = [(algorithm.policy.net, self.actor)]
        for k in range(2):
            pairs += [(perceptron(algorithm.critics, k), self.critics[k])]
            pairs += [(perceptron(algorithm.target, k), self.targets[k])]
        for ours, theirs in pairs:
            agree(ours, theirs)


class TwinDelayed(Textbook):
    """The common part of TD3 and TD3+BC (Fujimoto et al. 2018, algorithm 1): critics and smoothed targets."""

    def __init__(self, algorithm):
        super().__init__(algorithm)
        self.target_actor = copy.deepcopy(algorithm.target_policy.net)

    def fit_to_smoothed(self, batch: TransitionBatch, noise: torch.Tensor) -> None:
        with torch.no_grad():
            smoothing = (self.c.target_noise * noise).clamp(-self.c.noise_clip, self.c.noise_clip)
            actions = (self.target_actor(batch.next_obs).tanh() + smoothing).clamp(-1, 1)
            smaller = torch.min(*(self.value(q, batch.next_obs, actions) for q in self.targets))
            targets = batch.rewards + batch.discounts * smaller
        self.fit_critics(batch, targets)


def agree(ours: nn.Module, theirs: nn.Module, most: float | None = None) -> None:
    if most is None:  # without FMA, rounding alone reaches 1.001e-5 after eight updates
        most = 1e-5 if CPU_LEVEL > 2 else 2e-5
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert (a - b).abs().max() <= most * b.abs().max(), name


def shaken(algorithm):
    """`algorithm` with target networks that differ from the online ones."""
    rng = torch.Generator().manual_seed(1)
    targets = [algorithm.target, *([algorithm.target_policy] if hasattr(algorithm, "target_policy") else [])]
    with torch.no_grad():
        for p in (p for target in targets for p in target.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=rng)
    return algorithm

"""CQL's own mathematics: known values of the penalty, the update against the paper's, the learned weight."""

import math

import numpy as np
import pytest
import textbook
import torch
from scipy import integrate
from torch import nn

from rlox.algorithms import CQL
from rlox.kernels.rng import Rng
from rlox.nn.value_losses import conservative_penalty


def test_the_penalty_is_zero_if_all_actions_have_the_same_value():
    constant = torch.tensor([[3.0, -7.0], [0.5, 100.0]])  # two critics, two states
    values = constant[:, None].expand(2, 6, 2)
    assert conservative_penalty(values, torch.zeros(6, 2), constant).item() == 0.0
    # On average it is 0 for actions of any density too: exp(-log ratio) has mean 1 over the policy's own actions.
    n = 200_000
    policy = textbook.on_levers(CQL).policy
    with torch.no_grad():
        _, log_probs = policy.unit_sample(torch.randn(2, 3), torch.randn(n, 2, 2))
    log_ratios = log_probs + 2 * math.log(2)
    found = conservative_penalty(constant[:, None].expand(2, n, 2), log_ratios, constant)
    assert found.item() == pytest.approx(0.0, abs=0.02)


def test_the_penalty_is_the_soft_maximum_minus_the_value_of_the_data():
    """One dimension, Q(a) = 3a - a^2: log of half the integral of exp Q, for any distribution of the actions."""
    expected = math.log(0.5 * integrate.quad(lambda a: math.exp(3 * a - a * a), -1, 1)[0]) - 0.25
    rng = np.random.default_rng(0)
    n = 400_000
    uniform = rng.uniform(-1, 1, n)
    x = rng.normal(0.4, 0.7, n)
    squashed = np.tanh(x)
    density = np.exp(-0.5 * ((x - 0.4) / 0.7) ** 2) / (0.7 * math.sqrt(2 * math.pi)) / (1 - squashed**2)
    for actions, log_ratios in ((uniform, np.zeros(n)), (squashed, np.log(2 * density))):
        values = torch.tensor(3 * actions - actions**2)[None, :, None]
        found = conservative_penalty(values, torch.tensor(log_ratios)[:, None], torch.tensor([[0.25]]))
        assert found.item() == pytest.approx(expected, abs=0.01)


class Paper(textbook.Textbook):
    """Kumar et al. 2020, eq. 4 and appendix F, on Haarnoja et al. 2018; critic by critic, action by action."""

    def __init__(self, cql):
        super().__init__(cql)
        if self.c.activation == "tanh":
            self.critics, self.targets = (
                [nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in q)) for q in nets]
                for nets in (self.critics, self.targets)
            )
        self.log_alpha = cql.log_alpha.detach().clone().requires_grad_()
        self.log_weight = cql.log_cql_alpha.detach().clone().requires_grad_()
        self.alpha_adam, self.weight_adam = (
            torch.optim.Adam([p], self.c.learning_rate) for p in (self.log_alpha, self.log_weight)
        )
        self.rng = Rng(0)

    def sample(self, obs, noise):
        mean, log_std = self.actor(obs).chunk(2, -1)
        law = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        x = mean + law.stddev * noise
        return x.tanh(), (law.log_prob(x) - torch.log(1 - x.tanh() ** 2)).sum(-1)

    def update(self, batch):
        c, data, n = self.c, textbook.unit(batch.actions), self.c.n_random_actions
        noise = torch.from_numpy(self.rng.normal((2 + n, len(batch), 2)))
        uniform = 2 * torch.from_numpy(self.rng.uniform((n, len(batch), 2))) - 1
        weight, alpha = self.log_weight.exp().item(), self.log_alpha.exp().item()
        with torch.no_grad():
            next_action, _ = self.sample(batch.next_obs, noise[1])
            smaller = torch.min(*(self.value(q, batch.next_obs, next_action) for q in self.targets))
            targets = batch.rewards + batch.discounts * smaller
            proposals = [(a, torch.full((len(batch),), -2 * math.log(2))) for a in uniform]
            proposals += [self.sample(batch.obs, e) for e in noise[2:]]
        losses, penalties = [], []
        for q in self.critics:
            seen = self.value(q, batch.obs, data)
            # log of half the integral in each of two dimensions
            terms = torch.stack([(self.value(q, batch.obs, a) - log_p).exp() / 4 for a, log_p in proposals])
            penalties.append((terms.mean(0).log() - seen).mean())
            losses.append(((seen - targets) ** 2).mean() + weight * penalties[-1])
        self.descend(self.critic_adam, sum(losses) / 2)
        action, log_prob = self.sample(batch.obs, noise[0])
        values = torch.min(*(self.value(q, batch.obs, action) for q in self.critics))
        self.descend(self.actor_adam, (alpha * log_prob - values).mean())
        if c.auto_entropy:
            self.descend(self.alpha_adam, -(self.log_alpha * (log_prob.detach().mean() - 2.0)))
        if c.auto_alpha:
            excess = (sum(penalties) / 2).detach() - c.cql_target_value
            self.descend(self.weight_adam, -self.log_weight.exp() * excess)
        for target, q in zip(self.targets, self.critics, strict=True):
            self.follow(target, q)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"auto_alpha": True, "cql_target_value": 0.5},
        {"cql_alpha": 0.0, "auto_entropy": False},
        # So many that the critics process the states in several parts of unequal size.
        {"n_random_actions": 30, "activation": "tanh", "hidden": None, "hidden_sizes": [20, 24, 16]},
    ],
)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_updates_equal_the_papers(settings, backend):
    settings = {"n_random_actions": 3, **settings}
    cql = textbook.on_levers(CQL, tau=0.01, learning_rate=1e-3, backend=backend, **settings)
    update = cql.update_native if backend == "native" else cql.update
    paper = Paper(textbook.shaken(cql))
    for i in range(8):
        batch = textbook.transitions(16 + 4 * i, seed=i)  # batches may have different sizes
        paper.rng.set_state(cql.rng.get_state())
        paper.update(batch)
        metrics = update(batch)
        cql.counters.updates += 1  # as in the training loop
        paper.compare(cql)
        torch.testing.assert_close(cql.log_alpha, paper.log_alpha, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(cql.log_cql_alpha, paper.log_weight, rtol=1e-4, atol=1e-6)
    assert math.isfinite(metrics["cql_penalty"])


@pytest.mark.parametrize(("target", "grows"), [(-50.0, True), (50.0, False)])
def test_the_learned_weight_rises_while_the_penalty_is_above_its_target(target, grows):
    cql = textbook.on_levers(CQL, auto_alpha=True, cql_target_value=target, learning_rate=1e-2)
    metrics = cql.train(60)
    assert (metrics["cql_alpha"] > 5.0) is grows


@pytest.mark.slow
def test_the_penalty_keeps_values_of_other_actions_below_those_of_the_data():
    """With rewards of 0 and one action in the data, SAC values all actions equally; CQL values that action higher."""
    differences = []
    for cql_alpha in (0.0, 5.0):
        cql = textbook.on_levers(CQL, cql_alpha=cql_alpha, learning_rate=1e-3, backend="torch")
        for i in range(150):
            batch = textbook.transitions(seed=i)
            batch.actions[:] = torch.tensor([1.0, 0.25])
            batch.rewards.zero_()
            cql.update(batch)
        obs = torch.randn(200, 3)
        other = cql.critics(obs, 2 * torch.rand(200, 2) - 1)
        differences.append((cql.critics(obs, torch.tensor([[0.5, -0.5]]).expand(200, 2)) - other).mean().item())
    assert abs(differences[0]) < 0.2
    assert differences[1] > 1.0

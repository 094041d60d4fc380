"""IQL's own mathematics: expectiles, the update against the paper's, and the effect of the temperature."""

import copy
import math

import numpy as np
import pytest
import textbook
import torch
from scipy import integrate, optimize, stats

from rlox.algorithms import IQL
from rlox.nn.value_losses import expectile_loss


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("law", [stats.norm(1.0, 2.0), stats.expon(scale=3.0), stats.uniform(-1, 4)])
def test_expectile_regression_recovers_the_expectile_of_a_known_distribution(law, tau):
    """The expectile e solves tau E[(X - e)+] = (1 - tau) E[(e - X)+]; minimising the loss finds it."""

    def imbalance(e):
        above = integrate.quad(lambda x: (x - e) * law.pdf(x), e, law.ppf(1 - 1e-12))[0]
        below = integrate.quad(lambda x: (e - x) * law.pdf(x), law.ppf(1e-12), e)[0]
        return tau * above - (1 - tau) * below

    expected = optimize.brentq(imbalance, law.ppf(1e-6), law.ppf(1 - 1e-6))
    points = torch.tensor(law.ppf((np.arange(200_000) + 0.5) / 200_000))  # quantiles, not samples
    estimate = torch.zeros((), dtype=torch.float64, requires_grad=True)
    lbfgs = torch.optim.LBFGS([estimate], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        lbfgs.zero_grad()
        loss = expectile_loss(points - estimate, tau)
        loss.backward()
        return loss

    lbfgs.step(closure)
    assert estimate.item() == pytest.approx(expected, abs=2e-3)


def test_v_starts_as_pytorchs_layers_do():
    """Uniform weights and biases within 1/sqrt(fan_in), as for the critics; PPO's are orthogonal and larger."""
    iql = textbook.on_levers(IQL)
    layers = [layer for layer in iql.value if isinstance(layer, torch.nn.Linear)]
    assert [layer.in_features for layer in layers] == [3, 32, 32]
    for layer in layers:
        values = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
        assert values.abs().max() <= layer.in_features**-0.5
        assert layer.bias.abs().min() > 0


class Paper(textbook.Textbook):
    """Kostrikov et al. 2021, eq. 5 to 7; all three use V before the update."""

    def __init__(self, iql):
        super().__init__(iql)
        self.v = copy.deepcopy(iql.value)
        self.log_std = iql.policy.log_std.detach().clone().requires_grad_()
        rate = self.c.learning_rate
        self.v_adam = torch.optim.Adam(self.v.parameters(), rate)
        self.actor_adam = torch.optim.Adam([*self.actor.parameters(), self.log_std], rate)

    def update(self, batch, share):
        c, actions = self.c, textbook.unit(batch.actions)
        with torch.no_grad():
            targets = batch.rewards + batch.discounts * self.v(batch.next_obs)[:, 0]
            q = torch.min(*(self.value(net, batch.obs, actions) for net in self.targets))
            weights = (c.temperature * (q - self.v(batch.obs)[:, 0])).exp().clamp(max=c.max_weight)
        u = q - self.v(batch.obs)[:, 0]
        self.descend(self.v_adam, ((c.expectile - (u < 0).float()).abs() * u**2).mean())
        self.fit_critics(batch, targets)
        law = torch.distributions.Normal(self.actor(batch.obs).tanh(), self.log_std.exp())
        self.actor_adam.param_groups[0]["lr"] = c.learning_rate * share
        self.descend(self.actor_adam, -(weights * law.log_prob(actions).sum(-1)).mean())
        for target, net in zip(self.targets, self.critics, strict=True):
            self.follow(target, net)


@pytest.mark.parametrize("settings", [{}, {"expectile": 0.9, "temperature": 10.0, "max_weight": 3.0}])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_updates_equal_the_papers(settings, schedule, backend):
    iql = textbook.on_levers(IQL, tau=0.01, learning_rate=1e-3, policy_schedule=schedule, backend=backend, **settings)
    update = iql.update_native if backend == "native" else iql.update
    paper = Paper(textbook.shaken(iql))
    iql.counters.plan("", "n_updates", 12, None, None)
    for i in range(12):
        batch = textbook.transitions(seed=i)
        paper.update(batch, 0.5 * (1 + math.cos(math.pi * i / 12)) if schedule == "cosine" else 1.0)
        update(batch)
        iql.counters.updates += 1  # as in the training loop
        paper.compare(iql)
        textbook.agree(iql.value, paper.v)
        torch.testing.assert_close(iql.policy.log_std, paper.log_std, rtol=1e-5, atol=1e-7)


def test_log_probabilities_are_of_a_gaussian_around_the_bounded_mean():
    policy = textbook.on_levers(IQL).policy
    policy.log_std.data = torch.tensor([0.3, -0.8])
    obs, actions = torch.randn(50, 3), 2 * torch.rand(50, 2) - 1
    expected = stats.norm(policy.unit_mode(obs).detach(), np.exp([0.3, -0.8])).logpdf(actions).sum(1)
    np.testing.assert_allclose(policy.log_prob(obs, actions).detach(), expected, rtol=1e-4)
    policy.log_std.data = torch.tensor([-50.0, -50.0])  # log_std is clipped to its bounds
    assert torch.isfinite(policy.log_prob(obs, actions)).all()


def test_the_policys_learning_rate_is_reported_if_it_differs():
    found = IQL(None, 3, 1, policy_schedule="constant", learning_rate=1e-3).schedule_values(0.5)
    assert found == {"learning_rate": 1e-3}
    found = IQL(None, 3, 1, policy_schedule="cosine", learning_rate=1e-3).schedule_values(0.5)
    assert found == {"learning_rate": 1e-3, "policy_learning_rate": pytest.approx(5e-4)}

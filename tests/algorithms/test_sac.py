"""SAC's own mathematics: the squashed Gaussian, the update against the paper's, and the temperature."""

import numpy as np
import probes
import pytest
import textbook
import torch
from torch import nn

from rlox.algorithms import SAC
from rlox.algorithms.trainers import SACTrainer
from rlox.kernels.rng import Rng
from rlox.nn.actors import SquashedGaussianPolicy

SMALL = {"hidden_sizes": [32, 32], "buffer_size": 2_000, "batch_size": 32, "learning_starts": 20}


class Fixed(nn.Module):
    """A network for a policy with the same output for every observation."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = nn.Parameter(torch.tensor(outputs))

    def forward(self, obs):
        return self.outputs.expand(len(obs), -1)


def test_log_probability_of_the_squashed_gaussian():
    """Against the change of variables in float64, and as a density that integrates to 1."""
    policy = SquashedGaussianPolicy(3, 2, 16, rng=Rng(0))
    obs, noise = 3 * torch.randn(256, 3), torch.randn(256, 2)
    mean, log_std = policy(obs).double().chunk(2, -1)
    actions, log_probs = policy.unit_sample(obs, noise)
    x = mean + log_std.exp() * noise
    normal = torch.distributions.Normal(mean, log_std.exp()).log_prob(x)
    torch.testing.assert_close(actions, x.tanh().float())
    torch.testing.assert_close(log_probs, (normal - (1 - x.tanh() ** 2).log()).sum(-1).float(), rtol=1e-4, atol=1e-4)

    one = SquashedGaussianPolicy(3, 1, net=Fixed(0.4, -0.5))
    noise = torch.linspace(-8, 8, 20_001)[:, None]
    actions, log_probs = one.unit_sample(torch.zeros(20_001, 3), noise)
    assert torch.trapezoid(log_probs.double().exp(), actions[:, 0].double()).item() == pytest.approx(1, abs=1e-3)


def test_log_probability_is_finite_where_tanh_is_one():
    policy = SquashedGaussianPolicy(3, 1, net=Fixed(30.0, 5.0))
    actions, log_probs = policy.unit_sample(torch.zeros(2, 3), torch.tensor([[1.0], [-1.0]]))
    assert actions.tolist() == [[1.0], [1.0]]
    # log_std is clipped to 2: x = 30 +- e^2, and log(1 - tanh(x)^2) = 2 log 2 - 2x.
    x = 30 + np.exp(2.0) * np.array([1, -1])
    np.testing.assert_allclose(
        log_probs.detach(), -0.5 - 2 - 0.5 * np.log(2 * np.pi) - 2 * np.log(2) + 2 * x, rtol=1e-5
    )
    (gradient,) = torch.autograd.grad(log_probs.sum(), policy.net.outputs)
    assert gradient.tolist() == [4.0, 0.0]


def test_policy_by_itself_samples_differentiably():
    torch.manual_seed(0)
    policy = SquashedGaussianPolicy(3, 1, hidden=16)
    actions, log_probs = policy.sample(torch.zeros(5, 3))
    assert (actions.shape, log_probs.shape) == ((5, 1), (5,))
    assert (actions.abs() < 1).all()
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad((actions.sum() + log_probs.sum()), policy.net[-1].weight))
    torch.manual_seed(1)
    other = policy.sample(torch.zeros(5, 3))[0]
    torch.manual_seed(1)
    assert torch.equal(policy.sample(torch.zeros(5, 3))[0], other)
    assert not torch.equal(actions, other)


class Paper(textbook.Textbook):
    """Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1, with the gradient of log(alpha)."""

    def __init__(self, sac):
        super().__init__(sac)
        self.log_alpha = sac.log_alpha.detach().clone().requires_grad_(self.c.auto_entropy)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], self.c.learning_rate) if self.c.auto_entropy else None

    def sample(self, obs, noise):
        mean, log_std = self.actor(obs)[:, :2], self.actor(obs)[:, 2:].clamp(-20, 2)
        x = mean + log_std.exp() * noise
        jacobian = (1 - x.double().tanh() ** 2).log().float()
        return x.tanh(), (torch.distributions.Normal(mean, log_std.exp()).log_prob(x) - jacobian).sum(1)

    def update(self, batch, noise, next_noise):
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            actions, log_probs = self.sample(batch.next_obs, next_noise)
            smaller = torch.min(*(self.value(q, batch.next_obs, actions) for q in self.targets))
            targets = batch.rewards + batch.discounts * (smaller - alpha * log_probs)
        self.fit_critics(batch, targets)
        actions, log_probs = self.sample(batch.obs, noise)
        smaller = torch.min(*(self.value(q, batch.obs, actions) for q in self.critics))
        self.descend(self.actor_adam, (alpha * log_probs - smaller).mean())
        if self.c.auto_entropy:
            self.alpha_adam.zero_grad()
            (-self.log_alpha * (log_probs.detach() - 2.0)).mean().backward()  # target entropy: -2 for two components
            self.alpha_adam.step()
        for target, q in zip(self.targets, self.critics, strict=True):
            self.follow(target, q)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_updates_equal_the_papers(backend, auto, weighted):
    clip = {"max_grad_norm": 1e-6} if weighted else {}  # so small that the effect of Adam's epsilon is visible
    temperature = {"ent_coef": 0.3, "auto_entropy": auto}
    sac = SAC(probes.Levers, seed=0, backend=backend, learning_rate=1e-3, tau=0.01, **temperature, **clip, **SMALL)
    update = sac.update_native if backend == "native" else sac.update
    paper = Paper(textbook.shaken(sac))
    for i in range(20):
        batch = textbook.transitions(seed=i, weighted=weighted)
        paper.update(batch, *textbook.coming_noise(sac, 2, 32))
        metrics = update(batch)
        paper.compare(sac)
        assert sac.log_alpha.item() == pytest.approx(paper.log_alpha.item(), rel=1e-5)
    assert (float(metrics["alpha"]) == pytest.approx(0.3)) is not auto


@pytest.mark.slow
def test_temperature_brings_the_entropy_to_its_target():
    def entropy(**settings):
        sac = SAC(
            probes.ReachTheTarget, n_envs=8, seed=0, train_freq=8, learning_rate=3e-3, gamma=0.9, **settings, **SMALL
        )
        return sac.train(8_000)["entropy"], sac.log_alpha.exp().item()

    assert entropy(target_entropy=-1.0, ent_coef=0.01)[0] == pytest.approx(-1.0, abs=0.25)
    assert entropy(target_entropy=-2.0, ent_coef=0.01)[0] == pytest.approx(-2.0, abs=0.25)
    free, alpha = entropy(auto_entropy=False)
    assert alpha == 1.0
    assert free > 0  # at a temperature of 1 entropy dominates; a uniform action has log 2


def test_invalid_temperatures_are_errors():
    with pytest.raises(ValueError, match="ent_coef must be > 0 if auto_entropy is true, got 0"):
        SAC("Pendulum-v1", ent_coef=0.0)
    assert SAC("Pendulum-v1", ent_coef=0.0, auto_entropy=False, **SMALL).train(50)["alpha"] == 0
    with pytest.raises(ValueError, match="ent_coef must be >= 0"):
        SAC("Pendulum-v1", ent_coef=-1.0, auto_entropy=False)


def test_a_fixed_temperature_can_be_learned_after_loading(tmp_path):
    sac = SAC("Pendulum-v1", seed=0, auto_entropy=False, ent_coef=0.2, **SMALL)
    sac.train(50)
    sac.save(tmp_path / "a.safetensors")
    again = SAC.from_checkpoint(tmp_path / "a.safetensors", auto_entropy=True)
    assert again.log_alpha.exp().item() == pytest.approx(0.2)
    again.train(50)
    assert again.log_alpha.exp().item() != pytest.approx(0.2, rel=1e-4)


def test_trainer_is_sac():
    trainer = SACTrainer(env="Pendulum-v1", seed=3, prioritized=True, **SMALL)
    assert np.isfinite(trainer.train(total_timesteps=200)["q_loss"])
    assert trainer.predict(np.zeros(3)).shape == (1,)
    assert trainer.algorithm._memory.config.name == "prioritized"


def test_target_entropy_is_one_nat_per_component_or_what_is_given():
    assert SAC("Pendulum-v1", **SMALL)._target_entropy == -1.0
    assert SAC("Pendulum-v1", target_entropy=-3.0, **SMALL)._target_entropy == -3.0

"""TD3's own mathematics: the update against the paper's, delay, smoothing and exploration."""

import copy

import numpy as np
import probes
import pytest
import textbook
import torch

from rlox.algorithms import TD3
from rlox.algorithms.trainers import TD3Trainer
from rlox.nn.actors import DeterministicPolicy
from rlox.nn.critics.heads import MeanHead

mean_loss = MeanHead.loss
SMALL = {"hidden_sizes": [32, 32], "buffer_size": 2_000, "batch_size": 32, "learning_starts": 20}


class Paper(textbook.TwinDelayed):
    """Fujimoto et al. 2018, algorithm 1."""

    def update(self, batch, noise, number):
        self.fit_to_smoothed(batch, noise)
        if number % self.c.policy_delay == 0:
            self.descend(self.actor_adam, -self.value(self.critics[0], batch.obs, self.actor(batch.obs).tanh()).mean())
            for target, q in zip(self.targets, self.critics, strict=True):
                self.follow(target, q)
            self.follow(self.target_actor, self.actor)

    def compare(self, td3):
        super().compare(td3)
        textbook.agree(td3.target_policy.net, self.target_actor)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("delay", [1, 3])
def test_updates_equal_the_papers(backend, delay, weighted):
    clip = {"max_grad_norm": 1e-6} if weighted else {}  # so small that the effect of Adam's epsilon is visible
    settings = {"policy_delay": delay, "target_noise": 0.4, "tau": 0.01, "learning_rate": 1e-3}
    td3 = TD3(probes.Levers, seed=0, backend=backend, **settings, **clip, **SMALL)
    update = td3.update_native if backend == "native" else td3.update
    paper = Paper(textbook.shaken(td3))
    for i in range(20):
        batch = textbook.transitions(seed=i, weighted=weighted)
        paper.update(batch, textbook.coming_noise(td3, 32), i + 1)
        update(batch)
        td3.counters.updates += 1  # as in the training loop
        paper.compare(td3)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_policy_and_targets_wait_for_the_critics(backend):
    td3 = TD3(probes.Levers, seed=0, backend=backend, policy_delay=3, **SMALL)
    update = td3.update_native if backend == "native" else td3.update
    moved = []
    for i in range(6):
        before = [copy.deepcopy(m.state_dict()) for m in (td3.critics, td3.policy, td3.target, td3.target_policy)]
        metrics = update(textbook.transitions(seed=i))
        td3.counters.updates += 1
        after = [m.state_dict() for m in (td3.critics, td3.policy, td3.target, td3.target_policy)]
        moved.append([not all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(before, after, strict=True)])
        assert ("policy_loss" in metrics) is (i % 3 == 2)
    assert moved == [[True, False, False, False]] * 2 + [[True] * 4] + [[True, False, False, False]] * 2 + [[True] * 4]


def test_delayed_metrics_are_means_over_the_delayed_updates():
    td3 = TD3(probes.Levers, seed=0, backend="torch", policy_delay=4, train_freq=10, gradient_steps=10, **SMALL)
    reported = []
    update = td3.update

    def watched(batch):
        reported.append(update(batch))
        return reported[-1]

    td3.update = watched
    metrics = td3.train(100)
    last = reported[-10:]
    own = [row["policy_loss"] for row in last if "policy_loss" in row]
    assert len(own) in (2, 3)
    assert metrics["policy_loss"] == pytest.approx(torch.stack(own).mean().item())
    assert metrics["q_loss"] == pytest.approx(torch.stack([row["q_loss"] for row in last]).mean().item())


def test_target_smoothing_evens_out_a_narrow_peak(monkeypatch):
    """With target critics that have a ridge at the target policy's action, noise makes the value smaller."""

    def target_value(**settings):
        td3 = TD3(probes.Levers, seed=0, backend="torch", gamma=1.0, **settings, **SMALL)
        batch = textbook.transitions(512)
        batch.rewards.zero_()
        batch.discounts.fill_(1.0)
        peak = td3.target_policy.unit_mode(batch.next_obs)

        def ridge(obs, actions, chosen):
            return torch.exp(-(((actions - peak) / 0.05) ** 2).sum(-1)).expand(2, -1)

        td3.target.forward = ridge
        seen = []

        def loss(head, outputs, targets, weights):
            seen.append(targets)
            return mean_loss(head, outputs, targets, weights)

        monkeypatch.setattr(MeanHead, "loss", loss)
        td3.update(batch)
        return seen[0].mean().item()

    assert target_value(target_noise=0.0) == pytest.approx(1.0)
    assert target_value(target_noise=0.2) < 0.2
    assert target_value(target_noise=0.2, noise_clip=0.01) > 0.9


def test_exploration_noise_has_its_size_and_is_not_used_in_evaluation():
    policy = DeterministicPolicy(3, 2, 16, low=[-2.0, 0.0], high=[2.0, 1.0])
    policy.noise_std = 0.1
    obs, noise = torch.zeros(20_000, 3), torch.randn(20_000, 2)
    with torch.no_grad():
        for p in policy.net[-1].parameters():
            p.zero_()
        spread = policy.act(obs, noise) - policy.mode(obs)
    torch.testing.assert_close(spread.std(0), torch.tensor([0.2, 0.05]), rtol=0.03, atol=0)
    policy.noise_std = 50.0
    actions = policy.act(obs, noise)
    assert torch.equal(actions.min(0).values, torch.tensor([-2.0, 0.0]))
    assert torch.equal(actions.max(0).values, torch.tensor([2.0, 1.0]))

    td3 = TD3(probes.Levers, seed=0, exploration_noise=0.5, **SMALL)
    assert td3.policy.noise_std == 0.5
    assert np.array_equal(td3.predict(np.ones(3), deterministic=False), td3.predict(np.ones(3)))


def test_trainer_is_td3():
    trainer = TD3Trainer(env="Pendulum-v1", seed=3, prioritized=True, **SMALL)
    assert np.isfinite(trainer.train(total_timesteps=200)["q_loss"])
    assert trainer.predict(np.zeros(3)).shape == (1,)
    assert trainer.algorithm._memory.config.name == "prioritized"

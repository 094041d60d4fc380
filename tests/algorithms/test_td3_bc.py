"""TD3+BC's own mathematics: the update against the paper's, and the effect of alpha."""

import pytest
import textbook
import torch

import rlox
from rlox.algorithms import TD3BC
from rlox.nn.value_losses import regularised_policy_loss


class Paper(textbook.TwinDelayed):
    """Fujimoto and Gu 2021, eq. 3 to 5, on algorithm 1 of Fujimoto et al. 2018."""

    def update(self, batch, noise, number):
        self.fit_to_smoothed(batch, noise)
        if number % self.c.policy_delay == 0:
            actions = self.actor(batch.obs).tanh()
            values = self.value(self.critics[0], batch.obs, actions)
            weight = self.c.alpha / values.abs().mean().item()
            self.descend(
                self.actor_adam, -weight * values.mean() + ((actions - textbook.unit(batch.actions)) ** 2).mean()
            )
            for target, q in zip(self.targets, self.critics, strict=True):
                self.follow(target, q)
            self.follow(self.target_actor, self.actor)


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.5, "policy_delay": 3, "max_grad_norm": 0.5, "target_noise": 0.4}])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_updates_equal_the_papers(settings, backend):
    algorithm = textbook.on_levers(TD3BC, tau=0.01, learning_rate=1e-3, backend=backend, **settings)
    update = algorithm.update_native if backend == "native" else algorithm.update
    paper = Paper(textbook.shaken(algorithm))
    for i in range(12):
        batch = textbook.transitions(seed=i)
        paper.update(batch, textbook.coming_noise(algorithm, 32), i + 1)
        metrics = update(batch)
        assert {"policy_loss", "bc_loss"} <= metrics.keys() or (i + 1) % algorithm.config.policy_delay
        algorithm.counters.updates += 1  # as in the training loop
        paper.compare(algorithm)
        textbook.agree(algorithm.target_policy.net, paper.target_actor)


def test_alpha_0_is_cloning():
    algorithm = textbook.on_levers(TD3BC, policy_delay=1, alpha=0.0, backend="torch")
    clone = textbook.on_levers(rlox.BC, backend="torch")
    for i in range(30):
        batch = textbook.transitions(seed=i)
        algorithm.update(batch)
        clone.update(batch)
    textbook.agree(algorithm.policy.net, clone.policy.net)


def test_the_weight_of_values_does_not_depend_on_their_scale():
    """With ten times larger values, the step of the policy is the same."""

    def grads(scale):
        algorithm = textbook.on_levers(TD3BC, backend="torch")
        for layer in (algorithm.critics.weights[-1], algorithm.critics.biases[-1]):
            layer.data.mul_(scale)
        batch = textbook.transitions()
        loss, _ = regularised_policy_loss(
            algorithm.policy, algorithm.critics, batch.obs, textbook.unit(batch.actions), 2.5
        )
        return torch.autograd.grad(loss, algorithm.optimizer.parameters)

    for one, ten in zip(grads(1.0), grads(10.0), strict=True):
        torch.testing.assert_close(one, ten, rtol=1e-4, atol=1e-7)


def test_both_backends_are_the_same_training():
    """Metrics agree up to float rounding, with batches of more rows than the kernel processes at a time."""
    native, by_torch = (
        textbook.on_levers(TD3BC, normalize_obs=True, backend=name, batch_size=700) for name in ("native", "torch")
    )
    assert native.backend_reason == "perceptrons on the CPU, computed as the PyTorch update defines them"
    ours, theirs = native.train(40), by_torch.train(40)
    textbook.agree(native.policy, by_torch.policy, 1e-3)
    same = [name for name in theirs if not name.startswith("time/")]
    assert {k: ours[k] for k in same} == pytest.approx({k: theirs[k] for k in same}, rel=1e-3, abs=1e-4)

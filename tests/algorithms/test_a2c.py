"""A2C's own mathematics and a pinned trajectory."""

import numpy as np
import torch

from rlox.algorithms import A2C
from rlox.algorithms.trainers import A2CTrainer
from rlox.kernels.rng import Rng
from rlox.nn.losses import policy_gradient
from rlox.nn.policies import DiscretePolicy


def test_update_is_one_step_of_rmsprop_on_the_textbook_loss():
    a2c = A2C("CartPole-v1", n_envs=4, seed=0, n_steps=20, ent_coef=0.02, vf_coef=0.4)
    policy = DiscretePolicy(4, 2, rng=Rng(9))
    policy.load_state_dict({key: value.clone() for key, value in a2c.policy.state_dict().items()})
    batch = a2c.collector.collect(a2c.policy, 20)
    rmsprop = torch.optim.RMSprop(policy.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
    dist = torch.distributions.Categorical(logits=policy.actor(batch.obs))
    loss = -(dist.log_prob(batch.actions) * batch.advantages).mean()
    loss = loss + 0.4 * torch.nn.functional.mse_loss(policy.critic(batch.obs).squeeze(-1), batch.returns)
    (loss - 0.02 * dist.entropy().mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    rmsprop.step()
    metrics = a2c.update(batch)
    torch.testing.assert_close(metrics["grad_norm"], norm)
    for ours, theirs in zip(a2c.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_policy_gradient_does_not_differentiate_the_advantages():
    log_probs, advantages = torch.zeros(3, requires_grad=True), torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    policy_gradient(log_probs, advantages).backward()
    np.testing.assert_allclose(log_probs.grad, [-1 / 3, 2 / 3, -1])
    assert advantages.grad is None


def test_lambda_one_makes_n_step_returns():
    a2c = A2C("CartPole-v1", n_envs=2, seed=0)
    batch = a2c.collector.collect(a2c.policy, 5)
    assert a2c.config.gae_lambda == 1.0
    assert len(batch.episode_returns) == 0
    with torch.no_grad():
        last = a2c.policy.get_value(torch.from_numpy(a2c.collector.env.observe())).numpy()
    for t in range(5):
        expected = sum(0.99**k for k in range(5 - t)) + 0.99 ** (5 - t) * last
        np.testing.assert_allclose(batch.returns.view(5, 2)[t], expected, rtol=1e-5)


def test_trainer_is_the_algorithm():
    trainer = A2CTrainer(env="CartPole-v1", seed=3, n_envs=4)
    assert trainer.train(400)["value_loss"] == A2C("CartPole-v1", seed=3, n_envs=4).train(400)["value_loss"]

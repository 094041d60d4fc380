"""Policies, networks and losses against PyTorch's distributions and NumPy."""

import math
import os
from pathlib import Path

import forked
import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import rlox
from rlox import RolloutCollector
from rlox.algorithms import PPO
from rlox.kernels.rng import Rng
from rlox.nn.actors import DeterministicPolicy, QPolicy, SquashedGaussianPolicy, TanhMeanPolicy
from rlox.nn.losses import PPOLoss, ppo_clip, value_loss
from rlox.nn.optimizers import FlatOptimizer
from rlox.nn.policies import ContinuousPolicy, DiscretePolicy, MultiDiscretePolicy, mlp, policy_outputs


def _scaled(policy, factor=50.0):
    """The initial head is nearly uniform; scale it so that probabilities differ."""
    with torch.no_grad():
        policy.actor[-1].weight.mul_(factor)
    return policy


def test_discrete_policy_matches_categorical():
    policy, obs = _scaled(DiscretePolicy(4, 3)), torch.randn(64, 4)
    dist = torch.distributions.Categorical(logits=policy.actor(obs))
    actions = dist.sample()
    log_prob, entropy = policy.get_logprob_and_entropy(obs, actions)
    torch.testing.assert_close(log_prob, dist.log_prob(actions))
    torch.testing.assert_close(entropy, dist.entropy())
    assert torch.equal(policy.mode(obs), dist.probs.argmax(-1))
    assert policy.get_value(obs).shape == (64,)


def test_gumbel_sampling_has_the_softmax_frequencies():
    policy, n = _scaled(DiscretePolicy(4, 3), 100.0), 200_000
    obs = torch.randn(1, 4).expand(n, 4)
    noise = np.empty((n, 3), np.float32)
    policy.fill_noise(Rng(0, 2), noise)
    counts = torch.bincount(policy.act(obs, torch.from_numpy(noise)), minlength=3).numpy() / n
    expected = policy.actor(obs[:1]).softmax(-1)[0].detach().numpy()
    # Six standard errors of a binomial proportion.
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()
    assert expected.max() < 0.99


def test_continuous_policy_matches_normal():
    policy, obs = ContinuousPolicy(3, 2, log_std_init=-0.7), torch.randn(64, 3)
    dist = torch.distributions.Normal(policy.actor(obs), policy.log_std.exp().expand(64, 2))
    actions = dist.sample()
    log_prob, entropy = policy.get_logprob_and_entropy(obs, actions)
    torch.testing.assert_close(log_prob, dist.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, dist.entropy().sum(-1))
    noise = torch.randn(64, 2)
    torch.testing.assert_close(policy.act(obs, noise), policy.mode(obs) + math.exp(-0.7) * noise)


@pytest.mark.parametrize("kind", ["discrete", "multi-discrete", "continuous"])
def test_log_probabilities_of_sampled_actions_have_a_gradient(kind):
    """As in REINFORCE: act, then differentiate the log-probabilities that `get_action_and_logprob` returned."""
    torch.manual_seed(0)
    policy = {
        "discrete": lambda: DiscretePolicy(4, 3),
        "multi-discrete": lambda: MultiDiscretePolicy(4, [2, 3]),
        "continuous": lambda: ContinuousPolicy(4, 2),
    }[kind]()
    obs, weights = torch.randn(16, 4), torch.randn(16)
    actions, log_probs = policy.get_action_and_logprob(obs)
    assert not actions.requires_grad
    parameters = [p for name, p in policy.named_parameters() if not name.startswith("critic")]
    got = torch.autograd.grad((log_probs * weights).sum(), parameters)
    expected = torch.autograd.grad((policy.get_logprob_and_entropy(obs, actions)[0] * weights).sum(), parameters)
    for one, other in zip(got, expected, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other)
    assert policy.get_value(obs).requires_grad
    with torch.no_grad():
        assert not policy.get_action_and_logprob(obs)[1].requires_grad


def test_bounded_policies_sample_differentiably():
    obs = torch.randn(8, 3)
    for cls in (SquashedGaussianPolicy, DeterministicPolicy, TanhMeanPolicy):
        policy = cls(3, 2, hidden=8)
        sampled = policy.sample(obs)
        actions, *log_probs = sampled if isinstance(sampled, tuple) else (sampled,)
        for value in (actions, policy.mode(obs), *log_probs):
            grads = torch.autograd.grad(value.sum(), list(policy.net.parameters()), retain_graph=True)
            assert sum(g.abs().sum() for g in grads) > 0
    q = torch.nn.Linear(3, 2)
    assert QPolicy(q, 2)(obs).requires_grad


def test_collecting_builds_no_graph():
    for policy, env_id in ((DiscretePolicy(4, 2), "CartPole-v1"), (ContinuousPolicy(3, 1), "Pendulum-v1")):
        batch = RolloutCollector(env_id, n_envs=2, seed=0).collect(policy, 4)
        assert not any(getattr(batch, name).requires_grad for name in ("actions", "log_probs", "values", "advantages"))


def test_initial_weights_come_from_the_given_generator_alone():
    before = torch.get_rng_state()
    first, second = DiscretePolicy(4, 2, rng=Rng(7, 1)), DiscretePolicy(4, 2, rng=Rng(7, 1))
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(3)
    third = DiscretePolicy(4, 2)
    torch.manual_seed(3)
    fourth = DiscretePolicy(4, 2)
    assert torch.equal(third.actor[0].weight, fourth.actor[0].weight)
    assert not torch.equal(first.actor[0].weight, third.actor[0].weight)


def test_orthogonal_initialisation():
    net = mlp([4, 64, 64, 2], out_gain=0.01, rng=Rng(0))
    w = net[2].weight.detach()
    torch.testing.assert_close(w @ w.T, 2.0 * torch.eye(64), rtol=1e-4, atol=1e-4)
    head = net[4].weight.detach()
    torch.testing.assert_close(head @ head.T, 1e-4 * torch.eye(2), rtol=1e-4, atol=1e-8)
    tall = net[0].weight.detach()
    torch.testing.assert_close(tall.T @ tall, 2.0 * torch.eye(4), rtol=1e-4, atol=1e-4)
    uniform = mlp([100, 64, 1], orthogonal=False, rng=Rng(0))[0].weight
    assert 0.09 < uniform.abs().max() <= 0.1
    with pytest.raises(ValueError, match="did you mean 'relu'"):
        mlp([2, 2], activation="rellu")


def test_ppo_clip_against_a_numpy_oracle():
    rng = np.random.default_rng(0)
    new, old, adv = rng.normal(size=(3, 500))
    new = old + 0.3 * (new - old)
    loss, metrics = ppo_clip(*map(torch.from_numpy, (new, old, adv)), 0.2)
    ratio = np.exp(new - old)
    np.testing.assert_allclose(loss, -np.minimum(ratio * adv, np.clip(ratio, 0.8, 1.2) * adv).mean())
    np.testing.assert_allclose(metrics["clip_fraction"], (np.abs(ratio - 1) > 0.2).mean(), atol=1e-6)
    np.testing.assert_allclose(metrics["approx_kl"], (ratio - 1 - np.log(ratio)).mean())


def test_ppo_clip_has_no_gradient_beyond_the_clip():
    log_prob = torch.tensor([math.log(1.5), math.log(1.5), math.log(0.5)], requires_grad=True)
    loss, _ = ppo_clip(log_prob, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), 0.2)
    loss.backward()
    # Only the ratio of 1.5 with a negative advantage, which must decrease, still has a gradient.
    torch.testing.assert_close(log_prob.grad, torch.tensor([0.0, 0.5, 0.0]))


def test_value_loss_has_no_half_and_clips():
    v, r, old = torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0])
    assert value_loss(v, r, old) == pytest.approx((1 + 9) / 2)
    assert value_loss(v, r, old, clip_vf=0.5) == pytest.approx((1 + 0.25) / 2)


@pytest.mark.slow
def test_the_kind_of_value_clipping_is_documented_where_it_is_set():
    """Stable-Baselines3's, which uses the clipped value alone; PPO2 takes the larger of the two losses."""
    shown = forked.run("show", "algo=ppo", env={**os.environ, "COLUMNS": "300"})
    (line,) = (line for line in shown.stdout.splitlines() if "algo.clip_vf" in line)
    for text in (line, value_loss.__doc__, PPOLoss.__doc__):
        assert "Stable-Baselines3" in text
    assert "not PPO2's maximum" in (Path(__file__).parents[1] / "docs" / "algorithms" / "ppo.md").read_text()
    values, returns, old = torch.tensor([5.0], requires_grad=True), torch.tensor([2.0]), torch.tensor([1.0])
    loss = value_loss(values, returns, old, clip_vf=0.5)
    loss.backward()
    assert (loss.item(), values.grad.item()) == (0.25, 0.0)


def test_ppo_loss_combines_its_parts():
    policy, obs = DiscretePolicy(4, 2), torch.randn(32, 4)
    actions, old_log_probs = policy.get_action_and_logprob(obs)
    adv, ret, values = torch.randn(32), torch.randn(32), torch.randn(32)
    loss, m = PPOLoss(0.2, vf_coef=0.7, ent_coef=0.03)(policy, obs, actions, old_log_probs, adv, ret, values)
    torch.testing.assert_close(loss.detach(), m["policy_loss"] + 0.7 * m["value_loss"] - 0.03 * m["entropy"])
    assert set(m) == {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"}
    assert np.isfinite(m["policy_loss"])
    assert m["approx_kl"].abs() < 1e-6


@pytest.mark.parametrize("max_norm", [0.5, None])
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_flat_optimizer_equals_torch_with_clipping(kind, max_norm):
    torch.manual_seed(0)
    ours, theirs = mlp([4, 16, 1], rng=Rng(1)), mlp([4, 16, 1], rng=Rng(1))
    flat = FlatOptimizer(ours.parameters(), 1e-2, kind=kind)
    cls = torch.optim.Adam if kind == "adam" else torch.optim.RMSprop
    reference = cls(theirs.parameters(), lr=1e-2, eps=1e-5)
    for _ in range(20):
        x = torch.randn(8, 4)
        norm = flat.step(ours(x).square().mean() * 10, max_norm)
        reference.zero_grad()
        (theirs(x).square().mean() * 10).backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
        reference.step()
        # The two sum in different orders, and float32 rounding accumulates over the steps.
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    fresh = FlatOptimizer(mlp([4, 16, 1]).parameters(), 1e-2, kind=kind)
    fresh.set_state(flat.state())
    for name, value in flat.state().items():
        np.testing.assert_array_equal(fresh.state()[name], value)
    other = FlatOptimizer(mlp([4, 16, 1]).parameters(), 1e-2, kind="adam" if kind == "rmsprop" else "rmsprop")
    with pytest.raises(ValueError, match="state must hold"):
        other.set_state(flat.state())


def test_flat_optimizer_leaves_frozen_parameters_alone():
    net = mlp([4, 8, 1], rng=Rng(1))
    net[0].weight.requires_grad_(False)
    frozen, moving = net[0].weight.clone(), net[2].weight.clone()
    FlatOptimizer(net.parameters(), 1e-2).step(net(torch.randn(8, 4)).square().mean(), 1.0)
    assert torch.equal(net[0].weight, frozen)
    assert not torch.equal(net[2].weight, moving)
    with pytest.raises(ValueError, match="at least one"):
        FlatOptimizer([], 1e-2)


@pytest.mark.parametrize("flushed", [False, True])
def test_flat_optimizer_flushes_denormals_and_restores_the_users_setting(flushed):
    """Without a gradient the first moment shrinks by a tenth per step; as a denormal it would never become 0."""
    smallest = torch.tensor(1e-45)
    torch.set_flush_denormal(flushed)
    try:
        net = mlp([4, 8, 1], rng=Rng(1))
        flat = FlatOptimizer(net.parameters(), 1e-2)
        for scale in (1e-30, *[0.0] * 200):
            flat.step(net(torch.ones(8, 4)).sum() * scale, None)
            assert bool(smallest * 1 > 0) is not flushed
        assert not flat.state()["exp_avg"].any()
    finally:
        torch.set_flush_denormal(False)


def test_multi_discrete_policy_is_a_product_of_categoricals():
    policy, obs = _scaled(MultiDiscretePolicy(4, [2, 3, 5])), torch.randn(64, 4)
    actions, log_probs = policy.get_action_and_logprob(obs)
    assert actions.shape == (64, 3)
    assert (actions.amax(0) < torch.tensor([2, 3, 5])).all()
    parts = [torch.distributions.Categorical(logits=part) for part in policy.actor(obs).split([2, 3, 5], -1)]
    torch.testing.assert_close(log_probs, sum(d.log_prob(actions[:, k]) for k, d in enumerate(parts)).detach())
    _, entropy = policy.get_logprob_and_entropy(obs, actions)
    torch.testing.assert_close(entropy, sum(d.entropy() for d in parts))
    assert torch.equal(policy.mode(obs), torch.stack([d.probs.argmax(-1) for d in parts], -1))


def test_images_go_through_one_body_for_both_heads():
    policy = DiscretePolicy((4, 84, 84), 6, hidden=(), rng=Rng(0))
    # The network of Mnih et al. 2015 has 1,684,128 weights before its head (4 input frames).
    assert sum(p.numel() for p in policy.body.parameters()) == 1_684_128
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    actions, log_probs = policy.get_action_and_logprob(obs)
    together = policy_outputs(policy, obs, actions)
    torch.testing.assert_close(together[0].detach(), log_probs)
    torch.testing.assert_close(together[2], policy.get_value(obs))
    assert policy.get_value(obs).std() > 0


@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 7, 7), (4, 10, 10), (1, 20, 84), (3, 35, 36)])
def test_small_images_have_a_network_whose_every_pixel_counts(shape):
    policy = DiscretePolicy(shape, 3, hidden=(), rng=Rng(0))
    obs = torch.rand((2, *shape), requires_grad=True)
    policy.body(obs).sum().backward()
    assert policy.body(obs).shape == (2, 512)
    assert (obs.grad != 0).flatten(1).double().mean() > 0.9


@pytest.mark.slow
def test_agents_learn_from_small_images():
    class Side(gym.Env):
        """Shows a bright pixel on one side of 5 x 6 pixels: that side is the right action."""

        observation_space, action_space = gym.spaces.Box(0, 255, (5, 6, 1), np.uint8), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.side = int(self.np_random.integers(2))
            image = np.zeros((5, 6, 1), np.uint8)
            image[2, 5 * self.side] = 255
            return image, {}

        def step(self, action):
            side = self.side
            return self.reset()[0], float(action == side), True, False, {}

    for algorithm in (
        rlox.PPO(Side, n_envs=4, n_steps=32, hidden_sizes=[], learning_rate=1e-3, seed=0),
        rlox.DQN(Side, n_envs=4, learning_starts=64, batch_size=32, hidden_sizes=[], seed=0),
    ):
        algorithm.train(1024)
        assert algorithm.evaluate(20, 0).summary()["mean_return"] == 1.0


def test_training_leaves_out_the_checks_of_distributions_and_puts_them_back(monkeypatch):
    checked = []

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.pi, self.v = nn.Linear(4, 2), nn.Linear(4, 1)

        def get_action_and_logprob(self, obs):
            d = torch.distributions.Categorical(logits=self.pi(obs))
            checked.append(d._validate_args)
            action = d.sample()
            return action, d.log_prob(action)

        def get_value(self, obs):
            return self.v(obs).squeeze(-1)

        def get_logprob_and_entropy(self, obs, actions):
            d = torch.distributions.Categorical(logits=self.pi(obs))
            return d.log_prob(actions), d.entropy()

    # Importing PyTorch's compiler, as another test may have done, leaves them out for good.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    ppo = PPO("CartPole-v1", n_envs=2, n_steps=4, policy=Own())
    ppo.train(8)
    assert checked == [False] * 4
    with pytest.raises(ValueError, match="total_timesteps"):
        ppo.train(0)
    assert torch.distributions.Distribution._validate_args is True
    with torch.no_grad():
        ppo.policy.pi.weight.fill_(torch.nan)
    with pytest.raises((FloatingPointError, RuntimeError)):
        ppo.train(8)
    assert torch.distributions.Distribution._validate_args is True

"""Every loss against the formula of its paper in NumPy, on a few numbers; gradients where a sign error would show only
there."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from rlox import losses
from rlox.collectors.rollout import RolloutBatch
from rlox.envs import EnvSpec
from rlox.nn.batch import TransitionBatch

RNG = np.random.default_rng(7)
B, A = 6, 2
OBS = RNG.normal(size=(B, 3)).astype(np.float32)
UNIT = RNG.uniform(-0.9, 0.9, (B, A)).astype(np.float32)


def t(array, **kwargs):
    return torch.tensor(np.asarray(array, np.float32), **kwargs)


def numbers(metrics):
    return {name: value.item() for name, value in metrics.items() if value.ndim == 0}


def test_ppo_clip():
    """Ratios 2, 0.5 and 1.1 with eps = 0.2: the smaller of the clipped and the unclipped surrogate, each way."""
    ratios, advantages = np.array([2.0, 2.0, 0.5, 0.5, 1.1]), np.array([1.0, -1.0, 1.0, -1.0, 3.0])
    old = np.array([-1.0, -2.0, -0.5, -0.1, -0.7])
    loss, metrics = losses.ppo_clip(t(np.log(ratios) + old), t(old), t(advantages), 0.2)
    assert loss.item() == pytest.approx(-(1.2 - 2.0 + 0.5 - 0.8 + 3.3) / 5, rel=1e-5)
    kl = np.mean(ratios - 1 - np.log(ratios))
    assert numbers(metrics) == pytest.approx({"approx_kl": kl, "clip_fraction": 4 / 5}, rel=1e-4)


def test_policy_gradient_treats_advantages_as_constants():
    log_probs, advantages = t([-1.0, -2.0], requires_grad=True), t([3.0, -5.0], requires_grad=True)
    loss = losses.policy_gradient(log_probs, advantages)
    assert loss.item() == pytest.approx(-(-3.0 + 10.0) / 2)
    loss.backward()
    assert log_probs.grad.tolist() == [-1.5, 2.5]
    assert advantages.grad is None


def test_normalized():
    values = np.array([1.0, 2.0, 4.0, -3.0])
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(losses.normalized(t(values)), expected, rtol=1e-6)
    assert losses.normalized(t([5.0, 5.0])).tolist() == [0.0, 0.0]
    assert losses.normalized(t([5.0])).tolist() == [5.0]
    # With a deviation of 1e-8, the epsilon halves the result.
    np.testing.assert_allclose(losses.normalized(t([0.0, math.sqrt(2) * 1e-8])), [-(0.5**1.5), 0.5**1.5], rtol=1e-3)
    two = losses.normalized(t([1.0, 3.0]))
    np.testing.assert_allclose(two, [-math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-6)


def test_value_loss_has_no_half_and_clips_the_values_change():
    values, returns, old = [1.0, 2.0, 3.0], [2.0, 0.0, 3.5], [0.0, 2.1, 5.0]
    assert losses.value_loss(t(values), t(returns), t(old)).item() == pytest.approx((1 + 4 + 0.25) / 3)
    # Clipped to at most 0.5 from the old values: 0.5, 2, 4.5.
    clipped = losses.value_loss(t(values), t(returns), t(old), 0.5).item()
    assert clipped == pytest.approx((1.5**2 + 2.0**2 + 1.0**2) / 3)


class Given(nn.Module):
    """A policy whose outputs are parameters."""

    def __init__(self):
        super().__init__()
        self.log_probs = nn.Parameter(t([-1.0, -2.0, -0.5]))
        self.entropy = nn.Parameter(t([0.3, 0.6, 0.9]))
        self.values = nn.Parameter(t([1.0, 0.0, 2.0]))

    def get_value(self, obs):
        return self.values

    def get_logprob_and_entropy(self, obs, actions):
        return self.log_probs, self.entropy

    def get_action_and_logprob(self, obs):
        raise NotImplementedError


@pytest.mark.parametrize("kind", ["a2c", "ppo"])
def test_the_parts_of_an_actor_critics_loss(kind):
    policy, advantages, returns, old_values = Given(), t([1.0, -2.0, 3.0]), t([2.0, 2.0, 2.0]), t([0.0, 0.0, 0.0])
    obs, actions = t(OBS[:3]), torch.zeros(3, dtype=torch.int64)
    if kind == "a2c":
        loss, metrics = losses.a2c_loss(policy, obs, actions, advantages, returns, old_values, 0.5, 0.1)
        policy_loss = -(-1.0 + 4.0 - 1.5) / 3
        more = {}
    else:
        # With the old probabilities, every ratio is 1.
        given = (policy, obs, actions, policy.log_probs.detach().clone(), advantages, returns, old_values)
        loss, metrics = losses.PPOLoss(0.2, 0.5, 0.1)(*given)
        policy_loss = -(1.0 - 2.0 + 3.0) / 3
        more = {"approx_kl": 0.0, "clip_fraction": 0.0}
    expected = {"policy_loss": policy_loss, "value_loss": (1.0 + 4.0 + 0.0) / 3, "entropy": 0.6, **more}
    assert numbers(metrics) == pytest.approx(expected, abs=1e-6)
    assert not any(value.requires_grad for value in metrics.values())
    assert loss.item() == pytest.approx(policy_loss + 0.5 * 5 / 3 - 0.1 * 0.6, rel=1e-5)
    loss.backward()
    np.testing.assert_allclose(policy.entropy.grad, [-0.1 / 3] * 3, rtol=1e-5)
    np.testing.assert_allclose(policy.values.grad, 0.5 * 2 * np.array([-1.0, -2.0, 0.0]) / 3, rtol=1e-5)
    np.testing.assert_allclose(policy.log_probs.grad, -np.array([1.0, -2.0, 3.0]) / 3, rtol=1e-5)


def test_ppo_loss_clips_values_if_set():
    policy = Given()
    given = (policy, t(OBS[:3]), torch.zeros(3, dtype=torch.int64), policy.log_probs.detach())
    rest = (t([0.0, 0.0, 0.0]), t([2.0, 2.0, 2.0]), t([0.0, 0.0, 0.0]))
    _, metrics = losses.PPOLoss(clip_vf=0.5)(*given, *rest)
    assert metrics["value_loss"].item() == pytest.approx((1.5**2 + 2.0**2 + 1.5**2) / 3)
    # Its defaults are PPO's: a ratio of 2 counts as 1.2.
    given = (*given[:3], given[3] - math.log(2.0))
    loss, metrics = losses.PPOLoss()(*given, t([1.0, 1.0, 1.0]), *rest[1:])
    assert metrics["policy_loss"].item() == pytest.approx(-1.2, rel=1e-5)
    expected = -1.2 + 0.5 * metrics["value_loss"] - 0.01 * metrics["entropy"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


class Table(nn.Module):
    """A table of action values; the first component of the observation selects the row."""

    def __init__(self, rows):
        super().__init__()
        self.rows = nn.Parameter(t(rows))

    def forward(self, obs):
        return self.rows[obs[:, 0].long()]


# The best next action of a row is illegal; one action is left; after a termination, none is.
MASKS = np.array([[True, False, True], [True, True, True], [False, False, False]])


@pytest.mark.parametrize("masks", [None, MASKS, MASKS[[1, 0, 1]], np.eye(3, dtype=bool), np.ones((3, 3), bool)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["huber", "mse"])
@pytest.mark.parametrize("double", [False, True])
def test_q_loss(double, kind, weighted, masks):
    online = np.array([[1.0, 2.0, 0.0], [0.0, 5.0, 1.0]])
    target = np.array([[3.0, 1.0, 0.5], [7.0, 2.0, 4.0]])
    actions, rewards, discounts = np.array([0, 1, 2]), np.array([0.5, -1.0, 2.0]), np.array([0.9, 0.9, 0.0])
    now, then = np.array([0, 1, 1]), np.array([1, 0, 1])
    chooser = (online if double else target)[then]
    if masks is not None:
        chooser = np.where(masks, chooser, -np.inf)
    ahead = target[then, chooser.argmax(1)]
    errors = online[now, actions] - (rewards + discounts * ahead)
    each = errors**2 if kind == "mse" else np.where(abs(errors) < 1, errors**2 / 2, abs(errors) - 0.5)
    weights = np.array([0.5, 1.0, 0.25]) if weighted else np.ones(3)
    network = Table(online)
    loss, metrics = losses.q_loss(
        *(network, Table(target), t(now[:, None]), torch.tensor(actions), t(rewards), t(then[:, None]), t(discounts)),
        *(t(weights) if weighted else None, double, kind, None if masks is None else torch.tensor(masks)),
    )
    assert loss.item() == pytest.approx((weights * each).mean(), rel=1e-5)
    expected = {"q_loss": (weights * each).mean(), "q_value": online[now, actions].mean()}
    assert numbers(metrics) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(metrics["td_errors"], abs(errors), rtol=1e-5)
    loss.backward()
    slope = 2 * errors if kind == "mse" else np.clip(errors, -1, 1)
    grads = np.zeros_like(online)
    np.add.at(grads, (now, actions), weights * slope / 3)
    np.testing.assert_allclose(network.rows.grad, grads, rtol=1e-4, atol=1e-6)


class Critics(nn.Module):
    """Two critics, linear in observation and action."""

    def __init__(self, seed=0):
        super().__init__()
        self.w = nn.Parameter(t(np.random.default_rng(seed).normal(size=(2, 3 + A))))

    def forward(self, obs, actions):
        return torch.cat([obs, actions], -1).matmul(self.w.T).movedim(-1, 0)

    values = forward

    def first(self, obs, actions):
        return self(obs, actions)[0]

    def of(self, obs, actions):
        return self(t(obs), t(actions)).detach().numpy()


class Actor(nn.Module):
    """Actions in [-1, 1]: tanh of a linear function."""

    def __init__(self, seed=1):
        super().__init__()
        self.w = nn.Parameter(t(np.random.default_rng(seed).normal(size=(3, A))))

    def unit_mode(self, obs):
        return torch.tanh(obs @ self.w)

    def unit_sample(self, obs, noise):
        actions = torch.tanh(obs @ self.w + noise)
        return actions, -noise.square().sum(-1) + self.w.sum()

    def log_prob(self, obs, unit_actions):
        return -(self.unit_mode(obs) - unit_actions).square().sum(-1)

    def of(self, obs):
        return np.tanh(obs @ self.w.detach().numpy())


@pytest.mark.parametrize("weighted", [False, True])
def test_twin_q_loss(weighted):
    critics, targets = Critics(), RNG.normal(size=B)
    weights = RNG.uniform(0.1, 1.0, B) if weighted else np.ones(B)
    loss, metrics = losses.twin_q_loss(critics, t(OBS), t(UNIT), t(targets), t(weights) if weighted else None)
    values = critics.of(OBS, UNIT)
    expected = (weights * (values - targets) ** 2).mean()  # over both critics: half their sum
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert numbers(metrics) == pytest.approx({"q_loss": expected, "q_value": values.mean()}, rel=1e-5)
    np.testing.assert_allclose(metrics["td_errors"], abs(values - targets).mean(0), rtol=1e-5)


def test_smoothed_targets():
    actor, critics, noise = Actor(), Critics(3), RNG.normal(size=(B, A))
    rewards, discounts = RNG.normal(size=B), np.array([0.9, 0.9, 0.0, 0.5, 0.9, 0.9])
    batch = TransitionBatch(t(OBS), t(UNIT), t(rewards), t(OBS[::-1].copy()), t(discounts))
    found = losses.smoothed_targets(actor, critics, batch, t(noise), 0.7, 0.5)
    actions = np.clip(actor.of(OBS[::-1].copy()) + np.clip(0.7 * noise, -0.5, 0.5), -1, 1)
    np.testing.assert_allclose(
        found, rewards + discounts * critics.of(OBS[::-1].copy(), actions).min(0), rtol=1e-4, atol=1e-5
    )
    assert not found.requires_grad
    assert (abs(0.7 * noise) > 0.5).any()
    assert (abs(actions) == 1).any()


def test_soft_policy_loss():
    actor, critics, noise = Actor(), Critics(), RNG.normal(size=(B, A)).astype(np.float32)
    loss, metrics = losses.soft_policy_loss(actor, critics, t(OBS), t(noise), torch.tensor(0.3))
    actions, log_probs = (x.detach().numpy() for x in actor.unit_sample(t(OBS), t(noise)))
    expected = (0.3 * log_probs - critics.of(OBS, actions).min(0)).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert numbers(metrics) == pytest.approx({"policy_loss": expected, "entropy": -log_probs.mean()}, rel=1e-5)
    assert not metrics["entropy"].requires_grad


def test_deterministic_policy_loss_uses_the_first_critic():
    actor, critics = Actor(), Critics()
    loss, metrics = losses.deterministic_policy_loss(actor, critics, t(OBS))
    expected = -critics.of(OBS, actor.of(OBS))[0].mean()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert numbers(metrics) == pytest.approx({"policy_loss": expected}, rel=1e-5)


def test_cloning_and_regularised_policy_losses():
    actor, critics = Actor(), Critics()
    loss, metrics = losses.cloning_loss(actor, t(OBS), t(UNIT))
    distance = ((actor.of(OBS) - UNIT) ** 2).mean()
    assert loss.item() == pytest.approx(distance, rel=1e-5)
    assert numbers(metrics) == pytest.approx({"policy_loss": distance}, rel=1e-5)
    loss, metrics = losses.regularised_policy_loss(actor, critics, t(OBS), t(UNIT), 2.5)
    values = critics.of(OBS, actor.of(OBS))[0]
    expected = distance - 2.5 * values.mean() / abs(values).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert numbers(metrics) == pytest.approx({"policy_loss": expected, "bc_loss": distance}, rel=1e-4)
    # lambda is a constant: the gradient is that of the values, divided by their mean absolute value.
    loss.backward()
    other = Actor()
    lam = 2.5 / abs(values).mean()
    again = nn.functional.mse_loss(other.unit_mode(t(OBS)), t(UNIT))
    (again - lam * critics.first(t(OBS), other.unit_mode(t(OBS))).mean()).backward()
    np.testing.assert_allclose(actor.w.grad, other.w.grad, rtol=1e-4, atol=1e-6)


def test_label_loss():
    logits, labels = np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0], [0.0, 1.0, 0.5]]), np.array([0, 1, 1])
    loss, metrics = losses.label_loss(Table(logits), t([[0.0], [1.0], [2.0]]), torch.tensor(labels))
    expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[[0, 1, 2], labels])
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert numbers(metrics) == pytest.approx({"policy_loss": expected, "accuracy": 2 / 3}, rel=1e-5)


def test_expectile_loss_is_minimal_at_the_expectile():
    errors = np.array([-2.0, -0.5, 0.0, 1.0, 3.0])
    expected = (np.where(errors < 0, 0.3, 0.7) * errors**2).mean()
    assert losses.expectile_loss(t(errors), 0.7).item() == pytest.approx(expected, rel=1e-5)


def test_weighted_cloning_loss_clips_the_weight():
    actor, advantages = Actor(), np.array([-1.0, 0.0, 0.5, 1.0, 2.0, -3.0])
    loss, metrics = losses.weighted_cloning_loss(actor, t(OBS), t(UNIT), t(advantages), 3.0, 10.0)
    weights = np.minimum(np.exp(3.0 * advantages), 10.0)
    expected = (weights * ((actor.of(OBS) - UNIT) ** 2).sum(1)).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert numbers(metrics) == pytest.approx({"policy_loss": expected}, rel=1e-4)


def test_conservative_losses():
    values, ratios = RNG.normal(size=(2, 1 + 4, B)), RNG.normal(size=(4, B))
    targets = RNG.normal(size=B)
    soft = np.log(np.exp(values[:, 1:] - ratios).mean(1))
    penalty = (soft - values[:, 0]).mean()
    found = losses.conservative_penalty(t(values[:, 1:]), t(ratios), t(values[:, 0]))
    assert found.item() == pytest.approx(penalty, rel=1e-4)
    loss, metrics = losses.conservative_q_loss(t(values), t(targets), t(ratios), 5.0)
    errors = values[:, 0] - targets
    parts = {"q_loss": (errors**2).mean(), "q_value": values[:, 0].mean(), "td_error": abs(errors).mean()}
    assert loss.item() == pytest.approx(parts["q_loss"] + 5.0 * penalty, rel=1e-4)
    assert numbers(metrics) == pytest.approx({**parts, "cql_penalty": penalty}, rel=1e-4)
    # If all actions have the same value, the penalty is 0.
    flat, uniform = np.full((2, 4, B), 3.0), np.zeros((4, B))
    assert losses.conservative_penalty(t(flat), t(uniform), t(flat[:, 0])).item() == pytest.approx(0.0, abs=1e-6)


def test_explained_variance():
    returns, values = np.array([1.0, 2.0, 4.0, 7.0]), np.array([1.5, 1.0, 5.0, 6.0])
    ones = np.ones(4, np.float32)
    columns = (ones[:, None], ones, ones, values, ones, returns, ones)
    batch = RolloutBatch(*(np.asarray(column, np.float32) for column in columns))
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert batch.explained_variance().item() == pytest.approx(expected, rel=1e-5)
    assert batch.explained_variance(torch.zeros(4)).item() == 1.0
    batch.returns[:] = 3.0
    assert batch.explained_variance().isnan()


@pytest.mark.parametrize("n_step", [False, True])
def test_only_a_termination_stops_bootstrapping(n_step):
    """A batch of a memory in the learner's shapes: flat rows of a (2, 3) observation, two terminations in four rows."""
    spec = EnvSpec((2, 3), act_dim=2, act_low=-np.ones(2, np.float32), act_high=np.ones(2, np.float32))
    flat = np.arange(24, dtype=np.float32).reshape(4, 6)
    rows = {
        **{"obs": flat, "next_obs": flat + 1, "actions": np.arange(8.0).reshape(4, 2), "rewards": np.arange(4.0)},
        **{"terminated": np.array([0, 1, 0, 1]), "truncated": np.array([1, 1, 0, 0])},
    }
    if n_step:
        rows |= {"discounts": np.array([0.9, 0.81, 0.729, 0.9]), "weights": np.full(4, 0.5), "indices": np.arange(4)}
    batch = TransitionBatch.from_rows(rows, 0.99, spec, "cpu")
    assert len(batch) == 4
    np.testing.assert_array_equal(batch.obs, flat.reshape(4, 2, 3))
    np.testing.assert_array_equal(batch.next_obs, flat.reshape(4, 2, 3) + 1)
    np.testing.assert_array_equal(batch.actions, rows["actions"])
    np.testing.assert_array_equal(batch.rewards, np.arange(4.0))
    np.testing.assert_allclose(batch.discounts, [0.9, 0, 0.729, 0] if n_step else [0.99, 0, 0.99, 0], rtol=1e-6)
    assert {column.dtype for column in (batch.obs, batch.actions, batch.rewards, batch.discounts)} == {torch.float32}
    if n_step:
        assert batch.weights.tolist() == [0.5] * 4
        np.testing.assert_array_equal(batch.indices, np.arange(4))
    else:
        assert batch.weights is batch.indices is None

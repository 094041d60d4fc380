"""SAC with discrete actions: sums over actions against float64, masks of legal ones, exact resume, what it refuses."""

from __future__ import annotations

import copy
import math

import numpy as np
import probes
import pytest
import torch
from board_games import Corridor
from torch import nn

import rlox
from rlox import SAC
from rlox.algorithms import DiscreteSAC
from rlox.collectors import ReplayCollector
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.rng import Rng
from rlox.nn.actors import CategoricalPolicy
from rlox.nn.critics.discrete import ActionCritics, action_critic_loss, expected_policy_loss, log_probabilities
from rlox.nn.policies import DiscretePolicy

SMALL = {"hidden_sizes": [16], "learning_starts": 60, "batch_size": 16, "seed": 3}


class Short(Corridor):
    """A corridor whose episodes the time limit often cuts off."""

    def __init__(self):
        super().__init__(limit=4)


def masks_in(obs):
    """The legal moves (n, 3) in observations (n, 7) of the corridor."""
    cell = obs[:, :6].argmax(1)
    masks = np.stack([np.ones_like(cell), cell < 5, cell < 4], 1).astype(bool)
    masks[(cell == 3) & (obs[:, 6] == 0), 1:] = False
    return masks


# ---- the class


def test_the_environment_decides_the_class():
    sac = SAC("CartPole-v1", **SMALL)
    assert type(sac) is DiscreteSAC
    assert isinstance(sac, SAC)
    assert type(SAC("Pendulum-v1", **SMALL)) is SAC
    assert type(DiscreteSAC("CartPole-v1", **SMALL)) is DiscreteSAC
    assert sac.backend == "torch"
    assert sac.backend_reason == "only PyTorch computes SAC with discrete actions"
    with pytest.raises(ValueError, match="backend must be auto or torch here"):
        SAC("CartPole-v1", backend="native", **SMALL)


def test_other_actions_are_refused():
    class Own(SAC):
        def update(self, batch):
            return super().update(batch)

    with pytest.raises(ValueError, match=r"actions must be continuous, got 2 discrete actions; .*SAC"):
        Own("CartPole-v1", **SMALL)  # a changed update for continuous actions
    with pytest.raises(ValueError, match="actions must be discrete, got 1 action component"):
        DiscreteSAC("Pendulum-v1", **SMALL)
    with pytest.raises(ValueError, match="actions must be continuous or discrete, got 2 components"):
        SAC(probes.TwoSwitches, **SMALL)


def test_a_checkpoint_returns_the_class(tmp_path):
    sac = SAC("CartPole-v1", **SMALL)
    sac.train(200)
    sac.save(tmp_path / "a.safetensors")
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    for again in (rlox.load(tmp_path / "a.safetensors"), SAC.from_checkpoint(tmp_path / "a.safetensors")):
        assert type(again) is DiscreteSAC
        np.testing.assert_array_equal(again.predict(obs), sac.predict(obs))
    other = SAC("CartPole-v1", **{**SMALL, "seed": 4})
    other.init_from(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(other.predict(obs), sac.predict(obs))
    for name, value in other.target.state_dict().items():
        assert torch.equal(value, sac.critics.state_dict()[name])  # a new target starts at the critics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_head": "quantile"}, "critic_head must be mean with discrete actions"),
        ({"critic_head": "categorical"}, "critic_head must be mean with discrete actions"),
        ({"exploration_noise": 0.1}, "exploration_noise must be 0 with discrete actions"),
        ({"entropy_per_action": -0.5}, "entropy_per_action must be left out with discrete actions"),
        ({"entropy_fraction": 1.5}, r"entropy_fraction must be in \[0, 1\]"),
        ({"policy": nn.Linear(4, 3)}, r"policy must return the logits of all actions, \(B, 2\)"),
        ({"policy": CategoricalPolicy(4, 2, net=None, hidden=[])}, None),
        ({"policy": DiscretePolicy(4, 2, 8, memory=("lstm", 4, 1, None)).actor}, "policy must have no memory"),
    ],
)
def test_what_discrete_actions_exclude(settings, message):
    if message is None:
        SAC("CartPole-v1", **{**SMALL, **settings}).train(70)
        return
    with pytest.raises(ValueError, match=message):
        SAC("CartPole-v1", **{**SMALL, **settings})


def test_what_images_exclude():
    for name, value in (("actor_norm", "layer"), ("unit_norm", True)):
        with pytest.raises(ValueError, match=f"{name} must be .* images"):
            SAC(probes.BrightSide, **SMALL, **{name: value})
    with pytest.raises(ValueError, match="entropy_fraction must be left out with continuous actions"):
        SAC("Pendulum-v1", entropy_fraction=0.3, **SMALL)


# ---- the mathematics


def numpy_sums(probs, log_probs, values, alpha):
    """Sum over actions of probability times (value - alpha log probability), (B,) f64."""
    rows = []
    for p, log_p, q in zip(probs, log_probs, values, strict=True):
        rows.append(sum(pi * (qi - alpha * li) for pi, li, qi in zip(p, log_p, q, strict=True) if pi > 0))
    return np.array(rows)


def test_losses_and_their_gradients_in_float64():
    """One layer each, so that the gradients of the logits and values can be written down."""
    rng, alpha, n = np.random.default_rng(0), 0.37, 40
    policy = CategoricalPolicy(3, 4, [], rng=Rng(1))
    critics, target = (ActionCritics(3, 4, [], rng=Rng(seed), n_critics=3) for seed in (2, 3))
    obs, next_obs = rng.normal(size=(2, n, 3))
    actions, rewards = rng.integers(4, size=n), rng.normal(size=n)
    discounts, weights = np.where(rng.random(n) < 0.3, 0.0, 0.9), rng.uniform(0.1, 1, n)
    masks, next_masks = rng.random((2, n, 4)) < 0.6
    masks[np.arange(n), actions] = True
    next_masks[discounts == 0] = False  # an environment's own choice at the end
    next_masks[discounts > 0, 1] = True

    def log_policy(x, legal):
        w, b = (p.detach().double().numpy() for p in policy.net[0].parameters())
        logits = np.where(legal | ~legal.any(1, keepdims=True), x @ w.T + b, -np.inf)
        top = logits.max(1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))

    def values(network, x):
        w, b = (p.detach().double().numpy() for p in network.parameters())
        return x @ w + b

    log_p = log_policy(next_obs, next_masks)
    ahead = values(target, next_obs).min(0)
    expected = rewards + discounts * numpy_sums(np.exp(log_p), log_p, ahead, alpha)
    q = values(critics, obs)
    errors = q[:, np.arange(n), actions] - expected
    d_values = np.zeros_like(q)
    d_values[:, np.arange(n), actions] = 2 * weights * errors / errors.size

    def tensors(*arrays):
        kinds = {"f": torch.float32, "i": torch.int64, "b": torch.bool}
        return [torch.tensor(x, dtype=kinds[x.dtype.kind]) for x in arrays]

    columns = tensors(obs, actions, rewards, next_obs, discounts, weights)
    log_probs = log_probabilities(policy, columns[3], *tensors(next_masks))
    temperature = torch.tensor(alpha)
    loss, metrics = action_critic_loss(critics, target, *columns, log_probs.detach(), temperature)
    assert loss.item() == pytest.approx((weights * errors**2).mean(), rel=1e-5)
    np.testing.assert_allclose(metrics["td_errors"], np.abs(errors).mean(0), rtol=1e-4)
    d_weights, d_biases = torch.autograd.grad(loss, [*critics.parameters()])
    np.testing.assert_allclose(d_weights, obs.T @ d_values, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(d_biases, d_values.sum(1, keepdims=True), rtol=1e-4, atol=1e-6)

    log_p = log_policy(obs, masks)
    p = np.exp(log_p)
    for mean in (False, True):
        value = q.mean(0) if mean else q.min(0)
        objective = numpy_sums(p, log_p, value, alpha)  # what the policy climbs
        gain = np.where(p > 0, value - alpha * np.where(p > 0, log_p, 0), 0)
        d_logits = -p * (gain - objective[:, None]) / n
        loss, metrics = expected_policy_loss(policy, critics, columns[0], *tensors(masks), temperature, mean)
        assert loss.item() == pytest.approx(-objective.mean(), rel=1e-5)
        entropy = -np.where(p > 0, p * np.where(p > 0, log_p, 0), 0).sum(1).mean()
        assert metrics["entropy"].item() == pytest.approx(entropy, rel=1e-5)
        d_weight, d_bias = torch.autograd.grad(loss, [*policy.parameters()])
        np.testing.assert_allclose(d_weight, d_logits.T @ obs, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(d_bias, d_logits.sum(0), rtol=1e-4, atol=1e-6)


class Paper:
    """Christodoulou 2019, algorithm 1, for legal actions: separate networks in float64, with Adam and autograd."""

    def __init__(self, sac):
        c = self.c = sac.config
        self.policy = copy.deepcopy(sac.policy.net).double()
        self.critics, self.targets = ([self.take(net, k) for k in range(2)] for net in (sac.critics, sac.target))
        self.log_alpha = sac.log_alpha.detach().double().requires_grad_()
        self.adams = [
            torch.optim.Adam(parameters, c.learning_rate)
            for parameters in (
                self.policy.parameters(),
                [p for q in self.critics for p in q.parameters()],
                [self.log_alpha],
            )
        ]

    @staticmethod
    def take(ensemble, k):
        layers = []
        for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True):
            layer = nn.Linear(*weight.shape[1:])
            layer.load_state_dict({"weight": weight[k].T, "bias": bias[k, 0]})
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1]).double()

    def choices(self, obs, masks):
        logits = self.policy(obs).masked_fill(~masks, -torch.inf)
        return torch.distributions.Categorical(logits=logits)

    def update(self, obs, actions, rewards, next_obs, discounts, weights, masks, next_masks):
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            ahead = self.choices(next_obs, next_masks)
            smaller = torch.min(*(q(next_obs) for q in self.targets))
            targets = rewards + discounts * ((ahead.probs * smaller).sum(1) + alpha * ahead.entropy())
        taken = [q(obs)[range(len(obs)), actions] for q in self.critics]
        self.descend(1, sum((weights * 0.5 * (q - targets) ** 2).mean() for q in taken))
        now = self.choices(obs, masks)
        smaller = torch.min(*(q(obs).detach() for q in self.critics))
        self.descend(0, -((now.probs * smaller).sum(1) + alpha * now.entropy()).mean())
        wanted = self.c.entropy_fraction * masks.sum(1).double().log()
        self.descend(2, (self.log_alpha * (now.entropy().detach() - wanted)).mean())
        for target, q in zip(self.targets, self.critics, strict=True):
            for theirs, ours in zip(target.parameters(), q.parameters(), strict=True):
                theirs.data.lerp_(ours.data, self.c.tau)

    def descend(self, i, loss):
        self.adams[i].zero_grad()
        loss.backward()
        self.adams[i].step()


@pytest.mark.parametrize("weighted", [False, True])
def test_updates_equal_the_papers(weighted):
    settings = {**SMALL, "learning_rate": 1e-3, "tau": 0.02, "ent_coef": 0.5, "batch_size": 32}
    sac = SAC(Short, n_envs=2, buffer="prioritized" if weighted else "uniform", **settings)
    sac.train(300)
    sac.log_alpha.data.fill_(math.log(0.5))
    for optimizer in (sac.optimizer, sac.critic_optimizer, sac._alpha_optimizer):
        optimizer.set_state({name: np.zeros_like(x) for name, x in optimizer.state().items()})
    paper = Paper(sac)
    for _ in range(20):
        batch = sac.sample()
        columns = [getattr(batch, name) for name in ("obs", "actions", "rewards", "next_obs", "discounts", "weights")]
        columns[-1] = torch.ones(32) if columns[-1] is None else columns[-1]
        columns = [x.double() if x.is_floating_point() else x for x in columns]
        next_masks = batch.next_masks.clone()
        batch.next_masks[batch.discounts == 0] = False  # which must not matter
        paper.update(*columns, batch.masks, next_masks)
        sac.update(batch)
        sac.counters.updates += 1
        assert sac.log_alpha.item() == pytest.approx(paper.log_alpha.item(), rel=1e-5)
    pairs = [(sac.policy.net, paper.policy)]
    for k in range(2):
        pairs += [(paper.take(sac.critics, k), paper.critics[k]), (paper.take(sac.target, k), paper.targets[k])]
    for ours, theirs in pairs:
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (a - b).abs().max() <= 2e-5 * b.abs().max()


def test_the_entropy_wanted_is_a_part_of_the_largest():
    assert SAC("CartPole-v1", **SMALL)._target_entropy == pytest.approx(0.5 * math.log(2))
    assert SAC("CartPole-v1", entropy_fraction=0.3, **SMALL)._target_entropy == pytest.approx(0.3 * math.log(2))
    masks = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    sac = SAC(Short, entropy_fraction=0.5, **SMALL)
    assert float(sac._find_target_entropy(masks)) == pytest.approx(0.5 * (math.log(2) + math.log(3)) / 3)
    assert SAC(Short, target_entropy=0.3, **SMALL)._find_target_entropy(masks) == 0.3


@pytest.mark.slow
def test_temperature_brings_the_entropy_to_its_target():
    for fraction in (0.3, 0.8):
        sac = SAC(Corridor, n_envs=8, train_freq=8, learning_rate=3e-3, entropy_fraction=fraction, **SMALL)
        sac.train(8_000)
        batch = sac.sample()
        with torch.no_grad():
            log_probs = log_probabilities(sac.policy, batch.obs, batch.masks)
        entropy = -(log_probs.exp() * log_probs).sum(1).mean()
        assert entropy.item() == pytest.approx(float(sac._find_target_entropy(batch.masks)), abs=0.2)


def test_delayed_policies_and_chosen_critics_compose():
    norms = ("none", "layer", "batch", "batch_renorm")
    for i, norm in enumerate(norms):
        settings = {"critic_norm": norm, "actor_norm": norms[-1 - i], "n_critics": 3, "target_network": i % 2 == 0}
        settings |= {"dropout": 0.1, "policy_delay": 2, "unit_norm": i == 2, "policy_value": ("min", "mean")[i % 2]}
        settings |= {"n_target_critics": None if norm == "batch" else 2, "renorm_warmup": 10}
        sac = SAC("CartPole-v1", n_step=3, learning_rate_schedule="cosine", weight_decay=0.01, **settings, **SMALL)
        before = copy.deepcopy(sac.policy.state_dict())
        assert math.isfinite(sac.train(120)["q_loss"])
        assert any(not torch.equal(x, before[name]) for name, x in sac.policy.state_dict().items())


# ---- masks


class Recorder:
    """A memory that keeps what it receives."""

    def __init__(self):
        self.columns = []

    def push_batch(self, *columns, next_masks):
        self.columns.append([np.array(column) for column in (*columns, next_masks)])


BUFFERS = {
    "uniform": {"name": "uniform"},
    "n-step": {"name": "prioritized", "n_step": 3},
    "mmap": {"name": "mmap", "hot_size": 40, "n_step": 2},
}


def test_only_legal_actions_are_taken_and_their_masks_stored():
    collector, memory = ReplayCollector(Short, n_envs=3, seed=0), Recorder()
    collector.stores_masks = True
    policy = CategoricalPolicy(7, 3, 16, rng=Rng(0))
    for t in range(200):
        collector.step(policy, memory, random=t < 100)  # the environment refuses illegal moves
    obs, next_obs, stored, _, terminated, _, next_masks = map(np.concatenate, zip(*memory.columns, strict=True))
    np.testing.assert_array_equal(stored[:, 1:], masks_in(obs))
    np.testing.assert_array_equal(next_masks[~terminated], masks_in(next_obs[~terminated]))
    assert set(stored[masks_in(obs).all(1), 0]) == {0, 1, 2}


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_batch_has_the_masks_of_both_observations(buffer, tmp_path):
    sac = SAC(Short, n_envs=2, buffer={"size": 150, **BUFFERS[buffer]}, **SMALL)
    sac.train(400)
    for _ in range(10):
        batch = sac.sample()
        assert batch.actions.dtype == torch.int64
        assert batch.actions.shape == (16,)
        np.testing.assert_array_equal(batch.masks, masks_in(batch.obs.numpy()))
        assert batch.masks.gather(1, batch.actions[:, None]).all()
        going_on = batch.discounts.numpy() > 0
        np.testing.assert_array_equal(batch.next_masks[going_on], masks_in(batch.next_obs.numpy()[going_on]))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_resumed_run_ends_with_the_same_bits(buffer, tmp_path):
    chosen = {"size": 150, **BUFFERS[buffer]}
    folder = {"folder": str(tmp_path)} if buffer == "mmap" else {}
    settings = {**SMALL, "n_envs": 2, "policy_delay": 2, "dropout": 0.05}
    first, whole = SAC(Short, buffer={**chosen, **folder}, **settings), SAC(Short, buffer=chosen, **settings)
    first.train(300)
    first.save(tmp_path / "a.safetensors", memory=True)
    first.close()
    given = {"buffer": {**chosen, **folder}} if folder else {}
    resumed = SAC.from_checkpoint(tmp_path / "a.safetensors", env_id=Short, **given)
    resumed.train(300)
    whole.train(300)
    whole.train(300)
    assert resumed.log_alpha.item() == whole.log_alpha.item()
    for ours, theirs in ((resumed.policy, whole.policy), (resumed.critics, whole.critics)):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name
    one, other = resumed.buffer.sample(100, 0), whole.buffer.sample(100, 0)
    for name, column in one.items():
        np.testing.assert_array_equal(column, other[name])


def test_memories_that_cannot_hold_both_masks_are_refused():
    with pytest.raises(ValueError, match="buffer must be a name or a configuration with action masks"):
        SAC(Short, buffer=ReplayBuffer(100, 7, 1, mask_dim=3), **SMALL)


@pytest.mark.slow
def test_the_best_walk_through_the_corridor_is_found():
    sac = SAC(Corridor, n_envs=2, learning_rate=3e-3, gamma=0.9, entropy_fraction=0.3, **SMALL)
    sac.train(4000)
    assert sac.evaluate(20).returns.mean() > 26  # 26, 27 or 28, depending on the first cell
    obs = np.eye(7, dtype=np.float32)[[0]]
    assert sac.predict(obs, mask=np.array([[False, True, False]])) == [1]


# ---- a dataset


def record_play(n=60, **columns):
    """`n` transitions of CartPole's kind, numbered by their first observation; every second pushes to the right."""
    rows, zeros = np.arange(n), np.zeros(n, bool)
    obs = np.stack([rows, *np.zeros((3, n))], 1).astype(np.float32)
    return rlox.OfflineDatasetBuffer(obs, obs + 1, rows % 2, np.full(n, 100.0), rows % 10 == 9, zeros, **columns)


def test_a_dataset_is_mixed_into_the_batches():
    sac = SAC("CartPole-v1", dataset=record_play(), dataset_share=0.25, **{**SMALL, "learning_starts": 0})
    update, batches = sac.update, []
    sac.update = lambda batch: batches.append(batch) or update(batch)
    assert math.isfinite(sac.train(100)["q_loss"])
    for batch in batches:
        recorded = batch.rewards == 100
        assert recorded.sum() == 4
        rows = batch.obs[recorded, 0].long()
        assert batch.actions.dtype == torch.int64
        assert torch.equal(batch.actions[recorded], rows % 2)
        assert torch.equal(batch.discounts[recorded] == 0, rows % 10 == 9)
        assert (batch.rewards[~recorded] == 1).all()
    assert len(batches) > 80


def test_datasets_of_other_actions_or_with_masks_are_refused():
    obs, flags = np.zeros((20, 4), np.float32), np.zeros(20, bool)
    for actions, rule in ((np.full(20, 2), "actions below 2.*, got 2"), (np.full((20, 1), 0.5), "actions")):
        data = rlox.OfflineDatasetBuffer(obs, obs, actions, np.zeros(20), flags, flags)
        with pytest.raises(ValueError, match=rule):
            SAC("CartPole-v1", dataset=data, **SMALL)
    with pytest.raises(ValueError, match="dataset must be None with action masks"):
        SAC(Short, dataset=record_play(), **SMALL)


# ---- images, and a single action


def test_images_go_through_a_network_of_each_critic():
    sac = SAC(probes.BrightSide, seed=0, hidden_sizes=[8], learning_starts=20, batch_size=8, buffer_size=200)
    assert len(sac.critics.bodies) == 2
    before = copy.deepcopy(sac.critics.bodies.state_dict())
    sac.train(30)
    assert all(not torch.equal(x, before[name]) for name, x in sac.critics.bodies.state_dict().items())
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 36, 36), dtype=np.uint8)
    assert sac.predict(images).shape == (5,)
    some = torch.from_numpy(images)
    values = sac.critics.action_values(some)
    torch.testing.assert_close(sac.critics.action_values(some, torch.tensor([1])), values[1:])
    first, second = sac.critics.bodies
    assert not torch.equal(first(some / 255.0), second(some / 255.0))


def test_a_single_action_has_values_of_its_own():
    critics = ActionCritics(3, 1, 8, rng=Rng(0))
    assert critics.action_values(torch.zeros(5, 3)).shape == (2, 5, 1)


@pytest.mark.parametrize(
    "option", [{"actor_norm": "layer"}, {"residual_blocks": 1, "hidden_sizes": [8]}, {"unit_norm": True}]
)
def test_a_policy_of_ones_own_refuses_options_of_the_policy_that_it_replaces(option):
    module = nn.Linear(4, 2)
    before = module.weight.detach().clone()
    name, value = next(iter(option.items()))
    with pytest.raises(ValueError, match=f"SAC: policy must be left out with {name}={value}"):
        SAC("CartPole-v1", policy=module, **{**SMALL, **option})
    assert torch.equal(module.weight, before)

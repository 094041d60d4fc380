"""Behavioural cloning's own mathematics."""

import copy
import math

import numpy as np
import pytest
import textbook
import torch

import rlox
from rlox.algorithms import BC

BACKENDS = pytest.mark.parametrize("backend", ["torch", "native"])


def updated(bc, batch):
    metrics = bc.update_native(batch) if bc.backend == "native" else bc.update(batch)
    return {name: float(value) for name, value in metrics.items()}


def adams_step(bc, net, adam, loss):
    """Make the same step with PyTorch's optimiser, and return the norm of the gradient."""
    adam.zero_grad()
    loss.backward()
    limit = math.inf if bc.config.max_grad_norm is None else bc.config.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), limit)
    adam.step()
    return norm.item()


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.05, "activation": "tanh", "hidden_sizes": [20, 40, 7]}])
@BACKENDS
def test_continuous_updates_are_adams_on_the_squared_distance(backend, settings):
    settings = {"hidden_sizes": [32, 32], **settings}
    bc = textbook.on_levers(BC, learning_rate=1e-3, backend=backend, hidden=None, **settings)
    net = copy.deepcopy(bc.policy.net)
    adam = torch.optim.Adam(net.parameters(), 1e-3)
    for i in range(10):
        batch = textbook.transitions(n=300, seed=i)  # more rows than the kernel takes at a time
        loss = ((net(batch.obs).tanh() - textbook.unit(batch.actions)) ** 2).mean()
        norm = adams_step(bc, net, adam, loss)
        assert updated(bc, batch) == pytest.approx({"policy_loss": loss.item(), "grad_norm": norm}, rel=1e-5)
        textbook.agree(bc.policy.net, net)


def labelled(backend, **settings):
    """BC of three actions, and batches to learn from."""
    rng = np.random.default_rng(3)
    obs, never = rng.normal(size=(400, 4)).astype(np.float32), np.zeros(400, bool)
    actions = (obs[:, 0] > 0).astype(int) + (obs[:, 1] > 0.5)
    data = rlox.OfflineDatasetBuffer(obs, obs, actions, np.zeros(400), never, never, n_actions=3)
    return BC(data, 4, 3, continuous=False, hidden=32, learning_rate=1e-3, batch_size=300, backend=backend, **settings)


@BACKENDS
def test_discrete_updates_are_adams_on_the_cross_entropy(backend):
    bc = labelled(backend, max_grad_norm=0.1)
    net = copy.deepcopy(bc.policy.net)
    adam = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(10):
        batch = bc.sample()
        logits = net(batch.obs)
        loss = -logits.log_softmax(1)[torch.arange(300), batch.actions].mean()
        right = (logits.argmax(1) == batch.actions).sum().item() / 300
        norm = adams_step(bc, net, adam, loss)
        expected = {"policy_loss": loss.item(), "grad_norm": norm, "accuracy": right}
        assert updated(bc, batch) == pytest.approx(expected, rel=1e-5)
        textbook.agree(bc.policy.net, net)


def test_auto_is_native_and_continues_from_a_checkpoint(tmp_path):
    whole, half = labelled("auto"), labelled("native")
    assert whole.backend == "native"
    whole.train(20, schedule_timesteps=20)
    half.train(10, schedule_timesteps=20)
    half.save(tmp_path / "half.safetensors")
    rest = BC.from_checkpoint(tmp_path / "half.safetensors", half.dataset)
    assert rest.backend == "native"
    rest.train(10, schedule_timesteps=20)
    textbook.agree(rest.policy, whole.policy, 0.0)


def test_errors_of_the_kernel():
    bc = labelled("native")
    obs, labels = np.zeros((5, 4), np.float32), np.arange(5) % 3
    settings = {"learning_rate": 1e-3}
    with pytest.raises(ValueError, match=r"actions must be in \[0, 3\), got 0 to 3"):
        bc._net.update(obs, np.array([0, 1, 2, 3, 0]), **settings)
    with pytest.raises(TypeError, match="actions must have dtype int64"):
        bc._net.update(obs, labels.astype(np.float32), **settings)
    with pytest.raises(ValueError, match=r"obs must have shape \(5, 4\)"):
        bc._net.update(obs[:, :3], labels, **settings)
    with pytest.raises(ValueError, match="at least one row"):
        bc._net.update(obs[:0], labels[:0], **settings)
    assert np.isnan(bc._net.update(np.full_like(obs, np.nan), labels, **settings)["policy_loss"])


def test_discrete_cloning_learns_the_probabilities_of_the_data():
    """Three actions, drawn with known probabilities in each of two states: log-likelihood and sampling agree."""
    rng = np.random.default_rng(0)
    law = np.array([[0.7, 0.2, 0.1], [0.05, 0.05, 0.9]])
    n = 6000
    state = rng.integers(2, size=n)
    actions = (rng.random(n)[:, None] > law[state].cumsum(1)).sum(1).clip(max=2)
    obs = np.eye(2, dtype=np.float32)[state]
    never = np.zeros(n, bool)
    data = rlox.OfflineDatasetBuffer(obs, obs, actions, np.zeros(n), never, never, n_actions=3)
    bc = BC(dataset=data, obs_dim=2, act_dim=3, continuous=False, hidden=16, learning_rate=3e-3)
    metrics = bc.train(1500)
    with torch.no_grad():
        found = bc.policy(torch.eye(2)).softmax(-1).numpy()
    np.testing.assert_allclose(found, law, atol=0.05)
    entropy = -(law * np.log(law)).sum(1).mean()
    assert metrics["dataset/log_prob"] == pytest.approx(-entropy, abs=0.05)
    drawn = bc.predict(np.repeat(np.eye(2), 3000, 0), deterministic=False).reshape(2, 3000)
    np.testing.assert_allclose([np.bincount(row, minlength=3) / 3000 for row in drawn], found, atol=0.05)
    assert bc.predict(np.eye(2)).tolist() == [0, 2]


def test_discrete_actions_must_be_the_environments():
    obs, never = np.zeros((4, 1), np.float32), np.zeros(4, bool)
    floats = rlox.OfflineDatasetBuffer(obs, obs, np.array([0.0, 1, 0.5, 1]), never, never, never)
    with pytest.raises(ValueError, match="integers in column actions"):
        BC(floats, 1, 2, continuous=False)
    integers = rlox.OfflineDatasetBuffer(obs, obs, np.array([0, 1, 5, 1]), never, never, never)
    with pytest.raises(ValueError, match="actions below 2, like the environment, got 5"):
        BC(integers, 1, 2, continuous=False)

"""Behavioural cloning's own mathematics."""

import copy

import numpy as np
import pytest
import textbook
import torch

import rlox
from rlox.algorithms import BC


def test_continuous_updates_are_adams_on_the_squared_distance():
    bc = textbook.on_levers(BC, learning_rate=1e-3)
    net = copy.deepcopy(bc.policy.net)
    adam = torch.optim.Adam(net.parameters(), 1e-3)
    for i in range(10):
        batch = textbook.transitions(seed=i)
        loss = ((net(batch.obs).tanh() - textbook.unit(batch.actions)) ** 2).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        assert bc.update(batch)["policy_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
        textbook.agree(bc.policy.net, net)


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
    with pytest.raises(ValueError, match="actions below 2, as the environment, got 5"):
        BC(integers, 1, 2, continuous=False)

"""DQN with masks of legal actions: acting, the memory, targets, exact resume, and games that are learned."""

import numpy as np
import pytest
import torch
from board_games import Corridor, TicTacToe
from outside_buffer import NewestBuffer, NewestConfig
from torch import nn

from rlox import DQN
from rlox.buffers import register_buffer, table
from rlox.collectors import ReplayCollector
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.nn.actors import QPolicy

SMALL = {"hidden_sizes": [16], "learning_starts": 60, "batch_size": 16, "target_update_freq": 40, "seed": 3}


class Short(Corridor):
    """A corridor whose episodes the time limit often cuts off."""

    def __init__(self):
        super().__init__(limit=4)


class Recorder:
    """A memory that keeps what it receives."""

    def __init__(self):
        self.columns = []

    def push_batch(self, *columns, next_masks):
        self.columns.append([np.array(column) for column in (*columns, next_masks)])


def masks_in(obs):
    """The legal moves (n, 3) in observations (n, 7) of the corridor."""
    cell = obs[:, :6].argmax(1)
    masks = np.stack([np.ones_like(cell), cell < 5, cell < 4], 1).astype(bool)
    masks[(cell == 3) & (obs[:, 6] == 0), 1:] = False
    return masks


def test_transitions_have_the_mask_of_the_observation_they_led_to():
    collector, memory = ReplayCollector(Short, n_envs=3, seed=0), Recorder()
    policy = QPolicy(nn.Linear(7, 3), 3, epsilon=0.3)
    for t in range(200):
        collector.step(policy, memory, random=t < 100)  # the environment refuses illegal moves
    obs, next_obs, actions, _, terminated, truncated, masks = map(np.concatenate, zip(*memory.columns, strict=True))
    assert terminated.sum() > 20
    assert truncated.sum() > 20
    over = terminated
    np.testing.assert_array_equal(masks[~over], masks_in(next_obs[~over]))
    assert masks[over].all()
    one_left = masks_in(obs).sum(1) == 1
    assert one_left.sum() > 20
    assert (actions[one_left] == 0).all()
    assert set(actions[~one_left].ravel()) == {0, 1, 2}


def test_random_actions_are_uniform_over_the_legal_ones():
    collector, memory = ReplayCollector(Corridor, n_envs=4, seed=0), Recorder()
    for _ in range(2500):
        collector.step(None, memory, random=True)
    obs, _, actions, *_ = map(np.concatenate, zip(*memory.columns, strict=True))
    for n_legal in (2, 3):
        chosen = actions[masks_in(obs).sum(1) == n_legal, 0].astype(int)
        share = np.bincount(chosen, minlength=n_legal) / len(chosen)
        np.testing.assert_allclose(share, 1 / n_legal, atol=4 * 0.5 / np.sqrt(len(chosen)))


def numpy_gradients(weights, target, batch, double, gamma):
    """The gradient of the squared error of a network with one hidden layer of tanh, and the loss, in float64."""
    obs, next_obs, rewards = (np.asarray(batch[name], np.float64) for name in ("obs", "next_obs", "rewards"))
    n, rows, actions = len(rewards), np.arange(len(rewards)), np.asarray(batch["actions"])

    def values(x, parameters):
        hidden = np.tanh(x @ parameters[0].T + parameters[1])
        return hidden, hidden @ parameters[2].T + parameters[3]

    ahead = values(next_obs, target)[1]
    chooser = values(next_obs, weights)[1] if double else ahead
    best = np.where(batch["next_masks"], chooser, -np.inf).argmax(1)
    discounts = gamma * ~batch["terminated"]
    hidden, q = values(obs, weights)
    error = q[rows, actions] - (rewards + discounts * ahead[rows, best])
    d_q = np.zeros_like(q)
    d_q[rows, actions] = 2 * error / n
    d_hidden = d_q @ weights[2] * (1 - hidden**2)
    return [d_hidden.T @ obs, d_hidden.sum(0), d_q.T @ hidden, d_q.sum(0)], (error**2).mean()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_gradient_of_an_awkward_batch(backend, double):
    settings = {**SMALL, "activation": "tanh", "loss": "mse", "max_grad_norm": None, "double_dqn": double}
    dqn = DQN(Short, n_envs=2, backend=backend, **settings)
    dqn.train(300)
    rows = {name: column[:, 0] if name == "actions" else column for name, column in dqn.buffer.sample(64, 1).items()}
    left = rows["next_masks"].sum(1)
    awkward = (left == 1, left == 3, rows["terminated"], rows["truncated"] & (left < 3))
    assert min(kind.sum() for kind in awkward) > 2
    rows["next_masks"][np.flatnonzero(rows["terminated"])[:2]] = False  # an environment's own choice at the end
    rows["actions"] = rows["actions"].astype(np.int64)
    networks = [[p.detach().numpy().astype(np.float64) for p in net.parameters()] for net in (dqn.policy, dqn.target)]
    expected, loss = numpy_gradients(*networks, rows, double, dqn.config.gamma)
    blind, _ = numpy_gradients(*networks, {**rows, "next_masks": np.ones((64, 3), bool)}, double, dqn.config.gamma)
    batch = dqn.sample()
    for name in ("obs", "actions", "rewards", "next_obs", "next_masks"):
        setattr(batch, name, rows[name])
    batch.discounts = (dqn.config.gamma * ~rows["terminated"]).astype(np.float32)
    dqn.counters.env_steps += 1  # not a step at which the target moves
    metrics = (dqn.update_native if backend == "native" else dqn.update)(batch)
    assert float(metrics["q_loss"]) == pytest.approx(loss, rel=1e-5)
    if backend == "native":
        dqn.native.attach_gradients()
    for p, grad, other in zip(dqn.policy.parameters(), expected, blind, strict=True):
        np.testing.assert_allclose(p.grad, grad, rtol=1e-4, atol=1e-6)
        assert np.abs(grad - other).max() > 1e-4  # the masks matter


BUFFERS = {
    "uniform": {"name": "uniform"},
    "n-step": {"name": "prioritized", "n_step": 3},
    "mmap": {"name": "mmap", "hot_size": 40, "n_step": 2},
}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_resumed_run_ends_with_the_same_bits(buffer, backend, tmp_path):
    settings = {**SMALL, "n_envs": 2, "backend": backend}
    chosen = {"size": 150, **BUFFERS[buffer]}
    folder = {"folder": str(tmp_path)} if buffer == "mmap" else {}
    first, whole = DQN(Short, buffer={**chosen, **folder}, **settings), DQN(Short, buffer=chosen, **settings)
    first.train(400)
    first.save(tmp_path / "a.safetensors", memory=True)
    first.close()
    given = {"buffer": {**chosen, **folder}} if folder else {}
    resumed = DQN.from_checkpoint(tmp_path / "a.safetensors", env_id=Short, backend=backend, **given)
    resumed.train(400)
    whole.train(400)
    whole.train(400)
    assert resumed.collector.restore_note() is None
    for name, value in resumed.policy.state_dict().items():
        assert torch.equal(value, whole.policy.state_dict()[name]), name
    one, other = resumed.buffer.sample(100, 0), whole.buffer.sample(100, 0)
    for name, column in one.items():
        np.testing.assert_array_equal(column, other[name])
    assert "next_masks" in one


def test_both_backends_learn_the_same():
    native, pytorch = (DQN(Short, n_envs=2, backend=backend, **SMALL) for backend in ("native", "torch"))
    native.train(400)
    pytorch.train(400)
    for name, value in native.policy.state_dict().items():
        torch.testing.assert_close(value, pytorch.policy.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_a_memory_without_masks_is_refused_before_the_run(monkeypatch):
    with pytest.raises(ValueError, match="buffer must have mask_dim=3, because the environment has masks of 3 actions"):
        DQN(Short, buffer=ReplayBuffer(100, 7, 1))
    with pytest.raises(ValueError, match="buffer must have mask_dim=0, because the environment has no masks"):
        DQN("CartPole-v1", buffer=ReplayBuffer(100, 4, 1, mask_dim=2))
    monkeypatch.setattr("rlox.buffers.table.BUFFERS", dict(table.BUFFERS))
    register_buffer("newest-unmasked", NewestBuffer, NewestConfig)
    with pytest.raises(ValueError, match=r"buffer must have mask_dim=3, .* got newest-unmasked with 0"):
        DQN(Short, buffer="newest-unmasked")
    DQN(Short, buffer=ReplayBuffer(100, 7, 1, mask_dim=3), **{**SMALL, "learning_starts": 20}).train(60)


def test_the_best_walk_through_the_corridor_is_found():
    dqn = DQN(Corridor, n_envs=2, learning_rate=3e-3, exploration_fraction=0.5, gamma=0.9, **SMALL)
    dqn.train(4000)
    assert dqn.evaluate(20).returns.mean() > 26  # 26, 27 or 28, depending on the first cell
    assert "step by step, since the environment" in dqn.backend_reason


def test_the_best_legal_arm_is_taken():
    dqn = DQN("rlox/MaskedBandit-v0", gamma=0.5, learning_rate=3e-3, **SMALL)
    dqn.train(2000)
    # 7.5 is the most; 5 without attention to the mask. The standard deviation of this mean is 0.08.
    assert 7.2 < dqn.evaluate(100).returns.mean() < 7.8


def test_tic_tac_toe_is_won():
    settings = {"hidden_sizes": [64, 64], "learning_starts": 1000, "train_freq": 8, "gradient_steps": 4}
    settings |= {"target_update_freq": 500, "learning_rate": 1e-3, "exploration_fraction": 0.5}
    dqn = DQN(TicTacToe, n_envs=8, seed=0, **settings)
    untrained = dqn.evaluate(200).returns
    dqn.train(15_000)
    results = dqn.evaluate(200).returns
    # Random play wins 44 % of the games.
    assert (untrained == 1).mean() < 0.7
    assert (results == 1).mean() > 0.85
    assert (results == -1).mean() < 0.12

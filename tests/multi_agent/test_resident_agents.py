"""Rollouts and trainings of several agents in environments on a device, with tensors on the CPU."""

import re

import numpy as np
import pytest
import torch

import rlox
from rlox import MAPPO, PPO
from rlox.envs import EnvSpec
from rlox.envs.tensor import TensorAgents, TensorEnv, open_unit, table
from rlox.multi_agent import make_multi_agent_env
from rlox.multi_agent.tensor_rollout import TensorAgentCollector
from rlox.training.algorithm import choose_update, to_floats

ID = "GridPursuit-v0"
SMALL = {"n_envs": 6, "seed": 1, "n_steps": 40, "hidden_sizes": [8], "backend": "torch", "device": "cpu"}
WAYS = [
    {},
    {"share_parameters": False, "critic": "local"},
    {"agent_id": True, "value_norm": True},
    {"share_parameters": False, "value_norm": True},
]


def pair(**settings):
    """The same MAPPO with environments on a device and on the host."""
    return MAPPO(ID, env_backend="tensor", **SMALL, **settings), MAPPO(ID, **SMALL, **settings)


def flat(one):
    return torch.cat([p.detach().reshape(-1) for p in one.policy.parameters()]).numpy().copy()


def of_collector(one):
    return {name: array.tobytes() for name, array in one.collector.state().items()}


@pytest.mark.parametrize("settings", WAYS)
def test_rollouts_are_those_of_the_host(settings):
    """Also where episodes end at the time limit or by a catch, and with moments of returns that are not those of the
    start."""
    ours, theirs = pair(**settings)
    assert isinstance(ours.collector, TensorAgentCollector)
    for one in ours.learners:
        if one.norm is not None:
            moments = np.array([0.3, 4.0, 0.5])
            one.norm.set_state(moments)
            next(other.norm for other in theirs.learners if other.name == one.name).set_state(moments)
    n_ended = 0
    for n_steps in (40, 40, 7):
        batches = [one.collector.collect(one.actor, n_steps) for one in (ours, theirs)]
        for mine, other in zip(batches[0].players, batches[1].players, strict=True):
            columns, expected = mine.columns(), other.columns()
            assert columns.keys() == expected.keys()
            for name, column in columns.items():
                assert (column.shape, column.dtype) == (expected[name].shape, expected[name].dtype), name
                np.testing.assert_allclose(column, expected[name], rtol=0, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(batches[0].episode_returns, batches[1].episode_returns, rtol=1e-12)
        np.testing.assert_array_equal(batches[0].episode_lengths, batches[1].episode_lengths)
        assert batches[0].n_taken == batches[1].n_taken
        n_ended += len(batches[0].episode_lengths)
    assert n_ended >= 6
    assert ours.collector.metrics() == pytest.approx(theirs.collector.metrics())
    assert ours.collector.lines() == theirs.collector.lines()
    assert ours.collector.rng.get_state() == theirs.collector.rng.get_state()


@pytest.mark.parametrize("settings", WAYS[1:3])
def test_an_update_is_the_ordinary_one_given_its_permutation(settings):
    results = []
    for one in pair(**settings, batch_size=60, n_epochs=2):
        one.plan(1000)
        on_device = isinstance(one.collector, TensorAgentCollector)

        def permute(self, n, tensors=on_device):
            order = np.argsort(np.random.default_rng(n).random(n))
            return torch.from_numpy(order) if tensors else order

        one.rng = type("Order", (), {"permutation": permute})()
        batch = one.collector.collect(one.actor, 16)
        results.append((to_floats(choose_update(one)(batch)), flat(one)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-4)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=0, atol=1e-5)


def test_checkpoints_continue_exactly_and_on_the_host(tmp_path):
    whole, _ = pair(**WAYS[3])
    half, _ = pair(**WAYS[3])
    whole.train(480)
    half.train(240, schedule_timesteps=480)
    half.save(tmp_path / "half.safetensors")
    rest = MAPPO.from_checkpoint(tmp_path / "half.safetensors", device="cpu")
    assert isinstance(rest.collector, TensorAgentCollector)
    assert rest.collector.restore_note() is None
    rest.train(until=480)
    np.testing.assert_array_equal(flat(rest), flat(whole))
    assert rest.rng.get_state() == whole.rng.get_state()
    assert of_collector(rest) == of_collector(whole)
    assert rest.evaluate(2).returns.tolist() == whole.evaluate(2).returns.tolist()
    moved = MAPPO.from_checkpoint(tmp_path / "half.safetensors", env_backend="auto", backend="torch")
    assert moved.collector.restore_note() is None
    assert of_collector(moved) == of_collector(half)
    moved.save(tmp_path / "moved.safetensors")
    back = MAPPO.from_checkpoint(tmp_path / "moved.safetensors", env_backend="tensor", device="cpu")
    assert of_collector(back) == of_collector(half)


def test_one_agent_is_ppo():
    settings = {"n_envs": 4, "n_steps": 16, "hidden_sizes": [8], "env_backend": "tensor", "device": "cpu"}
    ours, theirs = MAPPO("CartPole-v1", **settings), PPO("CartPole-v1", **settings)
    batches = [one.collector.collect(one.actor, 16) for one in (ours, theirs)]
    for name, column in batches[1].columns().items():
        assert torch.equal(batches[0].columns()[name], column), name
    normed = MAPPO("CartPole-v1", value_norm=True, **settings)
    assert normed.collector.value_norm is normed.learners[0].norm
    assert np.isfinite(normed.train(256)["value_loss"])


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        (ID, {"memory": "gru"}, "the state of a memory is on the host"),
        (ID, {"share_parameters": False, "self_play": True}, "earlier policies of self_play are on the host"),
        (ID, {"env_workers": 2}, "no env_kwargs, wrappers, workers or remote addresses"),
        (
            "pettingzoo:mpe2.simple_spread_v3",
            {},
            "pettingzoo:mpe2.simple_spread_v3 has no tensor version with several agents; those that have one are "
            "GridPursuit-v0",
        ),
    ],
)
def test_what_cannot_run_on_a_device_is_refused(env, settings, message):
    with pytest.raises(ValueError, match=f"^MAPPO: env_backend must be auto.*{re.escape(message)}"):
        MAPPO(env, env_backend="tensor", **settings)


def test_arguments_of_the_environment_reach_the_device():
    one = MAPPO(ID, env_backend="tensor", env_kwargs={"size": 5, "n_pursuers": 4}, **SMALL)
    assert one.collector.env.env.size == 5
    assert len(one.agents) == 4
    with pytest.raises(ValueError, match="must have keys among size"):
        MAPPO(ID, env_backend="tensor", env_kwargs={"cells": 5}, **SMALL)


class Tug(TensorEnv):
    """Two agents pull at a rope, whose position is uniform in (-1, 1) at first; the nearer to 0 it is, the better."""

    env_id = "Tug-v0"
    agents = TensorAgents(
        ("left", "right"),
        EnvSpec((1,), act_dim=1, act_low=np.full(1, -1, np.float32), act_high=np.ones(1, np.float32)),
    )
    spec = agents.join()
    state_size = 1
    max_episode_steps = 8

    def start(self, words):
        return 2.0 * open_unit(words[:1]) - 1.0

    def step(self, state, actions, words=None):
        left, right = actions.double().clamp(-1.0, 1.0).unbind(1)
        new = state + 0.2 * (right - left)
        return new, -new[0].abs(), new[0].abs() > 3.0

    def observe(self, state):
        return torch.stack([state[0], -state[0]], 1)


@pytest.fixture
def tug():
    yield rlox.register_env(Tug)
    table.REGISTERED_AGENTS.clear()


def test_the_environment_of_a_user(tug):
    """On the device and on the host the rollouts are the same, and both trainings are evaluated."""
    settings = {"n_envs": 4, "n_steps": 24, "hidden_sizes": [8], "seed": 3, "device": "cpu", "backend": "torch"}
    ours, theirs = MAPPO(tug, env_backend="tensor", **settings), MAPPO(tug, **settings)
    assert ours.agents == theirs.agents == ("left", "right")
    assert ours.players[0].state_dim == 2
    batches = [one.collector.collect(one.actor, 24) for one in (ours, theirs)]
    assert len(batches[0].episode_lengths) == 12
    for name, column in batches[1].players[0].columns().items():
        np.testing.assert_allclose(batches[0].players[0].columns()[name], column, rtol=0, atol=1e-5, err_msg=name)
    for one in (ours, theirs):
        one.train(192)
        results = one.evaluate(3)
        assert results.agent_returns.shape == (3, 2)
        assert results.lengths.tolist() == [8, 8, 8]
    with pytest.raises(ValueError, match=r"PPO: env_id must have one agent, got Tug-v0, which has several; use MAPPO"):
        PPO(tug)
    with pytest.raises(ValueError, match="must be new, got 'Tug-v0'"):
        rlox.register_env(type("Other", (Tug,), {}))
    env = make_multi_agent_env(tug, 2, 0)
    assert env.step_all([np.zeros((2, 2, 1), np.float32)]).rewards[0].shape == (2, 2)


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        (TensorAgents(("a", "a"), Tug.agents.spec), "names of agents must be different"),
        (TensorAgents(("a", "b"), Tug.agents.spec, -1), "state_dim of agents must be at least 0, got -1"),
        (TensorAgents(("a", "b", "c"), Tug.agents.spec), r"spec must be agents\.join\(\)"),
        (2, "agents must be None or a TensorAgents, got 2"),
    ],
)
def test_wrong_agents_of_users(agents, message):
    with pytest.raises(ValueError, match=message):
        rlox.register_env(type("Changed", (Tug,), {"env_id": "Changed-v0", "agents": agents}))

"""Compiled and captured updates are those that Python runs, call by call."""

import numpy as np
import pytest
import torch
from device_comparison import CAPTURED, differing, require_close, require_same_with_and_without_graphs, weights
from small_algorithms import ONLINE, make, of_sequences, off_policy

from rlox.nn.compiling import CompiledLoss


def often(names, few):
    """On a real GPU a compilation takes many seconds, so that only `few` run by default."""
    rare = pytest.mark.exhaustive if torch.cuda.is_available() else ()
    return [pytest.param(name, marks=() if name in few else rare) for name in names]


def n_steps(name):
    return 52 if of_sequences(name) else 104 if off_policy(name) else 6 * 64


@pytest.mark.parametrize("name", often(ONLINE, ("ppo",)))
def test_a_compiled_training_equals_one_that_is_not_compiled(name):
    kind = {"precision": "float32"} if of_sequences(name) else {}
    kind |= {"n_epochs": 2, "batch_size": 16} if name == "ppo" else {}
    ours = make(name, device="cuda", compile=True, **kind)
    theirs = make(name, device="cuda", compile=False, **kind)
    require_close(ours.train(n_steps(name)), theirs.train(n_steps(name)), rel=5e-3, abs=5e-4)
    assert ours.counters.updates > 3


def test_metrics_of_a_compiled_loss_are_not_overwritten():
    def loss(x):
        return x.square().mean(), {"mean": x.mean() + 0}

    compiled = CompiledLoss(loss, True)
    results = [compiled(torch.full((4,), float(i), device="cuda", requires_grad=True))[1]["mean"] for i in range(3)]
    assert [x.item() for x in results] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", ["ppo", "a2c", "sac", "sac-discrete", "td3", "dqn"])
def test_many_updates_equal_those_of_the_cpu_under_schedules(name):
    """Long enough for graphs to be captured and replayed, with values that change from update to update."""
    settings = {"learning_rate_schedule": "linear", "learning_rate": 1e-3}
    settings |= {"clip_eps_schedule": "linear", "clip_eps": 0.05} if name == "ppo" else {}
    ours, theirs = make(name, device="cuda", **settings), make(name, device="cpu", backend="torch", **settings)
    n = 10 * 64 if not off_policy(name) else 40 + 12 * 8
    found, expected = ours.train(n, schedule_timesteps=2 * n), theirs.train(n, schedule_timesteps=2 * n)
    assert found["learning_rate"] == expected["learning_rate"] < 1e-3
    require_close(found, expected, rel=2e-2, abs=2e-3)
    for key, array in weights(theirs).items():
        if key.startswith("policy."):
            np.testing.assert_allclose(weights(ours)[key], array, rtol=0, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_replayed_update_equals_the_one_that_python_runs(name, monkeypatch):
    require_same_with_and_without_graphs(name, monkeypatch)


@pytest.mark.parametrize("name", ["ppo", "mappo"])
def test_a_replayed_update_learns_from_rollouts_of_the_host(name, monkeypatch):
    require_same_with_and_without_graphs(name, monkeypatch, env_backend="gymnasium")


@pytest.mark.parametrize("name", ["ppo", "mappo", "sac", "dreamer"])
def test_a_resumed_training_captures_anew_and_continues_exactly(name, tmp_path):
    n = 60 if of_sequences(name) else 104 if off_policy(name) else 8 * 64
    settings = {"learning_rate_schedule": "linear", **CAPTURED[name]}
    straight = make(name, device="cuda", **settings)
    straight.train(n, schedule_timesteps=2 * n)
    straight.save(tmp_path / "a.safetensors")
    loaded = type(straight).from_checkpoint(tmp_path / "a.safetensors", device="cuda")
    if off_policy(name):
        straight.save_buffer(tmp_path / "a.memory")
        loaded.load_buffer(tmp_path / "a.memory")
    straight.train(until=2 * n)
    loaded.train(until=2 * n)
    assert differing(weights(loaded), weights(straight)) == []

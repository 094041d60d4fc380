"""Trainings that stay on the GPU, environments included: equal to the CPU's, exact to resume, few waits."""

import warnings

import numpy as np
import pytest
import torch
from device_counts import count_work

from rlox import A2C, MAPPO, PPO
from rlox.nn.graphs import N_EAGER

SETTINGS = {"n_envs": 6, "n_steps": 8, "hidden_sizes": [8], "learning_rate_schedule": "linear"}
CASES = [
    (PPO, "CartPole-v1", {"batch_size": 20, "clip_eps_schedule": "linear"}),
    (A2C, "CartPole-v1", {}),
    (PPO, "Pendulum-v1", {"batch_size": 24, "normalize_obs": True, "normalize_rewards": True}),
    (MAPPO, "CartPole-v1", {"batch_size": 24}),
    (MAPPO, "GridPursuit-v0", {"batch_size": 48, "share_parameters": False, "critic": "local"}),
    (MAPPO, "GridPursuit-v0", {"batch_size": 60, "value_norm": True, "agent_id": True}),
]


@pytest.fixture(autouse=True)
def without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def make(cls, env, device="cuda", **settings):
    return cls(env, seed=1, device=device, env_backend="tensor", **SETTINGS, **settings)


def flat(one):
    return torch.cat([p.detach().reshape(-1).cpu() for p in one.policy.parameters()]).numpy()


@pytest.mark.parametrize(("cls", "env", "settings"), CASES)
def test_a_training_equals_that_with_tensors_on_the_cpu(cls, env, settings):
    """Also after the rollout and the update are captured; minibatches of two sizes, schedules, ended episodes."""
    n = 48 * (N_EAGER + 4)
    results = []
    for device in ("cuda", "cpu"):
        one = make(cls, env, device, **settings)
        results.append((flat(one), one.train(n), flat(one), one.counters))
        assert one.backend.captures == (device == "cuda")
    (start, metrics, weights, counters), (_, expected, theirs, their_counters) = results
    assert not np.array_equal(start, weights)
    # Adam divides gradients by their size, so that the rounding of a real GPU shows in the steps of small ones.
    np.testing.assert_allclose(weights, theirs, rtol=0, atol=3e-4)
    assert (counters.episodes, counters.updates) == (their_counters.episodes, their_counters.updates)
    for name in ("value_loss", "entropy", "learning_rate", "grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(("cls", "env", "settings"), CASES[1:3])
def test_an_interrupted_training_continues_exactly(cls, env, settings, tmp_path):
    n = 48 * (N_EAGER + 3)
    whole, half = make(cls, env, **settings), make(cls, env, **settings)
    whole.train(2 * n)
    half.train(n, schedule_timesteps=2 * n)
    half.save(tmp_path / "half.safetensors")
    rest = cls.from_checkpoint(tmp_path / "half.safetensors", device="cuda")
    rest.train(until=2 * n)
    np.testing.assert_array_equal(flat(rest), flat(whole))
    assert rest.rng.get_state() == whole.rng.get_state()
    assert rest.collector.rng.get_state() == whole.collector.rng.get_state()


@pytest.mark.parametrize(("cls", "env"), [(PPO, "CartPole-v1"), (MAPPO, "GridPursuit-v0")])
def test_a_rollout_and_an_update_are_one_launch_each(cls, env, pretended):
    """Beside the two graphs: progress is written, metrics are copied and stacked. The host waits for ended episodes,
    and for metrics."""
    one = make(cls, env, batch_size=24)
    one.train(48 * (N_EAGER + 2))
    with count_work() as work:
        one.train(48 * 10)
    assert work["launch:graph"] == 20
    assert work["launch"] <= 10 * 5
    assert work["sync"] <= 10 * 2
    assert work["h2d"] == 0
    assert [graphed.obstacle for _, graphed in one.backend.captured(one).graphs.values()] == [None]
    assert one.collector._graphed.obstacle is None


def test_auto_takes_environments_on_the_gpu_where_nothing_asks_for_the_host():
    on_gpu = PPO("CartPole-v1", 4, device="cuda")
    assert on_gpu.env_options.device == "cuda"
    for settings in ({"env_workers": 2}, {"reward_fn": lambda o, a, r: r}, {"env_backend": "gymnasium"}):
        assert PPO("CartPole-v1", 4, device="cuda", **settings).env_options.device is None
    assert PPO("CartPole-v1", 4, device="cpu").env_options.device is None


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({"n_envs": 1024}, "cuda"),
        ({"n_envs": 1023}, "cpu"),
        ({"n_envs": 1024, "backend": "native"}, "cpu"),
        ({"n_envs": 1024, "env_kwargs": {"sutton_barto_reward": True}}, "cpu"),
        ({"n_envs": 1024, "reward_fn": lambda obs, actions, rewards: rewards}, "cpu"),
    ],
)
def test_many_environments_are_on_the_gpu_by_themselves(settings, device):
    one = PPO("CartPole-v1", n_steps=2, hidden_sizes=[8], **settings)
    assert one.device == device
    assert (one.collector.env.device == "cuda:0") == (device == "cuda")
    one.close()

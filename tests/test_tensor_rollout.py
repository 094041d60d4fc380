"""Rollouts and trainings in environments that live on a device, with tensors on the CPU."""

import re

import forked
import numpy as np
import pytest
import torch
from torch import nn

from rlox import A2C, DQN, PPO, RolloutCollector
from rlox.collectors.tensor_normalize import TensorNormalize
from rlox.collectors.tensor_rollout import TensorRolloutCollector, compute_advantages_
from rlox.envs.spec import EnvSpec
from rlox.envs.tensor.base import TensorEnv
from rlox.envs.tensor.vec_env import TensorVecEnv
from rlox.kernels.advantage.gae import compute_gae_batched_f32
from rlox.kernels.rng import Rng
from rlox.nn.graphs import Graphed
from rlox.nn.policies import DiscretePolicy
from rlox.training.algorithm import choose_update, to_floats

COLUMNS = ("obs", "actions", "log_probs", "values", "advantages", "returns", "rewards", "dones")
SMALL = {"n_envs": 4, "n_steps": 16, "hidden_sizes": [8]}
ON_DEVICE = {**SMALL, "device": "cpu", "env_backend": "tensor"}


def flat(agent):
    return torch.cat([p.detach().reshape(-1) for p in agent.policy.parameters()]).numpy().copy()


def advantages_of(rewards, values, next_values, terminated, ended, gamma, gae_lambda):
    """The definition, step by step from the end."""
    out, after = np.zeros_like(rewards), np.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * ~terminated[t] - values[t]
        after = out[t] = delta + gamma * gae_lambda * ~ended[t] * after
    return out


def test_advantages_equal_the_definition_and_the_kernel():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 12, 5))
    terminated, truncated = rng.random((2, 12, 5)) < 0.2
    truncated &= ~terminated
    ended = terminated | truncated
    # What a step led to is the next observation, unless the episode ended.
    next_values = np.where(ended, rng.normal(size=(12, 5)), np.vstack([values[1:], rng.normal(size=(1, 5))]))
    arrays = (rewards, values, next_values, terminated, ended)
    out = compute_advantages_(torch.empty(12, 5, dtype=torch.float64), *map(torch.from_numpy, arrays), 0.97, 0.9)
    expected = advantages_of(*arrays, 0.97, 0.9)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-12)
    f32 = [x.astype(np.float32) for x in (rewards, values, next_values)]
    kernel, _ = compute_gae_batched_f32(
        f32[0], f32[1], terminated, f32[2][-1], 12, 0.97, 0.9, truncated=truncated, next_values=f32[2]
    )
    np.testing.assert_allclose(kernel, expected, rtol=0, atol=1e-5)


def test_rollouts_are_those_of_the_native_environments():
    """Also where episodes end at the time limit, and go on in the next rollout."""
    policy = DiscretePolicy(4, 2, 8, rng=Rng(0))
    here, there = TensorRolloutCollector(TensorVecEnv(3, 5, "CartPole-v1"), 5), RolloutCollector("CartPole-v1", 3, 5)
    truncated = 0
    for n_steps in (8, 30, 30, 7):
        ours, theirs = here.collect(policy, n_steps), there.collect(policy, n_steps)
        for name in COLUMNS:
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(ours.episode_returns, theirs.episode_returns)
        np.testing.assert_array_equal(ours.episode_lengths, theirs.episode_lengths)
        truncated += int(here._memory.truncated.sum())
        state = here.state()
        state["steps"][:2] = 499, 498
        here.set_state(state)
        there.set_state(state)
    assert truncated == 6
    assert here.rng.get_state() == there.rng.get_state()
    assert here.env_steps == there.env_steps == 3 * 75


@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True)])
def test_normalisation_is_that_of_the_host(parts, tmp_path):
    """Rollouts, statistics, a restored state, and the observations of evaluations."""
    settings = dict(zip(("normalize_obs", "normalize_rewards"), parts, strict=True), clip_rewards=2.0)
    ours, theirs = PPO("Pendulum-v1", **ON_DEVICE, **settings), PPO("Pendulum-v1", **SMALL, **settings)
    for _ in range(2):
        batches = [one.collector.collect(one.policy, 230) for one in (ours, theirs)]
        for name in ("obs", "rewards", "values", "advantages"):
            a, b = (getattr(batch, name).numpy() for batch in batches)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-3, err_msg=name)
    a, b = ours.normalizer.state(), theirs.normalizer.state()
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5, err_msg=name)
    obs = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(ours.normalizer.normalize(obs), theirs.normalizer.normalize(obs), rtol=1e-4)
    ours.train(128)
    ours.save(tmp_path / "a.safetensors")
    rest = PPO.from_checkpoint(tmp_path / "a.safetensors", device="cpu")
    for one in (ours, rest):
        one.train(128)
    np.testing.assert_array_equal(flat(ours), flat(rest))
    assert ours.evaluate(1).returns == rest.evaluate(1).returns


def test_all_episodes_are_reported_also_many(monkeypatch):
    """More than fit the first transfer are transferred in a second one."""
    policy = DiscretePolicy(4, 2, 8, rng=Rng(0))
    results = []
    for _ in range(2):
        collector = TensorRolloutCollector(TensorVecEnv(32, 0, "CartPole-v1"))
        batch = collector.collect(policy, 300)
        assert (collector._memory.n_kept == 64) == bool(results)
        results.append((batch.episode_returns, batch.episode_lengths))
        monkeypatch.setattr("rlox.collectors.tensor_rollout._EPISODES_PER_STEP", 0.0)
    assert len(results[0][0]) > 64
    np.testing.assert_array_equal(results[0], results[1])


def test_the_first_rollout_of_ppo_is_that_of_native_environments():
    ours, theirs = PPO("CartPole-v1", **ON_DEVICE), PPO("CartPole-v1", backend="native", **SMALL)
    assert (ours.backend, ours.backend_reason) == ("torch", "the environments are tensors")
    batches = [one.collector.collect(one.actor, 16) for one in (ours, theirs)]
    for name in COLUMNS:
        a, b = (getattr(batch, name).numpy() for batch in batches)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=name)


def test_an_update_is_the_ordinary_one_given_its_permutation():
    """The same rollout and order of minibatches: with the update of an agent whose environments are on the host."""
    ours, theirs = PPO("CartPole-v1", **ON_DEVICE), PPO("CartPole-v1", backend="torch", **SMALL)
    order = np.argsort(Rng(7).uniform(64))
    results = []
    for one in (ours, theirs):
        one.plan(1000)
        tensors = one is ours
        one.rng = type(
            "Order", (), {"permutation": lambda self, n, t=tensors: torch.from_numpy(order) if t else order}
        )()
        batch = one.collector.collect(one.actor, 16)
        results.append((to_floats(choose_update(one)(batch)), flat(one)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("cls", [PPO, A2C])
def test_an_interrupted_training_continues_exactly(cls, tmp_path):
    whole = cls("CartPole-v1", **ON_DEVICE)
    whole.train(64 * 8)
    half = cls("CartPole-v1", **ON_DEVICE)
    half.train(64 * 4, schedule_timesteps=64 * 8)
    half.save(tmp_path / "half.safetensors")
    rest = cls.from_checkpoint(tmp_path / "half.safetensors", device="cpu")
    assert rest.env_options.device == "cpu"
    assert rest.collector.restore_note() is None
    rest.train(until=64 * 8)
    np.testing.assert_array_equal(flat(rest), flat(whole))
    for one in (rest, whole):
        one.save(tmp_path / f"{one is rest}.safetensors")
    assert rest.rng.get_state() == whole.rng.get_state()
    assert rest.collector.rng.get_state() == whole.collector.rng.get_state()
    assert {k: v.tobytes() for k, v in rest.collector.state().items()} == {
        k: v.tobytes() for k, v in whole.collector.state().items()
    }


def test_after_a_rollout_that_stops_midway_new_episodes_start(monkeypatch):
    agent = PPO("CartPole-v1", **ON_DEVICE)
    env, n_steps = agent.collector.env, []
    agent.collector.collect(agent.actor, 4)

    def step_all(actions, out):
        n_steps.append(actions)
        if len(n_steps) == 3:
            raise KeyboardInterrupt
        return type(env).step_all(env, actions, out)

    monkeypatch.setattr(env, "step_all", step_all)
    with pytest.raises(KeyboardInterrupt):
        agent.collector.collect(agent.actor, 4)
    assert agent.collector.state() is None
    obs = agent.collector.collect(agent.actor, 4).obs.reshape(4, env.n_envs, 4)
    assert (obs[0].abs() <= 0.05).all()  # as all first observations
    after = env.observe().clone()
    assert agent.collector.collect(agent.actor, 4).obs[: env.n_envs].equal(after)


def test_a_training_goes_on_with_native_environments(tmp_path):
    """Their state and the position of the generators are the same, wherever they live."""
    there = PPO("CartPole-v1", **ON_DEVICE)
    there.train(64)
    there.save(tmp_path / "a.safetensors")
    here = PPO.from_checkpoint(tmp_path / "a.safetensors", env_backend="auto", device="cpu")
    assert here.env_options.device is None
    assert here.collector.restore_note() is None
    for name in COLUMNS:
        a, b = (getattr(one.collector.collect(one.actor, 16), name).numpy() for one in (here, there))
        if name == "obs":
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
            break


@pytest.mark.slow
def test_ppo_learns_cartpole_on_tensors():
    ppo = PPO(
        "CartPole-v1", 64, 0, device="cpu", env_backend="tensor", n_steps=32, batch_size=256, learning_rate=2e-3,
        n_epochs=8, hidden_sizes=[32],
    )  # fmt: skip
    assert ppo.train(120_000)["mean_reward"] > 150
    assert np.mean(ppo.evaluate(5).returns) > 200


def test_a_custom_policy_acts_with_its_own_noise():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

        def get_action_and_logprob(self, obs):
            one = torch.distributions.Categorical(logits=self.net(obs)[:, :2])
            actions = one.sample()
            return actions, one.log_prob(actions)

        def get_value(self, obs):
            return self.net(obs)[:, 2]

        def get_logprob_and_entropy(self, obs, actions):
            one = torch.distributions.Categorical(logits=self.net(obs)[:, :2])
            return one.log_prob(actions), one.entropy()

    settings = {name: value for name, value in ON_DEVICE.items() if name != "hidden_sizes"}
    ppo = PPO("CartPole-v1", policy=Policy(), **settings)
    ppo.train(128)
    assert not isinstance(ppo.collector._graphed, Graphed)
    batch = ppo.collector.collect(ppo.actor, 16)
    expected = ppo.policy.get_logprob_and_entropy(batch.obs, batch.actions)[0].detach()
    np.testing.assert_allclose(batch.log_probs, expected, rtol=0, atol=1e-6)


def test_numbers_that_are_not_finite_are_refused():
    ppo = PPO("CartPole-v1", **ON_DEVICE)
    ppo.train(64)
    ppo.collector.env.state[0, 2] = float("nan")
    message = "observations must be finite, got nan in .* from environment 2"
    with pytest.raises(FloatingPointError, match=message):
        ppo.train(64)


def test_signs_of_rewards_are_learned_from():
    collector = TensorRolloutCollector(TensorVecEnv(2, 0, "CartPole-v1"), reward_fn="sign")
    batch = collector.collect(DiscretePolicy(4, 2, 8, rng=Rng(0)), 8)
    assert batch.rewards.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("cls", "env", "settings", "message"),
    [
        (PPO, "CartPole-v1", {"reward_fn": lambda o, a, r: r}, "cannot call the Python function <lambda>"),
        (PPO, "CartPole-v1", {"env_workers": 1}, "no env_kwargs, wrappers, workers or remote addresses"),
        (PPO, "Blackjack-v1", {}, "Blackjack-v1 has no tensor version; those that have one are"),
        (DQN, "CartPole-v1", {}, "environments on a device are for PPO, A2C and MAPPO"),
    ],
)
def test_what_cannot_run_on_a_device_is_refused(cls, env, settings, message):
    with pytest.raises(ValueError, match=f"^{cls.__name__}: env_backend must be auto.*{re.escape(message)}"):
        cls(env, env_backend="tensor", device="cpu", **settings)


@pytest.mark.parametrize("check", [["--check"], []])
def test_the_command_line_chooses_environments_on_a_device(check, tmp_path):
    """Also GridWorld-v0, which gymnasium does not know."""
    small = ["total_timesteps=256", "env.n_envs=4", "algo.n_steps=16", "eval.n_episodes=1", "logger=none", "tuned=off"]
    command = ["train", "algo=ppo", "env=GridWorld-v0", "env.backend=tensor", "device=cpu", "hydra.run.dir=run"]
    done = forked.run(*command, *small, *check, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch (the environments are tensors)" in done.stdout
    assert (tmp_path / "run/checkpoints/last.safetensors").is_file() == (not check)


class Infinite(TensorEnv):
    """Counts its steps; in step 7, the observation or the reward is infinite."""

    env_id, spec, state_size, max_episode_steps = "Infinite-v0", EnvSpec((1,), n_actions=2), 1, 20

    def __init__(self, what):
        self.what = what

    def start(self, words):
        return torch.zeros((1, words.shape[1]), dtype=torch.float64)

    def step(self, state, actions, words=None):
        after = state + 1.0
        rewards = torch.ones_like(after[0])
        if self.what == "rewards":
            rewards = torch.where(after[0] == 7, torch.inf, rewards)
        return after, rewards, torch.zeros_like(after[0], dtype=torch.bool)

    def observe(self, state):
        obs = state.t().clone()
        return torch.where(obs == 7, torch.inf, obs) if self.what == "observations" else obs


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("what", ["observations", "rewards"])
def test_infinite_numbers_are_errors_also_if_they_are_normalised(what, normalized):
    collector = TensorRolloutCollector(TensorVecEnv(2, 0, Infinite(what)), 0)
    if normalized:
        collector.normalizer = TensorNormalize("cpu", 2, (1,), 0.99, True, True)
    with pytest.raises(FloatingPointError, match=f"{what} must be finite, got inf"):
        collector.collect(DiscretePolicy(1, 2), 10)


def test_observations_are_normalised_once_after_a_rollout_of_another_length():
    policy, seen = DiscretePolicy(4, 2), []
    for lengths in ((8, 8), (8, 4)):
        collector = TensorRolloutCollector(TensorVecEnv(2, 0, "CartPole-v1"), 0)
        collector.normalizer = TensorNormalize("cpu", 2, (4,), 0.99, True, False)
        collector.collect(policy, lengths[0])
        seen.append(collector.collect(policy, lengths[1]).obs.reshape(lengths[1], 2, 4)[0])
    np.testing.assert_array_equal(*seen)

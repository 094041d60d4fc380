"""Collection: time limits, auto-reset, statistics, reward functions, custom policies."""

from dataclasses import replace

import numpy as np
import probes
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation
from torch import nn

from rlox import ReplayBuffer, RolloutCollector
from rlox.collectors import ReplayCollector
from rlox.collectors.rollout import RolloutBatch
from rlox.compiled import NativePolicy
from rlox.config import PPOConfig
from rlox.envs import EnvSpec, make_vec_env
from rlox.kernels.rng import Rng
from rlox.nn.actors import DeterministicPolicy
from rlox.nn.policies import ContinuousPolicy, DiscretePolicy


class Fixed(nn.Module):
    """A custom policy: the action is always 0, and the value of an observation is `value(obs)`."""

    def __init__(self, value):
        super().__init__()
        self.value = value
        self.unused = nn.Parameter(torch.zeros(()))

    def get_action_and_logprob(self, obs):
        return torch.zeros(len(obs), dtype=torch.int64), torch.zeros(len(obs))

    def get_value(self, obs):
        return self.value(obs)

    def get_logprob_and_entropy(self, obs, actions):
        return torch.zeros(len(obs)) + self.unused, torch.zeros(len(obs))


def test_time_limit_is_no_termination():
    """Reward 1 for ever and V = 1/(1-gamma): every advantage is 0, whatever the time limit cuts."""
    gamma = 0.99
    policy = Fixed(lambda obs: torch.full((len(obs),), 1 / (1 - gamma)))
    collector = RolloutCollector(lambda: probes.ConstantReward(limit=7), n_envs=3, gamma=gamma, gae_lambda=0.95)
    for _ in range(3):
        batch = collector.collect(policy, 50)
        assert batch.advantages.abs().max() < 1e-3
        np.testing.assert_allclose(batch.returns, 1 / (1 - gamma), rtol=1e-5)
        assert len(batch.episode_lengths) > 0
        assert set(batch.episode_lengths) == {7}


def test_same_probe_fails_when_limits_count_as_terminations():
    """The probe can fail: if the time limit is reported as a termination, the advantages are far from 0."""
    gamma = 0.99

    class Terminates(probes.ConstantReward):
        def step(self, action):
            obs, reward, _, truncated, info = super().step(action)
            return obs, reward, truncated, False, info

    policy = Fixed(lambda obs: torch.full((len(obs),), 1 / (1 - gamma)))
    batch = RolloutCollector(lambda: Terminates(limit=7), n_envs=3, gamma=gamma).collect(policy, 50)
    assert batch.advantages.abs().max() > 50


@pytest.mark.parametrize("truncate", [True, False])
def test_bootstrap_uses_the_final_observation(truncate):
    """With V(s) = 10 s, lambda = 0: the last step of an episode sees V(4) = 40 when truncated and 0 when terminated. It
    never sees V(0) of the next episode by accident (the rewards differ)."""
    gamma = 0.5
    policy = Fixed(lambda obs: 10 * obs[:, 0])
    collector = RolloutCollector(
        lambda: probes.Countdown(limit=4, truncate=truncate), n_envs=2, gamma=gamma, gae_lambda=0.0
    )
    batch = collector.collect(policy, 8)
    s = batch.obs[:, 0].numpy()
    last = s == 3
    expected = np.where(last & (not truncate), 1.0, 1.0 + gamma * 10 * (s + 1)) - 10 * s
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)


def test_lambda_one_is_the_monte_carlo_return_across_rollouts():
    """With V = 0 and lambda = 1 the return of an episode inside a rollout is its discounted sum of rewards."""
    policy = Fixed(lambda obs: torch.zeros(len(obs)))
    collector = RolloutCollector(lambda: probes.Countdown(limit=4, truncate=False), n_envs=1, gamma=0.9, gae_lambda=1.0)
    batch = collector.collect(policy, 8)
    one = [sum(0.9**k for k in range(4 - t)) for t in range(4)]
    np.testing.assert_allclose(batch.returns, one + one, rtol=1e-6)


def test_shapes_and_statistics_on_native_and_foreign_environments():
    for env, policy in (
        ("CartPole-v1", DiscretePolicy(4, 2)),
        ("Acrobot-v1", DiscretePolicy(6, 3)),
        ("Pendulum-v1", ContinuousPolicy(3, 1)),
        ("MountainCarContinuous-v0", ContinuousPolicy(2, 1)),
    ):
        batch = RolloutCollector(env, n_envs=4, seed=0).collect(policy, 32)
        assert len(batch) == 128
        assert batch.obs.shape == (128, policy.actor[0].in_features)
        for name in ("log_probs", "values", "advantages", "returns", "rewards"):
            column = getattr(batch, name)
            assert column.shape == (128,), name
            assert column.dtype == torch.float32, name
            assert torch.isfinite(column).all(), name
        torch.testing.assert_close(batch.returns, batch.advantages + batch.values)


def test_log_probs_are_of_the_sampling_policy():
    for policy, env in (
        (DiscretePolicy(4, 2), "CartPole-v1"),
        (ContinuousPolicy(3, 1), "Pendulum-v1"),
    ):
        batch = RolloutCollector(env, n_envs=4, seed=1).collect(policy, 16)
        if env == "CartPole-v1":
            expected = torch.distributions.Categorical(logits=policy.actor(batch.obs)).log_prob(batch.actions)
        else:
            normal = torch.distributions.Normal(policy.actor(batch.obs), policy.log_std.exp())
            expected = normal.log_prob(batch.actions).sum(-1)
        torch.testing.assert_close(batch.log_probs, expected.detach(), rtol=1e-4, atol=1e-5)


def test_same_seed_same_rollout_and_other_seed_other_rollout():
    policy = DiscretePolicy(4, 2)
    first, second, other = (RolloutCollector("CartPole-v1", n_envs=4, seed=s).collect(policy, 64) for s in (5, 5, 6))
    assert torch.equal(first.obs, second.obs)
    assert torch.equal(first.actions, second.actions)
    assert not torch.equal(first.obs, other.obs)


def test_reward_fn_replaces_learned_rewards_only():
    seen = []

    def reward_fn(obs, actions, raw):
        seen.append((obs.shape, actions.shape, raw.copy()))
        return raw - 0.5 * obs[:, 2] ** 2

    collector = RolloutCollector("CartPole-v1", n_envs=8, seed=42, reward_fn=reward_fn)
    batch = collector.collect(DiscretePolicy(4, 2), 128)
    assert len(seen) == 128
    assert seen[0][:2] == ((8, 4), (8,))
    assert all((raw == 1.0).all() for _, _, raw in seen)
    torch.testing.assert_close(batch.rewards, 1.0 - 0.5 * batch.obs[:, 2] ** 2)
    np.testing.assert_array_equal(batch.episode_returns, batch.episode_lengths)


@pytest.mark.parametrize("kind", ["module", "native", "off-policy"])
def test_reward_fn_is_given_the_actions_that_were_executed(kind):
    """Pendulum clips torques to 2; the policy's are ten times as large. Log-probabilities are still of the samples."""
    seen = []

    def reward_fn(obs, actions, raw):
        seen.append(actions.copy())
        return np.abs(actions[:, 0]).astype(np.float64)

    if kind == "off-policy":
        collector = ReplayCollector("Pendulum-v1", n_envs=4, seed=1, reward_fn=reward_fn)
        policy = DeterministicPolicy(3, 1, 8, low=[-20.0], high=[20.0])
        policy.noise_std = 1.0
        memory = ReplayBuffer(200, 3, 1)
        for _ in range(50):
            collector.step(policy, memory)
        taken, rewards = (np.asarray(memory.gather(np.arange(200))[name]) for name in ("actions", "rewards"))
    else:
        module, spec = ContinuousPolicy(3, 1, log_std_init=3.0), make_vec_env("Pendulum-v1", 1, 0).spec
        policy = module if kind == "module" else NativePolicy.adopt(module, spec, PPOConfig())
        collector = RolloutCollector("Pendulum-v1", n_envs=4, seed=1, reward_fn=reward_fn)
        batch = collector.collect(policy, 50)
        assert batch.actions.abs().max() > 10
        normal = torch.distributions.Normal(module.actor(batch.obs), module.log_std.exp())
        torch.testing.assert_close(
            batch.log_probs, normal.log_prob(batch.actions).sum(-1).detach(), rtol=1e-4, atol=1e-4
        )
        taken, rewards = batch.actions.clamp(-2, 2).numpy(), batch.rewards.numpy()
    assert np.abs(taken).max() == 2.0
    np.testing.assert_array_equal(np.concatenate(seen), taken)
    np.testing.assert_array_equal(rewards, np.abs(taken[:, 0]))


class Half(nn.Module):
    get_action_and_logprob = get_logprob_and_entropy = lambda self, *a: None


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="reward_fn must return an array of shape"):
        RolloutCollector("CartPole-v1", reward_fn=lambda o, a, r: r[:2]).collect(DiscretePolicy(4, 2), 4)
    with pytest.raises(ValueError, match="must take the 3 observations of Pendulum-v1"):
        RolloutCollector("Pendulum-v1").collect(ContinuousPolicy(4, 1), 4)
    with pytest.raises(ValueError, match="act with shape"):
        RolloutCollector("Pendulum-v1").collect(ContinuousPolicy(3, 2), 4)
    with pytest.raises(ValueError, match="action"):
        RolloutCollector("CartPole-v1", n_envs=64).collect(DiscretePolicy(4, 5), 8)
    with pytest.raises(TypeError, match="lacks get_value"):
        RolloutCollector("CartPole-v1").collect(Half(), 4)
    with pytest.raises(ValueError, match=r"did you mean 'CartPole-v1'|ls envs"):
        RolloutCollector("CartPol-v1")
    with pytest.raises(ValueError, match="n_steps"):
        RolloutCollector("CartPole-v1").collect(DiscretePolicy(4, 2), 0)


def test_minibatches_cover_every_transition_once():
    batch = RolloutCollector("CartPole-v1", n_envs=4, seed=0).collect(DiscretePolicy(4, 2), 25)
    for shuffle in (True, False):
        parts = list(batch.sample_minibatches(32, shuffle=shuffle))
        assert [len(part) for part in parts] == [32, 32, 32, 4]
        together = torch.cat([part.obs for part in parts])
        assert torch.equal(together, batch.obs) is not shuffle
        torch.testing.assert_close(together.sum(0), batch.obs.sum(0))
    with pytest.raises(ValueError, match="batch_size"):
        next(batch.sample_minibatches(0))


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_minibatch_of_one_row_is_left_over(shuffle):
    """129 rows in batches of 64: a last row alone has no standard deviation, and the documents divide by it."""
    collector = RolloutCollector("CartPole-v1", n_envs=3, seed=0)
    batch = collector.collect(DiscretePolicy(4, 2), 43)
    parts = list(batch.sample_minibatches(64, shuffle=shuffle))
    assert [len(part) for part in parts] == [64, 65]
    for mb in parts:
        assert ((mb.advantages - mb.advantages.mean()) / (mb.advantages.std() + 1e-8)).isfinite().all()
    torch.testing.assert_close(torch.cat([part.obs for part in parts]).sum(0), batch.obs.sum(0))
    for size, sizes in ((1, [1] * 129), (128, [129]), (127, [127, 2]), (200, [129])):
        assert [len(part) for part in batch.sample_minibatches(size, shuffle=shuffle)] == sizes
    assert [len(part) for part in next(batch.sample_minibatches(1)).sample_minibatches(64)] == [1]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("policy", ["torch", "native"])
def test_every_column_is_a_tensor_and_in_every_minibatch(shuffle, policy):
    columns = ("obs", "actions", "log_probs", "values", "advantages", "returns", "rewards", "dones")
    if policy == "native":
        policy = NativePolicy.make(EnvSpec((4,), n_actions=2), PPOConfig(), Rng(0))
    else:
        policy = DiscretePolicy(4, 2)
    batch = RolloutCollector("CartPole-v1", n_envs=4, seed=0).collect(policy, 100)
    assert {name: type(getattr(batch, name)) for name in columns} == dict.fromkeys(columns, torch.Tensor)
    assert batch.dones.dtype == torch.bool
    assert batch.dones.sum() == len(batch.episode_returns) > 0
    assert np.asarray(batch.dones).sum() == len(batch.episode_lengths)
    parts = list(batch.sample_minibatches(128, shuffle=shuffle))
    assert [len(part.dones) for part in parts] == [128, 128, 128, 16]
    for name in columns:
        together = torch.cat([getattr(part, name) for part in parts])
        assert together.dtype == getattr(batch, name).dtype
        torch.testing.assert_close(together.double().sum(0), getattr(batch, name).double().sum(0))
    for part in parts:
        for row, ended in zip(part.obs, part.dones, strict=True):
            (at,) = (batch.obs == row).all(1).nonzero()[:, 0]
            assert batch.dones[at] == ended
        assert part.episode_returns.shape == (0,)
    assert next(RolloutBatch(*(getattr(batch, name) for name in columns[:7])).sample_minibatches(8)).dones is None


def test_a_collector_may_receive_its_environments():
    policy = DiscretePolicy(4, 2)
    for backend in ("auto", "gymnasium"):
        made = RolloutCollector(make_vec_env("CartPole-v1", 3, 5, backend=backend), seed=5)
        known = RolloutCollector("CartPole-v1", 3, 5, env_backend=backend)
        assert made.n_envs == 3
        for _ in range(2):
            one, other = made.collect(policy, 16), known.collect(policy, 16)
            assert torch.equal(one.obs, other.obs)
            assert torch.equal(one.advantages, other.advantages)


def test_sequences_are_the_steps_of_whole_environments():
    policy = DiscretePolicy(4, 2)
    rollout = RolloutCollector("CartPole-v1", n_envs=5).collect(policy, 12)
    found = list(rollout.sample_sequences(2, Rng(3)))
    assert [part.n_envs for part in found] == [2, 2, 1]
    order = np.concatenate([part.steps("obs")[0, :, 0] for part in found])
    first = rollout.steps("obs")[0, :, 0].numpy()
    chosen = [int(np.flatnonzero(first == x)[0]) for x in order]
    assert sorted(chosen) == [0, 1, 2, 3, 4]
    assert chosen != sorted(chosen)
    for name in ("obs", "actions", "returns", "dones"):
        whole = torch.cat([part.steps(name) for part in found], 1)
        assert torch.equal(whole, rollout.steps(name)[:, chosen])
    with pytest.raises(ValueError, match="must have the steps of whole environments"):
        next(next(rollout.sample_minibatches(8)).sample_sequences(2))
    with pytest.raises(ValueError, match="n_sequences must be >= 1, got 0"):
        next(rollout.sample_sequences(0))


@pytest.mark.slow
def test_stacked_frames_are_stored_once_and_read_back_whole():
    """The same rollout with and without the frame store, over many short episodes, with each kind of padding."""

    class Film(probes.BrightSide):
        def reset(self, *, seed=None, options=None):
            self.t = 0
            return super().reset(seed=seed)

        def step(self, action):
            self.t += 1
            image = self.np_random.integers(0, 256, (36, 36, 1)).astype(np.uint8)
            return image, 1.0, self.t == 3, self.t == 7 or self.np_random.random() < 0.1, {}

    policy = DiscretePolicy((4, 36, 36), 2, hidden=())
    for padding in ("reset", "zero"):

        def make(padding=padding):
            return FrameStackObservation(Film(), 4, padding_type=padding)

        stored, plain = (RolloutCollector(make, n_envs=3, seed=1) for _ in range(2))
        assert stored.spec.n_stacked == 4
        plain.spec = replace(plain.spec, n_stacked=1)
        for _ in range(3):
            one, other = stored.collect(policy, 40), plain.collect(policy, 40)
            assert one.obs.shape == other.obs.shape == (120, 4, 36, 36)
            assert torch.equal(one.obs[:], other.obs)
            assert torch.equal(one.returns, other.returns)
            assert torch.equal(one.log_probs, other.log_probs)
            # Episodes of three steps: 4 + 2 frames for every three stacks of 4.
            assert len(one.obs.frames) < 0.6 * 4 * 120
            for shuffle in (True, False):
                parts = [mb.obs for mb in one.sample_minibatches(50, shuffle=shuffle)]
                assert [part.shape for part in parts] == [(50, 4, 36, 36), (50, 4, 36, 36), (20, 4, 36, 36)]
                assert torch.cat(parts).long().sum() == other.obs.long().sum()
                assert torch.equal(torch.cat(parts), other.obs) is not shuffle


@pytest.mark.parametrize("which", [0, 1], ids=["observations", "actions"])
def test_reward_fn_cannot_change_what_is_learned_from(which):
    def spoils(*given):
        given[which][:] = 0
        return given[2]

    def doubles(obs, actions, rewards):
        rewards *= 2
        return rewards

    with pytest.raises(ValueError, match="read-only"):
        RolloutCollector("CartPole-v1", 2, 0, reward_fn=spoils).collect(DiscretePolicy(4, 2), 8)
    batch = RolloutCollector("CartPole-v1", 2, 0, reward_fn=doubles).collect(DiscretePolicy(4, 2), 8)
    assert (batch.rewards == 2).all()


@pytest.mark.parametrize("kind", ["<U3", complex, object])
def test_rewards_of_reward_fn_are_numbers(kind):
    collector = RolloutCollector("CartPole-v1", 2, 0, reward_fn=lambda obs, actions, rewards: rewards.astype(kind))
    with pytest.raises(TypeError, match="reward_fn must return numbers, got an array of dtype"):
        collector.collect(DiscretePolicy(4, 2), 8)


def test_a_single_row_joins_the_minibatch_before_it():
    batch = RolloutCollector("CartPole-v1", n_envs=1).collect(DiscretePolicy(4, 2), 3)
    assert [len(part) for part in batch.sample_minibatches(2)] == [3]
    assert [len(part) for part in batch.sample_minibatches(1)] == [1, 1, 1]

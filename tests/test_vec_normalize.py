"""Normalisation: the running moments, frozen in evaluation, exact through a checkpoint, and the effect on
learning."""

import math

import gymnasium
import numpy as np
import probes
import pytest
import torch
from gymnasium import spaces

from rlox import PPO, RolloutCollector, VecNormalize
from rlox.algorithms import DQN
from rlox.checkpoint import load_checkpoint
from rlox.collectors.vec_normalize import RunningMoments
from rlox.nn.policies import DiscretePolicy


def test_running_moments_equal_those_of_the_whole_stream():
    rng = np.random.default_rng(0)
    stream = rng.normal(3.0, 2.0, (1000, 4))
    moments = RunningMoments((4,))
    for part in np.split(stream, [1, 7, 300, 999]):
        moments.update(part)
    np.testing.assert_allclose(moments.mean, stream.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.var, stream.var(0), rtol=1e-4)
    assert moments.count == pytest.approx(1000)


def test_moments_far_from_zero_are_exact():
    """Sums of numbers around 1e6, and of their deviations, would be imprecise in float32."""
    stream = (1e6 + np.random.default_rng(0).integers(-3, 4, (1000, 2))).astype(np.float32)
    moments, exact, prior = RunningMoments((2,)), stream.astype(np.float64), 1e-4  # weight of the prior, in samples
    moments.update(stream)
    squares = prior + 1000 * exact.var(0) + exact.mean(0) ** 2 * prior * 1000 / (1000 + prior)
    np.testing.assert_allclose(moments.var * (1000 + prior) - squares, 0, atol=1.0)


def test_rewards_are_scaled_by_the_deviation_of_their_discounted_sum():
    """An oracle keeps all discounted sums; a sum restarts after each episode, and rewards keep their sign."""
    rng, gamma, n = np.random.default_rng(1), 0.9, 3
    normalizer = VecNormalize(n, (1,), gamma)
    sums, seen = np.zeros(n), []
    for _ in range(200):
        rewards, ended = rng.normal(5, 1, n), rng.random(n) < 0.1
        sums = sums * gamma + rewards
        seen.append(sums.copy())
        scaled = normalizer.normalize_rewards(rewards, ended)
        if len(seen) > 5:  # until then the prior N(0, 1) still counts
            np.testing.assert_allclose(scaled, rewards / np.sqrt(np.var(seen) + 1e-8), rtol=2e-3, atol=1e-4)
        sums[ended] = 0
    assert (scaled > 0).all()


def test_observations_are_normalised_as_seen_and_clipped():
    normalizer = VecNormalize(2, (3,), clip_obs=1.5)
    stream = np.random.default_rng(2).normal(10, 4, (500, 2, 3)).astype(np.float32)
    for obs in stream:
        normalizer.update(obs)
    out = normalizer.normalize(stream.reshape(-1, 3))
    assert out.dtype == np.float32
    assert np.abs(out).max() == 1.5
    before = normalizer.state()
    normalizer.normalize(stream[0])
    for name, value in normalizer.state().items():
        np.testing.assert_array_equal(value, before[name])


class Far(gymnasium.Env):
    """Two components at an awkward scale: the informative one is tiny, the other is huge and nearly constant."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sign = self.np_random.choice([-1.0, 1.0])
        return np.array([1e-4 * self.sign, 5e3 + self.np_random.normal()], np.float32), {}

    def step(self, action):
        reward = 1e3 * float((action == 1) == (self.sign > 0))
        return np.zeros(2, np.float32) + np.float32(5e3), reward, True, False, {}


@pytest.mark.slow
def test_normalisation_is_what_makes_an_awkward_scale_learnable():
    settings = {"n_envs": 8, "n_steps": 32, "seed": 0, "learning_rate": 3e-3}
    plain, normalized = PPO(Far, **settings), PPO(Far, normalize_obs=True, normalize_rewards=True, **settings)
    plain.train(6000)
    normalized.train(6000)
    assert normalized.evaluate(50).returns.mean() > 950 > 750 > plain.evaluate(50).returns.mean()


def test_episode_statistics_and_reward_fn_see_the_environments_own_units():
    seen = []

    def reward_fn(obs, actions, raw):
        seen.append((obs.copy(), raw.copy()))
        return raw

    normalizer = VecNormalize(4, (4,))
    collector = RolloutCollector("CartPole-v1", n_envs=4, seed=0, reward_fn=reward_fn, normalizer=normalizer)
    plain = RolloutCollector("CartPole-v1", n_envs=4, seed=0)
    policy = DiscretePolicy(4, 2)
    batch = collector.collect(policy, 64)
    assert (batch.episode_returns == batch.episode_lengths).all()
    assert all((raw == 1).all() for _, raw in seen)
    np.testing.assert_array_equal(seen[0][0], plain.env.reset_all())
    assert batch.obs.abs().max() > 1
    assert batch.rewards.unique().numel() > 5


def test_statistics_are_frozen_in_evaluation_and_kept_in_the_checkpoint(tmp_path):
    ppo = PPO("CartPole-v1", n_envs=4, n_steps=32, seed=0, normalize_obs=True, normalize_rewards=True)
    ppo.train(1024)
    before = ppo.normalizer.state()
    first = ppo.evaluate(5)
    for name, value in ppo.normalizer.state().items():
        np.testing.assert_array_equal(value, before[name])
    ppo.save(tmp_path / "n.safetensors")
    assert set(load_checkpoint(tmp_path / "n.safetensors").tensors["normalization"]) == set(before)
    again = PPO.from_checkpoint(tmp_path / "n.safetensors")
    np.testing.assert_array_equal(again.evaluate(5).returns, first.returns)
    obs = np.array([0.1, -0.2, 0.05, 0.3], np.float32)
    assert again.predict(obs) == ppo.predict(obs)
    # Exactly as if it had never stopped: environment, statistics and running sums.
    ppo.train(512)
    again.train(512)
    for a, b in zip(ppo.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_init_from_takes_weights_and_statistics(tmp_path):
    ppo = PPO("CartPole-v1", n_envs=4, n_steps=32, seed=0, normalize_obs=True)
    ppo.train(1024)
    ppo.save(tmp_path / "n.safetensors")
    fresh = PPO("CartPole-v1", n_envs=2, n_steps=16, seed=9, normalize_obs=True)
    fresh.init_from(tmp_path / "n.safetensors")
    assert fresh.counters.env_steps == 0
    np.testing.assert_array_equal(fresh.evaluate(3, seed=5).returns, ppo.evaluate(3, seed=5).returns)
    with pytest.raises(ValueError, match="does not fit"):
        PPO("Acrobot-v1", n_envs=2, n_steps=16, normalize_obs=True).init_from(tmp_path / "n.safetensors")


OFF_POLICY = {"n_envs": 4, "seed": 0, "hidden_sizes": [32], "batch_size": 32, "learning_starts": 64, "train_freq": 8}


def test_a_memory_holds_raw_observations_and_its_samples_are_normalised():
    dqn = DQN(Far, normalize_obs=True, clip_obs=0.5, buffer_size=1_000, **OFF_POLICY)
    dqn.train(400)
    state = dqn.rng.get_state()
    batch = dqn.sample()
    dqn.rng.set_state(state)
    raw = dqn.buffer.sample(32, dqn.rng.integers(2**63))
    assert raw["obs"][:, 1].min() > 4_900
    # All observations that were pushed, and those from which the next step starts.
    seen = np.concatenate([dqn.buffer.gather(np.arange(400))["obs"], dqn.collector._raw]).astype(np.float64)
    moments = dqn.normalizer.obs_moments
    np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-4, atol=1e-9)
    n, prior = len(seen), 1e-4  # of N(0, 1), which has this weight
    var = (prior + n * seen.var(0) + seen.mean(0) ** 2 * n * prior / (n + prior)) / (n + prior)
    np.testing.assert_allclose(moments.var, var, rtol=1e-4)
    for name in ("obs", "next_obs"):
        expected = np.clip((raw[name] - moments.mean) / np.sqrt(moments.var + 1e-8), -0.5, 0.5)
        np.testing.assert_allclose(getattr(batch, name).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert batch.obs.abs().max() == 0.5
    np.testing.assert_array_equal(batch.rewards.numpy(), raw["rewards"])


def test_off_policy_statistics_are_used_to_act_frozen_in_evaluation_and_continue_exactly(tmp_path):
    dqn = DQN("CartPole-v1", normalize_obs=True, **OFF_POLICY)
    dqn.train(400)
    before = dqn.normalizer.state()
    first = dqn.evaluate(5)
    for name, value in dqn.normalizer.state().items():
        np.testing.assert_array_equal(value, before[name])
    obs = np.array([0.1, -0.2, 0.05, 0.3], np.float32)
    with torch.no_grad():
        values = dqn.policy(torch.from_numpy(dqn.normalizer.normalize(obs[None])))
    assert dqn.predict(obs) == values.argmax()
    dqn.save(tmp_path / "n.safetensors")
    dqn.save_buffer(tmp_path / "n.memory")
    again = DQN.from_checkpoint(tmp_path / "n.safetensors")
    again.load_buffer(tmp_path / "n.memory")
    np.testing.assert_array_equal(again.evaluate(5).returns, first.returns)
    dqn.train(200)
    again.train(200)
    assert (dqn.normalizer.obs_moments.mean == again.normalizer.obs_moments.mean).all()
    for a, b in zip(dqn.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_off_policy_learns_at_an_awkward_scale():
    settings = {**OFF_POLICY, "learning_rate": 3e-3, "reward_fn": lambda obs, actions, raw: raw / 1e3}
    plain, normalized = (DQN(Far, normalize_obs=on, **settings) for on in (False, True))
    plain.train(4000)
    normalized.train(4000)
    assert normalized.evaluate(50).returns.mean() > 950 > 750 > plain.evaluate(50).returns.mean()


class ValueOfTheNormalised(torch.nn.Module):
    """V(s) is 10 times the observation that the policy sees; the action is always 0."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))

    def get_action_and_logprob(self, obs):
        return torch.zeros(len(obs), dtype=torch.int64), torch.zeros(len(obs)) * self.unused

    def get_value(self, obs):
        return 10 * obs[:, 0]

    def get_logprob_and_entropy(self, obs, actions):
        return torch.zeros(len(obs)) + self.unused, torch.zeros(len(obs))


@pytest.mark.parametrize("truncate", [True, False])
def test_the_value_after_a_time_limit_is_of_the_normalised_observation(truncate):
    """lambda = 0, reward 1, statistics fixed at N(100, 5^2): an episode that was truncated at observation 4 bootstraps
    from V of the normalised 4; an episode that terminated does not bootstrap."""
    gamma, mean, std = 0.5, 100.0, 5.0
    normalizer = VecNormalize(2, (1,), gamma, rewards=False, clip_obs=1e6)
    moments = normalizer.obs_moments
    moments.mean[:], moments.var[:], moments.count = mean, std**2, 1e18
    collector = RolloutCollector(
        lambda: probes.Countdown(limit=4, truncate=truncate),
        n_envs=2,
        gamma=gamma,
        gae_lambda=0.0,
        normalizer=normalizer,
    )
    batch = collector.collect(ValueOfTheNormalised(), 8)
    s = np.tile(np.arange(8) % 4, (2, 1)).T.ravel()
    np.testing.assert_allclose(batch.obs[:, 0], (s - mean) / std, rtol=1e-6)
    ahead = np.where((s == 3) & (not truncate), 0.0, gamma * 10 * (s + 1 - mean) / std)
    np.testing.assert_allclose(batch.advantages, 1.0 + ahead - 10 * (s - mean) / std, rtol=1e-5)


def test_rewards_are_clipped_on_both_sides():
    normalizer = VecNormalize(2, (1,), clip_rewards=0.5)
    normalizer.return_moments.count, ended = 1e18, np.zeros(2, bool)  # a deviation of 1 that no longer changes
    np.testing.assert_allclose(normalizer.normalize_rewards(np.array([-3.0, 3.0]), ended), [-0.5, 0.5])
    np.testing.assert_allclose(normalizer.normalize_rewards(np.array([-0.2, 0.2]), ended), [-0.2, 0.2])


def test_running_sums_are_restored_only_for_the_episodes_they_belong_to():
    saved = VecNormalize(3, (2,))
    saved.normalize_rewards(np.array([1.0, 2.0, 3.0]), np.zeros(3, bool))
    same, elsewhere, fewer = VecNormalize(3, (2,)), VecNormalize(3, (2,)), VecNormalize(2, (2,))
    same.set_state(saved.state())
    elsewhere.set_state(saved.state(), returns=False)
    fewer.set_state(saved.state())
    np.testing.assert_array_equal(same.returns, [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(elsewhere.returns, np.zeros(3))
    np.testing.assert_array_equal(fewer.returns, np.zeros(2))
    for restored in (same, elsewhere, fewer):
        assert restored.return_moments.var == saved.return_moments.var
    # They are copies: a change of one does not affect the other.
    saved.normalize_rewards(np.array([5.0, 5.0, 5.0]), np.ones(3, bool))
    np.testing.assert_array_equal(same.returns, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"obs_mean must have shape \(3,\), got \(2,\); the environment differs"):
        VecNormalize(3, (3,)).set_state(saved.state())
    lacking = {key: value for key, value in saved.state().items() if key != "return_var"}
    with pytest.raises(ValueError, match=r"return_var must have shape \(\), got nothing"):
        VecNormalize(3, (2,)).set_state(lacking)


@pytest.mark.parametrize("truncate", [True, False])
def test_a_collector_counts_every_observation_once_and_ends_sums_at_every_boundary(truncate):
    """Countdowns of four steps, reward 1, discount 1/2: the sums are 1, 1.5, 1.75, 1.875 and then restart, whether
    the episode terminated or was truncated."""
    normalizer = VecNormalize(2, (1,), 0.5, clip_rewards=1e6)
    collector = RolloutCollector(
        lambda: probes.Countdown(limit=4, truncate=truncate), n_envs=2, gamma=0.5, normalizer=normalizer
    )
    for _ in range(2):
        collector.collect(ValueOfTheNormalised(), 6)
    # What the policy saw, the first of all included: 0 1 2 3 0 1 2 3 0 1 2 3 0.
    seen = np.array([*range(4), *range(4), *range(4), 0])
    assert normalizer.obs_moments.count == pytest.approx(2 * len(seen), abs=1e-3)
    np.testing.assert_allclose(normalizer.obs_moments.mean, seen.mean(), rtol=1e-4)
    np.testing.assert_allclose(normalizer.obs_moments.var, seen.var(), rtol=1e-3)
    sums = np.tile([1.0, 1.5, 1.75, 1.875], 3)
    np.testing.assert_allclose(normalizer.return_moments.mean, sums.mean(), rtol=1e-3)
    np.testing.assert_allclose(normalizer.return_moments.var, sums.var(), rtol=2e-3)
    np.testing.assert_array_equal(normalizer.returns, [0.0, 0.0])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_predict_normalises_as_training_did(backend):
    dqn = DQN("CartPole-v1", 2, 0, normalize_obs=True, backend=backend, hidden_sizes=[8], learning_starts=8)
    dqn.train(200)
    obs = np.random.default_rng(0).normal(0, 0.5, (200, 4)).astype(np.float32)
    with torch.no_grad():
        values, raw = (dqn.policy(torch.from_numpy(x)) for x in (dqn.normalizer.normalize(obs), obs))
    assert (values.argmax(1) != raw.argmax(1)).any()
    np.testing.assert_array_equal(dqn.predict(obs), values.argmax(1).numpy())


class Clock(gymnasium.Env):
    """Observes a number near `start` that grows by 1 in each step."""

    action_space = spaces.Discrete(2)

    def __init__(self, start=1.7e9, dtype=np.float64):
        self.observation_space = spaces.Dict(
            {"speed": spaces.Box(-1, 1, (2,), np.float32), "time": spaces.Box(0, 1e12, (1,), dtype)}
        )
        self.start, self.dtype = start, dtype

    def _obs(self):
        return {"speed": np.zeros(2, np.float32), "time": np.array([self.start + self.t], self.dtype)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), 1.0, False, self.t == 20, {}


@pytest.mark.parametrize("algorithm", [PPO, DQN])
@pytest.mark.parametrize("start", [1.7e9, -3e8])
def test_changes_that_float32_cannot_represent_are_named_once(algorithm, start):
    settings = {"n_steps": 64} if algorithm is PPO else {"learning_starts": 2000}
    agent = algorithm(Clock, n_envs=2, env_kwargs={"start": start}, normalize_obs=True, **settings)
    with pytest.warns(RuntimeWarning, match=r"number 0 of 'time': smaller changes of it are lost") as record:
        agent.train(2200)
    assert len([one for one in record if "normalize_obs" in str(one.message)]) == 1


@pytest.mark.parametrize(("start", "dtype"), [(1e6, np.float64), (1.7e9, np.float32)])
def test_no_warning_if_nothing_is_lost_here(start, dtype, recwarn):
    """Below 2**24, float32 has all whole numbers; and the environment itself may have float32."""
    PPO(Clock, n_envs=2, n_steps=64, env_kwargs={"start": start, "dtype": dtype}, normalize_obs=True).train(2200)
    assert not [one for one in recwarn if "normalize_obs" in str(one.message)]


class Bytes(DiscretePolicy):
    """Notes the types of what it sees."""

    def __init__(self):
        super().__init__(900, 3, [8])
        self.seen = set()

    def mode(self, obs, *more):
        self.seen.add((obs.dtype, float(obs.max())))
        return super().mode(obs.flatten(1).float(), *more)


def test_images_stay_bytes_in_evaluations_if_only_rewards_are_normalised():
    for normalize in (False, True):
        policy = Bytes()
        agent = PPO("rlox/DrawnCatch-v0", policy=policy, normalize_rewards=normalize)
        agent.evaluate(2)
        assert policy.seen == {(torch.uint8, 255.0)}


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"n_envs": 0}, "n_envs must be >= 1, got 0"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ({"gamma": math.nan}, r"gamma must be in \[0, 1\], got nan"),
        ({"clip_obs": 0.0}, "clip_obs must be > 0, got 0.0"),
        ({"clip_rewards": -1.0}, "clip_rewards must be > 0, got -1.0"),
        ({"most_return": math.nan}, "most_return must be > 0, got nan"),
    ],
)
def test_wrong_arguments_are_refused(arguments, rule):
    with pytest.raises(ValueError, match=f"VecNormalize: {rule}"):
        VecNormalize(**{"n_envs": 2, "obs_shape": (3,), **arguments})

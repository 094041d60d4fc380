"""What SAC and TD3 share: bounds, twin critics, memories, checkpoints, the command line."""

import copy
import json
from typing import ClassVar

import forked
import gymnasium
import numpy as np
import probes
import pytest
import textbook
import torch
from gymnasium import spaces
from run_results import Losses
from torch import nn

import rlox
from rlox.algorithms import SAC, TD3
from rlox.kernels.rng import Rng
from rlox.nn.actors import DeterministicPolicy, QNetwork, SquashedGaussianPolicy
from rlox.nn.critics.ensemble import TwinQNetwork
from rlox.nn.critics.heads import MeanHead
from rlox.offline.collect import Behaviour, collect

BOTH = pytest.mark.parametrize("kind", [SAC, TD3])
SMALL = {"hidden_sizes": [32, 32], "buffer_size": 2_000, "batch_size": 32, "learning_starts": 20}


def box(low, high, image=False):
    """An environment with these bounds that is never stepped."""

    class Boxed(gymnasium.Env):
        observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8) if image else spaces.Box(-1.0, 1.0, (3,))
        action_space = spaces.Box(np.float32(low), np.float32(high), (2,), np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

    return Boxed


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_twin_networks_are_two_networks(activation):
    twin = TwinQNetwork(3, 2, (8, 6), activation, Rng(1))
    rng = Rng(1)
    pair = [QNetwork(3, 2, (8, 6), activation, rng) for _ in range(2)]
    obs, actions = torch.randn(5, 3), torch.randn(5, 2)
    values = twin(obs, actions)
    assert pair[0](obs, actions).shape == (5, 1)
    torch.testing.assert_close(values, torch.stack([q(obs, actions)[:, 0] for q in pair]))
    torch.testing.assert_close(twin.first(obs, actions), values[0])
    assert not torch.equal(values[0], values[1])


@BOTH
def test_actions_outside_the_networks_are_in_the_environments_units(kind):
    algorithm = kind(probes.Levers, n_envs=4, seed=0, **{**SMALL, "learning_starts": 400})
    algorithm.train(800)
    kept = algorithm.buffer.gather(np.arange(800))["actions"]
    for rows in (kept[:400], kept[400:]):  # random actions, and those of the policy
        assert (rows >= [-2, 0]).all()
        assert (rows <= [2, 1]).all()
    np.testing.assert_allclose(kept[:400].mean(0), [0, 0.5], atol=0.15)
    np.testing.assert_allclose(kept[:400].min(0), [-2, 0], atol=0.05)
    np.testing.assert_allclose(kept[:400].max(0), [2, 1], atol=0.05)
    obs = torch.randn(6, 3)
    with torch.no_grad():
        unit, actions = algorithm.policy.unit_mode(obs), algorithm.policy.mode(obs)
    torch.testing.assert_close(actions, textbook.LOW + (unit + 1) / 2 * (textbook.HIGH - textbook.LOW))
    torch.testing.assert_close(algorithm.policy.to_unit(actions), unit)
    np.testing.assert_allclose(algorithm.predict(obs.numpy()), actions, rtol=1e-5)


@BOTH
def test_both_levers_are_moved_to_their_targets(kind):
    algorithm = kind(probes.Levers, n_envs=4, seed=0, train_freq=4, learning_rate=3e-3, gamma=0.5, **SMALL)
    algorithm.train(4_000)
    # Staying at (0, 0.5), where tanh is 0, costs 1.3 per step.
    assert algorithm.evaluate(10).returns.mean() / 5 > -0.25


@BOTH
@pytest.mark.parametrize(("low", "high"), [(-np.inf, np.inf), (-1.0, np.inf), (-3e38, 3e38), (1.0, 1.0)])
def test_bounds_must_be_finite_and_different(kind, low, high):
    with pytest.raises(ValueError, match=r"bounds of the environment's actions must be finite and apart.*or take PPO"):
        kind(box(low, high))


@BOTH
def test_invalid_input_is_an_error_before_training(kind):
    with pytest.raises(ValueError, match=r"observations must be vectors, got images of shape \(1, 36, 36\); take PPO"):
        kind(box(-1.0, 1.0, image=True))
    kind(box(-1.0, 1.0, image=True), env_wrappers=["FlattenObservation"], **SMALL)
    if kind is not SAC:  # which learns them
        able = "A2C, APPO, DQN, DREAMER, IMPALA, MAPPO, PPO, SAC"
        with pytest.raises(ValueError, match=f"actions must be continuous, got 2 discrete actions; .* for {able}"):
            kind("CartPole-v1")
    with pytest.raises(ValueError, match=r"the buffer's size must be at least batch_size \(256\)"):
        kind("Pendulum-v1", buffer_size=100)


@BOTH
def test_a_custom_network(kind, tmp_path):
    def network(n_in=3):
        return nn.Sequential(nn.Linear(n_in, 8), nn.LayerNorm(8), nn.Linear(8, kind.Policy.outputs_per_action))

    torch.manual_seed(0)
    mine = network()
    algorithm = kind("Pendulum-v1", policy=mine, **SMALL)
    assert algorithm.policy.net is mine
    before = copy.deepcopy(mine.state_dict())
    algorithm.train(100)
    assert not any(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    algorithm.save(tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match="pass policy="):
        kind.from_checkpoint(tmp_path / "mine.safetensors")
    again = kind.from_checkpoint(tmp_path / "mine.safetensors", policy=network())
    assert again.predict(np.ones(3)) == algorithm.predict(np.ones(3))
    with pytest.raises(ValueError, match=r"policy must return .*, \(B, 4\)" if kind is SAC else r"\(B, 2\), got"):
        kind(probes.Levers, policy=network())
    with pytest.raises(ValueError, match=r"must take observations of shape \(B, 3,\)"):
        kind("Pendulum-v1", policy=network(5))
    ready = (SquashedGaussianPolicy if kind is SAC else DeterministicPolicy)(3, 1, 16)
    assert kind("Pendulum-v1", policy=ready, **SMALL).policy is ready
    assert ready.scale.item() == 2.0  # Pendulum's torque


@BOTH
def test_the_memory_gets_both_critics_errors(kind, monkeypatch):
    mean_loss = MeanHead.loss
    algorithm = kind(probes.Levers, seed=0, prioritized=True, backend="torch", **SMALL)
    algorithm.train(60)
    batch = algorithm.sample()
    updated, found = [], []

    class Memory:
        def update_priorities(self, indices, priorities):
            updated.append((indices, priorities))

    def loss(head, outputs, targets, weights):
        found.append((outputs - targets).detach())
        return mean_loss(head, outputs, targets, weights)

    algorithm._memory._buffer = Memory()
    monkeypatch.setattr(MeanHead, "loss", loss)
    metrics = algorithm.update(batch)
    ((indices, priorities),), (errors,) = updated, found
    assert np.array_equal(indices, batch.indices)
    np.testing.assert_allclose(priorities, errors.abs().mean(0).numpy(), rtol=1e-4, atol=1e-6)
    assert batch.weights.min() < 1
    torch.testing.assert_close(metrics["q_loss"], (batch.weights * errors**2).mean())


@BOTH
@pytest.mark.parametrize("buffer", ["prioritized", "mmap"])
def test_continues_exactly_with_every_memory_and_normalised_observations(kind, buffer, tmp_path):
    """Saved after 71 updates, which is between two updates of TD3's policy."""
    config = {"name": buffer, "size": 2_000, "n_step": 3, **({"hot_size": 100} if buffer == "mmap" else {})}
    settings = {**SMALL, "buffer_size": None, "buffer": config, "normalize_obs": True}
    straight, saved = (kind("Pendulum-v1", seed=1, **settings) for _ in range(2))
    straight.train(90)
    saved.train(90)
    assert saved.counters.updates % 2 == 1
    saved.save(tmp_path / "a.safetensors")
    saved.save_buffer(tmp_path / "a.memory")
    loaded = kind.from_checkpoint(tmp_path / "a.safetensors")
    loaded.load_buffer(tmp_path / "a.memory")
    expected, metrics = straight.train(60), loaded.train(60)
    same = [key for key in expected if not key.startswith("time/")]
    assert [metrics[key] for key in same] == [expected[key] for key in same]
    ours, theirs = (x._own_state()[1] for x in (loaded, straight))
    for section in theirs:
        for name, value in theirs[section].items():
            assert np.array_equal(ours[section][name], value), (section, name)
    for algorithm in (straight, saved, loaded):
        algorithm.close()


def noise_taken(kind, env, n_steps, **settings):
    """The noise (n_steps, N, A) in [-1, 1] that was added to a policy that always acts in the middle of the bounds."""
    algorithm = kind(env, seed=0, **{**SMALL, **settings})
    with torch.no_grad():
        for p in algorithm.policy.net[-1].parameters():
            p.zero_()
        if kind is SAC:
            algorithm.policy.net[-1].bias[algorithm.spec.act_dim :] = -20.0  # log standard deviations
    for _ in range(n_steps):
        algorithm.collector.step(algorithm.actor, algorithm.buffer)
    n = n_steps * algorithm.n_envs
    actions = torch.from_numpy(algorithm.buffer.gather(np.arange(n))["actions"])
    return algorithm.policy.to_unit(actions).numpy().reshape(n_steps, algorithm.n_envs, -1)


def correlation(x, y):
    return np.corrcoef(x.ravel(), y.ravel())[0, 1]


SMALL_NOISE = {"exploration_noise": 0.2, "noise_correlation": 0.9}


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_noise_has_its_size_and_correlation(kind, backend):
    """Tolerances of at least four standard errors: 36,000 correlated steps count as 3,800 independent ones."""
    settings = {"n_envs": 8, "buffer_size": 36_000, "backend": backend, **SMALL_NOISE}
    x = noise_taken(kind, lambda: probes.ConstantReward(4_500, True), 4_500, **settings)
    assert x.std() == pytest.approx(0.2, rel=0.05)
    assert abs(x.mean()) < 0.02
    assert correlation(x[1:], x[:-1]) == pytest.approx(0.9, abs=0.015)
    assert correlation(x[10:], x[:-10]) == pytest.approx(0.9**10, abs=0.1)
    assert abs(correlation(x[:, 1:], x[:, :-1])) < 0.1  # environments have independent noise


@BOTH
def test_noise_restarts_with_each_episode(kind):
    settings = {"n_envs": 64, "buffer_size": 16_000, **SMALL_NOISE}
    limits = noise_taken(kind, lambda: probes.ConstantReward(5, True), 250, **settings)
    x = limits.reshape(50, 5, 64)
    assert correlation(x[:, 1:], x[:, :-1]) == pytest.approx(0.9, abs=0.02)
    assert abs(correlation(x[1:, 0], x[:-1, -1])) < 0.07
    np.testing.assert_allclose(x.std((0, 2)), 0.2, rtol=0.06)  # the first step has the same deviation as later ones
    ends = noise_taken(kind, probes.ReachTheTarget, 100, **settings)
    assert abs(correlation(ends[1:], ends[:-1])) < 0.05


def test_noise_of_an_episode_that_began_while_actions_were_random_starts_anew():
    td3 = TD3("Pendulum-v1", exploration_noise=0.5, noise_correlation=0.9, **SMALL)
    one, other = td3._make_noise(3), td3._make_noise(3)
    for ended in ([True, False, False], [False] * 3):
        one.end(np.array(ended))
    still = np.zeros((3, 1), np.float32)
    np.testing.assert_array_equal(one.add(still, Rng(0, 0)), other.add(still, Rng(0, 0)))


@BOTH
def test_noise_is_the_same_on_both_backends_and_clipped_to_the_bounds(kind):
    """Levers of different ranges, with noise within the bounds and far beyond them."""
    settings = {"n_envs": 3, "noise_correlation": 0.8}
    small, large = (
        [
            noise_taken(kind, probes.Levers, 40, exploration_noise=std, backend=b, **settings)
            for b in ("torch", "native")
        ]
        for std in (0.3, 50.0)
    )
    np.testing.assert_allclose(small[0], small[1], atol=1e-6)
    assert 0.2 < small[0].std() < 0.4
    np.testing.assert_allclose(np.abs(large).mean(), 1.0, atol=0.02)
    assert np.abs(large).max() <= 1.0 + 1e-6


def test_the_policy_adds_independent_noise():
    td3 = TD3("Pendulum-v1", **SMALL)
    assert (td3.policy.noise_std, td3.collector.exploration) == (0.1, None)
    assert SAC("Pendulum-v1", **SMALL).collector.exploration is None
    x = noise_taken(SAC, probes.Levers, 200, n_envs=4, exploration_noise=0.2)
    assert x.std() == pytest.approx(0.2, rel=0.1)
    assert abs(correlation(x[1:], x[:-1])) < 0.1
    assert TD3("Pendulum-v1", noise_correlation=0.9, **SMALL).policy.noise_std == 0.0


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_noise_continues_exactly_if_the_environments_do(kind, backend, tmp_path):
    settings = {"n_envs": 2, "seed": 1, "backend": backend, "exploration_noise": 0.5, "noise_correlation": 0.97}
    settings["train_freq"] = 10
    straight, saved = (kind("Pendulum-v1", **settings, **SMALL) for _ in range(2))
    straight.train(90)
    saved.train(90)
    straight.evaluate(1)
    saved.save(tmp_path / "a.safetensors", memory=True)
    loaded = kind.from_checkpoint(tmp_path / "a.safetensors")
    straight.train(450)
    loaded.train(450)  # past the end of an episode
    ours, theirs = ({**x.buffer.get_state(), **x._own_state()[1]} for x in (loaded, straight))
    np.testing.assert_equal(ours, theirs)

    elsewhere = kind.from_checkpoint(tmp_path / "a.safetensors", env_wrappers=["RecordEpisodeStatistics"])
    assert elsewhere.collector.restore_note() is not None
    assert elsewhere.collector.exploration.state()["starts"].all()
    assert not loaded.collector.exploration.state()["starts"].any()
    with pytest.raises(ValueError, match=r"z must be a finite array \(2, 1\) of float32, got \(3, 1\) of float32"):
        loaded.collector.exploration.set_state({"z": np.zeros((3, 1), np.float32), "starts": np.ones(2, bool)})
    with pytest.raises(ValueError, match=r"starts must be a finite array \(2,\) of bool, got none"):
        loaded.collector.exploration.set_state({"z": np.zeros((2, 1), np.float32)})


class Recorder(probes.Levers):
    """Keeps the actions it receives, scaled to [-1, 1]."""

    taken: ClassVar[list] = []

    def step(self, action):
        self.taken.append((action - [0.0, 0.5]) / [2.0, 0.5])
        return super().step(action)


gymnasium.register("Recorder-v0", Recorder)


def in_the_middle(kind, **settings):
    """An algorithm whose policy always acts in the middle of the bounds."""
    algorithm = kind("Recorder-v0", seed=0, **{**SMALL, **settings})
    with torch.no_grad():
        for p in algorithm.policy.net[-1].parameters():
            p.zero_()
        if kind is SAC:
            algorithm.policy.net[-1].bias[algorithm.spec.act_dim :] = -20.0  # log standard deviations
    return algorithm


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("backend", "noise_correlation"),
    [
        ("torch", 0.9),
        ("native", 0.9),
        ("native", 0.0),
        pytest.param("torch", 0.0, marks=pytest.mark.exhaustive),
    ],
)
def test_stochastic_evaluation_and_collect_have_the_noise_of_training(kind, backend, noise_correlation, tmp_path):
    """Stochastic evaluation and `collect` add noise of the configured size and correlation, clipped to the bounds."""
    algorithm = in_the_middle(kind, backend=backend, exploration_noise=0.3, noise_correlation=noise_correlation)
    algorithm.save(tmp_path / "a.safetensors")
    algorithm = kind.from_checkpoint(tmp_path / "a.safetensors")

    def played(n_episodes, deterministic):
        Recorder.taken.clear()
        algorithm.evaluate(n_episodes, deterministic=deterministic)
        return np.array(Recorder.taken).reshape(n_episodes, 5, 2)

    assert np.abs(played(2, True)).max() < 1e-6
    played(1, False)
    by_evaluation = played(400, False)
    env = {"id": "Recorder-v0", "kwargs": {}, "wrappers": []}
    reported = collect([Behaviour("it", 1.0, algorithm)], env, 2000, tmp_path / "a.arrow", n_envs=2)
    rows = rlox.open_dataset(tmp_path / "a.arrow").get_state()
    by_collect = algorithm.policy.to_unit(torch.tensor(rows["actions"])).numpy().reshape(400, 5, 2)
    for x in (by_evaluation, by_collect):
        assert x.std() == pytest.approx(0.3, rel=0.1)
        assert np.abs(x).max() <= 1 + 1e-6
        assert correlation(x[:, 1:], x[:, :-1]) == pytest.approx(noise_correlation, abs=0.1)
        assert abs(correlation(x[1:, 0], x[:-1, 4])) < 0.15  # noise is independent between episodes
    assert np.array_equal(played(400, False), by_evaluation)
    assert reported["policies"][0] == {
        **reported["policies"][0], "deterministic": False, "exploration_noise": 0.3,
        "noise_correlation": noise_correlation,
    }  # fmt: skip
    reported = collect([Behaviour("it", 1.0, algorithm)], env, 20, tmp_path / "b.arrow", n_envs=2, deterministic=True)
    rows = rlox.open_dataset(tmp_path / "b.arrow").get_state()
    assert np.abs(algorithm.policy.to_unit(torch.tensor(rows["actions"])).numpy()).max() < 1e-6
    assert reported["policies"][0]["deterministic"] is True
    assert "exploration_noise" not in reported["policies"][0]


def test_a_policy_without_noise_is_reported_as_deterministic(tmp_path):
    td3 = in_the_middle(TD3, exploration_noise=0.0)
    env = {"id": "Recorder-v0", "kwargs": {}, "wrappers": []}
    reported = collect([Behaviour("it", 1.0, td3)], env, 20, tmp_path / "a.arrow", n_envs=2)
    assert reported["policies"][0]["deterministic"] is True
    sac = in_the_middle(SAC)
    reported = collect([Behaviour("it", 1.0, sac)], env, 20, tmp_path / "b.arrow", n_envs=2)
    assert reported["policies"][0]["deterministic"] is False


@BOTH
def test_noise_settings_are_checked(kind):
    for settings, message in (
        ({"exploration_noise": -0.1}, r"exploration_noise must be in \[0, 100\], got -0.1"),
        ({"exploration_noise": 0.1, "noise_correlation": 1.0}, r"noise_correlation must be in \[0, 1\), got 1.0"),
        ({"exploration_noise": 0.1, "noise_correlation": -0.5}, r"noise_correlation must be in \[0, 1\), got -0.5"),
        ({"exploration_noise": 0.0, "noise_correlation": 0.5}, "exploration_noise must be > 0 if noise_correlation"),
    ):
        with pytest.raises(ValueError, match=message):
            kind("Pendulum-v1", **settings)


@BOTH
def test_init_from_loads_the_critics(kind, tmp_path):
    first = kind("Pendulum-v1", seed=0, **SMALL)
    first.train(60)
    first.save(tmp_path / "a.safetensors")
    second = kind("Pendulum-v1", seed=1, **SMALL)
    second.init_from(tmp_path / "a.safetensors")
    pairs = [(second.policy, first.policy), (second.critics, first.critics), (second.target, first.critics)]
    if kind is TD3:
        pairs += [(second.target_policy, first.policy)]
    for ours, theirs in pairs:
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert second.train(60)["q_loss"] > 0
    assert not torch.equal(second.target.weights[0], first.critics.weights[0])


@BOTH
def test_learning_rate_falls_in_every_optimiser(kind):
    algorithm = kind("Pendulum-v1", seed=0, learning_rate_schedule="linear", **SMALL)
    algorithm.train(100)
    rates = [optimizer.learning_rate for optimizer in algorithm.optimizers]
    assert len(rates) == (3 if kind is SAC else 2)
    # The rate of the last update, whose step began after all steps but one.
    assert rates == pytest.approx([0.01 * algorithm.config.learning_rate] * len(rates))


@pytest.mark.slow
@BOTH
def test_from_the_command_line(kind, tmp_path):
    small = ["algo.hidden_sizes=[16]", "algo.learning_starts=50", "algo.batch_size=16", "buffer=prioritized"]
    train = [f"algo={kind.name}", "env=Pendulum-v1", "total_timesteps=300", "eval.n_points=1", "eval.n_episodes=2"]
    done = forked.run("train", *train, *small, "logger=none", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any({"loss/q", "loss/policy"} <= set(row) for row in rows)
    done = forked.run("eval", run, cwd=tmp_path)
    assert "reproduced exactly" in done.stdout


# [q_loss, q_value, td_error, policy_loss], and SAC's [entropy, alpha], of five rounds of two updates.
PINNED = {
    "sac": [
        [47.08889, 0.1492507, 6.018982, -0.5936131, 0.5891123, 0.9950249],
        [46.50919, -0.004867134, 5.952403, -0.4951731, 0.6632667, 0.9753013],
        [44.70900, -0.1242448, 5.639481, -0.1820827, 0.4850818, 0.9560394],
        [43.65519, -0.2831204, 5.946918, -0.1485438, 0.6397187, 0.9372553],
        [34.16463, -0.4255220, 4.921465, -0.02106750, 0.6424675, 0.9187429],
    ],
    "td3": [
        [61.81738, 0.03611483, 7.301324, 0.2182636],
        [37.80322, -0.1146286, 5.082624, 0.3626764],
        [41.46118, -0.3143328, 5.192145, 0.5296758],
        [57.46853, -0.6361036, 6.606870, 0.9291887],
        [51.47687, -0.9048626, 6.251741, 1.214148],
    ],
}


@BOTH
def test_pinned_trajectory(kind):
    log = Losses("q", "q_value", "td_error", "policy", *(("entropy", "alpha") if kind is SAC else ()))
    settings = {"batch_size": 16, "buffer_size": 500, "learning_starts": 32, "train_freq": 8, "learning_rate": 1e-2}
    settings |= {"hidden_sizes": [16, 16], "gradient_steps": 2, "n_envs": 4, "seed": 7}
    kind("Pendulum-v1", logger=log, **settings).train(64)
    np.testing.assert_allclose(log.rows, PINNED[kind.name], rtol=1e-4, atol=1e-5)

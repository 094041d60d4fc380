"""Stepping many environments into a replay memory."""

import numpy as np
import probes
import pytest
import torch
from outside_buffer import NewestBuffer

from rlox import ReplayBuffer
from rlox.collectors import ReplayCollector
from rlox.nn.actors import QPolicy


def pushed(collector, n, policy=None):
    """The rows that `n` steps push to the memory, by column; without a policy actions are random."""
    spec = collector.spec
    memory = NewestBuffer(10_000, spec.obs_dim, int(np.prod(spec.action_shape)))
    ended = [collector.step(policy, memory, random=policy is None) for _ in range(n)]
    return memory.get_state(), ended


def test_transitions_equal_the_steps_of_the_environment():
    rows, ended = pushed(ReplayCollector(lambda: probes.Countdown(3, True), n_envs=2, seed=0), 7)
    obs = np.repeat([0, 1, 2, 0, 1, 2, 0], 2)
    assert np.array_equal(rows["obs"][:, 0], obs)
    assert np.array_equal(rows["next_obs"][:, 0], obs + 1)  # at the limit 3, not the next episode's 0
    assert np.array_equal(rows["truncated"], obs == 2)
    assert not rows["terminated"].any()
    assert (rows["rewards"] == 1).all()
    assert rows["actions"].shape == (14, 1)
    assert [returns.tolist() for returns, _ in ended] == [[], [], [3.0, 3.0], [], [], [3.0, 3.0], []]
    assert ended[2][1].tolist() == [3, 3]


def test_native_environments_and_gymnasiums_alike():
    for backend in ("auto", "gymnasium"):
        rows, _ = pushed(ReplayCollector("CartPole-v1", n_envs=3, seed=0, env_backend=backend), 100)
        obs, after = rows["obs"].reshape(100, 3, 4), rows["next_obs"].reshape(100, 3, 4)
        over = (rows["terminated"] | rows["truncated"]).reshape(100, 3)
        assert over.any()
        assert np.array_equal(obs[1:][~over[:-1]], after[:-1][~over[:-1]])
        assert (np.abs(obs[1:][over[:-1]]) <= 0.05).all()
        assert (np.abs(after[:-1][over[:-1]]) > 0.05).any(1).all()


def test_one_environment_of_seed_0_by_default():
    np.testing.assert_array_equal(
        ReplayCollector("CartPole-v1").observe(), ReplayCollector("CartPole-v1", 1, 0).observe()
    )


def test_random_actions_cover_the_space():
    rows, _ = pushed(ReplayCollector("CartPole-v1", n_envs=4, seed=0), 100)
    assert 150 < rows["actions"].sum() < 250
    rows, _ = pushed(ReplayCollector("Pendulum-v1", n_envs=4, seed=0), 100)
    assert rows["actions"].dtype == np.float32
    assert -2 <= rows["actions"].min() < -1.8 < 1.8 < rows["actions"].max() <= 2
    rows, _ = pushed(ReplayCollector(probes.TwoSwitches, n_envs=4, seed=0), 50)
    assert {tuple(row) for row in rows["actions"].tolist()} == {(a, b) for a in (0, 1) for b in (0, 1, 2)}


def test_images_are_pushed_flat():
    collector, seen = ReplayCollector(probes.BrightSide, n_envs=2, seed=0), []

    class Memory:
        def push_batch(self, obs, next_obs, *rest):
            seen.extend([obs.copy(), next_obs.copy()])

    collector.step(None, Memory(), random=True)
    assert [images.shape for images in seen] == [(2, 36 * 36)] * 2
    assert seen[0].dtype == np.uint8
    assert seen[0].any()


def test_reward_fn_replaces_rewards_and_may_keep_its_arguments():
    kept = []

    def shaped(obs, actions, raw_rewards):
        kept.append((obs, actions, raw_rewards))
        return 10 * raw_rewards + actions

    rows, ended = pushed(ReplayCollector(lambda: probes.Countdown(3), n_envs=2, seed=0, reward_fn=shaped), 4)
    assert np.array_equal(rows["rewards"], 10 + rows["actions"][:, 0])
    assert np.array_equal(np.concatenate([obs for obs, _, _ in kept]), rows["obs"])
    assert ended[2][0].tolist() == [3.0, 3.0]  # of the environment's rewards
    wrong = ReplayCollector("CartPole-v1", seed=0, reward_fn=lambda obs, actions, raw_rewards: np.zeros(3))
    with pytest.raises(ValueError, match=r"ReplayCollector\.step: reward_fn must return an array of shape \(1,\)"):
        pushed(wrong, 1)


def test_a_policy_acts_with_the_collectors_noise():
    class Right(torch.nn.Module):
        def forward(self, obs):
            return torch.tensor([[0.0, 1.0]]).expand(len(obs), 2)

    rows, _ = pushed(ReplayCollector("CartPole-v1", n_envs=4, seed=0), 20, QPolicy(Right(), 2))
    assert (rows["actions"] == 1).all()
    rows, _ = pushed(ReplayCollector("CartPole-v1", n_envs=4, seed=0), 500, QPolicy(Right(), 2, epsilon=0.4))
    assert 0.16 < 1 - rows["actions"].mean() < 0.24
    with pytest.raises(ValueError, match=r"must act with shape \(4,\) on Pendulum-v1|must act with shape \(4, 1\)"):
        pushed(ReplayCollector("Pendulum-v1", n_envs=4, seed=0), 1, QPolicy(Right(), 2))


def test_native_state_continues_in_the_same_bits():
    straight = ReplayCollector("CartPole-v1", n_envs=2, seed=3)
    pushed(straight, 30)
    other = ReplayCollector("CartPole-v1", n_envs=2, seed=9)
    other.set_state(straight.state())
    other.rng.set_state(straight.rng.get_state())
    ours, theirs = pushed(straight, 30)[0], pushed(other, 30)[0]
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_a_memory_without_n_step_returns_needs_no_cut():
    memory = NewestBuffer(100, 4, 1)
    for seed in (0, 1):  # the second collector starts new episodes after the transitions of the first
        ReplayCollector("CartPole-v1", seed=seed).step(None, memory, random=True)
    assert len(memory) == 2


@pytest.mark.parametrize("n_step", [1, 3])
def test_after_a_step_that_is_lost_new_episodes_start(n_step):
    """The third step, which ends an episode, does not reach the memory: nothing may cross the gap."""
    reward_fn = probes.FailsOnce(3, RuntimeError("once"))
    collector = ReplayCollector(lambda: probes.Countdown(3, True), n_envs=2, seed=0, reward_fn=reward_fn)
    collector.n_step = n_step
    memory = ReplayBuffer(100, 1, 1, n_envs=2, n_step=n_step)
    for step in range(9):
        if step == 2:
            with pytest.raises(RuntimeError, match="once"):
                collector.step(None, memory, random=True)
            assert collector.state() is None
            assert collector.position() is None
        else:
            collector.step(None, memory, random=True)
    rows = memory.gather(np.arange(len(memory)))
    ahead = rows["next_obs"][:, 0] - rows["obs"][:, 0]
    assert ((ahead >= 1) & (ahead <= n_step)).all()
    np.testing.assert_allclose(rows["rewards"], (1 - 0.99**ahead) / (1 - 0.99), rtol=1e-5)

"""The environments and cells of benchmarks/memory_masks.py."""

import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import memory_masks
from benchmarks.peers import environments


def play(env_id: str, seed: int, n_steps: int = 200) -> list[tuple]:
    """Return what is observed in `n_steps` steps of random valid actions that the seed decides."""
    env, rng, seen = gymnasium.make(env_id), np.random.default_rng(seed), []
    obs, _ = env.reset(seed=seed)
    for _ in range(n_steps):
        mask = env.unwrapped.action_masks()
        assert mask.shape == (env.action_space.n,)
        assert mask.any()
        obs, reward, terminated, truncated, _ = env.step(rng.choice(np.flatnonzero(mask)))
        assert env.observation_space.contains(obs)
        seen.append((np.asarray(obs).tolist(), mask.tolist(), reward, terminated, truncated))
        if terminated or truncated:
            env.reset()
    return seen


@pytest.mark.parametrize("env_id", ["InvalidActions-v0", "ConnectFour-v0"])
def test_seed_decides_the_masked_environments(env_id):
    if env_id == "ConnectFour-v0":
        pytest.importorskip("pygame")
    assert play(env_id, 3) == play(env_id, 3)
    assert play(env_id, 3) != play(env_id, 4)


def test_the_rewarded_action_is_always_valid():
    env = environments.InvalidActions(10, 8)
    obs, _ = env.reset(seed=0)
    for _ in range(50):
        mask = env.action_masks()
        assert mask.sum() == 2
        assert mask[obs]
        other = int(np.flatnonzero(mask)[mask.nonzero()[0] != obs][0])
        action = obs if env.np_random.random() < 0.5 else other
        rewarded = action == obs
        obs, reward, *_ = env.step(action)
        assert reward == rewarded


def test_each_side_begins_half_of_the_games_of_connect_four():
    pytest.importorskip("pygame")
    env = environments.ConnectFour()
    env.reset(seed=0)
    moves = [env.reset()[0].sum() for _ in range(200)]
    assert set(moves) == {0.0, 1.0}
    assert 70 < sum(moves) < 130


def test_a_column_of_four_wins_connect_four():
    pytest.importorskip("pygame")
    env, won = environments.ConnectFour(), 0
    for seed in range(20):
        env.reset(seed=seed)
        over = False
        while not over:
            mask = env.action_masks()
            _, reward, over, _, _ = env.step(0 if mask[0] else int(mask.argmax()))
        won += reward == 1
    assert won > 10


@pytest.mark.parametrize(
    ("env_id", "size"), [("CartPoleNoVel-v1", 2), ("PendulumNoVel-v1", 2), ("MountainCarContinuousNoVel-v0", 1)]
)
def test_velocities_are_hidden(env_id, size):
    env = gymnasium.make(env_id)
    obs, _ = env.reset(seed=0)
    assert obs.shape == (size,)
    assert env.observation_space.contains(obs)


@pytest.mark.parametrize("env_id", memory_masks.CELLS)
def test_both_sides_have_the_same_settings(env_id):
    theirs, words = memory_masks.their_settings(env_id), memory_masks.our_words(env_id)
    ours = dict(word.split("=", 1) for word in words)
    assert theirs["n_envs"] == int(ours["env.n_envs"])
    assert memory_masks.count_whole_rollouts(env_id, theirs["steps"]) == int(ours["total_timesteps"])
    for name in memory_masks.SAME_NAME:
        assert theirs["kw"][name] == float(ours[f"algo.{name}"])
    assert (theirs["algo"] == "RecurrentPPO") == ("algo.memory" in ours)
    assert (theirs["normalize"] is not None) == ("algo.normalize_obs" in ours)

"""The environments that need a memory, a mask, or both: their dynamics and the best returns that they document."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlox.envs import make_vec_env
from rlox.envs.mask_tasks import InvalidActions, MaskedBandit, MaskedTMaze
from rlox.envs.memory_tasks import TMaze
from rlox.envs.registry import announce_all
from rlox.kernels.rng import Rng

IDS = ["rlox/TMaze-v0", "rlox/MaskedBandit-v0", "rlox/MaskedTMaze-v0", "rlox/InvalidActions-v0"]


def returns(env, act, n_episodes=400):
    """The return of each episode of `act(observations so far, mask)`; masks come from info or the method."""
    totals = []
    for i in range(n_episodes):
        obs, info = env.reset(seed=0 if i == 0 else None)
        seen, total, over = [obs], 0.0, False
        while not over:
            mask = info["action_mask"] if "action_mask" in info else getattr(env, "action_masks", lambda: None)()
            obs, reward, terminated, truncated, info = env.step(act(seen, mask))
            seen.append(obs)
            total, over = total + reward, terminated or truncated
        totals.append(total)
    return np.array(totals)


@pytest.mark.parametrize("length", [1, 10, 50])
def test_t_maze_needs_the_first_observation(length):
    env = TMaze(length)
    assert (returns(env, lambda seen, mask: int(seen[0][0] > 0), 50) == 1).all()
    assert (returns(env, lambda seen, mask: int(seen[0][0] < 0), 50) == -1).all()
    for action in (0, 1):
        assert abs(returns(env, lambda seen, mask, action=action: action).mean()) < 0.15
    obs, _ = env.reset(seed=1)
    shown = [obs.tolist()]
    for t in range(length + 1):
        obs, reward, terminated, _, _ = env.step(t % 2)
        shown.append(obs.tolist())
        assert terminated == (t == length)
        assert (reward != 0) == terminated
    assert abs(shown[0][0]) == 1
    assert all(side == 0 for side, _ in shown[1:])
    assert [place for _, place in shown].index(1) == length
    with pytest.raises(ValueError, match="TMaze: length must be >= 1, got 0"):
        TMaze(0)


def test_masked_bandit_pays_what_it_says():
    env = MaskedBandit()
    best = returns(env, lambda seen, mask: 2 if mask[2] else 1)
    assert abs(best.mean() - 7.5) < 0.15
    assert (returns(env, lambda seen, mask: 1) == 5).all()  # the best without masks
    assert abs(returns(env, lambda seen, mask: 2).mean()) < 0.4
    with pytest.raises(ValueError, match="MaskedBandit: length must be >= 1, got 0"):
        MaskedBandit(0)


def test_masked_t_maze_needs_memory_and_mask():
    env, rng = MaskedTMaze(4), np.random.default_rng(99)

    def side(seen):
        return int(seen[0][0] > 0)

    def open_door(mask, right):
        return int(2 * right + mask[2 * right : 2 * right + 2].argmax())

    assert (returns(env, lambda seen, mask: open_door(mask, side(seen))) == 1).all()
    assert abs(returns(env, lambda seen, mask: open_door(mask, int(rng.integers(2)))).mean()) < 0.15
    assert abs(returns(env, lambda seen, mask: 2 * side(seen) + int(rng.integers(2))).mean()) < 0.15
    assert abs(returns(env, lambda seen, mask: int(rng.integers(4))).mean() + 0.5) < 0.15
    obs, info = env.reset(seed=3)
    for _ in range(4):
        assert info["action_mask"].all()
        assert obs[1] == 0
        obs, _, _, _, info = env.step(0)
    assert obs[1] == 1
    assert info["action_mask"][:2].sum() == info["action_mask"][2:].sum() == 1


def test_invalid_actions():
    env = InvalidActions(12, 9)
    assert (returns(env, lambda seen, mask: int(seen[-1]), 5) == 100).all()
    counts, n = np.zeros(12), 0
    for episode in range(30):
        obs, _ = env.reset(seed=episode)
        truncated, t = False, 0
        while not truncated:
            mask = env.action_masks()
            assert mask.sum() == 3
            assert mask[obs]
            counts[(np.arange(12) - obs) % 12] += mask
            action = int(env.np_random.integers(12))
            right = action == obs
            obs, reward, terminated, truncated, _ = env.step(action)
            t, n = t + 1, n + 1
            assert reward == float(right)
            assert not terminated
        assert t == 100
    assert counts[0] == n  # the right one is always legal, and every other one equally often
    assert np.abs(counts[1:] / n - 2 / 11).max() < 0.03
    uniform = np.random.default_rng(99)
    guessed = returns(env, lambda seen, mask: int(uniform.choice(np.flatnonzero(mask))), 20)
    assert abs(guessed.mean() - 100 / 3) < 4
    for kwargs, rule in (
        ({"dim": 0, "n_invalid": 0}, "dim must be >= 1, got 0"),
        ({"dim": 3, "n_invalid": 3}, r"n_invalid must lie in \[0, 2\], got 3"),
        ({"length": 0}, "length must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=f"InvalidActions: {rule}"):
            InvalidActions(**kwargs)


@pytest.mark.parametrize("env_id", [*IDS, "rlox/MountainCarContinuousHidden-v0"])
def test_registered_with_gymnasium_and_exactly_restorable(env_id):
    announce_all()
    if env_id in IDS:
        check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)
    vec, again = make_vec_env(env_id, 3, 1), make_vec_env(env_id, 3, 2)
    assert vec.unrestorable_reason is None
    assert vec.spec.masked == (env_id in IDS[1:])
    vec.reset_all()
    rng = Rng(0)

    def step(env, rng):
        return env.step_all(env.spec.random_actions(rng, 3, env.action_masks()))

    for _ in range(7):
        step(vec, rng)
    again.set_state(vec.get_state())
    rngs = Rng(1), Rng(1)
    for _ in range(130):
        one, other = (step(env, own) for env, own in zip((vec, again), rngs, strict=True))
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_mountain_car_shows_only_its_position():
    announce_all()
    hidden, whole = gymnasium.make("rlox/MountainCarContinuousHidden-v0"), gymnasium.make("MountainCarContinuous-v0")
    assert hidden.observation_space.shape == (1,)
    assert hidden.spec.max_episode_steps == 999
    obs, full = hidden.reset(seed=4)[0], whole.reset(seed=4)[0]
    for t in range(50):
        assert obs == full[:1]
        action = np.array([np.sin(t / 7)], np.float32)
        (obs, reward, *_), (full, expected, *_) = hidden.step(action), whole.step(action)
        assert reward == expected


@pytest.mark.parametrize(
    ("env", "state"),
    [
        (TMaze(), [11, 1]),
        (TMaze(), [0, 0]),
        (MaskedBandit(), [10, True]),
        (MaskedTMaze(), [0, 1, np.zeros(4, np.bool_)]),
        (MaskedTMaze(), [11, 1, np.ones(4, np.bool_)]),
        (InvalidActions(3, 1), [0, 0, np.array([False, True, True])]),
        (InvalidActions(3, 1), [100, 0, np.ones(3, np.bool_)]),
    ],
)
def test_other_states_are_refused(env, state):
    with pytest.raises(ValueError, match=rf"{type(env).__name__}\.set_state: state must"):
        env.set_state(state)

"""The tasks DrawnCatch, with image observations, and CartPole and Pendulum without velocities."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from counting_agent import Counting
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from rlox.envs import make_vec_env
from rlox.envs.memory_tasks import DrawnCatch, KeepNumbers
from rlox.envs.registry import TASKS
from rlox.evaluation.episodes import evaluate


def where(image):
    """Row and column of the ball, and the columns of the paddle."""
    row, column = np.argwhere(image[..., 0] == 255)[0]
    paddle = np.flatnonzero(image[-1, :, 0] > 0)
    return int(row), int(column), paddle


def below(image):
    """The columns of the paddle; a caught ball hides one of them."""
    return {int(column) for column in np.flatnonzero(image[-1, :, 0] == 120)} | (
        {where(image)[1]} if where(image)[0] == image.shape[0] - 1 and hidden(image) else set()
    )


def hidden(image):
    """Whether the ball is on the paddle."""
    return int((image[-1] == 120).sum()) < 3


def cells(obs):
    """One pixel for each cell of the grid, after checking that the other pixels of a cell are equal."""
    assert (obs == obs[::3, ::3].repeat(3, 0).repeat(3, 1)).all()
    return obs[::3, ::3]


def played(env, seed, policy):
    obs, _ = env.reset(seed=seed)
    images, rewards, over = [cells(obs)], [], False
    while not over:
        obs, reward, over, cut, _ = env.step(policy(images))
        assert not cut
        images.append(cells(obs))
        rewards.append(reward)
    return images, rewards


def seer(images):
    """A policy that moves to where the ball will land, computed from the last two images."""
    size = images[-1].shape[0]
    row, column, paddle = where(images[-1])
    drift = column - where(images[-2])[1] if len(images) > 1 else 0
    while row < size - 1:
        drift = -drift if not 0 <= column + drift < size else drift
        row, column = row + 1, column + drift
    return 1 + int(np.sign(column - paddle.mean().round()))


@given(st.integers(0, 2**31), st.integers(8, 20))
def test_a_ball_falls_a_row_a_step_and_can_be_caught(seed, size):
    env = DrawnCatch(size)
    images, rewards = played(env, seed, seer)
    assert len(rewards) == size - 1
    assert rewards[:-1] == [0.0] * (size - 2)
    assert rewards[-1] == 1.0
    assert [where(image)[0] for image in images] == list(range(size))
    columns = [where(image)[1] for image in images]
    assert set(np.abs(np.diff(columns))) <= {0, 1}
    assert len(set(np.abs(np.diff(columns)))) == 1 or 0 in np.abs(np.diff(columns))


def test_dense_rewards_depend_on_whether_the_paddle_is_below_the_ball():
    images, rewards = played(DrawnCatch(8, dense=True), 3, lambda seen: len(seen) % 3)
    expected = []
    for image in images[1:]:
        _, column, _ = where(image)
        expected.append(1.0 if column in below(image) else -1.0)
    assert rewards == expected
    assert {*rewards} == {1.0, -1.0}


def test_a_paddle_that_stays_misses_most():
    env = DrawnCatch(16)
    last = [played(env, seed, lambda images: 1)[1][-1] for seed in range(200)]
    assert -0.9 < np.mean(last) < -0.3
    assert set(last) == {-1.0, 1.0}


def test_paddles_stay_on_the_board():
    for action in (0, 2):
        images, _ = played(DrawnCatch(), 0, lambda images, action=action: action)
        row = images[-2][-1, :, 0]
        assert (row[:3] if action == 0 else row[-3:]).tolist() == [120] * 3


def test_it_continues_from_a_state():
    env, other = DrawnCatch(), DrawnCatch()
    env.reset(seed=4)
    other.reset(seed=9)
    for action in (0, 2, 2):
        env.step(action)
    other.set_state(env.get_state())
    for action in (1, 0, 0, 2):
        a, b = env.step(action), other.step(action)
        assert np.array_equal(a[0], b[0])
        assert a[1:] == b[1:]
    for bad in ([0, 0, 2, 1], [99, 0, 0, 1], [0, 0, 0]):
        with pytest.raises(ValueError, match=r"DrawnCatch\.set_state: state must lie within"):
            env.set_state(np.array(bad))
    with pytest.raises(ValueError, match=r"size must lie in \[8, 64\], got 7"):
        DrawnCatch(7)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", TASKS)
def test_ids_work_in_all_functions(env_id):
    vec = make_vec_env(env_id, 2, 0)
    spec = vec.spec
    assert vec.unrestorable_reason is None
    assert spec.image is (env_id == "rlox/DrawnCatch-v0")
    shapes = {"Catch": (1, 30, 30), "MountainCar": (1,), "Bandit": (1,), "Invalid": (80,)}
    assert spec.obs_shape == next((shape for name, shape in shapes.items() if name in env_id), (2,))
    vec.close()
    result = evaluate(Counting(spec), env_id, 2, deterministic=False)
    assert result.lengths.max() <= 999
    program = f"""
import gymnasium, numpy as np
from rlox.envs import make_vec_env
vec = make_vec_env({env_id!r}, 2, 0, workers=2)
vec.reset_all()
print(vec.spec.obs_shape)
vec.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(spec.obs_shape)


def test_gymnasiums_checks_pass(recwarn):
    check_env(DrawnCatch(render_mode="rgb_array"), skip_render_check=True)
    env = DrawnCatch(render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (120, 120, 3)


def test_velocities_are_hidden():
    make_vec_env("rlox/CartPoleHidden-v1", 1, 0).close()  # registers it
    hidden, whole = gymnasium.make("rlox/CartPoleHidden-v1"), gymnasium.make("CartPole-v1")
    a, b = hidden.reset(seed=3)[0], whole.reset(seed=3)[0]
    for action in (0, 1, 1, 0):
        assert a.tolist() == b[[0, 2]].tolist()
        a, b = hidden.step(action)[0], whole.step(action)[0]
    assert hidden.spec.max_episode_steps == 500
    for keep in ([], [4], [-1]):
        with pytest.raises(ValueError, match="KeepNumbers: keep must name numbers from 0 to 3"):
            KeepNumbers(gymnasium.make("CartPole-v1"), keep)
    with pytest.raises(ValueError, match="the observations must be vectors"):
        KeepNumbers(DrawnCatch(), [0])


def test_images_are_unscaled_bytes():
    vec = make_vec_env("rlox/DrawnCatch-v0", 1, 0)
    obs = vec.reset_all()
    assert obs.dtype == np.uint8
    assert sorted(np.unique(obs)) == [0, 120, 255]
    vec.close()

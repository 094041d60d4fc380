"""Native environments against gymnasium's own: sizes, spaces, starts, dynamics, rewards, terminations, limits."""

import math

import gymnasium
import numpy as np
import pytest
import scipy.stats

from rlox.kernels.envs import NATIVE_ENVS, GridWorld, VecEnv

PI = math.pi
# Sizes, limits and starts (low, high per component); the test of the dynamics draws states from `wide`.
TABLE = {
    "CartPole-v1": {
        "obs_dim": 4,
        "n_actions": 2,
        "limit": 500,
        "start": [(-0.05, 0.05)] * 4,
        "wide": [(-2.45, 2.45), (-3, 3), (-0.22, 0.22), (-3, 3)],
    },
    "Pendulum-v1": {
        "obs_dim": 3,
        "n_actions": None,
        "limit": 200,
        "start": [(-PI, PI), (-1, 1)],
        "wide": [(-9, 9), (-8, 8)],
    },
    "MountainCar-v0": {
        "obs_dim": 2,
        "n_actions": 3,
        "limit": 200,
        "start": [(-0.6, -0.4), (0, 0)],
        "wide": [(-1.2, 0.6), (-0.07, 0.07)],
    },
    "MountainCarContinuous-v0": {
        "obs_dim": 2,
        "n_actions": None,
        "limit": 999,
        "start": [(-0.6, -0.4), (0, 0)],
        "wide": [(-1.2, 0.6), (-0.07, 0.07)],
    },
    "Acrobot-v1": {
        "obs_dim": 6,
        "n_actions": 3,
        "limit": 500,
        "start": [(-0.1, 0.1)] * 4,
        "wide": [(-PI, PI), (-PI, PI), (-4 * PI, 4 * PI), (-9 * PI, 9 * PI)],
    },
}
gymnasiums = pytest.mark.parametrize("env_id", TABLE)


def actions_for(env, rng):
    if env.discrete:
        return rng.integers(0, env.n_actions, len(env))
    return rng.uniform(-3, 3, (len(env), 1)).astype(np.float32)


def state_with(env, **arrays):
    return env.get_state() | arrays


def test_the_list():
    assert set(NATIVE_ENVS) == {*TABLE, "GridWorld-v0"}


@gymnasiums
def test_the_attributes(env_id):
    env, row = VecEnv(3, seed=1, env_id=env_id), TABLE[env_id]
    made = gymnasium.make(env_id)
    assert (len(env), env.n_envs, env.env_id, env.seed) == (3, 3, env_id, 1)
    assert env.obs_dim == row["obs_dim"] == made.observation_space.shape[0]
    assert env.n_actions == row["n_actions"]
    assert env.max_episode_steps == row["limit"] == made.spec.max_episode_steps
    assert env.discrete == isinstance(made.action_space, gymnasium.spaces.Discrete)
    if env.discrete:
        assert (env.n_actions, env.act_low, env.act_high) == (made.action_space.n, None, None)
    else:
        np.testing.assert_array_equal(env.act_low, made.action_space.low)
        np.testing.assert_array_equal(env.act_high, made.action_space.high)
        assert env.act_dim == made.action_space.shape[0]
    with pytest.raises(AttributeError):
        env.n_envs = 4


@pytest.mark.slow
@gymnasiums
def test_dynamics_equal_gymnasiums(env_id):
    # Pass the same state and action to both for one step, 10,400 times, so that chaotic dynamics neither hide a wrong
    # term behind a tolerance nor amplify rounding errors. Every 20 steps new states are drawn from the whole space, so
    # that walls, limits and terminations are reached.
    n, rng, wide = 8, np.random.default_rng(0), np.array(TABLE[env_id]["wide"]).T[..., None]
    env, reference = VecEnv(n, 5, env_id), gymnasium.make(env_id).unwrapped
    env.reset_all()
    reference.reset(seed=0)
    ended = 0
    for t in range(1300):
        if t % 20 == 19:
            env.set_state(state_with(env, state=rng.uniform(*wide, (wide.shape[1], n))))
        before, actions = env.get_state()["state"], actions_for(env, rng)
        step = env.step_all(actions)
        after = env.get_state()["state"]
        expected = []
        for i in range(n):
            reference.state, reference.steps_beyond_terminated = before[:, i].copy(), None
            # As float64: gymnasium would compute parts of the reward in float32 otherwise.
            action = int(actions[i]) if env.discrete else actions[i].astype(np.float64)
            obs, reward, terminated, _, _ = reference.step(action)
            expected.append((obs, reward, terminated, np.array(reference.state)))
        obs, rewards, terminated, state = (np.array(part) for part in zip(*expected, strict=True))
        assert step["terminated"].tolist() == terminated.tolist()
        ended += terminated.sum()
        np.testing.assert_allclose(step["final_obs"], obs, rtol=0, atol=2e-6 if env_id == "Acrobot-v1" else 1e-6)
        if env_id == "Pendulum-v1":
            np.testing.assert_allclose(step["rewards"], rewards, rtol=1e-12, atol=1e-12)
        else:
            assert step["rewards"].tolist() == rewards.tolist()
        runs = ~(step["terminated"] | step["truncated"])
        if env_id == "MountainCarContinuous-v0":  # gymnasium rounds the state to float32
            np.testing.assert_array_max_ulp(after.T[runs].astype(np.float32), state[runs], 1)
        else:
            np.testing.assert_allclose(after.T[runs], state[runs], rtol=1e-12, atol=1e-12)
    assert (ended > 50) == (env_id != "Pendulum-v1")


def test_pendulum_wraps_its_angle_as_gymnasium_does():
    angles = np.linspace(-100, 100, 4001)
    env, reference = VecEnv(len(angles), 0, "Pendulum-v1"), gymnasium.make("Pendulum-v1").unwrapped
    env.reset_all()
    speeds = np.linspace(-8, 8, len(angles))
    env.set_state(state_with(env, state=np.stack([angles, speeds])))
    step = env.step_all(np.zeros(len(angles), np.float32))
    after = env.get_state()["state"]
    reference.reset(seed=0)
    for i, angle in enumerate(angles):
        reference.state = np.array([angle, speeds[i]])
        _, reward, *_ = reference.step(np.zeros(1))
        np.testing.assert_allclose(step["rewards"][i], reward, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(after[:, i], reference.state, rtol=0, atol=2e-13)


def test_builtin_sine_and_cosine_are_accurate():
    # Read through Pendulum's float64 state: theta_dot' = theta_dot + 0.75 sin(theta).
    angles = np.concatenate([np.linspace(-1000, 1000, 200_001), np.pi / 2 * np.arange(-600, 601)])
    env = VecEnv(len(angles), 0, "Pendulum-v1")
    env.reset_all()
    env.set_state(state_with(env, state=np.stack([angles, np.zeros(len(angles))])))
    obs = env.observe()
    np.testing.assert_array_equal(obs[:, 2], 0)
    np.testing.assert_allclose(obs[:, 0], np.cos(angles), rtol=0, atol=3.1e-8)
    np.testing.assert_allclose(obs[:, 1], np.sin(angles), rtol=0, atol=3.1e-8)
    env.step_all(np.zeros(len(angles), np.float32))
    sine = env.get_state()["state"][1] / 0.75
    np.testing.assert_allclose(sine, np.sin(angles), rtol=0, atol=5e-16)


@gymnasiums
def test_starts_are_inside_gymnasiums_range_and_fill_it(env_id):
    n = 20_000
    env, ranges = VecEnv(n, 0, env_id), TABLE[env_id]["start"]
    env.reset_all()
    state = env.get_state()["state"]
    for component, (low, high) in zip(state, ranges, strict=True):
        if low == high:
            assert (component == low).all()
            continue
        assert low <= component.min() < component.max() <= high
        assert scipy.stats.kstest(component, "uniform", (low, high - low)).pvalue > 1e-4
    drawn = np.array([low < high for low, high in ranges])
    assert (np.abs(np.corrcoef(state[drawn]) - np.eye(drawn.sum())) < 5 / math.sqrt(n)).all()


def test_mountain_car_stops_at_its_wall():
    for env_id in ("MountainCar-v0", "MountainCarContinuous-v0"):
        env = VecEnv(2, 0, env_id)
        env.reset_all()
        env.set_state(state_with(env, state=np.array([[-1.19, -1.2], [-0.07, 0.0]])))
        env.step_all([0, 0])
        state = env.get_state()["state"]
        assert state[0, 0] == -1.2
        assert state[1, 0] == 0


def test_gridworld_follows_its_rules():
    # The rules in five lines, compared with the environment at walls, goals and limits.
    n, rng = 50, np.random.default_rng(0)
    env = VecEnv(n, 3, "GridWorld-v0")
    assert (env.obs_dim, env.n_actions, env.max_episode_steps) == (2, 4, 100)
    where, t, ends = env.reset_all() * 4, np.zeros(n), np.zeros(2)
    for _ in range(400):
        actions = rng.integers(0, 4, n)
        step = env.step_all(actions)
        where = np.clip(where + np.array([[-1, 0], [0, 1], [1, 0], [0, -1]])[actions], 0, 4)
        goal, t = (where == 4).all(1), t + 1
        np.testing.assert_array_equal(step["final_obs"], (where / 4).astype(np.float32))
        np.testing.assert_array_equal(step["terminated"], goal)
        np.testing.assert_array_equal(step["truncated"], t == 100)
        np.testing.assert_array_equal(step["rewards"], np.where(goal, 1.0, -0.01))
        done, ends = goal | (t == 100), ends + np.array([goal.sum(), (t == 100).sum()])
        where[done], t[done] = step["obs"][done] * 4, 0
        assert not (where == 4).all(1).any()
    assert (ends > 10).all()


@pytest.mark.parametrize(("rows", "cols"), [(5, 5), (1, 3), (4, 1), (2, 7)])
def test_gridworld_starts_uniformly_on_all_cells_but_the_goal(rows, cols):
    env, counts = GridWorld(rows, cols, seed=0), np.zeros((rows, cols))
    assert env.max_episode_steps == 4 * rows * cols
    for _ in range(200 * rows * cols):
        obs = env.reset()
        counts[env.pos] += 1
        np.testing.assert_array_equal(obs, np.float32(env.pos) / np.float32([max(rows - 1, 1), max(cols - 1, 1)]))
    assert counts[-1, -1] == 0
    assert scipy.stats.chisquare(counts.ravel()[:-1]).pvalue > 1e-4


def test_gridworld_render_and_repr():
    env = GridWorld(3, 4, seed=1)
    env.pos = (0, 1)
    assert env.pos == (0, 1)
    assert (env.rows, env.cols) == (3, 4)
    assert env.render() == ".A..\n....\n...G\n"
    assert repr(env) == "GridWorld(rows=3, cols=4, pos=(0, 1))"
    for action in (2, 2, 1, 1):
        result = env.step(action)
    assert env.render() == "....\n....\n...A\n"
    assert (result["reward"], result["terminated"], result["truncated"]) == (1.0, True, False)


def test_gridworld_of_one_row():
    env = GridWorld(1, 2, seed=0)
    assert env.pos == (0, 0)
    np.testing.assert_array_equal(env.observe(), [0, 0])
    for action in (0, 2, 3):
        np.testing.assert_array_equal(env.step(action)["obs"], [0, 0])
    np.testing.assert_array_equal(env.step(1)["obs"], [0, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GridWorld(1, 1), ValueError, "GridWorld: rows and cols must give at least 2 cells"),
        (lambda: GridWorld(0, 5), ValueError, "GridWorld: rows must be at least 1"),
        (lambda: GridWorld(5, -1), ValueError, "GridWorld: cols must be at least 1"),
        (lambda: GridWorld(10**6, 5), ValueError, "GridWorld: rows must be .*at most 4096"),
        (lambda: GridWorld(2.0, 5), TypeError, "GridWorld: rows must be an integer"),
        (lambda: GridWorld(True, 5), TypeError, "GridWorld: rows must be an integer"),
        (lambda: GridWorld(5, 5, seed=-1), ValueError, "GridWorld: seed must be"),
        (lambda: setattr(GridWorld(), "pos", (5, 0)), ValueError, "GridWorld.pos: .* grid of 5 x 5"),
        (lambda: setattr(GridWorld(), "pos", (0, -1)), ValueError, "GridWorld.pos: .* grid of 5 x 5"),
        (lambda: setattr(GridWorld(), "pos", (4, 4)), ValueError, "GridWorld.pos: .* not be the goal"),
        (lambda: setattr(GridWorld(), "pos", 3), TypeError, "GridWorld.pos: .* a pair"),
        (lambda: setattr(GridWorld(), "pos", (0.0, 1)), TypeError, "GridWorld.pos: row must be an integer"),
        (
            lambda: GridWorld().set_state(GridWorld().get_state() | {"state": [0.5, 1e300]}),
            ValueError,
            "GridWorld.set_state: state must be a cell",
        ),
        (lambda: GridWorld().set_state({}), ValueError, "GridWorld.set_state: state must have the keys"),
    ],
)
def test_errors_of_gridworld(call, error, message):
    with pytest.raises(error, match=message):
        call()

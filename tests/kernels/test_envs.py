"""The loop around the native environments: resets, limits, statistics, state, errors; single environments."""

import math
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.kernels.envs import (
    NATIVE_ENVS,
    Acrobot,
    CartPole,
    Env,
    GridWorld,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
    VecEnv,
)

KEYS = {
    "obs": np.float32,
    "rewards": np.float64,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "final_obs": np.float32,
    "episode_return": np.float64,
    "episode_length": np.int64,
}
both = pytest.mark.parametrize("env_id", NATIVE_ENVS)


def actions_for(env, rng):
    if env.discrete:
        return rng.integers(0, env.n_actions, len(env))
    return rng.uniform(-3, 3, (len(env), 1)).astype(np.float32)


def play(env, n_steps, seed=0):
    rng = np.random.default_rng(seed)
    return [env.step_all(actions_for(env, rng)) for _ in range(n_steps)]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        for key in KEYS:
            assert np.array_equal(a[key], b[key]), key


def state_with(env, **arrays):
    return env.get_state() | arrays


@both
@pytest.mark.parametrize("n", [1, 7, 8, 64])
def test_shapes_dtypes_and_fresh_arrays(env_id, n):
    env = VecEnv(n, 0, env_id)
    obs = env.reset_all()
    assert (obs.shape, obs.dtype) == ((n, env.obs_dim), np.float32)
    first, second = play(env, 2)
    assert list(first) == list(KEYS)
    for key, dtype in KEYS.items():
        assert first[key].dtype == dtype
        assert first[key].shape == ((n, env.obs_dim) if key in ("obs", "final_obs") else (n,))
        assert not np.shares_memory(first[key], second[key])


@both
def test_auto_reset_final_obs_and_statistics(env_id):
    n = 5
    env = VecEnv(n, 2, env_id)
    env.reset_all()
    returns, lengths, ended = np.zeros(n), np.zeros(n, int), 0
    rng = np.random.default_rng(0)
    for _ in range(max(450, env.max_episode_steps + 1)):
        step = env.step_all(actions_for(env, rng))
        returns += step["rewards"]
        lengths += 1
        np.testing.assert_allclose(step["episode_return"], returns, rtol=1e-12)
        np.testing.assert_array_equal(step["episode_length"], lengths)
        done = step["terminated"] | step["truncated"]
        np.testing.assert_array_equal(step["obs"][~done], step["final_obs"][~done])
        if env_id != "GridWorld-v0":  # an episode may start where another was truncated
            assert (step["obs"][done] != step["final_obs"][done]).any(axis=1).all()
        returns[done], lengths[done], ended = 0, 0, ended + done.sum()
        if env_id == "CartPole-v1" and done.any():
            assert (np.abs(step["obs"][done]) <= 0.05).all()
            assert (
                (np.abs(step["final_obs"][done, 0]) > 2.4) | (np.abs(step["final_obs"][done, 2]) > 12 * math.pi / 180)
            ).all()
        np.testing.assert_array_equal(env.observe(), step["obs"])
    assert ended >= n
    assert env.get_state()["episodes"].sum() == n + ended


def balance(obs):
    """A controller that keeps the pole up for ever."""
    return (obs @ np.array([0.1, 0.3, 3.0, 1.0], np.float32) > 0).astype(np.int64)


def test_cartpole_is_truncated_after_500_steps():
    env = VecEnv(4, 0)
    obs = env.reset_all()
    for t in range(1, 1001):
        step = env.step_all(balance(obs))
        obs = step["obs"]
        assert not step["terminated"].any()
        np.testing.assert_array_equal(step["truncated"], np.full(4, t % 500 == 0))
        if t % 500 == 0:
            np.testing.assert_array_equal(step["episode_return"], np.full(4, 500.0))
            np.testing.assert_array_equal(step["episode_length"], np.full(4, 500))
            np.testing.assert_array_equal(env.get_state()["steps"], np.zeros(4))


def test_pendulum_is_truncated_after_200_steps_and_never_terminates():
    env = VecEnv(3, 0, "Pendulum-v1")
    env.reset_all()
    steps = play(env, 400)
    assert [t + 1 for t, s in enumerate(steps) if s["truncated"].any()] == [200, 400]
    assert not any(s["terminated"].any() for s in steps)
    assert steps[199]["truncated"].all()


def test_both_flags_when_the_limit_and_a_fall_coincide():
    env = VecEnv(3, 0)
    env.reset_all()
    state = np.zeros((4, 3))
    state[0] = [2.39, 2.39, 0.0]
    state[1] = 5.0
    env.set_state(state_with(env, state=state, steps=np.array([499, 3, 499])))
    step = env.step_all([1, 1, 1])
    assert step["terminated"].tolist() == [True, True, False]
    assert step["truncated"].tolist() == [True, False, True]


@both
def test_seeds(env_id):
    first = VecEnv(6, 7, env_id)
    obs = first.reset_all()
    same, other = VecEnv(6, 7, env_id), VecEnv(6, 8, env_id)
    np.testing.assert_array_equal(same.reset_all(), obs)
    # Seeds are hashed: environment 1 of seed 7 differs from environment 0 of seed 8.
    keys = {int(key) for seed in range(50) for key in VecEnv(4, seed, env_id).get_state()["keys"]}
    assert len(keys) == 200
    if env_id == "GridWorld-v0":  # it has only 24 starts
        assert len({row.tobytes() for row in VecEnv(500, 7, env_id).reset_all()}) == 24
        other.reset_all()
    else:
        assert not np.isin(other.reset_all()[:, 0], obs[:, 0]).any()
        assert len({row.tobytes() for row in obs}) == 6
        starts = {VecEnv(4, seed, env_id).reset_all()[i].tobytes() for seed in range(50) for i in range(4)}
        assert len(starts) == 200
    assert_same(play(first, 250), play(same, 250))
    # A reset with a seed starts over; without a seed it continues with the next episodes.
    np.testing.assert_array_equal(other.reset_all(seed=7), obs)
    assert other.seed == 7
    assert not np.array_equal(other.reset_all(), obs)
    np.testing.assert_array_equal(other.get_state()["episodes"], np.full(6, 2))


@both
def test_an_environment_does_not_depend_on_its_neighbours(env_id):
    wide, narrow = VecEnv(33, 4, env_id), VecEnv(5, 4, env_id)
    np.testing.assert_array_equal(wide.reset_all()[:5], narrow.reset_all())
    rng = np.random.default_rng(0)
    for _ in range(300):
        actions = actions_for(wide, rng)
        a, b = wide.step_all(actions), narrow.step_all(actions[:5])
        for key in KEYS:
            np.testing.assert_array_equal(a[key][:5], b[key], err_msg=key)


@both
def test_parallel_episodes_equal_those_of_one_environment(env_id):
    n = 6

    def policy(obs, k):
        # A function of the observation, so different in every episode.
        mixed = obs.sum(axis=1) * (k + 1)
        if one.discrete:
            return np.floor(1000 * np.abs(mixed)).astype(np.int64) % one.n_actions
        return np.sin(mixed).astype(np.float32)

    one = VecEnv(1, 9, env_id)
    obs, k, serial = one.reset_all(), 0, [[]]
    while k < n:
        serial[k].append(obs[0].copy())
        step = one.step_all(policy(obs, np.array([k])))
        obs = step["obs"]
        if step["terminated"][0] or step["truncated"][0]:
            serial[k].append(step["final_obs"][0].copy())
            serial.append([])
            k += 1

    wide = VecEnv(n, 123, env_id)
    state = wide.get_state()
    state["keys"][:] = VecEnv(1, 9, env_id).get_state()["keys"]
    state["episodes"][:] = np.arange(n)
    wide.set_state(state)
    obs = wide.reset_all()
    parallel, running = [[] for _ in range(n)], np.ones(n, bool)
    while running.any():
        step = wide.step_all(policy(obs, np.arange(n)))
        for i in np.flatnonzero(running):
            parallel[i].append(obs[i].copy())
            if step["terminated"][i] or step["truncated"][i]:
                parallel[i].append(step["final_obs"][i].copy())
                running[i] = False
        obs = step["obs"]
    for i in range(n):
        np.testing.assert_array_equal(parallel[i], serial[i])


@settings(deadline=None, max_examples=25)
@given(
    env_id=st.sampled_from(NATIVE_ENVS),
    n=st.integers(1, 20),
    before=st.integers(0, 250),
    seed=st.integers(0, 2**64 - 1),
)
def test_snapshots_continue_exactly(env_id, n, before, seed):
    env = VecEnv(n, seed, env_id)
    env.reset_all()
    play(env, before)
    state = env.get_state()
    copies = {key: value.copy() for key, value in state.items()}
    expected = play(env, 60, seed=1)
    for key, value in copies.items():
        np.testing.assert_array_equal(state[key], value)  # a snapshot is a copy
    other = VecEnv(n, 0, env_id)
    other.set_state(state)
    assert_same(play(other, 60, seed=1), expected)
    env.set_state(state)
    copy = pickle.loads(pickle.dumps(env))
    assert repr(copy) == repr(env)
    assert_same(play(copy, 60, seed=1), expected)


@both
@pytest.mark.parametrize("n", [1, 300])
def test_out_gives_the_same_numbers(env_id, n):
    fresh, into, few = (VecEnv(n, 3, env_id) for _ in range(3))
    for env in (fresh, into, few):
        env.reset_all()
    out = {
        key: np.empty((n, fresh.obs_dim) if key in ("obs", "final_obs") else n, dtype) for key, dtype in KEYS.items()
    }
    part = {"final_obs": np.empty((n, fresh.obs_dim), np.float32), "truncated": np.empty(n, bool)}
    rng = np.random.default_rng(0)
    for _ in range(210):
        actions = actions_for(fresh, rng)
        expected = fresh.step_all(actions)
        assert into.step_all(actions, out=out) is out
        assert few.step_all(actions, part) is part
        assert_same([out], [expected])
        for key, value in part.items():
            np.testing.assert_array_equal(value, expected[key])
    assert list(part) == ["final_obs", "truncated"]
    np.testing.assert_array_equal(few.observe(), expected["obs"])
    assert few.step_all(actions, {}) == {}


def test_action_forms_mean_the_same():
    forms = [
        [0, 1, 1],
        (0, 1, 1),
        np.array([0, 1, 1]),
        np.array([0, 1, 1], np.int8),
        np.array([0, 1, 1], np.uint64),
        np.array([0, 1, 1], ">i8"),
        np.array([0, 9, 1, 9, 1, 9])[::2],
    ]
    results = []
    for actions in forms:
        env = VecEnv(3, 0)
        env.reset_all()
        results.append(env.step_all(actions))
    for result in results:
        assert_same([result], [results[0]])
    forms = [
        [0.5, -1, 3],
        np.array([0.5, -1, 3], np.float32),
        np.array([[0.5], [-1], [3]]),
        np.array([0.5, -1, 2]),
        np.array([0.5, -1, np.inf]),
    ]
    results = []
    for actions in forms:
        env = VecEnv(3, 0, "Pendulum-v1")
        env.reset_all()
        results.append(env.step_all(actions))
    for result in results:
        assert_same([result], [results[0]])
    env = VecEnv(2, 0, "Pendulum-v1")
    env.reset_all()
    env.step_all([1, -1])  # integers are accepted as torques


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: VecEnv(0), ValueError, "VecEnv: n must be at least 1, got 0"),
        (lambda: VecEnv(2.0), TypeError, "VecEnv: n must be an integer, got float"),
        (lambda: VecEnv(2, -1), ValueError, "VecEnv: seed must be at least 0"),
        (lambda: VecEnv(2, None), TypeError, "VecEnv: seed must be an integer"),
        (lambda: VecEnv(2, 0, "Acrobot-v9"), ValueError, "one of CartPole-v1, .*, GridWorld-v0, or rlox.GymVecEnv"),
        (lambda: VecEnv(2).observe(), ValueError, r"VecEnv.observe: .* call reset_all\(\)"),
        (lambda: VecEnv(2).reset_all(-1), ValueError, "VecEnv.reset_all: seed must be"),
    ],
)
def test_errors_of_construction_and_order(call, error, message):
    with pytest.raises(error, match=message):
        call()


def out_of(**change):
    return {"obs": np.empty((3, 4), np.float32), "rewards": np.empty(3)} | change


SHARED = np.empty((3, 4), np.float32)


@pytest.mark.parametrize(
    ("env_id", "actions", "out", "error", "message"),
    [
        ("CartPole-v1", [0, 1], None, ValueError, r"actions must have shape \(3,\), .* got \(2,\)"),
        ("CartPole-v1", [[0], [1], [1]], None, ValueError, r"got \(3, 1\)"),
        ("CartPole-v1", 1, None, ValueError, r"got \(\)"),
        ("CartPole-v1", [0, 2, 1], None, ValueError, r"in \[0, 2\), got 2 at index 1"),
        ("CartPole-v1", [0, 1, -1], None, ValueError, r"in \[0, 2\), got -1 at index 2"),
        ("CartPole-v1", [0.0, 1.0, 1.0], None, TypeError, "actions must be integers .* float64"),
        ("CartPole-v1", ["a"] * 3, None, TypeError, "actions must be integers"),
        ("Pendulum-v1", [0.0, 1.0], None, ValueError, r"shape \(3,\) or \(3, 1\), .* got \(2,\)"),
        ("Pendulum-v1", np.zeros((3, 2)), None, ValueError, r"got \(3, 2\)"),
        ("Pendulum-v1", [0, np.nan, 1], None, ValueError, "numbers, not NaN, got nan at index 1"),
        ("Pendulum-v1", ["a"] * 3, None, TypeError, "actions must be real numbers"),
        ("CartPole-v1", [0, 2**70, 0], None, ValueError, r"in \[0, 2\), got 1180591620717411303424 at index 1"),
        ("CartPole-v1", np.uint64([0, 2**64 - 1, 0]), None, ValueError, r"in \[0, 2\), got -1 at index 1"),
        ("CartPole-v1", [True, False, True], None, TypeError, "actions must be integers .* bool"),
        ("CartPole-v1", [0, None, 0], None, TypeError, "actions must be integers .* object"),
        ("CartPole-v1", None, None, ValueError, r"got \(\)"),
        ("CartPole-v1", [], None, ValueError, r"got \(0,\)"),
        ("Acrobot-v1", [0, 3, 1], None, ValueError, r"in \[0, 3\), got 3 at index 1"),
        ("GridWorld-v0", [4, 0, 1], None, ValueError, r"in \[0, 4\), got 4 at index 0"),
        ("CartPole-v1", [0] * 3, {"reward": np.empty(3)}, ValueError, r"among .* got \['reward'\]"),
        ("CartPole-v1", [0] * 3, out_of(rewards=np.empty(3, "f4")), TypeError, r"out\['rewards'\] .*float64"),
        ("CartPole-v1", [0] * 3, out_of(rewards=np.empty(4)), ValueError, r"must have shape \(3,\)"),
        ("CartPole-v1", [0] * 3, out_of(rewards=[0.0]), TypeError, "must be a NumPy array"),
        ("CartPole-v1", [0] * 3, out_of(rewards=np.empty(6)[::2]), ValueError, "C-contiguous"),
        ("CartPole-v1", [0] * 3, {"obs": SHARED, "final_obs": SHARED}, ValueError, "one twice"),
    ],
)
def test_errors_of_a_step_do_not_change_the_state(env_id, actions, out, error, message):
    env = VecEnv(3, 0, env_id)
    env.reset_all()
    before = env.get_state()
    with pytest.raises(error, match="VecEnv.step_all: .*" + message):
        env.step_all(actions, out)
    after = env.get_state()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"state": np.full((4, 3), np.nan)}, ValueError, "state must be finite, got nan"),
        ({"state": np.zeros((3, 4))}, ValueError, r"state must have shape \(4, 3\), got \(3, 4\)"),
        ({"state": np.zeros((4, 3), "f4")}, TypeError, "state must be an array of float64"),
        ({"steps": np.array([0, 500, 0])}, ValueError, r"steps must lie in \[0, 500\), got 500"),
        ({"steps": [0, 0, 0]}, TypeError, "steps must be an array of int64, got list"),
        ({"extra": 1}, ValueError, "state must have the keys"),
    ],
)
def test_errors_of_set_state(change, error, message):
    env = VecEnv(3, 0)
    env.reset_all()
    before = env.get_state()
    with pytest.raises(error, match="VecEnv.set_state: " + message):
        env.set_state(before | change)
    for key, value in before.items():
        np.testing.assert_array_equal(env.get_state()[key], value)


def test_cartpole_has_the_episodes_of_vec_env():
    single, vec = CartPole(seed=42), VecEnv(1, seed=42)
    rng = np.random.default_rng(0)
    many = vec.reset_all()
    for _ in range(20):
        obs, ended = single.reset(), False
        np.testing.assert_array_equal(obs, many[0])
        while not ended:
            action = int(rng.integers(2))
            result, step = single.step(action), vec.step_all([action])
            np.testing.assert_array_equal(result["obs"], step["final_obs"][0])
            assert [type(result[key]) for key in ("reward", "terminated", "truncated")] == [
                float,
                bool,
                bool,
            ]
            assert result["reward"] == step["rewards"][0]
            assert result["terminated"] == step["terminated"][0]
            assert result["truncated"] == step["truncated"][0]
            ended, many = result["terminated"] or result["truncated"], step["obs"]


def test_cartpole_time_limit_order_and_state():
    env = CartPole(seed=1)
    obs, middle = env.reset(), None
    for t in range(500):
        if t == 250:
            middle = env.get_state()
        result = env.step(int(balance(obs[None])[0]))
        obs = result["obs"]
        assert result["truncated"] == (t == 499)
    with pytest.raises(ValueError, match=r"CartPole.step: .* call reset\(\)"):
        env.step(0)
    other = CartPole()
    other.set_state(middle)
    for _ in range(250):
        again = other.step(int(balance(np.array([other.get_state()["state"]], np.float32))[0]))
    np.testing.assert_array_equal(again["obs"], obs)
    assert again["truncated"]
    np.testing.assert_array_equal(env.reset(), other.reset())
    np.testing.assert_array_equal(env.reset(seed=1), CartPole(seed=1).reset())


@pytest.mark.parametrize("cls", [CartPole, Pendulum, Acrobot, MountainCar, MountainCarContinuous])
def test_the_first_step_begins_the_first_episode(cls):
    lazy, explicit = cls(seed=3), cls(seed=3)
    with pytest.raises((TypeError, ValueError), match="action must"):
        lazy.step("up")
    explicit.reset()
    action = 1 if explicit.discrete else 0.5
    for _ in range(5):
        np.testing.assert_array_equal(lazy.step(action)["obs"], explicit.step(action)["obs"])
    np.testing.assert_array_equal(lazy.reset(), explicit.reset())


def test_cartpole_errors_and_entropy():
    env = CartPole(seed=0)
    env.reset()
    for action, error in ((2, ValueError), (-1, ValueError), (0.0, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"CartPole\.step: action must be"):
            env.step(action)
    env.step(np.int64(1))
    with pytest.raises(ValueError, match="CartPole: seed must be"):
        CartPole(seed=-1)
    with pytest.raises(ValueError, match=r"CartPole\.set_state: state must"):
        env.set_state({})
    assert not np.array_equal(CartPole().reset(), CartPole().reset())


def test_first_step_starts_the_first_episodes():
    lazy, explicit = VecEnv(4, 9), VecEnv(4, 9)
    explicit.reset_all()
    first, second = lazy.step_all([0, 1, 0, 1]), explicit.step_all([0, 1, 0, 1])
    assert np.array_equal(first["obs"], second["obs"])
    assert (lazy.get_state()["episodes"] == 1).all()


@both
@pytest.mark.parametrize("n", [1, 300, 1500])
def test_reused_arrays_hold_the_same_numbers(env_id, n):
    fresh, reused = VecEnv(n, 3, env_id), VecEnv(n, 3, env_id)
    rng = np.random.default_rng(0)
    arrays = None
    for _ in range(60):
        actions = actions_for(fresh, rng)
        expected, step = fresh.step_all(actions), reused.step_all(actions, copy=False)
        assert list(step) == list(KEYS)
        assert_same([step], [expected])
        arrays = arrays or dict(step)
        assert all(step[key] is arrays[key] for key in KEYS)
        # Changes of the dict by the caller must not affect the next step.
        step["rewards"] = None
        del step["obs"]
    assert_same([reused.step_all(actions)], [fresh.step_all(actions)])


def test_reused_arrays_outlive_the_environments():
    env = VecEnv(3000, 0)
    step = env.step_all(np.zeros(3000, int), copy=False)
    copies = {key: value.copy() for key, value in step.items()}
    del env
    assert_same([step], [copies])
    with pytest.raises(ValueError, match=r"VecEnv.step_all: copy must be True if out is given"):
        VecEnv(1).step_all([0], out={}, copy=False)


@both
def test_results_do_not_depend_on_blocks(env_id):
    # More environments than fit in a block, compared with the same ones in several objects.
    n, rng = 1100, np.random.default_rng(0)
    whole, parts = VecEnv(n, 4, env_id), [VecEnv(k, 0, env_id) for k in (500, 13, 587)]
    obs = whole.reset_all()
    state = whole.get_state()
    ends = np.cumsum([0, *map(len, parts)])
    for part, a, b in zip(parts, ends, ends[1:], strict=False):
        part.set_state({key: np.ascontiguousarray(value[..., a:b]) for key, value in state.items()})
        np.testing.assert_array_equal(part.observe(), obs[a:b])
    for _ in range(230):
        actions = actions_for(whole, rng)
        step = whole.step_all(actions)
        pieces = [part.step_all(actions[a:b]) for part, a, b in zip(parts, ends, ends[1:], strict=False)]
        for key in KEYS:
            np.testing.assert_array_equal(step[key], np.concatenate([piece[key] for piece in pieces]), err_msg=key)
    after = whole.get_state()
    for key, value in after.items():
        joined = np.concatenate([part.get_state()[key] for part in parts], axis=-1)
        np.testing.assert_array_equal(value, joined, err_msg=key)


def test_two_threads_do_not_step_at_once():
    env, n = VecEnv(200_000, 0, "Acrobot-v1"), 200_000
    actions, errors = np.zeros(n, int), []

    def work():
        for _ in range(5):
            try:
                env.step_all(actions)
            except RuntimeError as e:
                errors.append(str(e))

    env.reset_all()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(errors) <= {
        "VecEnv.step_all: only one thread may use these environments at a time; create a VecEnv per thread"
    }
    assert (env.get_state()["steps"] == 10 - len(errors)).all()


SINGLE = [CartPole, Pendulum, MountainCar, MountainCarContinuous, Acrobot, GridWorld]


def test_a_pickle_that_names_the_former_module_loads():
    env = Env("CartPole-v1", 3)
    env.reset()
    former = pickle.dumps(env, 0).replace(b"rlox.kernels.envs.env", b"rlox.kernels.envs.vec_env")
    assert b"vec_env" in former
    np.testing.assert_array_equal(pickle.loads(former).step(1)["obs"], env.step(1)["obs"])


@pytest.mark.parametrize(("make", "env_id"), list(zip(SINGLE, NATIVE_ENVS, strict=True)))
def test_single_environments_have_the_episodes_of_vec_env(make, env_id):
    single, vec = make(seed=42), VecEnv(1, seed=42, env_id=env_id)
    for name in ("env_id", "obs_dim", "discrete", "n_actions", "act_dim", "max_episode_steps"):
        assert getattr(single, name) == getattr(vec, name)
    rng = np.random.default_rng(0)
    many = vec.reset_all()
    if make is not GridWorld:
        with pytest.raises(ValueError, match=rf"{make.__name__}.observe: .* call reset\(\)"):
            single.observe()
        np.testing.assert_array_equal(single.reset(), many[0])
    for _ in range(2):
        np.testing.assert_array_equal(single.observe(), many[0])
        ended = False
        while not ended:
            action = actions_for(vec, rng)
            copy = pickle.loads(pickle.dumps(single))
            result, step = single.step(int(action[0]) if vec.discrete else action[0]), vec.step_all(action)
            again = copy.step(action[0])
            np.testing.assert_array_equal(result["obs"], step["final_obs"][0])
            np.testing.assert_array_equal(again.pop("obs"), result["obs"])
            assert again == {key: value for key, value in result.items() if key != "obs"}
            assert result["reward"] == step["rewards"][0]
            ended = result["terminated"] or result["truncated"]
            assert ended == (step["terminated"][0] or step["truncated"][0])
            many = step["obs"]
        with pytest.raises(ValueError, match=rf"{make.__name__}.step: .* call reset\(\)"):
            single.step(0)
        np.testing.assert_array_equal(single.reset(), many[0])
    assert repr(single).startswith(f"{make.__name__}(")


@pytest.mark.parametrize("make", [Pendulum, MountainCarContinuous])
def test_one_continuous_action_takes_many_forms(make):
    results = []
    for action in (0.5, [0.5], np.float32(0.5), np.array([0.5]), np.array(0.5)):
        env = make(seed=1)
        env.reset()
        results.append(env.step(action)["obs"])
    assert all(np.array_equal(result, results[0]) for result in results)
    env = make(seed=1)
    env.reset()
    for action, error, message in (
        (np.nan, ValueError, "not NaN, got nan"),
        ([0.5, 0.5], ValueError, r"shape \(1,\), got \(2,\)"),
        ("left", TypeError, "real numbers"),
        (None, TypeError, "real numbers"),
    ):
        with pytest.raises(error, match=rf"{make.__name__}.step: action must .*{message}"):
            env.step(action)


@pytest.mark.parametrize("make", [MountainCar, Acrobot, GridWorld])
def test_wrong_discrete_actions(make):
    env = make(seed=1)
    env.reset()
    for action, error in ((7, ValueError), (-1, ValueError), (0.5, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=rf"{make.__name__}.step: action must be"):
            env.step(action)


def test_an_environment_without_init_is_harmless():
    for kind in (*SINGLE, Env):
        env = kind.__new__(kind)
        assert env.reset().shape == (4,)
        env.step(0)
        assert env.observe().shape == (4,)
        env.set_state(env.get_state())

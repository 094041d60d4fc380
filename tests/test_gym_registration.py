"""``rlox/…`` in gymnasium: the ids are registered, and the environments behave as gymnasium's own."""

import re
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import ClipReward, RecordEpisodeStatistics

import rlox.envs.gym  # noqa: F401 (it registers the ids)
from rlox.envs.gymnasium_envs import NativeVectorEnv
from rlox.kernels.envs import NATIVE_ENVS, VecEnv


def make_vec(env_id, n, **kwargs):
    return gymnasium.make_vec(f"rlox/{env_id}", num_envs=n, **kwargs)


def actions_of(env, t):
    """Random actions of step `t`, the same in every call."""
    rng = np.random.default_rng(t)
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Box):
        return rng.uniform(space.low, space.high).astype(np.float32)
    return rng.integers(0, space.nvec)


@pytest.fixture(params=NATIVE_ENVS)
def env_id(request):
    return request.param


def test_spaces_equal_gymnasiums(env_id):
    env, single = make_vec(env_id, 3), gymnasium.make(f"rlox/{env_id}")
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert env.num_envs == 3
    assert single.observation_space == env.single_observation_space
    assert single.action_space == env.single_action_space
    assert env.observation_space == gymnasium.vector.utils.batch_space(single.observation_space, 3)
    assert env.action_space == gymnasium.vector.utils.batch_space(single.action_space, 3)
    if env_id in gymnasium.registry:
        theirs = gymnasium.make(env_id)
        assert single.action_space == theirs.action_space
        # One bound differs in the last bit: gymnasium rounds pi to float32 before it multiplies.
        np.testing.assert_allclose(single.observation_space.low, theirs.observation_space.low, rtol=1e-6)
        np.testing.assert_allclose(single.observation_space.high, theirs.observation_space.high, rtol=1e-6)
        assert single.observation_space.dtype == theirs.observation_space.dtype


def test_steps_equal_those_of_vec_env(env_id):
    env, ours = make_vec(env_id, 5), VecEnv(5, 7, env_id)
    obs, info = env.reset(seed=7)
    assert info == {}
    np.testing.assert_array_equal(obs, ours.reset_all())
    seen = set()
    for t in range(1100):
        actions = actions_of(env, t)
        obs, rewards, terminated, truncated, info = env.step(actions)
        out = ours.step_all(actions)
        for given, key in ((obs, "obs"), (rewards, "rewards"), (terminated, "terminated"), (truncated, "truncated")):
            np.testing.assert_array_equal(given, out[key])
            assert given.dtype == out[key].dtype
        assert env.observation_space.contains(obs)
        ended = terminated | truncated
        seen.add(bool(ended.any()))
        if not ended.any():
            assert info == {}
            continue
        np.testing.assert_array_equal(np.stack(info["final_obs"][ended]), out["final_obs"][ended])
        assert all(item is None for item in info["final_obs"][~ended])
        episode = info["final_info"]["episode"]
        np.testing.assert_array_equal(episode["r"], np.where(ended, out["episode_return"], 0))
        np.testing.assert_array_equal(episode["l"], np.where(ended, out["episode_length"], 0))
    assert seen == {True, False}


def test_same_step_reset_equals_gymnasiums():
    """Compared with SyncVectorEnv over single environments of rlox, with gymnasium's RecordEpisodeStatistics."""
    seeds = [3, 11, 5]
    theirs = SyncVectorEnv(
        [lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("rlox/CartPole-v1"))] * 3,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    ours = make_vec("CartPole-v1", 3)
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    np.testing.assert_array_equal(theirs.reset(seed=seeds)[0], ours.reset(seed=seeds)[0])
    ends = 0
    for t in range(120):
        actions = actions_of(ours, t)
        *expected, info = theirs.step(actions)
        *given, own = ours.step(actions)
        for a, b in zip(given, expected, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        if info:
            del info["final_info"]["episode"]["t"], info["final_info"]["episode"]["_t"]
        assert_same(own, info)
        ends += bool(info)
    assert ends > 5


def assert_same(own, theirs):
    assert set(own) == set(theirs)
    for key, value in theirs.items():
        if isinstance(value, dict):
            assert_same(own[key], value)
        elif value.dtype == object:
            assert own[key].dtype == object
            for a, b in zip(own[key], value, strict=True):
                np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_array_equal(own[key], value)
            assert own[key].dtype.kind == value.dtype.kind


def test_wrappers_of_gymnasium_work():
    env = ClipReward(RecordEpisodeStatistics(make_vec("CartPole-v1", 4)), max_reward=0.5)
    ours = VecEnv(4, 9)
    env.reset(seed=9)
    returns = []
    for t in range(100):
        actions = actions_of(env, t)
        _, rewards, *_, info = env.step(actions)
        assert (rewards == 0.5).all()
        out = ours.step_all(actions)
        ended = out["terminated"] | out["truncated"]
        assert ("episode" in info) == ended.any()
        if ended.any():
            np.testing.assert_array_equal(info["episode"]["r"][ended], out["episode_return"][ended])
            np.testing.assert_array_equal(info["episode"]["l"][ended], out["episode_length"][ended])
            returns.extend(out["episode_return"][ended])
    assert list(env.env.return_queue) == returns
    assert len(returns) > 5


def test_a_seed_reproduces_everything_and_no_seed_differs():
    env, other = make_vec("Pendulum-v1", 3), make_vec("Pendulum-v1", 3)
    assert not np.array_equal(env.reset()[0], other.reset()[0])  # seeded by the operating system
    first, again = env.reset(seed=1)[0], other.reset(seed=1)[0]
    np.testing.assert_array_equal(first, again)
    following = env.reset()[0]
    np.testing.assert_array_equal(following, other.reset()[0])  # the sequence of that seed continues
    assert not np.array_equal(following, first)
    assert env.np_random_seed == 1
    # A list seeds each copy; copies without a seed continue.
    mixed = env.reset(seed=[5, None, 6])[0]
    np.testing.assert_array_equal(mixed[0], VecEnv(1, 5, "Pendulum-v1").reset_all()[0])
    np.testing.assert_array_equal(mixed[2], VecEnv(1, 6, "Pendulum-v1").reset_all()[0])
    np.testing.assert_array_equal(mixed[1], other.reset()[0][1])


def test_reset_with_a_mask():
    env, twin = make_vec("CartPole-v1", 3), make_vec("CartPole-v1", 3)
    mask = np.array([False, True, False])
    with pytest.raises(ValueError, match="reset_mask must be used after a reset of all"):
        env.reset(options={"reset_mask": mask})
    env.reset(seed=0), twin.reset(seed=0)
    before = env.step([0, 1, 1])[0]
    np.testing.assert_array_equal(before, twin.step([0, 1, 1])[0])
    after = env.reset(options={"reset_mask": mask})[0]
    np.testing.assert_array_equal(after[~mask], before[~mask])
    np.testing.assert_array_equal(after[mask], twin.reset()[0][mask])
    for wrong, error in (([True] * 3, TypeError), (np.zeros(3, bool), ValueError), (np.ones(2, bool), ValueError)):
        with pytest.raises(error, match="reset_mask must"):
            env.reset(options={"reset_mask": wrong})
    with pytest.raises(ValueError, match=r"options must contain only reset_mask, got \['low'\]"):
        env.reset(options={"low": -0.1})


def test_wrong_input_is_an_error():
    env = make_vec("CartPole-v1", 3)
    with pytest.raises(ValueError, match="seed must have length 3, got 2"):
        env.reset(seed=[1, 2])
    with pytest.raises(ValueError):
        env.reset(seed=-1)
    env.reset(seed=0)
    for wrong in ([0, 1], [0, 1, 2], [[0], [1], [0]]):
        with pytest.raises(ValueError, match="actions must"):
            env.step(wrong)
    with pytest.raises(ValueError, match="max_episode_steps must be CartPole-v1's own 500, got 100"):
        make_vec("CartPole-v1", 3, max_episode_steps=100)
    with pytest.raises(ValueError, match="render_mode must be None"):
        make_vec("CartPole-v1", 3, render_mode="human")
    with pytest.raises(ValueError, match="env_id must be native, got 'Foo-v0'"):
        NativeVectorEnv(2, "Foo-v0")
    env.close()
    env.close()


@pytest.mark.filterwarnings("ignore::UserWarning")  # the checker warns about infinite bounds, which gymnasium has too
def test_single_environments_pass_gymnasiums_checker(env_id):
    check_env(gymnasium.make(f"rlox/{env_id}").unwrapped)


def test_single_environments_have_the_episodes_of_vec_env(env_id):
    env, ours, vec = gymnasium.make(f"rlox/{env_id}"), VecEnv(1, 3, env_id), make_vec(env_id, 1)
    obs, _ = env.reset(seed=3)
    np.testing.assert_array_equal(obs, ours.reset_all()[0])
    for t in range(600):
        action = actions_of(vec, t)[0]
        obs, reward, terminated, truncated, _ = env.step(action)
        out = ours.step_all(np.asarray(action)[None])
        np.testing.assert_array_equal(obs, out["final_obs"][0])
        assert (reward, terminated, truncated) == (out["rewards"][0], out["terminated"][0], out["truncated"][0])
        if terminated or truncated:
            with pytest.raises(gymnasium.error.ResetNeeded):
                env.step(action)
            np.testing.assert_array_equal(env.reset()[0], out["obs"][0])


def test_a_custom_time_limit():
    env = gymnasium.make("rlox/CartPole-v1", max_episode_steps=3)
    env.reset(seed=0)
    assert [env.step(t % 2)[3] for t in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    "program",
    [
        "import gymnasium, rlox",
        "import rlox, gymnasium, rlox.envs.gym",
        "import rlox.envs.gym, gymnasium",
        "import gymnasium; gymnasium.make_vec('rlox:rlox/CartPole-v1')",
        "import rlox, gymnasium; gymnasium.make_vec('rlox.envs.gym:rlox/CartPole-v1')",
    ],
)
def test_ids_are_registered_in_any_order_of_imports(program):
    code = f"{program}; env = gymnasium.make_vec('rlox/CartPole-v1', 2); print(type(env).__name__)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "NativeVectorEnv"


def test_importing_rlox_does_not_change_sys_meta_path():
    code = "import sys; before = list(sys.meta_path); import rlox; print(before == sys.meta_path)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_algorithms_find_the_ids_whatever_was_imported_first():
    code = (
        "import rlox, gymnasium; assert 'rlox/CartPole-v1' not in gymnasium.registry; "
        "rlox.PPO('rlox/CartPole-v1', 2, 0, n_steps=8).train(16); print('rlox/CartPole-v1' in gymnasium.registry)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_gymnasium_gives_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make_vec("CartPole-v1", 2)
    assert re.fullmatch(r"NativeVectorEnv\(rlox/CartPole-v1, num_envs=2\)", repr(env))


def test_asynchronous_copies_work():
    env = gymnasium.make_vec("rlox/CartPole-v1", num_envs=2, vectorization_mode="async")
    try:
        obs, _ = env.reset(seed=4)
        np.testing.assert_array_equal(obs[1], VecEnv(1, 5).reset_all()[0])
    finally:
        env.close()


def test_threads_register_at_the_same_time():
    program = (
        "import sys, threading, gymnasium\nfrom rlox.envs.registry import announce_all\nerrors = []\n\n\n"
        "def work():\n    try:\n        for _ in range(30):\n            announce_all()\n"
        "    except Exception as e:\n        errors.append(e)\n\n\n"
        "sys.setswitchinterval(1e-6)\nthreads = [threading.Thread(target=work) for _ in range(4)]\n"
        "for thread in threads:\n    thread.start()\nfor thread in threads:\n    thread.join()\n"
        "print(errors, 'rlox/CartPole-v1' in gymnasium.registry)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[] True\n"
    assert "Overriding" not in done.stderr

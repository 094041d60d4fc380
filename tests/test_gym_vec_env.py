"""Gymnasium environments: the same steps as gymnasium's own vector environments, every space, every wrapper."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import typing

import forked
import gymnasium
import numpy as np
import probes
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import nn

from rlox import DQN, PPO
from rlox.algorithms import ALGORITHMS, resolve
from rlox.checkpoint import load_checkpoint
from rlox.collectors import reward_name
from rlox.envs import EnvSpec, make_vec_env
from rlox.envs.gym_make import ATARI_WRAPPERS, make_gym_env, whole_games
from rlox.envs.gym_vec_env import GymVecEnv
from rlox.evaluation.episodes import evaluate
from rlox.kernels.envs.vec_env import VecEnv
from rlox_cli.config.compose import compose_jobs
from rlox_cli.terminal.errors import UsageError


def vectorised(env_id, n, **kwargs):
    return gymnasium.make_vec(
        env_id,
        num_envs=n,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        **kwargs,
    )


def true_next(obs, ended, info):
    """The observation that each step led to, from gymnasium's results with same-step autoreset."""
    reached = obs.copy()
    if ended.any():
        np.testing.assert_array_equal(info["_final_obs"], ended)
        reached[ended] = np.stack(info["final_obs"][ended])
    return reached


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("Acrobot-v1", {}),
        ("MountainCarContinuous-v0", {}),
        ("Pendulum-v1", {"g": 9.0}),
        ("CartPole-v1", {"sutton_barto_reward": True}),
    ],
)
def test_equals_gymnasiums_vector_environment(env_id, kwargs):
    n, n_steps = 3, 3400
    ours, theirs = GymVecEnv(env_id, n, kwargs=kwargs), vectorised(env_id, n, **kwargs)
    ours.reset_all()
    # The same seeds for both, by resetting each environment explicitly.
    first, _ = theirs.reset(seed=[10, 20, 30])
    for env, seed, row in zip(ours.envs, (10, 20, 30), first, strict=True):
        np.testing.assert_array_equal(env.reset(seed=seed)[0], row)
    rng, ends, returns, lengths = np.random.default_rng(0), 0, np.zeros(n), np.zeros(n, np.int64)
    for _ in range(n_steps):
        actions = rng.integers(0, ours.n_actions, n) if ours.discrete else rng.uniform(-1, 1, (n, 1)).astype(np.float32)
        got = ours.step_all(actions)
        obs, rewards, terminated, truncated, info = theirs.step(actions)
        ended = terminated | truncated
        returns, lengths, ends = returns + rewards, lengths + 1, ends + ended.sum()
        expected = {
            "obs": obs,
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "final_obs": true_next(obs, ended, info),
            "episode_return": returns,
            "episode_length": lengths,
        }
        assert set(got) == set(expected)
        for key, array in expected.items():
            np.testing.assert_array_equal(got[key], array, err_msg=key)
            assert got[key].dtype == array.dtype, key
        returns, lengths = np.where(ended, 0, returns), np.where(ended, 0, lengths)
    assert ends >= 3


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_native_environment_equals_gymnasiums_vector_environment(env_id):
    """10,000 steps; gymnasium's state is set to the native one at each start and each 200th step, then both run freely.

    A balanced pole amplifies a difference by 46 in 50 steps: a rounding error is 1e-9 after 200 and visible after 400.
    """
    n, n_steps = 4, 2500
    ours, theirs = VecEnv(n, 3, env_id), vectorised(env_id, n)
    obs = ours.reset_all()
    theirs.reset(seed=0)

    def copy_state(which):
        state = ours.get_state()["state"]
        for i in which:
            theirs.envs[i].unwrapped.state = state[:, i].copy()

    copy_state(range(n))
    rng, ends, limits = np.random.default_rng(1), 0, 0
    for t in range(1, n_steps + 1):
        if ours.discrete:  # two fall soon, two balance up to the time limit
            actions = (obs[:, 2] + 0.5 * obs[:, 3] + 0.1 * obs[:, 1] > 0).astype(np.int64)
            actions[:2] = rng.integers(0, 2, 2)
        else:
            actions = rng.uniform(-2, 2, (n, 1)).astype(np.float32)
        got = ours.step_all(actions)
        # As float64: gymnasium would compute parts of Pendulum's reward in float32 otherwise.
        theirs_obs, rewards, terminated, truncated, info = theirs.step(
            actions if ours.discrete else actions.astype(float)
        )
        ended = terminated | truncated
        np.testing.assert_array_equal(got["terminated"], terminated)
        np.testing.assert_array_equal(got["truncated"], truncated)
        np.testing.assert_allclose(got["rewards"], rewards, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got["final_obs"], true_next(theirs_obs, ended, info), rtol=1e-4, atol=1e-5)
        assert got["obs"].dtype == theirs_obs.dtype
        copy_state(np.flatnonzero(ended) if t % 200 else range(n))
        obs, ends, limits = got["obs"], ends + terminated.sum(), limits + truncated.sum()
    assert limits >= 4
    assert (ends > 0) == (env_id == "CartPole-v1")


class Scripted(gymnasium.Env):
    """Any two spaces, random observations (kept in `seen`), actions (kept in `taken`), and episodes of 5 steps."""

    def __init__(self, obs_space=None, act_space=None):
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32) if obs_space is None else obs_space
        self.action_space = spaces.Discrete(2) if act_space is None else act_space
        self.seen, self.taken = [], []

    def observe(self):
        self.seen.append(self.observation_space.sample())
        return self.seen[-1]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.taken.append(action)
        self.t += 1
        return self.observe(), 1.0, self.t == 5, False, {}


def played(obs_space, n_steps=12):
    """The spec, and observations as returned by `GymVecEnv` and as produced by the environment."""
    vec = GymVecEnv(lambda: Scripted(obs_space), 1)
    out = [vec.reset_all()[0]]
    for _ in range(n_steps):
        step = vec.step_all([0])
        out += [step["final_obs"][0]] + ([step["obs"][0]] if step["terminated"][0] else [])
    return vec.spec, out, vec.envs[0].seen


BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
IMAGE = spaces.Box(0, 255, (20, 30, 3), np.uint8)


@pytest.mark.parametrize(
    "space",
    [
        BOX,
        spaces.Box(-1, 1, (2, 3, 4), np.float32),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(0, 9, (4, 4), np.uint8),
        spaces.Discrete(4),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(5),
        spaces.Dict({"b": spaces.Discrete(2), "a": BOX, "deep": spaces.Tuple([spaces.Box(0, 1, (2, 2)), BOX])}),
        spaces.Tuple([spaces.Discrete(2), BOX]),
        spaces.Dict({"only": spaces.Discrete(3, start=5)}),
    ],
    ids=str,
)
def test_vector_observations_are_flattened_and_can_be_unflattened(space):
    spec, out, seen = played(space)
    assert (spec.obs_shape, spec.obs_dtype, spec.image) == ((spaces.flatdim(space),), np.float32, False)
    assert len(out) == len(seen) == 15
    for row, raw in zip(out, seen, strict=True):
        assert row.dtype == np.float32
        np.testing.assert_array_equal(row, spaces.flatten(space, raw).astype(np.float32))
        back, cells = spaces.unflatten(space, row), spaces.flatten(space, raw)
        np.testing.assert_allclose(spaces.flatten(space, back), cells, rtol=1e-6)


@pytest.mark.parametrize(
    ("space", "shape", "same"),
    [
        (IMAGE, (3, 20, 30), lambda raw: raw.transpose(2, 0, 1)),
        (spaces.Box(0, 255, (3, 20, 30), np.uint8), (3, 20, 30), lambda raw: raw),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), (4, 84, 84), lambda raw: raw),
        (spaces.Box(0, 255, (20, 30, 1), np.uint8), (1, 20, 30), lambda raw: raw.transpose(2, 0, 1)),
        (
            spaces.Box(0, 255, (2, 20, 30, 3), np.uint8),
            (6, 20, 30),
            lambda raw: np.concatenate([frame.transpose(2, 0, 1) for frame in raw]),
        ),
        (spaces.Dict({"only": IMAGE}), (3, 20, 30), lambda raw: raw["only"].transpose(2, 0, 1)),
    ],
    ids=["last", "first", "stack", "grey", "colour stack", "in a dict"],
)
def test_images_come_channels_first(space, shape, same):
    spec, out, seen = played(space)
    assert (spec.obs_shape, spec.obs_dtype, spec.image, spec.obs_dim) == (shape, np.uint8, True, int(np.prod(shape)))
    for row, raw in zip(out, seen, strict=True):
        assert row.dtype == np.uint8
        np.testing.assert_array_equal(row, same(raw))


@pytest.mark.parametrize(
    ("space", "kind", "given", "taken"),
    [
        (spaces.Discrete(3, start=5), {"n_actions": 3}, [2], 7),
        (spaces.MultiDiscrete([2, 3], start=[10, 0]), {"n_choices": (2, 3)}, [[1, 2]], [11, 2]),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), {"n_choices": (2, 3, 4, 5)}, [[1, 2, 3, 4]], [[1, 2], [3, 4]]),
        (spaces.MultiBinary(3), {"n_choices": (2, 2, 2)}, [[1, 0, 1]], [1, 0, 1]),
        (spaces.Box(-1, 1, (2, 2), np.float64), {"act_dim": 4}, [[0.5, 0, -1, 1]], [[0.5, 0], [-1, 1]]),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), {"act_dim": 1}, [[1e6]], [1e6]),
    ],
    ids=str,
)
def test_actions_arrive_as_the_environment_takes_them(space, kind, given, taken):
    vec = GymVecEnv(lambda: Scripted(act_space=space), 1)
    spec = vec.spec
    assert {
        key: getattr(spec, key) for key in ("n_actions", "n_choices", "act_dim") if getattr(spec, key) is not None
    } == kind
    vec.step_all(np.asarray(given, spec.action_dtype))
    assert np.asarray(given).shape[1:] == spec.action_shape
    np.testing.assert_array_equal(vec.envs[0].taken[0], taken)
    if spec.continuous:
        np.testing.assert_array_equal(spec.act_low, space.low.ravel())
        np.testing.assert_array_equal(spec.act_high, space.high.ravel())
    else:
        with pytest.raises(ValueError, match="actions must be"):
            vec.step_all(np.full_like(given, -1))
        with pytest.raises(TypeError, match="integers"):
            vec.step_all(np.asarray(given, float))
    with pytest.raises(ValueError, match="shape"):
        vec.step_all([*given, *given])


def test_an_action_is_the_environments_own_copy():
    class Changes(Scripted):
        def step(self, action):
            result = super().step(action)
            action[:] = 99
            return result

    actions = np.zeros((2, 1), np.float32)
    GymVecEnv(lambda: Changes(act_space=spaces.Box(-1, 1, (1,))), 2).step_all(actions)
    assert (actions == 0).all()
    with pytest.raises(ValueError, match="must be numbers, got nan"):
        GymVecEnv("Pendulum-v1", 1).step_all([[np.nan]])


def test_images_beside_other_parts_become_one_vector():
    space = spaces.Dict(
        {
            "camera": IMAGE,
            "inner": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 255, (1, 4, 5), np.uint8))),
            "speed": BOX,
        }
    )
    spec, out, seen = played(space)
    sizes = (1800, 3, 20, 3)
    assert (spec.obs_shape, spec.obs_dtype, spec.image, spec.shows_images) == ((sum(sizes),), np.float32, False, True)
    assert spec.images == ((0, 3, 20, 30), (1803, 1, 4, 5))
    assert spec.parts == (("camera", 1800), ("inner.0", 3), ("inner.1", 20), ("speed", 3))
    assert spec.described_parts() == "camera (an image), inner.0 (3 numbers), inner.1 (an image), speed (3 numbers)"
    for row, raw in zip(out, seen, strict=True):
        camera, (choice, grey), speed = raw["camera"], raw["inner"], raw["speed"]
        expected = [camera.transpose(2, 0, 1).ravel(), np.eye(3)[choice], grey.ravel(), speed]
        np.testing.assert_array_equal(row, np.concatenate(expected).astype(np.float32))
    assert spec != played(spaces.Box(-1, 1, spec.obs_shape, np.float32))[0]


def test_errors_about_spaces_name_a_remedy_that_works():
    mixed = spaces.Dict({"camera": IMAGE, "speed": BOX})
    with pytest.raises(ValueError, match=r"camera.*FilterObservation: \{filter_keys") as refused:
        PPO(lambda: Scripted(mixed))
    assert "PPO: the observation space must not mix images with other parts, got camera (an image), speed" in str(
        refused.value
    )
    for key, shape in (("camera", (3, 20, 30)), ("speed", (3,))):
        wrappers = [{"FilterObservation": {"filter_keys": [key]}}]
        assert GymVecEnv(lambda: Scripted(mixed), wrappers=wrappers).spec.obs_shape == shape

    with pytest.raises(ValueError, match=r"Sequence.*TransformObservation\(env, func, observation_space\)"):
        GymVecEnv(lambda: Scripted(spaces.Sequence(BOX)))
    remedied = lambda: gymnasium.wrappers.TransformObservation(  # noqa: E731
        Scripted(spaces.Sequence(BOX)), lambda obs: np.zeros(3), BOX
    )
    assert GymVecEnv(remedied).reset_all().shape == (1, 3)

    for space in (
        spaces.Dict({"a": spaces.Discrete(2)}),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Box(0, 9, (2,), np.int32),
    ):
        with pytest.raises(ValueError, match=r"action space must be .*TransformAction\(env, func, action_space\)"):
            GymVecEnv(lambda space=space: Scripted(act_space=space))
        vec = GymVecEnv(
            lambda space=space: gymnasium.wrappers.TransformAction(
                Scripted(act_space=space), lambda action, space=space: space.sample(), spaces.Discrete(2)
            )
        )
        assert vec.step_all([1])["rewards"] == [1.0]


class OneArray(gymnasium.Env):
    """Returns the number of steps, always in the same array. Episodes of 3 steps; the last reward is 0.5."""

    observation_space = spaces.Box(0, 10, (1,), np.float32)
    action_space = spaces.Discrete(2)
    truncates = False

    def __init__(self):
        self.obs = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs[0] = 0
        return self.obs, {}

    def step(self, action):
        self.obs[0] += 1
        over = bool(self.obs[0] == 3)
        return self.obs, 0.5 if over else 1.0, over and not self.truncates, over and self.truncates, {}


@pytest.mark.parametrize("truncates", [False, True])
def test_auto_reset_is_same_step_and_the_final_observation_survives(truncates):
    vec = GymVecEnv(type("Env", (OneArray,), {"truncates": truncates}), 2)
    rows = [vec.step_all([0, 1]) for _ in range(6)]
    column = {key: [row[key][1].item() for row in rows] for key in rows[0]}
    ends = [False, False, True] * 2
    assert column == {
        "obs": [1, 2, 0, 1, 2, 0],
        "final_obs": [1, 2, 3, 1, 2, 3],
        "rewards": [1, 1, 0.5] * 2,
        "terminated": [False] * 6 if truncates else ends,
        "truncated": ends if truncates else [False] * 6,
        "episode_return": [1, 2, 2.5] * 2,
        "episode_length": [1, 2, 3] * 2,
    }


def test_time_limits_of_gymnasium_truncate_and_restart():
    vec = GymVecEnv("MountainCar-v0", 2, kwargs={"max_episode_steps": 7})
    vec.reset_all()
    for t in range(1, 22):
        step = vec.step_all([1, 1])
        assert step["truncated"].tolist() == [t % 7 == 0] * 2
        assert not step["terminated"].any()
        assert (step["obs"] == step["final_obs"]).all() == (t % 7 != 0)
        assert step["episode_length"].tolist() == [(t - 1) % 7 + 1] * 2


def test_a_manual_reset_restarts_statistics_and_only_given_arrays_are_filled():
    vec = GymVecEnv(lambda: probes.Countdown(4), 2)
    vec.step_all([0, 0])
    vec.reset_all()
    out = {"episode_length": np.zeros(2, np.int64)}
    assert vec.step_all([0, 0], out) is out
    assert out["episode_length"].tolist() == [1, 1]
    assert len(out) == 1


def test_observations_that_do_not_fit_their_space_are_errors():
    class Lies(Scripted):
        def observe(self):
            return np.zeros(1, np.float32)

    shapes = r"Lies: observations must have the shape of observation_space, \(2,\), got \(1,\)"
    with pytest.raises(ValueError, match=shapes):
        GymVecEnv(Lies).reset_all()
    counter = iter([2, 3])
    with pytest.raises(ValueError, match="all environments must have the spaces"):
        GymVecEnv(lambda: Scripted(spaces.Discrete(next(counter))), 2)


def test_wrappers_by_name_by_path_and_with_arguments():
    assert GymVecEnv("CartPole-v1", wrappers=["TimeAwareObservation"]).obs_dim == 5
    for path in ("gymnasium.wrappers:DelayObservation", "gymnasium.wrappers.DelayObservation"):
        vec = GymVecEnv("CartPole-v1", wrappers=[{path: {"delay": 2}}, {"FrameStackObservation": {"stack_size": 3}}])
        assert vec.obs_dim == 12
        assert (vec.reset_all() == 0).all()
    resize = [{"ResizeObservation": {"shape": [8, 6]}}]  # a list, as YAML has it; gymnasium wants a tuple
    pytest.importorskip("cv2")
    assert GymVecEnv(lambda: Scripted(IMAGE), wrappers=resize).spec.obs_shape == (3, 8, 6)


@pytest.mark.parametrize(
    ("wrappers", "error", "match"),
    [
        (["FlatenObservation"], ValueError, "did you mean 'FlattenObservation'"),
        (["gymnasium.wrappers:FlatenObservation"], ValueError, "did you mean 'FlattenObservation'"),
        (["no_such_package.wrappers:Mine"], ImportError, "'no_such_package.wrappers:Mine' cannot be imported"),
        (["no_such_package.Mine"], ImportError, "; add --import no_such_package, which also looks in"),
        ([{"FrameStackObservation": {"size": 4}}], ValueError, "FrameStackObservation does not accept .*size"),
        (["NormalizeObservation"], ValueError, "use normalize_obs=True"),
        ([{"A": {}, "B": {}}], TypeError, "each of wrappers must be a name or"),
        ([lambda env: env], TypeError, "pass a callable as env"),
        ("FlattenObservation", TypeError, "wrappers must be a list"),
        (["math.floor"], ValueError, "math.floor does not accept"),
        (["builtins.str"], TypeError, r"must return a gymnasium.Env, got str"),
    ],
)
def test_wrong_wrappers_are_named(wrappers, error, match):
    with pytest.raises(error, match=match):
        GymVecEnv("CartPole-v1", wrappers=wrappers)


def test_an_environment_object_is_accepted_for_one_copy():
    env = Scripted()
    with GymVecEnv(env) as vec:
        vec.step_all([1])
    assert env.taken == [1]
    with pytest.raises(ValueError, match=r"must be an id or a callable for 2 copies.*pass lambda: Scripted"):
        make_vec_env(env, 2, 0)
    with pytest.raises(TypeError, match="must be an id or a callable"):
        make_vec_env(env, 1, 0, workers=1)
    with pytest.raises(ValueError, match="kwargs must be empty"):
        make_gym_env(env, {"a": 1})
    with pytest.raises(TypeError, match=r"must be an id, a callable or a gymnasium\.Env, got 3"):
        make_vec_env(3, 1, 0)


def test_make_vec_env_chooses_the_implementation():
    assert isinstance(make_vec_env("CartPole-v1", 2, 0), VecEnv)
    assert isinstance(make_vec_env("CartPole-v1", 2, 0, {"sutton_barto_reward": True}), GymVecEnv)
    assert isinstance(make_vec_env("CartPole-v1", 2, 0, None, ["ClipReward"][:0]), VecEnv)
    assert isinstance(make_vec_env("CartPole-v1", 2, 0, wrappers=["TimeAwareObservation"]), GymVecEnv)
    assert make_vec_env("CartPole-v1", 2, 0).spec == GymVecEnv("CartPole-v1").spec == EnvSpec((4,), n_actions=2)
    assert make_vec_env("Pendulum-v1", 2, 0).spec == GymVecEnv("Pendulum-v1").spec
    for workers, rule in ((-1, ">= 0, got -1"), (3, r"between 0 and n_envs \(2\), got 3")):
        with pytest.raises(ValueError, match=f"workers must be {rule}"):
            make_vec_env("CartPole-v1", 2, 0, workers=workers)


# Atari


@pytest.mark.slow
def test_atari_gets_the_usual_preprocessing():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    vec = GymVecEnv("ALE/Pong-v5", 2, kwargs={"repeat_action_probability": 0.0})
    assert (vec.spec.obs_shape, vec.spec.image, vec.n_actions) == ((4, 84, 84), True, 6)
    assert vec.reset_all().dtype == np.uint8
    frames = [vec.step_all([0, 1])["obs"] for _ in range(8)]
    np.testing.assert_array_equal(frames[-1][:, :3], frames[-2][:, 1:])
    assert vec.envs[0].spec.kwargs["repeat_action_probability"] == 0.0
    coloured = GymVecEnv(
        "ALE/Pong-v5", 1, wrappers=[{"AtariPreprocessing": {"grayscale_obs": False, "screen_size": 42}}]
    )
    assert coloured.spec.obs_shape == (3, 42, 42)


@pytest.mark.slow
def test_a_lost_life_may_end_an_episode_in_training_but_never_in_evaluation():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    ends = [{"AtariPreprocessing": {"terminal_on_life_loss": True}}, {"FrameStackObservation": {"stack_size": 4}}]
    whole = [{"AtariPreprocessing": {}}, ends[1]]
    assert whole_games(ends) == whole
    assert whole_games(ATARI_WRAPPERS) == list(ATARI_WRAPPERS)
    left = []
    for wrappers in (ends, whole):
        env = make_gym_env("ALE/Breakout-v5", wrappers=wrappers)
        env.reset(seed=0)
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step(1)
            over = terminated or truncated
        left.append(env.unwrapped.ale.lives())
    assert left == [4, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo",
    [
        ["algo=dqn", "total_timesteps=300", "algo.learning_starts=200", "algo.train_freq=25", "buffer.size=2_000"],
        pytest.param(
            ["algo=ppo", "total_timesteps=128", "env.n_envs=2", "algo.n_steps=64", "algo.n_epochs=1"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_pong_from_the_command_line(algo, tmp_path):
    """Training uses signs of rewards, the score is the game's, and typed settings override the usual ones."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    quick = ["eval.n_points=0", "eval.n_episodes=1", "logger=none", "env.kwargs.max_num_frames_per_episode=1200"]
    done = forked.run("train", *algo, "env=ALE/Pong-v5", *quick, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    checkpoint = load_checkpoint(run / "checkpoints" / "last.safetensors")
    assert checkpoint.header["reward_fn"] == "rlox:sign"
    assert checkpoint.header["config"]["hidden_sizes"] == []
    body = next(value for name, value in checkpoint.tensors["policy"].items() if name.endswith("body.0.weight"))
    assert body.shape == (32, 4, 8, 8)
    done = forked.run("eval", run, cwd=tmp_path)
    assert "reproduced exactly" in done.stdout, done.stderr
    again = resolve(ALGORITHMS[checkpoint.header["algorithm"]].cls).from_checkpoint(
        run / "checkpoints" / "last.safetensors"
    )
    assert again.collector.reward_fn(None, None, np.array([-7.0, 0.0, 3.0])).tolist() == [-1, 0, 1]
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "a2c", "dqn"])
def test_pong_in_the_library_equals_that_of_the_command_line(algo, tmp_path):
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    cls, (job,) = resolve(ALGORITHMS[algo].cls), compose_jobs([], [f"algo={algo}", "env=ALE/Pong-v5"])
    made = cls("ALE/Pong-v5", n_envs=1)
    assert made.config.hidden_sizes == job.config.algo.hidden_sizes == []
    assert reward_name(made.collector.reward_fn) == f"rlox:{job.config.env.reward_fn}" == "rlox:sign"
    mine = cls("ALE/Pong-v5", n_envs=1, reward_fn=None, hidden_sizes=[64])
    assert (mine.config.hidden_sizes, mine.collector.reward_fn) == ([64], None)
    mine.save(tmp_path / "a.safetensors")
    again = cls.from_checkpoint(tmp_path / "a.safetensors")
    assert (again.config.hidden_sizes, again.collector.reward_fn) == ([64], None)
    other = cls("CartPole-v1", n_envs=1)
    assert (other.config.hidden_sizes, other.collector.reward_fn) == (cls.Config().hidden_sizes, None)
    for one in (made, mine, again):
        one.close()


@pytest.mark.slow
def test_atari_games_use_the_sign_of_rewards_by_default():
    (job,) = compose_jobs([], ["algo=dqn", "env=ALE/Pong-v5", "env.reward_fn=null", "algo.hidden_sizes=[64]"])
    assert (job.config.env.reward_fn, job.config.algo.hidden_sizes) == (None, [64])
    for algo in ("dqn", "ppo"):
        (job,) = compose_jobs([], [f"experiment=atari-{algo}", "env=ALE/Breakout-v5"])
        assert (job.algo, job.config.env.id, job.config.env.reward_fn) == (algo, "ALE/Breakout-v5", "sign")
        assert job.config.algo.hidden_sizes == []
    with pytest.raises(UsageError, match=r"env\.reward_fn=sgn .*did you mean 'sign'"):
        compose_jobs([], ["env.reward_fn=sgn"])


def test_the_command_line_knows_atari_or_names_its_extra(monkeypatch):
    from rlox_cli.families.environment import check_env_id

    pytest.importorskip("ale_py")
    check_env_id("ALE/Pong-v5", {})
    with pytest.raises(ValueError, match=r"did you mean 'ALE/Pong-v5'"):
        check_env_id("ALE/Pogn-v5", {})
    monkeypatch.setitem(sys.modules, "ale_py", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r'pip install "rlox-cli\[atari\]"'):
        check_env_id("ALE/Pong-v5", {})
    with pytest.raises(ImportError, match=r'pip install "rlox-cli\[atari\]"'):
        GymVecEnv("ALE/Pong-v5")


# Evaluation on the same spaces


class Module(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode


@pytest.mark.parametrize(
    ("obs_space", "act_space", "action"),
    [
        (IMAGE, spaces.MultiDiscrete([2, 3], start=[10, 0]), [1, 2]),
        (spaces.Dict({"a": BOX, "b": spaces.Discrete(2)}), spaces.Discrete(2, start=4), 1),
        (spaces.Discrete(3), spaces.Box(-1, 1, (2, 2)), [0.5, 7.0, -3.0, 0.0]),
    ],
)
def test_evaluation_supports_the_same_spaces(obs_space, act_space, action):
    made = []

    def env():
        made.append(Scripted(obs_space, act_space))
        return made[-1]

    seen = []

    def mode(obs):
        seen.append(obs.clone())
        return torch.tensor([action])

    result = evaluate(Module(mode), env, 2, seed=5)
    assert result.returns.tolist() == [5.0, 5.0]
    spec = GymVecEnv(lambda: Scripted(obs_space, act_space)).spec
    assert all(obs.shape == (1, *spec.obs_shape) and obs.numpy().dtype == spec.obs_dtype for obs in seen)
    expected = {
        "MultiDiscrete": [11, 2],
        "Discrete": 5,
        "Box": [[0.5, 1.0], [-1.0, 0.0]],
    }[type(act_space).__name__]
    assert len(made[0].taken) == 10
    for taken in made[0].taken:
        np.testing.assert_array_equal(taken, expected)


@pytest.mark.parametrize("kwargs", [None, {"sutton_barto_reward": False}])
def test_transform_comes_before_the_policy(kwargs):
    """Scaled observations do not change the actions of a rule that balances; mirrored ones make it fall over."""
    balance = Module(lambda obs: (obs[:, 2] + 0.5 * obs[:, 3] > 0).long())
    returns = [
        evaluate(balance, "CartPole-v1", 5, env_kwargs=kwargs, transform=transform).returns
        for transform in (None, lambda obs: obs.astype(np.float64) * 2, lambda obs: -obs)
    ]
    assert returns[0].mean() > 150
    np.testing.assert_array_equal(returns[0], returns[1])
    assert returns[2].mean() < 15


@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1"])
def test_frames_of_the_first_episode(env):
    pytest.importorskip("pygame")
    frames = []
    result = evaluate(
        Module(lambda obs: torch.zeros(len(obs), dtype=torch.int64)),
        env,
        2,
        env_kwargs={"max_episode_steps": 20},
        frames=frames.append,
    )
    assert len(frames) == result.lengths[0] + 1
    assert all(frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 for frame in frames)
    assert (frames[0] != frames[-1]).any()


def test_errors_of_rendering():
    still = Module(lambda obs: torch.zeros(len(obs), dtype=torch.int64))
    with pytest.raises(ValueError, match="render must be False if frames are given"):
        evaluate(still, "CartPole-v1", 1, render=True, frames=print)
    with pytest.raises(TypeError, match="render_mode"):
        evaluate(still, Scripted, 1, frames=print)
    with pytest.raises(ValueError, match="rlox/MaskedBandit-v0 draws nothing: it does not take a render_mode"):
        evaluate(still, "rlox/MaskedBandit-v0", 1, frames=print)
    with pytest.raises(ValueError, match="Blind must support the render mode rgb_array, it has none"):
        evaluate(
            still, type("Blind", (Scripted,), {"__init__": lambda self, **_: Scripted.__init__(self)}), 1, frames=print
        )


def test_evaluation_does_not_change_an_environment_object():
    env = gymnasium.make("Acrobot-v1", max_episode_steps=9)
    env.reset(seed=0)
    before = env.unwrapped.state.copy()
    right = Module(lambda obs: torch.ones(len(obs), dtype=torch.int64))
    assert evaluate(right, env, 2).lengths.tolist() == [9, 9]
    np.testing.assert_array_equal(env.unwrapped.state, before)
    with pytest.raises(ValueError, match=r"that cannot be created again.*pass lambda: Scripted"):
        evaluate(right, Scripted(), 1)


def test_names_and_episode_statistics_of_gymnasiums_vector_environments():
    def countdown():
        return probes.Countdown(4)

    theirs = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        gymnasium.vector.SyncVectorEnv([countdown] * 3, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
    )
    vec = GymVecEnv(countdown, 3)
    native = VecEnv(3, 0)
    assert vec.num_envs == vec.num_envs() == theirs.num_envs == native.num_envs == native.num_envs() == 3
    assert vec.observation_space == vec.single_observation_space == theirs.single_observation_space
    assert vec.action_space == vec.single_action_space == theirs.single_action_space
    assert (vec.episode_rewards, vec.episode_lengths) == ([], [])
    vec.reset_all(), theirs.reset(seed=0)
    for _ in range(10):
        actions = np.array([vec.action_space.sample() for _ in range(vec.num_envs)])
        vec.step_all(actions), theirs.step(actions)
    assert list(vec.return_queue) == vec.episode_rewards == list(theirs.return_queue)
    assert list(vec.length_queue) == vec.episode_lengths == list(theirs.length_queue)
    assert len(vec.episode_rewards) == 6
    for _ in range(200):
        vec.step_all(actions)
    assert len(vec.episode_lengths) == 100


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_returns_one_object_again_is_an_error(workers):
    """Its copies would be stepped as if they were independent; with workers, each process has its own copies."""
    env = gymnasium.make("Acrobot-v1")
    with pytest.raises(ValueError, match="must create an environment of its own, got the same object again"):
        PPO(lambda: env, n_envs=4, env_workers=workers)
    with pytest.raises(ValueError, match="must create an environment of its own"):
        PPO(lambda: gymnasium.wrappers.TimeLimit(env, 10), n_envs=2)


def test_an_evaluation_leaves_the_environment_of_the_training_unchanged():
    class Counting(gymnasium.Env):
        observation_space, action_space, t = spaces.Box(-1, 1, (1,)), spaces.Discrete(2), 0

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.zeros(1, np.float32), 1.0, False, self.t == 4, {}

    own = Counting()
    agent = PPO(lambda: own, n_envs=1, n_steps=6)
    agent.train(6)
    with pytest.raises(ValueError, match=r"got an environment \(Counting\) that cannot be .* no spec"):
        agent.evaluate(1)
    assert own.t == 2
    agent.close()
    assert agent.evaluate(1).lengths.tolist() == [4]  # nothing is disturbed any more

    env = gymnasium.make("Acrobot-v1")
    agent = PPO(lambda: env, n_envs=1, n_steps=6)
    agent.train(6)
    state = env.unwrapped.state.copy()
    agent.evaluate(1)
    np.testing.assert_array_equal(env.unwrapped.state, state)


def test_mujoco_warns_once_of_each_kind_and_writes_no_file(tmp_path):
    program = """
        import sys, mujoco
        from rlox.envs.gym_make import make_gym_env

        def become_unstable():
            env = make_gym_env("Hopper-v5")
            env.reset(seed=0)
            model, data = env.unwrapped.model, env.unwrapped.data
            data.qvel[:], data.time = 1e30, data.time + float(sys.argv[-1])
            mujoco.mj_step(model, data)

        become_unstable()
        sys.argv[-1] = "3"
        become_unstable()
        mujoco.set_mju_user_warning(print)
        become_unstable()
    """
    words = [sys.executable, "-c", textwrap.dedent(program), "2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.count("RuntimeWarning: MuJoCo: ") == 1 + ("deprecated" in done.stderr)
    assert "The simulation is unstable. Time = 2" in done.stderr
    assert "The simulation is unstable. Time = 3" in done.stdout  # by the handler that was set
    assert list(tmp_path.iterdir()) == []


class Flaky(gymnasium.Env):
    """Episodes of ten steps. One step of the second copy fails: that in which the first copy ends its episode."""

    observation_space, action_space = spaces.Box(-100, 100, (2,), np.float32), spaces.Discrete(2)
    made: typing.ClassVar[list] = []
    failure: typing.ClassVar[BaseException | None] = None

    def __init__(self):
        self.made.append(self)
        self.number, self.t = len(self.made), 10

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.array([self.number, 0], np.float32), {}

    def step(self, action):
        assert self.t < 10, "a step after the end of the episode"
        if self.number == 2 and self.t == 9 and Flaky.failure is not None:
            failure, Flaky.failure = Flaky.failure, None
            raise failure
        self.t += 1
        return np.array([self.number, self.t], np.float32), 1.0, self.t == 10, False, {}


@pytest.mark.parametrize("failure", [OSError("once"), ValueError("once")])
@pytest.mark.parametrize("cls", [PPO, DQN])
def test_training_continues_with_new_episodes_after_a_step_that_failed_midway(cls, failure, monkeypatch):
    monkeypatch.setattr(Flaky, "made", [])
    monkeypatch.setattr(Flaky, "failure", failure)
    arguments = {"n_steps": 16, "batch_size": 16} if cls is PPO else {"learning_starts": 8, "batch_size": 8}
    agent = cls(Flaky, n_envs=2, hidden_sizes=[8], **arguments)
    with pytest.raises(type(failure)):
        agent.train(64)
    assert agent.collector.state() is None
    agent.train()
    assert set(agent.counters.recent_lengths) == {10}


def test_a_path_reaches_no_wrapper_that_is_refused():
    for name in ("gymnasium.wrappers.NormalizeReward", "gymnasium.wrappers:NormalizeObservation"):
        with pytest.raises(ValueError, match=r"wrappers must not contain gymnasium\.wrappers"):
            make_gym_env("CartPole-v1", wrappers=[name])
    item = {"gymnasium.wrappers.AtariPreprocessing": {"terminal_on_life_loss": True, "frame_skip": 1}}
    assert whole_games([item]) == [{"gymnasium.wrappers.AtariPreprocessing": {"frame_skip": 1}}]

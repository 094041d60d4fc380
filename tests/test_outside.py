"""Extensions from other packages: examples/native_env is built, installed and used in training; invalid capsules."""

from __future__ import annotations

import ctypes as c
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest

import rlox
from rlox import NativeReward, RolloutCollector, register_env
from rlox.compiled import NativePolicy
from rlox.config import PPOConfig
from rlox.envs import is_native, make_vec_env, native_env_ids, registry
from rlox.kernels.envs.native_env import REGISTERED
from rlox.kernels.envs.vec_env import VecEnv
from rlox.nn.policies import ContinuousPolicy, DiscretePolicy

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[1] / "examples" / "native_env"
OFFERED = ["Gusts-v0", "GustsContinuous-v0"]


def forget(*env_ids):
    gymnasium = sys.modules.get("gymnasium")
    for env_id in env_ids:
        REGISTERED.pop(env_id, None)
        if gymnasium is not None:
            gymnasium.registry.pop(f"rlox/{env_id}", None)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with the installed example, as after `pip install --target`, but without using the network."""
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("needs a C compiler")
    tmp = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, tmp / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*pip, "--target", tmp / "site", tmp / "source"], capture_output=True, text=True, check=False, cwd=tmp
    )
    assert done.returncode == 0, done.stderr
    return tmp / "site"


@pytest.fixture(scope="module")
def installed(site):
    """The same installation, importable in this process."""
    sys.path.insert(0, str(site))
    registry.offers.cache_clear()
    yield
    sys.path.remove(str(site))
    registry.offers.cache_clear()
    forget(*OFFERED)


def command(site, *args, cwd, check=True):
    done = forked.run(*args, cwd=cwd, env={**os.environ, "PYTHONPATH": str(site)})
    if check:
        assert done.returncode == 0, done.stderr
    return done


def header_of(cwd):
    from rlox.checkpoint import load_checkpoint

    (path,) = cwd.rglob("last.safetensors")
    return load_checkpoint(path).header


# The command line


def test_the_readmes_install_the_build_requirements_of_the_example():
    text = (EXAMPLE / "pyproject.toml").read_text()
    requires = re.findall(r'"(.*?)"', re.search(r"^requires = \[(.*)\]", text, re.MULTILINE)[1])
    assert {"setuptools>=77", "Cython>=3.1,<4", "rlox-cli"} <= set(requires)
    needed = " ".join(f'"{name}"' for name in requires if name.partition(">")[0] not in ("numpy", "rlox-cli"))
    for page in (EXAMPLE / "README.md", EXAMPLE.parents[1] / "docs" / "tutorials" / "native.md"):
        # Without build isolation pip installs no build requirements.
        lines = f" *pip install {re.escape(needed)}\n *pip install --no-build-isolation ./examples/native_env\n"
        assert re.search(lines, page.read_text())


def test_training_by_name_and_evaluating(site, tmp_path):
    small = ["total_timesteps=2000", "eval.n_points=1", "eval.n_episodes=3", "logger=none"]
    command(site, "train", "algo=ppo", "env=Gusts-v0", *small, cwd=tmp_path)
    assert header_of(tmp_path)["env"]["id"] == "Gusts-v0"
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    printed = command(site, "eval", str(run), "--json", cwd=tmp_path)
    assert json.loads(printed.stdout)["n_episodes"] == 3
    # Without the package, the error names what is missing.
    gone = command("", "eval", str(run), cwd=tmp_path, check=False)
    assert gone.returncode != 0
    assert "Gusts-v0" in gone.stderr


def test_dqn_with_their_buffer(site, tmp_path):
    from rlox.checkpoint import load_checkpoint

    def weights(name, *buffer):
        small = ["total_timesteps=1200", "eval.n_points=0", "eval.n_episodes=1", "logger=none", f"output_dir={name}"]
        command(site, "train", "algo=dqn", "env=Gusts-v0", *buffer, *small, cwd=tmp_path)
        checkpoint = load_checkpoint(tmp_path / name / "checkpoints" / "last.safetensors")
        return np.concatenate([array.ravel() for array in checkpoint.tensors["policy"].values()])

    # The draws, and so the weights, are those of their memory and of its setting.
    found = weights("a", "buffer=recency", "buffer.decay=0.99")
    assert "decay: 0.99" in (tmp_path / "a" / "config.yaml").read_text()
    np.testing.assert_array_equal(found, weights("again", "buffer=recency", "buffer.decay=0.99"))
    assert (found != weights("uniform")).any()
    assert (found != weights("other", "buffer=recency", "buffer.decay=0.9")).any()


def test_an_imported_module_registers(site, tmp_path):
    """Without entry points: a custom module registers an environment and a reward, also in worker processes."""
    (tmp_path / "mine.py").write_text(
        "import rlox\nfrom rlox_gusts.env import discrete\nrlox.register_env(discrete)\n"
        "def doubled(obs, actions, raw):\n    return 2 * raw\n"
    )
    bare = tmp_path / "bare"
    shutil.copytree(site / "rlox_gusts", bare / "rlox_gusts")
    small = ["total_timesteps=512", "eval.n_points=0", "eval.n_episodes=1", "logger=none"]
    mine = ["--import", "mine", "env=Gusts-v0", "env.workers=2", "env.reward_fn=mine:doubled"]
    command(bare, "train", *mine, *small, cwd=tmp_path)
    assert header_of(tmp_path)["reward_fn"] == "doubled"
    listed = command(bare, "ls", "envs", "--import", "mine", cwd=tmp_path).stdout
    assert "  Gusts-v0 (mine)\n" in listed


def composed(*overrides):
    from rlox_cli.config.compose import compose_jobs

    return compose_jobs([], list(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=Gust-v0"], "env=Gust-v0 is no environment; did you mean 'Gusts-v0'?"),
        (["env=Gusts"], "env=Gusts does not exist; did you mean 'Gusts-v0'?"),
        (["env.reward_fn=angle_penalt"], "did you mean 'angle_penalty'?"),
        (["env.reward_fn=''"], "env.reward_fn must be module:NAME"),
        (["env.reward_fn=rlox_gusts.reward:angle_penalty"], "if you trust it, add --import rlox_gusts.reward"),
        (["imports=[rlox_gusts.reward]", "env.reward_fn=rlox_gusts.reward:angle"], "did you mean 'angle_penalty'?"),
        (
            ["imports=[rlox_gusts]", "env.reward_fn=rlox_gusts:__doc__"],
            "must be a callable or a 'rlox.reward.v1' capsule",
        ),
        (["algo=dqn", "buffer=recenc"], "buffer=recenc does not exist; did you mean 'recency'?"),
        (["algo=dqn", "buffer=recency", "buffer.decay=2"], "buffer.decay must be in (0, 1), got 2.0"),
        (["algo=dqn", "buffer=recency", "buffer.decy=0.5"], "did you mean 'decay'?"),
    ],
)
def test_error_messages_list_installed_extensions(installed, overrides, message):
    from rlox_cli.terminal.errors import UsageError

    with pytest.raises(UsageError) as reported:
        composed(*overrides)
    assert message in str(reported.value)


def test_installed_extensions_compose_and_complete(installed):
    from rlox_cli.config.completion import complete

    (job,) = composed("env=GustsContinuous-v0", "imports=[rlox_gusts]", "env.reward_fn=rlox_gusts.reward:angle_penalty")
    assert job.config.env.id == "GustsContinuous-v0"
    line = SimpleNamespace(params={})
    assert complete(line, "env=Gus") == ["env=Gusts-v0", "env=GustsContinuous-v0"]
    assert complete(line, "buffer=rec") == ["buffer=recency"]


# The library


def test_offered_environments_are_native(installed):
    assert set(OFFERED) <= set(native_env_ids())
    env = make_vec_env("GustsContinuous-v0", 5, 3)
    assert isinstance(env, VecEnv)
    spec = env.spec
    assert (spec.obs_dim, spec.act_dim) == (6, 2)
    np.testing.assert_array_equal(spec.act_high, [1, 1])
    assert isinstance(VecEnv(2, 0, "Gusts-v0"), VecEnv)
    again = pickle.loads(pickle.dumps(env))
    np.testing.assert_array_equal(again.reset_all(), env.reset_all())


def test_gusts_follow_their_documented_dynamics(installed):
    """Stochastic steps that depend only on the seed, compared with the same dynamics in NumPy."""
    env = VecEnv(64, 5, "GustsContinuous-v0")
    obs = env.reset_all().astype(np.float64)
    rng = np.random.default_rng(0)
    winds = []
    for _ in range(50):
        actions = rng.uniform(-1.5, 1.5, (64, 2)).astype(np.float32)
        out = env.step_all(actions)
        after = out["final_obs"].astype(np.float64)
        position, velocity, wind = after[:, :2], after[:, 2:4], after[:, 4:]
        thrust = actions.clip(-1, 1).astype(np.float64)
        np.testing.assert_allclose(velocity, 0.95 * obs[:, 2:4] + 0.05 * (2 * thrust + wind), atol=1e-6)
        np.testing.assert_allclose(position, obs[:, :2] + 0.05 * velocity, atol=1e-6)
        gained = np.hypot(*obs[:, :2].T) - np.hypot(*position.T)
        arrived = (np.hypot(*position.T) < 0.2) & (np.hypot(*velocity.T) < 0.5)
        lost = (np.abs(position) > 2).any(1)
        expected = gained - 0.01 - 0.02 * np.abs(thrust).sum(1) + 10 * arrived - 5 * lost
        np.testing.assert_allclose(out["rewards"], expected, atol=1e-5)
        np.testing.assert_array_equal(out["terminated"], arrived | lost)
        obs = out["obs"].astype(np.float64)
        winds.append(wind)
    assert 0.05 < np.std(winds) < 0.6
    twin = VecEnv(64, 5, "GustsContinuous-v0")
    twin.reset_all()
    np.testing.assert_array_equal(twin.step_all(np.zeros((64, 2)))["rewards"].shape, (64,))


def test_snapshots_and_batch_size_change_nothing(installed):
    env, alone = VecEnv(600, 2, "Gusts-v0"), VecEnv(1, 2, "Gusts-v0")
    first, only = env.reset_all(), alone.reset_all()
    np.testing.assert_array_equal(first[0], only[0])
    actions = np.random.default_rng(1).integers(0, 5, (40, 600))
    for t in range(20):
        out = env.step_all(actions[t])
        np.testing.assert_array_equal(out["obs"][0], alone.step_all(actions[t, :1])["obs"][0])
    state = env.get_state()
    rest = [env.step_all(actions[t]) for t in range(20, 40)]
    env.set_state(state)
    for t, expected in zip(range(20, 40), rest, strict=True):
        out = env.step_all(actions[t])
        for key, value in expected.items():
            np.testing.assert_array_equal(out[key], value)


def test_installed_environments_are_registered_in_gymnasium(installed):
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    from rlox.envs.registry import announce_all

    announce_all()
    env = gymnasium.make_vec("rlox/Gusts-v0", num_envs=3)
    obs, _ = env.reset(seed=1)
    np.testing.assert_array_equal(obs, VecEnv(3, 1, "Gusts-v0").reset_all())
    assert env.single_action_space == gymnasium.spaces.Discrete(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about infinite bounds
        check_env(gymnasium.make("rlox/GustsContinuous-v0").unwrapped)


def test_wrappers_and_workers_take_native_ids_from_outside(installed):
    plain = make_vec_env("Gusts-v0", 2, 0, wrappers=[{"TimeLimit": {"max_episode_steps": 3}}])
    shared = make_vec_env("Gusts-v0", 2, 0, wrappers=[{"TimeLimit": {"max_episode_steps": 3}}], workers=2)
    try:
        np.testing.assert_array_equal(plain.reset_all(), shared.reset_all())
        for t in range(4):
            out, same = plain.step_all([1, 3]), shared.step_all([1, 3])
            np.testing.assert_array_equal(out["obs"], same["obs"])
            assert out["truncated"].all() == (t == 2)
    finally:
        shared.close()
    with pytest.raises(ValueError, match=r"did you mean 'Gusts-v0'\?"):
        make_vec_env("Gust-v0", 2, 0)
    with pytest.raises(ValueError, match="does not take kwargs"):
        make_vec_env("Gusts-v0", 2, 0, kwargs={"wind": 3})


def test_ppo_learns_and_evaluates(installed):
    from rlox.algorithms import PPO

    algorithm = PPO("Gusts-v0", n_envs=8, seed=0)
    before = algorithm.evaluate(20).summary()["mean_return"]
    algorithm.train(20_000)
    assert algorithm.evaluate(20).summary()["mean_return"] > before + 2


def test_dqn_learns_from_the_recency_buffer(installed):
    from rlox.algorithms import DQN

    algorithm = DQN("Gusts-v0", n_envs=8, seed=0, buffer="recency")
    assert type(algorithm.buffer).__name__ == "RecencyBuffer"
    assert algorithm.buffer.decay == 0.9999
    metrics = algorithm.train(3000)
    assert np.isfinite(metrics["q_loss"])
    assert len(algorithm.buffer) == 3000


# The reward


def angle_penalty(obs, actions, raw):
    return raw - 0.5 * obs[:, 2].astype(np.float64) ** 2


def test_a_native_reward_gives_what_python_gives(installed):
    from rlox_gusts.reward import angle_penalty as capsule

    policy = DiscretePolicy(obs_dim=4, n_actions=2)
    batches = [
        RolloutCollector("CartPole-v1", n_envs=4, seed=1, reward_fn=fn).collect(policy, 64)
        for fn in (capsule, NativeReward(capsule), angle_penalty)
    ]
    for batch in batches[:2]:
        np.testing.assert_array_equal(batch.rewards, batches[2].rewards)
        np.testing.assert_array_equal(batch.advantages, batches[2].advantages)
    assert batches[0].rewards.max() <= 1
    assert batches[0].rewards.min() < 1
    with pytest.raises(ValueError, match="reward_fn must fit observations of length 3, got angle_penalty for 4"):
        RolloutCollector("Pendulum-v1", reward_fn=capsule).collect(ContinuousPolicy(3, 1), 2)


def test_the_rewards_name_is_recorded(installed, tmp_path):
    from rlox.algorithms import PPO
    from rlox_cli.families.imports import resolve_reward

    algorithm = PPO("CartPole-v1", n_envs=2, n_steps=8, reward_fn=resolve_reward("angle_penalty", []))
    algorithm.train(16)
    algorithm.save(tmp_path / "last.safetensors")
    assert header_of(tmp_path)["reward_fn"] == "angle_penalty"
    with pytest.raises(ValueError, match="was trained with reward_fn angle_penalty"):
        PPO.from_checkpoint(tmp_path / "last.safetensors").train(16)


def test_a_native_reward_by_hand(installed):
    from rlox_gusts.reward import angle_penalty as capsule

    reward = NativeReward(capsule)
    assert (reward.name, reward.obs_dim, reward.__name__) == ("angle_penalty", 4, "angle_penalty")
    for n in (0, 1, 16, 1000):
        obs = np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32)
        raw = np.ones(n)
        np.testing.assert_allclose(reward(obs, np.zeros(n, int), raw), angle_penalty(obs, None, raw), rtol=1e-15)
        assert (raw == 1).all()
    # Lists, other dtypes and strided arrays are accepted and copied.
    strided = np.asfortranarray(np.eye(4, dtype=np.float64))[::2]
    np.testing.assert_array_equal(reward(strided, [0, 1], [1, 1]), [1, 0.5])


@pytest.mark.parametrize(
    ("obs", "actions", "rewards", "error", "message"),
    [
        (np.zeros((2, 3)), [0, 1], [1, 1], ValueError, r"obs must have shape \(N, 4\)"),
        (np.zeros((3, 4)), [0, 1], [1, 1], ValueError, "obs must have shape"),
        (np.zeros(4), [0], [1], ValueError, "obs must have shape"),
        (np.zeros((2, 4)), [0], [1, 1], ValueError, "actions must have 2 rows"),
        (np.zeros((2, 4)), [0.5, 1], [1, 1], ValueError, "actions must be"),
        (np.zeros((2, 4)), [True, False], [1, 1], ValueError, "actions must be"),
        (np.zeros((2, 4)), [0, 1], [[1, 1]], ValueError, r"raw_rewards must have shape \(N,\)"),
        (np.zeros((2, 4)), [0, 1], ["a", "b"], TypeError, "raw_rewards must be real numbers"),
        (np.zeros((2, 4), complex), [0, 1], [1, 1], TypeError, "obs must be real numbers"),
        (None, [0, 1], [1, 1], TypeError, "obs must be real numbers"),
    ],
)
def test_wrong_arrays_for_a_native_reward(installed, obs, actions, rewards, error, message):
    from rlox_gusts.reward import angle_penalty as capsule

    with pytest.raises(error, match=message):
        NativeReward(capsule)(obs, actions, rewards)


REWARD = c.CFUNCTYPE(
    None, c.c_void_p, c.c_int64, c.c_int64, c.POINTER(c.c_float), c.c_int64, c.c_void_p, c.POINTER(c.c_double)
)


class Spec(c.Structure):
    """`rlox_reward_v1`."""

    _fields_ = (
        ("struct_size", c.c_uint32),
        ("flags", c.c_uint32),
        ("name", c.c_char_p),
        ("obs_dim", c.c_int64),
        ("params", c.c_void_p),
        ("reward_n", REWARD),
    )


new_capsule = c.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = c.py_object, [c.c_void_p, c.c_char_p, c.c_void_p]
ALIVE = []  # objects whose addresses C keeps


def reward_capsule(name=b"rlox.reward.v1", **change):
    def halve(params, n, obs_dim, obs, act_dim, actions, rewards):
        for i in range(n):
            rewards[i] = rewards[i] / 2 + act_dim

    fields = {"struct_size": c.sizeof(Spec), "name": b"halve", "reward_n": REWARD(halve), **change}
    spec = Spec(**fields)
    ALIVE.append((spec, fields, name))
    return new_capsule(c.addressof(spec), name, None)


@pytest.mark.parametrize("native", [False, True])
def test_a_native_reward_is_given_the_actions_that_were_executed(native):
    """Both in single steps with PyTorch and in a rollout of the kernel."""

    def torque(params, n, obs_dim, obs, act_dim, actions, rewards):
        taken = c.cast(actions, c.POINTER(c.c_float))
        for i in range(n):
            rewards[i] = taken[i]

    policy = ContinuousPolicy(3, 1, log_std_init=3.0)
    collector = RolloutCollector("Pendulum-v1", 4, 1, reward_fn=reward_capsule(reward_n=REWARD(torque)))
    if native:
        policy = NativePolicy.adopt(policy, collector.spec, PPOConfig())
    batch = collector.collect(policy, 32)
    assert batch.actions.abs().max() > 10
    np.testing.assert_array_equal(batch.rewards, batch.actions[:, 0].clamp(-2, 2))


def test_any_length_and_continuous_actions():
    reward = NativeReward(reward_capsule())
    assert reward.obs_dim is None
    np.testing.assert_array_equal(reward(np.zeros((2, 7)), np.zeros((2, 3)), [4, 8]), [5, 7])


@pytest.mark.parametrize(
    ("capsule", "error", "message"),
    [
        (lambda: 3, TypeError, "capsule must be a PyCapsule"),
        (lambda: None, TypeError, "capsule must be a PyCapsule"),
        (lambda: reward_capsule(b"rlox.env.v1"), ValueError, "must be named 'rlox.reward.v1', got 'rlox.env.v1'"),
        (lambda: reward_capsule(None), ValueError, "must be named 'rlox.reward.v1', got None"),
        (lambda: reward_capsule(struct_size=8), ValueError, "struct_size must be at least 40, got 8"),
        (lambda: reward_capsule(flags=1), ValueError, "flags must be 0, got 1"),
        (lambda: reward_capsule(name=b"rlox.reward.v1", obs_dim=-1), ValueError, "obs_dim must be at least 0"),
        (lambda: reward_capsule(reward_n=REWARD()), ValueError, "reward_n must be a function"),
    ],
)
def test_capsules_that_break_the_contract(capsule, error, message):
    with pytest.raises(error, match=message):
        NativeReward(capsule())


def test_an_invalid_reward_is_an_error():
    with pytest.raises(TypeError, match=r"reward_fn must be a callable or a 'rlox\.reward\.v1' capsule, got str"):
        RolloutCollector("CartPole-v1", reward_fn="angle")


# Environments that break the contract of register_env; tests/kernels covers the contract of the struct


def test_ids_have_a_version():
    sys.path.insert(0, str(Path(__file__).parent / "kernels"))
    try:
        from test_external_env import walk
    finally:
        sys.path.pop(0)
    for wrong in (b"Walk", b"mine:Walk-v0", b"a/b/Walk-v0", b"Walk v0"):
        with pytest.raises(ValueError, match="env_id must be a name and a version"):
            register_env(walk(True, env_id=wrong))
    with pytest.raises(TypeError, match="capsule must be a PyCapsule"):
        register_env("Walk-v0")


# Entry points


class Point:
    def __init__(self, name, loaded):
        self.name, self.value, self.loaded = name, f"somewhere:{name}", loaded

    def load(self):
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.mark.parametrize(
    ("loaded", "error", "message"),
    [
        (RuntimeError("no licence"), ImportError, "Odd-v0.*failed with RuntimeError: no licence"),
        (17, ValueError, "must be a capsule of an environment, or return one"),
        (lambda: None, ValueError, "must provide the environment Odd-v0, got None"),
    ],
)
def test_invalid_entry_points_are_errors(monkeypatch, loaded, error, message):
    monkeypatch.setattr("rlox.config.offers.entry_points", lambda group: [Point("Odd-v0", loaded)])
    registry.offers.cache_clear()
    try:
        with pytest.raises(error, match=message):
            is_native("Odd-v0")
    finally:
        registry.offers.cache_clear()


def test_get_include_contains_the_header():
    header = Path(rlox.get_include()) / "rlox_native.h"
    assert "rlox_env_v1" in header.read_text()


# Tutorial, 3.2: a buffer that prefers recent transitions


@pytest.fixture
def recency(installed):
    from rlox_gusts.buffer import RecencyBuffer

    return RecencyBuffer


def filled(cls, n, capacity, decay):
    buffer = cls(capacity, 4, 1, decay=decay)
    for i in range(n):
        buffer.push(np.full(4, i), [0.0], float(i), False, i % 3 == 0)
    return buffer


def test_recency_respects_capacity(recency):
    buffer = filled(recency, 20, 10, 0.9)
    assert len(buffer) == buffer.len() == 10
    batch = buffer.sample(2000, 0)
    assert set(batch.rewards) == set(range(10, 20))
    np.testing.assert_array_equal(batch["obs"][:, 2], batch["rewards"])
    np.testing.assert_array_equal(batch.truncated, batch.rewards % 3 == 0)


def test_recency_prefers_recent_transitions(recency):
    assert filled(recency, 100, 100, 0.5).sample(1000, 42).rewards.mean() > 70


@pytest.mark.parametrize(("n", "capacity", "decay"), [(7, 10, 0.5), (25, 10, 0.7), (64, 64, 0.999), (3, 8, 1 - 1e-12)])
def test_recency_samples_in_proportion(recency, n, capacity, decay):
    from scipy.stats import chisquare

    kept = min(n, capacity)
    batch = filled(recency, n, capacity, decay).sample(50_000, 1)
    ages = (n - 1 - batch.rewards).astype(int)
    weights = decay ** np.arange(kept)
    expected = 50_000 * weights / weights.sum()
    common = expected >= 5
    counts = np.bincount(ages, minlength=kept)
    together = np.append(counts[common], counts[~common].sum()), np.append(expected[common], expected[~common].sum())
    together = [array[: common.sum() + bool((~common).any())] for array in together]
    assert chisquare(*together).pvalue > 1e-3


def test_recency_depends_only_on_contents_and_seed_and_can_be_saved(recency):
    whole, some = filled(recency, 30, 20, 0.9), recency(20, 4, 1, decay=0.9)
    rewards = np.arange(30.0)
    rows = (np.repeat(rewards[:, None], 4, 1), None, np.zeros((30, 1)), rewards, np.zeros(30, bool), rewards % 3 == 0)
    some.push_batch(*rows)
    for other in (some, pickle.loads(pickle.dumps(whole))):
        for seed in (0, 2**64 - 1):
            for key, value in whole.sample(33, seed).items():
                np.testing.assert_array_equal(other.sample(33, seed)[key], value)
    assert not np.array_equal(whole.sample(33, 0).rewards, whole.sample(33, 1).rewards)
    assert "next_obs" not in whole.sample(1, 0)
    with pytest.raises(ValueError, match="next_obs must be given with every transition or with none"):
        whole.push([0] * 4, 0, 0.0, False, False, next_obs=[0] * 4)


def test_recency_rejects_bad_arguments(recency):
    buffer = recency(4, 2)
    with pytest.raises(ValueError, match="the buffer must contain a transition"):
        buffer.sample(1, 0)
    buffer.push([1, 2], 0, 1.0, False, False)
    for args in ((0, 0), (1, -1), (1, 2**64)):
        with pytest.raises(ValueError):
            buffer.sample(*args)
    with pytest.raises(ValueError, match=r"obs must have shape \(1, 2\)"):
        buffer.push([1, 2, 3], 0, 1.0, False, False)
    for change in ({"capacity": 0}, {"decay": 1.0}, {"decay": 0.0}, {"decay": float("nan")}, {"obs_dim": 0}):
        with pytest.raises(ValueError):
            recency(**{"capacity": 4, "obs_dim": 2, **change})
    with pytest.raises(ValueError, match="capacity and decay must be"):
        recency(5, 2).set_state(buffer.get_state())

"""The envpool backend: the same arrays as other backends, episodes that restart at once, and errors."""

import json
import re
import subprocess
import sys
from collections import OrderedDict
from importlib.util import find_spec

import forked
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlox.algorithms import PPO
from rlox.checkpoint import load_checkpoint
from rlox.collectors import RolloutCollector
from rlox.config import EnvConfig
from rlox.envs import EnvSpec, make_vec_env
from rlox.envs.envpool_env import EnvPoolVecEnv, evaluation_kwargs
from rlox.envs.gym_vec_env import GymVecEnv
from rlox.envs.protocols import step_layout
from rlox.envs.remote import RemoteEnvPool, Server
from rlox.envs.remote.session import EnvSessions
from rlox.kernels.envs.vec_env import VecEnv

pytestmark = pytest.mark.skipif(find_spec("envpool") is None, reason="needs EnvPool")


def play(env, steps, seed=0):
    """The stacked results of `steps` random steps, and the first observations."""
    rng = np.random.default_rng(seed)
    spec, n, first = env.spec, len(env), env.reset_all()
    taken = []
    for _ in range(steps):
        actions = rng.integers(spec.n_actions, size=n) if spec.discrete else rng.uniform(-2, 2, (n, spec.act_dim))
        taken.append(env.step_all(actions))
    return first, {key: np.stack([step[key] for step in taken]) for key in taken[0]}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "HalfCheetah-v4", "CarRacing-v3"])
def test_arrays_have_the_form_of_other_backends(env_id):
    with EnvPoolVecEnv(env_id, 3, 0) as env:
        first, steps = play(env, 4)
        assert len(env) == 3
        assert first.shape == (3, *env.spec.obs_shape)
        assert first.dtype == env.spec.obs_dtype
        for key, (shape, dtype) in step_layout(env.spec, 3).items():
            assert steps[key].shape == (4, *shape)
            assert steps[key].dtype == dtype


def test_spec_equals_gymnasiums():
    for env_id in ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1"):
        with EnvPoolVecEnv(env_id) as env:
            assert env.spec == make_vec_env(env_id, 1, 0).spec
    with EnvPoolVecEnv("CartPole-v1") as env:
        assert (env.discrete, env.n_actions, env.obs_dim) == (True, 2, 4)


def test_observations_of_several_parts_and_images():
    with EnvPoolVecEnv("FetchReach-v4", 2) as env:
        first, steps = play(env, 2)
        assert env.spec.obs_shape == (16,)  # achieved_goal 3, desired_goal 3, observation 10: gymnasium's order
        raw, *_ = env._pool.step(np.zeros((2, 4), np.float32))
        assert np.array_equal(first[:, 3:6], raw["desired_goal"].astype(np.float32))
        assert np.isfinite(steps["obs"]).all()
    with EnvPoolVecEnv("FrozenLake-v1", 3) as env:
        assert np.array_equal(env.reset_all(), np.eye(16, dtype=np.float32)[[0, 0, 0]])
    with EnvPoolVecEnv("CarRacing-v3") as env:
        assert env.spec == EnvSpec(
            (3, 96, 96), np.uint8, act_dim=3, act_low=np.float32([-1, 0, 0]), act_high=np.ones(3, np.float32)
        )
        assert env.reset_all().any()


def test_a_time_limit_is_truncated_and_not_terminated():
    with EnvPoolVecEnv("Pendulum-v1", 4, 1) as env:
        _, steps = play(env, 400)
    expected = np.zeros((400, 4), bool)
    expected[[199, 399]] = True
    assert np.array_equal(steps["truncated"], expected)
    assert not steps["terminated"].any()
    with EnvPoolVecEnv("CartPole-v1", 4, 1, {"max_episode_steps": 5}) as env:
        env.reset_all()
        alternating = [env.step_all([i % 2] * 4) for i in range(5)]
    assert [step["truncated"].all() for step in alternating] == [False] * 4 + [True]
    assert not any(step["terminated"].any() for step in alternating)


def test_a_fall_is_terminated_and_only_that_copy_restarts():
    with EnvPoolVecEnv("CartPole-v1", 8, 3) as env:
        _, steps = play(env, 200)
    ended = steps["terminated"]
    assert not steps["truncated"].any()
    assert 8 < ended.sum() < 200
    assert not (ended.all(axis=1)).any()
    final, obs = steps["final_obs"], steps["obs"]
    assert np.array_equal(final[~ended], obs[~ended])
    # An episode starts within 0.05 of the origin and ends beyond 12 degrees or 2.4 units.
    assert (np.abs(obs[ended]) <= 0.05).all()
    assert ((np.abs(final[ended][:, 2]) > 0.2094) | (np.abs(final[ended][:, 0]) > 2.4)).all()
    # The step after a restart continues from the returned observation: x moves by 0.02 of its velocity.
    assert np.allclose(final[1:, :, 0], obs[:-1, :, 0] + 0.02 * obs[:-1, :, 1], atol=1e-6)


def test_statistics_are_per_episode():
    with EnvPoolVecEnv("Pendulum-v1", 2, 5) as env:
        _, steps = play(env, 250)
    assert np.allclose(steps["episode_return"][199], steps["rewards"][:200].sum(0), rtol=1e-12)
    assert np.allclose(steps["episode_return"][249], steps["rewards"][200:].sum(0), rtol=1e-12)
    assert steps["episode_length"][[0, 199, 200, 249], 0].tolist() == [1, 200, 1, 50]


def test_dynamics_equal_gymnasiums():
    """From the same state the same torque leads to the same observation and reward."""
    ours, theirs = EnvPoolVecEnv("Pendulum-v1", 1, 2), GymVecEnv("Pendulum-v1", 1, 2)
    (cos, sin, speed), _ = ours.reset_all()[0], theirs.reset_all()
    theirs.envs[0].unwrapped.state = np.array([np.arctan2(sin, cos), speed])
    for torque in (0.5, -1.5, 2.0):
        a, b = ours.step_all([[torque]]), theirs.step_all([[torque]])
        assert np.allclose(a["obs"], b["obs"], atol=1e-5)
        assert np.allclose(a["rewards"], b["rewards"], atol=1e-4)
    ours.close()


def test_trajectories_depend_on_seeds_and_not_on_threads():
    def trajectory(seed, **kwargs):
        with EnvPoolVecEnv("CartPole-v1", 6, seed, kwargs) as env:
            first, steps = play(env, 100)
            return np.concatenate([first[None], steps["obs"]])

    one = trajectory(1)
    assert np.array_equal(one, trajectory(1))
    assert np.array_equal(one, trajectory(1, num_threads=3))
    assert not np.array_equal(one, trajectory(2))
    assert len(np.unique(one[0], axis=0)) == 6


def test_a_later_reset_seeds_only_with_a_seed():
    with EnvPoolVecEnv("CartPole-v1", 2, 1) as env:
        first = env.reset_all()
        env.step_all([0, 1])
        assert not np.array_equal(env.reset_all(), first)
        assert np.array_equal(env.reset_all(seed=1), first)
        assert env.step_all([0, 1])["episode_length"].tolist() == [1, 1]
        assert not np.array_equal(env.reset_all(seed=2), first)
    with EnvPoolVecEnv("CartPole-v1", 2, 0) as env:
        assert np.array_equal(env.reset_all(seed=1), first)


def test_new_episodes_of_a_resumed_run_are_not_its_first_ones_again(tmp_path):
    seen, starts = [], []

    def reward(obs, actions, rewards):
        seen.append(obs.tolist())
        return rewards

    settings = {"env_backend": "envpool", "reward_fn": reward, "n_steps": 8, "batch_size": 16, "hidden_sizes": [8]}
    ppo = PPO("CartPole-v1", 2, 5, **settings)
    for _ in range(3):
        ppo.train(16)
        starts += seen[0]
        seen.clear()
        ppo.save(tmp_path / "a.safetensors")
        ppo.close()
        ppo = PPO.from_checkpoint(tmp_path / "a.safetensors", reward_fn=reward)
    ppo.close()
    assert len(set(map(tuple, starts))) == 6


def test_a_worker_takes_the_seed_of_the_learner():
    server = Server({"env": EnvSessions("CartPole-v1", backend="envpool")}).start()
    with EnvPoolVecEnv("CartPole-v1", 2, 7) as local, RemoteEnvPool([f"127.0.0.1:{server.port}"], None, 2, 7) as pool:
        assert np.array_equal(pool.reset_all(), local.reset_all())
    server.stop()


def test_only_given_arrays_are_filled():
    with EnvPoolVecEnv("CartPole-v1", 2, 1) as env:
        env.reset_all()
        out = {"obs": np.zeros((2, 4), np.float32), "truncated": np.ones(2, bool)}
        assert env.step_all([0, 1], out) is out
        assert sorted(out) == ["obs", "truncated"]
        assert out["obs"].any()
        assert not out["truncated"].any()


def test_errors():
    with pytest.raises(ValueError, match=r"got 'CartPole-v7'; did you mean 'CartPole-v1'"):
        EnvPoolVecEnv("CartPole-v7")
    with pytest.raises(TypeError, match="must be an EnvPool id"):
        make_vec_env(lambda: None, 1, 0, backend="envpool")
    with pytest.raises(ValueError, match=r"does not take kwargs .*gravitation"):
        EnvPoolVecEnv("CartPole-v1", kwargs={"gravitation": 3})
    for key in ("seed", "batch_size"):
        with pytest.raises(ValueError, match=f"kwargs must not contain {key}"):
            EnvPoolVecEnv("CartPole-v1", kwargs={key: 1})
    for threads in (-1, "two"):
        with pytest.raises(ValueError, match="num_threads must be an integer >= 0"):
            EnvPoolVecEnv("CartPole-v1", kwargs={"num_threads": threads})
    with EnvPoolVecEnv("CartPole-v1", 2) as env:
        with pytest.raises(ValueError, match=r"actions must be in \[0, 2\)"):
            env.step_all([0, 2])
        with pytest.raises(TypeError, match="must be integers"):
            env.step_all([0.0, 1.0])
        env.close()
        with pytest.raises(ValueError, match="must be open"):
            env.step_all([0, 1])


def test_backend_chooses_the_implementation():
    assert isinstance(make_vec_env("CartPole-v1", 2, 0), VecEnv)
    assert isinstance(make_vec_env("CartPole-v1", 2, 0, backend="gymnasium"), GymVecEnv)
    with make_vec_env("CartPole-v1", 2, 0, backend="envpool") as env:
        assert isinstance(env, EnvPoolVecEnv)
        assert env._pool.config["num_threads"] == 1
    with make_vec_env("CartPole-v1", 2, 0, {"num_threads": 2}, backend="envpool") as env:
        assert env._pool.config["num_threads"] == 2
    with pytest.raises(
        ValueError, match="backend must be one of auto, gymnasium, envpool, tensor, got 'envpol'; did you mean"
    ):
        make_vec_env("CartPole-v1", 2, 0, backend="envpol")
    with pytest.raises(ValueError, match="workers 0 with envpool"):
        make_vec_env("CartPole-v1", 2, 0, workers=1, backend="envpool")
    with pytest.raises(ValueError, match="wrappers must be empty"):
        make_vec_env("CartPole-v1", 2, 0, wrappers=["ClipReward"], backend="envpool")
    with pytest.raises(ValueError, match="EnvConfig: workers must be 0 with envpool"):
        EnvConfig(backend="envpool", workers=2)
    with pytest.raises(ValueError, match="EnvConfig: backend must be one of"):
        EnvConfig(backend="native")


def test_truncated_episodes_bootstrap():
    """The advantage of a truncated step is r + γ V' - V, where V' is the value of the observation it led to."""
    collector = RolloutCollector("Pendulum-v1", 2, 0, gamma=0.9, gae_lambda=0.0, env_backend="envpool")
    policy = PPO("Pendulum-v1", 2).policy
    twin = EnvPoolVecEnv("Pendulum-v1", 2, 0)
    batch = collector.collect(policy, 201)
    twin.reset_all()
    actions = batch.actions.numpy().reshape(201, 2, 1)
    steps = [twin.step_all(np.clip(a, -2, 2)) for a in actions]
    with torch.no_grad():
        reached = policy.get_value(torch.from_numpy(steps[199]["final_obs"])).reshape(-1).numpy()
    values = batch.values.numpy().reshape(201, 2)
    expected = steps[199]["rewards"] + 0.9 * reached - values[199]
    assert np.allclose(batch.advantages.numpy().reshape(201, 2)[199], expected, atol=1e-4)
    assert batch.episode_lengths.tolist() == [200, 200]


def test_ppo_trains_saves_and_resumes(tmp_path):
    kwargs = {"num_threads": 2}
    ppo = PPO("Pendulum-v1", 4, 3, n_steps=64, env_kwargs=kwargs, env_backend="envpool")
    before = [p.clone() for p in ppo.policy.parameters()]
    metrics = ppo.train(4 * 64 * 4)
    assert np.isfinite(metrics["mean_reward"])
    assert not any(torch.equal(a, b) for a, b in zip(before, ppo.policy.parameters(), strict=True))
    evaluation = ppo.evaluate(2)  # gymnasium's environment does not accept num_threads
    assert evaluation.lengths.tolist() == [200, 200]
    ppo.save(tmp_path / "a.safetensors")
    assert load_checkpoint(tmp_path / "a.safetensors").header["env"]["backend"] == "envpool"
    again = PPO.from_checkpoint(tmp_path / "a.safetensors")
    assert isinstance(again.collector.env, EnvPoolVecEnv)
    assert again.evaluate(2).returns.tolist() == evaluation.returns.tolist()
    again.train(256)
    twin = PPO("Pendulum-v1", 4, 3, n_steps=64, env_backend="envpool")
    twin.train(4 * 64 * 4)
    assert all(torch.equal(a, b) for a, b in zip(ppo.policy.parameters(), twin.policy.parameters(), strict=True))
    assert isinstance(PPO("CartPole-v1", 2, env_backend="gymnasium").collector.env, GymVecEnv)


def test_evaluation_must_be_possible_before_training_starts():
    with pytest.raises(ValueError, match="PendulumSwingup-v1 must exist in gymnasium too"):
        PPO("PendulumSwingup-v1", 1, env_backend="envpool")


@pytest.mark.parametrize("env_id", ["Pong-v5", "ALE/Pong-v5", "Pong-v4", "PongNoFrameskip-v4", "PongDeterministic-v4"])
def test_atari_games_are_refused_with_what_to_use(env_id):
    with pytest.raises(ValueError, match=r"take ALE/Pong-v5 with env\.backend=gymnasium") as refused:
        EnvPoolVecEnv(env_id)
    assert "did you mean" not in str(refused.value)


def test_hints_name_ids_that_can_be_used():
    for env_id in (
        "CartPole-v7",
        "Ant-v55",
        "MiniGrid-Empty-9x9-v0",
        "PendulumSwingUp-v2",
        "BeamRiders-v5",
    ):
        with pytest.raises(ValueError, match="must be a known EnvPool id") as refused:
            EnvPoolVecEnv(env_id)
        if match := re.search("did you mean '(.*)'", str(refused.value)):
            assert match[1] in gymnasium.registry
    with pytest.raises(ValueError, match="gymnasium has no such id; take an environment of gymnasium") as refused:
        PPO("PendulumSwingup-v1", 1, env_backend="envpool")
    assert "did you mean" not in str(refused.value)


def test_evaluation_must_use_the_same_environment():
    with EnvPoolVecEnv("CartPole-v1", kwargs={"num_threads": 2, "max_episode_steps": 9}) as env:
        assert evaluation_kwargs(env) == {"max_episode_steps": 9}
        env.spec = EnvSpec((5,), n_actions=2)
        with pytest.raises(
            ValueError, match=r"must be the same in EnvPool and in gymnasium.*\(5,\).*in EnvPool, \(4,\).*in gymnasium"
        ):
            evaluation_kwargs(env)


class Goal(gymnasium.Env):
    """The spaces of FetchReach-v4; `ordered` keeps the order of the parts, otherwise gymnasium sorts them."""

    action_space = spaces.Box(-1, 1, (4,))

    def __init__(self, ordered):
        sizes = {"desired_goal": 3, "achieved_goal": 3, "observation": 10}
        parts = {key: spaces.Box(-np.inf, np.inf, (size,)) for key, size in sizes.items()}
        self.observation_space = spaces.Dict(OrderedDict(parts) if ordered else parts)


def test_evaluation_must_have_the_parts_in_the_same_order(monkeypatch):
    def register(ordered):
        spec = gymnasium.envs.registration.EnvSpec(
            "FetchReach-v4", Goal, disable_env_checker=True, kwargs={"ordered": ordered}
        )
        monkeypatch.setitem(gymnasium.registry, "FetchReach-v4", spec)

    with EnvPoolVecEnv("FetchReach-v4") as env:
        register(ordered=False)
        assert evaluation_kwargs(env) == {}
        register(ordered=True)
        with pytest.raises(ValueError, match="in the same order"):
            evaluation_kwargs(env)


def test_without_envpool_the_remedy_is_named():
    program = (
        "import sys; sys.modules['envpool'] = None\n"
        "from rlox.envs import make_vec_env\n"
        "try: make_vec_env('CartPole-v1', 2, 0, backend='envpool')\n"
        "except ImportError as e: print(e)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 'pip install "rlox-cli[envpool]"' in printed


def rlox(tmp_path, *args):
    return forked.run(*args, cwd=tmp_path)


@pytest.mark.slow
def test_the_command_line_uses_it(tmp_path):
    run = rlox(
        tmp_path,
        *("train", "env=Pendulum-v1", "env.backend=envpool", "env.n_envs=2", "env.kwargs.num_threads=2", "tuned=off"),
        *("algo.n_steps=32", "total_timesteps=128", "eval.n_episodes=1", "logger=none", "hydra.run.dir=run"),
    )
    assert run.returncode == 0, run.stderr
    header = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors").header
    assert (header["env"]["backend"], header["env"]["kwargs"]) == ("envpool", {"num_threads": 2})
    scored = rlox(tmp_path, "eval", "run/checkpoints/last.safetensors", "--json")
    assert json.loads(scored.stdout)["n_episodes"] == 1, scored.stderr


@pytest.mark.slow
def test_the_command_line_prints_errors_in_one_sentence(tmp_path):
    wrong = rlox(tmp_path, "train", "env=CartPole-v7", "env.backend=envpool")
    assert (wrong.returncode, "did you mean 'CartPole-v1'" in wrong.stderr) == (2, True), wrong.stderr
    only_there = rlox(tmp_path, "train", "env=PendulumSwingup-v1", "env.backend=envpool", "hydra.run.dir=run")
    assert only_there.returncode != 0
    assert "PendulumSwingup-v1 must exist in gymnasium too" in only_there.stderr
    assert "Traceback" not in only_there.stderr

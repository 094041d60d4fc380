"""Adapters of vectorised environments of other packages, with small stand-ins that have their interfaces."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import rlox
from rlox.collectors.tensor_rollout import TensorRolloutCollector
from rlox.envs.protocols import step_layout
from rlox.envs.tensor import JaxVecEnv, TorchVecEnv, register_vec_env, table
from rlox.nn.policies import DiscretePolicy

N = 4


class Simulation:
    """Counters that go up by the action. They terminate above `top`, and are cut after `limit` steps."""

    def __init__(self, n=N, top=5.0, limit=4):
        self.num_envs, self.top, self.limit, self.device = n, top, limit, "cpu"
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.counts, self.steps = torch.zeros(n), torch.zeros(n, dtype=torch.int64)
        self.seeds, self.closed = [], False
        self.buffer = torch.zeros(n, 1)  # as in simulators, overwritten in each step

    @property
    def unwrapped(self):
        return self

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.counts.zero_()
        self.steps.zero_()
        self.buffer.zero_()
        return self.observation(), {}

    def advance(self, actions):
        self.counts += actions[:, 0]
        self.steps += 1
        terminated, truncated = self.counts > self.top, self.steps >= self.limit
        final = self.counts.clone().unsqueeze(1)
        self.counts[terminated | truncated] = 0.0
        self.steps[terminated | truncated] = 0
        self.buffer.copy_(self.counts.unsqueeze(1))
        return final, actions[:, 0].clone(), terminated, truncated

    def close(self):
        self.closed = True


class IsaacLike(Simulation):
    single_observation_space = spaces.Dict(
        {"policy": spaces.Box(-9, 9, (1,), np.float32), "critic": spaces.Box(-9, 9, (2,), np.float32)}
    )

    def observation(self):
        return {"critic": torch.zeros(self.num_envs, 2), "policy": self.buffer}

    def step(self, actions):
        _, *rest = self.advance(actions)
        return (self.observation(), *rest, {})


class ManiSkillLike(Simulation):
    single_observation_space = spaces.Box(-9, 9, (1,), np.float32)

    def observation(self):
        return self.buffer

    def step(self, actions):
        final, rewards, terminated, truncated = self.advance(actions)
        info = {"final_observation": final} if (terminated | truncated).any() else {}
        return self.observation(), rewards, terminated, truncated, info


@pytest.mark.parametrize("kind", [IsaacLike, ManiSkillLike])
def test_environments_with_tensors(kind):
    env = TorchVecEnv(kind(), seed=3)
    assert (env.spec.obs_shape, env.spec.act_dim, env.n_envs, env.device) == ((1,), 1, N, "cpu")
    assert env.reset_all().tolist() == [[0.0]] * N
    env.reset_all()
    assert env.env.seeds == [3, None]
    actions = torch.tensor([[0.0], [1.0], [2.0], [6.0]])
    first = env.step_all(actions)
    for name, (shape, dtype) in step_layout(env.spec, N).items():
        assert first[name].shape == shape
        assert first[name].numpy().dtype == dtype
    assert first["obs"].flatten().tolist() == [0.0, 1.0, 2.0, 0.0]
    assert first["terminated"].tolist() == [False, False, False, True]
    # Isaac Lab does not say what the step led to: the observation before it takes its place.
    led_to = 6.0 if kind is ManiSkillLike else 0.0
    assert first["final_obs"].flatten().tolist() == [0.0, 1.0, 2.0, led_to]
    assert first["episode_return"].tolist() == [0.0, 1.0, 2.0, 6.0]
    second = env.step_all(actions)
    assert first["obs"].flatten().tolist() == [0.0, 1.0, 2.0, 0.0]
    assert second["episode_length"].tolist() == [2, 2, 2, 1]
    third, fourth = env.step_all(actions), env.step_all(actions)
    assert third["terminated"].tolist() == [False, False, True, True]
    assert third["episode_return"].tolist() == [0.0, 3.0, 6.0, 6.0]
    assert fourth["truncated"].tolist() == [True, True, False, False]
    assert fourth["final_obs"].flatten().tolist()[1] == (4.0 if kind is ManiSkillLike else 3.0)
    assert env.observe().flatten().tolist() == [0.0, 0.0, 2.0, 0.0]
    assert env.get_state() is None
    with pytest.raises(ValueError, match="does not expose"):
        env.set_state({})
    env.close()
    assert env.env.closed


def test_refused_environments():
    env = IsaacLike()
    env.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    with pytest.raises(ValueError, match="autoreset mode NextStep"):
        TorchVecEnv(env)
    with pytest.raises(ValueError, match="obs_key must be one of critic, policy, got camera"):
        TorchVecEnv(IsaacLike(), obs_key="camera")
    assert TorchVecEnv(IsaacLike(), obs_key="critic").spec.obs_shape == (2,)
    env = ManiSkillLike()
    env.single_action_space = spaces.Dict({})
    with pytest.raises(ValueError, match="actions must be Discrete or a Box"):
        TorchVecEnv(env)
    with pytest.raises(ValueError, match="must have the attribute single_observation_space"):
        TorchVecEnv(Simulation())
    with pytest.raises(ValueError, match="reset first"):
        TorchVecEnv(ManiSkillLike()).observe()


@pytest.fixture
def registered():
    register_vec_env("Counters-v0", lambda n, seed, device: TorchVecEnv(ManiSkillLike(n), seed))
    yield
    table.VEC_ENVS.clear()


@pytest.mark.usefixtures("registered")
def test_training_in_an_environment_of_another_package():
    ppo = rlox.PPO("Counters-v0", n_envs=8, n_steps=16, env_backend="tensor")
    ppo.train(256)
    assert isinstance(ppo.collector.env, TorchVecEnv)
    assert isinstance(rlox.VecEnv(3, 0, "Counters-v0", device="cpu"), TorchVecEnv)
    with pytest.raises(ValueError, match="must be new"):
        register_vec_env("Counters-v0", lambda *_: None)


@pytest.mark.usefixtures("registered")
def test_an_environment_that_only_a_device_has_is_evaluated_there(monkeypatch):
    """Each of as many new copies as there are episodes plays one, in which the counter takes the actions' sum."""
    ppo = rlox.PPO("Counters-v0", n_envs=8, n_steps=16, env_backend="tensor")
    created = []
    create = table.VEC_ENVS["Counters-v0"]
    monkeypatch.setitem(table.VEC_ENVS, "Counters-v0", lambda *args: created.append(args) or create(*args))
    results = ppo.evaluate(5, seed=3)
    assert [(n, device) for n, _, device in created] == [(5, "cpu")]
    env = create(5, created[0][1], "cpu")
    obs, returns, lengths, running = env.reset_all(), np.zeros(5), np.zeros(5, int), np.ones(5, bool)
    while running.any():
        step = env.step_all(torch.from_numpy(ppo.predict(obs.numpy())))
        returns[running] += step["rewards"].numpy()[running]
        lengths[running] += 1
        running &= ~(step["terminated"] | step["truncated"]).numpy()
        obs = step["obs"]
    np.testing.assert_allclose(results.returns, returns, rtol=1e-6)
    np.testing.assert_array_equal(results.lengths, lengths)
    with pytest.raises(ValueError, match="Counters-v0, which only register_vec_env knows, has no pictures"):
        ppo.evaluate(1, frames=lambda image: None)
    gymnasium.register("Counters-v0", entry_point=lambda: None)
    try:
        assert not table.is_only_on_device("Counters-v0")
    finally:
        del gymnasium.registry["Counters-v0"]


@pytest.mark.usefixtures("registered")
def test_the_command_line_trains_and_evaluates_in_it(command, tmp_path):
    small = ("total_timesteps=128", "env.n_envs=4", "algo.n_steps=16", "eval.n_episodes=2", "logger=none", "tuned=off")
    words = ("train", "algo=ppo", "env=Counters-v0", "env.backend=tensor", "device=cpu", "hydra.run.dir=run")
    code, out, err = command(*words, *small)
    assert not code, err
    assert (tmp_path / "run/checkpoints/best.safetensors").is_file()
    code, out, err = command("eval", "run")
    assert not code, err
    code, out, err = command("ls", "envs")
    assert "Counters-v0 (registered by a module; algo=ppo, a2c, mappo)" in out
    assert "  CartPole-v1 (algo=ppo, a2c, mappo)" in out
    assert "  GridPursuit-v0 (algo=mappo)" in out


@dataclass
class State:
    obs: Any
    reward: Any
    done: Any
    info: dict = field(default_factory=dict)


class BraxLike:
    """A point that the action moves; it starts at random, and terminates beyond 1."""

    action_size = observation_size = 1

    def __init__(self, jnp, uniform, parts=False):
        self.jnp, self.uniform, self.parts = jnp, uniform, parts

    def wrap(self, obs):
        return {"state": obs, "privileged_state": obs} if self.parts else obs

    def reset(self, key):
        obs = self.uniform(key)
        return State(self.wrap(obs), 0.0 * obs[0], 0.0 * obs[0])

    def step(self, state, action):
        obs = (state.obs["state"] if self.parts else state.obs) + action
        done = self.jnp.where(obs[0] > 1.0, 1.0, 0.0).astype("float32")
        return replace(state, obs=self.wrap(obs), reward=action[0], done=done)


def use_stand_in_for_jax(monkeypatch):
    """Put a module in the place of JAX that does the same with NumPy, without compiling."""

    def tree_map(function, *trees):
        if isinstance(trees[0], State):
            return State(*(tree_map(function, *(vars(t)[name] for t in trees)) for name in vars(trees[0])))
        if isinstance(trees[0], dict):
            return {name: tree_map(function, *(t[name] for t in trees)) for name in trees[0]}
        return function(*trees)

    def vmap(function):
        def mapped(*batched):
            n = len(batched[-1])
            rows = [function(*(tree_map(lambda x, i=i: x[i], b) for b in batched)) for i in range(n)]
            return tree_map(lambda *xs: np.stack([np.asarray(x, np.float32) for x in xs]), *rows)

        return mapped

    jax = types.ModuleType("jax")
    jax.numpy, jax.jit, jax.vmap = np, lambda function: function, vmap
    jax.tree = types.SimpleNamespace(map=tree_map)
    jax.dlpack = types.SimpleNamespace(from_dlpack=lambda tensor: tensor.numpy())
    jax.random = types.SimpleNamespace(
        PRNGKey=lambda seed: np.array([seed]),
        fold_in=lambda key, i: key + 1000 * i,
        split=lambda key, n: key + np.arange(n),
        uniform=lambda key, shape: np.random.default_rng(int(key)).uniform(-0.5, 0.5, shape).astype(np.float32),
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    return jax


@pytest.fixture(params=["stand-in", "jax"])
def jax(request, monkeypatch):
    if request.param == "stand-in":
        return use_stand_in_for_jax(monkeypatch)
    real = pytest.importorskip("jax")
    fields = ["obs", "reward", "done", "info"]
    if not getattr(State, "registered", False):
        real.tree_util.register_dataclass(State, fields, [])
        State.registered = True
    return real


@pytest.mark.parametrize("parts", [False, True])
def test_environments_of_jax(jax, parts):
    def uniform(key):
        return jax.random.uniform(key, (1,))

    env = JaxVecEnv(BraxLike(jax.numpy, uniform, parts), 3, seed=1, max_episode_steps=3)
    first = env.reset_all()
    assert first.shape == (3, 1)
    assert env.device.split(":")[0] in ("cpu", "cuda")
    other = JaxVecEnv(BraxLike(jax.numpy, uniform, parts), 3, seed=1)
    assert torch.equal(first, other.reset_all())
    assert not torch.equal(first, env.reset_all())
    assert torch.equal(first, env.reset_all(1))
    actions = torch.tensor([[0.0], [-0.25], [2.0]], device=first.device)
    for t in range(1, 4):
        out = env.step_all(actions)
        ended = [t == 3, t == 3, True]
        assert out["terminated"].tolist() == [False, False, True]
        assert out["truncated"].tolist() == [t == 3, t == 3, False]
        assert out["episode_length"].tolist() == [t, t, 1]
        torch.testing.assert_close(out["episode_return"].cpu(), torch.tensor([0.0, -0.25 * t, 2.0]).double())
        led_to = first + actions * torch.tensor([[t], [t], [1]], device=first.device)
        torch.testing.assert_close(out["final_obs"], led_to)
        over = torch.tensor(ended, device=first.device).unsqueeze(1)
        torch.testing.assert_close(out["obs"], torch.where(over, first, led_to))


class WithKey(BraxLike):
    """It holds a random key and the number of its steps, as environments of MuJoCo Playground do."""

    def reset(self, key):
        state = super().reset(key)
        return replace(state, info={"rng": key, "steps": 0.0 * state.obs[0]})

    def step(self, state, action):
        info = {"rng": state.info["rng"] + 1, "steps": state.info["steps"] + 1}
        return replace(super().step(state, action), info=info)


def test_a_new_episode_does_not_draw_the_random_numbers_of_the_last_one_again(jax):
    env = JaxVecEnv(WithKey(jax.numpy, lambda key: jax.random.uniform(key, (1,))), 2, max_episode_steps=2)
    first = env.reset_all()
    keys = np.asarray(env._state.info["rng"])
    for _ in range(3):
        env.step_all(torch.zeros((2, 1), device=first.device))
    np.testing.assert_array_equal(np.asarray(env._state.info["rng"]), keys + 3)
    assert np.asarray(env._state.info["steps"]).tolist() == [1, 1]


def test_jax_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError, match="JaxVecEnv needs JAX"):
        JaxVecEnv(BraxLike(np, None), 3)


def test_discrete_actions_begin_where_the_space_says():
    class Discrete(IsaacLike):
        def __init__(self):
            super().__init__()
            self.single_action_space, self.seen = spaces.Discrete(3, start=1), set()

        def step(self, actions):
            self.seen |= set(actions.tolist())
            return super().step(torch.zeros(self.num_envs, 1))

    env = Discrete()
    TensorRolloutCollector(TorchVecEnv(env)).collect(DiscretePolicy(1, 3), 20)
    assert env.seen == {1, 2, 3}

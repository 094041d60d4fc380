"""`predict` takes the environment's own observations and returns actions that its ``step`` takes."""

from __future__ import annotations

import sys
from typing import ClassVar

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from rlox.algorithms import DQN, MAPPO, PPO, SAC, TD3


class Spaces(gymnasium.Env):
    """An environment with any spaces; it raises an error for an action that is not in its space."""

    def __init__(self, observed, taken):
        self.observation_space, self.action_space = observed, taken

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), (self.action_space, action)
        return self.observation_space.sample(), 0.0, False, False, {}


# Workers cannot import a test module by its name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL = {"n_envs": 2, "n_steps": 4, "batch_size": 8, "seed": 0}
BOX = spaces.Box(-1, 1, (2,))
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "start": spaces.Discrete(3, start=7),
    "choices": spaces.MultiDiscrete([2, 3]),
    "choices from": spaces.MultiDiscrete([2, 3], start=[5, -1]),
    "choices of two dimensions": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "switches": spaces.MultiBinary(3),
    "switches of two dimensions": spaces.MultiBinary((2, 2)),
    "box": spaces.Box(-2, 1, (3,)),
    "box of two dimensions": spaces.Box(-2, 1, (3, 2)),
    "box of no dimensions": spaces.Box(-2, 1, ()),
    "float64": spaces.Box(-0.1, 0.1, (2,), np.float64),
}


def in_space(space, action):
    # gymnasium's Discrete takes NumPy integers and ints, Box takes arrays only.
    return space.contains(np.asarray(action, space.dtype) if space.shape == () and space.dtype.kind == "f" else action)


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in ACTIONS), pytest.param("start", 1, marks=pytest.mark.slow)]
)
def test_actions_are_in_the_environments_space(kind, workers):
    space = ACTIONS[kind]
    ppo = PPO(lambda: Spaces(BOX, space), **SMALL, env_workers=workers)
    obs = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)
    for deterministic in (True, False):
        batch = ppo.predict(obs, deterministic)
        assert len(batch) == 20
        assert all(in_space(space, action) for action in batch)
        one = ppo.predict(obs[0], deterministic)
        assert in_space(space, one)
        if deterministic:
            np.testing.assert_array_equal(one, batch[0])
    ppo.train(8)
    ppo.close()


def test_numbers_beyond_the_bounds_of_float64_are_never_sent():
    # 0.1 is above 0.1 as float64 when it is rounded to float32, and 0.7 below.
    space = spaces.Box(np.array([-0.1, 0.1, -np.inf, 0.7]), np.array([0.1, 0.1, 0.1, 1.0]), dtype=np.float64)
    ppo = PPO(lambda: Spaces(BOX, space), **SMALL)
    low, high = ppo.spec.act_low.astype(np.float64), ppo.spec.act_high.astype(np.float64)
    near = np.array([-0.1, 0.1, -np.inf, 0.7])
    np.testing.assert_allclose(low, near, rtol=2e-7)
    np.testing.assert_allclose(high, space.high, rtol=2e-7)
    inside = [0, 2, 3]  # the second number has no float32 within its bounds
    assert (low >= space.low)[inside].all()
    assert (high <= space.high)[inside].all()
    ppo.close()


@pytest.mark.parametrize("cls", [SAC, TD3])
def test_a_squashed_policy_stays_within_bounds_of_float64(cls):
    space = spaces.Box(-0.1, 0.1, (2,), np.float64)
    agent = cls(lambda: Spaces(BOX, space), seed=0, hidden_sizes=(8,))
    actions = agent.predict(np.random.default_rng(0).uniform(-1e6, 1e6, (200, 2)))
    assert all(space.contains(action) for action in actions)
    assert abs(actions).max() > 0.0999
    agent.close()


OBSERVATIONS = {
    "dict": spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2, 2)), "c": spaces.MultiBinary(2)}),
    "nested": spaces.Dict({"x": spaces.Tuple([spaces.Discrete(2, start=1), spaces.Box(-1, 1, ())])}),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3])]),
    "one part": spaces.Dict({"x": spaces.Box(-1, 1, (3,))}),
    "discrete": spaces.Discrete(4),
    "start": spaces.Discrete(4, start=-2),
    "choices": spaces.MultiDiscrete([2, 3]),
    "switches": spaces.MultiBinary(3),
    "switches of two dimensions": spaces.MultiBinary((2, 2)),
    "box of two dimensions": spaces.Box(-1, 1, (2, 3)),
    "box of no dimensions": spaces.Box(-1, 1, ()),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "text": spaces.Text(4),
    "one of several": spaces.OneOf([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]),
}


def test_a_deterministic_policy_takes_the_same_action_when_it_is_to_sample():
    """Not with the noise of its training, which is as large in checkpoints."""
    td3, obs = TD3("Pendulum-v1", seed=1, exploration_noise=0.5), np.full(3, 0.5, np.float32)
    expected = td3.predict(obs)
    np.testing.assert_array_equal(td3.predict(obs, deterministic=False), expected)
    np.testing.assert_array_equal(td3.session(deterministic=False).predict(obs), expected)
    sac = SAC("Pendulum-v1", seed=1)
    assert sac.session(deterministic=False).predict(obs) != sac.session().predict(obs)


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations_of_the_environment_are_accepted(kind):
    space = OBSERVATIONS[kind]
    ppo = PPO(lambda: Spaces(space, spaces.Discrete(2)), **SMALL)
    space.seed(0)
    own = [space.sample() for _ in range(5)]
    rows = np.stack([np.asarray(spaces.flatten(space, obs), np.float32) for obs in own])
    expected = ppo.predict(rows)
    assert [ppo.predict(obs) for obs in own] == expected.tolist()
    assert ppo.predict(rows[0]) == expected[0]
    if kind not in ("discrete", "start", "text", "one of several"):
        batch = gymnasium.vector.utils.concatenate(
            space, own, gymnasium.vector.utils.create_empty_array(space, len(own))
        )
        assert ppo.predict(batch).tolist() == expected.tolist()
    ppo.close()


@pytest.mark.parametrize("shape", [(36, 40, 3), (3, 36, 40)], ids=["channels last", "channels first"])
def test_images_are_accepted_as_the_environment_shows_them(shape):
    space = spaces.Box(0, 255, shape, np.uint8)
    dqn = DQN(lambda: Spaces(space, spaces.Discrete(2)), seed=0, hidden_sizes=(8,))
    own = np.stack([space.sample() for _ in range(3)])
    first = own if shape[0] == 3 else np.moveaxis(own, -1, 1)
    expected = dqn.predict(first)
    assert dqn.predict(own).tolist() == expected.tolist()
    assert [dqn.predict(obs) for obs in own] == expected.tolist()
    for scaled in (own / 255.0, first[0] / 255.0):
        with pytest.raises(ValueError, match=r"DQN\.predict: obs must be of dtype uint8"):
            dqn.predict(scaled)
    dqn.close()


@pytest.mark.parametrize(
    ("kind", "obs", "message"),
    [
        ("dict", {"b": 0}, "obs must have the part 'a'"),
        ("dict", {"b": 9, "a": np.zeros((2, 2), "f4"), "c": np.zeros(2, "i1")}, r"obs\['b'\] must be in"),
        ("discrete", 4, "obs must be in observation_space, Discrete"),
        ("choices", [1, 3], "obs must be in observation_space, MultiDiscrete"),
        ("box of two dimensions", np.zeros((2, 4)), r"obs must have shape \(6\) or \(B, 6\), or be an observation"),
    ],
)
def test_other_observations_are_errors(kind, obs, message):
    ppo = PPO(lambda: Spaces(OBSERVATIONS[kind], spaces.Discrete(2)), **SMALL)
    with pytest.raises(ValueError, match=f"PPO.predict: {message}"):
        ppo.predict(obs)
    ppo.close()


class Zoo(ParallelEnv):
    """Agents with different spaces; one has a mask of legal actions in its observation."""

    metadata: ClassVar = {"name": "zoo_v0", "render_modes": []}
    possible_agents: ClassVar = ["box", "start", "masked"]
    observed: ClassVar = {
        "box": spaces.Discrete(3, start=1),
        "start": spaces.Box(-1, 1, (2, 2)),
        "masked": spaces.Dict({"observation": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)}),
    }
    taken: ClassVar = {
        "box": spaces.Box(-2, 2, (1, 2)),
        "start": spaces.Discrete(2, start=5),
        "masked": spaces.Discrete(3),
    }

    def observation_space(self, agent):
        return self.observed[agent]

    def action_space(self, agent):
        return self.taken[agent]

    def see(self):
        seen = {agent: self.observed[agent].sample() for agent in self.possible_agents}
        seen["masked"]["action_mask"][:] = [0, 0, 1]
        return seen

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return self.see(), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert all(self.taken[agent].contains(action) for agent, action in actions.items()), actions
        no = dict.fromkeys(self.agents, False)
        return self.see(), dict.fromkeys(self.agents, 0.0), no, no, {agent: {} for agent in self.agents}


def test_every_agent_takes_its_own_observations_and_actions():
    mappo = MAPPO("zoo", env_fn=Zoo, n_envs=2, n_steps=4, batch_size=8, seed=0)
    env = Zoo()
    obs, _ = env.reset()
    for deterministic in (True, False):
        actions = mappo.predict_all(obs, deterministic)
        assert actions["masked"] == 2  # the only legal one
        obs = env.step(actions)[0]
    mappo.train(8)
    mappo.close()


def test_several_agents_in_place_of_one_name_the_argument():
    for cls in (PPO, MAPPO):
        with pytest.raises(TypeError, match=r"got Zoo; for an environment with several agents, use MAPPO.*env_fn="):
            cls(lambda: Zoo())

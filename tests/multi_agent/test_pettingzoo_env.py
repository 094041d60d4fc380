"""PettingZoo environments as arrays, also when agents die or come back, in one process or several."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from rlox.algorithms import MAPPO
from rlox.envs import make_vec_env
from rlox.envs.state import first_seeds
from rlox.kernels.rng import Rng
from rlox.multi_agent import MultiAgentStep, is_multi_agent, make_multi_agent_env

# Workers cannot import a test module by its name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPREAD = "pettingzoo:mpe2.simple_spread_v3"
TAG = "pettingzoo:mpe2.simple_tag_v3"


class Script(ParallelEnv):
    """Plays `days`: the agents that are listed after the reset and after each step, with marks for those that end.

    An observation is [number of the agent, number of the step, last action]; a reward is 10 * agent + step.
    """

    metadata = {"name": "script"}  # noqa: RUF012
    possible_agents = ("a_0", "a_1", "b_0")

    def __init__(self, days=("a_0 a_1 b_0", "a_0 a_1 b_0", ""), render_mode=None, **change):
        self.days = [day.split() for day in days]
        self.possible_agents = list(type(self).possible_agents)
        self.render_mode = render_mode
        self.__dict__.update(change)

    def observation_space(self, agent):
        return spaces.Box(-99, 99, (3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(4 if agent.startswith("a") else 3)

    def look(self, agent, action=0):
        return np.array([self.possible_agents.index(agent), self.t, action], np.float32)

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, self.listed(0)
        return {agent: self.look(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def listed(self, t):
        """Names of a day without those that end: `!` marks a termination and `~` a truncation."""
        return [name for name in self.days[t] if name[-1] not in "!~"]

    def step(self, actions):
        assert set(actions) == set(self.agents), (actions, self.agents)
        self.t += 1
        day = self.days[self.t]
        acted, self.agents = self.agents, self.listed(self.t)
        listed = [name.rstrip("!~") for name in day]  # agents that the day does not name left without a flag
        return (
            {agent: self.look(agent, actions.get(agent, 0)) for agent in listed},
            {agent: float(10 * self.possible_agents.index(agent) + self.t) for agent in listed if agent in acted},
            {agent: f"{agent}!" in day for agent in listed},
            {agent: f"{agent}~" in day for agent in listed},
            {agent: {} for agent in listed},
        )

    def render(self):
        return np.full((4, 6, 3), self.t, np.uint8)


def script(*days, n=1, **change):
    return make_multi_agent_env(functools.partial(Script, days, **change), n, 0)


def acts(env, number=1):
    return [np.full((env.n_envs, len(group.agents)), number) for group in env.spec.groups]


def same(x: MultiAgentStep, y: MultiAgentStep):
    for key, mine in vars(x).items():
        theirs = getattr(y, key)
        for a, b in zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]:
            np.testing.assert_array_equal(a, b, err_msg=key)


def random_actions(env, rng):
    return [
        group.spec.random_actions(rng, env.n_envs * len(group.agents)).reshape(
            env.n_envs, len(group.agents), *group.spec.action_shape
        )
        for group in env.spec.groups
    ]


def play(env, steps, rng):
    return [env.step_all(random_actions(env, rng)) for _ in range(steps)]


@pytest.mark.parametrize("name", ["simple_spread_v3", "simple_tag_v3", "simple_speaker_listener_v4"])
@pytest.mark.parametrize("continuous", [False, True])
def test_the_arrays_equal_the_results_of_the_environments(name, continuous):
    kwargs = {"max_cycles": 6, "continuous_actions": continuous}
    n, rng = 3, Rng(4)
    env = make_multi_agent_env(f"pettingzoo:mpe2.{name}", n, 7, kwargs)
    module = __import__(f"mpe2.{name}", fromlist=["x"])
    raw = [module.parallel_env(**kwargs) for _ in range(n)]
    obs = [copy.reset(seed=seed)[0] for copy, seed in zip(raw, first_seeds(7, n), strict=True)]
    step = env.reset_all()
    returns, lengths = np.zeros((n, env.spec.n_agents)), np.zeros(n, int)
    assert {agent for group in env.spec.groups for agent in group.agents} == set(raw[0].possible_agents)
    assert list(env.spec.agents) == raw[0].possible_agents
    for _ in range(14):
        actions = random_actions(env, rng)
        nows = [copy.state() for copy in raw]
        for i, now in enumerate(nows):
            np.testing.assert_array_equal(step.state[i], now)
            for g, group in enumerate(env.spec.groups):
                for a, agent in enumerate(group.agents):
                    np.testing.assert_array_equal(step.obs[g][i, a], obs[i][agent])
        step = env.step_all(actions)
        for i, copy in enumerate(raw):
            chosen = {}
            for g, group in enumerate(env.spec.groups):
                chosen |= {agent: actions[g][i, a] for a, agent in enumerate(group.agents)}
            obs[i], rewards, terminated, truncated, _ = copy.step({agent: chosen[agent] for agent in copy.agents})
            np.testing.assert_array_equal(step.final_state[i], copy.state())
            lengths[i] += 1
            for g, group in enumerate(env.spec.groups):
                for a, (agent, slot) in enumerate(zip(group.agents, group.slots, strict=True)):
                    assert step.rewards[g][i, a] == rewards[agent]
                    assert step.terminated[g][i, a] == terminated[agent]
                    assert step.truncated[g][i, a] == truncated[agent]
                    np.testing.assert_array_equal(step.final_obs[g][i, a], obs[i][agent])
                    returns[i, slot] += rewards[agent]
            assert step.ended[i] == (not copy.agents)
            if step.ended[i]:
                np.testing.assert_array_equal(step.episode_returns[i], returns[i])
                assert step.episode_lengths[i] == lengths[i] == 6
                returns[i], lengths[i] = 0, 0
                obs[i], _ = copy.reset()
            else:
                assert np.isnan(step.episode_returns[i]).all()
                assert step.episode_lengths[i] == 0


def test_agents_of_equal_spaces_are_a_group():
    tag = make_multi_agent_env(TAG, 1, 0, {"num_good": 2})
    assert [(group.name, group.agents) for group in tag.spec.groups] == [
        ("adversary", ("adversary_0", "adversary_1", "adversary_2")),
        ("agent", ("agent_0", "agent_1")),
    ]
    assert [group.slots for group in tag.spec.groups] == [(0, 1, 2), (3, 4)]
    assert (tag.spec.state_dim, tag.spec.state_source, tag.spec.masked) == (96, "observations", (False, False))
    one = make_multi_agent_env(SPREAD, 1, 0)
    assert [(group.name, group.spec.obs_dim) for group in one.spec.groups] == [("agents", 18)]
    pair = make_multi_agent_env("pettingzoo:mpe2.simple_speaker_listener_v4", 1, 0)
    assert [(group.name, group.spec.obs_dim, group.spec.n_actions) for group in pair.spec.groups] == [
        ("speaker_0", 3, 3),
        ("listener_0", 11, 5),
    ]


def test_every_group_has_a_name_of_its_own():
    class Pack(Script):
        possible_agents = ("wolf_0", "wolf_1", "wolf")

        def action_space(self, agent):
            return spaces.Discrete(3 if agent == "wolf" else 4)

    env = make_multi_agent_env(functools.partial(Pack, ("wolf_0 wolf_1 wolf", "")), 1, 0)
    assert [group.name for group in env.spec.groups] == ["wolf", "wolf_"]


def test_an_agent_may_die_alone():
    env = script("a_0 a_1 b_0", "a_0! a_1 b_0", "a_1~ b_0", "b_0!")
    first = env.reset_all()
    assert [alive.tolist() for alive in first.alive] == [[[True, True]], [[True]]]
    a, b = range(2)
    died = env.step_all(acts(env, 2))
    assert died.terminated[a].tolist() == [[True, False]]
    assert died.truncated[a].tolist() == [[False, False]]
    assert died.rewards[a].tolist() == [[1.0, 11.0]]
    assert died.final_obs[a].tolist() == [[[0, 1, 2], [1, 1, 2]]]  # its last observation is there ...
    assert died.obs[a].tolist() == [[[0, 0, 0], [1, 1, 2]]]  # ... and is not acted on
    assert died.alive[a].tolist() == [[False, True]]
    assert died.state.tolist() == [[0, 0, 0, 1, 1, 2, 2, 1, 2]]
    assert died.final_state.tolist() == died.state.tolist()
    assert died.ended.tolist() == [False]
    cut = env.step_all(acts(env, 1))
    assert cut.rewards[a].tolist() == [[0.0, 12.0]]  # a dead agent gets no reward
    assert cut.terminated[a].tolist() == [[False, False]]
    assert cut.truncated[a].tolist() == [[False, True]]
    assert cut.final_obs[a].tolist() == [[[0, 0, 0], [1, 2, 1]]]
    assert cut.final_state.tolist() == [[0, 0, 0, 1, 2, 1, 2, 2, 1]]  # the state from which it bootstraps
    assert cut.state.tolist() == [[0, 0, 0, 0, 0, 0, 2, 2, 1]]
    assert cut.alive[a].tolist() == [[False, False]]
    last = env.step_all(acts(env, 0))
    assert last.ended.tolist() == [True]
    assert last.terminated[b].tolist() == [[True]]
    assert last.episode_returns.tolist() == [[1.0, 11.0 + 12.0, 21.0 + 22.0 + 23.0]]
    assert last.episode_lengths.tolist() == [3]
    assert last.obs[a].tolist() == [[[0, 0, 0], [1, 0, 0]]]  # of the next episode
    assert [alive.all() for alive in last.alive] == [True, True]
    assert last.final_obs[b].tolist() == [[[2, 3, 0]]]


def test_an_agent_that_vanishes_has_terminated_and_may_come_back():
    env = script("a_0 b_0", "b_0", "a_0 b_0", "a_0 a_1 b_0", "a_0~ a_1~ b_0~")
    first = env.reset_all()
    assert first.alive[0].tolist() == [[True, False]]
    assert first.obs[0][0, 1].tolist() == [0, 0, 0]
    gone = env.step_all(acts(env))
    assert gone.terminated[0].tolist() == [[True, False]]
    assert gone.rewards[0].tolist() == [[0.0, 0.0]]
    assert gone.final_obs[0].tolist() == [[[0, 0, 0], [0, 0, 0]]]
    back = env.step_all(acts(env))
    assert back.alive[0].tolist() == [[True, False]]
    assert back.rewards[0].tolist() == [[0.0, 0.0]]  # it did not act
    assert back.terminated[0].tolist() == back.truncated[0].tolist() == [[False, False]]
    assert back.obs[0].tolist() == [[[0, 2, 0], [0, 0, 0]]]
    new = env.step_all(acts(env))
    assert new.alive[0].tolist() == [[True, True]]
    assert new.rewards[0].tolist() == [[3.0, 0.0]]
    end = env.step_all(acts(env))
    assert end.truncated[0].tolist() == [[True, True]]
    assert end.ended.tolist() == [True]
    assert end.episode_returns.tolist() == [[3.0 + 4.0, 14.0, 21.0 + 22.0 + 23.0 + 24.0]]
    assert end.alive[0].tolist() == [[True, False]]


class Keeps(Script):
    """Continues to list agents that have ended, as some environments do."""

    def listed(self, t):
        return [name.rstrip("!~") for name in self.days[t]]

    def step(self, actions):
        self.agents = [name for name in self.agents if name in actions]
        return super().step(actions)


def test_an_agent_with_a_flag_is_dead_even_if_listed():
    days = ("a_0 a_1 b_0", "a_0! a_1 b_0", "a_0 a_1 b_0", "a_0! a_1! b_0~")
    env = make_multi_agent_env(functools.partial(Keeps, days), 1, 0)
    env.reset_all()
    found = [env.step_all(acts(env)) for _ in range(3)]
    assert [step.alive[0].tolist() for step in found[:2]] == [[[False, True]]] * 2
    assert found[2].ended.tolist() == [True]
    assert found[2].terminated[0].tolist() == [[False, True]]
    assert found[2].episode_returns.tolist() == [[1.0, 36.0, 66.0]]


def test_the_order_of_agents_does_not_matter():
    env = script("b_0 a_1 a_0", "a_1 b_0 a_0", "b_0! a_0! a_1!")
    env.reset_all()
    step = env.step_all([np.array([[3, 2]]), np.array([[1]])])
    assert step.obs[0].tolist() == [[[0, 1, 3], [1, 1, 2]]]
    assert step.obs[1].tolist() == [[[2, 1, 1]]]


def test_actions_of_dead_agents_are_ignored():
    env = script("a_0 b_0", "a_0 b_0", "a_0! b_0!")
    env.reset_all()
    env.step_all([np.array([[1, -7]]), np.array([[2]])])
    with pytest.raises(ValueError, match=r"PettingZooVecEnv.step_all: a: actions must be in \[0, 4\), got \[9, 0\]"):
        env.step_all([np.array([[9, -7]]), np.array([[2]])])


class Dicts(Script):
    """Has dicts where PettingZoo has methods."""

    observation_space = dict.fromkeys(Script.possible_agents, spaces.Box(0, 1, (3,)))


def test_dicts_of_spaces_are_named():
    with pytest.raises(
        ValueError, match=r"observation_space must be a method that takes an agent's name, got .*name it"
    ):
        make_multi_agent_env(lambda: Dicts(), 1, 0)


def test_one_environment_for_several_copies_is_an_error():
    env = Script()
    with pytest.raises(ValueError, match="must create an environment of its own, got the same object again"):
        make_multi_agent_env(lambda: env, 2, 0)


class Masked(Script):
    """Allows only action t % 3; the mask comes with the observation or the info."""

    where = "observation"

    def observation_space(self, agent):
        box = spaces.Box(-99, 99, (3,), np.float32)
        if self.where == "info" or agent.startswith("b"):
            return box
        return spaces.Dict({"observation": box, "action_mask": spaces.Box(0, 1, (4,), np.int8)})

    def mask(self):
        return (np.arange(4) == self.t % 3).astype(np.int8)

    def masked(self, obs, infos):
        for agent in obs:
            if agent.startswith("a"):
                if self.where == "info":
                    infos[agent] = {"action_mask": self.mask()}
                else:
                    obs[agent] = {"observation": obs[agent], "action_mask": self.mask()}
        return obs, infos

    def reset(self, seed=None, options=None):
        return self.masked(*super().reset(seed))

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = super().step(actions)
        obs, infos = self.masked(obs, infos)
        return obs, rewards, terminated, truncated, infos


@pytest.mark.parametrize("where", ["observation", "info"])
def test_masks_are_the_legal_actions(where):
    days = ("a_0 a_1 b_0", "a_0! a_1 b_0", "a_1! b_0!")
    env = make_multi_agent_env(functools.partial(Masked, days, where=where), 2, 0)
    assert env.spec.masked == (True, False)
    assert env.spec.groups[0].spec.obs_shape == (3,)
    first = env.reset_all()
    assert first.masks[1] is None
    assert first.masks[0].tolist() == [[[True, False, False, False]] * 2] * 2
    died = env.step_all(acts(env))
    assert died.masks[0].tolist() == [[[True] * 4, [False, True, False, False]]] * 2  # all actions for a dead agent
    assert died.obs[0][0].tolist() == [[0, 0, 0], [1, 1, 1]]
    again = env.step_all(acts(env))
    assert again.ended.all()
    assert again.masks[0].tolist() == first.masks[0].tolist()


def test_agents_that_join_later_have_masks():
    days = ("a_1 b_0", "a_0 a_1 b_0", "a_0! a_1! b_0!")
    env = make_multi_agent_env(functools.partial(Masked, days, where="info"), 1, 0)
    assert [(group.name, group.agents) for group in env.spec.groups] == [("a", ("a_0", "a_1")), ("b_0", ("b_0",))]
    assert env.reset_all().masks[0].tolist() == [[[True] * 4, [True, False, False, False]]]
    assert env.step_all(acts(env)).masks[0].tolist() == [[[False, True, False, False]] * 2]


def test_the_state_is_of_the_environment_or_the_observations():
    class Own(Script):
        def state(self):
            return np.array([[self.t, 7], [8, 9]])

    env = make_multi_agent_env(Own, 1, 0)
    assert (env.spec.state_dim, env.spec.state_source) == (4, "environment")
    assert env.reset_all().state.tolist() == [[0, 7, 8, 9]]
    step = env.step_all(acts(env))
    assert step.state.tolist() == step.final_state.tolist() == [[1, 7, 8, 9]]
    last = env.step_all(acts(env))
    assert (last.final_state[0, 0], last.state[0, 0]) == (2, 0)
    joined = make_multi_agent_env(Own, 1, 0, state="observations")
    assert (joined.spec.state_dim, joined.spec.state_source) == (9, "observations")
    with pytest.raises(ValueError, match="state must be observations if the environment has no state"):
        make_multi_agent_env(Script, 1, 0, state="environment")
    with pytest.raises(ValueError, match="state must be one of auto, environment, observations, got 'all'"):
        make_multi_agent_env(Script, 1, 0, state="all")
    asked = make_multi_agent_env(SPREAD, 1, 0, state="environment")
    assert asked.spec.state_source == "environment"
    np.testing.assert_array_equal(asked.reset_all().state, make_multi_agent_env(SPREAD, 1, 0).reset_all().state)


def test_arrays_are_new_unless_given():
    env = make_multi_agent_env(SPREAD, 2, 0)
    first = env.reset_all()
    before = first.obs[0].copy()
    step = env.step_all(acts(env))
    np.testing.assert_array_equal(first.obs[0], before)
    again = make_multi_agent_env(SPREAD, 2, 0)
    again.reset_all()
    out = MultiAgentStep.empty(env.spec, 2)
    out.rewards[0][...] = 99
    assert again.step_all(acts(again), out) is out
    same(out, step)


def test_a_seed_reproduces_episodes_and_later_resets_differ():
    def firsts(seed):
        env = make_multi_agent_env(SPREAD, 2, seed)
        return [env.reset_all().obs[0], env.reset_all().obs[0], env.reset_all(seed).obs[0]]

    first, second, third = firsts(1)
    again = firsts(1)
    np.testing.assert_array_equal(first, again[0])
    np.testing.assert_array_equal(second, again[1])
    np.testing.assert_array_equal(first, third)
    assert (first != second).any()
    assert (first[0] != first[1]).any()
    assert (first != firsts(2)[0]).any()


def test_names_may_be_numbers():
    class Numbers(Script):
        possible_agents = (0, 1)

        def observation_space(self, agent):
            return spaces.Box(-99, 99, (3,), np.float32)

        def action_space(self, agent):
            return spaces.Discrete(2, start=5)

        def reset(self, seed=None, options=None):
            self.agents = [0, 1]
            self.t = 0
            return {agent: self.look(agent) for agent in self.agents}, {}

        def step(self, actions):
            self.t += 1
            obs = {agent: self.look(agent, action) for agent, action in actions.items()}
            no = dict.fromkeys(obs, False)
            return obs, dict.fromkeys(obs, 1), no, no, {}

    env = make_multi_agent_env(Numbers, 1, 0)
    assert env.spec.agents == ("0", "1")
    env.reset_all()
    assert env.step_all([[[0, 1]]]).obs[0].tolist() == [[[0, 1, 5], [1, 1, 6]]]  # rlox counts actions from 0


def test_aec_environments_are_converted():
    from mpe2 import simple_spread_v3

    aec = make_multi_agent_env(lambda: simple_spread_v3.env(max_cycles=5), 2, 3)
    parallel = make_multi_agent_env(SPREAD, 2, 3, {"max_cycles": 5})
    same(aec.reset_all(), parallel.reset_all())
    for x, y in zip(play(aec, 7, Rng(0)), play(parallel, 7, Rng(0)), strict=True):
        same(x, y)
    named = make_multi_agent_env("mpe2.simple_spread_v3:env", 1, 0)
    assert named.spec.n_agents == 3


def test_agents_that_take_turns_act_one_at_a_time():
    env = make_multi_agent_env("pettingzoo:pettingzoo.classic.tictactoe_v3", 2, 0)
    assert env.spec.turns
    step = env.reset_all()
    board, turns = set(range(9)), []
    for cell in (0, 3, 1, 4, 2):  # the first player wins
        turns.append(step.alive[0].tolist())
        who = int(step.alive[0][0].argmax())
        assert set(np.flatnonzero(step.masks[0][0, who])) == board
        assert step.masks[0][0, 1 - who].all()
        board.remove(cell)
        step = env.step_all([np.full((2, 2), cell)])
    assert turns == [[[True, False]] * 2, [[False, True]] * 2] * 2 + [[[True, False]] * 2]
    assert step.rewards[0].tolist() == [[1.0, -1.0]] * 2
    assert step.terminated[0].all()
    assert step.ended.all()
    assert step.alive[0].tolist() == [[True, False]] * 2


def test_the_first_environment_is_rendered():
    env = script(*["a_0"] * 3, n=2, render_mode="rgb_array")
    env.reset_all()
    env.step_all(acts(env))
    assert env.render().tolist() == np.full((4, 6, 3), 1).tolist()
    assert script("a_0").render() is None
    spread = make_multi_agent_env(SPREAD, 1, 0, {"render_mode": "rgb_array"})
    spread.reset_all()
    assert spread.render().shape == (700, 700, 3)
    odd = script("a_0", render_mode="rgb_array", render=lambda: "a picture")
    odd.reset_all()
    with pytest.raises(ValueError, match=r"render\(\) must return one picture.* got a str"):
        odd.render()


class Saves(Script):
    """Returns random observations, and can be saved."""

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return super().reset(seed)

    def look(self, agent, action=0):
        return np.array([self.rng.random(), self.t, action], np.float32)

    def get_state(self):
        return {"t": self.t, "agents": self.agents, "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        self.t, self.agents = state["t"], state["agents"]
        self.rng = np.random.default_rng(0)
        self.rng.bit_generator.state = state["rng"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(0, 0), (2, 0), (0, 2)])
@pytest.mark.parametrize("env", ["simple_tag_v3", "saves"])
def test_a_restored_state_continues_exactly(env, workers):
    days = ("a_0 a_1 b_0", "a_1 b_0", "a_0 a_1 b_0", "a_0! a_1 b_0", "a_1~ b_0~")
    env = functools.partial(Saves, days) if env == "saves" else f"pettingzoo:mpe2.{env}"
    kwargs = {"max_cycles": 7} if isinstance(env, str) else None
    with (
        make_multi_agent_env(env, 3, 5, kwargs, workers[0]) as one,
        make_multi_agent_env(env, 3, 6, kwargs, workers[1]) as other,
    ):
        assert one.unrestorable_reason is None
        assert one.get_state() is None  # before there is an episode
        one.reset_all()
        play(one, 3, Rng(1))
        state = one.get_state()
        assert other.fits(state)
        expected = play(one, 12, Rng(2))
        other.set_state(state)
        for x, y in zip(expected, play(other, 12, Rng(2)), strict=True):
            same(x, y)
        assert any(step.ended.any() for step in expected)


class Seeded(Script):
    """An environment that cannot be restored, and writes the numbers that seed it into the file `seeds`."""

    def reset(self, seed=None, options=None):
        if seed is not None:
            with open(self.seeds, "a") as file:
                file.write(f"{seed}\n")
        return super().reset(seed)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_new_episodes_of_a_resumed_run_are_not_its_first_ones_again(workers, tmp_path):
    file, path, found = tmp_path / "seeds", tmp_path / "a.safetensors", []
    make = functools.partial(Seeded, seeds=str(file))

    def last_seeds():
        return sorted(map(int, file.read_text().split()[-2:]))

    mappo = MAPPO("seeded", n_envs=2, seed=5, env_fn=make, env_workers=workers, n_steps=16, hidden_sizes=[8])
    for resumes in (True, True, False):
        mappo.train(32)
        found.append(last_seeds())
        if resumes:
            mappo.save(path)
        mappo.close()
        if resumes:
            mappo = MAPPO.from_checkpoint(path, env_fn=make)
    again = MAPPO.from_checkpoint(path, env_fn=make)
    again.train(32)
    again.close()
    assert len({*found[0], *found[1], *found[2]}) == 6
    assert last_seeds() == found[2]  # a run that is resumed twice from one checkpoint does the same twice


def test_environments_that_cannot_be_saved_have_a_reason():
    env = script("a_0", "a_0")
    env.reset_all()
    assert env.unrestorable_reason == "Script has no get_state() and set_state(state)"
    assert env.get_state() is None
    with pytest.raises(ValueError, match=r"PettingZooVecEnv.set_state: .* must be restorable, but Script has no get_"):
        env.set_state({})


def test_a_state_of_other_environments_is_an_error():
    tag = make_multi_agent_env(TAG, 1, 0)
    tag.reset_all()
    spread = make_multi_agent_env(SPREAD, 1, 0)
    assert not spread.fits(tag.get_state())
    with pytest.raises(ValueError, match="the state must be of 1 x"):
        spread.set_state(tag.get_state())
    four = make_multi_agent_env(SPREAD, 1, 0, {"N": 4})
    four.reset_all()
    with pytest.raises(ValueError, match=r"PettingZooVecEnv: .*: (a state must contain|the state of)"):
        spread.set_state(four.get_state())


@pytest.mark.slow
@pytest.mark.parametrize("env", [TAG, functools.partial(Script, ("a_0 a_1", "a_0! a_1", "a_0 a_1 b_0", "a_1~ b_0!"))])
def test_workers_give_the_same_arrays(env):
    kwargs = {"max_cycles": 5, "num_good": 2} if isinstance(env, str) else None
    with (
        make_multi_agent_env(env, 5, 9, kwargs) as here,
        make_multi_agent_env(env, 5, 9, kwargs, workers=2) as there,
    ):
        assert here.spec == there.spec
        same(here.reset_all(), there.reset_all())
        for x, y in zip(play(here, 12, Rng(0)), play(there, 12, Rng(0)), strict=True):
            same(x, y)
        assert there.render() is None
    with make_multi_agent_env(SPREAD, 2, 0, {"render_mode": "rgb_array"}, workers=2) as drawn:
        drawn.reset_all()
        assert drawn.render().shape == (700, 700, 3)


class Odd(Script):
    """Behaves as the action of a_0 selects: 1 raises, 2 exits, 3 sleeps."""

    def step(self, actions):
        if actions["a_0"] == 1:
            raise KeyError("of the environment's own")
        if actions["a_0"] == 2:
            sys.exit(3)
        if actions["a_0"] == 3:
            time.sleep(0.3)
        self.t = -1
        return super().step(actions)


def odd(**more):
    return make_multi_agent_env(functools.partial(Odd, ("a_0",)), 4, 0, **more)


def chosen(*actions):
    return [np.array([[action, 0] for action in actions]), np.zeros((4, 1), int)]


def dead(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_worker_that_dies_is_named_and_nothing_is_left():
    env = odd(workers=2)
    pids = [child.process.pid for child in env._group.children]
    env.reset_all()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(
        RuntimeError, match=r"ParallelPettingZooVecEnv: worker 1 \(pid \d+\) died \(signal 9\) with env.* 2"
    ):
        env.step_all(chosen(0, 0, 0, 0))
    assert all(map(dead, pids))
    with pytest.raises(RuntimeError, match=r"ParallelPettingZooVecEnv: .* is closed"):
        env.step_all(chosen(0, 0, 0, 0))
    assert env.get_state() is None
    env.close()


@pytest.mark.slow
def test_a_worker_that_dies_while_it_saves_is_named():
    with make_multi_agent_env(TAG, 2, 0, workers=2) as env:
        env.reset_all()
        os.kill(env._group.children[0].process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"worker 0 \(pid \d+\) died \(signal 9\) with environments 0 to 0 of"):
            env.get_state()
        assert env.get_state() is None


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_exceptions_of_the_environment_are_passed_on(workers):
    with odd(workers=workers) as env:
        pids = [child.process.pid for child in getattr(env._group, "children", [])]
        env.reset_all()
        env.step_all(chosen(0, 0, 3, 0))
        with pytest.raises(KeyError, match="of the environment's own") as caught:
            env.step_all(chosen(0, 0, 0, 1))
        (note,) = [note for note in caught.value.__notes__ if "environment 3 (" in note]
        assert note.endswith("): step 2 of its episode failed")
    assert all(map(dead, pids))
    with odd(workers=workers) as env:
        env.reset_all()
        with pytest.raises(RuntimeError, match=r"the environment must not end the process, got SystemExit\(3\)"):
            env.step_all(chosen(0, 2, 0, 0))


@pytest.mark.slow
def test_errors_of_workers():
    with pytest.raises(ValueError, match=r"workers must be between 0 and n_envs \(2\), got 3"):
        make_multi_agent_env(SPREAD, 2, 0, workers=3)
    # The remedy in the worker's message is passed on.
    with pytest.raises(ImportError, match=r"did you mean pettingzoo:mpe2\.simple_spread_v3"):
        make_multi_agent_env("pettingzoo:simple_spread_v3", 2, 0, workers=1)
    lock = __import__("threading").Lock()
    with pytest.raises(TypeError, match="must be picklable by cloudpickle"):
        make_multi_agent_env(lambda: lock, 2, 0, workers=1)


# ---- environments that break one rule each


class Later(Script):
    """Breaks a rule at the second step, in the way that `broken` names."""

    broken = ""

    def __init__(self, broken="", **change):
        super().__init__(("a_0 a_1 b_0",) * 3 + ("a_0! a_1! b_0!",), **change)
        self.broken = broken
        self.resets = 0

    def observation_space(self, agent):
        size = 3 + (self.broken == "space" and self.resets > 1 and agent == "a_1")
        return spaces.Box(-99, 99, (size,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(4 + (self.broken == "choices" and self.resets > 1 and agent == "b_0"))

    def reset(self, seed=None, options=None):
        self.resets += 1
        obs, infos = super().reset(seed)
        if self.broken == "nobody":
            self.agents = []
        if self.broken == "reset":
            return obs
        if self.broken == "reset obs":
            del obs["b_0"]
        return obs, infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = super().step(actions)
        if self.t < 2:
            return obs, rewards, terminated, truncated, infos
        match self.broken.split():
            case ["missing", what]:
                of = {"obs": obs, "reward": rewards, "termination": terminated, "truncation": truncated}[what]
                del of["a_1"]
            case ["shape"]:
                obs["a_1"] = np.zeros(4, np.float32)
            case ["text"]:
                rewards["a_1"] = "3"
            case ["none"]:
                terminated["a_1"] = None
            case ["flag"]:
                truncated["a_1"] = "no"
            case ["nan"]:
                obs["a_1"][2] = np.nan
            case ["infinite"]:
                rewards["b_0"] = -np.inf
            case ["unknown"]:
                self.agents.append("c_0")
            case ["twice"]:
                self.agents.append("a_1")
            case ["four"]:
                return obs, rewards, terminated, infos
            case ["list"]:
                return list(obs.values()), rewards, terminated, truncated, infos
        return obs, rewards, terminated, truncated, infos


class States(Later):
    def state(self):
        late = self.t == 2
        if self.broken == "words":
            return "north"
        return np.full(
            5 if self.broken == "state" and late else 4, np.nan if self.broken == "nan state" and late else 1
        )


LATER = {
    "missing obs": (
        ValueError,
        "observations must have every agent that continues or was truncated, got none for 'a_1', only",
    ),
    "missing reward": (
        ValueError,
        r"rewards must have every agent that acted, got none for 'a_1', only \['a_0', 'b_0'\]",
    ),
    "missing termination": (ValueError, "terminations must have every agent that acted, got none for 'a_1', only"),
    "missing truncation": (ValueError, "truncations must have every agent that acted, got none for 'a_1', only"),
    "shape": (ValueError, r"observations of agent 'a_1' must have the shape of observation_space, \(3,\), got \(4,\)"),
    "text": (ValueError, "the reward of agent 'a_1' must be a number, got str"),
    "none": (ValueError, "terminations of agent 'a_1' must be a bool, got NoneType"),
    "flag": (ValueError, "truncations of agent 'a_1' must be a bool, got str"),
    "nan": (
        FloatingPointError,
        "observations of agent 'a_1' must be finite, got nan in number 2 from environment 0 at step 2 of its episode",
    ),
    "infinite": (FloatingPointError, "rewards of agent 'b_0' must be finite, got -inf from environment 0 at step 2"),
    "unknown": (
        ValueError,
        r"agents must be among possible_agents, \['a_0', 'a_1', 'b_0'\], got 'c_0'; list all agents there",
    ),
    "twice": (ValueError, "agents must name each agent once, got 'a_1' more than once in"),
    "four": (
        ValueError,
        r"step must return \(observations, rewards, terminations, truncations, infos\), got a tuple of 4",
    ),
    "list": (ValueError, "step must return observations as a dict by agent, got list"),
    "space": (ValueError, r"the observation space of agent 'a_1' must stay unchanged, Box.*\(3,\).*got Box.*\(4,\)"),
    "choices": (ValueError, r"the action space of agent 'b_0' must stay unchanged, Discrete\(4\), got Discrete\(5\)"),
    "state": (ValueError, r"state\(\) must keep its shape, 4 numbers, got 5; pad it, or use state=observations"),
    "nan state": (FloatingPointError, r"state\(\) must be finite, got nan in number 0 from environment 0 at step 2"),
}


@pytest.mark.parametrize("broken", LATER)
def test_an_environment_that_breaks_a_rule_later_is_an_error(broken):
    kind, says = LATER[broken]
    made = States if "state" in broken else Later
    env = make_multi_agent_env(functools.partial(made, broken), 2, 0)

    def begin():
        env.reset_all()
        for _ in range(2):
            env.step_all(acts(env))

    at = r".*\(environment 0 \(" if kind is ValueError else ""
    with pytest.raises(kind, match=f"^PettingZooVecEnv: .*{says}{at}") as caught:
        begin()
    assert "\n" not in str(caught.value)
    assert env.get_state() is None


FIRST = {
    "nobody": "reset must leave at least one agent in agents, got none",
    "reset": r"reset must return \(observations, infos\), got dict",
    "reset obs": "observations must have every agent that continues or was truncated, got none for 'b_0', only",
}


@pytest.mark.parametrize("broken", FIRST)
def test_a_reset_that_breaks_a_rule_is_an_error(broken):
    with pytest.raises(ValueError, match=FIRST[broken]):
        make_multi_agent_env(functools.partial(Later, broken), 1, 0).reset_all()


def test_possible_agents_must_exist_and_be_unique():
    def made(names):
        return lambda: Script(possible_agents=names)

    with pytest.raises(ValueError, match="possible_agents must hold at least one agent, got none"):
        make_multi_agent_env(lambda: Script(("",), possible_agents=[]), 1, 0)
    with pytest.raises(ValueError, match="possible_agents must name each agent once, got 'a_0' more than once in"):
        make_multi_agent_env(made(["a_0", "a_1", "b_0", "a_0"]), 1, 0)
    with pytest.raises(ValueError, match="it must have possible_agents, a list of all that may act, got none"):
        make_multi_agent_env(lambda: Script(possible_agents=None, look=lambda agent: np.zeros(3, np.float32)), 1, 0)
    calls = iter(range(2))

    def other():
        return Script(possible_agents=["a_0", "a_1", "b_0", "b_1"][: 3 + next(calls)])

    with pytest.raises(ValueError, match=r"its agents must be those of the first copy, .*environment 1"):
        make_multi_agent_env(other, 2, 0)


def test_invalid_masks_are_errors():
    def made(mask, where="observation"):
        env = make_multi_agent_env(functools.partial(Masked, ("a_0", "a_0"), where=where, mask=mask), 1, 0)
        env.reset_all()

    with pytest.raises(ValueError, match="action_mask of agent 'a_0' must allow at least one action, got none"):
        made(lambda: np.zeros(4, np.int8))
    with pytest.raises(ValueError, match=r"action_mask of agent 'a_0' must be 4 flags.*got ndarray of shape \(3,\)"):
        made(lambda: np.ones(3, np.int8), "info")

    class Forgets(Masked):
        where = "info"

        def masked(self, obs, infos):
            return super().masked(obs, infos) if not self.t else (obs, infos)

    env = make_multi_agent_env(functools.partial(Forgets, ("a_0", "a_0")), 1, 0)
    env.reset_all()
    with pytest.raises(ValueError, match="the info of agent 'a_0' must hold action_mask in every step, from"):
        env.step_all(acts(env))

    class Late(Masked):
        where = "info"

        def masked(self, obs, infos):
            return super().masked(obs, infos) if self.t else (obs, infos)

    env = make_multi_agent_env(functools.partial(Late, ("a_0", "a_0")), 1, 0)
    env.reset_all()
    with pytest.raises(ValueError, match="the info of agent 'a_0' must hold action_mask in every step, from the first"):
        env.step_all(acts(env))

    class Moves(Masked):
        def action_space(self, agent):
            return spaces.Box(-1, 1, (2,))

    with pytest.raises(
        ValueError, match="action_mask of agent 'a_0' must come with Discrete or MultiDiscrete actions, got Box"
    ):
        make_multi_agent_env(Moves, 1, 0)


def test_a_state_of_text_is_an_error():
    with pytest.raises(ValueError, match=r"state\(\) must return an array of numbers, got str; or use state=obs"):
        make_multi_agent_env(functools.partial(States, "words"), 1, 0)


def test_actions_are_checked():
    env = make_multi_agent_env(TAG, 2, 0)
    env.reset_all()
    with pytest.raises(ValueError, match="actions must be 2 arrays, one for each of adversary, agent_0, got 1"):
        env.step_all([np.zeros((2, 3), int)])
    with pytest.raises(ValueError, match=r"actions of adversary must have shape \(2, 3\), got \(2, 2\)"):
        env.step_all([np.zeros((2, 2), int), np.zeros((2, 1), int)])
    with pytest.raises(TypeError, match="agent_0: discrete actions must be integers, got dtype float64"):
        env.step_all([np.zeros((2, 3), int), np.zeros((2, 1))])


@pytest.mark.parametrize(
    ("env", "kind", "says"),
    [
        ("pettingzoo:simple_spread_v3", ImportError, "did you mean pettingzoo:mpe2.simple_spread_v3?"),
        ("pettingzoo:no_such_place", ImportError, r'pip install "rlox-cli\[multi-agent\]" installs pettingzoo'),
        ("pettingzoo:json", ValueError, "must name a module with a function parallel_env or env that returns"),
        ("json:nothing", ValueError, "must name a module with a function nothing that returns"),
        ("pettingzoo:", ValueError, "env must be pettingzoo:package.module, package.module:factory or a native id"),
        ("Spread-v9", ValueError, "try pettingzoo:mpe2.simple_spread_v3 or GridPursuit-v0"),
        (3, TypeError, "env must be an id or a callable that returns an environment, got int"),
        (
            lambda: 3,
            TypeError,
            "must be a PettingZoo environment with the parallel interface, got int",
        ),
    ],
)
def test_invalid_environments_are_errors(env, kind, says):
    with pytest.raises(kind, match=says):
        make_multi_agent_env(env, 1, 0)


def test_unknown_arguments_are_named():
    with pytest.raises(
        ValueError, match=r"simple_spread_v3 does not take kwargs {'colour': 'red'}: .*unexpected keyword"
    ):
        make_multi_agent_env(SPREAD, 1, 0, {"colour": "red"})
    with pytest.raises(ValueError, match="backend must be one of auto, native, pettingzoo, got 'gymnasium'"):
        make_multi_agent_env(SPREAD, 1, 0, backend="gymnasium")
    with pytest.raises(ValueError, match="env must be native with backend=native"):
        make_multi_agent_env(SPREAD, 1, 0, backend="native")


def test_multi_agent_ids_are_recognised():
    assert is_multi_agent(SPREAD)
    assert is_multi_agent("GridPursuit-v0")
    assert not is_multi_agent("CartPole-v1")
    assert not is_multi_agent(Script)
    for env in (SPREAD, "GridPursuit-v0"):
        with pytest.raises(ValueError, match=f"env must be an environment with one agent, got {env}; train"):
            make_vec_env(env, 1, 0)


def test_images_are_supported():
    class Pictures(Script):
        def observation_space(self, agent):
            return spaces.Box(0, 255, (8, 6, 3), np.uint8)

        def look(self, agent, action=0):
            return np.full((8, 6, 3), 10 * self.t + self.possible_agents.index(agent), np.uint8)

    env = make_multi_agent_env(functools.partial(Pictures, ("a_0 a_1", "a_1", "a_1!")), 1, 0)
    assert env.spec.groups[0].spec.obs_shape == (3, 8, 6)
    env.reset_all()
    step = env.step_all(acts(env))
    assert step.obs[0].dtype == np.uint8
    assert step.obs[0][0, :, 0, 0, 0].tolist() == [0, 11]
    assert step.state.shape == (1, 3 * 144)
    assert (step.state[0, 144:288] == 11).all()

"""PettingZoo environments whose solution is known analytically."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class _Env(ParallelEnv):
    """Agents by name; `spans` gives the number of steps of each agent, and whether it terminates after them."""

    metadata: ClassVar = {"name": "probe_v0", "render_modes": ["rgb_array"]}
    spans: ClassVar[dict[str, tuple[int, bool]]]

    def __init__(self, render_mode=None):
        self.possible_agents = list(self.spans)
        self.render_mode = render_mode
        self.agents: list[str] = []

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (self.observe(agent).size,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    t, seed, episode = 0, 0, 0

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.seed, self.episode = seed, 0
        self.agents, self.t = list(self.possible_agents), 0
        self.episode += 1
        self.begin(np.random.default_rng((self.seed, self.episode)))
        return {agent: self.observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def begin(self, rng):
        """Called before the first observation of an episode."""

    def get_state(self):
        return {"t": self.t, "seed": self.seed, "episode": self.episode, "agents": self.agents}

    def set_state(self, state):
        self.t, self.seed, self.episode = state["t"], state["seed"], state["episode"]
        self.agents = list(state["agents"])
        self.begin(np.random.default_rng((self.seed, self.episode)))

    def observe(self, agent):
        raise NotImplementedError

    def reward(self, agent, actions):
        return 1.0

    def step(self, actions):
        self.t += 1
        acted = self.agents
        over = {agent: self.t >= self.spans[agent][0] for agent in acted}
        rewards = {agent: float(self.reward(agent, actions)) for agent in acted}
        self.agents = [agent for agent in acted if not over[agent]]
        return (
            {agent: self.observe(agent) for agent in acted},
            rewards,
            {agent: over[agent] and self.spans[agent][1] for agent in acted},
            {agent: over[agent] and not self.spans[agent][1] for agent in acted},
            {agent: {} for agent in acted},
        )

    def render(self):
        return np.full((8, 8, 3), 10 * self.t, np.uint8) if self.render_mode == "rgb_array" else None


class Together(_Env):
    """Both agents get 1 if both choose 1, else 0."""

    spans: ClassVar = {"one": (5, True), "two": (5, True)}

    def observe(self, agent):
        return np.ones(1, np.float32)

    def reward(self, agent, actions):
        return all(action == 1 for action in actions.values())


class DiesHalfway(_Env):
    """Reward 1 a step: `short` lives 4 steps, `long` 8; both observe the number of steps."""

    spans: ClassVar = {"short": (4, True), "long": (8, True)}

    def observe(self, agent):
        return np.eye(9, dtype=np.float32)[self.t]


class LimitForOne(_Env):
    """Reward 1 a step: a time limit truncates `cut` after 4 steps with constant observations; `whole` terminates
    after 8."""

    spans: ClassVar = {"cut": (4, False), "whole": (8, True)}

    def observe(self, agent):
        return np.eye(9, dtype=np.float32)[0 if agent == "cut" else self.t]


class HiddenBit(_Env):
    """The reward of both is a bit that only `seer` sees; one step."""

    spans: ClassVar = {"blind": (1, True), "seer": (1, True)}

    def begin(self, rng):
        self.bit = int(rng.integers(2))

    def observe(self, agent):
        return np.array([self.bit if agent == "seer" else 0], np.float32) if self.agents else np.zeros(1, np.float32)

    def reward(self, agent, actions):
        return self.bit


class Zoo(_Env):
    """Unequal groups: three walkers that die at different steps and see 3 numbers, and a flyer with another space that
    a time limit truncates. Rewards depend on everything."""

    spans: ClassVar = {"walker_0": (2, True), "walker_1": (5, False), "walker_2": (7, True), "flyer": (6, False)}

    def begin(self, rng):
        self.noise = rng.normal(size=(16, 4))

    def observe(self, agent):
        i = self.possible_agents.index(agent)
        row = self.noise[self.t] if self.agents else np.zeros(4)
        return np.r_[row, i].astype(np.float32) if agent == "flyer" else np.r_[row[:2], i].astype(np.float32)

    def action_space(self, agent):
        return spaces.Box(-1.0, 1.0, (2,), np.float32) if agent == "flyer" else spaces.Discrete(3)

    def reward(self, agent, actions):
        return np.sum(actions[agent]) * 0.1 + self.noise[self.t, 0] + self.possible_agents.index(agent)


class MaskedZoo(Zoo):
    """The zoo, where one of the walkers' three actions is illegal, another one in each step, and forbidden."""

    def infos(self):
        walkers = [agent for agent in self.agents if agent != "flyer"]
        return {agent: {"action_mask": np.arange(3) != self.t % 3} for agent in walkers} | {"flyer": {}}

    def reset(self, seed=None, options=None):
        return super().reset(seed, options)[0], self.infos()

    def step(self, actions):
        for agent, action in actions.items():
            assert agent == "flyer" or action != self.t % 3
        return *super().step(actions)[:4], self.infos()


class Recall(_Env):
    """Each agent gets 1 if its last action of four is the cue that it saw in the first step only."""

    spans: ClassVar = {"one": (4, True), "two": (4, True)}

    def begin(self, rng):
        self.cues = rng.integers(2, size=2)

    def observe(self, agent):
        if not self.agents or self.t > 0:
            return np.array([0, self.t], np.float32)
        return np.array([2 * self.cues[self.possible_agents.index(agent)] - 1, 0], np.float32)

    def reward(self, agent, actions):
        return self.t == 4 and actions[agent] == self.cues[self.possible_agents.index(agent)]


class MaskedRecall(Recall):
    """The same, where before the last step only action 0 is legal, and the other forbidden."""

    def infos(self):
        mask = np.array([True, self.t >= 3])
        return {agent: {"action_mask": mask} for agent in self.agents}

    def reset(self, seed=None, options=None):
        return super().reset(seed, options)[0], self.infos()

    def step(self, actions):
        assert self.t >= 3 or not any(actions.values())
        return *super().step(actions)[:4], self.infos()


def record_recall(env, n_episodes):
    """The columns of a dataset of both agents of a `Recall`, who wait and then answer with their cues."""
    lives = [{agent: [] for agent in env.possible_agents} for _ in range(n_episodes)]
    for episode, life in enumerate(lives):
        obs, infos = env.reset(seed=episode)
        while env.agents:
            actions = {agent: int(env.cues[i]) if env.t == 3 else 0 for i, agent in enumerate(env.agents)}
            before, masks = obs, [[infos[agent]["action_mask"]] if infos[agent] else [] for agent in env.agents]
            obs, rewards, terminated, truncated, infos = env.step(actions)
            for agent, mask in zip(life, masks, strict=True):
                row = (before[agent], obs[agent], actions[agent], rewards[agent], terminated[agent], truncated[agent])
                life[agent].append((*row, *mask))
    rows = [row for life in lives for own in life.values() for row in own]
    names = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated", "action_masks")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=False)}


class Masked(_Env):
    """Only one of three actions is legal, which the observation does not show; any other action is an error."""

    spans: ClassVar = {"one": (6, True), "two": (3, True)}

    def observation_space(self, agent):
        return spaces.Dict(
            observation=spaces.Box(-1.0, 1.0, (1,), np.float32), action_mask=spaces.Box(0, 1, (3,), np.int8)
        )

    def action_space(self, agent):
        return spaces.Discrete(3)

    def legal(self, agent):
        return (self.t + self.possible_agents.index(agent)) % 3

    def observe(self, agent):
        mask = np.eye(3, dtype=np.int8)[self.legal(agent)]
        return {"observation": np.zeros(1, np.float32), "action_mask": mask}

    def step(self, actions):
        for agent, action in actions.items():
            assert action == self.legal(agent), f"{agent} took {action}, legal was {self.legal(agent)}"
        return super().step(actions)


class MaskedPairs(_Env):
    """Two choices, of two and of three; one of each is illegal, another one in each step."""

    spans: ClassVar = {"one": (6, True), "two": (3, True)}

    def observation_space(self, agent):
        return spaces.Dict(observation=spaces.Box(-1.0, 1.0, (1,), np.float32), action_mask=spaces.MultiBinary(5))

    def action_space(self, agent):
        return spaces.MultiDiscrete([2, 3])

    def observe(self, agent):
        mask = np.concatenate([np.arange(2) != self.t % 2, np.arange(3) != self.t % 3]).astype(np.int8)
        return {"observation": np.zeros(1, np.float32), "action_mask": mask}

    def step(self, actions):
        for first, second in actions.values():
            assert first != self.t % 2
            assert second != self.t % 3
        return super().step(actions)


class Pennies(_Env):
    """`even` wins a point if both choose the same action, else `odd` does; three rounds."""

    spans: ClassVar = {"even": (3, True), "odd": (3, True)}

    def observe(self, agent):
        return np.ones(1, np.float32)

    def reward(self, agent, actions):
        same = actions["even"] == actions["odd"]
        return 1.0 if same == (agent == "even") else -1.0

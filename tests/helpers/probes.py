"""Environments whose solution is known analytically."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

CONTINUOUS = spaces.Box(-1.0, 1.0, (1,), np.float32)


class ConstantReward(gymnasium.Env):
    """Reward 1, one observation, ended only by a time limit: V = 1 / (1 - gamma), every advantage is 0."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, limit: int = 10, continuous: bool = False):
        if continuous:
            self.action_space = CONTINUOUS
        self.limit = limit
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, False, self.t >= self.limit, {}


class FailsOnce:
    """A reward_fn that raises `error` in its call number `at` and otherwise returns the rewards unchanged."""

    def __init__(self, at, error):
        self.at, self.error = at, error
        self.calls = 0

    def __call__(self, obs, actions, rewards):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return rewards


class Countdown(gymnasium.Env):
    """Observation = steps so far; ends after `limit` steps, by termination or by a time limit. Reward 1 a step.

    The observation shows whether a final observation or the next episode's first one was used.
    """

    observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, limit: int = 4, truncate: bool = True):
        self.limit, self.truncate = limit, truncate
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t >= self.limit
        return (
            np.full(1, self.t, np.float32),
            1.0,
            over and not self.truncate,
            over and self.truncate,
            {},
        )


class MatchTheSign(gymnasium.Env):
    """One step; the observation is -1 or +1, and the action with the same sign earns 1, the other 0."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = np.array([self.np_random.choice([-1.0, 1.0])], np.float32)
        return self.obs, {}

    def step(self, action):
        return self.obs, float((action == 1) == (self.obs[0] > 0)), True, False, {}


class ReachTheTarget(gymnasium.Env):
    """One step, continuous: the reward is -(action - observation)^2, best at action = observation."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        return self.obs, -float((action[0] - self.obs[0]) ** 2), True, False, {}


class ExplodingReward(gymnasium.Env):
    """The reward becomes NaN after `after` steps, as in a broken simulator."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, after: int = 1500, continuous: bool = False):
        if continuous:
            self.action_space = CONTINUOUS
        self.after = after
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return (
            np.zeros(1, np.float32),
            float("nan") if self.t > self.after else 1.0,
            self.t % 10 == 0,
            False,
            {},
        )


class TwoSwitches(gymnasium.Env):
    """One step, two choices: the first must match the sign, the second (of three) must be 2; each earns 0.5."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = np.array([self.np_random.choice([-1.0, 1.0])], np.float32)
        return self.obs, {}

    def step(self, action):
        reward = 0.5 * float((action[0] == 1) == (self.obs[0] > 0)) + 0.5 * float(action[1] == 2)
        return self.obs, reward, True, False, {}


class BrightSide(gymnasium.Env):
    """One step; the left or the right half of an image is bright, and the action must name it (1: right)."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.right = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 60, (36, 36, 1)).astype(np.uint8)
        image[:, 18 * self.right : 18 * (self.right + 1)] += 150
        return image, {}

    def step(self, action):
        return np.zeros((36, 36, 1), np.uint8), float(action == self.right), True, False, {}


class NoisyArms(gymnasium.Env):
    """Two steps: all ten actions first earn 0, then N(0, 1). Every value is 0.

    The maximum of ten noisy estimates, from which Q-learning bootstraps, is greater.
    """

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        reward = 0.0 if self.t == 1 else float(self.np_random.normal())
        return np.ones(1, np.float32), reward, self.t == 2, False, {}


class Levers(gymnasium.Env):
    """Two levers of different ranges, 5 steps; the reward is -|distance| to (1, 0.2), so both must be moved."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self.t += 1
        obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return obs, -float(np.abs(action - [1.0, 0.2]).sum()), False, self.t == 5, {}

"""Environments for evaluations in other processes; importing this module registers them."""

from __future__ import annotations

import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv


class Waits(CartPoleEnv):
    """In processes other than `pid`, `reset` waits for the file that RLOX_TEST_WAITS_FOR names."""

    def __init__(self, pid=0):
        super().__init__()
        self.pid = pid

    def reset(self, *, seed=None, options=None):
        while os.getpid() != self.pid and not os.path.exists(os.environ["RLOX_TEST_WAITS_FOR"]):
            time.sleep(0.005)
        return super().reset(seed=seed, options=options)


class Slow(CartPoleEnv):
    """Steps of evaluations, which are those with a seed below 100, take a hundredth of a second."""

    pause = 0.01

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.evaluates = seed < 100
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.evaluates:
            time.sleep(self.pause)
        return super().step(action)


class FailsInEvaluation(Slow):
    pause = 0.0

    def step(self, action):
        if self.evaluates:
            raise KeyError("the elbow")
        return super().step(action)


class Endless(Slow):
    """Episodes of evaluations never end."""

    pause = 0.0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if self.evaluates and terminated:
            self.state, self.steps_beyond_terminated, terminated = self.np_random.uniform(-0.05, 0.05, 4), None, False
        return obs, reward, terminated, truncated, info


class Pictures(gymnasium.Env):
    observation_space = spaces.Box(0, 255, (3, 36, 36), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.obs(), {}

    def obs(self):
        return self.np_random.integers(0, 256, (3, 36, 36), np.uint8)

    def step(self, action):
        return self.obs(), float(action), False, False, {}


for kind in (Pictures, Waits, Slow, FailsInEvaluation):
    gymnasium.register(f"{kind.__name__}-v0", entry_point=f"{__name__}:{kind.__name__}", max_episode_steps=30)
gymnasium.register("EndlessEvaluation-v0", entry_point=f"{__name__}:Endless")

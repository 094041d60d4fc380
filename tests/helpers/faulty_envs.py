"""Environments with one mistake each, as in other packages; importing this module registers them."""

from __future__ import annotations

import random
import threading

import gymnasium
import numpy as np
from gymnasium import spaces


class Good(gymnasium.Env):
    """Counts to ten. The base class of all others, each of which changes one thing."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(2)
    length = 10

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.obs(), {}

    def obs(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def reward(self):
        return float(self.t % 3)

    def step(self, action):
        self.t += 1
        return self.obs(), self.reward(), False, self.t >= self.length, {}


class Nan(Good):
    def obs(self):
        return np.full(3, np.nan if self.t == 7 else 0.5, np.float32)


class NanReward(Good):
    def reward(self):
        return np.nan if self.t == 7 else 1.0


class NoReward(Good):
    def reward(self):
        return None


class WrongShape(Good):
    def obs(self):
        return np.zeros(4, np.float32)


class Bytes(Good):
    """A greyscale image without an axis for the channel."""

    observation_space = spaces.Box(0, 255, (40, 36), np.uint8)

    def obs(self):
        return self.np_random.integers(0, 256, (40, 36)).astype(np.uint8)


class WrongType(Good):
    def obs(self):
        return np.zeros(3, np.float64)


class Outside(Good):
    def obs(self):
        return np.full(3, 5.0, np.float32)


class NoInfo(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OldStep(Good):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class OldReset(Good):
    def reset(self):
        return super().reset()


class Unseeded(Good):
    def obs(self):
        return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32)


class UnseededReward(Good):
    def reward(self):
        return float(np.random.default_rng().uniform())


class Endless(Good):
    length = 10**9


class Terminates(Good):
    """Reports a time limit as a termination."""

    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, truncated, False, info


class Breaks(Good):
    def step(self, action):
        if self.t == 5:
            raise KeyError("the joint 'knee'")
        return super().step(action)


class Large(Good):
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def obs(self):
        return super().obs() * np.float32(1e6)

    def reward(self):
        return 1e5


class OddSpace(Good):
    observation_space = spaces.Sequence(spaces.Discrete(3))


class OddActions(Good):
    action_space = spaces.Box(0, 5, (2,), np.int64)


class Unbounded(Good):
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Continuous(Good):
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Choices(Good):
    action_space = spaces.MultiDiscrete([2, 3])


class Picture(Good):
    observation_space = spaces.Box(0, 255, (3, 48, 48), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def obs(self):
        return self.np_random.integers(0, 256, (3, 48, 48), np.uint8)


class NoConstructor(Good):
    def __init__(self):
        raise OSError("no such simulator: /opt/sim")


class Draws(Good):
    """Draws numbers from the global generators."""

    def __init__(self):
        self.drawn = np.random.uniform(), random.random()  # noqa: NPY002


class Locked(Good):
    """Fails if it is created in a second process or a second time."""

    made = 0

    def __init__(self):
        Locked.made += 1
        if Locked.made > 1:
            raise RuntimeError("the simulator runs only once")


def scaled(obs, actions, raw_rewards):
    return raw_rewards[:-1]


NOT_A_REWARD = 3


def holding(lock):
    """A constructor that cannot be sent to another process."""
    return lambda: Good() if lock else None


for kind in [Good, *Good.__subclasses__()]:
    gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)
gymnasium.register("Held-v0", entry_point=holding(threading.Lock()))

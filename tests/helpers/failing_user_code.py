"""Environments, wrappers and rewards that fail in one way each; importing this module registers the environments."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class Sound(gymnasium.Env):
    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(2)
    space = observation_space

    def __init__(self):
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.obs(), {}

    def obs(self):
        return np.full(3, 0.5, np.float32)

    def step(self, action):
        self.t += 1
        return self.obs(), 1.0, False, self.t >= 10, {}


class StepFails(Sound):
    def step(self, action):
        if self.t == 5:
            raise RuntimeError("the simulator\nhas lost its licence")
        return super().step(action)


class ResetFails(Sound):
    def reset(self, *, seed=None, options=None):
        return {"start": 0}["begin"]


class MakingFails(Sound):
    def __init__(self):
        raise LookupError("no such robot")


class Exits(Sound):
    def step(self, action):
        raise SystemExit(0)


class InNumPy(Sound):
    def obs(self):
        return np.concatenate([np.zeros(2), np.zeros((1, 1))])


class RewardMissing(Sound):
    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, None, terminated, truncated, info


class TextReward(Sound):
    def step(self, action):
        return super().step(action)[0], "1", False, False, {}


class VastReward(Sound):
    def step(self, action):
        return super().step(action)[0], 10**400, False, False, {}


class TextFlag(Sound):
    def step(self, action):
        return super().step(action)[0], 1.0, "False", False, {}


class NoFlag(Sound):
    def step(self, action):
        return super().step(action)[0], 1.0, False, None, {}


class InfoOfNone(Sound):
    def step(self, action):
        return *super().step(action)[:4], None


class NoReset(Sound):
    def reset(self, *, seed=None, options=None):
        return None


class FourValues(Sound):
    def step(self, action):
        return super().step(action)[1:]


class BareReset(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OldSignature(Sound):
    def reset(self):
        return super().reset()


class ShortRow(Sound):
    """An observation of a shape that NumPy would broadcast silently."""

    def obs(self):
        return np.zeros(1, np.float32)


class WrongText(Sound):
    def obs(self):
        return np.array(["a", "b", "c"])


class WrongPart(Sound):
    observation_space = spaces.Dict({"arm": spaces.Box(-1, 1, (2,)), "leg": spaces.Box(-1, 1, (1,))})

    def obs(self):
        return {"arm": np.zeros(2), "hand": np.zeros(1)}


class FloatImage(Sound):
    observation_space = spaces.Box(0, 255, (40, 40, 1), np.uint8)

    def obs(self):
        return np.full((40, 40, 1), 0.5)


class NanAt(Sound):
    """Returns `value` for the part `broken` in step `after` + 1, counted over all environments of the process."""

    observation_space = spaces.Dict({"arm": spaces.Box(-9, 9, (2,)), "leg": spaces.Box(-9, 9, (1,))})
    steps = 0

    def __init__(self, broken="obs", after=200, value=float("nan"), continuous=False):
        super().__init__()
        self.broken, self.after, self.value = broken, after, float(value)
        if continuous:
            self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        NanAt.steps = 0

    def obs(self):
        bad = self.broken == "obs" and NanAt.steps == self.after + 1
        return {"arm": np.full(2, 0.5, np.float32), "leg": np.array([self.value if bad else 0.1], np.float32)}

    def step(self, action):
        NanAt.steps += 1
        obs, reward, *rest = super().step(action)
        return obs, self.value if self.broken == "reward" and NanAt.steps == self.after + 1 else reward, *rest


class Wrapper(gymnasium.Wrapper):
    def step(self, action):
        return super().step(action.gear)


def reward(obs, actions, raw_rewards):
    raise TypeError("no torque there")


def nan_reward(obs, actions, raw_rewards):
    return raw_rewards * np.nan


for kind in (Sound, *Sound.__subclasses__()):
    gymnasium.register(f"{kind.__name__}-v0", kind, disable_env_checker=True)
gymnasium.register("Checked-v0", FourValues, max_episode_steps=50)
gymnasium.register("CheckedInfo-v0", InfoOfNone, max_episode_steps=50)

"""Environments whose observations mix an image with numbers; importing this module registers them."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class CameraWorld(gymnasium.Env):
    """A light moves over a picture: its position is visible in the picture, and its speed is given as numbers."""

    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (8, 8, 1), np.uint8), "speed": spaces.Box(-2, 2, (2,), np.float32)}
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.place = 0, self.np_random.integers(8, size=2)
        self.speed = np.zeros(2, np.float32)
        return self.seen(), {}

    def step(self, action):
        self.t += 1
        self.speed = np.float32([action - 1, 1])
        self.place = (self.place + self.speed.astype(int)) % 8
        return self.seen(), float(self.place[0] == 4), False, self.t == 12, {}

    def seen(self):
        camera = np.zeros((8, 8, 1), np.uint8)
        camera[tuple(self.place)] = 255
        return {"camera": camera, "speed": self.speed.copy()}

    def get_state(self):
        return {"t": self.t, "place": np.array(self.place, np.float64), "speed": self.speed.astype(np.float64)}

    def set_state(self, state):
        self.t, self.place = int(state["t"]), np.asarray(state["place"]).astype(int)
        self.speed = np.asarray(state["speed"], np.float32)


gymnasium.register("CameraWorld-v0", CameraWorld)


class Heights(gymnasium.Env):
    """One number of up to 100,000 that shows the progress of an episode."""

    observation_space = spaces.Box(0, 1e5, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.float32([0]), {}

    def step(self, action):
        self.t += 1
        return np.float32([1e4 * self.t]), float(action), self.t == 10, False, {}


gymnasium.register("Heights-v0", Heights)

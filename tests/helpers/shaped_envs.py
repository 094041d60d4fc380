"""Environments with any spaces, whose observations are random."""

from __future__ import annotations

import gymnasium


class Shaped(gymnasium.Env):
    """Episodes of 10 steps with random observations of one space; actions of another mean nothing."""

    def __init__(self, observations, actions):
        self.observation_space, self.action_space = observations, actions

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self._observe(), 0.0, self.t == 10, False, {}

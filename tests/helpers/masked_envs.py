"""Environments with masks of legal actions from any source, and the same masks computed from observations."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

SOURCES = {"info": 'info["action_mask"]', "method": "action_masks()", "observation": 'observation["action_mask"]'}


def legal(obs, choices):
    """The masks (N, sum(choices)) of observations (N, 2) that `Legal` shows."""
    rows = []
    for start, t in np.asarray(obs).astype(int).tolist():
        first = [j != (start + t) % choices[0] for j in range(choices[0])]
        others = [[j == start % n or t % 2 == 1 for j in range(n)] for n in choices[1:]]
        rows.append(np.concatenate([first, *others]))
    return np.array(rows)


class Legal(gymnasium.Env):
    """Episodes of 5 steps whose observation is a random start and the step; they terminate if the start is even.

    `form` converts a mask to what the environment offers; `source` is one of `SOURCES`, or "" for none.
    """

    def __init__(self, source="info", choices=(4,), form=None, start=0):
        self.source, self.choices, self.form = source, choices, form or (lambda mask: mask)
        n = sum(choices)
        box = spaces.Box(0, 100, (2,), np.float32)
        parts = {"action_mask": spaces.MultiBinary(n), "place": box}
        self.observation_space = spaces.Dict(parts) if source == "observation" else box
        one = len(choices) == 1
        self.action_space = spaces.Discrete(n, start=start) if one else spaces.MultiDiscrete(choices)
        self.start = self.t = 0
        self.n_resets = self.n_illegal = 0
        if source == "method":
            self.action_masks = lambda: self.form(self.mask())

    def mask(self):
        return legal([(self.start, self.t)], self.choices)[0]

    def _answer(self):
        place = np.array([self.start, self.t], np.float32)
        info = {"action_mask": self.form(self.mask())} if self.source == "info" else {}
        if self.source == "observation":
            return {"place": place, "action_mask": self.form(self.mask())}, info
        return place, info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_resets += 1
        self.start, self.t = int(self.np_random.integers(50)), 0
        return self._answer()

    def step(self, action):
        chosen = np.atleast_1d(action) - (self.action_space.start if len(self.choices) == 1 else 0)
        edges = np.cumsum([0, *self.choices[:-1]])
        self.n_illegal += not self.mask()[edges + chosen].all()
        self.t += 1
        over, ends = self.t == 5, self.start % 2 == 0
        obs, info = self._answer()
        if over and ends:  # what is legal after the end means nothing
            info.pop("action_mask", None)
        return obs, float(not self.n_illegal), over and ends, over and not ends, info

    def get_state(self):
        return [self.start, self.t]

    def set_state(self, state):
        self.start, self.t = state


def record(n_episodes, masked=True, n_actions=4):
    """The columns of a dataset of episodes of `Legal` with random legal actions, with masks if `masked`."""
    env, rng, rows = Legal("info", (n_actions,)), np.random.default_rng(0), []
    for episode in range(n_episodes):
        (obs, info), over = env.reset(seed=episode), False
        while not over:
            before, mask = obs, env.mask()
            action = rng.choice(np.flatnonzero(mask))
            obs, reward, terminated, truncated, info = env.step(action)
            over = terminated or truncated
            masks = (mask, info.get("action_mask", mask)) if masked else ()
            rows.append((before, obs, action, reward, terminated, truncated, *masks))
    names = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated", "action_masks", "next_action_masks")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=False)}

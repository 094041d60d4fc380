"""Small environments that mask actions."""

import gymnasium as gym
import numpy as np

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


class TicTacToe(gym.Env):
    """Tic-tac-toe against a random opponent, who begins half of the games; a win is worth 1, a loss -1.

    An observation is the 9 fields: 1 for the player's own, -1 for the opponent's. ``info["action_mask"]`` has the empty
    fields.
    """

    observation_space = gym.spaces.Box(-1, 1, (9,), np.float32)
    action_space = gym.spaces.Discrete(9)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.board = np.zeros(9, np.float32)
        if self.np_random.random() < 0.5:
            self._reply()
        return self.board.copy(), {"action_mask": self.board == 0}

    def _reply(self):
        self.board[self.np_random.choice(np.flatnonzero(self.board == 0))] = -1

    def _has_won(self, who):
        return any((self.board[list(line)] == who).all() for line in LINES)

    def step(self, action):
        assert self.board[action] == 0, f"field {action} is taken"
        self.board[action] = 1
        reward = 1.0 if self._has_won(1) else 0.0
        if not reward and (self.board == 0).any():
            self._reply()
            reward = -1.0 if self._has_won(-1) else 0.0
        over = reward != 0 or not (self.board == 0).any()
        return self.board.copy(), reward, over, False, {"action_mask": self.board == 0}


class Corridor(gym.Env):
    """Six cells in a row, in which the agent moves by 0, 1 or 2 to the right; beyond the end it must not, and in cell 3
    it must wait in even steps. The reward is the cell; an episode ends in cell 5, or is cut off after `limit` steps.
    """

    observation_space = gym.spaces.Box(0, 1, (7,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, limit=7):
        self.limit = limit

    def _observe(self):
        obs = np.zeros(7, np.float32)
        obs[self.cell], obs[6] = 1, self.t % 2
        mask = np.array([True, self.cell < 5, self.cell < 4])
        if self.cell == 3 and self.t % 2 == 0:
            mask[1:] = False  # one action is left
        return obs, mask

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.cell, self.t = int(self.np_random.integers(3)), 0
        obs, self.mask = self._observe()
        return obs, {"action_mask": self.mask}

    def step(self, action):
        assert self.mask[action], f"move {action} is illegal"
        self.cell, self.t = self.cell + int(action), self.t + 1
        obs, self.mask = self._observe()
        return obs, float(self.cell), self.cell == 5, self.t >= self.limit, {"action_mask": self.mask}

    def get_state(self):
        return [self.cell, self.t]

    def set_state(self, state):
        self.cell, self.t = state
        self.mask = self._observe()[1]

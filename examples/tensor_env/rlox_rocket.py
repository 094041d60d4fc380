"""Land a rocket softly: an environment in tensor operations, whose copies live on one device."""

import numpy as np
import torch

import rlox
from rlox.envs import EnvSpec
from rlox.envs.tensor import TensorEnv, open_unit

DT = 0.1  # s per step
GRAVITY = 3.7  # m/s^2, of Mars
THRUST = 6.0  # m/s^2


class Rocket(TensorEnv):
    """Three actions: no engine, half of it, all of it. The reward of touching down is 10 less the speed."""

    env_id = "Rocket-v0"
    spec = EnvSpec((2,), np.float32, n_actions=3)
    state_size = 2  # height (m), speed upwards (m/s)
    max_episode_steps = 200
    random_steps = True  # gusts

    def start(self, words):
        height, speed = open_unit(words[:2]).unbind(0)
        return torch.stack([20.0 + 10.0 * height, -5.0 * speed])

    def step(self, state, actions, words=None):
        height, speed = state.unbind(0)
        gust = open_unit(words[0]) - 0.5
        speed = speed + DT * (0.5 * THRUST * actions - GRAVITY + gust)
        height = height + DT * speed
        landed = height <= 0.0
        rewards = torch.where(landed, 10.0 - speed.abs(), -0.01)
        return torch.stack([height, speed]), rewards, landed

    def observe(self, state):
        return state.t() / 10.0


rlox.register_env(Rocket)

"""Environments that need a memory or action masks, for trainings that are compared with other systems'.

Importing this module registers them with gymnasium, under any interpreter: ``rlox train --import
benchmarks.peers.environments env=CartPoleNoVel-v1`` in the repository's root, and an import in a peer's process. It
needs gymnasium only; ConnectFour-v0 needs ``pettingzoo[classic]`` and the last three ``popgym``, when they are created.

=============================== ======================================================================================
``CartPoleNoVel-v1``            CartPole-v1 with the cart's position and the pole's angle only
``PendulumNoVel-v1``            Pendulum-v1 with the cosine and sine of the angle only
``MountainCarContinuousNoVel``  MountainCarContinuous-v0 with the car's position only (``-v0``)
``InvalidActions-v0``           the observation names the action that is rewarded; of 80 actions, 60 others are invalid
``ConnectFour-v0``              PettingZoo's connect_four_v3 against an opponent that moves at random
``RepeatPreviousEasy-v0``       POPGym's, as are ``PositionOnlyCartPoleEasy-v0`` and ``AutoencodeEasy-v0``
=============================== ======================================================================================
"""

import importlib

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register


class KeepNumbers(gymnasium.ObservationWrapper):
    """Shows only the numbers `keep` of a vector."""

    def __init__(self, env, keep):
        super().__init__(env)
        self._keep = list(keep)
        space = env.observation_space
        self.observation_space = spaces.Box(space.low[self._keep], space.high[self._keep], dtype=space.dtype.type)

    def observation(self, observation):
        return observation[self._keep]


def hide_velocity(base, keep, **kwargs):
    """Create an environment of gymnasium's classic control, `base`, that shows only the numbers `keep`."""
    return KeepNumbers(getattr(importlib.import_module("gymnasium.envs.classic_control"), base)(**kwargs), keep)


class InvalidActions(gymnasium.Env):
    """A new target in every step: the observation is the action that gives a reward of 1; others give 0.

    In every step, `n_invalid` random actions other than the target are invalid. It is the task of sb3-contrib's
    ``InvalidActionEnvDiscrete``, which draws from global generators; here, the seed of `reset` decides everything.
    """

    def __init__(self, n_actions=80, n_invalid=60):
        self.observation_space = self.action_space = spaces.Discrete(n_actions)
        self._n_invalid = n_invalid

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action):
        reward = float(int(action) == self._target)
        return self._draw(), reward, False, False, {}

    def action_masks(self):
        """Return which actions are valid, (n_actions,) bool."""
        return self._mask

    def _draw(self):
        n = int(self.action_space.n)
        self._target = int(self.np_random.integers(n))
        others = np.delete(np.arange(n), self._target)
        self._mask = np.ones(n, bool)
        self._mask[self.np_random.choice(others, self._n_invalid, replace=False)] = False
        return self._target


class ConnectFour(gymnasium.Env):
    """PettingZoo's connect_four_v3 against an opponent that moves at random; we begin in half of the games.

    The observation is the board, (84,) float32: for each of 6 x 7 cells whether we occupy it, and whether the opponent
    does. The reward is 1 for the game won, -1 for the game lost and 0 otherwise.
    """

    def __init__(self):
        from pettingzoo.classic import connect_four_v3

        self._game = connect_four_v3.raw_env()
        self.observation_space = spaces.Box(0.0, 1.0, (84,), np.float32)
        self.action_space = spaces.Discrete(7)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._game.reset()
        self._me = self._game.possible_agents[int(self.np_random.integers(2))]
        if self._game.agent_selection != self._me:
            self._reply()
        return self._observe(), {}

    def step(self, action):
        self._game.step(int(action))
        if not self._over():
            self._reply()
        return self._observe(), float(self._game.rewards[self._me]), self._over(), False, {}

    def action_masks(self):
        """Return the columns that are not full, (7,) bool."""
        return np.array(self._game.board[:7]) == 0

    def _reply(self):
        self._game.step(int(self.np_random.choice(np.flatnonzero(self.action_masks()))))

    def _over(self):
        return self._game.terminations[self._me]

    def _observe(self):
        return self._game.observe(self._me)["observation"].astype(np.float32).ravel()


def popgym(module, name):
    """Create an environment of POPGym; observations that consist of choices become concatenated one-hot vectors."""
    env = getattr(importlib.import_module(f"popgym.envs.{module}"), name)()
    if isinstance(env.observation_space, spaces.Tuple):
        env = gymnasium.wrappers.FlattenObservation(env)
        size = env.observation_space.shape
        env = gymnasium.wrappers.TransformObservation(env, np.float32, spaces.Box(0.0, 1.0, size, np.float32))
    return env


for _id, _base, _keep, _limit in (
    ("CartPoleNoVel-v1", "CartPoleEnv", (0, 2), 500),
    ("PendulumNoVel-v1", "PendulumEnv", (0, 1), 200),
    ("MountainCarContinuousNoVel-v0", "Continuous_MountainCarEnv", (0,), 999),
):
    register(_id, hide_velocity, max_episode_steps=_limit, kwargs={"base": _base, "keep": _keep})
register("InvalidActions-v0", InvalidActions, max_episode_steps=100)
register("ConnectFour-v0", ConnectFour)
for _module, _name in (
    ("repeat_previous", "RepeatPreviousEasy"),
    ("position_only_cartpole", "PositionOnlyCartPoleEasy"),
    ("autoencode", "AutoencodeEasy"),
):
    register(f"{_name}-v0", popgym, kwargs={"module": _module, "name": _name})

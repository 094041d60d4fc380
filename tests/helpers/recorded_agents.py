"""The steps that the agents of MAPPO take, and their weights."""

import numpy as np
from gymnasium import spaces


class Recorded:
    """Wraps the environments of an algorithm and records their steps."""

    def __init__(self, algorithm):
        self.env, self.steps, self.actions = algorithm.collector.env, [], []
        algorithm.collector.env = self

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset_all(self):
        self.steps.append(self.env.reset_all())
        return self.steps[-1]

    def step_all(self, actions):
        self.actions.append([array.copy() for array in actions])
        self.steps.append(self.env.step_all(actions))
        return self.steps[-1]


def remove_bounds(zoo):
    """Remove the bounds of a `zoo_probes.Zoo`, which then receives the sampled actions unchanged."""
    flyer, walker = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(3)
    zoo.action_space = lambda agent: flyer if agent == "flyer" else walker
    return zoo


def copy_weights(algorithm):
    """All weights of all policies, by name."""
    return {name: value.detach().numpy().copy() for name, value in algorithm.policy.state_dict().items()}


def are_equal(one, other):
    """Whether two dicts have the same arrays, bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

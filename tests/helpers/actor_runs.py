"""Runs of actors and learners, and what a worker may not answer."""

import sys
from typing import ClassVar

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlox.distributed import Actor, Trajectory, Weights
from rlox.distributed.grpc_actors import _check_rollout
from rlox.envs.remote.codec import Message, ProtocolError

# Processes of actors cannot import a helper of the tests by its name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Ends(gymnasium.Env):
    """Terminations and time limits at random, sometimes both at once; observations are uniform below `largest`."""

    observation_space = spaces.Box(-5, 5, (3,), np.float32)
    action_space = spaces.Discrete(2)
    largest: ClassVar[float] = 5

    def observe(self):
        return self.np_random.uniform(-self.largest, self.largest, 3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), self.np_random.normal(), self.np_random.random() < 0.1, self.np_random.random() < 0.2, {}


def flatten(policy):
    """All weights of a policy."""
    return np.concatenate([p.detach().numpy().ravel() for p in policy.parameters()])


def train(algorithm, steps):
    """Train and close; return the weights and the metrics."""
    metrics = algorithm.train(steps)
    algorithm.close()
    return flatten(algorithm.policy), metrics


class Answer:
    """What a worker answers to weights of version 7."""

    def __init__(self, plan):
        actor = Actor(plan, 0)
        self.plan, self.spec = plan, actor.collector.spec
        self.arrays = actor.rollout(Weights(7, plan.policy.weights())).arrays()
        actor.close()

    def check(self):
        return _check_rollout(Message("trajectory", {}, self.arrays), self.plan, self.spec, 7)

    def require_refused(self, name, change, message):
        """Check that the answer is accepted, but not with another array of this name, or without it."""
        assert isinstance(self.check(), Trajectory)
        self.arrays[name] = change(self.arrays.get(name))
        if self.arrays[name] is None:
            del self.arrays[name]
        with pytest.raises(ProtocolError, match=message):
            self.check()

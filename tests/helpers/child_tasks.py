"""Functions that tests run in other processes; spawned processes must be able to import them by name."""

import os

import rlox
from rlox.kernels.rng import Rng


def digest(thing):
    """Numbers that depend on the whole state of `thing`: a hundred samples or steps."""
    if isinstance(thing, rlox.VecEnv):
        actions = Rng(5).integers(2, size=(100, thing.n_envs))
        return [float(thing.step_all(row)["obs"].sum()) for row in actions]
    if isinstance(thing, Rng):
        return thing.normal(100).tolist()
    return [float(thing.sample(64, seed)["obs"].sum()) for seed in range(100)]


def child(queue, thing):
    queue.put(digest(thing))


def trained_and_threads():
    """Return the weights of a short native training as bytes, and how many new threads this process has after it."""
    before = set(os.listdir("/proc/self/task"))  # some may end meanwhile, such as those of a closed pool
    algorithm = rlox.PPO("CartPole-v1", 4, 0, n_steps=16, hidden_sizes=[16], backend="native")
    algorithm.train(256)
    algorithm.evaluate(1)
    return algorithm.native.net.parameters.tobytes(), len(set(os.listdir("/proc/self/task")) - before)

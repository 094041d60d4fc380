"""What tests run in other processes; a spawned one must be able to import it by name."""

import rlox
from rlox.kernels.rng import Rng


def digest(thing):
    """Numbers that depend on everything `thing` is: a hundred samples, or a hundred steps."""
    if isinstance(thing, rlox.VecEnv):
        actions = Rng(5).integers(2, size=(100, thing.n_envs))
        return [float(thing.step_all(row)["obs"].sum()) for row in actions]
    if isinstance(thing, Rng):
        return thing.normal(100).tolist()
    return [float(thing.sample(64, seed)["obs"].sum()) for seed in range(100)]


def child(queue, thing):
    queue.put(digest(thing))

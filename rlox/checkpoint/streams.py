"""Streams of the counter-based generator: one for each kind of random decision in a run.

Streams of one seed are independent, so that drawing more from one (such as for an evaluation) never shifts another.
"""

from enum import IntEnum


class Stream(IntEnum):
    """Second argument of ``rlox.kernels.rng.Rng(seed, stream)``; the numbers are part of a run's identity."""

    INIT = 1  # initial weights
    ACTION = 2  # action sampling while collecting
    PERMUTATION = 3  # minibatch order
    EVALUATION = 4  # action sampling in stochastic evaluation
    FOREIGN_ENVS = 5  # seeds of gymnasium environments
    REPLAY = 6  # which transitions each update sees, and the noise on the actions in its losses
    PROMPTS = 7  # which rows each update of a language model sees
    COMPLETIONS = 8  # tokens of a language model's completions
    ACTORS = 9  # seeds of the actors of a distributed training
    OPPONENTS = 10  # which earlier policies each self-play rollout plays against
    PREDICTIONS = 11  # futures sampled from a world model
    DROPOUT = 12  # which outputs of hidden layers dropout sets to 0

"""A minimal algorithm that learns from sequences: everything the family provides, without a world model."""

from dataclasses import dataclass

import torch
from counting_agent import Counting
from torch import nn

from rlox.config import Config
from rlox.nn.optimizers import FlatOptimizer
from rlox.training import SequenceAlgorithm


@dataclass
class TinyConfig(Config):
    """Settings of an algorithm that learns rewards from sequences."""

    replays = "sequences"
    uses_dataset = "may"

    batch_size: int = 2
    seq_len: int = 4
    replay_ratio: float = 3.0
    learning_starts: int = 20
    learning_rate: float = 1e-2
    gamma: float = 0.99
    pretrain_updates: int = 0

    @property
    def update_rows(self):
        return self.batch_size * self.seq_len

    @property
    def shape(self):
        return ()


class Tiny(SequenceAlgorithm):
    name = "tiny"
    Config = TinyConfig

    def make_policy(self, rng, policy):
        self.policy = nn.Linear(self.spec.model_width, 1)
        with torch.no_grad():
            self.policy.weight.fill_(0.1)
            self.policy.bias.zero_()

    def setup(self, rng):
        self.optimizer = FlatOptimizer(self.policy.parameters(), self.config.learning_rate)
        self.updated, self.batches = [], []

    @property
    def actor(self):
        return Counting(self.spec)

    def update(self, batch):
        self.updated.append(self.counters.env_steps)
        self.batches.append(batch)
        loss = (self.policy(batch.actions).squeeze(-1) - batch.rewards).square().mean()
        self.optimizer.step(loss, None)
        states = batch.state[:, None] + torch.arange(1, 5.0)[:, None]
        batch.update_states(self.buffer, states)
        return {"loss": loss.detach()}

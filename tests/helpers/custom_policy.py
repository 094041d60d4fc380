"""A policy of a user, who knows nothing of rlox's classes or of devices."""

import torch
from torch import nn


class CustomPolicy(nn.Module):
    """Actor and critic on one layer, which samples with PyTorch's generator."""

    def __init__(self, between=nn.Identity):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), between(), nn.Tanh())
        self.pi, self.v = nn.Linear(16, 2), nn.Linear(16, 1)

    def _choices(self, obs):
        return torch.distributions.Categorical(logits=self.pi(self.body(obs.to(self.v.weight.dtype))).float())

    def get_action_and_logprob(self, obs):
        choices = self._choices(obs)
        action = choices.sample()
        return action, choices.log_prob(action)

    def get_value(self, obs):
        return self.v(self.body(obs.to(self.v.weight.dtype))).squeeze(-1).float()

    def get_logprob_and_entropy(self, obs, action):
        choices = self._choices(obs)
        return choices.log_prob(action), choices.entropy()

    def mode(self, obs):
        return self._choices(obs).logits.argmax(-1)

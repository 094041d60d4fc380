"""A policy module as NumPy sees it: arrays in, arrays out, tensors and devices in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.kernels.rng import Rng
from rlox.nn.batch import FrameStacks
from rlox.nn.networks import rng_from_torch
from rlox.nn.policies import Actor, ActorCritic

# Values and log-probabilities of a rollout are computed at once, this many rows at a time so that memory stays bounded.
_CHUNK, _IMAGE_CHUNK = 8192, 512


def require_mode(policy: nn.Module, where: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The policy's ``mode``; a TypeError with the remedy where a user's module has none."""
    mode = getattr(policy, "mode", None)
    if not callable(mode):
        raise TypeError(
            f"{where}: {type(policy).__name__} must define mode(obs) -> actions to act deterministically; "
            "or pass deterministic=False"
        )
    return mode


class ModuleActor:
    """What `rlox.native.NativePolicy` does, by a module.

    Parameters
    ----------
    policy : nn.Module
        Any that `rlox.nn.policies` describes.
    device : str
        Where it lives.
    """

    def __init__(self, policy: nn.Module, device: str = "cpu"):
        self.policy = policy
        self.device = device

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @torch.inference_mode()
    def mode(self, obs: np.ndarray) -> np.ndarray:
        """The most likely actions; the policy must have a ``mode``."""
        return self.policy.mode(self._tensor(obs)).cpu().numpy()

    @torch.inference_mode()
    def sample(self, obs: np.ndarray, rng: Rng | None = None) -> np.ndarray:
        """Sampled actions; a user's module draws from PyTorch's generator, as ours do without `rng`."""
        if not isinstance(self.policy, Actor):
            return self.policy.get_action_and_logprob(self._tensor(obs))[0].cpu().numpy()
        noise = np.empty(self.policy.noise_shape(len(obs)), np.float32)
        self.policy.fill_noise(rng or rng_from_torch(), noise)
        return self.policy.act(self._tensor(obs), self._tensor(noise)).cpu().numpy()


class ModuleRollout:
    """One rollout's use of a module: `act` for each step, `judge` for all of them at the end.

    Parameters
    ----------
    policy : nn.Module
        With the three methods that `rlox.nn.policies` names.
    device : str
        Where it lives and the columns go.
    rng : Rng
        Decides the actions, where the policy is one of ours.
    n_steps, n : int
        Steps T and environments N.
    """

    def __init__(self, policy: nn.Module, device: str, rng: Rng, n_steps: int, n: int):
        self.policy = policy
        self.device = device
        self._noise: torch.Tensor | None = None
        self._log_probs: list[torch.Tensor] = []
        if isinstance(policy, ActorCritic):
            noise = torch.empty((n_steps, *policy.noise_shape(n)))
            policy.fill_noise(rng, noise.numpy())
            self._noise = noise.to(device)
        self.context = torch.inference_mode

    def act(self, obs: np.ndarray, t: int) -> np.ndarray:
        """Actions (N, …) of step `t`."""
        here = torch.from_numpy(obs).to(self.device)
        if self._noise is not None:
            action = self.policy.act(here, self._noise[t])
        else:
            action, log_prob = self.policy.get_action_and_logprob(here)
            self._log_probs.append(log_prob)
        return action.cpu().numpy()

    def place(self, column: np.ndarray) -> torch.Tensor:
        """A column of the batch where the learner wants it."""
        return torch.from_numpy(column).to(self.device)

    @torch.no_grad()
    def judge(
        self, seen: np.ndarray | FrameStacks, actions: np.ndarray, after: np.ndarray
    ) -> tuple[Any, Any, torch.Tensor, torch.Tensor, np.ndarray]:
        """Log-probabilities of the B actions and values of the B observations, and values of those that came `after`.

        Returns
        -------
        obs, actions, log_probs, values
            Columns of the batch.
        after_values : array
            f32, one for each row of `after`.
        """
        policy, n_seen = self.policy, len(seen)
        obs = self.place(seen) if isinstance(seen, np.ndarray) else seen
        taken, reached = self.place(actions), self.place(after)
        # One pass over vectors; images are not copied together.
        image = obs.dim() > 2
        blocks, chunk = ([obs, reached], _IMAGE_CHUNK) if image else ([torch.cat([obs, reached])], _CHUNK)
        values = torch.cat([policy.get_value(part).reshape(-1) for rows in blocks for part in rows.split(chunk)])
        if self._noise is not None:
            pairs = zip(obs.split(chunk), taken.split(chunk), strict=True)
            log_probs = torch.cat([policy.get_logprob_and_entropy(o, a)[0] for o, a in pairs])
        else:
            log_probs = torch.stack(self._log_probs).reshape(-1).clone()
        return obs, taken, log_probs, values[:n_seen], values[n_seen:].cpu().numpy()

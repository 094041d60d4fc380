"""NumPy interface of policy modules: arrays in, arrays out. Tensors, devices and evaluation mode are handled here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.kernels.rng import Rng
from rlox.nn.batch import FrameStacks
from rlox.nn.modes import acting, evaluating
from rlox.nn.modules import to_array
from rlox.nn.networks import rng_from_torch
from rlox.nn.policies import Actor, ActorCritic

# Values and log-probabilities of a rollout are computed after it, in chunks of this many rows to bound memory.
_CHUNK, _IMAGE_CHUNK = 8192, 512


def require_mode(policy: nn.Module, where: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the policy's ``mode``. Raises a TypeError with the remedy if a custom module has none."""
    mode = getattr(policy, "mode", None)
    if not callable(mode):
        raise TypeError(
            f"{where}: {type(policy).__name__} must define mode(obs) -> actions to act deterministically; "
            "or pass deterministic=False"
        )
    return mode


class ModuleActor:
    """Counterpart of `rlox.compiled.NativePolicy` for modules.

    Parameters
    ----------
    policy : nn.Module
        Any policy that `rlox.nn.policies` describes.
    device : str
        Device of the policy.
    """

    def __init__(self, policy: nn.Module, device: str = "cpu"):
        self.policy = policy
        self.device = device

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @torch.inference_mode()
    def mode(self, obs: np.ndarray) -> np.ndarray:
        """Return the most likely actions; the policy must have a ``mode``."""
        with evaluating(self.policy):
            return to_array(self.policy.mode(self._tensor(obs)))

    @torch.inference_mode()
    def sample(self, obs: np.ndarray, rng: Rng | None = None) -> np.ndarray:
        """Sample actions. Custom modules use PyTorch's generator, and so do rlox's policies if `rng` is None."""
        if not isinstance(self.policy, Actor):
            with evaluating(self.policy):
                return to_array(self.policy.get_action_and_logprob(self._tensor(obs))[0])
        noise = np.empty(self.policy.noise_shape(len(obs)), np.float32)
        self.policy.fill_noise(rng or rng_from_torch(), noise)
        with evaluating(self.policy):
            return to_array(self.policy.act(self._tensor(obs), self._tensor(noise)))


class ModuleRollout:
    """Use of a module in one rollout: `act` for each step, and `evaluate_actions` for all steps at the end.

    Parameters
    ----------
    policy : nn.Module
        Policy with the three methods that `rlox.nn.policies` names.
    device : str
        Device of the policy and of the columns.
    rng : Rng
        Generator of the actions of rlox's own policies.
    n_steps, n : int
        Steps T and environments N.
    """

    def __init__(self, policy: nn.Module, device: str, rng: Rng, n_steps: int, n: int):
        self.policy = policy
        self.device = device
        self._noise: torch.Tensor | None = None
        self._log_probs: list[torch.Tensor] = []
        if isinstance(policy, ActorCritic):
            noise = torch.empty((n_steps, *policy.noise_shape(n)), dtype=torch.float32, device="cpu")
            policy.fill_noise(rng, noise.numpy())
            self._noise = noise.to(device)
        self.context = partial(acting, policy)
        self._evaluator = ModuleEvaluator(policy, device)
        self.place = self._evaluator.place

    def act(self, obs: np.ndarray, t: int) -> np.ndarray:
        """Return the actions (N, …) of step `t`."""
        here = torch.from_numpy(obs).to(self.device)
        if self._noise is not None:
            action = self.policy.act(here, self._noise[t])
        else:
            action, log_prob = self.policy.get_action_and_logprob(here)
            self._log_probs.append(log_prob.float())
        return to_array(action)

    @torch.no_grad()
    def evaluate_actions(
        self, seen: np.ndarray | FrameStacks, actions: np.ndarray, after: np.ndarray
    ) -> tuple[Any, Any, torch.Tensor, torch.Tensor, np.ndarray]:
        """Return the results of `ModuleEvaluator`; for a custom module, with the log-probabilities from acting."""
        if self._noise is None:
            return self._evaluator(seen, actions, after, torch.stack(self._log_probs).reshape(-1).clone())
        return self._evaluator(seen, actions, after)

    @torch.no_grad()
    def log_probs(self, seen: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Return log-probabilities (B,) f32 of the B actions taken on the observations `seen`."""
        if self._noise is None:
            return torch.stack(self._log_probs).reshape(-1).cpu().numpy()
        return self._evaluator.log_probs(self.place(seen), self.place(actions)).cpu().numpy()


class ModuleEvaluator:
    """Log-probabilities and values of a rollout collected by a module, or by an earlier version of it.

    Parameters
    ----------
    policy : nn.Module
        Policy with the three methods that `rlox.nn.policies` names.
    device : str
        Device of the policy and of the columns.
    """

    def __init__(self, policy: nn.Module, device: str):
        self.policy = policy
        self.device = device

    def place(self, column: np.ndarray) -> torch.Tensor:
        """Move a column of the batch to the learner's device."""
        return torch.from_numpy(column).to(self.device)

    @torch.no_grad()
    def __call__(
        self,
        seen: np.ndarray | FrameStacks,
        actions: np.ndarray,
        after: np.ndarray,
        log_probs: torch.Tensor | None = None,
    ) -> tuple[Any, Any, torch.Tensor, torch.Tensor, np.ndarray]:
        """Compute the log-probabilities of B actions unless given, and values of B observations and of those `after`.

        Returns
        -------
        obs, actions, log_probs, values
            Columns of the batch.
        after_values : array
            f32, one for each row of `after`.
        """
        n_seen = len(seen)
        obs = self.place(seen) if isinstance(seen, np.ndarray) else seen
        taken, reached = self.place(actions), self.place(after)
        # Vectors take one pass; images are not concatenated, which would copy them.
        blocks = [obs, reached] if obs.dim() > 2 else [torch.cat([obs, reached])]
        parts = (part for rows in blocks for part in rows.split(self._chunk(obs)))
        with evaluating(self.policy):
            values = torch.cat([self.policy.get_value(part).reshape(-1).float() for part in parts])
        log_probs = self.log_probs(obs, taken) if log_probs is None else log_probs
        return obs, taken, log_probs, values[:n_seen], values[n_seen:].cpu().numpy()

    def log_probs(self, obs: torch.Tensor | FrameStacks, actions: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities (B,) of B actions."""
        pairs = zip(obs.split(self._chunk(obs)), actions.split(self._chunk(obs)), strict=True)
        with evaluating(self.policy):
            return torch.cat([self.policy.get_logprob_and_entropy(o, a)[0].float() for o, a in pairs])

    def _chunk(self, obs: torch.Tensor | FrameStacks) -> int:
        return _IMAGE_CHUNK if obs.dim() > 2 else _CHUNK

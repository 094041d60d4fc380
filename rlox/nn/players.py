"""Policies of several agents in PyTorch: the modules, their actions and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.kernels.rng import Rng
from rlox.nn.modules import copied
from rlox.nn.networks import rng_from_torch
from rlox.nn.policies import ActorCritic, mask_outputs

_CHUNK, _IMAGE_CHUNK = 8192, 512  # rows for which values and log-probabilities are computed at once


class PlayerPolicies(nn.Module):
    """The actor-critics of all players, in the order of the players, named from ``players.0`` on."""

    def __init__(self, policies: Sequence[ActorCritic]):
        super().__init__()
        self.players = nn.ModuleList(policies)


class ModulePart:
    """Actions, log-probabilities and values of one player, computed by a module from arrays to arrays.

    Parameters
    ----------
    policy : ActorCritic
        A policy from `rlox.nn.policies.make_policy`.
    device : str
        Device of the policy and of batches.
    """

    def __init__(self, policy: ActorCritic, device: str = "cpu"):
        self.policy = policy
        self.device = device

    def __reduce__(self) -> Any:
        # Copy the policy: its parameters may be views of one block, which a pickle would contain once per view.
        return ModulePart, (copied(self.policy), self.device)

    def place(self, column: np.ndarray | None) -> Any:
        """Return a column of a batch as a tensor on the learner's device."""
        return None if column is None else torch.from_numpy(np.ascontiguousarray(column)).to(self.device)

    def flat(self) -> np.ndarray:
        """Return a copy of all parameters, (P,) f32."""
        return torch.cat([p.detach().reshape(-1) for p in self.policy.parameters()]).cpu().numpy()

    @torch.no_grad()
    def set_flat(self, weights: np.ndarray) -> None:
        """Load the result of `flat`."""
        at = 0
        for p in self.policy.parameters():
            p.copy_(torch.from_numpy(weights[at : at + p.numel()]).view_as(p))
            at += p.numel()

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return self.policy.noise_shape(n)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        self.policy.fill_noise(rng, out)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, noise: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
        """Return sampled actions (B, …)."""
        rows, drawn = self.place(obs), self.place(noise)
        if masks is None:
            return self.policy.act(rows, drawn).cpu().numpy()
        return (self._outputs(rows, masks) + drawn).argmax(-1).cpu().numpy()

    @torch.inference_mode()
    def mode(self, obs: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
        """Return the most likely actions (B, …)."""
        rows = self.place(obs)
        if masks is None:
            return self.policy.mode(rows).cpu().numpy()
        return self._outputs(rows, masks).argmax(-1).cpu().numpy()

    def sample(self, obs: np.ndarray, masks: np.ndarray | None, rng: Rng | None = None) -> np.ndarray:
        """Return actions like `act`, with noise drawn from `rng`, or else from PyTorch's generator."""
        noise = np.empty(self.noise_shape(len(obs)), np.float32)
        self.fill_noise(rng or rng_from_torch(), noise)
        return self.act(obs, noise, masks)

    def _outputs(self, rows: torch.Tensor, masks: np.ndarray) -> torch.Tensor:
        return mask_outputs(self.policy.actor(self.policy.features(rows)), self.place(masks))

    @torch.no_grad()
    def evaluate_actions(
        self,
        obs: np.ndarray,
        states: np.ndarray | None,
        masks: np.ndarray | None,
        actions: np.ndarray,
        after: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return log-probabilities (B,) of the taken actions, values (B,), and values of the states `after` (K, …), all
        f32."""
        seen = self.place(obs)
        judged = seen if states is None else self.place(states)
        rows = _IMAGE_CHUNK if judged.dim() > 2 else _CHUNK
        parts = [part for block in (judged, self.place(after)) for part in block.split(rows)]
        values = torch.cat([self.policy.get_value(part) for part in parts]).cpu().numpy()
        legal = [None] * len(seen.split(rows)) if masks is None else self.place(masks).split(rows)
        log_probs = [
            self.policy.distribution(mask_outputs(self.policy.actor(self.policy.features(part)), allowed), taken)[0]
            for part, allowed, taken in zip(seen.split(rows), legal, self.place(actions).split(rows), strict=True)
        ]
        return torch.cat(log_probs).cpu().numpy(), values[: len(obs)], values[len(obs) :]

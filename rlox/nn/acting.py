"""How a policy acts: arrays of N environments in, arrays of their actions out; by PyTorch or compiled, with a memory or
without.

Whoever steps environments (collectors, evaluation, actors, datasets, `predict`) calls this interface and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.kernels.rng import Rng
from rlox.nn.memory_acting import Remembering, chunk_rows
from rlox.nn.modes import acting, evaluating
from rlox.nn.modules import copy_module, is_module, load_weights_, to_array, weights_of

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.nn.batch import FrameStacks

_LOWEST = np.float32(-1e9)  # noise on the logit of an illegal action, which is then never the largest


@dataclass(slots=True)
class Inputs:
    """What a policy sees of N environments at one step."""

    obs: np.ndarray  # (N, *obs_shape)
    mask: np.ndarray | None = None  # (N, n_actions) bool, the legal actions; None: all
    state: Any = None  # (N, S) f32, which the last call returned; None: that before an episode
    is_first: Any = None  # (N,) bool: where an episode starts, and `state` counts as that before it
    central: np.ndarray | None = None  # (N, …) f32: what a central critic sees; None: its memory stays as it is


class ActingPolicy:
    """Interface of policies that act in N environments, with the defaults of one without a memory.

    Attributes
    ----------
    state_dim : int
        S, the numbers that it carries from step to step in each environment; 0: it has no memory.
    n_state_noise : int
        Random numbers per environment that its next state depends on: the first columns of the noise of `act`.
    adds_noise_to_logits : bool
        Whether an action is the argmax of logits plus noise. Only such policies can respect a mask.
    """

    state_dim: int = 0
    n_state_noise: int = 0
    adds_noise_to_logits: bool = False

    def initial(self, n: int) -> Any:
        """Return the states (N, S) f32 before an episode; None without a memory."""
        return None

    def noise_shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the noise that `act` takes for `n` observations."""
        raise NotImplementedError

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        """Fill the f32 array `out`, of that shape or with more axes before it, with the noise for sampling."""
        raise NotImplementedError

    def act(self, inputs: Inputs, noise: np.ndarray) -> tuple[np.ndarray, Any]:
        """Return sampled actions (N, …), not clipped, and the next states (N, S) or None."""
        raise NotImplementedError

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
        """Return the most likely actions (N, …), and the next states (N, S) or None.

        `noise` (N, `n_state_noise`) draws the next states; without it they are the most likely ones, too.
        """
        raise NotImplementedError

    def context(self) -> AbstractContextManager[None]:
        """Return a context that makes many calls of `act` cheaper."""
        return nullcontext()

    def require_mode(self, where: str) -> None:
        """Raise TypeError if it can only sample."""
        return None

    def mask_noise(self, noise: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """Return `noise` (N, n_actions) with which no action is taken that is illegal by `mask` (N, n_actions)."""
        if mask is None:
            return noise
        self._require_logits()
        return np.where(mask, noise, _LOWEST)

    def _require_logits(self) -> None:
        if not self.adds_noise_to_logits:
            raise ValueError(f"{self}: there must be no action mask, since the policy does not choose by logits")


def acting_policy(policy: Any, device: str = "cpu") -> Any:
    """Return the `ActingPolicy` of a module on `device`; anything else acts by itself already."""
    if not is_module(policy):
        return policy
    return (MemoryPolicy if getattr(policy, "state_dim", 0) else ModulePolicy)(policy, device)


def draw_noise(policy: ActingPolicy, n: int, rng: Rng | None = None) -> np.ndarray:
    """Draw the noise with which a policy samples `n` actions; without `rng`, from a generator seeded from PyTorch's."""
    noise = np.empty(policy.noise_shape(n), np.float32)
    if noise.size:
        if rng is None:
            from rlox.nn.policies import rng_from_torch

            rng = rng_from_torch()
        policy.fill_noise(rng, noise)
    return noise


def read_state(where: str, state: Any, n: int, size: int) -> np.ndarray:
    """Return a caller's states of a memory, (S,) or (N, S), as (N, S) f32; a ValueError says what does not fit."""
    rows = np.asarray(state)
    rows = rows[None] if rows.ndim == 1 else rows
    if not size:
        raise ValueError(f"{where}: state must be None, since the agent has no memory")
    if rows.shape != (n, size) or rows.dtype.kind != "f" or not np.isfinite(rows).all():
        raise ValueError(
            f"{where}: state must be {n} row{'' if n == 1 else 's'} of {size} finite numbers, as the last call "
            f"returned it, got an array {np.shape(state)}"
        )
    return np.ascontiguousarray(rows, np.float32)


class EpisodeActor:
    """A policy in N environments, with what lasts from step to step: its states, and exploration noise.

    Call `act` with the observations of a step and then `end` with the episodes that ended in it.

    Parameters
    ----------
    policy : ActingPolicy
        The policy.
    n : int
        Environments N.
    rng : Rng, optional
        Draws actions, states and exploration noise; None: actions are drawn from PyTorch's generator.
    deterministic : bool
        Take the most likely actions.
    transform : callable, optional
        Applied to observations before the policy sees them, such as a normalisation.
    explore : callable, optional
        Takes N and returns the `rlox.collectors.exploration.ActionNoise` to add to sampled actions, or None.
    exploration_rng : Rng, optional
        Draws that noise; by default `rng`.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        n: int,
        rng: Rng | None,
        deterministic: bool = False,
        transform: Callable[[np.ndarray], np.ndarray] | None = None,
        explore: Callable[[int], Any] | None = None,
        exploration_rng: Rng | None = None,
    ):
        self._policy, self._rng, self._deterministic, self._transform = policy, rng, deterministic, transform
        self._exploration = None if deterministic or explore is None else explore(n)
        self._exploration_rng = exploration_rng or rng
        self._state = policy.initial(n)
        self._is_first = None if self._state is None else np.ones(n, np.bool_)

    def act(self, obs: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Return actions (N, …), not clipped, for observations (N, …) and masks of legal actions (N, n_actions)."""
        seen = obs if self._transform is None else np.ascontiguousarray(self._transform(obs))
        policy, inputs = self._policy, Inputs(seen, mask, self._state, self._is_first)
        if self._deterministic:
            noise = None
            if policy.n_state_noise:
                noise = np.empty((len(obs), policy.n_state_noise), np.float32)
                policy.fill_noise(self._rng, noise)
            actions, self._state = policy.mode(inputs, noise)
        else:
            actions, self._state = policy.act(inputs, draw_noise(policy, len(obs), self._rng))
            if self._exploration is not None:
                actions = self._exploration.add(actions, self._exploration_rng)
        if self._is_first is not None:
            self._is_first = np.zeros(len(obs), np.bool_)
        return actions

    def end(self, ended: np.ndarray) -> None:
        """Start anew in environments whose episodes `ended`, (N,) bool."""
        if self._is_first is not None:
            self._is_first = self._is_first | ended
        if self._exploration is not None:
            self._exploration.end(ended)


class ModulePolicy(ActingPolicy):
    """A PyTorch policy: one of rlox's own, whose noise is an argument, or a custom module.

    A custom module has the methods that `rlox.nn.policies` names, takes no noise, and samples with PyTorch's generator.

    Parameters
    ----------
    module : nn.Module
        The policy.
    device : str
        Its device.

    Attributes
    ----------
    drawn_log_probs : Tensor (N,), optional
        Log-probabilities of the last sampled actions, if a custom module drew them.
    """

    def __init__(self, module: nn.Module, device: str = "cpu"):
        from rlox.nn.policies import Actor

        self.module = module
        self.device = device
        self.custom = not isinstance(module, Actor)
        self.adds_noise_to_logits = getattr(module, "adds_noise_to_logits", False)
        self.drawn_log_probs: torch.Tensor | None = None
        self._inside = False  # whether `context` is entered

    def __reduce__(self) -> Any:
        # Copy the module: its parameters may be views of one block, which a pickle would contain once per view.
        return type(self), (copy_module(self.module), self.device)

    def __repr__(self) -> str:
        return type(self.module).__name__

    def copy(self) -> ModulePolicy:
        """Return a policy with a copy of the module, on the CPU, that computes the same bits."""
        return acting_policy(copy_module(self.module).to("cpu"))

    def weights(self) -> dict[str, np.ndarray]:
        """Return copies of all weights by their ``state_dict`` names."""
        return {name: np.array(array) for name, array in weights_of(self.module).items()}

    def load(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """Load the result of `weights`. Raises ValueError, which names `what`, if it does not fit."""
        load_weights_(self.module, arrays, what)

    def place(self, column: Any) -> Any:
        """Return an array as a tensor on the device; tensors and None unchanged."""
        import torch

        if not isinstance(column, np.ndarray):
            return column
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        return tensor if self.device == "cpu" else tensor.to(self.device)  # `to` takes a microsecond for nothing

    @contextmanager
    def context(self) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with acting(self.module):
                yield
        finally:
            self._inside = False

    def require_mode(self, where: str) -> None:
        if not callable(getattr(self.module, "mode", None)):
            raise TypeError(
                f"{where}: {self} must define mode(obs) -> actions to act deterministically; or pass "
                "deterministic=False"
            )

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, 0) if self.custom else self.module.noise_shape(n)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        if not self.custom:
            self.module.fill_noise(rng, out)

    def act(self, inputs: Inputs, noise: Any) -> tuple[np.ndarray, Any]:
        """Return sampled actions; `noise` is an array, or a tensor on the device."""
        if not self._inside:
            with self.context():
                return self.act(inputs, noise)
        if isinstance(noise, np.ndarray) and hasattr(self.module, "choose"):
            # What is decided on the host need not go to the device and back.
            return self.module.choose(noise, lambda: self.mode(inputs)[0], inputs.mask), None
        obs = self.place(inputs.obs)
        if not self.custom:
            return to_array(self.module.act(obs, self._masked(self.place(noise), inputs.mask))), None
        if inputs.mask is not None:
            self._refuse_mask()
        actions, self.drawn_log_probs = self.module.get_action_and_logprob(obs)
        return to_array(actions), None

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
        masks: tuple[Any, ...] = ()
        if inputs.mask is not None and hasattr(self.module, "choose"):  # which chooses by values, not by logits
            masks = (self.place(inputs.mask),)
        elif inputs.mask is not None:
            return self.act(inputs, np.zeros(self.noise_shape(len(inputs.obs)), np.float32))
        with self.context():
            return to_array(self.module.mode(self.place(inputs.obs), *masks)), None

    def _refuse_mask(self) -> None:
        raise ValueError(
            f"{self}: a custom policy must be a subclass of rlox.nn.policies.DiscretePolicy or MultiDiscretePolicy in "
            "environments with action masks"
        )

    def _masked(self, noise: torch.Tensor, mask: np.ndarray | None) -> torch.Tensor:
        if mask is None:
            return noise
        self._require_logits()
        return noise.masked_fill(~self.place(mask), float(_LOWEST))

    # ---- log-probabilities and values, for learning

    def evaluate_actions(
        self,
        obs: np.ndarray | FrameStacks,
        actions: np.ndarray,
        after: np.ndarray,
        log_probs: torch.Tensor | None = None,
        states: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> tuple[Any, Any, torch.Tensor, torch.Tensor, np.ndarray]:
        """Compute the log-probabilities of B actions unless given, and values of B observations and of those `after`.

        A critic that does not read the observations has the inputs `states` (B, S), and `after` (K, S). `masks`
        (B, n_actions) bool are the legal actions.

        Returns
        -------
        obs, actions, log_probs, values
            Columns of the batch.
        after_values : array
            f32, one for each row of `after`.
        """
        import torch

        n, rows, taken, reached = len(obs), self.place(obs), self.place(actions), self.place(after)
        judged = rows if states is None else self.place(states)
        # Vectors take one pass; images are not concatenated, which would copy them.
        blocks = [judged, reached] if judged.dim() > 2 else [torch.cat([judged, reached])]
        parts = (part for block in blocks for part in block.split(chunk_rows(judged)))
        with torch.no_grad(), evaluating(self.module):
            values = torch.cat([self.module.get_value(part).reshape(-1).float() for part in parts])
        log_probs = self.log_probs(rows, taken, masks) if log_probs is None else log_probs
        return rows, taken, log_probs, values[:n], values[n:].cpu().numpy()

    def log_probs(self, obs: Any, actions: Any, masks: np.ndarray | None = None) -> torch.Tensor:
        """Return the log-probabilities (B,) f32 of B actions, of those that `masks` (B, n_actions) allow."""
        import torch

        rows, taken = self.place(obs), self.place(actions)
        legal = repeat(()) if masks is None else ((part,) for part in self.place(masks).split(chunk_rows(rows)))
        pairs = zip(rows.split(chunk_rows(rows)), taken.split(chunk_rows(rows)), legal, strict=False)
        with torch.no_grad(), evaluating(self.module):
            return torch.cat([self.module.get_logprob_and_entropy(o, a, *mask)[0].float() for o, a, mask in pairs])

    def flat_weights(self) -> np.ndarray:
        """Return a copy of all parameters, (P,) f32."""
        import torch

        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()]).cpu().numpy()

    def set_flat_weights(self, weights: np.ndarray) -> None:
        """Load the result of `flat_weights`."""
        import torch

        start = 0
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(torch.from_numpy(weights[start : start + p.numel()]).view_as(p))
                start += p.numel()


class MemoryPolicy(Remembering, ModulePolicy):  # type: ignore[override]  # `state_dim` is that of the module
    """A `ModulePolicy` of one of rlox's own modules with a memory."""

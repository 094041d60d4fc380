"""Ensembles of critics: values of actions in states, computed by one batched product per layer.

Letters: N critics, B rows, D and A the sizes of observations and actions, K outputs of a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.kernels.rng import Rng
from rlox.nn.critics.blocks import layer_sizes, residual_weights
from rlox.nn.critics.heads import Head, MeanHead
from rlox.nn.critics.layers import linear
from rlox.nn.critics.norms import (
    Chosen,
    RMSNorm,
    batch_statistics,
    choose,
    make_norm,
    scale_to_sphere_,
    scale_to_unit_,
)
from rlox.nn.modules import mlp_weights
from rlox.nn.policies import NetworkSpec


class Dropout:
    """Sets each number to 0 with the probability `rate`, and scales the others up, with a generator of its own."""

    def __init__(self, rate: float, rng: Rng):
        self._rate, self._rng = rate, rng

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.from_numpy(self._rng.uniform(tuple(x.shape))).to(x.device) >= self._rate
        return x * (kept.to(x.dtype) / (1.0 - self._rate))

    def state(self) -> dict[str, np.ndarray]:
        """Return the generator's state, for a checkpoint."""
        return {name: np.array(value, np.uint64) for name, value in self._rng.get_state().items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._rng.set_state({name: int(value) for name, value in state.items()})


class CriticEnsemble(nn.Module):
    """N independent critics as one module, ``(B, D), (B, A) -> (N, B)``, or (N, B, K) if the head has K > 1 outputs.

    Weights are (N, n_in, n_out) and biases (N, 1, n_out), for ``x @ weight + bias``; they start at
    U(-1/sqrt(fan_in), 1/sqrt(fan_in)). With hidden layers 256-256 and B = 64, a step of two critics takes four fifths
    of the CPU time of two perceptrons.

    Parameters
    ----------
    obs_dim, act_dim : int
        Sizes D and A of observations and actions.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves.
    activation : str
        ``tanh`` or ``relu``.
    rng : Rng, optional
        Generator of the initial weights; by default seeded from PyTorch's.
    n_critics : int
        Critics N.
    head : Head, optional
        What the outputs are; by default expected returns.
    norm : str
        ``none``, ``layer``, ``batch`` or ``batch_renorm``: how hidden layers are normalised, with batch statistics also
        the input.
    norm_after : bool
        Normalise hidden layers after their activation instead of before it.
    dropout : Dropout, optional
        Applied to hidden layers before anything else, in training mode.
    n_blocks : int
        Residual blocks as in FlashSAC (arXiv:2604.04539), of which `hidden` is then the only width F: a linear layer to
        F features, the blocks, each of which adds the outputs of two hidden layers of 4 F and F units, and a division
        by the root mean square before the outputs. Weights start orthogonal and biases at 0. 0: hidden layers alone.

    Attributes
    ----------
    uses_batch : bool
        Whether `joint` normalises by the statistics of a batch.
    """

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        hidden: int | Sequence[int] = 256,
        activation: str = "relu",
        rng: Rng | None = None,
        n_critics: int = 2,
        head: Head | None = None,
        norm: str = "none",
        norm_after: bool = False,
        dropout: Dropout | None = None,
        n_blocks: int = 0,
    ):
        super().__init__()
        self.dropout = dropout
        self.head = head or MeanHead()
        self.uses_batch = norm in ("batch", "batch_renorm")
        spec = NetworkSpec(obs_dim + act_dim, hidden, activation, False, rng)
        widths = [*spec.widths, self.head.n_outputs]
        if n_blocks:
            widths = layer_sizes(widths[0], widths[1:-1], n_blocks, widths[-1])
            drawn = [residual_weights(widths, spec.rng) for _ in range(n_critics)]
        else:
            drawn = [mlp_weights(widths, 1.0, False, spec.rng) for _ in range(n_critics)]
        layers = list(zip(*drawn, strict=True))
        self._activate_ = getattr(torch, f"{activation}_")
        self.weights = nn.ParameterList(
            torch.tensor(np.stack([w.T for w, _ in layer]), device="cpu").contiguous() for layer in layers
        )
        # Where the mean of a batch is subtracted next, a bias would have no effect, and noise would let it drift.
        self._n_unbiased = len(layers) - 1 if self.uses_batch and not norm_after else 0
        self.biases = nn.ParameterList(
            torch.tensor(np.stack([b[None] for _, b in layer]), device="cpu") for layer in layers[self._n_unbiased :]
        )
        self._norm_after = norm_after
        # Two plain critics have native updates, which PyTorch's results are compared with.
        self._uses_kernel = norm != "none" or n_critics != 2 or self.head.n_outputs > 1
        hidden_widths = widths[2 if n_blocks else 1 : -1]
        normed = [] if norm == "none" else [*([widths[0]] if self.uses_batch else []), *hidden_widths]
        self.norms = nn.ModuleList(make_norm(norm, width, n_critics) for width in normed)
        self.last_norm = RMSNorm(widths[1], n_critics) if n_blocks else None

    def forward(self, obs: torch.Tensor, actions: torch.Tensor, chosen: Chosen = None) -> torch.Tensor:
        """Return the outputs of all, or of the `chosen` critics."""
        n = len(choose(self.weights[0], chosen))
        x = torch.cat([obs, actions], -1).expand(n, -1, -1)
        norms = iter(self.norms)
        if self.uses_batch:
            x = next(norms)(x, chosen)
        last = len(self.weights) - 1
        if self.last_norm is None:
            for i in range(last):
                x = self._hidden(x, i, next(norms, None), chosen)
        else:
            x = self._linear(x, 0, chosen)
            for i in range(1, last, 2):
                wide = self._hidden(x, i, next(norms, None), chosen)
                x = x + self._hidden(wide, i + 1, next(norms, None), chosen)
            x = self.last_norm(x, chosen)
        return self._linear(x, last, chosen).squeeze(-1)

    def _linear(self, x: torch.Tensor, i: int, chosen: Chosen, relu: bool = False) -> torch.Tensor:
        bias = i - self._n_unbiased
        biases = None if bias < 0 else choose(self.biases[bias], chosen)
        return linear(x, choose(self.weights[i], chosen), biases, relu, self._uses_kernel)

    def _hidden(self, x: torch.Tensor, i: int, norm: nn.Module | None, chosen: Chosen) -> torch.Tensor:
        dropout = self.dropout if self.training else None
        # ReLU that follows a layer at once is a part of it.
        fuses = self._activate_ is torch.relu_ and (self._norm_after or norm is None) and dropout is None
        x = self._linear(x, i, chosen, fuses)
        x = x if dropout is None else dropout(x)
        return self._normalize_and_activate(x, norm, chosen, fuses)

    def _normalize_and_activate(
        self, x: torch.Tensor, norm: nn.Module | None, chosen: Chosen, activated: bool
    ) -> torch.Tensor:
        if norm is None or self._norm_after:
            x = x if activated else self._activate_(x)
            return x if norm is None else norm(x, chosen)
        return self._activate_(norm(x, chosen))

    def scale_units_(self) -> None:
        """Scale the weights of each unit, with its bias, to the norm 1, in place; blocks as `norms.scale_units_`."""
        first = self._n_unbiased if self.last_norm is None else len(self.weights)
        for i, weight in enumerate(self.weights):
            scale_to_unit_(weight, self.biases[i - first] if i >= first else None, 1)
        if self.last_norm is not None:
            for norm in (*self.norms, self.last_norm):
                scale_to_sphere_(norm)

    def values(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the expected returns (N, B), by running statistics."""
        return self.head.values(self(obs, actions))

    def first(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the expected returns of the first critic, (B,), by running statistics."""
        return self.head.values(self(obs, actions, slice(1)))[0]

    def joint(
        self,
        obs: torch.Tensor,
        actions: torch.Tensor,
        next_obs: torch.Tensor,
        next_actions: torch.Tensor,
        renormalize: bool = False,
        learn: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of two halves of one batch, (N, B) or (N, B, K) each, by its statistics.

        See `rlox.nn.critics.norms.batch_statistics` for `renormalize` and `learn`.
        """
        with batch_statistics(self, renormalize, learn):
            outputs = self(torch.cat([obs, next_obs]), torch.cat([actions, next_actions]))
        both = outputs.split(len(obs), 1)
        return both[0], both[1]


class TwinQNetwork(CriticEnsemble):
    """Two critics of expected returns, ``(B, D), (B, A) -> (2, B)``; parameters as in `CriticEnsemble`."""


def draw_critics(config: Any, rng: Rng, device: str) -> torch.Tensor | None:
    """Return the indices (M,) int64 of `n_target_critics` different ones of `n_critics`; None if that is all of them.

    Nothing is drawn from `rng` then.
    """
    n = config.n_target_critics
    if n is None or n == config.n_critics:
        return None
    return torch.from_numpy(rng.permutation(config.n_critics)[:n]).to(device)


@torch.no_grad()
def follow_critics_(
    target: CriticEnsemble, block: torch.Tensor | None, critics: CriticEnsemble, flat: torch.Tensor, tau: float
) -> None:
    """Move a target network towards `critics` by the share `tau`, and copy their running statistics.

    `block` and `flat` are the flat parameters (P,) of both; None: there is no target network, and nothing to do.
    """
    if block is None:
        return
    block.lerp_(flat, tau)
    if critics.uses_batch:
        for ours, theirs in zip(target.norms.buffers(), critics.norms.buffers(), strict=True):
            ours.copy_(theirs)

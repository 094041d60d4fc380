"""Q-networks that learn more of a return than its mean, or explore by noise in their weights.

Heads: values, quantiles (QR-DQN, Dabney et al. 2018, arXiv:1710.10044) or a categorical distribution (C51, Bellemare et
al. 2017, arXiv:1707.06887). Layers: noisy ones (Fortunato et al. 2018, arXiv:1706.10295), and normalised ones.

Letters: B rows, A actions, N atoms per action, K random numbers of all noisy layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlox.envs.tensor.sums import expectations
from rlox.kernels.rng import Rng
from rlox.nn.actors import QPolicy
from rlox.nn.modules import layer_weights
from rlox.nn.policies import NetworkSpec

if TYPE_CHECKING:
    from rlox.config import DQNConfig


class Head(NamedTuple):
    """What a network says about the return of each action: `n_atoms` numbers of a `kind`.

    The kind is ``none`` (its value, one number), ``quantile`` (quantiles at the fractions (i + 1/2) / N) or
    ``categorical`` (logits of N values from `low` to `high`, equally far apart).
    """

    kind: str = "none"
    n_atoms: int = 1
    low: float = -10.0
    high: float = 10.0


VALUE = Head()


class NoisyLinear(nn.Module):
    """A linear layer with learned, factorised Gaussian noise on its weights (Fortunato et al. 2018, section 3).

    ``y = (w + s_w * f(e_out) f(e_in)^T) x + b + s_b * f(e_out)`` with ``f(e) = sign(e) sqrt|e|``. The noise is an
    argument; without it the layer is the linear layer of ``w`` and ``b``.

    Parameters
    ----------
    n_in, n_out : int
        Sizes of input and output.
    sigma : float
        The deviations s_w and s_b start at ``sigma / sqrt(n_in)``; w and b at U(-1/sqrt(n_in), 1/sqrt(n_in)).
    rng : Rng
        Generator of the initial weights.

    Attributes
    ----------
    n_noise : int
        Random numbers that it takes: those of its input, then those of its output.
    """

    def __init__(self, n_in: int, n_out: int, sigma: float, rng: Rng):
        super().__init__()
        self.n_in, self.n_noise = n_in, n_in + n_out
        weight, bias = layer_weights(n_out, n_in, 1.0, False, rng)
        spread = sigma / math.sqrt(n_in)
        self.weight, self.bias = nn.Parameter(torch.from_numpy(weight)), nn.Parameter(torch.from_numpy(bias))
        self.weight_sigma = nn.Parameter(torch.full_like(self.weight.data, spread))
        self.bias_sigma = nn.Parameter(torch.full_like(self.bias.data, spread))

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return (B, n_out). Standard normal `noise` is (n_noise,) for all rows, or (B, n_noise): each row its own."""
        if noise is None:
            return F.linear(x, self.weight, self.bias)
        factors = noise.sign() * noise.abs().sqrt()
        inner, outer = factors[..., : self.n_in], factors[..., self.n_in :]
        if noise.dim() == 1:
            weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(outer, inner))
            return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, outer))
        # The same without a weight matrix for each row.
        spread = F.linear(x * inner, self.weight_sigma, self.bias_sigma)
        return torch.addcmul(F.linear(x, self.weight, self.bias), spread, outer)


class _Layers(nn.Module):
    """Linear layers, each but perhaps the last with an optional LayerNorm and an activation."""

    def __init__(self, widths: Sequence[int], ends_activated: bool, make: Callable[[int, int], nn.Module], norm: bool):
        super().__init__()
        pairs = list(pairwise(widths))
        self.n_activated = len(pairs) if ends_activated else len(pairs) - 1
        self.linear = nn.ModuleList(make(n_in, n_out) for n_in, n_out in pairs)
        wide = [n_out for _, n_out in pairs[: self.n_activated]] if norm else []
        self.norm = nn.ModuleList(nn.LayerNorm(n, device="cpu", dtype=torch.float32) for n in wide)

    def forward(
        self, x: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor], noise: Iterator[torch.Tensor] | None
    ) -> torch.Tensor:
        for i, layer in enumerate(self.linear):
            x = layer(x) if noise is None else layer(x, next(noise))
            if i < self.n_activated:
                x = activate(self.norm[i](x) if len(self.norm) else x)
        return x


class ValueNetwork(nn.Module):
    """A perceptron that learns values of all actions, or the distributions of their returns.

    It has the shape of `rlox.nn.actors.DiscreteQNetwork`. With `dueling` every atom has a value and an advantage of its
    own, ``V_i + A_i - mean_a A_i`` (before the softmax of a categorical head), as in Rainbow.

    Parameters
    ----------
    obs_dim, n_actions, hidden, activation, dueling, rng
        As in `rlox.nn.actors.DiscreteQNetwork`.
    head : Head
        What is learned of the return of each action.
    noisy_sigma : float or None
        Initial noise of the linear layers, all of which are `NoisyLinear`; None: there is no noise.
    layer_norm : bool
        Each hidden layer's outputs are normalised before the activation (Ba et al. 2016, arXiv:1607.06450).

    Attributes
    ----------
    n_noise : int
        K, the standard normal numbers of all noisy layers; 0: there are none.
    """

    atoms: torch.Tensor

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_actions: int,
        hidden: int | Sequence[int] = 256,
        activation: str = "relu",
        dueling: bool = False,
        head: Head = VALUE,
        noisy_sigma: float | None = None,
        layer_norm: bool = False,
        rng: Rng | None = None,
    ):
        super().__init__()
        spec = NetworkSpec(obs_dim, hidden, activation, False, rng)
        self.n_actions, self.head, self.body = n_actions, head, spec.body
        self._activate = getattr(torch, activation)

        def make(n_in: int, n_out: int) -> nn.Module:
            if noisy_sigma is not None:
                return NoisyLinear(n_in, n_out, noisy_sigma, spec.rng)
            layer = nn.Linear(n_in, n_out, device="cpu", dtype=torch.float32)
            with torch.no_grad():
                for p, values in zip(layer.parameters(), layer_weights(n_out, n_in, 1.0, False, spec.rng), strict=True):
                    p.copy_(torch.from_numpy(values))
            return layer

        shared = max(0, len(spec.widths) - 2) if dueling else 0
        own = spec.widths[shared:]
        self.trunk = _Layers(spec.widths[: shared + 1], True, make, layer_norm)
        self.advantage = _Layers([*own, n_actions * head.n_atoms], False, make, layer_norm)
        self.value = _Layers([*own, head.n_atoms], False, make, layer_norm) if dueling else None
        layers = [part for part in self.modules() if isinstance(part, NoisyLinear)]
        self._sizes = [layer.n_noise for layer in layers]
        self.n_noise = sum(self._sizes)
        # They follow from the configuration, so checkpoints do not contain them.
        atoms = np.linspace(head.low, head.high, head.n_atoms, dtype=np.float32)
        self.register_buffer("atoms", torch.from_numpy(atoms), persistent=False)

    def outputs(self, obs: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return the atoms (B, A, N) of all actions: values, quantiles or logits. `noise` is (K,) or (B, K)."""
        x = obs if self.body is None else self.body(obs.float() / 255.0)
        parts = None if noise is None else iter(noise.split(self._sizes, -1))
        x = self.trunk(x, self._activate, parts)
        advantages = self.advantage(x, self._activate, parts).unflatten(-1, (self.n_actions, -1))
        if self.value is None:
            return advantages
        return self.value(x, self._activate, parts).unsqueeze(1) + advantages - advantages.mean(1, keepdim=True)

    def means(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the values (…), in units of discounted return, of atoms (…, N)."""
        is_mean = self.head.kind != "categorical"
        return outputs.mean(-1) if is_mean else expectations(outputs.softmax(-1), self.atoms)

    def forward(self, obs: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return values (B, A), in units of discounted return."""
        return self.means(self.outputs(obs, noise))


def create_value_policy(
    obs_dim: int | Sequence[int],
    n_actions: int,
    hidden: Sequence[int],
    activation: str,
    dueling: bool,
    config: DQNConfig,
    rng: Rng,
) -> QPolicy:
    """Create the policy of a `ValueNetwork` with the options of `config`; other arguments as in `ValueNetwork`."""
    c = config
    head = VALUE if c.distribution == "none" else Head(c.distribution, c.n_atoms, c.v_min, c.v_max)
    sigma = c.noisy_sigma if c.noisy else None
    network = ValueNetwork(obs_dim, n_actions, hidden, activation, dueling, head, sigma, c.layer_norm, rng)
    return (NoisyQPolicy if c.noisy else QPolicy)(network, n_actions)


class NoisyQPolicy(QPolicy):
    """ε-greedy over the values of a `ValueNetwork` with noisy layers.

    `act` draws new noise for each row, so that every environment explores in its own way at every step; `mode` has no
    noise.
    """

    q: ValueNetwork
    _noise: torch.Tensor | None = None  # of the rows whose actions are being chosen

    @property
    def n_noise(self) -> int:
        """K, the numbers of noise of each row."""
        return self.q.n_noise

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, 2 + self.n_noise)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        """Fill the first two columns as those of `QPolicy`, and the others with standard normal numbers."""
        out[..., :2] = rng.uniform((*out.shape[:-1], 2))
        out[..., 2:] = rng.normal((*out.shape[:-1], self.n_noise))

    def choose(self, noise: np.ndarray, best: Callable[[], np.ndarray], masks: np.ndarray | None = None) -> np.ndarray:
        with self._noised(noise[:, 2:]):
            return super().choose(noise[:, :2], best, masks)

    def mode(self, obs: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
        values = self.q(obs, self._noise)
        return (values if masks is None else values.masked_fill(~masks, -torch.inf)).argmax(-1)

    @contextmanager
    def _noised(self, noise: np.ndarray) -> Iterator[None]:
        self._noise = torch.from_numpy(np.ascontiguousarray(noise)).to(self.q.atoms.device)
        try:
            yield
        finally:
            self._noise = None

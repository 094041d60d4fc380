"""The world model of DreamerV3 (Hafner et al. 2023, arXiv:2301.04104), with the constants of the author's current code.

Symbols as in the paper: x observation (here ``obs``), a action, h deterministic state (``deter``), z latents
(``stoch``, one-hot), r reward, c continue. Letters of shapes: T steps, B sequences, D width of h, K latents of C
classes, A width of an action, U units of a hidden layer, F = D + K C width of a feature (h, z).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlox.config.world_models import BLOCKS, Size
from rlox.envs import EnvSpec
from rlox.kernels.rng import Rng
from rlox.world_models.cells import gates, norm_silu, pick, two_hot, two_hot_mean

N_BINS = 255
EPS = 1e-4  # of the norms
TRUNCATED = 1.0 / 0.87962566103423978  # inverse standard deviation of a standard normal truncated at +-2


def symlog(x: Tensor) -> Tensor:
    """Return sign(x) log(1 + \\|x\\|)."""
    return torch.sign(x) * torch.log1p(x.abs())


def symexp(x: Tensor) -> Tensor:
    """Return the inverse of `symlog`."""
    return torch.sign(x) * torch.expm1(x.abs())


def full(x: Tensor) -> Tensor:
    """Convert a result in bfloat16 to float32, so that only products are computed in half precision."""
    return x.float() if x.dtype == torch.bfloat16 else x


def draw_truncated_normal(shape: Sequence[int], fan_in: int, rng: Rng, scale: float = 1.0) -> nn.Parameter:
    """Draw weights with standard deviation scale / sqrt(fan_in) from a truncated normal distribution.

    The normal distribution is truncated at two of its own standard deviations.
    """
    # Phi(-2) = 0.02275; the inverse distribution function maps uniform numbers to truncated normal ones.
    uniform = torch.from_numpy(rng.uniform(tuple(shape), dtype=np.float64))
    low = 0.5 * math.erfc(math.sqrt(2.0))
    normal = math.sqrt(2.0) * torch.erfinv(2.0 * (low + (1.0 - 2.0 * low) * uniform) - 1.0)
    return nn.Parameter((TRUNCATED * scale / math.sqrt(fan_in) * normal).float())


class Linear(nn.Module):
    """x W' + b with `draw_truncated_normal` weights (n_out, n_in) and zero biases."""

    def __init__(self, n_in: int, n_out: int, rng: Rng, scale: float = 1.0, fan_in: int | None = None):
        super().__init__()
        self.weight = draw_truncated_normal((n_out, n_in), fan_in or n_in, rng, scale)
        self.bias = nn.Parameter(torch.zeros(n_out, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return full(F.linear(x, self.weight, self.bias))


class Norm(nn.Module):
    """RMS norm over the last axis, without an additive term, then SiLU."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return norm_silu(x, self.scale, EPS)


class Dense(nn.Module):
    """Linear, norm, SiLU."""

    def __init__(self, n_in: int, n_out: int, rng: Rng):
        super().__init__()
        self.linear, self.norm = Linear(n_in, n_out, rng), Norm(n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class MLP(nn.Module):
    """`layers` hidden layers of `units`, then a linear layer with `n_out` outputs, unless `n_out` is 0."""

    def __init__(self, n_in: int, units: int, layers: int, n_out: int, rng: Rng, scale: float = 1.0):
        super().__init__()
        widths = [n_in, *[units] * layers]
        self.hidden = nn.Sequential(*(Dense(a, b, rng) for a, b in pairwise(widths)))
        self.out = Linear(units, n_out, rng, scale) if n_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x))


class TwoHot(nn.Module):
    """A distribution over 255 bins that are spaced evenly in symlog, for rewards and returns in their own units.

    The head's last layer starts at zero, so that its first prediction is exactly 0: the bins are symmetric, and the
    mean adds symmetric pairs first.
    """

    def __init__(self, n_in: int, units: int, layers: int, rng: Rng):
        super().__init__()
        self.mlp = MLP(n_in, units, layers, N_BINS, rng, scale=0.0)
        half = symexp(torch.linspace(-20, 0, N_BINS // 2 + 1, dtype=torch.float64, device="cpu")).float()
        self.register_buffer("bins", torch.cat([half, -half[:-1].flip(0)]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (..., 255)."""
        return self.mlp(x)

    def mean(self, logits: Tensor) -> Tensor:
        """Return the expected value (...), without a gradient."""
        return two_hot_mean(logits, self.bins)

    def loss(self, logits: Tensor, *targets: Tensor) -> Tensor:
        """Return cross-entropies (..., S) with each of S `targets` (...); a target is split between its two bins."""
        target = torch.stack(targets, -1).detach().clamp(self.bins[0], self.bins[-1])
        above = torch.bucketize(target, self.bins).clamp_(1, N_BINS - 1)
        low, high = self.bins[above - 1], self.bins[above]
        return two_hot(logits, above - 1, (target - low) / (high - low))


def _convert_squares(encoder: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """Compute the variance from the mean of squares, which checkpoints of 0.12.0 contain."""
    if (square := state.pop(f"{prefix}square", None)) is not None:
        variance = square - state[f"{prefix}mean"].square()
        state[f"{prefix}variance"] = torch.where(variance > 1e-6 * square, variance, 0.0)


class Encoder(nn.Module):
    """Encodes observations as tokens (..., E).

    Observations are numbers (..., N), an image (..., C, H, W) of bytes, or numbers and images in one vector. Numbers
    are normalised to mean 0 and standard deviation 1, with the moments of all updates so far, and then transformed by
    symlog: otherwise small numbers would be lost in the sum of all numbers that the model's layers compute.
    """

    LEAST_RATE = 1e-3  # weight of a new batch in the running moments after many batches

    def __init__(self, spec: EnvSpec, units: int, rng: Rng):
        super().__init__()
        self.image, (self.places, pixels) = spec.image, image_places(spec)
        self.convs = nn.ModuleList(ImageEncoder(shape, units, rng) for _, shape in self.places)
        self.n_tokens = sum(convs.n_tokens for convs in self.convs)
        if self.image:
            return
        self.register_buffer("pixels", pixels, persistent=False)
        self.register_buffer("numbers", (~pixels).nonzero()[:, 0], persistent=False)
        self.mlp = MLP(len(self.numbers), units, 3, 0, rng) if len(self.numbers) else None
        self.n_tokens += units if self.mlp else 0
        self.register_buffer("mean", torch.zeros(spec.obs_shape, dtype=torch.float32, device="cpu"))
        self.register_buffer("variance", torch.ones(spec.obs_shape, dtype=torch.float32, device="cpu"))
        self.register_buffer("n_batches", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_load_state_dict_pre_hook(_convert_squares)

    @torch.no_grad()
    def see(self, obs: Tensor) -> None:
        """Update the running moments with vectors (..., N); images need none."""
        if self.image:
            return
        self.n_batches += 1
        rate: Any = (1.0 / self.n_batches).clamp(min=self.LEAST_RATE)
        if not obs.is_cuda:  # where the host need not wait for it
            rate = max(1.0 / float(self.n_batches), self.LEAST_RATE)
        # A difference of mean squares would lose deviations that are small beside the mean.
        variance, mean = torch.var_mean(obs.flatten(0, -2), 0, correction=0)
        change = mean - self.mean
        self.variance.lerp_(variance, rate).add_(change.square().mul_(rate * (1 - rate)))
        self.mean.add_(change.mul_(rate))

    @property
    def deviation(self) -> Tensor:
        """Standard deviations (N,); 1 for numbers that do not vary."""
        least = 1e-12 * self.mean.square()  # less is rounding
        return torch.where(self.variance > least.clamp_(min=1e-30), self.variance, 1.0).sqrt()

    def scaled(self, obs: Tensor) -> Tensor:
        """Scale observations to the form that the model sees and predicts; pixels are in [0, 1]."""
        if self.image:
            return obs.float() / 255
        x = symlog((obs - self.mean) / self.deviation)
        return torch.where(self.pixels, obs / 255, x) if self.places else x

    def unscaled(self, x: Tensor) -> Tensor:
        """Invert `scaled`; pixels are in [0, 255]."""
        if self.image:
            return 255 * x
        obs = symexp(x) * self.deviation + self.mean
        return torch.where(self.pixels, 255 * x, obs) if self.places else obs

    def forward(self, obs: Tensor) -> Tensor:
        x = self.scaled(obs)
        if not self.places and self.mlp is not None:
            return self.mlp(x)
        x = x.flatten(-3) if self.image else x
        tokens = [
            convs(x[..., start : start + math.prod(shape)].unflatten(-1, shape))
            for convs, (start, shape) in zip(self.convs, self.places, strict=True)
        ]
        if not self.image and self.mlp is not None:
            tokens.append(self.mlp(x[..., self.numbers]))
        return torch.cat(tokens, -1)


class Decoder(nn.Module):
    """Predicts observations from features (..., F), in the form of `Encoder.scaled`."""

    def __init__(self, spec: EnvSpec, n_in: int, units: int, rng: Rng):
        super().__init__()
        self.image, (self.places, pixels) = spec.image, image_places(spec)
        self.convs = nn.ModuleList(ImageDecoder(shape, n_in, units, rng) for _, shape in self.places)
        if self.image:
            return
        numbers = (~pixels).nonzero()[:, 0]
        self.mlp = MLP(n_in, units, 3, len(numbers), rng) if len(numbers) else None
        # Index of each number of an observation in the joined outputs, in which images come first.
        self.register_buffer("pixels", pixels, persistent=False)
        self.register_buffer("order", torch.cat([pixels.nonzero()[:, 0], numbers]).argsort(), persistent=False)

    def forward(self, feat: Tensor) -> Tensor:
        images = [convs(feat) for convs in self.convs]
        if self.image:
            return images[0]
        parts = [x.flatten(-3) for x in images] + ([] if self.mlp is None else [self.mlp(feat)])
        return torch.cat(parts, -1)[..., self.order] if images else parts[0]

    def errors(self, feat: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return squared errors, summed over an observation's numbers and over its pixels, (...) each.

        An error has shape () if observations have no such part. `target` must be in the form of `Encoder.scaled`.
        """
        squares = (self(feat) - target).square().flatten(feat.dim() - 1)
        none = squares.new_zeros(())
        if not self.places:
            return squares.sum(-1), none
        if self.image:
            return none, squares.sum(-1)
        return squares.masked_fill(self.pixels, 0).sum(-1), squares.masked_fill(~self.pixels, 0).sum(-1)


def image_places(spec: EnvSpec) -> tuple[list[tuple[int, tuple[int, ...]]], Tensor]:
    """Return start and shape (C, H, W) of each image in an observation, and which of its numbers (N,) are pixels."""
    places = [(0, spec.obs_shape)] if spec.image else [(start, tuple(shape)) for start, *shape in spec.images]
    pixels = torch.zeros(spec.obs_dim, dtype=torch.bool, device="cpu")
    for start, shape in places:
        pixels[start : start + math.prod(shape)] = True
    return places, pixels


class ImageEncoder(nn.Module):
    """Encodes images (..., C, H, W) in [0, 1] as tokens (..., E)."""

    def __init__(self, shape: tuple[int, ...], units: int, rng: Rng):
        super().__init__()
        sizes, depths = image_sizes(shape, units)
        self.layers = nn.ModuleList(Conv(a, b, rng) for a, b in pairwise([shape[0], *depths]))
        self.n_tokens = depths[-1] * math.prod(sizes[-1])

    def forward(self, images: Tensor) -> Tensor:
        x = (images.flatten(0, -4) - 0.5).contiguous(memory_format=torch.channels_last)
        for conv in self.layers:
            x = conv(F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2)), stride=2)
        return x.reshape(*images.shape[:-3], -1)


class ImageDecoder(nn.Module):
    """Predicts images (..., C, H, W) in [0, 1] from features (..., F)."""

    def __init__(self, shape: tuple[int, ...], n_in: int, units: int, rng: Rng):
        super().__init__()
        self.shape, (self.sizes, depths) = shape, image_sizes(shape, units)
        self.start = (depths[-1], *self.sizes[-1])
        self.dense = Dense(n_in, math.prod(self.start), rng)
        self.layers = nn.ModuleList(Conv(a, b, rng) for a, b in pairwise(depths[::-1]))
        self.out = Conv(depths[0], shape[0], rng, norm=False)

    def forward(self, feat: Tensor) -> Tensor:
        x = self.dense(feat).reshape(-1, *self.start).contiguous(memory_format=torch.channels_last)
        for conv, (height, width) in zip([*self.layers, self.out], self.sizes[-2::-1], strict=True):
            doubled = F.interpolate(x, scale_factor=2, mode="nearest")[..., :height, :width]
            x = conv(doubled.contiguous(memory_format=torch.channels_last))
        return x.sigmoid().reshape(*feat.shape[:-1], *self.shape)


class Conv(nn.Module):
    """A 5 x 5 convolution that keeps the size, or halves it with stride 2; then a norm over channels, and SiLU.

    Channels are last in memory, as the norm needs them; convolutions are also fastest in this layout.
    """

    def __init__(self, n_in: int, n_out: int, rng: Rng, norm: bool = True):
        super().__init__()
        self.weight = draw_truncated_normal((n_out, n_in, 5, 5), 25 * n_in, rng)
        self.bias = nn.Parameter(torch.zeros(n_out, dtype=torch.float32, device="cpu"))
        self.norm = Norm(n_out) if norm else None

    def forward(self, x: Tensor, stride: int = 1) -> Tensor:
        weight = self.weight.contiguous(memory_format=torch.channels_last)
        x = full(F.conv2d(x, weight, self.bias, stride, padding=2))
        return x if self.norm is None else self.norm(x.movedim(-3, -1)).movedim(-1, -3)


def image_sizes(shape: tuple[int, ...], units: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the sizes (height, width) of an image (C, H, W) as it is halved to about 4, and the channels of each."""
    sizes, depth = [(shape[1], shape[2])], max(4, units // 16)
    while (min(sizes[-1]) > 4 and len(sizes) < 5) or len(sizes) == 1:
        sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
    return sizes, [depth * k for k in (2, 3, 4, 4)[: len(sizes) - 1]]


class Latents(NamedTuple):
    """States of the model; the leading axes depend on the call."""

    deter: Tensor  # (..., D)
    stoch: Tensor  # (..., K * C), one-hot for each latent

    @property
    def feat(self) -> Tensor:
        """Features (..., F)."""
        return torch.cat(self, -1)

    def flat_states(self) -> Latents:
        """Return all states as rows (M, ...), without gradients."""
        return Latents(*(x.detach().flatten(0, -2) for x in self))


class RSSM(nn.Module):
    """The recurrent state-space model: a block-diagonal GRU over h, and categorical latents z.

    `size` has the widths of the model; `n_tokens` and `n_actions` are those of encoded observations and of actions.
    `unimix` is the share of the uniform distribution in the distributions of latents. `rng` draws the initial weights.
    """

    def __init__(self, size: Size, n_tokens: int, n_actions: int, unimix: float, rng: Rng):
        super().__init__()
        deter, units, stoch, classes = size
        self.deter, self.stoch, self.classes, self.unimix = deter, stoch, classes, unimix
        self.n_latents, width = stoch * classes, deter // BLOCKS
        self.of_deter, self.of_stoch = Dense(deter, units, rng), Dense(self.n_latents, units, rng)
        self.of_action = Dense(n_actions, units, rng)
        # A block sees its own slice of h and all three inputs. As a single matrix, its input would have this width:
        fan_in = BLOCKS * 3 * units + deter
        self.shared = Linear(3 * units, deter, rng, fan_in=fan_in)
        self.own = draw_truncated_normal((BLOCKS, width, width), fan_in, rng)
        self.norm = Norm(deter)
        self.gate_weight = draw_truncated_normal((BLOCKS, width, 3 * width), deter, rng)
        self.gate_bias = nn.Parameter(torch.zeros(BLOCKS, 1, 3 * width, dtype=torch.float32, device="cpu"))
        self.prior = MLP(deter, units, 2, self.n_latents, rng)
        self.post_deter = Linear(deter, units, rng, fan_in=deter + n_tokens)
        self.post_tokens = draw_truncated_normal((units, n_tokens), deter + n_tokens, rng)
        self.post_norm, self.post_out = Norm(units), Linear(units, self.n_latents, rng)

    def initial(self, n: int) -> Latents:
        """Return the state before an episode, zeros."""
        zeros = self.shared.bias.new_zeros
        return Latents(zeros(n, self.deter), zeros(n, self.n_latents))

    def embed(self, action: Tensor) -> Tensor:
        """Embed actions (..., A) for the recurrent cell, (..., U); numbers above 1 in size are scaled down to 1."""
        return self.of_action(action / action.detach().abs().clamp(min=1.0))

    def step(self, before: Latents, embedded: Tensor) -> Tensor:
        """Return h (B, D) after the state `before` and an action in the form of `embed`."""
        h = before.deter
        blocks = h.view(-1, BLOCKS, self.deter // BLOCKS).transpose(0, 1)
        x = self.shared(torch.cat([self.of_deter(h), self.of_stoch(before.stoch), embedded], -1))
        x = self.norm(x + torch.bmm(blocks, self.own).transpose(0, 1).reshape(x.shape))
        x = torch.baddbmm(self.gate_bias, x.view(-1, *blocks.shape[::2]).transpose(0, 1), self.gate_weight)
        return gates(full(x), h)

    def mixed(self, logits: Tensor) -> Tensor:
        """Return probabilities (..., K, C) of logits (..., K C), mixed with the uniform distribution."""
        probs = logits.unflatten(-1, (self.stoch, self.classes)).softmax(-1)
        return (1 - self.unimix) * probs + self.unimix / self.classes

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draw one-hot latents (B, K C) with uniform numbers (B, K); the gradient is that of their probabilities."""
        return pick(logits, uniform, self.unimix)

    def mode(self, logits: Tensor) -> Tensor:
        """Return the most likely latents (..., K C), one-hot."""
        classes = logits.unflatten(-1, (self.stoch, self.classes)).argmax(-1)
        return F.one_hot(classes, self.classes).flatten(-2).to(logits.dtype)

    def posterior(self, deter: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (B, K C) of z given h and the projected `tokens`, ``tokens @ post_tokens'``."""
        return self.post_out(self.post_norm(self.post_deter(deter) + tokens))

    def observe(
        self, tokens: Tensor, actions: Tensor, is_first: Tensor, start: Latents, uniform: Tensor
    ) -> tuple[Latents, Tensor]:
        """Run through T observed steps from `start`; return posterior states (T, B, ...) and logits (T, B, K C).

        `tokens` (T, B, E) are encoded observations, `actions` (T, B, A) those *before* each observation. Where
        `is_first` (T, B), state and previous action count as zero. The latents are drawn with `uniform` (T, B, K).
        """
        keep = (~is_first).to(tokens.dtype)[..., None]
        embedded = self.embed(actions * keep)
        seen = F.linear(tokens, self.post_tokens)
        # Compiled code, and a GPU, reset every step, since they must not depend on the values of a tensor.
        always = torch.compiler.is_compiling() or is_first.is_cuda
        resets = [True] * len(is_first) if always else is_first.any(1).tolist()
        state, deters, stochs, posteriors = start, [], [], []
        for t, reset in enumerate(resets):
            if reset:
                state = Latents(state.deter * keep[t], state.stoch * keep[t])
            deter = self.step(state, embedded[t])
            logits = self.posterior(deter, seen[t])
            state = Latents(deter, self.draw(logits, uniform[t]))
            deters.append(deter)
            stochs.append(state.stoch)
            posteriors.append(logits)
        return Latents(torch.stack(deters), torch.stack(stochs)), torch.stack(posteriors)

    def kl(self, deter: Tensor, post_logits: Tensor, free_nats: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the two halves of the balanced KL divergence (...), summed over latents, then at least `free_nats`.

        They are KL(sg(posterior) || prior), which trains the prior, and KL(posterior || sg(prior)); the entropies of
        prior and posterior follow, in nats.
        """
        prior, post = self.mixed(self.prior(deter)), self.mixed(post_logits)
        log_prior, log_post = prior.log(), post.log()

        def divergence(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
            return (p * (log_p - log_q)).sum((-2, -1)).clamp(min=free_nats)

        dyn = divergence(post.detach(), log_post.detach(), log_prior)
        rep = divergence(post, log_post, log_prior.detach())
        with torch.no_grad():
            entropies = [-(p * log_p).sum((-2, -1)) for p, log_p in ((prior, log_prior), (post, log_post))]
        return dyn, rep, *entropies

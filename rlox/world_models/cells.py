"""Element-wise parts of the recurrent model, which take most of an update's time if PyTorch runs them one by one.

Each function is defined by a formula in PyTorch. On a CPU, in float32 and uncompiled, a kernel computes the result and
its gradient in one pass each (`rlox.kernels.nn.cells`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rlox.envs.tensor.sums import cumulative_sums
from rlox.kernels.nn import cells


def norm_silu(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return SiLU(x / sqrt(mean(x**2) + eps) * scale), for x (..., N) and scale (N,)."""
    if _kernel_computes(x):
        return _NormSilu.apply(x, scale, eps)
    return F.silu(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale)


def gates(x: Tensor, h: Tensor) -> Tensor:
    """Return the GRU's next state (B, D) from the gates (G, B, 3 D / G) of its blocks and the state h (B, D).

    Each block contains reset, candidate and update: candidate = tanh(sigmoid(reset) candidate),
    u = sigmoid(update - 1), h' = u candidate + (1 - u) h.
    """
    if _kernel_computes(x):
        return _Gates.apply(x, h)
    reset, candidate, update = x.transpose(0, 1).unflatten(-1, (3, -1)).unbind(2)
    candidate = torch.tanh(torch.sigmoid(reset) * candidate).reshape(h.shape)
    return torch.lerp(h, candidate, torch.sigmoid(update - 1.0).reshape(h.shape))


def pick(logits: Tensor, uniform: Tensor, unimix: float) -> Tensor:
    """Draw one-hot samples (B, K C) from softmax(logits) mixed with the uniform distribution, logits (B, K C).

    Class c is drawn if the uniform number (B, K) is below the sum of the probabilities up to c, and not below the sum
    up to c - 1. The gradient is that of the probabilities (straight through).
    """
    if _kernel_computes(logits):
        return _SampleOneHot.apply(logits, uniform, unimix)
    n, classes = uniform.shape[-1], logits.shape[-1] // uniform.shape[-1]
    probs = (1 - unimix) * logits.unflatten(-1, (n, classes)).softmax(-1) + unimix / classes
    index = (cumulative_sums(probs.detach())[..., :-1] < uniform[..., None]).sum(-1)
    drawn = F.one_hot(index, classes).to(probs.dtype)
    return (drawn + (probs - probs.detach())).flatten(-2)


def two_hot(logits: Tensor, at: Tensor, share: Tensor) -> Tensor:
    """Return cross-entropies (..., S) of softmax(logits) (..., N) with targets on two neighbouring classes.

    The classes are `at` (..., S) and at + 1, with the weight `share` on the second.
    """
    if _kernel_computes(logits):
        return _TwoHot.apply(logits, at, share)
    pairs = logits.log_softmax(-1).gather(-1, torch.cat([at, at + 1], -1))
    low, high = pairs.chunk(2, -1)
    return -(low * (1 - share) + high * share)


def two_hot_mean(logits: Tensor, values: Tensor) -> Tensor:
    """Return the mean (...) of `values` (N,) under softmax(logits), without a gradient.

    The values must be symmetric about the middle one, which is 0. Equal logits give exactly 0.
    """
    logits = logits.detach()
    if _kernel_computes(logits):
        return torch.from_numpy(cells.two_hot_mean(logits.contiguous().numpy(), values.numpy()))
    powers, n = (logits - logits.amax(-1, keepdim=True)).exp(), len(values) // 2
    # Powers are subtracted before they are multiplied by values of up to 5e8, or divided by their sum. A difference of
    # products is not 0 where a compiler rounds only one of them (a fused multiply-add), and GPUs divide by products.
    return ((powers[..., n + 1 :] - powers[..., :n].flip(-1)) * values[n + 1 :]).sum(-1) / powers.sum(-1)


def _kernel_computes(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


class _NormSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, eps):
        x, scale = x.detach().contiguous(), scale.detach()
        out, ctx.inverse = cells.norm_silu(x.numpy(), scale.numpy(), eps)
        ctx.save_for_backward(x, scale)
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx, d):
        x, scale = ctx.saved_tensors
        dx, d_scale = cells.norm_silu_backward(x.numpy(), scale.numpy(), ctx.inverse, d.contiguous().numpy())
        return torch.from_numpy(dx), torch.from_numpy(d_scale), None


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, h):
        x, h = x.detach().contiguous(), h.detach().contiguous()
        ctx.save_for_backward(x, h)
        return torch.from_numpy(cells.gates(x.numpy(), h.numpy()))

    @staticmethod
    def backward(ctx, d):
        x, h = ctx.saved_tensors
        dx, dh = cells.gates_backward(x.numpy(), h.numpy(), d.contiguous().numpy())
        return torch.from_numpy(dx), torch.from_numpy(dh)


class _SampleOneHot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, uniform, unimix):
        ctx.classes, ctx.unimix = logits.shape[-1] // uniform.shape[-1], unimix
        drawn, ctx.probs = cells.pick(logits.detach().contiguous().numpy(), uniform.contiguous().numpy(), unimix)
        return torch.from_numpy(drawn)

    @staticmethod
    def backward(ctx, d):
        dx = cells.pick_backward(ctx.probs, d.contiguous().numpy(), ctx.classes, ctx.unimix)
        return torch.from_numpy(dx), None, None


class _TwoHot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, at, share):
        logits, at, share = logits.detach().contiguous(), at.contiguous(), share.detach().contiguous()
        out, ctx.lse = cells.two_hot(logits.numpy(), at.numpy(), share.numpy())
        ctx.save_for_backward(logits, at, share)
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx, d):
        logits, at, share = ctx.saved_tensors
        arrays = (logits.numpy(), at.numpy(), share.numpy())
        return torch.from_numpy(cells.two_hot_backward(*arrays, ctx.lse, d.contiguous().numpy())), None, None

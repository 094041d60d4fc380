"""Normalisation of features: outputs, gradients and running statistics, compared with NumPy and PyTorch's layers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlox.kernels.rng import Rng
from rlox.nn.critics import norms
from rlox.nn.critics.norms import BatchNorm, LayerNorm, batch_statistics, normed_mlp, scale_units_


def batch(seed=0, shape=(2, 12, 5)):
    x = np.random.default_rng(seed).normal(size=shape) * [1.0, 3.0, 0.1, 10.0, 1.0] + [0.0, 5.0, -1.0, 20.0, 0.0]
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def layer(n=2, seed=1):
    made = BatchNorm(5, n).double()
    values = np.random.default_rng(seed).normal(size=(4, *made.scale.shape))
    with torch.no_grad():
        for part, value in zip((made.scale, made.shift, made.mean), values, strict=False):
            part.copy_(torch.from_numpy(value))
        made.var.copy_(torch.from_numpy(np.exp(values[3])))
    return made


def test_batch_statistics_are_each_networks_own_and_gradients_are_those_of_pytorch():
    x, made = batch(), layer()
    slopes = torch.tensor(np.random.default_rng(2).normal(size=x.shape))
    with batch_statistics(made):
        y = made(x)
    ours = torch.autograd.grad((y * slopes).sum(), [x, made.scale, made.shift])
    theirs = [
        F.batch_norm(x[i], None, None, made.scale[i, 0], made.shift[i, 0], True, eps=norms.EPSILON) for i in (0, 1)
    ]
    expected = torch.stack(theirs)
    assert torch.allclose(y, expected, rtol=1e-12)
    for our, their in zip(
        ours, torch.autograd.grad((expected * slopes).sum(), [x, made.scale, made.shift]), strict=True
    ):
        assert torch.allclose(our, their, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("learn", [True, False])
def test_running_statistics_follow_the_batch_and_are_used_outside(learn):
    x, made = batch(), layer()
    mean, var = made.mean.numpy().copy(), made.var.numpy().copy()
    with batch_statistics(made, learn=learn):
        made(x)
    numbers = x.detach().numpy()
    if learn:
        mean = 0.99 * mean + 0.01 * numbers.mean(1, keepdims=True)
        var = 0.99 * var + 0.01 * numbers.var(1, keepdims=True)
    np.testing.assert_allclose(made.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(made.var, var, rtol=1e-12)
    scale, shift = made.scale.detach().numpy(), made.shift.detach().numpy()
    expected = (numbers - mean) / np.sqrt(var + 1e-3) * scale + shift
    np.testing.assert_allclose(made(x).detach(), expected, rtol=1e-9)
    np.testing.assert_allclose(made(x[1:], slice(1, 2)).detach(), expected[1:], rtol=1e-9)
    np.testing.assert_allclose(made.mean, mean, rtol=1e-12)


def test_renormalisation_is_the_definition_with_its_bounds():
    """Ioffe 2017, algorithm 1, differentiated by autograd with r and d as constants."""
    x, made = batch(), layer()
    with torch.no_grad():
        made.mean.copy_(batch(3).mean(1, keepdim=True))
        made.var.copy_(batch(3).var(1, keepdim=True))
        made.var[0, 0, 0] *= 100.0  # r is at its lower bound
        made.mean[1, 0, 1] += 40.0  # d is at its bound
    running = (made.var + 1e-3).sqrt()
    mean, var = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
    sigma = (var + 1e-3).sqrt()
    r = (sigma / running).detach().clamp(1 / 3, 3)
    d = ((mean - made.mean) / running).detach().clamp(-5, 5)
    assert r.min() == 1 / 3
    assert d.min() == -5
    expected = ((x - mean) / sigma * r + d) * made.scale + made.shift
    slopes = torch.tensor(np.random.default_rng(2).normal(size=x.shape))
    with batch_statistics(made, renormalize=True):
        y = made(x)
    assert torch.allclose(y, expected, rtol=1e-11)
    parts = [x, made.scale, made.shift]
    theirs = torch.autograd.grad((expected * slopes).sum(), parts)
    for our, their in zip(torch.autograd.grad((y * slopes).sum(), parts), theirs, strict=True):
        assert torch.allclose(our, their, rtol=1e-9, atol=1e-11)


def test_layer_normalisation():
    x, made = batch(), LayerNorm(5, 2).double()
    with torch.no_grad():
        made.scale.mul_(2.0)
        made.shift[1] += 3.0
    numbers = x.detach().numpy()
    normal = (numbers - numbers.mean(-1, keepdims=True)) / np.sqrt(numbers.var(-1, keepdims=True) + 1e-5)
    expected = 2.0 * normal + [[[0.0]], [[3.0]]]
    np.testing.assert_allclose(made(x).detach(), expected, rtol=1e-9)
    np.testing.assert_allclose(made(x[1:], slice(1, 2)).detach(), expected[1:], rtol=1e-9)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_a_normalised_perceptron_has_the_layers_in_order(norm, after):
    net = normed_mlp([3, 4, 6, 2], "relu", norm, after, Rng(1))
    kinds = [type(part).__name__ for part in net]
    name = "BatchNorm" if norm == "batch" else "LayerNorm"
    pair = ["ReLU", name] if after else [name, "ReLU"]
    assert kinds == [*([name] if norm == "batch" else []), *["Linear", *pair] * 2, "Linear"]
    biases = [part.bias is not None for part in net if isinstance(part, torch.nn.Linear)]
    assert biases == ([False, False, True] if norm == "batch" and not after else [True] * 3)
    bounds = [
        (part.weight.abs().max().item(), 1 / np.sqrt(part.in_features)) for part in net if hasattr(part, "weight")
    ]
    assert all(0.5 * bound < largest <= bound for largest, bound in bounds)


def test_units_have_the_norm_one():
    net = normed_mlp([3, 4, 2], "relu", "batch", False, Rng(1))
    before = net[-1].weight.detach().clone()
    scale_units_(net)
    first, last = (part for part in net if isinstance(part, torch.nn.Linear))
    np.testing.assert_allclose(first.weight.detach().norm(dim=1), np.ones(4), rtol=1e-6)
    whole = torch.cat([last.weight, last.bias[:, None]], 1).detach()
    np.testing.assert_allclose(whole.norm(dim=1), np.ones(2), rtol=1e-6)
    ratio = last.weight.detach() / before
    np.testing.assert_allclose(ratio, ratio[:, :1].expand(-1, 4), rtol=1e-5)

"""Normalisation of features: outputs, gradients and running statistics, compared with NumPy and PyTorch's layers."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlox import SAC, preset
from rlox.kernels.nn import batch_norm as kernel
from rlox.kernels.rng import Rng
from rlox.nn.critics import norms
from rlox.nn.critics.losses import critic_loss
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


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", [(2, 65, 130), (3, 64, 64), (1, 1, 1), (2, 200, 63), (90, 70)])
def test_the_kernel_computes_the_same_as_pytorch_does_in_float64(shape, renormalize):
    rng = np.random.default_rng(4)
    n_networks, width = (None if len(shape) == 2 else shape[0]), shape[-1]
    exact = BatchNorm(width, n_networks).double()
    with torch.no_grad():
        for part, low in ((exact.scale, 0.5), (exact.shift, -1.0), (exact.mean, 2.0), (exact.var, 0.1)):
            part.copy_(torch.from_numpy(rng.uniform(low, low + 1.0, part.shape)))
        exact.var.view(-1)[0] *= 1e4  # r at its bound
        exact.mean.view(-1)[-1] += 100.0  # d at its bound
    quick = BatchNorm(width, n_networks)
    quick.load_state_dict(exact.state_dict())
    x = torch.from_numpy(rng.normal(3.0, 2.0, shape).astype(np.float32)).transpose(0, -1).clone().transpose(0, -1)
    slopes = torch.from_numpy(rng.normal(size=shape).astype(np.float32))
    answers = []
    for layer in (quick, exact):
        given = x.to(layer.scale.dtype).requires_grad_()
        with batch_statistics(layer, renormalize):
            y = layer(given)
        gradients = torch.autograd.grad((y * slopes).sum(), [given, layer.scale, layer.shift])
        answers.append([y, *gradients, layer.mean, layer.var])
    assert all(one.dtype == torch.float32 for one in answers[0])
    for ours, theirs in zip(*answers, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=2e-4, atol=2e-5)


def test_the_kernel_gives_no_gradient_of_an_input_that_needs_none():
    layer, x = BatchNorm(5), torch.randn(6, 5)
    with batch_statistics(layer):
        y = layer(x)
    (d_scale,) = torch.autograd.grad(y.sum(), [layer.scale])
    np.testing.assert_allclose(d_scale, np.zeros((1, 5)), atol=1e-5)


def test_the_kernel_keeps_nan_in_its_feature():
    x = torch.randn(2, 9, 70)
    x[1, 3, 66] = torch.nan
    layer = BatchNorm(70, 2)
    with batch_statistics(layer, renormalize=True):
        y = layer(x)
    lost = y.isnan().all(1)
    assert lost[1, 66]
    assert lost.sum() == 1
    assert y.isnan().sum() == 9
    assert layer.mean.isnan().sum() == layer.var.isnan().sum() == 1


def test_the_kernel_refuses_other_arrays():
    x, features = np.zeros((2, 4, 3), np.float32), np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"x must be \(N, B, F\) with B >= 1"):
        kernel.normalize(x[:, :0], features, features, None, None, 1e-3, 3.0, 5.0)
    with pytest.raises(TypeError, match="scale must have dtype float32"):
        kernel.normalize(x, features.astype(float), features, None, None, 1e-3, 3.0, 5.0)
    with pytest.raises(ValueError, match=r"shift must have shape \(2, 3\)"):
        kernel.normalize(x, features, features[:1], None, None, 1e-3, 3.0, 5.0)
    with pytest.raises(ValueError, match="most_stretch must be"):
        kernel.normalize(x, features, features, None, None, 1e-3, 0.5, 5.0)
    _, parts = kernel.normalize(x, features, features, None, None, 1e-3, 3.0, 5.0)
    with pytest.raises(ValueError, match=r"d_y must have shape \(2, 4, 3\)"):
        kernel.gradient(x[:, :2], x, parts, True)


@pytest.mark.parametrize("kind", ["batch", "batch_renorm", "layer", "rms"])
def test_under_autocast_statistics_are_those_of_float32(kind):
    """Features come rounded to bfloat16 from the layer before; nothing else may be."""
    made = norms.RMSNorm(5, 2) if kind == "rms" else norms.make_norm(kind, 5, 2)
    plain = copy.deepcopy(made)
    rounded = batch().detach().to(torch.bfloat16)
    x, exact = rounded.clone().requires_grad_(), rounded.float().requires_grad_()
    for part, given, is_cast in ((made, x, True), (plain, exact, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast), batch_statistics(part, kind == "batch_renorm"):
            y = part(given)
        y.float().square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            part.outside = part(given.detach())
    assert torch.allclose(made.outside.float(), plain.outside, rtol=1e-2 if kind == "layer" else 1e-6, atol=1e-2)
    assert torch.allclose(x.grad.float(), exact.grad, rtol=2e-2, atol=2e-2)
    for (name, ours), theirs in zip(made.named_buffers(), plain.buffers(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.allclose(ours, theirs, rtol=1e-6), name


@pytest.mark.parametrize("name", ["crossq", "xqc", "flashsac"])
def test_losses_of_presets_under_autocast_are_near_those_of_float32(name):
    options = {**preset(name), "learning_starts": 20, "batch_size": 32, "buffer_size": 200, "seed": 1}
    # With probabilities of bins, PyTorch's autocast differs between the CPU and GPUs.
    options |= {"hidden_sizes": [16], "critic_hidden_sizes": [16], "critic_head": "mean"}
    agent = SAC("Pendulum-v1", **options)
    agent.train(40)
    batch, noise = agent.sample(), torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
    actions, losses = agent.policy.to_unit(batch.actions), []
    for is_cast in (False, True):
        critics = copy.deepcopy(agent.critics)
        target = critics if agent.target is agent.critics else copy.deepcopy(agent.target)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss, _ = critic_loss(
                critics, target, batch.obs, actions, batch.rewards, batch.next_obs, torch.tanh(noise), batch.discounts,
                None, None, None, False,
            )  # fmt: skip
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in critics.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=0.1)

"""Linear layers of ensembles: the kernel beside PyTorch in float64, and when it is used."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rlox.kernels.nn import ensemble_layers as kernel
from rlox.nn.critics import layers
from rlox.nn.critics.ensemble import CriticEnsemble
from rlox.nn.critics.layers import linear

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch):
    """Return the numbers of outputs of the layers that the kernel computed."""
    made = []

    class Counting:
        gradient = staticmethod(kernel.gradient)

        @staticmethod
        def forward(x, weight, bias, relu):
            made.append(weight.shape[-1])
            return kernel.forward(x, weight, bias, relu)

    monkeypatch.setattr(layers, "kernel", Counting)
    return made


def arrays(n, rows, n_in, n_out, dtype=torch.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((n, rows, n_in), (n, n_in, n_out), (n, 1, n_out), (n, rows, n_out))
    return [torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(dtype) for shape in shapes]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(2, 65, 23, 64), (3, 7, 5, 17), (1, 1, 1, 1), (2, 40, 64, 1), (2, 130, 48, 101)])
def test_the_kernel_computes_the_same_as_pytorch_does_in_float64(shape, biased, relu, calls):
    answers = []
    for dtype in (torch.float32, torch.float64):
        x, weight, bias, slopes = arrays(*shape, dtype)
        given = [x.requires_grad_(), weight.requires_grad_()] + ([bias.requires_grad_()] if biased else [])
        y = linear(x, weight, bias if biased else None, relu)
        answers.append([y, *torch.autograd.grad((y * slopes).sum(), given)])
    assert len(calls) == (biased or not relu)  # float64 never, and ReLU needs a bias
    assert all(one.dtype == torch.float32 for one in answers[0])
    if relu:
        assert (answers[1][0] == 0).any() or shape == (1, 1, 1, 1)
    for ours, theirs in zip(*answers, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-4)


def test_strided_inputs_and_gradients_are_read_rightly(calls):
    x, weight, bias, _ = arrays(2, 6, 5, 18)
    wide = x.transpose(1, 2).contiguous().transpose(1, 2)
    shared = x[:1].expand(2, -1, -1).requires_grad_()
    np.testing.assert_array_equal(linear(wide, weight, bias), linear(x, weight, bias))
    y = linear(shared, weight, bias)
    (ours,) = torch.autograd.grad(y.sum(), [shared])  # its gradient is expanded, too
    np.testing.assert_allclose(ours, weight.sum(-1).unsqueeze(1).expand(-1, 6, -1), rtol=1e-5, atol=1e-5)
    assert calls == [18, 18, 18]


def test_nan_stays_and_relu_gives_no_gradient_where_it_cut():
    x, weight, bias, _ = arrays(1, 4, 3, 16)
    x[0, 2, 1] = torch.nan
    assert linear(x, weight, bias, relu=True).isnan().sum() == 16
    bias = torch.full((1, 1, 16), -1e3, requires_grad=True)
    y = linear(torch.ones(1, 4, 3), weight, bias, relu=True)
    assert (y == 0).all()
    (d_bias,) = torch.autograd.grad(y.sum(), [bias])
    assert (d_bias == 0).all()


def test_what_needs_no_gradient_gets_none(calls):
    x, weight, bias, _ = arrays(2, 6, 5, 18)
    (d_bias,) = torch.autograd.grad(linear(x, weight, bias.requires_grad_()).sum(), [bias])
    np.testing.assert_allclose(d_bias, np.full((2, 1, 18), 6.0))
    d_x, d_weight, _ = kernel.gradient(np.ones((2, 6, 18), np.float32), x.numpy(), weight.numpy(), None, False, False)
    assert d_x is d_weight is None


def test_the_kernel_is_not_used_where_pytorch_was_told_how_to_compute(calls):
    x, weight, bias, _ = arrays(2, 6, 5, 18)
    torch.set_num_threads(2)
    linear(x, weight, bias)
    torch.set_num_threads(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    torch.set_float32_matmul_precision("medium")
    try:
        linear(x, weight, bias)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert calls == []
    linear(x, weight, bias)
    assert calls == [18]
    CriticEnsemble(5, 2, [24])(torch.randn(9, 5), torch.randn(9, 2))  # PyTorch's answer to the native updates
    assert calls == [18]


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("after", [False, True])
def test_an_ensemble_computes_all_of_its_layers_by_the_kernel(norm, after, calls):
    made = CriticEnsemble(5, 2, [24, 17], "relu", n_critics=3, norm=norm, norm_after=after)
    exact = CriticEnsemble(5, 2, [24, 17], "relu", n_critics=3, norm=norm, norm_after=after).double()
    exact.load_state_dict(made.state_dict())
    obs, actions = torch.randn(9, 5), torch.randn(9, 2)
    ours, theirs = (net(obs.to(dtype), actions.to(dtype)) for net, dtype in ((made, obs.dtype), (exact, torch.float64)))
    assert calls == [24, 17, 1]
    np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_the_kernel_refuses_other_arrays():
    x, weight, bias, d = (part.numpy() for part in arrays(2, 4, 3, 16))
    bias = bias[:, 0]
    with pytest.raises(ValueError, match=r"x must be \(N, B, I\) and weight \(N, I, O\), none of them empty"):
        kernel.forward(x[:, :0], weight, bias, False)
    with pytest.raises(TypeError, match="weight must have dtype float32"):
        kernel.forward(x, weight.astype(float), bias, False)
    with pytest.raises(ValueError, match=r"weight must have shape \(2, 3, 16\)"):
        kernel.forward(x, weight[:, :2], bias, False)
    with pytest.raises(ValueError, match=r"bias must have shape \(2, 16\)"):
        kernel.forward(x, weight, bias[:1], False)
    with pytest.raises(ValueError, match="relu needs a bias"):
        kernel.forward(x, weight, None, True)
    with pytest.raises(ValueError, match=r"d_y must have shape \(2, 4, 16\)"):
        kernel.gradient(d[:, :2], x, weight, None, True, True)
    with pytest.raises(ValueError, match=r"y must have shape \(2, 4, 16\)"):
        kernel.gradient(d, x, weight, d[:, :2], True, True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library's settings are those of glibc")
def test_a_training_keeps_freed_memory():
    code = (
        "import resource, torch\n"
        "from rlox.kernels.memory import keep_freed\n"
        "keep_freed()\n"
        "def faults(n):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(n):\n"
        "        parts = [torch.ones(1 << 20) for _ in range(4)]\n"
        "        del parts\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "faults(2)\n"
        "print(faults(50))\n"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(again.stdout) < 20_000  # without the setting 4 MiB come back 200 times, 1,024 pages each

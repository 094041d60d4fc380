"""The kernel of LSTM and GRU against the loop in PyTorch in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.kernels.nn import recurrent
from rlox.kernels.rng import Rng
from rlox.nn.memory import Memory, loop_over_steps, run_layer

KINDS = ("lstm", "gru")
GATES = {"lstm": 4, "gru": 3}


def arguments(kind, steps, n, n_inputs, size, seed=0, share_first=0.2, share_running=0.7):
    """Return random arguments of `run_layer` after `kind`, as float32 tensors."""
    draw = torch.Generator().manual_seed(seed)
    states, gates = size * (2 if kind == "lstm" else 1), GATES[kind] * size
    x, state = torch.randn(steps, n, n_inputs, generator=draw), torch.randn(n, states, generator=draw)
    is_first = torch.rand(steps, n, generator=draw) < share_first
    running = None if share_running is None else torch.rand(steps, n, generator=draw) < share_running
    shapes = ((gates, n_inputs), (gates, size), (gates,), (gates,))
    return [x, state, is_first, running, *(size**-0.5 * torch.randn(shape, generator=draw) for shape in shapes)]


def gradients(function, kind, given, dtype):
    """Return outputs, the last state, and the gradients of a random function of both with respect to all inputs."""
    given = [
        one if one is None or one.dtype == torch.bool else one.to(dtype, copy=True).requires_grad_() for one in given
    ]
    outputs, last = function(kind, *given)
    draw = torch.Generator().manual_seed(99)
    by = [torch.randn(one.shape, generator=draw).to(dtype) for one in (outputs, last)]
    wanted = [one for one in given if one is not None and one.requires_grad]
    return [outputs, last, *torch.autograd.grad((outputs, last), wanted, by)]


def assert_equal_to_loop(kind, given):
    names = ("outputs", "last", "x", "state", "w_ih", "w_hh", "b_ih", "b_hh")
    results = gradients(run_layer, kind, given, torch.float32), gradients(loop_over_steps, kind, given, torch.float64)
    for name, one, other in zip(names, *results, strict=True):
        assert one.dtype == torch.float32
        error = (one.double() - other).abs().max() / (1.0 + other.abs().max())
        assert error < 3e-6, (name, error)
    with torch.no_grad():
        outputs, last = run_layer(kind, *given)
    torch.testing.assert_close(outputs.double(), results[1][0], atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(last.double(), results[1][1], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 12), n=st.integers(1, 15), n_inputs=st.integers(1, 40), size=st.integers(1, 40),
    seed=st.integers(0, 1000), share_first=st.sampled_from([0.0, 0.3, 1.0]),
    share_running=st.sampled_from([None, 0.0, 0.5, 1.0]),
)  # fmt: skip
def test_any_sequences(kind, steps, n, n_inputs, size, seed, share_first, share_running):
    assert_equal_to_loop(kind, arguments(kind, steps, n, n_inputs, size, seed, share_first, share_running))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "n", "n_inputs", "size"), [(1, 1, 3, 64), (70, 9, 20, 72), (3, 300, 64, 16)])
def test_ends_of_sequences(kind, steps, n, n_inputs, size):
    given = arguments(kind, steps, n, n_inputs, size)
    given[2][0], given[2][-1], given[3][0, ::2], given[3][-1, ::3] = True, True, False, False
    assert_equal_to_loop(kind, given)
    given[2][:] = False
    assert_equal_to_loop(kind, given)


@pytest.mark.parametrize("kind", KINDS)
def test_saturated_gates_and_states_are_finite(kind):
    given = arguments(kind, 5, 3, 4, 8)
    given[0] *= 1e4
    given[1] *= 1e4
    assert all(one.isfinite().all() for one in gradients(run_layer, kind, given, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_stay_in_their_row(kind):
    given = arguments(kind, 4, 7, 5, 16, share_first=0.0, share_running=None)
    outputs, last = run_layer(kind, *given)
    given[0][1, 2] = torch.nan
    broken, broken_last = run_layer(kind, *given)
    assert broken[1:, 2].isnan().all()
    assert broken_last[2].isnan().all()
    others = [i for i in range(7) if i != 2]
    assert torch.equal(outputs[:, others], broken[:, others])
    assert torch.equal(last[others], broken_last[others])
    given[2][2, 2] = True  # a beginning forgets them
    assert run_layer(kind, *given)[0][2:].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(kind):
    given = arguments(kind, 6, 13, 10, 40)
    every = gradients(run_layer, kind, given, torch.float32)
    for n in (1, 2, 5, 6, 7):
        for steps in (1, 6):
            part = [
                one if one is None or i > 3 else one[:n] if i == 1 else one[:steps, :n] for i, one in enumerate(given)
            ]
            with torch.no_grad():
                outputs, last = run_layer(kind, *part)
                if steps == 1:  # maybe by another function, since packed weights would not pay
                    torch.testing.assert_close(outputs, every[0][:1, :n], atol=2e-6, rtol=0)
                    outputs, last = torch.from_numpy(recurrent.run(kind, *(one.numpy() for one in part))[0]), None
            assert torch.equal(outputs, every[0][:steps, :n])
            assert last is None or torch.equal(last, every[1][:n])
    first = [one[:1].numpy() if i in (0, 2, 3) else one.numpy() for i, one in enumerate(given)]
    outputs, _ = recurrent.step(kind, *first)
    for n in (1, 2, 7):
        part = [one[:, :n] if i in (0, 2, 3) else one[:n] if i == 1 else one for i, one in enumerate(first)]
        np.testing.assert_array_equal(recurrent.step(kind, *part)[0], outputs[:, :n])


@pytest.mark.parametrize("kind", KINDS)
def test_two_calls_give_the_same_bits(kind):
    given = arguments(kind, 20, 5, 7, 24)
    one, other = (gradients(run_layer, kind, given, torch.float32) for _ in range(2))
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", KINDS)
def test_strided_tensors(kind):
    given = arguments(kind, 6, 4, 5, 8)
    expected = gradients(run_layer, kind, given, torch.float32)
    strided = [one.mT.contiguous().mT if one is not None and one.ndim > 1 else one for one in given]
    assert not any(one.is_contiguous() for one in strided[:6])
    for one, other in zip(gradients(run_layer, kind, strided, torch.float32), expected, strict=True):
        assert torch.equal(one, other)
    x, *rest = (one if one is None or one.dtype == torch.bool else one.clone().requires_grad_() for one in given)
    sums = torch.autograd.grad(run_layer(kind, x, *rest)[0].sum(), x)[0]  # an expanded gradient, and none of the state
    x64, *rest = (one if one is None or one.dtype == torch.bool else one.double().requires_grad_() for one in given)
    expected = torch.autograd.grad(loop_over_steps(kind, x64, *rest)[0].sum(), x64)[0]
    torch.testing.assert_close(sums.double(), expected, atol=1e-5, rtol=1e-5)


def test_only_what_needs_a_gradient_gets_one_and_twice_if_asked():
    memory = Memory("gru", 5, 8, 2, False, Rng(0))
    x, state = torch.randn(4, 3, 5), torch.zeros(3, memory.state_dim)
    outputs, _ = memory(x, state, torch.zeros(4, 3, dtype=torch.bool))
    first = torch.autograd.grad(outputs.square().sum(), list(memory.parameters()), retain_graph=True)
    again = torch.autograd.grad(outputs.square().sum(), list(memory.parameters()))
    assert all(map(torch.equal, first, again))
    memory.requires_grad_(False)
    outputs, _ = memory(x.requires_grad_(), state, torch.zeros(4, 3, dtype=torch.bool))
    outputs.sum().backward()
    assert x.grad.any()
    assert all(p.grad is None for p in memory.parameters())


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, np.zeros((2, 3), np.float32), r"x must be an array \(T, N, D\) that is not empty, got \(2, 3\)"),
        (0, np.zeros((0, 3, 4), np.float32), r"x must be an array \(T, N, D\) that is not empty, got \(0, 3, 4\)"),
        (0, np.zeros((1, 3, 5), np.float32), r"w_ih must have shape \(32, 5\), got \(32, 4\)"),
        (0, np.zeros((1, 3, 4)), "x must have dtype float32, got float64"),
        (1, np.zeros((3, 8), np.float32), r"state must have shape \(3, 16\), got \(3, 8\)"),
        (2, np.zeros((1, 3), np.uint8), "is_first must have dtype bool, got uint8"),
        (3, np.zeros((1, 2), bool), r"running must have shape \(1, 3\), got \(1, 2\)"),
        (4, [[0.0]], "w_ih must be a NumPy array, got list"),
        (5, np.zeros((32, 0), np.float32), r"w_hh must have at least one column, got \(32, 0\)"),
        (5, np.zeros((24, 8), np.float32), r"w_hh must have shape \(32, 8\), got \(24, 8\)"),
        (6, np.zeros((32, 1), np.float32), r"b_ih must have shape \(32,\), got \(32, 1\)"),
        (7, np.zeros(24, np.float32), r"b_hh must have shape \(32,\), got \(24,\)"),
    ],
)
def test_wrong_arguments_are_named(at, wrong, message):
    given = [one.numpy() for one in arguments("lstm", 1, 3, 4, 8)]
    given[at] = wrong
    for function in (recurrent.run, recurrent.step):
        with pytest.raises((TypeError, ValueError), match=f"recurrent.{function.__name__}: {message}"):
            function("lstm", *given)


def test_wrong_kinds_and_gradients_are_named():
    given = [one.numpy() for one in arguments("gru", 2, 3, 4, 8)]
    with pytest.raises(ValueError, match=r"recurrent.run: kind must be lstm or gru, got 'rnn'"):
        recurrent.run("rnn", *given)
    with pytest.raises(ValueError, match=r"recurrent.step: x must have shape \(1, 3, 4\), got \(2, 3, 4\)"):
        recurrent.step("gru", *given)
    outputs, last, kept = recurrent.run("gru", *given)
    x, _, is_first, running, w_ih, w_hh, *_ = given
    with pytest.raises(ValueError, match=r"recurrent.go_back: kept must have shape"):
        recurrent.go_back("gru", x, is_first, running, w_ih, w_hh, kept[1:], outputs, last)
    with pytest.raises(ValueError, match=r"recurrent.go_back: d_outputs must have shape \(2, 3, 8\), got \(3, 8\)"):
        recurrent.go_back("gru", x, is_first, running, w_ih, w_hh, kept, last, last)
    with pytest.raises(ValueError, match=r"recurrent.go_back: d_last must have shape \(3, 8\), got \(2, 3, 8\)"):
        recurrent.go_back("gru", x, is_first, running, w_ih, w_hh, kept, outputs, outputs)
    assert recurrent.go_back("gru", x, is_first, running, w_ih, w_hh, kept, None, None, False, False)[0] is None

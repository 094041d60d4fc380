"""The kernel of networks with LSTM and GRU against the modules and the loop in PyTorch in float64."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlox.kernels.nn.recurrent import RecurrentNetwork
from rlox.kernels.rng import Rng
from rlox.nn.acting import Inputs, acting_policy
from rlox.nn.memory import Memory, MemoryNetwork, Sequences, loop_over_steps
from rlox.nn.policies import ContinuousPolicy, DiscretePolicy, MultiDiscretePolicy, mask_outputs, mlp

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


def run_layer(kind, x, state, is_first, running, *weights):
    """Run one layer by the kernel, with the arguments of `loop_over_steps`."""
    memory = Memory(kind, x.shape[2], weights[1].shape[1], 1, False, Rng(0))
    named = dict(zip(memory.state_dict(), weights, strict=True))
    return torch.func.functional_call(memory, named, (x, state, is_first, running))


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
    given = arguments(kind, 6, 13, 10, 40, share_running=None)
    every = gradients(run_layer, kind, given, torch.float32)
    for n in (1, 2, 5, 6, 7):
        for steps in (1, 6):
            part = [
                one if one is None or i > 3 else one[:n] if i == 1 else one[:steps, :n] for i, one in enumerate(given)
            ]
            with torch.no_grad():
                outputs, last = run_layer(kind, *part)
                if steps == 1 and part[3] is None and n < 9:  # with weights that are not packed
                    torch.testing.assert_close(outputs, every[0][:1, :n], atol=2e-6, rtol=0)
                    continue
            assert torch.equal(outputs, every[0][:steps, :n])
            assert torch.equal(last, run_layer(kind, *(given if n == 13 else part))[1][:n])


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


def make_network(kind, hidden, activation, n_inputs, size, n_layers, n_outputs):
    widths, trunk = [n_inputs, *hidden], nn.Sequential()
    if hidden:
        trunk = nn.Sequential(
            *mlp(widths, activation, 1.0, False, Rng(1)), {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]()
        )
    memory = Memory(kind, widths[-1], size, n_layers, False, Rng(2))
    return MemoryNetwork(trunk, memory, mlp([size, n_outputs], "tanh", 1.0, False, Rng(3)))


def network_gradients(network, x, state, is_first, running, dtype):
    x, state = x.to(dtype, copy=True).requires_grad_(), state.to(dtype, copy=True).requires_grad_()
    outputs, last = network.follow(x, Sequences(state, is_first, running))
    draw = torch.Generator().manual_seed(99)
    by = [torch.randn(one.shape, generator=draw).to(dtype) for one in (outputs, last)]
    return [outputs, last, *torch.autograd.grad((outputs, last), [x, state, *network.parameters()], by)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    hidden=st.lists(st.integers(1, 40), max_size=3), activation=st.sampled_from(["tanh", "relu"]),
    n_inputs=st.integers(1, 20), size=st.integers(1, 40), n_layers=st.integers(1, 3), n_outputs=st.integers(1, 20),
    steps=st.integers(1, 8), n=st.integers(1, 80), share_running=st.sampled_from([None, 0.5]),
)  # fmt: skip
def test_any_network(kind, hidden, activation, n_inputs, size, n_layers, n_outputs, steps, n, share_running):
    network = make_network(kind, hidden, activation, n_inputs, size, n_layers, n_outputs)
    exact, draw = copy.deepcopy(network).double(), torch.Generator().manual_seed(steps)
    x, state = torch.randn(steps * n, n_inputs, generator=draw), torch.randn(n, network.state_dim, generator=draw)
    flags = [torch.rand(steps * n, generator=draw) < share for share in (0.2, share_running or 1.0)]
    if share_running is None:
        flags[1] = None
    results = network_gradients(network, x, state, *flags, torch.float32)
    expected = network_gradients(exact, x, state, *flags, torch.float64)
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape
        if one.numel():
            assert (one.double() - other).abs().max() < 1e-5 * (1.0 + other.abs().max())
    with torch.no_grad():
        outputs, last = network.follow(x, Sequences(state, *flags))
    torch.testing.assert_close(outputs.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last.double(), expected[1], atol=1e-5, rtol=1e-5)


def test_what_else_a_network_is_made_of_is_computed_by_its_modules():
    network = make_network("lstm", [6], "tanh", 3, 8, 1, 2)
    x, sequences = torch.randn(4, 3), Sequences(torch.zeros(2, 16), torch.zeros(4, dtype=torch.bool))
    expected, called = network.follow(x, sequences)[0], []
    handle = network.trunk[0].register_forward_hook(lambda *_: called.append(1))
    assert network.pack() is None
    torch.testing.assert_close(network.follow(x, sequences)[0], expected)
    assert called
    handle.remove()
    assert network.pack() is not None
    network.trunk[1] = nn.Sigmoid()
    assert (network.follow(x, sequences)[0] - expected).abs().max() > 1e-3
    for trunk in (nn.Sequential(nn.Linear(3, 6, bias=False), nn.Tanh()), nn.Linear(3, 6)):
        network.trunk = trunk
        expected = network.head(
            network.memory(trunk(x).view(2, 2, 6), sequences.state, sequences.is_first.view(2, 2))[0]
        )
        torch.testing.assert_close(network.follow(x, sequences)[0], expected.flatten(0, 1))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        network.follow(torch.randn(4, 5), sequences)


def test_a_weight_that_changes_before_the_backward_pass_is_an_error():
    network = make_network("gru", [4], "relu", 3, 8, 1, 2)
    outputs, _ = network.follow(torch.randn(2, 3), Sequences(torch.zeros(2, 8), torch.zeros(2, dtype=torch.bool)))
    with torch.no_grad():
        network.trunk[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


POLICIES = {
    "discrete": lambda **more: DiscretePolicy(5, 4, [12], "tanh", rng=Rng(4), **more),
    "components": lambda **more: MultiDiscretePolicy(5, [3, 2], [12, 20], "relu", rng=Rng(4), **more),
    "continuous": lambda **more: ContinuousPolicy(5, 3, [], "tanh", -0.5, rng=Rng(4), **more),
}


@pytest.mark.parametrize("n", [1, 11])
@pytest.mark.parametrize("memory", [("lstm", 16, 2, None), ("gru", 9, 1, None)])
@pytest.mark.parametrize("kind", POLICIES)
def test_acting_equals_pytorch_over_episodes(kind, memory, n):
    policy, rng = POLICIES[kind](memory=memory), np.random.default_rng(7)
    acting, exact = acting_policy(policy), copy.deepcopy(policy).double()
    state, own = acting.initial(n), torch.zeros(n, policy.state_dim, dtype=torch.float64)
    is_first, size = np.ones(n, bool), policy.actor.state_dim
    with acting.context(), torch.no_grad():
        for _ in range(30):
            obs = rng.normal(size=(n, 5)).astype(np.float32)
            noise = np.empty(acting.noise_shape(n), np.float32)
            acting.fill_noise(Rng(int(rng.integers(100))), noise)
            mask = None
            if kind != "continuous":
                mask = rng.random(noise.shape) < 0.5
                mask[:, [0, -1]] = True
            actions, state = acting.act(Inputs(obs, mask, state, is_first), noise)
            first, x = torch.from_numpy(is_first), torch.from_numpy(obs).double()
            outputs, _, own = exact.follow(x, Sequences(own, first))
            outputs = outputs if mask is None else mask_outputs(outputs, torch.from_numpy(mask))
            expected = exact.pick(outputs, torch.from_numpy(noise).double()).numpy()
            np.testing.assert_allclose(actions, expected, atol=1e-5)
            np.testing.assert_allclose(state, own, atol=1e-5)
            modes, after = acting.mode(Inputs(obs, mask, state, is_first))
            with_zeros = np.zeros_like(is_first)
            is_first = rng.random(n) < 0.2
        assert modes.shape == actions.shape
        assert after.shape == state.shape
        policy.actor.head[0].bias.add_(1.0)  # not seen before the next context
        before = acting.act(Inputs(obs, None, state, with_zeros), noise)[1]
    outside = acting.act(Inputs(obs, None, state, with_zeros), noise)[1]
    np.testing.assert_allclose(outside, before, atol=1e-5)
    assert not np.array_equal(outside[:, :size], state[:, :size])


def test_a_pickle_has_the_shape():
    kernel = RecurrentNetwork("gru", (3, 4), 5, 2, 1, "relu")
    for other in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel)):
        assert other.shape == kernel.shape == ("gru", (3, 4), 5, 2, 1, "relu")
        assert (other.n_inputs, other.state_dim) == (3, 10)
    assert kernel.n_parameters == 4 * 4 + 15 * (4 + 5 + 2) + 15 * (5 + 5 + 2) + 6


def kernel_arguments():
    """Return a kernel, its parameters, and the other arguments of `forward` for two steps of three sequences."""
    network = make_network("lstm", [6], "tanh", 4, 8, 1, 2)
    x, state, flags = np.ones((6, 4), np.float32), np.zeros((3, 16), np.float32), np.zeros(6, bool)
    kernel = RecurrentNetwork("lstm", (4, 6), 8, 1, 2, "tanh")
    return kernel, [p.detach().numpy() for p in network.parameters()], [x, state, flags, flags]


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, np.zeros(6, np.float32), r"x must be an array of two dimensions that is not empty, got \(6,\)"),
        (0, np.zeros((0, 4), np.float32), r"x must be an array of two dimensions that is not empty, got \(0, 4\)"),
        (0, np.zeros((4, 4), np.float32), "x must have as many rows for each of 3 sequences, got 4"),
        (0, np.zeros((6, 5), np.float32), r"x must have shape \(6, 4\), got \(6, 5\)"),
        (0, np.zeros((6, 4)), "x must have dtype float32, got float64"),
        (1, np.zeros((3, 8), np.float32), r"state must have shape \(3, 16\), got \(3, 8\)"),
        (2, np.zeros(6, np.uint8), "is_first must have dtype bool, got uint8"),
        (3, np.zeros(3, bool), r"running must have shape \(6,\), got \(3,\)"),
    ],
)
def test_wrong_arguments_are_named(at, wrong, message):
    kernel, parameters, given = kernel_arguments()
    given[at] = wrong
    with pytest.raises((TypeError, ValueError), match=f"RecurrentNetwork.forward: {message}"):
        kernel.forward(parameters, *given)


def test_wrong_parameters_gradients_and_shapes_are_named():
    kernel, parameters, given = kernel_arguments()
    outputs, last, trace = kernel.forward(parameters, *given)
    assert outputs.shape == (0, 2)
    for wrong, message in (
        (parameters[1:], "there must be 8 parameters, got 7"),
        ([*parameters[:2], parameters[3], *parameters[3:]], r"weight_ih_l0 must have shape \(32, 6\), got \(32, 8\)"),
        ([[0.0], *parameters[1:]], "trunk.0.weight must be a NumPy array, got list"),
    ):
        for call in (lambda w: kernel.forward(w, *given), kernel.pack, lambda w: kernel.backward(w, trace, None, None)):
            with pytest.raises((TypeError, ValueError), match=message):
                call(wrong)
    with pytest.raises(ValueError, match=r"d_outputs must have shape \(0, 2\), got \(3, 16\)"):
        kernel.backward(parameters, trace, last, None)
    with pytest.raises(ValueError, match=r"d_last must have shape \(3, 16\), got \(0, 2\)"):
        kernel.backward(parameters, trace, None, outputs)
    d_x, d_state, gradient = kernel.backward(parameters, trace, None, last, False, False)
    assert d_x is None
    assert gradient is None
    assert d_state.shape == (3, 16)
    other = RecurrentNetwork("lstm", (4, 6), 8, 1, 3)
    with pytest.raises(ValueError, match="trace must be one of a network"):
        other.backward([*parameters[:6], np.zeros((3, 8), np.float32), np.zeros(3, np.float32)], trace, None, None)
    for shape, message in (
        (("rnn", (3,), 4, 1), "kind must be lstm or gru, got 'rnn'"),
        (("gru", (3,), 4, 1, 0, "elu"), "activation must be tanh or relu, got 'elu'"),
        (("gru", (3, 0), 4, 1), "sizes must be >= 1"),
        (("gru", (), 4, 1), "sizes must be >= 1"),
        (("gru", (3,) * 11, 4, 1), "sizes must be >= 1 and widths at most 10"),
    ):
        with pytest.raises(ValueError, match=f"RecurrentNetwork: {message}"):
            RecurrentNetwork(*shape)


def test_wrong_steps_are_named():
    kernel, parameters, _ = kernel_arguments()
    x, state, first = np.ones((3, 4), np.float32), np.zeros((3, 20), np.float32), np.zeros(3, bool)
    after = np.zeros_like(state)
    with pytest.raises(ValueError, match="step: parameters must be given or packed before"):
        kernel.step(x, state, first, after)
    kernel.pack(parameters)
    expected = kernel.step(x, state, first, after, 4)
    assert not after[:, :4].any()
    assert after[:, 4:].all()
    np.testing.assert_allclose(kernel.step(x, state, first, after, 4, parameters), expected, atol=1e-6)
    kernel.pack(parameters)
    for arguments_, message in (
        ((x, state, first, after, 5), "state must have 16 columns from 5 on, got 20 in all"),
        ((x, state, first, after, -1), "state must have 16 columns from -1 on, got 20 in all"),
        ((x, state, first, state), "after must be contiguous, writeable and another array than state"),
        ((x, state, first, after[:, ::-1]), "after must be contiguous, writeable and another array than state"),
        ((x, state, first, after[:2]), r"after must have shape \(3, 20\), got \(2, 20\)"),
        ((x[:2], state, first, after), r"state must have shape \(2, 20\), got \(3, 20\)"),
    ):
        with pytest.raises(ValueError, match=f"RecurrentNetwork.step: {message}"):
            kernel.step(*arguments_)


def test_a_pass_with_other_parameters_ends_the_packed_ones():
    kernel, parameters, given = kernel_arguments()
    step = np.ones((3, 4), np.float32), np.zeros((3, 16), np.float32), np.zeros(3, bool), np.empty((3, 16), np.float32)
    kernel.pack(parameters)
    kernel.step(*step)
    kernel.forward([2 * p for p in parameters], *given)
    with pytest.raises(ValueError, match=r"RecurrentNetwork.step: parameters must be given or packed before"):
        kernel.step(*step)

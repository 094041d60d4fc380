"""Networks with a memory against PyTorch's LSTM and GRU."""

import numpy as np
import pytest
import torch
from torch import nn

from rlox.kernels.rng import Rng
from rlox.nn.memory import Memory, MemoryNetwork, Sequences

MODULES = {"lstm": nn.LSTM, "gru": nn.GRU}
D, SIZE = 5, 6


def make_memory(kind, n_layers=1, size=SIZE, n_inputs=D, orthogonal=False, dtype=torch.float64):
    return Memory(kind, n_inputs, size, n_layers, orthogonal, Rng(3)).to(dtype)


def draw(memory, steps, n, seed=0):
    """Return random inputs (T, N, D) and a random state (N, S), both with a gradient, in the memory's data type."""
    generator, dtype = torch.Generator().manual_seed(seed), memory.weight_ih_l0.dtype
    shapes = (steps, n, memory.n_inputs), (n, memory.state_dim)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def no_flags(steps, n):
    return torch.zeros(steps, n, dtype=torch.bool)


def run_pytorch(memory, x, state):
    """Return what PyTorch's module with the same weights computes for one sequence (T, D) and its state (S,)."""
    module = MODULES[memory.kind](memory.n_inputs, memory.size, memory.n_layers, dtype=x.dtype)
    parts = state.view(memory.n_layers, -1, memory.size).unbind(1)
    arguments = x, tuple(parts) if memory.kind == "lstm" else parts[0]
    output, after = torch.func.functional_call(module, dict(memory.named_parameters()), arguments)
    return output, torch.stack(after if memory.kind == "lstm" else (after,), 1).flatten()


def run_one_by_one(memory, x, state, is_first, running):
    """Return outputs and states from PyTorch's module, on the running steps between two beginnings at a time."""
    outputs, states = torch.zeros(*x.shape[:2], memory.size, dtype=x.dtype), []
    for i in range(x.shape[1]):
        own = state[i]
        for t in range(len(x)):
            if is_first[t, i]:
                own = torch.zeros_like(own)
            if running[t, i]:
                outputs[t, i], own = (part.view(-1) for part in run_pytorch(memory, x[t : t + 1, i], own))
        states.append(own)
    return outputs, torch.stack(states)


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("kind", MODULES)
def test_outputs_states_and_gradients_are_those_of_pytorch(kind, n_layers):
    memory = make_memory(kind, n_layers)
    module = MODULES[kind](D, SIZE, n_layers, dtype=torch.float64)
    module.load_state_dict(memory.state_dict())
    assert [name for name, _ in memory.named_parameters()] == [name for name, _ in module.named_parameters()]
    x, state = draw(memory, 7, 3)
    output, after = memory(x, state, no_flags(7, 3))
    parts = [part.contiguous() for part in state.view(3, n_layers, -1, SIZE).permute(2, 1, 0, 3)]
    expected, expected_after = module(x, tuple(parts) if kind == "lstm" else parts[0])
    expected_after = torch.stack(expected_after if kind == "lstm" else (expected_after,)).permute(2, 1, 0, 3).flatten(1)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(after, expected_after)
    scale = torch.randn(output.shape, dtype=torch.float64)
    got = torch.autograd.grad((output * scale).sum() + after.square().sum(), [x, state, *memory.parameters()])
    loss = (expected * scale).sum() + expected_after.square().sum()
    for one, other in zip(got, torch.autograd.grad(loss, [x, state, *module.parameters()]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("kind", MODULES)
def test_beginnings_and_pauses_cut_a_sequence_into_pieces(kind, n_layers):
    memory, generator = make_memory(kind, n_layers), torch.Generator().manual_seed(5)
    x, state = draw(memory, 12, 6)
    is_first = torch.rand(12, 6, generator=generator) < 0.2
    running = torch.rand(12, 6, generator=generator) < 0.7
    is_first[0, 0] = is_first[-1, 1] = is_first[0, 2] = is_first[-1, 2] = True
    running[0, 3], running[-1, 4], running[:, 5], running[:, 0] = False, False, False, True
    is_first[:, 5] = False
    output, after = memory(x, state, is_first, running)
    expected, expected_after = run_one_by_one(memory, x, state, is_first, running)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(after, expected_after)
    assert torch.equal(after[5], state[5])
    got = torch.autograd.grad(output.square().sum() + after.sum(), [x, state, *memory.parameters()])
    wanted = torch.autograd.grad(expected.square().sum() + expected_after.sum(), [x, state, *memory.parameters()])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert not got[1][0].any()  # no gradient passes a beginning


@pytest.mark.parametrize("kind", MODULES)
def test_steps_one_at_a_time_are_the_steps_of_a_sequence(kind):
    memory = make_memory(kind, 2)
    x, state = draw(memory, 9, 2)
    is_first = torch.zeros(9, 2, dtype=torch.bool)
    is_first[4, 1] = True
    output, after = memory(x, state, is_first)
    for t in range(9):
        one, state = memory(x[t : t + 1], state, is_first[t : t + 1])
        torch.testing.assert_close(one[0], output[t])
    torch.testing.assert_close(state, after)


@pytest.mark.parametrize("kind", MODULES)
def test_initial_weights(kind):
    memory = make_memory(kind, 2, orthogonal=True)
    for name, value in memory.named_parameters():
        if "bias" in name:
            assert not value.any()
        else:
            torch.testing.assert_close(value.T @ value, torch.eye(value.shape[1], dtype=value.dtype), atol=1e-6, rtol=0)
    bound = SIZE**-0.5
    for value in make_memory(kind, 2).parameters():
        assert 0.5 * bound < value.abs().max() <= bound
        assert value.min() < 0 < value.max()
    memory, again = (Memory(kind, D, SIZE, 2, True, Rng(8)) for _ in range(2))
    for one, other in zip(memory.parameters(), again.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_a_network_returns_the_outputs_of_running_rows():
    memory = make_memory("lstm")
    network = MemoryNetwork(nn.Sequential(nn.Linear(3, D), nn.Tanh()), memory, nn.Linear(SIZE, 2)).double()
    rows, (_, state) = torch.randn(8, 3, dtype=torch.float64), draw(memory, 4, 2)
    is_first, running = torch.rand(8) < 0.3, torch.tensor([1, 1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    outputs, after = network.follow(rows, Sequences(state, is_first))
    expected, expected_after = memory(network.trunk(rows).view(4, 2, D), state, is_first.view(4, 2))
    torch.testing.assert_close(outputs, network.head(expected).view(8, 2))
    torch.testing.assert_close(after, expected_after)
    outputs, _ = network.follow(rows, Sequences(state, is_first, running))
    expected, _ = memory(network.trunk(rows).view(4, 2, D), state, is_first.view(4, 2), running.view(4, 2))
    torch.testing.assert_close(outputs, network.head(expected).view(8, 2)[running])


def test_an_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="Memory: kind must be lstm or gru, got 'rnn'"):
        Memory("rnn", 3, 4, 1, True, Rng(0))


def test_a_state_has_the_layers_one_after_the_other():
    assert [make_memory(kind, 3).state_dim for kind in MODULES] == [36, 18]
    memory = make_memory("lstm", 2)
    x, state = draw(memory, 1, 1)
    output, after = memory(x, state, no_flags(1, 1))
    np.testing.assert_array_equal(output[0].detach(), after[:, 12:18].detach())

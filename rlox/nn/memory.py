"""Networks with a memory: LSTM and GRU over sequences in which episodes end and agents pause.

Letters: T steps, n sequences (or N environments), D inputs, S numbers of a state, B = T * n rows step after step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from rlox.kernels.nn.recurrent import RecurrentNetwork
from rlox.kernels.rng import Rng
from rlox.nn.modules import layer_weights

_GATES = {"lstm": 4, "gru": 3}
_VECTORS = {"lstm": 2, "gru": 1}  # of a layer's state: an LSTM's output and its cell
_ACTIVATIONS = {nn.Tanh: "tanh", nn.ReLU: "relu"}
_MOST_HIDDEN = 9  # layers of the perceptron that the kernel computes
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Sequences(NamedTuple):
    """How rows are the steps of n sequences; all are tensors on the device of the rows.

    Attributes
    ----------
    state : Tensor
        (n, S), before the first step of each sequence.
    is_first : Tensor
        (B,) bool: an episode begins, so that the state before this row counts as zero.
    running : Tensor, optional
        (B,) bool: the agent acts. In other rows its memory stays as it is. None: all act.
    """

    state: Tensor
    is_first: Tensor
    running: Tensor | None = None


class Memory(nn.Module):
    """LSTM or GRU whose state is one row of numbers, and which begins anew where an episode begins.

    Its parameters have the names, shapes and order of gates of ``nn.LSTM`` (Hochreiter and Schmidhuber 1997,
    doi:10.1162/neco.1997.9.8.1735) and ``nn.GRU`` (Cho et al. 2014, arXiv:1406.1078), so that its ``state_dict`` loads
    into them.

    Parameters
    ----------
    kind : str
        ``lstm`` or ``gru``.
    n_inputs : int
        Number of inputs D.
    size : int
        Units of each layer; a step's output has as many numbers.
    n_layers : int
        Layers, each of which reads the outputs of the one before.
    orthogonal : bool
        Orthogonal initial weights and zero biases; else both start at U(-1/sqrt(size), 1/sqrt(size)).
    rng : Rng
        Generator of the initial weights.
    horizon : int, optional
        Initial biases with which the units keep what they saw for 1 to so many steps (chrono initialisation, Tallec
        and Ollivier 2018, arXiv:1804.11188): of the gate that keeps a unit's state log(U(1, horizon - 1)), and of an
        LSTM's input gate its negative. None: as the others.

    Attributes
    ----------
    state_dim : int
        Length S of a state, ``n_layers * size * (2 if lstm else 1)``: layer after layer its output, then, for an LSTM,
        its cell.
    """

    def __init__(
        self, kind: str, n_inputs: int, size: int, n_layers: int, orthogonal: bool, rng: Rng, horizon: int | None = None
    ):
        super().__init__()
        if kind not in _GATES:
            raise ValueError(f"Memory: kind must be lstm or gru, got {kind!r}")
        self.kind, self.n_inputs, self.size, self.n_layers = kind, n_inputs, size, n_layers
        self._kernel: RecurrentNetwork | None = None
        self.state_dim = n_layers * size * _VECTORS[kind]
        rows = _GATES[kind] * size
        for layer in range(n_layers):
            drawn = [_weights(rows, cols, size, orthogonal, rng) for cols in (size if layer else n_inputs, size)]
            for name, arrays in zip(("weight", "bias"), zip(*drawn, strict=True), strict=True):
                for source, array in zip(("ih", "hh"), arrays, strict=True):
                    self.register_parameter(f"{name}_{source}_l{layer}", nn.Parameter(torch.from_numpy(array)))
            if horizon is not None:
                self._set_horizon(layer, horizon, rng)

    @torch.no_grad()
    def _set_horizon(self, layer: int, horizon: int, rng: Rng) -> None:
        """Set the biases of the gates that keep a layer's state: an LSTM's forget gate, or a GRU's update gate."""
        size, from_inputs, from_state = self.size, *self.weights(layer)[2:]
        kept = torch.from_numpy(np.log(1.0 + (horizon - 2) * rng.uniform((size,), dtype=np.float64)).astype(np.float32))
        for bias, value in ((from_inputs, 0.0), (from_state, kept)):
            bias[size : 2 * size] = value
            if self.kind == "lstm":
                bias[:size] = -value

    def weights(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights and biases of a layer: (G size, D), (G size, size), (G size,), (G size,) for G gates."""
        w_ih, w_hh = getattr(self, f"weight_ih_l{layer}"), getattr(self, f"weight_hh_l{layer}")
        return w_ih, w_hh, getattr(self, f"bias_ih_l{layer}"), getattr(self, f"bias_hh_l{layer}")

    def forward(
        self, x: Tensor, state: Tensor, is_first: Tensor, running: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read T steps of N sequences.

        Parameters
        ----------
        x : Tensor
            (T, N, D), in the data type of the weights.
        state : Tensor
            (N, S), before the first step.
        is_first : Tensor
            (T, N) bool: the state before the step counts as zero, and no gradient passes.
        running : Tensor, optional
            (T, N) bool: where false, the state stays as it is (after `is_first`) and the step's output is zeros.

        Returns
        -------
        outputs : Tensor
            (T, N, size), of the last layer.
        state : Tensor
            (N, S), after the last step.
        """
        weights = [self.weights(layer) for layer in range(self.n_layers)]
        if _kernel_computes(x, state, *weights[0]):
            self._kernel = kernel = _kernel_of(self._kernel, self.kind, (self.n_inputs,), self.size, self.n_layers)
            flags = (one if one is None else one.flatten() for one in (is_first, running))
            outputs, last = _run(kernel, [p for layer in weights for p in layer], x.flatten(0, 1), state, *flags)
            return outputs.view(*x.shape[:2], self.size), last
        after = []
        for layer, before in enumerate(state.split(self.size * _VECTORS[self.kind], -1)):
            x, last = loop_over_steps(self.kind, x, before, is_first, running, *weights[layer])
            after.append(last)
        return x, torch.cat(after, -1) if len(after) > 1 else after[0]

    def extra_repr(self) -> str:
        return f"{self.kind}, n_inputs={self.n_inputs}, size={self.size}, n_layers={self.n_layers}"


class MemoryNetwork(nn.Module):
    r"""A perceptron before a memory, and a linear head after it.

    On the CPU in float32 one kernel computes what the modules define, forward and backward, if they are those that
    rlox builds. CPU milliseconds of one update (forward and backward) of the memory alone, on one thread of an AMD
    EPYC, for T x N steps, 64 inputs and 64 units, or 128 units in the last column:

    ==================== ======= ======= ========= ==============
    \                    32 x 8  128 x 4 1,024 x 1 128 x 8 (128)
    ==================== ======= ======= ========= ==============
    LSTM: the loop       10      41      358       73
    ``nn.LSTM``          1.5     2.4     6.3       9.2
    the kernel           0.8     1.6     3.7       7.8
    GRU: the loop        8       31      364       80
    ``nn.GRU``           6.0     21      193       40
    the kernel           0.7     1.3     3.0       6.8
    ==================== ======= ======= ========= ==============

    PyTorch's modules know no beginnings in the middle of a sequence.

    Parameters
    ----------
    trunk : nn.Module
        From rows (B, D) to inputs of the memory, with its last activation; ``nn.Identity`` if it has no layer.
    memory : Memory
        What remembers.
    head : nn.Module
        From outputs of the memory to outputs of the network.
    """

    def __init__(self, trunk: nn.Module, memory: Memory, head: nn.Module):
        super().__init__()
        self.trunk, self.memory, self.head = trunk, memory, head
        self.state_dim = memory.state_dim
        self._kernel: RecurrentNetwork | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (B, n_outputs) of rows `x` (B, D), each of which is the first step of an episode."""
        is_first = torch.ones(len(x), dtype=torch.bool, device=x.device)
        return self.follow(x, Sequences(x.new_zeros(len(x), self.state_dim), is_first))[0]

    def follow(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return the outputs of rows `x` (B, D), and the state (n, S) after the last step of each sequence.

        The outputs are (B, n_outputs); with ``sequences.running``, only those of the running rows, in their order.
        """
        plain = self._find_plain()
        if plain is not None and x.shape[1:] == plain[0][1][:1] and _kernel_computes(x, sequences.state, *plain[1]):
            self._kernel = kernel = _kernel_of(self._kernel, *plain[0])
            return _run(kernel, plain[1], x, *sequences)
        n, running = len(sequences.state), sequences.running
        inputs = self.trunk(x).unflatten(0, (-1, n))
        steps = None if running is None else running.view(-1, n)
        outputs, state = self.memory(inputs, sequences.state, sequences.is_first.view(-1, n), steps)
        outputs = outputs.flatten(0, 1)
        return self.head(outputs if running is None else outputs[running]), state

    def pack(self, kernel: RecurrentNetwork | None = None) -> RecurrentNetwork | None:
        """Return a kernel, maybe the one of an earlier call, whose `step` computes steps with the current weights.

        Later changes of the weights have no effect on it. None if a kernel does not compute this network.
        """
        plain = self._find_plain()
        if plain is None or not _kernel_computes(*plain[1]) or type(self).follow is not MemoryNetwork.follow:
            return None
        kernel = _kernel_of(kernel, *plain[0])
        kernel.pack(map(_array, plain[1]))
        return kernel

    def _find_plain(self) -> tuple[tuple[Any, ...], list[Tensor]] | None:
        """Return the shape of the kernel that computes this network, and its parameters; None if it has other parts.

        Other parts are modules that rlox does not build, and hooks, which a kernel does not call.
        """
        trunk, memory, head = self.trunk, self.memory, self.head
        parts = [*trunk] if type(trunk) is nn.Sequential else [] if type(trunk) is nn.Identity else [trunk]
        last = head[0] if type(head) is nn.Sequential and len(head) == 1 else head
        linear, activations = parts[::2], {type(part) for part in parts[1::2]}
        if type(memory) is not Memory or len(activations) > 1 or len(parts) % 2 or len(linear) > _MOST_HIDDEN:
            return None
        if not activations <= _ACTIVATIONS.keys() or any(type(one) is not nn.Linear for one in (*linear, last)):
            return None
        modules = (trunk, memory, head, last, *parts)
        if any(vars(part)[name] for part in modules for name in _HOOKS) or _has_any_global_hook():
            return None
        rows = [one.weight for one in linear]
        widths = (*(weight.shape[1] for weight in rows[:1]), *map(len, rows)) or (memory.n_inputs,)
        parameters = [p for one in linear for p in (one.weight, one.bias)]
        parameters += [p for layer in range(memory.n_layers) for p in memory.weights(layer)]
        parameters += [last.weight, last.bias]
        if any(p is None for p in parameters) or widths[-1] != memory.n_inputs:
            return None
        activation = _ACTIVATIONS[activations.pop()] if activations else "tanh"
        return (memory.kind, widths, memory.size, memory.n_layers, len(last.weight), activation), parameters


def _weights(rows: int, cols: int, size: int, orthogonal: bool, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Draw a weight (rows, cols) and a bias (rows,) f32."""
    if orthogonal:
        return layer_weights(rows, cols, 1.0, True, rng)
    bound = 1.0 / math.sqrt(size)
    weight, bias = (bound * (2.0 * rng.uniform(shape, dtype=np.float64) - 1.0) for shape in ((rows, cols), (rows,)))
    return weight.astype(np.float32), bias.astype(np.float32)


def _kernel_computes(*tensors: Tensor) -> bool:
    return not torch.compiler.is_compiling() and all(
        one.dtype == torch.float32 and one.device.type == "cpu" for one in tensors
    )


def _kernel_of(kernel: RecurrentNetwork | None, *shape: Any) -> RecurrentNetwork:
    """Return `kernel` if it has this shape, else a new one."""
    wanted = (*shape, 0, "tanh") if len(shape) == 4 else shape
    return kernel if kernel is not None and kernel.shape == wanted else RecurrentNetwork(*wanted)


def _run(
    kernel: RecurrentNetwork,
    parameters: Sequence[Tensor],
    x: Tensor,
    state: Tensor,
    is_first: Tensor,
    running: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run a kernel over rows x (B, D) of sequences from state (n, S). Returns its outputs and the last state."""
    if torch.is_grad_enabled():
        return _Network.apply(kernel, x, state, is_first, running, *parameters)
    arrays = map(_array, parameters)
    if running is None and len(x) == len(state):
        last = np.empty(state.shape, np.float32)
        outputs = kernel.step(*map(_array, (x, state, is_first)), last, parameters=arrays)
    else:
        outputs, last, _ = kernel.forward(arrays, *map(_array, (x, state, is_first, running)))
    return torch.from_numpy(outputs), torch.from_numpy(last)


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, state, is_first, running, *parameters):
        arrays = map(_array, (x, state, is_first, running))
        outputs, last, ctx.trace = kernel.forward(map(_array, parameters), *arrays)
        ctx.kernel = kernel
        ctx.save_for_backward(x, is_first, *parameters)  # PyTorch then notices if they change before the backward pass
        ctx.set_materialize_grads(False)
        return torch.from_numpy(outputs), torch.from_numpy(last)

    @staticmethod
    def backward(ctx, d_outputs, d_last):
        _, _, *parameters = ctx.saved_tensors
        _, wants_x, _, _, _, *wants = ctx.needs_input_grad
        arrays = ctx.kernel.backward(
            map(_array, parameters), ctx.trace, _array(d_outputs), _array(d_last), wants_x, any(wants)
        )
        d_x, d_state, gradient = (one if one is None else torch.from_numpy(one) for one in arrays)
        grads = [None] * len(parameters)
        if gradient is not None:
            parts = gradient.split([p.numel() for p in parameters])
            grads = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        return None, d_x, d_state, None, None, *grads


def _array(tensor: Tensor | None) -> np.ndarray | None:
    if tensor is None:
        return None
    return (tensor.detach() if tensor.requires_grad else tensor).numpy()


def loop_over_steps(
    kind: str,
    x: Tensor,
    state: Tensor,
    is_first: Tensor,
    running: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run one layer over x (T, N, D) from state (N, 1 or 2 size). Returns outputs (T, N, size) and the last state.

    It computes on any device and in any data type, and defines the results of the kernel.
    """
    inputs, outputs = F.linear(x, w_ih, b_ih), []
    for t in range(len(x)):
        state = state.masked_fill(is_first[t, :, None], 0.0)
        after = _lstm(inputs[t], state, w_hh, b_hh) if kind == "lstm" else _gru(inputs[t], state, w_hh, b_hh)
        output = after[:, : w_hh.shape[1]]
        if running is not None:
            runs = running[t, :, None]
            after, output = torch.where(runs, after, state), output.masked_fill(~runs, 0.0)
        state = after
        outputs.append(output)
    return torch.stack(outputs), state


def _lstm(inputs: Tensor, state: Tensor, w_hh: Tensor, b_hh: Tensor) -> Tensor:
    """Return output and cell (N, 2 size) after a step with inputs (N, 4 size) of its gates: i, f, g and o."""
    h, c = state.chunk(2, -1)
    i, f, g, o = (inputs + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.cat([torch.sigmoid(o) * torch.tanh(c), c], -1)


def _gru(inputs: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor) -> Tensor:
    """Return the state (N, size) after a step with inputs (N, 3 size) of its gates: reset, update and candidate."""
    (r, z, n), (from_r, from_z, from_n) = inputs.chunk(3, -1), F.linear(h, w_hh, b_hh).chunk(3, -1)
    candidate = torch.tanh(n + torch.sigmoid(r + from_r) * from_n)
    return torch.lerp(candidate, h, torch.sigmoid(z + from_z))

"""How native learners are held against PyTorch: the networks drawn, what is left out, and what counts as equal."""

import math

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

PERCEPTRONS = {
    "obs_dim": st.integers(1, 40),
    "hidden": st.lists(st.integers(1, 130), max_size=3).map(tuple),
    "activation": st.sampled_from(["relu", "tanh"]),
    "seed": st.integers(0, 1000),
}
BATCHES = st.one_of(st.integers(1, 40), st.integers(200, 600))  # within a block of the kernels, and over several


class NearestKink(TorchDispatchMode):
    """Notes in `distance` how near the inputs of ReLUs came to 0, and the two of a minimum to each other.

    There a gradient jumps: nearer than rounding, it is one for one and another for the other, and both are right. Two
    that are the same number count as one: PPO's clipped and unclipped objectives mostly are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.distance = math.inf

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.relu, torch.ops.aten.relu_):
            self.note(args[0])
        if func.overloadpacket is torch.ops.aten.minimum:
            apart = args[0] - args[1]
            self.note(apart[apart != 0])
        return func(*args, **(kwargs or {}))

    def note(self, x: torch.Tensor) -> None:
        self.distance = min(self.distance, x.abs().min().item() if x.numel() else math.inf)


def assert_equal_gradients(ours, theirs, what="", apart=1e-7, share=1e-5):
    """The flat `ours` against PyTorch's tensors, to `share` of each largest entry, and `apart` where sums cancel."""
    at = 0
    for grad in theirs:
        grad = np.asarray(grad).ravel()
        atol = share * np.abs(grad).max() + apart
        np.testing.assert_allclose(ours[at : at + grad.size], grad, rtol=0, atol=atol, err_msg=what)
        at += grad.size
    assert at == len(ours)

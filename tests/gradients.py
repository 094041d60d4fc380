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


ROUNDINGS = 8 * float(np.finfo(np.float32).eps)  # of a few sums in a row, as a share of what is summed


def assert_equal_gradients(ours, theirs, what="", apart=1e-7, share=1e-5, errors=None, rounded=None):
    """The flat `ours` against PyTorch's tensors in double precision: to `share` of each largest entry, and where sums
    cancel to `apart`, or to roundings of the network's largest entry.

    Gradients that are proportional to `errors`, differences of numbers of about 1, may have what rounding these is as a
    share of them. `rounded` are PyTorch's tensors in single precision: thrice their distance from `theirs` is allowed,
    for where logarithms are subtracted and exponentiated again.
    """
    theirs = [np.asarray(grad).ravel() for grad in theirs]
    apart += ROUNDINGS * max(np.abs(grad).max() for grad in theirs)
    if errors is not None:
        share += ROUNDINGS / np.abs(errors).mean()
    rounded = theirs if rounded is None else [np.asarray(grad).ravel() for grad in rounded]
    at = 0
    for grad, single in zip(theirs, rounded, strict=True):
        atol = share * np.abs(grad).max() + apart + 3 * np.abs(grad - single).max()
        np.testing.assert_allclose(ours[at : at + grad.size], grad, rtol=0, atol=atol, err_msg=what)
        at += grad.size
    assert at == len(ours)

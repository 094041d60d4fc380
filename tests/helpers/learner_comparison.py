"""Comparison of native learners with PyTorch: random networks, excluded cases and tolerances."""

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
BATCHES = st.one_of(st.integers(1, 40), st.integers(200, 600))  # within one block of the kernels, and across several


class NearestKink(TorchDispatchMode):
    """Records in `distance` how close inputs of ReLUs came to 0, and the two arguments of a minimum to each other.

    The gradient jumps at these points: within rounding, the two implementations may be on different sides, and both are
    right. Equal arguments of a minimum are ignored: PPO's clipped and unclipped objectives are mostly equal.
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


ROUNDINGS = 8 * float(np.finfo(np.float32).eps)  # rounding of a few successive sums, relative to the summands


def assert_equal_gradients(ours, theirs, what="", apart=1e-7, share=1e-5, errors=None, rounded=None):
    """Compare the flat `ours` with PyTorch's tensors in double precision. The tolerance is `share` of the largest entry
    of each tensor, plus `apart` and rounding of the largest entry of the network for sums that cancel.

    For gradients proportional to `errors`, which are differences of numbers of about 1, the relative rounding of these
    is added. `rounded` are PyTorch's tensors in single precision: three times their distance from `theirs` is added,
    for differences of logarithms that are exponentiated again.
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

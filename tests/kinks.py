"""Where a gradient jumps: nearer than rounding, it is one for one and another for the other, and both are right."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NearestKink(TorchDispatchMode):
    """Notes in `distance` how near the inputs of ReLUs came to 0, and the two of a minimum to each other.

    Two that are the same number count as one: PPO's clipped and unclipped objectives mostly are.
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

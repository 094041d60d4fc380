"""Rollouts that the host collects for policies on a GPU: by kernels with copies of the weights; sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.compiled.guard import ModuleWatch, find_difference
from rlox.compiled.policies import NativePolicy
from rlox.config import OnPolicyConfig
from rlox.envs import EnvSpec
from rlox.gpu.acting import Follower, find_excess

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    import torch

    from rlox.nn.transfers import Packing

_MOST_SHAPES = 4  # of rollouts whose memory on the device is kept


@dataclass(frozen=True)
class GpuPolicy:
    """An actor and critic that a GPU trains."""

    module: Any
    flat: torch.Tensor  # (P,) f32, its parameters
    spec: EnvSpec  # with the observations that it sees
    state_dim: int | None = None  # numbers that its critic reads; None: the observations


class HostCollection:
    """What the host does for an on-policy algorithm on a GPU.

    Parameters
    ----------
    algorithm : OnPolicyAlgorithm
        Its backend's reason gets a line that says who acts.
    policies : sequence of GpuPolicy
        Those that act, which kernels follow if they can. The moments of the collector's value norms come to the
        host with their parameters.

    Attributes
    ----------
    kernels : list of NativePolicy
        They act for `policies`; empty if the GPU does.
    """

    def __init__(self, algorithm: Any, policies: Sequence[GpuPolicy]):
        self._algorithm, collector = algorithm, algorithm.collector
        only = getattr(collector, "value_norm", None)
        norms = [*getattr(collector, "norms", {}).values(), *([] if only is None else [only])]
        why = _find_obstacle(algorithm, policies)
        algorithm.backend.reason += "; a kernel on the CPU collects" if why is None else f"; the GPU acts: {why}"
        followed = list(policies) if why is None else []

        def make(*arrays: np.ndarray) -> list[NativePolicy]:
            for norm, moments in zip(norms, arrays[len(followed) :], strict=True):
                norm.moments = moments
            own = zip(followed, arrays[: len(followed)], strict=True)
            return [follow_actor_critic(one, block, algorithm.config) for one, block in own]

        tensors = [*(one.flat for one in followed), *(norm.on_device for norm in norms)]
        self._follower = Follower(tensors, make) if tensors else None
        self.kernels: list[NativePolicy] = [] if self._follower is None else self._follower.after(None)
        self._uploads = Uploads(algorithm.device)

    def refresh(self, always: bool = False) -> None:
        """Copy parameters and moments if they may have changed: during a training, after each update."""
        a = self._algorithm
        if self._follower is not None:
            self._follower.after(a.counters.updates if a._trains and not always else None)

    def find_kernel(self) -> NativePolicy | None:
        """Return the kernel that acts for an only policy, with its newest parameters; None: the GPU must act."""
        self.refresh()
        return next(iter(self.kernels), None)

    def place(self, batch: Any) -> Any:
        """Return a batch with all its columns on the GPU, as `Uploads.place`."""
        return self._uploads.place(batch)


def _find_obstacle(algorithm: Any, policies: Sequence[GpuPolicy]) -> str | None:
    """Return why kernels on the CPU cannot or should not collect rollouts; None if they should."""
    if algorithm._own_policy:
        return "the policy is custom"
    return find_excess(sum(one.flat.numel() for one in policies) * algorithm.collector.n_envs) or (
        algorithm._kernel_obstacle(None) or find_difference("acting", algorithm.collector)
    )


def follow_actor_critic(one: GpuPolicy, block: np.ndarray, config: OnPolicyConfig) -> NativePolicy:
    """Return a policy that acts as `one` with the parameters in `block`, (P,) f32."""
    spec = one.spec
    n_outputs = spec.n_actions if spec.discrete else spec.act_dim
    sizes = (spec.obs_dim, n_outputs, config.hidden_sizes, spec.continuous, config.activation)
    policy = NativePolicy(*sizes, block=block, state_dim=one.state_dim)
    shapes = [(name, tuple(p.shape)) for name, p in one.module.named_parameters()]
    if shapes != [(name, array.shape) for name, array in policy.parameters.items()]:
        raise ValueError(f"the kernel's parameters must be those of the module, in its order, {shapes}")
    policy._watched.append(ModuleWatch("policy", one.module))
    return policy


class Uploads:
    """Sends rollouts to a device, always to the same memory, from which a captured update reads them.

    Parameters
    ----------
    device : str or torch.device
        Where they go.
    """

    def __init__(self, device: str | torch.device):
        import torch

        self._device = torch.device(device)
        self._kept: list[tuple[Packing, torch.Tensor]] = []

    def place(self, batch: Any) -> Any:
        """Return a `Rollout` or a `MultiAgentBatch` whose columns are on the device; its `reused` is true.

        A batch with columns that are there already is returned as it is.
        """
        import torch

        from rlox.nn.transfers import stage

        arrays: dict[str, np.ndarray] = {}
        for name, column in batch.columns().items():
            if not isinstance(column, torch.Tensor) or column.device.type != "cpu":
                return batch
            arrays[name] = column.numpy()
        packing, block = self._find(arrays)
        block.copy_(packing.write(arrays, stage(packing.n_bytes, self._device)), non_blocking=True)
        return batch.with_columns(packing.views(block), True)

    def _find(self, arrays: dict[str, np.ndarray]) -> tuple[Packing, torch.Tensor]:
        """Return the memory for arrays of these shapes."""
        for packing, block in self._kept:
            if packing.fits(arrays):
                return packing, block
        import torch

        from rlox.nn.transfers import Packing

        packing = Packing(arrays)
        made = packing, torch.zeros(packing.n_bytes, dtype=torch.uint8, device=self._device)
        self._kept = [*self._kept, made][-_MOST_SHAPES:]
        return made

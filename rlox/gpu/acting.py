"""Who acts for a policy that PyTorch trains on a GPU: a kernel on the CPU with a copy of it, or the GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.compiled.guard import find_update_difference
from rlox.compiled.policies import NativeActor, NativeBoundedPolicy

if TYPE_CHECKING:
    import torch

    from rlox.nn.graphed_acting import GraphedPolicy

# Up to so many parameters times environments, a kernel on the CPU acts sooner than a GPU with its launches and copies.
MOST_WORK = 500_000


class FollowingPolicy:
    """A kernel's policy with a copy of the parameters of one on a GPU.

    Parameters
    ----------
    flat : Tensor (P,) f32
        All parameters of the policy on the GPU.
    make : callable
        Returns the kernel's policy, given the block (P,) f32 of its parameters.
    """

    def __init__(self, flat: torch.Tensor, make: Callable[[np.ndarray], NativeActor]):
        import torch

        from rlox.nn.transfers import stage

        self._flat = flat
        self._block = stage(4 * flat.numel(), flat.device).view(torch.float32)
        self._policy = make(self._block.numpy())
        self._n_updates: int | None = None  # after which the parameters were copied

    def after(self, n_updates: int | None) -> NativeActor:
        """Return the kernel's policy with the parameters after so many updates; None: copy them in any case."""
        if n_updates is None or n_updates != self._n_updates:
            self._block.copy_(self._flat.detach())  # one transfer, after all that the GPU has been given to do
            self._n_updates = n_updates
        return self._policy


def choose_actor(algorithm: Any) -> tuple[FollowingPolicy | None, GraphedPolicy | None]:
    """Return what acts for an off-policy algorithm on a GPU: a kernel on the CPU for a small policy, or a graph on the
    GPU; neither for a custom policy, or one with a memory or noisy layers. The backend's reason says which."""
    why = _find_obstacle(algorithm)
    if why is None:
        algorithm.backend.reason += "; a kernel on the CPU acts"
        return FollowingPolicy(algorithm.optimizer.flat, algorithm._make_follower), None
    algorithm.backend.reason += f"; the GPU acts: {why}"
    if algorithm._own_policy or any(getattr(algorithm.policy, name, 0) for name in ("state_dim", "n_noise")):
        return None, None
    from rlox.nn.graphed_acting import GraphedPolicy

    return None, GraphedPolicy(algorithm.policy, algorithm.device)


def _find_obstacle(algorithm: Any) -> str | None:
    """Return why a kernel on the CPU cannot or should not act; None if it should."""
    if algorithm._own_policy:
        return "the policy is custom"
    work = algorithm.optimizer.flat.numel() * algorithm.collector.n_envs
    if work > MOST_WORK:
        return f"the policy's parameters times environments are {work:,}, more than {MOST_WORK:,}"
    return algorithm._kernel_obstacle(None) or find_update_difference(
        algorithm, algorithm.collector, algorithm.counters
    )


def follow_bounded(algorithm: Any, block: np.ndarray, kernel: type, **lengths: int) -> NativeBoundedPolicy:
    """Return a policy of bounded actions that acts as the policy of `algorithm` with the parameters in `block`.

    `lengths` are those of the blocks that the `kernel` has in addition to those of policy and critics, by their names.
    """
    import torch

    spec, c, n = algorithm.spec, algorithm.config, algorithm._network_sizes()[1]
    ours = copy.deepcopy(algorithm.policy).to("cpu").requires_grad_(False)
    start = 0
    for p in ours.parameters():
        p.data = torch.from_numpy(block[start : start + p.numel()]).view_as(p)
        start += p.numel()
    policy = NativeBoundedPolicy(ours)
    others = {"critics": n, "target": n, **lengths}
    blocks = {name: np.zeros(length, np.float32) for name, length in others.items()}
    sizes = {"obs_dim": spec.obs_dim, "act_dim": spec.act_dim, "hidden_sizes": c.hidden_sizes}
    policy.use(kernel, {"policy": block, **blocks}, **sizes, activation=c.activation)
    return policy

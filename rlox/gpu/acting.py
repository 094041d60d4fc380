"""Who acts for a policy that PyTorch trains on a GPU: a kernel on the CPU with a copy of it, or the GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.compiled.guard import find_update_difference
from rlox.compiled.policies import NativeBoundedPolicy

if TYPE_CHECKING:
    import torch

    from rlox.nn.graphed_acting import GraphedPolicy

# Up to so many parameters times environments, a kernel on the CPU acts sooner than a GPU with its launches and copies.
MOST_WORK = 500_000


class Follower:
    """What acts on the host for networks on a GPU, with a copy of their parameters.

    Parameters
    ----------
    tensors : sequence of Tensor (n,)
        What the host needs of the GPU, such as all parameters of a policy (P,) f32.
    make : callable
        Returns what acts, such as a kernel's policy, given the memory of the host's copies (n,), which stays the same.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], make: Callable[..., Any]):
        import torch

        from rlox.nn.transfers import Packing, stage

        self._tensors = [tensor.detach() for tensor in tensors]
        device = self._tensors[0].device
        kinds = [torch.empty(0, dtype=x.dtype, device="cpu").numpy().dtype for x in tensors]
        packing = Packing(
            {str(i): np.empty(len(x), kind) for i, (x, kind) in enumerate(zip(tensors, kinds, strict=True))}
        )
        self._block = stage(packing.n_bytes, device)
        # Several tensors are joined on the GPU, so that there is one transfer.
        self._joined = torch.empty(packing.n_bytes, dtype=torch.uint8, device=device) if len(tensors) > 1 else None
        self._parts = [] if self._joined is None else list(packing.views(self._joined).values())
        own = list(packing.views(self._block).values())
        self._only = own[0]
        self._actor = make(*(view.numpy() for view in own))
        self._n_updates: int | None = None  # after which the copy was made

    def after(self, n_updates: int | None) -> Any:
        """Return what acts, with the parameters after so many updates; None: copy them in any case."""
        if n_updates is None or n_updates != self._n_updates:
            # One transfer, after all that the GPU has been given to do.
            if self._joined is None:
                self._only.copy_(self._tensors[0])
            else:
                import torch

                torch._foreach_copy_(self._parts, self._tensors)
                self._block.copy_(self._joined)
            self._n_updates = n_updates
        return self._actor


def choose_actor(algorithm: Any) -> tuple[Follower | None, GraphedPolicy | None]:
    """Return what acts for an off-policy algorithm on a GPU: a kernel on the CPU for a small policy, or a graph on the
    GPU; neither for a custom policy, or one with a memory or noisy layers. The backend's reason says which."""
    why = _find_obstacle(algorithm)
    if why is None:
        algorithm.backend.reason += "; a kernel on the CPU acts"
        return Follower([algorithm.optimizer.flat], algorithm._make_follower), None
    algorithm.backend.reason += f"; the GPU acts: {why}"
    if algorithm._own_policy or any(getattr(algorithm.policy, name, 0) for name in ("state_dim", "n_noise")):
        return None, None
    from rlox.nn.graphed_acting import GraphedPolicy

    return None, GraphedPolicy(algorithm.policy, algorithm.device)


def _find_obstacle(algorithm: Any) -> str | None:
    """Return why a kernel on the CPU cannot or should not act; None if it should."""
    if algorithm._own_policy:
        return "the policy is custom"
    return find_excess(algorithm.optimizer.flat.numel() * algorithm.collector.n_envs) or (
        algorithm._kernel_obstacle(None) or find_update_difference(algorithm, algorithm.collector, algorithm.counters)
    )


def find_excess(work: int) -> str | None:
    """Return that a policy's parameters times environments are too many for a kernel, if they are."""
    if work > MOST_WORK:
        return f"the policy's parameters times environments are {work:,}, more than {MOST_WORK:,}"
    return None


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

"""One flat block of parameters, one fused Adam."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn


class FlatAdam:
    """Adam with global-norm clipping over parameters laid out as views of one flat f32 tensor.

    One norm and one fused kernel replace a dozen small ones, which is what an MLP's step costs on a CPU. The
    parameters stay the module's own: their ``.data`` and ``.grad`` become views, in the order given.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Those that do not require a gradient are left alone.
    learning_rate, eps : float
        Adam's step size and denominator offset. 1e-5 is what PPO's reference uses.

    Raises
    ------
    ValueError
        If no parameter is trainable, or they differ in dtype or device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float, eps: float = 1e-5):
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ValueError("FlatAdam: parameters must hold at least one that requires a gradient, got none")
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            raise ValueError(f"FlatAdam: parameters must share dtype and device, got {sorted(map(str, kinds))}")
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.flat = nn.Parameter(flat)
        self.flat.grad = torch.zeros_like(flat)
        offset = 0
        for p in self.parameters:
            part = slice(offset, offset + p.numel())
            p.data = flat[part].view_as(p)
            p.grad = self.flat.grad[part].view_as(p)
            offset += p.numel()
        self.adam = torch.optim.Adam([self.flat], lr=learning_rate, eps=eps, fused=True)

    def step(self, loss: torch.Tensor, max_grad_norm: float | None) -> torch.Tensor:
        """Differentiate `loss`, clip the global gradient norm (None: do not), take one step.

        Returns the norm before clipping, ().
        """
        grad = self.flat.grad
        grad.zero_()
        loss.backward()
        norm = torch.linalg.vector_norm(grad)
        if max_grad_norm is not None:
            # A NaN norm stays NaN, so that a broken loss shows in what is returned and in the weights alike.
            grad.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.adam.step()
        return norm

    def set_learning_rate(self, learning_rate: float) -> None:
        self.adam.param_groups[0]["lr"] = learning_rate

    def state(self) -> dict[str, np.ndarray]:
        """First and second moments (P,) and the step count (), copies."""
        state = self.adam.state[self.flat]
        if not state:
            zeros = np.zeros(self.flat.numel(), np.float32)
            return {"exp_avg": zeros, "exp_avg_sq": zeros.copy(), "step": np.zeros((), np.float32)}
        return {name: state[name].detach().cpu().numpy().copy() for name in ("exp_avg", "exp_avg_sq", "step")}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; a ValueError where the sizes differ."""
        if state["exp_avg"].shape != (self.flat.numel(),):
            raise ValueError(
                f"FlatAdam: exp_avg must have shape ({self.flat.numel()},), got {state['exp_avg'].shape}; "
                "the policy differs from the one that was saved"
            )
        device = self.flat.device
        self.adam.state[self.flat] = {
            "step": torch.tensor(float(state["step"]), dtype=torch.float32, device=device),
            "exp_avg": torch.from_numpy(state["exp_avg"].copy()).to(device),
            "exp_avg_sq": torch.from_numpy(state["exp_avg_sq"].copy()).to(device),
        }

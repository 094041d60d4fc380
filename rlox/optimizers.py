"""One flat block of parameters, one optimiser step over it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from rlox.config import OPTIMIZERS, nearest


class FlatOptimizer:
    """Adam or RMSprop with global-norm clipping over parameters laid out as views of one flat f32 tensor.

    One norm and one kernel replace a dozen small ones, which is what an MLP's step costs on a CPU. The parameters stay
    the module's own: their ``.data`` and ``.grad`` become views, in the order given.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Those that do not require a gradient are left alone.
    learning_rate, eps : float
        Step size and denominator offset; 1e-5 is what PPO's and A2C's references use.
    kind : str
        ``adam``, or ``rmsprop`` (decay 0.99).

    Raises
    ------
    ValueError
        If no parameter is trainable, they differ in dtype or device, or the kind is unknown.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float, eps: float = 1e-5, kind: str = "adam"):
        if kind not in OPTIMIZERS:
            raise ValueError(f"FlatOptimizer: kind must be known, got {kind!r}; {nearest(kind, OPTIMIZERS)}")
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ValueError("FlatOptimizer: parameters must hold at least one that requires a gradient, got none")
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            raise ValueError(f"FlatOptimizer: parameters must share dtype and device, got {sorted(map(str, kinds))}")
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.flat = nn.Parameter(flat)
        self.flat.grad = torch.zeros_like(flat)
        offset = 0
        for p in self.parameters:
            part = slice(offset, offset + p.numel())
            p.data = flat[part].view_as(p)
            p.grad = self.flat.grad[part].view_as(p)
            offset += p.numel()
        if kind == "adam":
            self.optimizer = torch.optim.Adam([self.flat], lr=learning_rate, eps=eps, fused=True)
            self._moments = ("exp_avg", "exp_avg_sq")
        else:
            self.optimizer = torch.optim.RMSprop([self.flat], lr=learning_rate, eps=eps, alpha=0.99)
            self._moments = ("square_avg",)

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
        self.optimizer.step()
        return norm

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def state(self) -> dict[str, np.ndarray]:
        """Moments (P,) and the step count (), copies."""
        state = self.optimizer.state[self.flat]
        if not state:
            zeros = {name: np.zeros(self.flat.numel(), np.float32) for name in self._moments}
            return {**zeros, "step": np.zeros((), np.float32)}
        return {name: state[name].detach().cpu().numpy().copy() for name in (*self._moments, "step")}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; a ValueError where kind or size differ."""
        if set(state) != {*self._moments, "step"}:
            raise ValueError(f"FlatOptimizer: state must hold {', '.join(self._moments)} and step, got {sorted(state)}")
        for name in self._moments:
            if state[name].shape != (self.flat.numel(),):
                raise ValueError(
                    f"FlatOptimizer: {name} must have shape ({self.flat.numel()},), got {state[name].shape}; "
                    "the policy differs from the one that was saved"
                )
        device = self.flat.device
        moments = {name: torch.from_numpy(state[name].copy()).to(device) for name in self._moments}
        # Fused Adam counts its steps on the parameters' device, RMSprop on the CPU.
        counter = device if "exp_avg" in moments else torch.device("cpu")
        step = torch.tensor(float(state["step"]), dtype=torch.float32, device=counter)
        self.optimizer.state[self.flat] = {"step": step, **moments}

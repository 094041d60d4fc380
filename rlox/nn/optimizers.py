"""One flat block of parameters, one optimiser step over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.config import OPTIMIZERS, nearest

BETAS = (0.9, 0.999)


def keeps_denormals() -> bool:
    """Return whether PyTorch keeps denormal numbers; it cannot be asked, and the user may already flush them."""
    return bool(torch.tensor(1e-45, dtype=torch.float32, device="cpu") * 1 > 0)


class FlatOptimizer:
    """Adam or RMSprop with global-norm clipping over parameters laid out as views of one flat tensor (f32 or f64).

    One norm and one kernel replace a dozen small ones, which make up the cost of an MLP's step on a CPU. The parameters
    remain the module's: their ``.data`` and ``.grad`` become views, in the given order.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Parameters that do not require a gradient are ignored.
    learning_rate : float or Tensor () f32
        Step size. A tensor on the parameters' device can change between the replays of a CUDA graph.
    eps : float
        Denominator offset; the references of PPO and A2C use 1e-5.
    weight_decay : float
        For Adam: each step also subtracts this fraction of each parameter, times the learning rate (Loshchilov and
        Hutter 2019, arXiv:1711.05101).
    betas : (float, float)
        For Adam: the decays of the means of gradients and of their squares.
    kind : str
        ``adam``, or ``rmsprop`` (decay 0.99), as defined in `torch.optim`.

    Attributes
    ----------
    reduce : callable or None
        Called with the flat gradient (P,) before each step, to change it in place: the ranks of a data-parallel
        training replace it by its mean over ranks.

    Raises
    ------
    ValueError
        If no parameter is trainable, they differ in dtype or device, they are neither float32 nor float64, or the kind
        is unknown.
    """

    reduce: Callable[[torch.Tensor], None] | None = None

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float | torch.Tensor,
        eps: float = 1e-5,
        kind: str = "adam",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = BETAS,
    ):
        if kind not in OPTIMIZERS:
            raise ValueError(f"FlatOptimizer: kind must be known, got {kind!r}; {nearest(kind, OPTIMIZERS)}")
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ValueError("FlatOptimizer: parameters must hold at least one that requires a gradient, got none")
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            raise ValueError(f"FlatOptimizer: parameters must share dtype and device, got {sorted(map(str, kinds))}")
        if (dtype := self.parameters[0].dtype) not in (torch.float32, torch.float64):
            raise ValueError(
                f"FlatOptimizer: parameters must be float32 or float64, got {dtype}, which rounds small steps away; "
                "keep them in float32 (module.float()), and compute in bfloat16 with torch.autocast in its methods"
            )
        self._sizes = [p.numel() for p in self.parameters]
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.grad = torch.zeros_like(self.flat)
        parts = zip(self.parameters, self.flat.split(self._sizes), self.grad.split(self._sizes), strict=True)
        for p, values, grad in parts:
            p.data, p.grad = values.view_as(p), grad.view_as(p)
        self.learning_rate = self.initial_rate = learning_rate
        self.eps = eps
        self.weight_decay = weight_decay
        self.betas = betas
        names = ("exp_avg", "exp_avg_sq") if kind == "adam" else ("square_avg",)
        self._moments = {name: torch.zeros_like(self.flat) for name in names}
        self._steps = torch.zeros((), dtype=torch.float32, device=self.flat.device)
        self._keep_denormals = keeps_denormals()

    def step(self, loss: torch.Tensor, max_grad_norm: float | None) -> torch.Tensor:
        """Differentiate `loss` by these parameters only, clip the global gradient norm (None: do not), take one step.

        Returns the norm before clipping, ().
        """
        return self.descend(torch.autograd.grad(loss, self.parameters, materialize_grads=True), max_grad_norm)

    @torch.no_grad()
    def descend(self, grads: Sequence[torch.Tensor] | None, max_grad_norm: float | None = None) -> torch.Tensor:
        """Take a step like `step`, along given gradients, one for each parameter; None: along those in `grad`."""
        grad = self.grad
        if grads is not None:
            torch.cat([g.reshape(-1) for g in grads], out=grad)
        if self.reduce is not None:
            self.reduce(grad)
        norm = torch.linalg.vector_norm(grad)
        # A NaN norm stays NaN, so that a broken loss is visible in the returned norm and in the weights.
        excess = None if max_grad_norm is None else ((norm + 1e-6) / max_grad_norm).clamp_(min=1.0)
        # The moments of dead units decay below 1e-38, where each operation takes a CPU ten times as long.
        torch.set_flush_denormal(True)
        self._move(excess)
        torch.set_flush_denormal(not self._keep_denormals)
        return norm

    def _move(self, excess: torch.Tensor | None) -> None:
        """Move the parameters along `grad`, which is to be divided by `excess`. Another optimiser overrides this."""
        self._steps += 1
        grad = self.grad
        if "exp_avg" in self._moments:
            first, second = ([moment] for moment in self._moments.values())
            settings = (self.learning_rate, self.eps, self.weight_decay, excess, self.betas)
            adam_([self.flat], [grad], first, second, self._steps, *settings)
            return
        if excess is not None:
            grad /= excess
        square_avg = self._moments["square_avg"]
        square_avg.mul_(0.99).addcmul_(grad, grad, value=0.01)
        deviation = square_avg.sqrt().add_(self.eps)
        if isinstance(self.learning_rate, torch.Tensor):
            self.flat -= grad / deviation * self.learning_rate
        else:
            self.flat.addcdiv_(grad, deviation, value=-self.learning_rate)

    def step_accumulated(self, max_grad_norm: float | None = None) -> torch.Tensor:
        """Take a step like `step`, along the gradients that ``backward()`` has accumulated since the last step."""
        norm = self.descend(None, max_grad_norm)
        self.grad.zero_()
        return norm

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of the moments (P,) and the step count ()."""
        return {name: value.cpu().numpy().copy() for name, value in self._state().items()}

    def _state(self) -> dict[str, torch.Tensor]:
        return {**self._moments, "step": self._steps}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned. Raises ValueError if kind or size differ."""
        ours = self._state()
        if set(state) != set(ours):
            raise ValueError(f"FlatOptimizer: state must hold {', '.join(self._moments)} and step, got {sorted(state)}")
        for name in self._moments:
            if state[name].shape != (self.flat.numel(),):
                raise ValueError(
                    f"FlatOptimizer: {name} must have shape ({self.flat.numel()},), got {state[name].shape}; "
                    "the policy differs from the one that was saved"
                )
        for name, tensor in ours.items():
            tensor.copy_(torch.from_numpy(np.asarray(state[name])))


def adam_(
    parameters: list[torch.Tensor],
    grads: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    steps: torch.Tensor,
    learning_rate: float | torch.Tensor,
    eps: float,
    weight_decay: float,
    excess: torch.Tensor | None,
    betas: tuple[float, float] = BETAS,
) -> None:
    """Take one step of Adam, or with `weight_decay` of AdamW, along gradients divided by `excess`; update the moments.

    `steps` () f32 already includes this step. A `learning_rate` that is a tensor is () f32 on the same device.
    """
    if excess is not None and excess.dtype != torch.float32:
        torch._foreach_div_(grads, excess)  # the kernel divides by float32 only
        excess = None
    # torch.optim.Adam(fused=True) calls the same kernel, but spends as much time again in Python.
    step = torch._fused_adamw_ if weight_decay else torch._fused_adam_
    step(
        parameters, grads, first, second, [], [steps] * len(parameters), lr=learning_rate, beta1=betas[0],
        beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False, grad_scale=excess,
    )  # fmt: skip


def require_laid_out(where: str, optimizers: Iterable[Any]) -> None:
    """Raise ValueError if parameters have left the flat block of their `FlatOptimizer`, and would no longer learn."""
    for optimizer in optimizers:
        if isinstance(optimizer, FlatOptimizer) and not all(
            p.dtype == part.dtype and p.data_ptr() == part.data_ptr()
            for p, part in zip(optimizer.parameters, optimizer.flat.split(optimizer._sizes), strict=True)
        ):
            raise ValueError(
                f"{where}: the networks' parameters must stay in the optimiser's memory, but they were moved, "
                "converted or replaced, and would no longer learn. Copy values into them with load_state_dict or "
                "copy_, or pass the module as policy= to a new algorithm"
            )

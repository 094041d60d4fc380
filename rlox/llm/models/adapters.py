"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) with peft."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.llm.models.language import LanguageModel
from rlox.nn.sharding import put_

_FROZEN = "rlox_reference"  # name of the frozen copy of a model's adapters
_MOST_SAMPLED = 1 << 14  # values of each tensor that a fingerprint includes


def with_adapters(
    model: LanguageModel, rank: int, alpha: float, targets: Sequence[str] | None, seed: int
) -> LanguageModel:
    """Return `model` with adapters of a `rank`; only the adapters are trained.

    Their output is scaled by ``alpha / rank``. `targets` are suffixes of the names of the modules that get an adapter;
    None stands for all linear modules except the last.

    Their initial weights depend only on `seed`; the state of PyTorch's generator is unchanged.

    Raises
    ------
    ImportError
        If peft is not installed.
    ValueError
        If the module is not a Hugging Face model, already has adapters, or lacks the targets.
    """
    where = model.where
    if hasattr(model.module, "disable_adapter"):
        raise ValueError(f"{where}: lora_rank must be null for a model that has adapters already, got {rank}")
    if not model.hugging_face:
        raise ValueError(
            f"{where}: lora_rank must be null for a module of your own, got {rank}: peft knows the layers of "
            "Hugging Face's models"
        )
    try:
        import peft
    except ImportError as e:
        raise ImportError(f'{where}: lora_rank needs peft; pip install "rlox-cli[llm]"') from e
    chosen = [*targets] if targets else "all-linear"
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)  # as it must be
                adapted = peft.get_peft_model(model.module, settings)
        except ValueError as e:
            raise ValueError(f"{where}: lora_targets must name modules of the model, got {targets}: {e}") from e
    return LanguageModel(adapted, model.tokenizer, model.eos, where)


class FrozenAdapters:
    """A copy of the active adapters of a peft model, which stays as they are now. The model contains it, unused.

    A copy that an earlier training left in the model is replaced. `full` gathers a tensor that is sharded.
    """

    def __init__(self, module: Any, full: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._module, self._full, self._active = module, full, module.active_adapter
        self._trained = {name: p.requires_grad for name, p in module.named_parameters() if not _is_frozen(name)}
        if _FROZEN in module.peft_config:
            module.delete_adapter(_FROZEN)
        settings = copy.copy(module.peft_config[self._active])
        settings.inference_mode = True
        if hasattr(settings, "init_lora_weights"):
            settings.init_lora_weights = True  # some other ways to create adapters change the model's weights
        device = next(module.parameters()).device
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
            module.add_adapter(_FROZEN, settings)
        module.train(module.training)
        self._switch(self._active)
        parameters = dict(module.named_parameters())
        names = {name: ".".join(_FROZEN if x == self._active else x for x in name.split(".")) for name in self._trained}
        self._names = {name: other for name, other in names.items() if other != name and other in parameters}
        for p, frozen in self._copies().values():
            frozen.data = p.detach().float().clone()  # trained weights become float32

    def _copies(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Return each parameter and its copy. Sharding replaces parameters by others."""
        parameters = dict(self._module.named_parameters())
        return {name: (parameters[name], parameters[other]) for name, other in self._names.items()}

    def _switch(self, name: str) -> None:
        self._module.set_adapter(name)
        # peft changes which parameters have a gradient.
        for other, p in self._module.named_parameters():
            p.requires_grad_(self._trained.get(other, False))

    @torch.no_grad()
    def follow_(self) -> None:
        """Copy the active adapters as they are now."""
        for p, frozen in self._copies().values():
            frozen.copy_(p)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model use the copy instead of the active adapters."""
        self._switch(_FROZEN)
        try:
            yield
        finally:
            self._switch(self._active)

    def state(self) -> dict[str, np.ndarray]:
        """Return the copy, by the names of the active adapters."""
        return {name: self._full(frozen).detach().cpu().numpy() for name, (_, frozen) in self._copies().items()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `state`. Raises ValueError if names or shapes differ."""
        theirs = {name: array.shape for name, array in state.items()}
        if {name: tuple(frozen.shape) for name, (_, frozen) in self._copies().items()} != theirs:
            raise ValueError("the reference must have the adapters of the checkpoint, got others")
        for name, (_, frozen) in self._copies().items():
            put_(frozen, state[name])


def _is_frozen(name: str) -> bool:
    """Return whether a parameter with this name belongs to `FrozenAdapters`."""
    return _FROZEN in name.split(".")


def fingerprint(module: nn.Module) -> str:
    """Hash the frozen weights that adapters are applied to: their shapes, and a sample of the values of each.

    The hash does not depend on their names, order and device, which libraries change, and is the same for weights
    that are stored in float32 and in bfloat16.
    """
    base = [p for name, p in module.named_parameters() if not p.requires_grad and not _is_frozen(name)]
    return hashlib.sha256(b"".join(sorted(map(_digest, base)))).hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    # An odd step, since a step that divides the row length would sample the same columns of every row.
    some = flat[:: len(flat) // _MOST_SAMPLED | 1]
    if some.is_floating_point():
        some = some.to(torch.bfloat16).view(torch.int16)
    values = some.cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(repr(tuple(tensor.shape)).encode() + values.tobytes()).digest()


def require_base(saved: Mapping[str, Any], base: str | None, where: str, path: str | os.PathLike) -> None:
    """Raise a ValueError unless the adapters `saved` at `path` were trained on a model with the fingerprint `base`."""
    if saved.get("base") not in (None, base):  # missing in older checkpoints
        raise ValueError(
            f"{where}: model must be the one that the adapters of {path} were trained on, got one with other weights; "
            "pass that model or put it back, or start a new training on this model with init_from"
        )

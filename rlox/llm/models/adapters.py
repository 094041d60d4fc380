"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) with peft."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlox.llm.models.language import LanguageModel

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
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[*targets] if targets else "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
                adapted = peft.get_peft_model(model.module, settings)
        except ValueError as e:
            raise ValueError(f"{where}: lora_targets must name modules of the model, got {targets}: {e}") from e
    return LanguageModel(adapted, model.tokenizer, model.eos or None, where)


def fingerprint(module: nn.Module) -> str:
    """Hash the frozen weights that adapters are applied to: their shapes, and a sample of the values of each.

    The hash does not depend on their names, order and device, which libraries change, and is the same for weights
    that are stored in float32 and in bfloat16.
    """
    return hashlib.sha256(b"".join(sorted(_digest(p) for p in module.parameters() if not p.requires_grad))).hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    # An odd step, since a step that divides the row length would sample the same columns of every row.
    some = flat[:: len(flat) // _MOST_SAMPLED | 1]
    if some.is_floating_point():
        some = some.to(torch.bfloat16).view(torch.int16)
    values = some.cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(repr(tuple(tensor.shape)).encode() + values.tobytes()).digest()


def require_base(saved: Mapping[str, Any], found: str | None, where: str, path: str | os.PathLike) -> None:
    """Raise a ValueError unless the base model of the adapters `saved` at `path` has the fingerprint `found`."""
    known = saved.get("base")  # missing in older checkpoints
    if known is not None and known != found:
        raise ValueError(
            f"{where}: model must be the one that the adapters of {path} were trained on, got one with other weights; "
            "pass that model or put it back, or start a new training on this model with init_from"
        )

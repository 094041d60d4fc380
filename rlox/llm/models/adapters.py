"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), by peft."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlox.llm.models.language import LanguageModel

_MOST_SAMPLED = 1 << 14  # values of each tensor that a fingerprint is made of


def with_adapters(
    model: LanguageModel, rank: int, alpha: float, targets: Sequence[str] | None, seed: int
) -> LanguageModel:
    """`model` with adapters of a `rank`, which alone are trained.

    Their output is scaled by ``alpha / rank``; `targets` are the ends of the names of the modules that get one, None:
    all linear ones but the last.

    Their first weights depend on `seed` alone; PyTorch's generator is left as it was.

    Raises
    ------
    ImportError
        Without peft.
    ValueError
        For a module that is none of Hugging Face's, one that has adapters, and targets that it lacks.
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
                warnings.simplefilter("ignore", FutureWarning)  # what peft asks transformers by its old name
                adapted = peft.get_peft_model(model.module, settings)
        except ValueError as e:
            raise ValueError(f"{where}: lora_targets must name modules of the model, got {targets}: {e}") from e
    return LanguageModel(adapted, model.tokenizer, model.eos or None, where)


def fingerprint(module: nn.Module) -> str:
    """A hash of the weights that adapters leave as they are: of their shapes, and of a sample of each one's values.

    It depends on neither their names, their order nor their device, which libraries change, and is the same for
    weights that are stored in float32 and in bfloat16.
    """
    return hashlib.sha256(b"".join(sorted(_digest(p) for p in module.parameters() if not p.requires_grad))).hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    # An odd step: one that divides the rows' length would see the same columns in each of them.
    some = flat[:: len(flat) // _MOST_SAMPLED | 1]
    if some.is_floating_point():
        some = some.to(torch.bfloat16).view(torch.int16)
    values = some.cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(repr(tuple(tensor.shape)).encode() + values.tobytes()).digest()


def require_base(saved: Mapping[str, Any], found: str | None, where: str, path: str | os.PathLike) -> None:
    """A ValueError where the adapters of the model that was `saved` at `path` are around another one than that whose
    fingerprint was `found`."""
    known = saved.get("base")  # older checkpoints do not say
    if known is not None and known != found:
        raise ValueError(
            f"{where}: model must be the one that the adapters of {path} were trained on, got one with other weights; "
            "pass that model or put it back, or start a new training on this one by init_from"
        )

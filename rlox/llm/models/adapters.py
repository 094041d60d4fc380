"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), by peft."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from rlox.llm.models.language import LanguageModel


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

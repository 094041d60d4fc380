"""A backend that samples in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.llm.backends.base import Backend, Capabilities
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Completions, Settings, sample
from rlox.llm.tokens import Sequences


class HFBackend(Backend):
    """Samples with a model in this process, by `rlox.llm.sampling.sample`.

    Parameters
    ----------
    model : nn.Module
        A model as for `rlox.training.post_training.LLMAlgorithm`: a separate one, or the one that is trained.
    tokenizer, eos_token_id : optional
        See `LLMAlgorithm`.
    """

    kind = "hf"
    capabilities = Capabilities(n=True, token_ids=True, scoring=True, weight_sync=True, lora=False)

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        eos_token_id: int | Iterable[int] | None = None,
        **more: Any,
    ):
        super().__init__(**more)
        self.model = LanguageModel(model, tokenizer, eos_token_id, self.where)
        self.bind(self.model)

    def complete(self, prompts: Sequence[Any], n: int, settings: Settings, seed: int) -> Completions:
        return sample(self.model, prompts, settings, n=n, seed=seed)

    @torch.no_grad()
    def score(self, sequences: Sequence[Any]) -> list[np.ndarray]:
        rows = [np.asarray(ids, np.int64) for ids in sequences]
        layout = self.model.layout(Sequences([ids[:1] for ids in rows], [ids[1:] for ids in rows]))
        log_probs = self.model.score(layout).log_probs.cpu().numpy()
        return np.split(log_probs, np.cumsum([len(ids) - 1 for ids in rows])[:-1])

    @torch.no_grad()
    def sync(self, model: LanguageModel, folder: str | os.PathLike | None = None) -> None:
        if model.module is self.model.module:
            return
        from rlox.llm.models.saved import copy_merged

        theirs = copy_merged(model).state_dict()
        ours = self.model.module.state_dict()
        if theirs.keys() != ours.keys() or any(theirs[name].shape != x.shape for name, x in ours.items()):
            raise ValueError(f"{self.where}: model must have the weights of the model that is trained, got others")
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])

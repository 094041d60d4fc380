"""A reward for a whole sequence, from a language model with one output instead of one for each token id."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlox.kernels.rng import Rng
from rlox.llm.models.language import LanguageModel
from rlox.llm.models.masks import without_masks
from rlox.llm.tokens import Sequences
from rlox.nn.transfers import send


class RewardHead(nn.Module):
    """Computes rewards of sequences.

    For a Hugging Face model, the reward is a linear function of the last token's hidden state. A custom module,
    ``forward(ids) -> (B,)``, returns the rewards itself.

    Parameters
    ----------
    model : LanguageModel
        Its output layer is not used.
    rng : Rng
        Draws the weights of the linear function, with standard deviation ``1 / sqrt(width + 1)``.
    """

    def __init__(self, model: LanguageModel, rng: Rng) -> None:
        super().__init__()
        self._model = model
        self.model = model.module
        self.head: nn.Linear | None = None
        if model.hugging_face:
            assert model.config is not None
            config = model.config.get_text_config()
            # OPT may project its hidden states to the width of its embeddings.
            width = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
            self.head = nn.Linear(width, 1, dtype=torch.float32, device="cpu")
            with torch.no_grad():
                self.head.weight.copy_(torch.from_numpy(rng.normal((1, width)) / np.sqrt(width + 1)))
                self.head.bias.zero_()
            self.head.to(model.device)

    def forward(self, sequences: Sequences) -> torch.Tensor:
        """Return rewards (B,) f32; raises a TypeError or ValueError if a custom module returns anything else."""
        self._model.evaluation_mode()
        ids, lengths = sequences.padded_rows()
        last = send(lengths - 1, self._model.device)
        padded = send(ids, self._model.device)
        if self.head is not None:
            inside: Any = self._model.base.base_model
            with without_masks(self._model):
                hidden = inside(input_ids=padded, use_cache=False).last_hidden_state
            # Autocast would compute in bfloat16 in spite of float32 inputs, and many rewards would be equal. Weights
            # that are gathered from several ranks may be bfloat16.
            with torch.autocast(hidden.device.type, enabled=False):
                x = hidden[torch.arange(len(last), device=last.device), last].float()
                rewards = F.linear(x, self.head.weight.float(), self.head.bias.float())
            return rewards[:, 0].clone()  # not a view, which FSDP warns about, since it might be changed in place
        rewards = torch.zeros(len(lengths), dtype=torch.float32, device=self._model.device)
        # Only rows of the same length together, since a custom module may not handle padding.
        for length in np.unique(lengths):
            rows = torch.from_numpy(np.flatnonzero(lengths == length)).to(self._model.device)
            rewards = rewards.index_copy(0, rows, self._own(padded[rows, :length]))
        return rewards

    def blank(self) -> torch.Tensor:
        """Run a forward pass on two tokens, for a rank that only takes part in another rank's pass."""
        return self(Sequences([np.zeros(1, np.int64)], [np.zeros(1, np.int64)]))

    def _own(self, ids: torch.Tensor) -> torch.Tensor:
        rewards, where = self.model(ids), self._model.where
        if not isinstance(rewards, torch.Tensor):
            raise TypeError(f"{where}: model must return rewards (B,), got {type(rewards).__name__}")
        if rewards.shape not in ((len(ids),), (len(ids), 1)):
            raise ValueError(f"{where}: model must return rewards ({len(ids)},), got {tuple(rewards.shape)}")
        return rewards.reshape(-1).float()

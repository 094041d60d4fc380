"""Supervised fine-tuning by maximum likelihood (Ouyang et al. 2022, arXiv:2203.02155, section 3.5, step 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.config import SFTConfig
from rlox.llm.encoded import Encoded
from rlox.llm.losses import sequence_sums
from rlox.llm.tokens import Sequences, in_parts
from rlox.nn.transfers import send
from rlox.training.post_training import LLMAlgorithm


class SFT(LLMAlgorithm):
    """Learns the dataset's completions as labels; prompts are only context. See `rlox.config.SFTConfig`.

    Parameters
    ----------
    model, callbacks, logger, **more
        See `rlox.training.post_training.LLMAlgorithm`. Rows have ``prompt`` and ``completion``, or ``text``, or
        ``messages``, whose last answer is learned.
    """

    name = "sft"
    Config = SFTConfig
    _data_parallel = True
    task = "texts"
    config: SFTConfig

    def batch(self, rows: Encoded, numbers: np.ndarray) -> Sequences:
        """Return the rows `numbers`, whose completions are scored."""
        return Sequences([rows.prompts[i] for i in numbers], [rows.completions[i] for i in numbers])

    def update(self, batch: Sequences) -> dict[str, torch.Tensor]:
        """Take one step of the optimiser. Returns metrics as scalar tensors."""
        self.follow_schedule()
        # With several ranks, the mean over ranks, because their gradients are averaged.
        total = max(float(self.ranks.mean(torch.tensor(float(batch.n_scored.sum()), device="cpu"))), 1.0)
        loss, entropy, right = torch.zeros(3, dtype=torch.float32, device=self.device).unbind()
        for rows in in_parts(len(batch), self.config.accumulation):
            part, _ = batch.take(rows)
            scores = self.score(part, entropy=True)
            mine = -scores.log_probs.sum() / total  # the mean over all tokens of the batch
            mine.backward()
            loss = loss + mine.detach()
            entropy = entropy + scores.entropies.detach().sum() / total  # type: ignore[union-attr]
            right = right + (scores.log_probs > -0.6931472).sum() / total
        grad_norm = self.optimizer.step_accumulated(self.config.max_grad_norm)
        return {"loss": loss, "entropy": entropy, "likely_tokens": right, "grad_norm": grad_norm}

    def train_step(self, prompt: Any, completion: Any = None) -> dict[str, float]:
        """Take one step on token ids, (B, P) and (B, C) or lists of (P_i,) and (C_i,), or on rows of text. Returns its
        metrics."""
        return super().train_step(prompt if completion is None else (prompt, completion))

    @torch.no_grad()
    def row_scores(self, rows: Encoded, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean log-probability of each completion's tokens, in nats."""
        means, lengths = [], []
        for part in np.array_split(numbers, -(-len(numbers) // self.config.batch_size)):
            batch = self.batch(rows, part)
            sums = sequence_sums(self.log_probs(batch), send(batch.owner, self.device), len(batch)).cpu().numpy()
            means.append(sums / np.maximum(batch.n_scored, 1))
            lengths.append(batch.n_scored)
        return np.concatenate(means).astype(float), np.concatenate(lengths)

"""A reward model from preferences (Ouyang et al. 2022, arXiv:2203.02155, section 3.5, step 2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlox.collectors.evaluation import torch_threads
from rlox.config import RewardModelConfig, shown
from rlox.kernels.rng import Rng
from rlox.llm.encoded import Encoded, encoded
from rlox.llm.losses import bradley_terry_loss
from rlox.llm.models.heads import RewardHead
from rlox.llm.pairs import Pairs, pairs_of
from rlox.llm.tokens import Sequences, in_parts
from rlox.training.post_training import LLMAlgorithm


class RewardModel(LLMAlgorithm):
    """Learns a reward by which the chosen completion of each pair earns more than the rejected one. See
    `rlox.config.RewardModelConfig`.

    The reward is a linear function of what the model makes of the last token; a module of the user's own returns
    rewards (B,) itself. What was trained is a reward function: `score_batch`.

    Parameters
    ----------
    model, callbacks, logger, **more
        See `rlox.training.post_training.LLMAlgorithm`. Rows have ``prompt``, ``chosen`` and ``rejected``, and may have
        ``margin``: by how much the rewards are to differ.
    """

    name = "reward_model"
    Config = RewardModelConfig
    data_parallel = True
    task = "pairs"
    config: RewardModelConfig
    policy: RewardHead

    def setup(self, rng: Rng) -> None:
        self._policy = RewardHead(self.model, rng)
        super().setup(rng)

    def batch(self, rows: Encoded, numbers: np.ndarray) -> Pairs:
        """The pairs `numbers` of `rows`."""
        return pairs_of(rows, numbers)

    def update(self, batch: Pairs) -> dict[str, torch.Tensor]:
        """One step of the optimiser; metrics as tensors ()."""
        c, total = self.config, len(batch)
        self.follow_schedule()
        found: list[dict[str, torch.Tensor]] = []
        for rows in in_parts(total, c.accumulation):
            part, _ = batch.sequences.take(np.concatenate([rows, rows + total]))
            chosen, rejected = self.rewards(part).view(2, -1)
            margin = None if batch.margins is None else torch.from_numpy(batch.margins[rows]).to(self.device)
            loss = bradley_terry_loss(chosen, rejected, margin, c.center).sum() / total
            loss.backward()
            apart = (chosen - rejected).detach()
            found.append(
                {
                    "loss": loss.detach(),
                    "accuracy": (apart > 0).float().sum() / total,
                    "margin": apart.sum() / total,
                    "chosen_reward": chosen.detach().sum() / total,
                    "rejected_reward": rejected.detach().sum() / total,
                }
            )
        metrics = {name: torch.stack([part[name] for part in found]).sum() for name in found[0]}
        return {**metrics, "grad_norm": self.optimizer.step_accumulated(c.max_grad_norm)}

    def rewards(self, sequences: Sequences) -> torch.Tensor:
        """Rewards (B,) f32, to be differentiated."""
        with self.cast(), self.model.learning():
            return self.policy(sequences).float()

    def train_step(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> dict[str, float]:
        """One step on pairs of token ids, as `rlox.DPO.compute_loss` takes them, or on rows of text; returns its
        metrics."""
        return super().train_step(prompt if chosen is None and rejected is None else (prompt, chosen, rejected))

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Nothing: a ValueError says that no file of Hugging Face's holds the reward's layer as it is here."""
        raise ValueError(
            "RewardModel.save_pretrained: a reward model must be kept by save(path), whose file holds its last layer "
            "too; RewardModel.from_checkpoint(path) reads it"
        )

    def generate(self, *prompts: Any, **settings: Any) -> Any:
        """Nothing: a TypeError says that a reward model completes no prompts."""
        raise TypeError(
            "RewardModel.generate: a reward model completes no prompts; call score_batch(prompts, completions)"
        )

    def examples(self, n: int) -> list[tuple[Any, str, float | None]]:
        """None: a reward model completes nothing."""
        return []

    @torch.no_grad()
    def score_batch(self, prompts: Sequence[Any], completions: Sequence[str]) -> np.ndarray:
        """Rewards (N,) f64 of completions, texts, for their prompts, texts or conversations.

        Raises
        ------
        ValueError
            Where their numbers differ, and without a tokenizer.
        """
        if len(prompts) != len(completions):
            raise ValueError(
                f"RewardModel.score_batch: there must be one prompt for each completion, got {len(prompts)} and "
                f"{len(completions)}"
            )
        if not len(prompts):
            return np.empty(0)
        texts = [{"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True)]
        rows = encoded(texts, "texts", self.model, "RewardModel.score_batch")
        found = []
        with torch_threads(self.threads):
            for part in np.array_split(np.arange(len(rows)), -(-len(rows) // self.config.batch_size)):
                batch = Sequences([rows.prompts[i] for i in part], [rows.completions[i] for i in part])
                found.append(self.rewards(batch).cpu().numpy())
        rewards = np.concatenate(found).astype(np.float64)
        if not np.isfinite(rewards).all():
            bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise ValueError(
                f"RewardModel.score_batch: rewards must be finite, got {rewards[bad]} for {shown(texts[bad])}"
            )
        return rewards

    @torch.no_grad()
    def row_scores(self, rows: Encoded, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """1 where the chosen completion earns more, else 0."""
        right, lengths = [], []
        for part in np.array_split(numbers, -(-len(numbers) // self.config.batch_size)):
            batch = self.batch(rows, part)
            chosen, rejected = self.rewards(batch.sequences).view(2, -1).cpu().numpy()
            right.append(chosen > rejected)
            lengths.append(batch.sequences.n_scored[: len(batch)])
        return np.concatenate(right).astype(float), np.concatenate(lengths)

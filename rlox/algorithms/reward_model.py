"""A reward model learned from preferences (Ouyang et al. 2022, arXiv:2203.02155, section 3.5, step 2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlox.config import RewardModelConfig
from rlox.kernels.rng import Rng
from rlox.llm.encoded import Encoded, Pairs, encode_dataset, margins_of, pairs_of
from rlox.llm.losses import bradley_terry_loss
from rlox.llm.models.heads import RewardHead
from rlox.llm.rewards.functions import pair_excerpt
from rlox.llm.tokens import Sequences, in_parts, unique_rows
from rlox.nn.modes import torch_threads
from rlox.nn.transfers import send
from rlox.training.post_training import LLMAlgorithm


class RewardModel(LLMAlgorithm):
    """Learns a reward that is larger for the chosen completion of each pair than for the rejected completion. See
    `rlox.config.RewardModelConfig`.

    The reward is a linear function of the model's output at the last token; a custom module returns rewards (B,)
    itself. The trained model is used as a reward function with `score_batch`.

    Parameters
    ----------
    model, callbacks, logger, **more
        See `rlox.training.post_training.LLMAlgorithm`. Rows have ``prompt``, ``chosen`` and ``rejected``, and may have
        ``margin``, the wanted difference of the rewards.
    """

    name = "reward_model"
    Config = RewardModelConfig
    _data_parallel = True
    task = "pairs"
    config: RewardModelConfig
    policy: RewardHead

    def setup(self, rng: Rng) -> None:
        self._policy = RewardHead(self.model, rng)
        super().setup(rng)

    def _encode(self, dataset: Any) -> Encoded:
        rows = super()._encode(dataset)
        margins_of(rows, range(len(rows)), type(self).__name__)  # raises an error before the training
        return rows

    def batch(self, rows: Encoded, numbers: np.ndarray) -> Pairs:
        """Return the pairs `numbers` of `rows`."""
        return pairs_of(rows, numbers, margins_of(rows, numbers, type(self).__name__))

    def update(self, batch: Pairs) -> dict[str, torch.Tensor]:
        """Take one step of the optimiser. Returns metrics as scalar tensors."""
        c, total = self.config, len(batch)
        self.follow_schedule()
        found: list[dict[str, torch.Tensor]] = []
        for rows in in_parts(total, c.accumulation):
            part, _ = batch.sequences.take(np.concatenate([rows, rows + total]))
            chosen, rejected = self.rewards(part).view(2, -1)
            margin = None if batch.margins is None else send(batch.margins[rows], self.device)
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
        """Return differentiable rewards (B,) f32."""
        with self.cast(), self.model.learning():
            return self.policy(sequences).float()

    def train_step(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> dict[str, float]:
        """Take one step on pairs of token ids, as for `rlox.DPO.compute_loss`, or on rows of text. Returns its
        metrics."""
        return super().train_step(prompt if chosen is None and rejected is None else (prompt, chosen, rejected))

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Raise ValueError: Hugging Face's files have no place for this reward layer."""
        raise ValueError(
            "RewardModel.save_pretrained: a reward model must be saved with save(path), which also stores its last "
            "layer; RewardModel.from_checkpoint(path) reads it"
        )

    def generate(self, *prompts: Any, **settings: Any) -> Any:
        """Raise TypeError: a reward model cannot generate completions."""
        raise TypeError(
            "RewardModel.generate: a reward model cannot complete prompts; call score_batch(prompts, completions)"
        )

    def examples(self, n: int) -> list[tuple[Any, str, float | None]]:
        """Return no examples: a reward model generates no completions."""
        return []

    @torch.no_grad()
    def score_batch(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        ended: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Return rewards (N,) f64 of completions (texts) for their prompts (texts or conversations).

        Equal rows have equal rewards, to the last bit. Completions with False in `ended` were cut off, and are read
        without an EOS. `tools` and `chat_template_kwargs` contain the arguments of each row's chat template, or None.

        Raises
        ------
        ValueError
            If there are not as many prompts as completions, there is no tokenizer, or a row is longer than the model's
            context.
        """
        if len(prompts) != len(completions):
            raise ValueError(
                f"RewardModel.score_batch: there must be one prompt for each completion, got {len(prompts)} and "
                f"{len(completions)}"
            )
        if not len(prompts):
            return np.empty(0)
        arguments = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        texts = {"prompt": list(prompts), "completion": list(completions)}
        texts |= {name: list(values) for name, values in arguments.items() if values is not None}
        rows = encode_dataset(texts, "texts", self.model, "RewardModel.score_batch", ended=ended)
        first, index = unique_rows(np.concatenate(pair) for pair in zip(rows.prompts, rows.completions, strict=True))
        found = []
        with torch_threads(self._threads):
            for part in np.array_split(first, -(-len(first) // self.config.batch_size)):
                batch = Sequences([rows.prompts[i] for i in part], [rows.completions[i] for i in part])
                found.append(self.rewards(batch).cpu().numpy())
        rewards = np.concatenate(found).astype(np.float64)[index]
        if not np.isfinite(rewards).all():
            bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise ValueError(
                f"RewardModel.score_batch: rewards must be finite, got {rewards[bad]} "
                f"({pair_excerpt(prompts[bad], completions[bad])})"
            )
        return rewards

    @torch.no_grad()
    def row_scores(self, rows: Encoded, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return 1 where the chosen completion has the larger reward, else 0."""
        right, lengths = [], []
        for part in np.array_split(numbers, -(-len(numbers) // self.config.batch_size)):
            batch = self.batch(rows, part)
            chosen, rejected = self.rewards(batch.sequences).view(2, -1).cpu().numpy()
            right.append(chosen > rejected)
            lengths.append(batch.sequences.n_scored[: len(batch)])
        return np.concatenate(right).astype(float), np.concatenate(lengths)

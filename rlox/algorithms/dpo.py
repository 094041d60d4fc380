"""Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290) and later variants of its loss: see
`rlox.llm.losses.preference_loss`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.checkpoint import Checkpoint
from rlox.config import DPOConfig
from rlox.kernels.rng import Rng
from rlox.llm.encoded import Encoded, Pairs, pairs_of
from rlox.llm.losses import preference_loss, sequence_sums
from rlox.llm.models.reference import ReferenceCache
from rlox.llm.tokens import in_parts
from rlox.nn.transfers import send
from rlox.training.algorithm import to_floats
from rlox.training.post_training import LLMAlgorithm


class DPO(LLMAlgorithm):
    """Makes the chosen completion of each pair likelier than the rejected one, relative to the reference. See
    `rlox.config.DPOConfig`.

    The reference model reads each pair of the dataset once. Its log-probabilities are kept, also in checkpoints; if
    another `ref_model` is passed to `from_checkpoint`, it reads the pairs again.

    Parameters
    ----------
    model, ref_model, callbacks, logger, **more
        See `rlox.training.post_training.LLMAlgorithm`. Rows have ``prompt``, ``chosen`` and ``rejected``.
    """

    name = "dpo"
    Config = DPOConfig
    _data_parallel = True
    task = "pairs"
    has_reference = True
    config: DPOConfig

    def setup(self, rng: Rng) -> None:
        super().setup(rng)
        assert self.reference is not None
        given = "" if "reference" in self._parts else self.reference.fingerprint
        self._known = self.keep("reference_log_probs", ReferenceCache(given))
        self._drawn: Pairs | None = None

    def use(self, dataset: Any) -> None:
        before = self.rows
        super().use(dataset)
        assert self.rows is not None
        if before is None or before.fingerprint != self.rows.fingerprint:
            self._known.reset(len(self.rows))

    def _start_from(self, checkpoint: Checkpoint, where: str) -> None:
        super()._start_from(checkpoint, where)
        self._known.forget()

    def batch(self, rows: Encoded, numbers: np.ndarray) -> Pairs:
        """Return the pairs `numbers` of `rows`."""
        return pairs_of(rows, numbers)

    def sample(self) -> Pairs:
        """Return the batch of the next update."""
        self._drawn = super().sample()
        return self._drawn

    def update(self, batch: Pairs) -> dict[str, torch.Tensor]:
        """Take one step of the optimiser. Returns metrics as scalar tensors."""
        self.follow_schedule()
        reference = self._reference_sums(batch, self._own(batch))
        found = [
            self._loss(batch, rows, reference, backward=True) for rows in in_parts(len(batch), self.config.accumulation)
        ]
        metrics = {name: torch.stack([part[name] for part in found]).sum() for name in found[0]}
        metrics["grad_norm"] = self.optimizer.step_accumulated(self.config.max_grad_norm)
        if self.follow_reference():
            self._known.forget()
        return metrics

    def _loss(self, batch: Pairs, rows: np.ndarray, reference: torch.Tensor, backward: bool) -> dict[str, torch.Tensor]:
        """Return the share of the pairs `rows` (M,) in the batch's loss and metrics; all shares add up to its means."""
        c, n, total = self.config, len(rows), len(batch)
        sequences, _ = batch.sequences.take(np.concatenate([rows, rows + total]))
        log_probs = self.score(sequences).log_probs
        sums = sequence_sums(log_probs, send(sequences.owner, self.device), 2 * n)
        index = send(rows, self.device)
        gains = sums.view(2, n) - reference[:, index]  # log policy - log reference, of chosen and rejected
        lengths = send(sequences.n_scored, self.device).clamp(min=1).view(2, n)
        means = gains / lengths
        losses = preference_loss(gains[0] - gains[1], means[0] - means[1], c.beta, c.loss_type, c.label_smoothing)
        loss = losses.sum() / total
        if backward:
            loss.backward()
        rewards = c.beta * gains.detach()
        return {
            "loss": loss if not backward else loss.detach(),
            "accuracy": (rewards[0] > rewards[1]).float().sum() / total,
            "margin": (rewards[0] - rewards[1]).sum() / total,
            "chosen_reward": rewards[0].sum() / total,
            "rejected_reward": rewards[1].sum() / total,
            "chosen_log_prob": sums[:n].detach().sum() / total,
            "rejected_log_prob": sums[n:].detach().sum() / total,
        }

    def _own(self, batch: Pairs) -> bool:
        """Return whether the pairs are rows of the dataset, as drawn by `sample`."""
        return batch is self._drawn

    def _reference_sums(self, batch: Pairs, known: bool, keep: bool = True) -> torch.Tensor:
        """Return the reference's log-probabilities (2, B) of chosen and rejected completions.

        With `known` they are looked up in the cache; with `keep` as well, new results are stored there.
        """
        found = self._known.get(batch.numbers) if known else None
        if found is None:
            log_probs = self.log_probs(batch.sequences, reference=True)
            owner = send(batch.sequences.owner, self.device)
            found = sequence_sums(log_probs, owner, 2 * len(batch)).view(2, -1).cpu().numpy()
            if known and keep:
                found = self._known.put(batch.numbers, found)
        return send(found, self.device)

    def compute_loss(self, prompt: Any, chosen: Any, rejected: Any) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the differentiable loss of pairs of token ids, and its metrics.

        Parameters
        ----------
        prompt, chosen, rejected
            Token ids (B, P), (B, C) and (B, R), or lists of (P_i,), (C_i,) and (R_i,). A tokenizer's padding is
            removed from the end of chosen and rejected, and from the beginning of prompts.
        """
        batch = self._batch_of((prompt, chosen, rejected))
        found = self._loss(batch, np.arange(len(batch)), self._reference_sums(batch, known=False), backward=False)
        loss = found.pop("loss")
        return loss, to_floats({"loss": loss.detach(), **found})

    def train_step(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> dict[str, float]:
        """Take one step on pairs, given as to `compute_loss` or as rows of text. Returns its metrics."""
        return super().train_step(prompt if chosen is None and rejected is None else (prompt, chosen, rejected))

    @torch.no_grad()
    def row_scores(self, rows: Encoded, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return 1 where the policy prefers the chosen completion more than the reference does, else 0."""
        right, lengths = [], []
        for part in np.array_split(numbers, -(-len(numbers) // self.config.batch_size)):
            batch = self.batch(rows, part)
            log_probs = self.log_probs(batch.sequences)
            sums = sequence_sums(log_probs, send(batch.sequences.owner, self.device), 2 * len(batch)).view(2, -1)
            # Nothing is cached, so that an evaluation cannot change what is learned, not even in the last bits.
            gains = (sums - self._reference_sums(batch, rows is self.rows, keep=False)).cpu().numpy()
            right.append(gains[0] > gains[1])
            lengths.append(batch.sequences.n_scored[: len(batch)])
        return np.concatenate(right).astype(float), np.concatenate(lengths)

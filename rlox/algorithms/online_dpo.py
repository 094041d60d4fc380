"""Online DPO: pairs of the policy's own completions (Guo et al. 2024, "Direct Language Model Alignment from Online AI
Feedback", arXiv:2402.04792)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.collectors.evaluation import torch_threads
from rlox.config import OnlineDPOConfig
from rlox.llm.encoded import Encoded
from rlox.llm.losses import preference_loss, sequence_sums
from rlox.llm.rewards.preferences import Preferences
from rlox.llm.rewards.scoring import texts_of
from rlox.llm.tokens import Sequences, in_parts
from rlox.training.post_training import LLMAlgorithm, Scored

_METRICS = ("accuracy", "margin", "chosen_reward", "rejected_reward")  # beside the loss, means over the pairs


@dataclass(frozen=True)
class JudgedPairs:
    """B pairs that were judged: the preferred completions are the first B sequences, the others follow."""

    sequences: Sequences
    n_undecided: int  # pairs of which neither was preferred; they are left out
    ended: np.ndarray  # bool, of all completions that were sampled
    lengths: np.ndarray  # their tokens
    rewards: np.ndarray | None  # f64, of all of them, where a reward function judged

    def __len__(self) -> int:
        return len(self.sequences) // 2


class OnlineDPO(LLMAlgorithm):
    """Samples two completions for each prompt, asks which is the better one, and takes a step of DPO on the pairs. See
    `rlox.config.OnlineDPOConfig`.

    Parameters
    ----------
    model, ref_model
        See `rlox.training.post_training.LLMAlgorithm`.
    preference_fn : callable, optional
        ``(prompts, completions) -> indices`` of texts, where a completion is a pair of them: for each prompt 0 or 1 for
        the one preferred, or None where neither is.
    callbacks, logger
        See `LLMAlgorithm`.
    reward_fn : callable or list of callable, optional
        In place of `preference_fn`: as `rlox.GRPO` takes it; the completion with the larger reward is preferred.
    reward_weights : list of float, optional
        One for each reward function; by default 1.
    **more
        See `LLMAlgorithm`.

    Raises
    ------
    TypeError, ValueError
        As `LLMAlgorithm`; also for both `preference_fn` and `reward_fn`.
    """

    name = "online_dpo"
    Config = OnlineDPOConfig
    data_parallel = True
    task = "prompts"
    has_reference = True
    config: OnlineDPOConfig

    def __init__(
        self,
        model: nn.Module,
        ref_model: nn.Module | None = None,
        preference_fn: Callable[..., Any] | None = None,
        callbacks: Iterable[Callback] | None = None,
        logger: LoggerCallback | None = None,
        *,
        reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        reward_weights: Sequence[float] | None = None,
        **more: Any,
    ):
        self.preferences = Preferences(preference_fn, reward_fn, reward_weights, "OnlineDPO")
        super().__init__(model, ref_model, callbacks, logger, **more)

    @property
    def rewarded(self) -> bool:
        return self.preferences.rewards is not None

    def sampled(self, n_rows: int, n: int, seed: int) -> Scored:
        rows = self._evaluated()
        numbers = np.arange(min(n_rows, len(rows)))
        with torch_threads(self.threads):
            drawn = self.complete([rows.prompts[i] for i in numbers], numbers, n, 0, self.settings(), seed)
            earned = self.preferences.scored(rows, np.repeat(numbers, n), drawn.ids, self.model)
        texts = [self.model.decode(ids) for ids in drawn.ids]
        return Scored(texts_of(rows, numbers, self.model), drawn.ids, texts, earned)

    def _longest(self) -> int:
        return self.config.max_new_tokens

    def _require_complete(self) -> None:
        super()._require_complete()
        self.preferences.require()
        if self.preferences.rewards is not None and self.rows is not None:
            self.preferences.rewards.check_columns(self.rows.columns)

    def batch(self, rows: Encoded, numbers: np.ndarray) -> JudgedPairs:
        """Pairs of completions of the prompts `numbers`, sampled and judged now."""
        prompts = [rows.prompts[i] for i in numbers]
        drawn = self.complete(prompts, numbers, 2, self.counters.updates, self.settings(), self.seed)
        first, rewards = self.preferences.judge(rows, numbers, drawn.ids, self.model)
        decided = np.flatnonzero(first >= 0)
        better, worse = 2 * decided + first[decided], 2 * decided + 1 - first[decided]
        sequences = Sequences(
            [prompts[i] for i in decided] * 2, [drawn.ids[i] for i in np.concatenate([better, worse])]
        )
        lengths = np.array([len(ids) for ids in drawn.ids])
        if rewards is not None:
            self.counters.ended(self.ranks.all_rows(rewards), self.ranks.all_rows(lengths))
        return JudgedPairs(sequences, len(numbers) - len(decided), drawn.ended, lengths, rewards)

    def update(self, batch: JudgedPairs) -> dict[str, torch.Tensor]:
        """One step of the optimiser on the pairs that were decided; metrics as tensors ()."""
        c, n_pairs = self.config, len(batch)
        # Of a rank the mean over all ranks, whose gradients are averaged.
        total = float(self.ranks.mean(torch.tensor(float(n_pairs))))
        self.follow_schedule()
        metrics = {name: torch.zeros((), device=self.device) for name in ("loss", *(_METRICS if total else ()))}
        if n_pairs:
            reference = self.log_probs(batch.sequences, reference=True)
            for rows in in_parts(n_pairs, c.accumulation):
                sequences, tokens = batch.sequences.take(np.concatenate([rows, rows + n_pairs]))
                owner, n = sequences.owner.to(self.device), len(rows)
                gaps = self.score(sequences).log_probs - reference[tokens.to(self.device)]
                gains = sequence_sums(gaps, owner, 2 * n).view(2, n)  # log policy - log reference, preferred and other
                lengths = torch.from_numpy(sequences.n_scored).to(self.device).clamp(min=1).view(2, n)
                means = gains / lengths
                losses = preference_loss(
                    gains[0] - gains[1], means[0] - means[1], c.beta, c.loss_type, c.label_smoothing
                )
                loss = losses.sum() / total
                loss.backward()
                rewards = c.beta * gains.detach()
                part = (
                    loss.detach(),
                    (rewards[0] > rewards[1]).float().sum() / total,
                    (rewards[0] - rewards[1]).sum() / total,
                    rewards[0].sum() / total,
                    rewards[1].sum() / total,
                )
                for name, value in zip(metrics, part, strict=True):
                    metrics[name] = metrics[name] + value
        if total:
            metrics["grad_norm"] = self.optimizer.step_accumulated(c.max_grad_norm)
        self.follow_reference()
        sampled = {
            "undecided": batch.n_undecided / max(1, n_pairs + batch.n_undecided),
            "completion_length": batch.lengths.mean(),
            "truncated": 1.0 - batch.ended.mean(),
            **({} if batch.rewards is None else {"mean_reward": batch.rewards.mean()}),
        }
        return {**{name: torch.tensor(float(x), device=self.device) for name, x in sampled.items()}, **metrics}

    def train_step(self, prompts: Any) -> dict[str, float]:
        """One update on completions of `prompts`, (B, P) token ids or whatever `train` takes; returns its metrics."""
        return super().train_step(prompts)

    def row_scores(self, rows: Encoded, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The reward of the likeliest completion of each prompt; with a `preference_fn`, 1 where it is preferred to the
        reference's, 0.5 where neither is."""
        prompts, settings = [rows.prompts[i] for i in numbers], self.settings(temperature=0.0)
        drawn = self.complete(prompts, numbers, 1, 0, settings, seed)
        lengths = np.array([len(ids) for ids in drawn.ids])
        if self.preferences.rewards is not None:
            return self.preferences.scored(rows, numbers, drawn.ids, self.model), lengths
        assert self.reference is not None
        with self.reference.in_place() as reference:
            theirs = self.complete(prompts, numbers, 1, 0, settings, seed, reference)
        pairs = [ids for pair in zip(drawn.ids, theirs.ids, strict=True) for ids in pair]
        first, _ = self.preferences.judge(rows, numbers, pairs, self.model)
        return np.select([first == 0, first == 1], [1.0, 0.0], 0.5), lengths

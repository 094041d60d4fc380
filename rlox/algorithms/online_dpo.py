"""Online DPO: DPO on pairs of the policy's own completions (Guo et al. 2024, "Direct Language Model Alignment from
Online AI Feedback", arXiv:2402.04792)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.config import OnlineDPOConfig
from rlox.llm.encoded import Encoded
from rlox.llm.losses import preference_loss, sequence_sums
from rlox.llm.rewards.preferences import Preferences
from rlox.llm.rewards.scoring import Scored, check_columns, completions_of, texts_of
from rlox.llm.tokens import Sequences, in_parts
from rlox.nn.modes import torch_threads
from rlox.nn.transfers import send, send_numbers
from rlox.training.post_training import LLMAlgorithm

_METRICS = ("accuracy", "margin", "chosen_reward", "rejected_reward")  # means over the pairs, in addition to the loss


@dataclass(frozen=True)
class JudgedPairs:
    """B judged pairs: the preferred completions are the first B sequences, the others follow in the same order."""

    sequences: Sequences
    n_undecided: int  # pairs without a preferred completion; they are left out
    ended: np.ndarray  # bool, of all sampled completions
    lengths: np.ndarray  # numbers of tokens of all sampled completions
    rewards: np.ndarray | None  # f64, of all sampled completions, if a reward function judged them

    def __len__(self) -> int:
        return len(self.sequences) // 2


class OnlineDPO(LLMAlgorithm):
    """Samples two completions for each prompt, has the better one chosen, and takes a DPO step on the pairs. See
    `rlox.config.OnlineDPOConfig`.

    Parameters
    ----------
    model, ref_model
        See `rlox.training.post_training.LLMAlgorithm`.
    preference_fn : callable, optional
        ``(prompts, completions) -> indices`` for texts, where each entry of ``completions`` is a pair of texts.
        Returns for each prompt the index 0 or 1 of the preferred completion, or None if neither is preferred. Without a
        tokenizer, it gets token ids: a tensor (B, P), padded on the left, and pairs of tensors (C_i,).
    callbacks, logger
        See `LLMAlgorithm`.
    reward_fn : callable or list of callable, optional
        Instead of `preference_fn`: as for `rlox.GRPO`; the completion with the larger reward is preferred.
    reward_weights : list of float, optional
        One for each reward function; by default 1.
    **more
        See `LLMAlgorithm`.

    Raises
    ------
    TypeError, ValueError
        As `LLMAlgorithm`; also if both `preference_fn` and `reward_fn` are given.
    """

    name = "online_dpo"
    Config = OnlineDPOConfig
    _data_parallel = True
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
        self.preferences = Preferences(
            preference_fn, reward_fn, reward_weights, "OnlineDPO", more.get("tokenizer") is not None
        )
        super().__init__(model, ref_model, callbacks, logger, **more)

    @property
    def rewarded(self) -> bool:
        return self.preferences.rewards is not None

    def sampled(self, n_rows: int, n: int, seed: int) -> Scored:
        rows = self._require_rows()
        numbers = np.arange(min(n_rows, len(rows)))
        with torch_threads(self._threads):
            drawn = self.complete([rows.prompts[i] for i in numbers], numbers, n, 0, self.settings(), seed)
            earned = self.preferences.scored(rows, np.repeat(numbers, n), drawn, self.model)
        texts = completions_of(rows, np.repeat(numbers, n), drawn.ids, self.model)
        return Scored(texts_of(rows, numbers, self.model), drawn.ids, texts, earned, drawn.ended)

    def _longest(self) -> int:
        return self.config.max_new_tokens

    def _most_completions(self) -> int:
        return max(super()._most_completions(), 2 * self.config.batch_size)

    def _prepare_training(self) -> None:
        super()._prepare_training()
        self.preferences.require()
        check_columns(self.preferences.rewards, self.rows, self.eval_rows)

    def batch(self, rows: Encoded, numbers: np.ndarray, streams: np.ndarray | None = None) -> JudgedPairs:
        """Sample two completions of each of the prompts `numbers`, and return the judged pairs.

        `streams` are the numbers of their random streams; by default `numbers`, without repetitions.
        """
        prompts = [rows.prompts[i] for i in numbers]
        streams = numbers if streams is None else streams
        drawn = self.complete(prompts, streams, 2, self.counters.updates, self.settings(), self.seed)
        first, rewards = self.preferences.prefer(rows, numbers, drawn, self.model)
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
        """Take one step of the optimiser on the decided pairs. Returns metrics as scalar tensors."""
        c, n_pairs = self.config, len(batch)
        # With several ranks, the mean over ranks, because their gradients are averaged.
        total = float(self.ranks.mean(torch.tensor(float(n_pairs), device="cpu")))
        self.follow_schedule()
        metrics = {name: torch.zeros((), device=self.device) for name in ("loss", *(_METRICS if total else ()))}
        if n_pairs:
            reference = self.log_probs(batch.sequences, c.temperature, reference=True)
            for rows in in_parts(n_pairs, c.accumulation):
                sequences, tokens = batch.sequences.take(np.concatenate([rows, rows + n_pairs]))
                owner, n = send(sequences.owner, self.device), len(rows)
                gaps = self.score(sequences, c.temperature).log_probs - reference[send(tokens, self.device)]
                gains = sequence_sums(gaps, owner, 2 * n).view(2, n)  # log policy - log reference; row 0 is preferred
                lengths = send(sequences.n_scored, self.device).clamp(min=1).view(2, n)
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
        return {**send_numbers(sampled, self.device), **metrics}

    def train_step(self, prompts: Any) -> dict[str, float]:
        """Take one update on completions of `prompts`, (B, P) token ids or as for `train`. Returns its metrics."""
        return super().train_step(prompts)

    def row_scores(self, rows: Encoded, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the reward of each prompt's completion at temperature 0.

        With a `preference_fn`, return 1 where the completion is preferred to the reference's, 0.5 where neither is
        preferred, else 0: the mean over both orders in which the two can be shown, because judges prefer a place.
        """
        prompts, settings = [rows.prompts[i] for i in numbers], self.settings(temperature=0.0)
        drawn = self.complete(prompts, numbers, 1, 0, settings, seed)
        lengths = np.array([len(ids) for ids in drawn.ids])
        if self.preferences.rewards is not None:
            return self.preferences.scored(rows, numbers, drawn, self.model), lengths
        assert self.reference is not None
        with self.reference.in_place() as reference:
            theirs = self.complete(prompts, numbers, 1, 0, settings, seed, reference)
        pairs = [*zip(drawn.ids, theirs.ids, strict=True), *zip(theirs.ids, drawn.ids, strict=True)]
        flat = [ids for pair in pairs for ids in pair]
        first = self.preferences.judge(rows, np.concatenate([numbers, numbers]), flat, self.model)
        wins = np.select([first == 0, first == 1], [1.0, 0.0], 0.5).reshape(2, -1)
        return (wins[0] + 1.0 - wins[1]) / 2, lengths

"""Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1), with later
variants: Dr. GRPO, DAPO, GSPO and RLOO; see `rlox.llm.losses` for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.config import GRPOConfig, integer, shown
from rlox.kernels.rng import Rng
from rlox.llm.conversations import Conversations, TextEnvironment, converse
from rlox.llm.data import template_arguments
from rlox.llm.encoded import Encoded, encode_dataset
from rlox.llm.losses import (
    clipped_loss,
    equal_rewards,
    group_advantages,
    k3,
    policy_ratios,
    sampler_weights,
    token_weights,
)
from rlox.llm.rewards.functions import Rewards
from rlox.llm.rewards.scoring import Scored, check_columns, completions_of, scores_of, texts_of
from rlox.llm.sampling import Completions, Settings, unique_numbers
from rlox.llm.tokens import Sequences, in_parts
from rlox.nn.modes import torch_threads
from rlox.nn.transfers import send, send_numbers
from rlox.training.post_training import LLMAlgorithm


@dataclass(frozen=True)
class Groups:
    """R = B * K completions, with the K completions of a prompt next to each other, and their rewards."""

    sequences: Sequences
    ids: list[np.ndarray]  # (C_i,) int64, the tokens after each prompt
    rewards: np.ndarray  # (R,) f64
    scores: dict[str, np.ndarray]  # (R,) f64 of each reward function; NaN where it does not apply
    sampler_log_probs: np.ndarray  # (N,) f32, under the distributions that were sampled from
    ended: np.ndarray  # (R,) bool; False where max_new_tokens cut the completion off

    def __len__(self) -> int:
        return len(self.sequences)


class GRPO(LLMAlgorithm):
    """Samples several completions for each prompt and makes those with larger rewards than the others of their prompt
    more likely. See `rlox.config.GRPOConfig`.

    Parameters
    ----------
    model, ref_model
        See `rlox.training.post_training.LLMAlgorithm`. No reference is kept if `kl_coef` is 0.
    reward_fn : callable or list of callable
        ``(completions, prompts) -> rewards`` of token ids, a list of tensors (C_i,) and a tensor (R, P), or
        ``(prompts, completions, **columns) -> rewards`` of texts; see `rlox.llm.rewards.functions.Rewards`.
    reward_weights : list of float, optional
        One for each reward function; by default 1.
    environment : callable, optional
        Returns a new environment that answers the model, for completions of several turns: see
        `rlox.llm.conversations.TextEnvironment`. Its rewards are summed and added to those of `reward_fn`, which is
        then optional and receives the whole text after the prompt; the prompt of a chat ends with the text of
        ``reset``. Tokens of the environment are read, not learned.
    callbacks, logger, **more
        See `rlox.training.post_training.LLMAlgorithm`.

    Raises
    ------
    TypeError, ValueError
        As `LLMAlgorithm`; with a tokenizer, also for a reward function whose first parameters are not called
        ``completions`` and ``prompts``.
    """

    name = "grpo"
    Config = GRPOConfig
    _data_parallel = True
    task = "prompts"
    has_reference = True
    config: GRPOConfig

    def __init__(
        self,
        model: nn.Module,
        ref_model: nn.Module | None = None,
        reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        callbacks: Iterable[Callback] | None = None,
        logger: LoggerCallback | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
        environment: Callable[[], TextEnvironment] | None = None,
        **more: Any,
    ):
        if environment is not None and not callable(environment):
            raise TypeError(
                f"GRPO: environment must be a function that returns an environment, got {shown(environment)}"
            )
        self.environment = environment
        has_tokenizer, has_environment = more.get("tokenizer") is not None, environment is not None
        self.rewards = (
            None if reward_fn is None else Rewards(reward_fn, reward_weights, "GRPO", has_tokenizer, has_environment)
        )
        super().__init__(model, ref_model, callbacks, logger, **more)
        if self.config.importance_sampling_level == "sequence" and self.config.loss_type != "grpo":
            warnings.warn(
                "GRPO: importance_sampling_level=sequence (GSPO) needs loss_type=grpo, in which every sequence has the "
                f"same weight, got loss_type={self.config.loss_type}, in which longer sequences have more",
                stacklevel=2,
            )
        c = self.config
        if c.top_k > 0 or c.top_p < 1.0 or c.min_p > 0.0:
            warnings.warn(
                "GRPO: top_k, top_p and min_p restrict what is sampled, not what is learned: ratios are those of the "
                "whole distribution, and sampler_gap shows the difference",
                stacklevel=2,
            )

    @property
    def rewarded(self) -> bool:
        return self.rewards is not None or self.environment is not None

    def _needs_reference(self) -> bool:
        return self.config.kl_coef > 0

    def _longest(self) -> int:
        return self.config.max_new_tokens

    def _most_completions(self) -> int:
        return max(super()._most_completions(), self.config.batch_size * self.config.group_size)

    def _prepare_training(self) -> None:
        super()._prepare_training()
        self._require_rewards()
        check_columns(self.rewards, self.rows, self.eval_rows)

    def _require_rewards(self) -> None:
        if not self.rewarded:
            raise ValueError(
                "GRPO: there must be a reward_fn or an environment to learn from; pass reward_fn=… to the constructor"
            )

    def batch(self, rows: Encoded, numbers: np.ndarray, streams: np.ndarray | None = None) -> Groups:
        """Sample completions of the prompts `numbers`, and return them with their rewards.

        `streams` are the numbers of their random streams; by default `numbers`, without repetitions.
        """
        step, settings = self.counters.updates, self.settings()
        found = self._draw(rows, numbers, self.config.group_size, step, settings, self.seed, streams)
        self.counters.ended(self.ranks.all_rows(found.rewards), self.ranks.all_rows(found.sequences.n_scored))
        return found

    def _draw(
        self,
        rows: Encoded,
        numbers: np.ndarray,
        n: int,
        step: int,
        settings: Settings,
        seed: int,
        streams: np.ndarray | None = None,
    ) -> Groups:
        """Sample `n` completions of each of the prompts `numbers`, or `n` conversations with an environment."""
        self._require_rewards()
        streams = unique_numbers(numbers) if streams is None else streams
        prompts = [rows.prompts[i] for i in numbers]
        judged, places = rows, np.repeat(numbers, n)
        drawn: Completions | Conversations
        if self.environment is None:
            drawn = self.complete(prompts, streams, n, step, settings, seed)
            rewards, written, starts = np.zeros(len(drawn.ids)), None, [ids for ids in prompts for _ in range(n)]
        else:
            if self.model.tokenizer is None:
                raise ValueError("GRPO: a text environment needs a tokenizer, got none; pass tokenizer=…")
            drawn = converse(
                self.model,
                prompts,
                texts_of(rows, numbers, self.model),
                streams,
                n,
                step,
                settings,
                self.config.max_turns,
                self.environment,
                lambda contexts, keys, turn, limits: self.complete(
                    contexts, keys, 1, turn, limits, seed, context=self._context()
                ),
                self._context(),
                [template_arguments(rows.columns, i) for i in numbers],
            )
            rewards, written, starts = drawn.rewards, drawn.written, drawn.prompts
            columns = {name: [column[i] for i in places] for name, column in rows.columns.items()}
            judged, places = Encoded(starts, texts=drawn.texts, columns=columns), np.arange(len(starts))
        named: dict[str, np.ndarray] = {}
        if self.rewards is not None:
            scores = scores_of(self.rewards, judged, places, drawn.ids, self.model, drawn.ended)
            named = dict(zip(self.rewards.names, scores, strict=True))
            if self.environment is not None:
                named["environment"] = rewards
            rewards = rewards + self.rewards.combine(scores)
        sequences = Sequences(starts, drawn.ids, written)
        return Groups(sequences, drawn.ids, rewards, named, np.concatenate(drawn.log_probs), drawn.ended)

    def sampled(self, n_rows: int, n: int, seed: int) -> Scored:
        rows = self._require_rows()
        numbers = np.arange(min(n_rows, len(rows)))
        with torch_threads(self._threads):
            found = self._draw(rows, numbers, n, 0, self.settings(), seed)
        texts = completions_of(rows, np.repeat(numbers, n), found.ids, self.model)
        return Scored(texts_of(rows, numbers, self.model), found.ids, texts, found.rewards, found.ended)

    def train_step(self, prompts: Any) -> dict[str, float]:
        """Take one update on completions of `prompts`, (B, P) token ids or as for `train`. Returns its metrics."""
        return super().train_step(prompts)

    def row_scores(self, rows: Encoded, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the reward of each prompt's completion at temperature 0."""
        found = self._draw(rows, numbers, 1, 0, self.settings(temperature=0.0), seed)
        return found.rewards, found.sequences.n_scored

    def evaluate(self, prompts: Any = None, n_samples: int = 1, **settings: Any) -> float:
        """Return the mean reward over prompts, with `n_samples` sampled completions each. Training is not affected.

        Parameters
        ----------
        prompts : optional
            As for `train`; by default `eval_dataset`, or the dataset.
        **settings
            As for `generate`.
        """
        where, chosen = "GRPO.evaluate", self.settings(**settings)
        n_samples = integer(where, "n_samples", n_samples, 1)
        data = self._require_rows() if prompts is None else prompts
        rows = encode_dataset(data, self.task, self.model, where, chosen.max_new_tokens)
        with torch_threads(self._threads):
            found = self._draw(rows, np.arange(len(rows)), n_samples, 0, chosen, 10_000 + self.seed)
        return float(found.rewards.mean())

    def update(self, batch: Groups) -> dict[str, torch.Tensor]:
        """Run `n_epochs` passes over the completions, with `n_minibatches` optimiser steps each. Returns metrics as
        scalar tensors."""
        c, whole, n_steps = self.config, batch.sequences, self.config.n_epochs * self.config.n_minibatches
        self.follow_schedule()
        rewards = self.ranks.all_rows(batch.rewards)
        advantages = self.ranks.own_rows(group_advantages(rewards, c.group_size, c.scale_rewards, c.baseline))
        advantages = send(advantages.astype(np.float32), self.device)
        sampled = send(batch.sampler_log_probs, self.device)
        # With a single step, the policy is still the one that sampled, and the first pass gives its log-probabilities.
        n_parts = c.n_minibatches * c.accumulation
        before = self.log_probs(whole, c.temperature, n_parts=n_parts) if n_steps > 1 else None
        reference = self.log_probs(whole, c.temperature, True, n_parts) if c.kl_coef > 0 else None

        history: list[dict[str, torch.Tensor]] = []
        for rows in self._minibatches(len(batch)):
            learned = rows[batch.ended[rows]] if c.mask_truncated else rows
            sequences, tokens = whole.take(learned)
            owner = send(sequences.owner, self.device)
            weights = token_weights(c.loss_type, owner, len(rows), c.max_new_tokens)
            if c.loss_type == "dapo" and self.ranks.joined:
                # Gradients are averaged over ranks; this makes it the mean over the tokens of all ranks.
                weights = weights * (
                    len(owner) / self.ranks.mean(torch.tensor(float(len(owner)), device="cpu")).clamp(min=1.0)
                )
            metrics: dict[str, torch.Tensor] = {}
            pieces = in_parts(len(learned), c.accumulation)
            for piece in pieces:
                part, inside = sequences.take(piece)
                at, mine = send(tokens[inside], self.device), send(part.owner, self.device)
                scores = self.score(part, c.temperature, entropy=True, entropy_gradient=c.ent_coef > 0)
                log_probs, entropies = scores.log_probs, scores.entropies
                old = log_probs.detach() if before is None else before[at]

                ratios = policy_ratios(log_probs, old, mine, c.importance_sampling_level, len(part))
                gains = advantages[send(learned[piece], self.device)][mine]
                high = c.clip_eps if c.clip_eps_high is None else c.clip_eps_high
                losses, clipped = clipped_loss(ratios, gains, c.clip_eps, high, c.delta)
                if c.sampler_correction != "none":
                    losses = losses * sampler_weights(
                        old, sampled[at], mine, len(part), c.sampler_correction, c.sampler_cap
                    )
                share = weights[send(inside, self.device)]
                if c.loss_type == "bnpo":
                    share = token_weights("bnpo", mine, len(part), c.max_new_tokens) / len(pieces)
                found = {"clip_fraction": clipped.float(), "entropy": entropies, "ratio": ratios}
                if reference is not None:
                    found["kl"] = k3(log_probs, reference[at])
                    losses = losses + c.kl_coef * found["kl"]
                if c.ent_coef > 0:
                    losses = losses - c.ent_coef * entropies
                found["sampler_gap"] = (old - sampled[at]).abs()
                loss = (share * losses).sum()
                loss.backward()
                # Means over the tokens of all parts; the loss keeps its own weights.
                n_tokens = max(len(tokens), 1)
                sums = {name: value.detach().sum() / n_tokens for name, value in found.items()}
                for name, value in {"loss": loss.detach(), **sums}.items():
                    metrics[name] = metrics.get(name, torch.zeros((), device=self.device)) + value
            if self.ranks.any(bool(metrics)):
                history.append({**metrics, "grad_norm": self.optimizer.step_accumulated(c.max_grad_norm)})
        self.follow_reference()
        return {
            **self._summarise_samples(batch),
            **(_mean_metrics(history) if history else {"loss": torch.zeros((), device=self.device)}),
        }

    def _minibatches(self, n: int) -> Iterator[np.ndarray]:
        """Yield the completions (M,) of each optimiser step; if a pass is a single step, all of them in order."""
        c = self.config
        for epoch in range(c.n_epochs):
            order = np.arange(n)
            if c.n_minibatches > 1:
                order = Rng(Rng(self.rng.key, 1 << 62).key, self.counters.updates * c.n_epochs + epoch).permutation(n)
            yield from np.array_split(order, c.n_minibatches)

    def _summarise_samples(self, batch: Groups) -> dict[str, torch.Tensor]:
        """Return metrics of the completions and their rewards."""
        groups = batch.rewards.reshape(-1, self.config.group_size)
        found = {
            "mean_reward": batch.rewards.mean(),
            "reward_std": groups.std(1).mean(),
            "equal_groups": equal_rewards(groups).mean(),
            "completion_length": batch.sequences.n_scored.mean(),
            "truncated": 1.0 - batch.ended.mean(),
        }
        if len(batch.scores) > 1:
            applies = {name: values[~np.isnan(values)] for name, values in batch.scores.items()}
            found |= {f"reward/{name}": values.mean() for name, values in applies.items() if len(values)}
        return send_numbers(found, self.device)


def _mean_metrics(history: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of each metric over an update's optimiser steps."""
    names = dict.fromkeys(name for row in history for name in row)
    return {name: torch.stack([row[name].detach().float() for row in history if name in row]).mean() for name in names}

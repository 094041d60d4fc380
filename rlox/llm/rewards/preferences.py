"""Preferences between two completions, from a user function or from rewards."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlox.config import shown
from rlox.llm.encoded import Encoded
from rlox.llm.losses import equal_rewards
from rlox.llm.models.language import LanguageModel
from rlox.llm.rewards.functions import Rewards, pair_excerpt
from rlox.llm.rewards.scoring import completions_of, scores_of, texts_of
from rlox.llm.sampling import Completions
from rlox.llm.tokens import pad_left
from rlox.processes.failures import note_cause, require_exception


class Preferences:
    """Compares pairs of completions with a user function or with reward functions; a TypeError if both are given."""

    def __init__(
        self,
        preference_fn: Callable[..., Any] | None,
        reward_fn: Any,
        reward_weights: Sequence[float] | None,
        where: str,
        tokenizer: bool = True,
    ) -> None:
        if preference_fn is not None and reward_fn is not None:
            raise TypeError(f"{where}: preference_fn must not be combined with reward_fn; pass one of them")
        if preference_fn is not None and not callable(preference_fn):
            raise TypeError(
                f"{where}: preference_fn must be a function (prompts, completions) -> indices, got "
                f"{shown(preference_fn)}"
            )
        self._function, self._where = preference_fn, where
        self.rewards = None if reward_fn is None else Rewards(reward_fn, reward_weights, where, tokenizer)

    def require(self) -> None:
        """Raise a ValueError if neither was given."""
        if self._function is None and self.rewards is None:
            raise ValueError(f"{self._where}: there must be a preference_fn or a reward_fn to learn from, got neither")

    def scored(
        self,
        rows: Encoded,
        numbers: Sequence[int] | np.ndarray,
        completions: Completions,
        model: LanguageModel,
    ) -> np.ndarray:
        """Return rewards (R,) f64 of completions of the prompts `numbers` (R,)."""
        assert self.rewards is not None
        scores = scores_of(self.rewards, rows, numbers, completions.ids, model, completions.ended)
        return self.rewards.combine(scores)

    def prefer(
        self, rows: Encoded, numbers: np.ndarray, drawn: Completions, model: LanguageModel
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the preferred completion of each pair, as `judge`, and any rewards (2 B,).

        With rewards, neither is preferred if they are equal up to the rounding of float32.
        """
        self.require()
        if self.rewards is None:
            return self.judge(rows, numbers, drawn.ids, model), None
        rewards = self.scored(rows, np.repeat(numbers, 2), drawn, model)
        pairs = rewards.reshape(-1, 2)
        return np.where(equal_rewards(pairs), -1, pairs.argmax(1)), rewards

    def judge(
        self, rows: Encoded, numbers: np.ndarray, completions: Sequence[np.ndarray], model: LanguageModel
    ) -> np.ndarray:
        """Return which completion of each pair the function prefers, (B,) int64: 0 or 1, -1 for neither.

        `completions` contains the two completions of each of the prompts `numbers` (B,), next to each other. Raises
        ValueError or TypeError if the function returns anything but 0, 1 or None for each pair.
        """
        assert self._function is not None
        prompts: Any
        texts: list[Any]
        if model.tokenizer is None:
            prompts, _ = pad_left([rows.prompts[i] for i in numbers], model.pad)
            texts = [torch.from_numpy(ids.copy()) for ids in completions]
        else:
            prompts = texts_of(rows, numbers, model)
            texts = [*completions_of(rows, np.repeat(numbers, 2), completions, model)]
        both = [(texts[i], texts[i + 1]) for i in range(0, len(texts), 2)]
        try:
            answer = self._function(copy.copy(prompts), list(both))
        except BaseException as e:
            require_exception(e, "preference_fn", "preference_fn")
            note_cause(e, "preference_fn")
            raise
        try:
            indices = [*answer]
        except TypeError as e:
            raise TypeError(f"{self._where}: preference_fn must return a list, got {shown(answer)}") from e
        if len(indices) != len(both):
            raise ValueError(
                f"{self._where}: preference_fn must return one index for each of {len(both)} prompts, got "
                f"{len(indices)}"
            )
        return np.array([self._index(index, prompts[i], both[i]) for i, index in enumerate(indices)], np.int64)

    def _index(self, answer: Any, prompt: Any, pair: tuple[Any, Any]) -> int:
        if answer is None:
            return -1
        try:
            index = None if isinstance(answer, bool) else operator.index(answer)
        except TypeError:  # arrays and tensors have `__index__` too
            index = None
        if index not in (0, 1):
            raise ValueError(
                f"{self._where}: preference_fn must return 0, 1 or None for each pair, got {shown(answer)} "
                f"({pair_excerpt(prompt, ' | '.join(map(str, pair)))})"
            )
        return index

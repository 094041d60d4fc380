"""Score sampled completions with reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlox.llm.encoded import Encoded
from rlox.llm.models.language import LanguageModel
from rlox.llm.rewards.functions import Rewards
from rlox.llm.templates import continues
from rlox.llm.tokens import pad_left


class Scored(NamedTuple):
    """Completions that were sampled for B prompts, and their rewards."""

    prompts: list[Any]  # (B), texts or conversations
    ids: list[np.ndarray]  # (B * n), the n completions of a prompt next to each other
    texts: list[str]
    rewards: np.ndarray  # (B * n,) f64
    ended: np.ndarray  # (B * n,) bool; False where a completion was cut off


def check_columns(rewards: Rewards | None, *datasets: Encoded | None) -> None:
    """Call `Rewards.check_columns` for each dataset that is there; do nothing without reward functions."""
    for rows in datasets:
        if rewards is not None and rows is not None:
            rewards.check_columns(rows.columns)


def texts_of(rows: Encoded, numbers: Sequence[int] | np.ndarray, model: LanguageModel) -> list[Any]:
    """Return the original texts of the prompts `numbers`; decode those that were given as token ids, or are only the
    first token of a text."""
    texts = [None if rows.texts is None else rows.texts[i] for i in numbers]
    return [model.decode(rows.prompts[i]) if text is None else text for i, text in zip(numbers, texts, strict=True)]


def completions_of(
    rows: Encoded, numbers: Sequence[int] | np.ndarray, completions: Sequence[np.ndarray], model: LanguageModel
) -> list[str]:
    """Return the texts of R completions of the prompts `numbers` (R,).

    Prompt and completion are one text if a text, or a message, is continued.
    """
    after = [rows.prompts[i] if rows.texts is None or continues(rows.texts[i]) else () for i in numbers]
    return [model.decode(ids, start) for ids, start in zip(completions, after, strict=True)]


def scores_of(
    rewards: Rewards,
    rows: Encoded,
    numbers: Sequence[int] | np.ndarray,
    completions: Sequence[np.ndarray],
    model: LanguageModel,
    ended: np.ndarray,
) -> np.ndarray:
    """Return scores (K, R) f64 of R completions of the prompts `numbers` (R,), NaN where a function does not apply.

    `ended` (R,) is False where a completion was cut off. Raises ValueError if a function takes texts and there is no
    tokenizer, and for the same reasons as `Rewards.scores`.
    """
    if rewards.needs_text and model.tokenizer is None:
        raise ValueError(
            f"{model.where}: a reward that takes texts needs a tokenizer, got none; pass tokenizer=…, or let it take "
            "token ids, (completions, prompts)"
        )
    ids = [torch.from_numpy(np.asarray(row)) for row in completions]
    prompts, _ = pad_left([rows.prompts[i] for i in numbers], model.pad)
    written = texts_of(rows, numbers, model) if model.tokenizer is not None else None
    decoded = completions_of(rows, numbers, completions, model) if model.tokenizer is not None else None
    columns = {name: [column[i] for i in numbers] for name, column in rows.columns.items()}
    return rewards.scores(prompts, ids, written, decoded, columns, ended)

"""Best-of-N: sample several completions and keep the one with the largest reward (Nakano et al. 2021, "WebGPT",
arXiv:2112.09332, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rlox.config import integer, nearest
from rlox.config.base import LARGEST_SEED
from rlox.config.migration import answers
from rlox.llm.backends import Backend, Served
from rlox.llm.data import SUFFIXES
from rlox.llm.encoded import Encoded, encode_dataset
from rlox.llm.models.language import LanguageModel
from rlox.llm.rewards.functions import Rewards
from rlox.llm.rewards.scoring import completions_of, scores_of
from rlox.llm.sampling import Completions, Settings, sample_in_parts


class Best(NamedTuple):
    """The best completion of each of B prompts."""

    ids: list[np.ndarray]  # (P_i + C_i,) int64, prompt and completion
    completions: list[np.ndarray]  # (C_i,) int64
    texts: list[str]  # the completions as text
    scores: np.ndarray  # (B,) f64, their rewards
    all_scores: np.ndarray  # (B, N) f64, the rewards of all sampled completions


class BestOfN:
    """Generates N completions for each prompt and keeps the one with the largest reward; nothing is trained.

    Parameters
    ----------
    model : nn.Module
        As `rlox.training.post_training.LLMAlgorithm` takes it.
    reward_fn : callable or list of callable
        As `rlox.GRPO` takes it.
    n : int
        Completions per prompt.
    max_new_tokens : int
        Largest number of tokens of a completion.
    tokenizer, eos_token_id, seed
        As `LLMAlgorithm` takes them.
    reward_weights : list of float, optional
        One for each reward function; by default 1.
    sampler : Backend, optional
        Backend, created by `rlox.llm.backends.create_backend`, that samples instead of the model. Its server must have
        loaded that model.
    **settings
        ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``stop`` (token ids), as in `rlox.llm.sampling.Settings`.

    Raises
    ------
    TypeError, ValueError
        For an invalid model or reward function, an unknown setting, or `n` below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]],
        n: int = 4,
        max_new_tokens: int = 64,
        *,
        tokenizer: Any = None,
        eos_token_id: int | Iterable[int] | None = None,
        seed: int = 42,
        reward_weights: Sequence[float] | None = None,
        sampler: Backend | None = None,
        **settings: Any,
    ):
        self.model = LanguageModel(model, tokenizer, eos_token_id, "BestOfN")
        self._served = None
        if sampler is not None:
            self._served = Served(sampler, self.model, "BestOfN", follows=False)
        else:
            self.model.warn_of_own_generate()
        self.rewards = Rewards(reward_fn, reward_weights, "BestOfN", tokenizer is not None)
        self.n = integer("BestOfN", "n", n, 1)
        self.seed = integer("BestOfN", "seed", seed, 0, LARGEST_SEED)
        for name in settings:
            if name not in (known := [*Settings.__dataclass_fields__]):
                raise TypeError(f"BestOfN: unknown setting {name!r}; {answers(name, known) or nearest(name, known)}")
        max_new_tokens = integer("BestOfN", "max_new_tokens", max_new_tokens, 1)
        self.settings = Settings(max_new_tokens=max_new_tokens, **settings)
        self._calls = 0

    def best(self, prompts: Any) -> Best:
        """Return the best completion of each prompt, with its score. Every call samples new completions.

        Parameters
        ----------
        prompts
            Token ids (B, P), a list of token ids (P_i,), one or several texts, dicts with ``prompt``, or a file of
            these. A text that ends like the name of such a file is taken as its path.
        """
        if isinstance(prompts, str) and not prompts.lower().endswith(SUFFIXES):
            prompts = [prompts]
        rows: Encoded = encode_dataset(prompts, "prompts", self.model, "BestOfN", self.settings.max_new_tokens)
        numbers = np.arange(len(rows))
        drawn = self._complete(rows.prompts)
        self._calls += 1
        scores = scores_of(self.rewards, rows, np.repeat(numbers, self.n), drawn.ids, self.model, drawn.ended)
        rewards = self.rewards.combine(scores).reshape(-1, self.n)
        completions = [drawn.ids[i * self.n + j] for i, j in enumerate(rewards.argmax(1))]
        return Best(
            [np.concatenate([rows.prompts[i], completions[i]]) for i in numbers],
            completions,
            completions_of(rows, numbers, completions, self.model),
            rewards.max(1),
            rewards,
        )

    def _complete(self, prompts: Sequence[np.ndarray]) -> Completions:
        if self._served is None:
            numbers = range(len(prompts))
            return sample_in_parts(self.model, prompts, self.settings, self.n, self.seed, self._calls, numbers)
        return self._served.complete(prompts, self.n, self.settings, self.seed, self._calls, "its own")

    def generate(self, prompts: Any, return_scores: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return prompts with their best completions, (B, P + T) int64, padded at the end with the model's padding id.

        With `return_scores`, also return the scores (B,) f64.
        """
        found = self.best(prompts)
        ids = torch.full((len(found.ids), max(map(len, found.ids))), self.model.pad, dtype=torch.int64, device="cpu")
        for i, row in enumerate(found.ids):
            ids[i, : len(row)] = torch.from_numpy(row)
        return (ids, torch.from_numpy(found.scores)) if return_scores else ids

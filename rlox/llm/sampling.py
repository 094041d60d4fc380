"""Sample completions from a language model. Each has its own stream of random numbers, so batching does not matter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlox.checkpoint.streams import Stream
from rlox.config import nearest, require, shown
from rlox.config.migration import answers
from rlox.envs.tensor.sums import cumulative_sums
from rlox.kernels.llm.vocabulary import draw_tokens
from rlox.kernels.rng import Rng
from rlox.llm.data import inner_ids
from rlox.llm.models.language import LanguageModel
from rlox.llm.models.masks import mask_prompts, mask_step, takes_final_masks
from rlox.llm.tokens import Sequences, pad_left
from rlox.nn.transfers import send
from rlox.processes.failures import Diverged

if TYPE_CHECKING:
    from rlox.llm.models.decoding import Native

# Share of the batch that must be finished before its rows are removed: a removal copies the cache of all other rows.
_DONE = 0.25
# Tokens after which a GPU is asked which completions have ended.
_LOOK_EVERY = 8
# Least number of new tokens for which the cache grows in place: copying a short cache costs less than preparing it.
_LONG = 16


@dataclass(frozen=True)
class Settings:
    """Settings of the distribution that tokens are drawn from; by default the model's own distribution.

    Restrictions are applied in the order `temperature`, `top_k`, `top_p`, `min_p`, each to the result of the previous
    one.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0  # divisor of the logits; 0: always the likeliest token
    top_k: int = 0  # only the k likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that together have this probability
    min_p: float = 0.0  # only tokens with at least this share of the likeliest token's probability
    stop: tuple[int, ...] = ()  # additional ids that end a completion

    def __post_init__(self) -> None:
        for name, kind in (
            ("max_new_tokens", int),
            ("top_k", int),
            *((n, float) for n in ("temperature", "top_p", "min_p")),
        ):
            require("Settings", name, getattr(self, name), kind)
        for name, fits, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "be >= 1"),
            ("temperature", 0 <= self.temperature < math.inf, "be >= 0 and finite; 0 takes the likeliest token"),
            ("top_k", self.top_k >= 0, "be >= 0; 0 leaves all"),
            ("top_p", 0 < self.top_p <= 1, "be in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "be in [0, 1)"),
        ):
            if not fits:
                raise ValueError(f"Settings: {name} must {rule}, got {shown(getattr(self, name))}")
        if not isinstance(self.stop, (tuple, list)) or not all(isinstance(i, int) for i in self.stop):
            raise TypeError(f"Settings: stop must hold token ids, got {shown(self.stop)}")

    @property
    def restricts(self) -> bool:
        """Whether some tokens may not be drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def settings_of(config: Any, changed: Mapping[str, Any], tokenizer: Any, where: str) -> Settings:
    """Return the settings that a configuration contains, overridden by those of `changed` that are not None.

    Raises TypeError for an unknown setting, and ValueError for a `stop` text that is not a single token.
    """
    names = [item.name for item in fields(Settings)]
    known = {name: getattr(config, name) for name in names if hasattr(config, name)}
    for name in changed:
        if name not in names:
            raise TypeError(f"{where}: unknown setting {name!r}; {answers(name, names) or nearest(name, names)}")
    values = {**known, **{name: value for name, value in changed.items() if value is not None}}
    stop = values.get("stop", ())
    if isinstance(stop, str) or not isinstance(stop, Iterable):
        raise TypeError(f"{where}: stop must be a list, got {shown(stop)}; write [{shown(stop)}]")
    values["stop"] = tuple(_stop_id(text, tokenizer, where) for text in stop)
    return Settings(**values)


def _stop_id(text: Any, tokenizer: Any, where: str) -> int:
    if isinstance(text, int):
        return text
    if tokenizer is None:
        raise ValueError(f"{where}: stop must be token ids without a tokenizer, got {shown(text)}")
    ids = inner_ids(tokenizer, text)
    if len(ids) != 1:
        raise ValueError(f"{where}: stop must contain texts of one token each, got {shown(text)}, which has {len(ids)}")
    return ids[0]


@dataclass(frozen=True)
class Completions:
    """R completions, prompt after prompt."""

    ids: list[np.ndarray]  # (C_i,) int64 each, including the token that ended the completion
    log_probs: list[np.ndarray]  # (C_i,) f32, under the distributions that were sampled from
    ended: np.ndarray  # (R,) bool; False where max_new_tokens cut the completion off

    def __len__(self) -> int:
        return len(self.ids)


def completion_noise(seed: int, step: int, prompts: Sequence[int], n: int, length: int) -> np.ndarray:
    """Return uniform numbers in (0, 1], f64 (len(prompts) * n, length), that determine the tokens of completions.

    They depend only on the seed, the step, the prompt's number, and the index among its `n` samples.
    """
    key = Rng(Rng(seed, Stream.COMPLETIONS).key, step).key
    noise = np.empty((len(prompts) * n, length))
    for i, prompt in enumerate(prompts):
        # A stream's number has 64 bits: 40 of the prompt's and 24 of the sample's. Further bits select the key.
        high, low = divmod(int(prompt), 1 << 40)
        own = Rng(key, high).key if high else key
        for j in range(n):
            Rng(own, (low << 24) + j).uniform(out=noise[i * n + j], dtype=np.float64)
    return np.subtract(1.0, noise, out=noise)


def unique_numbers(numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `numbers` (N,) int64 with unique ones in place of repetitions, so that a prompt that is drawn twice gets
    different completions."""
    seen: Counter[int] = Counter()
    unique = []
    for number in map(int, numbers):
        unique.append(number + (seen[number] << 32))
        seen[number] += 1
    return np.array(unique, np.int64)


def restrict_logits(logits: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return logits (R, V) f32 at the temperature, with minus infinity for tokens that may not be drawn."""
    if settings.temperature != 1.0:
        logits = logits / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        least = torch.topk(logits, settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if settings.top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        # Keep a token if the more likely tokens do not already have a probability of top_p. The first is always kept.
        drop = (cumulative_sums(probs) - probs) >= settings.top_p
        drop[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf)
    if settings.min_p > 0.0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < settings.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def pick(logits: torch.Tensor, noise: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row of logits (R, V) with `noise` (R,) in (0, 1].

    Returns the tokens and their log-probabilities f32 (R,).
    """
    if settings.temperature == 0.0:
        likeliest, tokens = logits.max(-1)
        return tokens, torch.where(likeliest.isfinite(), 0.0, torch.nan)
    if not settings.restricts and logits.device.type == "cpu" and logits.dtype == torch.float32:
        drawn = draw_tokens(logits.numpy(), noise.numpy(), settings.temperature)
        return torch.from_numpy(drawn[0]), torch.from_numpy(drawn[1])
    log_probs = restrict_logits(logits, settings).log_softmax(-1)
    # The inverse of the cumulative distribution function, in f64 so that no step vanishes in a large vocabulary.
    reached = cumulative_sums(log_probs.exp().double())
    # If a logit is NaN, the search finds no token; `sample` raises the error.
    tokens = torch.searchsorted(reached, noise[:, None] * reached[:, -1:])[:, 0].clamp_(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompts: Sequence[Any],
    settings: Settings,
    *,
    n: int = 1,
    seed: int = 0,
    step: int = 0,
    numbers: Sequence[int] | None = None,
) -> Completions:
    """Draw `n` completions for each prompt.

    A completion depends on (`seed`, `step`, the prompt's number, the sample) and on its prompt, not on the rest of the
    batch. (The last bits of logits do depend on the batch: the token may differ if a random number is that close to a
    boundary.)

    Parameters
    ----------
    prompts : sequence of integer arrays (P_i,)
        Token ids without padding.
    numbers : sequence of int, optional
        The prompts' numbers, for example in a dataset; by default their indices in `prompts`.

    Returns
    -------
    Completions
        The `n` completions of the first prompt, then those of the next.
    """
    model.evaluation_mode()
    numbers = range(len(prompts)) if numbers is None else numbers
    noise = send(completion_noise(seed, step, numbers, n, settings.max_new_tokens), model.device)
    last_ids = np.array(sorted({*model.eos, *settings.stop}), np.int64)
    ends = send(last_ids, model.device)
    # A GPU is asked now and then whether all have ended: it has tokens to compute while the host waits for an answer.
    look_every = 1 if model.device.type == "cpu" else _LOOK_EVERY
    if model.cached is None:
        model.cached = model.hugging_face and _samples_with_cache(model)
    decode = _Cached(model, prompts, n, settings.max_new_tokens) if model.cached else _FullRows(model, prompts, n)
    rows = len(prompts) * n
    ids = torch.full((rows, settings.max_new_tokens), -1, dtype=torch.int64, device=model.device)
    log_probs = torch.zeros((rows, settings.max_new_tokens), dtype=torch.float32, device=model.device)
    active = torch.arange(rows, device=model.device)  # rows of `ids` that are in the batch ...
    going = torch.ones(rows, dtype=torch.bool, device=model.device)  # ... and which of them have not ended
    tokens = None
    for t in range(settings.max_new_tokens):
        logits = decode.next(tokens)
        tokens, log_probs[active, t] = pick(logits, noise[active, t], settings)
        ids[active, t] = torch.where(going, tokens, -1)
        if len(ends):
            going = going & ~torch.isin(tokens, ends)
            if (t + 1) % look_every:
                continue
            n_going = int(going.sum())
            if n_going == 0:
                break
            if t + 1 < settings.max_new_tokens and n_going <= (1.0 - _DONE) * len(going):
                kept = going.nonzero()[:, 0]
                decode.keep(kept)
                active, tokens, going = active[kept], tokens[kept], going[kept]
    both = torch.stack([ids.double(), log_probs.double()]).cpu().numpy()  # one transfer
    drawn, drawn_log_probs = both[0].astype(np.int64), both[1].astype(np.float32)
    lengths = (drawn >= 0).sum(1)
    if not np.isfinite(drawn_log_probs).all():
        raise Diverged(
            f"{model.where}: the model's logits must be finite, and are not; training cannot continue, and a model "
            "that was loaded is damaged. Try a lower learning_rate or max_grad_norm"
        )
    last = drawn[np.arange(rows), np.maximum(lengths - 1, 0)]
    return Completions(
        [row[:length].copy() for row, length in zip(drawn, lengths, strict=True)],
        [row[:length].copy() for row, length in zip(drawn_log_probs, lengths, strict=True)],
        np.isin(last, last_ids),
    )


def sample_within(
    limits: Sequence[int], n: int, draw: Callable[[Sequence[int] | range, int], Completions]
) -> Completions:
    """Draw `n` completions of each prompt, of at most as many tokens as its own entry of `limits`.

    ``draw(places, limit)`` draws those of the prompts at `places`, which all have the same limit.
    """
    groups: dict[int, list[int]] = {}
    for place, limit in enumerate(limits):
        groups.setdefault(limit, []).append(place)
    if len(groups) == 1:
        return draw(range(len(limits)), limits[0])
    rows, parts = [], []
    for limit, places in groups.items():
        parts.append(draw(places, limit))
        rows += [place * n + j for place in places for j in range(n)]
    order = np.argsort(rows)
    ids, log_probs = ([x for part in parts for x in getattr(part, name)] for name in ("ids", "log_probs"))
    ended = np.concatenate([part.ended for part in parts])
    return Completions([ids[i] for i in order], [log_probs[i] for i in order], ended[order])


def _samples_with_cache(model: LanguageModel) -> bool:
    from rlox.llm.models.cache import samples_with_cache

    return samples_with_cache(model)


class _Cached:
    """Compute the logits of each row's next token with the model's cache, or the native decoder if it can.

    Prompts are padded on the left, so that all rows grow at the same column, and read once for all their completions.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Any], n: int, room: int) -> None:
        self.model, self.n, self.room = model, n, room
        ids, mask = pad_left(prompts, model.pad)
        self.ids, self.mask = send(ids, model.device), None if mask is None else send(mask, model.device)
        self.cache: Any = None
        self.position: torch.Tensor | None = None
        self.native: Native | None = None

    def next(self, tokens: torch.Tensor | None) -> torch.Tensor:
        if tokens is None:
            return self._prompts()
        if self.native is not None:
            return self.native.next(tokens)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        return self._forward(tokens[:, None])

    def _prompts(self) -> torch.Tensor:
        from rlox.llm.models.cache import with_room
        from rlox.llm.models.decoding import native

        if self.mask is not None:
            self.position = (self.mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(self.ids)
        self.native = native(self.model, self.ids, self.mask, self.cache, logits, self.n, self.room)
        if self.native is None:
            self.cache.batch_repeat_interleave(self.n)
            if self.room >= _LONG:
                with_room(self.cache, self.room)
            if self.mask is not None:
                self.mask = self.mask.repeat_interleave(self.n, 0)
                self.position = self.position.repeat_interleave(self.n, 0)  # type: ignore[union-attr]
        return logits.repeat_interleave(self.n, 0)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.model.module(
            input_ids=ids,
            attention_mask=self._attention_mask(),
            position_ids=self.position,
            use_cache=True,
            logits_to_keep=1,
            **{self.model.cache_name: self.cache},
        )
        self.cache = getattr(output, self.model.cache_name)
        if self.position is not None:
            self.position = self.position[:, -1:] + 1
        return output.logits[:, -1].float()

    def _attention_mask(self) -> torch.Tensor | None:
        """Return the mask as the model takes it."""
        if self.mask is None or not takes_final_masks(self.model):
            return self.mask
        return mask_prompts(self.mask) if self.cache is None else mask_step(self.mask)

    def keep(self, rows: torch.Tensor) -> None:
        if self.native is not None:
            return self.native.keep(rows)
        self.cache.batch_select_indices(rows)
        if self.mask is not None:
            self.mask, self.position = self.mask[rows], self.position[rows]  # type: ignore[index]


class _FullRows:
    """Counterpart of `_Cached` that reads whole rows. Padding is on the right, where no token sees it."""

    def __init__(self, model: LanguageModel, prompts: Sequence[Any], n: int) -> None:
        self.model = model
        ids, lengths = Sequences(prompts, [()] * len(prompts)).padded_rows()
        self.length = send(lengths, model.device).repeat_interleave(n)
        self.ids = send(ids, model.device).repeat_interleave(n, 0)

    def next(self, tokens: torch.Tensor | None) -> torch.Tensor:
        row = torch.arange(len(self.ids), device=self.ids.device)
        if tokens is not None:
            if int(self.length.max()) == self.ids.shape[1]:
                self.ids = torch.nn.functional.pad(self.ids, (0, 1))
            self.ids[row, self.length] = tokens
            self.length = self.length + 1
        return self.model.row_logits(self.ids)[row, self.length - 1].float()

    def keep(self, rows: torch.Tensor) -> None:
        self.ids, self.length = self.ids[rows], self.length[rows]

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
from rlox.llm.models.rows import LONG, CachedRows, FullRows
from rlox.nn.graphs import Graphed
from rlox.nn.transfers import send
from rlox.processes.failures import Diverged

if TYPE_CHECKING:
    from rlox.llm.models.static_cache import StaticRows

# Share of the batch that must be finished before its rows are removed: a removal copies the cache of all other rows.
_DONE = 0.25
# Completions that are sampled at once although an update samples fewer, or none.
AT_ONCE = 64
# Tokens after which a GPU is asked which completions have ended.
_LOOK_EVERY = 8
# Share of a batch of a static cache that must be finished before its rows are removed: a graph is captured anew then.
_STATIC_DONE = 0.5


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
    rows = len(prompts) * n
    if _has_static_cache(model, settings.max_new_tokens):
        return _completions(model, *_draw_with_static_cache(model, prompts, n, noise, ends, settings), last_ids)
    decode = CachedRows(model, prompts, n, settings.max_new_tokens) if model.cached else FullRows(model, prompts, n)
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
    return _completions(model, *_to_host(ids, log_probs), last_ids)


def sample_in_parts(
    model: LanguageModel,
    prompts: Sequence[Any],
    settings: Settings,
    n: int,
    seed: int,
    step: int,
    numbers: Sequence[int],
    most: int = AT_ONCE,
) -> Completions:
    """Draw what `sample` draws, of as many prompts at once as have at most `most` completions, or of one."""
    size = max(1, most // n)
    parts = [
        sample(model, prompts[i : i + size], settings, n=n, seed=seed, step=step, numbers=numbers[i : i + size])
        for i in range(0, len(prompts), size)
    ]
    return _joined(parts)


def _joined(parts: Sequence[Completions]) -> Completions:
    if len(parts) == 1:
        return parts[0]
    ids, log_probs = ([x for part in parts for x in getattr(part, name)] for name in ("ids", "log_probs"))
    return Completions(ids, log_probs, np.concatenate([part.ended for part in parts]))


def _to_host(ids: torch.Tensor, log_probs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    both = torch.stack([ids.double(), log_probs.double()]).cpu().numpy()  # one transfer
    return both[0].astype(np.int64), both[1].astype(np.float32)


def _completions(
    model: LanguageModel, drawn: np.ndarray, drawn_log_probs: np.ndarray, last_ids: np.ndarray
) -> Completions:
    """Return completions from tables (R, T) of their tokens, -1 after the end, and log-probabilities."""
    lengths = (drawn >= 0).sum(1)
    if not np.isfinite(drawn_log_probs).all():
        raise Diverged(
            f"{model.where}: the model's logits must be finite, and are not; training cannot continue, and a model "
            "that was loaded is damaged. Try a lower learning_rate or max_grad_norm"
        )
    last = drawn[np.arange(len(drawn)), np.maximum(lengths - 1, 0)]
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
    drawn = _joined(parts)
    return Completions([drawn.ids[i] for i in order], [drawn.log_probs[i] for i in order], drawn.ended[order])


def _samples_with_cache(model: LanguageModel) -> bool:
    from rlox.llm.models.cache import samples_with_cache

    return samples_with_cache(model)


def _has_static_cache(model: LanguageModel, room: int) -> bool:
    if model.sample_cache == "dynamic" or (model.sample_cache == "auto" and model.device.type == "cpu"):
        return False
    from rlox.llm.models.static_cache import uses_static_cache

    return uses_static_cache(model, room)


class _StaticDraws:
    """Tokens of R completions, drawn one after the other by the same operations on the same memory."""

    def __init__(self, rows: StaticRows, noise: torch.Tensor, ends: torch.Tensor, settings: Settings) -> None:
        self._rows, self._noise, self._ends, self._settings = rows, noise, ends, settings
        self.ids = torch.full(noise.shape, -1, device=noise.device)  # (R, T) int64; -1 after the end
        self.log_probs = torch.zeros(noise.shape, dtype=torch.float32, device=noise.device)
        self._active = torch.arange(len(noise), device=noise.device)  # rows of `ids` that are in the batch ...
        self.going = torch.ones(len(noise), dtype=torch.bool, device=noise.device)  # ... and which have not ended
        self._tokens = torch.zeros_like(self._active)
        self._column = torch.zeros(1, dtype=torch.int64, device=noise.device)

    def begin(self) -> None:
        """Read the prompts and draw the first token of each completion."""
        self._draw(self._rows.next(None))

    def advance(self) -> None:
        """Draw one more token of each completion."""
        self._draw(self._rows.next(self._tokens))

    def _draw(self, logits: torch.Tensor) -> None:
        place = self._active, self._column
        tokens, self.log_probs[place] = pick(logits, self._noise[place], self._settings)
        self.ids[place] = torch.where(self.going, tokens, -1)
        if len(self._ends):
            self.going &= (tokens[:, None] != self._ends).all(1)
        self._tokens.copy_(tokens)
        self._column += 1

    def keep(self, kept: torch.Tensor) -> None:
        """Continue with only these rows of the batch, in ascending order, in new memory."""
        self._rows.keep(kept)
        self._active, self._tokens, self.going = self._active[kept], self._tokens[kept], self.going[kept]


def _draw_with_static_cache(
    model: LanguageModel, prompts: Sequence[Any], n: int, noise: torch.Tensor, ends: torch.Tensor, settings: Settings
) -> tuple[np.ndarray, np.ndarray]:
    """Return tables (R, T) of tokens, -1 after the end, and of their log-probabilities.

    On a GPU, the work of a token is captured as a CUDA graph anew in each call: weights may have moved meanwhile, and
    autocast's copies of them, and the memory of the cache is free again for learning.
    """
    from rlox.llm.models.static_cache import StaticRows

    draws = _StaticDraws(StaticRows(model, prompts, n, settings.max_new_tokens), noise, ends, settings)
    draws.begin()
    graphed = _graph(model, draws)
    for t in range(1, settings.max_new_tokens):
        if len(ends) and t % _LOOK_EVERY == 0:
            n_going = int(draws.going.sum())
            if n_going == 0:
                break
            if settings.max_new_tokens - t >= LONG and n_going <= (1.0 - _STATIC_DONE) * len(draws.going):
                draws.keep(draws.going.nonzero()[:, 0])
                graphed = _graph(model, draws)
        graphed()
    if model.device.type == "cuda" and graphed.obstacle is not None:
        model.static = False  # a cache that grows is faster without a graph
    # The last graph must live until its replays are over.
    return _to_host(draws.ids, draws.log_probs)


def _graph(model: LanguageModel, draws: _StaticDraws) -> Graphed:
    if model.stream is None and model.device.type == "cuda":
        model.stream = torch.cuda.Stream(model.device)
    # The prompts have been read: libraries are ready but for the workspaces that they keep for each stream.
    return Graphed(draws.advance, model.device, f"{model.where}: sampled tokens", model.stream)

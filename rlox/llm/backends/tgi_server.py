"""Hugging Face's Text Generation Inference, as of version 3.3: ``POST /generate``.

Written from its source code, but not tested with a real server. It takes only text, and no new weights: it can be used
to generate, to evaluate and for best-of-n, but not for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlox.config import shown
from rlox.llm.backends.base import Capabilities, RawCompletion, as_lists, check_log_probs, seed_of
from rlox.llm.backends.wire import HTTPBackend, field
from rlox.llm.sampling import Completions, Settings


class TGIBackend(HTTPBackend):
    """Samples with a Text Generation Inference server.

    Prompts are sent as text, which the server must read as the same ids; this is checked in each answer.

    Parameters
    ----------
    url, token, timeout, retries, pause, concurrency, on_failure, wait_s, tolerance
        See `rlox.llm.backends.HTTPBackend`.
    tokenizer : optional
        A Hugging Face tokenizer; by default that of the model it samples for.
    """

    kind = "tgi"
    capabilities = Capabilities(n=False, token_ids=False, scoring=True, weight_sync=False, lora=False)

    def __init__(self, url: str, tokenizer: Any = None, **more: Any):
        super().__init__(url, **more)
        self._given_tokenizer = tokenizer

    def check(self, sync: bool = False, longest: int = 0) -> None:
        if sync:
            self.sync(None)  # type: ignore[arg-type]  # always raises
        self._require_healthy()
        most = field(self.client.get("/info"), "max_total_tokens", int, f"{self.where}/info")
        self._require_context(most, longest, "raise --max-total-tokens")

    def complete(self, prompts: Sequence[Any], n: int, settings: Settings, seed: int) -> Completions:
        if settings.min_p > 0.0:
            raise ValueError(f"{self.where}: min_p must be 0, since the server has no min_p, got {settings.min_p}")
        rows = as_lists(prompts)
        texts = [self._text(ids) for ids in rows]
        asked: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "do_sample": settings.temperature > 0.0,
            "details": True,
            "decoder_input_details": True,
            "stop": [self._text([token]) for token in settings.stop],
        }
        # The server rejects values that have no effect.
        if settings.temperature not in (0.0, 1.0):
            asked["temperature"] = settings.temperature
        if settings.top_k and settings.temperature > 0.0:
            asked["top_k"] = settings.top_k
        if settings.top_p < 1.0 and settings.temperature > 0.0:
            asked["top_p"] = settings.top_p

        def request(number: int) -> RawCompletion:
            # `best_of` would be limited, and would take no seed.
            place = number // n
            what = f"{self.where}/generate: prompt {place}, completion {number % n}"
            parameters = {**asked, "seed": seed_of(seed, number)}
            details = self._details(texts[place], parameters, what)
            self._prompt_log_probs(details, rows[place], what)
            reason = details.get("finish_reason")
            if reason not in ("length", "eos_token", "stop_sequence"):
                raise ValueError(
                    f"{what} must have finish_reason length, eos_token or stop_sequence, got {shown(reason)}"
                )
            tokens = field(details, "tokens", list, what)
            ids = [field(token, "id", int, what) for token in tokens]
            log_probs = [field(token, "logprob", (int, float), what) for token in tokens]
            return RawCompletion(ids, log_probs, reason != "length")

        return self.completions(self.client.map(request, range(len(rows) * n)), settings, self.where)

    def score(self, sequences: Sequence[Any]) -> list[np.ndarray]:
        rows = as_lists(sequences)

        def request(place: int) -> np.ndarray:
            # At least one token must be drawn.
            parameters = {"max_new_tokens": 1, "do_sample": False, "details": True, "decoder_input_details": True}
            what = f"{self.where}/generate: sequence {place}"
            details = self._details(self._text(rows[place]), parameters, what)
            log_probs = self._prompt_log_probs(details, rows[place], what)
            return check_log_probs(log_probs[1:], len(log_probs) - 1, what)

        return self.client.map(request, range(len(rows)))

    def _details(self, text: str, parameters: dict[str, Any], what: str) -> dict[str, Any]:
        answer = self.client.post("/generate", {"inputs": text, "parameters": parameters})
        return field(answer[0] if isinstance(answer, list) and answer else answer, "details", dict, what)

    def _prompt_log_probs(self, details: dict[str, Any], ids: list[int], what: str) -> list[Any]:
        """Return the server's log-probabilities of the prompt, which must have these `ids`."""
        prefill = field(details, "prefill", list, what)
        seen = [field(token, "id", int, what) for token in prefill]
        if seen != ids:
            raise ValueError(
                f"{what}: the server must read the prompt's text as the ids {shown(ids)}, got {shown(seen)}: it takes "
                "only text, and splits it differently, or puts a token before it; use vllm or sglang"
            )
        return [token.get("logprob") for token in prefill]

    def _text(self, ids: list[int]) -> str:
        tokenizer = self._tokenizer if self._given_tokenizer is None else self._given_tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.where}: it takes only text, and needs a tokenizer; pass tokenizer=…")
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

"""SGLang's own API, as of version 0.5.23: ``POST /generate`` and ``POST /update_weights_from_disk``.

Written from its source code, but not tested with a real server. The server draws its own random numbers: a seed has no
effect.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlox.checkpoint import one_line
from rlox.config import shown
from rlox.llm.backends.base import Capabilities, RawCompletion, as_lists, check_log_probs
from rlox.llm.backends.wire import HTTPBackend, field
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Completions, Settings

_SYNC_PATH = "/update_weights_from_disk"


class SGLangBackend(HTTPBackend):
    """Samples with an SGLang server.

    Its log-probabilities are those of the distribution at the temperature, before ``top_k``, ``top_p`` and ``min_p``;
    it must not be started with ``SGLANG_RETURN_ORIGINAL_LOGPROB``.

    Parameters
    ----------
    url, token, timeout, retries, pause, concurrency, on_failure, wait_s, tolerance, folder
        See `rlox.llm.backends.HTTPBackend`.
    """

    kind = "sglang"
    capabilities = Capabilities(n=True, token_ids=True, scoring=True, weight_sync=True, lora=False)

    def __init__(self, url: str, **more: Any):
        super().__init__(url, **more)
        self._version: str | None = None  # version of the last weights sent to the server

    def check(self, sync: bool = False, longest: int = 0) -> None:
        self._require_healthy()
        place = f"{self.where}/v1/models"
        listed = field(self.client.get("/v1/models"), "data", list, place)
        context = listed[0].get("max_model_len") if listed and isinstance(listed[0], dict) else None
        self._require_context(context, longest, "raise --context-length")
        if sync:
            self._require_paths((_SYNC_PATH,), "is it an SGLang server?")

    def complete(self, prompts: Sequence[Any], n: int, settings: Settings, seed: int) -> Completions:
        rows = as_lists(prompts)
        sampling = {
            "n": n,
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            "min_p": settings.min_p,
            "stop_token_ids": self.ends(settings),
        }

        def request(place: int) -> list[RawCompletion]:
            body = {"input_ids": rows[place], "sampling_params": sampling, "return_logprob": True}
            what = f"{self.where}/generate: prompt {place}"
            return self._read_completions(self.client.post("/generate", body), len(rows[place]), n, what)

        groups = self.client.map(request, range(len(rows)))
        return self.completions([completion for group in groups for completion in group], settings, self.where)

    def _read_completions(self, answer: Any, n_prompt: int, n: int, what: str) -> list[RawCompletion]:
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != n:
            raise ValueError(f"{what}: the server must answer with n={n} completions, got {len(answers)}: it ignores n")
        completions = []
        for row, completion in enumerate(answers):
            place = f"{what}, completion {row}"
            meta = field(completion, "meta_info", dict, place)
            version = meta.get("weight_version")
            if self._version is not None and version is not None and version != self._version:
                raise ValueError(
                    f"{place} must be drawn with the last weights sent to the server, {self._version!r}, got "
                    f"{shown(version)}: another training sends it weights as well, or it was restarted"
                )
            if meta.get("prompt_tokens", n_prompt) != n_prompt:
                raise ValueError(
                    f"{place} must be of a prompt of {n_prompt} tokens, got one of {shown(meta['prompt_tokens'])}"
                )
            reason = field(meta, "finish_reason", dict, place).get("type")
            if reason not in ("stop", "length"):
                raise ValueError(f"{place} must have finish_reason stop or length, got {shown(meta['finish_reason'])}")
            log_probs, ids = _pairs(field(meta, "output_token_logprobs", list, place), place)
            written = field(completion, "output_ids", list, place)
            # Some versions omit the token that stopped the completion.
            if written not in (ids, ids[:-1] if reason == "stop" else ids):
                raise ValueError(
                    f"{place} must have log-probabilities of its tokens {shown(written)}, got {shown(ids)}"
                )
            completions.append(RawCompletion(ids, log_probs, reason == "stop"))
        return completions

    def score(self, sequences: Sequence[Any]) -> list[np.ndarray]:
        rows = as_lists(sequences)

        def request(place: int) -> np.ndarray:
            body = {
                "input_ids": rows[place],
                "sampling_params": {"n": 1, "max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            what = f"{self.where}/generate: sequence {place}"
            answer = self.client.post("/generate", body)
            meta = field(answer[0] if isinstance(answer, list) and answer else answer, "meta_info", dict, what)
            log_probs, ids = _pairs(field(meta, "input_token_logprobs", list, what), what)
            if ids != rows[place]:
                raise ValueError(f"{what} must have log-probabilities of {shown(rows[place])}, got of {shown(ids)}")
            return check_log_probs(log_probs[1:], len(ids) - 1, what)

        return self.client.map(request, range(len(rows)))

    def sync(self, model: LanguageModel, folder: str | os.PathLike | None = None) -> None:
        path = self.write(model, folder)
        version = f"rlox-{path.name.removeprefix('weights-')}"  # a new one each time
        body = {
            "model_path": str(path), "flush_cache": True, "abort_all_requests": False, "weight_version": version,
        }  # fmt: skip
        remedy = f"can it read {path}? folder= must be one that both reach by the same path"
        try:
            answer = self.client.post(_SYNC_PATH, body, remedy)
        finally:
            self.remove(path)
        if not field(answer, "success", bool, f"{self.where}{_SYNC_PATH}"):
            raise RuntimeError(
                f"{self.where}{_SYNC_PATH}: the server must take the new weights, but reports "
                f"{one_line(answer.get('message', ''), 400)!r}; {remedy}"
            )
        self._version = version


def _pairs(tokens: list[Any], place: str) -> tuple[list[Any], list[Any]]:
    """Return the log-probabilities and the ids of ``[[logprob, id, text], …]``."""
    for token in tokens:
        if not isinstance(token, list) or len(token) < 2:
            raise ValueError(f"{place} must have [log-probability, id, text] for each token, got {shown(token)}")
    return [token[0] for token in tokens], [token[1] for token in tokens]

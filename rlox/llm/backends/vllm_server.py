"""vLLM's OpenAI-compatible server, as of version 0.32.

Completions come from ``POST /v1/completions``, log-probabilities of given tokens from the same path's
``prompt_logprobs``. New weights need the endpoints of ``VLLM_SERVER_DEV_MODE=1``. These let everyone who can reach them
run code: keep such a server on the loopback device or a private network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rlox.config import nearest, shown
from rlox.llm.backends.base import Capabilities, RawCompletion, as_lists, check_log_probs, seed_of
from rlox.llm.backends.wire import HTTPBackend, field
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Completions, Settings

_SYNC_PATHS = ("/pause", "/collective_rpc", "/reset_prefix_cache", "/resume")
# Left out, they would be those of the model's generation_config.json, and the server would sample from another
# distribution than the one that is learned.
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1, on the loopback device or a private network"


class VLLMBackend(HTTPBackend):
    """Samples with a vLLM server.

    Start it with ``--logprobs-mode processed_logprobs --max-logprobs -1``, so that log-probabilities are those of the
    distribution that was sampled from.

    Parameters
    ----------
    url, token, timeout, retries, pause, concurrency, on_failure, wait_s, tolerance, folder
        See `rlox.llm.backends.HTTPBackend`.
    model : str, optional
        The server's name of the model; by default its only model.
    lora : bool
        Whether to send only adapters, to a server that was started with ``--enable-lora`` and
        ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``; its own model must be the base model of the adapters.
    """

    kind = "vllm"
    capabilities = Capabilities(n=True, token_ids=True, scoring=True, weight_sync=True, lora=True)

    def __init__(self, url: str, model: str | None = None, lora: bool = False, **more: Any):
        super().__init__(url, **more)
        if not isinstance(lora, bool):
            raise TypeError(f"{self.where}: lora must be true or false, got {shown(lora)}")
        self._asked_model, self.lora = model, lora
        self._name: str | None = None
        self._adapter: tuple[str, Path] | None = None  # the server's name of the adapters, and their files

    def check(self, sync: bool = False, longest: int = 0) -> None:
        self._require_healthy()
        place = f"{self.where}/v1/models"
        listed = field(self.client.get("/v1/models"), "data", list, place)
        own = [model for model in listed if isinstance(model, dict) and model.get("parent") is None]
        names = [field(model, "id", str, place) for model in own]
        if not names:
            raise ValueError(f"{place} must have a model, got {shown(listed)}; is it a vLLM server?")
        if self._asked_model is not None and self._asked_model not in names:
            raise ValueError(
                f"{place}: model must be one of the server's, got {self._asked_model!r}; "
                f"{nearest(self._asked_model, names)}"
            )
        if self._asked_model is None and len(names) > 1:
            raise ValueError(f"{place}: model must be chosen, since the server has {', '.join(names)}; pass model=…")
        name = self._asked_model or names[0]
        self._name = name if self._adapter is None else self._adapter[0]
        self._require_context(own[names.index(name)].get("max_model_len"), longest, "raise --max-model-len")
        if sync and self.lora:
            how = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            self._require_paths(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), how)
        elif sync:
            self._require_paths(_SYNC_PATHS, _DEV_MODE)

    def complete(self, prompts: Sequence[Any], n: int, settings: Settings, seed: int) -> Completions:
        rows = as_lists(prompts)
        asked = {
            "model": self._served_name(),
            "n": n,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            "min_p": settings.min_p,
            **_NO_PENALTIES,
            "stop_token_ids": self.ends(settings),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

        def request(place: int) -> list[RawCompletion]:
            body = {**asked, "prompt": [rows[place]], "seed": seed_of(seed, place)}
            what = f"{self.where}/v1/completions: prompt {place}"
            return self._read_completions(self.client.post("/v1/completions", body), rows[place], n, what)

        groups = self.client.map(request, range(len(rows)))
        return self.completions([completion for group in groups for completion in group], settings, self.where)

    def _read_completions(self, answer: Any, prompt: list[int], n: int, what: str) -> list[RawCompletion]:
        completions = []
        for row, choice in enumerate(_choices(answer, n, what)):
            place = f"{what}, completion {row}"
            seen = field(choice, "prompt_token_ids", list, place)
            if seen != prompt:
                raise ValueError(f"{place} must be of the prompt {shown(prompt)}, got one of {shown(seen)}")
            log_probs = field(field(choice, "logprobs", dict, place), "token_logprobs", list, place)
            reason = choice.get("finish_reason")
            if reason not in ("stop", "length"):
                raise ValueError(f"{place} must have finish_reason stop or length, got {shown(reason)}")
            completions.append(RawCompletion(field(choice, "token_ids", list, place), log_probs, reason == "stop"))
        return completions

    def score(self, sequences: Sequence[Any]) -> list[np.ndarray]:
        rows = as_lists(sequences)
        asked = {
            "model": self._served_name(), "n": 1, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0,
            "return_token_ids": True,
        }  # fmt: skip

        def request(place: int) -> np.ndarray:
            what = f"{self.where}/v1/completions: sequence {place}"
            # The whole sequence is the prompt. Its first token has no log-probability; one more token must be drawn.
            (choice,) = _choices(self.client.post("/v1/completions", {**asked, "prompt": [rows[place]]}), 1, what)
            return _prompt_log_probs(field(choice, "prompt_logprobs", list, what), rows[place], what)

        return self.client.map(request, range(len(rows)))

    def sync(self, model: LanguageModel, folder: str | os.PathLike | None = None) -> None:
        self._served_name()
        if self.lora:
            self._sync_adapters(model, folder)
            return
        path = self.write(model, folder)
        try:
            self.client.send("/pause", remedy=_DEV_MODE)
            try:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
                remedy = f"can it read {path}? folder= must be one that both reach by the same path"
                self.client.send("/collective_rpc", body, remedy)
                # Prefixes that were computed with the old weights must not be reused.
                self.client.send("/reset_prefix_cache", remedy=_DEV_MODE)
            except BaseException:
                # Other clients may be waiting for the server.
                with suppress(Exception):
                    self.client.send("/resume")
                raise
            self.client.send("/resume", remedy=_DEV_MODE)
        finally:
            self.remove(path)

    def _sync_adapters(self, model: LanguageModel, folder: str | os.PathLike | None) -> None:
        if not hasattr(model.module, "disable_adapter"):
            raise ValueError(f"{self.where}: lora must be false for a model without adapters; set lora_rank")
        path = self.write(model, folder, adapters=True)
        # A new name each time, because vLLM caches computed prompts by the name of their adapter.
        name, before = f"rlox-{path.name.removeprefix('weights-')}", self._adapter
        lost = self.client.lost
        try:
            remedy = f"can it read {path}, and is --max-lora-rank large enough?"
            self.client.send("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, remedy)
        except BaseException as e:
            # If the connection breaks after the server has loaded the adapter, it refuses the repeated request.
            if self.client.lost == lost or "already been loaded" not in str(e):
                self.remove(path)
                raise
        # The files stay: vLLM reads them when the adapter is first used, and again after it was evicted.
        self._name, self._adapter = name, (name, path)
        if before is not None:
            # A restarted server does not know the previous adapter.
            with suppress(RuntimeError):
                self.client.send("/v1/unload_lora_adapter", {"lora_name": before[0]})
            self.remove(before[1])

    def close(self) -> None:
        if self._adapter is not None:
            with suppress(RuntimeError, ConnectionError):
                self.client.send("/v1/unload_lora_adapter", {"lora_name": self._adapter[0]})
            self.remove(self._adapter[1])
            self._name, self._adapter = None, None
        super().close()

    def _served_name(self) -> str:
        if self._name is None:
            self.check()
        assert self._name is not None
        return self._name


def _choices(answer: Any, n: int, what: str) -> list[Any]:
    """Return the choices of one prompt, in order."""
    choices = field(answer, "choices", list, what)
    if len(choices) != n:
        raise ValueError(f"{what}: the server must answer with n={n} completions, got {len(choices)}: it ignores n")
    numbers = [choice.get("index") if isinstance(choice, dict) else None for choice in choices]
    if numbers != [*range(n)]:
        raise ValueError(f"{what}: the server must number its completions from 0 to {n - 1}, got {shown(numbers)}")
    return choices


def _prompt_log_probs(entries: list[Any], ids: list[int], what: str) -> np.ndarray:
    """Return the log-probabilities of the tokens `ids` except the first; `entries` has {id: {logprob, …}} per token."""
    if len(entries) != len(ids):
        raise ValueError(f"{what}: prompt_logprobs must be as many as tokens, {len(ids)}, got {len(entries)}")
    values = []
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        values.append(field(field(entry, str(token), dict, f"{what}: prompt_logprobs"), "logprob", (int, float), what))
    return check_log_probs(values, len(ids) - 1, what)

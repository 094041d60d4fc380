"""What every backend has: what it can do, what it is asked for, and how strictly its answers are read."""

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

_LEAST = -9998.0  # log-probability of a token that can be drawn: vLLM writes -9999 for minus infinity


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do."""

    n: bool  # several completions by one request
    token_ids: bool  # prompts as ids, and completions as ids
    scoring: bool  # log-probabilities of tokens that are given
    weight_sync: bool  # new weights while it runs
    lora: bool  # adapters alone; where not, they are sent merged into the weights


class Drawn(NamedTuple):
    """One completion, as a server wrote it."""

    ids: Any
    log_probs: Any
    ended: bool  # by an end of sequence; else max_new_tokens cut it off


class Backend:
    """Samples completions, and scores tokens.

    Parameters
    ----------
    on_failure : str
        When the server is lost: ``stop`` the training, or ``wait`` until it is back, and give it its weights again.
    wait_s : float
        Seconds to wait before the training stops after all.
    tolerance : float, optional
        Largest difference of a log-probability between trainer and server after new weights; by default 1e-3, and 0.1
        where the trainer's passes are in bfloat16. A server in bfloat16 needs some 0.1 too.
    folder : path, optional
        Where weights are written for the server, which must reach it by the same path; by default a temporary folder
        of this machine.

    Attributes
    ----------
    kind : str
        As `rlox.llm.backends.create_backend` calls it.
    capabilities : Capabilities
        What it can do.
    context : int or None
        Most tokens of a sequence, where the server has said so to `check`.

    Raises
    ------
    ValueError
        For a setting out of range.
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

    # ---- what a backend defines

    def complete(self, prompts: Sequence[Any], n: int, settings: Settings, seed: int) -> Completions:
        """Draw `n` completions for each of `prompts` (P_i,), the n of a prompt together.

        Raises
        ------
        ConnectionError
            If the server is lost.
        RuntimeError
            If it refuses the request, with what it says.
        ValueError
            If its answer is not what was asked for.
        """
        raise NotImplementedError

    def score(self, sequences: Sequence[Any]) -> list[np.ndarray]:
        """Log-probabilities f32 (L_i - 1,) of the tokens of each sequence (L_i,) but the first, given those before, at
        temperature 1. Raises as `complete`."""
        raise NotImplementedError

    def sync(self, model: LanguageModel, folder: str | os.PathLike | None = None) -> None:
        """Take over the weights of `model`, by way of a `folder` that the server can read; by default its own.

        Raises
        ------
        ValueError
            If it cannot; else as `complete`.
        """
        raise ValueError(f"{self.where}: {self.kind} takes no new weights while it runs")

    def check(self, sync: bool = False, longest: int = 0) -> None:
        """Ask whether the server is there, has a context of `longest` tokens, and with `sync` takes new weights.

        Raises
        ------
        ConnectionError, RuntimeError, ValueError
            If not, with what to do.
        """

    @property
    def lost(self) -> int:
        """How often a connection has broken off: the server behind it may have been started anew."""
        return 0

    def is_up(self) -> bool:
        """Whether the server answers now."""
        return True

    def close(self) -> None:
        """Let go of connections and of what was written for the server; again is allowed."""
        if self._own_folder is not None:
            self._removal()
            self._own_folder = None

    # ---- what backends share

    def bind(self, model: LanguageModel) -> None:
        """Read answers as of this model: its vocabulary, its ends of a sequence, its tokenizer."""
        self._ends, self._vocabulary, self._tokenizer = model.eos, model.vocabulary, model.tokenizer

    def ends(self, settings: Settings) -> list[int]:
        """Ids that end a completion."""
        return sorted({*self._ends, *settings.stop})

    def write(self, model: LanguageModel, folder: str | os.PathLike | None, adapters: bool = False) -> Path:
        """Write the weights, or the `adapters` alone, into a new folder; `remove` it when they were read.

        A new one each time: a server may still have the files of the last one mapped into its memory.
        """
        home = self._folder if folder is None else Path(folder).absolute()
        if home is None:
            if self._own_folder is None:
                self._own_folder = Path(tempfile.mkdtemp(prefix="rlox-sampler-"))
                # At the latest when Python ends: not everyone closes what was opened.
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
        """Remove what `write` has written."""
        shutil.rmtree(path, ignore_errors=True)

    def completions(self, drawn: Sequence[Drawn], settings: Settings, what: str) -> Completions:
        """Completions, each of them checked; `what` has answered.

        Raises
        ------
        ValueError
            For ids that are none, log-probabilities that are none or of another number, and ends that do not fit.
        """
        ends = set(self.ends(settings))
        ids, log_probs = [], []
        for row, one in enumerate(drawn):
            place = f"{what}: completion {row}"
            ids.append(self._checked_ids(one, settings, ends, place))
            if settings.temperature == 0.0:  # all of the probability is on one token
                log_probs.append(np.zeros(len(ids[-1]), np.float32))
            else:
                log_probs.append(checked_log_probs(one.log_probs, len(ids[-1]), place))
        ended = np.array([one.ended or int(found[-1]) in ends for one, found in zip(drawn, ids, strict=True)], bool)
        return Completions(ids, log_probs, ended)

    def _checked_ids(self, one: Drawn, settings: Settings, ends: set[int], place: str) -> np.ndarray:
        ids = checked_ids(one.ids, place, self._vocabulary)
        if not 1 <= len(ids) <= settings.max_new_tokens:
            raise ValueError(f"{place} must have 1 to max_new_tokens={settings.max_new_tokens} tokens, got {len(ids)}")
        if not one.ended and len(ids) < settings.max_new_tokens and int(ids[-1]) not in ends:
            raise ValueError(
                f"{place} must go on to max_new_tokens={settings.max_new_tokens}, got {len(ids)} tokens and no end: "
                "the server cuts it off; start it with a larger context"
            )
        if ends and one.ended and int(ids[-1]) not in ends:
            raise ValueError(
                f"{place} must end with one of the ids {sorted(ends)}, got {int(ids[-1])}: the server has another end "
                "of sequence than the model here; pass eos_token_id=…, or let the server load this model"
            )
        if early := [int(i) for i in ids[:-1] if int(i) in ends]:
            raise ValueError(
                f"{place} must stop at the end of sequence {early[0]}, and goes on behind it: the server ignores "
                "the stop ids of the request"
            )
        return ids


def seed_of(seed: int, place: int) -> int:
    """The seed of the request for the prompt at `place`: below 2**53, which every JSON reader can hold."""
    return Rng(seed, place).key >> 11


def as_lists(rows: Sequence[Any]) -> list[list[int]]:
    """Arrays, tensors or lists of ids as lists."""
    return [row.tolist() if hasattr(row, "tolist") else [int(i) for i in row] for row in rows]


def checked_ids(ids: Any, place: str, vocabulary: int | None) -> np.ndarray:
    """Token ids (L,) int64 of an answer.

    Raises
    ------
    ValueError
        For what is no list of ids of the vocabulary.
    """
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"{place} must have token ids, got {shown(ids)}: the server leaves out what it is asked for")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{place} must have integers for token ids, got {shown(ids)}")
    most = "" if vocabulary is None else f" and below the vocabulary's {vocabulary}"
    if wrong := [i for i in ids if i < 0 or i >= (2**62 if vocabulary is None else vocabulary)]:
        raise ValueError(f"{place} must have token ids of at least 0{most}, got {wrong[0]}: is it another model's?")
    return np.array(ids, np.int64)


def checked_log_probs(found: Any, n: int, place: str) -> np.ndarray:
    """`n` log-probabilities f32 of an answer.

    Raises
    ------
    ValueError
        Unless it has so many finite numbers, none above 0 but by rounding.
    """
    if not isinstance(found, (list, tuple)):
        raise ValueError(
            f"{place} must have log-probabilities, got {shown(found)}: the server leaves out what it is asked for"
        )
    if len(found) != n:
        raise ValueError(f"{place} must have as many log-probabilities as tokens, {n}, got {len(found)}")
    for value in found:
        if not is_number(value) or not _LEAST < value <= 1e-3:
            raise ValueError(f"{place} must have finite log-probabilities of at most 0, got {shown(value)}")
    return np.minimum(np.array(found, np.float32), 0.0)

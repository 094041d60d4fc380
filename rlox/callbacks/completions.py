"""Record a few completions of a language model in addition to its metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlox.callbacks.base import Callback
from rlox.checkpoint import run_files

FILE = "completions.json"
_COLUMNS = ["step", "prompt", "completion", "reward"]
_MOST_ROWS, _LONGEST = 10_000, 2_000  # rows of the table, and characters of each text
_MOST_BYTES = 1 << 28  # of the file


class CompletionsCallback(Callback):
    """Writes completions of the first prompts, sampled at each evaluation, to a table for reading.

    The file ``completions.json`` in `folder` has ``columns`` (step, prompt, completion, reward) and ``data``, a list of
    rows, which is MLflow's format for tables. Each time, the whole file is replaced.

    Parameters
    ----------
    folder : path
        Folder of the file.
    written : callable, optional
        Called as ``written(step, file)`` after the file was replaced.
    n : int
        Number of prompts at each evaluation.
    """

    section = "log"
    acts_on_evaluation = False

    def __init__(self, folder: Path, written: Callable[[int, str], None] | None = None, n: int = 8) -> None:
        self.path, self.n = Path(folder) / FILE, n
        self._written = written
        self._rows: list[list[Any]] = []

    def on_training_start(self, *, algorithm: Any = None, **info: Any) -> None:
        self._rows = []
        if algorithm is not None and run_files.is_file(self.path.parent, FILE):
            # Drop later rows, because a resumed training writes them again.
            self._rows = [row for row in self._saved() if row[0] <= algorithm.counters.steps]

    def _saved(self) -> list[list[Any]]:
        try:
            kept = json.loads(run_files.read_bytes(self.path.parent, FILE, _MOST_BYTES))["data"]
            if all(type(row[0]) is int and len(row) == len(_COLUMNS) for row in kept):
                return kept
        except (ValueError, TypeError, LookupError, RecursionError):
            pass
        raise ValueError(f"{self.path} must be a table as rlox writes it, got other contents; delete the file")

    def on_evaluation(self, *, step: int, algorithm: Any = None, **info: Any) -> None:
        examples = algorithm.examples(self.n) if hasattr(algorithm, "examples") else []
        if not examples or any(row[0] == step for row in self._rows):
            return
        self._rows += [[step, _text(prompt), _text(text), reward] for prompt, text, reward in examples]
        table = {"columns": _COLUMNS, "data": self._rows[-_MOST_ROWS:]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        run_files.replace_text(self.path.parent, self.path.name, json.dumps(table, ensure_ascii=False, indent=0))
        if self._written is not None:
            self._written(step, FILE)


def _text(value: Any) -> str:
    """Return a text, or the last message of a conversation, shortened."""
    text = value if isinstance(value, str) else str(value[-1].get("content", "")) if value else ""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

"""Datasets as token ids, in the form that the algorithms read: prompts, pairs or texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlox.config import integer, shown
from rlox.config.arguments import warn_renamed
from rlox.kernels.rng import Rng
from rlox.llm.data import (
    Rows,
    encode,
    encode_answers,
    pair_rows,
    prompt_rows,
    read_rows,
    template_arguments,
    text_rows,
)
from rlox.llm.models.language import LanguageModel
from rlox.llm.tokens import Sequences


@dataclass
class Encoded:
    """N rows: a prompt each, and `completions` for the task texts, or `chosen` and `rejected` for the task pairs."""

    prompts: list[np.ndarray]  # (P_i,) int64 each
    completions: list[np.ndarray] = field(default_factory=list)
    chosen: list[np.ndarray] = field(default_factory=list)
    rejected: list[np.ndarray] = field(default_factory=list)
    texts: list[Any] | None = None  # the original prompts: texts, or conversations
    columns: dict[str, list[Any]] = field(default_factory=dict)  # the other columns of the dataset

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for group in (self.prompts, self.completions, self.chosen, self.rejected):
            digest.update(np.array([len(ids) for ids in group], np.int64).tobytes())
            for ids in group:
                digest.update(ids.tobytes())
        for name in sorted(self.columns):  # rewards read them
            try:
                digest.update(Rows({name: self.columns[name]}).fingerprint().encode())
            except TypeError:  # its values cannot be written as JSON
                digest.update(name.encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Pairs:
    """B pairs: the first B sequences have the chosen completions, the last B the rejected ones."""

    sequences: Sequences
    numbers: np.ndarray  # (B,) int64, their rows in the dataset
    margins: np.ndarray | None = None  # (B,) f32, required difference of the rewards, if the dataset has margins

    def __len__(self) -> int:
        return len(self.sequences) // 2


def pairs_of(rows: Encoded, numbers: np.ndarray, margins: np.ndarray | None = None) -> Pairs:
    """Return the pairs `numbers` of `rows`, with their `margins` (B,), if there are any."""
    sides = [side[i] for side in (rows.chosen, rows.rejected) for i in numbers]
    return Pairs(Sequences([rows.prompts[i] for i in numbers] * 2, sides), numbers, margins)


def margins_of(rows: Encoded, numbers: Iterable[int], where: str) -> np.ndarray | None:
    """Return the column ``margin`` of the rows `numbers`, f32 (B,), or None if there is no such column.

    Raises ValueError if a value is not a finite number.
    """
    if "margin" not in rows.columns:
        return None
    margins = []
    for i in numbers:
        value = rows.columns["margin"][i]
        try:
            margins.append(float(value))
        except (TypeError, ValueError):
            margins.append(np.nan)
        if not np.isfinite(margins[-1]):
            raise ValueError(
                f"{where}: row {i}: margin must be a finite number, got {shown(value)}; correct it, or leave out the "
                "row or the column"
            )
    return np.array(margins, np.float32)


class RowOrder:
    """The rows of a dataset in the order in which updates learn from them: each pass over the rows has a new one.

    The key of `rng` and the number of the pass determine it. `first_update` is the first update on these rows,
    `first_pass` the number of the pass in which it lies, and `n_before` the number of rows of this pass before it.
    """

    def __init__(self, n_rows: int, rng: Rng, first_update: int, first_pass: int = 0) -> None:
        self.n_rows, self.first_update, self.first_pass, self._rng = n_rows, first_update, first_pass, rng
        self.n_before = 0
        self._pass: tuple[int, np.ndarray] | None = None  # the last pass that was read, and its order

    def _place(self, update: int, n: int) -> int:
        """Return the number of rows from the start of the first pass to an update, all on `n` rows."""
        return self.n_before + (update - self.first_update) * n

    def numbers(self, update: int, n: int) -> np.ndarray:
        """Return the `n` rows (n,) int64 from which the update with this number learns."""
        places = np.arange(n) + self._place(update, n)
        rows = np.empty(n, np.int64)
        for number in np.unique(places // self.n_rows):
            here = places // self.n_rows == number
            if self._pass is None or self._pass[0] != number:
                key = self.first_pass + int(number)
                self._pass = int(number), Rng(self._rng.key, key).permutation(self.n_rows)
            rows[here] = self._pass[1][places[here] % self.n_rows]
        return rows

    def start(self) -> dict[str, int]:
        """Return the first update, the number of its pass and the rows before it, for a checkpoint."""
        return {"from": self.first_update, "pass": self.first_pass, "before": self.n_before}

    def start_at(self, saved: Mapping[str, Any], updates: int, config: Mapping[str, Any], n: int, where: str) -> None:
        """Start where `start` said, in a checkpoint after `updates`; raise ValueError if it is damaged.

        If its `config` had another ``batch_size`` than `n`, the next update continues behind the last row.
        """
        self.first_update = integer(where, "rows.from", saved.get("from", 0), 0, updates)
        self.first_pass = integer(where, "rows.pass", saved.get("pass", 0), 0)
        self.n_before = integer(where, "rows.before", saved.get("before", 0), 0, self.n_rows - 1)
        if (each := integer(where, "config.batch_size", config.get("batch_size", n), 1)) != n:
            n_passes, self.n_before = divmod(self._place(updates, each), self.n_rows)
            self.first_update, self.first_pass = updates, self.first_pass + n_passes

    def next_pass(self, update: int, n: int) -> int:
        """Return the number of the first pass that has not begun before the update with this number."""
        return self.first_pass - -self._place(update, n) // self.n_rows


def __getattr__(name: str) -> Any:
    if name != "encoded":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed("rlox.llm.encoded.encoded", "encode_dataset", "0.14.0")
    return encode_dataset


def encode_dataset(
    data: Any,
    task: str,
    model: LanguageModel,
    where: str,
    longest: int = 0,
    ended: Sequence[bool] | None = None,
) -> Encoded:
    """Encode `data` as the rows of a `task`: ``prompts``, ``pairs`` or ``texts``.

    Parameters
    ----------
    data
        Token ids: a tensor (N, P), a list of arrays (P_i,), or for pairs and texts a tuple of three or two of these.
        The tokenizer's padding is removed from tensors; a prompt that begins with the padding token itself, for example
        as its BOS, must be in a list. Otherwise everything that `rlox.llm.data.read_rows` reads.
    longest : int
        Maximum number of tokens that will be appended to a row.
    ended : sequence of bool, optional
        For texts: False for rows whose completion was cut off, and gets no EOS.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError
        If `data` is neither, contains text and there is no tokenizer, or has rows longer than the model's context.
    """
    if isinstance(data, Encoded):
        rows = data
    elif _are_ids(data):
        rows = _of_ids(data, task, model, where)
    else:
        rows = _of_text(data, task, model, where, ended)
    if not len(rows):
        raise ValueError(f"{where}: dataset must hold at least one row, got none")
    answers = [group for group in (rows.completions, rows.chosen, rows.rejected) if group]
    vocabulary, context = model.vocabulary or 2**63, model.context or 2**63
    for group in (rows.prompts, *answers):
        for i, ids in enumerate(group):
            if len(ids) and ids.max() >= vocabulary:
                raise ValueError(
                    f"{where}: token ids must be in the model's vocabulary, [0, {vocabulary}), got {int(ids.max())} in "
                    f"row {i}; does the tokenizer belong to the model?"
                )
    for i, prompt in enumerate(rows.prompts):
        n = len(prompt) + longest + max((len(group[i]) for group in answers), default=0)
        if n > context:
            more = f", {longest} of them max_new_tokens" if longest else ""
            raise ValueError(
                f"{where}: row {i} must fit in the model's context of {context} tokens, got {n}{more}; leave such rows "
                "out, or shorten them"
            )
    return rows


def _are_ids(data: Any) -> bool:
    if isinstance(data, tuple):
        return all(map(_are_ids, data)) and len(data) > 0
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return True
    return isinstance(data, list) and len(data) > 0 and isinstance(data[0], (torch.Tensor, np.ndarray, list))


def _of_ids(data: Any, task: str, model: LanguageModel, where: str) -> Encoded:
    names = {"prompts": ("prompts",), "pairs": ("prompts", "chosen", "rejected"), "texts": ("prompts", "completions")}
    tensors = data if isinstance(data, tuple) else (data,)
    if len(tensors) != len(names[task]):
        raise TypeError(f"{where}: token ids must be passed as ({', '.join(names[task])}), got {len(tensors)} of them")
    groups: dict[str, Any] = {
        name: _id_rows(group, name, model, where) for name, group in zip(names[task], tensors, strict=True)
    }
    if len({len(group) for group in groups.values()}) > 1:
        raise ValueError(
            f"{where}: there must be as many {' as '.join(groups)}, got {[len(g) for g in groups.values()]}"
        )
    return Encoded(**groups)


def _id_rows(group: Any, name: str, model: LanguageModel, where: str) -> list[np.ndarray]:
    if isinstance(group, torch.Tensor):
        group = group.detach().cpu().numpy()
    if isinstance(group, np.ndarray) and group.ndim != 2:
        raise ValueError(f"{where}: {name} must have shape (N, length), got {group.shape}")
    rows, whole = [], isinstance(group, np.ndarray)
    for i, row in enumerate(group):
        ids = np.asarray(row.detach().cpu() if isinstance(row, torch.Tensor) else row)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            chat = isinstance(row, list) and all(isinstance(one, dict) for one in row)
            hint = '; a conversation is {"prompt": [message, …]}' if chat else ""
            raise TypeError(f"{where}: {name} must hold rows of integer token ids, got {shown(row)} in row {i}{hint}")
        if len(ids) and ids.min() < 0:
            raise ValueError(f"{where}: {name} must hold ids of at least 0, got {int(ids.min())} in row {i}")
        rows.append(_remove_padding(ids.astype(np.int64), name, model) if whole else ids.astype(np.int64))
    if name == "prompts" and any(len(ids) == 0 for ids in rows):
        raise ValueError(f"{where}: prompts must have at least one token each")
    return rows


def _remove_padding(ids: np.ndarray, name: str, model: LanguageModel) -> np.ndarray:
    """Remove the tokenizer's padding from a row of a tensor: on the left of a prompt, on the right of other rows.

    If the padding token is also an EOS, one is kept at the end.
    """
    pad = getattr(model.tokenizer, "pad_token_id", None)
    if pad is None:
        return ids
    own = np.flatnonzero(ids != pad)
    if name == "prompts":
        return ids[own[0] :] if len(own) else ids[:0]
    end = int(own[-1]) + 1 if len(own) else 0
    return ids[: end + (pad in model.eos)]


def _of_text(data: Any, task: str, model: LanguageModel, where: str, ended: Sequence[bool] | None) -> Encoded:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"{where}: text needs a tokenizer, got none; pass tokenizer=…, or token ids")
    if task != "prompts" and not model.eos:
        raise ValueError(
            f"{where}: tokenizer must have an end of sequence (eos_token) to end completions with, got none; set "
            "tokenizer.eos_token, or pass eos_token_id=…"
        )
    source = read_rows(data)
    # The tokenizer's own EOS, or else the one that the user passed.
    eos = None if getattr(tokenizer, "eos_token_id", None) is not None or not model.eos else model.eos[0]
    if task == "prompts":
        prompts = prompt_rows(source)
        ids = [
            encode(tokenizer, p, row=i, where=where, **template_arguments(prompts.columns, i))[0]
            for i, p in enumerate(prompts.prompts)
        ]
        return Encoded(_arrays(ids), texts=prompts.prompts, columns=prompts.columns)
    if task == "pairs":
        pairs = pair_rows(source)
        each = [
            encode_answers(tokenizer, p, sides, eos=eos, row=i, where=where, **template_arguments(pairs.columns, i))
            for i, (p, *sides) in enumerate(zip(pairs.prompts, pairs.chosen, pairs.rejected, strict=True))
        ]
        chosen, rejected = (_arrays(sides[k] for _, sides in each) for k in (0, 1))
        heads = _arrays(head for head, _ in each)
        return Encoded(heads, chosen=chosen, rejected=rejected, texts=pairs.prompts, columns=pairs.columns)
    texts = text_rows(source)
    ends = [True] * len(texts.prompts) if ended is None else ended
    written = enumerate(zip(texts.prompts, texts.completions, ends, strict=True))
    rows = [
        encode(tokenizer, p, text, ended=e, eos=eos, row=i, where=where, **template_arguments(texts.columns, i))
        for i, (p, text, e) in written
    ]
    # The first token of a text without a prompt is only read, since nothing predicts it.
    split = [(head, rest) if head else (rest[:1], rest[1:]) for head, rest in rows]
    heads, rests = (_arrays(column) for column in zip(*split, strict=True))
    return Encoded(heads, rests, texts=[*texts.prompts], columns=texts.columns)


def _arrays(rows: Iterable[Sequence[int]]) -> list[np.ndarray]:
    return [np.asarray(row, np.int64) for row in rows]

"""Text datasets: reading rows, selecting the columns of each task, and encoding texts as token ids.

In messages, rows are numbered from 0 and lines of a file from 1.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlox.checkpoint import one_line
from rlox.config import nearest, shown
from rlox.llm.templates import COLUMNS, Chat, Template

Text = str | Chat

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_OF_CHATS = ("prompt", "completion", "chosen", "rejected", "messages", *COLUMNS)  # columns of mappings
_CHAT = '[{"role": "user", "content": "..."}]'
_LONGEST_FIELD = 2**31 - 1  # characters of one field of a CSV file; csv allows only 131,072 by default


@dataclass
class Rows:
    """A table of text: columns of equal length, named by texts, with at least one row; else ValueError or TypeError."""

    columns: dict[str, list]
    source: str = "<rows>"  # a path, or the kind of object in angle brackets

    def __post_init__(self) -> None:
        where = f"dataset {self.source}"
        for name in self.columns:
            if not isinstance(name, str):
                raise TypeError(f"{where}: names of columns must be texts, got {shown(name)}")
        lengths = {name: len(column) for name, column in self.columns.items()}
        if not any(lengths.values()):
            raise ValueError(f"{where}: it must hold at least one row, got none")
        first, n = next(iter(lengths.items()))
        for name, length in lengths.items():
            if length != n:
                raise ValueError(f"{where}: column {name} must have {n} rows, as column {first} has, got {length}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def fingerprint(self) -> str:
        """Return the SHA-256 of all names and values, to prevent resuming with different data.

        It depends on the order of rows, but not on that of columns. Raises TypeError for a value that JSON lacks.
        """
        digest = hashlib.sha256()
        for name in sorted(self.columns):
            digest.update(f"{json.dumps(name)}\n".encode())
            for row, value in enumerate(self.columns[name]):
                try:
                    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
                except (TypeError, ValueError, RecursionError) as e:
                    raise TypeError(
                        f"dataset {self.source}: row {row}: {name} must be a value that JSON supports, got "
                        f"{shown(value)} ({one_line(e)}); drop that column"
                    ) from e
                digest.update(f"{text}\n".encode())
        return digest.hexdigest()

    def select(self, indices: Iterable[int]) -> dict[str, list]:
        """Return the columns of only the rows `indices`, in that order."""
        chosen = [int(index) for index in indices]
        return {name: [column[index] for index in chosen] for name, column in self.columns.items()}


def _plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays, dates and bytes, which Parquet files contain, to JSON values."""
    for name in ("tolist", "isoformat", "hex"):
        if callable(method := getattr(value, name, None)):
            return method()
    raise TypeError(f"JSON does not support {type(value).__name__}")


# --- sources ---------------------------------------------------------------------------------------------------------


def read_rows(source: Any) -> Rows:
    """Read a dataset of text.

    Parameters
    ----------
    source : str, path, list, dict or datasets.Dataset
        A file of objects (``.jsonl``: one per line, ``.json``: a list), ``.csv`` with a header, ``.parquet`` or
        ``.arrow``; a list of dicts; a list of texts, which becomes the column ``prompt``; a dict of lists; or an object
        with ``column_names`` and ``source[name]``, such as a Hugging Face dataset.

    Returns
    -------
    Rows
        The whole dataset, in memory.

    Raises
    ------
    FileNotFoundError
        If the file does not exist. The message suggests the nearest name in its folder.
    ValueError
        If the file or a row is invalid. The message contains the line or the row.
    TypeError
        If `source` is none of the above.
    ImportError
        If pyarrow is needed and not installed.
    """
    if isinstance(source, Rows):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _read_file(Path(source))
    kind = f"<{type(source).__name__}>"
    where = f"dataset {kind}"
    if isinstance(source, (list, tuple)):
        if not any(isinstance(row, str) for row in source):
            return _from_objects(source, kind, [f"row {i}" for i in range(len(source))])
        for i, row in enumerate(source):
            if not isinstance(row, str):
                raise ValueError(f"{where}: row {i} must be a text, as other rows are, got {shown(row)}")
        return Rows({"prompt": list(source)}, kind)
    if isinstance(source, Mapping):
        if splits := [name for name, part in source.items() if hasattr(part, "column_names")]:
            raise ValueError(
                f"{where}: it must be one split, got {', '.join(map(str, splits))}; pass source[{splits[0]!r}]"
            )
        for name, column in source.items():
            if not isinstance(column, (list, tuple)):
                raise ValueError(f"{where}: column {name} must be a list, got {shown(column)}")
        return Rows({name: list(column) for name, column in source.items()}, kind)
    names = getattr(source, "column_names", None)
    if names is None or not hasattr(source, "__getitem__"):
        raise TypeError(
            f"read_rows: source must be a path, a list of dicts or texts, a dict of lists, or a datasets.Dataset, got "
            f"{shown(source)}; pass a streamed dataset as list(source)"
        )
    return Rows({name: _arrow_values(name, list(source[name])) for name in names}, kind)


def _read_file(path: Path) -> Rows:
    where = f"dataset {path}"
    if not path.exists():
        there = [p.name for p in path.parent.glob("*") if p.suffix.lower() in SUFFIXES]
        hint = f"; {nearest(path.name, there)}" if there else ""
        what = "such file" if path.parent.is_dir() else f"folder {path.parent}"
        raise FileNotFoundError(f"{where}: there is no {what}{hint}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{where}: its name must end in one of {', '.join(SUFFIXES)}, got {path.name!r}")
    if not path.is_file():
        raise ValueError(f"{where}: it must be an ordinary file")
    if suffix in (".parquet", ".arrow"):
        return Rows(_arrow_columns(path, suffix, where), str(path))
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise ValueError(
            f"{where}: line {line} must be UTF-8, got the byte 0x{e.object[e.start]:02x}; save the file as UTF-8"
        ) from e
    if suffix == ".csv":
        return Rows(_csv_columns(text, where), str(path))
    if suffix == ".jsonl":
        # Not splitlines: JSON texts may contain U+2028.
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        return _from_objects([_json(line, where, i) for i, line in lines], str(path), [f"line {i}" for i, _ in lines])
    objects = _json(text, where)
    if not isinstance(objects, list):
        raise ValueError(f"{where}: it must hold a list of objects, got {shown(objects)}")
    return _from_objects(objects, str(path), [f"row {i}" for i in range(len(objects))])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of these keys and values; raise a ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return found


def _json(text: str, where: str, line: int | None = None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as e:
        place, column, problem = e.lineno if line is None else line, f" at column {e.colno}", e.msg
        text = e.doc.split("\n")[e.lineno - 1]
    except (ValueError, RecursionError) as e:  # an integer of thousands of digits, deeply nested lists, or a key twice
        place, column, problem = 1 if line is None else line, "", one_line(e)
    remedy = "; name it .jsonl, if it has one object per line" if line is None and problem == "Extra data" else ""
    raise ValueError(f"{where}: line {place} must be JSON, got {shown(text)} ({problem}{column}){remedy}")


def _csv_columns(text: str, where: str) -> dict[str, list]:
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            rows = [(reader.line_num, row) for row in reader if row]
        except csv.Error as e:
            raise ValueError(f"{where}: line {reader.line_num} must be CSV, got {one_line(e)}") from e
    finally:
        csv.field_size_limit(limit)
    names = rows[0][1] if rows else []
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"{where}: names of columns must differ, got {twice!r} twice")
    for line, row in rows[1:]:
        if len(row) != len(names):
            raise ValueError(
                f"{where}: the row that ends in line {line} must have {len(names)} fields, as the header has, got "
                f"{len(row)}; put texts with commas in double quotes"
            )
    return {name: [row[i] for _, row in rows[1:]] for i, name in enumerate(names)}


def _arrow_columns(path: Path, suffix: str, where: str) -> dict[str, list]:
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as e:
        raise ImportError(f"{where}: pyarrow is needed for it; pip install pyarrow") from e
    try:
        if suffix == ".parquet":
            table = pa.parquet.ParquetFile(pa.OSFile(os.fsencode(path))).read()
        else:
            with pa.OSFile(os.fsencode(path)) as file:
                try:
                    reader = pa.ipc.open_file(file)
                except pa.ArrowInvalid:  # the datasets library writes Arrow's stream format instead
                    file.seek(0)
                    reader = pa.ipc.open_stream(file)
                table = reader.read_all()
    except (pa.ArrowException, OSError) as e:
        raise ValueError(f"{where}: it must be a {suffix} file, and is not, or is truncated: {one_line(e)}") from e
    names = table.column_names
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: names of columns must differ, got {', '.join(names)}")
    return {name: _arrow_values(name, column) for name, column in table.to_pydict().items()}


def _arrow_values(name: str, column: list) -> list:
    """Return a column's values; in chats and tools, without the keys of other rows, which Arrow adds as None."""
    return [_without_none(value) for value in column] if name in _OF_CHATS else column


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _from_objects(objects: Sequence[Any], source: str, places: Sequence[str]) -> Rows:
    """Build a table from objects with the same keys; `places` contains the place of each object, for messages."""
    where = f"dataset {source}"
    names = list(objects[0]) if objects and isinstance(objects[0], Mapping) else []
    for row, place in zip(objects, places, strict=True):
        if not isinstance(row, Mapping):
            raise ValueError(f'{where}: {place} must be an object such as {{"prompt": "..."}}, got {shown(row)}')
        if missing := [name for name in names if name not in row]:
            hint = nearest(str(missing[0]), map(str, row)) if row else "write null where there is no value"
            raise ValueError(f"{where}: {place} must have column {missing[0]!r}, as {places[0]} has, got none; {hint}")
        if extra := [name for name in row if name not in names]:
            raise ValueError(f"{where}: {places[0]} must have column {extra[0]!r}, as {place} has, got none")
    return Rows({name: [row[name] for row in objects] for name in names}, source)


# --- tasks -----------------------------------------------------------------------------------------------------------


@dataclass
class Prompts:
    """Data of online methods: N prompts, and the other columns, which rewards receive by name."""

    prompts: list[Text]
    columns: dict[str, list] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass
class Pairs:
    """N prompts, each with a preferred and a rejected answer."""

    prompts: list[Text]
    chosen: list[Text]
    rejected: list[Text]
    columns: dict[str, list] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass
class Texts:
    """N demonstrations. The loss covers only the completion; a prompt of None means that it covers the whole text."""

    prompts: list[Text | None]
    completions: list[Text]
    columns: dict[str, list] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)


def _encodable(where: str, name: str, text: str) -> str:
    """Return `text`. Raise a ValueError if it has a surrogate, half of a character, which no tokenizer encodes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ValueError(
                f"{where}: {name} must be a text of Unicode characters, got {shown(text[e.start : e.end])} at {e.start}"
            ) from e
    return text


def check_text(where: str, name: str, value: Any) -> Text:
    """Return `value`; raise a ValueError unless it is a text or a chat.

    Each message of a chat has its role, and its content, which only ``tool_calls`` replace.
    """
    if isinstance(value, str):
        return _encodable(where, name, value)
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{where}: {name} must be a text, or a chat such as {_CHAT}, got {shown(value)}")
    for i, message in enumerate(value):
        for part in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(part), str):
                if part == "content" and message.get("content") is None and message.get("tool_calls"):
                    continue
                raise ValueError(f"{where}: message {i} of {name} must have the text {part!r}, got {shown(message)}")
            _encodable(where, f"message {i} of {name}", message[part])
    return list(value)


def prompt_rows(rows: Rows) -> Prompts:
    """Return the rows as prompts; raises a ValueError unless column ``prompt`` has texts or chats."""
    return Prompts(_texts(rows, "prompt", f"prompt_rows: dataset {rows.source}"), _others(rows, "prompt"))


def pair_rows(rows: Rows) -> Pairs:
    """Return the rows as pairs, from the columns ``prompt``, ``chosen`` and ``rejected``.

    Without ``prompt``, the prompt is the common beginning of the chats ``chosen`` and ``rejected``.

    Raises
    ------
    ValueError
        If a column is missing, or a row is not a pair of answers to one prompt.
    """
    where = f"pair_rows: dataset {rows.source}"
    chosen, rejected = (_texts(rows, name, where) for name in ("chosen", "rejected"))
    if "prompt" in rows.columns or any(isinstance(text, str) for text in (*chosen, *rejected)):
        prompts = _texts(rows, "prompt", where)
    else:
        prompts = []
        for row, (good, bad) in enumerate(zip(chosen, rejected, strict=True)):
            n = 0
            while n < min(len(good), len(bad)) - 1 and good[n] == bad[n]:
                n += 1
            while n and good[n - 1]["role"] == "assistant":  # it is finished, and an answer would continue it
                n -= 1
            if n == 0:
                raise ValueError(
                    f"{where}: row {row}: chosen and rejected must begin with the same messages, which are the prompt, "
                    f"got {shown(good[0])} and {shown(bad[0])}; or add column 'prompt'"
                )
            prompts.append(good[:n])
            chosen[row], rejected[row] = good[n:], bad[n:]
    for name, answers in (("chosen", chosen), ("rejected", rejected)):
        _check_answers(where, name, prompts, answers)
    return Pairs(prompts, chosen, rejected, _others(rows, "prompt", "chosen", "rejected"))


def text_rows(rows: Rows) -> Texts:
    """Return the rows as demonstrations.

    They are read from the first of these that the dataset has: the columns ``prompt`` and ``completion``; the column
    ``messages``, a chat whose last messages, which are the assistant's, are the completion; the column ``text``, which
    is learned as a whole.

    Raises
    ------
    ValueError
        If columns are missing, or a row is invalid.
    """
    where, there = f"text_rows: dataset {rows.source}", rows.columns
    if "completion" in there or not ("messages" in there or "text" in there):
        if not {"prompt", "completion"} & there.keys():
            hints = [nearest(name, there) for name in ("prompt", "completion", "messages", "text")]
            raise ValueError(
                f"{where}: it must have columns 'prompt' and 'completion', or 'messages', or 'text', got none of them; "
                f"{next((hint for hint in hints if hint.startswith('did')), hints[0])}"
            )
        prompts, completions = (_texts(rows, name, where) for name in ("prompt", "completion"))
        _check_answers(where, "completion", prompts, completions)
        return Texts([*prompts], completions, _others(rows, "prompt", "completion"))
    if "messages" not in there:
        texts = _texts(rows, "text", where)
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"{where}: row {row}: text must be a text, got {shown(text)}; name it 'messages'")
        return Texts([None] * len(rows), texts, _others(rows, "text"))
    prompts, completions = [], []
    for row, chat in enumerate(_texts(rows, "messages", where)):
        n = 0 if isinstance(chat, str) else len(chat)
        while n and chat[n - 1]["role"] == "assistant":
            n -= 1
        if not 0 < n < len(chat):
            raise ValueError(
                f"{where}: row {row}: messages must be a chat of at least two that ends with one of role 'assistant', "
                f"after one of another role, got {shown(chat)}"
            )
        prompts.append(chat[:n])
        completions.append(chat[n:])
    return Texts(prompts, completions, _others(rows, "messages"))


def _texts(rows: Rows, name: str, where: str) -> list[Any]:
    """Return a column of texts or chats."""
    if name not in rows.columns:
        raise ValueError(f"{where}: it must have column {name!r}, got none; {nearest(name, rows.columns)}")
    return [check_text(f"{where}: row {row}", name, value) for row, value in enumerate(rows.columns[name])]


def template_arguments(columns: Mapping[str, list], row: int) -> dict[str, Any]:
    """Return the arguments of the chat template that the columns contain for a row."""
    return {name: columns[name][row] for name in COLUMNS if name in columns}


def _others(rows: Rows, *names: str) -> dict[str, list]:
    return {name: column for name, column in rows.columns.items() if name not in names}


def _check_answers(where: str, name: str, prompts: Sequence[Text], answers: Sequence[Text]) -> None:
    """Raise a ValueError unless answers to texts are texts, to chats texts or messages that the assistant begins."""
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if isinstance(answer, str):
            continue
        if isinstance(prompt, str) or answer[0]["role"] != "assistant":
            rule = "be a text, as prompt is" if isinstance(prompt, str) else "begin with a message of role 'assistant'"
            remedy = "if chosen and rejected begin with the prompt, leave column 'prompt' out"
            raise ValueError(
                f"{where}: row {row}: {name} must {rule}, got {shown(answer)}"
                f"{f'; {remedy}' if name in ('chosen', 'rejected') else ''}"
            )


# --- token ids -------------------------------------------------------------------------------------------------------


def encode(
    tokenizer: Any, prompt: Text | None, completion: Text | None = None, **options: Any
) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and of its completion.

    Prompt and completion are tokenised together, since some tokenizers put a space before every text. A token that
    covers the end of the prompt and the start of the completion belongs to the completion, as in TRL's `KTOTrainer`; if
    it is the only one, the two are tokenised separately. A text has the tokenizer's special tokens, but never an EOS
    that the tokenizer appends. A chat is rendered by the tokenizer's chat template, a prompt up to the point where the
    assistant writes. If its last message is the assistant's, the completion continues this message. A completion of a
    chat is the rest of the rendering of the whole chat, if that begins with the rendered prompt, or else only the
    answer's content.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        Or an object that is called, and renders chats, in the same way.
    prompt : str, chat or None
        None: the completion is a whole text, with special tokens.
    completion : str, chat or None
        A text can answer a prompt of either kind; messages can answer only a chat.
    **options
        As for `encode_answers`.

    Returns
    -------
    tuple of list of int
        Ids of the prompt, empty if it is None, and of the completion, empty if it is None.

    Raises
    ------
    TypeError, ValueError
        As `encode_answers`.
    """
    ids, answers = encode_answers(tokenizer, prompt, () if completion is None else (completion,), **options)
    return ids, answers[0] if answers else []


def encode_answers(
    tokenizer: Any,
    prompt: Text | None,
    completions: Sequence[Text],
    *,
    add_eos: bool = True,
    ended: bool = True,
    eos: int | None = None,
    row: int | None = None,
    where: str = "encode",
    tools: Any = None,
    chat_template_kwargs: Any = None,
) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of a prompt and of each of its completions, which all follow the same ids (see `encode`).

    Parameters
    ----------
    add_eos : bool
        End the completion with exactly one EOS.
    ended : bool
        False for a completion (a text) that was cut off: it gets no EOS, and nothing that a chat template puts after an
        answer.
    eos : int, optional
        Id of the EOS; by default the tokenizer's.
    row : int, optional
        Number of the row, for messages.
    tools : list, optional
        JSON schemas or functions, or schemas as JSON, that the chat template describes to the model.
    chat_template_kwargs : mapping, optional
        Variables of the chat template, such as ``enable_thinking``; also as JSON. Values of None are left out.

    Raises
    ------
    ValueError
        If a value is neither a text nor a chat, the prompt has no token, the prompt is a chat and the tokenizer has no
        chat template or one that does not read an argument, `add_eos` is set and there is no EOS, or an argument of the
        chat template is given with a text.
    TypeError
        If `tokenizer` cannot be called, or an argument of the chat template has the wrong type.
    """
    where = where if row is None else f"{where}: row {row}"
    if not callable(tokenizer):
        raise TypeError(
            f"{where}: tokenizer must be one of transformers, called as tokenizer(text), got {shown(tokenizer)}; wrap "
            "a tokenizers.Tokenizer in PreTrainedTokenizerFast(tokenizer_object=...)"
        )
    if prompt is not None:
        check_text(where, "prompt", prompt)
    for text in completions:
        check_text(where, "completion", text)
    end: Any = getattr(tokenizer, "eos_token_id", None) if eos is None else eos
    if add_eos and completions and end is None:
        raise ValueError(
            f"{where}: tokenizer must have an EOS, which ends completions, got None; set tokenizer.eos_token, or "
            "add_eos=False"
        )
    is_text = isinstance(prompt, str) or (prompt is None and all(isinstance(text, str) for text in completions))
    for name, value in zip(COLUMNS, (tools, chat_template_kwargs), strict=True):
        if value and is_text:
            raise ValueError(
                f"{where}: {name} must be left out if a prompt is a text, because no chat template reads it, got "
                f"{shown(value)}; drop or rename the column, or give prompts as chats"
            )
    start, wholes = prompt if isinstance(prompt, str) else "", []
    template = None if is_text else Template(where, tokenizer, tools, chat_template_kwargs)
    chat = [] if prompt is None or isinstance(prompt, str) else prompt
    if template is not None and chat:
        start = template.opening(chat)
    for text in completions:
        if template is not None and (ended or not isinstance(text, str)):
            wholes.append(template.whole(chat, text, start))
        elif isinstance(text, str):
            wholes.append(f"{start}{text}")
        else:
            raise ValueError(f"{where}: completion must be a text, as prompt is, got {shown(text)}")
    if prompt is None:
        ids, answers = [], [_whole_ids(tokenizer, whole, is_text) for whole in wholes]
        if is_text and not all(answers):
            raise ValueError(f"{where}: text must have at least one token, got {shown(completions[0])}")
    else:
        ids = _whole_ids(tokenizer, start, is_text)
        if not ids:
            raise ValueError(f"{where}: prompt must have at least one token, got {shown(prompt)}")
        ids, answers = _split(tokenizer, ids, start, wholes, is_text)
    ends = [add_eos and (ended or prompt is None or not isinstance(text, str)) for text in completions]
    return ids, [
        _with_eos(tokenizer, answer, end) if closes else answer for answer, closes in zip(answers, ends, strict=True)
    ]


def _split(
    tokenizer: Any, alone: list[int], start: str, wholes: Sequence[str], special: bool
) -> tuple[list[int], list[list[int]]]:
    """Return the ids that all of `wholes` share within their beginning `start`, and the rest of each.

    `alone`, the ids of `start`, are used if a token that covers more than `start` leaves no other for it.
    """
    split = [_split_one(tokenizer, alone, start, whole, special) for whole in wholes]
    shared = [_n_shared(split[0][0], ids) for ids, _ in split]
    n = min([*shared, *(head for _, head in split)], default=0)
    if n == 0:
        return alone, [inner_ids(tokenizer, whole[len(start) :]) for whole in wholes]
    return split[0][0][:n], [ids[n:] for ids, _ in split]


def _split_one(tokenizer: Any, alone: list[int], start: str, whole: str, special: bool) -> tuple[list[int], int]:
    """Return the ids of `whole`, and how many of the first of them lie within its beginning `start`."""
    if not getattr(tokenizer, "is_fast", False):  # it has no offsets
        ids = _whole_ids(tokenizer, whole, special)
        return ids, _n_shared(ids, alone)
    encoded = tokenizer(whole, add_special_tokens=special, return_offsets_mapping=True)
    ids = _without_appended(tokenizer, encoded["input_ids"], whole, special)
    spans = encoded["offset_mapping"]
    return ids, next((i for i, (_, stop) in enumerate(spans[: len(ids)]) if stop > len(start)), len(ids))


def _n_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal ids at the beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def inner_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that follows others, without the space that some tokenizers put before every text."""
    bare = _ids(tokenizer, text, False)
    tokens = getattr(tokenizer, "convert_ids_to_tokens", None)
    if tokens is None or "".join(map(str, tokens(_ids(tokenizer, "a", False)))) == "a":
        return bare
    for before in ("\n", ".", "a"):  # the first that does not become a part of the text's tokens
        alone = _ids(tokenizer, before, False)
        ids, n = _split_one(tokenizer, alone, before, before + text, False)
        if alone and ids[:n] == alone:
            return ids[n:]
    return bare


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]


def _whole_ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Return the ids of a text, with its special tokens if `special`, but not the EOS that some tokenizers append."""
    return _without_appended(tokenizer, _ids(tokenizer, text, special), text, special)


def _without_appended(tokenizer: Any, ids: list[int], text: str, special: bool) -> list[int]:
    """Return the ids of a text without the EOS that its tokenizer appended, if it did."""
    eos = getattr(tokenizer, "eos_token_id", None)
    if not special or not ids or ids[-1] != eos:
        return ids
    bare = _ids(tokenizer, text, False)
    appended = _run(ids, eos) - _run(bare, eos)
    if getattr(tokenizer, "bos_token_id", None) == eos and _run(bare, eos) == len(bare):
        appended -= 1  # if the text has no other tokens, the first token of the run is the BOS
    return ids[: len(ids) - max(0, appended)]


def _run(ids: Sequence[int], token: int) -> int:
    """Return the number of repetitions of `token` at the end."""
    return next((n for n, i in enumerate(reversed(ids)) if i != token), len(ids))


def _with_eos(tokenizer: Any, ids: list[int], eos: int) -> list[int]:
    """Return `ids` with one EOS at the end; white space that a template adds after the EOS is removed."""
    if eos in ids:
        end = len(ids) - ids[::-1].index(eos)
        if end == len(ids) or not tokenizer.decode(ids[end:]).strip():
            return ids[:end]
    return [*ids, eos]

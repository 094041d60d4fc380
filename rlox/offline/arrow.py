"""Datasets in Arrow's file format: one record batch, which is mapped into memory and never copied.

Columns are ``obs next_obs`` (fixed-size lists of float32 or uint8), ``actions`` (a fixed-size list of float32, or an
integer), ``rewards`` (float32), ``terminated truncated`` (uint8), if the environment masks actions ``action_masks`` and
``next_action_masks`` (fixed-size lists of uint8), and, if several agents acted, ``agent`` (int32), an index in the
metadata's list ``agents``. The schema's metadata has JSON under ``rlox.dataset``, which describes all rows
and their origin. Next observations are stored, although most are the next row's observation, so that every row is
complete regardless of which part of the file is read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rlox.checkpoint import decode_value, encode_value, is_count, one_line, parse_json
from rlox.config.packages import import_package
from rlox.offline.rows import AGENT, COLUMNS, MASKS, Block, names_of

FORMAT = 1
METADATA = "rlox.dataset"  # name of the JSON in formats that have attributes
_BLOCK_BYTES = 4 << 20
# Arrow's names of types that differ from NumPy's.
NUMPY_NAMES = {"halffloat": "f2", "float": "f4", "double": "f8"}


def import_arrow(where: str) -> Any:
    """Return pyarrow, or raise an ImportError with the remedy."""
    pyarrow = import_package("pyarrow", "arrow", where)
    import_module("pyarrow.ipc")
    return pyarrow


@contextmanager
def report_damage(what: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Raise exceptions of these `kinds` as a ValueError: `what`, a full sentence, and theirs."""
    try:
        yield
    except kinds as e:
        raise ValueError(f"{what}: {one_line(e)}") from e


def block_rows(row_bytes: int) -> int:
    """Return how many rows are processed at a time, so that memory stays bounded."""
    return max(1, _BLOCK_BYTES // max(1, row_bytes))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, (int, float)) for x in value)


def _is_env(value: Any) -> bool:
    kinds = {"id": str, "kwargs": dict, "wrappers": list}
    return isinstance(value, dict) and "id" in value and all(isinstance(value.get(k, t()), t) for k, t in kinds.items())


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value) and 0 < len(value) == len(set(value))


# Metadata is used only if it has these types: its author is not trusted.
_RULES = {
    "env": _is_env,
    "agents": _are_names,
    "n_actions": lambda x: is_count(x, 2**31) and x >= 1,
    "obs_shape": lambda x: _are_numbers(x) and all(is_count(n) and n >= 1 for n in x),
    **dict.fromkeys(("act_low", "act_high", "obs_mean", "obs_std"), _are_numbers),
    "reference_returns": lambda x: isinstance(x, dict) and _are_numbers([x.get("random"), x.get("expert")]),
    "policies": lambda x: (
        isinstance(x, list) and all(isinstance(p, dict) and isinstance(p.get("name"), str) for p in x)
    ),
}


def metadata_text(metadata: dict[str, Any]) -> str:
    """Return the JSON of a dataset's metadata, which `read_metadata` reads."""
    env = {"env": encode_value(metadata["env"])} if "env" in metadata else {}
    return json.dumps({"format": FORMAT, **metadata, **env}, allow_nan=False)


class ArrowWriter:
    """Writes a dataset of unknown length, one block at a time; the file appears complete or not at all.

    An Arrow record batch stores its columns one after the other, so each column is first written to a separate file, in
    a hidden folder next to `path`. A context manager: leaving it without `finish` removes everything.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        import_arrow(f"dataset {path}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._files: dict[str, Any] = {}  # by column, from the first block on
        self._like: Block = {}
        self.n = 0

    def __enter__(self) -> ArrowWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, block: Block) -> None:
        """Add rows: the six columns (masks, ``agent``), checked, with dtypes and shapes of the first block."""
        if not self._like:
            self._like = {name: column[:0] for name, column in block.items()}
            self._files = {name: open(self._folder / name, "wb") for name in block}  # noqa: SIM115 (closed on exit)
        for name, file in self._files.items():
            file.write(np.ascontiguousarray(block[name]).reshape(-1).data.cast("B"))
        self.n += len(block["rewards"])

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write the file, and move it into place."""
        pa = import_arrow(f"dataset {self.path}")
        for file in self._files.values():
            file.close()
        arrays = []
        for name, like in self._like.items():
            flat = np.memmap(self._folder / name, like.dtype, "r")
            values = pa.Array.from_buffers(
                pa.from_numpy_dtype(like.dtype), flat.size, [None, pa.py_buffer(flat)], null_count=0
            )
            width = math.prod(like.shape[1:])
            arrays.append(values if like.ndim == 1 else pa.FixedSizeListArray.from_arrays(values, width))
        text = metadata_text({"n_rows": self.n, **metadata})
        schema = pa.schema(
            [pa.field(name, array.type, nullable=False) for name, array in zip(self._like, arrays, strict=True)],
            {METADATA: text},
        )
        partial = self._folder / self.path.name
        with open(partial, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, self.path)


def open_reader(path: Path, where: str):
    """Open a reader of the memory-mapped file. Raises ValueError if it is not an Arrow file or is truncated."""
    pa = import_arrow(where)
    try:
        return pa.ipc.open_file(pa.memory_map(os.fsencode(path)))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as e:
        raise ValueError(
            f"{where}: {path} must be an Arrow IPC (Feather V2) file, but is not, or was cut short: {one_line(e)}"
        ) from e


def metadata_of(schema: Any, where: str) -> dict[str, Any]:
    """Return the metadata of a file; empty if rlox did not write it. Raises the same errors as `read_metadata`."""
    text = (schema.metadata or {}).get(METADATA.encode())
    return {} if text is None else read_metadata(text.decode(errors="replace"), where)


def read_metadata(text: str, where: str) -> dict[str, Any]:
    """Parse the JSON metadata of a file written by rlox.

    Raises ValueError if it is damaged, or from a newer version of rlox.
    """
    try:
        metadata = parse_json(text)
        if isinstance(metadata, dict) and "env" in metadata:
            metadata["env"] = decode_value(metadata["env"])
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where}: its metadata is damaged: {one_line(e)}") from e
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        got = one_line(metadata.get("format") if isinstance(metadata, dict) else metadata, 40)
        raise ValueError(f"{where}: its format must be {FORMAT}, got {got}; update rlox-cli")
    if bad := [name for name, holds in _RULES.items() if name in metadata and not holds(metadata[name])]:
        raise ValueError(f"{where}: its metadata is damaged: {bad[0]} cannot be {one_line(metadata[bad[0]], 80)}")
    return metadata


def map_columns(reader: Any, where: str) -> Block | None:
    """Return the six columns, and masks, as arrays on the file's pages; None if the file must be converted first.

    A file must be converted if it has several record batches, is compressed, has no next observations, or has other
    types.
    """
    pa = import_arrow(where)
    names = names_of(reader.schema.names, where)
    if reader.num_record_batches != 1 or "next_obs" not in names or "episode" in names:
        return None
    kinds = [reader.schema.field(names[name]).type for name in COLUMNS]
    rows = [kind.value_type if pa.types.is_fixed_size_list(kind) else kind for kind in kinds]
    observations, flags = (pa.float32(), pa.uint8()), (pa.uint8(), pa.bool_())
    mapped = (observations, (rows[0],), (pa.float32(), pa.int64(), pa.int32()), (pa.float32(),), flags, flags)
    if any(kind not in these for kind, these in zip(rows, mapped, strict=True)):
        return None
    if any(pa.types.is_fixed_size_list(kind) for kind in kinds[3:]):
        return None
    masks = [name for name in MASKS if name in names]
    for name in masks:
        kind = reader.schema.field(names[name]).type
        if not (pa.types.is_fixed_size_list(kind) and kind.value_type == pa.uint8()):
            return None
    before = pa.total_allocated_bytes()
    batch = reader.get_batch(0)
    if pa.total_allocated_bytes() > before:
        return None  # the file is compressed
    return {name: as_numpy(batch.column(names[name]), name, where, 0) for name in (*COLUMNS, *masks)}


def map_agents(reader: Any, where: str) -> np.ndarray | None:
    """Return the column ``agent`` (N,) of a mapped file, or None; raise a ValueError unless it has integers."""
    if AGENT not in reader.schema.names:
        return None
    agents = as_numpy(reader.get_batch(0).column(AGENT), AGENT, where, 0)
    if agents.dtype.kind not in "iu" or agents.ndim != 1:
        raise ValueError(f"{where}: column {AGENT} must hold one integer in each row, got {agents.dtype}")
    return agents


def _first_null(array: Any) -> int:
    return int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))


def as_numpy(array: Any, name: str, where: str, first: int) -> np.ndarray:
    """Convert an Arrow array to (n, …) numbers, without a copy if possible; `first` is its first row in the dataset.

    Raises ValueError for missing values, lists of different lengths, or values that are not numbers.
    """
    pa = import_arrow(where)
    if isinstance(array, pa.ExtensionArray):
        shape = getattr(array.type, "shape", None)
        numbers = as_numpy(array.storage, name, where, first)
        return numbers if shape is None else numbers.reshape(-1, *shape)
    if array.null_count:
        row = first + _first_null(array)
        raise ValueError(f"{where}: column {name} must have a value in every row, got none in row {row}")
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.diff(as_numpy(array.offsets, name, where, first))
        if (lengths != lengths[:1]).any():
            row = int((lengths != lengths[0]).argmax())
            raise ValueError(
                f"{where}: column {name} must have {lengths[0]} numbers in every row, as in row {first}, got "
                f"{lengths[row]} in row {first + row}"
            )
    elif not pa.types.is_fixed_size_list(kind):
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise ValueError(f"{where}: column {name} must hold numbers, got Arrow's type {kind}")
        # Arrow's own to_numpy (or dtypes) would import pandas if that is installed.
        dtype = np.dtype(NUMPY_NAMES.get(str(kind), str(kind)))
        stop, data = array.offset + len(array), array.buffers()[1]
        if len(array) == 0:
            return np.empty(0, dtype)
        if pa.types.is_boolean(kind):
            return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[array.offset : stop]
        return np.frombuffer(data, dtype, stop)[array.offset :]
    values = array.flatten()
    if values.null_count:
        row = first + _first_null(values) // (len(values) // len(array))
        raise ValueError(f"{where}: column {name} must have no missing numbers, got one in row {row}")
    return as_numpy(values, name, where, first).reshape(len(array), -1)


def table_blocks(batches: Iterator[Any], names: dict[str, str], where: str) -> Iterator[Block]:
    """Yield record batches, one after the other, as blocks of bounded size."""
    first = 0
    for batch in batches:
        if len(batch) == 0:
            continue
        rows = block_rows(batch.nbytes // len(batch))
        for start in range(0, len(batch), rows):
            part = batch.slice(start, rows)
            yield {name: as_numpy(part.column(theirs), name, where, first) for name, theirs in names.items()}
            first += len(part)


def file_blocks(reader: Any, names: dict[str, str], where: str) -> Iterator[Block]:
    """Yield the record batches of an open Arrow file as blocks."""
    pa = import_arrow(where)
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    with report_damage(f"{where}: its contents are damaged or cut short", pa.ArrowException, OSError):
        yield from table_blocks(batches, names, where)

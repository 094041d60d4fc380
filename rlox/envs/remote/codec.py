"""Messages as bytes: a small JSON head, then the memory of arrays.

======== =========================================================================================
bytes    content
======== =========================================================================================
4        ``rlox``
2        version of this layout, little-endian; 1
2        0
4        length H of the head, little-endian
H        the head: UTF-8 JSON ``{"kind": str, "fields": {…}, "arrays": [[name, dtype, [dims]], …]}``
…        each array in turn, little-endian and in C order, starting at a multiple of 8
======== =========================================================================================

`decode` does not trust its input: every size is checked against the number of bytes before memory of that size is
allocated, arrays are views of the bytes, and no part of a message is ever executed. Errors are `ProtocolError`.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

VERSION = 2
LARGEST_MESSAGE = 64 * 2**20  # bytes, unless another limit is set
_MAGIC = b"rlox"
_START = struct.Struct("<4sHHI")
_MOST_HEAD = 256 * 2**10  # bytes
_MOST_ARRAYS = 4096
_MOST_DIMS = 8
_MOST_DEPTH = 16  # nesting of lists and objects in the head
_LONGEST_NAME = 200
_LARGEST_KEPT = 2048  # largest head in bytes that is cached
_ZEROS = b"\0" * 8
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
_BY_CODE = {kind.str: name for name, kind in _DTYPES.items()}


class ProtocolError(ValueError):
    """Bytes that are not a message, or a message that is not the expected one."""


@dataclass(frozen=True)
class Message:
    """A message from one side to the other."""

    kind: str  # of request or answer
    fields: dict[str, Any] = field(default_factory=dict)  # JSON values by name
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # in a decoded message, read-only views of its bytes


def encode(kind: str, fields: Mapping[str, Any] | None = None, arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Return the bytes of a message; raise a `ProtocolError` for contents that a message cannot have."""
    layout, parts, size = [], [], 0
    for name, array in (arrays or {}).items():
        array = np.asarray(array)
        known = _BY_CODE.get(array.dtype.str)
        if known is None:
            if (known := array.dtype.name) not in _DTYPES:
                raise ProtocolError(f"encode: {name} must have one of the dtypes {', '.join(_DTYPES)}, got {known}")
            array = array.astype(_DTYPES[known])  # convert the byte order
        if array.ndim > _MOST_DIMS:
            raise ProtocolError(f"encode: {name} must have at most {_MOST_DIMS} dimensions, got {array.ndim}")
        layout.append((name, known, array.shape))
        data = array.tobytes()
        if size % 8:
            parts.append(_ZEROS[size % 8 :])
            size += -size % 8
        parts.append(data)
        size += len(data)
    if fields:
        try:
            beginning = _write_beginning(kind, tuple(layout), json.dumps(fields, separators=(",", ":")))
        except (TypeError, ValueError, RecursionError) as e:
            raise ProtocolError(f"encode: fields must be JSON: {e}") from e
    else:
        beginning = _kept_beginning(kind, tuple(layout), "{}")
    return b"".join([beginning, *parts])


def _write_beginning(kind: str, layout: tuple[tuple[str, str, tuple[int, ...]], ...], fields: str) -> bytes:
    table = json.dumps(layout, separators=(",", ":"))
    head = f'{{"kind":{json.dumps(kind)},"fields":{fields},"arrays":{table}}}'.encode()
    if len(head) > _MOST_HEAD or len(layout) > _MOST_ARRAYS:
        raise ProtocolError(
            f"encode: the head must have at most {_MOST_HEAD:,} bytes and {_MOST_ARRAYS:,} arrays, got {len(head):,} "
            f"and {len(layout):,}"
        )
    start = _START.size + len(head)
    return b"".join([_START.pack(_MAGIC, VERSION, 0, len(head)), head, b"\0" * (-start % 8)])


_kept_beginning = lru_cache(256)(_write_beginning)  # of messages without fields: all steps have the same one


def decode(data: bytes, limit: int = LARGEST_MESSAGE) -> Message:
    """Return the message in `data`, with arrays that are views of `data`.

    A `ProtocolError` is raised for anything that `encode` does not produce, and for more than `limit` bytes.
    """
    if len(data) > limit:
        raise ProtocolError(f"a message must have at most {limit:,} bytes, got {len(data):,}")
    if len(data) < _START.size or data[:4] != _MAGIC:
        raise ProtocolError(f"a message must begin with {_MAGIC!r}, got {bytes(data[:8])!r}")
    _, version, reserved, length = _START.unpack_from(data)
    if version != VERSION or reserved:
        raise ProtocolError(f"a message must have version {VERSION}, got {version}; install one rlox-cli on both ends")
    if length > min(_MOST_HEAD, len(data) - _START.size):
        raise ProtocolError(
            f"the head must have at most {min(_MOST_HEAD, len(data) - _START.size)} bytes, got {length}"
        )
    text = bytes(data[_START.size : _START.size + length])
    kind_of, fields, layout = _kept_head(text) if length <= _LARGEST_KEPT else _head(text)
    arrays: dict[str, np.ndarray] = {}
    at = _pad(data, _START.size + length)
    for i, (name, kind, dims, size) in enumerate(layout):
        if size > len(data) - at:
            raise ProtocolError(f"{name} must have its {size:,} bytes in the message, got {len(data) - at:,}")
        arrays[name] = _array(data, at, kind, dims, name)
        at = at + size if i == len(layout) - 1 else _pad(data, at + size)
    if at != len(data):
        raise ProtocolError(f"a message must end with its last array, got {len(data) - at:,} more bytes")
    return Message(kind_of, json.loads(fields), arrays)


def _pad(data: bytes, at: int) -> int:
    """Return the next multiple of 8. The bytes before it must be zeros, so that equal messages have equal bytes."""
    if at % 8:
        after = at + -at % 8
        if after > len(data) or any(data[at:after]):
            raise ProtocolError("an array must begin at a multiple of 8, after zeros")
        return after
    return at


_Layout = tuple[tuple[str, np.dtype, tuple[int, ...], int], ...]


def _head(text: bytes) -> tuple[str, str, _Layout]:
    """Return the kind, the fields as JSON, and name, dtype, shape and size in bytes of each array."""
    if _depth(text) > _MOST_DEPTH:
        raise ProtocolError(f"the head must not be nested deeper than {_MOST_DEPTH}")
    try:
        head = json.loads(text.decode(), parse_int=_integer)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"the head must be JSON: {str(e)[:200]}") from e
    if not isinstance(head, dict) or set(head) != {"kind", "fields", "arrays"}:
        raise ProtocolError("the head must contain kind, fields and arrays")
    kind, fields, arrays = head["kind"], head["fields"], head["arrays"]
    if not isinstance(kind, str) or len(kind) > _LONGEST_NAME:
        raise ProtocolError(f"kind must be a short string, got {str(kind)[:80]!r}")
    if not isinstance(fields, dict) or not isinstance(arrays, list) or len(arrays) > _MOST_ARRAYS:
        raise ProtocolError(f"fields must be an object, and arrays a list of at most {_MOST_ARRAYS:,}")
    layout = tuple(map(_entry, arrays))
    if len({name for name, *_ in layout}) < len(layout):
        raise ProtocolError("the names of arrays must differ")
    return kind, json.dumps(fields), layout


_kept_head = lru_cache(256)(_head)  # all steps have the same head; errors are not cached


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("an integer must have at most 20 digits")
    return int(digits)


def _depth(text: bytes) -> int:
    """Return an upper bound of the depth of the JSON: brackets inside strings count too."""
    depth = deepest = 0
    if text.count(b"[") + text.count(b"{") <= _MOST_DEPTH:
        return 0
    for byte in text:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _entry(entry: Any) -> tuple[str, np.dtype, tuple[int, ...], int]:
    if not isinstance(entry, list) or len(entry) != 3:
        raise ProtocolError(f"an array must be given as name, dtype and shape, got {str(entry)[:80]}")
    name, dtype, dims = entry
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ProtocolError(f"an array's name must be a short string, got {str(name)[:80]!r}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ProtocolError(f"{name} must have one of the dtypes {', '.join(_DTYPES)}, got {str(dtype)[:80]!r}")
    if not isinstance(dims, list) or len(dims) > _MOST_DIMS or not all(type(d) is int and 0 <= d < 2**31 for d in dims):
        raise ProtocolError(f"{name} must have a shape of at most {_MOST_DIMS} integers, got {str(dims)[:80]}")
    kind = _DTYPES[dtype]
    return name, kind, tuple(dims), math.prod(dims) * kind.itemsize


def _array(data: bytes, at: int, kind: np.dtype, dims: tuple[int, ...], name: str) -> np.ndarray:
    count = math.prod(dims)
    try:
        if kind == np.bool_:
            raw = np.frombuffer(data, np.uint8, count, at)
            if count and raw.max() > 1:
                raise ProtocolError(f"{name} must contain only 0 and 1, got {raw.max()}")
            return raw.view(np.bool_).reshape(dims)
        array = np.frombuffer(data, kind, count, at).reshape(dims) if count else np.zeros(dims, kind)
    except ValueError as e:
        raise ProtocolError(f"{name} must be an array of {dims}: {e}") from e
    return array if sys.byteorder == "little" else array.astype(kind.newbyteorder("="))

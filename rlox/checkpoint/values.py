"""Python values in JSON that come back with their types: tuples, NumPy numbers, other keys than text, infinities."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

# The key of an object that stands for something other than a dict with string keys.
_TAG = "rlox"
_DTYPE = re.compile(r"[<>|=]?([biuf]\d|U\d{1,4})")
_MOST_ITEMS = 100_000  # of an array
_FEW_BYTES, _BYTES_PER_CHARACTER = 1024, 32  # the most memory of an array: the first, and more with its text's length


class Lost(str):
    """The text of a value that JSON cannot contain. It must not be used as the value."""

    __slots__ = ()


def encode_value(value: Any) -> Any:
    """Return JSON from which `decode_value` creates `value` again, with the same types.

    Text, numbers, lists, and dicts with string keys stay as they are. What can be neither kept nor encoded, such as a
    function, comes back as `Lost`.

    >>> encode_value({"size": (3, 4)})
    {'size': {'rlox': 'tuple', 'value': [3, 4]}}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
    if type(value) is list:
        return [encode_value(item) for item in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "value": [encode_value(item) for item in value]}
    if type(value) is dict:
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: encode_value(item) for key, item in value.items()}
        return {_TAG: "dict", "value": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    if isinstance(value, (np.generic, np.ndarray)) and _DTYPE.fullmatch(value.dtype.str) and value.size <= _MOST_ITEMS:
        kind, plain = "array" if isinstance(value, np.ndarray) else "scalar", value.tolist()
        if _is_small(value.nbytes, plain):
            return {_TAG: kind, "dtype": value.dtype.str, "value": encode_value(plain)}
    return {_TAG: "lost", "value": str(value)}


def _is_small(n_bytes: int, items: Any) -> bool:
    """Whether an array's size is in proportion to its items' text, which a file's author may have made up."""
    return n_bytes <= _FEW_BYTES + _BYTES_PER_CHARACTER * len(str(items))


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` has encoded.

    Raises
    ------
    ValueError
        If a file contains something else.
    """
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode_value(item) for key, item in value.items()}
    try:
        return _decode_tagged(value[_TAG], value["value"], value.get("dtype", ""))
    except (KeyError, OverflowError, TypeError, ValueError) as e:
        raise ValueError(f"it must be a value that rlox has encoded, got {str(value)[:80]}") from e


def _decode_tagged(kind: Any, inner: Any, dtype: str) -> Any:
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(decode_value(inner))
    if kind == "dict":
        return {decode_value(key): decode_value(item) for key, item in inner}
    if kind == "lost":
        return Lost(inner)
    if kind in ("array", "scalar") and _DTYPE.fullmatch(dtype):
        items = decode_value(inner)
        if _is_small(np.dtype(dtype).itemsize * np.array(items, object).size, items):
            array = np.array(items, np.dtype(dtype))
            return array if kind == "array" else array[()]
    raise ValueError


def find_lost(value: Any) -> Lost | None:
    """Return the first `Lost` in a decoded `value`; None if there is none."""
    if isinstance(value, Lost):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((lost for item in value if (lost := find_lost(item)) is not None), None)
    return None

"""Checkpoints: one safetensors file with a JSON header. NumPy alone reads it, and nothing in it can run.

Tensors are named ``section/name``. The header's sections are those that an exact continuation needs; one that an
algorithm has no use for is there and empty, but for the last:

=============== =============================================================================================
policy          weights, by their ``state_dict`` names
target          weights of a target network, likewise
optimizer       moments and step counts
normalization   running statistics of observations and rewards
environment     state of native environments, and of foreign ones that can be restored (see `rlox.env_state`)
statistics      returns and lengths of the last 100 episodes
memory          off-policy, where it is saved: what of the replay memory changes as a whole, such as priorities; the
                header names the files beside the checkpoint that hold the rest (see `rlox.replay_files`)
generators      (header) key and position of every random stream; tensors only for a foreign generator
counters        (header) environment steps, updates, episodes, the training's end and that of its schedules
callbacks       (header) what each callback goes on from, such as the best score so far
critics         weights of SAC's and TD3's critics; theirs are ``target_policy``, ``critic_optimizer``,
                ``alpha_optimizer`` and ``temperature`` as well, and the offline algorithms' by the same names
dataset         (header) by what the dataset is known again that SAC or TD3 mixed into their batches
bounds          of a dataset's continuous actions, low and high (A,); its sizes are the header's ``spaces``, and
                ``env``, where the policy is evaluated, may have null for its id
=============== =============================================================================================

A SHA-256 over names, shapes and contents guards against every damage that leaves the file readable, but not against
malice: whoever writes a file computes it. So sizes are looked at before anything of that size is made, and what the
header holds is checked here, before another module sees it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from rlox.loops import Counters

FORMAT = "rlox-checkpoint"
FORMAT_VERSION = 1
TENSOR_SECTIONS = (
    "policy",
    "target",
    "optimizer",
    "normalization",
    "environment",
    "statistics",
    "generators",
)
# NumPy's dtypes as safetensors calls them; little-endian, as the machines are that the kernels are built for.
_DTYPES = {
    **{"f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8"},
    **{"u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL"},
}
# What every header must hold for `from_checkpoint`.
HEADER_KEYS = ("algorithm", "config", "counters", "env", "generators", "policy", "sections", "seed", "threads")
# A header has some ten kilobytes, and the text of one this long, or of so many parts, is not even parsed.
_MOST_BYTES = 8 << 20
_MOST_PARTS = 200_000


@dataclass
class Checkpoint:
    """A checkpoint in memory: the JSON header, and the tensors by section and name."""

    header: dict[str, Any]
    tensors: dict[str, dict[str, np.ndarray]]
    folder: Path | None = None  # where it was read from


def versions() -> dict[str, str]:
    """Versions of everything that can change a run's numbers, without importing any of it."""
    from rlox import __version__
    from rlox.kernels import CPU_LEVEL

    found = {"rlox": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "gymnasium"):
        if (version := _installed(name)) is not None:
            found[name] = version
    return {
        **found,
        "platform": f"{sys.platform}-{platform.machine()}",
        "cpu_level": str(CPU_LEVEL),
    }


@cache
def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)  # parses the package's whole description
    except metadata.PackageNotFoundError:
        return None


def trained_for(header: dict[str, Any]) -> tuple[int, str]:
    """How far a header's training had come, and the unit: environment steps, or offline, where there are none, updates.

    >>> trained_for({"counters": {"env_steps": 0, "updates": 500}})
    (500, 'updates')
    """
    counters = header["counters"]
    steps = counters["env_steps"]
    return (steps, "steps") if steps or not counters["updates"] else (counters["updates"], "updates")


def _digest(header: str, flat: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(flat):
        array = flat[name]
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(memoryview(array).cast("B") if array.size else b"")
    return digest.hexdigest()


def save_checkpoint(path: str | os.PathLike, checkpoint: Checkpoint, **header: Any) -> None:
    """Write `checkpoint` so that `path` always holds a whole one: the old until the new is on disk, then the new.

    `header` takes the place of values of its header, or joins them.

    Raises
    ------
    OSError
        If the folder cannot be written or the disk is full; `path` is then as it was.
    ValueError
        If the header is larger than `load_checkpoint` would read, or `path` names no file.
    TypeError
        If `path` is none.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"save_checkpoint: path must be a file's path, got {one_line(repr(path), 80)}")
    path = Path(path)
    # What is renamed to a device's name would take its place.
    if not path.name or "\0" in str(path) or (path.exists() and not path.is_file() and not path.is_dir()):
        raise ValueError(f"save_checkpoint: path must name a file, got {one_line(repr(str(path)), 80)}")
    flat = {
        f"{section}/{name}": np.asarray(array, order="C")
        for section, arrays in checkpoint.tensors.items()
        for name, array in arrays.items()
    }
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "sections": {
            section: sorted(checkpoint.tensors.get(section, {})) for section in (*TENSOR_SECTIONS, *checkpoint.tensors)
        },
        **checkpoint.header,
        **header,
    }
    # default=str: an odd value among env_kwargs must not cost the training its checkpoint.
    text = json.dumps(header, allow_nan=False, default=str)
    if len(text) > _MOST_BYTES or _parts(text) > _MOST_PARTS:
        raise ValueError(
            f"save_checkpoint: the header must have at most {_MOST_BYTES:,} characters in {_MOST_PARTS:,} parts, or it "
            f"cannot be read again, got {len(text):,} in {_parts(text):,}; the largest of it is "
            f"{max(header, key=lambda name: len(str(header[name])))!r}"
        )
    # What safetensors' own `save` would give, without its two copies of everything.
    index: dict[str, Any] = {"__metadata__": {"rlox": text, "sha256": _digest(text, flat)}}
    ordered = sorted(flat.items(), key=lambda item: (-item[1].itemsize, item[0]))  # each aligned to its own size
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        index[name] = {"dtype": _DTYPES[array.dtype.str[1:]], "shape": array.shape, "data_offsets": [start, end]}
    head = json.dumps(index, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for _, array in ordered:
                file.write(memoryview(array).cast("B") if array.size else b"")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as e:
        partial.unlink(missing_ok=True) if path.parent.is_dir() else None
        raise OSError(
            e.errno,
            f"save_checkpoint: cannot write ({e.strerror}); "
            + ("the earlier checkpoint there is untouched" if path.is_file() else "there was no earlier one"),
            str(path),
        ) from e
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; not every system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def one_line(thing: Any, most: int = 300) -> str:
    """`thing` as a text for an error message: one paragraph of bounded length, without control characters."""
    text = " ".join(str(thing).split())
    text = text if len(text) <= most else f"{text[:most]} …"
    return "".join(c if c.isprintable() else "?" for c in text)


def is_count(value: Any, below: int = 2**53) -> bool:
    """Whether `value`, out of a file, is a whole number from 0 to `below`."""
    return type(value) is int and 0 <= value < below


def _is_name(value: Any) -> bool:
    """Whether `value` may be printed and looked up in a table."""
    return isinstance(value, str) and 0 < len(value) <= 500 and value.isprintable()


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_settings(value: Any) -> bool:
    """Whether `value` maps names to what kernels can take: no integer has more than 64 bits."""
    items = [x for item in value.values() for x in (item if isinstance(item, list) else [item])] if value else []
    return all(abs(x) < 2**63 for x in items if isinstance(x, int))


_COUNTERS = {item.name for item in fields(Counters) if item.type == "int"}


def _are_counters(value: Any) -> bool:
    known = {"env_steps", "updates", "episodes", "horizon_start", "horizon_steps"}
    return _is_object(value) and known <= value.keys() <= _COUNTERS and all(map(is_count, value.values()))


def _is_env(value: Any) -> bool:
    return (
        _is_object(value)
        and (value.get("id") is None or _is_name(value["id"]))
        and is_count(value.get("n_envs"))
        and value["n_envs"] >= 1
        and _is_object(value.get("kwargs"))
        and isinstance(value.get("wrappers"), list)
        and all(_is_name(x) or (_is_object(x) and len(x) == 1) for x in value["wrappers"])
        and is_count(value.get("workers"))
        and _is_name(value.get("backend", "auto"))
    )


def _are_spaces(value: Any) -> bool:
    sizes = ("obs_dim", "act_dim")
    return (
        _is_object(value)
        and value.keys() == {*sizes, "continuous"}
        and all(is_count(value[name]) and value[name] >= 1 for name in sizes)
        and isinstance(value["continuous"], bool)
    )


def _are_generators(value: Any) -> bool:
    return _is_object(value) and all(
        _is_object(x) and x.keys() == {"key", "position"} and all(is_count(n, 2**64) for n in x.values())
        for x in value.values()
    )


# What a value must be wherever it stands in a header.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "algorithm": (_is_name, "be a name"),
    "backend": (_is_name, "be a name"),
    "buffer": (lambda x: _is_object(x) and _is_name(x.get("name")) and _are_settings(x), "be settings with a name"),
    "callbacks": (_is_object, "be an object"),
    "config": (lambda x: _is_object(x) and _are_settings(x), "be settings"),
    "counters": (_are_counters, f"hold counts by the names {', '.join(sorted(_COUNTERS))}"),
    "env": (_is_env, "hold id, n_envs >= 1, kwargs, wrappers and workers"),
    "file": (_is_name, "be a name"),
    "generators": (_are_generators, "hold key and position, integers below 2**64, of each generator"),
    "memory": (_is_object, "be an object"),
    "memory_start": (is_count, "be a count"),
    "policy": (lambda x: x in ("default", "custom"), "be default or custom"),
    "reward_fn": (lambda x: x is None or _is_name(x), "be a name or null"),
    "spaces": (_are_spaces, "hold obs_dim, act_dim and continuous"),
    "seed": (lambda x: is_count(x, 2**64), "be an integer in [0, 2**64)"),
    "threads": (lambda x: is_count(x, 257), "be an integer in [0, 256]"),
    "values": (_is_object, "be an object"),
}


def _integer(text: str) -> int:
    # An environment's seed may have 128 bits.
    if len(text) > 40:
        raise ValueError("an integer of more than 40 digits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} among its numbers")
    return value


def _parts(text: str) -> int:
    """About as many objects as JSON makes of `text`."""
    return sum(map(text.count, "[{,"))


def parse_json(text: str) -> Any:
    """As `json.loads`, for a text that nobody vouches for.

    Raises
    ------
    ValueError
        Also for what is too deep or too much, integers of more than 40 digits, and numbers that are not finite.
    """
    if _parts(text) > _MOST_PARTS:
        raise ValueError(f"more than {_MOST_PARTS:,} parts")
    try:
        return json.loads(text, parse_int=_integer, parse_float=_real, parse_constant=_real)
    except RecursionError:
        raise ValueError("objects within objects, too deep") from None


def _header(path: Path, text: str, keys: Sequence[str]) -> dict[str, Any]:
    """The JSON header, every known value of it checked."""
    try:
        header = parse_json(text)
        version = header["format_version"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"load_checkpoint: {path} is damaged: its header is no JSON object of ours ({one_line(e)})"
        ) from e
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(
            f"load_checkpoint: {path} has format version {one_line(version, 40)}, this rlox reads {FORMAT_VERSION}; "
            "update rlox-cli"
        )
    missing = [key for key in keys if key not in header]
    if missing:
        raise ValueError(f"load_checkpoint: {path} is damaged: its header lacks {', '.join(missing)}")
    for key, (holds, rule) in _RULES.items():
        if key in header and not holds(header[key]):
            raise ValueError(
                f"load_checkpoint: {path} is damaged: {key} in its header must {rule}, got {one_line(header[key], 80)}"
            )
    return header


def load_checkpoint(path: str | os.PathLike, keys: Sequence[str] = HEADER_KEYS) -> Checkpoint:
    """Read and verify a checkpoint; `keys` are what its header must hold.

    It takes about twice the file's size, whatever the file says of itself.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is cut short, damaged, written by something else, by a newer rlox, or by somebody who means harm; or if
        it does not fit in memory.
    """
    from safetensors import SafetensorError, safe_open

    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load_checkpoint: path must be a file's path, got {one_line(repr(path), 80)}")
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"load_checkpoint: {path} is a folder; name a file, such as checkpoints/last.safetensors in it"
        )
    if not path.exists():
        raise FileNotFoundError(f"load_checkpoint: no file {path}")
    if not path.is_file():
        raise ValueError(f"load_checkpoint: {path} must be an ordinary file")
    if path.stat().st_size == 0:
        raise ValueError(f"load_checkpoint: {path} is empty")
    with open(path, "rb") as start:
        length = int.from_bytes(start.read(8), "little")
    if length > _MOST_BYTES:
        raise ValueError(
            f"load_checkpoint: {path} is no safetensors file of ours, or is damaged (it declares a header of "
            f"{length:,} bytes)"
        )
    header: dict[str, Any] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            info = file.metadata() or {}
            if "rlox" in info:
                header = _header(path, info["rlox"], keys)
                flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, TypeError, KeyError, AttributeError, OverflowError) as e:
        raise ValueError(
            f"load_checkpoint: {path} is no safetensors file, or is cut short or damaged ({one_line(e)})"
        ) from e
    except MemoryError as e:
        raise ValueError(f"load_checkpoint: {path} does not fit in memory ({one_line(e)})") from e
    if not header:
        raise ValueError(f"load_checkpoint: {path} was not written by rlox: its header lacks the key 'rlox'")
    if odd := [name for name, array in flat.items() if array.dtype.kind not in "fiub"]:
        raise ValueError(f"load_checkpoint: {path} is damaged: {one_line(odd[0])} must hold numbers")
    if info.get("sha256") != _digest(info["rlox"], flat):
        raise ValueError(f"load_checkpoint: {path} is damaged: its contents do not match their SHA-256")
    tensors: dict[str, dict[str, np.ndarray]] = {section: {} for section in TENSOR_SECTIONS}
    for name, array in flat.items():
        section, _, rest = name.partition("/")
        tensors.setdefault(section, {})[rest] = array
    found = {section: sorted(arrays) for section, arrays in tensors.items() if arrays}
    sections = header.get("sections")
    if not _is_object(sections) or {name: x for name, x in sections.items() if x} != found:
        raise ValueError(f"load_checkpoint: {path} is damaged: sections in its header must be those of its tensors")
    tensors |= {section: {} for section in sections if section not in tensors}
    return Checkpoint(header, tensors, path.parent)

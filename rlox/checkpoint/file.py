"""Checkpoints: one safetensors file with a JSON header. NumPy alone reads it, and nothing in it can run.

Tensors are named ``section/name``. The header's sections are those that an exact continuation needs; one that an
algorithm has no use for is there and empty, but for the last:

=============== =============================================================================================
policy          weights, by their ``state_dict`` names
target          weights of a target network, likewise
optimizer       moments and step counts
normalization   running statistics of observations and rewards
environment     state of native environments, and of foreign ones that can be restored (see `rlox.envs.state`)
statistics      returns and lengths of the last 100 episodes
memory          off-policy, where it is saved: what of the replay memory changes as a whole, such as priorities; the
                header names the files beside the checkpoint that hold the rest (see `rlox.buffers.files`)
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
malice: the author of a file computes it. So sizes are looked at before anything of that size is made, and what the
header holds is checked here, before another module sees it.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlox.checkpoint.header import (
    _MOST_BYTES,
    _MOST_PARTS,
    FORMAT,
    FORMAT_VERSION,
    HEADER_KEYS,
    _header,
    _is_object,
    _parts,
    one_line,
)

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


@dataclass
class Checkpoint:
    """A checkpoint in memory: the JSON header, and the tensors by section and name."""

    header: dict[str, Any]
    tensors: dict[str, dict[str, np.ndarray]]
    folder: Path | None = None  # where it was read from


def _digest(header: str, flat: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(flat):
        array = flat[name]
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.data.cast("B") if array.size else b"")
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
                file.write(array.data.cast("B") if array.size else b"")
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


def _index(file: BinaryIO) -> dict[str, Any]:
    """The metadata and the place of each tensor of a safetensors file, which safetensors has found sound."""
    return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def _mapped(file: BinaryIO, index: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a file that was read up to the end of its index."""
    data = file.tell()
    kinds = {theirs: ours for ours, theirs in _DTYPES.items()}
    bytes_ = np.memmap(file, np.uint8, "c")  # what is written to stays in this process
    found = {}
    for name, item in index.items():
        if name != "__metadata__":
            start, end = (data + offset for offset in item["data_offsets"])
            found[name] = bytes_[start:end].view(kinds[item["dtype"]]).reshape(item["shape"]).view(np.ndarray)
    return found


def load_checkpoint(path: str | os.PathLike, keys: Sequence[str] = HEADER_KEYS, mapped: bool = False) -> Checkpoint:
    """Read and verify a checkpoint; `keys` are what its header must hold.

    It takes about twice the file's size, whatever the file says of itself. Where its tensors are `mapped` into memory
    they take none until they are read, and processes of one machine share them.

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
        with safe_open(path, framework="numpy") as file, open(path, "rb") as opened:
            # A training may have replaced the file meanwhile: header and tensors are read from the same one.
            index = _index(opened) if mapped else {}
            info = (index.get("__metadata__") if mapped else file.metadata()) or {}
            if "rlox" in info:
                header = _header(path, info["rlox"], keys)
                flat = _mapped(opened, index) if mapped else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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
    sections: Any = header.get("sections")
    if not _is_object(sections) or {name: x for name, x in sections.items() if x} != found:
        raise ValueError(f"load_checkpoint: {path} is damaged: sections in its header must be those of its tensors")
    tensors |= {section: {} for section in sections if section not in tensors}
    return Checkpoint(header, tensors, path.parent)

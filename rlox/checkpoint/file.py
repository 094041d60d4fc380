"""Checkpoints: one safetensors file with a JSON header. It can be read with NumPy alone, and contains no code.

Tensors are named ``section/name``. The header lists the sections that an exact continuation needs. Sections that an
algorithm does not use are present but empty, except for the last ones:

=============== =============================================================================================
policy          weights, by their ``state_dict`` names
target          weights of a target network, by the same names
optimizer       moments and step counts
normalization   running statistics of observations and rewards
environment     state of native environments, and of other environments that can be restored (see `rlox.envs.state`)
statistics      returns and lengths of the last 100 episodes
memory          off-policy, if the replay memory is saved: its parts that change as a whole, such as priorities; the
                header names the files next to the checkpoint that contain the rest (see `rlox.buffers.files`)
generators      (header) key and position of every random stream; tensors only for a foreign generator
counters        (header) environment steps, updates, episodes, the ends of the training and of its schedules
callbacks       (header) state of each callback, such as the best score so far
critics         weights of the critics of SAC and TD3, which also have ``target_policy``, ``critic_optimizer``,
                ``alpha_optimizer`` and ``temperature``; the offline algorithms use the same names
dataset         (header) identity of the dataset that SAC or TD3 mixed into their batches
bounds          bounds of a dataset's continuous actions, low and high (A,); its sizes are in the header's ``spaces``,
                and ``env``, where the policy is evaluated, may have null for its id
=============== =============================================================================================

A SHA-256 over names, shapes and contents detects any damage that leaves the file readable. It does not protect against
malicious files, because the author of a file computes it. Therefore sizes are checked before memory of that size is
allocated, and the contents of the header are checked here, before another module sees them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlox.checkpoint import run_files
from rlox.checkpoint.checks import one_line
from rlox.checkpoint.header import (
    _MOST_BYTES,
    _MOST_PARTS,
    FORMAT,
    FORMAT_VERSION,
    HEADER_KEYS,
    SETTINGS,
    VALUES_OF_USERS,
    _header,
    _is_object,
    _parts,
)
from rlox.checkpoint.values import encode_value

TENSOR_SECTIONS = (
    "policy",
    "target",
    "optimizer",
    "normalization",
    "environment",
    "statistics",
    "generators",
)
# NumPy dtypes and their safetensors names; little-endian, like all machines that the kernels are built for.
_DTYPES = {
    **{"f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8"},
    **{"u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL"},
}


@dataclass
class Checkpoint:
    """A checkpoint in memory: the JSON header, and the tensors by section and name."""

    header: dict[str, Any]
    tensors: dict[str, dict[str, np.ndarray]]
    folder: Path | None = None  # folder it was read from


def _digest(header: str, flat: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(flat):
        array = flat[name]
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.data.cast("B") if array.size else b"")
    return digest.hexdigest()


def save_checkpoint(path: str | os.PathLike, checkpoint: Checkpoint, **header: Any) -> None:
    """Write `checkpoint` to `path`, where the old file stays complete until the new one is on disk and replaces it.

    `header` overrides or adds values of its header.

    Raises
    ------
    OSError
        If the folder cannot be written or the disk is full; `path` is then unchanged.
    ValueError
        If the header is larger than `load_checkpoint` would read, or `path` does not name a file.
    TypeError
        If `path` is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"save_checkpoint: path must be a file's path, got {one_line(repr(path), 80)}")
    path = Path(path)
    # Renaming the new file to a device's path would replace the device.
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
    # Values of the user, which an unusual type must not prevent from being written.
    header |= {key: encode_value(header[key]) for key in VALUES_OF_USERS if key in header}
    # Other types become those of JSON, as in the rest of the header; only infinite settings need the encoding.
    plain = {key: json.loads(json.dumps(header[key], default=str)) for key in SETTINGS if key in header}
    header |= encode_value(plain)
    text = json.dumps(header, allow_nan=False, default=str)
    if len(text) > _MOST_BYTES or _parts(text) > _MOST_PARTS:
        raise ValueError(
            f"save_checkpoint: the header must have at most {_MOST_BYTES:,} characters in {_MOST_PARTS:,} parts, or it "
            f"cannot be read again, got {len(text):,} in {_parts(text):,}; its largest entry is "
            f"{max(header, key=lambda name: len(str(header[name])))!r}"
        )
    # The same bytes as safetensors' `save`, without the two copies that it makes of everything.
    index: dict[str, Any] = {"__metadata__": {"rlox": text, "sha256": _digest(text, flat)}}
    ordered = sorted(flat.items(), key=lambda item: (-item[1].itemsize, item[0]))  # aligned to the size of its items
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        index[name] = {"dtype": _DTYPES[array.dtype.str[1:]], "shape": array.shape, "data_offsets": [start, end]}
    head = json.dumps(index, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    try:
        with run_files.replace_file(*run_files.locate(path)) as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for _, array in ordered:
                file.write(array.data.cast("B") if array.size else b"")
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise OSError(
            e.errno,
            f"save_checkpoint: cannot write ({e.strerror}); "
            + ("the earlier checkpoint there is untouched" if path.is_file() else "there was no earlier checkpoint"),
            str(path),
        ) from e
    try:
        handle = os.open(path.parent, os.O_RDONLY)
    except OSError:
        return  # a system that opens no folders, so that the rename cannot be made durable
    try:
        with suppress(OSError):  # of a file system that cannot do that to folders, such as a shared one of VirtualBox
            os.fsync(handle)
    finally:
        os.close(handle)


def _index(file: IO[bytes]) -> dict[str, Any]:
    """Return the metadata and tensor offsets of a safetensors file that safetensors has already validated."""
    return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def _map_tensors(file: IO[bytes], index: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a file whose read position is at the end of its index."""
    data = file.tell()
    kinds = {theirs: ours for ours, theirs in _DTYPES.items()}
    bytes_ = np.memmap(file, np.uint8, "c")  # copy-on-write: changes stay in this process
    tensors = {}
    for name, item in index.items():
        if name != "__metadata__":
            start, end = (data + offset for offset in item["data_offsets"])
            tensors[name] = bytes_[start:end].view(kinds[item["dtype"]]).reshape(item["shape"]).view(np.ndarray)
    return tensors


def _read(
    path: Path, opened: IO[bytes], keys: Sequence[str], mapped: bool
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Return the header (empty: not written by rlox), the tensors and the metadata of an open file."""
    from safetensors import SafetensorError, safe_open

    if os.fstat(opened.fileno()).st_size == 0:
        raise ValueError(f"load_checkpoint: {path} is empty")
    length = int.from_bytes(opened.read(8), "little")
    if length > _MOST_BYTES:
        raise ValueError(
            f"load_checkpoint: {path} is not an rlox checkpoint, or is damaged (it declares a header of "
            f"{length:,} bytes)"
        )
    opened.seek(0)
    try:
        # The open file itself: a training may replace the file of this name meanwhile. Not on Windows, where an open
        # file cannot be replaced.
        opened_path = path if os.name == "nt" else f"/dev/fd/{opened.fileno()}"
        with safe_open(opened_path, framework="numpy") as file:
            index = _index(opened) if mapped else {}
            info = (index.get("__metadata__") if mapped else file.metadata()) or {}
            if "rlox" not in info:
                return {}, {}, info
            header = _header(path, info["rlox"], keys)
            if mapped:
                return header, _map_tensors(opened, index), info
            return header, {name: file.get_tensor(name) for name in file.keys()}, info  # noqa: SIM118
    except (SafetensorError, TypeError, KeyError, AttributeError, OverflowError) as e:
        raise ValueError(
            f"load_checkpoint: {path} is not a safetensors file, or is truncated or damaged ({one_line(e)})"
        ) from e
    except MemoryError as e:
        raise ValueError(f"load_checkpoint: {path} does not fit in memory ({one_line(e)})") from e


def _read_file(
    path: str | os.PathLike, keys: Sequence[str], mapped: bool
) -> tuple[Path, dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Return the path, and what `_read` returns of the file there."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load_checkpoint: path must be a file's path, got {one_line(repr(path), 80)}")
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"load_checkpoint: {path} is a folder; name a file, such as checkpoints/last.safetensors in it"
        )
    try:
        opened = run_files.open_file(*run_files.resolve(path))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"load_checkpoint: no file {path}") from None
    except ValueError as e:
        raise ValueError(f"load_checkpoint: {path} cannot be read: {e}") from None
    with opened:
        header, flat, info = _read(path, opened, keys, mapped)
    if not header:
        raise ValueError(f"load_checkpoint: {path} was not written by rlox: its header lacks the key 'rlox'")
    return path, header, flat, info


def read_header(path: str | os.PathLike, keys: Sequence[str] = HEADER_KEYS) -> dict[str, Any]:
    """Read the header of a checkpoint alone, which takes no longer for a large file.

    The tensors must have the sizes that the header declares, but are not read: only `load_checkpoint` finds out whether
    the file is as it was written.

    Raises
    ------
    FileNotFoundError, ValueError
        As `load_checkpoint`.
    """
    return _read_file(path, keys, mapped=True)[1]


def load_checkpoint(path: str | os.PathLike, keys: Sequence[str] = HEADER_KEYS, mapped: bool = False) -> Checkpoint:
    """Read and verify a checkpoint; `keys` are the keys that its header must contain.

    This takes about twice the file's size in memory, no matter what sizes the file declares. Tensors that are `mapped`
    take no memory until they are read, and processes of one machine share them.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If it is truncated, damaged or malicious, was written by another program or a newer rlox, or does not fit in
        memory.
    """
    path, header, flat, info = _read_file(path, keys, mapped)
    if odd := [name for name, array in flat.items() if array.dtype.kind not in "fiub"]:
        raise ValueError(f"load_checkpoint: {path} is damaged: {one_line(odd[0])} must contain numbers")
    if info.get("sha256") != _digest(info["rlox"], flat):
        raise ValueError(f"load_checkpoint: {path} is damaged: its contents do not match their SHA-256")
    tensors: dict[str, dict[str, np.ndarray]] = {section: {} for section in TENSOR_SECTIONS}
    for name, array in flat.items():
        section, _, rest = name.partition("/")
        tensors.setdefault(section, {})[rest] = array
    names = {section: sorted(arrays) for section, arrays in tensors.items() if arrays}
    sections: Any = header.get("sections")
    if not _is_object(sections) or {name: x for name, x in sections.items() if x} != names:
        raise ValueError(f"load_checkpoint: {path} is damaged: the sections in its header must match its tensors")
    tensors |= {section: {} for section in sections if section not in tensors}
    return Checkpoint(header, tensors, path.parent)

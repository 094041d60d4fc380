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
                ``alpha_optimizer`` and ``temperature`` as well
=============== =============================================================================================

A SHA-256 over names, shapes and contents guards against every damage that leaves the file readable.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

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
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        **found,
        "platform": f"{sys.platform}-{platform.machine()}",
        "cpu_level": str(CPU_LEVEL),
    }


def _digest(header: str, flat: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(flat):
        array = flat[name]
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(memoryview(array).cast("B") if array.size else b"")
    return digest.hexdigest()


def save_checkpoint(path: str | os.PathLike, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` so that `path` always holds a whole one: the old until the new is on disk, then the new.

    Raises
    ------
    OSError
        If the folder cannot be written or the disk is full; `path` is then as it was.
    """
    path = Path(path)
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
    }
    # default=str: an odd value among env_kwargs must not cost the training its checkpoint.
    text = json.dumps(header, allow_nan=False, default=str)
    # What safetensors' own `save` would give, without its two copies of everything.
    index: dict[str, Any] = {"__metadata__": {"rlox": text, "sha256": _digest(text, flat)}}
    ordered = sorted(flat.items(), key=lambda item: (-item[1].itemsize, item[0]))  # each aligned to its own size
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        index[name] = {"dtype": _DTYPES[array.dtype.str[1:]], "shape": array.shape, "data_offsets": [start, end]}
    head = json.dumps(index, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
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
            f"save_checkpoint: cannot write ({e.strerror}); an earlier checkpoint there is untouched",
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


def load_checkpoint(path: str | os.PathLike, keys: Sequence[str] = HEADER_KEYS) -> Checkpoint:
    """Read and verify a checkpoint; `keys` are what its header must hold.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is cut short, damaged, written by something else, or by a newer rlox.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"load_checkpoint: {path} is a folder; name a file, such as checkpoints/last.safetensors in it"
        )
    if not path.exists():
        raise FileNotFoundError(f"load_checkpoint: no file {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"load_checkpoint: {path} is empty")
    try:
        with safe_open(path, framework="numpy") as file:
            info = file.metadata() or {}
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"load_checkpoint: {path} is no safetensors file, or is cut short or damaged ({e})") from e
    if "rlox" not in info:
        raise ValueError(f"load_checkpoint: {path} was not written by rlox: its header lacks the key 'rlox'")
    try:
        header = json.loads(info["rlox"])
        version = header["format_version"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"load_checkpoint: {path} is damaged: its header is no JSON object of ours ({e})") from e
    if version != FORMAT_VERSION:
        raise ValueError(
            f"load_checkpoint: {path} has format version {version}, this rlox reads {FORMAT_VERSION}; update rlox-cli"
        )
    missing = [key for key in keys if key not in header]
    if missing:
        raise ValueError(f"load_checkpoint: {path} is damaged: its header lacks {', '.join(missing)}")
    if info.get("sha256") != _digest(info["rlox"], flat):
        raise ValueError(f"load_checkpoint: {path} is damaged: its contents do not match their SHA-256")
    tensors: dict[str, dict[str, np.ndarray]] = {section: {} for section in header["sections"]}
    for name, array in flat.items():
        section, _, rest = name.partition("/")
        tensors.setdefault(section, {})[rest] = array
    return Checkpoint(header, tensors, path.parent)

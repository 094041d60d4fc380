"""Arrays in memory that processes share."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import Any

import numpy as np

Layout = dict[str, tuple[tuple[int, ...], Any]]  # shapes and dtypes of arrays by name


def open_nameless() -> Any:
    """Return a file that no other process can open, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("rlox"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def write_all(file: Any, data: bytes) -> None:
    """Replace the contents of a file of `open_nameless`."""
    file.seek(0)
    file.truncate()
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def read_all(file: Any) -> bytes:
    """Return the contents of a file of `open_nameless`, and empty it."""
    file.seek(0)
    data = file.read()
    file.truncate(0)
    return data


def map_arrays(descriptor: int, layout: Layout, enlarge: bool = False) -> dict[str, np.ndarray]:
    """Return the arrays of `layout` in the memory of a file, which is made large enough with `enlarge`."""
    offsets = [0]
    for shape, dtype in layout.values():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        offsets.append(offsets[-1] + (size + 63) // 64 * 64)  # whole cache lines
    if enlarge:
        os.ftruncate(descriptor, offsets[-1])
    memory = mmap.mmap(descriptor, offsets[-1])
    return {
        name: np.ndarray(shape, dtype, memory, at)
        for (name, (shape, dtype)), at in zip(layout.items(), offsets, strict=False)
    }

"""Files of a run folder, opened and written without following links.

A run folder may come from somebody else. A link inside it could make rlox read, overwrite or delete any file of the
user, and a named pipe would block the reader. Therefore all files of a run are opened here: no part of a path below the
run folder may be a link, and only regular files are opened. The run folder itself may be reached through links
(``outputs -> /big/disk``).

Functions take the run folder, or that of a sweep, and the name of a file below it: ``checkpoints/last.safetensors``.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

CHECKPOINTS = "checkpoints"
RECORD = "metrics.jsonl"
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)
# Not on Windows, where os.open cannot open folders either.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)
_BINARY = getattr(os, "O_BINARY", 0)  # only on Windows, which would write each newline as two bytes
_FULL = tuple(getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name))  # of a full disk


def _require(path: Path, mode: int, is_kind: Callable[[int], bool], rule: str) -> None:
    """Raise a ValueError unless `mode`, the file type of `path`, is of this kind."""
    if not is_kind(mode):
        got = next((name for is_other, name in _KINDS if is_other(mode)), "a device")
        remedy = "delete it, or restore what was there"
        if stat.S_ISLNK(mode):
            remedy = "links inside a run folder are not followed: put what it names in its place, or delete it"
        raise ValueError(f"{path} must be {rule}, got {got}; {remedy}")


def check(
    folder: str | os.PathLike,
    name: str,
    is_kind: Callable[[int], bool] = lambda mode: stat.S_ISREG(mode) or stat.S_ISDIR(mode),
    rule: str = "a file or a folder",
) -> os.stat_result | None:
    """Return the status of a file or folder below `folder`; None if nothing has that name.

    Raises
    ------
    ValueError
        If a part of its path is a link or no folder, or it is not of the kind that `is_kind` accepts and `rule` names.
    """
    path, status = Path(folder), None
    for part in Path(name).parts:
        if status is not None:
            _require(path, status.st_mode, stat.S_ISDIR, "a folder")
        path /= part
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    if status is not None:
        _require(path, status.st_mode, is_kind, rule)
    return status


def is_file(folder: str | os.PathLike, name: str) -> bool:
    """Return whether a regular file has that name. Raises ValueError if something else has, as `open_descriptor`."""
    return check(folder, name, stat.S_ISREG, "a regular file") is not None


def open_descriptor(folder: str | os.PathLike, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a file below `folder` and return its descriptor; `flags` are those of `os.open`.

    Raises
    ------
    ValueError
        If a part of its path is a link or no folder, or it is no regular file.
    OSError
        If it does not exist (without ``os.O_CREAT``), or cannot be opened.
    """
    path = Path(folder)
    if not _FOLDER:
        is_file(folder, name)
        return os.open(path / name, flags | _BINARY, 0o644)
    *above, last = Path(name).parts
    at = os.open(path, os.O_RDONLY | _FOLDER)
    try:
        # Relative to the descriptor of the folder above, so that nobody can put a link in its place meanwhile.
        for part in above:
            path /= part
            _require(path, os.lstat(part, dir_fd=at).st_mode, stat.S_ISDIR, "a folder")
            below = os.open(part, os.O_RDONLY | _FOLDER | _NO_LINK, dir_fd=at)
            os.close(at)
            at = below
        path /= last
        try:
            _require(path, os.lstat(last, dir_fd=at).st_mode, stat.S_ISREG, "a regular file")
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        # Opening a pipe would wait for its writer.
        opened = os.open(last, flags | _NO_LINK | _NO_WAIT, 0o644, dir_fd=at)
    except OSError as e:
        # Relative to a descriptor, an error names only the last part of the path.
        raise type(e)(e.errno, e.strerror, str(path)) from None
    finally:
        os.close(at)
    try:
        _require(path, os.fstat(opened).st_mode, stat.S_ISREG, "a regular file")
    except BaseException:
        os.close(opened)
        raise
    return opened


def open_file(folder: str | os.PathLike, name: str, mode: str = "rb") -> IO[Any]:
    """Open a file below `folder` as `open` does, to read (``rb``, ``r+b``) or append; see `open_descriptor`."""
    flags = {"rb": os.O_RDONLY, "r+b": os.O_RDWR}.get(mode, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    binary = "b" in mode
    return open(open_descriptor(folder, name, flags), mode, -1 if binary else 1, None if binary else "utf-8")


def read_bytes(folder: str | os.PathLike, name: str, most: int) -> bytes:
    """Return the contents of a file below `folder`, which may have `most` bytes; see `open_descriptor`."""
    with open_file(folder, name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{Path(folder, name)} must have at most {most:,} bytes, got more; restore the file")
    return data


def make_folder(folder: str | os.PathLike, name: str) -> Path:
    """Create a folder below `folder`, and those above it. Raises ValueError if there is a link on its path."""
    path = Path(folder, name)
    if check(folder, name, stat.S_ISDIR, "a folder") is None:
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def replace_file(folder: str | os.PathLike, name: str) -> Iterator[BinaryIO]:
    """Yield a new binary file; at the end it replaces the file `name` below `folder` atomically.

    The folders above it are created. After an exception the old file is unchanged. A link with that name is replaced,
    and what it names is not touched.
    """
    path = Path(folder, name)
    make_folder(folder, os.path.dirname(name))
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    with suppress(FileNotFoundError):
        os.unlink(partial)  # of a killed process with the same number
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o644)
    try:
        with open(opened, "wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException as e:
        if isinstance(e, OSError) and e.errno in _FULL and e.filename is None:
            e.filename = str(path)  # which `write` does not name
        with suppress(OSError):
            os.unlink(partial)
        raise


def replace_text(folder: str | os.PathLike, name: str, text: str) -> None:
    """Replace the contents of a file below `folder` as `replace_file`. Names of files keep bytes that are not UTF-8."""
    with replace_file(folder, name) as file:
        file.write(text.encode(errors="surrogateescape"))


def locate(path: str | os.PathLike) -> tuple[Path, str]:
    """Return the run folder that a checkpoint or a file of a replay memory belongs to, and its name below that folder.

    A run folder has ``checkpoints/`` next to its record. For other paths, this is the folder of the file.
    """
    path = Path(os.path.abspath(path))
    for above in path.parents:
        if above.name == CHECKPOINTS and os.path.lexists(above.parent / RECORD):
            return above.parent, str(path.relative_to(above.parent))
    return path.parent, path.name


def resolve(path: str | os.PathLike) -> tuple[Path, str]:
    """As `locate`, to read a file: links to a file outside of a run folder are followed."""
    folder, name = locate(path)
    return (folder, name) if os.sep in name else locate(os.path.realpath(path))

"""Paths: how messages show them, and the checks of those that a command will write to."""

from __future__ import annotations

import os
import tempfile
import unicodedata
from pathlib import Path

from rlox.checkpoint import one_line
from rlox_cli.terminal.errors import UsageError

_LONGEST_PART = 255  # bytes, of every common file system
_LONGEST_PATH = 4095  # bytes, on Linux


def shown(path: Path) -> str:
    """Return `path` relative to the working directory if it is below it, else absolute."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def output_path(name: str, path: Path | str, folder: bool = False, probe: bool = True) -> Path:
    """Return `path`, with ``~`` expanded, if a command may write a file or a folder there. Nothing is created.

    Folders that are missing may be created later, but not in the root of a file system: that is nearly always a typing
    error, or a disk that is not mounted.

    Parameters
    ----------
    name : str
        The option or the key that named the path.
    path : Path or str
        As typed.
    folder : bool
        Whether it is a folder and not a file.
    probe : bool
        Whether to ask the system if it would write there.

    Raises
    ------
    UsageError
        For a path that cannot be meant: a control character, an unknown user after ``~``, a name that is too long,
        something of another kind, or a new folder in the root.
    OSError
        If the system refuses to write there.
    """
    text, kind = os.fspath(path), "folder" if folder else "file"
    if any(unicodedata.category(sign) in ("Cc", "Zl", "Zp") for sign in text):
        raise UsageError(f"{name} must contain no line break or other control character, got {one_line(text, 100)!r}")
    text = with_home(name, text)
    if any(len(part) > _LONGEST_PART for part in os.fsencode(text).split(b"/")) or len(text) > _LONGEST_PATH:
        raise UsageError(f"{name} must name a {kind} of at most {_LONGEST_PART} bytes, got {one_line(text, 60)}")
    path = Path(text)
    if os.path.exists(path):
        if folder and not path.is_dir():
            raise UsageError(f"{name} must be a folder, got the file {path}")
        if not folder and path.is_dir():
            raise UsageError(f"{name} must be a file, but there is a folder of this name, got {path}")
        if not folder and not path.is_file():
            raise UsageError(f"{name} must be a regular file, got {path}")
    elif os.path.islink(path):
        raise UsageError(f"{name} must not be a link to something that does not exist, got {path}")
    above = find_existing_parent(path.parent)
    if not above.is_dir():
        raise UsageError(f"{name} must be in a folder, got {path}: {above} is a file")
    new = path if folder else path.parent
    if not os.path.exists(new) and find_existing_parent(new).resolve() == Path(above.anchor):
        first = Path(os.path.abspath(new)).parts[:2]
        raise UsageError(f"{name} must be in a folder that exists, got {path}; create {Path(*first)} first")
    if probe:
        above = path if folder and path.is_dir() else above
        try:
            with tempfile.TemporaryFile(dir=above):
                pass
        except OSError as e:
            raise OSError(f"{name}: {path} cannot be written: {shown(above)} takes no files: {e.strerror or e}") from e
    return path


def with_home(name: str, text: str) -> str:
    """Return the path `text` with ``~`` expanded, as a shell does where it is not part of ``KEY=VALUE``.

    Raises
    ------
    UsageError
        If the user after ``~`` is unknown.
    """
    if not text.startswith("~"):
        return text
    user, slash, below = text.partition("/")
    if (home := os.path.expanduser(user)) == user == "~":
        raise UsageError(f"HOME must be set for {name}={one_line(text, 100)}, since this user has no home folder")
    if home == user:
        raise UsageError(f"{name} must begin with a user who exists, got {one_line(text, 100)}; try ./{text}")
    return os.path.join(home, below) if slash else home


def find_existing_parent(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))

"""Addresses of SQLite files, ``sqlite:///FILE``, in configurations and for SQLAlchemy, which MLflow and Optuna use."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

PREFIX = "sqlite:///"
_ENCODED = "uri=true"  # SQLite then decodes the path, https://www.sqlite.org/uri.html


def is_sqlite(uri: str) -> bool:
    """Return whether an address names a file of SQLite."""
    return uri.startswith(PREFIX)


def sqlite_uri(file: Path) -> str:
    """Return the address of `file` for a configuration.

    In ``sqlite:///FILE`` nothing is decoded, and a question mark ends the path. A path with one, with ``${``, which
    configurations resolve, or with bytes that are no printable text is therefore percent-encoded, as
    ``sqlite:///file:///FILE?uri=true``.
    """
    path = str(file)
    if path.isprintable() and "?" not in path and "${" not in path:
        return PREFIX + path
    return f"{PREFIX}{file.absolute().as_uri()}?{_ENCODED}"


def sqlalchemy_uri(file: Path) -> str:
    """Return the address of `file` for the installed SQLAlchemy: before version 2.1 it decodes no path."""
    if not {"?", "%"} & set(path := str(file)) and path.isprintable():
        return PREFIX + path
    from sqlalchemy import URL

    encoded = URL.create("sqlite", database=file.absolute().as_uri(), query={"uri": "true"})
    return encoded.render_as_string(hide_password=False)


def sqlite_file(uri: str) -> Path:
    """Return the file that an address names.

    Raises
    ------
    ValueError
        If it names none, or has options after a question mark.
    """
    path, _, options = uri.removeprefix(PREFIX).partition("?")
    if options == _ENCODED and path.startswith("file:///"):
        return Path(os.fsdecode(unquote_to_bytes(urlsplit(path).path)))
    if options or not path:
        raise ValueError(f"a database must be {PREFIX}FILE, without options after a question mark, got {uri!r}")
    return Path(path)


def names_file(uri: str) -> bool:
    """Return whether `sqlite_file` accepts the address."""
    try:
        return is_sqlite(uri) and bool(sqlite_file(uri))
    except ValueError:
        return False

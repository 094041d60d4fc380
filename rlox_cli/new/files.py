"""What all new packages have in common: a name, a folder, and the files in it."""

from __future__ import annotations

import keyword
import os
import re
from importlib.util import find_spec
from pathlib import Path

from rlox.checkpoint import run_files
from rlox_cli.terminal.console import TextConsole
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, shown

_LONGEST = 60  # characters of a name


def check_name(name: str) -> None:
    """Raise a UsageError unless `name` can be the name of a new Python module."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or len(name) > _LONGEST:
        raise UsageError(
            f"NAME must be a name for a Python module: small letters, digits and _, at most {_LONGEST}, got {name!r}"
        )
    spec = find_spec(name)
    if spec is not None and spec.origin is not None:  # else it is only a folder
        raise UsageError(f"NAME must be new, but Python can import {name!r} already; choose another")


def class_name(name: str) -> str:
    """Return ``BigStep`` for ``big_step``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def write_package(folder: Path, texts: dict[str, str], commands: list[tuple[str, str]]) -> None:
    """Write a new folder with the files `texts`, and print what to type next.

    Raises
    ------
    UsageError
        If the folder exists and is not empty.
    """
    folder = output_path("the folder", folder, folder=True)
    if os.path.lexists(folder) and any(folder.iterdir()):
        raise UsageError(f"{shown(folder)} must not exist yet, or be empty; choose another --folder")
    for name, text in texts.items():
        with run_files.replace_file(folder, name) as file:
            file.write(text.encode())
    console = TextConsole()
    console.print(f"wrote {shown(folder)}: {', '.join(texts)}")
    for label, line in commands:
        console.print(f"  {label:<10}  {line}")


def pyproject(name: str, description: str, extra: str = "") -> str:
    """Return the pyproject.toml of a package with one module."""
    return f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name.replace("_", "-")}"
version = "0.1.0"
description = "{description}"
requires-python = ">=3.10"
dependencies = ["rlox-cli"]
{extra}
[tool.setuptools]
py-modules = ["{name}"]
"""

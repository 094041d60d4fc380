"""Paths as messages show them."""

from __future__ import annotations

from pathlib import Path


def shown(path: Path) -> str:
    """Return `path` relative to the working directory if it is below it, else absolute."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

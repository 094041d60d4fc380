"""Paths as messages name them."""

from __future__ import annotations

from pathlib import Path


def shown(path: Path) -> str:
    """`path` relative to the working directory where it lies below it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

"""Packages that are imported only where they are used, by the extra of rlox that installs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def import_package(name: str, extra: str, where: str) -> Any:
    """Return a package, or raise an ImportError with the remedy, an extra of rlox."""
    try:
        return import_module(name)
    except ImportError as e:
        raise ImportError(f'{where}: {name} is required; pip install "rlox-cli[{extra}]"') from e

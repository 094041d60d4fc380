"""What installed packages add to rlox: the entry points of a group, such as ``rlox.algorithms`` or ``rlox.loggers``."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any


@functools.cache
def offers(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted. If two packages offer a name, the first one found counts."""
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        entries.setdefault(entry.name, entry)
    return dict(sorted(entries.items()))


def load(group: str, name: str) -> Any:
    """Load the object that an installed package offers under `name`, one of `offers(group)`.

    Raises
    ------
    ImportError
        If the package's code fails; the message contains its error.
    """
    entry = offers(group)[name]
    try:
        return entry.load()
    except Exception as e:  # another package's code
        raise ImportError(f"{group}: {name} ({entry.value}) failed with {type(e).__name__}: {e}") from e

"""How packages from outside join: where the C interface lies, and what they offer by entry points.

Groups: environments (``rlox.envs``) and rewards (``rlox.rewards``).

Names are read from the packages' metadata; a package's code is imported when one of its names is asked for.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rlox.config import nearest

ENV_GROUP = "rlox.envs"
REWARD_GROUP = "rlox.rewards"


@functools.cache
def offers(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, sorted; a name that two packages claim is left to the first found."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, entry)
    return dict(sorted(found.items()))


def load(group: str, name: str) -> Any:
    """The object that an installed package offers under `name`.

    Raises
    ------
    ValueError
        If none does; names the nearest one.
    ImportError
        If the package's own code fails, with what it says.
    """
    found = offers(group)
    if name not in found:
        hint = nearest(name, found) if found else "no installed package offers any"
        raise ValueError(f"{group}: {name!r} must be offered by an installed package; {hint}")
    try:
        return found[name].load()
    except Exception as e:  # another package's code
        raise ImportError(f"{group}: {name} ({found[name].value}) failed with {type(e).__name__}: {e}") from e


def get_include() -> str:
    """The folder with ``rlox_native.h``, the C interface for environments and rewards from outside."""
    import rlox.kernels

    return str(Path(rlox.kernels.__file__).parent / "include")

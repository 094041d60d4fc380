"""How packages from outside join: where the C interface lies, and what they offer by entry points.

Groups: environments (``rlox.envs``) and rewards (``rlox.rewards``).

Names are read from the packages' metadata; a package's code is imported when one of its names is asked for.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

ENV_GROUP = "rlox.envs"
REWARD_GROUP = "rlox.rewards"

worker_imports: list[str] = []  # modules that processes of `env_workers` import first: those of ``--import``


@functools.cache
def offers(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, sorted; a name that two packages claim is left to the first found."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, entry)
    return dict(sorted(found.items()))


def load(group: str, name: str) -> Any:
    """The object that an installed package offers under `name`, one of `offers(group)`.

    Raises
    ------
    ImportError
        If the package's own code fails, with what it says.
    """
    entry = offers(group)[name]
    try:
        return entry.load()
    except Exception as e:  # another package's code
        raise ImportError(f"{group}: {name} ({entry.value}) failed with {type(e).__name__}: {e}") from e


def register_offered(env_id: str) -> bool:
    """Register the native environment that an installed package offers under `env_id`; False if none does.

    Raises
    ------
    ValueError
        If what it offers is no environment of this id.
    ImportError
        If the package's code fails.
    """
    from rlox.kernels.envs.vec_env import native_ids, register_native

    if env_id not in offers(ENV_GROUP):
        return False
    where = f"{ENV_GROUP}: {env_id} ({offers(ENV_GROUP)[env_id].value})"
    given = load(ENV_GROUP, env_id)
    if env_id not in native_ids():  # importing the package may have registered it
        made = given() if callable(given) else given
        try:
            given = None if made is None else register_native(made)
        except (TypeError, ValueError) as e:
            raise ValueError(f"{where} must be a capsule of an environment, or return one: {e}") from e
        if env_id not in native_ids():
            raise ValueError(f"{where} must give the environment {env_id}, got {given}")
    return True


def get_include() -> str:
    """The folder with ``rlox_native.h``, the C interface for environments and rewards from outside."""
    import rlox.kernels

    return str(Path(rlox.kernels.__file__).parent / "include")

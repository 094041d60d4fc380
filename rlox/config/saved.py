"""A run's configuration as plain data, as it is stored in ``config.yaml``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlox.config.run import RunConfig
from rlox.config.sqlite import is_sqlite, sqlite_file, sqlite_uri

MOST_LEVELS = 32  # of nested values in a configuration


def to_plain(config: RunConfig, algo: str) -> dict[str, Any]:
    """Return `config` as plain data for ``config.yaml``, with the algorithm's name first in its section.

    Raises
    ------
    ValueError
        If a value could not be read from that file again.
    """
    plain = dataclasses.asdict(config)
    plain["algo"] = {"name": algo, **plain["algo"]}
    if plain["init_from"] is not None:
        plain["init_from"] = os.path.abspath(plain["init_from"])
    if plain["buffer"] is not None and plain["buffer"].get("folder") is not None:
        plain["buffer"]["folder"] = os.path.abspath(plain["buffer"]["folder"])
    if plain["dataset"] is not None and os.path.exists(plain["dataset"]["source"]):
        plain["dataset"]["source"] = os.path.abspath(plain["dataset"]["source"])
    if (wandb := config.logger.wandb) is not None:
        plain["logger"]["wandb"] = None if wandb.in_effect == "disabled" else {**vars(wandb), "mode": wandb.in_effect}
    if (mlflow := config.logger.mlflow) is not None:
        uri = mlflow.in_effect
        # The mirror runs later in another process: a path must not depend on the current working directory.
        uri = sqlite_uri(Path(os.path.abspath(sqlite_file(uri)))) if is_sqlite(uri) else uri
        plain["logger"]["mlflow"]["tracking_uri"] = uri
    require_plain(plain)
    return plain


def require_plain(data: Any, key: str = "", level: int = 1) -> None:
    """Check that `data`, the value of `key`, can be written into a configuration and read from it again.

    Raises
    ------
    ValueError
        For an interpolation, a control character, a byte that is not UTF-8, an integer of more than 64 bits, more
        than 32 levels, and anything that is neither text nor number.
    """
    where = f"{key} must be plain data, got " if key else ""
    if isinstance(data, (dict, list)):
        if level > MOST_LEVELS:
            raise ValueError(f"{where}more than {MOST_LEVELS} levels")
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            require_plain(name, key, level)
            require_plain(value, f"{key}.{name}" if key else str(name), level + 1)
    elif isinstance(data, str) and "${" in data:
        raise ValueError(f"{where}the interpolation {data[:80]!r} instead of a value")
    elif isinstance(data, str) and not all(c.isprintable() or c.isspace() for c in data):
        raise ValueError(f"{where}the text {data[:80]!a} with control characters or bytes that are not UTF-8")
    elif data is not None and not isinstance(data, (str, int, float)):
        raise ValueError(f"{where}{data!r}, which is neither text nor number")
    elif isinstance(data, int) and abs(data) >= 2**64:
        raise ValueError(f"{where}an integer of more than 64 bits")


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted keys whose values differ, as ``(key, [old, new])``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif old != new:
        yield prefix, [old, new]

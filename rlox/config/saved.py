"""A run's configuration as plain data, as it is stored in ``config.yaml``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from rlox.config.run import RunConfig


def resolved(config: RunConfig, algo: str) -> dict[str, Any]:
    """Return `config` as plain data for ``config.yaml``, with the algorithm's name first in its section."""
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
    mlflow = plain["logger"]["mlflow"]
    if mlflow is not None and mlflow["tracking_uri"].startswith("sqlite:///"):
        # The mirror runs later in another process: a path must not depend on the current working directory.
        mlflow["tracking_uri"] = "sqlite:///" + os.path.abspath(mlflow["tracking_uri"].removeprefix("sqlite:///"))
    return plain


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted keys whose values differ, as ``(key, [old, new])``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif old != new:
        yield prefix, [old, new]

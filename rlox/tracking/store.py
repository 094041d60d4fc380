"""What trainer and background writer share on disk: a store's queue of runs, a mirror's state.

A *store* is what one writer fills: one MLflow tracking URI, one W&B run. Its folder holds ``lock``
(the writer's flock) and ``pending/``, one small file per registration, each naming a run folder.
Every registration has a file of its own, so that a writer which is done with a run removes only
those it has seen, and a trainer that resumes at that moment is not forgotten.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlox.tracking import lock
from rlox.tracking.record import FILE

MIRRORS = "mirrors"


@dataclass
class State:
    """How far one mirror of one run has come; ``<run>/mirrors/<name>.json``."""

    offset: int = 0  # bytes of metrics.jsonl up to the last row mirrored
    seen: int = 0  # bytes of metrics.jsonl that were there when this was written
    segment: int = -1  # of the last row mirrored
    step: int = -1  # of the last row mirrored
    run: str = "running"  # running, finished, interrupted, failed or died
    complete: bool = False  # the run ended and the mirror has all of it
    remote_id: str | None = None
    url: str | None = None
    error: str | None = None  # why the last attempt failed, with the remedy
    artifacts: dict[str, int] = field(default_factory=dict)  # kind -> its checkpoint row's end
    updated: float = 0.0  # seconds since the epoch


def state_path(run: Path, name: str) -> Path:
    return run / MIRRORS / f"{name}.json"


def read_state(run: Path, name: str) -> State:
    """The mirror's state; a fresh one if there is none (a mirror can always be filled again)."""
    try:
        return State(**json.loads(state_path(run, name).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return State()


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


def write_state(run: Path, name: str, state: State) -> None:
    state.updated = round(time.time(), 3)
    _replace(state_path(run, name), json.dumps(asdict(state), indent=2) + "\n")


def read_config(run: Path) -> dict[str, Any]:
    """The run's resolved config, ``<run>/config.yaml``."""
    path = run / "config.yaml"
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        raise ValueError(
            f"rlox.tracking: run must be a run folder with config.yaml and {FILE}, got {run}; "
            f"name a folder that `rlox train` made"
        ) from None
    except yaml.YAMLError as e:
        raise ValueError(f"rlox.tracking: {path} must be YAML, got {e}; restore the file") from e
    if not isinstance(config, dict) or not isinstance(config.get("logger") or {}, dict):
        raise ValueError(
            f"rlox.tracking: {path} must map names to settings, got {type(config).__name__}; restore the file"
        )
    return config


def user_store(key: str) -> Path:
    """The folder of a store that has no place of its own on disk (a server)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "rlox" / hashlib.sha256(key.encode()).hexdigest()[:16]


def lock_path(store: Path) -> Path:
    return store / "lock"


def is_busy(store: Path) -> bool:
    """Whether a writer is at work on this store."""
    return lock.is_held(lock_path(store))


def register(store: Path, run: Path) -> None:
    """Ask the store's writer, present or next, to mirror this run."""
    folder = store / "pending"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:16]
    _replace(folder / f"{digest}-{os.getpid()}-{time.time_ns()}", str(run))


def pending(store: Path) -> dict[Path, list[Path]]:
    """The runs that wait for the store's writer, each with its registrations."""
    runs: dict[Path, list[Path]] = {}
    try:
        names = sorted(os.listdir(store / "pending"))
    except FileNotFoundError:
        return runs
    for name in names:
        entry = store / "pending" / name
        if not name.startswith("."):
            runs.setdefault(Path(entry.read_text()), []).append(entry)
    return runs


def is_pending(store: Path, run: Path) -> bool:
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:16]
    return any((store / "pending").glob(f"{digest}-*"))

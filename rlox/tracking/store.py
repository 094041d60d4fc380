"""Files shared by trainer and background writer: a store's queue of runs, and a mirror's state.

A *store* is filled by one writer, for example an MLflow tracking URI or a W&B run. Its folder contains
``lock`` (the writer's lock) and ``pending/``, with one small file per registration that names a run folder.
Because each registration has its own file, a writer that has finished a run removes only the
registrations it has seen, and a trainer that resumes at that moment is not forgotten.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlox.checkpoint import locks, run_files
from rlox.config import Config, CsvConfig, MlflowConfig, TensorboardConfig, WandbConfig, is_below
from rlox.config.home import user_folder
from rlox.config.packages import import_package
from rlox.config.run import MOST_BYTES, MOST_LEVELS, require_plain
from rlox.tracking.record import FILE

yaml = import_package("yaml", "cli", "logger")

MIRRORS = "mirrors"
LOCK = "lock"  # in a store's folder
_SECTIONS: dict[str, type[Config]] = {
    "mlflow": MlflowConfig,
    "wandb": WandbConfig,
    "tensorboard": TensorboardConfig,
    "csv": CsvConfig,
}


@dataclass
class State:
    """Progress of one mirror of one run; ``<run>/mirrors/<name>.json``."""

    offset: int = 0  # bytes of metrics.jsonl up to the last mirrored row
    seen: int = 0  # size of metrics.jsonl when this was written
    segment: int = -1  # of the last mirrored row
    step: int = -1  # of the last mirrored row
    run: str = "running"  # running, finished, interrupted, failed or died
    complete: bool = False  # whether the run ended and the mirror has all of it
    remote_id: str | None = None
    url: str | None = None
    error: str | None = None  # why the last attempt failed, with the remedy
    artifacts: dict[str, int] = field(default_factory=dict)  # kind -> its checkpoint row's end
    updated: float = 0.0  # seconds since the epoch


def read_state(run: Path, name: str) -> State:
    """Return the mirror's state, or a new one if there is no valid state (a mirror can always be filled again)."""
    try:
        state, fresh = State(**json.loads(run_files.read_bytes(run, f"{MIRRORS}/{name}.json", MOST_BYTES))), State()
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return State()
    counts = (state.offset, state.seen, *(state.artifacts.values() if isinstance(state.artifacts, dict) else ["none"]))
    good = all(type(n) is int and n >= 0 for n in counts) and isinstance(state.updated, (int, float))
    good &= all(isinstance(getattr(state, key), type(getattr(fresh, key))) for key in ("segment", "step", "run"))
    return state if good else fresh


def readable(path: Path | str) -> str:
    """Return `path` as text that every tracker accepts: bytes that are not UTF-8 are written as ``\\xe9``."""
    return os.fsencode(path).decode(errors="backslashreplace")


def write_state(run: Path, name: str, state: State) -> None:
    if not run.is_dir():  # moved or deleted, and not to be made again
        return
    state.updated = round(time.time(), 3)
    with run_files.replace_file(run, f"{MIRRORS}/{name}.json") as file:
        file.write(f"{json.dumps(asdict(state), indent=2)}\n".encode())


def write_error(run: Path, name: str, text: str) -> None:
    """Store in the mirror's state why the last attempt failed."""
    state = read_state(run, name)
    state.error = text
    write_state(run, name, state)


def inside(run: Path, name: str) -> Path:
    """Return the path of `name` below the run folder.

    Raises
    ------
    ValueError
        If the path leads out of the folder, by ``..``, or a part of it is a symbolic link.
    """
    if not is_below(name):
        raise ValueError(f"rlox.tracking: {str(name)!r} must be below the run folder {run}, but leads out of it")
    run_files.check(run, name)
    return run / name


def read_plain(folder: Path, name: str) -> Any:
    """Return the contents of a YAML file below `folder`: plain data.

    Raises
    ------
    ValueError, yaml.YAMLError, RecursionError
        For anything that rlox does not write into a configuration.
    """
    text = run_files.read_bytes(folder, name, MOST_BYTES).decode("utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    level = 0
    # Check before any object is created, because aliases multiply objects and tags choose their types.
    for event in yaml.parse(text, loader):
        if getattr(event, "anchor", None) is not None:
            raise ValueError(f"the anchor or alias {event.anchor[:40]!r}")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"the tag {event.tag[:40]!r}")
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise ValueError(f"more than {MOST_LEVELS} levels")
    data = yaml.load(text, loader)
    require_plain(data)
    return data


def read_config(run: Path) -> dict[str, Any]:
    """Return the run's config, ``<run>/config.yaml``: plain data without unresolved interpolations.

    Raises
    ------
    ValueError
        If the file does not exist, or contains what rlox does not write: anchors, tags, interpolations, dates, more
        than 256 KiB or 32 levels, or invalid settings of a logger, such as a file outside of the run folder.
    """
    path = run / "config.yaml"
    try:
        config = read_plain(run, path.name)
    except FileNotFoundError:
        raise ValueError(
            f"rlox.tracking: run must be a run folder with config.yaml and {FILE}, got {run}; "
            f"name a folder that `rlox train` created"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        why = " ".join(str(e).split())
        raise ValueError(f"rlox.tracking: {path} must be YAML as rlox writes it, got {why}; restore the file") from e
    loggers = config.get("logger") or {} if isinstance(config, dict) else None
    if not isinstance(loggers, dict):
        raise ValueError(
            f"rlox.tracking: {path} must map names to settings, got {type(config).__name__}; restore the file"
        )
    for name, settings in loggers.items():
        try:
            if not re.fullmatch(r"\w[\w.-]*", name) or not (settings is None or isinstance(settings, dict)):
                raise ValueError("it must be a name and its settings")
            if settings is not None and name in _SECTIONS:
                _SECTIONS[name].from_kwargs(f"logger.{name}", **settings)
        except (TypeError, ValueError) as e:
            raise ValueError(f"rlox.tracking: {path}: logger {name!r}: {e}; restore the file") from e
    return config


def user_store(key: str) -> Path:
    """Return the folder of a store that has no folder itself (a server)."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "rlox" / hashlib.sha256(key.encode()).hexdigest()[:16]


def is_busy(store: Path) -> bool:
    """Return whether a writer is working on this store."""
    return locks.is_locked(store, LOCK)


def register(store: Path, run: Path) -> None:
    """Request that the store's current or next writer mirrors this run."""
    folder = store / "pending"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(os.fsencode(run)).hexdigest()[:16]
    run_files.replace_text(folder, f"{digest}-{os.getpid()}-{time.time_ns()}", str(run))


def list_pending_runs(store: Path) -> dict[Path, list[Path]]:
    """Return the runs that wait for the store's writer, each with its registrations."""
    runs: dict[Path, list[Path]] = {}
    try:
        names = sorted(os.listdir(store / "pending"))
    except FileNotFoundError:
        return runs
    for name in names:
        entry = store / "pending" / name
        if not name.startswith("."):
            run = os.fsdecode(run_files.read_bytes(store, f"pending/{name}", MOST_BYTES))
            runs.setdefault(Path(run), []).append(entry)
    return runs


def is_pending(store: Path, run: Path) -> bool:
    digest = hashlib.sha256(os.fsencode(run)).hexdigest()[:16]
    return any((store / "pending").glob(f"{digest}-*"))

"""Open a dataset, given by a path or an id, from which algorithms sample."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlox.buffers import OfflineDataset
from rlox.checkpoint import one_line
from rlox.config import DatasetConfig, nearest
from rlox.envs import EnvSpec
from rlox.kernels.buffers.offline import OfflineDatasetBuffer
from rlox.offline.arrow import (
    FORMAT,
    ArrowWriter,
    file_blocks,
    map_agents,
    map_columns,
    metadata_of,
    open_reader,
)
from rlox.offline.returns import episode_starts
from rlox.offline.rows import Block, Rows, check_bounds, names_of
from rlox.offline.sources import (
    ARROW_SUFFIXES,
    MINARI_ID,
    READERS,
    Source,
    cache_folder,
    fingerprint,
    minari,
    minari_dataset,
    minari_files,
)

# Number of rows whose actions are compared with their bounds at a time.
_ROWS = 1 << 18


def open_dataset(
    source: str | os.PathLike | DatasetConfig,
    *,
    normalize: bool = False,
    max_transitions: int | None = None,
    reward_scale: float = 1.0,
    reward_shift: float = 0.0,
    normalize_returns: bool = False,
) -> OfflineDatasetBuffer:
    """Open a dataset of transitions. If the file allows it, only the sampled rows are read.

    A file written by ``rlox collect`` (and any Arrow file of one uncompressed record batch with the six columns in
    float32) is memory-mapped: its pages are loaded on use, so it may be larger than memory. Files written by rlox were
    checked when they were written and open at once, and each sample is checked again; other files are read once, to
    check them. All other formats are first converted into such a file, in blocks. The copy is kept in
    ``$XDG_CACHE_HOME/rlox/datasets`` (else in ``~/.cache``) until the original changes; that folder may be emptied at
    any time.

    Columns are ``obs actions rewards terminated truncated``, and optionally ``next_obs``, ``episode`` (rising numbers,
    only checked), and ``action_masks`` and ``next_action_masks``, flags of the legal actions in both observations. The
    names used by D4RL and Minari are accepted as well. For missing next observations, see `rlox.offline.rows.Rows`.

    If several agents acted, an episode is the life of one agent: ``metadata["agents"]`` contains the agents' names, and
    ``metadata["episode_agents"]`` the name of each episode's agent.

    Parameters
    ----------
    source : str, path or DatasetConfig
        ``.arrow``, ``.feather``, ``.ipc``, ``.parquet``, ``.npz``, ``.h5`` or ``.hdf5``; ``minari:ID``, or only the id
        if no such file exists. With a configuration, the other arguments must be left out.
    normalize : bool
        Sample observations as ``(obs - obs_mean) / obs_std``.
    max_transitions : int, optional
        Use only this many rows from the beginning.
    reward_scale, reward_shift : float
        Rewards are sampled as ``reward * reward_scale + reward_shift``.
    normalize_returns : bool
        Scale rewards such that the returns of the best and the worst episode differ by 1000, before the other two; IQL
        (Kostrikov et al. 2022, arXiv:2110.06169, appendix B) does this for locomotion.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If a file is damaged or truncated, or its rows are not transitions; the message names column and row.
    ImportError
        If pyarrow, h5py or minari is required but missing.
    """
    settings, options = source, (normalize, max_transitions, reward_scale, reward_shift, normalize_returns)
    if not isinstance(settings, DatasetConfig):
        settings = DatasetConfig(str(source), *options)
    elif options != (False, None, 1.0, 0.0, False):
        raise TypeError("open_dataset: a DatasetConfig must be the only argument; its fields replace the others")
    where = f"dataset {settings.source}"
    path, others = _find(settings.source, where)
    return _open_arrow(path if others is None else _convert_once(path.name, *others), where, settings)


def dataset_metadata(source: str | os.PathLike) -> dict[str, Any]:
    """Return a dataset's metadata, such as ``env``, ``policies`` and ``seed``, without reading its rows.

    Raises the errors of `open_dataset`.
    """
    where = f"dataset {source}"
    path, others = _find(str(source), where)
    return metadata_of(open_reader(path, where).schema, where) if others is None else others[1]().metadata


def _find(source: str, where: str) -> tuple[Path, tuple[str, Callable[[], Source]] | None]:
    """Return the path of a source and, if it is not an Arrow file, its fingerprint and a function that reads it."""
    path = Path(source)
    if source.startswith("minari:") or (not path.exists() and MINARI_ID.fullmatch(source)):
        path = Path(source.removeprefix("minari:"))
        known = minari_dataset(str(path), where)
        return path, (fingerprint(minari_files(known)), lambda: minari(known, where))
    check_source(source)
    if path.suffix in ARROW_SUFFIXES:
        return path, None
    return path, (fingerprint([path]), lambda: READERS[path.suffix](path, where))


def check_source(source: str) -> None:
    """Raise unless `source` is a file that can be opened, or may be a Minari id.

    The FileNotFoundError or ValueError has the nearest file name, or the supported endings.
    """
    where, path = f"dataset {source}", Path(source)
    if source.startswith("minari:"):
        if not MINARI_ID.fullmatch(source.removeprefix("minari:")):
            raise ValueError(
                f"{where}: a Minari id must be (namespace/)name-vN, got {source.removeprefix('minari:')!r}"
            )
        return
    if not path.exists():
        if MINARI_ID.fullmatch(source):
            return
        there = [p.name for p in path.parent.glob("*") if p.suffix in (*ARROW_SUFFIXES, *READERS)]
        hint = f"; {nearest(path.name, there)}" if there else ""
        raise FileNotFoundError(f"{where}: there is no such file, and a Minari id is minari:(namespace/)name-vN{hint}")
    if path.suffix not in (*ARROW_SUFFIXES, *READERS):
        raise ValueError(
            f"{where}: its name must end in one of {', '.join((*ARROW_SUFFIXES, *READERS))}, got {path.name!r}"
        )
    if not path.is_file():
        raise ValueError(f"{where}: it must be an ordinary file")
    if path.stat().st_size == 0:
        raise ValueError(f"{where}: the file is empty")


def _convert_once(name: str, key: str, make: Callable[[], Source]) -> Path:
    """Return the Arrow file into which a source is converted, unless that was done before."""
    digest = hashlib.sha256(f"{FORMAT}:{key}".encode()).hexdigest()[:16]
    stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[-80:]
    path = cache_folder() / f"{stem}-{digest}.arrow"
    if not path.is_file():
        convert(make(), path)
    return path


def convert(source: Source, path: str | os.PathLike) -> None:
    """Check the rows of `source`, and write them to an Arrow file that opens at once."""
    with ArrowWriter(path) as writer:
        rows = Rows(source.where, writer.write, **source.limits())
        for block in source.blocks:
            rows.push(block)
        found = rows.finish()
        shape = source.metadata.get("obs_shape", found["obs_shape"])
        if [math.prod(shape)] == found["obs_shape"]:
            found["obs_shape"] = shape  # Parquet and Arrow store images as flat lists
        writer.finish({**source.metadata, **found})


def _open_arrow(path: Path, where: str, settings: DatasetConfig) -> OfflineDatasetBuffer:
    reader = open_reader(path, where)
    metadata = metadata_of(reader.schema, where)
    columns = map_columns(reader, where)
    if columns is None:
        names = names_of(reader.schema.names, where, metadata)
        raw = Source(where, file_blocks(reader, names, where), metadata)
        return _open_arrow(_convert_once(path.name, fingerprint([path]), lambda: raw), where, settings)
    n = len(columns["rewards"])
    if n == 0:
        raise ValueError(f"{where}: rewards must have at least one transition, got none")
    known = metadata.get("n_rows") == n
    if metadata and not known:
        raise ValueError(f"{where}: it must have {metadata.get('n_rows')} rows, as its metadata says, got {n}")
    if not known:
        _check_mapped(columns, where)
    shape = metadata.get("obs_shape", columns["obs"].shape[1:])
    if math.prod(shape) != columns["obs"].size // n:
        raise ValueError(f"{where}: its rows of obs must have the shape {shape}, as its metadata says")
    for name in ("obs", "next_obs"):
        columns[name] = columns[name].reshape(n, *shape)
    whole = settings.max_transitions is None or settings.max_transitions >= n
    if not whole:
        columns = {name: column[: settings.max_transitions] for name, column in columns.items()}
    lives = _episode_agents(reader, columns, metadata, where)
    moments = {name: metadata[name] for name in ("obs_mean", "obs_std") if known and whole and name in metadata}
    columns["rewards"] = _rewards(columns, settings)
    try:
        return OfflineDatasetBuffer(
            **columns,
            normalize=settings.normalize,
            n_actions=metadata.get("n_actions"),
            lazy=known,
            metadata={**metadata, **lives, "source": settings.source, "file": str(path)},
            **{name: np.float32(value).reshape(shape) for name, value in moments.items()},
        )
    except (TypeError, ValueError) as e:
        # The kernel's message names an argument and a row, which are also the column and row of the dataset.
        raise ValueError(f"{where}: {str(e).removeprefix('OfflineDatasetBuffer: ')}") from e


def _episode_agents(reader: Any, columns: Block, metadata: dict[str, Any], where: str) -> dict[str, list[str]]:
    """Return ``episode_agents``, the name of each episode's agent; empty if the file does not contain it."""
    column = map_agents(reader, where) if "agents" in metadata else None
    if column is None:
        return {}
    starts = episode_starts(columns["terminated"], columns["truncated"])
    names, places = metadata["agents"], column[starts]
    wrong = (places < 0) | (places >= len(names))
    if wrong.any():
        row = int(starts[wrong.argmax()])
        raise ValueError(
            f"{where}: column agent must hold indices in the list of {len(names)} agents, got {column[row]} in row "
            f"{row}"
        )
    return {"episode_agents": [names[place] for place in places.tolist()]}


def _check_mapped(columns: Block, where: str) -> None:
    """Run the checks that files written by rlox have already passed, without keeping or copying anything."""
    rows, n = Rows(where, lambda block: None), len(columns["rewards"])
    for start in range(0, n, _ROWS):
        rows.push({name: column[start : start + _ROWS] for name, column in columns.items()})


def _rewards(columns: Block, settings: DatasetConfig) -> np.ndarray:
    """Return the rewards to sample; without changes, the file's own array."""
    scale, rewards = settings.reward_scale, columns["rewards"]
    if settings.normalize_returns:
        starts = episode_starts(columns["terminated"], columns["truncated"])
        returns = np.add.reduceat(rewards, starts, dtype=np.float64)
        if np.ptp(returns) == 0:
            raise ValueError(
                f"dataset {settings.source}: normalize_returns must be false if all episodes have the same return "
                f"({returns[0]})"
            )
        scale *= 1000.0 / np.ptp(returns)
    if scale == 1.0 and settings.reward_shift == 0.0:
        return rewards
    return (rewards * np.float64(scale) + settings.reward_shift).astype(np.float32)


def require_fit(dataset: OfflineDataset, spec: EnvSpec, where: str) -> None:
    """Raise a ValueError unless the dataset's observations and actions have the environment's shape, kind and bounds.

    Attributes that a custom dataset does not define (``obs_shape act_dim n_actions metadata``) are not checked.
    """
    known = getattr(dataset, "metadata", {})
    name = f"{where}: the dataset {one_line(known.get('source', ''), 200)}".rstrip()
    obs_shape, n_actions = getattr(dataset, "obs_shape", spec.obs_shape), getattr(dataset, "n_actions", None)
    if tuple(obs_shape) != spec.obs_shape:
        raise ValueError(
            f"{name} must have observations of shape {spec.obs_shape}, like the environment, got {obs_shape}"
        )
    if spec.discrete and hasattr(dataset, "n_actions"):
        if n_actions is None:
            _require_whole(dataset, spec.n_actions, name)
        elif n_actions > spec.n_actions:
            raise ValueError(
                f"{name} must hold actions below {spec.n_actions}, like the environment, got {n_actions - 1}"
            )
        elif getattr(dataset, "masked", False) and n_actions != spec.n_actions:
            raise ValueError(
                f"{name} must have masks of {spec.n_actions} actions, like the environment, got {n_actions}"
            )
    if spec.continuous:
        act_dim = getattr(dataset, "act_dim", spec.act_dim)
        if n_actions is not None or act_dim != spec.act_dim:
            got = f"{act_dim} floats" if n_actions is None else f"{n_actions} discrete actions"
            raise ValueError(f"{name} must have {spec.describe_actions()}, like the environment, got {got}")
        low, high = spec.act_low.ravel().tolist(), spec.act_high.ravel().tolist()
        if hasattr(dataset, "get_state") and (known.get("act_low") != low or known.get("act_high") != high):
            actions = dataset.get_state()["actions"]
            for start in range(0, len(actions), _ROWS):
                check_bounds(actions[start : start + _ROWS], low, high, name, start)


def _require_whole(dataset: Any, n_actions: int | None, name: str) -> None:
    """Raise ValueError, with the row, unless the dataset's floats (N, 1) are whole numbers below `n_actions`."""
    rule = f"{name} must hold integers in column actions, because the environment has {n_actions} discrete actions"
    if dataset.act_dim != 1:
        raise ValueError(f"{rule}, got {dataset.act_dim} floats in each row; save one integer for each")
    actions = dataset.get_state()["actions"]
    for start in range(0, len(actions), _ROWS):
        part = actions[start : start + _ROWS]
        wrong = ((part < 0) | (part >= n_actions) | (part != np.floor(part))).ravel()
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(f"{rule}, got {part.flat[row]} in row {start + row}; save them as integers")


def action_bounds(dataset: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the lower and upper bounds (A,) f32 of the dataset's continuous actions.

    They are those that its file names; else [-1, 1], or the smallest and the largest action of each component that
    leaves [-1, 1]. None if the dataset shows neither, since it only gives samples.
    """
    known = getattr(dataset, "metadata", {})
    low, high = (np.float32(known.get(name, ())).ravel() for name in ("act_low", "act_high"))
    if 0 < low.size == high.size == getattr(dataset, "act_dim", low.size) and np.isfinite([low, high]).all():
        return low, high
    if not hasattr(dataset, "get_state"):
        return None
    actions = dataset.get_state()["actions"]
    parts = [actions[start : start + _ROWS] for start in range(0, len(actions), _ROWS)]
    low, high = np.min([part.min(0) for part in parts], 0), np.max([part.max(0) for part in parts], 0)
    # A component that never changes has no width of its own.
    wide = (np.maximum(-low, high) > 1) & (low < high)
    size = np.maximum(1, np.abs(low))
    return np.where(wide, low, -size), np.where(wide, high, size)

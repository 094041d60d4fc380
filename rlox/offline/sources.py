"""Sources of datasets other than Arrow: Parquet, ``.npz``, HDF5 in D4RL's layout, Minari. All are read in blocks."""

from __future__ import annotations

import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlox.checkpoint import one_line
from rlox.config import nearest
from rlox.config.home import user_folder
from rlox.config.packages import import_package
from rlox.config.servers import unreachable_hub
from rlox.envs.masks import MASK, without_mask
from rlox.envs.spec import SpaceAdapter
from rlox.offline.arrow import (
    METADATA,
    block_rows,
    import_arrow,
    metadata_of,
    read_metadata,
    report_damage,
    table_blocks,
)
from rlox.offline.rows import Block, names_of

# (namespace/)*name-vN, Minari's form of dataset names.
MINARI_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v\d+")
NPZ_METADATA = "rlox_dataset"  # name of the array with the metadata's JSON


@dataclass
class Source:
    """Rows to read in blocks, and their metadata."""

    where: str  # name at the beginning of error messages
    blocks: Iterator[Block]
    metadata: dict[str, Any] = field(default_factory=dict)

    def limits(self) -> dict[str, Any]:
        """Return the limits that `rlox.offline.rows.Rows` checks rows against."""
        bounds = ("act_low", "act_high") if {"act_low", "act_high"} <= self.metadata.keys() else ()
        known = {name: self.metadata[name] for name in ("n_actions", *bounds) if name in self.metadata}
        return known | ({"n_agents": len(self.metadata["agents"])} if "agents" in self.metadata else {})


def parquet(path: Path, where: str) -> Source:
    """Read a Parquet file, row group by row group."""
    pa = import_arrow(where)
    import pyarrow.parquet as pq

    damage = (pa.ArrowException, OSError)
    with report_damage(f"{where}: {path} must be a Parquet file, but is not, or was cut short", *damage):
        file = pq.ParquetFile(pa.OSFile(os.fsencode(path)))
    metadata = metadata_of(file.schema_arrow, where)
    names = names_of(file.schema_arrow.names, where, metadata)

    def blocks() -> Iterator[Block]:
        with report_damage(f"{where}: its contents are damaged or cut short", *damage):
            batches = file.iter_batches(batch_size=16_384, columns=list(names.values()))
            yield from table_blocks(batches, names, where)

    return Source(where, blocks(), metadata)


class _Member:
    """An array in a zip file, read from start to end."""

    def __init__(self, archive: zipfile.ZipFile, name: str, where: str):
        self._file = archive.open(f"{name}.npy")
        try:
            version = np.lib.format.read_magic(self._file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, by_column, self.dtype = read(self._file)
        except ValueError as e:
            raise ValueError(f"{where}: array {name} is damaged: {one_line(e)}") from e
        if self.dtype.hasobject or not self.shape:
            kind = "Python objects (rows of different shapes?)" if self.dtype.hasobject else "a single number"
            raise ValueError(f"{where}: column {name} must hold numbers in rows of one shape, got {kind}")
        self._name, self._where = name, where
        self._rest: np.ndarray | None = None
        if by_column:  # blocks are ranges of rows, which are not contiguous in an array in Fortran order
            self._rest = self.take(self.shape[0]).ravel().reshape(self.shape, order="F")

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def take(self, n: int) -> np.ndarray:
        """Return the next `n` rows."""
        if self._rest is not None:
            rows, self._rest = self._rest[:n], self._rest[n:]
            return rows
        data = self._file.read(n * self.row_bytes)
        if len(data) < n * self.row_bytes:
            raise ValueError(f"{self._where}: column {self._name} must have {self.shape[0]} rows, but was cut short")
        return np.frombuffer(data, self.dtype).reshape(n, *self.shape[1:])


def npz(path: Path, where: str) -> Source:
    """Read arrays of `numpy.savez` or `numpy.savez_compressed`, by column name."""
    damage = (zipfile.BadZipFile, OSError)
    with report_damage(f"{where}: {path} must be an .npz file, but is not, or was cut short", *damage):
        archive = zipfile.ZipFile(path)
    arrays = [name.removesuffix(".npy") for name in archive.namelist()]
    metadata: dict[str, Any] = {}
    if NPZ_METADATA in arrays:
        with archive.open(f"{NPZ_METADATA}.npy") as file:
            metadata = read_metadata(str(np.lib.format.read_array(file)), where)
    names = names_of(arrays, where, metadata)

    def blocks() -> Iterator[Block]:
        what = f"{where}: its contents are damaged or cut short"
        with report_damage(what, *damage, EOFError, zlib.error), archive:
            members = {name: _Member(archive, theirs, where) for name, theirs in names.items()}
            n = members["rewards"].shape[0]
            sizes = {name: (member.shape, member.row_bytes) for name, member in members.items()}
            yield from _ranges(sizes, n, where, lambda name, start, stop: members[name].take(stop - start))

    return Source(where, blocks(), metadata)


def _ranges(sizes: dict[str, tuple[tuple[int, ...], int]], n: int, where: str, read: Any) -> Iterator[Block]:
    """Yield blocks of `n` rows in total, read column by column with ``read(name, start, stop)``."""
    for name, (shape, _) in sizes.items():
        if shape[:1] != (n,):
            raise ValueError(f"{where}: column {name} must have as many rows as rewards ({n}), got shape {shape}")
    rows = block_rows(sum(size for _, size in sizes.values()))
    for start in range(0, n, rows):
        yield {name: read(name, start, min(n, start + rows)) for name in sizes}


def hdf5(path: Path, where: str) -> Source:
    """Read an HDF5 file in D4RL's layout: one array per column, at the root."""
    h5py = import_package("h5py", "hdf5", where)
    with report_damage(f"{where}: {path} must be an HDF5 file, but is not, or was cut short", OSError):
        file = h5py.File(path, "r")
    metadata = read_metadata(file.attrs[METADATA], where) if METADATA in file.attrs else {}
    names = names_of([name for name, item in file.items() if isinstance(item, h5py.Dataset)], where, metadata)

    def blocks() -> Iterator[Block]:
        with file, report_damage(f"{where}: its contents are damaged or cut short", OSError):
            columns = {name: file[theirs] for name, theirs in names.items()}
            sizes = {
                name: (column.shape, math.prod(column.shape[1:]) * column.dtype.itemsize)
                for name, column in columns.items()
            }
            n = columns["rewards"].shape[0] if columns["rewards"].shape else 0
            yield from _ranges(sizes, n, where, lambda name, start, stop: columns[name][start:stop])

    return Source(where, blocks(), metadata)


def minari_dataset(name: str, where: str) -> Any:
    """Return a Minari dataset by its id; download it if it is not on this machine.

    Raises ImportError if minari is not installed, and ValueError if the dataset cannot be read or downloaded.
    """
    minari = import_package("minari", "minari", where)
    if not MINARI_ID.fullmatch(name):
        raise ValueError(f"{where}: a Minari id must be minari:(namespace/)name-vN")
    try:
        return minari.load_dataset(name)
    except FileNotFoundError:
        pass
    except Exception as e:  # other packages' code may raise anything on a damaged file
        raise ValueError(f"{where}: the local dataset cannot be read: {one_line(e)}") from e
    # Minari's own remote is on the Hugging Face Hub; it would retry for half a minute.
    reason = unreachable_hub() if os.environ.get("MINARI_REMOTE", "hf:").startswith("hf:") else None
    if reason is None:
        try:
            return minari.load_dataset(name, download=True)
        except Exception as e:  # any error of the network or the server
            reason = f"{type(e).__name__}: {one_line(e, 160)}"
    from minari.storage.datasets_root_dir import get_dataset_path

    local = sorted(minari.list_local_datasets())
    raise ValueError(
        f"{where}: it must be on this machine or on the server; {get_dataset_path(name)} does not exist, and it cannot "
        f"be downloaded ({reason}); {nearest(name, local) if local else 'no dataset is on this machine'}"
    )


def minari_files(dataset: Any) -> list[Path]:
    """Return the files of a Minari dataset."""
    root = Path(dataset.storage.data_path)
    return sorted(path for path in root.rglob("*") if path.is_file())


def minari(dataset: Any, where: str) -> Source:
    """Read the episodes of a Minari dataset, with Box or Discrete actions. Observations become what training on their
    space has (`SpaceAdapter`)."""
    from gymnasium import spaces

    obs_space, act_space = dataset.observation_space, dataset.action_space
    metadata: dict[str, Any] = {}
    first_action = 0
    if isinstance(act_space, spaces.Discrete):
        metadata["n_actions"], first_action = int(act_space.n), int(act_space.start)
    elif isinstance(act_space, spaces.Box):
        if np.isfinite(act_space.low).all() and np.isfinite(act_space.high).all():
            metadata["act_low"], metadata["act_high"] = act_space.low.ravel().tolist(), act_space.high.ravel().tolist()
    else:
        raise ValueError(f"{where}: its actions must be a Box or Discrete, got {type(act_space).__name__}")
    obs_space = without_mask(obs_space, act_space, where)
    adapter = SpaceAdapter(obs_space, act_space, where)
    if dataset.env_spec is not None:
        spec = dataset.env_spec
        metadata["env"] = {"id": spec.id, "kwargs": {k: v for k, v in spec.kwargs.items() if k != "render_mode"}}
    known = dataset.storage.metadata
    scores = (known.get("ref_min_score"), known.get("ref_max_score"))
    if all(isinstance(score, (int, float, np.number)) and math.isfinite(score) for score in scores):
        metadata["reference_returns"] = {"random": float(scores[0]), "expert": float(scores[1])}
    if known.get("algorithm_name"):
        metadata["policies"] = [{"name": one_line(known["algorithm_name"], 100)}]

    def blocks() -> Iterator[Block]:
        for episode in dataset.iterate_episodes():
            n = len(episode.rewards)
            if n == 0:
                continue
            seen = _observations(adapter, obs_space, episode.observations, where)
            if len(seen) != n + 1:
                raise ValueError(
                    f"{where}: episode {episode.id} must have {n + 1} observations, one more than rewards, got "
                    f"{len(seen)}"
                )
            truncated = np.array(episode.truncations)
            if not (episode.terminations[-1] or truncated[-1]):
                truncated[-1] = True  # the recording was cut
            actions = np.asarray(episode.actions)
            masks = _masks(episode, n, where) if "n_actions" in metadata else {}
            yield {
                **masks,
                "obs": seen[:-1],
                "next_obs": seen[1:],
                "actions": actions - first_action if first_action else actions.reshape(n, -1),
                "rewards": np.asarray(episode.rewards),
                "terminated": np.asarray(episode.terminations),
                "truncated": truncated,
            }

    return Source(where, blocks(), metadata)


def _masks(episode: Any, n: int, where: str) -> Block:
    """Return the masks of an episode with `n` steps, of all observations or of all but the last: those in its infos, or
    in its observations, as of environments (`rlox.envs.masks`)."""
    given = [part for part in (episode.infos, episode.observations) if isinstance(part, dict) and MASK in part]
    if not given:
        return {}
    masks = np.asarray(given[0][MASK])
    if len(masks) not in (n, n + 1):
        raise ValueError(
            f"{where}: episode {episode.id} must have an {MASK} for each of its {n + 1} observations, got {len(masks)}"
        )
    return {"action_masks": masks[:n]} | ({"next_action_masks": masks[1:]} if len(masks) > n else {})


def _observations(adapter: SpaceAdapter, space: Any, recorded: Any, where: str) -> np.ndarray:
    """Return the observations of an episode, (T, …), as training on their `space` has them."""
    from gymnasium import spaces
    from gymnasium.vector.utils import batch_space, iterate

    if isinstance(space, spaces.Dict):
        recorded = {key: recorded[key] for key in space.spaces}  # without masks of legal actions
    if adapter.vectors:
        return np.asarray(recorded)
    first = recorded
    while isinstance(first, (dict, tuple)):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    items = recorded if isinstance(space, spaces.Box) else iterate(batch_space(space, len(first)), recorded)
    return np.concatenate([adapter.read(item, where)[0] for item in items])


READERS = {".parquet": parquet, ".npz": npz, ".h5": hdf5, ".hdf5": hdf5}
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")


def fingerprint(paths: list[Path]) -> str:
    """Return names, sizes and modification times, which identify the source of a converted copy."""
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def cache_folder() -> Path:
    """Return the folder of converted copies: ``rlox/datasets`` in $XDG_CACHE_HOME, else in ~/.cache."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "rlox" / "datasets"

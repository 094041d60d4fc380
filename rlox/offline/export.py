"""Export of datasets to other formats: ``.npz``, HDF5 in D4RL's layout, Parquet, Minari."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlox.config.packages import import_package
from rlox.kernels.buffers.offline import OfflineDatasetBuffer
from rlox.offline.arrow import METADATA, block_rows, import_arrow, metadata_text
from rlox.offline.returns import episode_starts
from rlox.offline.rows import AGENT, COLUMNS, MASKS, Block
from rlox.offline.sources import ARROW_SUFFIXES, MINARI_ID, NPZ_METADATA

_D4RL_NAMES = ("observations", "next_observations", "actions", "rewards", "terminals", "timeouts")
# Metadata that is computed again when the file is read.
_OWN = ("source", "file", "format", "n_rows", "obs_mean", "obs_std", "n_dropped", "episode_agents")
SUFFIXES = (*ARROW_SUFFIXES, ".npz", ".h5", ".hdf5", ".parquet")


def check_destination(dest: str, force: bool = False) -> None:
    """Raise unless a dataset may be written to `dest`.

    Raises ValueError for an ending of no known format, an invalid Minari id, or a destination that already exists,
    unless `force`, and ImportError if the format's package is missing.
    """
    where = f"--out {dest}"
    if dest.startswith("minari:"):
        name = dest.removeprefix("minari:")
        if not MINARI_ID.fullmatch(name):
            raise ValueError(f"{where}: a Minari id must be minari:(namespace/)name-vN")
        if name in import_package("minari", "minari", where).list_local_datasets():
            raise ValueError(f"{where}: the dataset must be new; `minari delete {name}` removes the old one")
        return
    path = Path(dest)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{where}: its name must end in one of {', '.join(SUFFIXES)}, or be minari:ID")
    if path.is_dir():
        raise ValueError(f"{where}: it must be a file, but there is a folder of this name")
    if path.exists() and not force:
        raise ValueError(f"{where}: this file already exists; --force replaces it")
    if path.suffix in (".h5", ".hdf5"):
        import_package("h5py", "hdf5", where)  # before anything is collected


def export(dataset: OfflineDatasetBuffer, dest: str) -> None:
    """Write a dataset in the format given by `dest`; a file appears complete or not at all.

    Minari cannot store the column ``agent``.
    """
    state = dataset.get_state()
    columns = {name: state[name] for name in (*COLUMNS, *MASKS) if name in state}
    if dataset.n_actions is not None:
        columns["actions"] = columns["actions"][:, 0]
    known = {name: value for name, value in dataset.metadata.items() if name not in _OWN}
    if dest.startswith("minari:"):
        _to_minari(columns, dataset.n_actions, known, dest.removeprefix("minari:"))
        return
    if "episode_agents" in dataset.metadata:
        columns[AGENT] = _agents(columns, dataset.metadata)
    path = Path(dest)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial{path.suffix}")
    write = {".npz": _to_npz, ".parquet": _to_parquet}.get(path.suffix, _to_hdf5)
    try:
        write(columns, dataset.n_actions is not None, metadata_text(known), partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _agents(columns: Block, metadata: dict[str, Any]) -> np.ndarray:
    """Return the column ``agent``, (N,) int32, of a dataset that knows each episode's agent."""
    place = {name: i for i, name in enumerate(metadata["agents"])}
    starts = episode_starts(columns["terminated"], columns["truncated"])
    lengths = np.diff([*starts, len(columns["rewards"])])
    return np.repeat(np.array([place[name] for name in metadata["episode_agents"]], np.int32), lengths)


def _blocks(columns: Block, integers: bool) -> Iterator[Block]:
    n = len(columns["rewards"])
    rows = block_rows(sum(column.nbytes for column in columns.values()) // n)
    for start in range(0, n, rows):
        block = {name: column[start : start + rows] for name, column in columns.items()}
        if integers:
            block["actions"] = block["actions"].astype(np.int64)
        yield block


def _to_npz(columns: Block, integers: bool, text: str, path: Path) -> None:
    arrays: dict[str, Any] = {**columns, NPZ_METADATA: np.array(text)}
    if integers:
        arrays["actions"] = columns["actions"].astype(np.int64)
    np.savez(path, **arrays)


def _to_hdf5(columns: Block, integers: bool, text: str, path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs[METADATA] = text
        arrays, at = {}, 0
        theirs_of = dict(zip(COLUMNS, _D4RL_NAMES, strict=True))
        for name in columns:
            flag = name in ("terminated", "truncated", *MASKS)
            dtype = np.bool_ if flag else np.int64 if name == "actions" and integers else columns[name].dtype
            arrays[name] = file.create_dataset(theirs_of.get(name, name), columns[name].shape, dtype)
        for block in _blocks(columns, integers):
            n = len(block["rewards"])
            for name, column in block.items():
                arrays[name][at : at + n] = column
            at += n


def _to_parquet(columns: Block, integers: bool, text: str, path: Path) -> None:
    pa = import_arrow(f"--out {path}")
    import pyarrow.parquet as pq

    writer = None
    with pa.OSFile(os.fsencode(path), "wb") as file:
        for block in _blocks(columns, integers):
            arrays = {
                name: pa.array(column)
                if column.ndim == 1
                else pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), math.prod(column.shape[1:]))
                for name, column in block.items()
            }
            table = pa.table(arrays, metadata={METADATA: text})
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()


def _to_minari(columns: Block, n_actions: int | None, known: dict[str, Any], name: str) -> None:
    import gymnasium
    import minari
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    obs, next_obs, flags = columns["obs"], columns["next_obs"], columns["terminated"] | columns["truncated"]
    ends = np.flatnonzero(flags) + 1
    if not len(ends) or ends[-1] != len(flags):
        ends = np.append(ends, len(flags))
    pixels = obs.dtype == np.uint8
    low, high = (0, 255) if pixels else (-np.inf, np.inf)
    if n_actions is None:
        width = columns["actions"].shape[1]
        limits = {"act_low": -np.inf, "act_high": np.inf}
        bounds = [np.asarray(known.get(key, [value] * width), np.float32) for key, value in limits.items()]
        act_space: spaces.Space = spaces.Box(*bounds, dtype=np.float32)
    else:
        act_space = spaces.Discrete(n_actions)

    def episodes() -> Iterator[EpisodeBuffer]:
        for start, stop in pairwise([0, *ends.tolist()]):
            part = slice(start, stop)
            actions = columns["actions"][part]
            # As gymnasium has them, in the infos of a reset and of each step.
            last = slice(stop - 1, stop)
            masks = [
                columns[name][at].astype(bool) for name, at in zip(MASKS, (part, last), strict=True) if name in columns
            ]
            yield EpisodeBuffer(
                infos={"action_mask": np.concatenate(masks)} if masks else None,
                observations=np.concatenate([obs[part], next_obs[stop - 1 : stop]]),
                actions=actions if n_actions is None else actions.astype(np.int64),
                rewards=columns["rewards"][part],
                terminations=columns["terminated"][part].astype(bool),
                truncations=columns["truncated"][part].astype(bool),
            )

    env = known.get("env", {})
    spec = None
    if env and not env["kwargs"] and not env["wrappers"]:
        with suppress(gymnasium.error.Error):  # environments unknown to gymnasium
            spec = gymnasium.spec(env["id"])
    policies = ", ".join(policy["name"] for policy in known.get("policies", ())) or None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the author, permalink and other fields that only a publisher can fill
        created = minari.create_dataset_from_buffers(
            name,
            episodes(),
            env=spec,
            observation_space=spaces.Box(low, high, obs.shape[1:], obs.dtype.type),
            action_space=act_space,
            algorithm_name=policies,
            description=f"rlox collect: {metadata_text(known)}",
            jpeg_encoding=False,
        )
        if "reference_returns" in known:
            scores = known["reference_returns"]
            created.storage.update_metadata({"ref_min_score": scores["random"], "ref_max_score": scores["expert"]})

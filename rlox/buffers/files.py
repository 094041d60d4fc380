"""The replay memory next to a checkpoint, in files to which each save adds the new transitions.

A save writes the transitions since the previous save into a new file of ``memory/``. It returns the entry for the
checkpoint: the names of all files that it needs, and the small parts that change as a whole (priorities). Files that
the checkpoint does not name are only removed once it is in place. A process can therefore be killed at any moment, and
the checkpoint on disk still finds its files. Files whose transitions have all been overwritten are dropped, and small
files are joined.

In a memory of sequences, the states of stored steps change too. Changed states are written into separate files, which
are replaced by one file of all states once they are larger than that file would be.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from rlox.buffers.protocols import Buffer
from rlox.checkpoint import Checkpoint, is_count, load_checkpoint, one_line, run_files, save_checkpoint
from rlox.kernels.buffers.mmap import MmapReplayBuffer
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.buffers.sequence import SequenceReplayBuffer

_BIG = ("rows", "frames")
# The newest files are joined as soon as there are this many of a size class, unless that would take more memory than
# this. A file of class k contains the rows of about 8**k saves.
_JOINED = 8
_JOINED_BYTES = 128 * 2**20


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Split a state into values for a header, and arrays."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    return {name: value for name, value in state.items() if name not in arrays}, arrays


def _keeps_rows(buffer: Any) -> TypeGuard[ReplayBuffer]:
    """Return whether a memory can give the rows since an earlier state: rlox's own, on the host or on a device."""
    return isinstance(buffer, ReplayBuffer) or getattr(buffer, "saves_news", False)


@dataclass(frozen=True)
class MemorySnapshot:
    """A copy of the parts of a memory that must be written, taken at one moment."""

    # Writes the files; returns the header's entry and the tensors, from which `load` restores the memory.
    write: Callable[[], tuple[dict[str, Any], dict[str, np.ndarray]]]
    remove_unneeded: Callable[[], None]  # removes files that the checkpoint does not need; called once it is in place


class ReplayFiles:
    """The files that one training writes next to its checkpoints, into a `folder` that is created when first needed.

    To continue with the files of another process, `entry` is what its `MemorySnapshot` wrote, and `buffer` the memory
    that `load` restored from it.
    """

    _files: list[dict[str, Any]]  # oldest first, including those of a save that is being written
    _mark: int | None

    def __init__(self, folder: str | os.PathLike, entry: dict[str, Any] | None = None, buffer: Buffer | None = None):
        self.folder = Path(folder)
        self._run = secrets.token_hex(4)
        self._lock = threading.Lock()  # guards the disk: a checkpoint may be requested while another is written
        self._start_over()
        if entry is None or not entry["files"] or buffer is None or not len(buffer):
            return
        if isinstance(buffer, SequenceReplayBuffer):
            self._files, self._mark = list(entry["files"]), buffer.mark
        elif _keeps_rows(buffer) and all("joined" in file for file in entry["files"]):
            # Only the newest row, and no frames.
            saved = entry["values"]
            values, arrays = _split(buffer.get_state(saved["count"] - 1, saved.get("next_frame", 0)))
            self._files = list(entry["files"])
            self._upto = (values["count"], values.get("next_frame", 0))
            self._newest = arrays["rows"][-1].tobytes()

    def _start_over(self) -> None:
        self._files = []
        self._upto = (0, 0)  # transitions and frames in the files
        self._newest = b""  # last row in the files, to notice if the memory was replaced
        self._mark = None  # for a memory of sequences: marks what the files contain

    def take(self, buffer: Buffer) -> MemorySnapshot:
        """Copy the new rows, so that another thread can write them while the memory continues to change."""
        if isinstance(buffer, MmapReplayBuffer):
            # Its file keeps the transitions that the two newest states name.
            values, arrays = _split(buffer.get_state(include_cold=False))
            return self._snapshot_of([], values, arrays, {})
        if isinstance(buffer, SequenceReplayBuffer):
            return self._take_sequences(buffer)
        if not _keeps_rows(buffer):
            values, arrays = _split(buffer.get_state())
            self._files = []
            file = self._make_entry(secrets.token_hex(4))
            return self._snapshot_of([file], values, {}, {file["name"]: arrays})
        count, frame = self._upto
        # One row more than the new ones, to notice if the memory was cleared or replaced.
        values, arrays = _split(buffer.get_state(max(0, count - 1), frame))
        rows, now = arrays["rows"], (values["count"], values.get("next_frame", 0))
        if count and len(rows) == now[0] - count + 1 and rows[0].tobytes() == self._newest:
            arrays["rows"] = rows[1:]
        else:
            self._start_over()
            count = 0
            values, arrays = _split(buffer.get_state(0, 0))
        news = {name: arrays.pop(name) for name in _BIG if name in arrays}
        gone = (now[0] - buffer.capacity, now[1] - getattr(buffer, "frame_slots", 0))
        files = [file for file in self._files if file["count"] > gone[0] or file["next_frame"] > gone[1]]
        grown = len(news["rows"]) > 0
        if grown:
            size = sum(x.nbytes for x in news.values())
            entry = {**self._make_entry(f"{count:012d}-{now[0]:012d}"), "count": now[0], "next_frame": now[1]}
            files.append({**entry, "bytes": size, "joined": 0})
            self._newest = news["rows"][-1].tobytes()
        self._upto = now
        if len(buffer) < min(now[0], buffer.capacity):  # its frames had no room for the oldest transitions
            values["n_stored"] = len(buffer)
        return self._snapshot_of(files, values, arrays, {files[-1]["name"]: news} if grown else {})

    def _take_sequences(self, buffer: SequenceReplayBuffer) -> MemorySnapshot:
        before = [file for file in self._files if "states" in file]
        row = 8 + 4 * buffer.state_dim  # bytes of a state and its place
        all_states = sum(file["bytes"] for file in before) > row * len(buffer)
        changes = buffer.get_news(self._mark, all_states)
        values, arrays = _split(changes["values"])
        self._mark = changes["mark"]
        kept = [] if changes["whole"] else self._files
        oldest, now = arrays["pushed"] - arrays["sizes"], int(arrays["pushed"].sum())
        rows = [file for file in kept if "states" not in file and (np.asarray(file["ended"]) > oldest).any()]
        states = [] if all_states else [file for file in kept if "states" in file]
        news: dict[str, dict[str, np.ndarray]] = {}
        if len(changes["rows"]["places"]):
            file = {**self._make_entry(f"{now:012d}-{secrets.token_hex(4)}"), "ended": arrays["pushed"].tolist()}
            news[file["name"]] = changes["rows"]
            size = sum(x.nbytes for x in changes["rows"].values())
            rows.append({**file, "count": now, "bytes": size, "joined": 0})
        if len(changes["states"]["places"]):
            file = {**self._make_entry(f"states-{secrets.token_hex(4)}"), "states": True}
            news[file["name"]] = changes["states"]
            states.append({**file, "bytes": sum(x.nbytes for x in changes["states"].values())})
        return self._snapshot_of([*rows, *states], values, arrays, news)

    def _make_entry(self, stem: str) -> dict[str, Any]:
        return {"name": f"{stem}-{self._run}.safetensors"}

    def _snapshot_of(
        self,
        files: list[dict[str, Any]],
        values: dict[str, Any],
        arrays: dict[str, np.ndarray],
        news: dict[str, dict[str, np.ndarray]],
    ) -> MemorySnapshot:
        """Return a `MemorySnapshot` whose memory is in `files`; `news` are the contents of the new files, by name."""
        self._files = files
        named: list[dict[str, Any]] = []

        def write() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
            with self._lock:
                try:
                    for name, piece in news.items():
                        self._write(name, piece)
                    if lost := [file["name"] for file in files if not _is_file(self.folder / file["name"])]:
                        raise FileNotFoundError(
                            2,
                            f"replay memory: {self.folder / lost[0]} must exist; the next save writes all files again",
                        )
                    named[:] = self._join_newest([file for file in files if "states" not in file])
                    named.extend(file for file in files if "states" in file)
                    if self._files is files:
                        self._files = named
                except BaseException:
                    self._start_over()
                    raise
            return {"values": values, "files": named}, arrays

        def remove_unneeded() -> None:
            with self._lock:
                needed = {file["name"] for file in (*named, *self._files)}
                run_files.check(*run_files.locate(self.folder / "x"))  # nothing is removed through a link
                for path in self.folder.glob("*.safetensors"):
                    if path.name not in needed:
                        path.unlink(missing_ok=True)

        return MemorySnapshot(write, remove_unneeded)

    def _write(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        save_checkpoint(self.folder / name, Checkpoint({"file": name}, {"memory": arrays}))

    def _join_newest(self, files: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Join the newest of `files` if there are enough of a size class, and return the resulting list."""
        while len(last := files[-_JOINED:]) == _JOINED and len({file.get("joined") for file in last}) == 1:
            size = sum(file["bytes"] for file in last)
            if size > _JOINED_BYTES:
                break
            pieces = [load_checkpoint(self.folder / file["name"], ("file",)).tensors["memory"] for file in last]
            first, newest = last[0]["name"].split("-")[0], last[-1]
            entry = {**newest, **self._make_entry(f"{first}-{newest['count']:012d}-joined")}
            self._write(entry["name"], {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]})
            files = [*files[:-_JOINED], {**entry, "bytes": size, "joined": newest["joined"] + 1}]
        return files


def _require_entry(entry: Any) -> None:
    """Raise a ValueError unless a header's entry is as `MemorySnapshot` writes it: names, counts, short strings."""

    def is_text(value: Any) -> bool:
        return isinstance(value, str) and len(value) < 65_536 and "\0" not in value

    good = (
        isinstance(entry, dict)
        and isinstance(entry.get("values"), dict)
        and all(is_text(x) for x in entry["values"].values() if isinstance(x, str))
        and is_text(entry["values"].get("cold_path", ""))
        and is_count(entry["values"].get("next_frame", 0))
        and is_count(entry["values"].get("n_stored", 0))
        and is_count(entry.get("start", 0))
        and isinstance(entry.get("files"), list)
        and all(isinstance(file, dict) and is_text(file.get("name")) for file in entry["files"])
        and all(is_count(file.get("next_frame", 0)) for file in entry["files"])
        # Otherwise an entry could name one file many times, which would take much memory to load.
        and len({os.path.basename(file["name"]) for file in entry["files"]}) == len(entry["files"])
    )
    if not good:
        raise ValueError(
            f"replay memory: its entry in the header must be unchanged since the save, got {one_line(entry, 80)}"
        )


def list_missing_files(folder: Path, entry: dict[str, Any], own: str | os.PathLike | None = None) -> list[str]:
    """Return the missing files of a header entry; `own` is the folder in an `MmapReplayBuffer`'s configuration."""
    _require_entry(entry)
    paths = [folder / os.path.basename(file["name"]) for file in entry["files"]]
    if "cold_path" in entry["values"]:
        paths.append(_cold_path(folder, entry["values"]["cold_path"], own))
    return [str(path) for path in paths if not _is_file(path)]


def _is_file(path: Path) -> bool:
    return run_files.is_file(*run_files.locate(path))


def _cold_path(folder: Path, saved: str, own: str | os.PathLike | None) -> Path:
    """Return the file of an `MmapReplayBuffer`: in the run folder, which may have been moved, or in its folder `own`.

    Only the name of the saved path is used, because the path is read from a file and the memory writes to it.
    """
    name = os.path.basename(saved)
    in_run = folder.parent.parent / name
    return in_run if own is None or run_files.is_file(in_run.parent, name) else Path(own) / name


def _pieces(folder: Path, entry: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """Read the files of an entry."""
    pieces = []
    for file in entry["files"]:
        # The name is read from a file: it must not lead to another folder.
        name = os.path.basename(file["name"])
        piece = load_checkpoint(folder / name, ("file",))
        if piece.header["file"] != name:
            raise ValueError(
                f"replay memory: {folder / name} must have been written under this name, got {piece.header['file']}"
            )
        pieces.append(piece.tensors.get("memory", {}))
    return pieces


def _require_pieces(entry: dict[str, Any], pieces: list[dict[str, np.ndarray]], own: dict[str, Any]) -> None:
    """Raise a ValueError unless every piece has rows (and frames) of bytes, each as long as those of `own`."""
    for file, piece in zip(entry["files"], pieces, strict=True):
        for name in _BIG:
            rows = piece.get(name)
            if name in own and (rows is None or rows.dtype != np.uint8 or rows.shape[1:] != own[name].shape[1:]):
                got = "nothing" if rows is None else f"{rows.dtype} {rows.shape}"
                raise ValueError(
                    f"replay memory: {name} of {file['name']} must be uint8 (N, {own[name].shape[1]}), got {got}"
                )


def load(buffer: Buffer, folder: Path, entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Restore `buffer` to the state that `ReplayFiles.take` copied; it stays unchanged if the files do not fit it."""
    _require_entry(entry)
    values, pieces = entry["values"], _pieces(folder, entry)
    if "cold_path" in values:
        own = Path(buffer.cold_path).parent if isinstance(buffer, MmapReplayBuffer) else None
        values = {**values, "cold_path": str(_cold_path(folder, values["cold_path"], own))}
    try:
        _set(buffer, entry, values, arrays, pieces)
    except (LookupError, MemoryError, OverflowError, TypeError) as e:
        raise ValueError(f"replay memory: the files in {folder} do not fit it: {one_line(e)}") from e


def _set(
    buffer: Buffer,
    entry: dict[str, Any],
    values: dict[str, Any],
    arrays: dict[str, np.ndarray],
    pieces: list[dict[str, np.ndarray]],
) -> None:
    if isinstance(buffer, SequenceReplayBuffer):
        _set_sequences(buffer, values, arrays, pieces)
        return
    if not _keeps_rows(buffer):
        buffer.set_state({**values, **arrays, **(pieces[0] if pieces else {})})
        return
    own = buffer.get_state()
    # An empty memory does not know the length of its rows yet.
    _require_pieces(
        entry, pieces, {name: own[name] for name in _BIG if name in own and (name != "rows" or len(buffer))}
    )
    rows = np.concatenate([piece["rows"] for piece in pieces]) if pieces else own["rows"][:0]
    # Files still contain transitions that the memory had dropped. rlox 0.12.0 did not save how many it kept.
    n = min(values.get("n_stored", len(arrays.get("leaves", rows))), buffer.capacity)
    values = {name: value for name, value in values.items() if name != "n_stored"}
    arrays = {**arrays, "rows": rows[max(0, len(rows) - n) :]}
    if "next_frame" in values:
        slots, end = buffer.frame_slots, values["next_frame"]
        frames = np.zeros((min(end, slots), *own["frames"].shape[1:]), np.uint8)
        for file, piece in zip(entry["files"], pieces, strict=True):
            numbers = np.arange(file["next_frame"] - len(piece["frames"]), file["next_frame"])
            kept = (numbers >= end - slots) & (numbers < end)
            frames[numbers[kept] % slots] = piece["frames"][kept]
        arrays["frames"] = frames
    buffer.set_state({**values, **arrays})


def _set_sequences(
    buffer: SequenceReplayBuffer,
    values: dict[str, Any],
    arrays: dict[str, np.ndarray],
    pieces: list[dict[str, np.ndarray]],
) -> None:
    """Set a memory of sequences. If several pieces contain a step, the last piece in the list counts."""
    n = buffer.n_envs
    sizes, pushed = (np.asarray(arrays[name]) for name in ("sizes", "pushed"))
    if (
        any(array.shape != (n,) or array.dtype != np.int64 for array in (sizes, pushed))
        or ((sizes < 0) | (sizes > np.minimum(buffer.capacity // n, pushed))).any()
    ):
        raise ValueError(f"replay memory: sizes and pushed must fit {n} environments of {buffer.capacity // n} steps")
    own = {name: x for name, x in buffer.get_state().items() if isinstance(x, np.ndarray)}
    columns: dict[str, np.ndarray] = {}
    stored = np.arange(sizes.max(initial=0)) < sizes[:, None]  # (N, L)
    filled = {name: ~stored for name in (("obs", "state") if buffer.state_dim else ("obs",))}
    for piece in pieces:
        places = piece["places"]
        if places.ndim != 1 or places.dtype != np.int64 or (len(places) and places.min() < 0):
            raise ValueError(f"replay memory: places must be (M,) int64 and at least 0, got {places.dtype}")
        env = places % n
        at = places // n - (pushed - sizes)[env]
        kept = (at >= 0) & (at < sizes[env])
        for name, column in piece.items():
            if name == "places":
                continue
            like = own.get("obs" if name == "next_obs" else name)
            if like is None or column.dtype != like.dtype or column.shape != (len(places), *like.shape[2:]):
                raise ValueError(
                    f"replay memory: the files must contain rows of this memory, got {one_line(name, 40)} of shape "
                    f"{column.shape} for {len(places)} places"
                )
            if name not in columns:
                columns[name] = np.zeros((*stored.shape, *column.shape[1:]), column.dtype)
            columns[name][env[kept], at[kept]] = column[kept]
            if name in filled:
                filled[name][env[kept], at[kept]] = True
    if not all(steps.all() for steps in filled.values()):
        raise ValueError("replay memory: its files must contain every step, but some are missing")
    if not pieces:
        columns = {name: array[:, :0] for name, array in own.items() if array.ndim > 1}
    buffer.set_state({**columns, **values, **arrays})

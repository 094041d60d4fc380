"""The replay memory of an algorithm: chosen at construction, created on first use, stored next to checkpoints."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.buffers import Buffer, buffer_class, buffer_config, buffer_config_class, buffer_names, make_buffer
from rlox.buffers import files as replay_files
from rlox.checkpoint import Checkpoint, load_checkpoint, one_line, save_checkpoint
from rlox.config import BufferConfig, MmapBufferConfig, integer, require
from rlox.distributed.ranks import Ranks, memory_folder
from rlox.envs import EnvSpec, env_name

if TYPE_CHECKING:
    from rlox.collectors import ReplayCollector


class ReplayMemory:
    """A memory for what an algorithm `holds`: ``transitions`` or ``sequences``.

    Parameters
    ----------
    where : str
        The algorithm's class, for messages.
    holds, usual : str
        Contents of the memory, and its default kind.
    buffer, buffer_size, n_step, prioritized
        As for `rlox.training.off_policy.OffPolicyAlgorithm`.

    Attributes
    ----------
    config : BufferConfig or None
        None if the memory itself was passed.
    start : int
        Environment steps that had been taken when the memory was empty.

    Raises
    ------
    TypeError, ValueError
        For an unknown or unsuitable buffer.
    """

    def __init__(
        self,
        where: str,
        holds: str,
        usual: str,
        buffer: str | BufferConfig | Mapping[str, Any] | Buffer | None,
        buffer_size: int | None,
        n_step: int | None,
        prioritized: bool | None,
    ):
        if buffer_size is not None:
            buffer_size = integer(where, "buffer_size", buffer_size, 1)
        if n_step is not None:
            n_step = integer(where, "n_step", n_step, 1)
        if prioritized is not None:
            require(where, "prioritized", prioritized, bool)
        self._where = where
        self._is_default = buffer is None
        self._lost_kind: str | None = None  # a checkpoint's kind of buffer that is unknown in this process
        self._folder: tempfile.TemporaryDirectory | None = None
        self._files: replay_files.ReplayFiles | None = None
        self._saved: Checkpoint | None = None  # the source from which the memory is loaded on first use
        self._goes_on = False  # whether the environments are where that memory's newest transitions led to
        self._buffer: Buffer | None = None
        self.config: BufferConfig | None = None
        self.start = 0
        if isinstance(buffer, Buffer):
            self._buffer = buffer
            if not (buffer_size is n_step is prioritized is None):
                raise ValueError(
                    f"{where}: buffer_size, n_step and prioritized must not be given together with a buffer object"
                )
            return
        self.config = buffer_config(buffer, prioritized, usual, size=buffer_size, n_step=n_step)
        if self.config.holds != holds:
            able = [name for name in buffer_names() if buffer_config_class(name).holds == holds]
            raise ValueError(f"{where}: buffer must hold {holds}, got {self.config.name!r}; try {', '.join(able)}")

    def connect(
        self, ranks: Ranks, collector: ReplayCollector, spec: EnvSpec, gamma: float, state_dim: Callable[[], int]
    ) -> None:
        """Remember what the memory is created for; the last argument returns the size of the agent's own state."""
        if ranks.joined and isinstance(self.config, MmapBufferConfig):
            raise ValueError(f"{self._where}: buffer must be uniform or prioritized with distributed=ddp, got mmap")
        if self.config is not None:
            collector.n_step = self.config.n_step
        self._ranks, self._collector, self._spec = ranks, collector, spec
        self._gamma, self._state_dim = gamma, state_dim

    @property
    def given(self) -> Any:
        """The memory, if it exists already; else None."""
        return self._buffer

    @property
    def kind(self) -> type:
        """The class of the memory."""
        return type(self._buffer) if self.config is None else buffer_class(self.config.name)

    @property
    def size(self) -> int:
        """Rows for which it has room."""
        memory: Any = self._buffer
        config: Any = self.config
        return config.size if memory is None else memory.capacity

    def choose_folder(self, folder: Path) -> None:
        """Keep a memory of files in `folder`, unless its configuration names one."""
        if isinstance(self.config, MmapBufferConfig) and self.config.folder is None:
            self.config = replace(self.config, folder=str(folder.absolute()))

    @property
    def buffer(self) -> Buffer:
        """The memory, created on first access, because an evaluation does not need it.

        Raises
        ------
        ValueError
            If the checkpoint was trained with a kind of memory that is unknown here.
        """
        if self._lost_kind is not None:
            raise ValueError(
                f"{self._where}: the checkpoint was trained with the buffer {self._lost_kind}, which is not "
                "registered here; import the package that registers it, or pass from_checkpoint(buffer=...)"
            )
        if self._buffer is None:
            self._buffer = self._create()
        if self._saved is not None:
            saved, self._saved = self._saved, None
            folder, entry = self._folder_of(saved.folder), saved.header["memory"]
            replay_files.load(self._buffer, folder, entry, saved.tensors.get("memory", {}))
            self._files = replay_files.ReplayFiles(folder, entry, self._buffer)
            if self._goes_on:
                self._collector.remember_buffer(self._buffer)
        return self._buffer

    def _create(self) -> Buffer:
        config: Any = self.config
        if self._ranks.size > 1:
            config = replace(config, size=-(-config.size // self._ranks.size))
        if isinstance(config, MmapBufferConfig) and config.folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rlox-replay-")
            config = replace(config, folder=self._folder.name)
        elif isinstance(config, MmapBufferConfig):
            os.makedirs(config.folder, exist_ok=True)  # the memory would take a path that is new as its file's
        try:
            return make_buffer(config, self._spec, self._collector.n_envs, self._gamma, self._state_dim())
        except MemoryError as e:
            raise ValueError(f"{self._where}: buffer_size must fit in memory, got {config.size:,}: {e}") from e

    # ---- checkpoints

    def describe(self) -> dict[str, Any]:
        """Return the memory's configuration for a checkpoint's header."""
        config = self.config
        if config is None:
            return {"name": type(self._buffer).__name__}
        # The folder is only valid on this machine; the user who restores the run chooses another.
        folder = {"folder": None} if isinstance(config, MmapBufferConfig) else {}
        return {**config.to_dict(), **folder}

    def restore(self, checkpoint: Checkpoint, n_steps: int, exact: bool) -> None:
        """Load the memory of a checkpoint, taken after `n_steps`, when it is first used; warn if it starts empty.

        `exact` says whether the environments continue where its newest transitions led to.
        """
        self.start = n_steps
        if self._is_default:
            self._lost_kind = checkpoint.header["buffer"]["name"]
        entry = checkpoint.header.get("memory")
        if entry is None or self._buffer is not None:
            return
        saved = checkpoint.header["buffer"]
        why = None
        if not self._is_same(saved):
            own = self.describe()
            differs = ", ".join(f"{k}={own.get(k)} not {v}" for k, v in saved.items() if own.get(k) != v)
            why = f"its configuration differs from the saved one ({differs})"
        elif lost := replay_files.list_missing_files(
            self._folder_of(checkpoint.folder), entry, getattr(self.config, "folder", None)
        ):
            why = f"there is no {lost[0]}"
        if why is not None:
            warnings.warn(
                f"from_checkpoint: the replay memory starts empty, because {why}", RuntimeWarning, stacklevel=6
            )
            return
        self._saved, self.start, self._goes_on = checkpoint, entry["start"], exact

    def _is_same(self, saved: dict[str, Any]) -> bool:
        """Return whether a header's memory has the same contents as this one; settings that it lacks (written by
        rlox 0.6.0) count as equal."""
        own = self.config
        if own is None or saved.get("name") != own.name:
            return self.describe() == saved
        here = {"folder": own.folder} if isinstance(own, MmapBufferConfig) else {}
        theirs = buffer_config({**own.to_dict(), **saved, **here})
        return (theirs.n_step, theirs.arguments()) == (own.n_step, own.arguments())

    def _folder_of(self, folder: Path | None) -> Path:
        """Return the folder of the memory's files for a checkpoint in `folder`."""
        return memory_folder(Path(folder or "."), self._ranks.rank)

    def take(self, folder: Path) -> tuple[Callable[[], tuple[dict[str, Any], dict[str, np.ndarray]]], Any]:
        """Copy the new part of the memory. Returns a function that writes it for a checkpoint in `folder`, and one
        that removes unneeded files."""
        mine, start, buffer = self._folder_of(folder), self.start, self.buffer
        if self._files is None or self._files.folder != mine:
            self._files = replay_files.ReplayFiles(mine)
        taken = self._files.take(buffer)

        def write() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
            entry, arrays = taken.write()
            return {**entry, "start": start}, arrays

        return write, taken.remove_unneeded

    # ---- a file of its own

    def save(self, path: str | os.PathLike, env_id: Any) -> None:
        """Write the whole memory to a file; see `OffPolicyAlgorithm.save_buffer`."""
        state = self.buffer.get_state()
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        header = {
            "memory": self.describe(),
            "memory_start": self.start,
            "env_id": env_name(env_id),
            "position": self._collector.position(),
            "values": {name: value for name, value in state.items() if name not in arrays},
        }
        save_checkpoint(path, Checkpoint(header, {"memory": arrays}))

    def load(self, path: str | os.PathLike, env_id: Any) -> None:
        """Continue with the memory that `save` wrote; see `OffPolicyAlgorithm.load_buffer`."""
        saved = load_checkpoint(path, ("memory", "memory_start", "values"))
        if (env := saved.header.get("env_id", env_name(env_id))) != env_name(env_id):
            warnings.warn(
                f"load_buffer: {path} contains transitions of {one_line(env, 80)}, but these environments are "
                f"{env_name(env_id)}",
                RuntimeWarning,
                stacklevel=3,
            )
        self.buffer.set_state({**saved.header["values"], **saved.tensors["memory"]})
        self.start = saved.header["memory_start"]
        if saved.header.get("position") == self._collector.position() is not None:
            self._collector.remember_buffer(self.buffer)
        else:
            self._collector.forget_buffer()

    def close(self) -> None:
        """Close a memory that uses files, and remove its temporary folder."""
        if self._buffer is not None and hasattr(self._buffer, "close"):
            self._buffer.close()
        if self._folder is not None:
            self._folder.cleanup()


def choose_saved_buffer(header: dict[str, Any], holds: str) -> dict[str, Any]:
    """Return the argument ``buffer`` with which to restore a checkpoint; none if its kind is unknown here."""
    saved = header.get("buffer", {})
    name = saved.get("name", "uniform")
    if name not in buffer_names() or buffer_config_class(name).holds != holds:
        return {}
    config = buffer_config(saved)
    # The user, not the checkpoint, decides where files are written.
    return {"buffer": replace(config, folder=None) if isinstance(config, MmapBufferConfig) else config}

"""TensorBoard as a mirror: one event file in the run folder, written through the package's own record writer.

An event file cannot be continued safely after a kill, so each writer starts a new file from the record and removes the
previous one; the file of a finished run is left unchanged.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox.config.packages import import_package
from rlox.tracking.store import MIRRORS, inside

if TYPE_CHECKING:
    from rlox.tracking.writer import Job

yaml = import_package("yaml", "cli", "logger")

_SUFFIX = "rlox"  # marks rlox's event files; other files in the folder are not touched


class TensorboardMirror:
    """The mirror of TensorBoard's event files."""

    @staticmethod
    def store(settings: Mapping[str, Any], run: Path) -> Path:
        return run / MIRRORS / "tensorboard.store"

    def __init__(self, settings: Mapping[str, Any]):
        try:
            # These imports need neither TensorFlow nor PyTorch: tensorboard has its own protobufs and record writer.
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as e:
            raise ImportError(
                "rlox.tracking: logger=tensorboard needs the package tensorboard, got none; "
                'pip install "rlox-cli[tensorboard]", then rlox sync'
            ) from e
        self.event, self.summary, self.metadata = Event, Summary, SummaryMetadata
        self.tensor, self.writer = TensorProto, RecordWriter

    def open(self, job: Job) -> TensorboardRun:
        return TensorboardRun(self, job)


class TensorboardRun:
    """One run's event file: its metrics by name, and the resolved configuration as the text ``config``."""

    uploads_while_alive = False

    def __init__(self, mirror: TensorboardMirror, job: Job):
        self._mirror = mirror
        folder = inside(job.run, job.settings.get("folder", "tensorboard"))
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"events.out.tfevents.*.{_SUFFIX}"):
            old.unlink()
        job.state.offset, job.state.segment, job.state.step = 0, -1, -1
        job.state.url = str(folder)
        # Each file needs a new name, because a running TensorBoard remembers its position in a file by name.
        name = f"events.out.tfevents.{time.time():020.6f}.{socket.gethostname()}.{_SUFFIX}"
        self._file = mirror.writer(open(folder / name, "xb"))  # noqa: SIM115 -- closed by finish
        self._write(mirror.event(wall_time=job.ledger.started, file_version="brain.Event:2"))
        self._text("config", yaml.safe_dump(job.config, sort_keys=False), job.ledger.started)
        self._file.flush()

    def send(self, rows: list[dict[str, Any]]) -> None:
        value_of = self._mirror.summary.Value
        for row in rows:
            values = [
                value_of(tag=name, simple_value=value)
                for name, value in row.items()
                if value is not None and name not in ("segment", "step", "time")
            ]
            event = self._mirror.event(wall_time=row["time"], step=row["step"])
            event.summary.value.extend(values)
            self._write(event)
        self._file.flush()

    def upload(self, kind: str, path: Path) -> None:
        """Do nothing: checkpoints are already in the run folder."""

    def finish(self, status: str, message: str, ended: float) -> None:
        self._text("status", f"{status}: {message}" if message else status, ended)
        self._file.flush()
        self._file.close()

    def _text(self, tag: str, text: str, when: float) -> None:
        """Write a text for TensorBoard's text plugin; four leading spaces make it a code block."""
        m = self._mirror
        block = "\n".join(f"    {line}" for line in text.splitlines())
        tensor = m.tensor(dtype=7, string_val=[block.encode()])  # 7: DT_STRING; no shape: one string
        kind = m.metadata(plugin_data=m.metadata.PluginData(plugin_name="text"))
        event = m.event(wall_time=when)
        event.summary.value.append(m.summary.Value(tag=f"{tag}/text_summary", metadata=kind, tensor=tensor))
        self._write(event)

    def _write(self, event: Any) -> None:
        self._file.write(event.SerializeToString())

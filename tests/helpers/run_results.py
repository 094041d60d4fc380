"""The results of runs, for tests that compare runs with each other or with earlier numbers."""

import hashlib
import re
import time

import forked
import numpy as np

from rlox.algorithms import ALGORITHMS, resolve
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import load_checkpoint
from rlox.tracking import durable_rows

_IN_PROCESS = re.compile(r"time/|actors/\d+/")  # metrics that belong to a process


class Losses(LoggerCallback):
    """The metrics `loss/NAME`, one row for each log that has them."""

    def __init__(self, *names):
        self.names, self.rows = [f"loss/{name}" for name in names], []

    def log(self, step, metrics):
        if self.names[0] in metrics:
            self.rows.append([metrics[name] for name in self.names])


def outcome(run):
    """SHA-256 of each section of the checkpoint and the memory, and the metrics without times.

    Metrics of single actors are left out, too: they begin anew when a run is resumed.
    """
    path = run / "checkpoints/last.safetensors"
    checkpoint = load_checkpoint(path)
    header = checkpoint.header
    sections = {name: arrays for name, arrays in checkpoint.tensors.items() if name != "memory"}
    if "memory" in header:
        # The division into files depends on when it was saved; the contents do not.
        algorithm = resolve(ALGORITHMS[header["algorithm"]].cls).from_checkpoint(path)
        sections["memory"] = {name: x for name, x in algorithm.buffer.get_state().items() if isinstance(x, np.ndarray)}
        algorithm.close()
    digests = {
        section: hashlib.sha256(b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
        for section, arrays in sections.items()
    }
    kept = {name: header[name] for name in ("counters", "generators", "callbacks")}
    rows = [
        {name: x for name, x in row.items() if name not in ("segment", "time") and not _IN_PROCESS.match(name)}
        for row in durable_rows(run)
    ]
    return digests, kept, rows


def weights(path):
    """Every array of a checkpoint, by section and name."""
    return {f"{s}/{k}": v for s, part in load_checkpoint(path).tensors.items() for k, v in part.items()}


def kill_when_there(path, words, cwd):
    """Start `rlox *words`, and kill it as soon as the file `path` exists."""
    running = forked.Rlox(*words, cwd=cwd)
    try:
        deadline = time.monotonic() + 200
        while not path.exists():
            assert running.poll() is None, f"it ended without {path}"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        running.kill()
        running.wait()

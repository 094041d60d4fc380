"""What a run has come to, for tests that ask whether two runs are the same."""

import hashlib

import numpy as np

from rlox.algorithms import ALGORITHMS, resolve
from rlox.checkpoint import load_checkpoint
from rlox.tracking import durable_rows


def outcome(run):
    """SHA-256 of everything the run has come to, section by section, and its metrics without times."""
    path = run / "checkpoints/last.safetensors"
    checkpoint = load_checkpoint(path)
    header = checkpoint.header
    sections = {name: arrays for name, arrays in checkpoint.tensors.items() if name != "memory"}
    if "memory" in header:
        # Which files hold it depends on when it was saved, what it holds does not.
        algorithm = resolve(ALGORITHMS[header["algorithm"]].cls).from_checkpoint(path)
        sections["memory"] = {name: x for name, x in algorithm.buffer.get_state().items() if isinstance(x, np.ndarray)}
        algorithm.close()
    digests = {
        section: hashlib.sha256(b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
        for section, arrays in sections.items()
    }
    kept = {name: header[name] for name in ("counters", "generators", "callbacks")}
    rows = [
        {name: x for name, x in row.items() if name not in ("segment", "time") and not name.startswith("time/")}
        for row in durable_rows(run)
    ]
    return digests, kept, rows

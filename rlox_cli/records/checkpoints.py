"""Find the checkpoint that a command is to open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlox.algorithms import entry_of
from rlox.checkpoint import read_header, run_files


def read_known_header(path: Path) -> dict[str, Any]:
    """Return the header of a checkpoint. Raise a ValueError if its algorithm is not known here."""
    header = read_header(path)
    if not isinstance(header["algorithm"], str) or entry_of(header["algorithm"]) is None:
        raise ValueError(
            f"{path} holds a {header['algorithm']}, which is not known here; install the package that provides it, add "
            "--import my_package, or update rlox-cli"
        )
    return header


def best_of(folder: Path) -> Path:
    """Return the best checkpoint of a run folder, or the last one if there is no best."""
    for name in ("best", "last"):
        file = f"checkpoints/{name}.safetensors"
        if run_files.is_file(folder, file):
            return folder / file
    raise ValueError(f"{folder} must be a run folder with checkpoints/best.safetensors, or name a checkpoint file")

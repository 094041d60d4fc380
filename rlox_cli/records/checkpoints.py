"""The checkpoint that a command is to open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlox.algorithms import entry_of
from rlox.checkpoint import load_checkpoint


def known_header(path: Path) -> dict[str, Any]:
    """The header of a checkpoint of an algorithm that is known here."""
    header = load_checkpoint(path).header
    if not isinstance(header["algorithm"], str) or entry_of(header["algorithm"]) is None:
        raise ValueError(
            f"{path} holds a {header['algorithm']}, which is not known here; install the package that has it, add "
            "--import my_package, or update rlox-cli"
        )
    return header


def best_of(folder: Path) -> Path:
    """The best checkpoint of a run folder, else its last."""
    for name in ("best", "last"):
        path = folder / "checkpoints" / f"{name}.safetensors"
        if path.is_file():
            return path
    raise ValueError(f"{folder} must be a run folder with checkpoints/best.safetensors, or name a checkpoint file")

"""Folders that contain runs."""

from __future__ import annotations

import shlex
from pathlib import Path

from rlox.tracking.record import FILE
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown


def require_new(folder: Path) -> None:
    """Raise a UsageError if `folder` contains a run or a sweep."""
    for name, what, go_on in (
        (FILE, "run", resume_command(folder)),
        ("sweep.jsonl", "sweep", f"rlox sweep resume {shlex.quote(shown(folder))}"),
    ):
        if (folder / name).exists():
            raise UsageError(
                f"output_dir={shown(folder)} must be a new folder, but contains a {what}; choose another, or resume "
                f"it: {go_on}"
            )


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run in `folder`."""
    return f"rlox train {shlex.quote(f'resume={shown(folder)}')}"


def find_runs(folder: Path) -> list[Path]:
    """Return all run folders below `folder`, oldest first."""
    found = [path.parent for path in folder.rglob("metrics.jsonl") if (path.parent / "config.yaml").is_file()]
    return sorted(found, key=lambda run: (run / "config.yaml").stat().st_mtime)

"""Folders that contain runs."""

from __future__ import annotations

import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from rlox.checkpoint import run_files
from rlox.tracking.record import FILE, LOCK
from rlox_cli.terminal.account import TRACEBACK
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown


def require_new(folder: Path) -> None:
    """Raise a UsageError if `folder` contains a run or a sweep; a ValueError as `require_own_files`."""
    for name, what in ((FILE, "run"), ("sweep.jsonl", "sweep")):
        if os.path.lexists(folder / name):
            resume = f"rlox sweep resume {shlex.quote(shown(folder))}" if what == "sweep" else resume_command(folder)
            raise UsageError(
                f"output_dir={shown(folder)} must be a new folder, but contains a {what}; choose another, or resume "
                f"it: {resume}"
            )
    require_own_files(folder)


def require_own_files(folder: Path) -> None:
    """Raise a ValueError if something that a training writes or removes in `folder` is a link, or no regular file."""
    checkpoints = (f"{run_files.CHECKPOINTS}/last.safetensors", f"{run_files.CHECKPOINTS}/best.safetensors")
    pictures = ("predictions.png", "predictions.gif")
    of_hydra = (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")
    for name in (FILE, LOCK, TRACEBACK, "config.yaml", "completions.json", *pictures, *of_hydra, *checkpoints):
        run_files.check(folder, name, stat.S_ISREG, "a regular file")
    for name in ("mirrors", run_files.CHECKPOINTS, f"{run_files.CHECKPOINTS}/memory"):
        run_files.check(folder, name, stat.S_ISDIR, "a folder")
    for above, folders, files in os.walk(folder / run_files.CHECKPOINTS):
        for name in (*folders, *files):
            run_files.check(above, name)


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run in `folder`."""
    return f"rlox train {shlex.quote(f'resume={shown(folder)}')}"


def find_runs(folder: Path) -> list[Path]:
    """Return all run folders below `folder`, oldest first. Links below it are not followed."""
    times = {}
    for path in folder.rglob(FILE):
        with suppress(OSError):
            times[path.parent] = os.lstat(path.parent / "config.yaml").st_mtime
    return sorted(times, key=lambda run: times[run])

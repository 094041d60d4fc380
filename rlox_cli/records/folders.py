"""Folders that contain runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from rlox.checkpoint import run_files
from rlox.tracking.record import FILE, LOCK
from rlox_cli.terminal.account import TRACEBACK
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

# What Hydra writes into the folder of a run, before the run begins.
OF_HYDRA = (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")


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
    for name in (FILE, LOCK, TRACEBACK, "config.yaml", "completions.json", *pictures, *OF_HYDRA, *checkpoints):
        run_files.check(folder, name, stat.S_ISREG, "a regular file")
    for name in ("mirrors", run_files.CHECKPOINTS, f"{run_files.CHECKPOINTS}/memory"):
        run_files.check(folder, name, stat.S_ISDIR, "a folder")
    for above, folders, files in os.walk(folder / run_files.CHECKPOINTS):
        for name in (*folders, *files):
            run_files.check(above, name)


def remove_traces(folder: Path, new: list[Path], found: dict[str, bytes]) -> None:
    """Remove what Hydra has written into the folder of a run that failed, unless the run itself has saved something.

    If meanwhile another process trains there, what it had written is restored.

    Parameters
    ----------
    new : list of Path
        The folder and those above it that did not exist before, innermost first. They are removed if they are empty.
    found : dict
        The content of the files `OF_HYDRA` that were there before.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):  # such as a record of something else
        if os.listdir(folder) == [".hydra"] and not found:
            shutil.rmtree(folder / ".hydra")
            for path in new:
                path.rmdir()
        elif found and json.loads((folder / FILE).read_text("utf-8").partition("\n")[0])["pid"] != os.getpid():
            for name, content in found.items():
                with run_files.replace_file(folder, name) as file:
                    file.write(content)


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

"""Runs that were pulled from the Hugging Face Hub: kept in a folder of the user's, and named OWNER/NAME.

``RLOX_PULLED`` names that folder; by default it is ``rlox/pulled`` in the user's folder for data.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlox.checkpoint import run_files
from rlox.config.home import user_folder
from rlox_cli.records.checkpoints import best_of

MANIFEST = "rlox.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_name(text: str) -> bool:
    """Return whether `text` has the form OWNER/NAME of a repository on the hub."""
    return _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def pulled_folder() -> Path:
    """Return the folder of all pulled runs."""
    if folder := os.environ.get("RLOX_PULLED"):
        return Path(folder).absolute()
    return user_folder("XDG_DATA_HOME", ".local", "share") / "rlox" / "pulled"


def folder_of(name: str) -> Path:
    """Return the folder of the run that is, or will be, pulled by this name."""
    return pulled_folder().joinpath(*name.split("/"))


def find_pulled(name: str) -> Path | None:
    """Return the folder of the pulled run `name`; None if there is none, or if a file or folder here has this name."""
    if not is_name(name) or os.path.lexists(name):
        return None
    try:
        folder = folder_of(name)
    except OSError:  # a user without a home has pulled nothing
        return None
    return folder if run_files.is_file(folder, MANIFEST) else None


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a command is given: the file itself, or the best one of a run folder or a pulled run.

    Raises
    ------
    FileNotFoundError
        If there is nothing here, but `path` may be a name on the hub.
    ValueError
        If a folder is no run, or has no checkpoint.
    """
    if (folder := find_pulled(str(path))) is not None:
        return best_of(folder)
    if is_name(str(path)) and not os.path.lexists(path):
        raise FileNotFoundError(f"{path} must be a checkpoint or a run folder, got nothing there{hint(path)}")
    return best_of(path) if path.is_dir() else path


def hint(path: str | Path) -> str:
    """Return how to get a run that is not here, if `path` may be a name on the hub; else an empty text."""
    return f"; if it is on the Hugging Face Hub: rlox pull {path}" if is_name(str(path)) else ""

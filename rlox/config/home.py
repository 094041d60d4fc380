"""Folders of the user, outside of any run."""

from __future__ import annotations

import os
from pathlib import Path


def user_folder(variable: str, *below_home: str) -> Path:
    """Return the folder that the environment variable names, else the one `below_home`.

    Raises
    ------
    OSError
        If the variable is not set and the user has no home, as in containers that run under any user id.
    """
    if folder := os.environ.get(variable):
        return Path(folder)
    home = os.path.expanduser("~")
    if home == "~":  # Path.home() raises a RuntimeError there
        raise OSError(f"HOME must be set for a user without a home folder, or {variable}; set one to a folder to use")
    return Path(home, *below_home)

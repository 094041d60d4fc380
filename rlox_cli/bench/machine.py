"""The information that every measurement needs about where it was made."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone

from rlox_cli.report.machine import cpu_model


def provenance(command: str) -> dict[str, str]:
    """Return the command, date, machine and Python version, for the head of a result file."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }

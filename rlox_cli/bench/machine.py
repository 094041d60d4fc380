"""The information that every measurement needs about where it was made."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone


def cpu_model() -> str:
    """Return the processor's name according to the system."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def provenance(command: str) -> dict[str, str]:
    """Return the command, date, machine and Python version, for the head of a result file."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }

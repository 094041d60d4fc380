"""Versions of everything that can change the results of a run."""

from __future__ import annotations

import platform
import sys
from functools import cache
from importlib import metadata


def versions() -> dict[str, str]:
    """Return the versions of everything that can change a run's results, without importing any of it."""
    from rlox import __version__
    from rlox.kernels import CPU_LEVEL

    found = {"rlox": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "gymnasium"):
        if (version := _find_version(name)) is not None:
            found[name] = version
    return {
        **found,
        "platform": f"{sys.platform}-{platform.machine()}",
        "cpu_level": str(CPU_LEVEL),
    }


@cache
def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)  # slow, hence the cache: parses the package's whole description
    except metadata.PackageNotFoundError:
        return None

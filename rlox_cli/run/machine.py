"""The free memory and disk space of this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rlox_cli.terminal.paths import existing_parent

_CGROUPS = (  # limit, use, and the part of the use that the system can reclaim
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def memory() -> tuple[int, int] | None:
    """Return the free and the total bytes of memory, within a container's limit; None if unknown."""
    try:
        with open("/proc/meminfo") as file:
            fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        free, total = fields["MemAvailable"], fields["MemTotal"] + fields["SwapTotal"]
    except (OSError, LookupError, ValueError):
        try:
            free = total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
    limit = _container(Path("/sys/fs/cgroup"))
    return (free, total) if limit is None else (min(free, limit[0]), min(total, limit[1]))


def _container(root: Path) -> tuple[int, int] | None:
    for names in _CGROUPS:
        try:
            limit, used = (int((root / name).read_text()) for name in names[:2])
            stat = (root / names[0]).with_name("memory.stat").read_text().split()
            return limit - used + int(stat[stat.index(names[2]) + 1]), limit
        except (OSError, ValueError):
            continue
    return None


def free_disk(folder: Path) -> int:
    """Return the free bytes of the file system that `folder` is, or will be, on."""
    return shutil.disk_usage(existing_parent(folder)).free


def cpu_seconds() -> float:
    """Return the CPU time of this process and all that it has started, on Linux including those still alive."""
    own = os.times()
    total, tick = own.user + own.system + own.children_user + own.children_system, os.sysconf("SC_CLK_TCK")
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            try:
                stat = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has just ended
            total += sum(map(int, stat[11:15])) / tick
    return total


def size(n_bytes: float) -> str:
    """Format a size such as ``512 MiB`` or ``7.5 GiB``."""
    value, units = n_bytes / 2**20, ("MiB", "GiB", "TiB", "PiB")
    unit = 0
    while value >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {units[unit]}" if value >= 10 else f"{value:.1f} {units[unit]}"

"""Whether a training fits in the memory and on the disk of this machine."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlox.buffers import Footprint
from rlox.config import RunConfig
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import find_existing_parent

# Share of the free space: more may fit, but leaves little for anything else.
TIGHT = 0.8
_CGROUPS = (  # limit, use, and the part of the use that the system can reclaim
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def memory(cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[float, float]:
    """Return the free and the total bytes of memory, within a container's limit; infinite if unknown."""
    try:
        with open("/proc/meminfo") as file:
            fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        free, total = fields["MemAvailable"], fields["MemTotal"] + fields["SwapTotal"]
    except (OSError, LookupError, ValueError):
        try:
            free = total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):  # Windows has no sysconf
            return math.inf, math.inf
    for names in _CGROUPS:
        try:
            limit, used = (int((cgroups / name).read_text()) for name in names[:2])
            stat = (cgroups / names[0]).with_name("memory.stat").read_text().split()
            reclaimable = int(stat[stat.index(names[2]) + 1])
        except (OSError, ValueError):
            continue
        return min(free, limit - used + reclaimable), min(total, limit)
    return free, total


def free_disk(folder: Path) -> int:
    """Return the free bytes of the file system that `folder` is, or will be, on."""
    return shutil.disk_usage(find_existing_parent(folder)).free


def cpu_seconds() -> float:
    """Return the CPU time of this process and all that it has started, on Linux including those still alive."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            try:
                stat = Path(f"/proc/{child}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # the process has just ended
            total += sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def size(n_bytes: float) -> str:
    """Format a size such as ``512 MiB`` or ``7.5 GiB``."""
    value, units = n_bytes / 2**20, ("MiB", "GiB", "TiB", "PiB")
    unit = 0
    while value >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {units[unit]}" if value >= 10 else f"{value:.1f} {units[unit]}"


def require_memory(config: RunConfig) -> None:
    """Raise a UsageError for networks, or a number of environments, that this machine cannot even create."""
    (free, _), hidden = memory(), getattr(config.algo, "hidden_sizes", [])
    # Weights, gradients and two optimiser moments of a policy and a critic. Input and output layers come on top.
    weights = 2 * 16 * (sum(hidden) + sum(a * b for a, b in itertools.pairwise(hidden)))
    for key, value, needed, what in (
        ("algo.hidden_sizes", hidden, weights, "weights, gradients and moments"),
        ("env.n_envs", config.env.n_envs, 100 * config.env.n_envs, "states and observations"),
    ):
        if needed > free:
            raise UsageError(
                f"{key} must fit in memory, got {value}, whose {what} take at least {size(needed)}, but only "
                f"{size(free)} are free; lower it"
            )


def memory_warnings(config: RunConfig, replay: Footprint | None, more: int) -> Iterator[str]:
    """Yield warnings about the replay memory and `more` bytes in addition to it.

    Raises
    ------
    UsageError
        If they do not fit in memory.
    """
    (free, total), needed = memory(), more + (0 if replay is None else replay.resident)
    if replay is not None and replay.reserved > total:
        what, remedy = "transitions", ", or use buffer=mmap, which keeps older ones in a file"
        if config.buffer.holds == "sequences":
            what, remedy = "steps", ""
        raise UsageError(
            f"buffer.size must fit in memory, got {config.buffer.size:,} {what} of {replay.row:,} bytes, "
            f"{size(replay.reserved)}, but there are only {size(total)}; lower it to "
            f"{int(TIGHT * free) // replay.row:,}{remedy}"
        )
    if needed > free:
        if replay is None:
            raise UsageError(
                f"algo.n_steps must fit in memory, got {config.algo.n_steps:,} in {config.env.n_envs:,} environments, "
                f"a rollout of {size(more)}, but only {size(free)} are free; lower it, or env.n_envs"
            )
        raise UsageError(
            f"buffer.size must fit in memory, got {config.buffer.size:,}, of which the training fills "
            f"{size(needed)}, but only {size(free)} are free; lower it to "
            f"{int(TIGHT * free) // replay.row:,}, or use buffer=mmap, which keeps older ones in a file"
        )
    if needed > TIGHT * free:
        yield f"memory is tight: {size(needed)} of experience, and {size(free)} are free"


def disk_bytes(config: RunConfig, replay: Footprint | None, n_steps: int) -> tuple[int, int]:
    """Return the bytes that a replay memory writes in `n_steps`: into its own file, and next to the checkpoints."""
    if replay is None:
        return 0, 0
    saves = config.checkpoint.memory and not replay.disk
    # The states of steps are rewritten as they change, until their files have twice the size of the states.
    times = 2 if config.buffer.holds == "sequences" else 1
    return replay.disk, times * min(n_steps, config.buffer.size) * replay.row if saves else 0


def disk_warnings(config: RunConfig, replay: Footprint | None, folder: Path, n_steps: int) -> Iterator[str]:
    """Yield warnings about the replay memory's files.

    Raises
    ------
    UsageError
        If the disk has no room for them.
    """
    own, saved = disk_bytes(config, replay, n_steps)
    at = Path(getattr(config.buffer, "folder", None) or folder)
    free, needed = free_disk(at), own + saved
    if needed > free:
        remedy = "lower buffer.size" if own else "lower buffer.size, or set checkpoint.memory=false"
        raise UsageError(
            f"{find_existing_parent(at)} must have room for the replay memory's files, {size(needed)}, but "
            f"only {size(free)} are free; {remedy}, or choose another folder with "
            f"{'buffer.folder' if own else 'output_dir'}"
        )
    if needed > TIGHT * free:
        yield (
            f"the disk is nearly full: the replay memory's files take {size(needed)}, and "
            f"{size(free)} are free at {find_existing_parent(at)}"
        )

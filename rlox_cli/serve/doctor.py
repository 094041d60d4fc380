"""``rlox doctor``: the state of workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from rlox.config import RemoteConfig
from rlox.envs.remote.health import status_of
from rlox_cli.terminal.console import make_console, make_table, print_table


def main(remote: RemoteConfig) -> bool:
    """Print a line for each worker. Return whether none has a problem."""
    with ThreadPoolExecutor(min(16, len(remote.addresses))) as pool:
        found = list(pool.map(lambda address: status_of(address, remote), remote.addresses))
    table = make_table("worker", "state", "rlox", "environment", "spaces", "sessions", "answers in", "clock", "problem")
    for one in found:
        if not one.version:
            table.add_row(one.address, "failed", "", "", "", "", "", "", one.problem or "")
            continue
        median, late = one.latency_us
        table.add_row(
            one.address,
            "ok" if one.problem is None else "busy",
            one.version,
            one.env,
            one.spaces,
            f"{one.sessions} of {one.max_sessions}",
            f"{median:.0f} us (95 %: {late:.0f})",
            one.clock,
            one.problem or "",
        )
    print_table(make_console(), table)
    return all(one.problem is None for one in found)

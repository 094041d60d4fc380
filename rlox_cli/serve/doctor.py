"""``rlox doctor``: the state of workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from rlox.config import RemoteConfig
from rlox.envs.remote.health import status_of
from rlox_cli.terminal.console import TextConsole, make_table, print_table


def main(remote: RemoteConfig) -> bool:
    """Print a line for each worker. Return whether none has a problem."""
    with ThreadPoolExecutor(min(16, len(remote.addresses))) as pool:
        statuses = list(pool.map(lambda address: status_of(address, remote), remote.addresses))
    table = make_table("worker", "state", "rlox", "environment", "spaces", "sessions", "answers in", "clock", "problem")
    for worker in statuses:
        if not worker.version:
            table.add_row(worker.address, "failed", "", "", "", "", "", "", worker.problem or "")
            continue
        median, late = worker.latency_us
        table.add_row(
            worker.address,
            "ok" if worker.problem is None else "busy",
            worker.version,
            worker.env,
            worker.spaces,
            f"{worker.sessions} of {worker.max_sessions}",
            f"{median:.0f} us (95 %: {late:.0f})",
            worker.clock,
            worker.problem or "",
        )
    print_table(TextConsole(), table)
    return all(worker.problem is None for worker in statuses)

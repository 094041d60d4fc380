"""``rlox sync``: the trackers, brought up to date."""

from __future__ import annotations

from pathlib import Path

from rlox import tracking
from rlox_cli.runner import shown
from rlox_cli.terminal import make_console


def find_runs(folder: Path) -> list[Path]:
    """All run folders below `folder`, oldest first."""
    found = [path.parent for path in folder.rglob("metrics.jsonl") if (path.parent / "config.yaml").is_file()]
    return sorted(found, key=lambda run: (run / "config.yaml").stat().st_mtime)


def main(runs: list[Path]) -> None:
    """Mirror each run; a ValueError at the end if any could not be."""
    console = make_console()
    runs = runs or find_runs(Path("outputs"))
    if not runs:
        raise ValueError("no runs under outputs/; name run folders, or train one")
    failed = 0
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise ValueError(f"{run} must be a run folder with metrics.jsonl")
        with console.status(f"syncing {shown(run)}"):
            reports = tracking.sync(run)
        if not reports:
            console.print(f"{shown(run)}: no tracker configured", soft_wrap=True)
        for name, report in reports.items():
            state = report.error or (
                "complete" if report.complete else "up to the last checkpoint; the run has not ended"
            )
            console.print(f"{shown(run)}: {name} {state}", soft_wrap=True)
            failed += report.error is not None
    if failed:
        raise ValueError(f"{failed} mirror{'s' if failed > 1 else ''} could not be brought up to date; see above")

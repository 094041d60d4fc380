"""``rlox sync`` and ``rlox ui``: the trackers, brought up to date and looked at."""

from __future__ import annotations

import subprocess
import sys
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


def serve(store: Path, port: int, args: list[str]) -> None:
    """Run MLflow's server over the SQLite `store` until it is stopped."""
    if not store.is_file():
        raise ValueError(f"no MLflow database {store}; train with logger=mlflow first, or name it with --store")
    print(f"http://127.0.0.1:{port} (Ctrl-C stops it)", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{store.absolute()}",
    ]
    command += [
        "--default-artifact-root",
        str(store.absolute().parent / "mlartifacts"),
        "--port",
        str(port),
        *args,
    ]
    code = subprocess.run(command, check=False).returncode
    if code not in (0, -2, 130):
        raise RuntimeError(f"mlflow server ended with exit code {code}; is port {port} taken?")

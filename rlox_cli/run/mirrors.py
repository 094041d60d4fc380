"""Wait for the trackers at the end of a command, or bring them up to date later."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlox import tracking
from rlox.checkpoint.checks import visible
from rlox.config import MlflowConfig, RunConfig
from rlox.config.base import masked
from rlox.config.sqlite import is_sqlite, sqlite_file
from rlox.tracking.store import MIRRORS, read_config
from rlox.tracking.wandb import has_login
from rlox_cli.records.folders import find_runs
from rlox_cli.terminal.account import paragraph
from rlox_cli.terminal.console import TextConsole, print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

# How long the end of a command waits for the trackers. `rlox sync` can complete them later.
_WAIT_S = 120.0


def require_trackers(configs: Iterable[RunConfig]) -> None:
    """Raise a UsageError if a tracker's package is missing, or if nobody has logged in to W&B's server.

    Otherwise the training would end before that is known.
    """
    configs = list(configs)
    for name in ("wandb", "tensorboard"):
        if any(getattr(c.logger, name) is not None for c in configs) and find_spec(name) is None:
            raise UsageError(f'logger={name} needs a package that is not installed; pip install "rlox-cli[{name}]"')
    for mlflow in filter(None, (c.logger.mlflow for c in configs)):
        hand_over_password(mlflow)
    online = any(c.logger.wandb is not None and c.logger.wandb.in_effect == "online" for c in configs)
    if online and not has_login():
        raise UsageError(
            "logger=wandb must be able to log in, got no API key; type `wandb login`, set WANDB_API_KEY, or record "
            "without a server with logger.wandb.mode=offline (or WANDB_MODE=offline)"
        )


def hand_over_password(mlflow: MlflowConfig) -> None:
    """Let the processes that this one starts have the password of the server, which no file of a run contains.

    Raises a ValueError if it is not known.
    """
    if (uri := mlflow.in_effect) != masked(uri):
        os.environ["MLFLOW_TRACKING_URI"] = uri


def sync(runs: list[Path]) -> None:
    """Mirror each run. Print a line for each of several runs that cannot be read.

    Raises
    ------
    ValueError, LookupError, TypeError, OSError
        At once if a path is no run folder, if there are no runs, or if the only one cannot be read.
    RuntimeError
        At the end if any run could not be mirrored.
    """
    console = TextConsole()
    runs = runs or find_runs(Path("outputs"))
    if not runs:
        raise ValueError("no runs under outputs/; name run folders, or train one")
    for run in runs:
        if not os.path.lexists(run / "metrics.jsonl"):
            raise ValueError(f"{run} must be a run folder with metrics.jsonl")
    failed = left_out = 0
    for run in runs:
        try:
            with console.status(Text(visible(f"syncing {shown(run)}"))):
                reports = tracking.sync(run)
        except (ValueError, LookupError, TypeError, OSError) as e:
            if len(runs) == 1:
                raise
            # A damaged run does not keep the others from being synced.
            print_text(f"rlox sync: {shown(run)} is left out: {paragraph(e)}", stderr=True)
            left_out += 1
            continue
        if not reports:
            console.print(f"{shown(run)}: no tracker configured")
        for name, report in reports.items():
            state = report.error or (
                "complete" if report.complete else "up to the last checkpoint; the run has not ended"
            )
            console.print(f"{shown(run)}: {name} {state}")
            failed += report.error is not None
    if failed:
        raise RuntimeError(f"{failed} mirror{'s' if failed > 1 else ''} could not be brought up to date; see above")
    if left_out:
        raise RuntimeError(f"{left_out} run{'s' if left_out > 1 else ''} could not be synced; see above")


def finish_mirrors(folders: list[Path], console: Console) -> None:
    """Wait until the trackers have the runs. If a tracker cannot be reached, print a line; the run is not affected."""
    mirrored = [folder for folder in folders if (folder / MIRRORS).is_dir()]
    if not mirrored:
        return
    with console.status("mirroring to the trackers (Ctrl-C: continue in the background)"):
        try:
            reports = tracking.wait(mirrored, _WAIT_S)
        except KeyboardInterrupt as e:
            if getattr(e, "signal_number", signal.SIGINT) == signal.SIGTERM:
                raise
            return
    for folder, mirrors in reports.items():
        for name, report in mirrors.items():
            if not report.complete:
                reason = report.error or f"not finished yet; `rlox sync {shown(folder)}` copies the rest"
                print_text(f"{name}: {reason}", stderr=True)
            elif report.url and len(folders) == 1:
                url = shown(Path(report.url)) if report.url.startswith("/") else report.url
                console.print(f"  {name:<12} {url}")
                if name == "wandb" and report.url.startswith("/"):
                    console.print(f"  {'upload':<12} wandb sync {url}")
    recorded = [folder for folder, mirrors in reports.items() if "mlflow" in mirrors and not mirrors["mlflow"].error]
    try:
        usual = MlflowConfig().in_effect
    except ValueError:  # MLFLOW_TRACKING_URI changed since the run began: `rlox ui` alone would refuse it
        usual = ""
    for uri in dict.fromkeys(read_config(folder)["logger"]["mlflow"]["tracking_uri"] for folder in recorded):
        if is_sqlite(uri):
            store = sqlite_file(uri)
            opens = is_sqlite(usual) and sqlite_file(usual).absolute() == store
            option = "" if opens else f" --store {shlex.quote(shown(store))}"
            console.print(f"  {'view':<12} rlox ui{option}")
    if any("tensorboard" in mirrors for mirrors in reports.values()):
        common = Path(os.path.commonpath([folder.absolute() for folder in folders]))
        outputs = Path("outputs").absolute()
        logdir = outputs if common.is_relative_to(outputs) else common
        console.print(f"  {'view':<12} tensorboard --logdir {shlex.quote(shown(logdir))}")

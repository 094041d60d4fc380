"""``rlox ls``: list what there is."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import cast

from rich.console import Console

from rlox import config as configs
from rlox.algorithms import algorithm_names
from rlox.buffers import buffer_class, buffer_config_class, buffer_names
from rlox.config import nearest, tuned, tuned_pairs
from rlox_cli.config.presets import config_of, describe_preset, read_presets
from rlox_cli.config.shipped import read_shipped
from rlox_cli.report.environments import list_envs
from rlox_cli.terminal.account import paragraph
from rlox_cli.terminal.console import TextConsole, make_table, print_table, print_text

_THINGS = ("algos", "buffers", "envs", "experiments", "tuned", "runs", "sweeps")


def list_things(what: str, folder: Path) -> None:
    """Print one of the lists."""
    console = TextConsole()
    if what == "algos":
        table = make_table("algo", "what")
        rows = {name: cast(str, inspect.getdoc(config_of(name))).splitlines()[0] for name in algorithm_names()}
        rows |= {name: f"{describe_preset(name)} (a preset of {algo})" for name, algo in read_presets().items()}
        for name in sorted(rows):
            table.add_row(name, rows[name])
        print_table(console, table)
    elif what == "buffers":
        table = make_table("buffer", "what")
        for name in buffer_names():
            cls = buffer_config_class(name)
            doc = inspect.getdoc(buffer_class(name) if cls is configs.OutsideBufferConfig else cls) or ""
            table.add_row(name, doc.partition("\n")[0])
        print_table(console, table)
    elif what == "envs":
        list_envs(console)
    elif what == "tuned":
        table = make_table("settings", "steps", "must reach")
        for algo, env in tuned_pairs():
            settings = tuned(algo, env)
            reference = (settings.get("reference") or {}).get("mean_return")
            must_reach = "" if reference is None else f"{reference:g}"
            table.add_row(f"algo={algo} env={env}", f"{settings['total_timesteps']:,}", must_reach)
        print_table(console, table)
    elif what == "experiments":
        table = make_table("experiment", "what")
        for name, text in read_shipped("experiment").items():
            table.add_row(f"experiment={name}", text.splitlines()[1].lstrip("# "))
        print_table(console, table)
    elif what == "runs":
        _list_runs(folder, console)
    elif what == "sweeps":
        _list_sweeps(folder, console)
    else:
        raise ValueError(f"the list must be known, got {what!r}; {nearest(what, _THINGS)}")


def _list_sweeps(folder: Path, console: Console) -> None:
    from rlox_cli.config.overrides import as_typed
    from rlox_cli.records.ledger import FILE, Sweep
    from rlox_cli.terminal.paths import shown

    table = make_table("sweep", "jobs", "typed")
    for path in sorted(folder.rglob(FILE), key=lambda path: path.lstat().st_mtime):
        try:
            sweep = Sweep.read(path.parent)
        except (ValueError, OSError) as e:
            # A damaged sweep does not hide the others.
            print_text(f"rlox ls: {shown(path.parent)} is left out: {paragraph(e)}", stderr=True)
            continue
        sweep.scan()
        table.add_row(shown(path.parent), sweep.summary(), as_typed(sweep.head.overrides))
    if not table.row_count:
        raise ValueError(
            f"no sweeps under {folder}; start one with `rlox train -m …`, or name another folder with --folder"
        )
    print_table(console, table)


def _list_runs(folder: Path, console: Console) -> None:
    from rlox.tracking.record import is_alive, read_rows
    from rlox.tracking.store import read_config
    from rlox_cli.records.folders import find_runs
    from rlox_cli.records.runs import short
    from rlox_cli.terminal.paths import shown

    runs = find_runs(folder)
    if not runs:
        raise ValueError(f"no runs under {folder}; train one, or name another folder with --folder")
    table, unfinished = make_table("run", "algo", "env", "seed", "steps", "status", "best"), False
    for run in runs:
        try:
            plain = read_config(run)
            what = [str(plain.get("preset") or plain["algo"]["name"]), str(plain["env"]["id"]), str(plain["seed"])]
            alive = is_alive(run)
            steps, status, best = 0, "running" if alive else "killed", None
            for row, _ in read_rows(run / "metrics.jsonl"):
                event = row.get("event")
                # A checkpoint is recorded when it is on disk, which may be after later steps.
                steps = steps if event == "checkpoint" else row["step"]
                if event in ("start", "end") and not alive:
                    status = row.get("status", "killed")
                if (score := row.get("eval/mean_return")) is not None:
                    best = score if best is None else max(best, score)
        except (ValueError, LookupError, TypeError, OSError) as e:
            # A damaged run does not hide the others.
            print_text(f"rlox ls: {shown(run)} is left out: {paragraph(e)}", stderr=True)
            continue
        shown_best = "" if best is None else short(best)
        table.add_row(shown(run), *what, f"{steps:,}", status, shown_best)
        unfinished |= status in ("killed", "interrupted", "failed")
    print_table(console, table)
    if unfinished:
        console.print("resume a stopped run with: rlox train resume=RUN")

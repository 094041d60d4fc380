"""``rlox plot``: learning curves, performance profiles and speed of groups of runs, as a picture and a web page.

Statistics are those of `rlox_cli.report.statistics`: interquartile means over seeds with bootstrap intervals.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rlox.checkpoint import run_files
from rlox_cli.records.runs import (
    PATH,
    Group,
    Run,
    choose_metric,
    group_runs,
    join_first_words,
    metric_name,
    read_runs,
    units,
)
from rlox_cli.report.page import page
from rlox_cli.report.picture import Picture, cells
from rlox_cli.terminal.console import TextConsole, make_table, print_table, print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, shown

_USUAL = (".png", ".html")  # without --out
FORMATS = (".png", ".pdf", ".svg", ".html")


def _write(groups: list[Group], metric: str, by_time: bool, paths: Sequence[Path], notes: Sequence[str]) -> Picture:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    picture = Picture(groups, metric, by_time)
    svg = picture.save([path for path in paths if path.suffix != ".html"])
    for path in paths:
        if path.suffix == ".html":
            path.write_text(page(picture, svg, notes), encoding="utf-8")
    return picture


def main(paths: list[Path], metric: str | None, x: str, by: list[str], labels: list[str], out: list[Path]) -> None:
    """Draw the plot, and print a table of the groups and the paths of the files."""
    if x not in ("steps", "time"):
        raise UsageError(f"--x must be steps or time, got {x!r}")
    if by and labels:
        raise UsageError("--label must not be combined with --by: it names the runs of each PATH")
    if labels and len(labels) != len(paths):
        raise UsageError(f"--label must be given once for each PATH ({len(paths)}), got {len(labels)}")
    for path in out:
        if path.suffix not in FORMATS:
            raise UsageError(f"--out must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {path}")
    out = [output_path("--out", path) for path in out]
    metric = choose_metric(metric, paths)
    by = [PATH] if labels else by
    runs, notes = read_runs(paths, metric, labels or map(str, paths), by)
    groups = group_runs(runs, by)
    notes += [f"{g.label} ({g.env}) pools runs that differ in {join_first_words(g.pooled)}" for g in groups if g.pooled]
    for note in notes:
        print_text(f"rlox plot: {note}", stderr=True)
    if not out:
        stem = _default_stem(paths, runs)
        out = [output_path("--out", stem.with_name(stem.name + suffix)) for suffix in _USUAL]
    picture = _write(groups, metric, x == "time", out, notes)
    console = TextConsole()
    speed = f"{units(runs)}/s"
    table = make_table(
        *("group", "env", "runs", f"final {metric_name(metric)}", "95 % interval", "best", speed),
        optional=(speed, "best", *(["env"] if len({group.env for group in groups}) == 1 else [])),
    )
    for group in groups:
        table.add_row(group.label, group.env, *cells(picture.summaries[group]))
    print_table(console, table)
    for path in out:
        console.print(f"  {path.suffix[1:]:<7} {shown(path)}")
    if len(paths) == 1 and len(groups) > len({group.env for group in groups}):
        console.print(f"  compare rlox compare {shlex.quote(shown(paths[0]))}")


def _default_stem(paths: Sequence[Path], runs: Sequence[Run]) -> Path:
    """Return a path in a sweep's own folder; for any other choice of runs, a dated name under outputs/plots."""
    if len(paths) == 1 and {run.folder.parent for run in runs} == {paths[0]}:
        for suffix in _USUAL:
            run_files.is_file(paths[0], f"plot{suffix}")  # raises a ValueError if it is a link
        return paths[0] / "plot"
    return Path("outputs", "plots", time.strftime("%Y-%m-%d-%H%M%S"))

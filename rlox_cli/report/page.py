"""The page of ``rlox plot``: one self-contained HTML file, since results are mailed, kept and read offline.

The figure is Matplotlib's own SVG, about a hundred kilobytes. A plotting library in JavaScript would add megabytes to
every file, only to show, hide and highlight groups, which the few lines below do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import yaml

from rlox import __version__
from rlox.tracking.store import read_plain
from rlox_cli.records.runs import Group, Run, metric_name, plain, units
from rlox_cli.report.picture import Picture, cells
from rlox_cli.terminal.paths import shown

_CSS = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1500px; margin: 1.5em auto;
       padding: 0 1em }
svg { width: 100%; height: auto }
table { border-collapse: collapse; margin: 1em 0 }
th, td { text-align: left; padding: .25em .9em .25em 0; border-bottom: 1px solid #ddd; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.groups th:nth-child(n+4) { text-align: right }
tbody tr[data-group]:hover { background: #f3f3f3 }
i { display: inline-block; width: 1em; height: 1em; margin-right: .5em; vertical-align: -.1em }
pre { background: #f6f6f6; padding: .7em; overflow-x: auto; font-size: 13px }
summary { cursor: pointer; padding: .2em 0 }
"""
_SCRIPT = """
const parts = group => document.querySelectorAll(`svg [id^="g${group}-"]`);
for (const row of document.querySelectorAll("tr[data-group]")) {
  const mine = row.dataset.group, box = row.querySelector("input");
  const fade = value => document.querySelectorAll('svg [id^="g"]').forEach(part => {
    if (/^g\\d+-/.test(part.id) && !part.id.startsWith(`g${mine}-`)) part.style.opacity = value;
  });
  row.onmouseenter = () => fade(0.12);
  row.onmouseleave = () => fade("");
  box.onchange = () => {
    document.querySelectorAll(`tr[data-group="${mine}"] input`).forEach(other => other.checked = box.checked);
    parts(mine).forEach(part => part.style.display = box.checked ? "" : "none");
  };
}
"""


def page(picture: Picture, svg: str, notes: Sequence[str]) -> str:
    """Return the whole HTML text."""
    envs = ", ".join(dict.fromkeys(group.env for group in picture.groups))
    n_runs = sum(len(group.runs) for group in picture.groups)
    speed = f"{units(run for group in picture.groups for run in group.runs)}/s"
    heads = ("group", "environment", "runs", f"final {metric_name(picture.metric)}", "95 % interval", "best", speed)
    rows, about = [], []
    for group in picture.groups:
        number, (colour, _) = picture.labels.index(group.label), picture.appearance(group.label)
        counted, *numbers = cells(picture.summaries[group])
        swatch = f'<input type="checkbox" checked> <i style="background: {colour}"></i>'
        cell = f"<td><label>{swatch}{escape(group.label)}</label></td>{_cells([group.env, counted])}"
        rows.append(f'<tr data-group="{number}">{cell}{_cells(numbers, "n")}</tr>')
        about.append(_about(group))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>rlox: {escape(envs)}</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{escape(envs)}</h1>
<p>{n_runs} runs in {len(picture.groups)} groups, drawn {time.strftime("%Y-%m-%d %H:%M")} by rlox {__version__}.</p>
{_list(notes)}
<figure style="margin: 0">{svg}</figure>
<table class="groups">
<thead><tr>{_heads(heads)}</tr></thead>
<tbody>
{chr(10).join(rows)}
</tbody>
</table>
<p>Scores are interquartile means over runs (over the finished ones, if there are any), with percentile bootstrap
intervals; best is the same of each run's highest return. In a curve, a run that finished early keeps its last value.
Point at a row to highlight its group, untick it to hide the group.</p>
<h2>Groups</h2>
{chr(10).join(about)}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _cells(values: Iterable[str], kind: str = "") -> str:
    return "".join(f'<td class="{kind}">{escape(value)}</td>' for value in values)


def _heads(names: Iterable[str]) -> str:
    return "".join(f"<th>{escape(name)}</th>" for name in names)


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _about(group: Group) -> str:
    """Return a group's settings and runs, and the command and the whole configuration of its first run."""
    first = group.runs[0]
    settings = "".join(f"<tr>{_cells([key, value])}</tr>" for key, value in group.settings.items())
    runs = "".join(
        f"<tr>{_cells([str(r.seed), r.status, f'{r.steps:,}', f'{r.seconds:,.1f}', shown(r.folder)])}</tr>"
        for r in group.runs
    )
    # Pages are passed on, and a tracker's address may contain a password.
    shown_config = {key: value for key, value in first.config.items() if key != "logger"}
    config = yaml.safe_dump(shown_config, sort_keys=False, allow_unicode=True)
    return f"""<details>
<summary>{escape(group.label)} · {escape(group.env)}</summary>
{f"<table>{settings}</table>" if settings else ""}
<table><thead><tr>{_heads(("seed", "status", first.unit, "seconds", "folder"))}</tr></thead>{runs}</table>
{_command(first)}<pre>{escape(config)}</pre>
</details>"""


def _command(run: Run) -> str:
    """Return the command of this run, from the ledger of its sweep or from Hydra's files in the run's folder."""
    from rlox_cli.config.overrides import FOLDERS

    try:
        typed = _of_sweep(run.folder) or read_plain(run.folder, ".hydra/overrides.yaml")
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return ""
    typed_words = map(plain, typed if isinstance(typed, list) else [])
    left_out = ("logger.", *(f"{key}=" for key in FOLDERS))  # where the run was recorded
    words = [word for word in typed_words if not word.lstrip("+").startswith(left_out)]
    return f"<pre>{escape(' '.join(['rlox train', *words]))}</pre>"


def _of_sweep(folder: Path) -> list[str]:
    """Return the run's overrides from the ledger of its sweep; empty if it is not part of one."""
    from rlox_cli.records.ledger import FILE, Sweep

    for parent in folder.parents[:3]:
        if (parent / FILE).is_file():
            inside = folder.relative_to(parent).as_posix()
            return next((job.overrides for job in Sweep.read(parent).jobs.values() if job.folder == inside), [])
    return []

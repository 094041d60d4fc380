"""Runs and comparisons in a notebook: objects that a cell shows as tables and curves.

>>> from rlox_cli.notebook import compare_runs, open_runs
>>> open_runs("outputs/sweeps/first")  # doctest: +SKIP
>>> compare_runs("before", "after")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, overload

import numpy as np

from rlox.evaluation.html import Line, draw_curves, write_table
from rlox_cli.records.runs import Group, Run, choose_metric, group_runs, metric_name, read_runs, short, units
from rlox_cli.report.compare import compare, read_side
from rlox_cli.report.picture import cells, curve, summarise


class Runs(Sequence[Run]):
    """Runs that were read from disk. Those that differ only in the seed are one group.

    Attributes
    ----------
    metric : str
        Name of the metric that is shown, as in ``metrics.jsonl``.
    groups : list of Group
        The runs by their settings.
    notes : list of str
        What was left out, and why.
    """

    def __init__(self, runs: list[Run], metric: str, groups: list[Group], notes: list[str]):
        self._runs, self.metric, self.groups, self.notes = runs, metric, groups, notes

    @overload
    def __getitem__(self, at: int) -> Run: ...

    @overload
    def __getitem__(self, at: slice) -> list[Run]: ...

    def __getitem__(self, at: int | slice) -> Run | list[Run]:
        return self._runs[at]

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"Runs({len(self)} in {len(self.groups)} groups: {', '.join(group.label for group in self.groups)})"

    def _repr_html_(self) -> str:
        rows = [[group.label, group.env, *cells(summarise(group, self.metric))] for group in self.groups]
        head = ["settings", "environment", "runs", "final, IQM", "95 % interval", "best", "per second"]
        parts = [write_table(head, rows)]
        for env in dict.fromkeys(group.env for group in self.groups):
            of_env = [group for group in self.groups if group.env == env]
            lines = [_line(group, self.metric) for group in of_env]
            count = units(run for group in of_env for run in group.runs)
            parts.append(draw_curves(lines, count, f"{env}: {metric_name(self.metric)}"))
        parts += _small(self.notes)
        return "\n".join(parts)


class Comparison(Mapping[str, Any]):
    """The result of ``rlox compare``: a mapping with the keys of its ``--json``."""

    def __init__(self, result: dict[str, Any], sides: tuple[Runs, Runs]):
        self._result, self.sides = result, sides

    def __getitem__(self, key: str) -> Any:
        return self._result[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._result)

    def __len__(self) -> int:
        return len(self._result)

    def __repr__(self) -> str:
        sentences = (f"{env}: {one['verdict']['sentence']}" for env, one in self["environments"].items())
        return f"Comparison({'; '.join(sentences)})"

    def _repr_html_(self) -> str:
        parts = []
        if differing := {**self["config"], **self["versions"]}:
            rows = [[key, *(", ".join(side) or "–" for side in sides)] for key, sides in differing.items()]
            parts.append(write_table(["what differs", "A", "B"], rows))
        for env, one in self["environments"].items():
            parts.append(f"<p><b>{escape(env)}</b>: {escape(one['verdict']['sentence'])}</p>")
            parts += _small(one["notes"])
            rows = [
                [name.replace("_", " "), *(short(row.get(key)) for key in ("a", "b", "difference", "low", "high"))]
                for name, row in one["metrics"].items()
            ]
            parts.append(write_table(["", "A", "B", "B − A", "95 % from", "to"], rows))
            lines = [
                _line(Group(name, env, {}, runs=[run for run in side if run.env == env]), self["metric"])
                for name, side in zip("AB", self.sides, strict=True)
            ]
            parts.append(draw_curves(lines, one["unit"], metric_name(self["metric"])))
        parts += _small([note for side in self.sides for note in side.notes])
        return "\n".join(parts)


def open_runs(*paths: str | os.PathLike[str], metric: str | None = None, by: Sequence[str] = ()) -> Runs:
    """Read run folders, or folders that contain runs, as ``rlox plot`` does.

    Parameters
    ----------
    metric : str, optional
        Any name in ``metrics.jsonl``, or one that ``train`` returns; by default the return of evaluations, or of
        training if there are none.
    by : sequence of str
        Keys to group by; by default every key that makes runs different experiments.

    Raises
    ------
    ValueError
        If there are no runs, or no run has the metric or key.
    """
    folders = [Path(path) for path in paths or ("outputs",)]
    chosen = choose_metric(metric, folders)
    runs, notes = read_runs(folders, chosen, by=by)
    return Runs(runs, chosen, group_runs(runs, by), notes)


def compare_runs(
    a: str | os.PathLike[str], b: str | os.PathLike[str], metric: str | None = None, threshold: float | None = None
) -> Comparison:
    """Compare two runs, or two folders of runs, as ``rlox compare`` does; differences are b minus a.

    Raises
    ------
    ValueError
        If a side has no runs, or they have no environment in common.
    """
    chosen = choose_metric(metric, (Path(a), Path(b)))
    (ours, ours_notes), (theirs, theirs_notes) = (read_side(Path(path), chosen) for path in (a, b))
    sides = (
        Runs(ours, chosen, group_runs(ours), ours_notes),
        Runs(theirs, chosen, group_runs(theirs), theirs_notes),
    )
    return Comparison(compare(ours, theirs, chosen, threshold), sides)


def _small(notes: Sequence[str]) -> list[str]:
    return [f"<div><small>{escape(note)}</small></div>" for note in notes]


def _line(group: Group, metric: str) -> Line:
    """Return the interquartile mean of a group with its band."""
    one = curve(group.runs, metric, by_time=False)
    band = np.isfinite(one.middle.low).any()
    return Line(group.label, one.x, one.middle.value, *((one.middle.low, one.middle.high) if band else ()))

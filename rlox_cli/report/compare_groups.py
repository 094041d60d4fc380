"""``rlox compare SWEEP``: compare the groups of runs in one folder with one of them, the baseline."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rlox.config import nearest
from rlox_cli.records.runs import (
    RETURNS,
    Group,
    Run,
    choose_metric,
    ended,
    group_runs,
    join_first_words,
    metric_name,
    read_runs,
    short,
)
from rlox_cli.report.compare import LEVEL, bounds, fewest_runs, verdict
from rlox_cli.report.statistics import interval, to_json_numbers
from rlox_cli.terminal.console import TextConsole, make_table, print_table, print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown


def main(path: Path, metric: str | None, baseline: str | None, as_json: bool) -> None:
    """Compare the groups of runs under `path` that differ in more than the seed, and print the result."""
    metric = choose_metric(metric, [path])
    runs, notes = read_runs([path], metric)
    for note in notes:
        print_text(f"rlox compare: {note}", stderr=True)
    comparison = compare_groups(group_runs(runs), metric, baseline)
    if as_json:
        print(jsonlib.dumps(comparison, allow_nan=False))
    else:
        _print(comparison, TextConsole())


def compare_groups(groups: Sequence[Group], metric: str, baseline: str | None = None) -> dict[str, Any]:
    """Return the comparison of each environment's groups as plain data, with None for numbers that are not finite.

    Parameters
    ----------
    baseline : str, optional
        Label of the group that the others are compared with; by default the first one of each environment.

    Raises
    ------
    UsageError
        If no environment has two groups, or none has the `baseline`.
    """
    by_env: dict[str, list[Group]] = {}
    for group in groups:
        by_env.setdefault(group.env, []).append(group)
    several = {env: members for env, members in by_env.items() if len(members) > 1}
    labels = list(dict.fromkeys(group.label for members in several.values() for group in members))
    if not several:
        found = join_first_words([f"{group.label} on {group.env}" for group in groups])
        raise UsageError(f"one folder must contain two groups of runs on one environment, got {found}; name another B")
    if baseline is not None and baseline not in labels:
        raise UsageError(f"--baseline must be one of the groups, got {baseline!r}; {nearest(baseline, labels)}")
    result: dict[str, Any] = {"metric": metric, "environments": {}}
    for env, members in several.items():
        chosen = [group for group in members if group.label == baseline] or members[:1]
        if baseline is None or chosen[0].label == baseline:
            result["environments"][env] = _compare_with(chosen[0], members, metric)
    return to_json_numbers(result)


def _compare_with(first: Group, members: Sequence[Group], metric: str) -> dict[str, Any]:
    """Compare one environment's groups with the `first`, and return the best first."""
    sides, at = [ended(group.runs) for group in members], list(members).index(first)
    finals = [np.array([run.series[metric].values[-1] for run in side]) for side in sides]
    pairs = [None if group is first else verdict(finals[at], own) for group, own in zip(members, finals, strict=True)]
    adjusted = _adjust([None if pair is None else pair["p_value"] for pair in pairs])
    rows = []
    for group, side, own, pair, p in zip(members, sides, finals, pairs, adjusted, strict=True):
        of = interval([own])
        row: dict[str, Any] = {
            "group": group.label,
            "runs": [{"folder": shown(run.folder), "seed": run.seed, "status": run.status} for run in side],
            "left_out": [run.status for run in group.runs if run.status != "finished"] if _finished(side) else [],
            **{"final": of.value, "low": of.low, "high": of.high, "finished": _finished(side), "verdict": None},
        }
        if pair is not None:
            apart = {key: pair[key] for key in ("difference", "low", "high")}
            row |= {"difference": apart, "improvement": pair["improvement"]}
            row |= {"p_value": pair["p_value"], "p_adjusted": p}
            comparable = _finished(side) == _finished(sides[at])
            if comparable and p is not None and p <= LEVEL and not apart["low"] <= 0 <= apart["high"]:
                better, worse = ("better", "worse") if metric in RETURNS else ("higher", "lower")
                row["verdict"] = better if apart["difference"] > 0 else worse
        rows.append(row)
    rows.sort(key=lambda row: -row["final"])
    return {"baseline": first.label, "groups": rows, "seeds_needed": fewest_runs(len(members) - 1)}


def _finished(runs: Sequence[Run]) -> bool:
    return all(run.status == "finished" for run in runs)


def _adjust(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust the p-values of several comparisons (Holm 1979), so that one of them errs as rarely as one alone."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, i) in enumerate(known):
        adjusted[i] = least = max(least, min(1.0, p * (len(known) - rank)))
    return adjusted


def _print(comparison: dict[str, Any], console: Console) -> None:
    for env, result in comparison["environments"].items():
        base, groups = result["baseline"], result["groups"]
        console.print(f"{env}: interquartile means, compared with {base}")
        apart, of_final, of_apart = f"− {base}", "95 % interval", "95 % interval of it"
        wins = f"beats {base}"
        table = make_table(
            *("group", "runs", f"final {metric_name(comparison['metric'])}", of_final, apart, of_apart, wins, "p"),
            "verdict",
            optional=(wins, of_final, of_apart),
        )
        for row in groups:
            cells = [row["group"], str(len(row["runs"])), short(row["final"]), bounds(row)]
            if "difference" not in row:
                table.add_row(*cells, "", "", "", "", "baseline")
                continue
            p, change = row["p_adjusted"], row["difference"]
            shown_p = "" if p is None else f"{p:.2g}"
            cells += [short(change["difference"]), bounds(change), f"{row['improvement']['value']:.2f}", shown_p]
            table.add_row(*cells, row["verdict"] or "not shown")
        print_table(console, table)
        for row in groups:
            if row["left_out"]:
                n, kinds = len(row["left_out"]), ", ".join(sorted(set(row["left_out"])))
                console.print(f"left out: {n} run{'s' if n > 1 else ''} of {row['group']} ({kinds})")
            elif not row["finished"]:
                console.print(f"no run of {row['group']} is finished")
        fewest, needed = min(len(row["runs"]) for row in groups), result["seeds_needed"]
        if fewest < needed:
            console.print(f"{fewest} runs in a group cannot show a difference here: train {needed} seeds or more")
        tests = "a permutation test of the final scores"
        if len(groups) > 2:
            tests += f", adjusted for {len(groups) - 1} comparisons (Holm)"
        console.print(f"p: {tests}; better or worse: p <= {LEVEL} and the interval of the difference excludes 0")

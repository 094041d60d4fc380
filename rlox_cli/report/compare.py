"""``rlox compare A B``: compare the settings and results of two runs, or two groups of runs.

The verdict says whether their results differ by more than chance.
"""

from __future__ import annotations

import itertools
import json as jsonlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy import stats

from rlox_cli.records.runs import (
    RETURNS,
    Run,
    choose_metric,
    ended,
    find_differing_keys,
    join_first_words,
    metric_name,
    plain,
    read_runs,
    short,
    units,
)
from rlox_cli.report.statistics import difference, improvement, iqm, to_json_numbers
from rlox_cli.terminal.console import PlainTable, TextConsole, make_table, print_table, print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

LEVEL = 0.05  # how often two equal groups may be called different
_SHOWN_BY = 2.8  # standard errors that a difference must have to be found at that level in 80 % of cases
_INTERVAL = 3.92  # standard errors in a 95 % interval
_MOST_RUNS = 1000  # maximum number of runs per side that is recommended


def main(a: Path, b: Path, metric: str | None, threshold: float | None, as_json: bool) -> None:
    """Compare the runs under `a` with those under `b`, and print the result."""
    metric = choose_metric(metric, (a, b))
    if threshold is not None and not math.isfinite(threshold):
        raise UsageError(f"--threshold must be a finite number, got {threshold}")
    sides = []
    for path in (a, b):
        runs, notes = read_side(path, metric)
        for note in notes:
            print_text(f"rlox compare: {note}", stderr=True)
        sides.append(runs)
    comparison = compare(sides[0], sides[1], metric, threshold)
    if as_json:
        print(jsonlib.dumps(comparison, allow_nan=False))
    else:
        console = TextConsole()
        for name, path, runs in zip("AB", (a, b), sides, strict=True):
            console.print(f"{name}  {path}: {len(runs)} run{'s' if len(runs) != 1 else ''}")
        _print(comparison, console)


def read_side(path: Path, metric: str) -> tuple[list[Run], list[str]]:
    """Return the runs under `path`, and notes on those that are left out, or that differ in more than the seed."""
    runs, notes = read_runs([path], metric)
    if keys := find_differing_keys(runs):
        notes.append(f"{path} pools runs that differ in {join_first_words(keys)}")
    return runs, notes


def compare(a: Sequence[Run], b: Sequence[Run], metric: str, threshold: float | None = None) -> dict[str, Any]:
    """Return the comparison as plain data, with None for numbers that are not finite.

    Raises
    ------
    UsageError
        If the sides have a run in common, or have no environment in common.
    """
    if shared := {run.folder.resolve() for run in a} & {run.folder.resolve() for run in b}:
        raise UsageError(f"A and B must not contain the same runs, both contain {shown(min(shared))}")
    envs = sorted({run.env for run in a} & {run.env for run in b})
    if not envs:
        there, others = (", ".join(sorted({run.env for run in side})) for side in (a, b))
        raise UsageError(f"A and B must have an environment in common, got {there} and {others}")
    finals, by_env = [], {}
    for env in envs:
        of_env = [[run for run in side if run.env == env] for side in (a, b)]
        sides = [ended(side) for side in of_env]
        required = _required_score(sides, metric) if threshold is None else threshold
        ours, theirs = (_values(side, metric, -1) for side in sides)
        finals.append((ours, theirs))
        found = verdict(ours, theirs, "better" if metric in RETURNS else "higher")
        done = [any(run.status == "finished" for run in side) for side in sides]
        if done[0] != done[1]:
            one, other = "BA" if done[0] else "AB"
            sentence = (
                f"no verdict, because no run of {one} is finished and runs of {other} are; finish those of {one} "
                "(rlox train resume=RUN)"
            )
            found |= {"winner": None, "runs_needed": None, "sentence": sentence}
        by_env[env] = {
            "unit": units(run for side in sides for run in side),
            "runs": [
                [{"folder": shown(run.folder), "seed": run.seed, "status": run.status} for run in s] for s in sides
            ],
            "metrics": _metrics(sides, metric, required),
            "threshold": required,
            "pairs": _pairs(sides, metric),
            "verdict": found,
            "notes": [note for name, side in zip("AB", of_env, strict=True) for note in _unfinished(name, side)],
        }
    result: dict[str, Any] = {
        "metric": metric,
        "config": _differences([[run.flat for run in side] for side in (a, b)]),
        "versions": _differences([[run.versions for run in side] for side in (a, b)]),
        "environments": by_env,
    }
    if len(envs) > 1:
        result["improvement"] = improvement([b for _, b in finals], [a for a, _ in finals])._asdict()
    return to_json_numbers(result)


def _unfinished(name: str, side: Sequence[Run]) -> list[str]:
    """Return a note if runs of the side `name` are not finished."""
    states = [run.status for run in side if run.status != "finished"]
    kinds = ", ".join(sorted(set(states)))
    if len(states) == len(side):
        return [f"no run of {name} is finished: {kinds}"]
    return [f"{len(states)} of {len(side)} runs of {name} are left out: {kinds}"] if states else []


def verdict(a: np.ndarray, b: np.ndarray, word: str = "better") -> dict[str, Any]:
    """Decide whether the scores of runs distinguish two groups.

    The bootstrap interval of the difference must exclude zero, and a permutation test must agree: with few runs, the
    bootstrap interval is too narrow, while the test keeps its level with any number of runs.

    Parameters
    ----------
    a, b : (S,) arrays
        Scores; the sides may have different numbers.

    Returns
    -------
    dict
        ``winner`` (a, b or None), the ``difference`` of IQMs (b minus a) with ``low`` and ``high``, ``p_value``,
        ``improvement`` (probability that a run of b beats a run of a), ``runs_needed`` per side, ``sentence``.
    """
    apart, wins = difference([b], [a]), improvement([b], [a])
    result: dict[str, Any] = {"winner": None, "difference": apart.value, "low": apart.low, "high": apart.high}
    result |= {"p_value": None, "improvement": wins._asdict(), "runs_needed": None}
    n = min(len(a), len(b))
    if n < 2:
        each = "per side supports" if len(a) == len(b) else "on one side supports"
        result["sentence"] = f"one run {each} no verdict; train more seeds (rlox train -m … seed=0,1,2,3,4)"
        return result
    test = stats.permutation_test(
        (b, a), lambda x, y, axis: iqm(x, axis) - iqm(y, axis), vectorized=True, rng=np.random.default_rng(0)
    )
    result["p_value"] = float(test.pvalue)
    if test.pvalue <= LEVEL and not apart.low <= 0 <= apart.high:
        sign, result["winner"] = (1, "b") if apart.value > 0 else (-1, "a")
        low, high = sorted((sign * apart.low, sign * apart.high))
        ahead, behind = ("B", "A") if sign > 0 else ("A", "B")
        result["sentence"] = (
            f"{ahead} is {word}: its IQM is {short(abs(apart.value))} higher (95 % interval {short(low)} to "
            f"{short(high)}), and a run of {ahead} beats a run of {behind} with probability "
            f"{0.5 + sign * (wins.value - 0.5):.2f}"
        )
        return result
    result["runs_needed"] = needed = _runs_needed(n, abs(apart.value), (apart.high - apart.low) / _INTERVAL)
    counts = f"{len(a)} runs per side" if len(a) == len(b) else f"{len(a)} and {len(b)} runs"
    more = (
        f"it would take more than {_MOST_RUNS:,} runs per side to show a difference of this size"
        if needed is None
        else f"about {needed - n} more per side would show a difference of this size"
    )
    result["sentence"] = (
        f"{counts} do not distinguish A and B: B − A is {short(apart.value)} (95 % interval {short(apart.low)} "
        f"to {short(apart.high)}); {more}"
    )
    return result


def _runs_needed(n: int, size: float, error: float) -> int | None:
    """Return how many runs per side find a difference of `size` in four of five cases.

    With `n` runs per side, the difference has the standard error `error`.
    """
    if size * math.sqrt(_MOST_RUNS) <= _SHOWN_BY * error * math.sqrt(n):
        return None
    return max(n + 1, fewest_runs(), math.ceil(n * (_SHOWN_BY * error / size) ** 2))


def fewest_runs(n_comparisons: int = 1) -> int:
    """Return how many runs per side a permutation test needs to show the clearest of several differences."""
    return next(n for n in itertools.count(2) if 2 / math.comb(2 * n, n) * n_comparisons <= LEVEL)


def _values(runs: Sequence[Run], metric: str, at: int) -> np.ndarray:
    return np.array([run.series[metric].values[at] for run in runs])


def _required_score(sides: Sequence[Sequence[Run]], metric: str) -> float | None:
    """Return the score that the runs' tuned settings must reach; the lowest if there are several."""
    known = [run.reference for side in sides for run in side if run.reference is not None]
    return min(known) if known and metric in RETURNS else None


def _metrics(sides: Sequence[Sequence[Run]], metric: str, required: float | None) -> dict[str, Any]:
    """Return the IQM of each metric on both sides, and the difference of b to a."""
    series = [[run.series[metric] for run in side] for side in sides]
    first = max(s.steps[0] for side in series for s in side)
    last = min(s.steps[-1] for side in series for s in side)
    values = {
        "final": [[s.values[-1] for s in side] for side in series],
        "best": [[s.values.max() for s in side] for side in series],
        "mean_over_steps": [[_mean(s.steps, s.values, first, last) for s in side] for side in series],
        "steps_per_second": [[run.speed for run in side] for side in sides],
    }
    rows: dict[str, Any] = {}
    for name, (a, b) in values.items():
        apart = difference([b], [a])
        rows[name] = {"a": float(iqm(a)), "b": float(iqm(b)), "difference": apart.value}
        rows[name] |= {"low": apart.low, "high": apart.high}
    rows["mean_over_steps"]["steps"] = [int(first), int(last)]
    if required is not None:
        reached = [[_first_at(s.steps, s.values, required) for s in side] for side in series]
        middle = [float(np.median(side)) for side in reached]
        rows["steps_to_threshold"] = {"a": middle[0], "b": middle[1]}
        rows["steps_to_threshold"]["reached"] = [int(np.isfinite(side).sum()) for side in reached]
    return rows


def _mean(steps: np.ndarray, values: np.ndarray, first: int, last: int) -> float:
    """Return the mean of the curve between two steps: its area divided by its width."""
    if first >= last:
        return math.nan
    inner = steps[(steps > first) & (steps < last)]
    x = np.concatenate([[first], inner, [last]])
    return float(np.trapezoid(np.interp(x, steps, values), x) / (last - first))


def _first_at(steps: np.ndarray, values: np.ndarray, required: float) -> float:
    there = np.flatnonzero(values >= required)
    return float(steps[there[0]]) if len(there) else math.inf


def _pairs(sides: Sequence[Sequence[Run]], metric: str) -> dict[str, Any]:
    """Return the seeds that both sides have exactly once, and how often b ended higher with the same seed."""
    a, b = ({run.seed: run.series[metric].values[-1] for run in side} for side in sides)
    if any(len({run.seed for run in side}) < len(side) for side in sides):
        return {"seeds": [], "b_higher": 0, "equal": 0}
    seeds = sorted(a.keys() & b.keys())
    higher, equal = sum(b[seed] > a[seed] for seed in seeds), sum(b[seed] == a[seed] for seed in seeds)
    return {"seeds": seeds, "b_higher": higher, "equal": equal}


def _differences(sides: Sequence[Sequence[dict[str, Any]]]) -> dict[str, list[list[str]]]:
    """Return the keys whose values differ between the sides, with the values of each; none if a side lacks the key.

    The seed is left out, since the runs are listed by seed.
    """
    differing = {}
    for key in dict.fromkeys(key for side in sides for flat in side for key in flat):
        old, new = (sorted({plain(flat[key]) for flat in side if key in flat}) for side in sides)
        if old != new and key != "seed":
            differing[key] = [old, new]
    return differing


def _print(comparison: dict[str, Any], console: Console) -> None:
    for title, differences in (("settings", comparison["config"]), ("versions", comparison["versions"])):
        console.print(f"\n{title}: {'A → B' if differences else 'the same'}")
        # Another algorithm has other keys, which adds no information to its name.
        own = {key for key, sides in differences.items() if "algo.name" in differences and not all(sides)}
        table = make_table("", "", "", "")
        table.show_header = False
        for key, (old, new) in differences.items():
            if key not in own:
                table.add_row(f"  {key}", _join_words(old), "→", _join_words(new))
        if table.row_count:
            print_table(console, table)
        if own:
            console.print(f"  and {len(own)} keys that only one side's algorithms have (--json)")
    for env, result in comparison["environments"].items():
        console.print(f"\n{env}")
        print_table(console, _metrics_table(result, comparison["metric"]))
        pairs, seeds = result["pairs"], [[run["seed"] for run in side] for side in result["runs"]]
        lines = [*result["notes"], f"seeds: A {_seeds(seeds[0])}; B {_seeds(seeds[1])}"]
        if pairs["seeds"]:
            ties = f", {pairs['equal']} equal" if pairs["equal"] else ""
            lines.append(f"seeds that both have: {len(pairs['seeds'])}; B ended higher in {pairs['b_higher']}{ties}")
        wins = result["verdict"]["improvement"]
        if wins["low"] is not None:
            lines.append(f"probability of improvement (a run of B beats a run of A): {_between(wins)}")
            lines.append(f"permutation test of the final scores: p = {result['verdict']['p_value']:.2g}")
        lines.append(f"verdict: {result['verdict']['sentence']}")
        for line in lines:
            console.print(line)
    if "improvement" in comparison and comparison["improvement"]["low"] is not None:
        over = _between(comparison["improvement"])
        console.print(f"\nover the {len(comparison['environments'])} environments: probability of improvement {over}")


def _metrics_table(result: dict[str, Any], metric: str) -> PlainTable:
    metrics = result["metrics"]
    table = make_table("", "A", "B", "B − A", "95 % interval")
    unit = result["unit"]
    first, last = metrics["mean_over_steps"]["steps"]
    span = f"{first:,} to {last:,}" if first < last else "that both have"
    for name, title in (
        ("final", f"final {metric_name(metric)}"),
        ("best", "best"),
        ("mean_over_steps", f"mean over {unit} {span}"),
        ("steps_per_second", f"{unit} per second"),
    ):
        row = metrics[name]
        table.add_row(title, *(short(row[key]) for key in ("a", "b", "difference")), bounds(row))
    if "steps_to_threshold" in metrics:
        row = metrics["steps_to_threshold"]
        cells = [
            f"{short(row[key])} ({n} of {len(side)})"
            for key, n, side in zip("ab", row["reached"], result["runs"], strict=True)
        ]
        table.add_row(f"{unit} to {result['threshold']:g}, median", *cells)
    return table


def bounds(row: dict[str, Any]) -> str:
    """Return the interval from ``low`` to ``high`` for a table; empty if one run has none."""
    return "" if row["low"] is None else f"{short(row['low'])} to {short(row['high'])}"


def _between(of: dict[str, float]) -> str:
    return f"{of['value']:.2f} ({of['low']:.2f} to {of['high']:.2f})"


def _join_words(values: Sequence[str]) -> str:
    return ", ".join(values) if values else "(none)"


def _seeds(seeds: Sequence[int]) -> str:
    first, last = min(seeds), max(seeds)
    whole = len(seeds) > 2 and sorted(seeds) == list(range(first, last + 1))
    return f"{first} to {last}" if whole else ", ".join(map(str, sorted(seeds)))

"""Verdicts on the seeds of one configuration: by a reference score, by other runs, and by the fingerprint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlox.config.run import differences
from rlox_cli.bench import fingerprint, seeds
from rlox_cli.bench.seeds import Run
from rlox_cli.config.compose import Job, compose_jobs
from rlox_cli.report.statistics import Interval, difference, improvement, interval, iqm

PASS, FAIL, MORE = "PASS", "FAIL", "NEED MORE SEEDS"
_FEWEST = 5  # seeds needed for a verdict on the score: with fewer, a bootstrap interval is much too narrow
_MARGIN = 0.1  # share of the others' score, if --margin is not given
# Settings that make scores incomparable. All other settings are judged.
_TASK = ("total_timesteps", "max_time", "init_from", "dataset", "env", "eval")
_NOT_TASK = ("env.workers", "env.backend", "eval.n_points")
# Overrides that choose the tuned settings, in contrast to those that change them.
_CHOICE = re.compile(r"(algo|env|dataset|buffer|imports|logger)=")

Curve = list[dict[str, float]]


@dataclass(frozen=True)
class Others:
    """Runs that ours are compared with."""

    key: str  # suffix of the result's keys: sb3 or before
    title: str
    curves: dict[int, Curve]


@dataclass(frozen=True)
class Question:
    """How runs are judged."""

    threshold: float | None = None  # score for which the time to reach it is reported; None: the reference
    margin: float | None = None  # by which others may be better; None: a tenth of their score
    score_only: bool = False  # leave the fingerprint out
    flags: Sequence[str] = ()  # Hydra's flags, to find the tuned settings
    # The others of a cell, given its label, job and seeds; and the nominal runs of a cell.
    others: Callable[[str, Job, Sequence[int]], Others | None] = field(default=lambda label, job, seeds: None)
    nominal: Callable[[str, Job], dict[str, Any] | None] = field(
        default=lambda label, job: fingerprint.load_nominal(job.algo, job.config.env.id)
    )


def area(curve: Curve) -> float:
    """Return the mean height of an evaluation curve over its steps, which is its area, whatever its length."""
    steps, means = [row["step"] for row in curve], [row["mean"] for row in curve]
    return float(np.trapezoid(means, steps) / (steps[-1] - steps[0])) if steps[-1] > steps[0] else means[-1]


def first_reach(curves: Iterable[Curve], threshold: float) -> dict[str, Any]:
    """Return how many curves reach `threshold`, and when: medians over all curves, null if fewer than half reach it.

    The times are ``steps`` of the environments, and ``cpu_s`` and ``wall_s`` of collection and updates if the curves
    have them.
    """
    rows = [next((row for row in curve if row["mean"] >= threshold), None) for curve in curves]
    found: dict[str, Any] = {"score": threshold, "reached": sum(row is not None for row in rows), "of": len(rows)}
    for name, key in (("steps", "step"), ("cpu_s", "cpu_s"), ("wall_s", "wall_s")):
        values = [math.inf if row is None else row[key] for row in rows if row is None or key in row]
        median = float(np.median(values)) if len(values) == len(rows) else math.inf
        found[name] = median if math.isfinite(median) else None
    return found


def more_seeds(n: int, estimate: Interval, bound: float) -> str:
    """Return how many seeds, instead of `n`, would separate `estimate` from `bound` with this value and spread."""
    width = estimate.value - estimate.low if estimate.value >= bound else estimate.high - estimate.value
    distance = abs(estimate.value - bound)
    if n < _FEWEST or math.isinf(width):
        return f"at least {_FEWEST} seeds"
    needed = math.ceil(n * (width / distance) ** 2) if distance > 0 else math.inf
    return f"about {max(n + 1, needed)} seeds" if needed <= 1000 else "more than 1,000 seeds: the score is at the bound"


def judge_reference(scores: Sequence[float], reference: float) -> tuple[str, str]:
    """Return the verdict against a reference score, and the reason."""
    n, found = len(scores), interval([scores])
    text = f"IQM {interval_text(found)}, reference {reference:g}"
    if n >= _FEWEST and found.low >= reference:
        return PASS, text
    if n >= _FEWEST and found.high < reference:
        return FAIL, text
    return MORE, f"{text}; {more_seeds(n, found, reference)}"


def judge_others(ours: Sequence[float], theirs: Sequence[float], margin: float, title: str) -> tuple[str, str]:
    """Return the verdict against other runs, and the reason. An interval below 0 fails, even within the margin."""
    n, found = min(len(ours), len(theirs)), difference([ours], [theirs])
    text = f"IQM minus that of {title} {interval_text(found, '+')}, margin {margin:.3g}"
    if n >= _FEWEST and found.high < 0:
        return FAIL, text
    if n >= _FEWEST and found.low >= -margin:
        return PASS, text
    return MORE, f"{text}; {more_seeds(n, found, -margin)} of both"


def interval_text(of: Interval, sign: str = "", digits: int | None = None) -> str:
    """Return the value and its interval; by default with three significant digits, and at least one decimal."""
    if digits is None:
        largest = max((abs(number) for number in of if math.isfinite(number)), default=0.0)
        digits = max(1, 2 - math.floor(math.log10(largest))) if largest else 1
    value = f"{of.value:{sign}.{digits}f}"
    if math.isinf(of.high - of.low):
        return f"{value}, no interval from one seed"
    return f"{value} [{of.low:.{digits}f}, {of.high:.{digits}f}]"


def judge_fingerprint(runs: Sequence[Run], cell: dict[str, Any], nominal: dict[str, Any]) -> tuple[str, str] | None:
    """Return the verdict of the fingerprint, and the reason; store the differences in `cell`.

    Runs with other settings are not compared.
    """
    others = seeds.changes(nominal["settings"], cell["settings"])
    if others:
        cell["fingerprint"] = {"other_settings": others}
        return None
    nominal_runs = list(fingerprint.from_table(nominal["quantities"]).values())
    found = fingerprint.compare([run.quantities for run in runs], nominal_runs)
    cell["fingerprint"] = {**vars(found), "differing": [vars(one) for one in found.differing]}
    quantities = f"of {found.n_quantities} quantities ({found.n_ours} runs, {found.n_nominal} nominal runs)"
    if found.differs:
        return FAIL, f"{len(found.differing)} {quantities} differ"
    fewest = fingerprint.count_fewest(found.n_nominal)
    if found.n_ours < fewest:
        return MORE, f"at least {fewest} seeds are needed to find a difference from {found.n_nominal} nominal runs"
    return PASS, f"none {quantities} differs (smallest p {found.smallest_p:.2g}, level {fingerprint.LEVEL:g})"


def task_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the changed settings that make two scores incomparable, in the form of `seeds.changes`."""
    return [
        f"{key} {was} -> {now}"
        for key, (was, now) in differences(old, new)
        if key.partition(".")[0] in _TASK and key not in _NOT_TASK
    ]


def list_task_changes(job: Job, flags: Sequence[str]) -> list[str]:
    """Return how the job's task differs from that of the tuned settings whose ``reference:`` it has.

    Return nothing if the job has a reference of its own.

    Parameters
    ----------
    flags : sequence of str
        As typed, since a folder of the user may contain tuned settings.
    """
    if any("reference" in override.split("=")[0] for override in job.overrides):
        return []
    choices = {"algo": f"algo={job.choice}", "env": f"env={job.config.env.id}"}  # maybe those of a preset
    typed = [override for override in job.overrides if _CHOICE.match(override.lstrip("+"))]
    choices.update((override.lstrip("+").partition("=")[0], override) for override in typed)
    (known,) = compose_jobs(list(flags), list(choices.values()))
    if known.config.reference != job.config.reference:
        return []
    return task_changes(seeds.settings(known.config, known.algo), seeds.settings(job.config, job.algo))


def worst(verdicts: Iterable[str]) -> str | None:
    """Return the worst verdict: FAIL before NEED MORE SEEDS before PASS; None without verdicts."""
    found = set(verdicts)
    return next((word for word in (FAIL, MORE, PASS) if word in found), None)


def judge(label: str, job: Job, runs: dict[int, Run], diverged: dict[int, str], question: Question) -> dict[str, Any]:
    """Return the judgement of one cell, as stored in JSON; see the module.

    Returns
    -------
    dict
        ``final`` and ``curves`` by seed, ``iqm iqm_low iqm_high``, ``area`` under the curve, the first reach of the
        ``threshold``; of others ``iqm_KEY difference low high passes improvement area_KEY final_KEY curves_KEY``;
        ``fingerprint``, ``quantities``; ``verdicts`` and the worst of them as ``verdict``, null without any.
    """
    config = job.config
    cell: dict[str, Any] = {
        "algo": job.algo,
        "env": config.env.id,
        "settings": seeds.settings(config, job.algo),
        "reference": config.reference,
        "diverged": {str(seed): text for seed, text in diverged.items()},
        "final": {str(seed): run.score for seed, run in runs.items()},
        "curves": {str(seed): run.curve for seed, run in runs.items()},
        "quantities": fingerprint.as_table({seed: run.quantities for seed, run in runs.items()}),
    }
    verdicts: list[dict[str, str]] = []

    def add(by: str, found: tuple[str, str] | None) -> None:
        if found is not None:
            verdicts.append({"by": by, "verdict": found[0], "why": found[1]})

    if diverged:
        add("training", (FAIL, f"{len(diverged)} of {len(runs) + len(diverged)} seeds diverged"))
    if runs:
        _judge_runs(label, job, runs, question, cell, add)
    cell["verdicts"] = verdicts
    cell["verdict"] = worst(one["verdict"] for one in verdicts)
    return cell


def _judge_runs(
    label: str, job: Job, runs: dict[int, Run], question: Question, cell: dict[str, Any], add: Callable[..., None]
) -> None:
    scores = [run.score for run in runs.values()]
    found = interval([scores])
    cell.update(iqm=found.value, iqm_low=found.low, iqm_high=found.high)
    cell["area"] = interval([[area(run.curve) for run in runs.values()]])._asdict()
    reference = (cell["reference"] or {}).get("mean_return")
    threshold = reference if question.threshold is None else question.threshold
    if threshold is not None:
        cell["threshold"] = first_reach((run.curve for run in runs.values()), threshold)
    if reference is not None:
        if others_task := list_task_changes(job, question.flags):
            cell["reference_is_of"] = others_task
        else:
            add("reference", judge_reference(scores, reference))
    others = question.others(label, job, list(runs))
    if others is not None:
        theirs = [curve[-1]["mean"] for curve in others.curves.values()]
        margin = _MARGIN * abs(float(iqm(theirs))) if question.margin is None else question.margin
        gap = difference([scores], [theirs])
        cell.update(
            {
                "against": others.title,
                "margin": margin,
                f"iqm_{others.key}": float(iqm(theirs)),
                "difference": gap.value,
                "low": gap.low,
                "high": gap.high,
                "passes": gap.high >= 0,
                "improvement": improvement([scores], [theirs])._asdict(),
                f"area_{others.key}": interval([[area(curve) for curve in others.curves.values()]])._asdict(),
                f"final_{others.key}": {str(seed): curve[-1]["mean"] for seed, curve in others.curves.items()},
                f"curves_{others.key}": {str(seed): curve for seed, curve in others.curves.items()},
            }
        )
        if threshold is not None:
            cell[f"threshold_{others.key}"] = first_reach(others.curves.values(), threshold)
        add("others", judge_others(scores, theirs, margin, others.title))
    nominal = None if question.score_only else question.nominal(label, job)
    if nominal is not None:
        add("fingerprint", judge_fingerprint(list(runs.values()), cell, nominal))

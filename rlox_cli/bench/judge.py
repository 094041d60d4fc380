"""Verdicts on the seeds of one configuration: by a reference, by others' runs, by the fingerprint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlox_cli.bench import fingerprint, seeds
from rlox_cli.bench.seeds import Run
from rlox_cli.config.compose import Job, compose_jobs
from rlox_cli.config.saved import differences
from rlox_cli.report.statistics import Interval, difference, improvement, interval, iqm

PASS, FAIL, MORE = "PASS", "FAIL", "NEED MORE SEEDS"
_FEWEST = 5  # seeds that a verdict on the score takes: of fewer, a bootstrap interval is much too narrow
_MARGIN = 0.1  # of their score, where --margin does not say
# What makes a score another task's: other settings are what is judged.
_TASK = ("total_timesteps", "max_time", "init_from", "dataset", "env", "eval")
_NOT_TASK = ("env.workers", "env.backend", "eval.n_points")
# What the tuned settings were composed of, and not what was changed in them.
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
    """What is judged, beside the runs themselves."""

    threshold: float | None = None  # score whose first reach is timed; None: the reference's
    margin: float | None = None  # by which others may be better; None: a tenth of their score
    score_only: bool = False  # leave the fingerprint out
    flags: Sequence[str] = ()  # of Hydra's, by which the tuned settings are found
    # The others of a cell, given its label, job and seeds; and the nominal runs of a cell.
    others: Callable[[str, Job, Sequence[int]], Others | None] = field(default=lambda label, job, seeds: None)
    nominal: Callable[[str, Job], dict[str, Any] | None] = field(
        default=lambda label, job: fingerprint.load_nominal(job.algo, job.config.env.id)
    )


def area(curve: Curve) -> float:
    """Mean height of an evaluation curve over its steps: what its area says whatever its length."""
    steps, means = [row["step"] for row in curve], [row["mean"] for row in curve]
    return float(np.trapezoid(means, steps) / (steps[-1] - steps[0])) if steps[-1] > steps[0] else means[-1]


def first_reach(curves: Iterable[Curve], threshold: float) -> dict[str, Any]:
    """How many curves reach `threshold`, and when: medians over all, null where fewer than half do.

    ``steps`` of the environments, ``cpu_s`` and ``wall_s`` of collection and updates, as far as the curves have them.
    """
    rows = [next((row for row in curve if row["mean"] >= threshold), None) for curve in curves]
    found: dict[str, Any] = {"score": threshold, "reached": sum(row is not None for row in rows), "of": len(rows)}
    for name, key in (("steps", "step"), ("cpu_s", "cpu_s"), ("wall_s", "wall_s")):
        values = [math.inf if row is None else row[key] for row in rows if row is None or key in row]
        median = float(np.median(values)) if len(values) == len(rows) else math.inf
        found[name] = median if math.isfinite(median) else None
    return found


def more_seeds(n: int, found: Interval, bound: float) -> str:
    """How many seeds would part `found`, of `n`, from `bound`, if the spread stays and so does the value."""
    width = found.value - found.low if found.value >= bound else found.high - found.value
    distance = abs(found.value - bound)
    if n < _FEWEST or math.isinf(width):
        return f"at least {_FEWEST} seeds"
    needed = math.ceil(n * (width / distance) ** 2) if distance > 0 else math.inf
    return f"about {max(n + 1, needed)} seeds" if needed <= 1000 else "more than 1,000 seeds: it is at the bound"


def judge_reference(scores: Sequence[float], reference: float) -> tuple[str, str]:
    """Verdict and reason."""
    n, found = len(scores), interval([scores])
    said = f"IQM {interval_text(found)}, reference {reference:g}"
    if n >= _FEWEST and found.low >= reference:
        return PASS, said
    if n >= _FEWEST and found.high < reference:
        return FAIL, said
    return MORE, f"{said}; {more_seeds(n, found, reference)}"


def judge_others(ours: Sequence[float], theirs: Sequence[float], margin: float, title: str) -> tuple[str, str]:
    """Verdict and reason; what is wholly below 0 fails, however little it is."""
    n, found = min(len(ours), len(theirs)), difference([ours], [theirs])
    said = f"IQM less that of {title} {interval_text(found, '+')}, margin {margin:.3g}"
    if len(ours) >= _FEWEST and found.high < 0:
        return FAIL, said
    if len(ours) >= _FEWEST and found.low >= -margin:
        return PASS, said
    return MORE, f"{said}; {more_seeds(n, found, -margin)} of both"


def interval_text(found: Interval, sign: str = "") -> str:
    return f"{found.value:{sign}.1f} [{found.low:.1f}, {found.high:.1f}]"


def judge_fingerprint(runs: Sequence[Run], cell: dict[str, Any], nominal: dict[str, Any]) -> tuple[str, str] | None:
    """Verdict and reason, and in `cell` what differs; runs of other settings are not compared."""
    others = seeds.changes(nominal["settings"], cell["settings"])
    if others:
        cell["fingerprint"] = {"other_settings": others}
        return None
    nominal_runs = list(fingerprint.from_table(nominal["quantities"]).values())
    found = fingerprint.compare([run.quantities for run in runs], nominal_runs)
    cell["fingerprint"] = {**vars(found), "differing": [vars(one) for one in found.differing]}
    beside = f"of {found.n_quantities} quantities, {found.n_ours} runs beside {found.n_nominal} nominal ones"
    if found.differs:
        return FAIL, f"{len(found.differing)} {beside}, differ"
    if found.n_ours < 2:
        return MORE, "it takes 2 seeds or more"
    return PASS, f"none {beside}, differs (smallest p {found.smallest_p:.2g}, level {fingerprint.LEVEL:g})"


def task_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Settings that make two scores incomparable, as `seeds.changes` says them."""
    return [
        f"{key} {was} -> {now}"
        for key, (was, now) in differences(old, new)
        if key.partition(".")[0] in _TASK and key not in _NOT_TASK
    ]


def tuned_task_changes(job: Job, flags: Sequence[str]) -> list[str]:
    """In which the job's task is not that of the tuned settings whose ``reference:`` it has; none where it has its own.

    Parameters
    ----------
    flags : sequence of str
        As typed: a folder of the user's may hold tuned settings.
    """
    choices = [override for override in job.overrides if _CHOICE.match(override.lstrip("+"))]
    (known,) = compose_jobs(list(flags), choices)
    if known.config.reference != job.config.reference or any("reference" in o.split("=")[0] for o in job.overrides):
        return []
    return task_changes(seeds.settings(known.config, known.algo), seeds.settings(job.config, job.algo))


def worst(verdicts: Iterable[str]) -> str | None:
    """FAIL before NEED MORE SEEDS before PASS; None of nothing."""
    found = set(verdicts)
    return next((word for word in (FAIL, MORE, PASS) if word in found), None)


def judge(label: str, job: Job, runs: dict[int, Run], diverged: dict[int, str], question: Question) -> dict[str, Any]:
    """The judgement of one cell, as JSON has it; see the module.

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
        "diverged": {str(seed): said for seed, said in diverged.items()},
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
        if others_task := tuned_task_changes(job, question.flags):
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

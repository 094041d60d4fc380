"""``rlox bench learn``: does it learn what it must? Several seeds, their interval, and a verdict.

Each seed is evaluated on 20 deterministic episodes of one fresh environment seeded ``10_000 + seed`` at ten points and
at the end. Judged is the last evaluation by its interquartile mean over seeds (IQM), in three ways:

- against the ``reference:`` of the tuned settings, the score they must reach: PASS where the interval of the IQM lies
  at or above it, FAIL where it lies below; no verdict where the task is another one (steps, environment, evaluation);
- against others' runs of the same task (``--against``): FAIL where the interval of the difference lies below 0, PASS
  where it lies above minus the margin;
- by the fingerprint: FAIL where quantities of the runs are not those of nominal ones (`rlox_cli.bench.fingerprint`).

Where an interval holds the bound, MORE SEEDS are needed.
"""

from __future__ import annotations

import json as jsonlib
import math
import re
import secrets
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from rlox.checkpoint import one_line, versions
from rlox_cli.bench import fingerprint, seeds
from rlox_cli.bench.machine import provenance
from rlox_cli.bench.sb3 import recorded_curves, settings_of, trained_curves
from rlox_cli.bench.seeds import Run
from rlox_cli.compose import Job, compose_jobs, split_args
from rlox_cli.dataset_source import with_env
from rlox_cli.errors import UsageError
from rlox_cli.imports import import_modules
from rlox_cli.resume import differences
from rlox_cli.runs import unit_of
from rlox_cli.statistics import Interval, difference, improvement, interval, iqm
from rlox_cli.terminal import make_console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PASS, FAIL, MORE = "PASS", "FAIL", "NEED MORE SEEDS"
EXIT_CODES = {PASS: 0, FAIL: 1, MORE: 3}
_FEWEST = 5  # seeds that a verdict on the score takes: of fewer, a bootstrap interval is much too narrow
_MARGIN = 0.1  # of their score, where --margin does not say
_SHOWN = 8  # differing quantities that are printed
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


def aligned(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """(K,) steps at which there is an evaluation, and (K, R) the curves there; one that stopped early keeps its end."""
    first = max(curve[0]["step"] for curve in curves)
    steps = np.unique([row["step"] for curve in curves for row in curve])
    steps = steps[steps >= first]
    heights = [np.interp(steps, [row["step"] for row in c], [row["mean"] for row in c]) for c in curves]
    return steps, np.stack(heights, axis=-1)


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
    said = f"IQM {_told(found)}, reference {reference:g}"
    if n >= _FEWEST and found.low >= reference:
        return PASS, said
    if n >= _FEWEST and found.high < reference:
        return FAIL, said
    return MORE, f"{said}; {more_seeds(n, found, reference)}"


def judge_others(ours: Sequence[float], theirs: Sequence[float], margin: float, title: str) -> tuple[str, str]:
    """Verdict and reason; what is wholly below 0 fails, however little it is."""
    n, found = min(len(ours), len(theirs)), difference([ours], [theirs])
    said = f"IQM less that of {title} {_told(found, '+')}, margin {margin:.3g}"
    if len(ours) >= _FEWEST and found.high < 0:
        return FAIL, said
    if len(ours) >= _FEWEST and found.low >= -margin:
        return PASS, said
    return MORE, f"{said}; {more_seeds(n, found, -margin)} of both"


def _told(found: Interval, sign: str = "") -> str:
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
    """All that is to be said of one cell, as JSON has it; see the module.

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


def measure(
    label: str, job: Job, chosen: Iterable[int], folder: Path, jobs: int, question: Question, console: Console
) -> dict[str, Any]:
    """Train the seeds of one cell, each in ``folder/LABEL-sSEED``, with a line for each, and judge them."""
    chosen = list(chosen)
    done = 0

    def tell(seed: int, run: Run | str) -> None:
        nonlocal done
        done += 1
        said = run
        if isinstance(run, Run):
            last = run.curve[-1]
            said = f"{run.score:.1f} after {last['step']:,} {unit_of(vars(job.config))}, {last['cpu_s']:.1f} s CPU"
        console.print(f"{label} seed {seed}: {said} ({done} of {len(chosen)})", soft_wrap=True, markup=False)

    name = re.sub(r"[^\w.-]+", "_", label)
    runs, diverged = seeds.train(job.config, job.algo, chosen, lambda seed: folder / f"{name}-s{seed}", jobs, tell)
    return judge(label, job, runs, diverged, question)


def result(command: str, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result file: where it was measured, with what, and all cells."""
    verdict = worst(cell["verdict"] for cell in cells.values())
    return {**provenance(command), "versions": versions(), "verdict": verdict, "cells": cells}


def dumps(found: Any) -> str:
    """Strict JSON on one line; what is not finite is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return jsonlib.dumps(plain(found), allow_nan=False)


def describe(label: str, cell: dict[str, Any], console: Console) -> None:
    """What `judge` found, in lines."""

    def line(name: str, said: str) -> None:
        console.print(f"  {name:<17} {said}", soft_wrap=True, markup=False)

    n, steps = len(cell["final"]), f"{cell['settings']['total_timesteps']:,}"
    console.print(f"{label}: {n} seed{'s' if n != 1 else ''} of {steps} {_unit(cell)}", soft_wrap=True, markup=False)
    for seed, said in cell["diverged"].items():
        line("diverged", f"seed {seed}: {said}")
    key = next((key.removeprefix("iqm_") for key in cell if key in ("iqm_sb3", "iqm_before")), None)
    if n:
        line("final return", f"{_told(Interval(cell['iqm'], cell['iqm_low'], cell['iqm_high']))} (IQM, 95 % interval)")
        beside = f"; theirs {_told(Interval(**cell[f'area_{key}']))}" if key else ""
        line("area under curve", f"{_told(Interval(**cell['area']))} (mean return over training){beside}")
    if "threshold" in cell:
        beside = f"; theirs {_reach(cell[f'threshold_{key}'], _unit(cell))}" if key else ""
        line(f"{cell['threshold']['score']:g} reached", f"{_reach(cell['threshold'], _unit(cell))}{beside}")
    if key:
        line("beats theirs", f"with probability {_told_share(Interval(**cell['improvement']))}")
    found = cell.get("fingerprint", {})
    differing = [str(fingerprint.Quantity(**one)) for one in found.get("differing", [])]
    for said in [*differing[:_SHOWN], *([f"… and {len(differing) - _SHOWN} more"] if differing[_SHOWN:] else [])]:
        line("differs", said)
    if "other_settings" in found:
        line(
            "fingerprint", f"no verdict, for the nominal runs had other settings: {'; '.join(found['other_settings'])}"
        )
    if "reference_is_of" in cell:
        line(
            "reference",
            f"no verdict, for {cell['reference']['mean_return']:g} is that of another task: "
            f"{'; '.join(cell['reference_is_of'])}; name another: --against, or reference={{mean_return:SCORE}}",
        )
    for one in cell["verdicts"]:
        line(one["by"], f"{one['verdict']}: {one['why']}")
    if not cell["verdicts"]:
        line("verdict", "none: there is no `reference:` of this task and no --against to judge against")


def _unit(cell: dict[str, Any]) -> str:
    return unit_of(cell.get("settings", {}))  # results of earlier versions have none


def _reach(found: dict[str, Any], counted: str) -> str:
    times = [
        f"{found[name]:{form}} {unit}"
        for name, form, unit in (("steps", ",.0f", counted), ("cpu_s", ".3g", "s CPU"), ("wall_s", ".3g", "s wall"))
        if found[name] is not None
    ]
    return f"by {found['reached']} of {found['of']}{', median ' + ', '.join(times) if times else ''}"


def _told_share(found: Interval) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def plot(cells: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the picture of `draw`."""
    draw(cells).savefig(path, dpi=110)


def draw(cells: dict[str, dict[str, Any]]) -> Figure:
    """Learning curves: the IQM over seeds with its 95 % band, and the score that is to be reached."""
    from matplotlib.figure import Figure

    from rlox_cli.ticks import spread, thousands, wrapped

    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    figure = Figure(figsize=(max(6.4, 4 * columns + 0.4), 3.4 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    handles = {}
    for axis in axes.flat[len(cells) :]:
        axis.set_visible(False)
    for axis, (label, cell) in zip(axes.flat, cells.items(), strict=False):
        counts: list[str] = []
        sides = (("curves", "rlox", "C0"), ("curves_sb3", "Stable-Baselines3", "C1"), ("curves_before", "before", "C1"))
        for key, name, colour in sides:
            if not cell.get(key):
                continue
            curves = list(cell[key].values())
            steps, heights = aligned(curves)
            band = interval([heights])
            if len(curves) > 1:
                axis.fill_between(steps, band.low, band.high, color=colour, alpha=0.2, linewidth=0)
            (handles[name],) = axis.plot(steps, band.value, marker="." if len(steps) < 3 else "", color=colour)
            counts.append(f"{len(curves)}")
        beside = ""
        if "threshold" in cell:
            score = cell["threshold"]["score"]
            axis.axhline(score, color="0.4", linewidth=0.8, linestyle="--")
            beside = f"\ndashed: to reach, {score:g}"
        seeds_said = f" ({' and '.join(dict.fromkeys(counts))} seed{'' if counts == ['1'] else 's'})"
        axis.set_title(wrapped(label + seeds_said, 44), fontsize=10)
        axis.set_xlabel(_unit(cell).replace("steps", "environment steps") + beside, fontsize=9)
        axis.set_ylabel("evaluation return", fontsize=9)
        axis.tick_params(labelsize=8)
        spread(axis.xaxis, thousands())
        spread(axis.yaxis, most=8)
    # Beside the panels: within one, it would lie on a curve.
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), fontsize=9)
    episodes = sorted({str(cell.get("settings", {}).get("eval", {}).get("n_episodes", 20)) for cell in cells.values()})
    said = f"IQM over seeds and its 95 % bootstrap interval; {' or '.join(episodes)} deterministic episodes a point"
    figure.supxlabel(said, fontsize=9)
    return figure


def write(found: dict[str, Any], path: Path) -> None:
    """The result as JSON, and its curves beside it as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(found) + "\n")
    drawn = {label: cell for label, cell in found["cells"].items() if cell["curves"]}
    if drawn:
        plot(drawn, path.with_suffix(".png"))


def compose_cells(words: list[str]) -> dict[str, Job]:
    """A job for each combination of comma-separated values, by label: ``ppo-CartPole-v1``, and what else is swept.

    Raises
    ------
    UsageError
        For what `rlox train` would refuse, and for a seed: there are several.
    """
    flags, overrides = split_args(words)
    overrides = with_env(overrides)
    if any(re.match(r"\+*seed=", override) for override in overrides):
        raise UsageError("seed must be left out, there are several: --seeds N --first-seed K")
    jobs = compose_jobs([*flags, "-m"], ["logger=none", *overrides])
    given = [set(job.overrides) for job in jobs]
    shared = set.intersection(*given)
    cells = {}
    for job in jobs:
        if job.config.eval.n_points < 1:
            raise UsageError(f"eval.n_points must be at least 1, got {job.config.eval.n_points}")
        own = [o for o in job.overrides if o not in shared and not o.startswith(("algo=", "env="))]
        cells[" ".join([f"{job.algo}-{job.config.env.id}", *own])] = job
    return cells


def _earlier(path: Path, jobs: dict[str, Job], score_only: bool) -> dict[str, dict[str, Any]]:
    """The cells of an earlier result, which holds what will be asked of `jobs`, by label."""
    try:
        cells = jsonlib.loads(path.read_text())["cells"]
        faults = [_fault(cells, label, job, score_only) for label, job in jobs.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise UsageError(
            f"--against must be sb3 or the learn.json of an earlier --out, got {path}: {one_line(e, 80)}"
        ) from e
    for fault in filter(None, faults):
        raise UsageError(f"--against {path} {fault}")
    return cells


def _fault(cells: dict[str, dict[str, Any]], label: str, job: Job, score_only: bool) -> str | None:
    """What a result lacks to be compared with; any other error where it is none."""
    if label not in cells:
        return f"must hold {label}, it has {', '.join(cells)}"
    cell = cells[label]
    if not cell["curves"]:
        return f"must hold a curve of {label}, all its seeds diverged"
    for curve in cell["curves"].values():
        area(curve)
    if "settings" in cell and (others := task_changes(cell["settings"], seeds.settings(job.config, job.algo))):
        return f"must be of the same task, but differs: {'; '.join(others)}"
    if score_only:
        return None
    if not {"settings", "quantities"} <= set(cell):
        return f"has no fingerprint of {label}; --score-only does without"
    fingerprint.from_table(cell["quantities"])
    return None


def ask(
    cells: dict[str, Job],
    chosen: Sequence[int],
    runs: Path,
    console: Console,
    against: str | None,
    reference: Path | None = None,
    peer_pythons: Sequence[Path] = (),
    threshold: float | None = None,
    margin: float | None = None,
    score_only: bool = False,
    flags: Sequence[str] = (),
) -> Question:
    """The question that the options of the command put of `cells`; what is recorded is read now, before any training.

    Raises
    ------
    UsageError
        Where they do not fit together, or a file does not hold what is to be compared with.
    """
    question = Question(threshold, margin, score_only, flags)
    if against is None:
        if reference is not None or peer_pythons:
            raise UsageError("--reference and --peer-python must stand beside --against sb3")
        return question
    if against == "sb3":
        if (reference is None) == (not peer_pythons):
            raise UsageError(
                "--against sb3 must have either --reference FOLDER, its recorded curves, or --peer-python PATH, an "
                "interpreter that trains it"
            )
        if reference is not None:
            recorded = {
                label: Others("sb3", *recorded_curves(reference, label, job, chosen)) for label, job in cells.items()
            }
            return replace(question, others=lambda label, job, chosen: recorded[label])
        for job in cells.values():
            settings_of(job.config, job.algo)  # what has no counterpart is told

        def trained(label: str, job: Job, chosen: Sequence[int]) -> Others:
            return Others("sb3", *trained_curves(peer_pythons, label, job, chosen, runs / "sb3", console))

        return replace(question, others=trained)
    earlier = _earlier(Path(against), cells, score_only)

    def before(label: str, job: Job, chosen: Sequence[int]) -> Others:
        curves = {int(seed): curve for seed, curve in earlier[label]["curves"].items()}
        return Others("before", against, curves)

    return replace(question, others=before, nominal=lambda label, job: earlier[label])


def main(
    words: list[str],
    n_seeds: int,
    first_seed: int,
    against: str | None,
    reference: Path | None,
    peer_pythons: list[Path],
    runs: Path | None,
    jobs: int,
    threshold: float | None,
    margin: float | None,
    score_only: bool,
    as_json: bool,
    out: Path | None,
    imports: list[str],
) -> int:
    """Train, judge, print, and with `out` write ``learn.json`` and ``learn.png``; the command's exit code."""
    for name, value in (("--threshold", threshold), ("--margin", margin)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{name} must be a finite number, got {value}")
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out must be a folder, got the file {out}")
    import_modules(imports)
    progress = Console(stderr=True, highlight=False)
    chosen = [*words, *([f"imports=[{','.join(imports)}]"] if imports else [])]
    cells = compose_cells(chosen)
    if runs is None:
        runs = Path("outputs/learn") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{secrets.token_hex(2)}"
    seeds_of_each = range(first_seed, first_seed + n_seeds)
    question = ask(
        cells,
        seeds_of_each,
        runs,
        progress,
        against,
        reference,
        peer_pythons,
        threshold,
        margin,
        score_only,
        split_args(chosen)[0],
    )
    progress.print(f"runs in {runs}; if interrupted, the same command with --runs {runs} goes on", soft_wrap=True)
    for name in dict.fromkeys(job.tuned for job in cells.values() if job.tuned):
        progress.print(f"tuned settings: {name}", soft_wrap=True)
    options = [f"--seeds {n_seeds}", f"--first-seed {first_seed}"] + (["--against sb3"] if against == "sb3" else [])
    command = " ".join(["rlox bench learn", *map(shlex.quote, words), *options])
    judged = {label: measure(label, job, seeds_of_each, runs, jobs, question, progress) for label, job in cells.items()}
    found = result(command, judged)
    if out is not None:
        write(found, out / "learn.json")
    if as_json:
        print(dumps(found))
    else:
        console = make_console()
        for label, cell in judged.items():
            describe(label, cell, console)
        console.print(found["verdict"] or "nothing to judge against")
    return EXIT_CODES.get(found["verdict"], 0)

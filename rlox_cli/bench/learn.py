"""``rlox bench learn``: does an algorithm learn as well as it must? Several seeds, an interval, and a verdict.

Each seed is evaluated on 20 deterministic episodes of one fresh environment seeded ``10_000 + seed``, at ten points,
the last one at the end. The interquartile mean (IQM) of the last evaluation over seeds is judged in three ways:

- against the ``reference:`` of the tuned settings, the score that they must reach: PASS if the interval of the IQM is
  at or above it, FAIL if it is below; no verdict if the task is a different one (steps, environment, evaluation);
- against other runs of the same task (``--against``): FAIL if the interval of the difference is below 0, PASS if it is
  above minus the margin;
- by the fingerprint: FAIL if quantities of the runs differ from those of nominal runs (`rlox_cli.bench.fingerprint`).

If an interval contains the bound, MORE SEEDS are needed.
"""

from __future__ import annotations

import json as jsonlib
import math
import re
import secrets
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from rlox.checkpoint import one_line, versions
from rlox.config.run import differences, to_plain
from rlox_cli.bench import fingerprint, seeds
from rlox_cli.bench.curves import draw
from rlox_cli.bench.judge import FAIL, MORE, PASS, Others, Question, area, interval_text, judge, task_changes, worst
from rlox_cli.bench.machine import provenance
from rlox_cli.bench.sb3 import find_python, read_curves, settings_of, train_curves
from rlox_cli.bench.seeds import Run
from rlox_cli.config.compose import Job, compose_jobs
from rlox_cli.config.overrides import split_args, without_password
from rlox_cli.config.schema import with_env
from rlox_cli.families.imports import import_modules
from rlox_cli.records.runs import short, unit_of
from rlox_cli.report.statistics import Interval, to_json_numbers
from rlox_cli.terminal.console import TextConsole
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path

EXIT_CODES = {PASS: 0, FAIL: 1, MORE: 3}
_SHOWN = 8  # maximum number of differing quantities to print


def measure(
    label: str, job: Job, chosen: Iterable[int], folder: Path, jobs: int, question: Question, console: Console
) -> dict[str, Any]:
    """Train the seeds of one cell, each in ``folder/LABEL-sSEED``, print a line for each, and judge them."""
    chosen = list(chosen)
    done = 0

    def report(seed: int, run: Run | str) -> None:
        nonlocal done
        done += 1
        text = run
        if isinstance(run, Run):
            last = run.curve[-1]
            text = f"{short(run.score)} after {last['step']:,} {unit_of(vars(job.config))}, {last['cpu_s']:.1f} s CPU"
        console.print(f"{label} seed {seed}: {text} ({done} of {len(chosen)})")

    name = seeds.file_name(label)
    runs, diverged = seeds.train(job.config, job.algo, chosen, lambda seed: folder / f"{name}-s{seed}", jobs, report)
    return judge(label, job, runs, diverged, question)


def result(command: str, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the result file: where and with what it was measured, and all cells."""
    verdict = worst(cell["verdict"] for cell in cells.values())
    return {**provenance(command), "versions": versions(), "verdict": verdict, "cells": cells}


def dumps(content: dict[str, Any]) -> str:
    """Return strict JSON on one line; numbers that are not finite become null."""
    return jsonlib.dumps(to_json_numbers(content), allow_nan=False)


def describe(label: str, cell: dict[str, Any], console: Console) -> None:
    """Print the result of `judge`."""

    def line(name: str, text: str) -> None:
        console.print(f"  {name:<17} {text}")

    n, steps = len(cell["final"]), f"{cell['settings']['total_timesteps']:,}"
    console.print(f"{label}: {n} seed{'s' if n != 1 else ''} of {steps} {_unit(cell)}")
    for seed, text in cell["diverged"].items():
        line("diverged", f"seed {seed}: {text}")
    key = next((key.removeprefix("iqm_") for key in cell if key in ("iqm_sb3", "iqm_before")), None)
    if n:
        score = interval_text(Interval(cell["iqm"], cell["iqm_low"], cell["iqm_high"]))
        line("final return", f"{score} (IQM{', 95 % interval' if n > 1 else ''})")
        theirs = f"; theirs {interval_text(Interval(**cell[f'area_{key}']))}" if key else ""
        line("area under curve", f"{interval_text(Interval(**cell['area']))} (mean return over training){theirs}")
    if "threshold" in cell:
        theirs = f"; theirs {_reached_text(cell[f'threshold_{key}'], _unit(cell))}" if key else ""
        line(f"{cell['threshold']['score']:g} reached", f"{_reached_text(cell['threshold'], _unit(cell))}{theirs}")
    if key:
        line("beats theirs", f"with probability {interval_text(Interval(**cell['improvement']), digits=2)}")
    found = cell.get("fingerprint", {})
    differing = [str(fingerprint.Quantity(**one)) for one in found.get("differing", [])]
    for text in [*differing[:_SHOWN], *([f"… and {len(differing) - _SHOWN} more"] if differing[_SHOWN:] else [])]:
        line("differs", text)
    if "other_settings" in found:
        line(
            "fingerprint",
            f"no verdict, because the nominal runs had other settings: {'; '.join(found['other_settings'])}",
        )
    if "reference_is_of" in cell:
        line(
            "reference",
            f"no verdict, because {cell['reference']['mean_return']:g} is for another task: "
            f"{'; '.join(cell['reference_is_of'])}; use --against, or reference={{mean_return:SCORE}}",
        )
    for one in cell["verdicts"]:
        line(one["by"], f"{one['verdict']}: {one['why']}")
    if not cell["verdicts"]:
        line("verdict", "none: there is no `reference:` for this task and no --against to judge against")


def _unit(cell: dict[str, Any]) -> str:
    return unit_of(cell.get("settings", {}))  # results of earlier versions have none


def _reached_text(reached: dict[str, Any], counted: str) -> str:
    times = [
        f"{reached[name]:{form}} {unit}"
        for name, form, unit in (("steps", ",.0f", counted), ("cpu_s", ".3g", "s CPU"), ("wall_s", ".3g", "s wall"))
        if reached[name] is not None
    ]
    return f"by {reached['reached']} of {reached['of']}{', median ' + ', '.join(times) if times else ''}"


def write(content: dict[str, Any], path: Path) -> None:
    """Write the result as JSON, and its curves as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(content) + "\n", "utf-8")
    drawn = {label: cell for label, cell in content["cells"].items() if cell["curves"]}
    if drawn:
        draw(drawn).savefig(path.with_suffix(".png"), dpi=110)


def compose_cells(words: list[str]) -> dict[str, Job]:
    """Return a job for each combination of comma-separated values.

    The keys are labels: ``ppo-CartPole-v1`` and the values of other swept keys. Seeds of an experiment are left out.

    Raises
    ------
    UsageError
        If `rlox train` would reject the words, or a seed is given, since there are several, or a setting refers to it.
    """
    flags, overrides = split_args(words)
    overrides = with_env(overrides)
    if any(re.match(r"\+*seed=", override) for override in overrides):
        raise UsageError("seed must be left out, since there are several; use --seeds N --first-seed K")
    jobs, others = (compose_jobs([*flags, "-m"], ["logger=none", *overrides, f"seed={seed}"]) for seed in (0, 1))
    for job, other in zip(jobs, others, strict=True):
        differ = differences(to_plain(job.config, job.algo), to_plain(other.config, other.algo))
        if keys := [key for key, _ in differ if key != "seed"]:
            raise UsageError(
                f"{', '.join(keys)} must not depend on seed, since there are several; type the value, or leave it out"
            )
    lists = [set(job.overrides) for job in jobs]
    shared = set.intersection(*lists)
    cells = {}
    for job in jobs:
        if job.config.eval.n_points < 1:
            raise UsageError(f"eval.n_points must be at least 1, got {job.config.eval.n_points}")
        own = [o for o in job.overrides if o not in shared and not o.startswith(("algo=", "env="))]
        cells[" ".join([f"{job.choice}-{job.config.env.id}", *own])] = job
    return cells


def _earlier(path: Path, jobs: dict[str, Job], score_only: bool) -> dict[str, dict[str, Any]]:
    """Return the cells of an earlier result, by the label of the job that each is compared with, after checking them.

    A job without a cell of its label is compared with the environment's only cell, of another algorithm.
    """
    try:
        cells = dict(jsonlib.loads(path.read_text("utf-8"))["cells"])
        for env in {job.config.env.id for label, job in jobs.items() if label not in cells}:
            ours = [label for label, job in jobs.items() if job.config.env.id == env]
            theirs = [cell for cell in cells.values() if cell.get("settings", {}).get("env", {}).get("id") == env]
            if len(ours) == len(theirs) == 1:
                cells[ours[0]] = theirs[0]
        faults = [_fault(cells, label, job, score_only) for label, job in jobs.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise UsageError(
            f"--against must be sb3 or the learn.json of an earlier --out, got {path}: {one_line(e, 80)}"
        ) from e
    for fault in filter(None, faults):
        raise UsageError(f"--against {path} {fault}")
    return cells


def _fault(cells: dict[str, dict[str, Any]], label: str, job: Job, score_only: bool) -> str | None:
    """Return why a result cannot be compared with, or None. Raise some other error if it is not a result."""
    if label not in cells:
        return f"must hold {label}, but has {', '.join(cells)}"
    cell = cells[label]
    if not cell["curves"]:
        return f"must hold a curve of {label}, but all its seeds diverged"
    for curve in cell["curves"].values():
        area(curve)
    if "settings" in cell and (others := task_changes(cell["settings"], seeds.settings(job.config, job.algo))):
        return f"must be of the same task, but differs: {'; '.join(others)}"
    if score_only:
        return None
    if not {"settings", "quantities"} <= set(cell) or not fingerprint.from_table(cell["quantities"]):
        return f"has no fingerprint of {label}; add --score-only to skip it"
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
    """Return the question that the options of the command ask about `cells`. Recorded data is read before any training.

    Raises
    ------
    UsageError
        If the options do not fit together, or a file does not have the data to compare with.
    """
    question = Question(threshold, margin, score_only, flags)
    if against is None:
        if reference is not None or peer_pythons:
            raise UsageError("--reference and --peer-python must be used with --against sb3")
        return question
    if against == "sb3":
        if (reference is None) == (not peer_pythons):
            raise UsageError(
                "--against sb3 must be used with either --reference FOLDER, its recorded curves, or --peer-python "
                "PATH, an interpreter that trains it"
            )
        if reference is not None:
            recorded = {
                label: Others("sb3", *read_curves(reference, label, job, chosen)) for label, job in cells.items()
            }
            return replace(question, others=lambda label, job, chosen: recorded[label])
        for job in cells.values():
            settings_of(job.config, job.algo)  # raises for settings without counterpart
        python = find_python(peer_pythons)

        def trained(label: str, job: Job, chosen: Sequence[int]) -> Others:
            return Others("sb3", *train_curves(python, label, job, chosen, runs / "sb3", console))

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
    """Train, judge and print; with `out`, write ``learn.json`` and ``learn.png``. Return the command's exit code."""
    for name, value in (("--threshold", threshold), ("--margin", margin)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{name} must be a finite number, got {value}")
    out = None if out is None else output_path("--out", out, folder=True)
    runs = None if runs is None else output_path("--runs", runs, folder=True)
    import_modules(imports)
    progress = TextConsole(stderr=True)
    words = [without_password(word) for word in words]  # they are written into learn.json
    chosen = [*words, *([f"imports=[{','.join(imports)}]"] if imports else [])]
    cells = compose_cells(chosen)
    if runs is None:
        runs = Path("outputs/learn") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{secrets.token_hex(2)}"
    seeds_of_each = range(first_seed, first_seed + n_seeds)
    if against == "sb3" and seeds_of_each.stop > 2**32:
        raise UsageError(f"--first-seed must keep the seeds below 2**32 with --against sb3, got {first_seed}")
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
    progress.print(f"runs in {runs}; if interrupted, the same command with --runs {runs} continues")
    for name in dict.fromkeys(job.tuned for job in cells.values() if job.tuned):
        progress.print(f"tuned settings: {name}")
    options: dict[str, list[Any]] = {
        "--seeds": [n_seeds],
        "--first-seed": [first_seed],
        "--import": imports,
        "--against": [] if against is None else [against],
        "--reference": [] if reference is None else [reference],
        "--peer-python": ["PYTHON"] * len(peer_pythons),
        "--threshold": [] if threshold is None else [threshold],
        "--margin": [] if margin is None else [margin],
    }
    typed = [*words, *(str(part) for name, values in options.items() for value in values for part in (name, value))]
    command = shlex.join(["rlox", "bench", "learn", *typed, *(["--score-only"] if score_only else [])])
    judged = {label: measure(label, job, seeds_of_each, runs, jobs, question, progress) for label, job in cells.items()}
    outcome = result(command, judged)
    if out is not None:
        write(outcome, out / "learn.json")
    if as_json:
        print(dumps(outcome))
    else:
        console = TextConsole()
        for label, cell in judged.items():
            describe(label, cell, console)
        console.print(outcome["verdict"] or "nothing to judge against")
    return EXIT_CODES.get(outcome["verdict"], 0)

"""The results of a study: a table of its trials, the best one as a command and a file, and a plot of its course."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from rlox.checkpoint import run_files
from rlox_cli.config.ranges import Search
from rlox_cli.families.imports import import_words
from rlox_cli.records.ledger import Sweep
from rlox_cli.sweep.study import best_trial, format_value
from rlox_cli.terminal.account import paragraph
from rlox_cli.terminal.console import PlainTable, make_table, print_table
from rlox_cli.terminal.paths import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPERIMENT = Path("experiment") / "best.yaml"
PICTURE = "study.png"
_GROUPS = ("algo", "env", "buffer", "dataset", "tuned")
_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "open",
    TrialState.WAITING: "open",
}


def trials_table(study: optuna.Study) -> PlainTable:
    """Return a table with one row per trial, the best first; trials that failed or are open come last."""
    trials = study.get_trials(deepcopy=False)
    keys = list(dict.fromkeys(key for trial in trials for key in trial.params))
    table = make_table("trial", "value", "state", *(key.removeprefix("algo.") for key in keys), "")
    order = {TrialState.COMPLETE: 0, TrialState.PRUNED: 1}
    for trial in sorted(trials, key=lambda t: (order.get(t.state, 2), -(t.value or 0.0), t.number)):
        value = "" if trial.value is None else f"{trial.value:.1f}"
        row = [format_value(trial.params[key]) if key in trial.params else "" for key in keys]
        note = trial.user_attrs.get("error" if trial.state is TrialState.FAIL else "pruned", "")
        table.add_row(str(trial.number), value, _STATES[trial.state], *row, note)
    return table


def report(study: optuna.Study, search: Search, sweep: Sweep, console: Console) -> bool:
    """Print the trials and the best one, and write ``experiment/best.yaml`` and ``study.png`` into the sweep's folder.

    Return whether any trial has a value.
    """
    folder, head = sweep.folder, sweep.head
    print_table(console, trials_table(study))
    best = best_trial(study)
    if best is None:
        console.print("no trial has a value, so there is no best one")
        return False
    overrides = search.overrides(best.params)
    with run_files.replace_file(folder, str(EXPERIMENT)) as file:
        file.write(experiment_text(overrides, best).encode())
    importances = importance(study)
    try:
        with run_files.replace_file(folder, PICTURE) as file:
            draw(study, importances).savefig(file, dpi=110)
        picture = shown(folder / PICTURE)
    except ImportError as e:
        picture = paragraph(e)
    shares = ", ".join(
        f"{key.removeprefix('algo.')} {share:.0%}" for key, share in importances.items() if share >= 0.005
    )
    flags = [flag for flag in head.flags if flag not in ("-m", "--multirun")]
    imports = import_words(head.imports)
    words = [word for word in overrides if not word.startswith("imports=")]
    # Hydra takes one folder of the user's, and the experiment may stand on one in the folder that was typed.
    experiment = "" if flags else f"rlox train {shlex.join(['-cd', shown(folder), *imports])} experiment=best"
    for name, value in (
        ("best", f"trial {best.number}: mean return {best.value:.1f}"),
        ("train it", f"rlox train {shlex.join([*flags, *imports, *words])}"),
        ("as a file", experiment),
        ("importance", shares),
        ("picture", picture),
    ):
        if value:
            console.print(f"  {name:<12} {value}")
    return True


def experiment_text(overrides: list[str], best: FrozenTrial) -> str:
    """Return `overrides` as the text of a YAML file for conf/experiment, without the logger, which its user chooses."""
    defaults: list[Any] = []
    values: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        key, value = override.key_or_group, override.value()
        if key == "experiment":
            defaults.insert(0, value)
        elif key in _GROUPS:
            defaults.append({f"override /{key}": value})
        elif override.type is not OverrideType.DEL and not key.startswith("logger"):
            *sections, name = key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
    plain = yaml.safe_dump({"defaults": [*defaults, "_self_"], **values}, sort_keys=False)
    comment = f"Trial {best.number} of a search, which reached a mean return of {best.value:.1f}."
    return f"# @package _global_\n# {comment}\n{plain}"


def importance(study: optuna.Study) -> dict[str, float]:
    """Return each key's share of the difference between good trials and others, the largest first; empty if unknown.

    PED-ANOVA (Watanabe, Bansal and Hutter 2023, arXiv:2304.10255), over trials that have ended.
    """
    values = {trial.value for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))}
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return {}
    return optuna.importance.get_param_importances(study)


def draw(study: optuna.Study, importances: dict[str, float]) -> Figure:
    """Plot the study's course, and the importance of each key."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    from rlox_cli.report.ticks import spread, wrap_text

    trials = study.get_trials(deepcopy=False)
    done = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    cut = [trial for trial in trials if trial.state is TrialState.PRUNED and trial.value is not None]
    figure = Figure(figsize=(12 if importances else 7, max(4.5, 0.32 * len(importances) + 1.5)), layout="constrained")
    axes = figure.subplots(1, 2 if importances else 1, squeeze=False)[0]
    course = axes[0]
    course.plot([t.number for t in done], [t.value for t in done], "o", color="tab:blue", label="trial")
    if cut:
        course.plot(
            [t.number for t in cut],
            [t.value for t in cut],
            "x",
            color="tab:gray",
            label="pruned, at its last evaluation",
        )
    best = [max(t.value for t in done[: i + 1]) for i in range(len(done))]
    numbers = [*(t.number for t in done), trials[-1].number]
    course.step(numbers, [*best, best[-1]], where="post", color="tab:orange", linewidth=2, label="best so far")
    course.set(xlabel="trial", ylabel="mean return (undiscounted)", title="course of the search")
    course.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    spread(course.yaxis, most=8)
    course.grid(alpha=0.3)
    figure.legend(loc="outside lower left", ncols=3, fontsize=12)
    if importances:
        names = [wrap_text(name.removeprefix("algo."), 30) for name in reversed(importances)]
        shares = list(reversed(importances.values()))
        axes[1].barh(names, shares, color="tab:blue")
        for i, share in enumerate(shares):
            axes[1].annotate(f"{share:.0%}", (share, i), (4, 0), textcoords="offset points", va="center", size=12)
        axes[1].margins(x=0.12)
        axes[1].set(
            xlabel="share of the difference between\ngood trials and others",
            title=f"importance (PED-ANOVA),\n{len(done)} finished trials",
        )
        spread(axes[1].xaxis, PercentFormatter(1.0, 0), 4)
        axes[1].grid(axis="x", alpha=0.3)
    for axis in axes:
        axis.tick_params(labelsize=12)
        axis.xaxis.label.set_size(13)
        axis.yaxis.label.set_size(13)
        axis.title.set_size(14)
    return figure

"""Runs on disk, read for plots and comparisons: their configuration, their progress and what they recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlox.algorithms import entry_of, resolve
from rlox.buffers import buffer_config_class, buffer_names
from rlox.callbacks.loggers import tracker_name
from rlox.config import RunConfig, nearest
from rlox.config.base import operational_keys
from rlox.tracking.record import FILE, Ledger, is_alive, read_rows
from rlox.tracking.store import read_config
from rlox_cli.records.folders import find_runs
from rlox_cli.terminal.account import paragraph
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

EVALUATION = "eval/mean_return"
RETURNS = (EVALUATION, tracker_name("mean_reward"))
# Metrics that are plotted in addition to the requested one, for runs that train a language model.
LANGUAGE = tuple(
    tracker_name(name) for name in ("mean_reward", "accuracy", "kl", "entropy", "completion_length", "clip_fraction")
)
_COLLECT, _UPDATE = "time/collect_s", "time/update_s"
_MOST_LISTED = 4
PATH = "path"  # --by path: one group for each PATH that was typed


def unit_of(config: Mapping[str, Any]) -> str:
    """Return what a run counts, from its configuration nested as in config.yaml: ``steps``, or offline ``updates``."""
    # With a replay memory as well, the dataset is mixed with collected transitions.
    offline = config.get("dataset") is not None and config.get("buffer") is None
    return "updates" if offline else "steps"


class Series(NamedTuple):
    """A metric's finite values, (R,) each, in the order of the steps."""

    steps: np.ndarray  # environment steps; offline: updates
    seconds: np.ndarray  # of training, without the time between a stop and a resume
    values: np.ndarray


@dataclass
class Run:
    """The configuration, end and selected metrics of a run, without rows that a resume superseded."""

    folder: Path
    config: dict[str, Any]  # as config.yaml nests it
    flat: dict[str, Any]  # the same, with dotted keys
    versions: dict[str, str]
    status: str  # finished, interrupted, failed, killed or running
    steps: int
    seconds: float
    series: dict[str, Series]  # the requested metrics that have a value
    recorded: set[str]  # names of all metrics
    shares: dict[str, float]  # of the seconds: collect, update, other; empty if not recorded
    path: str = ""  # name of the path that the run was found under

    @property
    def algo(self) -> str:
        return self.flat["algo.name"]

    @property
    def env(self) -> str:
        return self.flat["env.id"]

    @property
    def seed(self) -> int:
        return self.flat["seed"]

    @property
    def reference(self) -> float | None:
        """The score that the tuned settings must reach."""
        value: Any = self.flat.get("reference.mean_return")
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None

    @property
    def unit(self) -> str:
        """What the run counts: ``steps`` of the environment, or ``updates``."""
        return unit_of(self.config)

    @property
    def speed(self) -> float:
        """Steps (offline: updates) per second of the whole training, evaluations and checkpoints included."""
        return self.steps / self.seconds if self.seconds > 0 else math.nan


def units(runs: Iterable[Run]) -> str:
    """Return what the runs count; ``steps or updates`` if they differ."""
    return " or ".join(sorted({run.unit for run in runs}))


def translate_metric(metric: str) -> str:
    """Return the metric's name in the record, where ``mean_reward`` is ``episode/return``."""
    return metric if "/" in metric else tracker_name(metric)


def choose_metric(metric: str | None, paths: Iterable[Path]) -> str:
    """Return the name of `metric` in the record.

    By default it is the return of evaluations or, if no run under `paths` was evaluated, that of training.
    """
    if metric is not None:
        return translate_metric(metric)
    evaluated = any(_has(folder, EVALUATION) for path in paths for folder in find_runs(path))
    return EVALUATION if evaluated else RETURNS[1]


def _has(folder: Path, metric: str) -> bool:
    with suppress(OSError, ValueError):  # a damaged run is reported when it is read
        return any(metric in row for row, _ in read_rows(folder / FILE))
    return False


def metric_name(metric: str) -> str:
    """Return the metric's name as plots and tables show it."""
    return {EVALUATION: "evaluation return", RETURNS[1]: "training return"}.get(metric, metric)


def short(value: float | None) -> str:
    """Format a number for a table, with about four digits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ended(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose last value is final: the finished ones, or all runs if none is finished."""
    return [run for run in runs if run.status == "finished"] or list(runs)


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("env.id", …)`` for ``{"env": {"id": …}}``. An empty mapping is yielded as a value."""
    if not isinstance(config, dict) or not config:
        yield prefix, config
        return
    for key, value in config.items():
        yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))


def read_run(folder: Path, metrics: Iterable[str]) -> Run:
    """Read a run folder.

    Raises
    ------
    ValueError
        If its configuration or its record is damaged; the message names file and line.
    OSError
        If they cannot be read.
    """
    config = read_config(folder)
    flat = dict(flatten(config))
    for key, kind in (("algo.name", str), ("env.id", str), ("seed", int), ("preset", str)):
        if type(flat.get(key)) is not kind and not (key == "preset" and flat.get(key) is None):
            raise ValueError(f"{shown(folder / 'config.yaml')}: {key} must have a valid value, got {flat.get(key)!r}")
    alive = is_alive(folder)
    ledger = Ledger(folder)
    ledger.scan()
    if not ledger.starts:
        raise ValueError(f"{shown(folder)} has not started: its record is empty")
    chosen = {*metrics, *(LANGUAGE if flat.get("model") else ())}
    points_by_name: dict[str, list[tuple[int, float, float]]] = {name: [] for name in chosen}
    recorded: set[str] = set()
    spent = {"collect": 0.0, "update": 0.0}
    segment, before, seconds, steps = -1, 0.0, 0.0, 0
    for row, _ in ledger.rows(provisional=True):
        if row["segment"] != segment:
            segment, before = row["segment"], seconds
        seconds = before + max(0.0, row["time"] - ledger.starts[segment]["time"])
        steps = row["step"]
        recorded.update(row)
        spent["collect"] += row.get(_COLLECT) or 0.0
        spent["update"] += row.get(_UPDATE) or 0.0
        for name, points in points_by_name.items():
            if (value := row.get(name)) is not None and math.isfinite(value):
                points.append((steps, seconds, value))
    versions = ledger.starts[ledger.segment].get("versions")
    shares = {}
    if seconds > 0 and _COLLECT in recorded:
        shares = {name: min(1.0, value / seconds) for name, value in spent.items()}
        shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    return Run(
        folder,
        config,
        flat,
        versions if isinstance(versions, dict) else {},
        "running" if alive else ledger.end["status"] if ledger.end else "killed",
        steps,
        seconds,
        {name: Series(*map(np.array, zip(*points, strict=True))) for name, points in points_by_name.items() if points},
        recorded - {"segment", "step", "time"},
        shares,
    )


def read_runs(
    paths: Sequence[Path], metric: str = EVALUATION, names: Iterable[str] | None = None, by: Sequence[str] = ()
) -> tuple[list[Run], list[str]]:
    """Return the runs under `paths` that have a value of `metric`, and a note on each run that is left out.

    Runs with the same settings and the same seed are duplicates: only the one that came farthest is used.

    Parameters
    ----------
    names : iterable of str, optional
        The name of each path; by default the path itself.
    by : sequence of str
        Keys that the runs will be grouped by, as for `group_runs`. Runs that differ in one of them are no duplicates,
        even if the key does not change results. With ``path``, a path stands for a difference that no setting shows,
        such as a change of the code.

    Raises
    ------
    UsageError
        If there is no run.
    """
    runs: dict[tuple, Run] = {}
    notes, recorded, seen, without = [], set(), set(), []
    for path, name in zip(paths, map(str, paths) if names is None else names, strict=True):
        folders = find_runs(path)
        if not folders:
            raise UsageError(f"no runs under {path}; name run folders, or folders that contain runs (`rlox ls runs`)")
        for folder in folders:
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                run = read_run(folder, {metric, EVALUATION})
            except (ValueError, OSError) as e:
                notes.append(f"{shown(folder)} is left out: {paragraph(e)}")
                continue
            run.path = name
            recorded |= run.recorded
            if metric not in run.series:
                without.append(f"{shown(folder)} ({run.status})")
                continue
            keys = {*_settings(run), *(key for key in run.flat if key in by or key.rpartition(".")[2] in by)}
            same = (name if PATH in by else "", run.seed, *sorted(f"{key}={plain(run.flat[key])}" for key in keys))
            other = runs.get(same)
            if other is not None:
                less, run = sorted((other, run), key=lambda r: (r.status == "finished", r.steps))
                note = f"{shown(less.folder)} is left out: {shown(run.folder)} has the same settings and seed"
                others = [key for key in run.flat if plain(less.flat.get(key)) != plain(run.flat[key])]
                notes.append(f"{note}, except for {join_first_words(others)}" if others else note)
            runs[same] = run
    if not runs:
        hint = f"{nearest(metric, recorded)} (--metric)" if recorded else "none has recorded anything"
        raise UsageError(f"no run has {metric}; {hint}{'. ' if notes else ''}{join_first_words(notes, '; ')}")
    if without:
        notes.append(f"left out, because they have no {metric} yet: {join_first_words(without)}")
    return list(runs.values()), notes


def join_first_words(words: Sequence[str], separator: str = ", ") -> str:
    """Join the first few of `words`, and say how many more there are."""
    more = [f"and {len(words) - _MOST_LISTED} more"] if len(words) > _MOST_LISTED else []
    return separator.join([*words[:_MOST_LISTED], *more])


@cache
def _beside(algo: str, buffer: str | None) -> frozenset[str]:
    """Return the keys of a run that do not make it another experiment: the seed, and what is declared operational."""
    sections = {"": RunConfig}
    if (entry := entry_of(algo)) is not None:
        sections["algo."] = resolve(entry.config)
    if buffer in buffer_names():
        sections["buffer."] = buffer_config_class(buffer)
    return frozenset(("seed", *(at + key for at, kind in sections.items() for key in operational_keys(kind))))


def _settings(run: Run) -> list[str]:
    """Return the keys in which runs differ as experiments."""
    beside = _beside(run.algo, run.flat.get("buffer.name"))
    return [key for key in run.flat if not any(key == prefix or key.startswith(f"{prefix}.") for prefix in beside)]


def _experiment(run: Run) -> tuple[str, ...]:
    """Return what runs of the same settings have in common, except for the seed."""
    return (run.algo, *sorted(f"{key}={plain(run.flat[key])}" for key in _settings(run)))


def plain(value: Any) -> str:
    """Return a setting as it is typed."""
    return value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))


@dataclass(eq=False)
class Group:
    """Runs of one environment that differ only in the seed, or that agree in the requested keys."""

    label: str
    env: str
    settings: dict[str, str]  # what distinguishes it from the other groups of its algorithm and environment
    pooled: list[str] = field(default_factory=list)  # keys in which its runs differ nevertheless
    runs: list[Run] = field(default_factory=list)


def group_runs(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """Divide the runs into groups, each of one environment.

    Parameters
    ----------
    by : sequence of str
        Keys to group by: dotted, or their last part, or ``path``. By default every key except the seed and those that
        are declared `operational`, such as where a run is logged, or how many processes evaluate.

    Raises
    ------
    UsageError
        If no run has one of the keys.
    """
    cells: dict[tuple[str, ...], list[Run]] = {}
    presets = {_experiment(run): run.flat["preset"] for run in runs if run.flat.get("preset")}
    names = {id(run): presets.get(_experiment(run), run.algo) for run in runs}  # of runs with the same settings, one
    keys = [_full_key(runs, key) for key in by]
    for run in runs:
        cell = (run.env,) if keys else (run.env, names[id(run)])
        cells.setdefault(cell, []).append(run)
    groups: list[Group] = []
    for members in cells.values():
        chosen = keys or find_differing_keys(members)
        parts: dict[tuple[str, ...], Group] = {}
        for run in sorted(members, key=lambda run: [_order(_value(run, key)) for key in chosen]):
            values = tuple(plain(_value(run, key)) for key in chosen)
            parts.setdefault(values, Group("", run.env, dict(zip(chosen, values, strict=True)))).runs.append(run)
        for group in parts.values():
            group.label = _label(group, list(parts.values()), bool(by), names[id(group.runs[0])])
            group.pooled = find_differing_keys(group.runs)
            group.runs.sort(key=lambda run: run.seed)
        groups += parts.values()
    return sorted(groups, key=lambda group: group.env)


def _full_key(runs: Sequence[Run], key: str) -> str:
    if key == PATH:
        return key
    known = {name for run in runs for name in run.flat}
    matches = [name for name in known if name == key] or sorted(n for n in known if n.rpartition(".")[2] == key)
    if len(matches) != 1:
        raise UsageError(f"--by must be {PATH} or a key of the runs, got {key!r}; {nearest(key, matches or known)}")
    return matches[0]


def _value(run: Run, key: str) -> Any:
    return run.path if key == PATH else run.flat.get(key)


def _order(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, (int, float))
    return not number, float(value) if number else 0.0, plain(value)


def find_differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys in which the runs differ as experiments."""
    keys = dict.fromkeys(key for run in runs for key in _settings(run))
    return [key for key in keys if len({plain(run.flat.get(key)) for run in runs}) > 1]


def _label(group: Group, siblings: list[Group], chosen: bool, name: str) -> str:
    """Return its name and as few settings as distinguish the group from its siblings, then dots if it has more."""
    keys: list[str] = []
    parts = 1
    for key in group.settings:
        finer = len({tuple(sibling.settings[k] for k in [*keys, key]) for sibling in siblings})
        if finer > parts or chosen:
            keys, parts = [*keys, key], finer
    settings = []
    for key in keys:
        value = group.settings[key]
        shortened = value if len(value) <= 40 else f"…{value[-39:]}"
        settings.append(shortened if key in (PATH, "algo.name") else f"{key.rpartition('.')[2]}={shortened}")
    if len(keys) < len(group.settings):
        settings.append("…")
    return " ".join(settings if chosen else [name, *settings])

"""Runs as they lie on disk, to be drawn and compared: what each was told to do, how far it came, what it recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlox.config import nearest
from rlox.logging import tracker_name
from rlox.tracking.record import Ledger, is_alive
from rlox.tracking.store import read_config
from rlox_cli.errors import UsageError, paragraph
from rlox_cli.runner import shown
from rlox_cli.sync import find_runs

EVALUATION = "eval/mean_return"
RETURNS = (EVALUATION, tracker_name("mean_reward"))
_COLLECT, _UPDATE = "time/collect_s", "time/update_s"
# What makes no other experiment of a run: its seed, where it is logged, how often it is saved.
_BESIDE = ("seed", "logger", "checkpoint", "reference", "max_time")
_PATH = "path"  # --by path: the runs of each PATH that was typed


class Series(NamedTuple):
    """A metric's finite values, (R,) each, in the order of the steps."""

    steps: np.ndarray  # environment steps
    seconds: np.ndarray  # of training; the time between a stop and its resume is left out
    values: np.ndarray


@dataclass
class Run:
    """A run's configuration, end and chosen metrics; rows that a resume superseded are not among them."""

    folder: Path
    config: dict[str, Any]  # as config.yaml nests it
    flat: dict[str, Any]  # the same by dotted keys
    versions: dict[str, str]
    status: str  # finished, interrupted, failed, killed or running
    steps: int
    seconds: float
    series: dict[str, Series]  # of the metrics asked for that have a value
    recorded: set[str]  # names of all metrics
    shares: dict[str, float]  # of the seconds: collect, update, other; empty if the record does not say
    path: str = ""  # of those typed, the one it was found under

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
        value = self.flat.get("reference.mean_return")
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None

    @property
    def speed(self) -> float:
        """Environment steps per second of the whole training, evaluations and checkpoints included."""
        return self.steps / self.seconds if self.seconds > 0 else math.nan


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"env": {"id": …}}`` -> ``("env.id", …)``; an empty mapping stays one."""
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
    for key, kind in (("algo.name", str), ("env.id", str), ("seed", int)):
        if type(flat.get(key)) is not kind:
            raise ValueError(f"{shown(folder / 'config.yaml')}: {key} must be a run's, got {flat.get(key)!r}")
    alive = is_alive(folder)
    ledger = Ledger(folder)
    ledger.scan()
    if not ledger.starts:
        raise ValueError(f"{shown(folder)} has not begun: its record is empty")
    found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in metrics}
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
        for name, points in found.items():
            if (value := row.get(name)) is not None:
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
        {name: Series(*map(np.array, zip(*points, strict=True))) for name, points in found.items() if points},
        recorded - {"segment", "step", "time"},
        shares,
    )


def read_runs(paths: Sequence[Path], metric: str = EVALUATION) -> tuple[list[Run], list[str]]:
    """The runs under `paths` that have a value of `metric`, and a line on each that has none or is damaged.

    Of runs that have the same settings and the same seed under one path, the one that came farthest is taken.

    Raises
    ------
    UsageError
        If there is none.
    """
    runs: dict[tuple, Run] = {}
    notes, recorded, seen = [], set(), set()
    for path in paths:
        folders = find_runs(path)
        if not folders:
            raise UsageError(f"no runs under {path}; name run folders, or folders that hold such (`rlox ls runs`)")
        for folder in folders:
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                run = read_run(folder, {metric, EVALUATION})
            except (ValueError, OSError) as e:
                notes.append(f"{shown(folder)} is left out: {paragraph(e)}")
                continue
            run.path = str(path)
            recorded |= run.recorded
            if metric not in run.series:
                notes.append(f"{shown(folder)} ({run.status}) is left out: it has no {metric} yet")
                continue
            same = (run.path, run.seed, *sorted(_identity(run)))
            other = runs.get(same)
            if other is not None:
                less, run = sorted((other, run), key=lambda r: (r.status == "finished", r.steps))
                notes.append(f"{shown(less.folder)} is left out: {shown(run.folder)} has the same settings and seed")
            runs[same] = run
    if not runs:
        hint = f"{nearest(metric, recorded)} (--metric)" if recorded else "nothing is recorded"
        raise UsageError(f"no run has {metric}; {hint}. {' '.join(notes)}")
    return list(runs.values()), notes


def _identity(run: Run) -> Iterator[str]:
    for key, value in run.flat.items():
        if key.split(".")[0] not in _BESIDE:
            yield f"{key}={plain(value)}"


def plain(value: Any) -> str:
    """A setting as it is typed."""
    return value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))


@dataclass(eq=False)
class Group:
    """Runs of one environment that differ in nothing but the seed, or in nothing that was asked to be told apart."""

    label: str
    env: str
    settings: dict[str, str]  # what tells it from the other groups of its algorithm and environment
    pooled: list[str] = field(default_factory=list)  # keys in which its runs differ all the same
    runs: list[Run] = field(default_factory=list)


def group_runs(runs: Sequence[Run], by: Sequence[str] = (), labels: dict[str, str] | None = None) -> list[Group]:
    """Part the runs into groups, each of one environment.

    Parameters
    ----------
    by : sequence of str
        Keys whose values part the runs, dotted or their last part, or ``path``; by default every key but the seed and
        where the run is logged and saved.
    labels : dict of str to str, optional
        Names of typed paths; the runs are parted by path then.

    Raises
    ------
    UsageError
        For a key that no run has.
    """
    cells: dict[tuple[str, ...], list[Run]] = {}
    keys = [_PATH] if labels else [_full_key(runs, key) for key in by]
    for run in runs:
        cell = (run.env,) if keys else (run.env, run.algo)
        cells.setdefault(cell, []).append(run)
    groups = []
    for members in cells.values():
        differing = keys or _differing(members)
        parts: dict[tuple[str, ...], Group] = {}
        for run in sorted(members, key=lambda run: [_order(_value(run, key)) for key in differing]):
            values = tuple(plain(_value(run, key)) for key in differing)
            parts.setdefault(values, Group("", run.env, dict(zip(differing, values, strict=True)))).runs.append(run)
        for group in parts.values():
            group.label = labels[group.runs[0].path] if labels else _label(group, list(parts.values()), bool(by))
            group.pooled = _differing(group.runs)
            group.runs.sort(key=lambda run: run.seed)
        groups += parts.values()
    return sorted(groups, key=lambda group: group.env)


def _full_key(runs: Sequence[Run], key: str) -> str:
    if key == _PATH:
        return key
    known = {name for run in runs for name in run.flat}
    found = [name for name in known if name == key] or sorted(n for n in known if n.rpartition(".")[2] == key)
    if len(found) != 1:
        raise UsageError(f"--by must be {_PATH} or a key of the runs, got {key!r}; {nearest(key, found or known)}")
    return found[0]


def _value(run: Run, key: str) -> Any:
    return run.path if key == _PATH else run.flat.get(key)


def _order(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, (int, float))
    return not number, float(value) if number else 0.0, plain(value)


def _differing(runs: Sequence[Run]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.flat if key.split(".")[0] not in _BESIDE)
    return [key for key in keys if len({plain(run.flat.get(key)) for run in runs}) > 1]


def _label(group: Group, siblings: list[Group], chosen: bool) -> str:
    """As few of the settings as tell it from its siblings; dots where there are more."""
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
        settings.append(shortened if key in (_PATH, "algo.name") else f"{key.rpartition('.')[2]}={shortened}")
    if len(keys) < len(group.settings):
        settings.append("…")
    return " ".join(settings if chosen else [group.runs[0].algo, *settings])

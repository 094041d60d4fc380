"""Train many seeds of one configuration, and read their records: scores, times, and quantities that distinguish runs.

Native runs share a process: nothing is imported, composed or started twice. Each run has the same results as
``rlox train`` with its seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import active_children, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from rlox.checkpoint import read_header, run_files
from rlox.config import RunConfig
from rlox.config.run import differences, to_plain
from rlox.tracking import durable_rows
from rlox.tracking.record import FILE, Ledger, is_alive
from rlox.tracking.store import read_config
from rlox_cli.families.imports import import_modules
from rlox_cli.run.session import Resumption, resume, run, without_eval_workers
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import Stopped, UsageError
from rlox_cli.terminal.paths import shown
from rlox_cli.terminal.signals import Signals, StopAtOnce

# Settings that do not affect a run's numbers, and the seed, which is stored separately.
_OF_MEMORY = {"memory", "memory_size", "memory_layers", "memory_horizon", "sequence_length", "burn_in"}
# Options of later versions that do nothing at this value: then they, and settings that matter only with them, decide
# nothing, and runs of former versions have the same settings.
SWITCHES = {
    "memory": ("none", _OF_MEMORY),
    "distribution": ("none", {"distribution", "n_atoms", "v_min", "v_max", "huber_kappa"}),
    "noisy": (False, {"noisy", "noisy_sigma"}),
    "layer_norm": (False, {"layer_norm"}),
    "adam_eps": (1e-8, {"adam_eps"}),
    "precision": ("float32", {"precision"}),
}
_RUN_SWITCHES = {"matmul_precision": "highest", "deterministic": False}  # likewise
_APART = (
    *("seed", "device", "backend", "threads", "compile", "checkpoint", "logger", "reference", "imports", "ray"),
    *("remote", "distributed", "distributed_timeout_s", "sampler_on_failure", "preset"),
)
# Limits of the parts of a run; its early updates, which differ least between seeds, are separate.
WINDOWS = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)
_DIGITS = 6  # significant ones of a quantity: the last bits differ between backends and machines


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    curve : list of dict
        Its evaluations: ``step mean std``, and ``cpu_s wall_s``, the seconds of collection and updates until then.
    quantities : dict
        See `quantities`.
    """

    seed: int
    curve: list[dict[str, float]]
    quantities: dict[str, float]

    @property
    def score(self) -> float:
        return self.curve[-1]["mean"]


def file_name(label: str) -> str:
    """Return the label of a cell as the beginning of a name of a file or folder."""
    return re.sub(r"[^\w.-]+", "_", label)


def settings(config: RunConfig, algo: str) -> dict[str, Any]:
    """Return all settings that affect a run's numbers, except for the seed, as plain data."""
    return _select_deciding(to_plain(config, algo))


def _select_deciding(plain: dict[str, Any]) -> dict[str, Any]:
    unused_keys = {*_APART, *(key for key, off in _RUN_SWITCHES.items() if plain.get(key) == off)}
    deciding = {key: value for key, value in plain.items() if key not in unused_keys}
    # The process in which an evaluation runs, and the memory that replay is in, do not change a run's numbers.
    for section, key in (("eval", "workers"), ("buffer", "device")):
        if isinstance(part := deciding.get(section), dict):
            deciding[section] = {name: value for name, value in part.items() if name != key}
    if isinstance(algo := deciding.get("algo"), dict):
        unused = {name for key, (off, names) in SWITCHES.items() if algo.get(key, off) == off for name in names}
        deciding["algo"] = {name: value for name, value in algo.items() if name not in unused}
    return deciding


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a text such as ``algo.gamma 0.98 -> 0.97`` for each setting that differs."""
    return [f"{key} {was} -> {now}" for key, (was, now) in differences(old, new)]


def train(
    config: RunConfig,
    algo: str,
    seeds: Iterable[int],
    folder: Callable[[int], Path],
    jobs: int,
    report: Callable[[int, Run | str], None],
) -> tuple[dict[int, Run], dict[int, str]]:
    """Train each seed in ``folder(seed)``. Finished runs in it are read, interrupted ones are resumed.

    Parameters
    ----------
    jobs : int
        Number of processes; 1: only this one.
    report : callable
        Called with each seed when it is done, and its run or the message of its error.

    Returns
    -------
    dict, dict
        Runs, and messages of runs that diverged, by seed in order.

    Raises
    ------
    UsageError
        If a folder contains a run with other settings, or one that is being trained now.
    """
    seeds = list(seeds)
    if jobs > 1:
        config = without_eval_workers(config)
    for seed in seeds:
        _require_same(config, algo, seed, folder(seed))
    results: dict[int, Run | str] = {}

    def take(seed: int, result: Run | str) -> None:
        results[seed] = result
        report(seed, result)

    if jobs == 1:
        for seed in seeds:
            take(seed, train_one(config, algo, seed, folder(seed)))
    else:
        _train_beside(config, algo, seeds, folder, jobs, take)
    runs = {seed: run for seed in seeds if isinstance(run := results[seed], Run)}
    return runs, {seed: reason for seed in seeds if isinstance(reason := results[seed], str)}


def _train_beside(
    config: RunConfig,
    algo: str,
    seeds: list[int],
    folder: Callable[[int], Path],
    jobs: int,
    take: Callable[[int, Run | str], None],
) -> None:
    """Call `train_one` for all seeds in other processes; the first Ctrl-C lets them save."""

    def report(line: str) -> None:
        print_text(line, stderr=True)

    line = "stopping: the runs are saving their state; press Ctrl-C again to stop at once"
    # Spawned, since a fork would copy the locks of threads.
    with (
        TemporaryDirectory(prefix="rlox-bench-") as name,
        ProcessPoolExecutor(min(jobs, len(seeds)), get_context("spawn")) as pool,
        Signals(report, line) as signals,
    ):
        flag = Path(name) / "stop"
        futures = {pool.submit(train_one, config, algo, seed, folder(seed), flag): seed for seed in seeds}
        waiting = set(futures)
        try:
            while waiting and signals.number is None:
                done, waiting = wait(waiting, 0.5, FIRST_COMPLETED)
                for future in done:
                    take(futures[future], future.result())
            if signals.number is not None:
                flag.touch()
                pool.shutdown(wait=True, cancel_futures=True)
                raise Stopped(signals.number)
        except StopAtOnce:
            for child in active_children():
                child.kill()
            raise
        except BrokenProcessPool as e:
            raise RuntimeError(
                "a process of --jobs was killed, perhaps because the memory was full; use a lower --jobs: the same "
                "command with --runs continues"
            ) from e
        except BaseException:
            flag.touch()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def train_one(config: RunConfig, algo: str, seed: int, folder: Path, stop_flag: Path | None = None) -> Run | str:
    """Return the run of one seed, or the message if it diverged; as `train`."""
    import_modules(config.imports)  # a process of the pool has imported nothing yet
    _require_same(config, algo, seed, folder)  # another command may have begun it since `train` looked
    config, quiet = replace(config, seed=seed), Console(quiet=True)
    last = folder / "checkpoints" / "last.safetensors"
    try:
        if not _is_finished(folder):
            if run_files.is_file(folder, "checkpoints/last.safetensors"):
                resume(Resumption(config, algo, last, {}, trusted=True), quiet, stop_flag)
            else:
                # If it was interrupted before anything was saved, its next segment starts over.
                run(config, algo, folder, quiet, stop_flag, again=True)
    except FloatingPointError as e:
        return str(e)
    return read(folder, seed)


def _is_finished(folder: Path) -> bool:
    if not (folder / FILE).is_file():
        return False
    ledger = Ledger(folder)
    ledger.scan()
    return ledger.end is not None and ledger.end["status"] == "finished"


def _require_same(config: RunConfig, algo: str, seed: int, folder: Path) -> None:
    """Raise a UsageError unless `folder` is new or contains the requested run, which nothing else is training."""
    if is_alive(folder):
        raise UsageError(f"{shown(folder)} is being trained by another process; wait for it, or choose another --runs")
    if not (folder / FILE).is_file():
        return
    if not any(run_files.is_file(folder, name) for name in ("config.yaml", "checkpoints/last.safetensors")):
        try:
            Ledger(folder).scan()  # of a run that was killed as it started: `train_one` starts over
        except ValueError as e:
            raise UsageError(f"{shown(folder)} must hold a run, or be new: {e}; choose another --runs") from e
        return
    asked = {**settings(config, algo), "seed": seed}
    saved = read_config(folder)
    saved = {**_select_deciding(saved), "seed": saved.get("seed")}
    if differ := changes({key: saved.get(key) for key in asked}, asked):
        raise UsageError(
            f"{shown(folder)} must hold a run with the requested settings, but differs: {'; '.join(differ)}; "
            "choose another --runs"
        )


def read(folder: Path, seed: int) -> Run:
    """Read a finished run from its record and its last checkpoint."""
    rows = durable_rows(folder)
    curve: list[dict[str, float]] = []
    cpu = wall = 0.0
    for row in rows:
        if "eval/mean_return" in row:
            if row["eval/mean_return"] is None or row.get("eval/std_return") is None:
                raise UsageError(
                    f"{shown(folder / FILE)} must hold a finite return and its deviation for each evaluation, got none "
                    f"at {row['step']:,}; delete the folder, or choose another --runs"
                )
            curve.append(
                {
                    "step": row["step"],
                    "mean": row["eval/mean_return"],
                    "std": row["eval/std_return"],
                    "cpu_s": round(cpu, 3),
                    "wall_s": round(wall, 3),
                }
            )
        elif "time/update_s" in row:
            cpu += row.get("time/cpu_s") or 0.0
            wall += (row.get("time/collect_s") or 0.0) + (row["time/update_s"] or 0.0)
    if not curve:
        raise UsageError(f"{shown(folder)} must hold evaluations, got none; leave eval.n_points above 0")
    return Run(seed, curve, quantities(rows, read_header(folder / "checkpoints" / "last.safetensors")))


def quantities(rows: list[dict[str, Any]], header: dict[str, Any]) -> dict[str, float]:
    """Return quantities, in addition to the score, in which runs of different implementations differ.

    These are the mean of each training metric over the parts of the run between `WINDOWS`, the last value and the mean
    of each evaluation metric, and the counts of the last checkpoint. NaN if a part has no number.
    """
    end = rows[-1]["step"]
    training = [row for row in rows if "eval/mean_return" not in row]
    evaluations = [row for row in rows if "eval/mean_return" in row]
    numbers = {f"count/{name}": float(header["counters"][name]) for name in ("env_steps", "updates", "episodes")}
    names = dict.fromkeys(name for row in training for name in row if "/" in name and not name.startswith("time/"))
    for name in names:
        for low, high in pairwise(WINDOWS):
            values = [row[name] for row in training if low * end < row["step"] <= high * end and name in row]
            numbers[f"{name} {low:.0%}-{high:.0%}"] = _mean(values)
    for name in (name for name in evaluations[-1] if name.startswith("eval/")):
        numbers[f"{name} last"] = _mean([evaluations[-1][name]])
        numbers[f"{name} mean"] = _mean([row[name] for row in evaluations])
    return {name: round_digits(value) for name, value in numbers.items()}


def _mean(values: list[float | None]) -> float:
    finite = [value for value in values if value is not None]
    return float(np.mean(finite)) if finite else math.nan


def round_digits(value: float) -> float:
    """Round `value` to as many digits as backends and machines agree on."""
    return float(f"{value:.{_DIGITS}g}")

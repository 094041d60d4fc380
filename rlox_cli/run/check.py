"""``rlox train … --check``: find what can go wrong in a run, and estimate what it will cost, without training.

Each distinct job is built as for its run. Its environment is checked against its interface, and a short training with
files in a temporary folder is timed; the rest is multiplication. benchmarks/preflight.json shows how accurate the
estimates are.
"""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from rlox.config import MmapBufferConfig, RunConfig
from rlox.config.base import masked
from rlox.config.servers import is_reachable
from rlox.config.sqlite import is_sqlite, sqlite_file
from rlox.tracking.loggers import LOGGERS
from rlox.tracking.wandb import base_url
from rlox_cli.config.compose import Job, find_new_folder, is_named_by_time
from rlox_cli.config.overrides import as_typed
from rlox_cli.families import limits
from rlox_cli.families.estimate import loggers
from rlox_cli.families.family import Estimate, Start, family_of
from rlox_cli.run.session import Resumption, build, replan, restore, training_warnings
from rlox_cli.terminal.account import exit_code, format_failure, headline, is_explained
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import find_existing_parent, shown

_TRACKER_S = 1.0  # seconds to wait for the answer of a tracker's server


@dataclass(frozen=True)
class Report:
    """What is known about one job before it runs."""

    title: str
    lines: list[tuple[str, str]]  # heading and text
    estimate: Estimate


def check(jobs: list[Job], multirun: bool, console: Console) -> None:
    """Examine every distinct job of `jobs`, and print a report.

    Raises
    ------
    UsageError, OSError
        For the last job that cannot be trained; the errors of other jobs are printed before.
    """
    start = Start(limits.cpu_seconds())
    alike: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        alike.setdefault(repr((job.algo, replace(job.config, seed=0))), []).append(number)
    reports: list[tuple[Report, int]] = []
    failures: list[Exception] = []
    for numbers in alike.values():
        job = jobs[numbers[0]]
        try:
            reports.append((examine(job, start, multirun), len(numbers)))
        except Exception as e:
            # The other jobs are still examined, unless the error is a bug in rlox.
            if not is_explained(e):
                raise
            failures.append(_of_job(e, job, numbers[0] if multirun else None))
    for report, n in reports:
        console.print(f"{report.title}{f', {n} jobs' if n > 1 else ''}")
        for name, text in report.lines:
            console.print(f"  {name:<12} {text}")
    if failures:
        *others, last = failures
        for other in others:
            print_text(format_failure("train", other), stderr=True)
        raise last
    if multirun:
        console.print(_sum(reports))
    console.print("nothing was trained or saved; leave out --check to train")


def _sum(reports: list[tuple[Report, int]]) -> str:
    """Sum up the times of a sweep; Python starts once for all jobs that one process runs one after the other."""
    n_jobs = sum(n for _, n in reports)
    start = reports[0][0].estimate.cpu["start"]
    total = start + sum((report.estimate.wall - report.estimate.cpu["start"]) * n for report, n in reports)
    longest = max(report.estimate.wall for report, _ in reports)
    jobs = f"{n_jobs} job{'s' if n_jobs > 1 else ''}"
    return f"{jobs}: {_duration(total)} one after the other, the longest {_duration(longest)}"


def _of_job(e: Exception, job: Job, number: int | None) -> Exception:
    """Return an error with the message of `e` and the job that it is about: an OSError if the system fails."""
    where = "" if number is None else f"job {number} of the sweep ({as_typed(job.overrides)}): "
    kind = OSError if isinstance(e, OSError) and exit_code(e) == 1 else UsageError
    error = kind(where + headline(e))
    error.__cause__ = e
    return error


def require_buildable(jobs: list[Job]) -> None:
    """Raise an error unless every algorithm of a sweep fits its environment, before the first job starts.

    With a launcher that may run jobs on other machines, only those machines matter, and nothing is built here.
    """
    if not jobs[0].cfg.hydra.launcher._target_.endswith(".BasicLauncher"):
        return
    seen = set()
    for number, job in enumerate(jobs):
        c = job.config
        alike = (c.env, c.buffer, c.dataset, c.init_from, c.device, c.backend, c.compile)
        network = [(k, v) for k, v in vars(c.algo).items() if not isinstance(v, float)]
        if (key := repr((job.algo, alike, network))) in seen:
            continue
        seen.add(key)
        try:
            with _generators_restored():
                here = replace(c.remote, addresses=[])  # the workers are checked when the job starts
                build(replace(c, env=replace(c.env, n_envs=1, workers=0), remote=here), job.algo, Path()).close()
        except Exception as e:
            if not is_explained(e):
                raise
            raise _of_job(e, job, number) from e


def check_resume(resumption: Resumption, console: Console) -> None:
    """Prepare everything to resume a run, as `rlox_cli.run.session.resume` does, and stop there.

    Raises
    ------
    UsageError, ValueError
        For errors that would end the run.
    """
    config, folder = resumption.config, resumption.checkpoint.parent.parent
    algorithm = restore(resumption, console)
    try:
        replan(algorithm, config, console, resumption.changed)
        for warning in training_warnings(algorithm, config, folder):
            console.print(f"  {'warning':<12} {warning}")
    finally:
        algorithm.close()
    console.print(f"  {'backend':<12} {algorithm.backend} ({algorithm.backend_reason})")
    console.print("the run can be resumed; nothing was trained or written, leave out --check to resume it")


def examine(job: Job, start: Start, multirun: bool) -> Report:
    """Return the report on one job.

    Raises
    ------
    UsageError, ValueError, TypeError, ImportError
        For errors that would end the run.
    """
    config, folder = job.config, find_new_folder(job, multirun)
    family = family_of(config.algo, config.env.id)
    warnings = [*_tracker_warnings(config)]
    with tempfile.TemporaryDirectory(prefix="rlox-check-") as name, _generators_restored(), ExitStack() as stack:
        scratch, before = Path(name), limits.cpu_seconds()
        buffer = config.buffer
        if isinstance(buffer, MmapBufferConfig):
            buffer = replace(buffer, folder=str(scratch))  # its file would otherwise be in the run's folder
        if config.deterministic:
            from rlox_cli.run.device import prepare_deterministic

            prepare_deterministic(config)
        algorithm = build(replace(config, buffer=buffer), job.algo, scratch)
        start = replace(start, building=limits.cpu_seconds() - before)
        device: list[tuple[str, str]] = []
        try:
            if config.deterministic or config.matmul_precision != "highest":
                from rlox_cli.run.device import set_numerics

                stack.enter_context(set_numerics(config, algorithm, warnings.append))
            if algorithm.device != "cpu":
                from rlox_cli.run.device import describe_device

                device = describe_device(algorithm)[1]
            warnings += family.warnings(algorithm, config, folder)
            result = family.examine(algorithm, config, start, scratch)
        finally:
            algorithm.close()
    needed, free = result.estimate.disk, limits.free_disk(folder)
    if needed > limits.TIGHT * free:
        warnings.append(f"the disk may become full: files take {limits.size(needed)}, and {limits.size(free)} are free")
    lines = [
        *result.lines,
        *device,
        ("disk", f"{limits.size(needed)} of {limits.size(free)} free"),
        ("time", _time(config, result.estimate, result.limit)),
        # The default name contains the time, which will be another one when the run starts.
        ("folder", f"{shown(folder.parent)}/…" if is_named_by_time(job) else shown(folder)),
        *(("warning", line) for line in dict.fromkeys([*warnings, *result.warnings])),
    ]
    return Report(f"{job.choice} on {config.env.id}", lines, result.estimate)


@contextmanager
def _generators_restored() -> Iterator[None]:
    """Restore the global random generators afterwards, since code of the user may draw from them."""
    own, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global generator is meant)
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)  # noqa: NPY002


def _time(config: RunConfig, estimate: Estimate, limit: int | None) -> str:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in estimate.cpu.items() if seconds >= 0.05)
    text = f"{_duration(estimate.wall)}, {sum(estimate.cpu.values()):.1f} s of CPU ({parts})"
    if estimate.step is not None:
        text += f"; {1000 * estimate.step:.3g} ms of CPU per step"
    if estimate.update is not None:
        text += f"; {estimate.update:.3g} s of CPU per update"
    if estimate.workers:
        text += f"; evaluated in parallel, by {estimate.workers} process{'' if estimate.workers == 1 else 'es'}"
    if limit is not None and estimate.longest_evaluation > 0.1 * estimate.wall:
        text += f"; evaluations {_duration(estimate.longest_evaluation)} if every episode lasts {limit:,} steps"
    if config.max_seconds is not None and estimate.wall > config.max_seconds:
        text += f"; max_time={config.max_time} ends it earlier"
    return text


def _tracker_warnings(config: RunConfig) -> Iterator[str]:
    """Yield warnings about trackers that are not available now; no training waits for them."""
    for name in filter(LOGGERS.__contains__, loggers(config)):  # those of other packages are installed
        package = {"csv": None}.get(name, name)
        if package and importlib.util.find_spec(package) is None:
            yield f'logger={name} needs a package that is not installed; pip install "rlox-cli[{name}]"'
            continue
        key, address = "logger.mlflow.tracking_uri", None
        if name == "mlflow":
            uri = config.logger.mlflow.in_effect
            if is_sqlite(uri):
                above = find_existing_parent(sqlite_file(uri))
                if not os.access(above, os.W_OK):
                    yield f"logger.mlflow.tracking_uri={uri} cannot be written to: {above}"
            else:
                address = uri
        if name == "wandb" and config.logger.wandb.in_effect == "online":
            key, address = "WANDB_BASE_URL", base_url()
        if address is not None and not is_reachable(key, address, _TRACKER_S):
            yield (
                f"logger={name}: {masked(address)} does not answer within {_TRACKER_S:g} s; training does not wait "
                "for it, and `rlox sync` can send the missing data later"
            )


def _duration(seconds: float) -> str:
    """Format a time such as ``3.2 s``, ``12 min`` or ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"

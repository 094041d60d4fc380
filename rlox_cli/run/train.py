"""``rlox train``: read and validate what was typed, then train one run, or hand over to Hydra."""

from __future__ import annotations

import os
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from rlox.config import RunConfig, settings
from rlox.config.base import masked
from rlox.config.run import DISTRIBUTED
from rlox.distributed.group import Group
from rlox.distributed.ranks import is_started_by_torchrun, join
from rlox.tracking.store import read_config
from rlox_cli.config.compose import (
    Job,
    compose_jobs,
    compose_typed,
    expands,
    find_new_folder,
    run_composed,
    run_hydra,
    searches,
)
from rlox_cli.config.overrides import HELP_FLAGS, run_folder, split_args, take_imports
from rlox_cli.config.presets import name_choice, preset_settings, read_presets
from rlox_cli.config.rules import read_tuned_steps
from rlox_cli.config.schema import to_run_config, with_env
from rlox_cli.families.imports import import_modules
from rlox_cli.records.folders import OF_HYDRA, remove_traces
from rlox_cli.run.mirrors import finish_mirrors, require_trackers
from rlox_cli.run.session import Outcome, resume, run
from rlox_cli.terminal.account import format_failure
from rlox_cli.terminal.console import TextConsole, make_table, print_table, print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown, with_home


@dataclass(frozen=True)
class Typed:
    """What was typed for ``rlox train``, and what was composed from it."""

    flags: list[str]
    overrides: list[str]
    modules: list[str]
    console: Console
    sweep: DictConfig | None  # the configuration of a sweep of its own jobs; None: Hydra runs the jobs
    jobs: list[Job]
    searches: bool  # whether Optuna chooses the jobs


def main(args: list[str], own: Collection[str] = ()) -> Typed | None:
    """Run the command for `args`, the Hydra overrides and flags as typed; `own` is as for `split_args`.

    Return the sweep that was typed, if it was one, for `rlox_cli.sweep` to run.
    """
    typed, (modules, args) = args, take_imports(args)
    checks, args = "--check" in args, [arg for arg in args if arg != "--check"]
    flags, overrides = split_args(args, own)
    console = TextConsole()
    console.quiet = _n_started() > 1 and os.environ["RANK"] != "0"
    if runs := [override for override in overrides if override.startswith("resume=")]:
        if len(set(runs)) > 1:
            raise UsageError(f"resume must be given once, got {' and '.join(runs)}")
        others = [override for override in overrides if override not in runs]
        _resume(with_home("resume", runs[-1].partition("=")[2]), flags, others, modules, console, checks)
        return None
    if modules:
        if any(override.lstrip("+").startswith("imports=") for override in overrides):
            raise UsageError("--import must not be combined with imports=[…], which it sets; use only one of them")
        import_modules(modules)
        overrides.append(f"imports=[{','.join(modules)}]")
    overrides = run_folder(with_env(overrides))
    # Flags such as --hydra-help and --version train nothing and need no valid configuration.
    prints_info = any(flag in ("--hydra-help", "--version", "--info", "-i") for flag in flags)
    if prints_info or any(flag.split("=")[0] in ("--cfg", "-c") for flag in flags):
        if checks:
            raise UsageError("--check must not be combined with a flag that only prints")
        if not prints_info:
            jobs = compose_jobs(flags, overrides)  # reports what is wrong before anything is printed
            if len(jobs) == 1 and jobs[0].config.preset is not None:
                overrides = [*overrides, f"preset={jobs[0].config.preset}"]  # composing alone does not set it
        _run_with_hydra(flags, overrides, False, console)
        return None
    sweep, jobs = compose_typed(flags, overrides, lambda line: console.print(line))
    multirun, searching = sweep is not None, sweep is not None and searches(sweep)
    configs = [job.config for job in jobs]
    if not checks:
        _require_ranks(configs, multirun, typed)
    require_trackers(configs)
    announce(jobs[:1] if searching else jobs, console)
    if checks:
        from rlox_cli.run.check import check

        check(jobs, multirun, console)
        return None
    if configs[0].distributed is not None:
        outcome = train_on_ranks(configs[0], jobs[0].algo, lambda: find_new_folder(jobs[0], False), console)
    else:
        folder = find_new_folder(jobs[0], multirun)
        if sweep is not None:
            from rlox_cli.run.check import require_buildable

            require_buildable(jobs)
            if searching or expands(sweep):
                return Typed(flags, overrides, modules, console, sweep, jobs, searching)
        if multirun or not HELP_FLAGS.isdisjoint(flags):
            _run_with_hydra(flags, overrides, multirun, console)
            return None
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        found = {name: (folder / name).read_bytes() for name in OF_HYDRA if (folder / name).exists()}
        try:
            outcome = run_composed(flags, jobs[0], _train)
        except BaseException:
            remove_traces(folder, new, found)
            raise
    if outcome is not None:  # this is rank 0
        finish_mirrors([outcome.folder], console)
    return None


def _train(cfg: DictConfig) -> Outcome:
    """Train one composed job. Launchers call this in other processes, too, by its name."""
    hydra = HydraConfig.get()
    if cfg.imports:
        import_modules(cfg.imports)  # a launcher's process has imported nothing yet
    config = to_run_config(cfg)
    algo = name_choice(hydra.runtime.choices.algo, config)
    return run(config, algo, Path(hydra.runtime.output_dir), TextConsole())


class _Jobs:
    """The jobs that Hydra runs in this process, since ``hydra.main`` returns nothing.

    A launcher's other processes have a copy, which only trains: there, the launcher reports failures.
    """

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.failures: list[Exception] = []
        self._process = os.getpid()

    def train(self, cfg: DictConfig) -> dict[str, float]:
        """Return the final evaluation, which a sweeper may optimise."""
        if os.getpid() != self._process:
            return _train(cfg).final
        try:
            outcome = _train(cfg)
        except Exception as e:
            # The other jobs of a sweep continue, and Hydra does not print its own report of the error.
            self.failures.append(e)
            return {}
        self.outcomes.append(outcome)
        return outcome.final


def _run_with_hydra(flags: list[str], overrides: list[str], multirun: bool, console: Console) -> None:
    jobs = _Jobs()
    try:
        run_hydra(flags, overrides, jobs.train)
    finally:
        if jobs.outcomes:
            if multirun:
                _print_outcomes(jobs.outcomes, console)
            finish_mirrors([outcome.folder for outcome in jobs.outcomes], console)
    if jobs.failures:
        *before, last = jobs.failures
        for e in before:
            print_text(format_failure("train", e), stderr=True)
        raise last


def _resume(
    name: str, flags: list[str], overrides: list[str], modules: list[str], console: Console, checks: bool
) -> None:
    from rlox_cli.run.resume import prepare

    if _n_started() and not checks and not flags:
        timeout_s, distributed = _rendezvous(name, overrides)
        outcome = resume_on_ranks(name, flags, overrides, modules, timeout_s, distributed, console)
    else:
        resumption = prepare(name, flags, overrides, modules, console)
        if resumption is None:
            return
        require_trackers([resumption.config])
        if checks:
            from rlox_cli.run.check import check_resume

            check_resume(resumption, console)
            return
        _require_ranks([resumption.config], False, [f"resume={name}", *overrides])
        outcome = resume(resumption, console)
    if outcome is not None:  # this is rank 0
        finish_mirrors([outcome.folder], console)


def announce(jobs: list[Job], console: Console) -> None:
    """Print how many jobs there are, and which tuned settings they have."""
    if len(jobs) > 1:
        console.print(f"{len(jobs)} jobs, all valid")
    for name in dict.fromkeys(item.tuned for item in jobs if item.tuned):
        console.print(
            f"tuned settings: {name} (`rlox show algo={name.split('/', 1)[0]} env={name.split('/', 1)[1]}`; "
            "tuned=off for the defaults)"
        )
        if short := _short_budget(name, [item.config for item in jobs if item.tuned == name]):
            console.print(f"  {short}")
    for line in _idle_settings(jobs):
        console.print(line)


def _idle_settings(jobs: list[Job]) -> Iterator[str]:
    """Yield a line for each setting that has no effect, of those that were typed or are in a file of the user."""
    found: Counter[tuple[str, str]] = Counter()
    for job in jobs:
        algo = job.config.algo
        typed = {word.lstrip("+").partition("=")[0] for word in job.overrides}
        changed = {f"algo.{name}" for name, value in vars(algo).items() if value != getattr(type(algo), name, value)}
        if any(key.startswith("algo.") for key in changed | typed):
            shipped = _shipped(job.choice, job.tuned) if changed - typed else set()
            idle = job.config.idle().items()
            found.update((key, needed) for key, needed in idle if key in typed or key in changed - shipped)
    for (key, needed), n in found.items():
        jobs_of_it = "" if n == len(jobs) else f" (in {n} of {len(jobs)} jobs)"
        yield f"warning: {key} has no effect without {needed}{jobs_of_it}"


@cache
def _shipped(choice: str, tuned: str | None) -> set[str]:
    """Return the keys of the hyper-parameters that a preset and tuned settings of rlox contain."""
    names = [*preset_settings(choice)["algo"]] if choice in read_presets() else []
    if tuned is not None:
        with suppress(ValueError):  # they are the user's own
            names += settings.tuned(*tuned.split("/", 1)).get("algo", {})
    return {f"algo.{name}" for name in names}


def _short_budget(name: str, runs: list[RunConfig]) -> str | None:
    """Return a sentence if the runs with the tuned settings `name` take fewer steps than these are meant for."""
    shortest = min(runs, key=lambda one: one.total_timesteps)
    own, full = read_tuned_steps(name), (shortest.reference or {}).get("full_steps")
    if own is not None and shortest.total_timesteps < own:
        return f"total_timesteps={shortest.total_timesteps:,} is short: the tuned settings are for {own:,}"
    if isinstance(full, int) and shortest.total_timesteps < full:
        return (
            f"total_timesteps={shortest.total_timesteps:,} is a short budget: the source of the settings trains for "
            f"{full:,} and reaches more (total_timesteps={full})"
        )
    return None


def _print_outcomes(outcomes: Iterable[Outcome], console: Console) -> None:
    from rlox_cli.records.runs import short

    table = make_table("run", "steps", "seconds", "final", "best")
    for o in outcomes:
        best = "" if o.best is None else short(o.best)
        final = f"{short(o.final['mean_return'])} ± {short(o.final['std_return'])}" if o.final else ""
        table.add_row(shown(o.folder), f"{o.steps:,}", f"{o.seconds:.1f}", final, best)
    print_table(console, table)


def _n_started() -> int:
    """Return how many processes torchrun has started, including this one; 0 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ and is_started_by_torchrun() else 0


def _require_ranks(configs: list[RunConfig], multirun: bool, typed: list[str]) -> None:
    """Raise a UsageError if torchrun started a run that is not data-parallel, or did not start one that is."""
    n, mode = _n_started(), next((c.distributed for c in configs if c.distributed is not None), None)
    if mode is not None and multirun:
        raise UsageError(f"distributed must be null in a sweep, where each job is one process, got {mode}")
    if mode is not None and not n:
        raise UsageError(
            f"distributed={mode} must be started with torchrun, or left out (distributed=null); try: torchrun "
            f"--standalone --nproc-per-node=2 -m rlox train {shlex.join(map(masked, typed))}"
        )
    if mode is None and n > 1:
        raise UsageError(
            f"distributed must be ddp or fsdp when torchrun has started {n} processes, got null: each process would "
            "train its own run; add distributed=ddp"
        )


def _rendezvous(name: str, overrides: list[str]) -> tuple[float, str]:
    """Return how many seconds the ranks of a run wait for each other, and how the run is distributed.

    Both come from the run's configuration; a typed ``distributed=`` takes precedence.
    """
    typed = [override.partition("=")[2] for override in overrides if override.lstrip("+").startswith("distributed=")]
    path = Path(name)
    folder = path if path.is_dir() else path.parent.parent
    saved: dict[str, Any]
    try:
        saved = read_config(folder)
        timeout_s, distributed = float(saved["distributed_timeout_s"]), saved["distributed"]
    except (OSError, LookupError, TypeError, ValueError):
        # If this is not a run, the code that reads it raises the error.
        timeout_s, distributed = RunConfig.distributed_timeout_s, None
    distributed = typed[-1] if typed else distributed
    return timeout_s, distributed if distributed in DISTRIBUTED else "ddp"


@contextmanager
def _reporting(group: Group) -> Iterator[None]:
    """Report exceptions to the other ranks. Then torchrun's SIGTERM must not end this process before it prints them."""
    with group.reporting_errors():
        try:
            yield
        except Exception:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun kills a process that does not end within 30 s
            raise


def train_on_ranks(config: RunConfig, algo: str, make_folder: Callable[[], Path], console: Console) -> Outcome | None:
    """Train a new run on the ranks that torchrun has started. Every rank calls this; only rank 0 gets the outcome.

    If torchrun has restarted the ranks, the run of the previous attempt continues from its last checkpoint.
    """
    assert config.distributed is not None
    group = join(config.distributed_timeout_s, config.distributed)
    with _reporting(group):
        name, again = group.shared_text("folder", lambda: str(make_folder()))
        folder = Path(name)
        if again and group.from_first((folder / "checkpoints" / "last.safetensors").is_file):
            return _resume_on(group, name, [], [], config.imports, console, trusted=True)
        outcome = run(config, algo, folder, console, again=again or group.rank > 0)
        group.leave()
    return None if group.rank else outcome


def resume_on_ranks(
    name: str,
    flags: list[str],
    overrides: list[str],
    modules: list[str],
    timeout_s: float,
    distributed: str,
    console: Console,
) -> Outcome | None:
    """Resume the run `name` on the ranks that torchrun has started, in the mode `distributed`; see `train_on_ranks`."""
    group = join(timeout_s, distributed)
    with _reporting(group):
        import_modules(modules)
        name, again = group.shared_text("run", lambda: name)
        if again and Path(name).is_file():
            name = str(Path(name).parent.parent)  # the previous attempt has come further
        return _resume_on(group, name, flags, overrides, modules, console)


def _resume_on(
    group: Group,
    name: str,
    flags: list[str],
    overrides: list[str],
    modules: list[str],
    console: Console,
    trusted: bool = False,
) -> Outcome | None:
    from rlox_cli.run.resume import prepare

    resumption = group.from_first(lambda: prepare(name, flags, overrides, modules, console, trusted))
    if resumption is not None and resumption.config.distributed is None:
        raise UsageError(
            f"distributed must be ddp or fsdp when torchrun has started {group.size} processes, got null; add "
            "distributed=ddp"
        )
    outcome = None if resumption is None else resume(resumption, console)
    group.leave()
    return None if group.rank else outcome

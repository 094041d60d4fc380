"""Compose validated runs from what was typed, with Hydra, strict keys and readable errors.

Every job is composed and checked here before the first one starts, and before ``--cfg`` prints anything.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, RangeSweep
from hydra.core.utils import JobStatus, configure_log, run_job
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlox.config import RunConfig
from rlox.config.run import to_plain
from rlox_cli.config.explain import explain
from rlox_cli.config.overrides import (
    FOLDERS,
    as_typed,
    explain_unparsed,
    flag_value,
    refuse_blanks,
    refuse_forms,
    take_out_password,
    without_password,
)
from rlox_cli.config.presets import name_choice
from rlox_cli.config.ranges import count_values, number_at, read_search
from rlox_cli.config.rules import apply_settings, check_run
from rlox_cli.config.schema import (
    CONFIG_MODULE,
    CONFIG_NAME,
    ONE_CHOICE,
    SearchPath,
    ray_settings,
    register,
    to_run_config,
)
from rlox_cli.records.folders import require_new
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path

# Top-level keys that are plain values. Sections could be groups to choose from.
_PLAIN_KEYS = {item.name for item in fields(RunConfig)} - {
    *("algo", "env", "buffer", "dataset", "eval", "checkpoint", "logger", "ray", "remote", "preset")
}

_MOST_JOBS = 100_000  # of one sweep: checking them takes half an hour, and running them weeks
_MANY = 200  # jobs, from which on a sample is checked first
_SAMPLE = 32


@dataclass
class Job:
    """One validated run: its overrides, its configuration, and the choices in the defaults list."""

    overrides: list[str]
    config: RunConfig
    algo: str
    tuned: str | None  # "ppo/CartPole-v1" if tuned settings apply
    cfg: DictConfig  # as composed, including Hydra's section; for the jobs of a sweep, that of the sweep
    choice: str  # that of algo=: the algorithm, or a preset of it
    subdir: str = ""  # its folder, relative to the sweep's


def compose_typed(
    flags: list[str], overrides: list[str], report: Callable[[str], None] | None = None
) -> tuple[DictConfig | None, list[Job]]:
    """Compose and validate every job that `flags` and `overrides` describe.

    Sweepers other than Hydra's basic one and rlox's own choose their jobs as they go: `_sweep` says which jobs are
    checked instead. Of many jobs, a sample is checked before all of them, and `report` is called with a line about how
    long that takes.

    Returns
    -------
    DictConfig or None
        The configuration of a sweep itself, of which the section ``hydra`` is used; None for a single run.
    list of Job
        All jobs of the sweep, or the run.

    Raises
    ------
    UsageError
        For the first invalid job, with the key, the rule, the value and the nearest valid name.
    """
    multirun = any(flag in ("-m", "--multirun") for flag in flags) or "hydra.mode=MULTIRUN" in overrides
    with _composition(flags) as config_name:
        if not multirun:
            cfg = composed(overrides, config_name, "")
            if cfg.hydra.mode is RunMode.MULTIRUN:
                raise UsageError("hydra.mode must not be MULTIRUN in a file; type -m instead")
            return None, [_compose_one(cfg, overrides, "")]
        master, lists = _sweep(overrides, config_name)
        composer = _Composer(config_name)

        def composed_job(number: int) -> Job:
            where = f"job {number} of the sweep ({as_typed(lists[number])}): " if len(lists) > 1 else ""
            cfg = composer.compose(lists[number], where)
            job = _compose_one(cfg, lists[number], where)
            job.subdir, job.cfg = _subdir(cfg, number), master
            return job

        if len(lists) > _MANY:
            composed_job(0)  # fills caches
            started = time.perf_counter()
            for i in range(1, _SAMPLE):
                composed_job(i * (len(lists) - 1) // (_SAMPLE - 1))
            seconds = (time.perf_counter() - started) / (_SAMPLE - 1) * len(lists)
            if report is not None:
                report(f"{len(lists):,} jobs: {_SAMPLE} of them are valid; checking all takes about {seconds:.0f} s")
        jobs = [composed_job(number) for number in range(len(lists))]
        if searches(master):
            read_search(overrides, master).require_independent([to_plain(job.config, job.algo) for job in jobs], master)
        return master, jobs


def compose_jobs(flags: list[str], overrides: list[str]) -> list[Job]:
    """Return the jobs of `compose_typed`."""
    return compose_typed(flags, overrides)[1]


def compose_launcher(flags: list[str], overrides: list[str]) -> DictConfig:
    """Return the configuration whose section ``hydra`` says how to launch jobs that are already known."""
    with _composition(flags) as config_name:
        master = composed(overrides, config_name, "")
        ray_settings(master)
        return master


def find_new_folder(job: Job, multirun: bool) -> Path:
    """Return the folder for the files of a new run, or of a whole sweep. Nothing is created.

    Raises
    ------
    UsageError
        If the folder refers to an unknown key, its path would do so in Hydra's own files, it cannot be used, or it
        contains a run or a sweep.
    """
    HydraConfig.instance().cfg = job.cfg  # `set_config` would make it read-only
    try:
        folder = Path(job.cfg.hydra.sweep.dir if multirun else job.cfg.hydra.run.dir).absolute()
    except OmegaConfBaseException as e:
        raise UsageError(re.sub(r"hydra\.(run|sweep)\.dir", "output_dir", explain(e))) from e
    if "${" in str(folder):
        raise UsageError(
            f"output_dir must have no ${{ in its path, which Hydra reads as a reference, got {folder}; choose another "
            "folder, or rename the one where rlox was started"
        )
    output_path("output_dir", folder, folder=True)
    require_new(folder)
    return folder


def is_named_by_time(job: Job) -> bool:
    return not any(override.lstrip("+").startswith(tuple(f"{key}=" for key in FOLDERS)) for override in job.overrides)


@contextmanager
def _composition(flags: list[str]) -> Iterator[str]:
    """Prepare Hydra to compose what `flags` choose; yields the name of the root configuration."""
    register()
    _serve_config_dir(flags)
    config_path = flag_value(flags, "--config-path", "-cp")
    GlobalHydra.instance().clear()
    context = (
        initialize_config_dir(str(Path(config_path).resolve()), version_base="1.3")
        if config_path
        else initialize_config_module(CONFIG_MODULE, version_base="1.3", job_name="rlox")
    )
    with context:
        yield flag_value(flags, "--config-name", "-cn") or CONFIG_NAME


def _serve_config_dir(flags: list[str]) -> None:
    """Let `SearchPath` serve the folder of ``-cd`` from now on, if there is one."""
    folder = flag_value(flags, "--config-dir", "-cd")
    SearchPath.folder = None if folder is None else Path(folder).resolve()
    if folder is not None and not Path(folder).is_dir():
        raise UsageError(f"--config-dir must be a folder of YAML, got {folder}; `rlox cp conf {folder}` creates one")


def _sweep(overrides: list[str], config_name: str) -> tuple[DictConfig, list[list[str]]]:
    """Return the configuration of the sweep itself, and the jobs as Hydra's basic sweeper expands them.

    The sweep itself has no swept keys, but of each swept choice the first one, since other keys may depend on it:
    ``algo=sac,td3 algo.learning_starts=500``. ``hydra.sweeper.params`` count as if they were typed. For a search with
    Optuna, the jobs cover both ends of every range. For any other sweeper there is one job, which is the sweep itself.
    """
    loader = GlobalHydra.instance().config_loader()
    try:
        parser = OverridesParser.create(config_loader=loader)
        typed = parser.parse_overrides(overrides)
        # Keys of sections may need a choice that only the parameters of the sweeper name.
        early = [item for item in typed if not item.key_or_group.startswith(tuple(f"{key}." for key in ONE_CHOICE))]
        chosen = _first_job(early)
        master = composed(chosen, config_name, "")
        params = master.hydra.sweeper.get("params") or {}
        # What is typed replaces the parameters.
        lines = [without_password(f"{key}={value}") for key, value in params.items()]
        parsed = [*parser.parse_overrides(lines), *typed]
        fixed = _first_job(parsed)
        if fixed != chosen:
            master = composed(fixed, config_name, f"job 0 of the sweep ({as_typed(fixed)}): ")
        ray_settings(master)
        if searches(master):
            return master, read_search(overrides, master).corners(master.seed)
        if not expands(master):
            return master, [fixed]
        return master, _expand_sweeps(parsed)
    except OverrideParseException as e:
        raise explain_unparsed(e.override) if "LexerNoViableAlt" in e.message else UsageError(str(e)) from e
    except (HydraException, OmegaConfBaseException) as e:
        raise UsageError(explain(e)) from e


def _first_job(parsed: list[Override]) -> list[str]:
    """Return the overrides that are not swept, and of each swept choice the first one; the last one of a key counts."""
    words, last = [], {item.key_or_group: item for item in parsed}
    for key, item in last.items():
        if not item.is_sweep_override():
            words.append(item.input_line)
        elif key in (*ONE_CHOICE, "logger") and item.is_discrete_sweep():
            words.append(f"{key}={_swept(item)[0]}")
    return words


def _expand_sweeps(parsed: list[Override]) -> list[list[str]]:
    """Return every combination of the swept values; the last key varies fastest.

    If a key is given twice, the last one counts.

    Raises
    ------
    UsageError
        If a key has no values, or there are too many jobs.
    """
    values: dict[str, list[str]] = {}
    for item in parsed:
        key = item.get_key_element()
        if not item.is_sweep_override():
            values[key] = [f"{key}={item.get_value_element_as_str()}"]
        elif item.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in _swept(item)]
        else:
            raise UsageError(
                f"{item.input_line} must list its values, as {key}=1,2; ranges are searched by hydra/sweeper=optuna"
            )
    if (n := math.prod(map(len, values.values()))) > _MOST_JOBS:
        raise UsageError(f"a sweep must have at most {_MOST_JOBS:,} jobs, got {n:,}; start several sweeps")
    return [list(job) for job in itertools.product(*values.values())]


def _swept(item: Override) -> list[str]:
    """Return the values of one swept key as they are typed."""
    if isinstance(sweep := item.value(), RangeSweep):
        n = count_values(item.input_line, sweep)
        if n > _MOST_JOBS:
            raise UsageError(
                f"{item.input_line} must give at most {_MOST_JOBS:,} jobs, got {n:,}; start several sweeps"
            )
        values = [str(number_at(sweep, i)) for i in range(n)]
        if sweep.shuffle:
            random.shuffle(values)
    else:
        values = list(item.sweep_string_iterator())
    if not values:
        raise UsageError(
            f"{item.input_line} must match a name, got none; `rlox ls` lists names of algorithms and others"
        )
    for value in values:
        refuse_blanks(item.key_or_group, value.strip("'\""))
    return values


def expands(master: DictConfig) -> bool:
    """Return whether all jobs of the sweeper are known beforehand."""
    return master.hydra.runtime.choices["hydra/sweeper"] in ("basic", "rlox")


def searches(master: DictConfig) -> bool:
    """Return whether the sweeper is Optuna, which chooses its jobs as it goes."""
    return master.hydra.runtime.choices["hydra/sweeper"] == "optuna"


class _Composer:
    """Composes jobs. Jobs with the same choices from every group share one composition; other values are set on a copy.

    A composition takes a tenth of a second, a copy a few milliseconds, which matters for a thousand seeds.
    """

    def __init__(self, config_name: str):
        self._config_name = config_name
        self._parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        self._parsed: dict[str, Override] = {}
        self._bases: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, overrides: list[str], where: str) -> DictConfig:
        for line in overrides:
            if line not in self._parsed:
                (self._parsed[line],) = self._parser.parse_overrides([line])
        parsed = [self._parsed[line] for line in overrides]
        choices = tuple(item.input_line for item in parsed if not _sets_value(item))
        try:
            if choices not in self._bases:
                self._bases[choices] = composed(list(choices), self._config_name, where)
            cfg = copy.deepcopy(self._bases[choices])
            for item in filter(_sets_value, parsed):
                OmegaConf.update(cfg, item.key_or_group, item.value())
        except (HydraException, OmegaConfBaseException, UsageError, AssertionError, AttributeError):
            return composed(overrides, self._config_name, where)  # raises an error that says what is wrong
        task = [item for item in parsed if not item.is_hydra_override()]
        cfg.hydra.overrides.task = [item.input_line for item in task]
        form = cfg.hydra.job.config.override_dirname
        named = sorted(item.input_line for item in task if item.key_or_group not in form.exclude_keys)
        cfg.hydra.job.override_dirname = form.item_sep.join(named).replace("=", form.kv_sep)
        return cfg


def _sets_value(override: Override) -> bool:
    """Return whether the override only sets a key of a run to another value, and chooses nothing from a group."""
    key = override.key_or_group
    plain = override.type is OverrideType.CHANGE and override.package is None and "/" not in key
    return plain and (key in _PLAIN_KEYS or ("." in key and not key.startswith("hydra.")))


def _subdir(cfg: DictConfig, number: int) -> str:
    """Return the job's folder, relative to the sweep's."""
    with open_dict(cfg.hydra.job):
        cfg.hydra.job.num = number
    HydraConfig.instance().cfg = cfg  # read by ${hydra:…}; `set_config` would copy it
    try:
        return str(cfg.hydra.sweep.subdir)
    except OmegaConfBaseException as e:
        raise UsageError(explain(e)) from e


def _compose_one(cfg: DictConfig, overrides: list[str], where: str) -> Job:
    try:
        choices, run = cfg.hydra.runtime.choices, to_run_config(cfg)
        algo = name_choice(choices.algo, run)
        check_run(run, algo, choices.get("buffer"))
        to_plain(run, algo)  # before anything runs, since the run could not be read again
        tuned = apply_settings(run, choices.algo, choices.get("tuned"), overrides)
        return Job(overrides, run, algo, tuned, cfg, choices.algo)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError) as e:
        raise UsageError(where + explain(e)) from e


def composed(overrides: list[str], config_name: str, where: str) -> DictConfig:
    try:
        refuse_forms(overrides)
    except UsageError as e:
        raise UsageError(f"{where}{e}") from e
    try:
        return compose(config_name, overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as e:
        raise UsageError(where + explain(e)) from e
    except (AssertionError, AttributeError) as e:
        # OmegaConf raises these for keys below a section that is null.
        below = next(filter(None, (re.match(r"\+{0,2}logger\.(\w+)[.=]", override) for override in overrides)), None)
        if below is None and any(override.lstrip("+").startswith("hydra.sweeper.params") for override in overrides):
            raise UsageError(
                f"{where}hydra.sweeper.params is null here, and a file sets it; type the keys themselves: -m seed=0,1"
            ) from e
        if below is None:
            raise
        raise UsageError(f"{where}{below.string}: the logger {below[1]} is not chosen; add logger={below[1]}") from e


def run_composed(flags: list[str], job: Job, task: TaskFunction) -> Any:
    """Run a composed job as ``hydra.main`` would, without composing it two more times. Return the result of `task`.

    Hydra still provides the output folder, the logging and the callbacks. `flags` only choose what was composed.
    """
    cfg = job.cfg
    if cfg.hydra.mode is None:
        cfg.hydra.mode = RunMode.RUN
    uri = OmegaConf.select(cfg, "logger.mlflow.tracking_uri")
    if uri is not None and (hidden := take_out_password(uri)) != uri:  # in a file of the user; Hydra stores `cfg`
        cfg.logger.mlflow.tracking_uri = hidden
    with _composition(flags):
        configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
        callbacks = Callbacks(cfg)
        callbacks.on_run_start(cfg, config_name=CONFIG_NAME)
        context = HydraContext(GlobalHydra.instance().config_loader(), callbacks)
        result = run_job(task, cfg, "hydra.run.dir", None, context)
        callbacks.on_run_end(cfg, config_name=CONFIG_NAME, job_return=result)
        if result.status is JobStatus.FAILED:
            raise result._return_value  # its property would also print how the job was started
        return result.return_value


def run_hydra(flags: list[str], overrides: list[str], task: TaskFunction) -> None:
    """Hand over to ``hydra.main``, which handles launchers, sweepers and its own flags."""
    import hydra

    register()
    _serve_config_dir(flags)
    rest, words = [], iter(flags)
    for word in words:
        if word in ("--config-dir", "-cd"):
            next(words)
        elif not word.startswith(("--config-dir=", "-cd=")):
            rest.append(word)
    GlobalHydra.instance().clear()
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["rlox train", *overrides, *rest]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions reach `reported`, which prints them
    try:
        hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)(task)()
    except (ConfigCompositionException, yaml.YAMLError, UnicodeDecodeError) as e:
        with _composition(flags):  # which `hydra.main` has ended
            raise UsageError(explain(e)) from e
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR") if full is None else os.environ.update(HYDRA_FULL_ERROR=full)

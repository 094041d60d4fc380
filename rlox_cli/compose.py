"""From what was typed to validated runs: Hydra's composition, with strict keys and readable errors.

Every job is composed and checked here before the first one starts, and before ``--cfg`` prints anything.
"""

from __future__ import annotations

import copy
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from rlox import config as config_module
from rlox.algorithms import ALGORITHMS, resolve
from rlox.buffers import buffer_config_class, buffer_names
from rlox.checkpoint import load_checkpoint, one_line
from rlox.config import BufferConfig, DatasetConfig, OffPolicyConfig, RunConfig, nearest, tuned_pairs
from rlox.config.migration import answers
from rlox.offline.dataset import check_source
from rlox_cli.buffer_source import BufferSource
from rlox_cli.cp import shipped
from rlox_cli.dataset_source import DatasetSource
from rlox_cli.env_source import GymEnvSource
from rlox_cli.errors import UsageError
from rlox_cli.imports import import_modules, resolve_reward
from rlox_cli.sweep.search import OptunaConfig, read_search

CONFIG_MODULE = "rlox_cli.conf"
CONFIG_NAME = "config"
# Hydra's flags without a value, and those that take it as the next word.
_FLAGS = {
    *("-h", "--help", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc"),
}
_VALUE_FLAGS = {
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--cfg", "-c", "--package", "-p", "--info", "-i"),
}
_EXPONENT = r"(?<![\w.'\"+-])\d[\d_]*(?:\.\d+)?[eE]\+?\d{1,2}(?![\w.'\"])"
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
_ONE_CHOICE = ("algo", "env", "buffer", "dataset", "tuned", "experiment")
_LONGEST_NAME = 200
_KINDS = {
    "Float": "a number",
    "Integer": "an integer",
    "Boolean": "true or false",
    "String": "a text",
}
_OFF_POLICY_ONLY = "on-policy algorithms keep none, algo=dqn does"
# The root's keys that are no sections, which could be groups to choose from.
_PLAIN_KEYS = {item.name for item in fields(RunConfig)} - {
    *("algo", "env", "buffer", "dataset", "eval", "checkpoint", "logger"),
}
# The key that a Config stands at; an algorithm's own stands at `algo`, a memory's at `buffer`.
_SECTION_OF = {
    "RunConfig": "",
    "EnvConfig": "env.",
    "DatasetConfig": "dataset.",
    "EvalConfig": "eval.",
    "CheckpointConfig": "checkpoint.",
    "MlflowConfig": "logger.mlflow.",
    "WandbConfig": "logger.wandb.",
    "TensorboardConfig": "logger.tensorboard.",
    "CsvConfig": "logger.csv.",
}


@dataclass
class Job:
    """One validated run: the overrides that make it, its configuration, and the choices in the defaults list."""

    overrides: list[str]
    config: RunConfig
    algo: str
    tuned: str | None  # "ppo/CartPole-v1" where tuned settings apply
    cfg: DictConfig  # as composed, Hydra's part included; the sweep's own for all its jobs
    subdir: str = ""  # its folder in that of the sweep


@dataclass
class SweeperConfig:
    """How `rlox train -m` goes through the jobs that comma lists, ranges and `params` stand for."""

    _target_: str = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    params: dict[str, str] | None = None  # swept keys, as if they were typed
    max_batch_size: int | None = None  # jobs that are handed to the launcher at once; null: all
    retries: int = 2  # how often in a row a job that died may be tried again without having come further
    plot: bool = True  # draw the learning curves when all is done


class OwnFolderFirst(SearchPathPlugin):
    """Puts the folder of ``-cd`` before what ships, so that an edited copy of a shipped file is the one that counts.

    Hydra's own ``--config-dir`` comes behind, where a file of the same name is never found.
    """

    folder: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder is not None:
            search_path.prepend("command-line", f"file://{self.folder}")


def register() -> None:
    """Make the schemas, the environment source and the resolvers known to Hydra; idempotent."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for name, entry in ALGORITHMS.items():
        store.store(group="algo", name=f"{name}_schema", node=resolve(entry.config))
    for name in shipped("buffer"):
        store.store(group="buffer", name=f"{name}_schema", node=buffer_config_class(name))
    store.store(group="hydra/sweeper", name="rlox", node=SweeperConfig)
    store.store(group="hydra/sweeper", name="optuna_schema", node=OptunaConfig)
    Plugins.instance().register(GymEnvSource)
    Plugins.instance().register(BufferSource)
    Plugins.instance().register(DatasetSource)
    Plugins.instance().register(OwnFolderFirst)
    OmegaConf.register_new_resolver("short_id", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)


def run_name(algo: str, env: str, seed: int) -> str:
    """``ppo-CartPole-v1-s0``, fit for a folder's name."""
    return re.sub(r"[^\w.-]+", "_", f"{algo}-{env[: _LONGEST_NAME // 2]}-s{seed}")


def split_args(args: list[str]) -> tuple[list[str], list[str]]:
    """Part what was typed into Hydra's flags (with their values) and overrides, which Hydra wants in this order apart.

    Raises
    ------
    UsageError
        For a word that is neither.
    """
    flags, overrides = [], []
    words = iter(args)
    for word in words:
        if word in _VALUE_FLAGS:
            flags.append(word)
            value = next(words, None)
            if value is not None:
                flags.append(value)
        elif word.startswith("-"):
            if (name := word.partition("=")[0]) not in _FLAGS | _VALUE_FLAGS:
                known = {"--import", "--check", *_FLAGS, *_VALUE_FLAGS}
                raise UsageError(f"{_short(name)} is no flag; {nearest(name, known)}")
            flags.append(word)
        elif "=" in word or word.startswith("~"):
            # The kwargs take any key; to Hydra's strict mode each would be unknown.
            overrides.append(f"++{word}" if re.match(r"(env|buffer)\.kwargs[.=]", word) else _whole(word))
        else:
            raise UsageError(f"{_short(word)!r} must be KEY=VALUE or a flag; `rlox train --help` shows how")
    if not any(word.split("=")[0] in ("--cfg", "-c", "--info", "-i") for word in flags):
        for word in flags:
            if word.split("=")[0] in ("--resolve", "--package", "-p"):
                raise UsageError(f"{word} must stand beside --cfg job, which prints the configuration")
    return flags, overrides


def _whole(override: str) -> str:
    """`override` with 1e6 as 1000000 where its key takes a whole number, which Hydra reads as a float."""
    key, _, value = override.partition("=")
    if key.lstrip("+").removeprefix("hydra.sweeper.params.") not in _whole_keys():
        return override

    def digits(found: re.Match[str]) -> str:
        number = Decimal(found[0].replace("_", ""))
        return str(int(number)) if number == number.to_integral_value() else found[0]

    return f"{key}={re.sub(_EXPONENT, digits, value)}"


@cache
def _whole_keys() -> set[str]:
    """The dotted keys of all integers, and lists of them, that a run can have."""
    sections: list[tuple[str, type]] = [("", RunConfig), ("hydra.sweeper.", SweeperConfig)]
    sections += [("hydra.sweeper.", OptunaConfig)]
    sections += [("algo.", resolve(entry.config)) for entry in ALGORITHMS.values()]
    sections += [("buffer.", buffer_config_class(name)) for name in buffer_names()]
    sections += [(at, getattr(config_module, name)) for name, at in _SECTION_OF.items() if at]
    return {
        at + item.name
        for at, kind in sections
        for item in fields(kind)
        if re.search(r"\bint\b", str(get_type_hints(kind)[item.name]))
    }


def run_folder(overrides: list[str]) -> list[str]:
    """`overrides` with ``output_dir=FOLDER`` as Hydra has it: the run's folder, or that of all a sweep's runs.

    Raises
    ------
    UsageError
        For an empty folder, and beside the keys that it stands for.
    """
    typed = [override for override in overrides if override.startswith("output_dir=")]
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("output_dir", *_FOLDERS) and value in ("", "''", '""', "null"):
            raise UsageError(f"{key} must name a folder, got nothing")
        if key in _FOLDERS and typed:
            raise UsageError(f"output_dir must not stand beside {key}, which it sets; type one of them")
        if key in ("output_dir", *_FOLDERS) and any(len(os.fsencode(part)) > 255 for part in value.split("/")):
            raise UsageError(f"{key} must name a folder of at most 255 bytes, got {_short(value)}")
    rest = [override for override in overrides if override not in typed]
    if not typed:
        return rest
    folder = typed[-1].partition("=")[2]
    if folder[0] not in "'\"":
        # A path is taken as it is, whatever its signs mean in Hydra's grammar.
        folder = os.path.expanduser(folder).replace("'", r"\'")
        folder = f"'{folder}'"
    return [*rest, *(f"{key}={folder}" for key in _FOLDERS)]


def _refuse_forms(overrides: list[str]) -> None:
    """A UsageError for what Hydra's grammar allows, and no run can have, in words that say what to type."""
    loader = GlobalHydra.instance().config_loader()
    parser = OverridesParser.create(config_loader=loader)
    for line in overrides:
        if len(name := line.partition("=")[0]) > _LONGEST_NAME:
            raise UsageError(
                f"{_short(name)} must be a key of at most {_LONGEST_NAME} characters, got one of {len(name):,}"
            )
        try:
            (override,) = parser.parse_overrides([line])
        except OverrideParseException as e:
            raise UsageError(
                f"{_short(line)!r} must be KEY=VALUE, and a value with other characters than ASCII letters, digits and "
                "-_./:+@ must be quoted: \"KEY='VALUE'\""
            ) from e
        except ValueError as e:
            raise UsageError(f"{_short(line)} must have a value that can be read: {one_line(e, 80)}") from e
        key = override.key_or_group
        if not key:
            raise UsageError(f"{_short(line)!r} must be KEY=VALUE, got no key")
        # What judges a run is no setting of it: tuned settings bring it, and a run does without.
        if override.type is OverrideType.DEL and key != "reference":
            raise UsageError(
                f"{_short(line)} must not delete a key: a run has all of them; leave it out for its default"
            )
        if override.is_sweep_override():
            continue
        value = override.value()
        if value == "???":
            raise UsageError(f"{key} must have a value, got ???, which stands for none")
        if value is None and (key in _ONE_CHOICE or loader.get_group_options(key)):
            raise UsageError(f"{key} must be a name, got null; leave it out for its default")
        if key == "hydra.job.chdir" and value:
            raise UsageError(f"{key} must be false, got {value}: paths are read from the folder where rlox was started")
        if key not in _ONE_CHOICE:
            continue
        if isinstance(value, (list, dict)):
            several = isinstance(value, list) and all(isinstance(item, str) for item in value)
            remedy = f"one run for each: -m {key}={','.join(value)}" if several else f"keys are set as {key}.KEY=VALUE"
            raise UsageError(f"{key} must be one choice, got {_short(line.partition('=')[2])}; {remedy}")
        if len(str(value)) > _LONGEST_NAME and key != "dataset":
            raise UsageError(
                f"{key} must be a name of at most {_LONGEST_NAME} characters, got one of {len(str(value)):,}: "
                f"{_short(str(value))}"
            )


def _short(text: str) -> str:
    return one_line(text, 60)


def _flag_value(flags: list[str], *names: str) -> str | None:
    for i, word in enumerate(flags):
        if word in names and i + 1 < len(flags):
            return flags[i + 1]
        for name in names:
            if word.startswith(f"{name}="):
                return word.split("=", 1)[1]
    return None


def _take_config_dir(flags: list[str]) -> list[str]:
    """`flags` without ``-cd DIR``, which `OwnFolderFirst` serves from now on."""
    folder = _flag_value(flags, "--config-dir", "-cd")
    OwnFolderFirst.folder = None if folder is None else Path(folder).resolve()
    if folder is None:
        return flags
    if not Path(folder).is_dir():
        raise UsageError(f"--config-dir must be a folder of YAML, got {folder}; `rlox cp conf {folder}` makes one")
    rest, words = [], iter(flags)
    for word in words:
        if word in ("--config-dir", "-cd"):
            next(words)
        elif not word.startswith(("--config-dir=", "-cd=")):
            rest.append(word)
    return rest


def is_multirun(flags: list[str], overrides: list[str]) -> bool:
    return any(flag in ("-m", "--multirun") for flag in flags) or "hydra.mode=MULTIRUN" in overrides


def compose_jobs(flags: list[str], overrides: list[str]) -> list[Job]:
    """Compose and validate every job that `flags` and `overrides` stand for.

    A sweeper other than Hydra's basic one and rlox's own chooses its jobs as it goes: then the one job without the
    swept values is checked.

    Raises
    ------
    UsageError
        For the first job that is not valid, naming key, rule, value and the nearest valid name.
    """
    if is_multirun(flags, overrides):
        return compose_sweep(flags, overrides)[1]
    with _composition(flags) as config_name:
        cfg = composed(overrides, config_name, "")
        if cfg.hydra.mode is RunMode.MULTIRUN:
            raise UsageError("hydra.mode must not be MULTIRUN in a file; type -m instead")
        return [_compose_one(cfg, overrides, "")]


def compose_sweep(flags: list[str], overrides: list[str]) -> tuple[DictConfig, list[Job]]:
    """The sweep's own configuration (its section ``hydra`` counts), and its jobs as `compose_jobs`."""
    with _composition(flags) as config_name:
        master, lists = _sweep(overrides, config_name)
        composer, jobs = _Composer(config_name), []
        for number, job in enumerate(lists):
            where = f"job {number} of the sweep ({' '.join(job)}): " if len(lists) > 1 else ""
            cfg = composer.compose(job, where)
            jobs.append(_compose_one(cfg, job, where))
            jobs[-1].subdir, jobs[-1].cfg = _subdir(cfg, number), master
        return master, jobs


def compose_launcher(flags: list[str], overrides: list[str]) -> DictConfig:
    """The configuration whose section ``hydra`` says how jobs that are known already are launched."""
    with _composition(flags) as config_name:
        return composed(overrides, config_name, "")


def folder_of(job: Job, multirun: bool) -> Path:
    """Where the run's files, or all of the sweep's, are to go.

    Raises
    ------
    UsageError
        For a folder that refers to what is no key.
    """
    HydraConfig.instance().cfg = job.cfg  # `set_config` would make it read-only
    try:
        return Path(job.cfg.hydra.sweep.dir if multirun else job.cfg.hydra.run.dir).absolute()
    except OmegaConfBaseException as e:
        raise UsageError(re.sub(r"hydra\.(run|sweep)\.dir", "output_dir", explain(e))) from e


def named_by_time(job: Job) -> bool:
    return not any(override.lstrip("+").startswith(tuple(f"{key}=" for key in _FOLDERS)) for override in job.overrides)


@contextmanager
def _composition(flags: list[str]) -> Iterator[str]:
    """Hydra, ready to compose what `flags` choose; yields the name of the root."""
    register()
    _take_config_dir(flags)
    config_path = _flag_value(flags, "--config-path", "-cp")
    GlobalHydra.instance().clear()
    context = (
        initialize_config_dir(str(Path(config_path).resolve()), version_base="1.3")
        if config_path
        else initialize_config_module(CONFIG_MODULE, version_base="1.3", job_name="rlox")
    )
    with context:
        yield _flag_value(flags, "--config-name", "-cn") or CONFIG_NAME


def _sweep(overrides: list[str], config_name: str) -> tuple[DictConfig, list[list[str]]]:
    """The configuration without the swept keys, and the jobs as Hydra's basic sweeper expands them.

    ``hydra.sweeper.params`` count as if they were typed. For a search: jobs that meet both ends of every range. For any
    other sweeper: one job, without the swept keys.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    loader = GlobalHydra.instance().config_loader()
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(overrides)
        fixed = [item.input_line for item in parsed if not item.is_sweep_override()]
        master = composed(fixed, config_name, "")
        if searches(master):
            return master, list(read_search(overrides, master).corners())
        if not expands(master):
            return master, [fixed]
        params = master.hydra.sweeper.get("params") or {}
        given = OverridesParser.create(config_loader=loader).parse_overrides([f"{k}={v}" for k, v in params.items()])
        parsed = [*given, *parsed]  # what is typed replaces a preset's
        return master, [job for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]
    except HydraException as e:
        raise UsageError(str(e)) from e


def expands(master: DictConfig) -> bool:
    """Whether the sweeper is one whose jobs are all known beforehand."""
    return master.hydra.runtime.choices["hydra/sweeper"] in ("basic", "rlox")


def searches(master: DictConfig) -> bool:
    """Whether the sweeper is Optuna, which chooses its jobs as it goes."""
    return master.hydra.runtime.choices["hydra/sweeper"] == "optuna"


class _Composer:
    """Composes jobs that choose the same from every group once; what values differ are set on a copy.

    A composition takes a tenth of a second, a copy some milliseconds: of a thousand seeds that makes the difference.
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
            ConfigLoaderImpl._apply_overrides_to_config([item for item in parsed if _sets_value(item)], cfg)
        except (HydraException, OmegaConfBaseException, UsageError):
            return composed(overrides, self._config_name, where)  # it says what is wrong
        task = [item for item in parsed if not item.is_hydra_override()]
        cfg.hydra.overrides.task = [item.input_line for item in task]
        form = cfg.hydra.job.config.override_dirname
        cfg.hydra.job.override_dirname = get_overrides_dirname(
            overrides=task, kv_sep=form.kv_sep, item_sep=form.item_sep, exclude_keys=form.exclude_keys
        )
        return cfg


def _sets_value(override: Override) -> bool:
    """Whether the override only gives a key of a run another value, and chooses nothing from a group."""
    key = override.key_or_group
    plain = override.type is OverrideType.CHANGE and override.package is None and "/" not in key
    return plain and (key in _PLAIN_KEYS or ("." in key and not key.startswith("hydra.")))


def _subdir(cfg: DictConfig, number: int) -> str:
    """The job's folder in that of its sweep."""
    with open_dict(cfg.hydra.job):
        cfg.hydra.job.num = number
    HydraConfig.instance().cfg = cfg  # what ${hydra:…} asks; `set_config` would copy it
    return str(cfg.hydra.sweep.subdir)


def _compose_one(cfg: DictConfig, overrides: list[str], where: str) -> Job:
    try:
        return _validated(cfg, overrides)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError) as e:
        raise UsageError(where + explain(e)) from e


def composed(overrides: list[str], config_name: str, where: str) -> DictConfig:
    try:
        _refuse_forms(overrides)
    except UsageError as e:
        raise UsageError(f"{where}{e}") from e
    try:
        return compose(config_name, overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as e:
        raise UsageError(where + explain(e)) from e
    except AssertionError as e:
        # What OmegaConf says of a key below a section that is null.
        below = [o for o in overrides if re.match(r"logger\.\w+\.", o)]
        if not below:
            raise
        name = below[0].split(".")[1]
        raise UsageError(f"{where}{below[0]}: the logger {name} is not chosen; add logger={name}") from e


def _validated(cfg: DictConfig, overrides: list[str]) -> Job:
    choices = cfg.hydra.runtime.choices
    algo, choice = choices.algo, choices.get("tuned")
    run = to_run_config(cfg)
    _check_known(run)
    _check_off_policy(run, algo, choices.get("buffer"))
    _check_dataset(run, algo)
    module, _, env_id = run.env.id.rpartition(":")
    import_modules([*run.imports, *([module] if module else [])])
    check_env_id(env_id, run.env.kwargs, run.env.backend)
    resolve_reward(run.env.reward_fn, run.imports)
    if run.init_from is not None:
        _check_init_from(run.init_from)
    pairs = {f"{a}/{e}" for a, e in tuned_pairs()} | _own_tuned_pairs()
    applied = choice if choice in pairs else None
    typed = next((o.split("=", 1)[1] for o in overrides if re.match(r"\+*tuned=", o)), None)
    if typed is not None and typed not in (*pairs, "off"):
        raise ValueError(f"tuned={typed} does not exist; {nearest(typed, [*pairs, 'off'])}")
    if applied and typed is None and applied != f"{algo}/{run.env.id}":
        raise ValueError(
            f"env.id={run.env.id} stands beside the tuned settings of {applied}; type env={run.env.id}, or tuned=off"
        )
    return Job(overrides, run, algo, applied, cfg)


def _check_known(config: Any, at: str = "") -> None:
    """A ValueError for a key that ``+`` has added to a section, and nothing would read."""
    if not is_dataclass(config):
        return
    known = [item.name for item in fields(config)]
    for name, value in vars(config).items():
        if name not in known:
            raise ValueError(f"{at}{name} is no key of {type(config).__name__}; {nearest(name, known)}")
        _check_known(value, f"{at}{name}.")


def _check_off_policy(run: RunConfig, algo: str, chosen: str | None) -> None:
    if not isinstance(run.algo, OffPolicyConfig):
        if run.buffer is not None:
            raise ValueError(
                f"buffer must be left out with algo={algo}, got {chosen or 'its keys'}; {_OFF_POLICY_ONLY}"
            )
        return
    if not isinstance(run.buffer, BufferConfig):
        raise ValueError(f"buffer must be chosen for algo={algo}, got null; try buffer=uniform")
    if run.buffer.name != chosen:
        raise ValueError(f"buffer.name must be {chosen}, what buffer= chose, got {run.buffer.name!r}")
    at_least = max(run.algo.batch_size, run.env.n_envs)
    if run.buffer.size < at_least:
        raise ValueError(
            f"buffer.size must be at least algo.batch_size and env.n_envs ({at_least}), got {run.buffer.size}"
        )
    if run.algo.learning_starts >= run.total_timesteps:
        raise ValueError(
            f"algo.learning_starts must be below total_timesteps ({run.total_timesteps}), or nothing is learned, "
            f"got {run.algo.learning_starts}"
        )


def _check_dataset(run: RunConfig, algo: str) -> None:
    uses, some = run.algo.uses_dataset, "dataset=data/medium.arrow (`rlox collect` makes one) or dataset=minari:ID"
    if run.dataset is None:
        if uses == "must":
            raise ValueError(f"dataset must be chosen for algo={algo}, got null; try {some}")
        return
    if not isinstance(run.dataset, DatasetConfig):
        raise ValueError(f"dataset.source must be given; try {some}")
    if uses == "never":
        able = [name for name, entry in ALGORITHMS.items() if resolve(entry.config).uses_dataset != "never"]
        raise ValueError(
            f"dataset must be left out with algo={algo}, which learns from what it gathers itself, got "
            f"{run.dataset.source}; those that learn from one: {', '.join(able)}"
        )
    check_source(run.dataset.source)
    if uses == "must":
        # It is evaluated on the environment and learns nothing there, from losses as they are written.
        for key, value, meant in (
            ("compile", run.compile, "false"),
            ("env.reward_fn", run.env.reward_fn, "null"),
            ("env.workers", run.env.workers, "0"),
            ("env.backend", run.env.backend != "auto" and run.env.backend, "auto"),
        ):
            if value:
                raise ValueError(f"{key} must be {meant} with algo={algo}, which learns from the dataset, got {value}")


def _own_tuned_pairs() -> set[str]:
    """``<algo>/<env>`` of the tuned settings in the folder of ``-cd``."""
    if OwnFolderFirst.folder is None:
        return set()
    root = OwnFolderFirst.folder / "tuned"
    return {path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/**/*.yaml")}


def _check_init_from(name: str) -> None:
    if not name:
        raise ValueError("init_from must be a checkpoint file, or null, got ''")
    path = Path(name)
    if path.is_dir():
        raise ValueError(
            f"init_from must be a checkpoint file, got the folder {path}; "
            f"try init_from={path}/checkpoints/best.safetensors"
        )
    try:
        load_checkpoint(path)
    except (OSError, ValueError) as e:
        raise ValueError(f"init_from={path} must be a checkpoint that loads: {e}") from e


def to_run_config(cfg: DictConfig) -> RunConfig:
    """The typed configuration of a composed job; every rule is checked on the way."""
    plain = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    return OmegaConf.to_object(OmegaConf.merge(run_schema(), plain))


@cache
def run_schema() -> DictConfig:
    return OmegaConf.structured(RunConfig)


def check_env_id(env_id: str, kwargs: dict[str, Any], backend: str = "auto") -> None:
    """Raise a ValueError unless `env_id` is native or registered with gymnasium, which is only then imported.

    With the backend envpool it must be one of EnvPool's.
    """
    from rlox.envs import foreign_id, is_native, native_env_ids

    if backend == "envpool":
        from rlox.envs.envpool_env import check_envpool_id

        try:
            check_envpool_id(env_id)
        except ImportError as e:
            raise ValueError(f"env.backend=envpool is not available: {e}") from e
        return
    try:
        if is_native(env_id) and not kwargs:
            return
    except ImportError as e:
        raise ValueError(f"env={env_id} is not available: {e}") from e
    import gymnasium
    from gymnasium import error

    from rlox.envs.gym_make import register_atari

    if env_id.startswith("ALE/"):
        try:
            register_atari()
        except ImportError as e:
            raise ValueError(f"env={env_id} is not available: {e}") from e
    try:
        gymnasium.spec(foreign_id(env_id))
    except (error.Error, ImportError) as e:
        hint = nearest(env_id, [*native_env_ids(), *gymnasium.registry])
        remedy = hint if hint.startswith("did") else "`rlox ls envs` lists them"
        raise ValueError(f"env={one_line(env_id, 80)} is no environment; {remedy}") from e


def _section(name: str) -> str:
    """The key, with its dot, at which the Config class of this name stands."""
    kinds = [BufferConfig]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return "buffer." if name in {kind.__name__ for kind in kinds} else _SECTION_OF.get(name, "algo.")


def explain(e: BaseException) -> str:
    """One sentence for a Hydra or OmegaConf error: the key, what it must be, the value, the nearest valid name."""
    root: BaseException = e
    while not isinstance(root, OmegaConfBaseException) and root.__cause__ is not None:
        root = root.__cause__
    if isinstance(e, MissingConfigException) and e.missing_cfg_file:
        path = e.missing_cfg_file.removesuffix(".yaml")
        group, _, choice = path.partition("/") if path.split("/")[0] in _ONE_CHOICE else path.rpartition("/")
        if group == "dataset":
            return f"dataset must name a file, or minari:ID, got {choice!r}"
        if group:
            # Hydra names no options for an item of a list, as in logger=[mlflow,cvs].
            options = e.options or GlobalHydra.instance().config_loader().get_group_options(group)
            options = [option for option in options if not option.endswith("_schema")]
            more = "; or any gymnasium id, such as Acrobot-v1" if group == "env" else ""
            return f"{group}={choice} does not exist; {nearest(choice, options)}{more}"
    if isinstance(e, HydraException) and "Ambiguous value for argument" in str(e):
        line = re.search(r"argument '(.*?)'\n", str(e))
        return f"{line[1] if line else 'a comma list'} is several values, which are a sweep: rlox train -m …"
    if isinstance(root, OmegaConfBaseException) and root.full_key:
        first = (root.msg or str(root)).splitlines()[0]
        if isinstance(root, InterpolationResolutionError):
            told = re.search(r"Interpolation key '(.*)' not found|[Uu]nsupported interpolation type (\S+)", first)
            name = next(filter(None, told.groups()), "") if told else ""
            what = f"refers to {name!r}, which is no key" if name else f"cannot be resolved: {first}"
            return f"{root.full_key} {what}; a reference is ${{SECTION.KEY}}, as ${{algo.gamma}}"
        if "Cannot merge DictConfig with ListConfig" in first:
            return f"{root.full_key} must be a list, as [1,2], got a mapping"
        if "is not a ListConfig" in first or "Cannot assign" in first or "Cannot convert" in first:
            kind = (
                "a list, as [1,2]"
                if "ListConfig" in first
                else "a mapping, as {name: 1}"
                if "Dict[" in first
                else "a text"
            )
            got = re.search(r"(?:assigned: |Cannot assign |Cannot convert )'?(\w+)", first)
            return f"{root.full_key} must be {kind}, got a value of type {got[1] if got else 'another'}"
        if "not in" in first or "not found" in first:
            known = [str(key) for key in root.parent_node] if isinstance(root.parent_node, DictConfig) else []
            if root.object_type is dict and re.fullmatch(r"buffer\.\w+", root.full_key):
                return f"{root.full_key} needs a replay memory; {_OFF_POLICY_ONLY}"
            if root.object_type is dict and re.fullmatch(r"dataset\.\w+", root.full_key):
                return f"{root.full_key} needs a dataset; add dataset=data/medium.arrow or dataset=minari:ID"
            kind = root.object_type.__name__ if isinstance(root.object_type, type) else "the configuration"
            hint = nearest(str(root.key), known) if known else "`rlox show` lists the keys"
            for section in ("algo", "env", "buffer", "dataset"):
                # `gamma=0.9` for `algo.gamma=0.9` is what people type first.
                if "." not in root.full_key and OmegaConf.select(root.parent_node, f"{section}.{root.key}") is not None:
                    hint = f"did you mean {section}.{root.key}?"
            section, _, name = root.full_key.rpartition(".")
            if section in ("", "algo"):
                algo = root.parent_node if section else root.parent_node.get("algo") or {}
                hint = answers(name, [str(key) for key in algo], cli=True) or hint
            return f"{root.full_key} is no key of {kind}; {hint}"
        value = re.match(r"Value (.*) of type '\w+' could not be converted to (\w+)", first)
        if value:
            kind = _KINDS.get(value[2], value[2])
            hint = " (write 1_000_000, not 1e6)" if kind == "an integer" and re.match(r"'\d+\.0'", value[1]) else ""
            known = [str(key) for key in root.parent_node] if isinstance(root.parent_node, DictConfig) else []
            theirs = answers(str(root.key), known, cli=True, value=value[1].strip("'"))
            return f"{root.full_key} must be {kind}, got {value[1]}{hint}{f'; {theirs}' if theirs else ''}"
        if "is not Optional" in first:
            return f"{root.full_key} must have a value, got null; leave it out for its default"
        if not_bool := re.match(r"Value (.*) is not a valid bool", first):
            return f"{root.full_key} must be {_KINDS['Boolean']}, got {not_bool[1]}"
        return f"{root.full_key}: {first}"
    if isinstance(e, (ValueError, TypeError)) and (named := re.match(r"(\w+Config): (.*)", str(e), re.DOTALL)):
        return f"{_section(named[1])}{named[2]}"
    return " ".join(str(e).split())


def run_hydra(flags: list[str], overrides: list[str], task) -> None:
    """Hand over to ``hydra.main``, which owns output folders, launchers, sweepers and its own flags."""
    import hydra

    register()
    flags = _take_config_dir(flags)
    GlobalHydra.instance().clear()
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["rlox train", *overrides, *flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us; `reported` makes the paragraph
    try:
        hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)(task)()
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR") if full is None else os.environ.update(HYDRA_FULL_ERROR=full)

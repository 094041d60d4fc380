"""What Hydra needs to know: the typed configuration of a run, rlox's sweeper, and where to look for YAML.

The config sources serve choices of ``algo``, ``env``, ``buffer``, ``dataset``, ``rows`` and ``logger`` that have no
YAML file.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf

from rlox.algorithms import algorithm_names, entry_of, resolve
from rlox.buffers import BUFFERS, buffer_config_class, buffer_names
from rlox.checkpoint import one_line
from rlox.config import DatasetConfig, LoggerConfig, OnPolicyConfig, RayResources, RunConfig, usual_settings
from rlox.config.offers import offers
from rlox.config.sqlite import PREFIX
from rlox.envs.registry import ENV_GROUP, ZOO, find_unimported_module
from rlox.offline.dataset import dataset_metadata
from rlox.offline.sources import ARROW_SUFFIXES, READERS
from rlox.tracking.loggers import logger_config, logger_settings, outside_loggers
from rlox_cli.config.ranges import OptunaConfig
from rlox_cli.config.shipped import read_shipped
from rlox_cli.families.family import family_of
from rlox_cli.families.imports import is_function
from rlox_cli.records.checkpoints import best_of
from rlox_cli.records.pulled import find_pulled
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import with_home

CONFIG_MODULE = "rlox_cli.conf"
CONFIG_NAME = "config"
ONE_CHOICE = ("algo", "env", "buffer", "dataset", "tuned", "experiment")
LONGEST_NAME = 200
# Keys whose values are paths, or may be. A shell expands no ``~`` after ``KEY.WITH.DOTS=``, and some after no ``=``.
_PATH_KEYS = (
    *("init_from", "model", "tokenizer", "reward", "sampler_folder", "buffer.folder", "dataset.source", "eval.dataset"),
    *("logger.mlflow.tracking_uri", "remote.token_file", "remote.ca", "remote.cert", "remote.key"),
)
# The prefix of each Config's keys. That of algorithms is `algo.`, that of replay memories `buffer.`.
SECTION_OF = {
    "RunConfig": "",
    "EnvConfig": "env.",
    "DatasetConfig": "dataset.",
    "EvalConfig": "eval.",
    "RemoteConfig": "remote.",
    "CheckpointConfig": "checkpoint.",
    "RayConfig": "ray.",
    "MlflowConfig": "logger.mlflow.",
    "WandbConfig": "logger.wandb.",
    "TensorboardConfig": "logger.tensorboard.",
    "CsvConfig": "logger.csv.",
}


# gymnasium's grammar: (namespace/)name(-vN). Without a version it is more likely a typo than an id.
_ENV_ID = re.compile(r"(?:[\w:.-]+/)?[\w:.-]+-v\d+")


@dataclass
class SweeperConfig:
    """How `rlox train -m` runs the jobs that comma lists, ranges and `params` describe."""

    params: dict[str, str] | None = None  # swept keys, as if they were typed
    max_batch_size: int | None = None  # jobs that are handed to the launcher at once; null: all
    retries: int = 2  # how often in a row a job that died without progress is tried again
    plot: bool = True  # draw the learning curves at the end


@dataclass
class RayLauncherConfig(RayResources):
    """Runs the jobs of a sweep on Ray: rlox train -m hydra/launcher=ray …"""

    _target_: str = "rlox_cli.sweep.ray.RayLauncher"
    n_jobs: int = -1  # maximum number of jobs at once; -1: as many as the CPUs, GPUs and resources allow

    def rules(self):
        yield from super().rules()
        yield "n_jobs", self.n_jobs == -1 or self.n_jobs >= 1, "be -1 or >= 1"


class SearchPath(SearchPathPlugin):
    """Adds the schemas, and puts the folder of ``-cd`` before the shipped files, so that its files take precedence.

    Hydra's own ``--config-dir`` comes after them, where a file of the same name is never found.
    """

    folder: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder is not None:
            search_path.prepend("command-line", f"file://{self.folder}")
        search_path.append("rlox", "schemas://")


class _Choices(ConfigSource):
    """Serves the choices of one group. A YAML file of the same name in `conf/` or the ``-cd`` folder overrides them."""

    group: ClassVar[str | None]  # None: of several groups, and not listed
    name_of_scheme: ClassVar[str]  # as in config.yaml

    @classmethod
    def scheme(cls) -> str:
        return cls.name_of_scheme

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == self.group

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        # Hydra asks for None where a choice is null.
        return group == self.group and name not in ("", "None") and self.serves(name)

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"no {self.group}: {config_path}")
        config, package = self.config(config_path.removesuffix(".yaml").partition("/")[2])
        return ConfigResult(self.provider, f"{self.name_of_scheme}://", config, {"package": package})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [*self.names()] if config_path == self.group and results_filter != ObjectType.GROUP else []

    def serves(self, name: str) -> bool:
        """Return whether there is such a choice."""
        raise NotImplementedError

    def names(self) -> Sequence[str]:
        """Return the choices that completion and messages list."""
        raise NotImplementedError

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        """Return the configuration of a choice, and the package that it belongs to; None: that of its group."""
        raise NotImplementedError


class GymEnvSource(_Choices):
    """Any ``env=ID`` as ``{id: ID}``, with the usual settings for ``ALE/…`` ids, and ``env=pettingzoo:MODULE``.

    It lists the environments that installed packages offer.
    """

    group, name_of_scheme = "env", "gymenv"

    def serves(self, name: str) -> bool:
        return _ENV_ID.fullmatch(name) is not None or (name.startswith(ZOO) and name != ZOO)

    def names(self) -> list[str]:
        return [name for name in offers(ENV_GROUP) if self.serves(name)]

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        settings: dict[str, Any] = {"env": {"id": name}}
        if usual := usual_settings(name):
            # Typed overrides take precedence.
            settings["env"]["reward_fn"] = usual.pop("reward_fn")
            settings["algo"] = usual
        return OmegaConf.create(settings), "_global_"


class BufferSource(_Choices):
    """``buffer=NAME`` for a replay memory that a package has registered, with its configuration's defaults."""

    group, name_of_scheme = "buffer", "buffers"

    def serves(self, name: str) -> bool:
        return name in buffer_names()

    def names(self) -> list[str]:
        return buffer_names()

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        return OmegaConf.structured(buffer_config_class(name)(name=name)), None


class DatasetSource(_Choices):
    """``dataset=SOURCE``. Whether the source exists is checked later, where the message can be more specific."""

    group, name_of_scheme = "dataset", "datasets"

    def serves(self, name: str) -> bool:
        return not name.endswith("_schema")

    def names(self) -> list[str]:
        return dataset_files()

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        return OmegaConf.structured(DatasetConfig(source=name)), None


class AlgorithmSource(_Choices):
    """``algo=NAME`` for an algorithm without a YAML file, which another package adds."""

    group, name_of_scheme = "algo", "algorithms"

    def serves(self, name: str) -> bool:
        return name not in read_shipped("algo") and name in algorithm_names()  # reads which packages are installed

    def names(self) -> list[str]:
        return algorithm_names()

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        kind = resolve(entry_of(name).config)
        settings: dict[str, Any] = {"defaults": [f"{name}_schema@algo", "_self_"]}
        if not issubclass(kind, OnPolicyConfig):
            settings["env"] = {"n_envs": 1}
        if (usual := family_of(kind).usual_buffer) is not None:
            settings["defaults"].insert(1, {"override /buffer": usual})
        return OmegaConf.create(settings), "_global_"


class RowsSource(_Choices):
    """``rows=NAME`` for an algorithm that trains a language model: sets `env`, since there is no environment."""

    group, name_of_scheme = "rows", "rows"

    def serves(self, name: str) -> bool:
        entry = entry_of(name)
        return entry is not None and family_of(resolve(entry.config)).completes_prompts

    def names(self) -> list[str]:
        return [name for name in algorithm_names() if self.serves(name)]

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        # The dataset's name, which distinguishes runs and plots.
        env = {"id": "${task_name:${oc.select:dataset.source,text}}", "n_envs": 1}
        return OmegaConf.create({"env": env}), "_global_"


class LoggerSource(_Choices):
    """``logger=NAME`` for a logger of an installed package, with the defaults of its settings."""

    group, name_of_scheme = "logger", "loggers"

    def serves(self, name: str) -> bool:
        return name in outside_loggers()

    def names(self) -> list[str]:
        return outside_loggers()

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        return OmegaConf.create({name: vars(logger_settings(name)())}), None


class SchemaSource(_Choices):
    """The typed configurations that files refer to: ``run_schema``, ``algo/NAME_schema``, ``buffer/NAME_schema`` ….

    Hydra's ConfigStore would copy all of them for every composition, and building all takes a tenth of a second.
    """

    group, name_of_scheme = None, "schemas"

    def is_config(self, config_path: str) -> bool:
        return _kind_of(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        kind = _kind_of(config_path)
        if kind is None:
            raise ConfigLoadError(f"no schema: {config_path}")
        schema = run_schema() if kind is RunConfig else copy.deepcopy(schema_of(kind))
        return ConfigResult(self.provider, "schemas://", schema, {"package": None})


# Returns a dataclass as Hydra merges it: typed, and strict about keys. Callers copy it before they change it.
schema_of: Callable[[type], DictConfig] = cache(OmegaConf.structured)


def run_schema() -> DictConfig:
    """Return a new copy of the schema of a run, with the settings of all loggers that are installed."""
    schema = copy.deepcopy(schema_of(RunConfig))
    if (kind := logger_config()) is not LoggerConfig:
        schema.logger = OmegaConf.structured(kind)
    return schema


_SINGLE = {
    "run_schema": RunConfig,
    "hydra/sweeper/optuna_schema": OptunaConfig,
    "hydra/launcher/ray_schema": RayLauncherConfig,
}


def _kind_of(config_path: str) -> type | None:
    """Return the dataclass of a schema; None if there is none of that name."""
    path = config_path.removesuffix(".yaml")
    if not path.endswith("_schema"):
        return None
    group, _, name = path.removesuffix("_schema").rpartition("/")
    if group == "algo":
        entry = entry_of(name)
        return None if entry is None else resolve(entry.config)
    if group == "buffer":
        return buffer_config_class(name) if name in BUFFERS else None
    return _SINGLE.get(path)


def register() -> None:
    """Register the sweeper, the config sources and the resolvers with Hydra; idempotent."""
    ConfigStore.instance().store("rlox", schema_of(SweeperConfig), "hydra/sweeper")
    plugins = (
        *(SearchPath, SchemaSource, GymEnvSource, AlgorithmSource, BufferSource, DatasetSource, RowsSource),
        LoggerSource,
    )
    for plugin in plugins:
        Plugins.instance().register(plugin)
    OmegaConf.register_new_resolver("short_id", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    OmegaConf.register_new_resolver("task_name", task_name, replace=True)


def ray_settings(cfg: DictConfig) -> RayLauncherConfig | None:
    """Return the settings of hydra/launcher=ray from a composed configuration; None for another launcher.

    Raises
    ------
    UsageError
        If a value breaks a rule, or the sweeper starts its launcher itself.
    ImportError
        If Ray is not installed; the message says how to install it.
    """
    if cfg.hydra.launcher.get("_target_") != RayLauncherConfig._target_:
        return None
    if cfg.hydra.runtime.choices["hydra/sweeper"] not in ("basic", "rlox", "optuna"):
        raise UsageError("hydra/launcher=ray must be used with hydra/sweeper=rlox or optuna; leave one of them out")
    if find_spec("ray") is None:
        raise ImportError('hydra/launcher=ray needs Ray, which is not installed; try: pip install "rlox-cli[ray]"')
    try:
        return RayLauncherConfig.from_kwargs("hydra.launcher", **OmegaConf.to_container(cfg.hydra.launcher))
    except (ValueError, TypeError) as e:
        raise UsageError(str(e).replace("RayLauncherConfig: ", "hydra.launcher.")) from e


def run_name(algo: str, env: str, seed: int) -> str:
    """Return a name such as ``ppo-CartPole-v1-s0`` that is valid for a folder."""
    return re.sub(r"[^\w.-]+", "_", f"{algo}-{env[: LONGEST_NAME // 2]}-s{seed}")


def task_name(source: str) -> str:
    """Return the name of rows of text: ``sums`` for data/sums.jsonl, ``copy_rows`` for my_package:copy_rows."""
    return source.rpartition(":")[2] if is_function(source) else Path(source).stem


def to_run_config(cfg: DictConfig) -> RunConfig:
    """Return the typed configuration of a composed job, with every rule checked."""
    plain = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    if "reference" in plain and not plain.reference:  # empty in config.yaml, since no key can be added to null
        plain.reference = None
    for key in _PATH_KEYS:
        value = OmegaConf.select(plain, key)
        if isinstance(value, str):
            prefix = PREFIX if value.startswith(PREFIX) else ""
            path = with_home(key, value.removeprefix(prefix))
            if key in ("init_from", "model") and (pulled := find_pulled(path)) is not None:
                path = str(best_of(pulled))
            elif key == "init_from" and path and Path(path).is_dir():
                try:
                    path = str(best_of(Path(path)))
                except ValueError as e:
                    raise ValueError(f"{key}={e}") from None
            OmegaConf.update(plain, key, prefix + path)
        elif isinstance(value, ListConfig):
            paths = [with_home(key, path) if isinstance(path, str) else path for path in value]
            OmegaConf.update(plain, key, paths)
    return OmegaConf.to_object(OmegaConf.merge(run_schema(), plain))


def dataset_files(typed: str = "") -> list[str]:
    """Return the datasets among the files whose path begins with `typed`, here or one folder below."""
    paths = {path for pattern in (f"{typed}*", f"{typed}*/*") for path in glob(pattern)}
    return sorted(path for path in paths if path.endswith((*ARROW_SUFFIXES, *READERS)))


def with_env(overrides: list[str]) -> list[str]:
    """Return `overrides` with the environment in which their dataset was gathered, unless they name one."""
    keys = [override.partition("=")[0].lstrip("+") for override in overrides]
    lines = [line for key, line in zip(keys, overrides, strict=True) if key in ("dataset", "dataset.source")]
    if not lines or any(key in ("env", "env.id", "experiment") for key in keys):
        return overrides
    try:
        parsed = OverridesParser.create().parse_override(lines[-1])
        values = parsed.sweep_iterator() if parsed.is_sweep_override() else [parsed.value()]
        sources = [str(getattr(value, "text", value)) for value in values]  # without the quotes of a quoted one
        envs = [dataset_metadata(with_home("dataset", source)).get("env", {}) for source in sources]
    except (OSError, ValueError, ImportError, HydraException):
        return overrides  # the check of the whole job reports what is wrong
    env, *others = envs
    if any(other != env for other in others):
        raise UsageError(f"env must be given for datasets of several environments, {', '.join(map(str, envs))}")
    if env.get("kwargs") or env.get("wrappers"):
        raise UsageError(
            f"env must be given with its kwargs and wrappers: the dataset was gathered in {env['id']}, "
            f"env.kwargs={env.get('kwargs', {})}, env.wrappers={env.get('wrappers', [])}"
        )
    if module := find_unimported_module(env.get("id", "")):
        raise UsageError(
            f"env must be given: the dataset was gathered in {one_line(env['id'], 200)}, and a file may not choose the "
            f"module {one_line(module, 200)} to import; if you trust it, add env={one_line(env['id'], 200)}"
        )
    return [*overrides, f"env={env['id']}"] if env else overrides

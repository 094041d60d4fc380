"""What Hydra needs to know: the typed configuration of a run, rlox's sweeper, and where to look for YAML."""

from __future__ import annotations

import copy
import re
import secrets
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf

from rlox.algorithms import entry_of, resolve
from rlox.buffers import BUFFERS, buffer_config_class
from rlox.config import RayResources, RunConfig
from rlox.config.sqlite import PREFIX
from rlox_cli.config.ranges import OptunaConfig
from rlox_cli.config.sources import AlgorithmSource, BufferSource, DatasetSource, GymEnvSource, RowsSource
from rlox_cli.families.imports import is_function
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import with_home

CONFIG_MODULE = "rlox_cli.conf"
CONFIG_NAME = "config"
ONE_CHOICE = ("algo", "env", "buffer", "dataset", "tuned", "experiment")
LONGEST_NAME = 200
# Keys whose values are paths, or may be. A shell expands no ``~`` after ``KEY.WITH.DOTS=``, and some after no ``=``.
_PATH_KEYS = (
    *("init_from", "model", "tokenizer", "reward", "sampler_folder", "buffer.folder", "dataset.source", "eval.dataset"),
    "logger.mlflow.tracking_uri",
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


class SchemaSource(ConfigSource):
    """The typed configurations that files refer to: ``run_schema``, ``algo/NAME_schema``, ``buffer/NAME_schema`` ….

    Hydra's ConfigStore would copy all of them for every composition, and building all takes a tenth of a second.
    """

    @staticmethod
    def scheme() -> str:
        return "schemas"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return _kind_of(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        kind = _kind_of(config_path)
        if kind is None:
            raise ConfigLoadError(f"no schema: {config_path}")
        return ConfigResult(self.provider, "schemas://", copy.deepcopy(schema_of(kind)), {"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


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


@cache
def schema_of(kind: type) -> DictConfig:
    return OmegaConf.structured(kind)


def register() -> None:
    """Register the sweeper, the config sources and the resolvers with Hydra; idempotent."""
    ConfigStore.instance().store("rlox", schema_of(SweeperConfig), "hydra/sweeper")
    plugins = (SearchPath, SchemaSource, GymEnvSource, AlgorithmSource, BufferSource, DatasetSource, RowsSource)
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
        _expand_home(plain, key)
    return OmegaConf.to_object(OmegaConf.merge(schema_of(RunConfig), plain))


def _expand_home(plain: DictConfig, key: str) -> None:
    """Expand ``~`` in the path, or the paths, of `key`."""
    value = OmegaConf.select(plain, key)
    if isinstance(value, str):
        prefix = PREFIX if value.startswith(PREFIX) else ""
        OmegaConf.update(plain, key, prefix + with_home(key, value.removeprefix(prefix)))
    elif isinstance(value, ListConfig):
        paths = [with_home(key, path) if isinstance(path, str) else path for path in value]
        OmegaConf.update(plain, key, paths)

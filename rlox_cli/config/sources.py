"""Choices without a YAML file, of ``algo``, ``env``, ``buffer`` and ``dataset``, as Hydra config sources."""

from __future__ import annotations

import re
from glob import glob
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from rlox.algorithms import algorithm_names, entry_of, resolve
from rlox.buffers import buffer_config_class, buffer_names
from rlox.config import DatasetConfig, OffPolicyConfig, OnPolicyConfig, usual_settings
from rlox.envs.registry import ENV_GROUP, offers
from rlox.offline.dataset import dataset_metadata
from rlox.offline.sources import ARROW_SUFFIXES, READERS
from rlox_cli.config.shipped import shipped
from rlox_cli.terminal.errors import UsageError

# gymnasium's grammar: (namespace/)name(-vN). Without a version it is more likely a typing error than an id.
_ID = re.compile(r"^env/(?P<id>(?:[\w:.-]+/)?[\w:.-]+-v\d+)$")


class GymEnvSource(ConfigSource):
    """Serves ``env/<id>`` as ``{id: <id>}``, with what is usual for ``ALE/…`` ids; a YAML in conf/env goes before it.

    It lists what installed packages offer, so that completion and messages know them beside the built-in ids.
    """

    @staticmethod
    def scheme() -> str:
        return "gymenv"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == "env"

    def is_config(self, config_path: str) -> bool:
        return _ID.match(config_path.removesuffix(".yaml")) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        match = _ID.match(config_path.removesuffix(".yaml"))
        if match is None:
            raise ConfigLoadError(f"no environment id: {config_path}")
        found: dict[str, Any] = {"env": {"id": match["id"]}}
        if usual := usual_settings(match["id"]):
            # What is typed overrides it.
            found["env"]["reward_fn"] = usual.pop("reward_fn")
            found["algo"] = usual
        return ConfigResult(
            provider=self.provider, path="gymenv://", config=OmegaConf.create(found), header={"package": "_global_"}
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        configs = config_path == "env" and results_filter in (None, ObjectType.CONFIG)
        return [name for name in offers(ENV_GROUP) if _ID.match(f"env/{name}")] if configs else []


class BufferSource(ConfigSource):
    """Serves ``buffer/<name>`` from its configuration's defaults; a YAML in conf/buffer goes before it."""

    @staticmethod
    def scheme() -> str:
        return "buffers"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == "buffer"

    def is_config(self, config_path: str) -> bool:
        # Hydra asks for every file of every group; the names of installed packages are read from the disk.
        return (name := _name(config_path)) is not None and name in buffer_names()

    def load_config(self, config_path: str) -> ConfigResult:
        name = _name(config_path)
        if name is None:
            raise ConfigLoadError(f"no buffer: {config_path}")
        return ConfigResult(
            provider=self.provider,
            path="buffers://",
            config=OmegaConf.structured(buffer_config_class(name)(name=name)),
            header={"package": None},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return buffer_names() if config_path == "buffer" and results_filter != ObjectType.GROUP else []


def _name(config_path: str) -> str | None:
    group, _, name = config_path.removesuffix(".yaml").rpartition("/")
    return name if group == "buffer" else None


class AlgorithmSource(ConfigSource):
    """Serves ``algo/<name>`` of an algorithm without a YAML file, and its schema: one that a package outside adds."""

    @staticmethod
    def scheme() -> str:
        return "algorithms"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == "algo"

    def is_config(self, config_path: str) -> bool:
        name = self._named(config_path)
        return name is not None and name in algorithm_names()

    def load_config(self, config_path: str) -> ConfigResult:
        name = self._named(config_path)
        entry = None if name is None else entry_of(name)
        if entry is None:
            raise ConfigLoadError(f"no algorithm: {config_path}")
        kind, path = resolve(entry.config), "algorithms://"
        if config_path.removesuffix(".yaml").endswith("_schema"):
            return ConfigResult(self.provider, path, OmegaConf.structured(kind), {"package": None})
        found: dict[str, Any] = {"defaults": [f"{name}_schema@algo", "_self_"]}
        if not issubclass(kind, OnPolicyConfig):
            found["env"] = {"n_envs": 1}
        if issubclass(kind, OffPolicyConfig):
            found["defaults"].insert(1, {"override /buffer": "uniform"})
        return ConfigResult(self.provider, path, OmegaConf.create(found), {"package": "_global_"})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return algorithm_names() if config_path == "algo" and results_filter != ObjectType.GROUP else []

    @staticmethod
    def _named(config_path: str) -> str | None:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        name = name.removesuffix("_schema")
        return name if group == "algo" and name not in shipped("algo") else None


_GROUP = "dataset"


class DatasetSource(ConfigSource):
    """Serves ``dataset/<source>`` as its configuration; a YAML in conf/dataset of ``-cd`` goes before it.

    Whether the source exists is checked with everything else, where the message can say more.
    """

    @staticmethod
    def scheme() -> str:
        return "datasets"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == _GROUP

    def is_config(self, config_path: str) -> bool:
        return _source(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        source = _source(config_path)
        if source is None:
            raise ConfigLoadError(f"no dataset: {config_path}")
        return ConfigResult(
            provider=self.provider,
            path="datasets://",
            config=OmegaConf.structured(DatasetConfig(source=source)),
            header={"package": None},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return dataset_files() if config_path == _GROUP and results_filter != ObjectType.GROUP else []


def dataset_files(typed: str = "") -> list[str]:
    """The datasets among the files whose path begins with `typed`, here or a folder below."""
    found = [path for pattern in (f"{typed}*", f"{typed}*/*") for path in glob(pattern)]
    return sorted(path for path in set(found) if path.endswith((*ARROW_SUFFIXES, *READERS)))


def with_env(overrides: list[str]) -> list[str]:
    """`overrides` with the environment that their dataset was gathered in, where they name none themselves."""
    typed = [override.partition("=") for override in overrides]
    sources = [value for key, _, value in typed if key.lstrip("+") in (_GROUP, f"{_GROUP}.source")]
    if not sources or any(key.lstrip("+") in ("env", "env.id", "experiment") for key, _, _ in typed):
        return overrides
    try:
        envs = [dataset_metadata(source).get("env", {}) for source in sources[-1].split(",")]
    except (OSError, ValueError, ImportError):
        return overrides  # what is wrong with it, the check of the whole job says
    env, *others = envs
    if any(other != env for other in others):
        raise UsageError(f"env must be given for datasets of several environments, {', '.join(map(str, envs))}")
    if env.get("kwargs") or env.get("wrappers"):
        raise UsageError(
            f"env must be given with its kwargs and wrappers: the dataset was gathered in {env['id']}, "
            f"env.kwargs={env.get('kwargs', {})}, env.wrappers={env.get('wrappers', [])}"
        )
    return [*overrides, f"env={env['id']}"] if env else overrides


def _source(config_path: str) -> str | None:
    group, _, name = config_path.removesuffix(".yaml").partition("/")
    return name if group == _GROUP and name and not name.endswith("_schema") else None

"""Hydra config sources for choices of ``algo``, ``env``, ``buffer``, ``dataset`` and ``rows`` without a YAML file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from glob import glob
from typing import Any, ClassVar

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from rlox.algorithms import algorithm_names, entry_of, resolve
from rlox.buffers import buffer_config_class, buffer_names
from rlox.checkpoint import one_line
from rlox.config import DatasetConfig, OnPolicyConfig, usual_settings
from rlox.envs.registry import ENV_GROUP, ZOO, offers, unimported_module
from rlox.offline.dataset import dataset_metadata
from rlox.offline.sources import ARROW_SUFFIXES, READERS
from rlox_cli.config.shipped import shipped
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import with_home

# gymnasium's grammar: (namespace/)name(-vN). Without a version it is more likely a typo than an id.
_ENV_ID = re.compile(r"(?:[\w:.-]+/)?[\w:.-]+-v\d+")


class _Choices(ConfigSource):
    """Serves the choices of one group. A YAML file of the same name in `conf/` or the ``-cd`` folder overrides them."""

    group: ClassVar[str]
    name_of_scheme: ClassVar[str]  # as in config.yaml

    @classmethod
    def scheme(cls) -> str:
        return cls.name_of_scheme

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == self.group

    def is_config(self, config_path: str) -> bool:
        name = self._name(config_path)
        return name is not None and self.serves(name)

    def load_config(self, config_path: str) -> ConfigResult:
        name = self._name(config_path)
        if name is None or not self.serves(name):
            raise ConfigLoadError(f"no {self.group}: {config_path}")
        config, package = self.config(name)
        return ConfigResult(self.provider, f"{self.name_of_scheme}://", config, {"package": package})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [*self.names()] if config_path == self.group and results_filter != ObjectType.GROUP else []

    def _name(self, config_path: str) -> str | None:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return name if group == self.group and name else None

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
        found: dict[str, Any] = {"env": {"id": name}}
        if usual := usual_settings(name):
            # Typed overrides take precedence.
            found["env"]["reward_fn"] = usual.pop("reward_fn")
            found["algo"] = usual
        return OmegaConf.create(found), "_global_"


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
        return name not in shipped("algo") and name in algorithm_names()  # reads which packages are installed

    def names(self) -> list[str]:
        return algorithm_names()

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        kind = resolve(entry_of(name).config)
        found: dict[str, Any] = {"defaults": [f"{name}_schema@algo", "_self_"]}
        if not issubclass(kind, OnPolicyConfig):
            found["env"] = {"n_envs": 1}
        if kind.replays != "nothing":
            usual = "sequence" if kind.replays == "sequences" else "uniform"
            found["defaults"].insert(1, {"override /buffer": usual})
        return OmegaConf.create(found), "_global_"


class RowsSource(_Choices):
    """``rows=NAME`` for an algorithm that trains a language model: sets `env`, since there is no environment."""

    group, name_of_scheme = "rows", "rows"

    def serves(self, name: str) -> bool:
        found = entry_of(name)
        return found is not None and resolve(found.config).uses_dataset == "text"

    def names(self) -> list[str]:
        return [name for name in algorithm_names() if self.serves(name)]

    def config(self, name: str) -> tuple[DictConfig, str | None]:
        # The dataset's name, which distinguishes runs and plots.
        env = {"id": "${task_name:${oc.select:dataset.source,text}}", "n_envs": 1}
        return OmegaConf.create({"env": env}), "_global_"


def dataset_files(typed: str = "") -> list[str]:
    """Return the datasets among the files whose path begins with `typed`, here or one folder below."""
    found = [path for pattern in (f"{typed}*", f"{typed}*/*") for path in glob(pattern)]
    return sorted(path for path in set(found) if path.endswith((*ARROW_SUFFIXES, *READERS)))


def with_env(overrides: list[str]) -> list[str]:
    """Return `overrides` with the environment in which their dataset was gathered, unless they name one."""
    typed = [override.partition("=") for override in overrides]
    sources = [value for key, _, value in typed if key.lstrip("+") in ("dataset", "dataset.source")]
    if not sources or any(key.lstrip("+") in ("env", "env.id", "experiment") for key, _, _ in typed):
        return overrides
    try:
        envs = [dataset_metadata(with_home("dataset", source)).get("env", {}) for source in sources[-1].split(",")]
    except (OSError, ValueError, ImportError):
        return overrides  # the check of the whole job reports what is wrong
    env, *others = envs
    if any(other != env for other in others):
        raise UsageError(f"env must be given for datasets of several environments, {', '.join(map(str, envs))}")
    if env.get("kwargs") or env.get("wrappers"):
        raise UsageError(
            f"env must be given with its kwargs and wrappers: the dataset was gathered in {env['id']}, "
            f"env.kwargs={env.get('kwargs', {})}, env.wrappers={env.get('wrappers', [])}"
        )
    if module := unimported_module(env.get("id", "")):
        raise UsageError(
            f"env must be given: the dataset was gathered in {one_line(env['id'], 200)}, and a file may not choose the "
            f"module {one_line(module, 200)} to import; if you trust it, add env={one_line(env['id'], 200)}"
        )
    return [*overrides, f"env={env['id']}"] if env else overrides

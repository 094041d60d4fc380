"""``dataset=<a file or an id>`` without a YAML file: a Hydra config source that answers for any of them."""

from __future__ import annotations

from glob import glob

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from rlox.config import DatasetConfig
from rlox.offline.dataset import dataset_metadata
from rlox.offline.sources import ARROW_SUFFIXES, READERS
from rlox_cli.errors import UsageError

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

"""``buffer=<a registered name>`` without a YAML file: a Hydra config source that answers for buffers from outside."""

from __future__ import annotations

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from rlox.buffers import buffer_config_class, buffer_names


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
        return _name(config_path) in buffer_names()

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

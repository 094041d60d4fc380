"""``env=<id>`` without a YAML file, gymnasium's or from outside: a Hydra config source that answers for ids."""

from __future__ import annotations

import re
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from rlox.config import usual_settings
from rlox.envs.registry import ENV_GROUP, offers

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

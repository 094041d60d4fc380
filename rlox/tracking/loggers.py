"""The loggers that mirror a run's record: those of rlox, and those that installed packages add.

A package adds a logger with an entry point of the group ``rlox.loggers``, ``name = "module:Class"``; `logger=name` then
chooses it. `rlox.tracking.writer` documents the interface of the class. If it has settings, its attribute ``Config`` is
a dataclass that derives from `rlox.config.Config`, with a default for each field.
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields, make_dataclass
from functools import cache
from importlib import import_module
from typing import Any

from rlox.config import Config, CsvConfig, LoggerConfig, MlflowConfig, TensorboardConfig, WandbConfig, nearest
from rlox.config.offers import load, offers

LOGGER_GROUP = "rlox.loggers"

# name in the config's `logger:` -> class, imported when used
LOGGERS = {
    "mlflow": "rlox.tracking.mlflow:MlflowMirror",
    "wandb": "rlox.tracking.wandb:WandbMirror",
    "tensorboard": "rlox.tracking.tensorboard:TensorboardMirror",
    "csv": "rlox.tracking.csv:CsvMirror",
}
_CONFIGS: dict[str, type[Config]] = {
    "mlflow": MlflowConfig,
    "wandb": WandbConfig,
    "tensorboard": TensorboardConfig,
    "csv": CsvConfig,
}


class NoSettings(Config):
    """The settings of a logger that has none."""


def outside_loggers() -> list[str]:
    """Return the names of the loggers of installed packages."""
    return [name for name in offers(LOGGER_GROUP) if name.isidentifier() and name not in LOGGERS]


def logger_names() -> list[str]:
    """Return the names of all loggers."""
    return [*LOGGERS, *outside_loggers()]


def logger_class(name: str) -> Any:
    """Return the class for a name of the config's ``logger:``.

    Raises
    ------
    ValueError
        If there is no such logger.
    ImportError
        If the package's code fails.
    """
    if name in LOGGERS:
        module, attribute = LOGGERS[name].split(":")
        return getattr(import_module(module), attribute)
    if name in outside_loggers():
        return load(LOGGER_GROUP, name)
    raise ValueError(
        f"rlox.tracking: logger must be one of {', '.join(sorted(logger_names()))}, got {name!r}; "
        f"{nearest(name, logger_names())}, or install the package that provides it"
    )


def logger_settings(name: str) -> type[Config]:
    """Return the class of a logger's settings.

    Raises
    ------
    TypeError
        If the settings of an installed package are not a `Config` with defaults.
    ValueError, ImportError
        As `logger_class`.
    """
    if name in _CONFIGS:
        return _CONFIGS[name]
    settings = getattr(logger_class(name), "Config", NoSettings)
    whole = isinstance(settings, type) and issubclass(settings, Config)
    if not whole or any(f.default is MISSING and f.default_factory is MISSING for f in fields(settings)):
        raise TypeError(
            f"{LOGGER_GROUP}: the Config of {name} must derive from rlox.config.Config, with a default for each field, "
            f"got {settings!r}"
        )
    return settings


def logger_config() -> type[LoggerConfig]:
    """Return `LoggerConfig`, with a field for each logger of an installed package, if there are any."""
    return _extend(tuple(outside_loggers()))


@cache
def _extend(names: tuple[str, ...]) -> type[LoggerConfig]:
    if not names:
        return LoggerConfig
    more = [(name, logger_settings(name) | None, field(default=None)) for name in names]
    return make_dataclass(LoggerConfig.__name__, more, bases=(LoggerConfig,), namespace={"__module__": __name__})

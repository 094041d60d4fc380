"""``rlox show``: explain each key, from the comments in the code that uses it."""

from __future__ import annotations

import inspect
import io
import json
import tokenize
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import yaml

from rlox import config as configs
from rlox.buffers import buffer_config_class
from rlox.config import nearest, tuned, tuned_pairs
from rlox.config.base import types_of
from rlox.offline.dataset import open_dataset
from rlox.tracking.loggers import logger_config, logger_settings, outside_loggers
from rlox_cli.config.presets import (
    choice_names,
    config_of,
    describe_preset,
    nearest_choice,
    preset_settings,
    read_presets,
)
from rlox_cli.report.choosing import START_WITH
from rlox_cli.report.dataset import print_dataset
from rlox_cli.terminal.console import PlainTable, TextConsole, make_table, print_table

_SECTIONS = {
    "env": configs.EnvConfig,
    "buffer": configs.BufferConfig,
    "dataset": configs.DatasetConfig,
    "eval": configs.EvalConfig,
    "checkpoint": configs.CheckpointConfig,
    "ray": configs.RayConfig,
    "remote": configs.RemoteConfig,
    "logger.mlflow": configs.MlflowConfig,
    "logger.wandb": configs.WandbConfig,
    "logger.tensorboard": configs.TensorboardConfig,
    "logger.csv": configs.CsvConfig,
}
_CHOSEN = ("algo", "buffer", "dataset")  # from groups; each choice has keys of its own
# Words that are typed like keys of a run, but belong to the command.
_COMMAND_KEYS = {
    "resume": "the run to resume: its folder, or a checkpoint in it",
    "output_dir": "the run's folder; with -m, the folder of all runs; by default a new one under outputs/",
}


def comments(cls: type) -> dict[str, str]:
    """Return the trailing comment of every field, from the source code of `cls` and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base) or base.__module__ == logger_config.__module__:  # that one has no source code
            continue
        name = None
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(base)).readline):
            if token.type == tokenize.NAME and token.start[1] == 4:
                name = token.string
            elif token.type == tokenize.COMMENT and name:
                texts[name] = token.string.lstrip("# ")
    return texts


def _plain(value: Any) -> str:
    return "required" if value is MISSING else json.dumps(value) if not isinstance(value, str) else value


def _table(cls: Any, prefix: str, more: dict[str, dict[str, Any]] | None = None) -> PlainTable:
    """Return the table of the fields of `cls`; `more` are further columns of values."""
    more = more or {}
    searched = any("search" in item.metadata for item in fields(cls))
    columns = [
        "key",
        "type",
        "default",
        *more,
        *(["search"] if searched else []),
        "meaning",
    ]
    table = make_table(*columns)
    hints, meaning = types_of(cls), comments(cls)
    for item in fields(cls):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if (
            item.name.startswith("_")
            or is_dataclass(default)
            or item.name in _CHOSEN
            or hints[item.name] is configs.LoggerConfig
        ):
            continue
        kind = hints[item.name]
        kind_name = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
        row = [prefix + item.name, kind_name.replace("typing.", "").replace("None", "null"), _plain(default)]
        row += [_plain(values[item.name]) if item.name in values else "" for values in more.values()]
        if searched:
            row.append(item.metadata.get("search", ""))
        table.add_row(*row, meaning.get(item.name, ""))
    return table


def show_keys(topics: list[str]) -> None:
    """Print tables for the topics; by default the top level and all sections."""
    console = TextConsole()
    algo = env = None
    sections = []
    known = {**_SECTIONS, **{f"logger.{name}": logger_settings(name) for name in outside_loggers()}}
    for topic in topics:
        if topic.startswith("algo="):
            algo = topic[5:]
            if config_of(algo) is None:
                raise ValueError(f"algo={algo} does not exist; {nearest_choice(algo, choice_names())}")
        elif topic.startswith("env="):
            env = topic[4:]
        elif topic.startswith("buffer="):
            cls = buffer_config_class(topic[7:])
            console.print(f"{topic}: {inspect.getdoc(cls)}")
            print_table(console, _table(cls, "buffer."))
        elif topic == "hydra.sweeper":
            from rlox_cli.config.ranges import OptunaConfig  # imports Hydra, which the other topics do not need

            console.print(f"{topic}: {inspect.getdoc(OptunaConfig)}")
            print_table(console, _table(OptunaConfig, f"{topic}."))
        elif topic == "hydra.launcher":
            from rlox_cli.config.schema import RayLauncherConfig

            console.print(f"{topic}: {inspect.getdoc(RayLauncherConfig)}")
            print_table(console, _table(RayLauncherConfig, f"{topic}."))
        elif topic.startswith("dataset="):
            console.print(topic)
            print_dataset(open_dataset(topic[8:]), console)
        elif topic in known:
            sections.append(topic)
        else:
            raise ValueError(
                "topic must be algo=NAME, env=ID, buffer=NAME, dataset=SOURCE or a section, got "
                f"{topic!r}; {nearest(topic, known)}"
            )
    if not topics:
        table = _table(configs.RunConfig, "")
        for key, meaning in _COMMAND_KEYS.items():
            table.add_row(key, "str", "", meaning)
        print_table(console, table)
        sections = list(known)
    for section in sections:
        console.print(f"\n{section}: {inspect.getdoc(known[section])}")
        print_table(console, _table(known[section], f"{section}."))
    if env is not None and algo is None:
        algo = "ppo"
    if algo is not None:
        _show_algorithm(algo, env, console)


def _show_algorithm(algo: str, env: str | None, console: TextConsole) -> None:
    """Print the table of an algorithm or a preset, with the preset's settings and those tuned for `env`."""
    presets = read_presets()
    cls, preset = config_of(algo), preset_settings(algo) if algo in presets else None
    columns = {} if preset is None else {"preset": preset}
    known = (algo, env) in tuned_pairs()
    if env is not None and known:
        columns["tuned"] = tuned(algo, env)
    console.print(f"{algo}: {inspect.getdoc(cls) if preset is None else describe_preset(algo)}")
    if algo in START_WITH:
        console.print(f"start with it when: {START_WITH[algo]}")
    if own := [name for name, base in presets.items() if base == algo]:
        console.print("presets of it:")
        for name in own:
            console.print(f"  algo={name}: {START_WITH[name]}")
    print_table(console, _table(cls, "algo.", {name: settings.get("algo", {}) for name, settings in columns.items()}))
    for name, settings in columns.items():
        rest = {key: value for key, value in settings.items() if key != "algo"}
        text = yaml.safe_dump(rest, default_flow_style=True, width=200, allow_unicode=True).strip()
        also = {"preset": "also of the preset", "tuned": "also tuned"}[name]
        console.print(f"\n{also}: {text}")
    if env is not None and not known:
        console.print(f"\nno tuned settings for algo={algo} env={env}; `rlox ls tuned` lists those that exist")

"""Presets: choices of ``algo=`` that are an algorithm with other settings, such as ``algo=qr_dqn`` for DQN.

A preset is a YAML file of the group ``algo``, in `conf/` or the folder of ``-cd``, whose first default is the schema of
its algorithm. Checkpoints name the algorithm. Runs, plots, folders and tuned settings name the preset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from rlox.algorithms import ALGORITHMS, algorithm_names, entry_of, resolve
from rlox.config import Config, RunConfig, nearest
from rlox_cli.config.shipped import read_shipped

# What rlox has instead of algorithms of other libraries whose names are like those of unrelated ones, or like none.
_INSTEAD = {
    **dict.fromkeys(("trpo", "ppo2", "maskable_ppo", "maskableppo"), "algo=ppo"),
    **dict.fromkeys(("recurrent_ppo", "recurrentppo", "ppo_lstm", "rppo"), "algo=ppo algo.memory=lstm"),
    **dict.fromkeys(("ddpg", "d4pg"), "algo=td3"),
    **dict.fromkeys(("a3c", "vpg", "reinforce"), "algo=a2c"),
    **{"r2d2": "algo=dqn algo.memory=lstm", "iqn": "algo=qr_dqn", "mpo": "algo=sac", "bcq": "algo=iql"},
}


def name_choice(choice: str, run: RunConfig) -> str:
    """Return the name of the algorithm that ``algo=choice`` is: `choice` itself, or of a preset, which is named in
    `run`, the algorithm with such a configuration."""
    if entry_of(choice) is not None:
        run.preset = None
        return choice
    run.preset = choice
    return next((name for name, entry in ALGORITHMS.items() if resolve(entry.config) is type(run.algo)), choice)


def read_presets() -> dict[str, str]:
    """Return the algorithms of the shipped presets, by the presets' names."""
    texts = {name: text for name, text in read_shipped("algo").items() if name not in ALGORITHMS}
    return {name: _read(text)["defaults"][0].partition("_schema@")[0] for name, text in texts.items()}


def describe_preset(name: str) -> str:
    """Return what a shipped preset is, from the first comment of its file."""
    return read_shipped("algo")[name].splitlines()[1].lstrip("# ")


def preset_settings(name: str) -> dict[str, Any]:
    """Return the settings of a shipped preset by section, those of its algorithm as ``algo``."""
    settings = _read(read_shipped("algo")[name])
    choices = {key: value for one in settings.pop("defaults") if isinstance(one, dict) for key, value in one.items()}
    if (memory := choices.get("override /buffer", "uniform")) != "uniform":
        settings["buffer"] = {"name": memory, **settings.get("buffer", {})}
    return settings


def config_of(name: str) -> type[Config] | None:
    """Return the class of the configuration of an algorithm, or of the shipped preset `name`; None if it is neither."""
    entry = entry_of(name) or entry_of(read_presets().get(name, ""))
    return None if entry is None else resolve(entry.config)


def choice_names() -> list[str]:
    """Return the names of all algorithms and shipped presets."""
    return sorted({*algorithm_names(), *read_presets()})


def nearest_choice(name: str, choices: Iterable[str]) -> str:
    """Return a hint for a choice of ``algo=`` that does not exist: what is nearest to it among `choices`."""
    if (instead := _INSTEAD.get(name.lower())) is not None:
        return f"the nearest is {instead}, and `rlox ls algos` lists all"
    return nearest(name, choices)


def _read(text: str) -> dict[str, Any]:
    return yaml.safe_load(text)

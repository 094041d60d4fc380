"""Read a run's configuration from plain data, as `rlox.config.run` stores it in ``config.yaml``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlox.algorithms import algorithm_names, entry_of, resolve
from rlox.buffers import buffer_config_class
from rlox.config import DatasetConfig, RunConfig
from rlox_cli.config.explain import explain
from rlox_cli.config.rules import check_run
from rlox_cli.config.schema import run_schema
from rlox_cli.families.imports import import_modules, list_needed_modules, require_typed
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown


def configuration(saved: dict[str, Any], modules: list[str], where: Path) -> tuple[RunConfig, str]:
    """Return the validated configuration, and the name of its algorithm, from plain data that `resolved` made.

    Raises
    ------
    UsageError
        If the data is not a configuration, or needs modules of the user that were not typed.
    """
    algo = algorithm_name(saved, modules, where)
    try:
        return OmegaConf.to_object(add_types(saved, algo)), algo
    except (OmegaConfBaseException, ValueError, TypeError) as e:
        raise UsageError(f"{shown(where)}: {explain(e)}") from e


def check_saved(config: RunConfig, algo: str, where: Path) -> None:
    """Check the rules between sections for a configuration that was read from the file `where`.

    Raises
    ------
    UsageError
        If a rule is broken, such as a replay memory for an algorithm that has none.
    """
    try:
        # The weights that a run started from are no longer needed.
        check_run(dataclasses.replace(config, init_from=None), algo, config.buffer and config.buffer.name)
    except ValueError as e:
        raise UsageError(f"{shown(where)}: {e}") from e


def algorithm_name(saved: dict[str, Any], modules: list[str], path: Path) -> str:
    """Import `modules`, one of which may define the algorithm; remove its name from its section and return it.

    Also checks the types of the keys that are read before the whole configuration is checked.

    Raises
    ------
    UsageError
        As `configuration`: code of the user is imported only if it was typed, since a file must not decide what runs.
    """
    name = saved["algo"].pop("name", None) if isinstance(saved.get("algo"), dict) else None
    env = saved.get("env")
    sound = (
        isinstance(env, dict)
        and isinstance(env.get("id"), str)
        and isinstance(env.get("kwargs"), dict)
        and isinstance(env.get("wrappers"), list)
        and isinstance(saved.get("imports"), list)
    )
    if sound:
        require_typed([*list_needed_modules(saved["env"], saved), *map(str, saved["imports"])], modules, path)
        import_modules(modules)
    if not (sound and isinstance(name, str) and entry_of(name) is not None):
        raise UsageError(
            f"{shown(path)} must hold a run's configuration, with env, imports, and algo.name one of "
            f"{', '.join(algorithm_names())}, got {name!r}; restore the file"
        )
    return name


def add_types(saved: dict[str, Any], algo: str) -> DictConfig:
    """Return `saved` with the types of its sections, strict about keys."""
    cfg = run_schema()
    cfg.algo = OmegaConf.structured(resolve(entry_of(algo).config))
    memory = saved.get("buffer")
    if memory is not None:
        name = memory.get("name") if isinstance(memory, dict) else memory
        cfg.buffer = OmegaConf.structured(buffer_config_class(str(name)))
    if saved.get("dataset") is not None:
        cfg.dataset = OmegaConf.structured(DatasetConfig)
    try:
        return OmegaConf.merge(cfg, saved)
    except OmegaConfBaseException as e:
        raise UsageError(f"config.yaml of the run: {explain(e)}") from e

"""Rules between sections of a run's configuration, which no section can check by itself."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlox.algorithms import ALGORITHMS, resolve
from rlox.checkpoint import load_checkpoint
from rlox.config import MmapBufferConfig, RayConfig, RemoteConfig, RunConfig, nearest, tuned, tuned_pairs
from rlox.config.sqlite import is_sqlite, sqlite_file
from rlox_cli.config.schema import SearchPath
from rlox_cli.families.family import Family, family_of
from rlox_cli.records.pulled import hint
from rlox_cli.terminal.paths import output_path


def check_run(run: RunConfig, algo: str, buffer: str | None) -> None:
    """Check the rules between sections, and that everything that `run` names exists.

    Parameters
    ----------
    algo, buffer : str
        The choices from these groups.

    Raises
    ------
    ValueError
        If a rule is broken; the message has the key, the rule and the value.
    """
    _check_known(run)
    # Files that are written outside of the run's folder must be where files may be written.
    for key, folder in (("buffer.folder", getattr(run.buffer, "folder", None)), ("sampler_folder", run.sampler_folder)):
        if folder is not None:
            output_path(key, folder, folder=True)
    uri = None if run.logger.mlflow is None else run.logger.mlflow.tracking_uri
    if uri is not None and is_sqlite(uri):
        # A system that refuses to write there is only a warning: no training waits for its trackers.
        output_path("logger.mlflow.tracking_uri", sqlite_file(uri), probe=False)
    family = family_of(run.algo, run.env.id)
    if run.distributed is not None:
        _check_distributed(run, algo, family)
    _check_machines(run)
    family.check(run, algo, buffer)
    if run.init_from is not None:
        _check_init_from(run.init_from)


def apply_settings(run: RunConfig, algo: str, choice: str | None, overrides: list[str]) -> str | None:
    """Return the tuned settings that the `choice` of the group applies, such as ``ppo/CartPole-v1``, or None.

    Raises
    ------
    ValueError
        If typed settings do not exist, or if the settings are for another environment.
    """
    typed = next((o.split("=", 1)[1] for o in overrides if re.match(r"\+*tuned=", o)), None)
    if typed == "off" and choice == "off":
        return None
    pairs = {f"{a}/{e}" for a, e in tuned_pairs()}
    if SearchPath.folder is not None:
        pairs |= _own_tuned_pairs(SearchPath.folder)
    applied = choice if choice in pairs else None
    if typed is not None and typed not in (*pairs, "off"):
        raise ValueError(f"tuned={typed} does not exist; {nearest(typed, [*pairs, 'off'])}")
    if applied and typed is None and applied != f"{algo}/{run.env.id}":
        raise ValueError(
            f"env.id={run.env.id} must match the tuned settings, got those of {applied}; type env={run.env.id}, or "
            "tuned=off"
        )
    return applied


def _check_known(config: Any, at: str = "") -> None:
    """Raise a ValueError for a key that ``+`` has added to a section and that nothing would read."""
    if not is_dataclass(config):
        return
    known = [item.name for item in fields(config)]
    for name, value in vars(config).items():
        if name not in known:
            raise ValueError(f"{at}{name} is no key of {type(config).__name__}; {nearest(name, known)}")
        _check_known(value, f"{at}{name}.")


def _check_distributed(run: RunConfig, algo: str, family: Family) -> None:
    if not resolve(ALGORITHMS[algo].cls)._data_parallel:
        able = [name for name, entry in ALGORITHMS.items() if resolve(entry.cls)._data_parallel]
        raise ValueError(f"distributed must be null with algo={algo}, got {run.distributed}; try {', '.join(able)}")
    if run.distributed == "fsdp" and not family.shards:
        raise ValueError(
            f"distributed must be ddp with algo={algo}, got fsdp, which is for language models; try distributed=ddp"
        )
    for key, value, meant in (
        ("backend", run.backend == "native" and "native", "auto or torch"),
        ("sampler", run.sampler, "null"),
        ("env.backend", run.env.backend == "envpool" and "envpool", "auto or gymnasium"),
        ("buffer", isinstance(run.buffer, MmapBufferConfig) and "mmap", "uniform or prioritized"),
    ):
        if value:
            raise ValueError(f"{key} must be {meant} with distributed={run.distributed}, got {value}")


def _check_machines(run: RunConfig) -> None:
    """Check that the package for other machines is there, or that their settings are left out if none is used."""
    remote = run.remote.addresses or getattr(run.algo, "worker_addresses", None)
    if remote and find_spec("grpc") is None:
        raise ValueError(
            'remote.addresses needs grpcio, which is not installed; try: pip install "rlox-cli[distributed]"'
        )
    ray = getattr(run.algo, "actors", None) == "ray"
    if ray and find_spec("ray") is None:
        raise ValueError('algo.actors=ray needs Ray, which is not installed; try: pip install "rlox-cli[ray]"')
    for used, key, section, usual, unless, remedy in (
        (ray, "ray", run.ray, RayConfig(), "unless actors run on Ray", "algo=impala algo.actors=ray"),
        (
            *(remote, "remote", run.remote, RemoteConfig(), "if no worker is named"),
            "remote.addresses=[host:port] (`rlox worker --env ID` starts one)",
        ),
    ):
        for name, value in vars(usual).items():
            if not used and (typed := getattr(section, name)) != value:
                raise ValueError(f"{key}.{name} must be left out {unless}, got {typed}; try {remedy}")


def read_tuned_steps(name: str) -> int | None:
    """Return the ``total_timesteps`` of the tuned settings ``<algo>/<env>``, in the folder of ``-cd`` or in rlox."""
    if SearchPath.folder is not None and name in _own_tuned_pairs(SearchPath.folder):
        settings = OmegaConf.load(SearchPath.folder / "tuned" / f"{name}.yaml")
        own = OmegaConf.to_container(settings).get("total_timesteps")
    else:
        own = tuned(*name.split("/", 1)).get("total_timesteps")
    return own if isinstance(own, int) else None


def _own_tuned_pairs(folder: Path) -> set[str]:
    """Return ``<algo>/<env>`` for all tuned settings in the folder of ``-cd``."""
    root = folder / "tuned"
    return {path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/**/*.yaml")}


def _check_init_from(name: str) -> None:
    if not name:
        raise ValueError("init_from must be a run folder or a checkpoint file, or null, got ''")
    path = Path(name)
    try:
        load_checkpoint(path)
    except (OSError, ValueError) as e:
        raise ValueError(f"init_from={path} must be a checkpoint that loads: {e}{hint(name)}") from e

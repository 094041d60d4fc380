"""Rules between sections of a run's configuration, which no section can check by itself."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlox.algorithms import ALGORITHMS, resolve
from rlox.buffers import buffer_config_class, buffer_names
from rlox.checkpoint import load_checkpoint, one_line
from rlox.config import (
    BufferConfig,
    DatasetConfig,
    MmapBufferConfig,
    RayConfig,
    RemoteConfig,
    RunConfig,
    nearest,
    tuned,
    tuned_pairs,
)
from rlox.config.sqlite import is_sqlite, sqlite_file
from rlox.envs.registry import ZOO, imported_module
from rlox.multi_agent import is_multi_agent
from rlox.offline.dataset import check_source
from rlox_cli.config.imports import import_modules, resolve_reward
from rlox_cli.config.language import check_language, refuse_language
from rlox_cli.config.schema import SearchPath
from rlox_cli.terminal.paths import output_path, permitted_path

OFF_POLICY_ONLY = "on-policy algorithms have none, algo=dqn has one"


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
    _check_outputs(run)
    _check_distributed(run, algo)
    _check_ray(run)
    _check_remote(run)
    if run.language:
        import_modules(run.imports)
        check_language(run, algo)
        if run.init_from is not None:
            _check_init_from(run.init_from)
        return
    refuse_language(run, algo)
    _check_off_policy(run, algo, buffer)
    _check_dataset(run, algo)
    module = imported_module(run.env.id)
    import_modules([*run.imports, *([module] if module else [])])
    if is_multi_agent(run.env.id):
        _check_multi_agent(run, algo)
    else:
        check_env_id(run.env.id.rpartition(":")[2], run.env.kwargs, run.env.backend)
    resolve_reward(run.env.reward_fn, run.imports)
    if run.init_from is not None:
        _check_init_from(run.init_from)


def _check_outputs(run: RunConfig) -> None:
    """Raise unless the files that are written outside of the run's folder may be written where the keys say."""
    for key, folder in (("buffer.folder", getattr(run.buffer, "folder", None)), ("sampler_folder", run.sampler_folder)):
        if folder is not None:
            output_path(key, folder, folder=True)
    uri = None if run.logger.mlflow is None else run.logger.mlflow.tracking_uri
    if uri is not None and is_sqlite(uri):
        # A system that refuses to write there is only a warning: no training waits for its trackers.
        permitted_path("logger.mlflow.tracking_uri", sqlite_file(uri))


def _check_multi_agent(run: RunConfig, algo: str) -> None:
    """Raise a ValueError unless the algorithm supports several agents, and the environment's package is installed."""
    if not run.algo.several_agents and run.algo.uses_dataset != "must":
        able = [name for name, entry in ALGORITHMS.items() if resolve(entry.config).several_agents]
        raise ValueError(
            f"env={run.env.id} has several agents, but algo={algo} trains only one; try algo={' or '.join(able)}"
        )
    if run.env.id.startswith(ZOO):
        path = run.env.id.removeprefix(ZOO).partition(":")[0]
        try:
            if find_spec("pettingzoo") is None:
                raise ImportError("PettingZoo is not installed")
            import_module(path)
        except ImportError as e:
            raise ValueError(
                f'env={run.env.id} is not available: {one_line(e)}; try: pip install "rlox-cli[multi-agent]", or name '
                "an installed module with a parallel environment"
            ) from e


def applied_settings(run: RunConfig, algo: str, choice: str | None, overrides: list[str]) -> str | None:
    """Return the tuned settings that the `choice` of the group applies, such as ``ppo/CartPole-v1``, or None.

    Raises
    ------
    ValueError
        If typed settings do not exist, or if the settings are for another environment.
    """
    pairs = {f"{a}/{e}" for a, e in tuned_pairs()} | _own_tuned_pairs()
    applied = choice if choice in pairs else None
    typed = next((o.split("=", 1)[1] for o in overrides if re.match(r"\+*tuned=", o)), None)
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


def _check_distributed(run: RunConfig, algo: str) -> None:
    if run.distributed is None:
        return
    if not resolve(ALGORITHMS[algo].cls).data_parallel:
        able = [name for name, entry in ALGORITHMS.items() if resolve(entry.cls).data_parallel]
        raise ValueError(f"distributed must be null with algo={algo}, got {run.distributed}; try {', '.join(able)}")
    if run.distributed == "fsdp" and not run.language:
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


def _check_off_policy(run: RunConfig, algo: str, chosen: str | None) -> None:
    replays = run.algo.replays
    if replays == "nothing":
        if run.buffer is not None:
            raise ValueError(f"buffer must be left out with algo={algo}, got {chosen or 'its keys'}; {OFF_POLICY_ONLY}")
        return
    if not isinstance(run.buffer, BufferConfig):
        usual = "sequence" if replays == "sequences" else "uniform"
        raise ValueError(f"buffer must be chosen for algo={algo}, got null; try buffer={usual}")
    if run.buffer.name != chosen:
        raise ValueError(f"buffer.name must be {chosen}, as buffer= chose, got {run.buffer.name!r}")
    if run.buffer.holds != replays:
        able = [name for name in buffer_names() if buffer_config_class(name).holds == replays]
        raise ValueError(f"buffer must hold {replays} for algo={algo}, got {chosen}; try buffer={', '.join(able)}")
    what, at_least = "algo.batch_size and env.n_envs", max(run.algo.batch_size, run.env.n_envs)
    if replays == "sequences":
        what, at_least = "algo.seq_len times env.n_envs", run.algo.seq_len * run.env.n_envs
    if run.buffer.size < at_least:
        raise ValueError(f"buffer.size must be at least {what} ({at_least}), got {run.buffer.size}")
    if run.algo.learning_starts >= run.total_timesteps:
        raise ValueError(
            f"algo.learning_starts must be below total_timesteps ({run.total_timesteps}), or nothing is learned, "
            f"got {run.algo.learning_starts}"
        )


def _check_remote(run: RunConfig) -> None:
    if run.remote.addresses or getattr(run.algo, "worker_addresses", None):
        if find_spec("grpc") is None:
            raise ValueError(
                'remote.addresses needs grpcio, which is not installed; try: pip install "rlox-cli[distributed]"'
            )
        return
    for name, usual in vars(RemoteConfig()).items():
        if (value := getattr(run.remote, name)) != usual:
            raise ValueError(
                f"remote.{name} must be left out if no worker is named, got {value}; try "
                "remote.addresses=[host:port] (`rlox worker --env ID` starts one)"
            )


def _check_ray(run: RunConfig) -> None:
    if getattr(run.algo, "actors", None) == "ray":
        if find_spec("ray") is None:
            raise ValueError('algo.actors=ray needs Ray, which is not installed; try: pip install "rlox-cli[ray]"')
        return
    for name, usual in vars(RayConfig()).items():
        if (value := getattr(run.ray, name)) != usual:
            raise ValueError(
                f"ray.{name} must be left out unless actors run on Ray, got {value}; try algo=impala algo.actors=ray"
            )


def _check_dataset(run: RunConfig, algo: str) -> None:
    uses, some = run.algo.uses_dataset, "dataset=data/medium.arrow (`rlox collect` writes one) or dataset=minari:ID"
    if run.dataset is None:
        if uses == "must":
            raise ValueError(f"dataset must be chosen for algo={algo}, got null; try {some}")
        return
    if not isinstance(run.dataset, DatasetConfig):
        raise ValueError(f"dataset.source must be given; try {some}")
    if uses == "never":
        able = [name for name, entry in ALGORITHMS.items() if resolve(entry.config).uses_dataset in ("may", "must")]
        raise ValueError(
            f"dataset must be left out with algo={algo}, which collects its own data, got {run.dataset.source}; "
            f"algorithms that learn from a dataset: {', '.join(able)}"
        )
    check_source(run.dataset.source)
    if uses == "must":
        # The environment is only used for evaluations, and the losses are never compiled.
        for key, value, meant in (
            ("compile", run.compile, "false"),
            ("env.reward_fn", run.env.reward_fn, "null"),
            ("env.workers", run.env.workers, "0"),
            ("remote.addresses", run.remote.addresses, "[]"),
            ("env.backend", run.env.backend != "auto" and run.env.backend, "auto"),
        ):
            if value:
                raise ValueError(f"{key} must be {meant} with algo={algo}, which learns from the dataset, got {value}")


def tuned_steps(name: str) -> int | None:
    """Return the ``total_timesteps`` of the tuned settings ``<algo>/<env>``, in the folder of ``-cd`` or in rlox."""
    if SearchPath.folder is not None and name in _own_tuned_pairs():
        settings = OmegaConf.load(SearchPath.folder / "tuned" / f"{name}.yaml")
        own = OmegaConf.to_container(settings).get("total_timesteps")
    else:
        own = tuned(*name.split("/", 1)).get("total_timesteps")
    return own if isinstance(own, int) else None


def _own_tuned_pairs() -> set[str]:
    """Return ``<algo>/<env>`` for all tuned settings in the folder of ``-cd``."""
    if SearchPath.folder is None:
        return set()
    root = SearchPath.folder / "tuned"
    return {path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/**/*.yaml")}


def _check_init_from(name: str) -> None:
    if not name:
        raise ValueError("init_from must be a checkpoint file, or null, got ''")
    path = Path(name)
    if path.is_dir():
        raise ValueError(
            f"init_from must be a checkpoint file, got the folder {path}; "
            f"try init_from={path}/checkpoints/best.safetensors"
        )
    try:
        load_checkpoint(path)
    except (OSError, ValueError) as e:
        raise ValueError(f"init_from={path} must be a checkpoint that loads: {e}") from e


def check_env_id(env_id: str, kwargs: dict[str, Any], backend: str = "auto") -> None:
    """Raise a ValueError unless `env_id` is native or registered with gymnasium.

    gymnasium is imported only if the environment is not native. With the backend envpool, the environment must be one
    of EnvPool's.
    """
    from rlox.envs import foreign_id, is_native

    if backend == "envpool":
        from rlox.envs.envpool_env import check_envpool_id

        try:
            check_envpool_id(env_id)
        except ImportError as e:
            raise ValueError(f"env.backend=envpool is not available: {e}") from e
        return
    try:
        if is_native(env_id) and not kwargs:
            return
    except ImportError as e:
        raise ValueError(f"env={env_id} is not available: {e}") from e
    import gymnasium
    from gymnasium import error

    from rlox.envs.gym_make import nearest_id, register_atari

    if env_id.startswith("ALE/"):
        try:
            register_atari()
        except ImportError as e:
            raise ValueError(f"env={env_id} is not available: {e}") from e
    try:
        gymnasium.spec(foreign_id(env_id))
    except (error.Error, ImportError) as e:
        raise ValueError(f"env={one_line(env_id, 80)} is no environment; {nearest_id(env_id)}") from e

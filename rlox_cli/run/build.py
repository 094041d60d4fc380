"""Build an algorithm that can be trained from a validated configuration."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rlox.algorithms import entry_of, resolve
from rlox.algorithms.trainers import offline_sizes
from rlox.checkpoint import load_checkpoint, trained_for
from rlox.config import BufferConfig, MmapBufferConfig, RunConfig
from rlox.offline.dataset import open_dataset
from rlox_cli.config.imports import resolve_reward
from rlox_cli.run.language import build_language, restore_language
from rlox_cli.run.limits import require_memory
from rlox_cli.terminal.console import make_console


def _memory(buffer: BufferConfig | None, folder: Path) -> dict[str, BufferConfig]:
    """Return the argument for an off-policy algorithm's replay memory, whose files are in the run's folder."""
    if isinstance(buffer, MmapBufferConfig) and buffer.folder is None:
        buffer = replace(buffer, folder=str(folder))
    return {} if buffer is None else {"buffer": buffer}


def build(config: RunConfig, algo: str, folder: Path, console: Console | None = None) -> Any:
    """Return the untrained algorithm of a new run in `folder`. Print what `init_from` leaves out."""
    cls = resolve(entry_of(algo).cls)
    if not config.language:
        require_memory(config)
    if config.language:
        algorithm = build_language(cls, config)
    elif config.offline:
        algorithm = _on_dataset(cls, config)
    else:
        env, arguments = config.env, _arguments(config, folder)
        algorithm = cls(env.id, n_envs=env.n_envs, seed=config.seed, env_kwargs=env.kwargs, **arguments)
    try:
        if config.init_from is not None:
            with _notes("init_from:", console or make_console(stderr=True)):
                algorithm.init_from(config.init_from)
            if console is not None:
                header = load_checkpoint(config.init_from).header
                steps, unit = trained_for(header)
                what = "the networks and normalisation", "the replay memory start fresh"
                if config.language:
                    what = "the weights", "the reference start fresh, the reference as a copy of these weights"
                console.print(
                    f"init_from: {what[0]} of {header['algorithm']} at {unit[:-1]} {steps:,} are taken over, as far as "
                    f"both have them; optimisers, counters and {what[1]}",
                    soft_wrap=True,
                    markup=False,
                )
    except BaseException:
        algorithm.close()
        raise
    return algorithm


def restored(config: RunConfig, algo: str, checkpoint: Path, console: Console, trusted: bool) -> Any:
    """Return the algorithm in `checkpoint`, for `resume` to continue. Print what cannot be restored."""
    cls = resolve(entry_of(algo).cls)
    if config.language:
        return restore_language(cls, config, checkpoint)
    with _notes("from_checkpoint:", console):
        arguments = _offline_arguments(config) if config.offline else _arguments(config, checkpoint.parent.parent)
        algorithm = cls.from_checkpoint(checkpoint, env_id=config.env.id if trusted else None, **arguments)
    # Before the first step there is nothing to lose.
    acted = not config.offline and algorithm.counters.env_steps > 0
    if acted and (note := algorithm.collector.restore_note()) is not None:
        console.print(note, soft_wrap=True, markup=False)
    return algorithm


def plan(algorithm: Any, config: RunConfig, console: Console, changed: Mapping[str, Any] | None) -> None:
    """Set the end of the training and of its schedules. Print a note if schedules are stretched.

    `changed` is None for a new run, and what was typed for a resumed one.

    Raises
    ------
    ValueError
        If ``schedule_timesteps`` leaves nothing to learn.
    """
    end, schedule_end = config.total_timesteps, config.schedule_timesteps
    if changed is None:
        algorithm.plan(end, schedule_timesteps=schedule_end)
        return
    if "schedule_timesteps" in changed and schedule_end is None:
        schedule_end = end
    with _notes("train:", console):
        algorithm.plan(until=end, schedule_timesteps=schedule_end)


@contextmanager
def _notes(beginning: str, console: Console) -> Iterator[None]:
    """Print the warnings whose text starts with `beginning` as plain lines, and hide all others."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", beginning)
        yield
    for warning in warned:
        console.print(str(warning.message), soft_wrap=True, markup=False)


def _offline_arguments(config: RunConfig) -> dict[str, Any]:
    """As `_arguments`, for an algorithm that learns from a dataset; the environment is used for its evaluation."""
    # Observations are normalised as they are sampled, where it is fastest.
    settings = replace(config.dataset, normalize=config.dataset.normalize or config.algo.normalize_obs)
    return {
        "dataset": open_dataset(settings),
        "device": config.device,
        "backend": config.backend,
        "threads": config.threads,
        "env_wrappers": config.env.wrappers,
        "config": config.algo,
    }


def _on_dataset(cls: type, config: RunConfig):
    """Return an offline algorithm with the sizes and bounds of the environment."""
    arguments, env = _offline_arguments(config), config.env
    return cls(
        seed=config.seed,
        env_id=env.id,
        env_kwargs=env.kwargs,
        **offline_sizes(env.id, env.kwargs, env.wrappers, where="env", dataset=arguments["dataset"]),
        **arguments,
    )


def _arguments(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the arguments that an algorithm's constructor and its `from_checkpoint` share."""
    if config.dataset is not None and config.dataset.normalize_returns:
        raise ValueError(
            "dataset.normalize_returns must be false if the replay memory holds the environment's own rewards, got "
            "true; use dataset.reward_scale and reward_shift for rewards that were recorded on another scale"
        )
    return {
        "device": config.device,
        "backend": config.backend,
        "threads": config.threads,
        "compile": config.compile,
        "env_wrappers": config.env.wrappers,
        "env_workers": config.env.workers,
        "env_backend": config.env.backend,
        **({"remote": config.remote} if config.remote.addresses else {}),
        "reward_fn": resolve_reward(config.env.reward_fn, config.imports),
        **_memory(config.buffer, folder),
        **({} if config.dataset is None else {"dataset": open_dataset(config.dataset)}),
        **({"ray": config.ray} if getattr(config.algo, "actors", None) == "ray" else {}),
        "config": config.algo,
    }

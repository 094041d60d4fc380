"""Algorithms that learn only from a dataset; the environment is used for their evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlox.algorithms.trainers import offline_sizes
from rlox.config import RunConfig
from rlox.evaluation.episodes import MAX_STEPS
from rlox.offline.dataset import check_source, open_dataset
from rlox_cli.families import limits
from rlox_cli.families.environment import Environment, require_source, spell


class Offline(Environment):
    """Algorithms that learn only from a dataset."""

    learns_from_env = False
    longest_episode = f"{MAX_STEPS:,} steps"

    def check_dataset(self, run: RunConfig, algo: str) -> None:
        if run.dataset is None:
            raise ValueError(
                f"dataset must be chosen for algo={algo}, got null; try dataset=data/medium.arrow (`rlox collect` "
                "writes one) or dataset=minari:ID"
            )
        require_source(run)
        check_source(run.dataset.source)
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

    def build(self, cls: Any, config: RunConfig, folder: Path) -> Any:
        limits.require_memory(config)
        arguments, env = self.arguments(config, folder), config.env
        return cls(
            seed=config.seed,
            env_id=env.id,
            env_kwargs=env.kwargs,
            **offline_sizes(env.id, env.kwargs, env.wrappers, where="env", dataset=arguments["dataset"]),
            **arguments,
        )

    def arguments(self, config: RunConfig, folder: Path) -> dict[str, Any]:
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

    def note_on_restoring(self, algorithm: Any) -> str | None:
        return None

    def round_steps(self, config: RunConfig) -> int:
        return 1

    def warnings(self, algorithm: Any, config: RunConfig, folder: Path) -> Iterator[str]:
        yield from super().warnings(algorithm, config, folder)
        c, dataset = config.algo, algorithm.dataset
        if c.batch_size > (n := len(dataset)):
            yield (
                f"algo.batch_size={c.batch_size:,} is more than the dataset has, {n:,} transitions: batches repeat them"
            )
        gathered = dataset.metadata.get("env", {}).get("id", config.env.id)
        if gathered != config.env.id:
            yield f"the dataset was gathered in {gathered}, but the policy is evaluated in {config.env.id}"
        (free, _), size = limits.memory(), _count_mapped_bytes(dataset)
        if size > free:
            yield (
                f"the dataset, {limits.size(size)}, is larger than the free memory, {limits.size(free)}: batches "
                "wait for the disk; dataset.max_transitions limits it to a part"
            )

    def training_costs(self, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from rlox_cli.families.estimate import time_updates

        return time_updates(self, algorithm, config)

    def evaluation_costs(self, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, bool]:
        from rlox_cli.families.estimate import time_evaluation

        return time_evaluation(algorithm, config, algorithm.env_options.kwargs)

    def describe_data(self, algorithm: Any) -> list[tuple[str, str]]:
        stats, known = algorithm.dataset.stats(), algorithm.dataset.metadata
        env = f" of {known['env']['id']}" if known.get("env") else ""
        text = (
            f"{spell(stats['n_transitions'], 'transition')} in {spell(stats['n_episodes'], 'episode')}{env}, "
            f"return {format_returns(stats, known)}"
        )
        return [("dataset", text)]

    def describe_training(self, algorithm: Any, config: RunConfig) -> str:
        updates = spell(config.total_timesteps, "update")
        return f"{updates} in batches of {config.algo.batch_size:,} from {len(algorithm.dataset):,} transitions"

    def describe_stored(self, algorithm: Any, config: RunConfig) -> str:
        size = limits.size(_count_mapped_bytes(algorithm.dataset))
        return f"; the dataset, {size}, is read from its file as it is used"


def _count_mapped_bytes(dataset: Any) -> int:
    """Return the size of a dataset's mapped file; its pages stay in memory while they are used and there is room."""
    return os.stat(dataset.metadata["file"]).st_size


def format_returns(stats: dict[str, Any], metadata: dict[str, Any]) -> str:
    """Format a dataset's returns, such as ``-21.40 ± 3.20 (-30.00 to -15.00)``; a note is added for several agents."""
    per_agent = ", per agent and episode" if metadata.get("agents") else ""
    spread = f"{stats['min_return']:.2f} to {stats['max_return']:.2f}"
    return f"{stats['mean_return']:.2f} ± {stats['std_return']:.2f} ({spread}){per_agent}"

"""The function that Hydra runs, in this process or in a launcher's; importable by name, since launchers pickle it."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from rlox_cli.compose import to_run_config
from rlox_cli.runner import Outcome, run

# What the jobs of this process have done, for the table at the end: hydra.main itself returns nothing.
OUTCOMES: list[Outcome] = []


def train(cfg: DictConfig) -> dict[str, float]:
    """Train one composed job; returns the final evaluation, which is what a sweeper may optimise."""
    hydra = HydraConfig.get()
    outcome = run(to_run_config(cfg), hydra.runtime.choices.algo, Path(hydra.runtime.output_dir), Console())
    OUTCOMES.append(outcome)
    return outcome.final

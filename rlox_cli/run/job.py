"""The function that Hydra runs, in this process or in a launcher's; importable by name, since launchers pickle it."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rlox_cli.config.imports import import_modules
from rlox_cli.config.schema import to_run_config
from rlox_cli.run.runner import Outcome, run
from rlox_cli.terminal.console import make_console

# What the jobs of this process have done: hydra.main itself returns nothing. `rlox train` makes the lists; where they
# are None a launcher has carried the job into a process of its own, and failures are its to report.
OUTCOMES: list[Outcome] | None = None
FAILURES: list[Exception] | None = None


def train(cfg: DictConfig) -> dict[str, float]:
    """Train one composed job; returns the final evaluation, which is what a sweeper may optimise."""
    hydra = HydraConfig.get()
    try:
        import_modules(cfg.imports)  # a launcher's process has imported nothing yet
        outcome = run(to_run_config(cfg), hydra.runtime.choices.algo, Path(hydra.runtime.output_dir), make_console())
    except Exception as e:
        if FAILURES is None:
            raise
        # The other jobs of a sweep go on, and Hydra does not print its own account of it.
        FAILURES.append(e)
        return {}
    if OUTCOMES is not None:
        OUTCOMES.append(outcome)
    return outcome.final

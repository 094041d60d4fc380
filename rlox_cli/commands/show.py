"""``rlox show``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlox_cli.terminal.options import Imports
from rlox_cli.terminal.process import report_exceptions


def show(
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC", help="What to explain.")] = None,
    imports: Imports = None,
) -> None:
    """Explain the keys of a run: type, default, meaning, and the tuned value if algo= and env= are given.

    \b
    rlox show                            the top level and all sections
    rlox show algo=ppo                   the algorithm's hyper-parameters
    rlox show algo=ppo env=CartPole-v1   the tuned values next to the defaults
    rlox show buffer=prioritized         the keys of a replay memory
    rlox show hydra.sweeper              search with Optuna
    rlox show hydra.launcher             sweeps on Ray (hydra/launcher=ray)
    rlox show dataset=data/medium.arrow  rows, episodes, returns, origin
    rlox show eval                       one section: env, buffer, dataset, eval,
                                         checkpoint, ray, remote,
                                         logger.mlflow, logger.wandb,
                                         logger.tensorboard, logger.csv
    """
    with report_exceptions("show"):
        from rlox_cli.families.imports import import_modules
        from rlox_cli.report.keys import show_keys

        import_modules(imports or [])
        show_keys(topics or [])

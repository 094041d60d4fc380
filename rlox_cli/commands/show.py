"""``rlox show``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported
from rlox_cli.terminal.options import Imports


def show(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC", help="What to explain."),
    ] = None,
    imports: Imports = None,
) -> None:
    """Explain the keys of a run: type, default, meaning, and the tuned value where algo= and env= are given.

    \b
    rlox show                            the root and all its sections
    rlox show algo=ppo                   the algorithm's hyper-parameters
    rlox show algo=ppo env=CartPole-v1   with the tuned values beside the defaults
    rlox show buffer=prioritized         a replay memory's keys
    rlox show hydra.sweeper              the search by Optuna: rlox train -m hydra/sweeper=optuna
    rlox show hydra.launcher             the jobs of a sweep on Ray: rlox train -m hydra/launcher=ray
    rlox show dataset=data/medium.arrow  what a dataset holds: rows, episodes, returns, where it comes from
    rlox show eval                       one section: env, buffer, dataset, eval, checkpoint, logger.mlflow,
                                         logger.wandb, logger.tensorboard, logger.csv
    """
    with reported("show"):
        from rlox_cli.config.imports import import_modules
        from rlox_cli.report.keys import show_keys

        import_modules(imports or [])
        show_keys(topics or [])

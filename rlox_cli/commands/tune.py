"""``rlox tune``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlox_cli.config.completion import complete
from rlox_cli.terminal.options import PASS_ON
from rlox_cli.terminal.process import report_exceptions

FLAGS = {**PASS_ON, "allow_interspersed_args": True}


def tune(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change.", autocompletion=complete)
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Total number of trials; by default 20.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of a trial, whose mean counts; by default 1.")] = None,
    search: Annotated[
        str | None,
        typer.Option(metavar="KEY,KEY", help="Hyper-parameters to search in their own ranges; default: all."),
    ] = None,
) -> None:
    """Search for hyper-parameters with Optuna. The same as `rlox train -m hydra/sweeper=optuna`.

    \b
    rlox tune algo=ppo env=CartPole-v1 --trials 50
    rlox tune algo=sac env=Pendulum-v1 --search learning_rate,gamma --seeds 3
    rlox tune algo=ppo env=CartPole-v1 \\
      'algo.learning_rate=tag(log,interval(1e-5,1e-2))'

    `rlox show algo=ppo` lists the ranges, `rlox show hydra.sweeper` the keys that
    have no option here, such as hydra.sweeper.pruner. `rlox sweep resume`
    continues a search that was stopped, with more trials if you like.
    """
    with report_exceptions("tune"):
        from rlox_cli.commands.train import main

        words = ["-m", "hydra/sweeper=optuna"]
        words += [] if trials is None else [f"hydra.sweeper.n_trials={trials}"]
        words += [] if seeds is None else [f"hydra.sweeper.n_seeds={seeds}"]
        words += [] if search is None else [f"hydra.sweeper.search=[{search}]"]
        main([*words, *(overrides or []), *context.args], own=("--trials", "--seeds", "--search"))

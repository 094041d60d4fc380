"""``rlox new env``, ``rlox new algorithm`` and ``rlox new experiment``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.process import report_exceptions

new = typer.Typer(help="Write a small package of your own, with a test that passes.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Small letters, digits and _.")]
Folder = Annotated[
    Path | None, typer.Option("--folder", metavar="DIR", help="A new folder; by default one called NAME.")
]


@new.command()
def env(name: Name, folder: Folder = None) -> None:
    """Write an environment with gymnasium's interface, to be replaced by your task.

    Its test checks gymnasium's rules, seeds and the time limit, and trains PPO.

    \b
    rlox new env my_task
    cd my_task && pytest && rlox train --import my_task env=MyTask-v0
    """
    with report_exceptions("new env"):
        from rlox_cli.new.environment import make_environment

        make_environment(name, folder)


@new.command()
def algorithm(
    name: Name,
    like: Annotated[
        str, typer.Option(metavar="ALGO", help="The algorithm to start from: a2c, dqn, ppo, sac, td3, iql, …")
    ] = "ppo",
    folder: Folder = None,
) -> None:
    """Write an algorithm that starts as an exact copy of another one's update and losses.

    Everything that it computes is in one file: change a line of a loss. The rest
    (environments, collection, evaluation, checkpoints, resume, sweeps) stays
    rlox's. Its test checks that it trains, is restored, and equals the original
    until you change it.

    \b
    rlox new algorithm my_ppo
    rlox new algorithm my_sac --like sac
    cd my_sac && pytest && rlox train --import my_sac algo=my_sac env=Pendulum-v1
    """
    with report_exceptions("new algorithm"):
        from rlox_cli.new.algorithm import make_algorithm

        make_algorithm(name, like, folder)


@new.command()
def experiment(
    name: Name,
    algo: Annotated[str, typer.Option(metavar="ALGO", help="The algorithm, or a shipped preset.")] = "ppo",
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="The environment; by default CartPole-v1 or, for continuous actions, Pendulum-v1."
        ),
    ] = None,
    folder: Folder = None,
) -> None:
    """Write an experiment for `rlox train -cd DIR experiment=NAME`. It starts from the tuned settings if there are any.

    Its README has the commands for seeds, a plot and a verdict; its test trains it.

    \b
    rlox new experiment discounts --algo ppo --env Acrobot-v1
    """
    with report_exceptions("new experiment"):
        from rlox_cli.new.experiment import make_experiment

        make_experiment(name, algo, env, folder)

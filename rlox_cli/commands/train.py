"""``rlox train``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import typer

from rlox_cli.config.completion import complete
from rlox_cli.terminal.process import report_exceptions


def train(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change.", autocompletion=complete)
    ] = None,
) -> None:
    """Train an agent; with -m, train one for each combination of comma-separated values.

    \b
    rlox train algo=ppo env=CartPole-v1
    rlox train env=Pendulum-v1 seed=3 algo.learning_rate=3e-4 env.n_envs=16
    rlox train -m algo=ppo,a2c seed=0,1,2,3
    rlox train -m 'seed=range(8)' hydra/launcher=joblib
    rlox train -m hydra/sweeper=optuna 'hydra.sweeper.search=\\[gamma,gae_lambda]'
    rlox train algo=dqn buffer=prioritized buffer.alpha=0.5
    rlox train env=Acrobot-v1 total_timesteps=200_000 logger=wandb
    rlox train max_time=30m eval.stop_at=475 'logger=\\[mlflow,csv]'
    rlox train init_from=outputs/…
    rlox train resume=outputs/… total_timesteps=500_000
    rlox train -m experiment=cartpole-seeds
    rlox train --import my_package env=Mine-v0
    rlox train algo=sac env=Pendulum-v1 --check

    If rlox has tuned settings for the algorithm and the environment (`rlox ls
    tuned`), it applies and announces them; tuned=off turns them off. `rlox show
    algo=ppo` explains every key. Each run has a folder below outputs/ (or
    output_dir=FOLDER) with its configuration, metrics and checkpoints. Ctrl-C
    saves everything and stops; a second Ctrl-C stops at once.

    resume=RUN (a run folder, or a checkpoint in one) continues a run that was
    stopped or killed, as if it had not been. It keeps its settings, except for
    what you type in addition. A larger total_timesteps extends the run and
    stretches its schedules to the new end.

    A sweep (-m) prints a line when a job ends, retries jobs that died, and ends
    with tables and a plot. `rlox sweep resume` continues a sweep that was stopped
    or killed. hydra/launcher=joblib runs the jobs in parallel.

    \b
    Flags (all but the first two are Hydra's; --hydra-help lists those):
      --import MODULE       import a module of your own first (environments,
                            wrappers, algorithms); recorded with the run
      --check               look for problems and estimate time, memory and disk;
                            trains nothing
      -m, --multirun        one job for each combination of comma-separated values
      --cfg job|hydra|all   print the composed configuration and exit; -p KEY:
                            only that part; --resolve: with references resolved
      --info \\[TOPIC]        how the configuration was composed: all, defaults,
                            defaults-tree, searchpath, plugins
      -cd, --config-dir DIR a folder of your own YAML, laid out like conf/, that
                            is searched first (`rlox cp` fills it)
      -cn, --config-name N  another root configuration than config.yaml
    """
    with report_exceptions("train"):
        main([*(overrides or []), *context.args])


def main(args: list[str], own: Collection[str] = ()) -> None:
    """Run ``rlox train`` with `args` as typed. Messages about flags name `own` too, those of another command."""
    from rlox_cli.run.train import main

    plan = main(args, own)
    if plan is None:
        return
    if plan.searches:
        from rlox_cli.sweep.control import optuna_search

        optuna_search().start(plan.flags, plan.overrides, plan.modules, plan.sweep, plan.jobs[0], plan.console)
    else:
        from rlox_cli.sweep.control import start

        start(plan.flags, plan.overrides, plan.modules, plan.sweep, plan.jobs, plan.console)

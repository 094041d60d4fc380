"""``rlox train``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlox_cli.config.completion import complete
from rlox_cli.terminal.exits import reported


def train(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What to change.", autocompletion=complete),
    ] = None,
) -> None:
    """Train an agent; -m trains one for every combination of comma-separated values.

    \b
    rlox train algo=ppo env=CartPole-v1
    rlox train env=Pendulum-v1 seed=3 algo.learning_rate=3e-4 env.n_envs=16
    rlox train -m algo=ppo seed=0,1,2,3            rlox train -m 'seed=range(8)' hydra/launcher=joblib
    rlox train -m hydra/sweeper=optuna algo=ppo env=CartPole-v1 'hydra.sweeper.search=\\[learning_rate,gamma]'
    rlox train algo=dqn buffer=prioritized buffer.alpha=0.5
    rlox train env=Acrobot-v1 total_timesteps=200_000 logger=wandb
    rlox train max_time=30m eval.stop_at=475       'logger=\\[mlflow,csv]'
    rlox train init_from=outputs/…/checkpoints/best.safetensors
    rlox train resume=outputs/…                    rlox train resume=outputs/… total_timesteps=500_000
    rlox train experiment=ppo-smoke                rlox train -m experiment=cartpole-seeds
    rlox train --import my_package env=Mine-v0     rlox train algo=sac env=Pendulum-v1 --check

    Tuned settings for (algorithm, environment) are applied where they ship (`rlox ls tuned`) and announced; tuned=off
    turns them off. `rlox show algo=ppo` explains every key. Each run leaves a folder under outputs/ (or
    output_dir=FOLDER) with its configuration, metrics and checkpoints; Ctrl-C stops it with everything saved, a
    second one at once.

    resume=RUN (a run folder, or a checkpoint in one) goes on with a run that was stopped or killed, as if it had not
    been: its own settings hold, and only what is typed beside it changes. A larger total_timesteps extends a run,
    and stretches its schedules to the new end.

    A sweep (-m) prints a line when a job ends, tries again what died, and ends with tables and a picture; `rlox sweep
    resume` goes on with one that was stopped or killed. hydra/launcher=joblib runs its jobs beside each other.

    \b
    Flags (all but the first two are Hydra's; all of those: --hydra-help):
      --import MODULE       import a module of your own first: environments, wrappers, algorithms; recorded with the run
      --check               look for what can go wrong, estimate what the run takes (time, memory, disk), train nothing
      -m, --multirun        one job per combination of comma-separated values
      --cfg job|hydra|all   print the composed configuration and stop; -p KEY: only that part; --resolve
      --info \\[TOPIC]        how the configuration was composed: all, defaults, defaults-tree, searchpath, plugins
      -cd, --config-dir DIR a folder of your own YAML, laid out like conf/, looked into first (`rlox cp` fills it)
      -cn, --config-name N  another root than config.yaml
    """
    with reported("train"):
        from rlox_cli.train import main

        main([*(overrides or []), *context.args])

"""``rlox collect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported
from rlox_cli.terminal.options import Imports


def collect(
    checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=]CHECKPOINT", help="Checkpoints, or run folders (the best).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Transitions to gather.")] = None,
    mix: Annotated[
        str | None,
        typer.Option(metavar="NAME:SHARE,…", help="Shares of the steps; the name random: uniformly random actions."),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FILE|minari:ID", help="What to write.")] = "data.arrow",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides environments and actions.")] = 0,
    n_envs: Annotated[int, typer.Option(min=1, help="Environments stepped side by side.")] = 8,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The most likely actions, not samples with training's noise.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Write what this run's saved replay memory holds instead.")
    ] = None,
    env: Annotated[str | None, typer.Option(metavar="ID", help="The environment; by default the checkpoints'.")] = None,
    agents: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Of several agents, those to record: a group, or agents of one group."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    imports: Imports = None,
) -> None:
    """Gather a dataset for offline learning from one or several policies, or from a run's replay memory.

    \b
    rlox collect outputs/…/checkpoints/best.safetensors --steps 100000 --out data/expert.arrow
    rlox collect medium=outputs/… --mix medium:0.5,random:0.5 --steps 100000 --out data/mixed.arrow
    rlox collect --env Pendulum-v1 --steps 10000 --out data/random.npz
    rlox collect --env pettingzoo:mpe2.simple_tag_v3 --agents adversary --steps 10000 --out data/chase.arrow
    rlox collect --replay outputs/… --out data/medium-replay.arrow
    rlox collect outputs/… --steps 10000 --out minari:pendulum/medium-v0

    With several agents each life of an agent is an episode, and a step gives a transition for each agent that acts.
    Names in --mix are those given as NAME=CHECKPOINT, positions (1, 2, …), or go to the unnamed ones in their order.
    The file's ending says the format: .arrow (which training maps as it is), .npz, .h5 (D4RL's layout), .parquet.
    `rlox show dataset=FILE` prints what one holds. Ctrl-C leaves nothing behind.
    """
    with reported("collect"):
        from rlox_cli.report.dataset import print_written
        from rlox_cli.run.collect import main

        main(checkpoints or [], steps, mix, out, seed, n_envs, deterministic, replay, env, agents, force,
             imports or [])  # fmt: skip
        print_written(out)

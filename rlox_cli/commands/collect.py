"""``rlox collect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import Imports
from rlox_cli.terminal.process import report_exceptions


def collect(
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=]CHECKPOINT", help="Checkpoints, or run folders (for their best one)."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of transitions to gather.")] = None,
    mix: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:SHARE,…", help="Share of the steps for each policy; `random` takes uniformly random actions."
        ),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FILE|minari:ID", help="Where to write the dataset.")] = "data.arrow",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the environments and the actions.")] = 0,
    n_envs: Annotated[int, typer.Option(min=1, help="Number of environments, stepped together.")] = 8,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Take the most likely actions, without training's noise.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Write the saved replay memory of this run instead.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="ID", help="The environment; by default that of the checkpoints.")
    ] = None,
    agents: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="With several agents, those to record: a group, or agents of one group."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    imports: Imports = None,
) -> None:
    """Gather a dataset for offline learning, with one or several policies or from a run's replay memory.

    \b
    rlox collect outputs/…/checkpoints/best.safetensors --out data/expert.arrow
    rlox collect medium=outputs/… --mix medium:0.5,random:0.5 --out mixed.arrow
    rlox collect --env Pendulum-v1 --steps 10000 --out data/random.npz
    rlox collect --env pettingzoo:mpe2.simple_tag_v3 --agents adversary
      --steps 10000 --out data/chase.arrow
    rlox collect --replay outputs/… --out data/medium-replay.arrow
    rlox collect outputs/… --steps 10000 --out minari:pendulum/medium-v0

    With several agents, each life of an agent is an episode, and each step gives
    a transition for each agent that acts.

    A name in --mix is one given as NAME=CHECKPOINT, or a position (1, 2, …).
    Other names are assigned to the unnamed checkpoints in order.

    The file name's ending chooses the format: .arrow (which training maps into
    memory as it is), .npz, .h5 (D4RL's layout) or .parquet. `rlox show
    dataset=FILE` describes a dataset. If you press Ctrl-C, no file is left.
    """
    with report_exceptions("collect"):
        from rlox_cli.report.dataset import print_written
        from rlox_cli.run.collect import main

        print_written(main(checkpoints or [], steps, mix, out, seed, n_envs, deterministic, replay, env, agents, force,
                           imports or []))  # fmt: skip

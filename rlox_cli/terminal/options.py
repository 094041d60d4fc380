"""Options that several commands share, declared for Typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import a module of your own first. Can be repeated."),
]
Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, a run folder (for its best one), or the name of a pulled run.")
]
EvaluationSeed = Annotated[
    int | None, typer.Option(min=0, help="Seed of the environment; by default the evaluation seed of the training.")
]
Stochastic = Annotated[
    bool,
    typer.Option("--stochastic", help="Sample actions, with training's noise, instead of taking the most likely."),
]
MaxSteps = Annotated[
    int | None, typer.Option(min=1, help="Steps after which an episode is cut off; by default as in training.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
# Everything after the command's own options belongs to Hydra's grammar, except -h and --help.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

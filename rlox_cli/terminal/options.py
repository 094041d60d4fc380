"""Options that several commands share, declared for Typer."""

from __future__ import annotations

from typing import Annotated

import typer

Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import a module of your own first. Can be repeated."),
]
# Everything after the command's own options belongs to Hydra's grammar, except -h and --help.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

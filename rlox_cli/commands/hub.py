"""``rlox push``, ``rlox pull`` and ``rlox card``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import Imports
from rlox_cli.terminal.process import report_exceptions

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder (for its best checkpoint), or a checkpoint.")]
_Episodes = Annotated[
    int | None,
    typer.Option(min=1, help="Evaluate this many new episodes for the card; by default the score of the training."),
]
_Licence = Annotated[str | None, typer.Option("--licence", "--license", metavar="ID", help="Such as mit or cc-by-4.0.")]


def push(
    run: _Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="OWNER/NAME on the hub, or NAME in your account.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Who sees a new repository; by default as your account.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the folder and upload nothing.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The folder of --dry-run.")] = None,
    film: Annotated[bool, typer.Option(help="Film an episode, if the environment renders.")] = True,
    episodes: _Episodes = None,
    licence: _Licence = None,
    imports: Imports = None,
) -> None:
    """Share a run on the Hugging Face Hub: checkpoint, settings, record, curve, film, card.

    Needs the extra `hub` and a token that may write (`hf auth login`, or HF_TOKEN).
    HF_ENDPOINT names another hub.

    \b
    rlox push outputs/… me/ppo-cartpole --licence mit
    rlox push outputs/… me/ppo-cartpole --dry-run --out shared
    """
    with report_exceptions("push"):
        from rlox_cli.hub.contents import Options
        from rlox_cli.hub.main import push as main

        main(run, name, private, dry_run, out, Options(episodes, film, licence, tuple(imports or ())))


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="OWNER/NAME on the hub.")],
    revision: Annotated[str | None, typer.Option(help="A branch, a tag or a commit; by default the newest.")] = None,
) -> None:
    """Fetch a run that `rlox push` has shared, and verify it.

    Afterwards, `rlox eval NAME`, `init_from=NAME` and `model=NAME` use it. It is kept
    in ~/.local/share/rlox/pulled, or where RLOX_PULLED says. Nothing in it is run.
    """
    with report_exceptions("pull"):
        from rlox_cli.hub.main import pull as main

        main(name, revision)


def card(
    run: _Run,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the card here instead of printing it.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="OWNER/NAME on the hub, for its commands.")] = None,
    episodes: _Episodes = None,
    licence: _Licence = None,
    imports: Imports = None,
) -> None:
    """Write the card of an agent: its score with an interval, its training, its use."""
    with report_exceptions("card"):
        from rlox_cli.hub.contents import Options
        from rlox_cli.hub.main import card as main

        main(run, out, name, Options(episodes, False, licence, tuple(imports or ())))

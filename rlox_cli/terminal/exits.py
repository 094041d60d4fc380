"""How a command ends: what is printed on stderr, and the exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
import typer

from rlox_cli.terminal.errors import Stopped
from rlox_cli.terminal.signals import Signals


@contextmanager
def reported(verb: str) -> Iterator[None]:
    """Print an exception as `account` formats it, and exit with its code. RLOX_TRACEBACK=1 lets it propagate.

    The first Ctrl-C or SIGTERM stops the command, except in parts that handle signals themselves, such as a training.
    """
    try:
        with Signals():
            yield
    except (click.exceptions.Exit, click.exceptions.Abort, click.ClickException):
        raise
    except Stopped as e:
        raise typer.Exit(e.exit_code) from None
    except KeyboardInterrupt as e:
        print(f"rlox {verb}: interrupted", file=sys.stderr)
        raise typer.Exit(128 + getattr(e, "signal_number", signal.SIGINT)) from None
    except BaseException as e:
        from rlox_cli.terminal.account import account, exit_code, is_of_user  # imports NumPy, which --help does without
        from rlox_cli.terminal.console import print_text

        # Hydra and its plugins may end the process themselves; an environment must not.
        if os.environ.get("RLOX_TRACEBACK") == "1" or (isinstance(e, SystemExit) and not is_of_user(e)):
            raise
        rank = int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
        lost = type(e).__name__ == "RankLost"
        # A rank that only lost another rank has nothing to add to what rank 0 prints, unless rank 0 was killed.
        if not rank or not lost or getattr(e, "unreported", False):
            print_text(f"rlox {verb}: {f'rank {rank}: ' if rank and not lost else ''}{account(e)}", stderr=True)
        raise typer.Exit(exit_code(e)) from None

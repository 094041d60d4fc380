"""The Typer application, with all commands in the order in which the help lists them."""

from __future__ import annotations

import atexit
import codecs
import faulthandler
import os
import sys
import warnings
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import typer
import typer.main

from rlox.processes.child import kill_forks
from rlox.processes.interpreter import format_warning
from rlox_cli.commands.bench import bench
from rlox_cli.commands.collect import collect
from rlox_cli.commands.compare import compare
from rlox_cli.commands.enjoy import enjoy
from rlox_cli.commands.env import env
from rlox_cli.commands.eval import eval_
from rlox_cli.commands.export import export
from rlox_cli.commands.generate import generate
from rlox_cli.commands.hub import card, pull, push
from rlox_cli.commands.ls import cp, ls
from rlox_cli.commands.new import new
from rlox_cli.commands.plot import plot
from rlox_cli.commands.schema import schema
from rlox_cli.commands.show import show
from rlox_cli.commands.sweep import sweep
from rlox_cli.commands.trackers import sync, ui
from rlox_cli.commands.train import train
from rlox_cli.commands.tune import FLAGS, tune
from rlox_cli.commands.workers import doctor, worker
from rlox_cli.terminal.options import PASS_ON
from rlox_cli.terminal.process import Output, open_streams
from rlox_cli.terminal.shells import replace_scripts
from rlox_cli.terminal.signals import end_on_signals

app = typer.Typer(
    name="rlox",
    help="Train, evaluate and compare reinforcement-learning agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings=PASS_ON)(train)
app.command(context_settings=FLAGS)(tune)
app.command("eval")(eval_)
app.command()(enjoy)
app.command()(export)
app.command()(generate)
app.command()(collect)
app.command()(ls)
app.command()(show)
app.command()(cp)
app.command()(schema)
app.command()(sync)
app.command(context_settings=PASS_ON)(ui)
app.command()(plot)
app.command()(compare)
app.command()(card)
app.command()(push)
app.command()(pull)
app.command()(worker)
app.command()(doctor)
app.command()(env)
app.add_typer(new, name="new")
app.add_typer(sweep, name="sweep")
app.add_typer(bench, name="bench")


replace_scripts()


def _version(asked: bool) -> None:
    if asked:
        from rlox import __version__

        print(f"rlox {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, evaluate and compare reinforcement-learning agents."""


@cache
def commands() -> Any:
    """Return the application as a Click command. Typer would build one for every call, which takes 20 ms."""
    return typer.main.get_command(app)


def main() -> None:
    end_on_signals()
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        # Names of files in other scripts would be strings that no library can write: start again in UTF-8 mode, in
        # which only the output stays ASCII.
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", "ascii")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    atexit.register(kill_forks)
    open_streams()
    warnings.formatwarning = format_warning
    faulthandler.enable(2)  # an interpreter that dies prints which code was running, such as an environment's
    if "" in (words := sys.argv[1:]):
        # Often an unset shell variable. As a path, '' would mean the working directory.
        print(f"rlox: argument {words.index('') + 1} must not be empty, got ''", file=sys.stderr)
        sys.exit(2)
    try:
        os.getcwd()
    except OSError as e:
        print(f"rlox: the working folder must exist, but was deleted ({e.strerror}); cd to another", file=sys.stderr)
        sys.exit(2)
    try:
        commands()()
    except SystemExit as e:
        with suppress(OSError):
            sys.stdout.flush()
        if Output.incomplete and not e.code:
            sys.exit(1)
        raise


if __name__ == "__main__":
    main()

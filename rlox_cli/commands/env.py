"""``rlox env``."""

from __future__ import annotations

from rlox_cli.terminal.options import Json
from rlox_cli.terminal.process import report_exceptions


def env(json: Json = False) -> None:
    """Print what a bug report needs: versions, processor, GPU, threads, compiler and packages.

    The output contains no paths and no names of machine or user, and of the
    environment variables only those about threads, devices and rlox.
    """
    with report_exceptions("env"):
        from rlox_cli.report.machine import main

        main(json)

"""The program ``rlox``. It handles signals before it imports the command line, which takes some tenths of a second."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys

from rlox_cli.terminal.signals import end_on_signals


def main() -> None:
    end_on_signals()
    from rlox.processes.child import kill_forks
    from rlox_cli.main import commands
    from rlox_cli.terminal.process import open_streams, use_utf8_paths

    use_utf8_paths()
    atexit.register(kill_forks)
    open_streams()
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
    commands()()


if __name__ == "__main__":
    main()

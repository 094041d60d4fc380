"""The program ``rlox``. It handles signals before it imports the command line, which takes some tenths of a second."""

from __future__ import annotations

from rlox_cli.terminal.signals import end_on_signals


def main() -> None:
    end_on_signals()
    from rlox_cli.main import main

    main()


if __name__ == "__main__":
    main()

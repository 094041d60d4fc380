"""The program ``rlox``. Signals are handled before the command line is imported, which takes a few tenths of a second."""

from __future__ import annotations

from rlox_cli.terminal.signals import end_on_signals


def main() -> None:
    end_on_signals()
    from rlox_cli.main import main

    main()


if __name__ == "__main__":
    main()

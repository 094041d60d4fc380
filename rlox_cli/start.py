"""The program ``rlox``. It handles signals before it imports the command line, which takes some tenths of a second."""

from __future__ import annotations

import signal

# What the library alone does not need; the extra of the command line in pyproject.toml.
PACKAGES = ("hydra", "omegaconf", "rich", "scipy", "typer", "yaml")
REMEDY = 'try: pip install "rlox-cli[cli]"'


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process quietly while the handlers are imported
    from rlox_cli.terminal.signals import end_on_signals

    end_on_signals()
    try:
        from rlox_cli.main import main
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in PACKAGES:
            raise
        raise SystemExit(f"rlox: the command line needs {e.name}, which is not installed; {REMEDY}") from None

    main()


if __name__ == "__main__":
    main()

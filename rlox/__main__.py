"""``python -m rlox``: the command line."""

from rlox_cli.start import main

main()

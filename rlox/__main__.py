"""``python -m rlox``: the command line."""

from rlox_cli.main import main

main()

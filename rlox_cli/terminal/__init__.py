"""How does a command talk? Errors and exit codes, signals, streams, the console with its tables, paths."""

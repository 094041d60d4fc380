"""How are errors, exit codes, signals, streams, tables and paths handled?"""

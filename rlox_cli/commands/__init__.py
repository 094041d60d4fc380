"""Which commands are there? One file for each verb, with its arguments, one call and its output.

Only Typer is imported until a command runs, so that help and completion are fast.
"""

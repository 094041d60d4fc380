"""Which commands are there? A file for each verb: arguments in, one call, output.

Nothing but Typer is imported until a command runs, so that help and completion are quick.
"""

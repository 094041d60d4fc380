"""The two exceptions that a command raises itself."""

from __future__ import annotations


class Stopped(BaseException):
    """A signal ended the training after everything was saved; not an Exception, so that a sweep ends too."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number


class UsageError(ValueError):
    """What was typed cannot be a run: an unknown key, a wrong type, a value out of range, a missing choice."""

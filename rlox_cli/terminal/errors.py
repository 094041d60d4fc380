"""The two exceptions that commands raise."""

from __future__ import annotations


class Stopped(BaseException):
    """A signal ended the training after everything was saved. Not an Exception, so that it also ends a sweep."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number


class UsageError(ValueError):
    """The input is not valid: an unknown key, a wrong type, a value out of range, a missing choice."""

"""A log of refusals that a flood of them cannot fill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PERIOD_S, MOST_LINES = 10.0, 20


class Refusals:
    """Logs the first refusals of each period, and the number of the others when the period ends, from any thread.

    `what` is refused, for the line with the number of the others: ``"connections"``.
    """

    def __init__(self, log: Callable[[str], None], what: str):
        self._log, self._what = log, what
        self._lock = threading.Lock()
        self._since, self._n = 0.0, 0

    def add(self, line: str) -> None:
        """Count a refusal, and log its line unless many were logged in this period."""
        self.tick()
        with self._lock:
            if not self._n:
                self._since = time.monotonic()
            self._n += 1
            if self._n <= MOST_LINES:
                self._log(line)

    def tick(self, end: bool = False) -> None:
        """Log how many refusals were not logged, if the period is over (or should `end`). Called about every second."""
        with self._lock:
            if self._n and (end or time.monotonic() - self._since > PERIOD_S):
                if self._n > MOST_LINES:
                    self._log(f"{self._n - MOST_LINES:,} more {self._what} were refused")
                self._n = 0

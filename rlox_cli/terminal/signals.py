"""Ctrl-C and SIGTERM: during long work the first one lets it save, and the second one stops it at once.

A closed terminal (SIGHUP) and the signals that clusters send before a time limit also let it save. At all other times,
from the start of the command until the interpreter has ended, one of the first two ends the process.
"""

from __future__ import annotations

import _thread
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlox.checkpoint import run_files
from rlox.processes.child import SAVE_AND_END

_GRACE_S = 2.0  # from SIGTERM until an update or an evaluation is stopped
_SAVING_S = 10.0  # the same if the update has ended and is being saved
_GONE_S = 4.0  # after an immediate stop: the process is then ended, whatever it is doing
_LOOK_S = 0.5  # between two checks of a sweep's stop file
AT_ONCE = "at once"  # content of that file after a second signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANDLED = (*_SIGNALS, *SAVE_AND_END)
_END = b"\0"


def end_on_signals() -> None:
    """Let Ctrl-C and SIGTERM end this process, quietly and with exit code 128 + signal, wherever it is in its code."""
    for number in _SIGNALS:
        signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # such as a stream that the signal has interrupted
            stream.flush()
    os._exit(128 + number)


class StopAtOnce(KeyboardInterrupt):
    """A second signal came, or the time that SIGTERM leaves has passed."""

    def __init__(self, number: int):
        super().__init__(f"stopped at once by {signal.Signals(number).name}")
        self.signal_number = number


class Signals:
    """Context manager that handles Ctrl-C and SIGTERM; outside the main thread it does nothing.

    The first signal is only recorded. A second one raises `StopAtOnce`. So does a single SIGTERM, two seconds later. If
    the process has not ended four seconds after that, a thread ends it, since the main thread may be busy in C code.
    The signals `SAVE_AND_END` may come repeatedly, and only count as a first one. Where another handler is installed
    for them, such as submitit's, or they are ignored, as under nohup, that stays as it is.

    Parameters
    ----------
    report : callable, optional
        Called with `line`, from that thread, when the first signal comes. None: the first signal raises `StopAtOnce`.
    line : str
        The text for `report`.
    flag : Path, optional
        The stop file of a sweep: when it contains `AT_ONCE`, this process stops at once as well.

    Attributes
    ----------
    number : int or None
        The number of the first signal.
    """

    def __init__(self, report: Callable[[str], None] | None = None, line: str = "", flag: Path | None = None):
        self.number: int | None = None
        self._report, self._line, self._flag = report, line, flag
        self._raised = self._saving = False

    def saving(self) -> None:
        """Call this when the update has ended: after SIGTERM, saving may take ten seconds."""
        self._saving = True

    def __enter__(self) -> Signals:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = {}
            for number in _HANDLED:
                handler = signal.getsignal(number)
                undecided = handler is signal.SIG_DFL or getattr(handler, "__func__", None) is Signals._on_signal
                if number in _SIGNALS or undecided:
                    self._before[number] = signal.signal(number, self._on_signal)
            # Sockets, since Windows can wait for nothing else.
            self._read, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._outer = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._follow, name="rlox-signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            self._raised = True  # an exception here would leave the handlers in place
            signal.set_wakeup_fd(self._outer)
            self._write.send(_END)
            self._thread.join()
            self._read.close()
            self._write.close()
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._on_signal:  # else it was replaced on purpose
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        first = self.number is None
        self.number = self.number or number
        if number in SAVE_AND_END and self._report:
            return
        if not (first and self._report) and not self._raised:
            self._raised = True
            raise StopAtOnce(number)

    def _follow(self) -> None:
        first, raise_at, exit_at = None, math.inf, math.inf
        while True:
            wait = min(raise_at, exit_at) - time.monotonic()
            if self._flag is not None:
                wait = min(wait, _LOOK_S)
            numbers = b""
            if select.select([self._read], [], [], None if wait == math.inf else max(0.0, wait))[0]:
                numbers = self._read.recv(64)
                if self._flag is not None and self._outer >= 0:
                    _send(self._outer, numbers.replace(_END, b""))  # to a sweep that runs the job itself
            for number in numbers:
                if number not in _HANDLED or (first is not None and number in SAVE_AND_END):
                    continue
                if first is None and self._report is not None:
                    first = number
                    with suppress(Exception):  # stop even if nobody reads the output any more
                        self._report(self._line)
                    if number == signal.SIGTERM:
                        raise_at = time.monotonic() + _GRACE_S
                elif exit_at == math.inf:
                    first, raise_at, exit_at = number, math.inf, time.monotonic() + _GONE_S
            if _END in numbers:
                return
            now = time.monotonic()
            if now >= raise_at and self._saving:
                raise_at, self._saving = now + _SAVING_S - _GRACE_S, False
            elif now >= raise_at or (exit_at == math.inf and self._asked_at_once()):
                first, raise_at = first or signal.SIGTERM, math.inf
                self.number = self.number or signal.SIGTERM
                _terminate()
            if now >= exit_at:
                print("rlox: stopped at once; what was saved before is kept", file=sys.stderr, flush=True)
                os._exit(128 + (first or signal.SIGTERM))

    def _asked_at_once(self) -> bool:
        try:
            return (
                self._flag is not None
                and run_files.read_bytes(self._flag.parent, self._flag.name, len(AT_ONCE)) == AT_ONCE.encode()
            )
        except (OSError, ValueError):
            return False


def _send(descriptor: int, data: bytes) -> None:
    if os.name == "nt":  # where the number of a socket is no file descriptor
        outer = socket.socket(fileno=descriptor)
        outer.send(data)
        outer.detach()
    else:
        os.write(descriptor, data)


def _terminate() -> None:
    """Send SIGTERM to this process, so that its handler runs in the main thread."""
    if os.name == "nt":  # where os.kill would end the process at once
        _thread.interrupt_main(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def _in_child() -> None:
    # A signal to a forked child must not reach its parent, whose socket it shares.
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_in_child)

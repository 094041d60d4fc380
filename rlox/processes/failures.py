"""Exceptions from code outside rlox: which call raised them, stored on the exception itself.

The library raises the user's exception, with its own type, and adds a note that names the environment, reward, callback
or worker. The command line prints this note and the frames of the user's code, from the record that is stored here.
"""

from __future__ import annotations

import contextlib
import io
import opcode
import pickle
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, TracebackType
from typing import Any, ClassVar, NamedTuple, NoReturn

from rlox.config import shown

_NAME = "__rlox_failure__"
_RAISES = {opcode.opmap["RAISE_VARARGS"], opcode.opmap["RERAISE"]}


class Frame(NamedTuple):
    """One line of a traceback."""

    file: str
    line: int
    function: str
    source: str  # the stripped line; empty if the file cannot be read
    module: str  # first part of the module's name


class Diverged(FloatingPointError):
    """The policy's outputs are no longer finite, so its weights are useless."""


@dataclass
class Failure:
    """Information about an exception in addition to its type and message."""

    what: str = ""  # the call that raised it: "environment 3 (Mine-v0): step 7 of its episode"; empty: unknown
    frames: list[Frame] = field(default_factory=list)  # frames in another process, outermost first
    trace: str = ""  # the same frames as Python prints them
    running: bool = False  # whether a training had begun
    saved: str = ""  # what the training had saved before
    file: str = ""  # file with the whole traceback


def failure_of(e: BaseException) -> Failure:
    """Return the `Failure` stored on `e`; it is created on demand."""
    failure = getattr(e, _NAME, None)
    if failure is None:
        failure = Failure()
        setattr(e, _NAME, failure)
    return failure


def note_cause(e: BaseException, what: str) -> None:
    """Store on `e`, also as a note, which call of the user's code raised it. Only the first call counts."""
    failure = failure_of(e)
    if not failure.what:
        failure.what = what
        add_note(e, f"rlox: {what} failed")


def add_note(e: BaseException, note: str) -> None:
    """Add a note like ``e.add_note``. Python 3.10 has no such method and does not print notes, but they can be read."""
    if sys.version_info >= (3, 11):
        e.add_note(note)
    else:
        e.__notes__ = [*getattr(e, "__notes__", []), note]  # type: ignore[attr-defined]


def frames_of(trace: TracebackType | None) -> list[Frame]:
    """Return the frames of a traceback, outermost first."""
    modules = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in traceback.walk_tb(trace)]
    return [
        Frame(item.filename, item.lineno or 0, item.name, item.line or "", module)
        for item, module in zip(traceback.extract_tb(trace), modules, strict=True)
    ]


def is_raised(e: BaseException) -> bool:
    """Return whether a ``raise`` statement raised `e`. Ctrl-C and errors of Python itself have none."""
    last = e.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    code = b"" if last is None else last.tb_frame.f_code.co_code  # empty for compiled code
    return bool(code) and last is not None and code[last.tb_lasti] in _RAISES


def require_exception(e: BaseException, who: str, what: str = "") -> None:
    """Raise a RuntimeError from `e` if `e` would end the process, although it is neither Ctrl-C nor SIGTERM.

    Code outside rlox must not do that with SystemExit, GeneratorExit, a KeyboardInterrupt of its own or another
    BaseException: the command could end with exit code 0, and nothing would say what happened. `who` starts the message
    (``GymVecEnv: Mine-v0: the environment``), `what` is the call, for `note_cause`.
    """
    interrupts = isinstance(e, KeyboardInterrupt) and not (type(e) is KeyboardInterrupt and is_raised(e))
    if isinstance(e, Exception) or interrupts:
        return
    ended = RuntimeError(f"{who} must not end the process, got {shown(e)}")
    if what:
        note_cause(ended, what)
    raise ended from e


@contextlib.contextmanager
def no_exit(who: str, what: str = "") -> Iterator[None]:
    """Call `require_exception` for an exception that is raised in the block."""
    try:
        yield
    except BaseException as e:
        require_exception(e, who, what)
        raise


def dumps(value: Any) -> bytes:
    """Pickle `value` with cloudpickle for another process, and keep the file names of its functions.

    cloudpickle 3.1.3 drops them, and a traceback from the other process would then show no line of the user's code.
    """
    import cloudpickle

    table = cloudpickle.Pickler.dispatch_table

    def reduce(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
        return _make_code, (*table[CodeType](code), code.co_filename)

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar = ChainMap({CodeType: reduce}, table)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _make_code(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class WorkerTraceback(Exception):
    """The traceback of an exception in another process, as printed there; the cause of the one raised in the parent."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_exception(e: BaseException) -> tuple[bytes | None, str, str, list[Frame], str]:
    """Return the arguments of `raise_packed`, with which the parent raises `e`; see also `require_exception`."""
    try:
        require_exception(e, "an environment")
    except RuntimeError as ended:
        e = ended
    try:
        # A class from the parent's main script is pickled by value, and becomes the same class again in the parent.
        sent = dumps(e)
        pickle.loads(sent)
    except Exception:  # such as classes whose constructors need other arguments than the message
        sent = None
    frames = frames_of(e.__traceback__)
    if e.__cause__ is not None:
        frames = [*frames_of(e.__cause__.__traceback__), *frames]
    trace = "".join(traceback.format_exception(e))
    return sent, f"{type(e).__name__}: {e}", failure_of(e).what, frames, trace


def raise_packed(sent: bytes | None, message: str, what: str, frames: list[Frame], trace: str) -> NoReturn:
    """Raise an exception that another process packed with `pack_exception`."""
    try:
        e = RuntimeError(message) if sent is None else pickle.loads(sent)
    except Exception:  # the user's class may not be importable here
        e = RuntimeError(message)
    failure = failure_of(e)
    failure.frames, failure.trace = frames, trace
    if what:
        note_cause(e, what)
    raise e from WorkerTraceback(trace)

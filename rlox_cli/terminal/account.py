"""What is printed for an exception, and the exit code.

There are three kinds of exceptions, by where they were raised:

- an error that rlox raises on purpose, or that the machine causes, is printed as one paragraph;
- an exception from the user's code (an environment, a reward, a policy, a wrapper, a callback) is printed as one line
  that says what failed and where, with the frames of that code;
- anything else is a bug in rlox and is printed with its whole traceback.

Exit codes: 2 if what was typed, or a file that it names, is wrong; 1 if something outside failed: a training, the code
of the user, the system, a server; 128 + signal after a signal (docs/guides/command-line.md).
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType

from rlox.checkpoint import run_files
from rlox.config import shown
from rlox.processes.failures import Failure, Frame, failure_of, frames_of, is_raised
from rlox_cli.terminal import paths
from rlox_cli.terminal.errors import Stopped, UsageError

TRACEBACK = "traceback.txt"  # in a run's folder: its last failure

_OURS = ("rlox", "rlox_cli")
_OUR_FOLDERS = tuple(str(Path(__file__).resolve().parents[1].with_name(name)) + os.sep for name in _OURS)
# Errors caused by the machine and not by a program. Libraries raise them too, without wrapping them.
_MACHINE = (OSError, MemoryError, ImportError)
# Types of the errors about wrong input, in contrast to failures while running.
_REFUSED = (ValueError, TypeError, ImportError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Frames of these libraries do not help the author of an environment.
_LIBRARIES = {
    *("gymnasium", "numpy", "scipy", "torch", "ale_py", "envpool", "cloudpickle", "joblib", "optuna", "minari", "ray"),
    *("hydra", "omegaconf", "antlr4", "typer", "click", "rich", "yaml", "safetensors", "pyarrow", "h5py"),
    *("mlflow", "wandb", "tensorboard", "matplotlib", "plotly", "sqlalchemy", "PIL", "imageio", "imageio_ffmpeg"),
    *(
        "transformers",
        "huggingface_hub",
        "tokenizers",
        "peft",
        "accelerate",
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "requests",
        "urllib3",
    ),
}
# Extras of rlox, by the packages that they install.
_EXTRAS = {
    **dict.fromkeys(("transformers", "tokenizers", "peft"), "llm"),
    **dict.fromkeys(("pettingzoo", "mpe2"), "multi-agent"),
    **{name: name for name in ("minari", "mlflow", "optuna", "ray", "tensorboard", "wandb")},
    **{"matplotlib": "plot", "pyarrow": "arrow", "h5py": "hdf5", "grpc": "distributed", "huggingface_hub": "hub"},
}
# Functions of the library whose messages begin with their names, which say nothing to whoever typed a command.
_FUNCTIONS = ("collect", "evaluate", "export", "load_checkpoint", "train")
_MOST_FRAMES = 3
_LONGEST = 2000  # characters of a message, or of a line of a traceback, that are printed or recorded


def paragraph(e: BaseException) -> str:
    """Return the message of `e` as one paragraph; for an OSError, with the name of the file, and for a missing package,
    with the command that installs it."""
    text = _text(e)
    package = (e.name or "").partition(".")[0] if isinstance(e, ImportError) else ""
    if package in _EXTRAS and "rlox-cli[" not in text:
        text = f'{text}; pip install "rlox-cli[{_EXTRAS[package]}]"'
    if isinstance(e, OSError) and e.strerror:
        text = f"{e.strerror}: {e.filename}" if e.filename else e.strerror
    return _cut(" ".join(text.split())) or type(e).__name__


def _text(e: BaseException) -> str:
    try:
        return str(e)
    except Exception:  # a broken __str__
        return ""


def _cut(text: str) -> str:
    """Return `text` with at most `_LONGEST` characters, and how many there were."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def headline(e: BaseException) -> str:
    """Return one line: what went wrong, and in which call of the user's code if it was raised there."""
    if is_refusal(e):
        return paragraph(e)
    text = f"{type(e).__name__}: {paragraph(e)}" if _text(e) else type(e).__name__
    what, frames = _user_call(e), _user_frames(e)
    if not what and frames:
        what = f"{frames[-1].function} in {Path(frames[-1].file).name}, line {frames[-1].line},"
    if what:
        return f"{what} failed with {text}"
    return paragraph(e) if _is_of_machine(e) else text


def summary(e: BaseException) -> str:
    """Return `headline` and the last line of the user's code that was reached, for a table or a row of a file."""
    frames = _user_frames(e)
    return headline(e) + (f" ({frames[-1].file}, line {frames[-1].line})" if frames else "")


def format_failure(verb: str, e: BaseException, rank: int = 0) -> str:
    """Return what ``rlox VERB`` prints for `e`: its name, that of a process other than the first one, and `account`."""
    text = account(e)
    where, colon, rest = text.partition(": ")
    who = f"rank {rank}: " if rank else ""
    return f"rlox {verb}: {who}{rest if colon and where in _FUNCTIONS else text}"


def account(e: BaseException) -> str:
    """Return the text to print for `e`: a paragraph, a line with frames of the user's code, or the whole traceback."""
    failure = _store_failure(e)
    if not is_of_user(e):
        text = f"{headline(e)}. {failure.saved}" if failure.saved else headline(e)
        if is_explained(e):
            return text
        also = f"; it is also in {failure.file}" if failure.file else ""
        if replaced := _replaced():
            where = failure.file or "set RLOX_TRACEBACK=1 to print it"
            return f"{text}\n  code outside rlox has replaced {replaced}, which rlox needs\n  whole traceback: {where}"
        trace = "".join(map(_cut, traceback.format_exception(e)))
        return (
            f"{trace}{text}\nThis is a bug in rlox, not in what you typed: please "
            f"report it with the traceback above{also}"
        )
    lines = [headline(e)]
    for frame in _user_frames(e)[-_MOST_FRAMES:]:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.source:
            lines.append(f"    {frame.source}")
    lines.append(f"  whole traceback: {failure.file or 'set RLOX_TRACEBACK=1 to print it'}")
    if failure.saved:
        lines.append(f"  {failure.saved}")
    return "\n".join(lines)


def _replaced() -> str:
    """Return a function that everybody needs and that the user's code has replaced, and by what; empty if none."""
    clocks = ((f"time.{name}", getattr(time, name)) for name in ("perf_counter", "monotonic", "time", "sleep"))
    for name, value in (("sys.excepthook", sys.excepthook), *clocks):
        if not (callable(value) if name == "sys.excepthook" else isinstance(value, BuiltinFunctionType)):
            return f"{name} by {shown(value)}"
    return ""


def exit_code(e: BaseException) -> int:
    """Return 2 for wrong input, 1 for a failure while running."""
    if _store_failure(e).running or is_of_user(e):
        return 1
    if isinstance(e, OSError) and e.errno == errno.ENAMETOOLONG:
        return 2  # no system has such a file
    return 2 if isinstance(e, UsageError) or (is_refusal(e) and isinstance(e, _REFUSED)) else 1


def keep_traceback(e: BaseException, folder: Path) -> str | None:
    """Write the whole traceback into `folder` if a paragraph does not contain everything.

    Return the name of the file, or None if nothing was written.
    """
    if isinstance(e, (KeyboardInterrupt, Stopped)) or (is_explained(e) and not is_of_user(e)):
        return None
    failure = failure_of(e)
    if not failure.file:
        with suppress(OSError):
            with run_files.replace_file(folder, TRACEBACK) as file:
                file.write("".join(traceback.format_exception(e)).encode("utf-8", "replace"))
            failure.file = paths.shown(folder / TRACEBACK)
    return TRACEBACK if failure.file else None


def is_explained(e: BaseException) -> bool:
    """Return whether `e` is not a bug in rlox: its message, or the user's frames, say what to do about it."""
    return is_refusal(e) or _is_of_machine(e) or is_of_user(e)


def is_of_user(e: BaseException) -> bool:
    """Return whether `e` was raised in an environment, a reward or other code outside rlox."""
    return bool(_user_call(e) or _user_frames(e))


def is_refusal(e: BaseException) -> bool:
    """Return whether rlox raised `e` on purpose: with its own ``raise``, or in a kernel.

    An exception that Python raises because of a mistake in rlox does not count.
    """
    if isinstance(e, UsageError):
        return True
    if there := failure_of(e).frames:
        return _is_ours(there[-1])
    frames = frames_of(e.__traceback__)
    if not frames or not _is_ours(frames[-1]):
        return False
    # A kernel's frame has no bytecode to inspect.
    return frames[-1].file.endswith((".pyx", ".pxd")) or is_raised(e)


def _chain(e: BaseException | None) -> Iterator[BaseException]:
    """Yield `e` and the exceptions it was raised from or during. Each comes once, since causes can form a cycle."""
    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        yield e
        e = e.__cause__ if e.__cause__ is not None or e.__suppress_context__ else e.__context__


def _store_failure(e: BaseException) -> Failure:
    """Return the `Failure` stored on `e`, or on an exception that it was raised from."""
    return next((f for f in map(failure_of, _chain(e)) if f.running or f.file or f.saved), failure_of(e))


def _user_call(e: BaseException) -> str:
    """Return the call of the user's code that raised `e`; empty if none is known."""
    return next((what for cause in _chain(e) if (what := failure_of(cause).what)), "")


def _user_frames(e: BaseException) -> list[Frame]:
    """Return the frames of the user's code. For an environment from a library, return that library's last frame."""
    inside = [_frames_inside(cause) for cause in _chain(e)]
    for frames in inside:
        if own := [f for f in frames if f.module not in _LIBRARIES and f.module not in sys.stdlib_module_names]:
            return own
    return inside[0][-1:] if _user_call(e) and not is_refusal(e) else []


def _frames_inside(e: BaseException) -> list[Frame]:
    """Return the frames below rlox's first one, without those of rlox."""
    frames = [*frames_of(e.__traceback__), *failure_of(e).frames]
    # The code that called rlox is not involved.
    entered = next((i for i, frame in enumerate(frames) if _is_ours(frame)), 0)
    return [frame for frame in frames[entered:] if not _is_ours(frame) and not frame.file.startswith("<")]


def _is_of_machine(e: BaseException) -> bool:
    # torch.OutOfMemoryError is a RuntimeError; compared by name, so that torch need not be imported.
    return isinstance(e, _MACHINE) or type(e).__name__ == "OutOfMemoryError"


def _is_ours(frame: Frame) -> bool:
    return frame.module in _OURS or os.path.realpath(frame.file).startswith(_OUR_FOLDERS)

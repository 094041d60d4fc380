"""Exceptions from code outside rlox: which call raised them, stored on the exception itself.

The library raises the user's exception, with its own type, and adds a note that names the environment, reward, callback
or worker. The command line prints this note and the frames of the user's code, from the record that is stored here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import opcode
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, TracebackType
from typing import Any, ClassVar, NamedTuple

import numpy as np

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
    found = getattr(e, _NAME, None)
    if found is None:
        found = Failure()
        setattr(e, _NAME, found)
    return found


def note_cause(e: BaseException, what: str) -> None:
    """Store on `e`, also as a note, which call of the user's code raised it. Only the first call counts."""
    found = failure_of(e)
    if not found.what:
        found.what = what
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
    BaseException: the command could end with exit code 0, and nothing would say what happened.

    Parameters
    ----------
    who : str
        The start of the message, such as ``GymVecEnv: Mine-v0: the environment``.
    what : str
        The call, for `note_cause`.
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


UNANSWERED = object()  # stands for the answer if ``reset`` or ``step`` did not return
NO_ANSWERS = frozenset(
    (str, bytes, np.str_, type(None))
)  # types that `float` or `bool` would accept as a reward or flag


def wrong_answer(env: Any, hook: str, answer: Any) -> str | None:
    """Return what is wrong with the answer of ``env.reset`` or ``env.step``, and the remedy; None if it is correct."""
    if hook == "reset":
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            return f"reset must return (observation, info), got {described(answer)}; return {{}} if there is no info"
        return wrong_observation(env.observation_space, answer[0])
    if not (isinstance(answer, tuple) and len(answer) == 5):
        old = "; this is the form of old gym: split done into terminated (by the task) and truncated (by a time limit)"
        return (
            f"step must return (observation, reward, terminated, truncated, info), got {described(answer)}"
            f"{old if isinstance(answer, tuple) and len(answer) == 4 else ''}"
        )
    obs, reward, *flags, _ = answer
    if (wrong := wrong_observation(env.observation_space, obs)) is not None:
        return wrong
    try:
        if type(reward) in NO_ANSWERS:
            raise TypeError("a string is not a number")
        float(reward)
    except OverflowError:
        return f"the reward must fit a float, got an integer of {reward.bit_length():,} bits"
    except (TypeError, ValueError):
        return f"the reward must be a number, got {described(reward)}"
    for name, flag in zip(("terminated", "truncated"), flags, strict=True):
        if np.shape(flag) != () or not isinstance(flag, (bool, np.bool_, int, np.integer, np.ndarray)):
            return f"{name} must be a bool, got {described(flag)}"
    return None


def require_separate(envs: Sequence[Any], where: str) -> None:
    """Raise ValueError if two of `envs`, which are stepped independently, are the same object."""
    if len({id(getattr(env, "unwrapped", env)) for env in envs}) < len(envs):
        raise ValueError(
            f"{where}: each call must create an environment of its own, got the same object again; create it inside of "
            "the function: lambda: MyEnv(), not lambda: env"
        )


def wrong_observation(space: Any, obs: Any, name: str = "observations") -> str | None:
    """Return how `obs` differs from `space` in structure, shape or kind of number. Bounds are not checked."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        is_dict = isinstance(space, spaces.Dict)
        keys = list(space.spaces) if is_dict else list(range(len(space.spaces)))
        if not isinstance(obs, Mapping if is_dict else (tuple, list)):
            return f"{name} must be a {'dict' if is_dict else 'tuple'} of {keys}, got {described(obs)}"
        if missing := [key for key in keys if (key not in obs if is_dict else key >= len(obs))]:
            return f"{name} must have the part {missing[0]!r} of observation_space, got {list(obs) if is_dict else obs}"
        parts = (wrong_observation(space[key], obs[key], f"{name}[{key!r}]") for key in keys)
        return next(filter(None, parts), None)
    if isinstance(space, spaces.Box):
        try:
            array = np.asarray(obs)
        except ValueError:
            return f"{name} must be one array of shape {space.shape}, got {described(obs)}"
        if array.dtype.kind not in "fiub":
            return f"{name} must be numbers, got {described(obs)} of dtype {array.dtype}"
        if array.shape != space.shape:
            return f"{name} must have the shape of observation_space, {space.shape}, got {array.shape}"
        if space.dtype == np.uint8 and array.dtype.kind == "f":
            return f"{name} must be of dtype uint8, as observation_space says, got {array.dtype}"
        return None
    return None if space.contains(obs) else f"{name} must be in observation_space, {space}, got {str(obs)[:80]}"


def described(answer: Any) -> str:
    """Describe the type, and the length or shape, of an answer."""
    if isinstance(answer, tuple):
        return f"a tuple of {len(answer)}"
    return f"{type(answer).__name__}{' of shape ' + str(answer.shape) if isinstance(answer, np.ndarray) else ''}"


def explain_env_failure(
    e: BaseException, env: Any, hook: str, answer: Any, where: str, what: str, when: str = "", action: Any = None
) -> None:
    """Store on `e` which environment raised it; if the environment's answer is wrong, raise a ValueError from `e`.

    An environment must not end the process: see `require_exception`.

    Parameters
    ----------
    e : BaseException
        The exception from a call of ``reset`` or ``step``, or from using its answer.
    env : gymnasium.Env
        The environment with all its wrappers.
    hook : str
        ``reset`` or ``step``.
    answer : Any
        The return value; `UNANSWERED` if the call did not return.
    where, what, when : str
        The start of error messages; the call and its environment; its step.
    action : Any
        The action that ``step`` was called with.
    """
    what_and_when = f"{what} {when}".strip()
    require_exception(e, f"{where}: the environment", what_and_when)
    if not isinstance(e, Exception):
        return  # Ctrl-C
    raiser = frames_of(e.__traceback__)[-1].module
    if failure_of(e).what or (answer is UNANSWERED and raiser == "rlox"):
        return
    if answer is UNANSWERED and raiser == "gymnasium":
        # A gymnasium wrapper failed on an answer that is not visible here: repeat the call without the wrappers.
        bare = env.unwrapped
        with contextlib.suppress(Exception):
            answer = bare.reset(seed=None) if hook == "reset" else bare.step(action)
    if answer is UNANSWERED:
        note_cause(e, what_and_when)
        return
    wrong = wrong_answer(env.unwrapped, hook, answer) or wrong_answer(env, hook, answer)
    if wrong is not None:
        error = ValueError(f"{where}: {wrong} ({what}{_place(env, hook)})")
        note_cause(error, what)
        raise error from e


def _place(env: Any, hook: str) -> str:
    """Return where the innermost environment defines ``reset`` or ``step``; empty if unknown."""
    method: Any = getattr(type(env.unwrapped), hook, None)
    try:
        return f" at {inspect.getsourcefile(method)}, line {inspect.getsourcelines(method)[1]}"
    except (OSError, TypeError):
        return ""


def dumps(value: Any) -> bytes:
    """Pickle `value` with cloudpickle for another process, and keep the file names of its functions.

    cloudpickle 3.1.3 drops them, and a traceback from the other process would then show no line of the user's code.
    """
    with io.BytesIO() as file:
        _pickler()(file).dump(value)
        return file.getvalue()


@functools.cache
def _pickler() -> type:
    import cloudpickle

    table = cloudpickle.Pickler.dispatch_table
    reduced = table[CodeType]

    def reduce(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
        make, arguments = reduced(code)
        return _in_file, (make, arguments, code.co_filename)

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar = ChainMap({CodeType: reduce}, table)

    return Pickler


def _in_file(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)

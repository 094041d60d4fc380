"""What is wrong with the answer of an environment's ``reset`` or ``step``, in words."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlox.processes.failures import failure_of, frames_of, note_cause, require_exception

UNANSWERED = object()  # stands for the answer if ``reset`` or ``step`` did not return
# Types that `float` or `bool` would accept as a reward or flag.
NO_ANSWERS = frozenset((str, bytes, np.str_, type(None)))


def wrong_answer(env: Any, hook: str, answer: Any) -> str | None:
    """Return what is wrong with the answer of ``env.reset`` or ``env.step``, and the remedy; None if it is correct."""
    if hook == "reset":
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            return (
                f"reset must return (observation, info), got {describe_answer(answer)}; return {{}} if there is no info"
            )
        return wrong_observation(env.observation_space, answer[0])
    if not (isinstance(answer, tuple) and len(answer) == 5):
        old = "; this is the form of old gym: split done into terminated (by the task) and truncated (by a time limit)"
        return (
            f"step must return (observation, reward, terminated, truncated, info), got {describe_answer(answer)}"
            f"{old if isinstance(answer, tuple) and len(answer) == 4 else ''}"
        )
    obs, reward, *flags, info = answer
    if not isinstance(info, dict):
        return f"step must return info as a dict, got {describe_answer(info)}; return {{}} if there is no info"
    if (wrong := wrong_observation(env.observation_space, obs)) is not None:
        return wrong
    return wrong_numbers({"the reward": reward}, dict(zip(("terminated", "truncated"), flags, strict=True)))


def wrong_numbers(rewards: Mapping[str, Any], flags: Mapping[str, Any]) -> str | None:
    """Return which of the rewards is no number, or which of the flags no bool; None if all are valid."""
    for name, reward in rewards.items():
        try:
            if type(reward) in NO_ANSWERS:
                raise TypeError("a string is not a number")
            float(reward)
        except OverflowError:
            return f"{name} must fit a float, got an integer of {reward.bit_length():,} bits"
        except (TypeError, ValueError):
            return f"{name} must be a number, got {describe_answer(reward)}"
    for name, flag in flags.items():
        if np.shape(flag) != () or not isinstance(flag, (bool, np.bool_, int, np.integer, np.ndarray)):
            return f"{name} must be a bool, got {describe_answer(flag)}"
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
            return f"{name} must be a {'dict' if is_dict else 'tuple'} of {keys}, got {describe_answer(obs)}"
        if missing := [key for key in keys if (key not in obs if is_dict else key >= len(obs))]:
            return f"{name} must have the part {missing[0]!r} of observation_space, got {list(obs) if is_dict else obs}"
        parts = (wrong_observation(space[key], obs[key], f"{name}[{key!r}]") for key in keys)
        return next(filter(None, parts), None)
    if isinstance(space, spaces.Box):
        try:
            array = np.asarray(obs)
        except ValueError:
            return f"{name} must be one array of shape {space.shape}, got {describe_answer(obs)}"
        if array.dtype.kind not in "fiub":
            return f"{name} must be numbers, got {describe_answer(obs)} of dtype {array.dtype}"
        if array.shape != space.shape:
            return f"{name} must have the shape of observation_space, {space.shape}, got {array.shape}"
        if space.dtype == np.uint8 and array.dtype.kind == "f":
            return f"{name} must be of dtype uint8, as observation_space says, got {array.dtype}"
        return None
    return None if space.contains(obs) else f"{name} must be in observation_space, {space}, got {str(obs)[:80]}"


def describe_answer(answer: Any) -> str:
    """Describe the type, and the length or shape, of an answer."""
    if isinstance(answer, tuple):
        return f"a tuple of {len(answer)}"
    return f"{type(answer).__name__}{' of shape ' + str(answer.shape) if isinstance(answer, np.ndarray) else ''}"


def explain_env_failure(
    e: BaseException, env: Any, hook: str, answer: Any, where: str, what: str, when: str = "", action: Any = None
) -> None:
    """Store on `e` which environment raised it; if the environment's answer is wrong, raise a ValueError from `e`.

    The call of ``reset`` or ``step`` (`hook`) returned `answer`, or `UNANSWERED`. Messages start with `where`; `what`
    is the call and its environment, `when` its step. An environment must not end the process: see `require_exception`.
    """
    what_and_when = f"{what} {when}".strip()
    require_exception(e, f"{where}: the environment", what_and_when)
    if not isinstance(e, Exception):
        return  # Ctrl-C
    raiser = frames_of(e.__traceback__)[-1].module
    if failure_of(e).what or (answer is UNANSWERED and raiser == "rlox"):
        return
    hidden = answer is UNANSWERED
    if hidden and raiser == "gymnasium":
        # A gymnasium wrapper failed on an answer that is not visible here: repeat the call without the wrappers.
        bare = env.unwrapped
        with contextlib.suppress(Exception):
            answer = bare.reset(seed=None) if hook == "reset" else bare.step(action)
    if answer is not UNANSWERED and (
        wrong := wrong_answer(env.unwrapped, hook, answer) or wrong_answer(env, hook, answer)
    ):
        error = ValueError(f"{where}: {wrong} ({what}{_place(env, hook)})")
        note_cause(error, what)
        raise error from e
    if hidden:
        note_cause(e, what_and_when)


def _place(env: Any, hook: str) -> str:
    """Return where the innermost environment defines ``reset`` or ``step``; empty if unknown."""
    method: Any = getattr(type(env.unwrapped), hook, None)
    try:
        return f" at {inspect.getsourcefile(method)}, line {inspect.getsourcelines(method)[1]}"
    except (OSError, TypeError):
        return ""

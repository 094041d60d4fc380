"""Construction of an agent from a checkpoint, and the checks before it: a file must not choose what runs, or how large
it is."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlox.checkpoint import Checkpoint, find_lost, load_checkpoint, one_line
from rlox.checkpoint.shapes import weight_shapes
from rlox.config import shown
from rlox.envs.registry import find_module
from rlox.kernels.envs import NATIVE_ENVS
from rlox.nn.modules import out_of_memory

# Largest numbers of environments, and of processes for them, that a file may request by itself.
_MOST_NATIVE_ENVS, _MOST_ENVS, _MOST_WORKERS = 65_536, 1_024, 64


@contextmanager
def explained(
    what: str,
    arguments: Collection[str] = (),
    kinds: tuple[type[Exception], ...] = (
        ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
    ),
) -> Iterator[None]:  # fmt: skip
    """Raise errors of these `kinds` as ValueError, in one line that begins with `what`.

    A TypeError stays one if the caller's `arguments` may have caused it; a full memory of a device stays as it is.
    """
    try:
        yield
    except kinds as e:
        if out_of_memory(e):
            raise
        kind = TypeError if arguments and isinstance(e, TypeError) else ValueError
        raise kind(f"{what}: {one_line(e, 1000)}") from e


def restore_agent(
    cls: Any,
    path: str | os.PathLike,
    env_id: Any,
    policy: Any,
    backend: str | None,
    reward_fn: Any,
    env_wrappers: Sequence[Any] | None,
    env_backend: str | None,
    arguments: dict[str, Any],
) -> Any:
    """Restore an algorithm of the class `cls`; arguments and errors as of `rlox.training.Agent.from_checkpoint`."""
    where, checkpoint = f"{cls.__name__}.from_checkpoint", load_checkpoint(path)
    header, env = checkpoint.header, checkpoint.header["env"]
    env_kwargs = complete_kwargs(where, path, env["kwargs"], arguments)
    refuse_fixed(cls, where, arguments)
    require_algorithm(cls, header, path)
    require_acting_header(cls, where, path, checkpoint, env_id, policy, env_wrappers, other_env=arguments.get("env_fn"))
    saved_reward = header.get("reward_fn")
    if reward_fn is None and saved_reward and saved_reward.startswith("rlox:"):
        reward_fn = saved_reward.removeprefix("rlox:")
    agent = cls.__new__(cls)
    agent._expect_shapes(weight_shapes(checkpoint))
    own = arguments.keys() - {"logger", "callbacks", "device"}
    with explained(f"{where}: {path}", own, (MemoryError, TypeError, ValueError)):
        agent.__init__(
            env["id"] if env_id is None else env_id,
            policy=policy,
            reward_fn=reward_fn,
            **{
                "n_envs": env["n_envs"],
                "seed": header["seed"],
                "threads": header["threads"],
                "env_kwargs": env_kwargs,
                "env_workers": env["workers"],
                **({} if "config" in arguments else header["config"]),
                **cls._saved_arguments(header, arguments),
                "backend": choose_saved_backend(header, arguments["device"]) if backend is None else backend,
                "env_backend": env.get("backend", "auto") if env_backend is None else env_backend,
                "env_wrappers": env["wrappers"] if env_wrappers is None else list(env_wrappers),
                **arguments,
            },
        )
    agent._resume(checkpoint, path, None if reward_fn is not None else saved_reward, env_id)
    return agent


def refuse_fixed(cls: type, where: str, arguments: dict[str, Any]) -> None:
    """Raise TypeError for arguments that must be the checkpoint's."""
    if fixed := {"n_envs", "seed"} & arguments.keys():
        raise TypeError(
            f"{where}: {min(fixed)} must be the checkpoint's, got {shown(arguments[min(fixed)])}; leave it out, or "
            f"create a new {cls.__name__} and call init_from(path)"
        )


def require_acting_header(
    cls: Any,
    where: str,
    path: str | os.PathLike,
    checkpoint: Checkpoint,
    env_id: Any,
    policy: Any,
    env_wrappers: Any,
    other_env: Any,
) -> None:
    """Raise ValueError unless the environments and networks that a header describes may and can be created.

    `other_env` is an environment that replaces the header's, like `env_id`.
    """
    header = checkpoint.header
    if header["policy"] == "custom" and policy is None:
        raise ValueError(f"{where}: {path} contains a custom policy; pass policy=YourPolicy(...)")
    if header["env"]["id"] is None:
        raise ValueError(f"{where}: {path} is damaged: env must have an id")
    require_no_code(where, path, header["env"], env_id or other_env, env_wrappers)
    _require_counts(checkpoint, f"{where}: {path}", trusted=env_id is not None)
    with explained(f"{where}: {path} is damaged", kinds=(TypeError, ValueError)):
        cls.Config.from_kwargs(cls.__name__, **header["config"])


def complete_kwargs(
    where: str, path: str | os.PathLike, kwargs: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the environment's saved `kwargs`, completed by those that no file can contain, from `arguments`.

    Removes ``env_kwargs`` from `arguments`. Raises TypeError if it contains others, and ValueError if one is missing.
    """
    lost = {name: text for name, value in kwargs.items() if (text := find_lost(value)) is not None}
    own = arguments.pop("env_kwargs", None) or {}
    if extra := own.keys() - lost.keys():
        raise TypeError(
            f"{where}: env_kwargs must be the checkpoint's, got {min(extra)}={shown(own[min(extra)])}; leave it out, "
            "or create a new algorithm and call init_from(path)"
        )
    if missing := lost.keys() - own.keys():
        name = min(missing)
        raise ValueError(
            f"{where}: {path} cannot contain the value of env_kwargs[{name!r}], {one_line(lost[name], 80)}; pass "
            f"env_kwargs={{{', '.join(f'{name!r}: ...' for name in sorted(lost))}}}"
        )
    return {**kwargs, **own}


def require_algorithm(cls: type[Any], header: dict[str, Any], path: str | os.PathLike) -> None:
    """Raise ValueError if the header belongs to another algorithm than `cls`."""
    if header["algorithm"] != cls.name:
        raise ValueError(f"{cls.__name__}.from_checkpoint: {path} must contain {cls.name}, got {header['algorithm']}")


def choose_saved_backend(header: dict[str, Any], device: str) -> str:
    """Return the backend with which to continue: a native training stays native if that is exact."""
    # A file without a backend was trained with PyTorch, before there was a choice.
    return "auto" if device != "cuda" and header.get("backend") == "native" else "torch"


def _require_counts(checkpoint: Checkpoint, where: str, trusted: bool) -> None:
    """Raise ValueError if a header requests more environments than its tensors, or the limits for files, allow."""
    env, saved = checkpoint.header["env"], checkpoint.tensors["environment"].get("keys")
    n, workers = env["n_envs"], env["workers"]
    statistics = checkpoint.tensors["statistics"]
    for name in ("episode_returns", "episode_lengths"):
        if name not in statistics or statistics[name].ndim != 1:
            raise ValueError(f"{where} is damaged: {name} must have one number for each episode")
    if saved is not None and (saved.shape, saved.dtype) != ((n,), np.uint64):
        raise ValueError(f"{where} is damaged: n_envs must be that of its environments' state, {saved.shape}, got {n}")
    if trusted:
        return
    most = _MOST_ENVS if env["id"] not in NATIVE_ENVS else _MOST_NATIVE_ENVS if saved is None else n
    for name, value, bound in (("n_envs", n, most), ("workers", workers, _MOST_WORKERS)):
        if value > bound:
            raise ValueError(
                f"{where} requests {name}={value}, but a file may request at most {bound}; if you trust it, pass "
                f"env_id={env['id']!r}, or type env.n_envs={n} next to resume="
            )


def is_own_environment(env: dict[str, Any]) -> bool:
    """Return whether a header's `env` names a class or function of the user instead of an id.

    gymnasium would take a name without a version for the newest environment of that name.
    """
    if "callable" in env or not isinstance(env["id"], str) or ":" in env["id"] or re.search(r"-v\d+$", env["id"]):
        return env.get("callable", False)
    import gymnasium

    return env["id"] not in gymnasium.registry


def require_no_code(where: str, path: str | os.PathLike, env: dict[str, Any], env_id: Any, env_wrappers: Any) -> None:
    """Raise ValueError if a header's `env` would run code or write files that only the file has chosen.

    The arguments that replace them (`env_id`, `env_wrappers`) are trusted.
    """
    wrappers = env["wrappers"] if env_wrappers is None else ()
    names = [name if isinstance(name, str) else next(iter(name), "") for name in wrappers]
    if any(":" in name or "." in name for name in names):
        raise ValueError(
            f"{where}: the wrappers {names} of {path} name a module to import; if you trust it, pass env_wrappers=[...]"
        )
    if "RecordVideo" in names:
        raise ValueError(
            f"{where}: the wrapper RecordVideo of {path} writes to a folder that the file chose; if you trust it, "
            "pass env_wrappers=[...]"
        )
    if env_wrappers is None and (lost := find_lost(env["wrappers"])) is not None:
        raise ValueError(
            f"{where}: {path} cannot contain {one_line(lost, 80)}, an argument of its wrappers; pass env_wrappers=[...]"
        )
    if env_id is None and is_own_environment(env):
        raise ValueError(
            f"{where}: {path} was trained on {env['id']}, a class or function of yours; pass env_id={env['id']} "
            "(env_fn for several agents), or register it with gymnasium.register and train with its id"
        )
    # gymnasium imports the part before the colon, and a file must not choose what code runs. gymnasium's environments
    # for old gym take the id as an argument.
    for name in (env["id"], env["kwargs"].get("env_id")):
        if env_id is None and find_module(str(name)):
            raise ValueError(
                f"{where}: the environment {name} of {path} names a module to import; if you trust it, pass "
                f"env_id={env['id']!r}"
            )

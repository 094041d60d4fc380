"""What users of Stable-Baselines3, or of an earlier version of rlox, write instead of the arguments and attributes of
algorithms."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any

from rlox.config.base import nearest
from rlox.config.migration import CONTRIB, SB3, answers

POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy", "MlpLstmPolicy", "CnnLstmPolicy", "MultiInputLstmPolicy")


# Attributes of Stable-Baselines3's models, and what to write instead.
_OURS = {
    "learn": "agent.train(total_timesteps)",
    "load": "{}.from_checkpoint(path)",
    "num_timesteps": "agent.counters.env_steps",
    "get_env": "agent.collector.env",
    "set_env": "{}.from_checkpoint(path, env_id=…)",
    "get_parameters": "agent.policy.state_dict()",
    "set_parameters": "agent.init_from(path)",
}


def missing_attribute(cls: type, name: str) -> AttributeError:
    """Return the error for an attribute that `cls` and its instances lack; it names ours for one of `SB3`."""
    if name in _OURS:
        return AttributeError(
            f"{cls.__name__} has no attribute {name!r}, as in {SB3}; write {_OURS[name].format(cls.__name__)}"
        )
    return AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")


# Names of attributes until 0.12, and where they are now.
_RENAMED = {
    "act_on": "_act_on",
    "buffer_config": "_memory.config",
    "check_kernel": "backend.require_unchanged",
    "compile": "backend.compiles",
    "compiled": "backend.compiled",
    "data_parallel": "_data_parallel",
    "dataset": "_dataset",
    "env_backend": "env_options.backend",
    "env_kwargs": "env_options.kwargs",
    "env_workers": "env_options.workers",
    "env_wrappers": "env_options.wrappers",
    "evaluation_arguments": "_evaluation_arguments",
    "explore": "_explore",
    "make_noise": "_make_noise",
    "min_rows": "_min_rows",
    "parts": "_parts",
    "requested_device": "_requested_device",
    "target_entropy": "_target_entropy",
    "threads": "_threads",
    "use_kernel": "_use_kernel",
}


def warn_renamed(old: str, new: str | None, removed_in: str, stacklevel: int = 2) -> None:
    """Give a DeprecationWarning that `old`, an alias until `removed_in`, is now `new`; it names the caller's caller.

    Without `new`, the warning offers no other name.
    """
    instead = "it is no longer public" if new is None else f"use {new}"
    text = f"{old} is deprecated, and will be removed in rlox {removed_in}; {instead}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def find_renamed(owner: object, name: str) -> Any:
    """Return the attribute that `name` is called now, with a DeprecationWarning; raise AttributeError if none is."""
    if name not in _RENAMED:
        raise missing_attribute(type(owner), name)
    new = _RENAMED[name]
    value = attrgetter(new)(owner)
    warn_renamed(f"{name} of an algorithm", None if new.startswith("_") else new, "0.14.0", stacklevel=3)
    return value


class Hinting(type):
    """Metaclass of algorithms: their missing attributes are explained, without being listed by `dir`."""

    def __getattr__(cls, name: str) -> Any:
        raise missing_attribute(cls, name)


def refuse(where: str, unknown: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for the first `unknown` argument of a method; the message names the nearest `known` one."""
    for name in unknown:
        raise TypeError(f"{where}: unknown argument {name!r}; {answers(name, known) or nearest(name, known)}")


def refuse_policy_name(where: str, name: str, value: Any) -> None:
    """Raise ValueError if an argument is the name of one of Stable-Baselines3's policies."""
    if isinstance(value, str) and value in POLICIES:
        memory = ', and memory="lstm" for one with a memory' if "Lstm" in value else ""
        raise ValueError(
            f"{where}: {name} must not be {value!r}, a policy of {CONTRIB if memory else SB3}: the environment "
            "determines the networks. Write the environment first, and hidden_sizes=[64, 64] or policy=MODULE for "
            f"other networks{memory}"
        )

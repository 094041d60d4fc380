"""What users of Stable-Baselines3 write, and what to write here, for error messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rlox.config.base import nearest
from rlox.config.migration import SB3, answers

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
        raise ValueError(
            f"{where}: {name} must not be {value!r}, a policy of {SB3}: the environment determines the networks. Write "
            "the environment first, and hidden_sizes=[64, 64] or policy=MODULE for other networks"
        )

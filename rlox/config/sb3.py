"""What users of Stable-Baselines3 write, and what to write here, for error messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rlox.config.base import nearest
from rlox.config.migration import SB3, answers

POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy", "MlpLstmPolicy", "CnnLstmPolicy", "MultiInputLstmPolicy")


class Elsewhere:
    """An attribute of Stable-Baselines3's models: on a class and its instances, an AttributeError names `ours`."""

    def __init__(self, ours: str):
        self._ours = ours

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        name = owner.__name__
        raise AttributeError(f"{name} has no attribute {self._name!r}, as in {SB3}; write {self._ours.format(name)}")


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

"""Every hyper-parameter of rlox, declared once: default, meaning, check.

This module does not import PyTorch or Hydra, so that help, completion and validation are fast. ``rlox show`` prints the
trailing comment of each field. Fields are never changed after construction; derived values are properties.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import numbers
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from rlox.config.packages import import_package

SCHEDULES = ("constant", "linear")
PRECISIONS = ("auto", "float32", "bfloat16")
MATMUL_PRECISIONS = ("highest", "high", "medium")
POLICY_SCHEDULES = ("constant", "cosine")
ACTIVATIONS = ("tanh", "relu")
MEMORIES = ("none", "lstm", "gru")
MOST_MEMORY_UNITS, MOST_MEMORY_LAYERS = 8192, 16
OPTIMIZERS = ("adam", "rmsprop")
Q_LOSSES = ("huber", "mse")
DISTRIBUTIONS = ("none", "quantile", "categorical")
MOST_ATOMS = 4096
WEIGHT_NORMS = ("batch", "memory", "none")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "native", "torch")
SAMPLERS = ("vllm", "vllm-local", "sglang", "tgi")
WANDB_MODES = ("online", "offline", "disabled")
ENV_BACKENDS = ("auto", "gymnasium", "envpool", "tensor")
LARGEST_COUNT = 2**31 - 1  # of steps, epochs, rows: no training would finish with more
LARGEST_RETURN = 1_000_000_000  # above this, float32 rounds neighbouring returns to the same number
MOST_STEPS = 2**62 - 1  # of a training; kernels add to them in 64 bits
MOST_AT_ONCE = 1_000_000  # rows of one batch, steps or updates of one round, units of one layer
MOST_PROCESSES = 4096  # of one run
MOST_THREADS = 1024  # of PyTorch
LARGEST_SEED = 2**63 - 1 - 10_000  # evaluations use 10_000 + seed, which must be below 2**63
LONGEST_S = 2**31 - 1  # seconds, 68 years: libraries cannot wait for longer
MOST_NOISE = 100  # deviation of noise on actions in [-1, 1]: with this much, every action is at a bound
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127

# Search ranges of sweeps, in Hydra's grammar: those of rl-zoo3, without the values that always diverge.
LEARNING_RATES = "tag(log, interval(1e-5, 1e-2))"
DISCOUNTS = "0.9,0.95,0.98,0.99,0.995,0.999"
TRACE_DECAYS = "0.8,0.9,0.95,0.98,1.0"
ENTROPY_WEIGHTS = "tag(log, interval(1e-8, 0.1))"
TARGET_SHARES = "tag(log, interval(1e-3, 0.08))"

_MOST_LISTED = 40  # number of names in an error message


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the closest of `choices`, or the first of them in order if none is close."""
    choices = sorted(choices)
    if (close := closest(name, choices)) is not None:
        return f"did you mean {close!r}?"
    more = f", … ({len(choices):,} in all)" if len(choices) > _MOST_LISTED else ""
    return f"try one of {', '.join(choices[:_MOST_LISTED])}{more}"


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Return the closest of `choices`, or None if none is close.

    A guess must be likely: a choice with a typing error, or one that begins with `name` or has it as a part.
    """
    close = [one for one in choices if _is_close(name.lower(), one.lower())]
    # Of equal ones the last in order, which is the newest version of an environment.
    ranked = ((difflib.SequenceMatcher(None, name.lower(), one.lower()).ratio(), one) for one in close)
    return max(ranked, default=(0.0, None))[1]


def _is_close(name: str, choice: str) -> bool:
    if len(name) >= 3 and (choice.startswith(name) or name in re.split(r"[\W_]+", choice)):
        return True
    matcher = difflib.SequenceMatcher(None, name, choice)
    if matcher.quick_ratio() < 0.6:
        return False
    changes = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")
    return matcher.ratio() >= 0.75 or changes <= 1 or (changes == 2 and name[0] == choice[0])


def is_below(path: str) -> bool:
    """Whether `path` names something inside the folder it is joined to."""
    inside = not path.startswith(("/", "~")) and ".." not in path.split("/")
    return inside and bool(path.strip("./")) and "\0" not in path


# Returns the types of a dataclass's fields. Evaluating the annotations takes longer than all checks.
types_of: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether `value` has the annotated type. An int counts as a float; a bool never counts as a number."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_is_a(value, arg) for arg in args)
    if kind is type(None):
        return value is None
    if origin is list:
        return isinstance(value, (list, tuple)) and all(_is_a(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


# What is before the last @ of a host: a password after a user, or a token alone. And up to a later @, a password that
# contains / ? or #, unless it looks like a port.
_PASSWORD = re.compile(
    r"(\w+://(?:[^/?#\s:]*:(?=[^/?#\s]+@))?)[^/?#\s]+@|(\w+://[^/?#\s:@\[]*:)(?!\d+(?:[/?#\s'\"]|$))[^\s@]+@"
)
HIDDEN = "***"


def masked(text: str) -> str:
    """Return `text` with ``***`` for the passwords and tokens in its URLs, for everything that is printed or stored."""
    return _PASSWORD.sub(rf"\1\2{HIDDEN}@", text)


def shown(value: Any) -> str:
    """Format `value` for a message: one line of at most 200 characters, without passwords."""
    try:
        text = masked(" ".join(repr(value).split()))
    except Exception:  # an integer of more digits than Python prints, or a broken __repr__
        text = f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= 200 else f"{text[:197]}..."


def require(where: str, name: str, value: Any, kind: Any) -> None:
    """Raise a TypeError unless `value` has the annotated type `kind`.

    An int counts as a float; a bool never counts as a number.
    """
    if not _is_a(value, kind):
        raise TypeError(f"{where}: {name} must be of type {_type_name(kind)}, got {shown(value)}")


def integer(where: str, name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """Return `value` as an int. NumPy integers and whole floats such as 1e6 are accepted too.

    Raises
    ------
    TypeError
        If `value` is not an integer; a bool is not.
    ValueError
        If it is outside [`least`, `most`].
    """
    if type(value) is float and 1 <= value <= 2**53 and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{where}: {name} must be an integer, got {shown(value)}")
    number = int(value)
    if not least <= number <= most:
        bounds = f"be >= {least}" if number < least else f"be at most {most}"
        raise ValueError(f"{where}: {name} must {bounds}, got {shown(value)}")
    return number


def choice(where: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`, otherwise raise a ValueError that names the nearest one."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{where}: {name} must be one of {', '.join(choices)}, got {shown(value)}; "
            f"{nearest(value if isinstance(value, str) else shown(value), choices)}"
        )
    return value


def _unrepresentable(value: Any, kind: Any, most: int) -> str | None:
    """Return the rule that a number breaks because kernels cannot represent it, in any field; None if there is none."""
    if isinstance(value, (list, tuple)):
        rules = (
            (_unrepresentable(item, typing.get_args(kind)[0], most) for item in value) if typing.get_args(kind) else ()
        )
        return next((rule for rule in rules if rule is not None), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if float not in (kind, *typing.get_args(kind)):
        return f"be between -{most:,} and {most:,}" if isinstance(value, int) and abs(value) > most else None
    if value != value:
        return "be a number"
    if isinstance(value, float) and math.isinf(value):
        return None  # infinity means off, in fields whose own rule allows it
    return f"be at most {FLOAT32_MAX:.1e} in size, to fit float32" if abs(value) > FLOAT32_MAX else None


def usual_settings(env_id: Any) -> dict[str, Any]:
    """Return the usual `reward_fn` and hyper-parameters of an environment, used unless others are given.

    Agents in ``ALE/…`` games learn from the signs of rewards, with the network of Mnih et al. 2015, which has no layer
    after its features.
    """
    game = isinstance(env_id, str) and env_id.startswith("ALE/")
    return {"reward_fn": "sign", "hidden_sizes": []} if game else {}


def searched(default: Any, space: str) -> Any:
    """Return a field that sweeps may search, with its search space in Hydra's grammar in the metadata."""
    metadata = {"search": space}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def operational(default: Any) -> Any:
    """Return a field that says how a run is carried out, recorded or stopped, but not what it learns.

    Runs that differ only in such fields belong to one group in plots and comparisons. `default` is a value, or a class:
    that of a section, all of whose fields are operational then, or list.
    """
    known: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return field(**known, metadata={"operational": True})


def operational_keys(config: type) -> Iterator[str]:
    """Yield the dotted keys of the operational fields of a configuration; for a whole section, the section's key."""
    hints = types_of(config)
    for item in fields(config):
        if "operational" in item.metadata:
            yield item.name
        elif is_dataclass(hints[item.name]):
            yield from (f"{item.name}.{key}" for key in operational_keys(hints[item.name]))


@dataclass
class Config:
    """Base of all configurations: checks the types of the fields, then the rules that `rules` yields."""

    uses_dataset: ClassVar[str] = (
        "never"  # whether an algorithm learns from a dataset: never, may, must, or text (rows of text)
    )
    replays: ClassVar[str] = "nothing"  # what is sampled from an algorithm's replay memory: transitions or sequences
    several_agents: ClassVar[bool] = False  # whether an algorithm trains several agents of one environment together
    largest: ClassVar[int] = 2**63 - 1  # upper bound of integers
    lacks: ClassVar[Mapping[str, str]] = {}  # hyper-parameters that only others have, and why these do without them

    def __post_init__(self) -> None:
        where, hints = type(self).__name__, types_of(type(self))
        for item in fields(self):
            value, kind = getattr(self, item.name), hints[item.name]
            if isinstance(value, tuple):
                setattr(self, item.name, value := list(value))  # as files store it
            fits = _is_a(value, kind)
            if not fits and type(value) is float and 1 <= value <= 2**53 and value.is_integer():
                whole = int(value)  # 1e6 is a whole number
                if fits := _is_a(whole, kind):
                    setattr(self, item.name, value := whole)
            if not fits:
                from rlox.config.migration import answers

                theirs = answers(item.name, hints, value=value)
                wrong = f"must be of type {_type_name(kind)}, got {shown(value)}{f'; {theirs}' if theirs else ''}"
                raise TypeError(f"{where}: {item.name} {wrong}")
            rule = _unrepresentable(value, kind, self.largest)
            if rule is not None:
                raise ValueError(f"{where}: {item.name} must {rule}, got {shown(value)}")
        for name, holds, rule in self.rules():
            if not holds:
                raise ValueError(f"{where}: {name} must {rule}, got {shown(getattr(self, name))}")
        for item in fields(self):
            value, kind = getattr(self, item.name), hints[item.name]
            if isinstance(value, float) and 0 < abs(value) < FLOAT32_MIN:  # becomes 0 in float32, so 0 must be allowed
                try:
                    replace(self, **{item.name: 0.0})
                except ValueError as e:
                    least = f"{item.name} must be at least {FLOAT32_MIN:.1e}, to fit float32"
                    raise ValueError(f"{where}: {least}, got {shown(value)}") from e
            if type(value) is int and kind is not Any and _is_a(0.0, kind):
                setattr(self, item.name, float(value))  # PyTorch and kernels accept only integers of 64 bits

    def rules(self) -> Iterable[tuple[str, bool, str]]:
        """Yield ``(field, whether the rule holds, "be > 0")`` for every rule."""
        return ()

    def conditions(self) -> Iterable[tuple[str, bool, str]]:
        """Yield ``(field, whether it has an effect, "noisy=true")`` for fields that only matter beside certain values.

        The text names these values.
        """
        if hasattr(self, "memory"):
            for name in ("memory_size", "memory_layers", "memory_horizon"):
                yield name, self.recurrent, "memory=lstm or gru"

    def idle(self) -> dict[str, str]:
        """Return the fields that have no effect beside the other values, with the values that would change this."""
        return {name: needed for name, holds, needed in self.conditions() if not holds}

    @property
    def recurrent(self) -> bool:
        """Whether the agent has a memory: a state of its network that lasts for an episode."""
        return getattr(self, "memory", "none") != "none"

    @classmethod
    def from_kwargs(cls, owner: str, **values: Any) -> Config:
        """Build a configuration from keyword arguments.

        An unknown name raises a TypeError that says why the class lacks it, or names the nearest field, or the
        equivalent of another trainer's keyword.
        """
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                from rlox.config.migration import answers

                hint = cls.lacks.get(name) or answers(name, known) or nearest(name, known)
                raise TypeError(f"{owner}: unknown hyper-parameter {name!r}; {hint}")
        return cls(**values)

    @classmethod
    def from_arguments(cls, owner: str, **values: Any) -> Config:
        """Return `from_kwargs`, with a UserWarning about arguments of `owner` that have no effect beside the others."""
        config = cls.from_kwargs(owner, **values)
        for name, needed in config.idle().items() if values else ():
            if name in values and values[name] != getattr(cls, name, None):
                level, frame = 1, sys._getframe()
                while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "rlox":
                    level, frame = level + 1, frame.f_back
                warnings.warn(f"{owner}: {name} has no effect without {needed}", UserWarning, stacklevel=level)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, with nested configurations as dicts."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build a configuration from the dict that `to_dict` returns, or from a part of it.

        Raises
        ------
        TypeError, ValueError
            For an unknown field (the message names the nearest), a value of the wrong type, or one that breaks a rule.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"{cls.__name__}: a configuration must map fields to values, got {shown(values)}")
        hints, given = types_of(cls), dict(values)
        for name, value in values.items():
            kinds = [kind for kind in (hints.get(name), *typing.get_args(hints.get(name))) if isinstance(kind, type)]
            inner = next((kind for kind in kinds if issubclass(kind, Config)), None)
            if inner is not None and isinstance(value, Mapping):
                given[name] = inner.from_dict(value)
        return cls.from_kwargs(cls.__name__, **given)

    def to_yaml(self, path: str | os.PathLike) -> None:
        """Write the fields to a YAML file, from which `from_yaml` builds an equal configuration."""
        yaml = import_package("yaml", "cli", f"{type(self).__name__}.to_yaml")
        # The detour through JSON turns tuples and NumPy floats into types that YAML knows.
        Path(path).write_text(yaml.safe_dump(json.loads(json.dumps(self.to_dict())), sort_keys=False), "utf-8")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike) -> Config:
        """Read a YAML file of fields; missing fields have their defaults. ``3e-4`` is read as a number.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        TypeError, ValueError
            Same as `from_dict`; and if the file is not YAML.
        """
        yaml: Any = import_package("yaml", "cli", f"{cls.__name__}.from_yaml")
        safe: Any = yaml.SafeLoader

        class Loader(safe):
            """Loader that reads 3e-4 as a number; YAML 1.1 reads it as a string, because it has no dot."""

        Loader.add_implicit_resolver(
            "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
        )
        try:
            return cls.from_dict(yaml.load(Path(path).read_text("utf-8"), Loader) or {})
        except yaml.YAMLError as e:
            raise ValueError(f"{cls.__name__}.from_yaml: {path} must be a YAML file: {' '.join(str(e).split())}") from e


def _is_finite(value: Any) -> bool:
    """Whether all numbers in `value`, which may contain lists and mappings, are finite."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _width_rules(widths: list[int]) -> Iterable[tuple[str, bool, str]]:
    yield "hidden_sizes", all(width >= 1 for width in widths), "contain widths >= 1"
    yield "hidden_sizes", all(width <= MOST_AT_ONCE for width in widths), f"contain widths of at most {MOST_AT_ONCE:,}"
    few = all(one * other <= 2**30 for one, other in pairwise(widths))
    yield "hidden_sizes", few, "need at most 2**30 weights between two layers"


def bounds_rules(config: Any) -> Iterable[tuple[str, bool, str]]:
    """Yield the rules of `v_min` and `v_max`, the bounds of a distribution of returns."""
    low, high = config.v_min, config.v_max
    for name, bound in (("v_min", low), ("v_max", high)):
        yield name, abs(bound) <= LARGEST_RETURN, f"be in [-{LARGEST_RETURN:,}, {LARGEST_RETURN:,}]"
    yield "v_max", low < high, f"be above v_min ({low:g})"


def lack_memory(reason: str) -> dict[str, str]:
    """Return `Config.lacks` of an algorithm whose agents cannot have a memory, for the `reason`."""
    names = ("memory", "memory_size", "memory_layers", "memory_horizon", "sequence_length", "burn_in")
    return dict.fromkeys(names, reason)


def memory_rules(config: Any) -> Iterable[tuple[str, bool, str]]:
    """Yield the rules of `memory`, `memory_size` and `memory_layers` of a configuration that has them."""
    size = config.memory_size
    yield "memory", config.memory in MEMORIES, f"be one of {', '.join(MEMORIES)}"
    yield "memory_size", 1 <= size <= MOST_MEMORY_UNITS, f"be in [1, {MOST_MEMORY_UNITS}]"
    horizon = config.memory_horizon
    yield "memory_horizon", horizon is None or 2 <= horizon <= LARGEST_COUNT, "be >= 2 or null"
    yield "memory_layers", 1 <= config.memory_layers <= MOST_MEMORY_LAYERS, f"be in [1, {MOST_MEMORY_LAYERS}]"

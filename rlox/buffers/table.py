"""Table of replay memories.

An external package adds a memory with `register_buffer`, or with an entry point of the group ``rlox.buffers`` in its
``pyproject.toml``, which is loaded when the name is first used::

    [project.entry-points."rlox.buffers"]
    recency = "their_package.buffers:RecencyBuffer"

Then ``rlox train algo=dqn buffer=recency`` and ``DQN(..., buffer="recency")`` use it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, NamedTuple

from rlox.buffers.protocols import Buffer
from rlox.config import BufferConfig, OutsideBufferConfig, SequenceBufferConfig, nearest, shown
from rlox.config.offers import load, offers
from rlox.envs import EnvSpec

ENTRY_POINTS = "rlox.buffers"
_METHODS = ("push_batch", "sample", "__len__", "get_state", "set_state")


class Entry(NamedTuple):
    """Location of a buffer and its configuration; imported when the buffer is first used."""

    cls: Any  # "module:Class", or the class
    config: Any  # "module:Config", or the class


BUFFERS: dict[str, Entry] = {
    "uniform": Entry("rlox.kernels.buffers.replay:ReplayBuffer", "rlox.config.off_policy:BufferConfig"),
    "prioritized": Entry(
        "rlox.kernels.buffers.prioritized:PrioritizedReplayBuffer", "rlox.config.off_policy:PrioritizedBufferConfig"
    ),
    "mmap": Entry("rlox.kernels.buffers.mmap:MmapReplayBuffer", "rlox.config.off_policy:MmapBufferConfig"),
    "sequence": Entry(
        "rlox.kernels.buffers.sequence:SequenceReplayBuffer", "rlox.config.off_policy:SequenceBufferConfig"
    ),
}

# The same memories on a GPU.
ON_DEVICE: dict[str, str] = {
    "uniform": "rlox.buffers.device:DeviceReplayBuffer",
    "prioritized": "rlox.buffers.device:PrioritizedDeviceReplayBuffer",
}


def register_buffer(name: str, cls: type | str, config: type[BufferConfig] | str | None = None) -> None:
    """Register a buffer for ``buffer=NAME``.

    Parameters
    ----------
    name : str
        Letters, digits, ``_``, ``-`` and ``.``.
    cls : type or str
        A `Buffer` class, or its ``"module:Class"``, which is imported when it is first used.
    config : type or str, optional
        Its configuration, a dataclass derived from `rlox.config.BufferConfig`, or ``"module:Config"``. The default is
        ``cls.Config`` if it exists, else `rlox.config.OutsideBufferConfig`, whose ``kwargs`` accept any argument.

    Raises
    ------
    ValueError
        If the name is empty, has other characters, or belongs to another class.
    TypeError
        If `cls` or `config` is neither a class nor a string.
    """
    if not isinstance(name, str) or not name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum():
        raise ValueError(f"register_buffer: name must consist of letters, digits, _, - and ., got {name!r}")
    for what, value in (("cls", cls), ("config", config)):
        if not (isinstance(value, type) or (isinstance(value, str) and ":" in value) or (config is value is None)):
            raise TypeError(f"register_buffer: {what} must be a class or 'module:Class', got {value!r}")
    entry = Entry(cls, config)
    if BUFFERS.get(name, entry) != entry:
        raise ValueError(f"register_buffer: name must be new, but {name!r} is {BUFFERS[name].cls}")
    BUFFERS[name] = entry


def buffer_names() -> list[str]:
    """Return all names that ``buffer=`` accepts, including those of installed packages."""
    return list(dict.fromkeys([*BUFFERS, *offers(ENTRY_POINTS)]))


def _entry(name: str) -> Entry:
    entry = BUFFERS.get(name)
    if entry is None and name in offers(ENTRY_POINTS):
        entry = Entry(load(ENTRY_POINTS, name), None)
    if entry is None:
        raise ValueError(
            f"buffer: name must be known, got {shown(name)}; {nearest(shown(name), buffer_names())}, or register_buffer"
        )
    return entry


def buffer_class(name: str) -> type:
    """Import and return the class of the buffer `name`; raise a ValueError if it is unknown."""
    cls = _entry(name).cls
    return resolve_name(cls) if isinstance(cls, str) else cls


def buffer_config_class(name: str) -> type[BufferConfig]:
    """Return the configuration class of the buffer `name`. Raises the same ValueError as `buffer_class`."""
    config = _entry(name).config or getattr(buffer_class(name), "Config", OutsideBufferConfig)
    config = resolve_name(config) if isinstance(config, str) else config
    if not (isinstance(config, type) and issubclass(config, BufferConfig)):
        raise TypeError(
            f"buffer: the Config of {name!r} must be a dataclass derived from rlox.config.BufferConfig, got {config!r}"
        )
    return config


def buffer_config(
    buffer: str | BufferConfig | Mapping[str, Any] | None = None,
    prioritized: bool | None = None,
    usual: str = "uniform",
    **changes: Any,
) -> BufferConfig:
    """Return the configuration for a name, a mapping, or a configuration.

    Parameters
    ----------
    buffer
        None, and a mapping without a ``name``, mean the `usual` memory.
    prioritized
        True replaces the `usual` memory by the prioritized one. If a name is given, the value must agree with it.
    **changes
        Fields that override those of `buffer`; None leaves a field unchanged.

    Raises
    ------
    ValueError, TypeError
        For an unknown name, an unknown field, or a value out of range.
    """
    if isinstance(buffer, BufferConfig):
        kind, fields = type(buffer), buffer.to_dict()
    elif buffer is None or isinstance(buffer, (str, Mapping)):
        fields = {"name": buffer} if isinstance(buffer, str) else dict(buffer or {})
        if not all(isinstance(key, str) for key in fields):
            raise TypeError(f"buffer: the keys of a mapping must be names of fields, got {shown(buffer)}")
        fields.setdefault("name", "prioritized" if prioritized else usual)
        kind = buffer_config_class(fields["name"])
    else:
        raise TypeError(
            "buffer: the value must be a name, a BufferConfig, a mapping or a rlox.buffers.Buffer, "
            f"got {type(buffer).__name__}"
        )
    name = fields["name"]
    if prioritized is not None and prioritized is not (name == "prioritized"):
        raise ValueError(
            f"buffer: prioritized must fit the name, got {prioritized} with {name!r}; leave one of them out"
        )
    fields |= {key: value for key, value in changes.items() if value is not None}
    return kind.from_kwargs("buffer", **fields)


def takes_masks(name: str) -> bool:
    """Return whether the buffer `name` stores masks of legal actions: whether its ``push_batch`` takes them."""
    cls: Any = buffer_class(name)
    parameters = inspect.signature(cls.push_batch).parameters.values()
    return any(p.name == "next_masks" or p.kind is p.VAR_KEYWORD for p in parameters)


def make_buffer(
    config: BufferConfig,
    spec: EnvSpec,
    n_envs: int,
    gamma: float,
    state_dim: int = 0,
    device: str = "cpu",
    with_masks: bool = False,
) -> Buffer:
    """Build the replay memory that `config` describes, for the observations and actions of `spec`.

    On another `device` than the CPU, it is one of `ON_DEVICE`. A memory of sequences stores actions in the form that a
    world model takes, `EnvSpec.model_width` numbers each, and with every step `state_dim` numbers for the state of the
    agent. A uniform memory becomes one of sequences, all equally likely, if there is a `state_dim`; then its user
    computes n-step returns, and the flags of legal actions, if there are masks, follow the numbers of an action. They
    also do in a memory of transitions `with_masks`, those of the observation that was acted on.

    Raises
    ------
    TypeError
        If the class is not a `Buffer`, or does not accept the arguments.
    ValueError
        If it computes no n-step returns, but `config` asks for them.
    """
    act_dim = spec.model_width
    if state_dim and config.name == "uniform":
        config = SequenceBufferConfig(size=config.size)
        act_dim += sum(spec.choices) if spec.masked else 0
    cls = buffer_class(config.name) if device == "cpu" else resolve_name(ON_DEVICE[config.name])
    n_stored = math.prod(spec.action_shape) + (sum(spec.choices) if with_masks and spec.masked else 0)
    arguments = {"obs_dim": spec.obs_dim, "act_dim": n_stored, **config.arguments()}
    if config.holds == "sequences":
        arguments |= {"act_dim": act_dim, "n_envs": n_envs, "state_dim": state_dim}
    if config.n_step > 1:
        arguments |= {"n_step": config.n_step, "gamma": gamma, "n_envs": n_envs}
    if spec.image:
        arguments |= {"obs_shape": spec.obs_shape, "obs_dtype": spec.obs_dtype}
        if config.holds == "sequences":
            del arguments["obs_dim"]
        if spec.n_stacked > 1 and config.frame_stacks:
            arguments |= {"n_stacked": spec.n_stacked, "n_envs": n_envs}
    if spec.masked and config.holds == "transitions":
        arguments["mask_dim"] = sum(spec.choices)
    if device != "cpu":
        arguments["device"] = device
    try:
        buffer = cls(**arguments)
    except TypeError as e:
        if "argument" not in str(e):
            raise
        raise TypeError(f"buffer: {config.name} must take the arguments {', '.join(arguments)}: {e}") from e
    if not isinstance(buffer, Buffer):
        missing = [name for name in _METHODS if not hasattr(buffer, name)]
        raise TypeError(f"buffer: {config.name} ({cls}) must define {', '.join(missing)}; see rlox.buffers.Buffer")
    if config.n_step > 1 and not hasattr(buffer, "cut"):
        raise ValueError(
            f"buffer: n_step must be 1 with {config.name}, got {config.n_step}: it computes no n-step returns, or it "
            "would define cut; see rlox.buffers.Buffer"
        )
    return buffer

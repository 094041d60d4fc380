"""The table of replay memories, and what one must be able to do.

A package outside adds one by `register_buffer`, or by an entry point of the group ``rlox.buffers`` in its
``pyproject.toml``, which is loaded when the name is first used::

    [project.entry-points."rlox.buffers"]
    recency = "their_package.buffers:RecencyBuffer"

From then on ``rlox train algo=dqn buffer=recency`` and ``DQN(..., buffer="recency")`` know it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rlox.config import BufferConfig, MmapBufferConfig, OutsideBufferConfig, nearest, shown
from rlox.envs import EnvSpec

ENTRY_POINTS = "rlox.buffers"
_METHODS = ("push_batch", "sample", "__len__", "get_state", "set_state")


@runtime_checkable
class Buffer(Protocol):
    """What the off-policy loop asks of a replay memory. Letters: N rows pushed, B rows sampled, D, A sizes.

    The class is called with keywords: ``capacity obs_dim act_dim`` (observations flattened) and whatever else its
    configuration holds (`BufferConfig.arguments`). Only where they say something it is given as well: ``n_step gamma
    n_envs`` for n-step returns (n_step > 1), ``obs_shape obs_dtype`` for images (C, H, W) of uint8, and ``n_stacked
    n_envs`` for images that are stacks of frames, where ``frame_stacks`` of its configuration is not False.

    Optional methods: ``update_priorities(indices, priorities)``, given the indices of a sample and the absolute TD
    errors (B,) f64, for a memory whose samples hold ``indices``; ``set_beta(beta)``, called before each sample, where
    the configuration has a ``beta``; ``cut()``, called where the transitions to come do not follow on from those
    before (environments that start afresh after a resume), across which no n-step return may reach: needed where
    the memory has an ``n_step`` above 1; ``n_pushed``, how many transitions it was ever given, by which a push from
    elsewhere is noticed; ``close()``.
    """

    def push_batch(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> None:
        """Copy in N transitions, row i from environment i: (N, D), (N, D), (N, A) f32, (N,) f32, (N,) and (N,) bool."""

    def sample(self, batch_size: int, seed: int) -> Mapping[str, np.ndarray]:
        """B transitions, a function of contents and `seed` alone.

        Keys ``obs next_obs actions rewards terminated truncated`` as pushed; ``discounts`` (B,) where rewards are
        n-step returns: gamma to the number of their steps; ``weights`` (B,) that correct for unequal sampling;
        ``indices`` (B,) where priorities are to be updated.
        """

    def __len__(self) -> int:
        """Transitions that can be sampled."""

    def get_state(self) -> dict[str, Any]:
        """Everything, as arrays, numbers and texts."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly from what `get_state` returned."""


@runtime_checkable
class OfflineDataset(Protocol):
    """What the offline loop asks of a dataset; `rlox.OfflineDatasetBuffer` is one.

    Optional, and used where they are there: ``obs_dim`` and ``act_dim`` (and ``obs_shape``), to be compared with the
    algorithm's; ``normalized``, whether samples are, by ``obs_mean`` and ``obs_std`` (D,); ``get_state()``, all
    transitions by the names of a sample and in their order, to check the actions and to compare values with returns.
    """

    def sample(self, batch_size: int, seed: int) -> Mapping[str, np.ndarray]:
        """B transitions, a function of contents and `seed` alone.

        ``obs next_obs`` (B, D), ``actions`` (B, A) or discrete (B, 1), ``rewards terminated truncated`` (B,).
        """


class Entry(NamedTuple):
    """Where a buffer lives; imported when it is first used."""

    cls: Any  # "module:Class", or the class
    config: Any  # "module:Config", or the class


BUFFERS: dict[str, Entry] = {
    "uniform": Entry("rlox.kernels.buffers.replay:ReplayBuffer", "rlox.config:BufferConfig"),
    "prioritized": Entry("rlox.kernels.buffers.replay:PrioritizedReplayBuffer", "rlox.config:PrioritizedBufferConfig"),
    "mmap": Entry("rlox.kernels.buffers.mmap:MmapReplayBuffer", "rlox.config:MmapBufferConfig"),
}


def register_buffer(name: str, cls: type | str, config: type[BufferConfig] | str | None = None) -> None:
    """Make ``buffer=NAME`` known.

    Parameters
    ----------
    name : str
        Letters, digits, ``_``, ``-`` and ``.``.
    cls : type or str
        A `Buffer`, or its ``"module:Class"``, which is imported when it is first used.
    config : type or str, optional
        Its configuration, a dataclass below `rlox.config.BufferConfig`, or ``"module:Config"``. Without one it is
        ``cls.Config`` where there is one, else `rlox.config.OutsideBufferConfig`, whose ``kwargs`` take anything.

    Raises
    ------
    ValueError
        For an empty or odd name, and one that is taken by another class.
    TypeError
        If `cls` or `config` is neither a class nor a text.
    """
    if not isinstance(name, str) or not name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum():
        raise ValueError(f"register_buffer: name must be of letters, digits, _, - and ., got {name!r}")
    for what, value in (("cls", cls), ("config", config)):
        if not (isinstance(value, type) or (isinstance(value, str) and ":" in value) or (config is value is None)):
            raise TypeError(f"register_buffer: {what} must be a class or 'module:Class', got {value!r}")
    entry = Entry(cls, config)
    if BUFFERS.get(name, entry) != entry:
        raise ValueError(f"register_buffer: name must be new, but {name!r} is {BUFFERS[name].cls}")
    BUFFERS[name] = entry


def _from_outside() -> dict[str, Entry]:
    """The buffers that installed packages announce; nothing of theirs is imported."""
    return {point.name: Entry(point.value, None) for point in metadata.entry_points(group=ENTRY_POINTS)}


def buffer_names() -> list[str]:
    """All names that ``buffer=`` takes, those of installed packages included."""
    return [*BUFFERS, *sorted(set(_from_outside()) - set(BUFFERS))]


def _entry(name: str) -> Entry:
    entry = BUFFERS.get(name) or _from_outside().get(name)
    if entry is None:
        raise ValueError(
            f"buffer: name must be known, got {shown(name)}; {nearest(shown(name), buffer_names())}, or register_buffer"
        )
    return entry


def _resolve(found: Any) -> Any:
    """The class itself, or what "module:Class" names."""
    if not isinstance(found, str):
        return found
    module, _, name = found.partition(":")
    return getattr(import_module(module), name)


def buffer_class(name: str) -> type:
    """The class that `name` stands for, imported now.

    Raises
    ------
    ValueError
        If there is none of this name; the message has the nearest.
    """
    return _resolve(_entry(name).cls)


def buffer_config_class(name: str) -> type[BufferConfig]:
    """The configuration of the buffer `name`; a ValueError as for `buffer_class`."""
    entry = _entry(name)
    config = entry.config
    if config is None:
        config = getattr(_resolve(entry.cls), "Config", OutsideBufferConfig)
    config = _resolve(config)
    if not (isinstance(config, type) and issubclass(config, BufferConfig)):
        raise TypeError(
            f"buffer: the Config of {name!r} must be a dataclass below rlox.config.BufferConfig, got {config!r}"
        )
    return config


def buffer_config(
    buffer: str | BufferConfig | Mapping[str, Any] | None = None, prioritized: bool | None = None, **changes: Any
) -> BufferConfig:
    """The configuration that a name, a mapping, or a configuration stands for.

    Parameters
    ----------
    buffer
        None, and a mapping without a ``name``, stand for the uniform memory.
    prioritized
        True turns that into the prioritized one; True and False must fit a name that is given.
    **changes
        Fields that go before those of `buffer`; None leaves one alone.

    Raises
    ------
    ValueError, TypeError
        For an unknown name, an unknown field, a value out of range.
    """
    if isinstance(buffer, BufferConfig):
        kind, fields = type(buffer), buffer.to_dict()
    elif buffer is None or isinstance(buffer, (str, Mapping)):
        fields = {"name": buffer} if isinstance(buffer, str) else dict(buffer or {})
        if not all(isinstance(key, str) for key in fields):
            raise TypeError(f"buffer: a mapping must have names of fields for keys, got {shown(buffer)}")
        fields.setdefault("name", "prioritized" if prioritized else "uniform")
        kind = buffer_config_class(fields["name"])
    else:
        raise TypeError(
            "buffer: it must be a name, a BufferConfig, a mapping or a rlox.buffers.Buffer, "
            f"got {type(buffer).__name__}"
        )
    name = fields["name"]
    if prioritized is not None and prioritized is not (name == "prioritized"):
        raise ValueError(f"buffer: prioritized must fit the name, got {prioritized} beside {name!r}; leave one out")
    fields |= {key: value for key, value in changes.items() if value is not None}
    return kind.from_kwargs("buffer", **fields)


def make_buffer(config: BufferConfig, spec: EnvSpec, n_envs: int, gamma: float) -> Buffer:
    """Build the replay memory that `config` describes, for the observations and actions of `spec`.

    Raises
    ------
    TypeError
        If what it names is no `Buffer`, or does not take its arguments.
    """
    cls = buffer_class(config.name)
    arguments = {"obs_dim": spec.obs_dim, "act_dim": math.prod(spec.action_shape), **config.arguments()}
    if config.n_step > 1:
        arguments |= {"n_step": config.n_step, "gamma": gamma, "n_envs": n_envs}
    if spec.image:
        arguments |= {"obs_shape": spec.obs_shape, "obs_dtype": spec.obs_dtype}
        if spec.n_stacked > 1 and config.frame_stacks:
            arguments |= {"n_stacked": spec.n_stacked, "n_envs": n_envs}
    try:
        buffer = cls(**arguments)
    except TypeError as e:
        if "argument" not in str(e):
            raise
        raise TypeError(f"buffer: {config.name} must take the arguments {', '.join(arguments)}: {e}") from e
    if not isinstance(buffer, Buffer):
        missing = [name for name in _METHODS if not hasattr(buffer, name)]
        raise TypeError(f"buffer: {config.name} ({cls}) must define {', '.join(missing)}; see rlox.buffers.Buffer")
    return buffer


@dataclass(frozen=True)
class Footprint:
    """Bytes that a replay memory takes."""

    reserved: int  # of memory, asked for when it is made
    resident: int  # of these in use, once all transitions are pushed
    disk: int  # of its own file
    row: int  # of one transition in memory


# Transitions of the miniature that `footprint` makes: memories are reserved by the row, so that two tell of any.
_MINIATURE = 512


def footprint(config: BufferConfig, spec: EnvSpec, n_envs: int, gamma: float, n_pushed: int) -> Footprint | None:
    """What the memory that `make_buffer` builds of the same arguments takes after `n_pushed` transitions.

    None where its class has no ``nbytes`` that would tell. Nothing of its size is reserved.

    Raises
    ------
    TypeError
        As `make_buffer`.
    """
    least = max(_MINIATURE, n_envs, config.n_step)
    if isinstance(config, MmapBufferConfig):
        with tempfile.TemporaryDirectory(prefix="rlox-replay-") as folder:
            # Without an older part there is no table of its blocks either, and all that is left are the rows.
            mini = make_buffer(replace(config, size=least, hot_size=least, folder=folder), spec, n_envs, gamma)
            row = mini.ram_budget // least
            mini.close()
        hot = config.n_hot * row
        return Footprint(hot, min(n_pushed, config.n_hot) * row, max(0, min(n_pushed, config.size) * row - hot), row)
    if not hasattr(buffer_class(config.name), "nbytes"):
        return None
    try:
        small, large = (make_buffer(replace(config, size=n), spec, n_envs, gamma).nbytes for n in (least, 2 * least))
    except ValueError:
        return None  # a configuration from outside, whose rules forbid so small a memory
    reserved = small + (large - small) * (config.size - least) // least
    return Footprint(reserved, reserved * min(n_pushed, config.size) // config.size, 0, -(-(large - small) // least))

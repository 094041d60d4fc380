"""Settings of replay memories and datasets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlox.config.base import WEIGHT_NORMS, Config, operational, searched


@dataclass
class BufferConfig(Config):
    """Uniform: every transition is equally likely to be drawn. Base class of the other memories' settings."""

    name: str = "uniform"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    size: int = 1_000_000  # transitions it holds; the oldest are then overwritten
    n_step: int = searched(1, "1,3,5")  # steps of a return before it bootstraps; episode ends and time limits cut it

    frame_stacks: ClassVar[bool] = True  # whether its class takes n_stacked, to store each frame of stacked frames once
    holds: ClassVar[str] = "transitions"  # what is sampled from it: transitions or sequences, see `Config.replays`

    def rules(self):
        yield "name", bool(self.name), "not be empty"
        yield "size", self.size >= 1, "be >= 1"
        yield "n_step", self.n_step >= 1, "be >= 1"
        yield "n_step", self.n_step <= self.size, f"be at most size ({self.size})"

    def arguments(self) -> dict[str, Any]:
        """Return the buffer's arguments, without shapes and n-step returns: ``capacity`` and all other fields."""
        given = {key: value for key, value in self.to_dict().items() if key not in ("name", "size", "n_step")}
        return {"capacity": self.size, **given}


@dataclass
class OutsideBufferConfig(BufferConfig):
    """A registered memory without its own configuration class."""

    name: str = "outside"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of its class

    frame_stacks = False

    def arguments(self):
        return {"capacity": self.size, **self.kwargs}


@dataclass
class PrioritizedBufferConfig(BufferConfig):
    """Prioritised: drawn in proportion to the last TD error (Schaul et al. 2016, arXiv:1511.05952)."""

    name: str = "prioritized"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    alpha: float = searched(0.6, "interval(0.3, 0.9)")  # exponent of the priorities: 0 draws uniformly, 1 in proportion
    beta: float = 0.4  # exponent of the importance weights at the start; it rises to 1 at total_timesteps, linearly
    eps: float = 1e-2  # smallest priority: smaller TD errors count as this, so that no transition is lost
    weight_norm: str = "none"  # divide importance weights by the largest one of: batch, memory; none: not divided

    def rules(self):
        yield from super().rules()
        yield "alpha", 0 <= self.alpha <= 1, "be in [0, 1]"
        yield "beta", 0 <= self.beta <= 1, "be in [0, 1]"
        yield "eps", 0 <= self.eps < math.inf, "be >= 0 and finite"
        yield "weight_norm", self.weight_norm in WEIGHT_NORMS, f"be one of {', '.join(WEIGHT_NORMS)}"


@dataclass
class MmapBufferConfig(BufferConfig):
    """Uniform, with the newest transitions in memory and older ones in a file."""

    name: str = "mmap"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    hot_size: int | None = operational(None)  # transitions held in memory; null: 10_000, or size if that is smaller
    folder: str | None = operational(None)  # folder of the file; null: the run folder (library: a temporary folder)

    frame_stacks = False

    def rules(self):
        yield from super().rules()
        yield "hot_size", 1 <= self.n_hot <= self.size, f"be between 1 and size ({self.size}), or null"

    @property
    def n_hot(self) -> int:
        """`hot_size`, or its default if that is null."""
        return min(10_000, self.size) if self.hot_size is None else self.hot_size

    def arguments(self):
        return {"hot_capacity": self.n_hot, "total_capacity": self.size, "cold_path": self.folder}


@dataclass
class SequenceBufferConfig(BufferConfig):
    """Sequences of consecutive steps, for agents that carry a state from step to step (DreamerV3)."""

    name: str = "sequence"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    size: int = 1_000_000  # steps it holds, over all environments; the oldest are then overwritten
    n_step: int = 1  # always 1: sequences contain single steps
    online: bool = True  # each batch first takes steps not used before; the rest is drawn uniformly

    frame_stacks = False
    holds = "sequences"

    def rules(self):
        yield from super().rules()
        yield "n_step", self.n_step == 1, "be 1, since sequences contain single steps"

    def arguments(self):
        return {"capacity": self.size}


@dataclass
class DatasetConfig(Config):
    """Recorded transitions to learn from."""

    source: str  # a file (.arrow .feather .ipc .parquet .npz .h5 .hdf5), or minari:ID; chosen by dataset=SOURCE
    normalize: bool = False  # standardise observations by the dataset's mean and deviation
    max_transitions: int | None = None  # use only this many rows, from the beginning; null: all
    reward_scale: float = 1.0  # rewards are multiplied by this,
    reward_shift: float = 0.0  # then this is added
    normalize_returns: bool = False  # first scale rewards so that best and worst episode differ by 1000, as in IQL

    def rules(self):
        yield "source", bool(self.source) and "\0" not in self.source, "be a file or minari:ID"
        yield "max_transitions", self.max_transitions is None or self.max_transitions >= 1, "be >= 1, or null"
        yield "reward_scale", math.isfinite(self.reward_scale) and self.reward_scale != 0, "be finite and not 0"
        yield "reward_shift", math.isfinite(self.reward_shift), "be finite"

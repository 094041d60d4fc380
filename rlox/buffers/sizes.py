"""How many bytes a memory will take."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

from rlox.buffers.table import buffer_class, make_buffer
from rlox.config import BufferConfig, MmapBufferConfig
from rlox.envs import EnvSpec


@dataclass(frozen=True)
class Footprint:
    """Bytes that a replay memory takes."""

    reserved: int  # of memory, asked for when it is made
    resident: int  # of these in use, once all transitions are pushed
    disk: int  # of its own file
    row: int  # of one transition in memory


# Transitions of the miniature that `footprint` makes: memories are reserved by the row, so two sizes give that of any.
_MINIATURE = 512


def footprint(
    config: BufferConfig, spec: EnvSpec, n_envs: int, gamma: float, n_pushed: int, state_dim: int = 0
) -> Footprint | None:
    """What the memory that `make_buffer` builds of the same arguments takes after `n_pushed` transitions.

    None where its class has no ``nbytes``. Nothing of its size is reserved.

    Raises
    ------
    TypeError
        As `make_buffer`.
    """
    least = max(_MINIATURE, n_envs, config.n_step)
    if config.holds == "sequences":
        least = _MINIATURE * n_envs  # each environment has as much room as the others
    if isinstance(config, MmapBufferConfig):
        with tempfile.TemporaryDirectory(prefix="rlox-replay-") as folder:
            # Without an older part there is no table of its blocks either, and all that is left are the rows.
            mini: Any = make_buffer(replace(config, size=least, hot_size=least, folder=folder), spec, n_envs, gamma)
            row = mini.ram_budget // least
            mini.close()
        hot = config.n_hot * row
        return Footprint(hot, min(n_pushed, config.n_hot) * row, max(0, min(n_pushed, config.size) * row - hot), row)
    if not hasattr(buffer_class(config.name), "nbytes"):
        return None

    def nbytes(size: int) -> int:
        memory: Any = make_buffer(replace(config, size=size), spec, n_envs, gamma, state_dim)
        return memory.nbytes

    try:
        small, large = nbytes(least), nbytes(2 * least)
    except ValueError:
        return None  # a configuration from outside, whose rules forbid so small a memory
    reserved = small + (large - small) * (config.size - least) // least
    return Footprint(reserved, reserved * min(n_pushed, config.size) // config.size, 0, -(-(large - small) // least))

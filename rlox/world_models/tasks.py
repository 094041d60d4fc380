"""Former place of `rlox.envs.memory_tasks`."""

from typing import Any

from rlox.config.arguments import warn_renamed
from rlox.envs import memory_tasks


def __getattr__(name: str) -> Any:
    warn_renamed(__name__, "rlox.envs.memory_tasks", "0.14.0")
    return getattr(memory_tasks, name)

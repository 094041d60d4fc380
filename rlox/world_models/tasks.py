"""Former place of `rlox.envs.memory_tasks`."""

import warnings
from typing import Any

from rlox.envs import memory_tasks


def __getattr__(name: str) -> Any:
    warnings.warn(f"{__name__} is deprecated; use rlox.envs.memory_tasks", DeprecationWarning, stacklevel=2)
    return getattr(memory_tasks, name)

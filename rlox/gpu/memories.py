"""Whose memory a replay memory or a dataset takes: the host's or the GPU's."""

from __future__ import annotations

import math
from typing import Any

from rlox.buffers.table import ON_DEVICE
from rlox.config import BufferConfig
from rlox.kernels.buffers.offline import OfflineDatasetBuffer


def place_memory(algorithm: Any, where: str) -> None:
    """Choose the device of an off-policy algorithm's memory by its configuration, and name it in the backend's reason.

    Raises
    ------
    ValueError
        If it must be the GPU's, but cannot be; `where` starts the message.
    """
    memory: Any = algorithm._memory
    if memory.config is None or memory.config.device == "cpu":
        return
    why = _find_obstacle(algorithm, memory.config)
    if why is None:
        memory.device = algorithm.device
    elif memory.config.device == "cuda":
        raise ValueError(f"{where}: buffer.device must be auto or cpu here, got cuda: {why}")
    if algorithm.device != "cpu":
        place = "on the GPU" if why is None else f"on the host: {why}"
        algorithm.backend.reason += f"; the replay memory is {place}"


def count_bytes(algorithm: Any, config: BufferConfig) -> int:
    """Return how many bytes the rows of an off-policy algorithm's memory take on a GPU."""
    spec = algorithm.spec
    mask_words = -(-sum(spec.choices) // 4) if spec.masked else 0
    n_flags = sum(spec.choices) if algorithm.collector.stores_masks else 0
    n_words = 2 * spec.obs_dim + mask_words + math.prod(spec.action_shape) + n_flags
    return 4 * config.size * (n_words + 4)


def _find_obstacle(algorithm: Any, config: BufferConfig) -> str | None:
    """Return why the memory of an off-policy algorithm must be the host's; None if it can be the GPU's."""
    spec = algorithm.spec
    if algorithm.device == "cpu":
        return "the learner runs on the CPU"
    if algorithm.normalizer is not None:
        return "the host normalises observations or rewards"
    if algorithm._dataset is not None:
        return "a dataset on the host is mixed into the batches"
    if algorithm.ranks.joined:
        return "there are several ranks"
    if config.name not in ON_DEVICE:
        return f"{config.name} has no counterpart on a GPU"
    if spec.image:
        return "observations are images, of which the host stores each frame once"

    from rlox.buffers.device import MOST_ROWS

    if config.size > MOST_ROWS:
        return f"it has more than {MOST_ROWS:,} transitions"
    return _find_lack(count_bytes(algorithm, config))


def _find_lack(n_bytes: int) -> str | None:
    import torch

    if n_bytes > torch.cuda.mem_get_info()[0] // 2:
        return f"it takes {n_bytes / 2**30:.1f} GiB, more than half of the GPU's free memory"
    return None


def dataset_fits(algorithm: Any) -> bool:
    """Return whether an offline algorithm's dataset can be copied to the GPU; the backend's reason then says so, or why
    not."""
    why = _find_dataset_obstacle(algorithm.dataset)
    place = "on the GPU" if why is None else f"on the host: {why}"
    algorithm.backend.reason += f"; the dataset is {place}"
    return why is None


def _find_dataset_obstacle(dataset: Any) -> str | None:
    from rlox.buffers.device_dataset import width

    if getattr(type(dataset), "sample", None) is not OfflineDatasetBuffer.sample:
        return f"{type(dataset).__name__} has its own samples"
    if dataset.masked:
        return "it has masks of legal actions"
    return _find_lack(4 * len(dataset) * width(dataset))

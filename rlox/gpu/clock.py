"""The seconds of updates that a GPU runs while the host goes on."""

from __future__ import annotations

from typing import Any

import torch


class UpdateClock:
    """Measures updates on their device; a context around those of each round.

    The host hands updates to a GPU and goes on. It waits for them later, when it next needs weights to act, and its own
    clock would count that as collection. So events on the GPU measure them, for which nothing waits.
    """

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._running: list[tuple[Any, Any]] = []  # events around the updates of each round since the last report

    def __enter__(self) -> None:
        self._begun = self._record()

    def __exit__(self, *error: object) -> None:
        self._running.append((self._begun, self._record()))

    def _record(self) -> Any:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def divide(self, collect_s: float, update_s: float) -> tuple[float, float]:
        """Return the seconds of collection and updates since the last call, given those by the host's clock.

        The host must have waited for the updates, as it does to read their metrics.
        """
        if not self._running:
            return collect_s, update_s
        self._running[-1][1].synchronize()
        on_gpu = sum(begun.elapsed_time(ended) for begun, ended in self._running) / 1000.0
        self._free += [event for pair in self._running for event in pair]
        self._running.clear()
        on_gpu = min(on_gpu, collect_s + update_s)
        return collect_s + update_s - on_gpu, on_gpu

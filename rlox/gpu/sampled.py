"""What a GPU needs from algorithms that learn from samples to capture a sample and its update as one graph."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rlox.gpu.replay import CapturedReplay


class SampledUpdates:
    """Part of the families whose updates learn from samples, of a replay memory or of a dataset."""

    _captured: CapturedReplay | None = None
    _draws_on_device = False  # they are the host generator's numbers, see `rlox.gpu.ahead`

    @property
    def _n_rows(self: Any) -> int:
        """Rows of a batch, or its sequences."""
        return self.config.batch_size

    def _capture_obstacle(self) -> str | None:
        definer = next(cls for cls in type(self).__mro__ if "sample" in vars(cls))
        if "sample" in vars(self) or not definer.__module__.startswith("rlox."):
            return f"the sample of {definer.__name__} is not rlox's own"
        return None

    def _noise_shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the normal numbers that an update from `n` rows draws; () for none."""
        return ()

    def _uniform_shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the uniform numbers that it draws after them; () for none."""
        return ()

    def _draw_noise(self: Any, n: int) -> torch.Tensor:
        """Return the normal numbers of an update from `n` rows, f32, on the learner's device."""
        import torch

        if self._captured is not None and self._captured.running:
            return self._captured.noise()
        return torch.from_numpy(self.rng.normal(self._noise_shape(n))).to(self.device)

    def _draw_uniform(self: Any, n: int) -> torch.Tensor:
        """Return the uniform numbers of an update from `n` rows, f32 in [0, 1), on the learner's device."""
        import torch

        if self._captured is not None and self._captured.running:
            return self._captured.uniform()
        return torch.from_numpy(self.rng.uniform(self._uniform_shape(n))).to(self.device)

    def _host_numbers(self) -> dict[str, np.ndarray]:
        """Draw the numbers that an update takes from the host in any case, by name."""
        return {}

    def _branch(self) -> tuple[Hashable, ...]:
        """Return what decides on the host which operations the next `update` runs; there is a graph for each value."""
        return ()

    def _follow_replay(self) -> None:
        """Change the state on the host as `update` does, after a graph has run instead of it."""

    def _make_source(self) -> Any:
        """Return where the batches of captured updates come from, a `rlox.gpu.sources.Source`."""
        raise NotImplementedError

    def _make_updates(self) -> Any:
        """Return what a training on a GPU, which captures its updates, uses instead of `Updates`."""
        if self._captured is None:
            from rlox.gpu.replay import CapturedReplay

            self._captured = CapturedReplay(self, self._make_source())
        return self._captured

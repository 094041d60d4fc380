"""Settings of ``rlox train buffer=recency`` in addition to the size."""

from dataclasses import dataclass

from rlox.config import BufferConfig


@dataclass
class RecencyBufferConfig(BufferConfig):
    """Recent transitions are sampled more often: the i-th newest in proportion to decay**i."""

    name: str = "recency"  # which one; chosen by buffer=NAME
    decay: float = 0.9999  # how much less likely each older transition is than the next newer one, in (0, 1)

    def rules(self):
        yield from super().rules()
        yield "decay", 0 < self.decay < 1, "be in (0, 1)"
        yield "n_step", self.n_step == 1, "be 1"

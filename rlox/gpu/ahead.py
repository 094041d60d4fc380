"""The random numbers of the next updates, drawn on the learner's device many updates at a time."""

from __future__ import annotations

import math

import numpy as np
import torch

from rlox.envs.tensor.philox import as_signed, make_multipliers, make_round_keys, philox
from rlox.kernels.rng import Rng
from rlox.nn.graphs import Graphed
from rlox.nn.random import DeviceRng, to_normal, to_uniform
from rlox.nn.transfers import Packing, stage

_PER_BLOCK = 4  # words of a block, and numbers
_MOST_UPDATES = 128
_MOST_NUMBERS = 1 << 20  # of all updates that are drawn for at once, to bound memory


class NumbersAhead:
    """What the next updates would draw from the host's generator, one after the other, drawn on the device at once.

    An update draws a seed, whose generator decides which rows it sees, then standard normal numbers, then uniform ones.
    A block of random numbers takes about a hundred small kernels; drawn for many updates at once, they cost next to
    nothing. The host's generator advances with every update as if it had drawn them itself. So checkpoints store its
    state as ever, and a training on the CPU draws the same numbers, but for the rounding of logarithm, sine and cosine.

    Parameters
    ----------
    rng : Rng
        The host's generator.
    device : str or torch.device
        Where numbers are drawn.
    n_words : int
        Words that an update draws with its seed; 0: it draws no seed.
    domain : int
        Domain of these words.
    normal_shape, uniform_shape : tuple of int
        Shapes of its normal and of its uniform numbers; () for none.
    others : int
        Blocks that the host itself draws for an update, before these numbers.

    Attributes
    ----------
    words : Tensor (K, n_words) int64
        Of K updates, in [0, 2**32).
    normals, uniforms : Tensor (K, *shape) f32
        Likewise; uniform numbers are in [0, 1).
    """

    def __init__(
        self,
        rng: Rng,
        device: str | torch.device,
        n_words: int,
        domain: int,
        normal_shape: tuple[int, ...] = (),
        uniform_shape: tuple[int, ...] = (),
        others: int = 0,
    ):
        self._rng, self._domain, self._others = rng, domain, others
        self._seeded = int(n_words > 0)
        numbers = [math.prod(shape) if shape else 0 for shape in (normal_shape, uniform_shape)]
        self._n_of_kind = [-(-n // _PER_BLOCK) for n in numbers]  # blocks
        self._n_blocks = self._seeded + sum(self._n_of_kind)  # of an update's numbers, from the host's generator
        self._n_word_blocks = -(-n_words // _PER_BLOCK)
        self.n_ahead = max(1, min(_MOST_UPDATES, _MOST_NUMBERS // max(sum(numbers), n_words, 1)))
        k = self.n_ahead
        self.words = torch.zeros((k, n_words), dtype=torch.int64, device=device)
        self.normals, self.uniforms = (
            torch.zeros((k, *(shape or (0,))), dtype=torch.float32, device=device)
            for shape in (normal_shape, uniform_shape)
        )
        self._generator = DeviceRng(0, device=device)
        self._generator.set_state({"key": rng.key, "position": 0})
        self._key = rng.key
        self._multipliers = make_multipliers(device)
        inputs = {"position": np.zeros(1, np.int64), "round_keys": np.zeros((10, 2, k), np.int64)}
        self._packing = Packing(inputs)
        self._block = torch.zeros(self._packing.n_bytes, dtype=torch.uint8, device=device)
        self._inputs = self._packing.views(self._block)
        self._draw = Graphed(self._fill, device, "random numbers")
        self._used = k
        self._next = -1  # position of the host's generator at which the update after the last one draws

    def advance(self) -> int:
        """Return the index of the next update's numbers, and move the host's generator past them."""
        rng = self._rng
        if self._used == self.n_ahead or rng.position != self._next or rng.key != self._key:
            self._refill()
        rng.skip(self._n_blocks)
        self._next = rng.position + self._others
        self._used += 1
        return self._used - 1

    def _refill(self) -> None:
        """Draw for the updates that begin where the host's generator is."""
        state, probe = self._rng.get_state(), Rng(0)
        if state["key"] != self._key:
            self._key = state["key"]
            self._generator.set_state({"key": self._key, "position": 0})
        probe.set_state(state)
        keys = np.zeros(self.n_ahead, np.int64)
        if self._seeded:
            for i in range(self.n_ahead):
                keys[i] = as_signed(Rng(probe.integers(2**63)).key)
                probe.skip(self._n_blocks + self._others - 1)
        inputs = {
            "position": np.array([as_signed(state["position"])]),
            "round_keys": make_round_keys(torch.from_numpy(keys)).numpy(),
        }
        host = self._packing.write(inputs, stage(self._packing.n_bytes, self._block.device))
        self._block.copy_(host, non_blocking=True)
        self._draw()
        self._used = 0

    def _fill(self) -> None:
        k = self.n_ahead
        if any(self._n_of_kind):
            self._generator.position.copy_(self._inputs["position"][0])
            # The first block of an update is that of its seed; the host's own are those of the next update.
            all_words = self._generator.words(k * _PER_BLOCK * (self._n_blocks + self._others)).view(k, -1)
            at = _PER_BLOCK * self._seeded
            kinds = ((self.normals, to_normal), (self.uniforms, to_uniform))
            for (numbers, convert), n_blocks in zip(kinds, self._n_of_kind, strict=True):
                if n_blocks:
                    own = convert(all_words[:, at : at + _PER_BLOCK * n_blocks])
                    numbers.view(k, -1).copy_(own[:, : numbers[0].numel()])
                at += _PER_BLOCK * n_blocks
        if self._seeded:
            blocks = self._n_word_blocks
            counters = torch.arange(blocks, device=self.words.device).repeat(k)
            # One key for every block, without a repetition whose length the device would have to report.
            keys = self._inputs["round_keys"].unsqueeze(-1).expand(-1, -1, -1, blocks).reshape(10, 2, k * blocks)
            even, odd = philox(keys, self._multipliers, counters, self._domain)
            words = torch.stack([even, odd]).permute(2, 1, 0).reshape(k, _PER_BLOCK * blocks)
            self.words.copy_(words[:, : self.words.shape[1]])

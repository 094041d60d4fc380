"""Random numbers on a device: the generator of `rlox.kernels.rng` in tensor operations.

Nothing here waits for the device or looks at a number. The position is a tensor that every draw advances in place, so
that a CUDA graph with draws in it draws new numbers each time it is replayed.
"""

from __future__ import annotations

import math

import torch

from rlox.envs.tensor.philox import ROUNDS, WORD, as_signed, make_multipliers, make_round_keys, open_unit, philox
from rlox.kernels.rng import Rng

_TO_UNIT_F32 = 2.0**-24
_TO_UNIT_F64 = 2.0**-53


class DeviceRng:
    """The generator `rlox.kernels.rng.Rng` on a device: the same key and position give the same numbers.

    Uniform numbers and integers agree in every bit, the others to the rounding of logarithm, sine and cosine on the
    device. `permutation` returns another order than `Rng.permutation`, which exchanges elements one after the other;
    here random keys are sorted. Every method advances the position as `Rng`'s does, and none waits for the device,
    `get_state` excepted.

    Parameters
    ----------
    seed, stream : int
        As for `Rng`; both in [0, 2**64).
    device : str or torch.device
        Where the numbers are drawn.

    Attributes
    ----------
    device : torch.device
    position : torch.Tensor
        Number of blocks drawn so far, int64 (), on the device; advanced in place.
    """

    def __init__(self, seed: int, stream: int = 0, device: torch.device | str = "cpu"):
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.device = self.position.device
        self._multipliers = make_multipliers(self.device)
        self._round_keys = torch.empty((ROUNDS, 2, 1), dtype=torch.int64, device=self.device)
        self.set_state(Rng(seed, stream).get_state())

    def __repr__(self) -> str:
        return f"DeviceRng(key={self._key:#018x}, device='{self.device}')"

    def get_state(self) -> dict[str, int]:
        """Return the state as `Rng.get_state` does; waits for the device."""
        return {"key": self._key, "position": int(self.position) % (1 << 64)}

    def set_state(self, state: dict[str, int]) -> None:
        """Restore a state of `get_state` or of `Rng.get_state`, in the tensors that a captured graph reads.

        Raises ValueError for other keys or values.
        """
        checked = Rng(0)
        checked.set_state(state)
        self._key = checked.key
        self.position.fill_(as_signed(checked.position))
        self._round_keys.copy_(make_round_keys(torch.tensor([as_signed(self._key)])))

    def skip(self, blocks: int) -> None:
        """Advance by `blocks` >= 0 blocks, as if they had been drawn."""
        self.position += blocks

    def uniform(
        self,
        size: int | tuple[int, ...] | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Draw uniform numbers in [0, 1).

        Parameters
        ----------
        size : int or tuple of int, optional
            Shape of the result; by default that of `out`, or ().
        out : torch.Tensor, optional
            Tensor on the device to write to; it is then also the return value.
        dtype : torch.dtype, optional
            float32 (a grid of 2**-24, four numbers per block) or float64 (2**-53, two per block); by default that of
            `out`, or float32.

        Raises
        ------
        ValueError
            If `dtype` is another one, or `out` differs from `size`, `dtype` or the device.
        """
        shape, dtype = self._check(size, out, dtype, "uniform")
        n = math.prod(shape)
        single = dtype == torch.float32
        numbers = to_uniform(self.words(n)) if single else self._units(n)
        return self._give(numbers, n, shape, out)

    def normal(
        self,
        size: int | tuple[int, ...] | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Draw standard normal numbers, by Box and Muller's method in float64; arguments as for `uniform`."""
        shape, dtype = self._check(size, out, dtype, "normal")
        n = math.prod(shape)
        if dtype == torch.float32:
            return self._give(to_normal(self.words(n)), n, shape, out)
        first, second = self._units(n).view(-1, 2).unbind(1)
        # 1 - first is in (0, 1], so that the logarithm stays finite.
        return self._give(_normal_pairs(1.0 - first, second), n, shape, out)

    def gumbel(self, size: int | tuple[int, ...] | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Draw standard Gumbel numbers -log(-log u) as float32, always finite; arguments as for `uniform`."""
        shape, _ = self._check(size, out, torch.float32, "gumbel")
        n = math.prod(shape)
        numbers = -(-open_unit(self.words(n)).log()).log()
        return self._give(numbers.to(torch.float32), n, shape, out)

    def integers(
        self, high: int | torch.Tensor, size: int | tuple[int, ...] | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Draw int64 numbers in [0, high), two per block; the other arguments are as for `uniform`.

        `high` is an int in [1, 2**63], or an int64 tensor on the device that broadcasts to (n,), whose values are not
        checked: a captured graph then draws below the value that the tensor has when it is replayed.
        """
        if not isinstance(high, torch.Tensor) and not 1 <= high <= 1 << 63:
            raise ValueError(f"DeviceRng.integers: high must be at least 1 and at most 2**63, got {high}")
        shape, _ = self._check(size, out, torch.int64, "integers")
        n = math.prod(shape)
        low, top = self.words(n, per_block=2).view(-1, 2)[:n].unbind(1)
        # The high half of the 128-bit product with `high`, in 32-bit words.
        high_low, high_top = high & WORD, high >> 32
        middle = top * high_low + ((low * high_low >> 32) & WORD)
        carry = (middle & WORD) + low * high_top
        numbers = top * high_top + ((middle >> 32) & WORD) + ((carry >> 32) & WORD)
        return self._give(numbers, n, shape, out)

    def permutation(self, n: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a random permutation of 0 ... n - 1, int64 (n,): the order of n random keys of 64 bits.

        Two keys are equal with a probability of n**2 / 2**65; their elements then keep their order.
        """
        shape, _ = self._check(n, out, torch.int64, "permutation")
        low, top = self.words(n, per_block=2).view(-1, 2)[:n].unbind(1)
        return self._give(torch.argsort((top << 32) | low, stable=True), n, shape, out)

    def words(self, n: int, per_block: int = 4) -> torch.Tensor:
        """Draw the words of whole blocks for `n` numbers, int64 (4 * blocks,) in the order of a block, and advance."""
        blocks = -(-n // per_block)
        counters = torch.arange(blocks, device=self.device) + self.position
        even, odd = philox(self._round_keys, self._multipliers, counters, 0)
        self.position += blocks
        return torch.stack([even, odd], 0).permute(2, 1, 0).reshape(-1)

    def _units(self, n: int) -> torch.Tensor:
        """Draw float64 numbers in [0, 1), two per block."""
        low, top = self.words(n, per_block=2).view(-1, 2).unbind(1)
        return ((((top << 32) | low) >> 11) & ((1 << 53) - 1)).to(torch.float64) * _TO_UNIT_F64

    def _check(
        self, size: int | tuple[int, ...] | None, out: torch.Tensor | None, dtype: torch.dtype | None, method: str
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and data type of a result after checking the arguments."""
        where = f"DeviceRng.{method}"
        if size is None:
            shape = () if out is None else tuple(out.shape)
        else:
            shape = size if isinstance(size, tuple) else (size,)
        if any(length < 0 for length in shape):
            raise ValueError(f"{where}: size must have no negative entry, got {size}")
        dtype = dtype or (torch.float32 if out is None else out.dtype)
        if method in ("uniform", "normal") and dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{where}: dtype must be float32 or float64, got {dtype}")
        if out is not None and (tuple(out.shape) != shape or out.dtype != dtype or out.device != self.device):
            raise ValueError(
                f"{where}: out must be {dtype} of shape {shape} on {self.device}, "
                f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
            )
        return shape, dtype

    def _give(self, numbers: torch.Tensor, n: int, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        """Return the first `n` numbers in `shape`, in `out` if there is one."""
        numbers = numbers[:n].view(shape)
        return numbers if out is None else out.copy_(numbers)


def to_uniform(words: torch.Tensor) -> torch.Tensor:
    """Return the uniform numbers f32 in [0, 1) that `DeviceRng.uniform` makes of `words`, one of each."""
    return (words >> 8).to(torch.float32) * _TO_UNIT_F32


def to_normal(words: torch.Tensor) -> torch.Tensor:
    """Return the standard normal numbers f32 that `DeviceRng.normal` makes of `words` (..., 2 n), one of each."""
    first, second = open_unit(words).unflatten(-1, (-1, 2)).unbind(-1)
    return _normal_pairs(first, second).to(torch.float32)


def _normal_pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return standard normal numbers (..., 2 n) f64 of uniform ones (..., n) f64; the first of a pair is not 0."""
    radius, angle = (-2.0 * first.log()).sqrt(), 2.0 * math.pi * second
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2)

"""Philox4x32-10, the generator of kernels/philox.pxd, in tensor operations.

PyTorch has no unsigned 64-bit arithmetic on every device. Products of two 32-bit words wrap modulo 2**64 in int64 as
they do in uint64; what differs is the right shift, which copies the sign, so each shift is followed by a mask.
"""

from __future__ import annotations

import torch

WORD = 0xFFFF_FFFF
ROUNDS = 10
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
_TO_OPEN_UNIT = 2.0**-32


def as_signed(x: int) -> int:
    """Return the int64 with the 64 bits of `x`, 0 <= x < 2**64."""
    return x - (1 << 64) if x >> 63 else x


def make_round_keys(keys: torch.Tensor) -> torch.Tensor:
    """Return the keys of Philox's rounds, int64 (10, 2, n), for the 64-bit `keys`, int64 (n,)."""
    rounds = torch.arange(ROUNDS, device=keys.device).view(-1, 1, 1)
    words = torch.stack([keys, keys >> 32]) & WORD
    return (words + rounds * torch.tensor(_KEY_STEPS, device=keys.device).view(1, 2, 1)) & WORD


def make_multipliers(device: torch.device | str) -> torch.Tensor:
    """Return the constants that `philox` multiplies with, int64 (2,).

    They are an argument because a tensor made from Python numbers within a CUDA graph would be a copy from the host.
    """
    return torch.tensor(_MULTIPLIERS, device=device)


def philox(
    round_keys: torch.Tensor,
    multipliers: torch.Tensor,
    counter: torch.Tensor,
    domain: int,
    domain_high: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Philox4x32-10 blocks: the words a and c, int64 (2, ..., n), and the words b and d, both in [0, 2**32).

    Parameters
    ----------
    round_keys : torch.Tensor
        From `make_round_keys`, (10, 2, n), or (10, 2, 1) for one key.
    multipliers : torch.Tensor
        From `make_multipliers`.
    counter : torch.Tensor
        Low half of the counters, int64 (..., n), read as unsigned.
    domain, domain_high : int, int or torch.Tensor
        Low and high word of the high half, below 2**32; the high one may be a tensor (..., n).
    """
    ones = [1] * (counter.ndim - 1)
    round_keys, multipliers = round_keys.view(ROUNDS, 2, *ones, -1), multipliers.view(2, *ones, 1)
    low = torch.full_like(counter, domain)
    high = domain_high if isinstance(domain_high, torch.Tensor) else torch.full_like(counter, domain_high)
    if torch.compiler.is_compiling():
        # Element by element, so that one kernel computes all rounds; exchanging rows would split it.
        a, b, c, d = counter & WORD, counter >> 32, low, high
        for key_a, key_c in round_keys.unbind(0):
            product_a, product_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
            a, c = ((product_c >> 32) ^ b ^ key_a) & WORD, ((product_a >> 32) ^ d ^ key_c) & WORD
            b, d = product_c, product_a
        return torch.stack([a, c]), torch.stack([b, d]) & WORD
    # Words a and c are multiplied, b and d are not. Both pairs are rows of one tensor, which halves the launches.
    even, odd = torch.stack([counter & WORD, low]), torch.stack([counter >> 32, high])
    for keys in round_keys.unbind(0):
        products = (even * multipliers).flip(0)
        # `odd` keeps all 64 bits of the products, of which only the low word counts.
        even = ((products >> 32) ^ odd ^ keys) & WORD
        odd = products
    return even, odd & WORD


def open_unit(words: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers in (0, 1), symmetric about 1/2, for 32-bit `words`."""
    return (words.to(torch.float64) + 0.5) * _TO_OPEN_UNIT

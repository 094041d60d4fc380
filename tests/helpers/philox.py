"""rlox's random number generator in plain Python: Philox4x32-10, with keys derived by splitmix64."""

MASK = 2**64 - 1


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def derive_key(seed, index=0):
    return splitmix64((splitmix64(seed) + index * 0x9E3779B97F4A7C15) & MASK)


def philox(key, counter, domain=0):
    """Return the four 32-bit words of a block."""
    a, b = counter & 0xFFFFFFFF, counter >> 32
    c, d = domain & 0xFFFFFFFF, domain >> 32
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        m0, m1 = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (m1 >> 32) ^ b ^ k0, m1 & 0xFFFFFFFF, (m0 >> 32) ^ d ^ k1, m0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d

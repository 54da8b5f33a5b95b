"""Many uniform numbers from the 32 random bits of a view, in integer arithmetic, so alike on every
device.
"""

import torch

_MASK = 2**32 - 1
_WEYL = 0x9E3779B9  # 2^32 / golden ratio, odd: consecutive counters land far apart


def uniforms(bits: torch.Tensor, count: int) -> torch.Tensor:
    """A function of each view's bits alone: number i of a view is a hash of (bits, i).

    Args:
        bits: (V,), int64 with values in [0, 2^32).
        count: How many numbers each view needs.

    Returns:
        (V, count), float32: multiples of 2^-24 in [0, 1). For uniform bits each number is
        exactly uniform, since the hash is a permutation; together they are as independent
        as 2^32 different rows can be. No cryptographic strength: no privacy rests on views.
    """
    counters = torch.arange(count, device=bits.device) * _WEYL
    return (_permute((_permute(bits)[:, None] + counters) & _MASK) >> 8) * 2.0**-24


def _permute(words: torch.Tensor) -> torch.Tensor:
    """A permutation of [0, 2^32) in which each bit of the input moves each bit of the output half
    of the time.

    Two rounds of multiplication and xor-shift with the multipliers found by C. Wellons's search
    (`hash-prospector`, 2018); both are below 2^31, so that no product leaves int64.
    """
    words = words ^ (words >> 16)
    words = (words * 0x21F0AAAD) & _MASK
    words = words ^ (words >> 15)
    words = (words * 0x735A2D97) & _MASK
    return words ^ (words >> 15)

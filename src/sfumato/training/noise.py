"""The noise of an update: Gaussian, of the claimed scale, from the run's key."""

import math
from collections.abc import Mapping

import numpy as np
import torch

_GRID_BITS = 12


def standard_normal(words: np.ndarray, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Turns uniform words into independent standard normals by Box-Muller, on the device.

    In float64: a radius from 63 bits reaches 9.4 standard deviations, where 32 bits
    would cut the tails at 6.7 and with them the guarantee.

    Args:
        words: Uniform 64-bit words, shape (count rounded up to even,), uint64.
        count: How many normals.

    Returns:
        float64, shape (count,).
    """
    uniform = torch.from_numpy(words.view(np.int64)).to(device)
    half = uniform.numel() // 2
    # 63 bits as an integer w >= 0: (w + 1/2) / 2^63 lies in (0, 1], and is exact where it is small.
    radius = (uniform[:half] >> 1).bitwise_and_(2**63 - 1).double().add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
    angle = uniform[half:].double().mul_(2.0 * math.pi * 2.0**-64)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count]


def words_needed(count: int) -> int:
    """How many uniform words ``standard_normal`` reads for ``count`` normals."""
    return count + count % 2


def add_noise(grad_sum: Mapping[str, torch.Tensor], noise_stddev: float, words: np.ndarray) -> dict[str, torch.Tensor]:
    """Adds Gaussian noise to a sum of clipped gradients, once for the whole update.

    The sum is formed in float64 and rounded to a grid of about noise_stddev / 4096, so
    that the low bits of a float, which would tell which sums could have led to it
    (Mironov 2012), are not released. Rounding what is already noisy costs no privacy.

    Guarantee: every coordinate gets its own N(0, noise_stddev^2), given uniform words
    that nobody else has and that are used for no other release.

    Args:
        grad_sum: Parameter name -> sum of clipped gradients, any float type.
        noise_stddev: noise_multiplier x sensitivity, > 0.
        words: ``words_needed(total number of coordinates)`` uniform words, uint64.

    Returns:
        Parameter name -> float32 noisy sum, of the same shapes.
    """
    sizes = [value.numel() for value in grad_sum.values()]
    device = next(iter(grad_sum.values())).device
    noise = standard_normal(words, sum(sizes), device).mul_(noise_stddev)
    grid = 2.0 ** (math.floor(math.log2(noise_stddev)) - _GRID_BITS)
    noisy = {}
    for (name, value), part in zip(grad_sum.items(), noise.split(sizes), strict=True):
        noisy[name] = part.view(value.shape).add_(value).div_(grid).round_().mul_(grid).float()
    return noisy

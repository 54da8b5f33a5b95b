"""The noise of an update: Gaussian, of the claimed scale, from a fresh stream."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from sfumato.clipping.clip import at_least_float32
from sfumato.randomness import Stream

_GRID_BITS = 12
BLOCK = 4096
"""Coordinates whose noise comes from consecutive words, half of them radii and half angles."""
# Coordinates that are computed at once: so many that threads seldom wait for Python's lock.
_PIECE = 16 * BLOCK


def standard_normal(words: np.ndarray) -> np.ndarray:
    """Turns uniform words into independent standard normals by Box-Muller.

    In float64. A radius from 95 bits reaches 11.5 standard deviations, and up to 10.6 radii lie closer than the grid of
    what is released; 32 bits would cut the tails at 6.7, and with them the guarantee (`sfumato.accounting.gaussian`).

    Args:
        words: Uniform 64-bit words, shape (blocks, 2, count), "<u8": of radii, and of angles with 32 more bits of the
            radii.

    Returns:
        float64, of the same shape.
    """
    # 95 bits as an integer w >= 0: (w + 1/2) / 2^95 lies in (0, 1], and is exact where it is small.
    low = ((words[:, 1] & np.uint64(2**32 - 1)).astype(np.float64) + 0.5) * 2.0**-32
    uniform = ((words[:, 0] >> np.uint64(1)).astype(np.float64) + low) * 2.0**-63
    radius = np.sqrt(-2 * np.log(uniform))
    angle = (words[:, 1] >> np.uint64(32)).astype(np.float64) * (2.0 * math.pi * 2.0**-32)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def add_noise(grad_sum: Mapping[str, torch.Tensor], noise_stddev: float, stream: Stream) -> dict[str, torch.Tensor]:
    """Adds Gaussian noise to a sum of clipped gradients, once for the whole update: `with_noise` of all its parts.

    Args:
        grad_sum: Parameter name -> sum of clipped gradients, float types.
        noise_stddev: noise_multiplier x sensitivity, > 0.
        stream: Read from its start.

    Returns:
        Parameter name -> float32 noisy sum, of the same shapes.
    """
    values = list(grad_sum.values())
    flat = np.concatenate([at_least_float32(value).numpy(force=True).reshape(-1) for value in values])
    noisy = with_noise(torch.from_numpy(flat), noise_stddev, stream).numpy()
    parts = np.split(noisy, np.cumsum([value.numel() for value in values])[:-1])
    return {
        # Each in memory of its own: what is done to one shows in no other.
        name: torch.from_numpy(part.reshape(value.shape).copy()).to(value.device)
        for (name, value), part in zip(grad_sum.items(), parts, strict=True)
    }


def with_noise(values: torch.Tensor, noise_stddev: float, stream: Stream, first: int = 0) -> torch.Tensor:
    """Adds Gaussian noise to a part of a sum of clipped gradients.

    The sum is formed in float64 and rounded to a grid of about noise_stddev / 4096, so
    that the low bits of a float, which would tell which sums could have led to it
    (Mironov 2012), are not released. Rounding what is already noisy costs no privacy.

    Guarantee: every coordinate gets its own N(0, noise_stddev^2), given a stream that
    nobody else has and that is used for no other sum. It is a function of the stream and of the coordinate, in
    whatever parts the sum is noised.

    Args:
        values: (n,), float32 or float64: coordinates from ``first`` on.
        noise_stddev: noise_multiplier x sensitivity, > 0.
        stream: Read at the words of these coordinates.
        first: A multiple of `BLOCK`.

    Returns:
        (n,), float32, on the same device.
    """
    assert first % BLOCK == 0
    grid = 2.0 ** (math.floor(math.log2(noise_stddev)) - _GRID_BITS)
    # By NumPy, wherever the sum lies: PyTorch's and MKL's threads are missing in a process that was forked, which waits
    # for them without end; and to have fewer of them would change how the program around us computes.
    flat = values.numpy(force=True)

    # Not what lay in memory, which may be the sum.
    noisy = np.full(flat.shape, math.nan, dtype=np.float32)

    def add(start: int) -> None:
        part = flat[start : start + _PIECE]
        num_words = -(-len(part) // BLOCK) * BLOCK
        words = stream.words_at(first + start, num_words).reshape(-1, 2, BLOCK // 2)
        with np.errstate(all="ignore"):  # not what the program around us chose
            normal = standard_normal(words).reshape(-1)[: len(part)]
            normal *= noise_stddev
            normal += part
            normal /= grid
            noisy[start : start + _PIECE] = np.rint(normal, out=normal) * grid

    # Which coordinate gets which noise does not depend on the threads.
    pieces = range(0, len(flat), _PIECE)
    threads = min(torch.get_num_threads(), len(pieces))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(add, pieces))
    else:
        for start in pieces:
            add(start)
    return torch.from_numpy(noisy).to(values.device)

"""Synthetic textures: what stands for images where no image of anybody may be looked at."""

import numpy as np
import torch

_PIXELS = 64 * 32 * 32
"""Of all textures that a centre is the mean of, but at least 8 textures."""
_DISCS = 60
_NOISE = 0.05


def dead_leaves(count: int, size: int, channels: int) -> np.ndarray:
    """Discs of random sizes and colours that lie over each other (Lee, Mumford and Huang 2001): edges at all scales, as
    photographs have them, of about zero mean and unit spread, as normalised images.

    They follow from the arguments alone: NumPy keeps what `RandomState` draws the same for good (NEP 19).

    Returns:
        (count, channels, size, size), float32.
    """
    draw = np.random.RandomState(0)
    rows, columns = np.mgrid[:size, :size]
    images = np.tile(draw.normal(size=(count, channels, 1, 1)), (1, 1, size, size)).astype(np.float32)
    for _ in range(_DISCS):
        radius = (1.5 / (draw.uniform(size=(count, 1, 1)) + 0.05) + 1) * size / 32
        y, x = draw.uniform(size=(2, count, 1, 1)) * size
        inside = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
        colour = draw.normal(size=(count, 1)) + 0.4 * draw.normal(size=(count, channels))
        np.copyto(images, colour[:, :, None, None].astype(np.float32), where=inside[:, None])
    return images + _NOISE * draw.normal(size=images.shape).astype(np.float32)


def textures_for(image_size: int, channels: int) -> torch.Tensor:
    """What a centre is the mean over: (m, channels, image_size, image_size)."""
    return torch.tensor(dead_leaves(max(8, _PIXELS // image_size**2), image_size, channels))

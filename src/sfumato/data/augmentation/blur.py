"""Gaussian blur with a width of its own for each image (SimCLR: Chen et al. 2020, Appendix A)."""

import torch
from torch.nn import functional as F


def blur_radius(size: int) -> int:
    """Pixels on each side of the kernel, whose width is a tenth of the image's: 11 at 224 pixels, 1
    at 32, none below 20.
    """
    return size // 20


def gaussian_blur(pixels: torch.Tensor, sigma: torch.Tensor, radius: int) -> torch.Tensor:
    """Weighted means of neighbours; beyond the edge the image is mirrored without repeating the
    edge pixel.

    Written as sums of shifted images: a convolution would be computed in reduced precision on some
    devices, and round differently for different batches.

    Args:
        pixels: (V, C, H, W).
        sigma: (V,), standard deviations in pixels, positive.
        radius: The kernel has 2 radius + 1 taps in each direction; radius < min(H, W).

    Returns:
        (V, C, H, W).
    """
    distances = torch.arange(radius + 1, device=pixels.device, dtype=pixels.dtype)
    weights = torch.exp(-0.5 * (distances / sigma[:, None].to(pixels.dtype)) ** 2)  # (V, radius + 1)
    weights = weights / (weights[:, :1] + 2 * weights[:, 1:].sum(1, keepdim=True))
    taps = weights[:, :, None, None, None].unbind(1)  # each (V, 1, 1, 1)
    for axis, edges in ((2, (0, 0, radius, radius)), (3, (radius, radius, 0, 0))):
        size = pixels.shape[axis]
        padded = F.pad(pixels, edges, mode="reflect")
        total = pixels * taps[0]
        for distance in range(1, radius + 1):
            total += (
                padded.narrow(axis, radius - distance, size) + padded.narrow(axis, radius + distance, size)
            ) * taps[distance]
        pixels = total
    return pixels

"""A dictionary of patches of synthetic textures: what an image has of each (Coates, Lee and Ng 2011).

Their patches were of real images, clustered. These are of dead leaves (`textures`), taken as they are drawn: clusters
of them did no better (docs/defaults.md), and what is drawn follows from a public seed on every machine.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.models.textures import dead_leaves

COUNT, PATCH = 800, 6
"""K, and height and width of a patch in pixels."""
_TEXTURES, _PATCHES = 250, 40
"""Textures, and patches of each, by which patches are whitened."""
_FLAT = 0.05
"""Added to a patch's variance, for images of about unit spread: what varies less counts as flat."""
_RIDGE = 0.1
"""Added to the variances that whitening divides by."""
_THRESHOLD = 0.5
_SIZE = 32
"""Of textures in pixels; images of twice that or more are averaged down."""


class Dictionary(nn.Module):
    """How far the patches of each quarter of an image point to each of K patches, or away from it.

    A patch less its mean, over its spread, is whitened; of its product with a patch of the dictionary what is beyond
    a threshold counts, by its sign, averaged over each quarter of the image; then the root.

    Args:
        channels: Of the images.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, 2 K, 2, 2)
    """

    kernels: torch.Tensor
    offset: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        draw = np.random.RandomState(1)
        textures = dead_leaves(_TEXTURES, _SIZE, channels).astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(textures, (PATCH, PATCH), (2, 3))
        side = windows.shape[2]
        image, row, column = (draw.randint(most, size=_TEXTURES * _PATCHES) for most in (_TEXTURES, side, side))
        patches = windows[image, :, row, column].reshape(_TEXTURES * _PATCHES, -1)
        patches = patches - patches.mean(1, keepdims=True)
        patches /= np.sqrt(patches.var(1, keepdims=True) + _FLAT)
        mean = patches.mean(0)
        values, vectors = np.linalg.eigh(np.cov(patches, rowvar=False))
        whitening = vectors / np.sqrt(values + _RIDGE) @ vectors.T
        words = (patches[:COUNT] - mean) @ whitening
        words /= np.linalg.norm(words, axis=1, keepdims=True)
        kernels = words @ whitening  # each adds up to 0, as patches do: no patch need be taken less its mean
        offset = kernels @ mean
        shape = (COUNT, channels, PATCH, PATCH)
        self.register_buffer("kernels", torch.tensor(kernels.reshape(shape), dtype=torch.float32))
        self.register_buffer("offset", torch.tensor(offset[:, None, None], dtype=torch.float32))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = F.avg_pool2d(images, max(1, images.shape[-1] // _SIZE))
        similar = F.conv2d(images, self.kernels) / self._spread(images) - self.offset
        beyond = F.softshrink(similar, _THRESHOLD)
        half = -(-beyond.shape[-1] // 2)  # quarters of an odd side share their middle
        signed, size = (F.avg_pool2d(each, half, beyond.shape[-1] - half) for each in (beyond, beyond.abs()))
        return torch.cat([size + signed, size - signed], 1).clamp(min=0).div(2).sqrt()  # one map of each sign

    def _spread(self, images: torch.Tensor) -> torch.Tensor:
        """Of each patch: (rows, 1, side, side)."""
        mean, square = (F.avg_pool2d(each.mean(1, keepdim=True), PATCH, 1) for each in (images, images.square()))
        return ((square - mean.square()).clamp(min=0) + _FLAT).sqrt()

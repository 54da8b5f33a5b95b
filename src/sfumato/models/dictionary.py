"""A dictionary of patches of synthetic textures: what an image has of each (Coates, Lee and Ng 2011).

Their patches were of real images, clustered. These are of dead leaves (`textures`), taken as they are drawn: clusters
of them did no better (docs/defaults.md), and what is drawn follows from a public seed on every machine.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.models.textures import dead_leaves

COUNT, PATCH = 400, 8
"""Patches that are drawn, and their height and width in pixels."""
_STRIDE = 2
_PLACES = 4
"""Windows that averages are over, of each side."""
_TEXTURES, _PATCHES = 250, 40
"""Textures, and patches of each, by which patches are whitened."""
_FLAT = 0.05
"""Added to a patch's variance, for images of about unit spread: what varies less counts as flat."""
_RIDGE = 0.1
"""Added to the variances that whitening divides by."""
_THRESHOLD = 1.0
_SIZE = 32
"""Of textures in pixels; images of twice that or more are averaged down."""


class Dictionary(nn.Module):
    """How far the patches of each part of an image point to each of K patches, or away from it.

    A patch, every second one, less its mean, over its spread, is whitened; of its product with a patch of the
    dictionary what is beyond a threshold counts, by its sign, averaged over each of 4 x 4 windows; then the root.

    Args:
        image_size: Height and width in pixels, at least 8.
        channels: Of the images.
        mirror: Whether the dictionary has the mirror image of each patch, too: K is 800 then, else 400.

    Attributes:
        mirrored: Of each of 2 K maps that which is its mirror image for the mirror image, where the dictionary has
            these; exact for even sizes.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, 2 K, 4, 4); fewer windows below 14 pixels
    """

    kernels: torch.Tensor
    offset: torch.Tensor
    windows: torch.Tensor

    def __init__(self, image_size: int, channels: int, mirror: bool = False) -> None:
        super().__init__()
        draw = np.random.RandomState(1)
        textures = dead_leaves(_TEXTURES, _SIZE, channels).astype(np.float64)
        patches_of = np.lib.stride_tricks.sliding_window_view(textures, (PATCH, PATCH), (2, 3))
        side = patches_of.shape[2]
        image, row, column = (draw.randint(most, size=_TEXTURES * _PATCHES) for most in (_TEXTURES, side, side))
        patches = patches_of[image, :, row, column]
        patches = np.concatenate([patches, patches[..., ::-1]])  # so that mirror images are whitened alike
        patches = patches.reshape(len(patches), -1)
        patches = patches - patches.mean(1, keepdims=True)
        patches /= np.sqrt(patches.var(1, keepdims=True) + _FLAT)
        mean = patches.mean(0)
        values, vectors = np.linalg.eigh(np.cov(patches, rowvar=False))
        whitening = vectors / np.sqrt(values + _RIDGE) @ vectors.T
        words = np.concatenate([half[:COUNT] for half in np.split(patches, 2)[: 1 + mirror]])
        words = (words - mean) @ whitening
        words /= np.linalg.norm(words, axis=1, keepdims=True)
        kernels = words @ whitening  # each adds up to 0, as patches do: no patch need be taken less its mean
        offset = kernels @ mean
        count, shape = len(words), (-1, channels, PATCH, PATCH)
        self.register_buffer("kernels", torch.tensor(kernels.reshape(shape), dtype=torch.float32))
        self.register_buffer("offset", torch.tensor(offset[:, None, None], dtype=torch.float32))
        self._reduction = max(1, image_size // _SIZE)
        side = (image_size // self._reduction - PATCH) // _STRIDE + 1
        self.register_buffer("windows", torch.tensor(windows(side, min(_PLACES, side)), dtype=torch.float32))
        self.mirrored = [first + (number + COUNT) % count for first in (0, count) for number in range(count)]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = F.avg_pool2d(images, self._reduction)
        similar = F.conv2d(images, self.kernels, stride=_STRIDE) / self._spread(images) - self.offset
        beyond = F.softshrink(similar, _THRESHOLD)
        signed, size = (self.windows.T @ (each @ self.windows) for each in (beyond, beyond.abs()))
        return torch.cat([size + signed, size - signed], 1).clamp(min=0).div(2).sqrt()  # one map of each sign

    def _spread(self, images: torch.Tensor) -> torch.Tensor:
        """Of each patch: (rows, 1, side, side)."""
        mean, square = (F.avg_pool2d(each.mean(1, keepdim=True), PATCH, _STRIDE) for each in (images, images.square()))
        return ((square - mean.square()).clamp(min=0) + _FLAT).sqrt()


def windows(size: int, places: int) -> np.ndarray:
    """The mean over each of as many windows, which overlap by at most one: (size, places)."""
    rows, place = np.arange(size)[:, None], np.arange(places)
    inside = (rows >= place * size // places) & (rows < -(-(place + 1) * size // places))
    return inside / inside.sum(0)

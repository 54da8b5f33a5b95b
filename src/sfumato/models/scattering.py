"""The scattering transform of images (Bruna and Mallat 2013), as real convolutions: wavelets, moduli, averages.

What it knows of images is written here: that edges have a place, a direction and a scale. Two orders of Morlet
wavelets, as Oyallon and Mallat (2015) and, before private training, Tramer and Boneh (2021) have them.
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.errors import InputError

ANGLES = 8
_WIDTH = 0.8
"""Of the finest wavelet, across its waves, in pixels; each scale doubles it."""
_REACH = 5
"""A kernel ends this many widths from its middle."""


def morlet(scale: int, angle: float, size: int) -> np.ndarray:
    """A wave below a Gaussian half as wide across it as along it, less what of the Gaussian makes the sum 0: complex,
    (size, size). Scale 0 is the finest.
    """
    width, slant = _WIDTH * 2**scale, 4 / ANGLES
    rows, columns = np.mgrid[:size, :size] - (size - 1) / 2
    across = rows * math.cos(angle) + columns * math.sin(angle)
    along = columns * math.cos(angle) - rows * math.sin(angle)
    gauss = np.exp(-(across**2 + (slant * along) ** 2) / (2 * width**2)) * slant / (2 * math.pi * width**2)
    wave = gauss * np.exp(0.75j * math.pi / 2**scale * across)
    return wave - gauss * (wave.sum() / gauss.sum())


def averaging(size: int, width: float, stride: int) -> np.ndarray:
    """A Gaussian average of rows that go round, about the middle of each `stride` places but the first and the last:
    (size, size / stride - 2).
    """
    places = np.arange(0, size, stride)[1:-1] + (stride - 1) / 2
    distance = (np.arange(size)[:, None] - places + size / 2) % size - size / 2
    weights = np.exp(-(distance**2) / (2 * width**2))
    return weights / weights.sum(0)


class Scattering(nn.Module):
    """Moduli of wavelets and of wavelets of these, averaged over 2^J pixels.

    Images are reflected at their edges by 2^J pixels, and up to a multiple of 2^J. A wavelet of scale j is taken about
    the middle of each 2^j pixels, so that a mirror image has the same features elsewhere.

    Args:
        image_size: Height and width in pixels.
        J: Number of scales, at least 1; images must have 2^(J + 1) pixels or more.

    Attributes:
        num_maps: Of each channel, 1 + 8 J + 64 J (J - 1) / 2: the average, first order, second order.
        side: Of each map, image_size / 2^J rounded up.
        mirrored: Of each of `num_maps` that which is its mirror image for the mirror image.

    Raises:
        InputError: If there is no such J.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, channels * num_maps, side, side)
    """

    def __init__(self, image_size: int, J: int = 2) -> None:
        super().__init__()
        if J < 1 or image_size < 2 ** (J + 1):
            raise InputError(
                f"scattering: J = {J} is not possible with images of {image_size} pixels: it must be at least 1, and "
                "images of 2^(J + 1) pixels or more. Correct model.options."
            )
        self.J, self.side, self._edge = J, -(-image_size // 2**J), 2**J
        self.num_maps = 1 + ANGLES * J + ANGLES**2 * J * (J - 1) // 2
        self._more = self.side * self._edge - image_size
        size = self.side * self._edge + 2 * self._edge
        for scale in range(J):
            across = 2 * _REACH * 2**scale + (scale == 0)
            angles = [math.pi * (ANGLES // 2 - 1 - number) / ANGLES for number in range(ANGLES)]
            waves = np.stack([morlet(scale, angle, across) for angle in angles])
            kernels = np.concatenate([waves.real, waves.imag])[:, None]
            self.register_buffer(f"wavelets_{scale}", torch.tensor(kernels, dtype=torch.float32))
        for scale in range(J):
            average = averaging(size >> scale, _WIDTH * 2 ** (J - 1 - scale), 2 ** (J - scale))
            self.register_buffer(f"average_{scale}", torch.tensor(average, dtype=torch.float32))
        turned = [(-2 - number) % ANGLES for number in range(ANGLES)]  # of angle a, the number of -a
        one = [1 + scale * ANGLES + angle for scale in range(J) for angle in turned]
        pairs = range(1 + ANGLES * J, self.num_maps, ANGLES**2)
        self.mirrored = [0, *one, *(first + ANGLES * a + b for first in pairs for a in turned for b in turned)]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows, channels = images.shape[:2]
        before = self._edge + self._more // 2
        after = 2 * self._edge + self._more - before
        images = F.pad(images, (before, after, before, after), mode="reflect").flatten(0, 1)[:, None]
        first, second = [], []
        for scale in range(self.J):
            moduli = self._moduli(images, scale)
            first.append(self._averaged(moduli, scale))
            for more in range(1, self.J - scale):
                again = self._moduli(moduli.flatten(0, 1)[:, None], more)
                second.append(self._averaged(again.unflatten(0, (-1, ANGLES)).flatten(1, 2), scale + more))
        maps = torch.cat([self._averaged(images, 0), *first, *second], 1)
        return maps.reshape(rows, channels * self.num_maps, self.side, self.side)

    def _moduli(self, maps: torch.Tensor, scale: int) -> torch.Tensor:
        """(m, 1, size, size) -> (m, 8, size / 2^scale, same); maps go round at their edges."""
        reach = _REACH * 2**scale - 2**scale // 2
        maps = F.pad(maps, (reach, reach, reach, reach), mode="circular")
        real, imaginary = F.conv2d(maps, self.get_buffer(f"wavelets_{scale}"), stride=2**scale).square().chunk(2, 1)
        return (real + imaginary).sqrt()

    def _averaged(self, maps: torch.Tensor, scale: int) -> torch.Tensor:
        """(m, c, size, size) at every 2^scale-th pixel -> (m, c, side, side)."""
        average = self.get_buffer(f"average_{scale}")
        return average.T @ (maps @ average)

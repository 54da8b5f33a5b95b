"""Which part of an image a view shows.

All functions take V images with one set of parameters for each, and treat each image alone:
the values of a view do not depend on what else is in the batch, to the last bit.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_ATTEMPTS = 10
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
NUM_BOX_UNIFORMS = 2 * _ATTEMPTS + 2


def cropped(
    pixels: Tensor, top: Tensor, left: Tensor, flip: Tensor, size: tuple[int, int], *, repeats_edge: bool
) -> Tensor:
    """Crops by whole pixels, of images that go on beyond their edges as in a mirror.

    Args:
        pixels: (V, C, H, W).
        top: (V,), int64: the image's row at which the crop begins; may be negative.
        left: (V,), likewise its column.
        flip: (V,): other than 0 exchanges left and right afterwards.
        size: Rows and columns of a crop.
        repeats_edge: Whether the pixel at the edge is seen in the mirror too (NumPy's "symmetric"; else "reflect").

    Returns:
        (V, C, *size).
    """
    num_views, channels, height, width = pixels.shape
    rows = _mirrored(height, top, size[0], repeats_edge)
    columns = _mirrored(width, left, size[1], repeats_edge)
    columns = torch.where(flip[:, None] != 0, columns.flip(1), columns)
    source = (rows[:, :, None] * width + columns[:, None, :]).view(num_views, 1, size[0] * size[1])
    found = pixels.reshape(num_views, channels, height * width).gather(2, source.expand(-1, channels, -1))
    return found.view(num_views, channels, *size)


def _mirrored(size: int, start: Tensor, length: int, repeats_edge: bool) -> Tensor:
    """The pixels seen from `start` on when a line goes on as in a mirror, 1 0 | 0 1 ... n-1 | n-1 or
    2 1 | 0 1 ... n-1 | n-2: (V,) -> (V, length).
    """
    period = 2 * size if repeats_edge else max(2 * size - 2, 1)
    index = (start[:, None] + torch.arange(length, device=start.device)) % period
    return torch.minimum(index, period - repeats_edge - index)


def random_boxes(uniforms: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Boxes of the standard random resized crop (Szegedy et al. 2015; Sander et al. 2022, Section
    4.2).

    A box has an area uniform in 0.08 to 1 times the image's and a ratio of width to height
    log-uniform in 3/4 to 4/3, both before rounding to whole pixels; the first of ten such boxes
    that fits is placed uniformly. If none fits, it is the largest central box of a ratio in range.

    Args:
        uniforms: (V, NUM_BOX_UNIFORMS), in [0, 1).

    Returns:
        top, left, height and width of each box, (V,), in pixels, whole numbers in floating point.
    """
    area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * uniforms[:, :_ATTEMPTS])
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    aspect = torch.exp(low + (high - low) * uniforms[:, _ATTEMPTS : 2 * _ATTEMPTS])
    heights, widths = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()  # (V, attempts)
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    first = fits.int().argmax(1, keepdim=True)
    any_fits = fits.any(1)
    box_height = torch.where(any_fits, heights.gather(1, first)[:, 0], min(height, max(round(width / _RATIO[0]), 1)))
    box_width = torch.where(any_fits, widths.gather(1, first)[:, 0], min(width, max(round(height * _RATIO[1]), 1)))
    free_rows, free_columns = height - box_height, width - box_width
    top = torch.where(any_fits, (uniforms[:, -2] * (free_rows + 1)).floor(), (free_rows / 2).floor())
    left = torch.where(any_fits, (uniforms[:, -1] * (free_columns + 1)).floor(), (free_columns / 2).floor())
    return top, left, box_height, box_width


def resized_crop(pixels: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor) -> Tensor:
    """The part of each image in its box, stretched to the whole size by bilinear interpolation.

    Only pixels inside the box are used. A box is never larger than the image, so nothing is
    shrunk and no smoothing against aliasing is needed.

    Args:
        pixels: (V, C, H, W).
        top, left, height, width: (V,), the box in pixels.
        flip: (V,): other than 0 exchanges left and right afterwards.

    Returns:
        (V, C, H, W); within 1e-4 of exact arithmetic for pixels in [0, 1].
    """
    rows = _stretched(pixels.shape[2], top, height, pixels)
    columns = _stretched(pixels.shape[3], left, width, pixels)
    columns = torch.where(flip[:, None] != 0, columns.flip(1), columns)
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), dim=-1)  # (V, H, W, 2): x, y
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _stretched(size: int, start: Tensor, length: Tensor, pixels: Tensor) -> Tensor:
    """Where in the image each pixel of a view lies along one axis, (V, size), in grid_sample's
    units: -1 and 1 are the outer edges.
    """
    centres = torch.arange(size, device=pixels.device, dtype=pixels.dtype) + 0.5
    start, length = start[:, None].to(pixels.dtype), length[:, None].to(pixels.dtype)
    within = (centres * (length / size)).clamp(min=0.5).minimum(length - 0.5)  # the outermost pixels' centres at most
    return (start + within) * (2 / size) - 1

"""What a view shows of an image: which part of it, and in which colours.

All functions take V images with one set of parameters for each, and treat each image alone:
the values of a view do not depend on what else is in the batch, to the last bit.

Colour jitter, loss of colour and blur are for images with values in [0, 1]. Their definitions are those of
torchvision (`torchvision.transforms.v2.functional`), its effects on grey images included:
there saturation, hue and grayscale do nothing.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from sfumato.data.images import on_device

_ATTEMPTS = 10
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
NUM_BOX_UNIFORMS = 2 * _ATTEMPTS + 2
NUM_JITTER_UNIFORMS = 5
_ORDERS = torch.tensor(list(itertools.permutations(range(4))))  # (24, 4)


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


def jitter(pixels: Tensor, uniforms: Tensor, strength: tuple[float, float, float, float]) -> Tensor:
    """Changes brightness, contrast, saturation and hue by random factors in random order.

    Args:
        pixels: (V, C, H, W), C = 1 or 3, in [0, 1].
        uniforms: (V, NUM_JITTER_UNIFORMS), in [0, 1), on the CPU: the four factors, then the order.
        strength: (b, c, s, h): the first three factors are uniform in [1 - b, 1 + b] and so on, b,
            c, s <= 1; hue turns by a part of the circle uniform in [-h, h], h <= 1/2.

    Returns:
        (V, C, H, W), in [0, 1].
    """
    span, centre = torch.tensor(strength), torch.tensor([1.0, 1.0, 1.0, 0.0])
    factors = (centre + span * (2 * uniforms[:, :4] - 1)).to(pixels.dtype)
    return adjust_in_order(pixels, on_device(factors, pixels.device), _ORDERS[(uniforms[:, 4] * len(_ORDERS)).long()])


def adjust_in_order(pixels: Tensor, factors: Tensor, orders: Tensor) -> Tensor:
    """Applies the four adjustments to each image in its own order.

    Args:
        pixels: (V, C, H, W), in [0, 1].
        factors: (V, 4), of brightness, contrast, saturation and hue.
        orders: (V, 4), int64, on the CPU: each row a permutation of those four.
    """
    pixels = pixels.clone()
    adjustments = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    for place in range(4):
        for number, adjust in enumerate(adjustments[: 4 if pixels.shape[1] == 3 else 2]):
            chosen = on_device(torch.nonzero(orders[:, place] == number)[:, 0], pixels.device)
            pixels[chosen] = adjust(pixels[chosen], factors[chosen, number])
    return pixels


def adjust_brightness(pixels: Tensor, factor: Tensor) -> Tensor:
    """factor x, within [0, 1]: (V, C, H, W), (V,) -> (V, C, H, W)."""
    return (pixels * factor[:, None, None, None]).clamp_(0, 1)


def adjust_contrast(pixels: Tensor, factor: Tensor) -> Tensor:
    """Moves each pixel away from (factor > 1) or towards the image's mean grey: (V, C, H, W), (V,)
    -> (V, C, H, W).
    """
    # Line by line: a sum over a whole image alone in its batch would be split among threads, and
    # round in another way.
    mean = grey(pixels).mean(3, keepdim=True).mean(2, keepdim=True)
    return _blend(pixels, mean, factor)


def adjust_saturation(pixels: Tensor, factor: Tensor) -> Tensor:
    """Moves each pixel away from (factor > 1) or towards its own grey: (V, 3, H, W), (V,) -> (V, 3,
    H, W).
    """
    return _blend(pixels, grey(pixels), factor)


def adjust_hue(pixels: Tensor, turn: Tensor) -> Tensor:
    """Turns the hue by a part of the circle: (V, 3, H, W), (V,) -> (V, 3, H, W).

    In hue, saturation and value, v = max(r, g, b) and chroma c = max - min stay. A channel's value
    depends on the distance, in sixths of the circle, between the hue and that channel's own: v - c
    min(1, max(0, distance - 1)).
    """
    red, green, blue = pixels.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    per_chroma = 1 / torch.where(chroma == 0, 1, chroma)
    not_red = torch.where(value == green, (blue - red) * per_chroma + 2, (red - green) * per_chroma + 4)
    hue = torch.where(value == red, (green - blue) * per_chroma, not_red).add_(6 * turn[:, None, None])
    hue -= 6 * (hue / 6).floor_()  # in [0, 6]
    # Beyond [0, 1] where the nearer way is round the other side.
    shares = 2 - (hue - 3).abs_(), (hue - 2).abs_() - 1, (hue - 4).abs_() - 1
    return torch.stack([value - chroma * share.clamp_(0, 1) for share in shares], 1)


def grey(pixels: Tensor) -> Tensor:
    """Luma (ITU-R BT.601): (V, C, H, W) -> (V, 1, H, W); grey images are their own."""
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = pixels.split(1, dim=1)
    return red * 0.2989 + green * 0.587 + blue * 0.114


def _blend(pixels: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    factor = factor[:, None, None, None]
    return (pixels * factor).add_(other * (1 - factor)).clamp_(0, 1)


def gaussian_blur(pixels: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Gaussian blur (SimCLR: Chen et al. 2020, Appendix A); beyond the edge the image is mirrored without repeating the
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
            both = padded.narrow(axis, radius - distance, size) + padded.narrow(axis, radius + distance, size)
            total += both * taps[distance]
        pixels = total
    return pixels

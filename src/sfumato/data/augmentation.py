"""Views of images for augmentation multiplicity (De et al. 2022, Section 3.1 and Appendix C.2)."""

import functools
from typing import Literal

import torch

Kind = Literal["none", "flip", "crop", "crop_flip"]

_POSITION_BITS = 31  # of the 32 bits of a view; the lowest one decides the flip
_MAX_INDICES = 2**20  # source indices held at once: 8 MB, which bounds memory and halves the time on a CPU


def augment(images: torch.Tensor, bits: torch.Tensor, kind: Kind, padding: int = 4) -> torch.Tensor:
    """K views of each image, as a pure function of random bits.

    A view is a crop at the original size, uniform among all positions in the image
    with `padding` pixels of mirror padding on each edge (the edge pixel repeated:
    NumPy's "symmetric"; torch's "reflect" is another thing), then flipped from left
    to right with probability 1/2. Each view depends on its image and its own 32 bits
    alone, so that batches may be cut up and views computed in any order.

    Args:
        images: (B, C, H, W).
        bits: (B, K), int64 with values uniform in [0, 2^32).
        kind: "none" repeats the image; "flip", "crop" and "crop_flip" do what they say.
        padding: Pixels on each edge; at least 0, used by the crops.

    Returns:
        (B, K, C, H, W), of the same type and on the same device. The positions are
        uniform up to (2 padding + 1)^2 / 2^31.
    """
    num_images, channels, height, width = images.shape
    num_views = bits.shape[1]
    if kind == "none":
        return images[:, None].expand(-1, num_views, -1, -1, -1)
    padding = padding if kind in ("crop", "crop_flip") else 0
    positions = (2 * padding + 1) ** 2
    position = ((bits >> 1) * positions) >> _POSITION_BITS
    flip = bits & 1 if kind in ("flip", "crop_flip") else torch.zeros_like(bits)
    view = position * 2 + flip  # (B, K): row of the table
    table = _source_pixels(height, width, padding, images.device)
    pixels = images.reshape(num_images, 1, channels, height * width).expand(-1, num_views, -1, -1)
    views = images.new_empty(num_images, num_views, channels, height * width)
    chunk = max(1, _MAX_INDICES // (num_views * height * width))
    for start in range(0, num_images, chunk):
        rows = slice(start, start + chunk)
        source = table.index_select(0, view[rows].flatten()).view(-1, num_views, 1, height * width)
        torch.gather(pixels[rows], 3, source.expand(-1, -1, channels, -1), out=views[rows])
    return views.view(num_images, num_views, channels, height, width)


@functools.lru_cache(maxsize=8)
def _source_pixels(height: int, width: int, padding: int, device: torch.device) -> torch.Tensor:
    """Where each pixel of each possible view comes from: (2 (2 padding + 1)^2, H*W), row 2 position + flip."""
    offsets = torch.arange(2 * padding + 1) - padding
    rows = _mirror(offsets[:, None] + torch.arange(height), height)  # (P, H)
    columns = _mirror(offsets[:, None] + torch.arange(width), width)  # (P, W)
    columns = torch.stack([columns, columns.flip(1)], dim=1)  # (P, 2, W)
    table = rows[:, None, None, :, None] * width + columns[None, :, :, None, :]  # (P, P, 2, H, W)
    return table.reshape(-1, height * width).to(device)


def _mirror(index: torch.Tensor, size: int) -> torch.Tensor:
    """The pixel that stands at `index` when the row is continued by mirror images: ... 1 0 | 0 1 ... n-1 | n-1 ..."""
    index = index % (2 * size)
    return torch.minimum(index, 2 * size - 1 - index)

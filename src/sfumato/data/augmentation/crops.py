"""Crops by whole pixels and flips (De et al. 2022, Section 3.1 and Appendix C.2): small images
through a table of every view there is, large ones on a CPU copied row by row.
"""

import dataclasses
import functools

import torch

_POSITION_BITS = 31  # of the 32 bits of a view; the lowest one decides the flip
_LARGE = 2**12
"""Pixels of an image: above, a table of sources costs a CPU more than copies of whole rows."""
_MAX_INDICES = 2**20  # source indices held at once: 8 MB, which bounds memory and halves the time on a CPU


def crop_and_flip(
    images: torch.Tensor, bits: torch.Tensor, padding: int, flip: bool, size: int | None = None
) -> torch.Tensor:
    """Crops, flipped or not: at the original size with `padding` pixels of mirror padding on each
    edge, or parts of another size.

    Args:
        images: (B, C, H, W).
        bits: (B, K), int64 with values uniform in [0, 2^32).
        size: Of the parts, at most H and W.

    Returns:
        (B, K, C, H, W), or (B, K, C, size, size). The positions are uniform up to their number / 2^31.
    """
    num_images, channels, height, width = images.shape
    num_views = bits.shape[1]
    first = -padding if size is None else 0
    seen = (height, width) if size is None else (size, size)
    places = _Places(first, height - seen[0] - 2 * first + 1, width - seen[1] - 2 * first + 1, *seen)
    position = ((bits >> 1) * (places.rows * places.columns)) >> _POSITION_BITS
    flips = bits & 1 if flip else torch.zeros_like(bits)
    if images.device.type == "cpu" and height * width > _LARGE and padding < min(height, width):
        return _copied(images, position, flips, places)
    table = _source_pixels(height, width, places, images.device)
    view = position * 2 + flips  # (B, K): row of the table
    pixels = images.reshape(num_images, 1, channels, height * width).expand(-1, num_views, -1, -1)
    views = images.new_empty(num_images, num_views, channels, seen[0] * seen[1])
    chunk = max(1, _MAX_INDICES // (num_views * seen[0] * seen[1]))
    for start in range(0, num_images, chunk):
        rows = slice(start, start + chunk)
        source = table.index_select(0, view[rows].flatten()).view(-1, num_views, 1, seen[0] * seen[1])
        torch.gather(pixels[rows], 3, source.expand(-1, -1, channels, -1), out=views[rows])
    return views.view(num_images, num_views, channels, *seen)


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where a view of so many pixels may begin: from `first` on, in so many rows and columns."""

    first: int
    rows: int
    columns: int
    height: int
    width: int


def _copied(images: torch.Tensor, position: torch.Tensor, flip: torch.Tensor, places: _Places) -> torch.Tensor:
    """The same views, each copied in up to four parts: what lies in the image, and its mirrored edges."""
    _, channels, height, width = images.shape
    views = images.new_empty(*position.shape, channels, places.height, places.width)
    for image, of_image, numbers, flips in zip(images, views, position.tolist(), flip.tolist(), strict=True):
        for view, number, flipped in zip(of_image, numbers, flips, strict=True):
            top, left = (offset + places.first for offset in divmod(number, places.columns))
            for rows, from_rows, turned in _parts(top, places.height, height):
                for columns, from_columns, mirrored in _parts(left, places.width, width):
                    part = image[:, from_rows, from_columns]
                    if flipped:
                        columns = slice(places.width - columns.stop, places.width - columns.start)
                    dims = [1] * turned + [2] * (mirrored != bool(flipped))
                    view[:, rows, columns] = part.flip(dims) if dims else part
    return views


def _parts(start: int, length: int, size: int) -> list[tuple[slice, slice, bool]]:
    """A line of a view that begins `start` pixels into the image's: where parts lie in the view,
    where in the image, and whether they are mirrored.
    """
    before, after = max(-start, 0), max(start + length - size, 0)
    parts = [(slice(before, length - after), slice(start + before, start + length - after), False)]
    if before:
        parts.append((slice(0, before), slice(0, before), True))
    if after:
        parts.append((slice(length - after, length), slice(size - after, size), True))
    return parts


@functools.lru_cache(maxsize=8)
def _source_pixels(height: int, width: int, places: _Places, device: torch.device) -> torch.Tensor:
    """Where each pixel of each possible view comes from: (2 places, pixels of a view), row 2 position
    + flip.
    """
    tops, lefts = torch.arange(places.rows) + places.first, torch.arange(places.columns) + places.first
    rows = _mirror(tops[:, None] + torch.arange(places.height), height)  # (P, height of a view)
    columns = _mirror(lefts[:, None] + torch.arange(places.width), width)  # (Q, its width)
    columns = torch.stack([columns, columns.flip(1)], dim=1)  # (Q, 2, its width)
    table = rows[:, None, None, :, None] * width + columns[None, :, :, None, :]  # (P, Q, 2, its height, its width)
    return table.reshape(-1, places.height * places.width).to(device)


def _mirror(index: torch.Tensor, size: int) -> torch.Tensor:
    """The pixel that stands at `index` when the row is continued by mirror images: ... 1 0 | 0 1
    ... n-1 | n-1 ...
    """
    index = index % (2 * size)
    return torch.minimum(index, 2 * size - 1 - index)

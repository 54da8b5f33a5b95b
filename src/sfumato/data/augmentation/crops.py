"""Crops by whole pixels and flips (De et al. 2022, Section 3.1 and Appendix C.2): small images
through a table of every view there is, large ones on a CPU copied row by row.
"""

import functools

import torch

_POSITION_BITS = 31  # of the 32 bits of a view; the lowest one decides the flip
_LARGE = 2**12
"""Pixels of an image: above, a table of sources costs a CPU more than copies of whole rows."""
_MAX_INDICES = 2**20  # source indices held at once: 8 MB, which bounds memory and halves the time on a CPU


def crop_and_flip(images: torch.Tensor, bits: torch.Tensor, padding: int, crop: bool, flip: bool) -> torch.Tensor:
    """Crops at the original size with `padding` pixels of mirror padding on each edge, flipped or
    not.

    Args:
        images: (B, C, H, W).
        bits: (B, K), int64 with values uniform in [0, 2^32).

    Returns:
        (B, K, C, H, W). The positions are uniform up to (2 padding + 1)^2 / 2^31.
    """
    num_images, channels, height, width = images.shape
    num_views = bits.shape[1]
    padding = padding if crop else 0
    position = ((bits >> 1) * (2 * padding + 1) ** 2) >> _POSITION_BITS
    view = position * 2 + (bits & 1 if flip else 0)  # (B, K): row of the table
    if images.device.type == "cpu" and height * width > _LARGE and padding < min(height, width):
        return _copied(images, position, view & 1, padding)
    table = _source_pixels(height, width, padding, images.device)
    pixels = images.reshape(num_images, 1, channels, height * width).expand(-1, num_views, -1, -1)
    views = images.new_empty(num_images, num_views, channels, height * width)
    chunk = max(1, _MAX_INDICES // (num_views * height * width))
    for start in range(0, num_images, chunk):
        rows = slice(start, start + chunk)
        source = table.index_select(0, view[rows].flatten()).view(-1, num_views, 1, height * width)
        torch.gather(pixels[rows], 3, source.expand(-1, -1, channels, -1), out=views[rows])
    return views.view(num_images, num_views, channels, height, width)


def _copied(images: torch.Tensor, position: torch.Tensor, flip: torch.Tensor, padding: int) -> torch.Tensor:
    """The same views, each copied in up to four parts: what lies in the image, and its mirrored edges."""
    _, _, height, width = images.shape
    views = images.new_empty(*position.shape, *images.shape[1:])
    for image, of_image, places, flips in zip(images, views, position.tolist(), flip.tolist(), strict=True):
        for view, place, flipped in zip(of_image, places, flips, strict=True):
            top, left = (offset - padding for offset in divmod(place, 2 * padding + 1))
            for rows, from_rows, turned in _parts(top, height):
                for columns, from_columns, mirrored in _parts(left, width):
                    part = image[:, from_rows, from_columns]
                    if flipped:
                        columns = slice(width - columns.stop, width - columns.start)
                    dims = [1] * turned + [2] * (mirrored != bool(flipped))
                    view[:, rows, columns] = part.flip(dims) if dims else part
    return views


def _parts(start: int, size: int) -> list[tuple[slice, slice, bool]]:
    """A line of a view that begins `start` pixels into the image's: where parts lie in the view,
    where in the image, and whether they are mirrored.
    """
    if start == 0:
        return [(slice(0, size), slice(0, size), False)]
    inner, edge = size - abs(start), abs(start)
    if start < 0:
        return [(slice(0, edge), slice(0, edge), True), (slice(edge, size), slice(0, inner), False)]
    return [(slice(0, inner), slice(edge, size), False), (slice(inner, size), slice(inner, size), True)]


@functools.lru_cache(maxsize=8)
def _source_pixels(height: int, width: int, padding: int, device: torch.device) -> torch.Tensor:
    """Where each pixel of each possible view comes from: (2 (2 padding + 1)^2, H*W), row 2 position
    + flip.
    """
    offsets = torch.arange(2 * padding + 1) - padding
    rows = _mirror(offsets[:, None] + torch.arange(height), height)  # (P, H)
    columns = _mirror(offsets[:, None] + torch.arange(width), width)  # (P, W)
    columns = torch.stack([columns, columns.flip(1)], dim=1)  # (P, 2, W)
    table = rows[:, None, None, :, None] * width + columns[None, :, :, None, :]  # (P, P, 2, H, W)
    return table.reshape(-1, height * width).to(device)


def _mirror(index: torch.Tensor, size: int) -> torch.Tensor:
    """The pixel that stands at `index` when the row is continued by mirror images: ... 1 0 | 0 1
    ... n-1 | n-1 ...
    """
    index = index % (2 * size)
    return torch.minimum(index, 2 * size - 1 - index)

"""Images as training sees them: integers in memory or on disk, normalised by public constants when a
batch is taken.
"""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from sfumato.data.store import Rows, sha256_of_each
from sfumato.errors import InputError

_PART = 1024
"""Images that are hashed at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with labels, in a fixed order: `Examples` made of pixels.

    An image that could not be decoded keeps its index, so that N and every default
    stay what they were: its pixels are 0 here, `readable` is False, and the trainer
    makes it contribute exactly zero.

    Attributes:
        stored: (M, C, H, W), torch.uint8 or torch.uint16; 0 is black, `max_value` white. May lie in
            a file that is mapped into memory.
        labels: (N,), torch.int64: classes; or (N, F): of each finding 1, 0, or -1 where it is unknown.
        readable: (N,), torch.bool.
        mean: Public constant per channel, in units of images scaled to [0, 1]. Grey images with
            three constants are taken as colour images.
        std: Public constant per channel, likewise.
        max_value: The integer that is scaled to 1.
        groups: Which images belong together (a person), one name per image, or None.
        image_size: In pixels, to which images are resized when they are taken; None: as stored.
        crop: Side of the part that is seen of each image, at its centre or, in views, anywhere;
            None: all of it.
        rows: (N,), torch.int64: where in `stored` each image lies; None where N = M and each lies
            in its place.
        store: Where `stored` lies on disk, with a digest of each image; None: in memory.
    """

    stored: torch.Tensor
    labels: torch.Tensor
    readable: torch.Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_value: int = 255
    groups: list[str] | None = None
    image_size: int | None = None
    crop: int | None = None
    rows: torch.Tensor | None = None
    store: Rows | None = None

    def __post_init__(self) -> None:
        count = len(self.stored if self.rows is None else self.rows)
        assert self.stored.dtype in (torch.uint8, torch.uint16)
        assert self.labels.ndim in (1, 2) and len(self.labels) == count and self.labels.dtype == torch.int64
        assert self.readable.shape == (count,) and self.readable.dtype == torch.bool
        assert len(self.mean) == len(self.std) in (self.stored.shape[1], 3)
        assert self.groups is None or len(self.groups) == count

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image, as it is seen."""
        channels, height, width = self._whole
        return channels, self.crop or height, self.crop or width

    @property
    def _whole(self) -> tuple[int, int, int]:
        height, width = self.stored.shape[2:]
        return len(self.mean), self.image_size or height, self.image_size or width

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        return indices if self.rows is None else self.rows[indices]

    def integers(self, indices: torch.Tensor | None = None) -> torch.Tensor:
        """The chosen images, or all, as they are stored: (B, C, H, W)."""
        rows = self._rows(torch.arange(len(self)) if indices is None else indices)
        if self.store is not None:
            self.store.bring(rows.tolist())
        # uint16 lacks indexing in some releases of torch; int16 has the same bits.
        stored = self.stored.view(torch.int16) if self.stored.dtype == torch.uint16 else self.stored
        return stored.index_select(0, rows.to(stored.device)).view(self.stored.dtype)

    def digests(self) -> list[str]:
        """Of each image as it is stored: equal pixels have equal ones. For owner/ alone."""
        return [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).hexdigest() for row in self.integers()]

    def batch(self, indices: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """The chosen images, scaled to [0, 1] and normalised: (x / max_value - mean) / std.

        Args:
            indices: (B,), integers in [0, N); may be empty and may repeat.
            device: Where the result lies. Only the integers are copied there.

        Returns:
            (B, C, H, W), float32. Each image depends on itself alone.
        """
        batch = self.whole(indices, device)
        if self.crop is None:
            return batch
        top, left = ((whole - self.crop) // 2 for whole in batch.shape[2:])
        return batch[:, :, top : top + self.crop, left : left + self.crop].contiguous()

    def whole(self, indices: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """The same of all that `batch` shows the centre of."""
        batch = on_device(self.integers(indices), device).to(torch.float32)
        unit = self.max_value
        if batch.shape[1:] != self._whole:
            batch, unit = self._as_shaped(batch / self.max_value), 1
        scale = torch.tensor([1 / (unit * std) for std in self.std])
        shift = torch.tensor([mean / std for mean, std in zip(self.mean, self.std, strict=True)])
        scale, shift = on_device(torch.stack([scale, shift])[:, :, None, None], device)
        return batch.mul_(scale).sub_(shift)

    def _as_shaped(self, images: torch.Tensor) -> torch.Tensor:
        """Images in [0, 1], resized (bicubic with anti-aliasing), of as many channels as there are
        constants.
        """
        channels, *size = self._whole
        if not len(images):
            return images.new_zeros(0, channels, *size)
        if list(images.shape[2:]) != size:
            images = F.interpolate(images, size=size, mode="bicubic", antialias=True).clamp_(0, 1)
        return images.expand(-1, channels, -1, -1).contiguous()

    def subset(self, indices: Sequence[int]) -> "ImageSet":
        """The images at these indices, in that order; no pixel is copied."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return dataclasses.replace(
            self,
            rows=self._rows(chosen),
            labels=self.labels[chosen],
            readable=self.readable[chosen],
            groups=None if self.groups is None else [self.groups[i] for i in indices],
        )

    def content(self) -> Iterator[bytes]:
        """All that an update could depend on, in parts of which none could stand for another."""
        places: dict[str, int] = {}  # who is one person, without names
        numbers = None if self.groups is None else [places.setdefault(group, len(places)) for group in self.groups]
        yield repr((numbers, len(self))).encode()
        yield self.labels.numpy().tobytes()
        yield from self.pixels()

    def pixels(self) -> Iterator[bytes]:
        """The same of what a network sees of each image."""
        yield repr((self.stored.shape[1:], self._whole, self.shape, str(self.stored.dtype))).encode()
        yield repr((self.max_value, self.mean, self.std)).encode()
        yield self.readable.numpy().tobytes()
        for indices in torch.arange(len(self)).split(_PART):
            if self.store is None:  # the same bytes wherever the pixels lie
                yield sha256_of_each(self.integers(indices).numpy()).tobytes()
            else:
                yield self.store.columns["digests"][self._rows(indices).numpy()].tobytes()

    def largest_group(self) -> tuple[str, int] | None:
        """The group with most images that count and how many it has; None where images are not grouped."""
        if self.groups is None:
            return None
        counted = [group for group, counts in zip(self.groups, self.readable.tolist(), strict=True) if counts]
        return collections.Counter(counted).most_common(1)[0] if counted else None


def on_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor there. To a GPU it is copied from pinned memory, without waiting for what the GPU computes."""
    if tensor.is_cuda or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel."""


def normalisation(mean: list[float] | None, std: list[float] | None, channels: int, default: Scale) -> Scale:
    """The public constants of a recipe, or the default where it gives none.

    Raises:
        InputError: If there is not one finite number per channel.
    """
    chosen = []
    for key, values, fallback in (("mean", mean, default[0]), ("std", std, default[1])):
        constants = tuple(values) if values is not None else fallback
        if len(constants) != channels or not all(math.isfinite(value) for value in constants):
            what = f"is not one finite number per channel ({channels})"
            raise InputError(f"data.{key} = {list(constants)} {what}. Give {channels}, or leave it out.")
        chosen.append(constants)
    return chosen[0], chosen[1]

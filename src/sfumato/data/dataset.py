"""Images as training sees them: integers in memory, normalised by public constants when a batch is
taken.
"""

import collections
import dataclasses
import functools
import math
from typing import Literal

import torch

from sfumato.config import DataConfig
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with labels, in a fixed order.

    An image that could not be decoded keeps its index, so that N and every default
    stay what they were: its pixels are 0 here, `readable` is False, and the trainer
    makes it contribute exactly zero.

    Attributes:
        images: (N, C, H, W), torch.uint8 or torch.uint16; 0 is black, `max_value` white.
        labels: (N,), torch.int64.
        readable: (N,), torch.bool.
        mean: Public constant per channel, in units of images scaled to [0, 1].
        std: Public constant per channel, likewise.
        max_value: The integer that is scaled to 1.
        groups: Which images belong together (a person), one name per image, or None.
    """

    images: torch.Tensor
    labels: torch.Tensor
    readable: torch.Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_value: int = 255
    groups: list[str] | None = None

    def __post_init__(self) -> None:
        count, channels = self.images.shape[:2]
        assert self.images.dtype in (torch.uint8, torch.uint16)
        assert self.labels.shape == (count,) and self.labels.dtype == torch.int64
        assert self.readable.shape == (count,) and self.readable.dtype == torch.bool
        assert len(self.mean) == len(self.std) == channels
        assert self.groups is None or len(self.groups) == count

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """The chosen images, scaled to [0, 1] and normalised: (x / max_value - mean) / std.

        Args:
            indices: (B,), integers in [0, N); may be empty and may repeat.
            device: Where the result lies. Only the integers are copied there.

        Returns:
            (B, C, H, W), float32. Each image depends on itself alone.
        """
        # uint16 lacks indexing in some releases of torch; int16 has the same bits.
        stored = self.images.view(torch.int16) if self.images.dtype == torch.uint16 else self.images
        rows = stored.index_select(0, indices.to(stored.device)).view(self.images.dtype)
        batch = rows.to(device).to(torch.float32)
        if len(self.mean) == 1:
            return batch.mul_(1 / (self.max_value * self.std[0])).sub_(self.mean[0] / self.std[0])
        scale = torch.tensor([1 / (self.max_value * std) for std in self.std], device=batch.device)
        shift = torch.tensor([mean / std for mean, std in zip(self.mean, self.std, strict=True)], device=batch.device)
        return batch.mul_(scale[:, None, None]).sub_(shift[:, None, None])

    def subset(self, indices: list[int]) -> "ImageSet":
        """The images at these indices, in that order."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        stored = self.images.view(torch.int16) if self.images.dtype == torch.uint16 else self.images
        return dataclasses.replace(
            self,
            images=stored[chosen].view(self.images.dtype),
            labels=self.labels[chosen],
            readable=self.readable[chosen],
            groups=None if self.groups is None else [self.groups[i] for i in indices],
        )

    def largest_group(self) -> tuple[str, int] | None:
        """The group with most images and how many it has; None where images are not grouped."""
        if not self.groups:
            return None
        return collections.Counter(self.groups).most_common(1)[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """What a run trains on and what it is judged by.

    Attributes:
        name: As in the recipe.
        classes: Class names in label order; public.
        train: The images that get the privacy guarantee.
        held_out_files: All held-out images in their places, unreadable ones too: how many they are
            is public.
        held_out_name: "test" or "valid".

    Raises:
        InputError: If a label lies outside [0, number of classes).
    """

    name: str
    classes: tuple[str, ...]
    train: ImageSet
    held_out_files: ImageSet
    held_out_name: Literal["test", "valid"]

    def __post_init__(self) -> None:
        for part, images in (("train", self.train), (self.held_out_name, self.held_out_files)):
            wrong = torch.nonzero((images.labels < 0) | (images.labels >= len(self.classes)))
            if len(wrong):
                index = int(wrong[0])
                raise InputError(
                    f"data set {self.name}: label {int(images.labels[index])} of {part} image "
                    f"{index} is out of range: there are {len(self.classes)} classes, 0 to "
                    f"{len(self.classes) - 1}. Correct the label file."
                )

    @functools.cached_property
    def held_out(self) -> ImageSet:
        """The held-out images that can be read: accuracies are printed on them, and they get no
        guarantee.
        """
        files = self.held_out_files
        return files if files.readable.all() else files.subset(files.readable.nonzero().flatten().tolist())

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def image_size(self) -> int:
        """Height and width in pixels."""
        return self.shape[1]

    @property
    def facts(self) -> Facts:
        """What every default and every epsilon depend on."""
        return Facts(len(self.train), len(self.classes), self.image_size, self.channels)

    @property
    def mean(self) -> tuple[float, ...]:
        return self.train.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.train.std


def normalisation(
    mean: list[float] | None,
    std: list[float] | None,
    channels: int,
    default: tuple[tuple[float, ...], tuple[float, ...]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The public constants of a recipe, or the default where it gives none.

    Raises:
        InputError: If there is not one finite number per channel.
    """
    chosen = []
    for key, values, fallback in (("mean", mean, default[0]), ("std", std, default[1])):
        constants = tuple(values) if values is not None else fallback
        if len(constants) != channels or not all(math.isfinite(value) for value in constants):
            raise InputError(
                f"data.{key} = {list(constants)} does not fit images of {channels} channel(s). "
                "Give one finite number per channel."
            )
        chosen.append(constants)
    return chosen[0], chosen[1]


def check_proportions(config: DataConfig, num_classes: int) -> None:
    """Refuses class proportions that are not one share for each class.

    Raises:
        InputError: If their number is wrong or their sum is not 1 (to 0.02, for rounded ones).
    """
    shares = config.class_proportions
    if shares is not None and (len(shares) != num_classes or abs(sum(shares) - 1) > 0.02):
        raise InputError(
            f"data.class_proportions = {shares} is not one share for each of {num_classes} "
            "classes with sum 1. Correct it."
        )

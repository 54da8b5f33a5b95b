"""What a run trains on and is judged by."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, Self

import torch

from sfumato.config import DataConfig
from sfumato.data.catalogue import Facts
from sfumato.data.images import ImageSet
from sfumato.errors import InputError


class Examples(Protocol):
    """Labelled examples in a fixed order, of which batches are taken by index.

    Attributes:
        labels: (N,), torch.int64.
        readable: (N,), torch.bool: one that is not keeps its index and contributes zero.
        groups: Which examples belong together (a person), one name each, or None.
    """

    @property
    def labels(self) -> torch.Tensor: ...

    @property
    def readable(self) -> torch.Tensor: ...

    @property
    def groups(self) -> list[str] | None: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example, as a model takes it."""

    def __len__(self) -> int: ...

    def batch(self, indices: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """(B, *shape), float32, on the device; each row depends on its own example alone."""

    def subset(self, indices: Sequence[int]) -> Self:
        """The examples at these indices, in that order."""

    def content(self) -> Iterator[bytes]:
        """All that an update could depend on, for a fingerprint: what differs in anything differs
        here.
        """


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
    """

    name: str
    classes: tuple[str, ...]
    train: ImageSet
    held_out_files: ImageSet
    held_out_name: Literal["test", "valid"]

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
        return self.train.shape

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
        people = None if self.train.groups is None else len(set(self.train.groups))
        return Facts(len(self.train), len(self.classes), self.image_size, self.channels, people)

    @property
    def mean(self) -> tuple[float, ...]:
        return self.train.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.train.std


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

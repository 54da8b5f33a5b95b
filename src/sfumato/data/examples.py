"""What a run trains on and is judged by."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from typing import Literal

import torch

from sfumato.config import DataConfig
from sfumato.data.catalogue import Facts
from sfumato.data.images import ImageSet, on_device
from sfumato.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureSet:
    """Features as training sees them: what a fixed network makes of each image, computed once.

    Attributes:
        stored: (N, D), torch.float32; zeros of an image that cannot be read.
        labels: As of an `ImageSet`.
        readable: (N,), torch.bool.
        groups: Which examples belong together (a person), one name each, or None.
    """

    stored: torch.Tensor
    labels: torch.Tensor
    readable: torch.Tensor
    groups: list[str] | None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """(D,)."""
        return tuple(self.stored.shape[1:])

    def batch(self, indices: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """(B, D), float32. No copy of rows that follow each other, as all do where every example is drawn."""
        count, first = len(indices), int(indices[0]) if len(indices) else 0
        if torch.equal(indices, torch.arange(count) + first):
            return on_device(self.stored[first : first + count], device)
        return on_device(self.stored.index_select(0, indices), device)


Examples = ImageSet | FeatureSet
"""Labelled examples in a fixed order, of which batches are taken by index. One that is not readable keeps its index and
contributes zero.
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
    def facts(self) -> Facts:
        """What every default and every epsilon depend on."""
        (channels, size, _), train = self.train.shape, self.train
        people = None if train.groups is None else len(set(train.groups))
        return Facts(len(train), len(self.classes), size, channels, people, train.labels.ndim == 2)


def dataset_digest(dataset: Dataset) -> str:
    """SHA-256 of the data as training and evaluation see them, in 64 hexadecimal digits.

    Covers decoded images, labels, readable flags, people, order, class names and normalisation constants of both
    parts: an image added, removed, altered, relabelled or reordered changes it. It is for the owner alone: whoever
    holds candidates could confirm by it that they were used.
    """
    named = ["sfumato data 1", dataset.name, dataset.classes, dataset.held_out_name]
    parts = [json.dumps(named).encode()]
    for examples in (dataset.train, dataset.held_out_files):
        parts += [b"part", *examples.content()]
    return digest_of(parts)


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 of parts, in 64 hexadecimal digits; no two sequences of parts give one stream of bytes."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()


def check_proportions(config: DataConfig, num_classes: int) -> None:
    """Refuses class proportions that are not one share for each class.

    Raises:
        InputError: If their number is wrong or their sum is not 1 (to 0.02, for rounded ones).
    """
    shares = config.class_proportions
    if shares is not None and (len(shares) != num_classes or abs(sum(shares) - 1) > 0.02):
        what = f"one share for each of {num_classes} classes with sum 1"
        raise InputError(f"data.class_proportions = {shares} is not {what}. State it so, or leave it out.")

"""Images that a caller has in Python: a pair of arrays, a map-style dataset, a Hugging Face dataset.

They are read once, in the order of their indices, and decoded as the PNG files that they would be: a folder of the same
images in the same order gives the same model. What has a third part says whose each image is.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.config import DataConfig
from sfumato.data.decoding import Decoded, decode_images
from sfumato.data.listing import ImageFile
from sfumato.data.pixels import Picture
from sfumato.errors import InputError

_PART = 1024
"""Images that are held as they were given before they are decoded."""
_KINDS = (
    "give a pair (images, labels), a dataset with a length whose items are (image, label), or one of Hugging Face's "
    "datasets with the columns image and label; for people a group in the third place"
)
_COLUMNS = ("images", "labels", "groups")
_IMAGE_COLUMNS, _LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label")


class Given:
    """What a caller gave to train on, and to be judged by.

    Attributes:
        classes: As the object names them; None where it names none.

    Args:
        data: To train on; and a held-out part of it to be judged by, unless there is ``test``.
        test: To be judged by.

    Raises:
        InputError: If it is no data set.
    """

    def __init__(self, data: Any, test: Any = None) -> None:
        self._parts = {"data": _Part(data, "data")} | ({} if test is None else {"test": _Part(test, "test")})
        self.classes = self._parts["data"].classes

    def stated(self, config: DataConfig) -> DataConfig:
        """The recipe's section, with the classes that the object names.

        Raises:
            InputError: If the recipe is of other images, or nobody states the classes.
        """
        if config.name != "folder":
            raise InputError(
                f'data.name = "{config.name}" are images of their own, and data was given. Take the recipe '
                "image-folder, or leave data out."
            )
        if config.path is not None or config.layout is not None or config.group_by not in (None, "group"):
            raise InputError(
                'data was given, so data.path and data.layout say nothing, and data.group_by is "group": whose each '
                "image is stands in a third place. Leave them out."
            )
        if config.classes is None and self.classes is None:
            raise InputError(
                "data does not name its classes. They are published, and a list read from private labels would tell "
                'that an image of a class is there. State those that may be known: settings={"data.classes": ["A", '
                '"B"]}, in the order of the labels.'
            )
        return config if config.classes is not None else config.model_copy(update={"classes": list(self.classes or ())})

    def read(self, config: DataConfig, image_size: int, channels: int) -> tuple[list[ImageFile], Decoded]:
        """All images, decoded, and what would be said of their files.

        Args:
            config: With the classes.
            image_size: In pixels.
            channels: 1 or 3.

        Raises:
            InputError: If an item is no image with a label of a class.
        """
        classes = config.classes or []
        files: list[ImageFile] = []
        found: list[Decoded] = []
        for name, part in self._parts.items():
            pictures: list[Picture] = []
            for index, (image, label, *group) in enumerate(part):
                item = f"{name}[{index}]"
                if config.group_by is not None and not group:
                    raise InputError(f"{item} does not say whose it is. Give (image, label, group) of each.")
                stated = None if name == "data" else "test"
                file = ImageFile(Path(item), item, (0, 0, 0), part=stated, group=str(group[0]) if group else None)
                if config.task == "multilabel":
                    files.append(dataclasses.replace(file, findings=_findings(label, classes, item)))
                else:
                    files.append(dataclasses.replace(file, label=_class(label, classes, item)))
                pictures.append(Picture(image, item))
                if len(pictures) == _PART or index == len(part) - 1:
                    how = {"image_size": config.stored_size(image_size), "channels": channels}
                    found.append(decode_images(pictures, **how, resize=config.resize))
                    pictures.clear()
        rows, kept = torch.cat([each.images for each in found]), np.concatenate([each.kept for each in found])
        return files, Decoded(rows, [reason for each in found for reason in each.reasons], kept)


class _Part(Sequence[Sequence[Any]]):
    """One object, as (image, label) or (image, label, group) by index."""

    def __init__(self, given: Any, name: str) -> None:
        self._name = name
        self._columns: list[str] | None = None
        if isinstance(given, tuple) and len(given) in (2, 3) and all(hasattr(each, "__len__") for each in given):
            if len(set(map(len, given))) > 1:
                counts = ", ".join(f"{len(each)} {what}" for each, what in zip(given, _COLUMNS, strict=False))
                raise InputError(f"{name} has {counts}. Give one for each.")
            self._items: Any = _Arrays(given)
        elif hasattr(given, "__len__") and hasattr(given, "__getitem__"):
            self._items = given
        else:
            raise InputError(f"{name} of type {type(given).__name__} is no data set: {_KINDS}.")
        if not len(self._items):
            raise InputError(f"{name} holds no image. Give some.")
        names = getattr(given, "column_names", None)
        if isinstance(names, list):  # Hugging Face's
            wanted = (_IMAGE_COLUMNS, _LABEL_COLUMNS, ("group",))
            columns = [next((column for column in each if column in names), None) for each in wanted]
            if None in columns[:2]:
                raise InputError(f"{name} has the columns {', '.join(names)}. Name two of them image and label.")
            self._columns = [column for column in columns if column is not None]
        stated = getattr(given, "classes", None)
        if self._columns is not None:
            stated = getattr(given.features[self._columns[1]], "names", None)
        self.classes: list[str] | None = None if stated is None else [str(name) for name in stated]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Sequence[Any]:
        item = self._items[index]
        if self._columns is not None:
            return [item[column] for column in self._columns]
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            raise InputError(f"{self._name}[{index}] is no pair of an image and a label: {_KINDS}.")
        return item

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return (self[index] for index in range(len(self)))


class _Arrays:
    def __init__(self, columns: Sequence[Any]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(column[index] for column in self._columns)


def _findings(label: Any, classes: Sequence[str], item: str) -> tuple[int, ...]:
    """Of each class 1, 0, or -1 where it is unknown."""
    values = tuple(np.asarray(label).tolist()) if np.ndim(label) == 1 else ()
    if len(values) != len(classes) or not set(values) <= {-1, 0, 1}:
        raise InputError(
            f"{item} has the label {label!r}. Give {len(classes)} numbers: 1, 0, or -1 where it is unknown."
        )
    return tuple(map(int, values))


def _class(label: Any, classes: Sequence[str], item: str) -> str:
    """The name of a label: a class's own, or its number."""
    if isinstance(label, str) and label in classes:
        return label
    value = label.item() if isinstance(label, (np.generic, torch.Tensor)) and label.ndim == 0 else label
    if isinstance(value, int) and 0 <= value < len(classes):
        return classes[value]
    raise InputError(
        f"{item} has the label {label!r}, which is no class: there are {', '.join(classes)}. Give a name of these, or "
        f"a number from 0 to {len(classes) - 1}."
    )

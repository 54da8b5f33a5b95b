"""Images that a caller has in Python: a pair of arrays, a map-style dataset, a Hugging Face dataset.

They are read once, in the order of their indices, and decoded as the PNG files that they would be: a folder of the same
images in the same order gives the same model. What has a third part says whose each image is.
"""

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.config import DataConfig
from sfumato.data.decoding import Decoded, decode_images
from sfumato.data.listing import ImageFile
from sfumato.data.pixels import Picture
from sfumato.data.tables import as_text
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
        self._parts = [_Part(data, "data")] + ([] if test is None else [_Part(test, "test")])
        self.classes = self._parts[0].classes

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
        of_folders = [key for key in ("path", "layout", "tables", "exclude") if getattr(config, key)]
        if of_folders or config.group_by not in (None, "group"):
            raise InputError(
                f"data was given, so data.{(of_folders or ['group_by'])[0]} says nothing. Leave it out. Whose each "
                'image is stands in a third place, for data.group_by = "group".'
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
        classes, size = config.classes or [], config.stored_size(image_size)
        files: list[ImageFile] = []
        found: list[Decoded] = []
        for part in self._parts:
            for start in range(0, part.count, _PART):
                pictures: list[Picture] = []
                for index in range(start, min(start + _PART, part.count)):
                    item, (image, label, *group) = f"{part.name}[{index}]", part[index]
                    if config.group_by is not None and not group:
                        raise InputError(f"{item} does not say whose it is. Give (image, label, group) of each.")
                    findings = part.findings(label, classes, item) if config.task == "multilabel" else None
                    own = "" if findings is not None else part.class_of(label, classes, item)
                    whose = as_text(item, "group", np.asarray(group[0]).tolist()) if group else None
                    side = None if part.name == "data" else "test"
                    files.append(
                        ImageFile(Path(item), item, (0, 0, 0), label=own, findings=findings, part=side, group=whose)
                    )
                    pictures.append(Picture(image, item))
                found.append(decode_images(pictures, image_size=size, channels=channels, resize=config.resize))
        rows, kept = torch.cat([each.images for each in found]), np.concatenate([each.kept for each in found])
        return files, Decoded(rows, [reason for each in found for reason in each.reasons], kept)


class _Part:
    """One object, as (image, label) or (image, label, group) by index.

    Attributes:
        name: "data" or "test".
        count: How many items it has.
        classes: As the object names them, in the order of its numbers; None where it names none.
    """

    def __init__(self, given: Any, name: str) -> None:
        if isinstance(given, Mapping) or not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
            raise InputError(f"{name} of type {type(given).__name__} is no data set: {_KINDS}.")
        self.name, self.count, self._items = name, len(given), given
        self._arrays, self._columns, self._has_numbers = list[Any](), list[str](), False
        if isinstance(given, tuple) and len(given) in (2, 3) and all(hasattr(each, "__len__") for each in given):
            if len(set(map(len, given))) > 1:
                counts = ", ".join(f"{len(each)} {what}" for each, what in zip(given, _COLUMNS, strict=False))
                raise InputError(f"{name} has {counts}. Give one for each.")
            self._arrays = [each.to_numpy() if hasattr(each, "to_numpy") else each for each in given]
            self.count = len(given[0])
        if not self.count:
            raise InputError(f"{name} holds no image. Give some.")
        stated, names = getattr(given, "classes", None), getattr(given, "column_names", None)
        if isinstance(names, list):  # Hugging Face's
            wanted = (_IMAGE_COLUMNS, _LABEL_COLUMNS, ("group",))
            columns = [next((column for column in each if column in names), None) for each in wanted]
            if None in columns[:2]:
                raise InputError(f"{name} has the columns {', '.join(names)}. Name two of them image and label.")
            self._columns = [column for column in columns if column is not None]
            feature = given.features[self._columns[1]]
            self._has_numbers = hasattr(feature, "feature")  # a list of the numbers of those that are there
            stated = getattr(getattr(feature, "feature", feature), "names", None)
        self.classes = [str(each) for each in stated] if isinstance(stated, (list, tuple)) else None

    def __getitem__(self, index: int) -> Sequence[Any]:
        try:
            item: Any = tuple(array[index] for array in self._arrays) or self._items[index]
        except KeyError as error:
            raise InputError(f"{self.name} gives nothing for the index {index}: {_KINDS}.") from error
        if self._columns:
            return [item[column] for column in self._columns]
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            raise InputError(f"{self.name}[{index}] is no pair of an image and a label: {_KINDS}.")
        return item

    def findings(self, label: Any, classes: Sequence[str], item: str) -> tuple[int, ...]:
        """Of each class 1, 0, or -1 where it is unknown."""
        own = self.classes or classes
        values: list[Any] = []
        if np.ndim(label) == 1:
            values = [own[value] if self._has_numbers else value for value in getattr(label, "tolist", lambda: label)()]
        said: dict[Any, int] = {item: 1}  # no class
        are_names = all(isinstance(value, str) for value in values)
        if self._has_numbers or (are_names and (values or isinstance(label, (list, tuple)))):
            said = dict.fromkeys(own, 0) | dict.fromkeys(values, 1)
        elif len(values) == len(own) and set(values) <= {-1, 0, 1}:
            said = dict(zip(own, map(int, values), strict=True))
        if not said.keys() <= set(classes):
            raise InputError(
                f"{item} has the label {reprlib.repr(label)}. Give {len(classes)} numbers: 1, 0, or -1 where it is "
                f"unknown; or the names that it has, of {', '.join(classes)}."
            )
        return tuple(said.get(name, -1) for name in classes)

    def class_of(self, label: Any, classes: Sequence[str], item: str) -> str:
        """The name of a label: a class's own, or its number in the object's order."""
        own = self.classes or classes
        value = label.item() if isinstance(label, (np.generic, torch.Tensor)) and label.ndim == 0 else label
        if isinstance(value, int) and 0 <= value < len(own):
            if self.classes is None and str(int(value)) in own and own[value] != str(int(value)):
                raise InputError(f"{item} has the label {value}, the number of {own[value]!r}. Give names, as texts.")
            value = own[value]
        if isinstance(value, str) and value in classes:
            return value
        raise InputError(
            f"{item} has the label {reprlib.repr(label)}, which is no class: there are {', '.join(classes)}. Give a "
            f"name of these, or a number from 0 to {len(own) - 1}."
        )

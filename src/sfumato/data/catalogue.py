"""The public numbers of a data set, which every default and every epsilon depend on."""

import dataclasses

from sfumato.config import DataConfig
from sfumato.errors import InputError


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a data set without looking at an image.

    Attributes:
        num_examples: N, the number of training images; an unreadable one counts.
        num_classes: Number of classes.
        image_size: Height and width in pixels.
        channels: 1 or 3.
    """

    num_examples: int
    num_classes: int
    image_size: int
    channels: int


_TRAIN_AND_VALID = {  # name: (train, train+valid, classes, size, channels); De et al. 2022, Table 11 and C.2
    "digits": (1150, 1437, 10, 8, 1),
    "mnist": (55_000, 60_000, 10, 28, 1),
    "fashion_mnist": (55_000, 60_000, 10, 28, 1),
    "cifar10": (45_000, 50_000, 10, 32, 3),
    "imagenet": (1_271_167, 1_281_167, 1000, 224, 3),
}


def public_facts(config: DataConfig) -> Facts | None:
    """The facts of a named data set; None for a folder, whose size only its owner knows.

    Raises:
        InputError: If the recipe asks for more images than there are.
    """
    if config.name not in _TRAIN_AND_VALID:
        return None
    train, train_and_valid, classes, size, channels = _TRAIN_AND_VALID[config.name]
    available = train if config.split == "train" else train_and_valid
    num_examples = config.num_examples or available
    if num_examples > available:
        raise InputError(
            f'data.num_examples = {num_examples} is more than the {available} images of data set {config.name}, split "{config.split}". '
            "Choose fewer, or take the key out to train on all."
        )
    return Facts(num_examples, classes, size, channels)

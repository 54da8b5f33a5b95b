"""The public numbers of a data set, which every default and every epsilon depend on."""

import dataclasses
from pathlib import Path

from sfumato.config import DataConfig
from sfumato.errors import InputError

ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
"""What may stand in the place of ImageNet's folders (`sfumato.data.imagenet`)."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a data set without looking at an image.

    Attributes:
        num_examples: N, the number of training images; an unreadable one counts.
        num_people: How many people they are of; None where nobody says.
        is_multilabel: Whether an image has any number of labels, and none of some.
        num_classes: Number of classes.
        image_size: Height and width in pixels.
        channels: 1 or 3.
    """

    num_examples: int
    num_classes: int
    image_size: int
    channels: int
    num_people: int | None = None
    is_multilabel: bool = False


@dataclasses.dataclass(frozen=True)
class NamedSet:
    """The public facts of a benchmark.

    Attributes:
        classes: Names in label order.
        num_train: Images of its training part, those of `num_valid` among them: what "train+valid" trains on.
        num_valid: How many of them "train" holds out (De et al. 2022, Table 11).
        num_test: Images of its test part.
        shape: (channels, height, width), which are equal.
        mean: Per channel, published.
        std: Per channel, published.
        max_value: The integer that is scaled to 1.
        files: Below the data root.
        folders: For images in folders of classes: that of the set, of its training and of its test part.
    """

    classes: tuple[str, ...]
    num_train: int
    num_valid: int
    num_test: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_value: int = 255
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


def _mnist_files(folder: str) -> tuple[str, ...]:
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(f"{folder}/raw/{part}-ubyte" for part in parts)


def _numbered(count: int) -> tuple[str, ...]:
    """Classes by their number in the order of the files, from 1 on."""
    return tuple(str(number) for number in range(1, count + 1))


_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_FILES = (*(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)),)
_CIFAR10_FILES += ("cifar-10-batches-py/test_batch", "cifar-10-batches-py/batches.meta")
_CIFAR100_FILES = ("cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta")
_IMAGENET32_FILES = (*(f"imagenet32/train_data_batch_{i}" for i in range(1, 11)), "imagenet32/val_data")
_SVHN_FILES = ("train_32x32.mat", "test_32x32.mat")
_IMAGENET_FOLDERS, _PLACES_FOLDERS = ("imagenet", "train", "val"), ("places365_standard", "train", "val")
_CIFAR10_SCALE = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
_CIFAR100_SCALE = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)
_SVHN_SCALE = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
_IMAGENET_SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)
_CIFAR100 = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()
)

# Classes; images to train on, to validate, to test; shape; mean and standard deviation.
NAMED: dict[str, NamedSet] = {
    "digits": NamedSet(_DIGITS, 1437, 287, 360, (1, 8, 8), (0.5,), (0.5,), max_value=16),
    "mnist": NamedSet(_DIGITS, 60_000, 5_000, 10_000, (1, 28, 28), (0.1307,), (0.3081,), files=_mnist_files("MNIST")),
    "fashion_mnist": NamedSet(
        _FASHION, 60_000, 5_000, 10_000, (1, 28, 28), (0.2860,), (0.3530,), files=_mnist_files("FashionMNIST")
    ),
    "cifar10": NamedSet(_CIFAR10, 50_000, 5_000, 10_000, (3, 32, 32), *_CIFAR10_SCALE, files=_CIFAR10_FILES),
    "cifar100": NamedSet(_CIFAR100, 50_000, 5_000, 10_000, (3, 32, 32), *_CIFAR100_SCALE, files=_CIFAR100_FILES),
    "svhn": NamedSet(_DIGITS, 73_257, 5_000, 26_032, (3, 32, 32), *_SVHN_SCALE, files=_SVHN_FILES),
    "imagenet32": NamedSet(
        _numbered(1000), 1_281_167, 10_000, 50_000, (3, 32, 32), _HALF, _HALF, files=_IMAGENET32_FILES
    ),
    "imagenet": NamedSet(
        _numbered(1000), 1_281_167, 10_000, 50_000, (3, 224, 224), *_IMAGENET_SCALE, folders=_IMAGENET_FOLDERS
    ),
    "places365": NamedSet(
        _numbered(365), 1_803_460, 0, 36_500, (3, 256, 256), *_IMAGENET_SCALE, folders=_PLACES_FOLDERS
    ),
}
"""The public facts of every named data set. Its name is also in `sfumato.config.DataConfig`, its reader in
`sfumato.data.benchmarks`.
"""


def missing(name: str, root: Path | None) -> str | None:
    """What a named data set lacks below a data root: its first file or folder that is not there; None if all are.

    Sizes and contents are looked at when it is read.
    """
    named = NAMED[name]
    if root is None:
        return "a data root: --data-root or the variable SFUMATO_DATA" if named.files or named.folders else None
    wanted = [[root / relative] for relative in named.files]
    if named.folders:
        home, *parts = named.folders
        archives = ARCHIVES if name == "imagenet" else {}
        wanted += [[root / home / each for each in (part, archives.get(part, part))] for part in parts]
    return next((str(places[0]) for places in wanted if not any(place.exists() for place in places)), None)


def public_facts(config: DataConfig) -> Facts | None:
    """The facts of a named data set; None for a folder, whose size only its owner knows.

    Raises:
        InputError: If the recipe asks for more images than there are.
    """
    if config.name not in NAMED:
        return None
    named = NAMED[config.name]
    available = named.num_train - (named.num_valid if config.split == "train" else 0)
    num_examples = config.num_examples or available
    if num_examples > available:
        there = f"the {available} images of data set {config.name}, split {config.split}"
        raise InputError(f"data.num_examples = {num_examples} is more than {there}. Choose fewer, or leave it out.")
    channels, size, _ = named.shape
    return Facts(num_examples, len(named.classes), config.image_size or size, config.channels or channels)

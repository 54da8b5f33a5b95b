"""Public benchmark images from the files that their authors published."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from sfumato.data import imagenet32
from sfumato.data.archives import imagenet
from sfumato.data.catalogue import NamedSet
from sfumato.data.decoding import decode_cached
from sfumato.data.listing import ImageFile, find_images, refusing
from sfumato.data.store import Rows
from sfumato.errors import InputError

_ORIGINAL = "Put the original file there."


@dataclasses.dataclass(frozen=True)
class Raw:
    """All images of a named set, its training part first, as its files give them.

    Attributes:
        images: (N, C, H, W), uint8.
        labels: (N,), int64.
        readable: (N,), bool.
        store: Where the images lie on disk; None: in memory.
    """

    images: torch.Tensor
    labels: torch.Tensor
    readable: torch.Tensor
    store: Rows | None = None


Reader = Callable[[str, NamedSet, Path, Callable[[str], None]], Raw]


def read(name: str, named: NamedSet, root: Path | None, image_size: int, report: Callable[[str], None]) -> Raw:
    """The images of a named set.

    Args:
        name: Of `NAMED`.
        named: Its public facts.
        root: The folder that holds the sets.
        image_size: To which images of many sizes are resized; the others stay as they are.
        report: Takes lines for the user.

    Raises:
        InputError: If a file is missing, damaged or of other images.
    """
    if name == "digits":
        return _digits()
    where = "Name the folder that holds it by --data-root or the variable SFUMATO_DATA."
    if root is None:
        raise InputError(f"data set {name} lies in no known folder. {where}")
    missing = next((root / relative for relative in named.files if not (root / relative).is_file()), None)
    if missing is not None:
        raise InputError(f"data set {name}: {missing} is missing. {where}")
    if named.folders:
        return _of_folders(name, named, root, image_size, report)
    return _READERS[name](name, named, root, report)


def _in_memory(images: torch.Tensor, labels: torch.Tensor) -> Raw:
    return Raw(images.contiguous(), labels, torch.ones(len(images), dtype=torch.bool))


def _digits() -> Raw:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return _in_memory(
        torch.from_numpy(bunch.images).to(torch.uint8)[:, None], torch.from_numpy(bunch.target).to(torch.int64)
    )


def _mnist(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> Raw:
    # torchvision's own class would prefer other files beside these, pickles of which nothing is known
    from torchvision.datasets.mnist import read_image_file, read_label_file

    found = []
    for file in named.files:
        read = read_image_file if "idx3" in file else read_label_file
        kinds = (AssertionError, RuntimeError, ValueError, TypeError, LookupError)
        with refusing(f"data set {name}: {root / file} is damaged", _ORIGINAL, *kinds):
            found.append(read(str(root / file)))
    return _in_memory(torch.cat(found[::2])[:, None], torch.cat(found[1::2]).long())


def _of_torchvision(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> Raw:
    """CIFAR-10, CIFAR-100 and SVHN, whose files are compared with their published checksums."""
    from torchvision import datasets

    # NumPy warns about the pickles of CIFAR.
    with refusing(f"data set {name} in {root} is damaged", _ORIGINAL, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "svhn":
            parts = [datasets.SVHN(str(root), split=split) for split in ("train", "test")]
        else:
            kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
            parts = [kind(str(root), train=train) for train in (True, False)]
    images = torch.cat([torch.as_tensor(part.data) for part in parts])
    labels = [torch.as_tensor(part.labels if name == "svhn" else part.targets).long() for part in parts]
    return _in_memory(images if name == "svhn" else images.permute(0, 3, 1, 2), torch.cat(labels))


def _imagenet32(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> Raw:
    rows = imagenet32.read(name, named, root, report)
    images, labels = (torch.from_numpy(rows.columns[column]) for column in ("values", "labels"))
    return Raw(images, labels, torch.ones(len(labels), dtype=torch.bool), rows)


def _of_folders(name: str, named: NamedSet, root: Path, image_size: int, report: Callable[[str], None]) -> Raw:
    """Of folders `<part>/<class>/*`, or of ImageNet's archives in their place: decoded once to files that
    are mapped.
    """
    files: list[ImageFile] = []
    home = root / named.folders[0]
    known: list[str] = []
    for part, count in zip(named.folders[1:], (named.num_train, named.num_test), strict=True):
        place = home / part
        if place.is_dir():
            found = [
                dataclasses.replace(file, label=file.name.rpartition("/")[0].split("/")[0])
                for file in find_images(place)
            ]
        else:
            found = imagenet.images_of(home, part) if name == "imagenet" else []
            place = home / imagenet.ARCHIVES[part] if found else place
        classes = sorted({file.label for file in found} - {""})
        if len(found) != count or len(classes) != named.num_classes or any(not file.label for file in found):
            raise InputError(
                f"data set {name}: {place} holds {len(found)} images in {len(classes)} folders, not "
                f"{count} in {named.num_classes}. Put the official archive there, or its images in one folder a class."
            )
        known = known or classes
        if classes != known:
            other = next(label for label in classes if label not in known)
            raise InputError(
                f"data set {name}: {home / part} has a folder {other}/, which {home / named.folders[1]} has not. "
                "Give both parts the same names of classes."
            )
        files += [dataclasses.replace(file, name=f"{part}/{file.name}") for file in found]
    decoded = decode_cached(home, files, image_size=image_size, channels=named.shape[0], report=report)
    decoded.report_unreadable(map(str, files), report)
    places = {label: place for place, label in enumerate(known)}
    labels = torch.tensor([places[file.label] for file in files])
    return Raw(decoded.images, labels, decoded.readable, decoded.store)


_READERS: dict[str, Reader] = {
    "mnist": _mnist,
    "fashion_mnist": _mnist,
    "cifar10": _of_torchvision,
    "cifar100": _of_torchvision,
    "svhn": _of_torchvision,
    "imagenet32": _imagenet32,
}

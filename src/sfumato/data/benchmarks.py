"""Public benchmark images from the files that their authors published."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from sfumato.data import imagenet32
from sfumato.data.archives import imagenet
from sfumato.data.cache import decode_cached
from sfumato.data.catalogue import NamedSet
from sfumato.data.listing import FoundFile, find_images
from sfumato.data.raw import Raw, damaged
from sfumato.errors import InputError

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
    for relative, size in named.files:
        path = root / relative
        if not path.is_file():
            raise InputError(f"data set {name}: {path} is missing. {where}")
        if size is not None and path.stat().st_size != size:
            raise InputError(
                f"data set {name}: {path} is damaged: it has {path.stat().st_size} bytes, not "
                f"{size}. Put the original file there."
            )
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
    for file, _ in named.files:
        is_images = "idx3" in file
        head = (root / file).read_bytes()[:4]
        if head != (b"\0\0\x08\x03" if is_images else b"\0\0\x08\x01"):
            raise damaged(name, root / file, "no such header")
        found.append((read_image_file if is_images else read_label_file)(str(root / file)))
    return _in_memory(torch.cat(found[::2])[:, None], torch.cat(found[1::2]).long())


def _cifar(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> Raw:
    import torchvision.datasets

    kind = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]
    _refuse_other_files(name, named, root, dict([*kind.train_list, *kind.test_list]))
    try:
        with warnings.catch_warnings():
            # NumPy's about the pickles of CIFAR, which are read only if their published checksums are right
            warnings.simplefilter("ignore")
            parts = [kind(str(root), train=train, download=False) for train in (True, False)]
    except Exception as error:
        raise damaged(name, root / named.files[0][0], str(error)) from None
    images = torch.cat([torch.as_tensor(part.data) for part in parts]).permute(0, 3, 1, 2)
    return _in_memory(images, torch.cat([torch.as_tensor(part.targets, dtype=torch.int64) for part in parts]))


def _svhn(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> Raw:
    """Its files give the digit 0 the label 10."""
    from scipy.io import loadmat

    images, labels = [], []
    for (file, _), count in zip(named.files, (named.num_train, named.num_test), strict=True):
        try:
            held = loadmat(str(root / file))
            pixels, digits = np.asarray(held["X"]), np.asarray(held["y"]).ravel()
        except Exception as error:  # of a file that is cut, or no MATLAB file
            raise damaged(name, root / file, str(error)) from None
        channels, *size = named.shape
        if pixels.dtype != np.uint8 or pixels.shape != (*size, channels, count):
            raise damaged(name, root / file, f"it holds {pixels.dtype} of shape {pixels.shape}")
        if digits.shape != (count,) or digits.dtype.kind not in "iu" or not set(digits.tolist()) <= set(range(1, 11)):
            raise damaged(name, root / file, f"its labels are not {count} whole numbers from 1 to 10")
        images.append(torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))))
        labels.append(torch.from_numpy(digits.astype(np.int64) % 10))
    return _in_memory(torch.cat(images), torch.cat(labels))


def _of_folders(name: str, named: NamedSet, root: Path, image_size: int, report: Callable[[str], None]) -> Raw:
    """Of folders `<part>/<class>/*`, or of ImageNet's archives in their place: decoded once to files that
    are mapped.
    """
    files: list[FoundFile] = []
    labels: list[int] = []
    home = root / named.folders[0]
    known: list[str] = []
    for part, count in zip(named.folders[1:], (named.num_train, named.num_test), strict=True):
        found, archive = _part_of_set(name, named, home, part)
        classes = sorted({label for _, label in found} - {""})
        if len(found) != count or len(classes) != named.num_classes or any(not label for _, label in found):
            remedy = "Unpack the official archive there, one folder a class."
            if archive is not None:
                remedy = "Put the original archive there."
            raise InputError(
                f"data set {name}: {archive or home / part} holds {len(found)} images in {len(classes)} folders, not "
                f"{count} in {named.num_classes}. {remedy}"
            )
        known = known or classes
        if classes != known:
            other = next(label for label in classes if label not in known)
            raise InputError(
                f"data set {name}: {home / part} has a folder {other}/, which {home / named.folders[1]} has not. "
                "Give both parts the same names of classes."
            )
        places = {label: place for place, label in enumerate(classes)}
        files += [dataclasses.replace(file, name=f"{part}/{file.name}") for file, _ in found]
        labels += [places[label] for _, label in found]
    decoded = decode_cached(home, files, image_size=image_size, channels=named.shape[0], report=report)
    _report_unreadable(files, decoded.reasons, report)
    return Raw(decoded.images, torch.tensor(labels), decoded.readable, decoded.digests)


def _part_of_set(name: str, named: NamedSet, home: Path, part: str) -> tuple[list[tuple[FoundFile, str]], Path | None]:
    """The images of one part and their classes, by name ("": it lies in none); and the archive that they are in."""
    if (home / part).is_dir() or name != "imagenet":
        found = find_images(home / part) if (home / part).is_dir() else []
        return [(file, file.name.split("/")[0] if "/" in file.name else "") for file in found], None
    is_train = part == named.folders[1]
    listed = imagenet.training_images(home) if is_train else imagenet.validation_images(home)
    return listed, home / imagenet.ARCHIVES[part] if listed else None


def _report_unreadable(
    files: Sequence[FoundFile], reasons: Sequence[str | None], report: Callable[[str], None]
) -> None:
    wrong = [(file, reason) for file, reason in zip(files, reasons, strict=True) if reason is not None]
    for file, reason in wrong[:20]:
        report(f"unreadable image {file}: {reason}; it contributes nothing")
    if len(wrong) > 20:
        report(f"and {len(wrong) - 20} more that cannot be read")


def _refuse_other_files(name: str, named: NamedSet, root: Path, md5: dict[str, str]) -> None:
    """Raises InputError for a file whose published checksum is wrong."""
    from torchvision.datasets.utils import check_integrity

    for file, _ in named.files:
        path = root / file
        if path.name in md5 and not check_integrity(str(path), md5[path.name]):
            raise damaged(name, path, "its checksum is another")


_READERS: dict[str, Reader] = {
    "mnist": _mnist,
    "fashion_mnist": _mnist,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "svhn": _svhn,
    "imagenet32": imagenet32.read,
}

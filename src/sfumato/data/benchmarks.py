"""Public benchmark images from the files that their authors published."""

import dataclasses
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from sfumato.data import cache, store
from sfumato.data.archives import imagenet
from sfumato.data.cache import decode_cached
from sfumato.data.catalogue import NamedSet
from sfumato.data.images import Digests
from sfumato.data.listing import FoundFile, find_images
from sfumato.errors import InputError

_CLASSES_OF_IMAGENET = 1000


@dataclasses.dataclass(frozen=True)
class Raw:
    """All images of a named set, its training part first.

    Attributes:
        images: (N, C, H, W), uint8; may lie in a file that is mapped.
        labels: (N,), int64.
        readable: (N,), bool.
        digests: Of images that lie in a file.
    """

    images: torch.Tensor
    labels: torch.Tensor
    readable: torch.Tensor
    digests: Digests | None = None


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
            raise _damaged(name, root / file, "no such header")
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
        raise _damaged(name, root / named.files[0][0], str(error)) from None
    images = torch.cat([torch.as_tensor(part.data) for part in parts]).permute(0, 3, 1, 2)
    return _in_memory(images, torch.cat([torch.as_tensor(part.targets, dtype=torch.int64) for part in parts]))


def _svhn(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> Raw:
    """Its files give the digit 0 the label 10."""
    from scipy.io import loadmat

    images, labels = [], []
    for file, _ in named.files:
        try:
            held = loadmat(str(root / file))
            images.append(torch.from_numpy(np.ascontiguousarray(held["X"].transpose(3, 2, 0, 1))))
            labels.append(torch.from_numpy(held["y"].astype(np.int64).ravel() % 10))
        except Exception as error:  # of a file that is cut, or no MATLAB file
            raise _damaged(name, root / file, str(error)) from None
    return _in_memory(torch.cat(images), torch.cat(labels))


def _imagenet32(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> Raw:
    """Of pickled batches (Chrabaszcz et al. 2017): copied once to a file that is mapped, for they take
    4 GB.
    """
    paths = [root / file for file, _ in named.files]
    settings = {"name": name, "files": [[str(path.resolve()), *_stamp(path)] for path in paths]}
    count = named.num_train + named.num_test
    folder = cache.own_folder(settings, "images")
    if folder is None:
        raise InputError(f"data set {name} needs a folder of your own for its images. Set XDG_CACHE_HOME to one.")
    with store.alone(folder, lambda: report(f"another process is filling {folder}: waiting for it")):
        found = store.read(folder, settings)
        labels_path = folder / "labels.npy"
        if found is None or not labels_path.is_file():
            try:
                new = store.begin(folder, settings, count, named.shape, np.dtype(np.uint8))
            except OSError as error:
                raise InputError(f"{folder} has no room for {name}: {error.strerror}. Free some space.") from None
            labels = np.zeros(count, np.int64)
            start = 0
            for path in paths:
                report(f"reading {path}")
                pixels, given = _pickled_batch(name, path)
                part = np.arange(start, start + len(pixels))
                if start + len(pixels) > count or pixels.shape[1:] != (np.prod(named.shape),):
                    raise _damaged(name, path, f"it holds {pixels.shape} after {start} images")
                new.put(part, pixels.reshape(-1, *named.shape), {})
                labels[part] = given - 1
                start += len(pixels)
            if start != count:
                raise InputError(
                    f"data set {name}: its files hold {start} images, not {count}. Put the originals there."
                )
            np.save(labels_path, labels)
            new.finish()
            found = store.read(folder, settings)
        if found is None:
            raise InputError(f"{folder} does not hold what was written there. Run again.")
        labels = np.load(labels_path)
    return Raw(
        torch.from_numpy(found.values),
        torch.from_numpy(labels),
        torch.ones(count, dtype=torch.bool),
        Digests(found.digests, folder),
    )


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


_NUMBERS = frozenset({"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"})


class _Array:
    """What a pickle says of an array, taken by hand: NumPy's own reading of a forged one writes where
    it should not.
    """

    def __init__(self, *_: Any) -> None:
        self.values = np.zeros(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, in_columns, content = state
        self.values = _laid_out(content, dtype, shape, "F" if in_columns else "C")


class _Dtype:
    """A type of plain numbers, by its name."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


def _laid_out(content: Any, dtype: _Dtype, shape: tuple[int, ...], order: Literal["C", "F"]) -> np.ndarray:
    if dtype.name not in _NUMBERS:
        raise pickle.UnpicklingError(f"it holds {dtype.name}, not plain numbers")
    content = content.encode("latin1") if isinstance(content, str) else content
    kind = np.dtype((dtype.order if dtype.order in "<>" else "=") + dtype.name)
    return np.frombuffer(content, kind).reshape(shape, order=order)


def _from_buffer(content: Any, dtype: _Dtype, shape: tuple[int, ...], order: Literal["C", "F"]) -> _Array:
    array = _Array()
    array.values = _laid_out(content, dtype, shape, order)
    return array


def _bytes_of(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Nothing but arrays of plain numbers: a pickle could run any code."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
        ("numpy", "ndarray"): None,  # named as the class to reconstruct
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _bytes_of,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it would run {module}.{name}")
        return self._KNOWN[module, name]


def _pickled_batch(name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(n, C H W) uint8 and labels from 1 on."""
    try:
        with open(path, "rb") as file:
            held = _ArraysOnly(file, encoding="latin1").load()
        pixels, labels = (part.values if isinstance(part, _Array) else part for part in (held["data"], held["labels"]))
        labels = np.asarray(labels)
    except Exception as error:  # a damaged pickle raises whatever it runs into
        raise _damaged(name, path, str(error)) from None
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise _damaged(name, path, "its images are not rows of bytes")
    if labels.dtype.kind not in "iu" or labels.shape != pixels.shape[:1]:
        raise _damaged(name, path, "there is not one whole number for each image")
    if len(labels) and not (labels.min() >= 1 and labels.max() <= _CLASSES_OF_IMAGENET):
        raise _damaged(name, path, f"labels are not all in 1 to {_CLASSES_OF_IMAGENET}")
    return pixels, labels.astype(np.int64)


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


_ARCHIVES = {"train": imagenet.TRAIN, "val": imagenet.VALIDATION}


def _part_of_set(name: str, named: NamedSet, home: Path, part: str) -> tuple[list[tuple[FoundFile, str]], Path | None]:
    """The images of one part and their classes, by name ("": it lies in none); and the archive that they are in."""
    if (home / part).is_dir() or name != "imagenet":
        found = find_images(home / part) if (home / part).is_dir() else []
        return [(file, file.name.split("/")[0] if "/" in file.name else "") for file in found], None
    is_train = part == named.folders[1]
    listed = imagenet.training_images(home) if is_train else imagenet.validation_images(home)
    return listed, home / _ARCHIVES[part] if listed else None


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
            raise _damaged(name, path, "its checksum is another")


def _damaged(name: str, path: Path, reason: str) -> InputError:
    reason = (" ".join(reason.split()) or "unreadable")[:200]
    return InputError(f"data set {name}: {path} is damaged ({reason}). Put the original file there.")


_READERS: dict[str, Reader] = {
    "mnist": _mnist,
    "fashion_mnist": _mnist,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "svhn": _svhn,
    "imagenet32": _imagenet32,
}

"""ImageNet as it is published: its archives, whose images are decoded without unpacking them, and its images at 32 x 32
pixels, from the pickled batches of Chrabaszcz et al. (2017).

- `ILSVRC2012_img_train.tar` holds a tar for each class, `n01440764.tar`, and that one the class's images.
- `ILSVRC2012_img_val.tar` holds the validation images flat. Their classes stand in `LOC_val_solution.csv`, or in the
  development kit (`ILSVRC2012_devkit_t12`, unpacked or as `.tar.gz`): a number for each image, whose synset `meta.mat`
  names.

Classes, order and names are those of the unpacked folders, `<part>/<synset>/<image>`, so both ways give one data set.
How many images there are is public and fixed: an archive that lacks some is refused. An image whose bytes are damaged
keeps its place and contributes nothing.
"""

import csv
import io
import pickle
import re
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from sfumato.data import store
from sfumato.data.archives import DAMAGED, files_of
from sfumato.data.catalogue import ARCHIVES, NamedSet
from sfumato.data.listing import EXTENSIONS, ImageFile, stamp_of
from sfumato.data.store import Report
from sfumato.errors import InputError, refusing

_SOLUTION, _KIT = "LOC_val_solution.csv", "ILSVRC2012_devkit_t12"
_NUMBERS, _SYNSETS = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_SYNSET = re.compile(r"n\d{8}")
_MOST_BYTES_OF_A_CLASS = 2**33
_ORIGINAL, _ORIGINAL_FILE = "Put the original archive there.", "Put the original file there."


def images_of(home: Path, part: str) -> list[ImageFile]:
    """The images of "train" or "val", each labelled by its synset, by name.

    Raises:
        InputError: If the archive is damaged or holds anything else, or labels are missing.
    """
    path = home / ARCHIVES[part]
    stamp = stamp_of(path)
    found: list[ImageFile] = []
    with _opened(path, str(path)) as tar:
        for image, start, synset in _training(path, tar) if part == "train" else _validation(home, tar):
            name = PurePosixPath(image.name).name
            if PurePosixPath(name).suffix.lower() not in EXTENSIONS:
                raise InputError(f"{path}: {image.name} is no image. {_ORIGINAL}")
            span = (start + image.offset_data, image.size)
            found.append(ImageFile(path, f"{synset}/{name}", stamp, span, label=synset))
    return sorted(found, key=lambda file: file.name)


def _opened(path: Path, where: str, file: IO[bytes] | None = None) -> tarfile.TarFile:
    with refusing(f"{where} is cut short, damaged or compressed", _ORIGINAL, *DAMAGED):
        return tarfile.open(path, "r:", file)  # a compressed one has no places to read from


def _training(path: Path, tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, int, str]]:
    """Each image, where its class's own archive begins, and its synset."""
    for member in files_of(tar, str(path), _MOST_BYTES_OF_A_CLASS):
        synset, _, kind = PurePosixPath(member.name).name.rpartition(".")
        if kind != "tar" or not _SYNSET.fullmatch(synset):
            raise InputError(f"{path}: {member.name} is no archive of a class. {_ORIGINAL}")
        where = f"{path}: {member.name}"
        with _opened(path, where, tar.extractfile(member)) as inner:
            for image in files_of(inner, where):
                yield image, member.offset_data, synset


def _validation(home: Path, tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, int, str]]:
    """Each image, 0, and its synset."""
    path, synsets, count = home / ARCHIVES["val"], _validation_synsets(home), 0
    remedy = "Put the original archive and its labels there."
    for image in files_of(tar, str(path)):
        name = PurePosixPath(image.name).name
        synset = synsets.get(name.partition(".")[0])
        if synset is None:
            raise InputError(f"{path}: {name} has no label. {remedy}")
        count += 1
        yield image, 0, synset
    if len(synsets) != count:
        raise InputError(f"{path} holds {count} images, and there are labels of {len(synsets)}. {remedy}")


def _validation_synsets(home: Path) -> dict[str, str]:
    """Image -> synset, by the table if it is there, else by the development kit."""
    from scipy.io.matlab import MatReadError

    table, kit, archive = home / _SOLUTION, home / _KIT, home / f"{_KIT}.tar.gz"
    place = next((path for path in (table, kit, archive) if path.exists()), None)
    if place is None:
        wanted = f"Put {_SOLUTION}, {_KIT}.tar.gz or that folder, unpacked, there."
        raise InputError(f"{home / ARCHIVES['val']} has no labels beside it. {wanted}")
    # What SciPy raises of a damaged MATLAB file is not stated.
    kinds = (*DAMAGED, csv.Error, MatReadError, ValueError, TypeError, LookupError, AttributeError, struct.error)
    with refusing(f"{place} is damaged", "Put the original there.", *kinds):
        if place == table:
            found = _of_table(table.read_text(encoding="utf-8-sig"))
        elif place == kit:
            found = _of_kit((kit / "data" / _NUMBERS).read_bytes(), (kit / "data" / _SYNSETS).read_bytes())
        else:
            with tarfile.open(archive, "r:gz") as tar:
                members = {PurePosixPath(member.name).name: member for member in files_of(tar, str(archive))}
                numbers, synsets = (tar.extractfile(members[name]) for name in (_NUMBERS, _SYNSETS))
                found = _of_kit(numbers.read(), synsets.read())  # type: ignore[union-attr]  # of files, never None
        if not found or not all(_SYNSET.fullmatch(synset) for synset in found.values()):
            raise ValueError("an image has no synset")
    return found


def _of_table(text: str) -> dict[str, str]:
    """Of rows `ILSVRC2012_val_00048981,n03995372 85 1 499 272`: the synset, then its boxes."""
    return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(io.StringIO(text))}


def _of_kit(numbers: bytes, synsets: bytes) -> dict[str, str]:
    """Line i of the numbers is of validation image i; the table of synsets says which is meant."""
    from scipy.io import loadmat

    table = loadmat(io.BytesIO(synsets), squeeze_me=True)["synsets"]
    leaves = table[table["num_children"] == 0]  # the others are families of classes
    names = {int(number): str(synset) for number, synset in zip(leaves["ILSVRC2012_ID"], leaves["WNID"], strict=True)}
    return {f"ILSVRC2012_val_{place:08d}": names[int(line)] for place, line in enumerate(numbers.split(), 1)}


def small_images(name: str, named: NamedSet, root: Path, report: Report) -> store.Rows:
    """All images of 32 x 32 pixels and their labels, the training part first: `values`, `digests` and `labels`.

    They take 4 GB, so they are copied once to a file that is mapped.

    Raises:
        InputError: If a file is damaged or holds more or fewer images.
        OSError: If there is no room.
    """
    paths = [root / file for file in named.files]
    settings = {"name": name, "files": [[str(path.resolve()), *stamp_of(path)] for path in paths]}
    slot = store.slot_of(settings, "images")
    if slot is None:
        raise InputError(f"data set {name} is copied into a cache folder: leave --no-cache out.")

    def fill(part: Path) -> None:
        byte = np.dtype(np.uint8)
        columns: store.Columns = {
            "values": (named.shape, byte),
            "digests": ((32,), byte),
            "labels": ((), np.dtype(np.int64)),
        }
        rows = store.Filling(part, named.num_train + named.num_test, columns)
        ends = [0]
        for path in paths:
            report(f"reading {path}")
            values, labels = _batch(name, named, path)
            if ends[-1] >= rows.num_filled:
                rows.put(values=values, digests=store.sha256_of_each(values), labels=labels)
            ends.append(ends[-1] + len(labels))
        found, expected = (ends[-2], ends[-1] - ends[-2]), (named.num_train, named.num_test)
        if found != expected:
            what = "{} images to train on and {} in val_data".format
            raise InputError(f"data set {name}: its files hold {what(*found)}, not {what(*expected)}. {_ORIGINAL_FILE}")

    folder, _ = store.made(slot, settings, fill, report)
    return store.read(folder)


def _batch(name: str, named: NamedSet, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(n, C, H, W), uint8, and labels (n,), int64, from 0 on."""
    kinds = (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, EOFError, ImportError)
    with refusing(f"data set {name}: {path} is damaged", _ORIGINAL_FILE, *kinds), open(path, "rb") as file:
        held = _ArraysOnly(file, encoding="latin1").load()
        pixels, labels = held["data"], np.asarray(held["labels"])
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), np.prod(named.shape)):
            raise ValueError(f"its images are {pixels.dtype} of shape {pixels.shape}")
        known = range(1, 1 + len(named.classes))
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or not np.isin(labels, known).all():
            raise ValueError(f"labels are not all in 1 to {len(named.classes)}")
    return pixels.reshape(-1, *named.shape), labels.astype(np.int64) - 1


class _ArraysOnly(pickle.Unpickler):
    """Nothing but arrays of plain numbers: a pickle could run any code, and NumPy take bytes for objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "dtype"):
            return _plain_type
        if (module.replace("_core", "core"), name) in {
            ("numpy", "ndarray"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy.core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
        }:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would run {module}.{name}")


def _plain_type(name: str, *_: Any) -> np.dtype:
    if not re.fullmatch("[iuf][1248]", name):
        raise pickle.UnpicklingError(f"it holds {name}, not plain numbers")
    return np.dtype(name)

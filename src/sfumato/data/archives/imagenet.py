"""ImageNet as it is published, without unpacking it: its images are decoded straight from the archives.

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
import re
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sfumato.data.archives.shards import DAMAGED, files_of
from sfumato.data.listing import EXTENSIONS, ImageFile, refusing, stamp_of
from sfumato.errors import InputError

TRAIN, VALIDATION = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
ARCHIVES = {"train": TRAIN, "val": VALIDATION}
"""What stands in the place of each folder."""
_SOLUTION, _KIT = "LOC_val_solution.csv", "ILSVRC2012_devkit_t12"
_NUMBERS, _SYNSETS = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_SYNSET = re.compile(r"n\d{8}")
_MOST_BYTES_OF_A_CLASS = 2**33
_ORIGINAL = "Put the original archive there."


def images_of(home: Path, part: str) -> list[ImageFile]:
    """The images of "train" or "val", each labelled by its synset, by name; none where the archive is not there.

    Raises:
        InputError: If the archive is damaged or holds anything else, or labels are missing.
    """
    path = home / ARCHIVES[part]
    if not path.is_file():
        return []
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
    path, synsets, count = home / VALIDATION, _validation_synsets(home), 0
    labels = "Put the original archive and its labels there."
    for image in files_of(tar, str(path)):
        name = PurePosixPath(image.name).name
        synset = synsets.get(name.partition(".")[0])
        if synset is None:
            raise InputError(f"{path}: {name} has no label. {labels}")
        count += 1
        yield image, 0, synset
    if len(synsets) != count:
        raise InputError(f"{path} holds {count} images, and there are labels of {len(synsets)}. {labels}")


def _validation_synsets(home: Path) -> dict[str, str]:
    """Image -> synset, by the table if it is there, else by the development kit."""
    from scipy.io.matlab import MatReadError

    table, kit, archive = home / _SOLUTION, home / _KIT, home / f"{_KIT}.tar.gz"
    place = next((path for path in (table, kit, archive) if path.exists()), None)
    if place is None:
        raise InputError(
            f"{home / VALIDATION} has no labels beside it. Put {_SOLUTION}, {_KIT}.tar.gz or that folder, unpacked, "
            "there."
        )
    # What SciPy raises of a damaged MATLAB file is not stated.
    kinds = (*DAMAGED, csv.Error, MatReadError, ValueError, TypeError, LookupError, AttributeError, struct.error)
    with refusing(f"{place} is damaged", "Put the original there.", *kinds):
        if place == table:
            found = _of_table(table.read_text(encoding="utf-8-sig"))
        elif place == kit:
            found = _of_kit((kit / "data" / _NUMBERS).read_bytes(), (kit / "data" / _SYNSETS).read_bytes())
        else:
            held = {}
            with tarfile.open(archive, "r:gz") as tar:
                for member in files_of(tar, str(archive)):
                    if (name := PurePosixPath(member.name).name) in (_NUMBERS, _SYNSETS):
                        held[name] = tar.extractfile(member).read()  # type: ignore[union-attr]  # of a file
            found = _of_kit(held[_NUMBERS], held[_SYNSETS])
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

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
import itertools
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sfumato.data.archives.tar import DAMAGED, MOST_BYTES, End, end_of, next_member
from sfumato.data.listing import EXTENSIONS, FoundFile, stamp_of
from sfumato.errors import InputError

TRAIN, VALIDATION = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
ARCHIVES = {"train": TRAIN, "val": VALIDATION}
"""What stands in the place of each folder."""
_SOLUTION, _KIT = "LOC_val_solution.csv", "ILSVRC2012_devkit_t12"
_NUMBERS, _SYNSETS = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_SYNSET = re.compile(r"n\d{8}")


def training_images(home: Path) -> list[tuple[FoundFile, str]]:
    """Every training image and its synset, by name; none where the archive is not there.

    Raises:
        InputError: If the archive is damaged, or holds anything else.
    """
    path = home / TRAIN
    if not path.is_file():
        return []
    found: list[tuple[FoundFile, str]] = []
    stamp = stamp_of(path)
    with _opened(path) as outer:
        for member in _files(path, path.name, outer):
            synset, _, kind = PurePosixPath(member.name).name.rpartition(".")
            if kind != "tar" or not _SYNSET.fullmatch(synset):
                raise InputError(f"{path}: {member.name} is no archive of a class. Put the original archive there.")
            with _nested(path, outer, member) as inner:
                for image in _files(path, member.name, inner, member.size):
                    span = (member.offset_data + image.offset_data, image.size)
                    found.append((FoundFile(path, f"{synset}/{_image_name(path, image)}", stamp, span), synset))
    return _in_order(path, found)


def validation_images(home: Path) -> list[tuple[FoundFile, str]]:
    """The same of the validation images.

    Raises:
        InputError: Likewise; or if their labels are missing or damaged.
    """
    path = home / VALIDATION
    if not path.is_file():
        return []
    synsets = _validation_synsets(home)
    found: list[tuple[FoundFile, str]] = []
    stamp = stamp_of(path)
    with _opened(path) as archive:
        for image in _files(path, path.name, archive):
            name = _image_name(path, image)
            synset = synsets.get(name.partition(".")[0])
            if synset is None:
                raise InputError(f"{path}: {name} has no label. Put the original archive and its labels there.")
            found.append((FoundFile(path, f"{synset}/{name}", stamp, (image.offset_data, image.size)), synset))
    if len(synsets) != len(found):
        raise InputError(
            f"{path} holds {len(found)} images, and there are labels of {len(synsets)}. Put the original archive and "
            "its labels there."
        )
    return _in_order(path, found)


def _in_order(path: Path, found: list[tuple[FoundFile, str]]) -> list[tuple[FoundFile, str]]:
    ordered = sorted(found, key=lambda item: item[0].name)
    for (one, _), (other, _) in itertools.pairwise(ordered):
        if one.name == other.name:
            raise InputError(f"{path}: {one.name} is there a second time. Put the original archive there.")
    return ordered


def _image_name(path: Path, member: tarfile.TarInfo) -> str:
    name = PurePosixPath(member.name).name
    if PurePosixPath(name).suffix.lower() not in EXTENSIONS:
        raise InputError(f"{path}: {member.name} is no image. Put the original archive there.")
    if member.size > MOST_BYTES:
        raise InputError(f"{path}: {member.name} has {member.size} bytes. No image is as large.")
    return name


def _opened(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:")  # a compressed one has no places to read from
    except (tarfile.TarError, *DAMAGED) as error:
        raise _damaged(path, path.name) from error


def _nested(path: Path, outer: tarfile.TarFile, member: tarfile.TarInfo) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=outer.extractfile(member), mode="r:")
    except (tarfile.TarError, *DAMAGED) as error:
        raise _damaged(path, member.name) from error


def _files(path: Path, name: str, tar: tarfile.TarFile, size: int | None = None) -> Iterator[tarfile.TarInfo]:
    """The ordinary files of an archive of so many bytes, which must reach to its end."""
    size = path.stat().st_size if size is None else size
    try:
        while (member := next_member(tar)) is not None:
            if member.isdir():
                continue
            if not member.isfile() or member.sparse is not None:
                raise InputError(f"{path}: {member.name} is no ordinary file. Put the original archive there.")
            if member.offset_data + member.size > size:
                raise _damaged(path, name)
            yield member
    except (tarfile.TarError, *DAMAGED) as error:
        if isinstance(error, InputError):
            raise
        raise _damaged(path, name) from error
    if end_of(tar) is not End.WHOLE:
        raise _damaged(path, name)


def _damaged(path: Path, name: str) -> InputError:
    where = f"{path}" if name == path.name else f"{path}: {name}"
    return InputError(f"{where} is cut short, damaged or compressed. Put the original archive there.")


def _validation_synsets(home: Path) -> dict[str, str]:
    """Image -> synset, by the table if it is there, else by the development kit."""
    table = home / _SOLUTION
    if table.is_file():
        return _of_table(table)
    kit = home / _KIT
    if kit.is_dir():
        read = {name: _content_of_kit(kit, name) for name in (_NUMBERS, _SYNSETS)}
        return _of_kit(kit, read[_NUMBERS], read[_SYNSETS])
    archive = home / f"{_KIT}.tar.gz"
    if archive.is_file():
        held = {}
        try:
            with tarfile.open(archive, "r:gz") as tar:
                for member in tar:
                    if member.isfile() and (name := PurePosixPath(member.name).name) in (_NUMBERS, _SYNSETS):
                        file: IO[bytes] | None = tar.extractfile(member)
                        held[name] = b"" if file is None else file.read()
        except (tarfile.TarError, *DAMAGED) as error:
            raise InputError(f"{archive} is cut short or damaged. Put the original there.") from error
        return _of_kit(archive, held.get(_NUMBERS, b""), held.get(_SYNSETS, b""))
    raise InputError(
        f"{home / VALIDATION} has no labels beside it. Put {_SOLUTION}, {_KIT}.tar.gz or that folder, unpacked, there."
    )


def _content_of_kit(kit: Path, name: str) -> bytes:
    path = kit / "data" / name
    if not path.is_file():
        raise InputError(f"{path} is missing. Unpack the development kit again.")
    return path.read_bytes()


def _of_table(path: Path) -> dict[str, str]:
    """Of rows `ILSVRC2012_val_00048981,n03995372 85 1 499 272`: the synset, then its boxes."""
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
        found = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (csv.Error, *DAMAGED, KeyError, AttributeError, IndexError) as error:
        raise InputError(f"{path} is damaged. Put the original there.") from error
    if len(found) < len(rows) or not all(_SYNSET.fullmatch(synset) for synset in found.values()):
        raise InputError(f"{path} is damaged: an image is there twice, or has no synset. Put the original there.")
    return found


def _of_kit(where: Path, numbers: bytes, synsets: bytes) -> dict[str, str]:
    """Line i of the numbers is of validation image i; the table of synsets says which is meant."""
    from scipy.io import loadmat

    try:
        table = loadmat(io.BytesIO(synsets), squeeze_me=True)["synsets"]
        leaves = table[table["num_children"] == 0]  # the others are families of classes
        names = {
            int(number): str(synset) for number, synset in zip(leaves["ILSVRC2012_ID"], leaves["WNID"], strict=True)
        }
        stated = [int(line) for line in numbers.split()]
        found = {f"ILSVRC2012_val_{place:08d}": names[number] for place, number in enumerate(stated, 1)}
    except Exception as error:  # of a file that is cut, or no MATLAB file
        raise InputError(
            f"{where} is damaged: {_NUMBERS} and {_SYNSETS} do not fit. Put the original there."
        ) from error
    if not found or not all(_SYNSET.fullmatch(synset) for synset in found.values()):
        raise InputError(f"{where} is damaged: it names no synsets. Put the original there.")
    return found

"""A folder of tar shards (`webdataset`) or Parquet files (`parquet`), unpacked once into the user's cache folder.

**Nothing depends on an image's place, nor on other members.** Its name, by which persons are told
and it is held out, is `<shard>/<member>`, whatever lies beside it. (A row of a Parquet file that has no path is held
out by its bytes.) A part (train, valid, test and their other spellings) is what a word of the shard's name says, or a
folder of its members; the two must agree.

All images are put into one file, and beside it stands where each begins: no name of a member is a name on the disk.
"""

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from sfumato.data import store
from sfumato.data.archives.shards import images_of_parquet, images_of_tar
from sfumato.data.listing import PART_MEANT, ImageFile, stamp_of, words_of
from sfumato.errors import InputError

SUFFIXES = (".tar", ".parquet")
_IMAGES, _INDEX = "images.bin", "index.jsonl"
_PASSED_OVER = ("readme.md", "readme.txt", "dataset_info.json", "license", "thumbs.db", "desktop.ini")


def shards(root: Path) -> list[Path]:
    """The archives of a folder, by name; none where it holds anything else.

    Raises:
        InputError: If it holds archives beside other files.
    """
    if root.is_file() and root.suffix.lower() in SUFFIXES:
        return [root]
    if not root.is_dir():
        return []
    entries = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    found = [path for path in entries if path.suffix.lower() in SUFFIXES and path.is_file()]
    others = [path for path in entries if path not in found and path.name.lower() not in _PASSED_OVER]
    if found and others:
        raise InputError(
            f"{root} holds archives ({found[0].name}) beside {others[0].name}. Keep archives in a folder of their own, "
            "or unpack them."
        )
    return found


def unpacked(
    root: Path, found: Sequence[Path], report: Callable[[str], None], unpack_to: Path | None = None
) -> list[ImageFile]:
    """The images of a folder's archives, in the order of their names.

    Args:
        root: The folder.
        found: Its archives.
        report: Takes lines about progress.
        unpack_to: An empty folder; None: they are kept in the user's cache folder.

    Raises:
        InputError: If an archive is no archive, or an example has no label or two.
    """
    folder = unpack_to
    if folder is None:
        settings = {"root": str(root.resolve())}
        slot = store.slot_of(settings, "unpacked")
        if slot is None:
            raise InputError(f"{root} holds archives, which are unpacked into a cache folder: leave --no-cache out.")
        stamps = [[path.name, *stamp_of(path)] for path in found]
        folder, _ = store.made(
            slot, {**settings, "archives": stamps}, lambda part: _unpack(root, found, part, report), report
        )
    else:
        _unpack(root, found, folder, report)
    rows = [json.loads(line) for line in (folder / _INDEX).read_text(encoding="utf-8").splitlines()]
    images, stamp = folder / _IMAGES, stamp_of(folder / _IMAGES)
    files = [ImageFile(images, stamp=stamp, **{**row, "span": tuple(row["span"])}) for row in rows]
    return sorted(files, key=lambda file: (file.name, file.span))


def _unpack(root: Path, found: Sequence[Path], folder: Path, report: Callable[[str], None]) -> None:
    """Writes all images to one file of a folder, and an index."""
    report(f"unpacking {len(found)} archive(s) of {root}")
    rows = []
    with open(folder / _IMAGES, "wb") as file:

        def keep(content: bytes) -> tuple[int, int]:
            start = file.tell()
            return start, file.write(content)

        for path in found:
            of_shard = part_of(path)
            read = images_of_parquet if path.suffix.lower() == ".parquet" else images_of_tar
            for image in read(path, keep, report):
                if of_shard and image.part and of_shard != image.part:
                    raise InputError(
                        f"{path}: {image.name} lies in {image.part}/, and the archive is named for {of_shard}. Rename "
                        "the archive, or the folder."
                    )
                hashed = unicodedata.normalize("NFC", f"{path.stem}/{image.name}")
                rows.append(
                    {
                        "name": hashed + image.suffix,
                        "hashed": hashed,
                        "span": image.span,
                        "label": image.label,
                        "group": image.group or None,
                        "part": of_shard or image.part or None,
                    }
                )
    for column, what in (("group", "group"), ("part", "part (train, valid, test)")):
        without = next((row["name"] for row in rows if not row[column]), None)
        if without is not None and any(row[column] for row in rows):
            raise InputError(f"{root}: {without} names no {what}, and others do. Give it to all or none.")
    store.write(folder / _INDEX, "".join(f"{json.dumps(row)}\n" for row in rows))


def part_of(path: Path) -> str:
    """The part that one word of a shard's name says; "" where none does."""
    parts = {PART_MEANT[word] for word in words_of(path.stem) if word in PART_MEANT}
    return parts.pop() if len(parts) == 1 else ""

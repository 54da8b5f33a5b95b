"""A folder of tar shards (`webdataset`) or Parquet files (`parquet`), unpacked once into the user's cache folder.

**Nothing depends on an image's place, nor on other members.** Its name, by which persons are told
and it is held out, is `<shard>/<member>`, whatever lies beside it; on disk it has another. (A row of
a Parquet file that has no path is held out by its bytes.) A part (train, valid, test and their other
spellings) is what a word of the shard's name says, or a folder of its members; the two must agree.

An archive that is cut short loses what lay behind the cut; an image at the cut is kept, and cannot be
read. What was unpacked is taken only as it was left: where a file was changed since, all is unpacked anew.
"""

import errno
import hashlib
import json
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sfumato.data import cache, store
from sfumato.data.archives.parquet import examples_of_parquet
from sfumato.data.archives.webdataset import examples_of_tar
from sfumato.data.listing import PART_MEANT, FoundFile, LabelledFile, stamp_of, words_of
from sfumato.errors import InputError

SUFFIXES = (".tar", ".parquet")
_INDEX, _DONE = "index.jsonl", "done.json"


def shards(root: Path) -> list[Path]:
    """The archives of a folder, by name; none where it holds anything else.

    Raises:
        InputError: If it holds archives beside other files, or one under two names.
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
    same: dict[tuple[int, int], Path] = {}
    for path in found:
        status = path.stat()
        other = same.setdefault((status.st_dev, status.st_ino), path)
        if other != path:
            raise InputError(f"{path} and {other} are one archive under two names. Take one out.")
    return found


_PASSED_OVER = ("readme.md", "readme.txt", "dataset_info.json", "license", "thumbs.db", "desktop.ini")


def unpacked(root: Path, report: Callable[[str], None]) -> list[LabelledFile] | None:
    """The images of a folder's archives, kept in the user's cache folder; None where it holds none.

    Args:
        root: The folder.
        report: Takes lines about progress.

    Raises:
        InputError: If an archive is no archive, an example has no label or two, or there is no room.
    """
    found = shards(root)
    if not found:
        return None
    slot = cache.own_folder({"root": str(root.resolve())}, "unpacked")
    if slot is None:
        raise InputError(
            f"{root} holds archives, which are unpacked into a cache folder of your own: leave --no-cache out, and see "
            "to it that XDG_CACHE_HOME, or ~/.cache, can be written."
        )
    stamps = [[path.name, *stamp_of(path), path.stat().st_ino] for path in found]
    folder = slot / hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:32]
    try:
        with store.alone(slot, lambda: report(f"another process is unpacking into {slot}: waiting for it")):
            files = labelled(folder)
            if files is None:
                for other in slot.iterdir():  # no copies of private images pile up
                    if other.is_dir():
                        shutil.rmtree(other)
                try:
                    unpack(found, folder, report)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                files = labelled(folder)
    except OSError as error:
        room = " Free some space." if error.errno == errno.ENOSPC else ""
        raise InputError(f"{root} cannot be unpacked into {slot}: {error.strerror or error}.{room}") from None
    if files is None:
        raise InputError(f"{slot} does not hold what was unpacked there. Run again.")
    return files


def labelled(folder: Path) -> list[LabelledFile] | None:
    """What was unpacked into a folder, in the order of names; None where it is not as it was left."""
    try:
        text = (folder / _INDEX).read_text(encoding="ascii")
        done = json.loads((folder / _DONE).read_text(encoding="utf-8"))
        if done["sha256"] != hashlib.sha256(text.encode()).hexdigest():
            return None
        rows = [json.loads(line) for line in text.splitlines()]
        found = [_labelled(folder, row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if any(list(item.file.stamp) != row["stamp"] for item, row in zip(found, rows, strict=True)):
        return None
    return sorted(found, key=lambda item: (item.file.name, item.file.path.name))


def _labelled(folder: Path, row: dict[str, Any]) -> LabelledFile:
    path = folder / row["file"]
    file = FoundFile(path, row["name"], stamp_of(path))
    return LabelledFile(file, row["label"], row["part"] or None, row["group"] or None, row["hashed"])


def unpack(found: Sequence[Path], folder: Path, report: Callable[[str], None]) -> None:
    """Writes all images to a folder, under names that tell nothing, and an index."""
    root = found[0] if len(found) == 1 else found[0].parent
    report(f"unpacking {len(found)} archive(s) of {root}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for path in found:
        of_shard = part_of(path)
        read = examples_of_parquet if path.suffix.lower() == ".parquet" else examples_of_tar
        for example in read(path, report):
            # Without a name of its own an image is told by its bytes, never by its place.
            own = example.name or f"#{hashlib.sha256(example.image).hexdigest()}"
            name = unicodedata.normalize("NFC", f"{path.stem}/{own}")
            if of_shard and example.part and of_shard != example.part:
                raise InputError(
                    f"{path}: {own} lies in {example.part}/, and the archive is named for {of_shard}. Rename "
                    "the archive, or the folder."
                )
            file = f"{len(rows):08d}{example.suffix}"
            (folder / file).write_bytes(example.image)
            rows.append(
                {
                    "file": file,
                    "name": name + example.suffix,
                    "hashed": name,
                    "label": example.label,
                    "group": example.group,
                    "part": of_shard or example.part,
                    "stamp": stamp_of(folder / file),
                }
            )
    for column, what in (("group", "group"), ("part", "part (train, valid, test)")):
        without = next((row["name"] for row in rows if not row[column]), None)
        if without is not None and any(row[column] for row in rows):
            raise InputError(f"{root}: {without} names no {what}, and others do. Give it to all or none.")
    index = "".join(f"{json.dumps(row)}\n" for row in rows)
    store.write_private(folder / _INDEX, index)
    done = {"root": str(root.resolve()), "images": len(rows), "sha256": hashlib.sha256(index.encode()).hexdigest()}
    store.write_private(folder / _DONE, json.dumps(done))


def part_of(path: Path) -> str:
    """The part that one word of a shard's name says; "" where none does."""
    parts = {PART_MEANT[word] for word in words_of(path.stem) if word in PART_MEANT}
    return parts.pop() if len(parts) == 1 else ""

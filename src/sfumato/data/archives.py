"""Archives of images as a folder: WebDataset's tar shards, and Parquet files as Hugging Face writes
them.

A folder that holds nothing but shards is unpacked once, into the user's cache folder, to image files
and a `labels.csv`; from then on it is a folder like any other. Shards named train*, valid* (val*,
validation*) and test* are those parts. Of a tar an example is what shares a name: `0001.jpg` with
`0001.cls` (a class's number or name) or `0001.json` (its "label", and "group" where it has one);
without these, the folder that a member lies in names its class. Of a Parquet file an example is a
row: "image" (bytes, or a record with "bytes"), "label" and perhaps "group".

An archive that is cut short loses what lay behind the cut; the image at the cut is kept, and cannot
be read.
"""

import csv
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sfumato.data import cache, store
from sfumato.data.listing import EXTENSIONS, PART_MEANT
from sfumato.errors import InputError

SUFFIXES = (".tar", ".parquet")
_LABELS, _DONE = "labels.csv", "done.json"
_MOST_BYTES = 2**28
"""Of one member: no image file is larger."""


class _Example(NamedTuple):
    image: bytes
    suffix: str
    label: str
    group: str


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


_PASSED_OVER = ("readme.md", "readme.txt", "dataset_info.json", "license", "thumbs.db", "desktop.ini")


def unpacked(root: Path, report: Callable[[str], None]) -> Path:
    """The folder itself, or, where it holds archives, what was made of them.

    Args:
        root: The folder.
        report: Takes lines about progress.

    Raises:
        InputError: If an archive is no archive, an example has no label or two, or there is no room.
    """
    found = shards(root)
    if not found:
        return root
    slot = cache.own_folder({"root": str(root.resolve())}, "unpacked")
    if slot is None:
        raise InputError(f"{root} holds archives, which need a cache folder of your own. Set XDG_CACHE_HOME to one.")
    stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in found]
    folder = slot / hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:32]
    try:
        with store.alone(slot, lambda: report(f"another process is unpacking into {slot}: waiting for it")):
            if not (folder / _DONE).exists():
                for other in slot.iterdir():  # no copies of private images pile up
                    if other.is_dir():
                        shutil.rmtree(other)
                report(f"unpacking {len(found)} archive(s) of {root}, once")
                try:
                    _unpack(found, folder, report)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
    except OSError as error:
        raise InputError(
            f"{root} cannot be unpacked into {slot}: {error.strerror or error}. Free some space."
        ) from None
    return folder / "images"


def _unpack(found: list[Path], folder: Path, report: Callable[[str], None]) -> None:
    home = folder / "images"
    home.mkdir(mode=0o700, parents=True)
    rows: list[tuple[str, str, str]] = []
    for number, path in enumerate(found):
        part = _part(path, found)
        directory = home / part / f"{number:05d}" if part else home / f"{number:05d}"
        directory.mkdir(mode=0o700, parents=True)
        read = _of_parquet if path.suffix.lower() == ".parquet" else _of_tar
        for index, example in enumerate(read(path, report)):
            file = directory / f"{index:08d}{example.suffix}"
            file.write_bytes(example.image)
            rows.append((file.relative_to(home).as_posix(), example.label, example.group))
    with_groups = any(group for _, _, group in rows)
    with open(home / _LABELS, "w", encoding="utf-8", newline="") as table:
        writer = csv.writer(table)
        writer.writerow(["file", "label", *(["group"] if with_groups else [])])
        writer.writerows(row if with_groups else row[:2] for row in rows)
    store.write_private(folder / _DONE, json.dumps({"images": len(rows)}))


def _part(path: Path, found: list[Path]) -> str | None:
    """Of a shard, by what its name begins with, where all of them say so."""
    parts = [PART_MEANT.get(other.name.replace("_", "-").replace(".", "-").split("-")[0].casefold()) for other in found]
    if all(parts) and "train" in parts:
        return parts[found.index(path)]
    return None


def _of_tar(path: Path, report: Callable[[str], None]) -> Iterator[_Example]:
    """Members that share a name lie one after another (WebDataset)."""
    key: str | None = None
    held: dict[str, bytes] = {}
    for name, content in _members(path, report):
        above, _, last = name.rpartition("/")
        stem, _, suffix = last.partition(".")
        if key is not None and f"{above}/{stem}" != key:
            yield from _example(path, key, held)
            held = {}
        key = f"{above}/{stem}"
        suffix = f".{suffix.rpartition('.')[2].lower()}"  # 0001.seg.png is one of several images
        if suffix in held:
            raise InputError(f"{path}: {name} is a second {suffix} of its example. Keep one image of each.")
        held[suffix] = content
    if key is not None:
        yield from _example(path, key, held)


def _members(path: Path, report: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a tar's files, as far as it goes."""
    try:
        with tarfile.open(path, "r:*") as tar:
            while True:
                try:
                    member = tar.next()
                except tarfile.ReadError:
                    report(f"warning: {path} is cut short: what lay behind the cut is lost")
                    return
                if member is None:
                    if not _ends(tar):
                        report(f"warning: {path} is cut short: what lay behind the cut is lost")
                    return
                if not member.isfile():
                    continue
                if member.size > _MOST_BYTES:
                    raise InputError(f"{path}: {member.name} has {member.size} bytes. No image is as large.")
                try:
                    file = tar.extractfile(member)
                    content = b"" if file is None else file.read()
                except (tarfile.ReadError, EOFError):
                    content = b""
                if len(content) < member.size:
                    report(f"warning: {path} is cut short in {member.name}: what lay behind the cut is lost")
                    yield PurePosixPath(member.name).as_posix(), content
                    return
                yield PurePosixPath(member.name).as_posix(), content
    except tarfile.TarError as error:
        raise InputError(f"{path} is no tar archive: {error}. Put the original there.") from None


def _ends(tar: tarfile.TarFile) -> bool:
    """Whether a block of zeros stands behind the last member, as at the end of every tar."""
    assert tar.fileobj is not None
    try:
        tar.fileobj.seek(tar.offset)
        return tar.fileobj.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    except (OSError, EOFError):  # of a compressed one that is cut
        return False


def _example(path: Path, key: str, held: dict[str, bytes]) -> Iterator[_Example]:
    images = [suffix for suffix in held if suffix in EXTENSIONS]
    if not images:
        return  # a text beside the images
    if len(images) > 1:
        raise InputError(f"{path}: {key} has {len(images)} images ({', '.join(images)}). Keep one of each example.")
    described: Any = {}
    if ".json" in held:
        try:
            described = json.loads(held[".json"])
        except (ValueError, RecursionError):
            raise InputError(f"{path}: {key}.json is no JSON. Correct it.") from None
        described = described if isinstance(described, dict) else {}
    label = held[".cls"].decode("utf-8", "replace") if ".cls" in held else _plain(described.get("label"))
    label = label.strip() or PurePosixPath(key).parent.name
    if not label:
        raise InputError(
            f'{path}: {key} has no label. Add {key.lstrip("/")}.cls, a "label" in its .json, or a folder of its class.'
        )
    yield _Example(held[images[0]], images[0], label, _plain(described.get("group")).strip())


def _plain(value: Any) -> str:
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _of_parquet(path: Path, report: Callable[[str], None]) -> Iterator[_Example]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: pyarrow is not installed. Install it: pip install 'sfumato[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
        names = _class_names(file.schema_arrow.metadata)
        columns = [name for name in ("image", "label", "group") if name in file.schema_arrow.names]
        if columns[:2] != ["image", "label"]:
            given = ", ".join(file.schema_arrow.names)
            raise InputError(f'{path} needs the columns "image" and "label"; it has {given}. Rename them.')
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                yield _of_row(path, row, names)
    except InputError:
        raise
    except Exception as error:  # Arrow's own are of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read as Parquet: {reason}. Put the original there.") from None


def _of_row(path: Path, row: dict[str, Any], names: list[str]) -> _Example:
    image = row["image"].get("bytes") if isinstance(row["image"], dict) else row["image"]
    label = row["label"]
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        label = names[label]
    label = _plain(label).strip()
    if not label:
        raise InputError(f"{path}: a row has no label. Fill it in, or take the row out.")
    content = image if isinstance(image, bytes) else b""
    return _Example(content, _suffix(content), label, _plain(row.get("group")).strip())


def _class_names(metadata: dict[bytes, bytes] | None) -> list[str]:
    """Of whole-number labels, where Hugging Face's library noted them."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return [str(name) for name in features["label"]["names"]]
    except (KeyError, ValueError, TypeError):
        return []


def _suffix(content: bytes) -> str:
    """A name for the file: which kind it is, the decoder finds by itself."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            kind = f".{(image.format or 'png').lower()}"
    except Exception:  # damaged: an image that cannot be read
        return ".png"
    return kind if kind in EXTENSIONS else ".png"

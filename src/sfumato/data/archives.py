"""Archives of images as a folder: WebDataset's tar shards, and Parquet files as Hugging Face writes
them.

A folder that holds nothing but shards is unpacked once, into the user's cache folder, to image files
and a `labels.csv`; from then on it is a folder like any other. Of a tar an example is what shares a
name: `0001.jpg` with `0001.cls` (a class's number or name) or `0001.json` (its "label", and "group"
where it has one); without these, the folder that a member lies in names its class. Of a Parquet file
an example is a row: "image" (bytes, or a record with "bytes" and "path"), "label" and perhaps
"group".

An image keeps its name, `<shard>/<member>`, by which it is held out or grouped; a row without a path
is named by its bytes. So one image more moves no other. A part (train, valid, test and their other
spellings) is what a word of the shard's name says, else the first folder of its members.

An archive that is cut short loses what lay behind the cut; an image at the cut is kept, and cannot be
read.
"""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import lzma
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sfumato.data import cache, store
from sfumato.data.listing import EXTENSIONS, PART_MEANT
from sfumato.errors import InputError

SUFFIXES = (".tar", ".parquet")
_LABELS, _DONE = "labels.csv", "done.json"
_DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
_MOST_BYTES = 2**28
"""Of one member: no image file is larger."""


class _Example(NamedTuple):
    """One image.

    Attributes:
        name: Its path in the archive; "" where it has none.
        part: Of the first folder of its name, if that is a part.
    """

    image: bytes
    name: str
    suffix: str
    label: str
    group: str
    part: str = ""


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
        raise InputError(
            f"{root} holds archives, which are unpacked into a cache folder of your own: leave --no-cache out, and see "
            "to it that XDG_CACHE_HOME, or ~/.cache, can be written."
        )
    stamps = [[path.name, *_stamp(path)] for path in found]
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


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def forget(root: Path) -> None:
    """Removes what `unpacked` made of a folder's archives."""
    slot = cache.own_folder({"root": str(root.resolve())}, "unpacked") if shards(root) else None
    if slot is not None and slot.exists():
        shutil.rmtree(slot)


def _unpack(found: list[Path], folder: Path, report: Callable[[str], None]) -> None:
    home = folder / "images"
    home.mkdir(mode=0o700, parents=True)
    rows: list[dict[str, str]] = []
    taken: set[str] = set()
    for path in found:
        of_shard = _part(path)
        read = _of_parquet if path.suffix.lower() == ".parquet" else _of_tar
        for example in read(path, report):
            name = f"{_safe(path.stem)}/{_safe(example.name) or hashlib.sha256(example.image).hexdigest()}"
            copies = itertools.count(1)  # of one image without a name, say; two members cannot have one name
            unique = name
            while f"{unique}{example.suffix}".casefold() in taken:
                unique = f"{name}-{next(copies)}"
            taken.add(f"{unique}{example.suffix}".casefold())
            file = home / f"{unique}{example.suffix}"
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_bytes(example.image)
            part = of_shard or example.part
            rows.append(
                {"file": f"{unique}{example.suffix}", "label": example.label, "group": example.group, "split": part}
            )
    columns = ["file", "label"]
    for column, what in (("group", "group"), ("split", "part (train, valid, test)")):
        without = next((row["file"] for row in rows if not row[column]), None)
        if any(row[column] for row in rows):
            if without is not None:
                raise InputError(
                    f"{found[0].parent}: {without} names no {what}, and others do. Give it to all or none."
                )
            columns.append(column)
    with open(home / _LABELS, "w", encoding="utf-8", newline="") as table:
        writer = csv.DictWriter(table, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    root = found[0] if len(found) == 1 else found[0].parent
    store.write_private(folder / _DONE, json.dumps({"root": str(root.resolve()), "images": len(rows)}))


def _part(path: Path) -> str:
    """What one word of a shard's name says."""
    words = re.split(r"[-_. ]+", path.stem.casefold())
    parts = {PART_MEANT[word] for word in words if word in PART_MEANT}
    return parts.pop() if len(parts) == 1 else ""


def _safe(name: str) -> str:
    """A path that leads nowhere else, as near to a member's as a file system takes it."""
    parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..", ".")]
    return "/".join(part.replace("\0", "").replace("\\", "_")[:200].strip() or "_" for part in parts)


def _of_tar(path: Path, report: Callable[[str], None]) -> Iterator[_Example]:
    """Members that share a name lie one after another (WebDataset)."""
    key, held, seen = "", dict[str, bytes](), set[str]()
    for name, content in _members(path, report):
        if name is None:  # the archive is cut short here: what the last example lacks is lost
            is_named = ".cls" in held or ".json" in held or PurePosixPath(key).parent.name
            if is_named and any(suffix in held for suffix in EXTENSIONS):
                yield from _example(path, key, held)
            return
        above, _, last = name.rpartition("/")
        if last.startswith(".") or "__MACOSX" in above.split("/"):
            continue
        stem, _, suffix = last.partition(".")
        own = f"{above}/{stem}".lstrip("/")
        if own != key:
            if held:
                yield from _example(path, key, held)
            if own in seen:
                raise InputError(f"{path}: what is named {own} does not lie together. Write it by WebDataset's tools.")
            seen.add(own)
            key, held = own, {}
        suffix = f".{suffix.rpartition('.')[2].lower()}"  # 0001.seg.png is one of several images
        if suffix in held:
            raise InputError(f"{path}: {name} is a second {suffix} of its example. Keep one image of each.")
        held[suffix] = content
    if held:
        yield from _example(path, key, held)


def _members(path: Path, report: Callable[[str], None]) -> Iterator[tuple[str | None, bytes]]:
    """Names and contents of a tar's files, as far as it goes; then None if it is cut short."""
    cut = f"warning: {path} is cut short or damaged: what lay behind that place is lost"
    try:
        tar = tarfile.open(path, "r:*")
    except (tarfile.TarError, *_DAMAGED) as error:
        raise InputError(f"{path} is no tar archive: {_first_line(error)}. Put the original there.") from None
    with tar:
        while True:
            try:
                member = tar.next()
                if member is None:
                    if not _ends(tar):
                        report(cut)
                        yield None, b""
                    return
                if member.isdir():
                    continue
                if not member.isfile():
                    raise InputError(f"{path}: {member.name} is a link or no ordinary file. Put the file itself there.")
                if member.size > _MOST_BYTES:
                    raise InputError(f"{path}: {member.name} has {member.size} bytes. No image is as large.")
                file = tar.extractfile(member)
            except (tarfile.TarError, *_DAMAGED):
                report(cut)
                yield None, b""
                return
            content = b""
            with contextlib.suppress(tarfile.TarError, *_DAMAGED):
                content = b"" if file is None else file.read()
            yield PurePosixPath(member.name).as_posix(), content
            if len(content) < member.size:
                report(cut)
                yield None, b""
                return


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _ends(tar: tarfile.TarFile) -> bool:
    """Whether a block of zeros stands behind the last member, as at the end of every tar."""
    assert tar.fileobj is not None
    try:
        tar.fileobj.seek(tar.offset)
        return tar.fileobj.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    except (tarfile.TarError, *_DAMAGED):  # of a compressed one that is cut
        return False


def _example(path: Path, key: str, held: dict[str, bytes]) -> Iterator[_Example]:
    where = f"{path}: {key}"
    images = [suffix for suffix in held if suffix in EXTENSIONS]
    described = _described(where, held[".json"]) if ".json" in held else {}
    if not images:
        if ".cls" in held or "label" in described:
            raise InputError(f"{where} has no image of a known kind ({', '.join(EXTENSIONS)}). Convert it.")
        return  # a text beside the images
    if len(images) > 1:
        raise InputError(f"{where} has {len(images)} images ({', '.join(images)}). Keep one of each example.")
    stated = [_plain(where, "label", described["label"])] if "label" in described else []
    if ".cls" in held:
        stated.append(held[".cls"].decode("utf-8", "replace").strip())
    if len(set(stated)) > 1:
        raise InputError(f"{where} has two labels, {' and '.join(map(repr, stated))}. Keep one.")
    above = [part for part in PurePosixPath(key).parts if part not in ("/", "..")][:-1]
    part = PART_MEANT.get(above[0].casefold(), "") if above else ""
    label = stated[0] if stated else (above[-1] if len(above) > bool(part) else "")
    if not label:
        raise InputError(f'{where} has no label. Add a .cls, a "label" in its .json, or a folder of its class.')
    group = _plain(where, "group", described["group"]) if "group" in described else ""
    yield _Example(held[images[0]], key, images[0], label, group, part)


def _described(where: str, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise InputError(f"{where}.json is no JSON. Correct it.") from None
    return found if isinstance(found, dict) else {}


def _plain(where: str, column: str, value: Any) -> str:
    """A label or group as text: a name or a whole number."""
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float) and value.is_integer():  # as tables write whole numbers beside empty cells
        value = int(value)
    text = str(value).strip() if isinstance(value, (str, int)) else ""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = ""
    if not text:
        raise InputError(f"{where} has the {column} {str(value)[:50]!r}, no name or whole number. Correct it.")
    return text


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
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                yield _of_row(f"{path} row {number}", row, names)
                number += 1
    except InputError:
        raise
    except Exception as error:  # Arrow's own are of many kinds
        raise InputError(f"{path} cannot be read as Parquet: {_first_line(error)}. Put the original there.") from None


def _of_row(where: str, row: dict[str, Any], names: list[str]) -> _Example:
    image: Any = row["image"]
    name = ""
    if isinstance(image, dict):
        image, name = image.get("bytes"), str(image.get("path") or "")
    label = row["label"]
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        label = names[label]
    group = _plain(where, "group", row["group"]) if "group" in row else ""
    content = image if isinstance(image, bytes) else b""
    stem = PurePosixPath(name).with_suffix("").as_posix() if name else ""
    return _Example(content, stem, _suffix(content), _plain(where, "label", label), group)


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

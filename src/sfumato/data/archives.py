"""Archives of images as a folder: WebDataset's tar shards, and Parquet files as Hugging Face writes
them.

A folder that holds nothing but shards is unpacked once, into the user's cache folder. Of a tar an
example is what shares a name: `0001.jpg` with `0001.cls` (a class's number or name) or `0001.json`
(its "label", and "group" where it has one); without these, the folder that a member lies in names
its class. Of a Parquet file an example is a row: "image" (bytes, or a record with "bytes" and
"path"), "label" and perhaps "group".

**Nothing depends on an image's place.** Its name, by which persons are told, is `<shard>/<member>`,
and by that name and its bytes it is held out; on disk it has another. A part (train, valid, test and
their other spellings) is what a word of the shard's name says, or a folder of its members; the two
must agree.

An archive that is cut short loses what lay behind the cut; an image at the cut is kept, and cannot be
read.
"""

import contextlib
import errno
import hashlib
import io
import json
import lzma
import shutil
import tarfile
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sfumato.data import cache, store
from sfumato.data.listing import EXTENSIONS, PART_MEANT, FoundFile, LabelledFile, words_of
from sfumato.errors import InputError

SUFFIXES = (".tar", ".parquet")
_INDEX, _DONE = "index.jsonl", "done.json"
_DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
_MOST_BYTES = 2**28
"""Of one member: no image file is larger."""


class _Example(NamedTuple):
    """One image.

    Attributes:
        name: Its path in the archive, without what tells its kind; "" where it has none.
        part: What a folder of its name says.
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


def unpacked(root: Path, report: Callable[[str], None]) -> Path | None:
    """Where the images of a folder's archives lie, kept in the user's cache folder; None where it
    holds none.

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
    stamps = [[path.name, *_stamp(path)] for path in found]
    folder = slot / hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:32]
    try:
        with store.alone(slot, lambda: report(f"another process is unpacking into {slot}: waiting for it")):
            if not (folder / _DONE).exists():
                for other in slot.iterdir():  # no copies of private images pile up
                    if other.is_dir():
                        shutil.rmtree(other)
                try:
                    unpack(found, folder, report)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
    except OSError as error:
        room = " Free some space." if error.errno == errno.ENOSPC else ""
        raise InputError(f"{root} cannot be unpacked into {slot}: {error.strerror or error}.{room}") from None
    return folder


def labelled(folder: Path) -> list[LabelledFile]:
    """What was unpacked into a folder, in the order of names."""
    found = []
    for line in (folder / _INDEX).read_text(encoding="ascii").splitlines():
        row = json.loads(line)
        path = folder / row["file"]
        status = path.stat()
        file = FoundFile(path, row["name"], (status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        found.append(LabelledFile(file, row["label"], row["part"] or None, row["group"] or None, row["hashed"]))
    return sorted(found, key=lambda item: (item.file.name, item.file.path.name))


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def unpack(found: Sequence[Path], folder: Path, report: Callable[[str], None]) -> None:
    """Writes all images to a folder, under names that tell nothing, and an index."""
    root = found[0] if len(found) == 1 else found[0].parent
    report(f"unpacking {len(found)} archive(s) of {root}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    for path in found:
        of_shard = _part(path)
        read = _of_parquet if path.suffix.lower() == ".parquet" else _of_tar
        for example in read(path, report):
            name = unicodedata.normalize("NFC", f"{path.stem}/{example.name}")
            if of_shard and example.part and of_shard != example.part:
                raise InputError(
                    f"{path}: {example.name} lies in {example.part}/, and the archive is named for {of_shard}. Rename "
                    "the archive, or the folder."
                )
            file = f"{len(rows):08d}{example.suffix}"
            (folder / file).write_bytes(example.image)
            digest = hashlib.sha256(example.image).hexdigest()
            rows.append(
                {
                    "file": file,
                    "name": name + example.suffix,
                    "hashed": f"{name}#{digest}",
                    "label": example.label,
                    "group": example.group,
                    "part": of_shard or example.part,
                }
            )
    for column, what in (("group", "group"), ("part", "part (train, valid, test)")):
        without = next((row["name"] for row in rows if not row[column]), None)
        if without is not None and any(row[column] for row in rows):
            raise InputError(f"{root}: {without} names no {what}, and others do. Give it to all or none.")
    store.write_private(folder / _INDEX, "".join(f"{json.dumps(row)}\n" for row in rows))
    store.write_private(folder / _DONE, json.dumps({"root": str(root.resolve()), "images": len(rows)}))


def _part(path: Path) -> str:
    """What one word of a shard's name says."""
    parts = {PART_MEANT[word] for word in words_of(path.stem) if word in PART_MEANT}
    return parts.pop() if len(parts) == 1 else ""


def _of_tar(path: Path, report: Callable[[str], None]) -> Iterator[_Example]:
    """Members that share a name lie one after another (WebDataset)."""
    key, held, seen, with_labels = "", dict[str, bytes](), set[str](), _has_labels(path)
    for name, content in _members(path, report):
        if name is None:  # the archive is cut short here: what the last example lacks is lost
            is_named = ".cls" in held or ".json" in held or PurePosixPath(key).parent.name
            if is_named and any(suffix in held for suffix in EXTENSIONS):
                yield from _example(path, key, held)
            return
        above, _, last = name.rpartition("/")
        if last.startswith(".") or "__MACOSX" in above.split("/"):
            continue
        # WebDataset ends a name at its first dot; of images alone, as DICOM's numbers, all but the kind is the name.
        stem, _, suffix = last.partition(".") if with_labels else last.rpartition(".")
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


def _has_labels(path: Path) -> bool:
    """Whether labels lie beside the images."""
    with contextlib.suppress(tarfile.TarError, *_DAMAGED), tarfile.open(path, "r:*") as tar:
        while (member := tar.next()) is not None:
            if member.name.lower().endswith((".cls", ".json")):
                return True
    return False


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
    if not stated and not above:
        raise InputError(f'{where} has no label. Add a .cls, a "label" in a .json, or a folder of its class.')
    label = stated[0] if stated else _plain(where, "label", above.pop())
    parts = {PART_MEANT[folder.casefold()] for folder in above if folder.casefold() in PART_MEANT}
    if len(parts) > 1:
        raise InputError(f"{where} lies in folders of two parts. Move it.")
    part = parts.pop() if parts else ""
    if not stated and label.casefold() in PART_MEANT and not part:
        raise InputError(f"{where} lies in {label}/, which is a part or a class. Put it into a folder of its class.")
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
    suffix = PurePosixPath(name).suffix
    return _Example(content, name.removesuffix(suffix), _suffix(content), _plain(where, "label", label), group)


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

"""Archives of images as a folder: WebDataset's tar shards, and Parquet files as Hugging Face writes
them.

A folder that holds nothing but shards is unpacked once, into the user's cache folder. Of a tar an
example is an image with what shares its name: `0001.jpg` with `0001.cls` (a class's number or name)
or `0001.json` (its "label", and "group" where it has one); without these, the folder that it lies in
names its class. Of a Parquet file an example is a row: "image" (bytes, or a record with "bytes" and
"path"), "label" and perhaps "group".

**Nothing depends on an image's place, nor on other members.** Its name, by which persons are told
and it is held out, is `<shard>/<member>`, whatever lies beside it; on disk it has another. (A row of
a Parquet file that has no path is held out by its bytes.) A part (train, valid, test and their other
spellings) is what a word of the shard's name says, or a folder of its members; the two must agree.

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
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
MOST_BYTES = 2**28
"""Of one member: no image file is larger."""


_LABELS = (".cls", ".json")
"""What says the label of the image that it lies beside."""


class _Member(NamedTuple):
    """A file of a tar; one that the archive's end cut is not whole."""

    name: str
    content: bytes
    is_whole: bool


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
        of_shard = part_of(path)
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
            rows.append(
                {
                    "file": file,
                    "name": name + example.suffix,
                    "hashed": name if example.name else f"{name}#{hashlib.sha256(example.image).hexdigest()}",
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


def part_of(path: Path) -> str:
    """The part that one word of a shard's name says; "" where none does."""
    parts = {PART_MEANT[word] for word in words_of(path.stem) if word in PART_MEANT}
    return parts.pop() if len(parts) == 1 else ""


def _of_tar(path: Path, report: Callable[[str], None]) -> Iterator[_Example]:
    """Members that share a name up to its first dot lie one after another (WebDataset)."""
    described = _described_keys(path)
    key, held, ended, seen = "", list[_Member](), set[str](), set[str]()
    for member in _members(path, report):
        if member is None:  # the archive is cut short here: what the last example lacks is lost
            yield from _at_cut(path, held, bool(described))
            return
        folders = member.name.split("/")[:-1]
        if member.name.rpartition("/")[2].startswith(".") or "__MACOSX" in folders:
            continue
        if any(folder.startswith(".") and folder not in (".", "..") for folder in folders):
            continue
        if member.name in seen:
            raise InputError(f"{path}: {member.name} is there a second time. Keep one.")
        seen.add(member.name)
        own = _key(member.name)
        if held and own != key:
            yield from _examples(path, held)
            ended.add(key)
            held = []
        if own in ended and own in described:
            raise InputError(f"{path}: what is named {own} does not lie together. Write it by WebDataset's tools.")
        if own not in described:  # an image by itself; one after another, or all might be held at once
            yield from _examples(path, held)
            held = []
        key = own
        held.append(member)
    yield from _examples(path, held)


def _key(name: str) -> str:
    """What the members of one example share."""
    above, _, last = name.rpartition("/")
    return f"{above}/{last.partition('.')[0]}".lstrip("/")


def _stem(name: str) -> str:
    """A name without what tells its kind."""
    above, dot, kind = name.rpartition(".")
    return above if dot and "/" not in kind else name


def _described_keys(path: Path) -> set[str]:
    """The keys beside whose images labels lie."""
    found = set()
    with contextlib.suppress(tarfile.TarError, *DAMAGED), tarfile.open(path, "r:*") as tar:
        while (member := next_member(tar)) is not None:
            if member.name.lower().endswith(_LABELS):
                found.add(_key(PurePosixPath(member.name).as_posix()))
    return found


def _at_cut(path: Path, held: list[_Member], has_labels: bool) -> Iterator[_Example]:
    """The last example of an archive that is cut, if its label is known: an image at the cut counts."""
    whole = [member for member in held if member.is_whole or not member.name.lower().endswith(_LABELS)]
    images = [member for member in whole if _suffix_of(member.name) in EXTENSIONS]
    if len(whole) == len(held) and images and (len(whole) > len(images) or not has_labels):
        yield from _examples(path, whole)


def _members(path: Path, report: Callable[[str], None]) -> Iterator["_Member | None"]:
    """A tar's files, as far as it goes; then None if it is cut short."""
    cut = f"warning: {path} is cut short or damaged: what lay behind that place is lost"
    try:
        tar = tarfile.open(path, "r:*")
    except (tarfile.TarError, *DAMAGED) as error:
        raise InputError(f"{path} is no tar archive: {_first_line(error)}. Put the original there.") from None
    with tar:
        while True:
            try:
                member = next_member(tar)
                if member is None:
                    if not is_ended(tar):
                        report(cut)
                        yield None
                    return
                if member.isdir():
                    continue
                if not member.isfile():
                    raise InputError(f"{path}: {member.name} is a link or no ordinary file. Put the file itself there.")
                if member.size > MOST_BYTES:
                    raise InputError(f"{path}: {member.name} has {member.size} bytes. No image is as large.")
                file = tar.extractfile(member)
            except (tarfile.TarError, *DAMAGED):
                report(cut)
                yield None
                return
            content = b""
            with contextlib.suppress(tarfile.TarError, *DAMAGED):
                content = b"" if file is None else file.read()
            is_whole = len(content) == member.size
            yield _Member(PurePosixPath(member.name).as_posix(), content, is_whole)
            if not is_whole:
                report(cut)
                yield None
                return


def next_member(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The next member; None at the end.

    Raises:
        tarfile.ReadError: If it leads back: some versions of Python would go round for ever.
    """
    before, member = tar.offset, tar.next()
    vars(tar)["members"] = []  # the headers of a large shard would all stay in memory
    if member is not None and (member.size < 0 or tar.offset < before):
        raise tarfile.ReadError("a member of negative size")
    return member


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def is_ended(tar: tarfile.TarFile) -> bool:
    """Whether a block of zeros stands behind the last member, as at the end of every tar."""
    assert tar.fileobj is not None
    try:
        tar.fileobj.seek(tar.offset)
        return tar.fileobj.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    except (tarfile.TarError, *DAMAGED):  # of a compressed one that is cut
        return False


def _examples(path: Path, held: Sequence[_Member]) -> Iterator[_Example]:
    """The images among members of one key, each with the labels of its own name and of the key."""
    images = [member for member in held if _suffix_of(member.name) in EXTENSIONS]
    labels = [member for member in held if member.name.lower().endswith(_LABELS)]
    own = {image.name: [label for label in labels if _stem(label.name) == _stem(image.name)] for image in images}
    shared = [label for label in labels if all(label not in mine for mine in own.values())]
    for label in shared if not images else ():
        if not label.name.lower().endswith(".json") or "label" in _described(f"{path}: {label.name}", label.content):
            raise InputError(
                f"{path}: {label.name} has no image of a known kind ({', '.join(EXTENSIONS)}) beside it. Convert it."
            )
    for label in labels:
        whose = [image.name for image in images if label in own[image.name]] or [image.name for image in images]
        if len(whose) > 1:
            raise InputError(
                f"{path}: {label.name} has {len(whose)} images ({', '.join(whose[:3])}). Keep one of each example."
            )
    for image in images:
        yield _example(path, image, [*own[image.name], *shared])


def _example(path: Path, image: _Member, labels: Sequence[_Member]) -> _Example:
    where = f"{path}: {image.name}"
    stated, groups = list[str](), list[str]()
    for member in labels:
        if member.name.lower().endswith(".cls"):
            stated.append(_plain(where, "label", member.content.decode("utf-8-sig", "replace")))
            continue
        described = _described(f"{path}: {member.name}", member.content)
        stated += [_plain(where, "label", described["label"])] if "label" in described else []
        groups += [_plain(where, "group", described["group"])] if "group" in described else []
    for what, found in (("labels", stated), ("groups", groups)):
        if len(set(found)) > 1:
            raise InputError(f"{where} has two {what}, {' and '.join(map(repr, found))}. Keep one.")
    above = [part for part in PurePosixPath(image.name).parts if part not in ("/", "..")][:-1]
    if not stated and not above:
        raise InputError(f'{where} has no label. Add a .cls, a "label" in a .json, or a folder of its class.')
    label = stated[0] if stated else _plain(where, "label", above.pop())
    part = _part_of_folders(where, above)
    if not stated and label.casefold() in PART_MEANT and not part:
        raise InputError(f"{where} lies in {label}/, which is a part or a class. Put it into a folder of its class.")
    group = groups[0] if groups else ""
    return _Example(image.content, _stem(image.name), _suffix_of(image.name), label, group, part)


def _part_of_folders(where: str, above: Sequence[str]) -> str:
    parts = {PART_MEANT[folder.casefold()] for folder in above if folder.casefold() in PART_MEANT}
    if len(parts) > 1:
        raise InputError(f"{where} lies in folders of two parts. Move it.")
    return parts.pop() if parts else ""


def _suffix_of(name: str) -> str:
    return name.removeprefix(_stem(name)).lower()


def _described(where: str, content: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in ("label", "group") if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f'{where} gives "{twice}" twice. Keep one.')
        return dict(pairs)

    try:
        found = json.loads(content, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is no JSON. Correct it.") from None
    return found if isinstance(found, dict) else {}


def _plain(where: str, column: str, value: Any) -> str:
    """A label or group as text: a name or a whole number."""
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float) and value.is_integer():  # as tables write whole numbers beside empty cells
        value = int(value)
    text = unicodedata.normalize("NFC", str(value)).strip() if isinstance(value, (str, int)) else ""
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
        given = file.schema_arrow.names
        columns = [name for name in ("image", "label", "group") if name in given]
        twice = next((name for name in columns if given.count(name) > 1), None)
        if twice is not None:
            raise InputError(f'{path} has the column "{twice}" twice. Keep one.')
        if columns[:2] != ["image", "label"]:
            listed = ", ".join(given)
            raise InputError(f'{path} needs the columns "image" and "label"; it has {listed}. Rename them.')
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
    part = _part_of_folders(where, PurePosixPath(name).parts[:-1])
    return _Example(content, name.removesuffix(suffix), _suffix(content), _plain(where, "label", label), group, part)


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

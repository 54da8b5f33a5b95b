"""The images of a tar shard as WebDataset writes it, and of a Parquet file as Hugging Face does.

In a tar an example is an image with what shares its name: `0001.jpg` with `0001.cls` (a class's number or name) or
`0001.json` (its "label", and "group" where it has one); without these, the folder that it lies in names its class.
A Parquet file has rows of "image" (bytes, or a record with "bytes" and "path"), "label" and perhaps "group".
"""

import collections
import hashlib
import json
import lzma
import tarfile
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sfumato.data.listing import EXTENSIONS, PART_MEANT, is_left_out, is_note, refusing
from sfumato.errors import InputError

DAMAGED = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)
"""What damaged archives raise when they are read."""
MOST_BYTES = 2**28
"""Of one member: no image file is larger."""
MOST_BYTES_OF_A_LABEL = 2**24
_MOST_SIGNS = 1000
"""Of the name of a class or a group."""
_LABELS = (".cls", ".json")
"""What says the label of the image that it lies beside."""
_BESIDE = (".txt", ".npy", ".npz", ".pyd", ".pkl", ".pickle", ".pth", ".pt", ".xml", ".yaml", ".yml", ".html")
"""Kinds of members that are no image and may stand beside one; they are passed over, and counted."""

Keep = Callable[[bytes], tuple[int, int]]
"""Puts an image's bytes into a file and says where: first byte, number of bytes."""


class Example(NamedTuple):
    """One image of an archive.

    Attributes:
        span: Where its bytes were put.
        name: Its path in the archive, without what tells its kind.
        suffix: What tells its kind.
        label, group: As the archive states them; "" where it states no group.
        part: What a folder of its name says; "" where none does.
    """

    span: tuple[int, int]
    name: str
    suffix: str
    label: str
    group: str = ""
    part: str = ""


def files_of(tar: tarfile.TarFile, where: str, most_bytes: int = MOST_BYTES) -> Iterator[tarfile.TarInfo]:
    """The files of an archive, one after another.

    Raises:
        InputError: If it holds a link or what else is no file, or a larger one; or if it is damaged or cut short.
    """
    with refusing(f"{where} is cut short or damaged", "Put the original archive there.", *DAMAGED):
        for member in tar:
            vars(tar)["members"] = []  # the headers of a large shard would all stay in memory
            if member.isdir():
                continue
            if not member.isfile() or member.sparse is not None:
                raise InputError(f"{where}: {member.name} is a link or no ordinary file. Put the file itself there.")
            if member.size > most_bytes:
                raise InputError(f"{where}: {member.name} has {member.size} bytes. No image is as large.")
            yield member
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes a bad header for the end
            raise tarfile.ReadError("it has no end")


def images_of_tar(path: Path, keep: Keep, report: Callable[[str], None]) -> list[Example]:
    """The images of a tar shard.

    Raises:
        InputError: If it is damaged, or what it holds is no image, has no label or more than one.
    """
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, dict[str, str]] = {}
    beside = collections.Counter[str]()
    with refusing(f"{path} is no tar archive", "Put the original there.", *DAMAGED):
        tar = tarfile.open(path, "r:*")  # noqa: SIM115, closed below
    with tar:
        for member in files_of(tar, str(path)):
            name = unicodedata.normalize("NFC", PurePosixPath(member.name).as_posix())
            if any(is_left_out(folder) for folder in name.split("/") if folder not in (".", "..")):
                continue
            if name in images or name in labels:
                raise InputError(f"{path}: {name} is there a second time. Keep one.")
            suffix = _suffix_of(name)
            if suffix not in (*EXTENSIONS, *_LABELS):
                _refuse_unknown(path, name, suffix)
                beside[suffix] += 1
                continue
            if suffix in _LABELS and member.size > MOST_BYTES_OF_A_LABEL:
                raise InputError(f"{path}: {name} has {member.size} bytes. No label is as large.")
            with refusing(f"{path} is cut short or damaged", "Put the original archive there.", *DAMAGED):
                content = tar.extractfile(member).read()  # type: ignore[union-attr]  # of a file, never None
            if suffix in EXTENSIONS:
                images[name] = keep(content)
            else:
                labels[name] = _stated(f"{path}: {name}", suffix, content)
    if beside:
        kinds = ", ".join(f"{count} of {kind or 'notes'}" for kind, count in sorted(beside.items()))
        report(f"passed over in {path}: members that are no image: {kinds}")
    told = _labels_of_images(path, list(images), labels)
    return [_example(path, name, span, told[name]) for name, span in images.items()]


def _refuse_unknown(path: Path, name: str, suffix: str) -> None:
    """Of a member that is no image and no label: whether it may be left out."""
    last = name.rpartition("/")[2]
    if suffix not in _BESIDE and not is_note(last):
        raise InputError(
            f"{path}: {name} is of no known kind of image ({', '.join(EXTENSIONS)}). Convert it, or take it out."
        )


def _key(name: str) -> str:
    """What the members of one example share: all up to the first dot."""
    above, _, last = name.rpartition("/")
    return f"{above}/{last.partition('.')[0]}"


def _suffix_of(name: str) -> str:
    return name.removeprefix(_stem(name)).lower()


def _stem(name: str) -> str:
    """A name without what tells its kind."""
    above, dot, kind = name.rpartition(".")
    return above if dot and "/" not in kind else name


def _stated(where: str, suffix: str, content: bytes) -> dict[str, str]:
    """The label and the group that a file beside an image states; each only where it does."""
    if suffix == ".cls":
        return {"label": _as_text(where, "label", content.decode("utf-8-sig", "replace"))}
    with refusing(f"{where} is no JSON", "Correct it.", ValueError, RecursionError):
        found = json.loads(content)
    columns = [column for column in ("label", "group") if isinstance(found, dict) and column in found]
    return {column: _as_text(where, column, found[column]) for column in columns}


def _labels_of_images(
    path: Path, images: Sequence[str], labels: dict[str, dict[str, str]]
) -> dict[str, list[dict[str, str]]]:
    """What is stated of each image beside it, by a file of its own name, else by one that shares its key."""
    of_stem, of_key = collections.defaultdict(list), collections.defaultdict(list)
    for name in images:
        of_stem[_stem(name)].append(name)
        of_key[_key(name)].append(name)
    told = collections.defaultdict(list)
    for label, stated in labels.items():
        where = f"{path}: {label}"
        whose = of_stem.get(_stem(label)) or of_key.get(_key(label), [])
        if len(whose) > 1:
            raise InputError(f"{where} has {len(whose)} images ({', '.join(whose[:3])}). Keep one of each example.")
        if whose:
            told[whose[0]].append(stated)
        elif "label" in stated:
            raise InputError(f"{where} has no image of a known kind ({', '.join(EXTENSIONS)}) beside it. Convert it.")
    return told


def _example(path: Path, name: str, span: tuple[int, int], told: Sequence[dict[str, str]]) -> Example:
    where = f"{path}: {name}"
    stated = {}
    for column in ("label", "group"):
        values = {told_by[column] for told_by in told if column in told_by}
        if len(values) > 1:
            raise InputError(f"{where} has two {column}s, {' and '.join(map(repr, sorted(values)))}. Keep one.")
        stated[column] = next(iter(values), "")
    above = [part for part in PurePosixPath(name).parts if part not in ("/", "..")][:-1]
    if not stated["label"] and not above:
        raise InputError(f'{where} has no label. Add a .cls, a "label" in a .json, or a folder of its class.')
    label = stated["label"] or _as_text(where, "label", above.pop())
    part = _part_of_folders(where, above)
    if not stated["label"] and label.casefold() in PART_MEANT and not part:
        raise InputError(f"{where} lies in {label}/, which is a part or a class. Put it into a folder of its class.")
    return Example(span, _stem(name), _suffix_of(name), label, stated["group"], part)


def images_of_parquet(path: Path, keep: Keep, report: Callable[[str], None]) -> list[Example]:
    """The images of a Parquet file.

    Raises:
        InputError: If it is damaged, or lacks images or labels.
    """
    with refusing(f"{path}: pyarrow is not installed", "Install it: pip install 'sfumato[parquet]'", ImportError):
        import pyarrow
        from pyarrow import parquet
    examples: list[Example] = []
    with refusing(f"{path} cannot be read as Parquet", "Put the original there.", pyarrow.ArrowException, OSError):
        file = parquet.ParquetFile(path)
        names = _class_names(file.schema_arrow.metadata)
        given = file.schema_arrow.names
        columns = [name for name in ("image", "label", "group") if name in given]
        if columns[:2] != ["image", "label"] or any(given.count(name) > 1 for name in columns):
            listed = ", ".join(given)
            raise InputError(f'{path} needs one column "image" and one "label"; it has {listed}. Rename them.')
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                examples.append(_of_row(f"{path} row {len(examples)}", row, names, keep))
    return examples


def _of_row(where: str, row: dict[str, Any], names: list[str], keep: Keep) -> Example:
    image: Any = row["image"]
    path = PurePosixPath()
    if isinstance(image, dict):
        image, path = image.get("bytes"), PurePosixPath(str(image.get("path") or ""))
    if image is not None and not isinstance(image, bytes):
        raise InputError(f'{where} has an "image" that is {type(image).__name__}, not bytes. Store the files\' bytes.')
    content = image or b""
    label = row["label"]
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        label = names[label]
    group = _as_text(where, "group", row["group"]) if "group" in row else ""
    # Without a name of its own an image is told by its bytes, never by its place.
    name = str(path.with_suffix("")) if path.name else f"#{hashlib.sha256(content).hexdigest()}"
    suffix = path.suffix.lower() if path.suffix.lower() in EXTENSIONS else ".png"
    part = _part_of_folders(where, path.parts[:-1])
    return Example(keep(content), name, suffix, _as_text(where, "label", label), group, part)


def _class_names(metadata: dict[bytes, bytes] | None) -> list[str]:
    """Of whole-number labels, where Hugging Face's library noted them."""
    features = json.loads((metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return [str(name) for name in features.get("label", {}).get("names", [])]


def _as_text(where: str, column: str, value: Any) -> str:
    """A label or group as text: a name or a whole number."""
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float) and value.is_integer():  # as tables write whole numbers beside empty cells
        value = int(value)
    text = unicodedata.normalize("NFC", str(value)).strip() if isinstance(value, (str, int)) else ""
    if not 0 < len(text) <= _MOST_SIGNS:
        raise InputError(f"{where} has the {column} {str(value)[:50]!r}, no name or whole number. Correct it.")
    return text


def _part_of_folders(where: str, above: Sequence[str]) -> str:
    """The part that one of an image's folders says; "" where none does."""
    parts = {PART_MEANT[folder.casefold()] for folder in above if folder.casefold() in PART_MEANT}
    if len(parts) > 1:
        raise InputError(f"{where} lies in folders of two parts. Move it.")
    return parts.pop() if parts else ""

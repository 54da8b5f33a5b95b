"""A folder of tar shards as WebDataset writes them, or of Parquet files as Hugging Face does, unpacked once into the
user's cache folder.

In a tar an example is an image with what shares its name: `0001.jpg` with `0001.cls` (a class's number or name) or
`0001.json` (its "label", and "group" where it has one); without these, the folder that it lies in names its class.
A Parquet file has rows of "image" (bytes, or a record with "bytes" and "path"), "label" and perhaps "group".

**Nothing depends on an image's place, nor on other members.** Its name, by which persons are told
and it is held out, is `<shard>/<member>`, whatever lies beside it. (A row of a Parquet file that has no path is held
out by its bytes.) A part (train, valid, test and their other spellings) is what a word of the shard's name says, or a
folder of its members; the two must agree.

All images are put into one file, and beside it stands where each begins: no name of a member is a name on the disk.
"""

import collections
import hashlib
import json
import lzma
import tarfile
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sfumato.data import dicom, store
from sfumato.data.listing import EXTENSIONS, PART_MEANT, ImageFile, is_left_out, is_note, part_said, stamp_of
from sfumato.data.store import Report
from sfumato.errors import InputError, refusing

DAMAGED = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)
"""What damaged archives raise when they are read."""
_ORIGINAL = "Put the original archive there."
_SUFFIXES = (".tar", ".parquet")
_IMAGES, _INDEX = "images.bin", "index.json"
_MOST_BYTES, _MOST_BYTES_OF_A_LABEL = 2**28, 2**24  # of one member
_MOST_SIGNS = 1000
"""Of the name of a class or a group."""
_LABELS = (".cls", ".json")
"""What says the label of the image that it lies beside."""
_BESIDE = (".txt", ".npy", ".npz", ".pyd", ".pkl", ".pickle", ".pth", ".pt", ".xml", ".yaml", ".yml", ".html")
"""Kinds of members that are no image and may stand beside one; they are passed over, and counted."""

Keep = Callable[[bytes], tuple[int, int]]
"""Puts an image's bytes into a file and says where: first byte, number of bytes."""


Row = dict[str, Any]
"""What the index says of an image: the fields of `ImageFile` that an archive tells."""


def archives_of(root: Path) -> list[Path]:
    """The archives of a folder, by name; none where it holds anything else.

    Raises:
        InputError: If it holds archives beside other files.
    """
    if root.is_file() and root.suffix.lower() in _SUFFIXES:
        return [root]
    if not root.is_dir():
        return []
    entries = sorted(path for path in root.iterdir() if not is_left_out(path.name) and not is_note(path.name))
    found = [path for path in entries if path.suffix.lower() in _SUFFIXES and path.is_file()]
    shards = {path.stem for path in found if path.suffix.lower() == ".tar"}
    found = [path for path in found if path.suffix.lower() == ".tar" or path.stem not in shards]  # img2dataset's tables
    beside = {f"{stem}{ending}" for stem in shards for ending in (".parquet", "_stats.json")}
    known = {"dataset_info.json", *beside, *(path.name for path in found)}
    others = [path.name for path in entries if path.name not in known]
    if found and others:
        remedy = "Keep archives in a folder of their own, or unpack them."
        raise InputError(f"{root} holds archives ({found[0].name}) beside {others[0]}. {remedy}")
    return found


def unpacked(root: Path, found: Sequence[Path], report: Report, unpack_to: Path | None = None) -> list[ImageFile]:
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
        stamps = {"unpacked": [[path.name, *stamp_of(path)] for path in found]}
        folder, _ = store.made(slot, settings | stamps, lambda part: _unpack(root, found, part, report), report)
    else:
        _unpack(root, found, folder, report)
    images, stamp = folder / _IMAGES, stamp_of(folder / _IMAGES)
    rows = store.read_json(folder / _INDEX)
    files = [ImageFile(images, stamp=stamp, **{**row, "span": tuple(row["span"])}) for row in rows]
    return sorted(files, key=lambda file: (file.name, file.span))


def _unpack(root: Path, found: Sequence[Path], folder: Path, report: Report) -> None:
    """Writes all images to one file of a folder, and an index."""
    report(f"unpacking {len(found)} archive(s) of {root}")
    rows: list[Row] = []
    with open(folder / _IMAGES, "wb") as file:

        def keep(content: bytes) -> tuple[int, int]:
            if dicom.is_dicom(content):
                remedy = "Unpack the archives into class folders."
                raise InputError(f"{root} holds DICOM, which names people: it is not copied into the cache. {remedy}")
            return file.tell(), file.write(content)

        for path in found:
            read = _images_of_parquet if path.suffix.lower() == ".parquet" else _images_of_tar
            rows += read(path, keep, report)
    for column, what in (("group", "group"), ("part", "part (train, valid, test)")):
        without = [row["name"] for row in rows if not row[column]]
        if 0 < len(without) < len(rows):
            raise InputError(f"{root}: {without[0]} names no {what}, and others do. Give it to all or none.")
    store.write(folder / _INDEX, json.dumps(rows))


def _row(
    path: Path, name: str, suffix: str, label: str, group: str, above: Sequence[str], span: tuple[int, int]
) -> Row:
    """Of an image by its name in an archive without what tells its kind, the suffix; `above` are its folders."""
    parts = {PART_MEANT[folder.casefold()] for folder in above if folder.casefold() in PART_MEANT}
    if len(parts) > 1:
        raise InputError(f"{path}: {name} lies in folders of two parts. Leave one of them out.")
    part, of_archive = "".join(parts), part_said(path.stem)
    if of_archive and part and of_archive != part:
        named = f"the archive is named for {of_archive}. Rename the archive, or the folder."
        raise InputError(f"{path}: {name} lies in {part}/, and {named}")
    hashed = unicodedata.normalize("NFC", f"{path.stem}/{name}")
    row = {"name": hashed + suffix, "hashed": hashed, "span": span, "label": label}
    return row | {"group": group or None, "part": of_archive or part or None}


def files_of(tar: tarfile.TarFile, where: str, most_bytes: int = _MOST_BYTES) -> Iterator[tarfile.TarInfo]:
    """The files of an archive, one after another.

    Raises:
        InputError: If it holds a link or what else is no file, or a larger one; or if it is damaged or cut short.
    """
    with refusing(f"{where} is cut short or damaged", _ORIGINAL, *DAMAGED):
        for member in tar:
            vars(tar)["members"] = []  # the headers of a large shard would all stay in memory
            if member.isdir():
                continue
            if not member.isfile() or member.sparse is not None:
                raise InputError(f"{where}: {member.name} is a link or no ordinary file. Put the file itself there.")
            if member.size > most_bytes:
                raise InputError(f"{where}: {member.name} has {member.size} bytes, as no image has. Take it out.")
            yield member
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes a bad header for the end
            raise tarfile.ReadError("it has no end")


def _images_of_tar(path: Path, keep: Keep, report: Report) -> list[Row]:
    """The images of a tar shard; refused if it is damaged, or what it holds is no image, has no label or two."""
    images: dict[PurePosixPath, tuple[int, int]] = {}
    stated: dict[PurePosixPath, dict[str, str]] = {}
    beside = collections.Counter[str]()
    with refusing(f"{path} is no tar archive", _ORIGINAL, *DAMAGED):
        tar = tarfile.open(path, "r:*")  # noqa: SIM115, closed below
    with tar:
        for member in files_of(tar, str(path)):
            name = PurePosixPath(unicodedata.normalize("NFC", member.name))
            suffix, where = name.suffix.lower(), f"{path}: {name}"
            if any(is_left_out(folder) for folder in name.parts if folder != ".."):
                continue
            if name in images or name in stated:
                raise InputError(f"{where} is there a second time. Keep one.")
            if suffix not in (*EXTENSIONS, *_LABELS):
                if suffix not in _BESIDE and not is_note(name.name):
                    known = ", ".join(EXTENSIONS)
                    raise InputError(f"{where} is of no known kind of image ({known}). Convert it, or take it out.")
                beside[suffix] += 1
                continue
            if suffix in _LABELS and member.size > _MOST_BYTES_OF_A_LABEL:
                raise InputError(f"{where} has {member.size} bytes. Keep its label and group alone.")
            with refusing(f"{path} is cut short or damaged", _ORIGINAL, *DAMAGED):
                content = tar.extractfile(member).read()  # type: ignore[union-attr]  # of a file, never None
            if suffix in EXTENSIONS:
                images[name] = keep(content)
            else:
                stated[name] = _stated(where, suffix, content)
    if beside:
        kinds = ", ".join(f"{count} of {kind or 'notes'}" for kind, count in sorted(beside.items()))
        report(f"passed over in {path}: members that are no image: {kinds}")
    told = _told_of_images(path, images, stated)
    return [_example(path, name, told[name], span) for name, span in images.items()]


def _stated(where: str, suffix: str, content: bytes) -> dict[str, str]:
    """The label and the group that a file beside an image states; each only where it does."""
    if suffix == ".cls":
        return {"label": _as_text(where, "label", content.decode("utf-8-sig", "replace"))}
    with refusing(f"{where} is no JSON", 'Write it as {"label": "NAME"}.', ValueError, RecursionError):
        found = json.loads(content)
    columns = [column for column in ("label", "group") if isinstance(found, dict) and column in found]
    return {column: _as_text(where, column, found[column]) for column in columns}


def _told_of_images(
    path: Path, images: Iterable[PurePosixPath], stated: dict[PurePosixPath, dict[str, str]]
) -> dict[PurePosixPath, list[dict[str, str]]]:
    """What is stated of each image beside it, by a file of its own name, else by one that shares its key."""
    of_stem, of_key, told = (collections.defaultdict[PurePosixPath, list](list) for _ in range(3))
    for image in images:
        of_stem[image.with_suffix("")].append(image)
        of_key[_key(image)].append(image)
    for label, said in stated.items():
        where = f"{path}: {label}"
        whose = of_stem.get(label.with_suffix("")) or of_key.get(_key(label), [])
        if len(whose) > 1:
            listed = ", ".join(map(str, whose[:3]))
            raise InputError(f"{where} has {len(whose)} images ({listed}). Keep one of each example.")
        if whose:
            told[whose[0]].append(said)
        elif "label" in said:
            raise InputError(f"{where} has no image of a known kind ({', '.join(EXTENSIONS)}) beside it. Add one.")
    return told


def _key(name: PurePosixPath) -> PurePosixPath:
    """What the members of one example share: all up to the first dot."""
    return name.parent / name.name.partition(".")[0]


def _example(path: Path, name: PurePosixPath, told: Sequence[dict[str, str]], span: tuple[int, int]) -> Row:
    where, found = f"{path}: {name}", {}
    for column in ("label", "group"):
        values = sorted({stated[column] for stated in told if column in stated})
        if len(values) > 1:
            raise InputError(f"{where} has two {column}s, {' and '.join(map(repr, values))}. Keep one.")
        found[column] = "".join(values)
    above = [folder for folder in name.parts[:-1] if folder not in ("/", "..")]
    label = found["label"]
    if not label:
        if not above:
            raise InputError(f'{where} has no label. Add a .cls, a "label" in a .json, or a folder of its class.')
        label = _as_text(where, "label", above.pop())
        if label.casefold() in PART_MEANT and not any(each.casefold() in PART_MEANT for each in above):
            what = f"{where} lies in {label}/, which is a part or a class"
            raise InputError(f"{what}. Put it into a folder of its class.")
    return _row(path, str(name.with_suffix("")), name.suffix.lower(), label, found["group"], above, span)


def _images_of_parquet(path: Path, keep: Keep, report: Report) -> list[Row]:
    """The images of a Parquet file; refused if it is damaged, or lacks images or labels."""
    with refusing(f"{path}: pyarrow is not installed", "Install it: pip install pyarrow", ImportError):
        import pyarrow
        from pyarrow import parquet
    rows: list[Row] = []
    notes = (ValueError, AttributeError, TypeError)  # of damaged notes of features
    kinds = (pyarrow.ArrowException, OSError, *notes)
    with refusing(f"{path} cannot be read as Parquet", "Put the original there.", *kinds):
        file = parquet.ParquetFile(path)
        given, metadata = file.schema_arrow.names, file.schema_arrow.metadata or {}
        pixels = "img" if "img" in given and "image" not in given else "image"  # as CIFAR-10 has it
        columns = [name for name in (pixels, "label", "group") if name in given]
        if columns[:2] != [pixels, "label"] or any(given.count(name) > 1 for name in columns):
            listed = ", ".join(given)
            raise InputError(f'{path} needs one column "image" and one "label"; it has {listed}. Rename them.')
        # Of whole-number labels, where Hugging Face's library noted them.
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = [str(name) for name in features.get("label", {}).get("names", [])]
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                rows.append(_of_row(path, f"{path} row {len(rows)}", row | {"image": row[pixels]}, names, keep))
    return rows


def _of_row(path: Path, where: str, row: dict[str, Any], names: list[str], keep: Keep) -> Row:
    image: Any = row["image"]
    label, own = row["label"], PurePosixPath()
    if isinstance(image, dict):
        image, own = image.get("bytes"), PurePosixPath(str(image.get("path") or ""))
    if image is not None and not isinstance(image, bytes):
        raise InputError(f'{where} has an "image" that is {type(image).__name__}, not bytes. Store the files\' bytes.')
    content = image or b""
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        label = names[label]
    group = _as_text(where, "group", row["group"]) if "group" in row else ""
    # Without a name of its own an image is told by its bytes, never by its place.
    name = str(own.with_suffix("")) if own.name else f"#{hashlib.sha256(content).hexdigest()}"
    suffix = own.suffix.lower() if own.suffix.lower() in EXTENSIONS else ".png"
    return _row(path, name, suffix, _as_text(where, "label", label), group, own.parts[:-1], keep(content))


def _as_text(where: str, column: str, value: Any) -> str:
    """A label or group as text: a name or a whole number."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)  # tables write whole numbers so beside empty cells
    text = unicodedata.normalize("NFC", str(value)).strip() if isinstance(value, (str, int)) else ""
    if not 0 < len(text) <= _MOST_SIGNS:
        raise InputError(f"{where} has the {column} {str(value)[:50]!r}, no name or whole number. Write one there.")
    return text

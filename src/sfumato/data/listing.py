"""Which files of a user's folder are images, and of which class, part and group. Never opens an
image.

Nothing is passed over in silence: every file is an image of a listed class or is refused
by name. The exceptions are what systems leave behind: names that begin with a dot
(.DS_Store, ._a.png, .git), Thumbs.db, desktop.ini and __MACOSX are left out; notes such as README.txt are named.
Symbolic links to files are followed; links to folders are refused; so are two names of
one file, since that image would count twice.
"""

import dataclasses
import io
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from sfumato.errors import InputError

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
PARTS = ("train", "valid", "test")
PART_MEANT = {"training": "train", "validation": "valid", "val": "valid", "dev": "valid", "testing": "test"} | {
    part: part for part in PARTS
}
_LEFT_OUT = ("thumbs.db", "desktop.ini", "__macosx")
_NOTES = ("readme", "license", "licence", "copying", "notice", "changelog", "citation")
_DICOM_EXTENSIONS = (".dcm", ".dicom", ".ima")


@dataclasses.dataclass(frozen=True)
class FoundFile:
    """A file that carries an image, by its name.

    Attributes:
        path: Where it lies.
        name: Its path relative to the folder, with `/` and in Unicode NFC on every system.
        stamp: (size, mtime_ns, ctime_ns): when one changes, the file may have changed.
        span: Where the image begins in the file, in bytes, and how many it has; None: it is the whole file.
    """

    path: Path
    name: str
    stamp: tuple[int, int, int]
    span: tuple[int, int] | None = None

    def __str__(self) -> str:
        return str(self.path) if self.span is None else f"{self.path}: {self.name}"

    def open(self) -> IO[bytes]:
        """The image's bytes."""
        if self.span is None:
            return open(self.path, "rb")
        first, size = self.span
        with open(self.path, "rb", buffering=0) as file:
            file.seek(first)
            return io.BytesIO(file.read(size))


@dataclasses.dataclass(frozen=True)
class LabelledFile:
    """A file with what the folder says about it; `part` is "train", "valid", "test" or None where
    the folder does not say; `hashed` decides where it is held out, None: its name.
    """

    file: FoundFile
    label: str
    part: str | None = None
    group: str | None = None
    hashed: str | None = None


def find_images(root: Path) -> list[FoundFile]:
    """All images below a folder, in the order of their names.

    Raises:
        InputError: If the folder cannot be read, or a file in it is refused.
    """
    if not root.is_dir():
        reason = "is not a folder" if root.exists() else "does not exist"
        raise InputError(f"data folder {root} {reason}. Name the folder of images by --data-root or data.path.")
    files: list[FoundFile] = []
    names: dict[str, Path] = {}
    same: dict[tuple[int, int], Path] = {}
    for path in _walk(root):
        name = unicodedata.normalize("NFC", path.relative_to(root).as_posix())
        if is_table(name) or is_note(name):
            continue
        _check_kind(path)
        status = _status(path)
        for other in (names.setdefault(name, path), same.setdefault((status.st_dev, status.st_ino), path)):
            if other != path and status.st_ino:
                raise InputError(
                    f"{path} and {other} are one file under two names, so that its image would "
                    "count twice. Take one out."
                )
        files.append(FoundFile(path, name, (status.st_size, status.st_mtime_ns, status.st_ctime_ns)))
    return sorted(files, key=lambda file: file.name)


def find_notes(root: Path) -> list[str]:
    """What is passed over below a folder (`is_note`), by name; nothing where it is an archive."""
    names = (path.relative_to(root).as_posix() for path in _walk(root)) if root.is_dir() else iter(())
    return sorted(name for name in names if is_note(name))


def stamp_of(path: Path) -> tuple[int, int, int]:
    """(size, mtime_ns, ctime_ns) of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_table(name: str) -> bool:
    """Whether a file's name in the folder is that of a table of labels (`sfumato.data.tables`)."""
    *above, last = name.split("/")
    is_there = not above or (len(above) == 1 and above[0].casefold() in PART_MEANT)
    return is_there and last in ("labels.csv", "metadata.csv", "metadata.jsonl")


def is_note(name: str) -> bool:
    """Whether a file tells of the images, as README.txt does: such ones are passed over."""
    stem, _, ending = name.rpartition("/")[2].casefold().partition(".")
    return stem in _NOTES and ending in ("", "txt", "md", "rst", "pdf", "html")


def check_file(path: Path) -> None:
    """Refuses what is no file of a known kind of image.

    Raises:
        InputError: Naming the file.
    """
    if not path.is_file():
        raise InputError(
            f"image {path} {'is no ordinary file' if path.exists() else 'does not exist'}. Name "
            "an image, or a folder of images."
        )
    _check_kind(path)


def find_labelled(root: Path, classes: Sequence[str] | None, *, needs_train: bool = True) -> list[LabelledFile]:
    """The images of the layouts `<class>/*` and `{train,valid,test}/<class>/*`; folders within a
    class belong to it.

    Args:
        root: The folder.
        classes: The listed classes, or None to take every class folder's name.
        needs_train: Whether there must be a training part, where there are parts.

    Raises:
        InputError: If a file lies outside a listed class, or the layout is neither.
    """
    files = find_images(root)
    folders = sorted(
        {
            unicodedata.normalize("NFC", entry.name)
            for entry in root.iterdir()
            if entry.is_dir() and not is_left_out(entry.name)
        }
    )
    parts = parts_of(root, files, folders, classes, needs_train=needs_train)
    found = []
    for file in files:
        *above, _ = file.name.split("/")
        part = parts[above.pop(0)] if parts and above else None
        if not above or (classes is not None and above[0] not in classes):
            listed = f"the classes {', '.join(classes)}" if classes is not None else "a class's folder"
            or_list = ", or list its class in data.classes" if needs_train else ""
            raise InputError(f"{file.path} lies outside {listed}. Move it into a class's folder or away{or_list}.")
        if any("\ud800" <= sign <= "\udfff" for sign in above[0]):  # it goes into files for sharing, which are UTF-8
            raise InputError(
                f"the folder {above[0]!r} in {root} names a class, but its name is not UTF-8. "
                "Rename the folder; its files may stay."
            )
        found.append(LabelledFile(file, above[0], part))
    used = {item.label for item in found}
    for folder in _class_folders(root, folders, bool(parts)):
        if unicodedata.normalize("NFC", folder.name) not in used:
            raise InputError(f"{folder} holds no image. Put images of the class there, or take the folder away.")
    return found


def _class_folders(root: Path, folders: Sequence[str], in_parts: bool) -> Iterator[Path]:
    """Folders that name a class, empty ones too."""
    for folder in folders:
        if not in_parts:
            yield root / folder
        elif (root / folder).is_dir():
            inner = sorted((root / folder).iterdir())
            yield from (path for path in inner if path.is_dir() and not is_left_out(path.name))


# Default_Ignorable_Code_Point of Unicode 16.0's DerivedCoreProperties.txt (as in 14.0), which no
# font shows, those kept for later included; and the blank of Braille.
_INVISIBLE = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x2800, 0x2800),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)


def _is_invisible(sign: str) -> bool:
    return unicodedata.category(sign) in ("Cf", "Cc") or any(low <= ord(sign) <= high for low, high in _INVISIBLE)


def group_name(text: str) -> str:
    """One spelling for what is one group to the eye: Unicode NFC, one blank between words, no
    invisible signs.

    Two spellings of a person would count as two, each within the limit. Upper and lower case stay
    apart, as names and codes use them.

    Example:
        >>> group_name(" Zoe\u0308\u00a0\u200bK. ") == "Zo\u00eb K."
        True
    """
    visible = "".join(sign for sign in text if sign.isspace() or not _is_invisible(sign))
    return " ".join(unicodedata.normalize("NFC", visible).split())


def with_groups(files: Sequence[LabelledFile], pattern: str) -> list[LabelledFile]:
    """The same files, each with the group that the pattern's first group reads from its relative
    path.

    Raises:
        InputError: If the pattern is no regular expression with a group, or finds nothing in a
            path.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise InputError(f"data.group_by = {pattern!r} is no regular expression: {error}. Correct it.") from None
    if not expression.groups:
        raise InputError(
            f"data.group_by = {pattern!r} has no (group) to read from a path. Put what names a "
            "person in parentheses, as in '(patient[0-9]+)'; 'group' alone means that column of "
            "the table of labels."
        )
    grouped = []
    for item in files:
        match = expression.search(item.file.name)
        group = group_name(match[1] or "") if match else ""
        if not group:
            raise InputError(
                f"data.group_by = {pattern!r} reads no group from {item.file.name}. Correct the "
                "expression, or rename the file."
            )
        grouped.append(dataclasses.replace(item, group=group))
    return grouped


def words_of(name: str) -> list[str]:
    """The words of a name, as `pets_train-01` or `petsTrain`; a number or "set" at a word's end left out, as of
    `train2017` and `testset`.
    """
    parts = re.split(r"[-_. ]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name))
    words = (word.casefold().rstrip("0123456789").removesuffix("set") for word in parts)
    return [word for word in words if word]


def parts_of(
    root: Path,
    files: Sequence[FoundFile],
    folders: Sequence[str],
    classes: Sequence[str] | None,
    *,
    needs_train: bool = True,
) -> dict[str, str]:
    """Which of the folders at the top is which part, whatever its spelling (Training/, val/, Test/);
    empty where they are classes. What could be both is refused.

    Raises:
        InputError: If a part stands beside what is none, or twice, or there is no train/.
    """
    meant = {name: PART_MEANT[name.casefold()] for name in folders if name.casefold() in PART_MEANT}
    if classes is None and len(folders) > 1 and all(set(words_of(name)) & set(PART_MEANT) for name in folders):
        unclear = next((name for name in folders if name not in meant), None)
        if unclear is not None:
            raise InputError(
                f"{root} holds {', '.join(f'{name}/' for name in folders[:3])}: parts or classes? Rename them to "
                "train/, valid/ and test/, or list them in data.classes."
            )
    others = [name for name in folders if name not in meant]
    if not meant or (classes is not None and set(folders) <= set(classes)):
        return {}
    listed = "or list all these folders in data.classes if they are classes."
    if others:
        is_class = any(file.name.count("/") == 1 and file.name.split("/")[0] in meant for file in files)
        if is_class and not any(name in PARTS for name in meant):
            return {}  # a folder of images beside other classes is one of them
        raise InputError(
            f"{root} holds {next(iter(meant))}/ beside {others[0]}/. Keep only train/, valid/ and test/ "
            f"(or Training/, val/ and the like), {listed}"
        )
    for part in PARTS:
        same = [other for other in meant if meant[other] == part]
        if len(same) > 1:
            raise InputError(f"{root} holds {same[0]}/ and {same[1]}/, which both mean {part}/. Put them together.")
    if needs_train and "train" not in meant.values():
        raise InputError(f"{root} holds {next(iter(meant))}/ but no train/. Add it, {listed}")
    return meant


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below a folder that is not left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"folder {folder} cannot be read: {error.strerror}. Make it readable.") from None
    for entry in entries:
        path = folder / entry.name
        if is_left_out(entry.name):
            continue
        if entry.is_symlink() and entry.is_dir():
            raise InputError(
                f"{path} is a symbolic link to a folder, which is not followed. Put the folder itself there."
            )
        if entry.is_dir():
            yield from _walk(path)
        elif entry.is_file():
            yield path
        else:
            raise InputError(f"{path} is a broken link or no ordinary file. Take it out of the folder.")


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}. Make it readable, or take it out of the folder."
        ) from None


def is_left_out(name: str) -> bool:
    """Whether a system left a file or folder of that name behind."""
    return name.startswith(".") or name.lower() in _LEFT_OUT


def _check_kind(path: Path) -> None:
    extension = path.suffix.lower()
    if extension in EXTENSIONS:
        return
    if extension in _DICOM_EXTENSIONS or _is_dicom(path):
        raise InputError(
            f"{path} is DICOM, which is not read. Convert it to 16-bit PNG first, for example by "
            "DCMTK's `dcmj2pnm --write-16-bit-png`, and see to it that no name is written into "
            "the picture."
        )
    if extension in (".csv", ".tsv", ".xlsx", ".xls", ".ods"):
        raise InputError(
            f"{path} is no image. A table of labels is named labels.csv, with commas between the columns file, label "
            "and, for people with several images, group. Rename it, or take it out of the folder."
        )
    raise InputError(
        f"{path} is of no known kind of image ({', '.join(EXTENSIONS)}). Convert it, or take it out of the folder."
    )


def _is_dicom(path: Path) -> bool:
    """By its mark at byte 128, since DICOM files often have no extension."""
    try:
        with open(path, "rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False

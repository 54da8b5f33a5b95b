"""What lies in a user's folder, by names alone: images, tables of labels, notes. Never opens an image.

Nothing is passed over in silence: every file is an image or is refused by name. The exceptions are what systems leave
behind: names that begin with a dot (.DS_Store, ._a.png, .git), Thumbs.db, @eaDir and the like are left out; notes such
as README.txt, and what `data.exclude` names, are told. Symbolic links to files are followed; links to folders are
refused.
"""

import dataclasses
import importlib.util
import io
import os
import re
import unicodedata
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn

from sfumato.errors import InputError

DICOM = (".dcm", ".dicom", ".ima")
_PICTURES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".webp", ".tif", ".tiff")
EXTENSIONS = _PICTURES + (DICOM if importlib.util.find_spec("pydicom") else ())
PARTS = ("train", "valid", "test")
PART_MEANT = {"training": "train", "validation": "valid", "val": "valid", "dev": "valid", "testing": "test"} | {
    part: part for part in PARTS
}
FILE_COLUMNS = {"labels.csv": "file", "metadata.csv": "file_name", "metadata.jsonl": "file_name"}
"""Names of tables of labels, and the column that holds paths relative to the table's folder."""
_LEFT_OUT = "thumbs.db desktop.ini __macosx _ds_store icon\r @eadir #recycle $recycle.bin lost+found".split(" ")
_LEFT_OUT.append("system volume information")
_NOTES = ("readme", "license", "licence", "copying", "notice", "changelog", "citation", "dicomdir")


class Misread(InputError):
    """A folder is in no layout. `remedy`: what to say where its names tell no better one."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what} {remedy}".strip())
        self.what, self.remedy = what, remedy


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """A file that carries an image, and what its folder says of it.

    Attributes:
        path: Where it lies.
        name: Its path relative to the folder, with `/` and in Unicode NFC on every system.
        stamp: (size, mtime_ns, ctime_ns): when one changes, the file may have changed.
        span: Where the image begins in the file, in bytes, and how many it has; None: it is the whole file.
        label: Of its class.
        findings: Of several labels each: 1, 0, or -1 where it is unknown; None: it is of one class.
        part: "train", "valid" or "test"; None where the folder does not say.
        group: Whose it is, where the folder says so.
        hashed: Decides where it is held out; None: its name.
    """

    path: Path
    name: str
    stamp: tuple[int, int, int]
    span: tuple[int, int] | None = None
    label: str = ""
    findings: tuple[int, ...] | None = None
    part: str | None = None
    group: str | None = None
    hashed: str | None = None

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
class Found:
    """What lies below a folder.

    Attributes:
        images: In the order of their names.
        tables: Of labels: that of the folder first, then those of its parts.
        notes: What is passed over, by name.
        folders: By their path relative to the folder: those that hold images, and those that hold no file.
        others: Files of other kinds, by name: what stands in the way.
        exclude: The patterns of what was left out.
        left_out: What they named, folders with a slash at their end.
    """

    images: list[ImageFile] = dataclasses.field(default_factory=list)
    tables: list[Path] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    folders: list[str] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)
    exclude: Sequence[str] = ()
    left_out: list[str] = dataclasses.field(default_factory=list)


def find_files(root: Path, exclude: Sequence[str] = (), tables: Sequence[str] = (), *, must_name: bool = True) -> Found:
    """Walks through a folder, once.

    Args:
        exclude: Patterns of what is left out (`data.exclude`).
        tables: Of labels, by names of their own (`data.tables`).
        must_name: Whether each must name something.

    Raises:
        InputError: If the folder is not there, a pattern names nothing, or a file in it is refused.
    """
    if not root.is_dir():
        reason = "is not a folder" if root.exists() else "does not exist"
        raise InputError(f"data folder {root} {reason}. Name the folder of images by --data-root or data.path.")
    found, passed_over = Found(exclude=exclude), set[str]()
    for above, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if not is_left_out(name))
        for name in list(folders):
            path = Path(above, name)
            if excluded(f"{relative_name(path, root)}/", exclude):
                found.left_out.append(f"{relative_name(path, root)}/")
                folders.remove(name)
                continue
            if path.is_symlink():
                raise InputError(f"{path} is a symbolic link to a folder: not followed. Put the folder itself there.")
            found.folders.append(relative_name(path, root))
        for path in (Path(above, name) for name in sorted(names) if not is_left_out(name)):
            if not path.is_file():
                raise InputError(f"{path} is a broken link or no ordinary file. Take it out of the folder.")
            name = relative_name(path, root)
            is_table = name in tables or (path.name in FILE_COLUMNS and _may_hold_tables(name))
            if excluded(name, exclude) and (not is_table or name in exclude):
                found.left_out.append(name)
                passed_over.update(map(str, PurePosixPath(name).parents))
                continue  # a table of labels by its own name alone
            if is_table:
                found.tables.append(path)
            elif is_note(name):
                found.notes.append(name)
            elif path.suffix.lower() in EXTENSIONS:
                found.images.append(ImageFile(path, name, stamp_of(path)))
            else:
                found.others.append(name)
    for name in tables:
        if must_name and root / name not in found.tables:
            raise InputError(f"data.tables: there is no file {name} in {root}. Name it as it lies there.")
    named = [*found.left_out, *(relative_name(table, root) for table in found.tables)]
    for pattern in exclude:
        if must_name and not any(excluded(name, [pattern]) for name in named):
            raise InputError(f"data.exclude: nothing in {root} is called {pattern!r}. Name what is, or take it out.")
    holding = {file.name.rpartition("/")[0] for file in found.images}
    holding |= {str(above) for folder in list(holding) for above in PurePosixPath(folder).parents}
    found.folders[:] = [folder for folder in found.folders if folder in holding or folder not in passed_over]
    found.images.sort(key=lambda file: file.name)
    found.notes.sort()
    return found


def find_images(root: Path) -> list[ImageFile]:
    """All images below a folder, in the order of their names.

    Raises:
        InputError: As `find_files`; if there are files of other kinds.
    """
    found = find_files(root)
    for name in found.others:
        refuse_kind(root / name)
    return found.images


def excluded(path: str, exclude: Sequence[str]) -> bool:
    """Whether a pattern names a path, a folder's with a slash at its end. `*` stands for slashes too; a pattern without
    a slash names files and folders anywhere.
    """
    last, inside = path.rstrip("/").rpartition("/")[2], path + "*" * path.endswith("/")
    return any(fnmatchcase(inside if "/" in pattern else last, pattern) for pattern in exclude)


def relative_name(path: Path, root: Path) -> str:
    """A path relative to a folder, in one spelling."""
    return unicodedata.normalize("NFC", path.relative_to(root).as_posix())


def stamp_of(path: Path) -> tuple[int, int, int]:
    """(size, mtime_ns, ctime_ns) of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _may_hold_tables(name: str) -> bool:
    """Whether a file lies at the top or in a part, where tables of labels do (`sfumato.data.tables`)."""
    *above, _ = name.split("/")
    return not above or (len(above) == 1 and above[0].casefold() in PART_MEANT)


def is_note(name: str) -> bool:
    """Whether a file tells of the images, as README.txt does: such ones are passed over."""
    stem, _, ending = name.rpartition("/")[2].casefold().partition(".")
    return stem in _NOTES and ending in ("", "txt", "md", "rst", "pdf", "html")


def is_left_out(name: str) -> bool:
    """Whether a system left a file or folder of that name behind."""
    return name.startswith(".") or name.lower() in _LEFT_OUT


def check_file(path: Path) -> None:
    """Refuses what is no file of a known kind of image.

    Raises:
        InputError: Naming the file.
    """
    if not path.is_file():
        reason = "is no ordinary file" if path.exists() else "does not exist"
        raise InputError(f"image {path} {reason}. Name an image, or a folder of images.")
    if path.suffix.lower() not in EXTENSIONS:
        refuse_kind(path)


def refuse_kind(path: Path) -> NoReturn:
    """Refuses a file of another kind than images are, by the kind.

    Raises:
        InputError: Naming the file.
    """
    extension = path.suffix.lower()
    why = f"is of no known kind of image ({', '.join(EXTENSIONS)}). Convert it, or take it out of the folder."
    if extension in DICOM:
        why = "is DICOM, and pydicom, which reads it, is not installed. Install it: pip install pydicom"
    elif extension in (".csv", ".tsv", ".xlsx", ".xls", ".ods"):
        why = (
            "is no image. A table of labels is named labels.csv, with commas between the columns file, label and, for "
            "people with several images, group. Rename it, or take it out of the folder."
        )
    raise InputError(f"{path} {why}")


def _raise(error: OSError) -> None:
    raise InputError(f"folder {error.filename} cannot be read: {error.strerror}. Make it readable.")


def words_of(name: str) -> list[str]:
    """The words of a name, as `pets_train-01` or `petsTrain`; a number or "set" at a word's end left out, as of
    `train2017` and `testset`.
    """
    parts = re.split(r"[-_. ]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name))
    words = (word.casefold().rstrip("0123456789").removesuffix("set") for word in parts)
    return [word for word in words if word]


def part_said(name: str) -> str | None:
    """The part that a folder's name says, or one of its words."""
    said = {PART_MEANT[word] for word in words_of(name) if word in PART_MEANT}
    return said.pop() if len(said) == 1 else None


def parts_of(
    root: Path, names: Sequence[str], folders: Sequence[str], classes: Sequence[str] | None, *, needs_train: bool = True
) -> dict[str, str]:
    """Which of the folders at the top is which part, whatever its spelling (Training/, val/, Test/);
    empty where they are classes. What could be both is refused.

    Args:
        root: The folder.
        names: Of its images.
        folders: At its top.
        classes: The listed ones; None: every folder may be one.
        needs_train: Whether there must be a training part, where there are parts.

    Raises:
        InputError: If a part stands beside what is none, or twice, or there is no train/.
    """
    meant = {name: PART_MEANT[name.casefold()] for name in folders if name.casefold() in PART_MEANT}
    others = [name for name in folders if name not in meant]
    sound_like_parts = len(folders) > 1 and all(set(words_of(name)) & set(PART_MEANT) for name in folders)
    if classes is None and sound_like_parts and others:
        listed = ", ".join(f"{name}/" for name in folders[:3])
        remedy = "Rename them to train/, valid/ and test/, or list them in data.classes."
        raise Misread(f"{root} holds {listed}: parts or classes?", remedy)
    if not meant or (classes is not None and set(folders) <= set(classes)):
        return {}
    first, listed = next(iter(meant)), "or list all these folders in data.classes if they are classes."
    if others:
        is_class = any(name.count("/") == 1 and name.split("/")[0] in meant for name in names)
        if is_class and not any(name in PARTS for name in meant):
            return {}  # a folder of images beside other classes is one of them
        raise Misread(f"{root} holds {first}/ beside {others[0]}/.", f"Keep only train/, valid/ and test/, {listed}")
    for part in PARTS:
        same = [other for other in meant if meant[other] == part]
        if len(same) > 1:
            raise Misread(f"{root} holds {same[0]}/ and {same[1]}/, which both mean {part}/.", "Put them together.")
    if needs_train and "train" not in meant.values():
        raise Misread(f"{root} holds {first}/ but no train/.", f"Add it, {listed}")
    return meant

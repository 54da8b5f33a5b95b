"""Which class, part and person each image of a folder has: by its folders, a table of labels or its archive.

Four layouts: `<class>/*`, `{train,valid,test}/<class>/*`, a table of labels (its images in {train,valid,test}/ or
anywhere; `sfumato.data.tables`), or archives (`sfumato.data.archives`). Classes are public, so they come from the
names of folders or from the recipe, never from a table of labels.
"""

import collections
import dataclasses
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from sfumato.config import DataConfig
from sfumato.data import tables
from sfumato.data.archives import unpacking
from sfumato.data.listing import Found, ImageFile, find_files, parts_of, refusing
from sfumato.errors import InputError

MOST_NAMED = 5
"""Names that a line for the user gives as examples."""


def list_images(
    config: DataConfig,
    root: Path,
    report: Callable[[str], None],
    *,
    needs_train: bool = True,
    unpack_to: Path | None = None,
) -> list[ImageFile]:
    """The images of a folder in the order of their names, each with its label, and whatever part and group a table or
    an archive states.

    Args:
        config: The recipe's `data` section.
        root: The folder, in any layout that is read.
        report: Takes lines for the user.
        needs_train: False: a folder to judge a model by may lack training images.
        unpack_to: Where archives are unpacked; None: into the cache.

    Raises:
        InputError: If a file is refused, or labels come from the files and `data.classes` is left out.
    """
    listed = None if config.classes is None else _listed_classes(config.classes)
    archives = unpacking.shards(root)
    if archives:
        files = unpacking.unpacked(root, archives, report, unpack_to)
        _require_classes(config, str(root), files)
        return files
    found = find_files(root)
    if found.notes:
        more = f" and {len(found.notes) - 3} more" if len(found.notes) > 3 else ""
        report(f"passed over: {', '.join(found.notes[:3])}{more}")
    if not found.tables:
        return _of_folders(root, found, listed, needs_train=needs_train)
    files = tables.read_labels(root, found, classes=listed, needs_train=needs_train)
    _require_classes(config, str(found.tables[0]), files)
    return files


def _of_folders(root: Path, found: Found, classes: Sequence[str] | None, *, needs_train: bool) -> list[ImageFile]:
    """Of the layouts `<class>/*` and `{train,valid,test}/<class>/*`; folders within a class belong to it."""
    top = sorted(name for name in found.folders if "/" not in name)
    parts = parts_of(root, [file.name for file in found.images], top, classes, needs_train=needs_train)
    files = []
    for file in found.images:
        *above, _ = file.name.split("/")
        part = parts[above.pop(0)] if parts and above else None
        if not above or (classes is not None and above[0] not in classes):
            listed = f"the classes {', '.join(classes)}" if classes is not None else "a class's folder"
            or_list = ", or list its class in data.classes" if needs_train else ""
            raise InputError(f"{file.path} lies outside {listed}. Move it into a class's folder or away{or_list}.")
        files.append(dataclasses.replace(file, label=above[0], part=part))
    used = {item.label for item in files}
    for folder in sorted(found.folders):
        if folder.count("/") == bool(parts) and folder.rpartition("/")[2] not in used:
            raise InputError(f"{root / folder} holds no image. Put images of the class there, or take the folder away.")
    return files


def with_groups(
    group_by: str | None, files: Sequence[ImageFile], root: Path, report: Callable[[str], None]
) -> list[ImageFile]:
    """The same files with the groups (people) that `data.group_by` tells: as the folder states them, or read from each
    name by a pattern's first group. None: without groups.

    Raises:
        InputError: If a file has no group, or the pattern is none.
    """
    if group_by is None:
        if any(file.group for file in files):
            report(f'{root} has a column "group", which is not used: data.group_by = "group" keeps a group on one side')
        return [dataclasses.replace(file, group=None) for file in files]
    if group_by == "group" and any(file.group for file in files):
        named = [(file, file.group) for file in files]
        remedy = "Fill its group in, as for all others, or take data.group_by out"
    else:
        remedy = "Correct the expression, or rename the file"
        with refusing(f"data.group_by = {group_by!r} is no regular expression", "Correct it.", re.error):
            expression = re.compile(group_by)
        if not expression.groups:
            raise InputError(
                f"data.group_by = {group_by!r} has no (group) to read from a path. Put what names a "
                "person in parentheses, as in '(patient[0-9]+)'; 'group' alone means that column of "
                "the table of labels."
            )
        matches = [expression.search(file.name) for file in files]
        named = [(file, match[1] if match else None) for file, match in zip(files, matches, strict=True)]
    grouped = []
    for file, group in named:
        group = unicodedata.normalize("NFC", (group or "").strip())
        if not group:
            raise InputError(f"data.group_by = {group_by!r} reads no group from {file.name}. {remedy}.")
        grouped.append(dataclasses.replace(file, group=group))
    _warn_of_like_groups({str(file.group) for file in grouped}, report)
    return grouped


def _warn_of_like_groups(groups: set[str], report: Callable[[str], None]) -> None:
    """Says to the owner which groups are apart by case, width or the like alone: one person
    perhaps, counted as several.
    """
    alike = collections.defaultdict(list)
    for group in sorted(groups):
        alike[" ".join(unicodedata.normalize("NFKC", group).casefold().split())].append(group)
    same = [" / ".join(spellings) for spellings in alike.values() if len(spellings) > 1]
    if same:
        report(
            "warning: groups that differ by upper and lower case or the like are different "
            f"people here: {', '.join(same[:MOST_NAMED])}"
        )


def classes_of(config: DataConfig, root: Path, files: Sequence[ImageFile]) -> tuple[str, ...]:
    """The classes in the order of their labels: as listed, else by the names of folders.

    Raises:
        InputError: If there are fewer than two, or an image is of none.
    """
    classes = (
        tuple(sorted({item.label for item in files})) if config.classes is None else _listed_classes(config.classes)
    )
    if len(classes) < 2:
        found = ", ".join(classes) or "no image was found"
        inner = sorted({item.name.split("/")[1] for item in files if item.name.count("/") >= 2})
        deeper = f", or name {root / classes[0]} if {', '.join(inner[:3])} in it are the classes" if inner[1:] else ""
        raise InputError(
            f"there must be two classes or more, not {len(classes)} ({found}). Add images of others{deeper}."
        )
    wrong = next((item for item in files if item.label not in classes), None)
    if wrong is not None:
        raise InputError(
            f"{root / wrong.name} has the label {wrong.label}, which is not in data.classes "
            f"({', '.join(classes)}). Correct one of them."
        )
    return classes


def _require_classes(config: DataConfig, source: str, files: Sequence[ImageFile]) -> None:
    if config.classes is None:
        found = sorted({item.label for item in files})
        shown = ", ".join(map(repr, found[:MOST_NAMED])) + (", ..." if len(found) > MOST_NAMED else "")
        raise InputError(
            f"{source} gives labels, but data.classes does not state the classes. "
            "They are published, and no noise hides that an image of a class is there: a list "
            f"read from the private labels would tell. It holds {shown}. State the classes that "
            "may be known: "
            '--set \'data.classes=["A", "B"]\''
        )


def _listed_classes(classes: Sequence[str]) -> tuple[str, ...]:
    listed = tuple(unicodedata.normalize("NFC", name) for name in classes)
    for name in listed:
        if not name or listed.count(name) > 1:
            raise InputError(f"data.classes names {name!r} more than once or not at all. List each class once.")
    return listed

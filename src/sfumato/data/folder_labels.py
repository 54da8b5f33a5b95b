"""Whose class each image of a folder has: by its class folder, a table of labels or an archive.

Classes are public, so they come from the names of folders or from the recipe, never from a table of labels.
"""

import dataclasses
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from sfumato.config import DataConfig
from sfumato.data import tables
from sfumato.data.archives import unpacking
from sfumato.data.listing import LabelledFile, find_labelled, group_name, with_groups
from sfumato.errors import InputError

MOST_NAMED = 5
"""Names that a line for the user gives as examples."""


def files_with_labels(
    config: DataConfig, root: Path, report: Callable[[str], None], *, needs_train: bool = True
) -> list[LabelledFile]:
    """The images of a folder, each with its label, and its group where `data.group_by` names one.

    Args:
        config: The recipe's `data` section.
        root: The folder, in any layout that is read.
        report: Takes lines for the user.
        needs_train: False: a folder to judge a model by may lack training images.

    Raises:
        InputError: If a file is refused, or labels come from the files and `data.classes` is left out.
    """
    listed = None if config.classes is None else _listed_classes(config.classes)
    in_archives = unpacking.unpacked(root, report)
    if in_archives is not None:
        return of_archives(config, root, in_archives, report)
    found_tables = tables.find_tables(root)
    if not found_tables:
        files = find_labelled(root, listed, needs_train=needs_train)
        return files if config.group_by is None else with_groups(files, config.group_by)
    by_column = config.group_by == "group"
    files = tables.read_labels(root, with_groups=by_column, classes=listed, needs_train=needs_train)
    _require_classes(config, str(found_tables[0]), files)
    if config.group_by is None and tables.has_groups(root):
        report(
            f'{found_tables[0]} has a column "group", which is not used: data.group_by = "group" keeps the '
            "images of a group on one side"
        )
    return files if by_column or config.group_by is None else with_groups(files, config.group_by)


def of_archives(
    config: DataConfig, root: Path, files: list[LabelledFile], report: Callable[[str], None]
) -> list[LabelledFile]:
    _require_classes(config, str(root), files)
    if config.group_by is None and any(item.group for item in files):
        report(f'{root} names groups, which are not used: data.group_by = "group" keeps a group on one side')
    if config.group_by == "group":
        without = next((item for item in files if not group_name(item.group or "")), None)
        if without is not None:
            raise InputError(f"{root}: {without.file.name} names no group. Give it to all, or take data.group_by out.")
        return [dataclasses.replace(item, group=group_name(str(item.group))) for item in files]
    plain = [dataclasses.replace(item, group=None) for item in files]
    return plain if config.group_by is None else with_groups(plain, config.group_by)


def _require_classes(config: DataConfig, source: str, files: Sequence[LabelledFile]) -> None:
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


def classes_of(config: DataConfig, root: Path, files: Sequence[LabelledFile]) -> tuple[str, ...]:
    classes = (
        tuple(sorted({item.label for item in files})) if config.classes is None else _listed_classes(config.classes)
    )
    if len(classes) < 2:
        found = ", ".join(classes) or "no image was found"
        inner = sorted({item.file.name.split("/")[1] for item in files if item.file.name.count("/") >= 2})
        deeper = f", or name {root / classes[0]} if {', '.join(inner[:3])} in it are the classes" if inner[1:] else ""
        raise InputError(
            f"there must be two classes or more, not {len(classes)} ({found}). Add images of others{deeper}."
        )
    for item in files:
        if item.label not in classes:
            listed = ", ".join(classes)
            if any(set(map(str.strip, item.label.split(sign))) & set(classes) for sign in "|;,"):
                raise InputError(
                    f"{root / item.file.name} has several labels ({item.label}): each image has one here. Leave "
                    "such images out, or make the combination a class of its own in data.classes."
                )
            raise InputError(
                f"{root / item.file.name} has the label {item.label}, which is not in data.classes "
                f"({listed}). Correct one of them."
            )
    return classes


def _listed_classes(classes: Sequence[str]) -> tuple[str, ...]:
    listed = tuple(unicodedata.normalize("NFC", name) for name in classes)
    for name in listed:
        if not name or listed.count(name) > 1:
            raise InputError(f"data.classes names {name!r} more than once or not at all. List each class once.")
    return listed

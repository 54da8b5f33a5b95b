"""Which class, part and person each image of a folder has, and which are held out.

Images lie directly in class folders, below the root or below a part; or a table of labels (`sfumato.data.tables`) or
archives (`sfumato.data.archives`) say what they are; or `data.layout` does. Anything else is refused, with what would
read it (`sfumato.data.proposals`). Classes are public, so they come from the
names of folders or from the recipe, never from a table of labels.

What is held out follows a fixed public rule that looks at names, never at pixels: the folder's own parts, or a hash of
each name alone, so that adding or removing an image moves no other. Two folders that differ in one image still differ
in one image after the split, which a shuffle of N indices would not give.
"""

import collections
import dataclasses
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sfumato.config import DataConfig
from sfumato.data import archives, dicom, proposals, tables
from sfumato.data.listing import (
    DICOM,
    EXTENSIONS,
    Found,
    ImageFile,
    Misread,
    find_files,
    part_said,
    parts_of,
    refuse_kind,
)
from sfumato.data.store import Report
from sfumato.errors import InputError, refusing

HELD_OUT_FRACTION = 0.2
PATIENT_ID = "PatientID"
"""The group in the header of DICOM files. It is named to nobody: what is said of such groups names files."""
Part = Literal["train", "valid", "test"]
_GROUP = "Put what names a person in parentheses, as in '(patient[0-9]+)', or name a column of the table "
_GROUP += "of labels (of archives, of images in Python and of data.layout it is 'group')."
_NOBODY = ("nan", "none", "null", "na", "n/a")
"""What programs write where a table says nothing."""
MOST_NAMED = 5
"""Names that a line for the user gives as examples."""


def list_images(
    config: DataConfig, root: Path, report: Report, *, needs_train: bool = True, unpack_to: Path | None = None
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
    packed = archives.archives_of(root)
    if packed:
        source, files = root, archives.unpacked(root, packed, report, unpack_to)
        if config.group_by not in (None, "group"):
            files = [dataclasses.replace(file, group=None) for file in files]
    else:
        found = find_files(root, config.exclude, config.tables, must_name=needs_train)
        if found.notes:
            report(f"passed over: {proposals.listed(found.notes)}")
        if found.others and (found.tables or config.layout is not None):  # how to read it is said already
            leaving = proposals.leaving_out(proposals.patterns(found.others), found)
            raise InputError(f"{_beside(root, found)} Take them out, or: {leaving}")
        if not found.tables:
            tables.refuse_other_tables(root, found)
            try:
                files = _of_folders(root, found, config, listed, needs_train=needs_train)
                _refuse_copies_and_other_classes(root, found, files, report)
                alike = proposals.shared_names((item.label, item.name) for item in files)
                if alike:
                    what = f"{alike[2]} files of {alike[0]} are named as in {alike[1]}"
                    report(f"warning: {what}: are these classes, or the same pictures twice?")
                return files
            except Misread as misread:
                for line in proposals.shown(root, found):
                    report(line)
                remedy = "Put images directly into class folders, and other files elsewhere."
                if needs_train:
                    remedy = proposals.remedies(root, found, misread.remedy, has_layout=config.layout is not None)
                raise InputError(f"{misread.what} {remedy}") from None
        source = found.tables[0]
        files = tables.read_labels(root, found, config, listed, report, needs_train=needs_train)
    if listed is None:
        labels = sorted({item.label for item in files})
        shown = ", ".join(map(repr, labels[:MOST_NAMED])) + (", ..." if len(labels) > MOST_NAMED else "")
        raise InputError(
            f"{source} gives labels, but data.classes does not state the classes. They are published, and a list read "
            f"from private labels would tell that an image of a class is there. It holds {shown}. State the classes "
            'that may be known: --set \'data.classes=["A", "B"]\''
        )
    return files


def _of_folders(
    root: Path, found: Found, config: DataConfig, classes: Sequence[str] | None, *, needs_train: bool
) -> list[ImageFile]:
    """Of the layouts `<class>/*` and `{train,valid,test}/<class>/*`, or of that which `data.layout` states."""
    if found.others:
        raise _beside(root, found)
    layout, parts = config.layout, dict[str, str]()
    if layout is None:
        top = sorted(name for name in found.folders if "/" not in name)
        parts = parts_of(root, [file.name for file in found.images], top, classes, needs_train=needs_train)
        layout = "{part}/{class}" if parts else "{class}"
    pattern, files = _pattern(layout), []
    for file in found.images:
        match = pattern.fullmatch(file.name.rpartition("/")[0])
        said = match.groupdict() if match else {}
        if not said or (classes is not None and said["class"] not in classes):
            where = "directly in a class folder, below the folder or below a part"
            where = where if config.layout is None else f"as data.layout = {config.layout!r} says"
            where = f"in a folder of the classes {', '.join(classes)}" if classes is not None and match else where
            raise Misread(f"{file.path} does not lie {where}.")
        part = said.get("part") and (parts[said["part"]] if config.layout is None else part_said(said["part"]))
        if "part" in said and part is None:
            raise Misread(f"{file.path}: {said['part']}/ is none of train, valid, test.", "Rename the folder.")
        group = said.get("group") if config.group_by in (None, "group") else None
        files.append(dataclasses.replace(file, label=said["class"], part=part, group=group))
    if config.layout is None and classes is None and proposals.are_numbered(sorted({item.label for item in files})):
        what = f"{root}: folders that differ by a number alone ({files[0].label}) are parts, folds or people, it seems."
        raise Misread(what, "If they are classes, list them in data.classes; else write labels.csv (file, label).")
    used = {item.label for item in files}
    for folder in sorted(found.folders):
        match = pattern.fullmatch(folder)
        if match and match["class"] not in used:
            raise InputError(f"{root / folder} holds no image. Put images of the class there, or take the folder away.")
    return files


def _refuse_copies_and_other_classes(root: Path, found: Found, files: Sequence[ImageFile], report: Report) -> None:
    """Refuses several files of one picture, by their names, and parts whose classes are not those of training."""
    twice = proposals.taken_twice(item.name for item in files)
    if twice:
        first, second, patterns, is_sure = twice
        remedy = f"leave the others out: {proposals.leaving_out(patterns, found)}"
        if is_sure:
            what = f"{root}: {first} and {second} are one picture twice, by their names."
            raise InputError(f"{what} Rename what is a picture of its own, or {remedy}")
        report(f"warning: {root}: {first} and {second} may be one picture twice, by their names. If so, {remedy}")
    labels = collections.defaultdict(set)
    for item in files:
        labels[item.part or "train"].add(item.label)
    for part in sorted({"valid", "test"} & set(labels)) if "train" in labels else ():
        missing = sorted(labels[part] - labels["train"])
        if missing:
            what = f"{root}: {part}/ holds the classes {', '.join(missing[:MOST_NAMED])}, and train/ does not."
            raise InputError(f"{what} Give each class one name in all parts.")


def _beside(root: Path, found: Found) -> Misread:
    """Of files that are no images."""
    if {Path(name).suffix.lower() for name in found.others} <= set(DICOM):
        refuse_kind(root / found.others[0])
    count = len(found.others)
    more = f", and {count - 1} more are not" if count > 1 else ""
    return Misread(f"{root / found.others[0]} is of no known kind of image ({', '.join(EXTENSIONS)}){more}.")


def _pattern(layout: str) -> re.Pattern[str]:
    """What a layout says of a folder's path."""
    named = re.sub(r"\\\{(class|part|group)\\\}", r"(?P<\1>[^/]+?)", re.escape(layout))
    return re.compile(named.replace(r"\*", "[^/]*"))


def with_groups(config: DataConfig, files: Sequence[ImageFile], root: Path, report: Report) -> list[ImageFile]:
    """The same files with the groups (people) that `data.group_by` tells: as the folder states them, as DICOM files do,
    or read from each name by a pattern's first group. None: without groups.

    Raises:
        InputError: If a file has no group, or the pattern is none.
    """
    group_by = config.group_by
    if group_by is None:
        if any(file.group for file in files):
            report("groups are stated, and not used: --set data.group_by=group keeps each on one side")
        elif any(file.name.lower().endswith(DICOM) for file in files):
            report(f"whose DICOM files are is not looked at: --set data.group_by={PATIENT_ID} keeps each on one side")
        return [dataclasses.replace(file, group=None) for file in files]
    is_stated = any(file.group is not None for file in files) or group_by == PATIENT_ID
    if group_by == PATIENT_ID and any(file.name.lower().endswith(DICOM) for file in files):
        named = dicom.patients_of(files)
    elif is_stated:
        named = [file.group for file in files]
    else:
        with refusing(f"data.group_by = {group_by!r} is no regular expression", _GROUP, re.error):
            expression = re.compile(group_by)
        if not expression.groups:
            raise InputError(f"data.group_by = {group_by!r} has no (group) to read from a path. {_GROUP}")
        named = [match[1] if (match := expression.search(file.name)) else None for file in files]
    groups = [unicodedata.normalize("NFC", (group or "").strip()) for group in named]
    if is_stated:
        groups = ["" if group.casefold() in _NOBODY else group for group in groups]
    grouped = [dataclasses.replace(file, group=group) for file, group in zip(files, groups, strict=True)]
    lost = [file.name for file in grouped if not file.group]
    if lost:
        remedy = "Fill the group in, as for all others, or take data.group_by out."
        if not is_stated:
            patterns = proposals.patterns_of_names(lost, [file.name for file in grouped if file.group])
            remedy = "Correct the expression, or rename the files."
            if patterns and files[0].span is None:  # of what archives hold, nothing is left out
                leaving = proposals.leaving_out([*config.exclude, *patterns], Found())
                remedy = f"Correct the expression, or leave them out: {leaving}"
        what = f"data.group_by = {group_by!r} reads no group from {proposals.listed(lost)}"
        raise InputError(f"{what} ({len(lost)} of {len(files)} files). {remedy}")
    first = {str(file.group): file.name if group_by == PATIENT_ID else str(file.group) for file in reversed(grouped)}
    alike = collections.defaultdict(list)  # apart by case, width or the like alone: one person perhaps
    for name, shown in sorted(first.items()):
        plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        alike[re.sub(r"^0+(?=\d)|[.]0+$", "", plain)].append(shown)
    same = ", ".join([" / ".join(spellings) for spellings in alike.values() if len(spellings) > 1][:MOST_NAMED])
    if same:
        report(
            f"warning: groups that differ by upper and lower case, zeros or the like are different people here: {same}"
        )
    return grouped


def classes_of(config: DataConfig, root: Path, files: Sequence[ImageFile]) -> tuple[str, ...]:
    """The classes in the order of their labels: as listed, else by the names of folders.

    Raises:
        InputError: If there are fewer than two, or an image is of none.
    """
    found = sorted({item.label for item in files})
    classes = tuple(found) if config.classes is None else _listed_classes(config.classes)
    if len(classes) < 2:
        named = ", ".join(classes) or "no image was found"
        raise InputError(f"there must be two classes or more, not {len(classes)} ({named}). Add others.")
    if config.task == "multilabel" and any(item.findings is None for item in files):
        raise InputError('data.task = "multilabel" needs a table of labels, labels.csv. Write one, or leave it out.')
    for item in files:
        if item.findings is None and item.label not in classes:
            wrong = f"the label {item.label}, which is not in data.classes ({', '.join(classes)})"
            remedy = "Change its label, or add the class."
            if set(re.split("[|;]", item.label)) <= set(classes):
                remedy = "If an image may have several labels: --set data.task=multilabel"
            raise InputError(f"{root / item.name} has {wrong}. {remedy}")
    return classes


def _listed_classes(classes: Sequence[str]) -> tuple[str, ...]:
    listed = tuple(unicodedata.normalize("NFC", name) for name in classes)
    for name in listed:
        if not name or listed.count(name) > 1:
            raise InputError(f"data.classes names {name!r} more than once or not at all. List each class once.")
    return listed


def hash_fraction(purpose: str, name: str) -> float:
    """A fixed public number in [0, 1) for a name; SHA-256, so that it spreads evenly whatever the
    names.

    Example:
        >>> round(hash_fraction("test", "NORMAL/a.png"), 4) == round(hash_fraction("test", "NORMAL/a.png"), 4)
        True
    """
    text = f"sfumato split 1\0{purpose}\0{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big") / 2**48  # 48 bits: exact in a float


def is_held_out(purpose: str, name: str) -> bool:
    """Whether the image or group of this name falls into the 20 % that are held out.

    Args:
        purpose: "test" or "valid"; the two choices are independent.
        name: The relative path of an image with `/`, or the name of its group.
    """
    return hash_fraction(purpose, name) < HELD_OUT_FRACTION


def hold_out(purpose: str, count: int, held_out: int) -> tuple[list[int], list[int]]:
    """Splits the indices of a public data set of known size, exactly.

    Args:
        purpose: Which split, such as "cifar10 valid".
        count: The number of images.
        held_out: How many are held out.

    Returns:
        The kept and the held-out indices, both ascending.
    """
    order = sorted(range(count), key=lambda index: hash_fraction(purpose, str(index)))
    return sorted(order[held_out:]), sorted(order[:held_out])


def split(files: Sequence[ImageFile], which: Literal["train", "train+valid"]) -> dict[Part, list[int]]:
    """Which images train and which are held out, by the folder's parts or by the hash of each name
    alone.

    Args:
        files: The listed images; their groups, where given, are hashed instead of their paths.
        which: "train" sets "valid" apart from the training images; "train+valid" does not, unless
            the folder has valid/ and no test/: that is then its only held-out part.

    Returns:
        The places of each part's images, ascending.

    Raises:
        InputError: If a group would have images on both sides.
    """
    given, valid_alone = {item.part for item in files}, holds_out_valid_alone(files)
    sets_apart = which == "train" or valid_alone
    parts: dict[Part, list[int]] = {"train": [], "valid": [], "test": []}
    sides: dict[str, tuple[Part, ImageFile]] = {}
    both: dict[str, str] = {}
    for place, item in enumerate(files):
        name = item.group or item.hashed or item.name
        is_test = not valid_alone and (item.part == "test" if "test" in given else is_held_out("test", name))
        is_valid = sets_apart and (item.part == "valid" if "valid" in given else is_held_out("valid", name))
        part: Part = "test" if is_test else "valid" if is_valid else "train"
        if item.group is not None:
            other, first = sides.setdefault(item.group, (part, item))
            if other != part:
                both.setdefault(item.group, f"{first.name} ({other}) and {item.name} ({part})")
        parts[part].append(place)
    for where in both.values():
        more = f" So have {len(both) - 1} more groups." if len(both) > 1 else ""
        remedy = "Move all of a group into one part; if they are two people, give them two names."
        raise InputError(f"one group has images on both sides: {where}.{more} {remedy}")
    return parts


def holds_out_valid_alone(files: Sequence[ImageFile]) -> bool:
    """Whether the folder's owner held out valid/ and nothing else: training on it would surprise."""
    given = {item.part for item in files}
    return "valid" in given and "test" not in given


def beyond_limit(files: Sequence[ImageFile], limit: int | None) -> list[int]:
    """The places of images beyond so many of their group, all but those whose names' hashes are
    smallest: no pixel and no other group decides.
    """
    if limit is None:
        return []
    groups = collections.defaultdict(list)
    for place in sorted(range(len(files)), key=lambda at: hash_fraction("kept", files[at].hashed or files[at].name)):
        groups[files[place].group].append(place)
    return [place for group, places in groups.items() if group is not None for place in places[limit:]]

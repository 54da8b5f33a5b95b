"""A folder whose labels stand in a table.

`labels.csv` has the columns file, label and optionally group; or, for several labels an image, a column for each of
them. `metadata.csv` and `metadata.jsonl` are those of Hugging Face's image folders: file_name and label, beside the
images or in each of train/, valid/ and test/. A column `split` says which part an image belongs to.
"""

import csv
import dataclasses
import itertools
import json
import re
import reprlib
import shlex
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from sfumato.config import DataConfig
from sfumato.data.listing import (
    EXTENSIONS,
    FILE_COLUMNS,
    PART_MEANT,
    Found,
    ImageFile,
    find_files,
    parts_of,
    relative_name,
)
from sfumato.data.proposals import leaving_out, patterns
from sfumato.data.store import Report
from sfumato.errors import InputError, refusing

_KNOWN = {*FILE_COLUMNS.values(), "label", "group"}
_NONE = "No Finding"
"""What stands in the place of labels where there are none."""

_Table = tuple[list[str], list[tuple[int, dict[str, Any]]]]
"""Names of columns, and the cells of each further line with its number."""


def read_labels(
    root: Path, found: Found, config: DataConfig, classes: Sequence[str] | None, report: Report, *, needs_train: bool
) -> list[ImageFile]:
    """The images that the folder's tables list, in the order of their names. Columns of other names
    are not read.

    Where the folders at the top are train/, valid/ and test/, they are parts, as they are without a
    table.

    Args:
        root: The folder.
        found: What lies in it.
        config: The recipe's `data` section. Where a table has a column for each class, images have several labels
            unless `task` says otherwise; `group_by` names the column that says whose each image is, where a table has
            it, else "group".
        classes: The listed classes: folders of their names are no parts.
        report: Takes lines for the user.
        needs_train: Whether there must be a training part, where there are parts.

    Raises:
        InputError: If the table is malformed, names a file twice, outside the folder or
            one that is not there, or if an image below the folder is not in the table, or lies in
            none of the parts.
    """
    for one, other in itertools.pairwise(found.tables):
        if one.parent in (other.parent, root) and one.name in FILE_COLUMNS:
            raise InputError(f"{one} and {other} both give labels. Keep one of them.")
    files = {file.name: file for file in found.images}
    folders = sorted({name.split("/")[0] for name in files if "/" in name})
    parts = parts_of(root, list(files), folders, classes, needs_train=needs_train)
    classes = classes or ()
    labelled: dict[str, ImageFile] = {}
    lines: dict[str, str] = {}
    by_end, num_missing = names_by_end(files), 0
    left_out = set(found.left_out)
    folders_left_out = tuple(name for name in left_out if name.endswith("/"))
    for table in found.tables:
        for line, file, row in _rows(table, root, found, config, classes):
            where = f"{table} line {line}"
            name = _name_of(table, root, file, by_end)
            if not name:
                num_missing += 1
                continue
            if name in labelled:
                raise InputError(f"{where}: {file} stands in {lines[name]} already. Take one line out.")
            if name in left_out or name.startswith(folders_left_out):
                continue
            if name not in files:
                raise InputError(f"{where}: there is no image {file} below {table.parent}. Write its path from there.")
            if parts and "/" not in name:
                raise InputError(f"{files[name].path} lies outside train/, valid/ and test/. Move it into one of them.")
            part = _part_of(where, file, parts[name.split("/")[0]] if parts else None, row.get("split"))
            label, findings = unicodedata.normalize("NFC", row.get("label", "")), None
            if "label" not in row:
                findings = tuple(_finding(where, name, row[name]) for name in classes)
            elif config.task == "multilabel":
                label, findings = "", _joined(where, label, classes)
            labelled[name] = dataclasses.replace(
                files[name], label=label, findings=findings, part=part, group=row.get("group")
            )
            lines[name] = f"line {line}" if len(found.tables) == 1 else where
    if num_missing:
        report(f"{num_missing} lines of the tables are of images that are not in {root}: passed over")
    deeper = [name for name, item in labelled.items() if item.part is None and _lies_in_a_part(name, classes)]
    if deeper:
        remedy = "Give the table a column split: train, valid or test."
        raise InputError(f"{files[deeper[0]].path} lies in a part, which no column says. {remedy}")
    for name, image in files.items():
        if name not in labelled:
            listed = " or ".join(map(str, found.tables))
            raise InputError(f"{image.path} is not in {listed}. Add a line for it, or move it away.")
    return [labelled[name] for name in files]


def _lies_in_a_part(name: str, classes: Sequence[str]) -> bool:
    return any(folder.casefold() in PART_MEANT and folder not in classes for folder in name.split("/")[:-1])


def _part_of(where: str, file: str, lies_in: str | None, split: str | None) -> str | None:
    """The part that folder and column say."""
    if split is None:
        return lies_in
    stated = PART_MEANT.get(split.casefold())
    if stated is None:
        raise InputError(f"{where}: split {split!r} is none of train, valid, test. Write one of these.")
    if lies_in not in (None, stated):
        raise InputError(f"{where}: {file} has split {stated} and lies in {lies_in}/. Move it, or change its split.")
    return stated


def names_by_end(names: Collection[str]) -> dict[str, str]:
    """Each end of each name, of whole parts; "" where it is of two names."""
    found: dict[str, str] = {}
    for name in names:
        for end in _ends(name):
            found[end] = "" if end in found else name
    return found | {name: name for name in names}


def _found(file: str, by_end: Mapping[str, str]) -> str:
    """The image that a table's path means: of either path the whole must stand at the other's end, since equal names in
    other folders are other images, of other people; "" where there is none.
    """
    ends = _ends(file)
    return next((end for end in ends if by_end.get(end) == end), by_end.get(ends[0], ""))


def _ends(path: str) -> list[str]:
    """A path and what is left of it without its first folders, longest first."""
    parts = unicodedata.normalize("NFC", path).replace("\\", "/").split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def _columns(header: Sequence[str], lines: Sequence[tuple[int, dict[str, Any]]]) -> tuple[str | None, str]:
    """The first column of which every cell names an image by its ending, and the one whose name has "label" in it."""
    texts = {name: [_text(cells.get(name)).lower() for _, cells in lines] for name in header}
    files = (name for name, each in texts.items() if each and all(text.endswith(EXTENSIONS) for text in each))
    labels = [name for name in header if "label" in name.casefold()]
    return next(files, None), labels[0] if len(labels) == 1 else "label"


def refuse_other_tables(root: Path, found: Found) -> None:
    """Refuses tables of labels that have names of their own, with all that would read them. Classes are shown to the
    owner, who states those that may be known.

    Raises:
        InputError: If there is such a table.
    """
    by_end, named, classes, has_signs = names_by_end([file.name for file in found.images]), [], dict[str, None](), False
    for name in found.others:
        if not name.lower().endswith((".csv", ".tsv")):
            continue
        header, lines = _read(root / name)
        column, of_labels = _columns(header, lines)
        if column is None or not any(_found(_text(cells[column]), by_end) for _, cells in lines):
            continue
        each = [other for other in header if all(_text(cells.get(other)) in _FINDINGS for _, cells in lines)]
        stated = {_text(cells.get(of_labels)) for _, cells in lines} - {""}
        if len(each) < 2 and not stated:
            continue
        named.append(name)
        if len(each) < 2:
            has_signs |= _NONE in stated or any(re.search("[|;]", cell) for cell in stated)
            each = sorted({part.strip() for cell in stated for part in re.split("[|;]", cell)} - {"", _NONE})
        classes |= dict.fromkeys(each)
    if not named:
        return
    others = [name for name in found.others if name not in named]
    settings = [f"data.tables={json.dumps(named)}", f"data.classes={json.dumps(list(classes), ensure_ascii=False)}"]
    settings += ["data.task=multilabel"] if has_signs else []
    settings += [f"data.exclude={json.dumps([*found.exclude, *patterns(others)])}"] if others else []
    raise InputError(
        f"{root / named[0]} seems to give labels. Classes are published, so state those that may be known; as it is: "
        + " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
    )


_FINDINGS = {"": -1, "-1": -1, "-1.0": -1, "0": 0, "0.0": 0, "1": 1, "1.0": 1}


def _finding(where: str, name: str, cell: str) -> int:
    """1, 0, or -1 for what is unknown: empty, too."""
    if cell not in _FINDINGS:
        raise InputError(f"{where}: {name} is {cell!r}. Write 1, 0, or, where it is unknown, -1 or nothing.")
    return _FINDINGS[cell]


def _joined(where: str, label: str, classes: Sequence[str]) -> tuple[int, ...]:
    """Of labels with | or ; between: those that are not there are 0."""
    found = {part.strip() for part in re.split("[|;]", label)} - {"", _NONE}
    others = sorted(found - set(classes))
    if others:
        listed = ", ".join(classes)
        raise InputError(f"{where} has the label {others[0]}, which is not in data.classes ({listed}). Add it there.")
    return tuple(int(name in found) for name in classes)


def _rows(
    table: Path, root: Path, found: Found, config: DataConfig, classes: Sequence[str]
) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Of each row its line's number, its file, and its label or findings, split and group, stripped; only groups,
    findings and several labels may be empty.
    """
    (header, lines), task = _read(table), config.task
    group = unicodedata.normalize("NFC", config.group_by or "group")
    named, label = (FILE_COLUMNS[table.name], "label") if table.name in FILE_COLUMNS else _columns(header, lines)
    file = named or "file"
    is_meant = task == "multilabel" or (task is None and label not in header)
    has_findings = is_meant and bool(classes) and set(classes) <= set(header)
    columns = {file: file} | ({name: name for name in classes} if has_findings else {"label": label})
    columns |= {name.casefold(): name for name in header if name.casefold() == "split"}
    columns |= {"group": group} if group in header else {}
    if any(header.count(name) != 1 for name in columns.values()):
        listed = " and ".join(f"one column {name!r}" for name in columns.values())
        if is_meant and classes:
            lacking = ", ".join(name for name in classes if name not in header)
            listed += f" (or one for each of data.classes: there is none for {lacking})"
        needs = f"{listed} in its first line, parted by commas, semicolons or tabs"
        leave = f"Write these there, or leave it out: {leaving_out([relative_name(table, root)], found)}"
        raise InputError(f"{table} needs {needs}; it has {', '.join(header) or 'none'}. {leave}")
    for line, cells in lines:
        where = f"{table} line {line}"
        row = {key: as_text(where, name, cells.get(name)) for key, name in columns.items()}
        may_be_empty = {"group", *(classes if has_findings else ()), *(("label",) if task == "multilabel" else ())}
        empty = next((key for key, value in row.items() if not value and key not in may_be_empty), None)
        if empty is not None:
            raise InputError(f"{where} has no {empty}. Fill it in, or take out line and image.")
        yield line, row.pop(file), row


def column(root: Path, name: str, data: DataConfig) -> dict[str, str]:
    """What the folder's tables state in one of their other columns, by the image's name; "" where a cell is empty.

    Args:
        root: The folder.
        name: The column's.
        data: Which other tables there are, and what is left out.

    Raises:
        InputError: If there is no table, or a table has no such column.
    """
    files = find_files(root, data.exclude, data.tables, must_name=False)
    if not files.tables:
        raise InputError(f"{root} has no table, so no column {name!r}. Write one: labels.csv, or metadata.csv.")
    found: dict[str, str] = {}
    by_end = names_by_end([file.name for file in files.images])
    for table in files.tables:
        header, lines = _read(table)
        if header.count(name) != 1:
            raise InputError(f"{table} has no one column {name!r}: it has {', '.join(header)}. Name one of these.")
        of_files = FILE_COLUMNS.get(table.name) or _columns(header, lines)[0] or "file"
        for _, cells in lines:
            value, path = cells.get(name), _text(cells.get(of_files))
            text = value if isinstance(value, str) else "" if value is None else json.dumps(value, sort_keys=True)
            found[_name_of(table, root, path, by_end)] = text.strip()
    return found


def _name_of(table: Path, root: Path, file: str, by_end: Mapping[str, str]) -> str:
    """An image's name in the folder, of its path from the table; in a table of another name, of the path's end."""
    if table.name not in FILE_COLUMNS:
        return _found(file, by_end)
    return unicodedata.normalize("NFC", (table.parent.relative_to(root) / file).as_posix())


def _text(cell: Any) -> str:
    return cell.strip() if isinstance(cell, str) else ""


def as_text(where: str, name: str, cell: Any) -> str:
    """A text, a whole number, yes or no as 1 or 0, labels in a list with | between; "" of nothing."""
    if cell is None or isinstance(cell, str):
        return _text(cell)
    if isinstance(cell, list) and all(isinstance(part, str) for part in cell):
        return "|".join(cell)
    if not isinstance(cell, (int, float)) or not float(cell).is_integer():
        raise InputError(f"{where}: {name} is {reprlib.repr(cell)}. Write a text or a whole number.")
    return str(int(cell))


def _read(table: Path) -> _Table:
    """A table's columns and its lines that are not empty."""
    kind = "JSON" if table.suffix == ".jsonl" else "CSV"
    with (
        refusing(f"{table} is no {kind} in UTF-8", f"Save it as {kind} in UTF-8.", csv.Error, UnicodeDecodeError),
        open(table, encoding="utf-8-sig", newline="") as file,  # "-sig": spreadsheets put a mark at the start
    ):
        return _read_json(table, file) if kind == "JSON" else _read_csv(table, file)


def _read_csv(table: Path, file: TextIO) -> _Table:
    first = file.readline()
    file.seek(0)
    # As spreadsheets of many countries write it: by what sets the columns apart that are known.
    delimiter = max(",;\t", key=lambda sign: len(_KNOWN & {cell.strip(' "\r\n') for cell in first.split(sign)}))
    reader = csv.reader(file, strict=True, delimiter=delimiter)
    header = [unicodedata.normalize("NFC", cell.strip()) for cell in next(reader, [])]
    lines = [(reader.line_num, cells) for cells in reader if any(map(str.strip, cells))]
    for line, cells in lines:
        if any(cells[len(header) :]):  # spreadsheets leave out empty cells at the end, or write more of them
            what = f"{table} line {line} has {len(cells)} cells, and the first line names {len(header)} columns"
            raise InputError(f"{what}. Correct it: a cell in which the sign stands that parts them is put into quotes.")
    return header, [(line, dict(zip(header, cells, strict=False))) for line, cells in lines]


def _read_json(table: Path, file: TextIO) -> _Table:
    """An object a line; a label may be a number."""
    rows = []
    for line, text in enumerate(file, start=1):
        if text.strip():
            where, remedy = f"{table} line {line} is no JSON object", "Write one object a line."
            with refusing(where, remedy, ValueError, RecursionError):
                row = json.loads(text)
            if not isinstance(row, dict):
                raise InputError(f"{where}. {remedy}")
            rows.append((line, row))
    return list(dict.fromkeys(key for _, row in rows for key in row)), rows

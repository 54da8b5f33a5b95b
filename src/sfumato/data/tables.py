"""A folder whose labels stand in a table.

`labels.csv` has the columns file, label and optionally group. `metadata.csv` and `metadata.jsonl`
are those of Hugging Face's image folders: file_name and label, beside the images or in each of
train/, valid/ and test/. A column `split` says which part an image belongs to.
"""

import csv
import itertools
import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from sfumato.data.listing import PART_MEANT, LabelledFile, find_images, group_name, parts_of
from sfumato.errors import InputError

FILE_COLUMNS = {"labels.csv": "file", "metadata.csv": "file_name", "metadata.jsonl": "file_name"}
"""Names of tables, and the column that holds paths relative to the table's folder."""

_KNOWN = {*FILE_COLUMNS.values(), "label", "group"}


def find_tables(root: Path) -> list[Path]:
    """The folder's table of labels, or those of its parts; none where folders are named by classes.

    Raises:
        InputError: If there is more than one for the same images.
    """
    inner = sorted(path for path in root.iterdir() if path.name.casefold() in PART_MEANT) if root.is_dir() else []
    found = [folder / name for folder in (root, *inner) for name in FILE_COLUMNS if (folder / name).is_file()]
    for one, other in itertools.pairwise(found):
        if one.parent in (other.parent, root):
            raise InputError(f"{one} and {other} both give labels. Keep one of them.")
    return found


def read_labels(
    root: Path, *, with_groups: bool, classes: Sequence[str] | None = None, needs_train: bool = True
) -> list[LabelledFile]:
    """The images that the folder's tables list, in the order of their names. Columns of other names
    are not read.

    Where the folders at the top are train/, valid/ and test/, they are parts, as they are without a
    table.

    Args:
        root: The folder.
        with_groups: Whether the column `group` is read; it must then be there.
        classes: The listed classes: folders of their names are no parts.
        needs_train: Whether there must be a training part, where there are parts.

    Raises:
        InputError: If the table is malformed, names a file twice, outside the folder or
            one that is not there, or if an image below the folder is not in the table, or lies in
            none of the parts.
    """
    files = {file.name: file for file in find_images(root)}
    folders = sorted({name.split("/")[0] for name in files if "/" in name})
    parts = parts_of(root, list(files.values()), folders, classes, needs_train=needs_train)
    tables = find_tables(root)
    found: dict[str, LabelledFile] = {}
    lines: dict[str, str] = {}
    for table in tables:
        above = PurePosixPath(table.parent.relative_to(root).as_posix())
        column = FILE_COLUMNS[table.name]
        split = [name for name in _read(table)[0] if name.casefold() == "split"][:1]
        for line, row in _rows(table, [column, "label", *(["group"] if with_groups else []), *split]):
            where, text = f"{table} line {line}", row[column]
            path = PurePosixPath(text)
            if path.is_absolute() or ".." in path.parts:
                raise InputError(f"{where}: {text} leads out of the folder. Give paths relative to {table.parent}.")
            name = unicodedata.normalize("NFC", str(above / path))
            if name in found:
                raise InputError(f"{where}: {text} stands in {lines[name]} already. Take one line out.")
            if name not in files:
                raise InputError(
                    f"{where}: there is no image {text} below {table.parent}. Correct the line, or take it out."
                )
            group = group_name(row["group"]) if with_groups else None
            if group == "":
                raise InputError(f"{where} has no group that could be seen. Fill it in, or take the line out.")
            if parts and "/" not in name:
                raise InputError(
                    f"{files[name].path} lies outside train/, valid/ and test/. Move it into one of them or away."
                )
            part = parts[name.split("/")[0]] if parts else None
            if split:
                stated = PART_MEANT.get(row[split[0]].casefold())
                if stated is None:
                    raise InputError(f"{where}: split {row[split[0]]!r} is none of train, valid, test. Correct it.")
                if part not in (None, stated):
                    raise InputError(f"{where}: {text} has split {stated} and lies in {part}/. Correct one of them.")
                part = stated
            found[name] = LabelledFile(files[name], unicodedata.normalize("NFC", row["label"]), part, group)
            lines[name] = f"line {line}" if len(tables) == 1 else f"{table} line {line}"
    for name, file in files.items():
        if name not in found:
            listed = " or ".join(map(str, tables))
            raise InputError(f"{file.path} is not in {listed}. Add a line for it, or move it away.")
    return [found[name] for name in sorted(found)]


def column(root: Path, name: str) -> dict[str, str]:
    """What the folder's tables state in one of their other columns, by the image's name; "" where a cell is empty.

    Raises:
        InputError: If there is no table, or a table has no such column.
    """
    tables = find_tables(root)
    if not tables:
        raise InputError(f"{root} has no table, so no column {name!r}. Write one: labels.csv, or metadata.csv.")
    found: dict[str, str] = {}
    for table in tables:
        header, lines = _read(table, _any_value)
        if header.count(name) != 1:
            raise InputError(f"{table} has no one column {name!r}: it has {', '.join(header)}. Name one of these.")
        above, file, place = table.parent.relative_to(root), header.index(FILE_COLUMNS[table.name]), header.index(name)
        for _, cells in lines:
            path = unicodedata.normalize("NFC", (above / cells[file].strip()).as_posix())
            found[path] = cells[place].strip() if place < len(cells) else ""
    return found


def has_groups(root: Path) -> bool:
    """Whether a table has a column `group`."""
    return any("group" in _read(table)[0] for table in find_tables(root))


def _listed(needed: list[str]) -> str:
    """One column each, by name."""
    *first, last = [f"one column {column!r}" for column in needed]
    return f"{', '.join(first)} and {last}" if first else last


def _rows(table: Path, needed: list[str]) -> list[tuple[int, dict[str, str]]]:
    """The needed columns of each row with its line number, stripped and none of them empty."""
    header, lines = _read(table)
    for column in needed:
        if header.count(column) != 1:
            raise InputError(
                f"{table} needs {_listed(needed)} in its first line, parted by commas, semicolons or tabs; it has "
                f"{', '.join(header) or 'none'}. Correct the first line."
            )
    rows = []
    for line, cells in lines:
        row = {
            column: cells[header.index(column)].strip() if header.index(column) < len(cells) else ""
            for column in needed
        }
        for column, value in row.items():
            if not value:
                raise InputError(f"{table} line {line} has no {column}. Fill it in, or take the line out.")
        rows.append((line, row))
    return rows


def _read(table: Path, in_words: Callable[[Any], str] | None = None) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header's column names, and each further non-empty line's cells with its number.

    Args:
        in_words: Of a value of JSON; by default "" of all but texts and whole numbers.
    """
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:  # "-sig": spreadsheets put a mark at the start
            return _read_json(table, file, in_words or _label) if table.suffix == ".jsonl" else _read_csv(file)
    except OSError as error:
        raise InputError(f"{table} cannot be read: {error.strerror}. Make it readable.") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{table} is no CSV in UTF-8: {error}. Save it as comma-separated UTF-8.") from None


def _read_csv(file: TextIO) -> tuple[list[str], list[tuple[int, list[str]]]]:
    first = file.readline()
    file.seek(0)
    # As spreadsheets of many countries write it: by what sets the columns apart that are known.
    delimiter = max(",;\t", key=lambda sign: len(_KNOWN & {cell.strip(' "\r\n') for cell in first.split(sign)}))
    reader = csv.reader(file, strict=True, delimiter=delimiter)
    header = [cell.strip() for cell in next(reader, [])]
    return header, [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]


def _label(value: Any) -> str:
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _any_value(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, sort_keys=True)


def _read_json(
    table: Path, file: TextIO, in_words: Callable[[Any], str]
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """An object a line; a label may be a number."""
    header: list[str] = []
    rows = []
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{table} line {line} is no JSON object. Write one object a line.")
        header += [key for key in row if key not in header]
        rows.append((line, [in_words(row.get(key)) for key in header]))
    return header, rows

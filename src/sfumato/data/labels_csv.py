"""A folder whose labels stand in a table: labels.csv with the columns file, label and optionally
group.
"""

import csv
import unicodedata
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from sfumato.data.listing import LabelledFile, find_images, group_name, has_parts
from sfumato.errors import InputError

NAME = "labels.csv"


def read_labels(root: Path, *, with_groups: bool, classes: Sequence[str] | None = None) -> list[LabelledFile]:
    """The images that labels.csv lists, in the order of their names. Columns of other names are not
    read.

    Where the folders at the top are train/, valid/ and test/, they are parts, as they are without a
    table.

    Args:
        root: The folder; the column `file` holds paths relative to it.
        with_groups: Whether the column `group` is read; it must then be there.
        classes: The listed classes: folders of their names are no parts.

    Raises:
        InputError: If the table is malformed, names a file twice, outside the folder or
            one that is not there, or if an image below the folder is not in the table, or lies in
            none of the parts.
    """
    table = root / NAME
    files = {file.name: file for file in find_images(root)}
    folders = sorted({name.split("/")[0] for name in files if "/" in name})
    in_parts = has_parts(root, list(files.values()), folders, classes)
    found: dict[str, LabelledFile] = {}
    lines: dict[str, int] = {}
    needed = ["file", "label", *(["group"] if with_groups else [])]
    for line, row in _rows(table, needed):
        text, label = row["file"], row["label"]
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts:
            raise InputError(f"{table} line {line}: {text} leads out of the folder. Give paths relative to {root}.")
        name = unicodedata.normalize("NFC", str(path))
        if name in found:
            raise InputError(f"{table} line {line}: {text} stands in line {lines[name]} already. Take one line out.")
        if name not in files:
            raise InputError(
                f"{table} line {line}: there is no image {text} below {root}. Correct the line, or take it out."
            )
        group = group_name(row["group"]) if with_groups else None
        if group == "":
            raise InputError(f"{table} line {line} has no group that could be seen. Fill it in, or take the line out.")
        if in_parts and "/" not in name:
            raise InputError(
                f"{files[name].path} lies outside train/, valid/ and test/. Move it into one of them or away."
            )
        part = name.split("/")[0] if in_parts else None
        found[name] = LabelledFile(files[name], unicodedata.normalize("NFC", label), part, group)
        lines[name] = line
    for name, file in files.items():
        if name not in found:
            raise InputError(f"{file.path} is not in {table}. Add a line for it, or move it away.")
    return [found[name] for name in sorted(found)]


def has_groups(root: Path) -> bool:
    """Whether the table has a column `group`."""
    return "group" in _read(root / NAME)[0]


def _rows(table: Path, needed: list[str]) -> list[tuple[int, dict[str, str]]]:
    """The needed columns of each row with its line number, stripped and none of them empty."""
    header, lines = _read(table)
    for column in needed:
        if header.count(column) != 1:
            raise InputError(
                f"{table} needs one column {column!r} in its first line; it has "
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


def _read(table: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header's column names, and each further non-empty line's cells with its number."""
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:  # "-sig": spreadsheets put a mark at the start
            first = file.readline()
            file.seek(0)
            reader = csv.reader(
                file, strict=True, delimiter=max(",;\t", key=first.count)
            )  # as spreadsheets of many countries write it
            header = [cell.strip() for cell in next(reader, [])]
            return header, [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except OSError as error:
        raise InputError(f"{table} cannot be read: {error.strerror}. Make it readable.") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{table} is no CSV in UTF-8: {error}. Save it as comma-separated UTF-8.") from None

"""Scores that somebody's own attack gave, as a table."""

import csv
from pathlib import Path

from sfumato.errors import InputError

_COLUMNS = ("score", "member")


def read_scores(path: Path) -> tuple[list[float], list[int]]:
    """The columns ``score`` and ``member`` of a CSV file with a first line of names; others are passed
    over.

    Returns:
        Scores, and 1 or 0 for each.

    Raises:
        InputError: If the file cannot be read, lacks a column, or a value is none.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)  # else a quote that is not closed takes all lines after it
            names = next(reader, [])
            _refuse_several_lines(path, reader.line_num, names)
            missing = [name for name in _COLUMNS if name not in names]
            if missing:
                raise InputError(
                    f"{path} has no column {' and no column '.join(missing)}. Its first line must name the columns: "
                    "score,member."
                )
            twice = [name for name in _COLUMNS if names.count(name) > 1]
            if twice:
                raise InputError(f"{path} has more than one column {twice[0]}. Leave one.")
            rows = []
            for cells in filter(None, reader):  # a blank line has none
                _refuse_several_lines(path, reader.line_num, cells)
                if len(cells) != len(names):  # R writes names of rows so: each cell would be taken for its neighbour
                    raise InputError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells, and the first line has {len(names)} "
                        "names. Name every column there, fill every line, and write numbers with a point."
                    )
                row = dict(zip(names, cells, strict=True))
                rows.append((reader.line_num, row["score"], row["member"]))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Name a CSV file.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no CSV file in UTF-8. Save it as one.") from None
    except csv.Error as error:
        raise InputError(
            f"{path}, after line {reader.line_num}: {error}. Is a quote not closed, or within a cell? Mend it."
        ) from None
    scores, members = [], []
    for number, score, member in rows:
        try:
            if "_" in score:  # Python reads 1_000 as a number
                raise ValueError
            scores.append(float(score))
        except ValueError:
            raise InputError(
                f"{path}, line {number}: score must be a number, not {_shown(score)}. Mend that line."
            ) from None
        if member not in ("0", "1"):
            raise InputError(
                f"{path}, line {number}: member must be 1 where the example took part and 0 where it did not, not "
                f"{_shown(member)}. Mend that line."
            )
        members.append(int(member))
    return scores, members


def _refuse_several_lines(path: Path, last: int, cells: list[str]) -> None:
    """Cells between two quotes that belong to two lines."""
    if any("\n" in cell or "\r" in cell for cell in cells):
        raise InputError(f"{path}: a cell that ends in line {last} has several lines. Is a quote not closed? Mend it.")


def _shown(cell: str) -> str:
    return repr(cell if len(cell) < 80 else f"{cell[:80]}...")

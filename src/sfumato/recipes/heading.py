"""What the first comment of a recipe says: where its numbers are printed, and which accuracies they reached."""

import dataclasses
import re

_PLACE = re.compile(r"(?P<paper>.+? et al\. \d{4}), (?P<kind>Table|Figure|Section|Appendix)s? (?P<number>[\w.]*\w)")
_ACCURACY = re.compile(r"(?P<per_cent>\d+(?:\.\d+)?) % (?:test accuracy|accuracy|top-1)(?P<how> \([^)]*\))?")
OWN = "Sfumato's own"


@dataclasses.dataclass(frozen=True)
class Heading:
    """The comment above a recipe's first section.

    Attributes:
        source: Its first line: paper, table and column, and what is trained.
        group: Paper and table, by which recipes are listed together; `OWN` where there is no paper.
        paper: The paper's accuracy as it is printed, with its spread; None where there is none.
        paper_accuracy: The same as a fraction.
        ours: The accuracy that was measured here; None where nobody has.
    """

    source: str
    group: str
    paper: str | None
    paper_accuracy: float | None
    ours: str | None


def read_heading(text: str) -> Heading:
    """The heading of a recipe's text. A line that is indented goes on with the one before.

    Example:
        >>> found = read_heading("# De et al. 2022, Table 9, row 1: a network.\\n# Paper: 93.6 % test accuracy.")
        >>> found.group, found.paper, found.paper_accuracy
        ('De et al. 2022, Table 9', '93.6 %', 0.936)
    """
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#   ") and lines:
            lines[-1] += " " + line.lstrip("# ")
        else:
            lines.append(line.lstrip("# ").rstrip())
    source = lines[0] if lines else ""
    place = _PLACE.match(source)
    group = f"{place['paper']}, {place['kind']} {place['number']}" if place else OWN
    said = {key: rest for key, _, rest in (line.partition(": ") for line in lines) if key in ("Paper", "Ours")}
    printed = _ACCURACY.match(said.get("Paper", ""))
    return Heading(
        source,
        group,
        f"{printed['per_cent']} %{printed['how'] or ''}" if printed else None,
        round(float(printed["per_cent"]) / 100, 6) if printed else None,
        said["Ours"].rstrip(".") if "Ours" in said else None,
    )


def by_place(group: str) -> list[tuple[int, int, str]]:
    """Sorts groups: their numbers as numbers, Table 9 before Table 12."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", group)]

"""The recipes that are shipped: the papers' tables as data, and our own."""

import copy
import difflib
import functools
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.errors import InputError

FOLDER = Path(__file__).parent


@functools.cache
def names() -> tuple[str, ...]:
    """Every shipped recipe, such as "demo/digits"."""
    return tuple(sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml")))


def find(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        InputError: If there is none of that name; the nearest is given.
    """
    if name not in names() and Path(name).is_dir():
        command = f"sfumato train image-folder --data-root {shlex.quote(name)} --epsilon 3"
        raise InputError(f"{name} is a folder, no recipe. For images in it: {command}")
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.3)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise InputError(
            f"there is no recipe {name!r}. {hint}`sfumato recipes list` names all; the path of a .toml file works too."
        )
    return FOLDER / f"{name}.toml"


def read(recipe: str | Path) -> tuple[str, dict[str, Any]]:
    """The name and the values of a shipped recipe or a TOML file.

    Raises:
        InputError: If there is no such recipe; the nearest name is given.
    """
    path = Path(recipe)
    if str(recipe) not in names() and (path.suffix == ".toml" or os.path.isfile(path)):
        return path.stem, config.read(path)
    return str(recipe), config.read(find(str(recipe)))


def recipe_of(given: config.Recipe | Mapping[str, Any] | str | Path, settings: Mapping[str, Any]) -> config.Recipe:
    """The recipe that a caller means.

    Args:
        given: A recipe, its nested dictionaries, the name of a shipped one or the path of a TOML
            file.
        settings: What is set otherwise, such as {"privacy.target_epsilon": 3.0}.

    Raises:
        InputError: If there is no such recipe, or a key or value is wrong.
    """
    if isinstance(given, config.Recipe) and not settings:
        return given
    if isinstance(given, config.Recipe):
        values = given.model_dump(exclude_unset=True)
    elif isinstance(given, (str, Path)):
        values = read(given)[1]
    elif isinstance(given, Mapping):
        values = copy.deepcopy(dict(given))
    else:
        raise InputError(f"a recipe is a name, a path, nested dictionaries or a Recipe, not {type(given).__name__}.")
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise InputError('settings must be a dictionary such as {"privacy.target_epsilon": 3.0}.')
    for key, value in settings.items():
        config.put(values, key, value)
    return config.parse(values)


def name_of(given: config.Recipe | Mapping[str, Any] | str | Path) -> str:
    """What runs of a recipe are named after."""
    return read(given)[0] if isinstance(given, (str, Path)) else "run"


_PLACE = re.compile(r"(?P<paper>.+? et al\. \d{4}), (?P<kind>Table|Figure|Section|Appendix)s? (?P<number>[\w.]*\w)")
_ACCURACY = re.compile(r"(?P<per_cent>\d+(?:\.\d+)?) % (?:test accuracy|accuracy|top-1)(?P<how> \([^)]*\))?")
OWN = "Sfumato's own"


def read_heading(text: str) -> dict[str, Any]:
    """The comment above a recipe's first section. A line that is indented goes on with the one before.

    Returns:
        `source`, its first line: paper, table and column, and what is trained; `group`, paper and table, by which
        recipes are listed together, or `OWN`; `paper`, the paper's accuracy as it is printed, with its spread, and
        `paper_accuracy`, the same as a fraction; `ours`, the accuracy that was measured here. None: there is none.

    Example:
        >>> found = read_heading("# De et al. 2022, Table 9, row 1: a network.\\n# Paper: 93.6 % test accuracy.")
        >>> found["group"], found["paper"], found["paper_accuracy"]
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
    return {
        "source": source,
        "group": group,
        "paper": f"{printed['per_cent']} %{printed['how'] or ''}" if printed else None,
        "paper_accuracy": round(float(printed["per_cent"]) / 100, 6) if printed else None,
        "ours": said["Ours"].rstrip(".") if "Ours" in said else None,
    }


def by_place(group: str) -> list[tuple[int, int, str]]:
    """Sorts groups: their numbers as numbers, Table 9 before Table 12."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", group)]

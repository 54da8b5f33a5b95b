"""The recipes that are shipped: the papers' tables as data, and our own."""

import difflib
from pathlib import Path

from sfumato.errors import InputError

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Every shipped recipe, such as "demo/digits"."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml"))


def find(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        InputError: If there is none of that name; the nearest is given.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.3)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise InputError(
            f"there is no recipe {name!r}. {hint}`sfumato recipes list` names all; the path of a .toml file works too."
        )
    return FOLDER / f"{name}.toml"

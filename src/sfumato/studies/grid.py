"""Which settings a sweep tries: a grid, a list, or a list times a grid."""

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.errors import InputError, nearest

# From a recipe key to its value; JSON.
Settings = dict[str, Any]

NUM_STEPS, WEIGHTS = "training.num_steps", "model.init_from"
_OTHER_IMAGES = "cells would be compared on other images. Use --set."
_SELECTED = "a run selected from others stands for itself. Leave it out, or use `sfumato search --paid`."
# Of keys, and of a whole section.
_WHY_NOT = {
    "run": "how often each cell runs is --seeds N, and --paired gives them seeds.",
    "data.path": "where images lie is --data-root.",
    **dict.fromkeys(("data.split", "data.held_out"), _OTHER_IMAGES),
    **dict.fromkeys(("privacy.selected_from", "privacy.selection_shape", "privacy.score_noise"), _SELECTED),
}


def parse_grid(texts: Iterable[str]) -> dict[str, list[Any]]:
    """The values of each `key=v1,v2` of the command line. They are read as a TOML list, else one by one, as TOML or
    text.

    Example:
        >>> parse_grid(["optimizer.learning_rate=1.0,2.0", "augmentation.kind=none,flip", "ema.decay=[0.9, 0.99],0.9"])
        {'optimizer.learning_rate': [1.0, 2.0], 'augmentation.kind': ['none', 'flip'], 'ema.decay': [[0.9, 0.99], 0.9]}

    Raises:
        InputError: If one has no such form, no values, or a key stands twice.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise InputError(f'--grid {text!r} is not of the form section.key=v1,v2, as "ema.decay=0.9,0.99".')
        if key in grid:
            raise InputError(f"--grid names {key} twice. Give all its values at once: {key}=v1,v2.")
        if not values:
            raise InputError(f"--grid {key} has no values. Give some: {key}=v1,v2.")
        grid[key] = _values(key, values)
    return grid


def _values(key: str, text: str) -> list[Any]:
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"--grid {key}={text} has an empty value. Take it out; --set {key}= takes a key out.")
    return [config.value_of(part) for part in parts]


def read_cells(path: Path) -> list[Settings]:
    """Whole settings from a TOML file: a [[cell]] table for each, its keys with dots or as tables.

    Raises:
        InputError: If it holds anything else.
    """
    values = config.read(path, "list of cells")
    listed = values.get("cell")
    if set(values) != {"cell"} or not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise InputError(f"{path} is no list of cells. Write a [[cell]] table for each, with keys of a recipe.")
    return [config.dotted(each) for each in listed]


def cells_of(grid: Mapping[str, Sequence[Any]], listed: Sequence[Mapping[str, Any]] = ()) -> list[Settings]:
    """The settings of every cell: each of the list with each of the grid, whose first key moves slowest.

    Args:
        grid: The values of each key.
        listed: Whole settings, one for each of its cells; empty: there is no list.

    Raises:
        InputError: If there is nothing to try, a key may not be swept or is none, or two cells are the same.
    """
    if not grid and not listed:
        raise InputError("a sweep needs settings to try: give --grid section.key=v1,v2, once for each key.")
    for key in [*grid, *(key for settings in listed for key in settings)]:
        _refuse_key(key)
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise InputError(f"the grid has no values of {key}. Give a list of some.")
        if any(key in settings for settings in listed):
            raise InputError(f"{key} stands in the grid and in the list of cells. Leave it in one of them.")
    combined = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    cells = [{**settings, **each} for settings in listed or [{}] for each in combined]
    shared = [for_sharing(settings) for settings in cells]
    for (one, of_one), (other, of_other) in itertools.combinations(zip(cells, shared, strict=True), 2):
        if one == other:
            raise InputError(f"two cells are the same ({in_words(one)}): each stands once. Take one out.")
        if of_one == of_other:
            names = f"{one[WEIGHTS]} and {other[WEIGHTS]}"
            raise InputError(f"{names} have one name, by which a sweep's files tell cells. Rename one.")
    return cells


def for_sharing(settings: Mapping[str, Any]) -> Settings:
    """Settings as a sweep's files state them: where weights lie on their owner's machine goes into none.

    Example:
        >>> for_sharing({"model.init_from": "/home/me/weights.pth", "optimizer.learning_rate": 2.0})
        {'model.init_from': 'weights.pth', 'optimizer.learning_rate': 2.0}
    """
    source = settings.get(WEIGHTS)
    return {**settings, **({WEIGHTS: Path(source).name} if isinstance(source, str) else {})}


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings on one line.

    Example:
        >>> in_words({"optimizer.learning_rate": 2.0, "augmentation.kind": "flip"})
        'optimizer.learning_rate=2.0 augmentation.kind=flip'
    """
    return " ".join(f"{key}={'' if value is None else value}" for key, value in settings.items()) or "as the recipe is"


def _refuse_key(key: str) -> None:
    """Raises InputError for what is no key, or none to be swept."""
    why_not = _WHY_NOT.get(key, _WHY_NOT.get(key.split(".")[0]))
    if why_not is None and config.changes_no_result(key) and key != WEIGHTS:  # other weights give another result
        why_not = "it changes no result, so all cells would be the same. Use --set."
    if why_not is not None:
        raise InputError(f"{key} cannot be swept: {why_not}")
    known = [name for name in config.known_keys() if "." in name and not name.startswith("run.")]
    if key not in known and not (key.startswith("model.options.") and key.count(".") == 2):
        raise InputError(f"{key} is no key of a recipe. {nearest(key, known)}")

"""What a search may change: groups of recipe keys, each with the values it may take.

A space is a TOML file with one table for each group, in the order in which the greedy strategy
takes them:

    ["learning rate"]
    "optimizer.learning_rate" = [1.0, 2.0, 4.0]
    "optimizer.momentum" = [0.0, 0.5]

    [averaging]
    "ema.decay" = [0.9, 0.99, 0.999]

A list is tried value by value; samplers also take ranges, such as {low = 0.5, high = 16.0, log =
true}.
"""

import dataclasses
import functools
import itertools
import math
import operator
import random
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.config import ResolvedRecipe
from sfumato.errors import InputError, nearest
from sfumato.planning.defaults import ADAM

STEPS = "training.num_steps"
"""The one privacy parameter that may be searched: batch size and learning rate follow it, at
constant eta and sigma (Section 4.3).
"""

# From a recipe key to its value.
Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Range:
    """All numbers between two, for samplers; whole numbers if both ends are."""

    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def ends(self) -> list[float]:
        """The least and the largest number that may be drawn; of real numbers, hardly any that is
        drawn is a whole one.
        """
        if self.is_whole:
            return [self.low, self.high]
        return [math.nextafter(self.low, math.inf), math.nextafter(self.high, -math.inf)]


Choices = dict[str, list[Any] | Range]


@dataclasses.dataclass(frozen=True)
class Space:
    """Groups of keys that are searched together, by their names, in order."""

    groups: dict[str, Choices]

    @property
    def choices(self) -> Choices:
        return {key: values for group in self.groups.values() for key, values in group.items()}

    def as_json(self) -> dict[str, Any]:
        return dict(dataclasses.asdict(self)["groups"])


def paper_space(steps: int | None) -> Space:
    """The grid of Sander et al. 2022, Section 4.2, in the order of Table 2, then steps against
    batch size as in Table 3: an eighth, a quarter, as many, four times as many; None: no others.
    """
    groups: dict[str, Choices] = {
        "learning rate": {
            "optimizer.learning_rate": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
            "optimizer.momentum": [0.0, 0.1, 0.5, 0.9, 1.0],
            "optimizer.dampening": [0.0, 0.1, 0.5, 0.9, 1.0],
        },
        "averaging": {"ema.decay": [0.9, 0.99, 0.999, 0.9999, 0.99999]},
        "augmentation": {"augmentation.kind": ["rrc", "tan", "simclr"], "augmentation.augmult": [1, 2, 4, 8, 16]},
    }
    if steps is not None:
        groups["steps"] = {STEPS: [max(1, steps // 8), max(1, steps // 4), steps, 4 * steps]}
    return Space(groups)


def read_space(path: Path) -> Space:
    """Reads a space from a TOML file.

    Raises:
        InputError: If a key may not be searched, is no key of a recipe, or has no values.
    """
    tables = config.read(path, "space")
    wrong = [name for name, table in tables.items() if not isinstance(table, dict) or not table]
    if wrong or not tables:
        what = f"{wrong[0]} is no group" if wrong else "it names nothing to search"
        raise InputError(f'{path}: {what}. Write a table [group] with keys such as "optimizer.learning_rate" = [1.0].')
    groups = {
        name: {key: _choices(path, key, values) for key, values in config.dotted(table, but=("low", "high")).items()}
        for name, table in tables.items()
    }
    keys = [key for group in groups.values() for key in group]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise InputError(f"{path} names {twice} in two groups. Leave it in one.")
    return Space(groups)


def _choices(path: Path, key: str, values: Any) -> list[Any] | Range:
    """Of a key, where each may be tried: a value that its key cannot take would fail in every trial that draws it."""
    _refuse_key(path, key)
    found = _range(values) if isinstance(values, dict) else values
    if not found or not isinstance(found, list | Range):
        raise InputError(
            f"{path}: {key} = {values!r} is neither a list of values nor a range such as "
            "{low = 0.5, high = 16.0, log = true}. Write one."
        )
    for value in found.ends() if isinstance(found, Range) else found:
        if key.startswith("model.options."):
            reason = config.why_impossible("model.options", {key.split(".")[2]: value})
        else:
            reason = config.why_impossible(key, value)
        if key == STEPS and (type(value) is not int or value < 1):  # others are counted from it
            reason = "it must be a whole number of at least 1, without quotes"
        if reason is not None:
            shown = values if isinstance(found, Range) else value
            raise InputError(f"{path}: {key} = {shown!r} is not possible: {reason}. Correct it.")
    return found


def _range(table: dict[str, Any]) -> Range | None:
    """None: it is no range."""
    if not {"low", "high"} <= table.keys() <= {"low", "high", "log"}:
        return None
    low, high, log = table["low"], table["high"], table.get("log", False)
    numbers = {type(low), type(high)} <= {int, float} and type(log) is bool
    is_range = numbers and -math.inf < low < high < math.inf and (low > 0 or not log)
    return Range(low, high, log) if is_range else None


_SEARCHED = ("model", "augmentation", "optimizer", "ema")
_CONSTANT = f"the signal-to-noise ratio is held constant. Search {STEPS}: batch size and noise follow it."
_SHARED = "every trial must see the same images and seeds. Leave it out."
_WHY_NOT = {"privacy": _CONSTANT, "training": _CONSTANT, "data": _SHARED, "run": _SHARED}


def _refuse_key(path: Path, key: str) -> None:
    if key in (STEPS, "privacy.clipping_norm") or (key.startswith("model.options.") and key.count(".") == 2):
        return
    why_not = _WHY_NOT.get(key.split(".")[0])
    if why_not is not None:
        raise InputError(f"{path}: {key} cannot be searched: {why_not}")
    known = [name for name in config.known_keys() if name.startswith(_SEARCHED)]
    if key not in known:
        raise InputError(f"{path}: {key} is no key of a recipe. {nearest(key, known)}")


def apply(recipe: ResolvedRecipe, settings: Settings) -> ResolvedRecipe:
    r"""The recipe with settings in place, at the same total amount of noise.

    Other steps S' at constant eta and sigma need B' = B \sqrt{S / S'}; the learning rate, given for
    the recipe's own S, becomes lr S / S' (Sander et al. 2022, Section 4.3), and its schedule is
    stretched by S' / S. Keys that the chosen optimizer does not have are left out.

    Args:
        recipe: Of the run that the search is for.
        settings: From a recipe key to its value.

    Raises:
        InputError: If such a recipe is not possible.
    """
    values = recipe.model_dump()
    for key, value in settings.items():
        *sections, last = key.split(".")
        functools.reduce(operator.getitem, sections, values)[last] = value
    # What the chosen optimizer does not have was set for another one.
    optimizer = values["optimizer"]
    if optimizer["name"] == "sgd":
        optimizer |= dict.fromkeys(ADAM)
    else:
        optimizer |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
        optimizer |= {key: usual for key, usual in ADAM.items() if optimizer[key] is None}
    steps, batch_size = recipe.training.num_steps, recipe.training.batch_size
    if settings.get(STEPS, steps) != steps:
        factor = steps / settings[STEPS]
        values["training"]["batch_size"] = round(batch_size * math.sqrt(factor))
        optimizer["learning_rate"] *= factor
        optimizer["warmup_steps"] = round(optimizer["warmup_steps"] / factor)
        if optimizer["milestones"] is not None:
            optimizer["milestones"] = sorted({max(1, round(step / factor)) for step in optimizer["milestones"]})
    return config.parse_resolved(values)


def trial_of(recipe: ResolvedRecipe, settings: Settings, num_examples: int) -> ResolvedRecipe:
    """As `apply`.

    Raises:
        InputError: If it cannot be trained, or says nothing that another does not say more cheaply.
    """
    trial = apply(recipe, settings)
    has_views = trial.augmentation.kind != "none"
    if trial.training.batch_size > num_examples or has_views != (trial.augmentation.augmult > 0):
        raise InputError("these settings contradict each other")
    return trial


def possible(recipe: ResolvedRecipe, settings: Settings, num_examples: int) -> ResolvedRecipe | None:
    """As `trial_of`; None where that refuses."""
    try:
        return trial_of(recipe, settings, num_examples)
    except InputError:
        return None


def proposals(
    recipe: ResolvedRecipe, space: Space, name: str, current: Settings, count: int, num_examples: int
) -> tuple[list[Settings], list[Settings]]:
    """At most ``count`` different possible settings of a space's group, on top of the current ones and none
    equal to them; and those for which there was no room.

    Where the group has more, they are drawn from it, the same ones each time.
    """
    current_identity = _identity(apply(recipe, current))
    found: dict[str, Settings] = {}
    group = space.groups[name]
    for values in itertools.product(*(values for values in group.values() if isinstance(values, list))):
        settings = {**current, **dict(zip(group, values, strict=True))}
        candidate = possible(recipe, settings, num_examples)
        if candidate is not None and _identity(candidate) != current_identity:
            found.setdefault(_identity(candidate), settings)
    chosen = set(random.Random(name).sample(range(len(found)), min(count, len(found))))
    listed = list(enumerate(found.values()))
    return [each for i, each in listed if i in chosen], [each for i, each in listed if i not in chosen]


def views_of(recipe: ResolvedRecipe, batch_size: int, num_runs: int = 1) -> int:
    """Views that so many runs at a batch size differentiate."""
    return num_runs * batch_size * recipe.training.num_steps * max(1, recipe.augmentation.augmult)


def _identity(recipe: ResolvedRecipe) -> str:
    """Equal for recipes that train alike: dampening means nothing without momentum."""
    if recipe.optimizer.momentum == 0:
        recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"dampening": 0.0})})
    return recipe.model_dump_json()

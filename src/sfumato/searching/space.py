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
import itertools
import math
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

    def ends(self) -> list[float]:
        """The least and the largest number that may be drawn; of real numbers, hardly any that is
        drawn is a whole one.
        """
        if isinstance(self.low, int) and isinstance(self.high, int):
            return [self.low, self.high]
        return [math.nextafter(self.low, math.inf), math.nextafter(self.high, -math.inf)]


@dataclasses.dataclass(frozen=True)
class Group:
    """Keys that are searched together."""

    name: str
    choices: dict[str, list[Any] | Range]

    def settings(self) -> list[Settings]:
        """Every combination of its lists."""
        lists = [values for values in self.choices.values() if isinstance(values, list)]
        return [dict(zip(self.choices, values, strict=True)) for values in itertools.product(*lists)]


@dataclasses.dataclass(frozen=True)
class Space:
    """Groups in order."""

    groups: tuple[Group, ...]

    @property
    def choices(self) -> dict[str, list[Any] | Range]:
        return {key: values for group in self.groups for key, values in group.choices.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            group.name: {
                key: dataclasses.asdict(values) if isinstance(values, Range) else values
                for key, values in group.choices.items()
            }
            for group in self.groups
        }


def paper_space(recipe: ResolvedRecipe) -> Space:
    """The grid of Sander et al. 2022, Section 4.2, in the order of Table 2, then steps against
    batch size as in Table 3: an eighth, a quarter, as many, four times as many.
    """
    steps = recipe.training.num_steps
    groups: dict[str, dict[str, list[Any] | Range]] = {
        "learning rate": {
            "optimizer.learning_rate": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
            "optimizer.momentum": [0.0, 0.1, 0.5, 0.9, 1.0],
            "optimizer.dampening": [0.0, 0.1, 0.5, 0.9, 1.0],
        },
        "averaging": {"ema.decay": [0.9, 0.99, 0.999, 0.9999, 0.99999]},
        "augmentation": {"augmentation.kind": ["rrc", "tan", "simclr"], "augmentation.augmult": [1, 2, 4, 8, 16]},
        "steps": {STEPS: [max(1, steps // 8), max(1, steps // 4), steps, 4 * steps]},
    }
    return Space(tuple(Group(name, choices) for name, choices in groups.items()))


def read_space(path: Path) -> Space:
    """Reads a space from a TOML file.

    Raises:
        InputError: If a key may not be searched, is no key of a recipe, or has no values.
    """
    tables = config.read(path)
    if not tables:
        raise InputError(
            f"{path} names nothing to search. Give a table for each group, with keys such as "
            '"optimizer.learning_rate" = [1.0, 2.0].'
        )
    groups = []
    for name, table in tables.items():
        if not isinstance(table, dict) or not table:
            raise InputError(
                f'{path}: {name} is no group. Write [{name}] and below it keys such as "optimizer.learning_rate" = '
                "[1.0, 2.0]."
            )
        groups.append(Group(name, {key: _choices(path, key, values) for key, values in _flat(table).items()}))
    keys = [key for group in groups for key in group.choices]
    for key in keys:
        _refuse_key(path, key)
        if keys.count(key) > 1:
            raise InputError(f"{path} names {key} in two groups. Leave it in one.")
    for group in groups:
        for key, values in group.choices.items():
            _refuse_values(path, key, values)
    return Space(tuple(groups))


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; a table with low and high is a range."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and not {"low", "high"} & value.keys():
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _choices(path: Path, key: str, values: Any) -> list[Any] | Range:
    if isinstance(values, list) and values:
        return values
    if isinstance(values, dict) and {"low", "high"} <= values.keys() <= {"low", "high", "log"}:
        found = Range(**values)
        numbers = all(type(end) in (int, float) for end in (found.low, found.high)) and type(found.log) is bool
        if numbers and -math.inf < found.low < found.high < math.inf and (found.low > 0 or not found.log):
            return found
    raise InputError(
        f"{path}: {key} = {values!r} is neither a list of values nor a range such as "
        f"{{low = 0.5, high = 16.0, log = true}}. Write one."
    )


def _refuse_values(path: Path, key: str, values: list[Any] | Range) -> None:
    """A value that its key cannot take would fail in every trial that draws it."""
    for value in values.ends() if isinstance(values, Range) else values:
        if key.startswith("model.options."):
            reason = config.why_impossible("model.options", {key.split(".")[2]: value})
        else:
            reason = config.why_impossible(key, value)
        if key == STEPS and (type(value) is not int or value < 1):  # others are counted from it
            reason = "it must be a whole number of at least 1, without quotes"
        if reason is not None:
            shown = dataclasses.asdict(values) if isinstance(values, Range) else value
            raise InputError(f"{path}: {key} = {shown!r} is not possible: {reason}. Correct it.")


_ALLOWED = ("model", "augmentation", "optimizer", "ema")


def _refuse_key(path: Path, key: str) -> None:
    section = key.split(".")[0]
    if key == STEPS or key == "privacy.clipping_norm":
        return
    if section in ("privacy", "training"):
        raise InputError(
            f"{path}: {key} cannot be searched: the signal-to-noise ratio is held constant. "
            f"Search {STEPS}; batch size and noise then follow it."
        )
    if section in ("data", "run"):
        raise InputError(
            f"{path}: {key} cannot be searched: every trial must see the same images and seeds. Leave it out."
        )
    near = [known for known in config.known_keys() if known.startswith(_ALLOWED)]
    an_option = key.startswith("model.options.") and key.count(".") == 2
    if key not in near and not an_option:
        raise InputError(f"{path}: {key} is no key of a recipe. {nearest(key, near)}")


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
        section = values
        for name in sections:
            section = section[name]
        section[last] = value
    # What the chosen optimizer does not have was set for another one.
    optimizer = values["optimizer"]
    if optimizer["name"] == "sgd":
        optimizer |= dict.fromkeys(ADAM)
    else:
        optimizer |= {
            "momentum": 0.0,
            "dampening": 0.0,
            "nesterov": False,
            **{key: usual for key, usual in ADAM.items() if optimizer[key] is None},
        }
    steps, batch_size = recipe.training.num_steps, recipe.training.batch_size
    if settings.get(STEPS, steps) != steps:
        factor = steps / settings[STEPS]
        values["training"]["batch_size"] = round(batch_size * math.sqrt(factor))
        optimizer["learning_rate"] *= factor
        optimizer["warmup_steps"] = round(optimizer["warmup_steps"] / factor)
        if optimizer["milestones"] is not None:
            optimizer["milestones"] = sorted({max(1, round(step / factor)) for step in optimizer["milestones"]})
    return config.parse_resolved(values)


def proposals(
    recipe: ResolvedRecipe, group: Group, current: Settings, count: int, num_examples: int
) -> tuple[list[Settings], list[Settings]]:
    """At most ``count`` different possible settings of a group, on top of the current ones and none
    equal to them; and those for which there was no room.

    Where the group has more, they are drawn from it, the same ones each time.
    """
    seen = {_identity(apply(recipe, current))}
    found = []
    for changes in group.settings():
        settings = {**current, **changes}
        try:
            candidate = apply(recipe, settings)
        except InputError:
            continue
        identity = _identity(candidate)
        if identity in seen or not possible(candidate, num_examples):
            continue
        seen.add(identity)
        found.append(settings)
    chosen = set(random.Random(group.name).sample(range(len(found)), min(count, len(found))))
    return (
        [settings for i, settings in enumerate(found) if i in chosen],
        [settings for i, settings in enumerate(found) if i not in chosen],
    )


def possible(recipe: ResolvedRecipe, num_examples: int) -> bool:
    """Whether a recipe can be trained and says something that another does not say more cheaply."""
    views_of_nothing = recipe.augmentation.kind == "none" and recipe.augmentation.augmult > 0
    no_views = recipe.augmentation.kind != "none" and recipe.augmentation.augmult == 0
    return recipe.training.batch_size <= num_examples and not views_of_nothing and not no_views


def views_of(recipe: ResolvedRecipe, batch_size: int, num_runs: int = 1) -> int:
    """Views that so many runs at a batch size differentiate."""
    return num_runs * batch_size * recipe.training.num_steps * max(1, recipe.augmentation.augmult)


def _identity(recipe: ResolvedRecipe) -> str:
    """Equal for recipes that train alike: dampening means nothing without momentum."""
    if recipe.optimizer.momentum == 0:
        recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"dampening": 0.0})})
    return recipe.model_dump_json()

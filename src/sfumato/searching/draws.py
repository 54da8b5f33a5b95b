"""Settings of private trials: drawn independently and evenly, each of them tried before anything is trained."""

import itertools
import math
import random
from collections.abc import Collection
from typing import Any

from sfumato.config import ResolvedRecipe
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError, naming
from sfumato.planning.resolve import resolve
from sfumato.scaling.simulate import try_network
from sfumato.searching.result import Cost
from sfumato.searching.space import Range, Settings, Space, apply, possible, views_of


def draw(recipe: ResolvedRecipe, space: Space, generator: random.Random) -> Settings:
    """Settings drawn evenly from a space, again until they are possible.

    Raises:
        InputError: If none seem to be.
    """
    for _ in range(10_000):
        settings = {key: _one_of(choices, generator) for key, choices in space.choices.items()}
        if possible(recipe, settings, recipe.training.batch_size) is not None:
            return settings
    raise InputError("--paid: the space offers no possible settings. Look for choices that contradict each other.")


def _one_of(choices: list[Any] | Range, generator: random.Random) -> Any:
    if isinstance(choices, list):
        return generator.choice(choices)
    if choices.log:
        return math.exp(generator.uniform(math.log(choices.low), math.log(choices.high)))
    if choices.is_whole:
        return generator.randint(int(choices.low), int(choices.high))
    return generator.uniform(choices.low, choices.high)


def refuse_untrainable_choices(recipe: ResolvedRecipe, space: Space, facts: Facts, trust: Collection[str] = ()) -> None:
    """Tries what may be drawn before anything is: a search that stops at one of its trials could not go on.

    Keys of one section are tried together, a range at its ends.

    Args:
        recipe: As for `paid_search`.
        space: What settings are drawn from.
        facts: The public numbers of the images.
        trust: Modules that may be imported for a model, each by its full name.

    Raises:
        InputError: Naming the settings and why they cannot be trained.
    """
    sections: dict[str, dict[str, list[Any]]] = {"": {}}
    for key, choices in space.choices.items():
        sections.setdefault(key.split(".")[0], {})[key] = choices.ends() if isinstance(choices, Range) else choices
    for section, values in sections.items():
        for combination in itertools.product(*values.values()):
            settings = dict(zip(values, combination, strict=True))
            trial = possible(recipe, settings, recipe.training.batch_size)
            if trial is None:  # never drawn
                continue
            shown = ", ".join(f"{key} = {value!r}" for key, value in settings.items()) or "the recipe's own settings"
            with naming(f"--paid: no trial could be made with {shown}"):
                resolve(trial, facts)
                if section in ("", "model"):
                    try_network(trial, facts, trust)


def expected_cost(recipe: ResolvedRecipe, space: Space, mean: float) -> Cost:
    """Views that so many trials are expected to differentiate; what a search really did is secret. Averaged over drawn
    settings.
    """
    batch_size, generator = recipe.training.batch_size, random.Random(0)
    drawn = [views_of(apply(recipe, draw(recipe, space, generator)), batch_size) for _ in range(200)]
    views = sum(drawn) / len(drawn) * mean
    return Cost(search_views=views, search_fraction=views / views_of(recipe, batch_size))

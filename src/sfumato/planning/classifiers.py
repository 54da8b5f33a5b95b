"""What a recipe may say of a classifier on centred features, whose mean is released before the updates
(`model.features = "centred"`): what that may cost follows from the target by a rule.
"""

import decimal
import math
from collections.abc import Callable
from typing import Any

from sfumato.accounting.gaussian import mu_gaussian
from sfumato.config import FilledPrivacy, ModelConfig, Recipe
from sfumato.errors import InputError

SHARE_OF_FIRST_RELEASE = 0.1
"""Of the squared signal to noise (mu) that the target allows: docs/defaults.md has the evidence."""
LEAST_FOR_CENTRE = 1000.0
"""N epsilon from which on features are centred."""

_ASKED = 'model.features = "centred"'
_ON_FEATURES = {"model.trainable": "classifier", "augmentation.kind": "none", "augmentation.augmult": 0}


def fill_in(recipe: Recipe, values: dict[str, Any], choose: Callable[..., None]) -> None:
    """Sets the only values that have a meaning; ``values`` are the recipe's.

    Raises:
        InputError: If the recipe asks for others.
    """
    if not recipe.model.releases_first:
        return
    if recipe.training.num_steps == 0:
        raise InputError(
            f"{_ASKED} with training.num_steps = 0 would spend on what is released first and train nothing. Give it "
            "updates."
        )
    what = "the classifier is on features that are computed once"
    for name, only in _ON_FEATURES.items():
        section, key = name.split(".")
        if (given := values[section][key]) not in (only, None):
            raise InputError(
                f"{_ASKED}: {what}, so {name} = {given!r} is not possible: it is {only!r} there. Leave it out, or set "
                'model.features = "unit".'
            )
        choose(name, only, what)


def fill_in_first_release(model: ModelConfig, privacy: FilledPrivacy, choose: Callable[..., None]) -> None:
    """The noise of the first release: the share that it takes of the budget, which the target alone decides.

    Raises:
        InputError: If neither the noise nor a target is given, or nothing is released first.
    """
    if privacy.first_release_noise is not None and not model.releases_first:
        raise InputError(
            f'privacy.first_release_noise is for {_ASKED}, not for "{model.features}". Leave it out, or set that.'
        )
    if privacy.first_release_noise is not None or not model.releases_first:
        return
    if privacy.target_epsilon is None:
        raise InputError(
            f"{_ASKED} releases the mean of features before its updates: give a target epsilon, of which it takes its "
            "share, or privacy.first_release_noise."
        )
    mu = math.sqrt(SHARE_OF_FIRST_RELEASE) * mu_gaussian(privacy.target_epsilon, privacy.delta)
    exact = decimal.Decimal(repr(privacy.images_per_unit / mu))
    noise = float(decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).plus(exact))
    share = f"{SHARE_OF_FIRST_RELEASE:.0%} of the squared signal that the target allows"
    choose("privacy.first_release_noise", noise, f"for the mean of features: {share}")


def centre_by_default(recipe: Recipe, privacy: FilledPrivacy, num_examples: int) -> bool:
    """Whether features are centred where the recipe leaves it open: what centring brings must be more than its noise
    costs (docs/defaults.md), and the whole run one that a first release fits.
    """
    target = privacy.target_epsilon
    fits = recipe.training.num_steps != 0 and not recipe.audit.canaries
    is_one_run = privacy.selected_from is None and privacy.score_noise is None
    if target is None or not fits or not is_one_run or privacy.person_sampling == "persons":
        return False
    return num_examples * target / privacy.images_per_unit >= LEAST_FOR_CENTRE


def refuse_other_than_updates(model: ModelConfig, command: str) -> None:
    """Raises InputError if a recipe releases more than updates, of which the command knows alone."""
    if model.releases_first:
        raise InputError(
            f"{command} knows of updates alone, and {_ASKED} releases more. Take "
            "--set model.features=unit, or use `sfumato train`."
        )


def with_updates_alone(recipe: Recipe, command: str) -> Recipe:
    """The recipe for such a command: where it leaves open what a classifier is given, nothing is released first.

    Raises:
        InputError: If it releases more than updates.
    """
    model = recipe.model
    refuse_other_than_updates(model, command)
    if model.trainable != "classifier" or model.features is not None:
        return recipe
    return recipe.model_copy(update={"model": model.model_copy(update={"features": "unit"})})

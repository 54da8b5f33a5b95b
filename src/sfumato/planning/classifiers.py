"""What a recipe may say of a classifier on features that is not found by updates alone (`model.classifier`).

"least_squares" is one release of all images: keys of updates and averages have no meaning. "dp_fc" is one release of
second moments before the updates, `model.features = "centred"` one of the mean of features; what it may cost follows
from the target by a rule.
"""

import decimal
import math
from collections.abc import Callable
from typing import Any

from sfumato.config import FilledPrivacy, ModelConfig, PrivacyConfig, Recipe
from sfumato.errors import InputError

SHARE_OF_FIRST_RELEASE = 0.1
"""Of the squared signal to noise (mu) that the target allows: docs/defaults.md has the evidence."""
LEAST_FOR_CENTRE = 1000.0
"""N epsilon from which on features are centred."""

_ON_FEATURES = {
    "model.trainable": "classifier",
    "augmentation.kind": "none",
    "augmentation.augmult": 0,
}
_ON_UNIT_FEATURES = {**_ON_FEATURES, "model.features": "unit"}
_WITHOUT_UPDATES = {
    **_ON_UNIT_FEATURES,
    "privacy.clipping_norm": 1.0,  # the length of a vector of features
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 1.0,
    "optimizer.momentum": 0.0,
    "optimizer.dampening": 0.0,
    "optimizer.max_grad_norm": None,
    "optimizer.weight_decay": 0.0,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "ema.decay": 0.0,
    "training.num_steps": 1,
    "training.engine": "auto",
    "training.microbatch_size": "auto",
    "training.verify_every": None,
    "training.label_smoothing": 0.0,
    "training.precision": "float32",
    "training.compile": False,
    "training.norm_histogram_every": None,
    "data.class_proportions": None,
}


def fill_in(recipe: Recipe, values: dict[str, Any], num_examples: int, choose: Callable[..., None]) -> None:
    """Sets the only values that have a meaning; ``values`` is the recipe's, and changed in place.

    Raises:
        InputError: If the recipe asks for others.
    """
    model = recipe.model
    if model.classifier == "sgd" and model.features != "centred":
        return
    asks, instead = _asked(model)
    if model.releases_first and recipe.training.num_steps == 0:
        raise InputError(
            f"{asks} with training.num_steps = 0 would spend on what is released first and train nothing. Give it "
            "updates."
        )
    only_ones: dict[str, Any] = dict(_ON_FEATURES if model.classifier == "sgd" else _ON_UNIT_FEATURES)
    what = "the classifier is on features that are computed once"
    if model.classifier == "least_squares":
        only_ones = {**_WITHOUT_UPDATES, "training.batch_size": num_examples}
        what = "the classifier is solved for, by one release of all images"
    for name, only in only_ones.items():
        section, key = name.split(".")
        settings = getattr(recipe, section)
        if settings is None:
            continue
        given, default = getattr(settings, key), type(settings).model_fields[key].default
        if given not in (only, default, None):
            meaning = "has no meaning there" if only is None else f"is {only!r} there"
            raise InputError(
                f"{asks}: {what}, so {name} = {given!r} is not possible: it {meaning}. Leave it out, or set {instead}."
            )
        if given is None and only is not None:
            choose(section, key, only, what)
        values[section][key] = only


def _asked(model: ModelConfig) -> tuple[str, str]:
    """The setting by which something is added up of all images, and the one by which nothing is."""
    if model.classifier != "sgd":
        return f'model.classifier = "{model.classifier}"', 'model.classifier = "sgd"'
    return 'model.features = "centred"', 'model.features = "unit"'


def fill_in_first_release(model: ModelConfig, privacy: FilledPrivacy, choose: Callable[..., None]) -> None:
    """The noise of the first release: the share that it takes of the budget, which the target alone decides.

    Raises:
        InputError: If neither the noise nor a target is given, or nothing is released first.
    """
    from sfumato.accounting.gaussian import mu_gaussian

    if privacy.first_release_noise is not None and not model.releases_first:
        raise InputError(
            'privacy.first_release_noise is for model.classifier = "dp_fc" and model.features = "centred", not for '
            f'"{model.classifier}" on "{model.features}" features. Leave it out, or set one of them.'
        )
    if privacy.first_release_noise is not None or not model.releases_first:
        return
    what = "second moments" if model.classifier == "dp_fc" else "the mean of features"
    if privacy.target_epsilon is None:
        raise InputError(
            f"{_asked(model)[0]} releases {what} before its updates: give a target epsilon, of which they take their "
            "share, or privacy.first_release_noise."
        )
    mu = math.sqrt(SHARE_OF_FIRST_RELEASE) * mu_gaussian(privacy.target_epsilon, privacy.delta)
    exact = decimal.Decimal(repr(privacy.images_per_unit / mu))
    noise = float(decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).plus(exact))
    share = f"{SHARE_OF_FIRST_RELEASE:.0%} of the squared signal that the target allows"
    choose("privacy", "first_release_noise", noise, f"for {what}: {share}")


def centre_by_default(recipe: Recipe, privacy: FilledPrivacy, num_examples: int) -> bool:
    """Whether features are centred where the recipe leaves it open: what centring brings must be more than its noise
    costs (docs/defaults.md), and the whole run one that a first release fits.
    """
    target = privacy.target_epsilon
    fits = recipe.model.classifier == "sgd" and recipe.training.num_steps != 0 and not recipe.audit.canaries
    is_one_run = privacy.selected_from is None and privacy.score_noise is None
    if target is None or not fits or not is_one_run or privacy.person_sampling == "persons":
        return False
    return num_examples * target / privacy.images_per_unit >= LEAST_FOR_CENTRE


def refuse_other_than_updates(model: ModelConfig, command: str) -> None:
    """Raises InputError if a recipe releases more than updates, of which the command knows alone."""
    if model.adds_up:
        asked, instead = _asked(model)
        raise InputError(
            f"{command} knows of updates alone, and {asked} releases more. Set {instead}, or use `sfumato train`."
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


def refuse_people_together(model: ModelConfig, privacy: PrivacyConfig) -> None:
    """Raises InputError if people are to be drawn, each with the mean of their images."""
    if privacy.person_sampling == "persons":
        raise InputError(
            f"{_asked(model)[0]} adds up images, each by itself, so privacy.person_sampling = "
            '"persons" is not possible. Leave it out: epsilon for a person then covers all images of theirs.'
        )

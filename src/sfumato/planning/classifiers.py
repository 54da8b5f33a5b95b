"""What a recipe may say of a classifier on features that is not found by updates alone (`model.classifier`).

"least_squares" is one release of all images: keys of updates and averages have no meaning. "dp_fc" is one release of
second moments before the updates; what it may cost follows from the target by a rule.
"""

import decimal
import math
from collections.abc import Callable
from typing import Any

from sfumato.config import FilledPrivacy, ModelConfig, PrivacyConfig, Recipe
from sfumato.errors import InputError

SHARE_OF_FIRST_RELEASE = 0.1
"""Of the squared signal to noise (mu) that the target allows: docs/defaults.md has the evidence."""

_ON_FEATURES = {
    "model.trainable": "classifier",
    "model.features": "unit",
    "augmentation.kind": "none",
    "augmentation.augmult": 0,
}
_WITHOUT_UPDATES = {
    **_ON_FEATURES,
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
    kind = recipe.model.classifier
    if kind != "dp_fc" and recipe.privacy is not None and recipe.privacy.first_release_noise is not None:
        raise InputError(
            f'privacy.first_release_noise is for model.classifier = "dp_fc", not "{kind}". Leave it out, or set that.'
        )
    if kind == "sgd":
        return
    if kind == "dp_fc" and recipe.training.num_steps == 0:
        raise InputError(
            'model.classifier = "dp_fc" with training.num_steps = 0 would spend on second moments and train nothing. '
            "Give it updates."
        )
    only_ones: dict[str, Any] = dict(_ON_FEATURES)
    what = "the classifier is on features that are computed once"
    if kind == "least_squares":
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
                f'model.classifier = "{kind}": {what}, so {name} = {given!r} is not possible: it {meaning}. Leave it '
                'out, or set model.classifier = "sgd".'
            )
        if given is None and only is not None:
            choose(section, key, only, what)
        values[section][key] = only


def fill_in_first_release(privacy: FilledPrivacy, choose: Callable[..., None]) -> None:
    """The noise of the first release: the share that it takes of the budget, which the target alone decides.

    Raises:
        InputError: If neither the noise nor a target is given.
    """
    from sfumato.accounting.gaussian import mu_gaussian

    if privacy.first_release_noise is not None:
        return
    if privacy.target_epsilon is None:
        raise InputError(
            'model.classifier = "dp_fc" releases second moments before its updates: give a target epsilon, of which '
            "they take their share, or privacy.first_release_noise."
        )
    mu = math.sqrt(SHARE_OF_FIRST_RELEASE) * mu_gaussian(privacy.target_epsilon, privacy.delta)
    exact = decimal.Decimal(repr(privacy.images_per_unit / mu))
    noise = float(decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).plus(exact))
    share = f"{SHARE_OF_FIRST_RELEASE:.0%} of the squared signal that the target allows"
    choose("privacy", "first_release_noise", noise, f"second moments take {share}")


def refuse_other_than_updates(model: ModelConfig, command: str) -> None:
    """Raises InputError if a recipe releases more than updates, of which the command knows alone."""
    if model.classifier != "sgd":
        raise InputError(
            f'{command} knows of updates alone, and model.classifier = "{model.classifier}" releases more. Set '
            'model.classifier = "sgd", or use `sfumato train`.'
        )


def refuse_people_together(model: ModelConfig, privacy: PrivacyConfig) -> None:
    """Raises InputError if people are to be drawn, each with the mean of their images."""
    if privacy.person_sampling == "persons":
        raise InputError(
            f'model.classifier = "{model.classifier}" adds up images, each by itself, so privacy.person_sampling = '
            '"persons" is not possible. Leave it out: epsilon for a person then covers all images of theirs.'
        )

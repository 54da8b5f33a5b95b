"""What a recipe may say where the classifier is solved for (`model.classifier = "least_squares"`): there is one release
of all images, and keys of views, updates and averages have no meaning.
"""

from collections.abc import Callable
from typing import Any

from sfumato.config import PrivacyConfig, Recipe
from sfumato.errors import InputError

_ONLY = {
    "model.trainable": "classifier",
    "model.features": "unit",
    "augmentation.kind": "none",
    "augmentation.augmult": 0,
    "privacy.clipping_norm": 1.0,  # the length of a vector of features
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 1.0,
    "optimizer.momentum": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "ema.decay": 0.0,
    "training.num_steps": 1,
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
    for name, only in {**_ONLY, "training.batch_size": num_examples}.items():
        section, key = name.split(".")
        settings = getattr(recipe, section)
        if settings is None:
            continue
        given, default = getattr(settings, key), type(settings).model_fields[key].default
        if given not in (only, default, None):
            stated = "it has no meaning" if only is None else f"it is {only!r}"
            raise InputError(
                f'model.classifier = "least_squares" is one release of features and labels of all images: {name} = '
                f'{given!r} is not possible, {stated} there. Leave it out, or set model.classifier = "sgd".'
            )
        if given is None and only is not None:
            choose(section, key, only, "the classifier is solved for, by one release of all images")
        values[section][key] = only


def refuse_people_together(privacy: PrivacyConfig) -> None:
    """Raises InputError if people are to be drawn, each with the mean of their images."""
    if privacy.person_sampling == "persons":
        raise InputError(
            'model.classifier = "least_squares" adds up images, each by itself, so privacy.person_sampling = "persons" '
            "is not possible. Leave it out: epsilon for a person then covers all images of theirs."
        )

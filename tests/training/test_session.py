"""Which recipes are one run."""

import pytest

from sfumato.config import parse
from sfumato.training.session import recipe_digest


def recipe(optimizer):
    budget = {"noise_multiplier": 2.0, "delta": 1e-4}
    views = {"padding": 4}  # as resolved recipes have it
    training = {"batch_size": 512, "num_steps": 60}
    return parse({"data": {"name": "digits"}, "privacy": budget, "optimizer": optimizer, "augmentation": views, "training": training})


@pytest.mark.parametrize(
    "optimizer, digest",
    [
        ({"learning_rate": 2.0}, "c6da98fbc2f7dc48b9177bcee33fe763710908bf3adea2701952fba7a6ed405d"),
        ({"learning_rate": 0.5, "momentum": 0.9, "dampening": 0.9}, "6d120a2386b0dc60d834426096515cf7e37135c9471094dff35b42d2bed792d1"),
    ],
)
def test_a_run_that_was_begun_before_a_key_came_is_still_the_same_run(optimizer, digest):
    """Digests of the first version, whose recipes knew neither Adam nor weight decay. See `sfumato.config.ADDED`."""
    assert recipe_digest(recipe(optimizer)) == digest


def test_recipes_that_release_something_else_have_other_digests():
    adam = {"name": "adam", "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "adam_epsilon": 1e-8}
    optimizers = [
        {"learning_rate": 0.01},
        {"learning_rate": 0.01, "weight_decay": 0.1},
        adam,
        {**adam, "name": "adamw"},
        {**adam, "beta1": 0.0},
        {**adam, "beta2": 0.99},
        {**adam, "adam_epsilon": 1e-6},
        {**adam, "weight_decay": 0.1},
    ]
    assert len({recipe_digest(recipe(optimizer)) for optimizer in optimizers}) == len(optimizers)


def test_what_is_noted_for_the_owner_does_not_make_another_run():
    plain = recipe({"learning_rate": 2.0})
    watched = plain.model_copy(update={"training": plain.training.model_copy(update={"norm_histogram_every": 5})})
    assert recipe_digest(watched) == recipe_digest(plain)

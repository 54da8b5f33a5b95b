"""What a recipe leaves out about its views, and what of them changes a release."""

import pytest

from sfumato import config
from sfumato.config import releasing_keys
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve


def plan_of(image_size, **augmentation):
    values = {"data": {"name": "folder"}, "augmentation": augmentation, "training": {"batch_size": 8, "num_steps": 1}}
    return resolve(config.parse(values), Facts(100, 2, image_size, 3))


@pytest.mark.parametrize("image_size, padding", [(224, 20), (28, 2)])
def test_tans_padding_is_20_pixels_at_224_in_proportion(image_size, padding):
    plan = plan_of(image_size, kind="tan", augmult=2)
    assert plan.recipe.augmentation.padding == padding
    assert "augmentation.padding" in {choice.key for choice in plan.choices}
    assert plan_of(image_size, kind="tan", augmult=2, padding=5).recipe.augmentation.padding == 5


@pytest.mark.parametrize("kind", ["none", "flip", "simclr"])
def test_the_padding_of_other_kinds_is_4_as_it_was(kind):
    plan = plan_of(32, kind=kind)
    assert plan.recipe.augmentation.padding == 4 and plan.recipe.augmentation.augmult == (0 if kind == "none" else 2)
    assert "augmentation.padding" not in {choice.key for choice in plan.choices}


def test_views_that_cannot_be_made_are_refused():
    with pytest.raises(InputError, match="at most 31"):
        plan_of(32, kind="tan", padding=32)
    assert plan_of(32, kind="tan", padding=31).recipe.augmentation.padding == 31
    for kind in ("rrc", "tan", "simclr"):
        with pytest.raises(InputError, match=f'"{kind}".*augmult'):
            plan_of(32, kind=kind, augmult=0)


def test_testing_with_views_changes_no_release():
    keys = [releasing_keys(plan_of(32, kind="rrc", test_views=number).recipe) for number in (0, 8)]
    assert keys[0] == keys[1]
    assert keys[0] != releasing_keys(plan_of(32, kind="simclr").recipe)


def test_ordinary_training_has_defaults_of_its_own():
    """Nothing bounds its gradients: the rate of private training ends at chance."""
    facts = Facts(1000, 2, 32, 3)
    recipe = resolve(config.parse({"data": {"name": "folder"}}), facts).recipe
    assert (recipe.optimizer.learning_rate, recipe.optimizer.momentum) == (0.02, 0.9)
    assert (recipe.training.batch_size, recipe.training.num_steps) == (128, 79)
    own = {"data": {"name": "folder"}, "optimizer": {"momentum": 0.5}, "training": {"batch_size": 10}}
    recipe = resolve(config.parse(own), facts).recipe
    assert (recipe.optimizer.momentum, recipe.training.num_steps) == (0.5, 1000)
    bounded = {"data": {"name": "folder"}, "optimizer": {"max_grad_norm": 1.0}}
    assert resolve(config.parse(bounded), facts).recipe.optimizer.learning_rate == 2.0


@pytest.mark.parametrize(
    ("model", "num_examples", "target", "rate"),
    [
        ({"trainable": "classifier"}, 100, 0.5, 0.06),
        ({"trainable": "classifier"}, 50_000, 8.0, 16.0),
        ({"name": "scattering"}, 8000, 1.0, 2.0),
        ({"name": "scattering"}, 50_000, 8.0, 64.0),
    ],
)
def test_the_rate_on_features_is_that_of_the_signal_with_what_goes_with_it_unless_one_is_stated(
    model, num_examples, target, rate
):
    def optimizer_of(**optimizer):
        recipe = {"data": {"name": "folder"}, "model": model, "optimizer": optimizer}
        recipe["privacy"] = {"target_epsilon": target, "delta": 1e-5}
        plan = resolve(config.parse(recipe), Facts(num_examples, 2, 32, 3))
        return plan.recipe.optimizer.learning_rate, plan.recipe.optimizer.momentum, plan.recipe.ema.decay

    assert optimizer_of() == (rate, 0.9, 0.9)
    assert optimizer_of(learning_rate=1.0)[:2] == (1.0, 0.0)


FEW, SOME = Facts(200, 10, 32, 3), Facts(4000, 2, 32, 3)


@pytest.mark.parametrize(
    ("facts", "target", "kind", "augmult", "trainable", "num_steps"),
    [
        (SOME, 0.01, None, None, None, 2),
        (SOME, 8.0, None, 2, "classifier", 2),
        (SOME, 0.01, "none", 0, "norms", 2),
        (SOME, 8.0, "none", None, "classifier", 2),
        (SOME, 8.0, "flip", None, "all", 2),
        (SOME, 0.01, "flip", 2, None, 2),
        # What a warning tries with more images must not refuse the recipe that it warns of.
        (FEW, 0.05, None, None, "classifier", None),
        (FEW, 3.0, None, None, "classifier", 0),
        (FEW, 0.05, None, None, "classifier", 1),
    ],
)
def test_what_was_filled_in_resolves_to_itself(facts, target, kind, augmult, trainable, num_steps):
    """Else a run could not be resumed."""
    values = {"data": {"name": "folder"}, "model": {"trainable": trainable}}
    values |= {"augmentation": {"kind": kind, "augmult": augmult}, "training": {"num_steps": num_steps}}
    values |= {"privacy": {"target_epsilon": target, "delta": 1e-5}}
    recipe = resolve(config.parse(values), facts).recipe
    assert resolve(config.parse(recipe.model_dump(mode="json")), facts).recipe == recipe


@pytest.mark.parametrize(
    ("size", "images", "given", "name"),
    [
        (24, 60_000, {}, "scattering"),
        (40, 300, {"model": {"options": {"mirror": True}}}, "scattering"),
        (23, 300, {}, "small_cnn"),
        (41, 300, {}, "small_cnn"),
        (32, 60_001, {}, "small_cnn"),
        (32, 3000, {"model": {"options": {"width": 2}}}, "small_cnn"),
        (32, 3000, {"model": {"name": "tanh_cnn"}}, "tanh_cnn"),
        (32, 3000, {"augmentation": {"augmult": 2}}, "small_cnn"),
        (32, 3000, {"augmentation": {"kind": "flip"}}, "small_cnn"),
        (32, 3000, {"optimizer": {"name": "adam"}}, "small_cnn"),
        (32, 3000, {"privacy": {"target_epsilon": 1.0, "noise_multiplier": 9.0}}, "small_cnn"),
        (32, 3000, {"privacy": None}, "small_cnn"),
        (32, 3000, {"data": {"name": "cifar10"}}, "small_cnn"),
    ],
)
def test_a_folder_of_small_images_gets_features_from_a_formula(size, images, given, name):
    values = {"data": {"name": "folder", "image_size": size}, "privacy": {"target_epsilon": 1.0}, **given}
    recipe = resolve(config.parse(values), Facts(images, 2, size, 3)).recipe
    assert recipe.model.name == name
    if name == "scattering":
        asked = given.get("model", {}).get("options", {})  # else no mirror images: left and right may be classes
        assert (recipe.model.options, recipe.model.trainable) == (asked, "classifier")
        assert recipe.training.batch_size == images and recipe.model.features == "unit"
        assert resolve(config.parse(recipe.model_dump()), Facts(images, 2, size, 3)).recipe == recipe

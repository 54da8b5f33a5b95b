"""What a recipe leaves out, filled in by rules of public numbers alone.

The rules depend on the number of images, their size, the number of classes and the
budget; never on an image or a label. docs/defaults.md tells how they were chosen.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from sfumato.config import FilledPrivacy, FilledRecipe, ModelConfig, Recipe
from sfumato.data.catalogue import Facts
from sfumato.planning import classifiers

DEFAULT_STEPS = 150
ADAM = {"beta1": 0.9, "beta2": 0.999, "adam_epsilon": 1e-8}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value that was filled in, and why."""

    key: str
    value: Any
    why: str


def fill_in(recipe: Recipe, facts: Facts) -> tuple[FilledRecipe, list[Choice]]:
    """Fills in everything but the quantity that calibration solves for.

    Returns:
        The recipe, and a list of what was chosen.
    """
    choices: list[Choice] = []
    values = recipe.model_dump()

    def choose(section: str, key: str, value: Any, why: str) -> None:
        if values[section][key] is None:
            values[section][key] = value
            choices.append(Choice(f"{section}.{key}", value, why))

    n = facts.num_examples
    classifiers.fill_in(recipe, values, choose)
    if recipe.data.name == "folder":
        choose(
            "data",
            "image_size",
            facts.image_size,
            "small images keep training fast and private; state a larger size if details matter",
        )
        choose("data", "channels", facts.channels, "colour; state 1 for grey images")
    choose("model", "name", "small_cnn", "a group-norm CNN takes any size and has few parameters, so little noise")
    choose("model", "trainable", "all", "every parameter, unless weights are given")
    choose(
        "augmentation",
        "kind",
        "none" if not recipe.augmentation.augmult else "flip",
        "views cost time; mirror images where views are asked for",
    )
    choose(
        "augmentation",
        "augmult",
        0 if values["augmentation"]["kind"] == "none" else 2,
        "each image as it is, unless views are asked for",
    )
    if values["augmentation"]["kind"] == "tan":
        choose(
            "augmentation",
            "padding",
            max(round(facts.image_size * 20 / 224), 1),
            "20 pixels at 224, as in the paper, in proportion",
        )
    elif values["augmentation"]["padding"] is None:
        values["augmentation"]["padding"] = 4
    if recipe.privacy is not None:
        choose("privacy", "delta", delta_default(n), f"the largest power of ten up to 1/(10 N) = 1/{10 * n}")
        privacy = FilledPrivacy.model_validate(values["privacy"])
        plain = _on_features(values) and values["augmentation"]["kind"] == "none"
        if plain and classifiers.centre_by_default(recipe, privacy, n):
            choose(
                "model", "features", "centred", "less their mean, which is released first: N epsilon is 1000 or more"
            )
    if values["model"]["features"] is None:
        values["model"]["features"] = "unit" if values["model"]["trainable"] == "classifier" else "raw"
    if recipe.privacy is not None:
        classifiers.fill_in_first_release(ModelConfig.model_validate(values["model"]), privacy, choose)
    solved = _solved_quantity(values)
    if _on_features(values):
        _fill_in_on_features(recipe, values, n, solved, choose)
    if recipe.privacy is None and recipe.optimizer.max_grad_norm is None:
        _fill_in_ordinary(recipe, values, n, choose)
    if solved != "batch_size":
        choose(
            "training", "batch_size", default_batch_size(n), f"a quarter of N = {n}, between 256 and 4096, at most N"
        )
    if solved != "num_steps":
        choose("training", "num_steps", DEFAULT_STEPS, "more updates need more noise in each")
    if recipe.optimizer.name == "sgd":
        choose(
            "optimizer",
            "learning_rate",
            2.0,
            "the sum of clipped gradients is divided by the batch size, so one rate suits all batches",
        )
    else:
        for key, value in ADAM.items():
            choose("optimizer", key, value, "as Kingma and Ba (2015) have it")
        choose(
            "optimizer",
            "learning_rate",
            0.01,
            "Adam moves each weight by about this much, whatever the size of its gradients",
        )
    return FilledRecipe.model_validate(values), choices


def _on_features(values: dict[str, Any]) -> bool:
    """Whether a private classifier trains on features of length 1 that are computed once."""
    model, augmentation = values["model"], values["augmentation"]
    on_features = model["trainable"] == "classifier" and model["features"] != "raw" and augmentation["augmult"] == 0
    return bool(on_features and values["privacy"] is not None and values["optimizer"]["name"] == "sgd")


def _fill_in_on_features(
    recipe: Recipe, values: dict[str, Any], n: int, solved: str, choose: Callable[..., None]
) -> None:
    """A hundred updates of all images with momentum: features cost no forward pass, and at q = 1 the
    noise of many updates is that of one (docs/defaults.md).
    """
    if solved != "batch_size":
        choose("training", "batch_size", n, "all images: features are cheap, and many updates then cost as one")
    if solved != "num_steps":
        choose("training", "num_steps", 100, "enough for momentum to average the noise")
    target = values["privacy"]["target_epsilon"]
    if values["optimizer"]["learning_rate"] is None and target is not None:
        signal = n * target / 4000
        rate = float(f"{min(max(signal, 0.06), 16.0):.2g}")
        choose("optimizer", "learning_rate", rate, f"N epsilon / 4000 with N = {n}, between 0.06 and 16")
        others = (("optimizer", "momentum", 0.9), ("privacy", "clipping_norm", 0.5), ("ema", "decay", 0.9))
        for section, key, value in others:
            if key not in getattr(recipe, section).model_fields_set:
                values[section][key] = None
                choose(section, key, value, "goes with that rate")


def _fill_in_ordinary(recipe: Recipe, values: dict[str, Any], n: int, choose: Callable[..., None]) -> None:
    """Small batches, some epochs and a rate for gradients that nothing bounds."""
    choose("training", "batch_size", min(128, n), "as ordinary training has it")
    steps = math.ceil(10 * n / values["training"]["batch_size"])
    choose("training", "num_steps", steps, "ten epochs")
    if recipe.optimizer.name == "sgd" and values["optimizer"]["learning_rate"] is None:
        choose("optimizer", "learning_rate", 0.02, "gradients that are not clipped take a smaller rate")
        if "momentum" not in recipe.optimizer.model_fields_set:
            values["optimizer"]["momentum"] = None
            choose("optimizer", "momentum", 0.9, "goes with that rate")


def delta_default(num_examples: int) -> float:
    """The largest power of ten up to 1 / (10 num_examples): publishing one image at random would satisfy
    a delta of 1 / num_examples.

    Example:
        >>> delta_default(60_000), delta_default(10_000)
        (1e-06, 1e-05)
    """
    return float(f"1e-{len(str(10 * num_examples - 1))}")


def default_batch_size(num_examples: int) -> int:
    """A quarter of the images, between 256 and 4096, and never more than there are."""
    return min(max(num_examples // 4, 256), 4096, num_examples)


def _solved_quantity(values: dict[str, Any]) -> str:
    """What calibration will solve for: the one quantity left out, else the noise."""
    privacy = values["privacy"]
    if privacy is None or privacy["target_epsilon"] is None or privacy["noise_multiplier"] is None:
        return "noise_multiplier"
    left_out = [key for key in ("batch_size", "num_steps") if values["training"][key] is None]
    return left_out[-1] if left_out else "none"

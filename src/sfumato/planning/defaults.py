"""What a recipe leaves out, filled in by rules of public numbers alone.

The rules depend on the number of images, their size, the number of classes and the
budget; never on an image or a label. docs/defaults.md tells how they were chosen.
"""

import dataclasses
import math
from typing import Any

from sfumato.config import FilledRecipe, ModelConfig, Recipe
from sfumato.config.pretrained import FROM_FORMULA, with_what_its_name_implies
from sfumato.data.catalogue import Facts

DEFAULT_STEPS = 150
ADAM = {"beta1": 0.9, "beta2": 0.999, "adam_epsilon": 1e-8}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value that was filled in, and why."""

    key: str
    value: Any
    why: str


class _Filling:
    """A recipe's values, of which those that are None are filled in, and what was chosen."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.values = recipe, recipe.model_dump()
        self.choices: list[Choice] = []

    def choose(self, name: str, value: Any, why: str) -> None:
        """Sets a key that is left out."""
        section, key = name.split(".")
        if self.values[section][key] is None:
            self.values[section][key] = value
            self.choices.append(Choice(name, value, why))

    def choose_unless_stated(self, name: str, value: Any, why: str) -> None:
        """Sets a key that has a default and that the recipe does not state."""
        section, key = name.split(".")
        if key not in getattr(self.recipe, section).model_fields_set:
            self.values[section][key] = None
            self.choose(name, value, why)


def fill_in(recipe: Recipe, facts: Facts) -> tuple[FilledRecipe, list[Choice]]:
    """Fills in everything but the quantity that calibration solves for.

    Returns:
        The recipe, and a list of what was chosen.
    """
    filling, n = _Filling(recipe), facts.num_examples
    values, choose = filling.values, filling.choose
    if recipe.data.name == "folder":
        why = "small images keep training fast and private; state a larger size if details matter"
        choose("data.image_size", facts.image_size, why)
        choose("data.channels", facts.channels, "colour; state 1 for grey images")
    if facts.is_multilabel:
        choose("data.task", "multilabel", "the table has a column for each of data.classes")
    if _measured_for_folders(recipe, facts):
        why = "small images, and few; if mirror images show the same class, add --set model.options.mirror=true; of "
        why += "photographs a network that others trained tells more: --set model.name=efficientnet_lite0"
        choose("model.name", "scattering", why)
        values.update(with_what_its_name_implies(values))
    choose("model.name", "small_cnn", "a group-norm CNN takes any size and has few parameters, so little noise")
    choose("model.trainable", "all", "every parameter, unless weights are given")
    if values["model"]["trainable"] == "lora":
        choose("model.lora_rank", 4, "few parameters, so little noise")
    _fill_in_views(filling, facts.image_size)
    if recipe.privacy is not None:
        choose("privacy.delta", delta_default(n), f"the largest power of ten up to 1/(10 N) = 1/{10 * n}")
    if values["model"]["features"] is None:
        values["model"]["features"] = "unit" if values["model"]["trainable"] == "classifier" else "raw"
    solved = _solved_quantity(values)
    if _on_features(values):
        _fill_in_on_features(filling, n, solved)
    if recipe.privacy is None and recipe.optimizer.max_grad_norm is None:
        _fill_in_ordinary(filling, n)
    if solved != "batch_size":
        why = f"a quarter of N = {n}, between 256 and 4096, at most N"
        choose("training.batch_size", default_batch_size(n), why)
    if solved != "num_steps":
        choose("training.num_steps", DEFAULT_STEPS, "more updates need more noise in each")
    if recipe.optimizer.name == "sgd":
        why = "the sum of clipped gradients is divided by the batch size, so one rate suits all batches"
        choose("optimizer.learning_rate", 2.0, why)
    else:
        for key, value in ADAM.items():
            choose(f"optimizer.{key}", value, "as Kingma and Ba (2015) have it")
        why = "Adam moves each weight by about this much, whatever the size of its gradients"
        choose("optimizer.learning_rate", 0.01, why)
    return FilledRecipe.model_validate(values), filling.choices


def _measured_for_folders(recipe: Recipe, facts: Facts) -> bool:
    """Whether a folder's images are of the sizes and numbers for which features from a formula were better than the
    small network (docs/defaults.md), and the recipe asks for nothing that they are not given by.
    """
    size, views, privacy = recipe.data.image_size or facts.image_size, recipe.augmentation, recipe.privacy
    of_mirror = {key: value for key, value in recipe.model.options.items() if key == "mirror"}
    as_it_is = recipe.model == ModelConfig(options=of_mirror) and not views.augmult and views.kind in (None, "none")
    to_a_target = privacy is not None and privacy.target_epsilon is not None and privacy.noise_multiplier is None
    to_a_target = to_a_target and recipe.optimizer.name == "sgd"
    measured = recipe.data.name == "folder" and 24 <= size <= 40 and facts.num_examples <= 60_000
    return as_it_is and to_a_target and measured


def _fill_in_views(filling: _Filling, image_size: int) -> None:
    choose, views = filling.choose, filling.values["augmentation"]
    why = "views cost time; mirror images where views are asked for"
    choose("augmentation.kind", "flip" if views["augmult"] else "none", why)
    augmult = 0 if views["kind"] == "none" else 2
    choose("augmentation.augmult", augmult, "each image as it is, unless views are asked for")
    if views["kind"] == "tan":
        why = "20 pixels at 224, as in the paper, in proportion"
        choose("augmentation.padding", round(image_size * 20 / 224), why)
    elif views["padding"] is None:
        views["padding"] = 4


def _on_features(values: dict[str, Any]) -> bool:
    """Whether a private classifier trains on features of length 1 that are computed once."""
    model, augmentation = values["model"], values["augmentation"]
    on_features = model["trainable"] == "classifier" and model["features"] != "raw" and augmentation["augmult"] == 0
    return bool(on_features and values["privacy"] is not None and values["optimizer"]["name"] == "sgd")


def _fill_in_on_features(filling: _Filling, n: int, solved: str) -> None:
    """A hundred updates of all images with momentum: features cost no forward pass, and at q = 1 the
    noise of many updates is that of one (docs/defaults.md).
    """
    choose, target = filling.choose, filling.values["privacy"]["target_epsilon"]
    if solved != "batch_size":
        choose("training.batch_size", n, "all images: features are cheap, and many updates then cost as one")
    if solved != "num_steps":
        choose("training.num_steps", 100, "enough for momentum to average the noise")
    if filling.values["optimizer"]["learning_rate"] is None and target is not None:
        most = 64.0 if filling.values["model"]["name"] in FROM_FORMULA else 16.0
        signal = n * target / 4000
        rate = float(f"{min(max(signal, 0.06), most):.2g}")
        choose("optimizer.learning_rate", rate, f"N epsilon / 4000 with N = {n}, between 0.06 and {most:.0f}")
        for name, value in (("optimizer.momentum", 0.9), ("privacy.clipping_norm", 0.5), ("ema.decay", 0.9)):
            filling.choose_unless_stated(name, value, "goes with that rate")


def _fill_in_ordinary(filling: _Filling, n: int) -> None:
    """Small batches, some epochs and a rate for gradients that nothing bounds."""
    choose, optimizer = filling.choose, filling.values["optimizer"]
    choose("training.batch_size", min(128, n), "as ordinary training has it")
    choose("training.num_steps", math.ceil(10 * n / filling.values["training"]["batch_size"]), "ten epochs")
    if optimizer["name"] == "sgd" and optimizer["learning_rate"] is None:
        choose("optimizer.learning_rate", 0.02, "gradients that are not clipped take a smaller rate")
        filling.choose_unless_stated("optimizer.momentum", 0.9, "goes with that rate")


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

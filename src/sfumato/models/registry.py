"""Builds networks by name: the registry's own, or anybody's "package.module:factory"."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sfumato.errors import InputError
from sfumato.models import lenet, small_cnn, wide_resnet

Factory = Callable[..., nn.Module]

# Each name with its factory and the smallest image size in pixels.
MODELS: dict[str, tuple[Factory, int]] = {
    "small_cnn": (small_cnn.SmallCNN, small_cnn.MIN_SIZE),
    "tanh_cnn": (lenet.TanhCNN, lenet.TANH_CNN_MIN_SIZE),
    "lenet": (lenet.LeNet, lenet.LENET_MIN_SIZE),
    "wide_resnet": (wide_resnet.WideResNet, wide_resnet.MIN_SIZE),
}

# Named by recipes that can be planned and verified, not yet built.
NOT_YET = ("nf_resnet50",)

_SHAPE_KEYS = ("num_classes", "image_size", "channels")


def build(name: str, *, image_size: int, channels: int, num_classes: int, options: Mapping[str, Any] | None = None, seed: int) -> nn.Module:
    """A network with initial weights that depend on `seed` alone.

    The global random state is neither used nor changed.

    Args:
        name: "small_cnn", "tanh_cnn", "lenet", "wide_resnet", or "package.module:factory",
            any callable: it is given `num_classes`, those of `image_size` and `channels`
            that it accepts, and the options, all by keyword.
        image_size: Height and width of the images in pixels.
        channels: Of the images.
        num_classes: Outputs.
        options: The factory's other keyword arguments.
        seed: Of the initial weights.

    Raises:
        InputError: If the name or an option is unknown (the nearest known one is named), the
            images are too small for the model, or the factory cannot be imported or called.
    """
    options = dict(options or {})
    factory, min_size = MODELS[name] if name in MODELS else (_import_factory(name), 1)
    if image_size < min_size:
        raise InputError(
            f"model {name} needs images of at least {min_size}x{min_size} pixels, not {image_size}x{image_size}. "
            "Choose a larger data.image_size, or another model."
        )
    shape = {"num_classes": num_classes, "image_size": image_size, "channels": channels}
    accepted, takes_any = _keywords(factory)
    known = [key for key in accepted if key not in _SHAPE_KEYS]
    for key in options:
        if key in _SHAPE_KEYS:
            raise InputError(f"model {name}: {key} follows from the data and is no option. Remove it from model.options.")
        if key not in known and not takes_any:
            raise InputError(f"model {name} has no option {key}. {_nearest(key, known)}")
    given = {key: value for key, value in shape.items() if key == "num_classes" or key in accepted or takes_any}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = factory(**given, **options)
        except InputError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(f"model {name} cannot be built: {error}. Correct model.options.") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model {name} gave a {type(model).__name__}, not a torch.nn.Module. Return a module from the factory.")
    return model


def _import_factory(name: str) -> Factory:
    if name in NOT_YET:
        raise InputError(f"model {name} cannot be built by this version: recipes that name it are planned and verified. Choose another model.name.")
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(f'model "{name}" is unknown. {_nearest(name, list(MODELS))} Your own is named "package.module:factory".')
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f'model "{name}": {error}. Install that package, or set PYTHONPATH to the folder that holds it.') from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f'model "{name}": {module_name} has no function or class "{attribute}". {_nearest(attribute, names)}')
    return factory


def _keywords(factory: Factory) -> tuple[list[str], bool]:
    """Names that a callable accepts by keyword, and whether it accepts any."""
    parameters = inspect.signature(factory).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
    return names, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if near:
        return f"Did you mean {near[0]}?"
    return f"Known are {', '.join(known)}." if known else "It has none."

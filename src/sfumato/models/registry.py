"""Builds networks by name: the registry's own, those of timm and torchvision, or anybody's
"package.module:factory".

Names and options also come from files that somebody else wrote. A network of the registry takes
from them nothing but numbers of its architecture; a module is imported only if whoever runs the
program trusts it by name.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sfumato.errors import InputError, nearest
from sfumato.models import efficientnet, lenet, libraries, nf_resnet, small_cnn, wide_resnet
from sfumato.nn import fix_groupnorm
from sfumato.torch_internals import tree_leaves

Factory = Callable[..., nn.Module]


@dataclasses.dataclass(frozen=True)
class Network:
    """What may be built from any file.

    Attributes:
        factory: Makes the network; it reads and fetches nothing.
        min_size: The smallest image size in pixels.
        options: The keyword arguments that a recipe may give: architecture alone, whatever else the
            factory takes.
    """

    factory: Factory
    min_size: int = 1
    options: tuple[str, ...] = ()


MODELS: dict[str, Network] = {
    "small_cnn": Network(small_cnn.SmallCNN, small_cnn.MIN_SIZE, ("width", "order")),
    "tanh_cnn": Network(lenet.TanhCNN, lenet.TANH_CNN_MIN_SIZE),
    "lenet": Network(lenet.LeNet, lenet.LENET_MIN_SIZE),
    "wide_resnet": Network(
        wide_resnet.WideResNet,
        wide_resnet.MIN_SIZE,
        ("depth", "width", "order", "normalization", "groups", "weight_standardization"),
    ),
    **{name: Network(factory, nf_resnet.MIN_SIZE, ("skip_init",)) for name, factory in nf_resnet.NETWORKS.items()},
    "efficientnet_lite0": Network(efficientnet.efficientnet_lite0, efficientnet.MIN_SIZE),
}

# No useful network is larger; a file of a few bytes may ask for one that takes all time or memory
# to build.
_LARGEST = {"depth": 1000, "width": 4096, "groups": 4096, "embed_dim": 8192, "num_heads": 1024, "patch_size": 1024}

_SHAPE_KEYS = ("num_classes", "image_size", "channels")
# ASCII alone: two names that look alike are never one, and nothing but an attribute of the module
# itself is reached.
_IMPORTED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*):([A-Za-z_][A-Za-z0-9_]*)")


def build(
    name: str,
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    options: Mapping[str, Any] | None = None,
    fix: str | None = None,
    seed: int,
    trust: Collection[str] = (),
) -> nn.Module:
    """A network with initial weights that depend on `seed` alone.

    The global random states of PyTorch, NumPy and Python are neither used nor changed. A network of
    a module of the user's own is built twice, and both must hold the same.

    Args:
        name: Of `MODELS`, "timm:NAME", "torchvision:NAME", or "package.module:factory",
            any callable: it is given `num_classes`, those of `image_size` and `channels`
            that it accepts, and the options, all by keyword. It may draw by the global generators
            of PyTorch, NumPy and Python.
        image_size: Height and width of the images in pixels.
        channels: Of the images.
        num_classes: Outputs.
        options: The factory's other keyword arguments.
        fix: "groupnorm": batch normalisation is replaced by group normalisation (`fix_groupnorm`).
        seed: Of the initial weights.
        trust: Modules that may be imported, each by its full name: "package" does not include
            "package.module".

    Raises:
        InputError: If a module would be imported that is not trusted, the name or an option is
            unknown (the nearest known one is named), the images are too small for the model, the
            factory cannot be imported or called, or it draws from elsewhere.
    """
    if torch.get_default_dtype() != torch.float32:
        raise InputError(
            f"weights are float32 here, and torch.set_default_dtype says {torch.get_default_dtype()}. Set it back: "
            "torch.set_default_dtype(torch.float32)."
        )
    options = dict(options or {})
    network = _network(name)
    for key, most in _LARGEST.items() if network else ():
        if isinstance(options.get(key), int | float) and not options[key] <= most:
            raise InputError(
                f"model {name}: {key} = {options[key]} is not possible: at most {most}. Correct model.options."
            )
    factory, min_size = (network.factory, network.min_size) if network else (_import_factory(name, trust), 1)
    if image_size < min_size:
        raise InputError(
            f"model {name} needs images of at least {min_size}x{min_size} pixels, not "
            f"{image_size}x{image_size}. Choose a larger data.image_size, or another model."
        )
    shape = {"num_classes": num_classes, "image_size": image_size, "channels": channels}
    accepted, takes_any = _keywords(factory)
    known = list(network.options) if network else [key for key in accepted if key not in _SHAPE_KEYS]
    for key in options:
        if key in _SHAPE_KEYS:
            raise InputError(
                f"model {name}: {key} follows from the data and is no option. Remove it from model.options."
            )
        if key not in known and (network is not None or not takes_any):
            raise InputError(f"model {name} has no option {key}. {nearest(key, known)}")
    given = {key: value for key, value in shape.items() if key == "num_classes" or key in accepted or takes_any}
    unnamed = [key for key in given if key not in accepted and key != "num_classes"]
    make = functools.partial(_made, name, factory, given, options, unnamed, seed)
    model = make()
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model {name} gave a {type(model).__name__}, not a torch.nn.Module. Return a module from the factory."
        )
    if fix == "groupnorm":
        model = fix_groupnorm(model)
    if network is None:
        _refuse_other_draws(name, model, fix_groupnorm(make()) if fix else make())
    # One value repeated gets memory for all of them: it is written to, and read from files.
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not nn.parameter.is_lazy(tensor) and any(
            size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            tensor.data = tensor.data.contiguous()
    return model


def _made(
    name: str, factory: Factory, given: dict[str, Any], options: dict[str, Any], unnamed: list[str], seed: int
) -> Any:
    """What the factory makes; one that takes any keyword and then refuses one of ``unnamed`` is not
    given that.
    """
    try:
        with _seeded(seed):
            return factory(**given, **options)
    except InputError:
        raise
    except Exception as error:  # whatever the code of a factory runs into
        refused = next((key for key in unnamed if f"unexpected keyword argument '{key}'" in str(error)), None)
        if refused is None or refused not in given:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"model {name} cannot be built: {reason}. Correct model.options.") from error
    return _made(name, factory, {key: value for key, value in given.items() if key != refused}, options, unnamed, seed)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within the block the global generators of PyTorch, NumPy and Python draw from `seed`; then
    they are as they were.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed([seed % 2**32, seed >> 32])
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _refuse_other_draws(name: str, model: nn.Module, again: nn.Module) -> None:
    """A model that is built anew, to resume or to evaluate, gets the saved parameters and buffers
    alone: all else must be as it was.
    """
    for (path, one), (_, other) in itertools.zip_longest(_held(model), _held(again), fillvalue=("", None)):
        if (
            one is None
            or other is None
            or one.shape != other.shape
            or not bool(((one == other) | ((one != one) & (other != other))).all())
        ):
            raise InputError(
                f"model {name}: {path or 'what it holds'} is another each time it is built, so "
                "the trained model could not be built again. Draw it by torch (torch.randn and "
                "the like, whose seed is set here), and register it as a buffer."
            )


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes or lie in one, by name."""
    for path, module in model.named_modules():
        for key, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and not is_lazy(leaf):
                    yield f"{path}.{key}".lstrip("."), leaf


def _network(name: str) -> Network | None:
    """What may be built from any file: the registry's own, timm's and torchvision's."""
    if name in MODELS:
        return MODELS[name]
    factory = libraries.factory(name)
    return None if factory is None else Network(factory, 1, libraries.OPTIONS)


def imported_module(name: str) -> str | None:
    """The module that building a model of this name imports; None for what any file may name, and
    for what is no such name.
    """
    if name.partition(":")[0] in libraries.NAMES:
        return None
    match = _IMPORTED.fullmatch(name)
    return match[1] if match else None


def _import_factory(name: str, trust: Collection[str]) -> Factory:
    match = _IMPORTED.fullmatch(name)
    if match is None:
        raise InputError(
            f'model "{name}" is unknown. {nearest(name, list(MODELS))} Networks of libraries are "timm:NAME" '
            'and "torchvision:NAME", your own is "package.module:factory".'
        )
    module_name, attribute = match.groups()
    trusted = {trust} if isinstance(trust, str) else set(trust)
    if module_name not in trusted:
        raise InputError(
            f'model "{name}" would import the module {module_name} and run its code, but a file names it, which may '
            "be a stranger's. "
            f"If you trust that module and all that it imports, add --trust {module_name}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f'model "{name}": {error}. Install that package, or set PYTHONPATH to the folder that holds it.'
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(
            f'model "{name}": {module_name} has no function or class "{attribute}". {nearest(attribute, names)}'
        )
    # What a trusted module merely imported for itself (os.system, torch.hub.load) is not what it
    # offers.
    home = (
        getattr(factory, "__module__", None) if inspect.isroutine(factory) or inspect.isclass(factory) else module_name
    )
    if home not in trusted and not str(home).startswith(f"{module_name}."):
        raise InputError(
            f'model "{name}" comes from the module {home}, not from {module_name}. If you trust that one too, add '
            f"--trust {home}"
        )
    return factory


def _keywords(factory: Factory) -> tuple[list[str], bool]:
    """Names that a callable accepts by keyword, and whether it accepts any."""
    parameters = inspect.signature(factory).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    return names, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

"""Builds networks by name: the registry's own, those of timm and torchvision, or anybody's
"package.module:factory".

Names and options also come from files that somebody else wrote. A network of the registry takes
from them nothing but numbers of its architecture; a module is imported only if whoever runs the
program trusts it by name.
"""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sfumato.errors import InputError, nearest, refusing
from sfumato.models import fixed, libraries, resnets, small
from sfumato.models.layers import fix_groupnorm

Factory = Callable[..., nn.Module]


@dataclasses.dataclass(frozen=True)
class Network:
    """What may be built from any file.

    Attributes:
        factory: Makes the network; it reads and fetches nothing.
        min_size: The smallest image size in pixels.
        options: The keyword arguments that a recipe may give: architecture alone, whatever else the
            factory takes. None: whatever it takes.
    """

    factory: Factory
    min_size: int = 1
    options: tuple[str, ...] | None = None


MODELS: dict[str, Network] = {
    "small_cnn": Network(small.SmallCNN, 8, ("width", "order")),
    "tanh_cnn": Network(small.TanhCNN, 14, ()),
    "lenet": Network(small.LeNet, 12, ()),
    "wide_resnet": Network(
        resnets.WideResNet, 8, ("depth", "width", "order", "normalization", "groups", "weight_standardization")
    ),
    **{name: Network(factory, 32, ("skip_init",)) for name, factory in resnets.NETWORKS.items()},
    "efficientnet_lite0": Network(libraries.efficientnet_lite0, 32, ()),
    "scattering": Network(fixed.scattering, 8, ("J", "mirror")),
    "dictionary": Network(fixed.dictionary, 8, ("mirror",)),
    "scattering+dictionary": Network(fixed.scattering_and_dictionary, 8, ("J", "mirror")),
}

# No useful network is larger; a file of a few bytes may ask for one that takes all time or memory
# to build.
_LARGEST = {"depth": 1000, "width": 4096, "groups": 4096, "embed_dim": 8192, "num_heads": 1024, "J": 5}
_LARGEST |= {"patch_size": 1024}

# ASCII alone: two names that look alike are never one, and nothing but an attribute of the module
# itself is reached.
_IMPORTED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*):([A-Za-z_][A-Za-z0-9_]*)")


class _NothingDrawn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"]
        return args[0] if func in (torch.Tensor.normal_, torch.Tensor.erfinv_) else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def shapes_alone() -> Iterator[None]:
    """Within, a network is built without memory: its tensors have shapes, and no values. To draw these in vain PyTorch
    would import its compiler, which takes a second.
    """
    with torch.device("meta"), _NothingDrawn():
        yield


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

    PyTorch's global random state is as it was before.

    Args:
        name: Of `MODELS`, "timm:NAME", "torchvision:NAME", or "package.module:factory",
            any callable: it is given `num_classes`, those of `image_size` and `channels`
            that it names, and the options, all by keyword. What it draws it draws by PyTorch's global generator.
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
            unknown (the nearest known one is named), the images are too small for the model, or the
            factory cannot be imported or called.
    """
    options = dict(options or {})
    network = MODELS.get(name)
    if network is None:
        factory = libraries.factory(name)
        network = Network(factory, 1, libraries.OPTIONS) if factory else Network(_import_factory(name, trust))
    if image_size < network.min_size:
        raise InputError(
            f"model {name} needs images of at least {network.min_size}x{network.min_size} pixels, not "
            f"{image_size}x{image_size}. Choose a larger data.image_size, or another model."
        )
    shape = {"num_classes": num_classes, "image_size": image_size, "channels": channels}
    accepted = {*inspect.signature(network.factory).parameters, "num_classes"}
    _check_options(name, network, options, shape)
    known = accepted - shape.keys() if network.options is None else network.options
    remedy = f"It takes model.options: {', '.join(sorted(known)) or 'none'}; each must fit the images and the others."
    with (
        refusing(f"model {name} cannot be built", remedy, Exception),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(seed)
        model = network.factory(**{key: value for key, value in shape.items() if key in accepted}, **options)
        if fix == "groupnorm":
            model = fix_groupnorm(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model {name} gave a {type(model).__name__}, not a torch.nn.Module. Return a module from the factory."
        )
    # One value repeated gets memory for all of them: it is written to, and read from files.
    for tensor in [*model.parameters(), *model.buffers()]:
        if not nn.parameter.is_lazy(tensor) and 0 in tensor.stride():
            tensor.data = tensor.data.contiguous()
    return model


def _check_options(name: str, network: Network, options: Mapping[str, Any], shape: Collection[str]) -> None:
    """Refuses what the network does not take, and what takes all time or memory."""
    of_factory = inspect.signature(network.factory).parameters
    kinds = {parameter.kind for parameter in of_factory.values()}
    takes_any = network.options is None and inspect.Parameter.VAR_KEYWORD in kinds
    known = list(of_factory) if network.options is None else network.options
    for key, value in options.items():
        if key in shape:
            raise InputError(f"model {name}: {key} follows from the data and is no option. Remove it.")
        if key not in known and not takes_any:
            raise InputError(f"model {name} has no option {key}. {nearest(key, [*known])}")
        most = _LARGEST.get(key) if network.options is not None else None
        if most is not None and isinstance(value, int | float) and not value <= most:
            raise InputError(f"model {name}: {key} = {value} is not possible: at most {most}. Give less.")
        # "False" would count as true.
        if key in of_factory and isinstance(of_factory[key].default, bool) and isinstance(value, str):
            raise InputError(f"model {name}: {key} = {value!r} is not possible: it is true or false. Give one of them.")


def imported_module(name: str) -> str | None:
    """The module that building a model of this name imports; None for what any file may name, and
    for what is no such name.
    """
    match = _IMPORTED.fullmatch(name)
    return match[1] if match and match[1] not in libraries.NAMES else None


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
            f'model "{name}" would import the module {module_name} and run its code, and the file that names it may be '
            f"a stranger's. If you trust that module and all that it imports, add --trust {module_name}"
        )
    remedy = f'needed for model "{name}": install that package, or set PYTHONPATH to the folder that holds it'
    module = libraries.imported(module_name, remedy)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(
            f'model "{name}": {module_name} has no function or class "{attribute}". {nearest(attribute, names)}'
        )
    # What a trusted module merely imported for itself (os.system, torch.hub.load) is not what it
    # offers to a file that a stranger wrote.
    if inspect.isroutine(factory) or inspect.isclass(factory):
        home = str(factory.__module__)
        if home not in trusted and not home.startswith(f"{module_name}."):
            raise InputError(
                f'model "{name}" comes from the module {home}, not from {module_name}. If you trust that one too, add '
                f"--trust {home}"
            )
    return factory

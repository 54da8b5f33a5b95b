"""Public weights that a network starts from (De et al. 2022, Section 4)."""

import dataclasses
import hashlib
import math
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.config.pretrained import FROM_PACKAGE, FROM_TIMM, PACKAGED
from sfumato.errors import InputError, refusing
from sfumato.models import libraries

# What other tools put around the state of a model.
_WRAPPINGS = "state_dict model model_state_dict net module network state_dict_ema model_ema ema teacher student".split()
# What a damaged or foreign pickle raises.
_DAMAGES = (pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Tensors by name, and a digest of names, types, shapes and values."""

    tensors: dict[str, torch.Tensor]

    @property
    def digest(self) -> str:
        """SHA-256, 64 hexadecimal digits."""
        digest = hashlib.sha256()
        for name, value in sorted(self.tensors.items()):
            array = value.detach().contiguous().cpu()
            digest.update(f"{name}\0{array.dtype}\0{tuple(array.shape)}\0".encode())
            digest.update(array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b"")
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Fitted:
    """How weights met a network.

    Attributes:
        not_given: Tensors of the network that the weights lack, or have in another shape; they keep
            what they were built with.
        not_used: Tensors of the weights that the network lacks.
        adapted: Tensors of the weights that were made for other channels or another image size (`_adapted`).
        new_classifier: Whether the classifier is of other classes or features, and was made anew, as zeros.
    """

    not_given: list[str]
    not_used: list[str]
    adapted: list[str]
    new_classifier: bool

    def lines(self) -> list[str]:
        """What a user should know."""
        out = []
        if self.new_classifier:
            out.append("the classifier is new, and starts at zero: the weights have that of other classes or features")
        for names, what in (
            (self.not_given, "of the model are not in the weights and start as in training from scratch"),
            (self.not_used, "of the weights are not in the model and are not used"),
            (self.adapted, "of the weights are for other channels or image sizes, and are adapted as timm does"),
        ):
            if names:
                shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                out.append(f"{len(names)} tensor(s) {what}: {shown}")
        return out


def read_weights(model_name: str, init_from: str) -> Weights:
    """The weights that a recipe names. Files are read as tensors alone: no code in them is run.

    Args:
        model_name: `model.name` of the recipe.
        init_from: "package"; "timm", its hub; a .safetensors file; a .pth or .pt file of tensors; or a run folder.

    Raises:
        InputError: If there are none, or the file is damaged or holds something else than tensors.
    """
    if init_from == FROM_PACKAGE:
        if model_name not in PACKAGED:
            names = ", ".join(PACKAGED)
            raise InputError(f"no package holds weights of model {model_name}. Those of {names} can be had so.")
        return Weights(libraries.packaged_weights())
    if init_from == FROM_TIMM:
        return Weights(libraries.hub_weights(model_name))
    path = Path(init_from)
    path = path / "model.safetensors" if os.path.isdir(path) else path  # of a name that no file system takes, too
    if not os.path.isfile(path):
        raise InputError(
            f"model.init_from = {init_from!r}: there is no such file. Name a .safetensors or .pth file (a run's recipe "
            f'keeps its name alone, without the folder), a finished run\'s folder, or "{FROM_PACKAGE}".'
        )
    return Weights({name: _as_numbers(path, name, value) for name, value in _read(path).items()})


def _as_numbers(path: Path, name: str, value: torch.Tensor) -> torch.Tensor:
    """The tensor as plain numbers in memory.

    Raises:
        InputError: If it is anything else, or less is in the file than it would be in memory.
    """
    dense = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
    if not dense or value.numel() * value.element_size() > value.untyped_storage().nbytes() or not name.isascii():
        raise InputError(
            f"{path}: tensor {ascii(name)} is sparse, quantised, without numbers, repeats them, or has a name that is "
            "not ASCII. Save plain tensors, by contiguous()."
        )
    return value.detach().resolve_conj().resolve_neg()


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    what = f"{path} holds no tensors that can be read without running its code"
    remedy = "Restore it from a copy, or save the model's state_dict alone, best as .safetensors."
    with refusing(what, remedy, SafetensorError, *_DAMAGES):
        if path.suffix == ".safetensors":
            return load_file(path)
        held: Any = torch.load(path, map_location="cpu", weights_only=True)
    while isinstance(held, dict) and (keys := [key for key in _WRAPPINGS if isinstance(held.get(key), dict)]):
        held = held[keys[0]]
    items = held.items() if isinstance(held, dict) else ()
    tensors = {name: value for name, value in items if isinstance(name, str) and isinstance(value, torch.Tensor)}
    if not tensors:
        raise InputError(f"{path} holds no dictionary of named tensors. Save the model's state_dict.")
    return tensors


@torch.no_grad()
def fit(model: nn.Module, weights: Weights, classifier: str | None) -> Fitted:
    """Copies into a network what has the same name and shape, or can be adapted to it, in place.

    Args:
        model: The network.
        weights: What to copy.
        classifier: Name of the network's classifier, which is set to zero where the weights' is for
            other classes or features (`model.features`: with a centre, or without); None where it has none.

    Raises:
        InputError: If nothing fits, or a tensor holds no finite numbers of the model's kind.
    """
    own, named = model.state_dict(), list(weights.tensors)
    prefix = _prefix(own, weights.tensors)
    given = {name[len(prefix) :]: value for name, value in weights.tensors.items() if name.startswith(prefix)}
    changed = {name: _adapted(name, given[name], own[name].shape) for name in own.keys() & given.keys()}
    given |= (adapted := {name: value for name, value in changed.items() if value is not None})
    found = {name for name, value in own.items() if name in given and given[name].shape == value.shape}
    head = {name for name in own if classifier is not None and name.startswith(f"{classifier}.")}
    given_head = {name for name in given if classifier is not None and name.startswith(f"{classifier}.")}
    new_classifier = bool(head) and not given_head <= head <= found
    if new_classifier:
        found -= head
    if not found - head:
        raise InputError(
            f"not one tensor of the weights fits the model: they are named {', '.join(named[:3])}, ..., and the "
            f"model's {', '.join(list(own)[:3])}, .... Name the network that they were made for."
        )
    for name in found:
        if own[name].is_floating_point() != given[name].is_floating_point():
            theirs, ours = (str(each[name].dtype).removeprefix("torch.") for each in (given, own))
            raise InputError(
                f"tensor {name} of the weights holds {theirs}, the model's {ours}: these are other weights, or "
                "quantised. Save them as float32."
            )
        own[name].copy_(given[name])
        if not own[name].isfinite().all():
            raise InputError(f"tensor {name} of the weights holds values not finite, or too large. Take others.")
    for name in head - found:
        own[name].zero_()
    not_given = [name for name in own if name not in found | head and not name.endswith("num_batches_tracked")]
    used = {prefix + name for name in own}
    return Fitted(not_given, [name for name in named if name not in used], sorted(adapted), new_classifier)


def _adapted(name: str, value: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """Filters of grey images made of those of colour ones, or the other way, and a table of positions for another
    number of patches, as timm's `adapt_input_conv` and `resample_abs_pos_embed` do; None: there is nothing to adapt.
    """
    if value.shape == shape or value.ndim != len(shape) or not value.is_floating_point():
        return None
    same = [one == other for one, other in zip(value.shape, shape, strict=True)]
    if same == [True, False, True, True] and {value.shape[1], shape[1]} == {1, 3}:
        return (value.float().sum(1, keepdim=True) / shape[1]).expand(shape)
    if same != [True, False, True] or "pos" not in name:
        return None
    old, new = math.isqrt(value.shape[1]), math.isqrt(shape[1])
    given, wanted = value.shape[1] - old**2, shape[1] - new**2  # tokens of class and distillation, before the patches
    if not old * new or wanted not in (0, given) or given > 2:
        return None
    patches = value[:, given:].float().transpose(1, 2).unflatten(2, (old, old))
    resized = F.interpolate(patches, size=(new, new), mode="bicubic", antialias=True)
    return torch.cat([value[:, :wanted].float(), resized.flatten(2).transpose(1, 2)], 1)


def _prefix(own: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> str:
    """What other tools put before the names of a network's tensors (module., _orig_mod., backbone.): before most names
    of one shape; of equals the shortest.
    """
    counts = Counter[str]()
    for name, value in tensors.items():
        steps = name.split(".")
        for rest in (".".join(steps[i:]) for i in range(len(steps))):
            if rest in own and own[rest].shape == value.shape:
                counts[name.removesuffix(rest)] += 1
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")

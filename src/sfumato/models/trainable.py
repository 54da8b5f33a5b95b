"""Which parameters of a network train, and the network cut in two at its classifier."""

import copy
import re
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from sfumato.errors import InputError, refusing
from sfumato.models.layers import Classifier, UnitLinear

ANY_NUMBER = "It must take any number of images, one too: flatten(1) keeps a batch of one, squeeze() does not."
"""The remedy for a model that fails on some numbers of images."""


def classifier_name(model: nn.Module, num_classes: int) -> str | None:
    """Name of the final linear layer: the last with one output for each class; None if there is
    none.
    """
    layers = [(name, module) for name, module in model.named_modules() if name and isinstance(module, nn.Linear)]
    return next((name for name, layer in reversed(layers) if layer.out_features == num_classes), None)


def named_classifier(model: nn.Module, num_classes: int) -> str:
    """The same of a model that must have one.

    Raises:
        InputError: If it has none.
    """
    name = classifier_name(model, num_classes)
    if name is None:
        raise InputError(
            f"this model has no final linear layer with {num_classes} outputs, so no classifier. Take --set "
            "'model.trainable=[\"PATTERN\"]', of parameter names, and --set model.features=raw."
        )
    return name


def select_trainable(model: nn.Module, which: str | Sequence[str], num_classes: int) -> None:
    """Freezes every parameter but those that are to train, in place.

    Args:
        model: The network.
        which: "all"; "classifier": the final linear layer; "norms": it, and scales and shifts of
            normalisation layers (Shysheya et al. 2023); "lora": it, and low-rank updates (`add_low_rank`); or regular
            expressions, of which one must match a parameter's whole name.
        num_classes: Outputs.

    Raises:
        InputError: If nothing would train, an expression is none or matches nothing, or the
            classifier cannot be told.
    """
    if which == "all":
        return
    names = [name for name, _ in model.named_parameters()]
    chosen: set[str] = set()
    if which in ("classifier", "norms", "lora"):
        head = named_classifier(model, num_classes)
        chosen = {name for name in names if name.startswith(f"{head}.")}
        if which == "lora":
            chosen |= {name for name in names if name.endswith((".lora_A", ".lora_B"))}
        if which == "norms":
            norms = {path for path, module in model.named_modules() if is_normalization(module)}
            chosen |= {f"{path}.{key}".lstrip(".") for path in norms for key in ("weight", "bias")} & {*names}
    else:
        for pattern in [which] if isinstance(which, str) else which:
            what = f"model.trainable: {pattern!r}"
            with refusing(f"{what} is no regular expression", "Escape brackets and stars.", re.error):
                matched = {name for name in names if re.fullmatch(pattern, name)}
            if not matched:
                raise InputError(
                    f"{what} matches no parameter. They are named {', '.join(names[:4])}, ...: a pattern matches a "
                    'whole name, for example "layer4\\..*".'
                )
            chosen |= matched
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen and parameter.requires_grad)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"model.trainable: the network holds {', '.join(sorted(chosen)[:4])} fixed (requires_grad is False), so "
            "nothing would train. Choose others, or have the factory leave them free."
        )


def is_normalization(module: nn.Module) -> bool:
    """Whether a module normalises: PyTorch's own, its subclasses, and others that are named so."""
    own = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    return isinstance(module, own) or "norm" in type(module).__name__.lower()


def freeze_statistics(model: nn.Module) -> None:
    """Holds every batch normalisation that has statistics in evaluation mode for good, in place.

    Its statistics come with public weights, so that it is a fixed function of each image; scale and
    shift may train.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            kind = type(module)
            module.__class__ = type(kind.__name__, (_Frozen, kind), {})
            module.eval()


class _Frozen(nn.Module):
    """Put before a batch normalisation's own class: it has no training mode."""

    def train(self, mode: bool = True) -> "_Frozen":
        return super().train(False)


def scale_features(model: nn.Module, name: str) -> None:
    """Makes the classifier scale what it is given to length 1, in place; its weights stay, and its centre is zeros."""
    old, (parent, _, last) = model.get_submodule(name), name.rpartition(".")
    if type(old) is not nn.Linear:
        kind = f"{type(old).__name__} at {name!r}"
        raise InputError(f"model.features needs a plain linear classifier, not {kind}. Take --set model.features=raw.")
    new = UnitLinear(old.in_features, old.out_features, old.bias is not None, device="meta")
    new.weight, new.bias = old.weight, old.bias
    new.centre = torch.zeros(old.in_features, device=old.weight.device)
    setattr(model.get_submodule(parent), last, new.train(old.training))


@torch.no_grad()
def centre_features(model: nn.Module, name: str, textures: torch.Tensor) -> None:
    """Sets the centre of the classifier to the mean of features over textures, in place, where the network has batch
    normalisations; else it stays.

    They normalise by the textures' own statistics for that: so each channel has the mean and spread that it had on the
    images that made the weights. By the statistics of those images textures would look like no image of them.
    """
    seen = copy.deepcopy(model).eval()
    norms = [module for module in seen.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.running_mean = norm.running_var = None
    features = _given_to(seen, name, textures) if norms else None
    if features is not None:
        model.get_submodule(name).get_buffer("centre").copy_(F.normalize(features).mean(0))


def _given_to(model: nn.Module, name: str, images: torch.Tensor) -> torch.Tensor | None:
    """What a layer is given last while a network sees images; None: it is not called."""
    seen: list[torch.Tensor] = []

    def keep(_: nn.Module, given: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
        seen.append(given[0] if given else named["input"])

    with model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True):
        model(images)
    return seen[-1] if seen else None


def classifier_of(model: nn.Module, name: str) -> Classifier:
    """The classifier alone, on what `Backbone` gives."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return Classifier(layer, name)


class Backbone(nn.Module):
    """A network without its classifier: from images to the features that the classifier multiplies,
    as the classifier scales them. Always in evaluation mode.

    Raises:
        InputError: If the classifier is not the last thing that the network does.
    """

    def __init__(self, model: nn.Module, name: str, row: torch.Tensor) -> None:
        super().__init__()
        self._model, self._name = model, name
        model.eval()
        failure = f"the model fails on images of shape {tuple(row.shape[1:])} in evaluation mode"
        with refusing(failure, ANY_NUMBER, Exception), torch.no_grad():
            rows = torch.randn(2, *row.shape[1:], device=row.device)
            features = self(rows)
            is_random = not torch.equal(features, self(rows))
            self(rows[:1])
            is_last = features.ndim == 2 and self._ends_there(row)
        if is_random:
            raise InputError(
                "this model draws random numbers in evaluation mode too, so features cannot be computed once. Make "
                "that depend on self.training, as F.dropout(x, training=self.training)."
            )
        if not is_last:
            raise InputError(
                f'model.trainable = "classifier": layer {name!r} is not the last thing that this model does, so '
                "features cannot be computed once. Give patterns of parameter names."
            )

    def _ends_there(self, row: torch.Tensor) -> bool:
        """Whether outputs and gradients are the classifier's own, at made-up weights, small ones and large: given ones
        may be zeros, behind which a scale, a temperature or a limit does not show.
        """
        classifier, generator = classifier_of(self._model, self._name), torch.Generator().manual_seed(0)

        def normals(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(row)

        images = normals(8, *row.shape[1:])
        images[::2] *= 16
        spreads = torch.logspace(-2, 2.5, classifier.layer.out_features).to(row)
        made_up = {
            key: (normals(*value.shape) * spreads.view(-1, *[1] * (value.ndim - 1))).requires_grad_()
            for key, value in classifier.named_parameters()
        }
        features, found = self(images), []  # under the weights that the model has: the made-up ones must not steer them
        with torch.enable_grad():
            for network, given in ((classifier, features), (self._model, images)):
                outputs = functional_call(network, made_up, (given,))
                if not isinstance(outputs, torch.Tensor) or outputs.shape != (8, classifier.layer.out_features):
                    return False
                total = outputs[outputs.isfinite().all(1)].square().sum()
                found.append([outputs, *torch.autograd.grad(total, list(made_up.values()), materialize_grads=True)])
        (one, *grads), (other, *others) = found
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and all(map(torch.allclose, grads, others))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        layer, was_training = self._model.get_submodule(self._name), self._model.training
        features = _given_to(self._model.eval(), self._name, images)
        self._model.train(was_training)
        if features is None:
            raise InputError(
                f"layer {self._name!r}, the last with an output for each class, is not called by this model's forward "
                "pass, so it is no classifier. Give model.trainable as patterns of parameter names."
            )
        return layer.scaled(features) if isinstance(layer, UnitLinear) else features

"""The user's own model, holding other values for a while: shifted, in double precision, and afterwards the very tensors that it had.

A copy of a model will not do for checking it: `copy.deepcopy` drops hooks on parameters. Values as
they are will not do either: behind a head of zeros nothing shows.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# A module's dotted path and the name of one of its parameters or buffers.
Place = tuple[str, str]


@contextmanager
def stand_in(model: nn.Module, dtype: torch.dtype | None, shift_seed: int | None) -> Iterator[None]:
    """Within, every parameter and buffer holds a copy; afterwards its own memory again, whatever happened to the copy.

    Every `.grad` is None within, and what it was afterwards; parameters, buffers and modules that are registered
    within are taken away again, and modes and `requires_grad` are as before.

    Args:
        dtype: Of the copies of floating-point values; None leaves each as it is.
        shift_seed: Moves parameters by a tenth of their spread, by 0.1 where they have none. None: they stay.
    """
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    grads = [parameter.grad for parameter in parameters]
    own = [tensor.data for tensor in tensors]  # the same memory
    trains = [parameter.requires_grad for parameter in parameters]
    modules = list(model.modules())
    modes = [module.training for module in modules]
    registered = [[dict(registry) for registry in _registries(module)] for module in modules]
    generator = torch.Generator().manual_seed(shift_seed or 0)
    try:
        for number, tensor in enumerate(tensors):
            if number < len(parameters):
                tensor.grad = None
            value = tensor.data.clone()
            if shift_seed is not None and number < len(parameters) and value.is_floating_point():
                value = _shifted(value, generator)
            tensor.data = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        yield
    finally:
        for module, mode, before in zip(modules, modes, registered, strict=True):
            module.training = mode
            for registry, entries in zip(_registries(module), before, strict=True):
                _restore(registry, entries)
        for parameter, trainable in zip(parameters, trains, strict=True):
            parameter.grad = None
            parameter.requires_grad_(trainable)
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a model keeps: parameters, frozen ones included, buffers, kept in checkpoints or not, and what of it trains."""

    tensors: dict[Place, torch.Tensor]
    flags: dict[Place, bool]

    @classmethod
    def of(cls, model: nn.Module) -> "Snapshot":
        """Copies of all of it."""
        return cls({place: tensor.detach().clone() for place, tensor in _places(model).items()}, _flags(model))

    def changed(self, model: nn.Module) -> Place | None:
        """The first parameter, buffer or mode that is no longer what it was, came in or is gone; None if all is as it was."""
        now = _places(model)
        for place in [*now, *self.tensors]:
            if place not in now or place not in self.tensors or not same_bits(now[place].detach(), self.tensors[place]):
                return place
        flags = _flags(model)
        return next((place for place in [*flags, *self.flags] if flags.get(place) != self.flags.get(place)), None)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are alike in type, shape and every bit; NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.is_floating_point or one.dtype.is_complex:
        return bool(torch.equal(one.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0)) and torch.equal(one.isnan(), other.isnan()))
    return torch.equal(one, other)


def _places(model: nn.Module) -> dict[Place, torch.Tensor]:
    return {
        (path, name): tensor
        for path, module in model.named_modules()
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    }


def _flags(model: nn.Module) -> dict[Place, bool]:
    flags = {(path, "training"): module.training for path, module in model.named_modules()}
    return flags | {place: tensor.requires_grad for place, tensor in _places(model).items()}


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _restore(registry: dict[str, Any], before: dict[str, Any]) -> None:
    if registry.keys() != before.keys() or any(registry[name] is not tensor for name, tensor in before.items()):
        registry.clear()
        registry.update(before)


def _shifted(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    spread = value.float().std(correction=0) if value.numel() else value.new_zeros(())
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + noise * torch.where(spread > 0, 0.1 * spread, 0.1).to(value)

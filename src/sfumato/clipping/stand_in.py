"""The user's own model, holding other values for a while: shifted, in double precision, and afterwards the very tensors that it had.

A copy of a model will not do for checking it: `copy.deepcopy` drops hooks on parameters. Values as
they are will not do either: behind a head of zeros nothing shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# A module's dotted path and the name of one of its parameters or buffers.
Place = tuple[str, str]


@contextmanager
def stand_in(model: nn.Module, dtype: torch.dtype | None, shift_seed: int | None) -> Iterator[None]:
    """Within, every parameter and buffer holds a copy; afterwards its own memory again, whatever happened to the copy.

    Every `.grad` is None within, and what it was afterwards; parameters and buffers that are registered
    within are taken away again.

    Args:
        dtype: Of the copies of floating-point values; None leaves each as it is.
        shift_seed: Moves parameters by a tenth of their spread, by 0.1 where they have none. None: they stay.
    """
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    grads = [parameter.grad for parameter in parameters]
    own = [tensor.data for tensor in tensors]  # the same memory
    registered = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
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
        for module, its_parameters, its_buffers in registered:
            _restore(module._parameters, its_parameters)
            _restore(module._buffers, its_buffers)
        for parameter in parameters:
            parameter.grad = None
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


def snapshot(model: nn.Module) -> dict[Place, torch.Tensor]:
    """Copies of all parameters, frozen ones included, and of all buffers, kept in checkpoints or not."""
    return {place: tensor.detach().clone() for place, tensor in _places(model).items()}


def changed(model: nn.Module, before: dict[Place, torch.Tensor]) -> Place | None:
    """The first parameter or buffer that is no longer what it was, came in or is gone; None if all is as it was."""
    now = _places(model)
    for place in [*now, *before]:
        if place not in now or place not in before or not same_bits(now[place].detach(), before[place]):
            return place
    return None


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


def _restore(registry: dict, before: dict) -> None:
    if registry.keys() != before.keys() or any(registry[name] is not tensor for name, tensor in before.items()):
        registry.clear()
        registry.update(before)


def _shifted(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    spread = value.float().std(correction=0) if value.numel() else value.new_zeros(())
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + noise * torch.where(spread > 0, 0.1 * spread, 0.1).to(value)

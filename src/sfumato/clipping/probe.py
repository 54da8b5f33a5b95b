"""What a model is tried on before it sees a private image: made-up images and targets, and shifted parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sfumato.torch_internals import tree_leaves

# What makes images of each kind from standard normal values and uniform ones in [0, 1): ordinary
# ones, pixels of eight bits with black areas and equal values, and large ones.
_KINDS = (
    lambda normal, uniform: normal,
    lambda normal, uniform: (256 * (2 * uniform - 1)).clamp(min=0).floor() / 255,
    lambda normal, uniform: 300 * (2 * uniform - 1),
)
# For models that take nothing else: as they come, mostly black, and dark.
_PIXELS = (lambda normal, uniform: uniform, _KINDS[1], lambda normal, uniform: uniform**4)


def made_up_images(
    examples: int, views: int, row: torch.Tensor, seed: int, *, only_pixels: bool = False
) -> torch.Tensor:
    """(examples, views, *one row): examples of different scales, so that what some values hide
    others show.

    Args:
        row: (1, ...): shape, type and device alone are used.
        only_pixels: All values lie between 0 and 1.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (views, *row.shape[1:])
    kinds = _PIXELS if only_pixels else _KINDS
    rows = []
    for example in range(examples):
        if row.is_floating_point():
            normal, uniform = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
            rows.append(kinds[example % len(kinds)](normal, uniform))
        else:
            rows.append(torch.randint(2, shape, generator=generator))
    return torch.stack(rows).to(device=row.device, dtype=row.dtype)


def made_up_targets(
    examples: int, views: int, like: tuple[torch.Tensor, ...], outputs: Any, seed: int
) -> tuple[torch.Tensor, ...]:
    """Targets (examples, views, ...), the same for all views: class numbers where targets are whole numbers, shares
    that sum to 1 where they are not.

    Args:
        like: (0, ...) each: type, shape and device of the targets of one view.
        outputs: Of the model for one row; its second dimension counts classes.
    """
    generator = torch.Generator().manual_seed(seed)
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    classes = leaves[0].shape[1] if len(leaves) == 1 and leaves[0].ndim >= 2 else 2
    targets = []
    for target in like:
        shape = (examples, *target.shape[1:])
        if target.is_floating_point():
            values = torch.rand(shape, generator=generator)
            values = values.softmax(1) if len(shape) > 1 else values
        else:
            values = torch.randint(2 if target.dtype == torch.bool else max(classes, 1), shape, generator=generator)
        values = values.to(device=target.device, dtype=target.dtype)
        targets.append(values[:, None].expand(examples, views, *shape[1:]))
    return tuple(targets)


@contextmanager
def temporary_values(model: nn.Module, dtype: torch.dtype | None, seed: int | None) -> Iterator[None]:
    """Within, the user's own model holds copies of its parameters and buffers and no `.grad`; afterwards its own again.

    A copy of a model will not do: `copy.deepcopy` drops hooks on parameters.

    Args:
        dtype: Of the copies of floating-point values; None leaves each as it is.
        seed: Moves parameters by a tenth of their spread, by 0.1 where they have none: behind a head of zeros nothing
            shows. None: they stay.
    """
    parameters = list(model.parameters())
    parts = [(part, part.training, dict(part._buffers)) for part in model.modules()]
    own = [(each, each.data, each.grad, each.requires_grad) for each in [*parameters, *model.buffers()]]
    generator = torch.Generator().manual_seed(seed or 0)
    try:
        for number, (tensor, data, *_) in enumerate(own):
            tensor.grad = None
            value = data.clone()
            if seed is not None and number < len(parameters) and value.is_floating_point():
                value = shifted(value, generator)
            tensor.data = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        yield
    finally:
        for part, mode, buffers in parts:
            part.training = mode
            part._buffers.update(buffers)
        for tensor, data, grad, trains in own:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(trains).grad = grad


def shifted(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A parameter moved a little."""
    spread = value.float().std(correction=0) if value.numel() else value.new_zeros(())
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + noise * torch.where(spread > 0, 0.1 * spread, 0.1).to(value)


@contextmanager
def random_state_kept(on: torch.Tensor) -> Iterator[None]:
    """Leaves the global random state, of the CPU and of a tensor's device, as it was."""
    with torch.random.fork_rng(devices=[on.device] if on.is_cuda else []):
        yield

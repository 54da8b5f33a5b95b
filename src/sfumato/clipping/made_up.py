"""Images and targets that nobody owns, to try a model and its loss on: a check never sees a private
one.
"""

from typing import Any

import torch

from sfumato.torch_internals import tree_leaves

# What makes images of each kind from standard normal values and uniform ones in [0, 1): ordinary
# ones, pixels of eight bits with black areas and equal values, large ones, and between.
_KINDS = (
    lambda normal, uniform: normal,
    lambda normal, uniform: (256 * (2 * uniform - 1)).clamp(min=0).floor() / 255,
    lambda normal, uniform: 300 * (2 * uniform - 1),
    lambda normal, uniform: 16 * normal,
)
# For models that take nothing else: as they come, mostly black, dark, and few shades.
_PIXELS = (
    lambda normal, uniform: uniform,
    _KINDS[1],
    lambda normal, uniform: uniform**4,
    lambda normal, uniform: (4 * uniform).floor() / 4 + 0.1,
)


def made_up_images(
    examples: int, views: int, row: torch.Tensor, seed: int, *, only_pixels: bool = False
) -> torch.Tensor:
    """(examples, views, *one row): examples of different scales, so that what some values hide
    others show.

    Args:
        row: (1, ...): shape, type and device alone are used.
        only_pixels: All values lie between 0 and 1.1.
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


def made_up_targets(examples: int, like: tuple[torch.Tensor, ...], outputs: Any, seed: int) -> tuple[torch.Tensor, ...]:
    """One target for each example: class numbers where the targets are whole numbers, shares that
    sum to 1 where they are not.

    Args:
        like: (0, ...) each: type, shape and device of the targets.
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
        targets.append(values.to(device=target.device, dtype=target.dtype))
    return tuple(targets)

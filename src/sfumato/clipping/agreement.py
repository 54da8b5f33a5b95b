"""Whether tensors agree: what the law compares by."""

from collections.abc import Sequence
from typing import Any

import torch

from sfumato.torch_internals import tree_leaves

# Gradients shorter than what may be clipped to at all count as none.
SHORTEST = 1e-12


def leaves(outputs: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def rows_agree(together: torch.Tensor, alone: Sequence[torch.Tensor], tolerance: float) -> bool:
    """Whether each row of a batch's output is that row's own output."""
    grown = [dim for dim, (size, own) in enumerate(zip(together.shape, alone[0].shape, strict=False)) if size != own]
    if together.ndim != alone[0].ndim or len(grown) > 1:
        return False
    if not grown:  # the same for whatever batch, or a value of all rows
        return all(difference(together, own) <= tolerance for own in alone)
    (dim,) = grown
    if together.shape[dim] != len(alone) * alone[0].shape[dim]:
        return False
    parts = together.unflatten(dim, (len(alone), -1)).unbind(dim)
    return all(difference(part, own) <= tolerance for part, own in zip(parts, alone, strict=True))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    if one.shape != other.shape:
        return float("inf")
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    if not one.numel():
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def unit_length(norms: torch.Tensor) -> torch.Tensor:
    """What makes gradients of these norms one long, and leaves those of no length short."""
    return 1 / norms.clamp(min=SHORTEST)


def norm_of(values: Any) -> torch.Tensor:
    return torch.stack([value.square().sum() for value in values]).sum().sqrt()


def or_infinite(value: torch.Tensor) -> float:
    return float(value) if bool(value.isfinite()) else float("inf")


def first_line(error: BaseException) -> str:
    """The first words of an error, or its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""One loss for each example, of that example's outputs and targets alone."""

from typing import Any

import torch

from sfumato.clipping.protocol import Loss
from sfumato.torch_internals import tree_flatten, tree_unflatten


class ExampleLosses:
    """Applies a loss to one example's K rows at a time, whatever the loss does with its rows.

    A loss that compares rows (with their mean, with each other's targets, with their number)
    then sees one example's views only, so that no example's loss can depend on another.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        self._vectorised = True  # until it turns out to branch on values

    def __call__(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> torch.Tensor:
        """(m,) losses, each the mean over K views.

        Args:
            outputs: Any nesting of tensors (m, *shape of the model's output for K rows); what
                else is in it goes to the loss as it is.
            targets: Each (m, ...).
        """
        leaves, structure = tree_flatten(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def of_example(*parts: torch.Tensor) -> torch.Tensor:
            own = iter(parts[: len(tensors)])
            rows = tree_unflatten([next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
            repeated = (target.expand(views, *target.shape) for target in parts[len(tensors) :])
            return self._loss_fn(rows, *repeated).mean()

        parts = (*tensors, *targets)
        if self._vectorised:
            try:
                return torch.func.vmap(of_example, randomness="different")(*parts)
            except Exception:  # a mistake in the loss shows in the loop as well
                self._vectorised = False
        return torch.stack([of_example(*example) for example in zip(*parts, strict=True)])

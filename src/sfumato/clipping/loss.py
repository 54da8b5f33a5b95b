"""A user's loss, called with one row at a time: no row can tell what another is."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.func import vmap

from sfumato.clipping.clip import at_least_float32
from sfumato.clipping.protocol import Loss
from sfumato.errors import InputError
from sfumato.torch_internals import tree_flatten, tree_unflatten


def example_losses(
    loss_fn: Loss, outputs: Any, targets: tuple[torch.Tensor, ...], weights: torch.Tensor
) -> torch.Tensor:
    """(m,) losses: of each example, the sum of its K rows' losses times their weights.

    ``loss_fn`` is called through `torch.func.vmap`, with a batch of one row, and returns its loss, of shape () or (1,).

    Args:
        outputs: Any nesting of tensors (m K, *shape of the model's output for one row); what else is in it goes to
            the loss as it is.
        targets: Each (m, K, ...).
        weights: (m, K).
    """
    leaves, structure = tree_flatten(outputs)
    tensors = list(filter(torch.is_tensor, leaves))

    def of_row(*parts: torch.Tensor) -> torch.Tensor:
        own = iter(parts[: len(tensors)])
        row = tree_unflatten([next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
        return one_loss(loss_fn, row, parts[len(tensors) :])

    losses = vmap(of_row)(*tensors, *(target.flatten(0, 1).unsqueeze(1) for target in targets))
    return (at_least_float32(losses).view_as(weights) * weights).sum(1)


def one_loss(loss_fn: Loss, outputs: Any, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """The loss of one row, of shape ().

    Raises:
        InputError: If the loss gives another number of values than one.
    """
    loss = loss_fn(outputs, *targets)
    if not isinstance(loss, torch.Tensor) or loss.shape not in ((), (1,)):
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(
            f"loss_fn gave {shape} for one row, not its loss, of shape () or (1,). It is called with one row at a time."
        )
    return loss.reshape(())

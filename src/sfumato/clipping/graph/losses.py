"""One loss for each example, of that example's outputs and targets alone."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from sfumato.clipping.outputs import is_usual
from sfumato.clipping.protocol import Loss
from sfumato.clipping.user_code import catches
from sfumato.torch_internals import tree_flatten, tree_unflatten


class ExampleLosses:
    """Applies a loss to one example's K rows at a time, whatever the loss does with its rows.

    A loss that compares rows (with their mean, with each other's targets, with their number)
    then sees one example's views only, so that no example's loss can depend on another.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        # An error that one example raises must be no other's to catch.
        self._catches = catches(loss_fn)
        # By its targets: found at the first call with such, which is on made-up images (the law). No private one
        # decides it.
        self._vectorised: dict[Any, bool] = {}

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
            repeated = (target.expand(views, *target.shape).clone() for target in parts[len(tensors) :])
            return self._loss_fn(rows, *repeated).mean()

        parts = (*tensors, *targets)
        kind = tuple((target.shape[1:], target.is_floating_point()) for target in targets)
        if self._catches or self._vectorised.get(kind) is False:
            return torch.stack([of_example(*example) for example in zip(*parts, strict=True)])
        try:
            losses = torch.func.vmap(of_example, randomness="different")(*parts)
        except Exception:  # it branches on values; what else is wrong shows in the loop
            if kind in self._vectorised:
                raise
            self._vectorised[kind] = False
            return self(outputs, targets, views)
        self._vectorised[kind] = True
        return losses


class LossGradients:
    """Losses, and their gradients with respect to the model's outputs.

    In a graph that is being compiled it is one operation, which calls this object whenever the
    graph runs: the loss is the user's, as it is at that time, and a compiled graph holds nothing of
    it. A copy in the graph could not be compared with the loss either: one image at a kink, where
    the two round to different sides, would send all others of its microbatch to other rounding.

    Args:
        losses: Of the user's loss.
        output: From the tensors that the model returned, (m, ...) each, to what it returned.
    """

    def __init__(self, losses: ExampleLosses, output: Callable[[list[torch.Tensor]], Any]) -> None:
        self._losses, self._output = losses, output
        self._number = next(_numbers)
        _known[self._number] = self

    def __call__(
        self, outputs: list[torch.Tensor], targets: tuple[torch.Tensor, ...], views: int
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """(m,) losses, and for each output the gradient of their sum; None for whole numbers."""
        floats = [output.is_floating_point() for output in outputs]
        losses, *found = torch.ops.sfumato.loss_gradients(
            [output.detach() for output in outputs], list(targets), self._number, views
        )
        gradients = iter(found)
        return losses, [next(gradients) if is_float else None for is_float in floats]

    def compute(self, outputs: list[torch.Tensor], targets: list[torch.Tensor], views: int) -> list[torch.Tensor]:
        """The operation itself: losses, and the gradients of those outputs that have one."""
        with torch.enable_grad():
            own = [output.detach().requires_grad_(output.is_floating_point()) for output in outputs]
            # The loss sees none of an example whose outputs are not finite (less than infinite may be meant: a
            # masked class): some losses raise at it, others look for it. A copy, for it may write to what it is given.
            usual = is_usual(own)
            shown = [_where(usual, value, 0.0) if value.requires_grad else value.clone() for value in own]
            losses = _where(usual, self._losses(self._output(shown), tuple(targets), views), torch.nan)
            floats = [output for output in own if output.requires_grad]
            gradients: list[torch.Tensor | None] = [None] * len(floats)
            if floats and losses.requires_grad:
                gradients = list(torch.autograd.grad(losses.sum(), floats, allow_unused=True))
        made = _made(outputs)
        made[0].copy_(losses.detach())
        for into, gradient in zip(made[1:], gradients, strict=True):
            if gradient is not None:
                into.copy_(gradient)
        return made


def _where(condition: torch.Tensor, value: torch.Tensor, other: float) -> torch.Tensor:
    return torch.where(condition.view(-1, *[1] * (value.ndim - 1)), value, other)


_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, LossGradients] = weakref.WeakValueDictionary()
_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)
# By hand, since `torch.library.custom_op` lets nothing be differentiated within.
_library = torch.library.Library("sfumato", "FRAGMENT")
_library.define("loss_gradients(Tensor[] outputs, Tensor[] targets, int number, int views) -> Tensor[]")


@contextmanager
def rehearsing() -> Iterator[None]:
    """Inside, the operation calls no loss. A compiled graph is looked at by PyTorch when it runs
    first, in a way in which no loss can be vectorised.
    """
    token = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(token)


def _loss_gradients(
    outputs: list[torch.Tensor], targets: list[torch.Tensor], number: int, views: int
) -> list[torch.Tensor]:
    return _made(outputs) if _rehearsing.get() else _known[number].compute(outputs, targets, views)


@torch.library.register_fake("sfumato::loss_gradients", lib=_library)
def _(outputs: list[torch.Tensor], targets: list[torch.Tensor], number: int, views: int) -> list[torch.Tensor]:
    return _made(outputs)


_library.impl("loss_gradients", _loss_gradients, "CompositeExplicitAutograd")


def _made(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the operation gives, filled with zeros: a graph is compiled for these shapes, types and
    strides.
    """
    floats = [output for output in outputs if output.is_floating_point()]
    dtype = torch.float64 if any(output.dtype == torch.float64 for output in floats) else torch.float32
    losses = outputs[0].new_zeros(len(outputs[0]), dtype=dtype)
    return [losses, *(output.new_zeros(output.shape) for output in floats)]

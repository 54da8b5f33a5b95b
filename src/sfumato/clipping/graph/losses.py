"""The losses of a microbatch as one operation of its graph."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from sfumato.clipping.loss import ExampleLosses
from sfumato.clipping.outputs import tensors_of


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
        own = [output.detach() for output in outputs]
        returned = self._output(own)
        losses, gradients = self._losses(returned, tuple(targets), views)
        made = _made(outputs)
        found: list[torch.Tensor] = []
        for output in (output for output in own if output.is_floating_point()):
            # A model may return one tensor twice.
            same = [gradient for leaf, gradient in zip(tensors_of(returned), gradients, strict=True) if leaf is output]
            found.append(torch.stack([gradient for gradient in same if gradient is not None]).sum(0))
        for into, value in zip(made, [losses, *found], strict=True):
            into.copy_(value)
        return made


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

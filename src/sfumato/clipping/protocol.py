"""What every engine is: one way of summing the clipped gradients of a microbatch."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sfumato.clipping.loss import ExampleLosses

Loss = Callable[..., torch.Tensor]
# From (m,) gradient norms to what each gradient is multiplied by; what is compiled for one serves
# all that equal it.
Coefficient = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A microbatch of m examples with K views each.

    Attributes:
        inputs: (m, K, ...).
        targets: Each (m, ...): one for each example.
        is_real: (m,): False for padding, whose norms and losses say nothing.
        seeds: (m, K, 2), of the random numbers inside the model (`sfumato.clipping.draws`); None:
            it draws none.
    """

    inputs: torch.Tensor
    targets: tuple[torch.Tensor, ...]
    is_real: torch.Tensor
    seeds: torch.Tensor | None

    def first(self, count: int) -> "Batch":
        """The first examples alone."""
        return self.like(tuple(tensor[:count] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in an order that `like` knows."""
        return (self.inputs, self.is_real, *self.targets, *([] if self.seeds is None else [self.seeds]))

    def like(self, tensors: tuple[torch.Tensor, ...]) -> "Batch":
        """A batch of such tensors."""
        inputs, is_real, *rest = tensors
        targets = tuple(rest[: len(self.targets)])
        return Batch(inputs, targets, is_real, rest[-1] if self.seeds is not None else None)


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """What `sfumato.clipping.clipped_grad` computes for one batch of B examples.

    Attributes:
        grad_sum: Each trainable parameter's name, in the model's order -> sum of the clipped
            gradients, shaped like the parameter, in float32 (float64 for float64 parameters). Safe
            to release only after noise of `sensitivity` times sigma has been added.
        grad_norms: (B,) L2 norms before clipping, what float32 roundings may hide included
            (docs/engine.md); not private. Zero at padding.
        losses: (B,) losses, averaged over an example's views; not private. Zero at padding.
        sensitivity: How far one example moves the sum, in L2 norm: what noise multiplies.
    """

    grad_sum: dict[str, torch.Tensor]
    grad_norms: torch.Tensor
    losses: torch.Tensor
    sensitivity: float = 1.0


def add_to(total: dict[str, torch.Tensor], part: dict[str, torch.Tensor]) -> None:
    """Adds one sum to another that begins as {}. Writes into no tensor: autograd gives one and the
    same to both parameters of a + b.
    """
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this machine, has no memory left."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


class Engine(ABC):
    """Sums clipped per-example gradients of one model; made from a model, a loss, one input and
    settings of speed.

    Attributes:
        methods: How it computes, as far as that decides speed and rounding; empty where there is no
            choice.
        losses: Of the examples, and their gradients by the model's outputs.
        draw_dims: For each draw of random numbers inside the model, in order, the dimension that
            counts rows.
        parallel: Whether several threads may use it at once, and find the same whoever comes first.
        rounds_by: How far its gradients may lie from those that it gives `plainly`, relative to
            their norm; 0 if it knows nothing else.
        compiles: Whether a microbatch is one compiled graph.
    """

    methods: dict[str, str]
    losses: "ExampleLosses"
    compiles = False
    draw_dims: tuple[int, ...] = ()
    parallel = False
    rounds_by = 0.0

    def plainly(self) -> AbstractContextManager[None]:
        """Within, it computes operation by operation in the precision of what it is given."""
        return nullcontext()

    def choose_methods(self, batch: Batch) -> None:  # noqa: B027  (most have no choice)
        """Settles how to compute, by trying it on a made-up batch as large as a microbatch will be."""

    def parameters_fixed(self) -> AbstractContextManager[None]:
        """Inside, what is computed of parameters and buffers alone may be computed once."""
        return nullcontext()

    def parameters_free(self) -> AbstractContextManager[None]:
        """Inside, parameters may change from call to call, whatever `parameters_fixed` around it
        says.

        Nothing that was computed of them is kept, from before, within or after.
        """
        return nullcontext()

    @abstractmethod
    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """The sum of each real example's coefficient(norm) times its gradient, in tensors that
        share no memory.

        An example whose norm or loss is not finite adds exactly zero.
        """

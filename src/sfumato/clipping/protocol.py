"""What every engine is: one way of summing the clipped gradients of a microbatch."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

Loss = Callable[..., torch.Tensor]
# From (m,) gradient norms to what each gradient is multiplied by.
Coefficient = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A microbatch of m examples with K views each.

    Attributes:
        inputs: (m, K, ...).
        targets: Each (m, K, ...): one for each view.
        weights: (m, K): an example's gradient is the sum of its views' times these; 1/K: their mean.
        is_real: (m,): False for padding, whose norms and losses say nothing.
        seeds: (m, K, 2), of the random numbers inside the model (`sfumato.clipping.random_layers`); None:
            it draws none.
        draw_dims: For each draw of random numbers inside the model, in order, the dimension that counts rows.
    """

    inputs: torch.Tensor
    targets: tuple[torch.Tensor, ...]
    weights: torch.Tensor
    is_real: torch.Tensor
    seeds: torch.Tensor | None = None
    draw_dims: tuple[int, ...] = ()

    def take(self, examples: torch.Tensor | slice) -> "Batch":
        """These of the examples."""
        return self.like(tuple(tensor[examples] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in an order that `like` knows."""
        seeds = () if self.seeds is None else (self.seeds,)
        return (self.inputs, self.weights, self.is_real, *self.targets, *seeds)

    def like(self, tensors: tuple[torch.Tensor, ...]) -> "Batch":
        """A batch of such tensors."""
        inputs, weights, is_real, *rest = tensors
        targets = tuple(rest[: len(self.targets)])
        seeds = rest[-1] if self.seeds is not None else None
        return Batch(inputs, targets, weights, is_real, seeds, self.draw_dims)


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
    sensitivity: float = math.nan


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this machine, has no memory left."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


class Engine(ABC):
    """Sums clipped per-example gradients of one model; made from a model, a loss, one input and
    settings of speed.

    Attributes:
        methods: How it computes, as far as that decides speed and rounding; empty where there is no
            choice.
        parallel: Whether several threads may use it at once.
    """

    methods: dict[str, str]
    parallel = False

    def choose_methods(self, batch: Batch) -> None:  # noqa: B027  (most have no choice)
        """Settles how to compute, by trying it on a made-up batch as large as a microbatch will be."""

    def evaluate(self) -> Any:
        """What depends on parameters and buffers alone, as they are: computed once for all microbatches of a call."""
        return None

    @abstractmethod
    def clipped_sum(self, coefficient: Coefficient, evaluated: Any, batch: Batch) -> ClippedGrad:
        """The sum of each real example's coefficient(norm) times its gradient, in tensors that
        share no memory.

        An example whose norm or loss is not finite adds exactly zero.

        Args:
            evaluated: From `evaluate`, at the present parameters.
        """

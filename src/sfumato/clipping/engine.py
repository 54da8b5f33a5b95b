"""What every engine is: one way of summing the clipped gradients of a microbatch."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Loss = Callable[..., torch.Tensor]
# From (m,) gradient norms to what each gradient is multiplied by.
Coefficient = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """What `sfumato.clipping.clipped_grad` computes for one batch of B examples.

    Attributes:
        grad_sum: Each trainable parameter's name, in the model's order -> sum of the clipped gradients, shaped
            like the parameter, in float32 (float64 for float64 parameters). Safe to
            release only after noise of `sensitivity` times sigma has been added.
        grad_norms: (B,) L2 norms before clipping, what float32 roundings may hide included (docs/engine.md); not private. Zero at padding.
        losses: (B,) losses, averaged over an example's views; not private. Zero at padding.
    """

    grad_sum: dict[str, torch.Tensor]
    grad_norms: torch.Tensor
    losses: torch.Tensor


def add_to(total: dict[str, torch.Tensor], part: dict[str, torch.Tensor]) -> None:
    """Adds one sum to another that begins as {}. Writes into no tensor: autograd gives one and the same to both parameters of a + b."""
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value


class Engine(ABC):
    """Sums clipped per-example gradients of one model; made from a model, a loss, one input and recorded methods.

    Attributes:
        methods: How it computes, as far as that decides speed and rounding; empty where there is no choice.
        parallel: Whether several threads may use it at once, and find the same whoever comes first.
    """

    methods: dict[str, str]
    parallel = False

    def parameters_fixed(self) -> AbstractContextManager[None]:
        """Inside, what is computed of parameters and buffers alone may be computed once."""
        return nullcontext()

    @abstractmethod
    def clipped_sum(self, coefficient: Coefficient, inputs: torch.Tensor, targets: tuple[torch.Tensor, ...], is_real: torch.Tensor) -> ClippedGrad:
        """The sum of each real example's coefficient(norm) times its gradient, in tensors that share no memory.

        An example whose norm or loss is not finite adds exactly zero.

        Args:
            inputs: (m, K, ...): K views of m examples.
            targets: Each (m, ...): one for each example.
            is_real: (m,): False for padding, whose norms and losses say nothing.
        """

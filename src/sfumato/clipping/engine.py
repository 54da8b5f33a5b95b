"""What every engine is: one way of summing the clipped gradients of a microbatch."""

from collections.abc import Callable
from typing import Protocol

import torch

Loss = Callable[..., torch.Tensor]
# From (m,) gradient norms to what each gradient is multiplied by.
Coefficient = Callable[[torch.Tensor], torch.Tensor]


class Engine(Protocol):
    """Sums clipped per-example gradients of one model; made from a model, a loss, one input and recorded methods.

    Attributes:
        methods: How it computes, as far as that decides speed and rounding; empty where there is no choice.
    """

    methods: dict[str, str]

    def accumulate(
        self,
        coefficient: Coefficient,
        inputs: torch.Tensor,
        targets: tuple[torch.Tensor, ...],
        is_real: torch.Tensor,
        grad_sum: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds each real example's coefficient(norm) times its gradient to `grad_sum`, in place.

        An example whose norm or loss is not finite adds exactly zero.

        Args:
            inputs: (m, K, ...): K views of m examples.
            targets: Each (m, ...): one for each example.
            is_real: (m,): False for padding.
            grad_sum: Each trainable parameter's name -> the sum so far, float32 at least.

        Returns:
            The gradient norms and the losses, both (m,).
        """
        ...

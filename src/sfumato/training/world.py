"""The processes that train one model together. Today there is one; the loop is written for any number."""

from collections.abc import Callable
from typing import TypeVar

import torch

Value = TypeVar("Value")


class World:
    """One process: it has every share, its sums are the sums, and what it computes is the same for all."""

    def share(self, randomness: Value) -> Value:
        """This process's part of the one global sample."""
        return randomness

    def sum(self, grad_sum: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sum over all processes of their clipped sums."""
        return grad_sum

    def same(self, compute: Callable[[], Value]) -> Value:
        """What the first process computes, in all of them: noise is drawn once."""
        return compute()

"""Conditions on values: looked at at once, or, in a graph that is being compiled, taken for granted
and reported.

A compiled graph cannot branch on what it computes. It takes the common way, and returns whether
everything that it assumed was so; where it was not, its caller computes the microbatch again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_recorded: ContextVar[list[torch.Tensor] | None] = ContextVar("recorded", default=None)


def guard(condition: torch.Tensor) -> bool:
    """Whether a condition holds; True in a graph that is being compiled, which then returns the
    condition.
    """
    recorded = _recorded.get()
    if recorded is None:
        return bool(condition)
    recorded.append(condition)
    return True


def is_recording() -> bool:
    """Whether a graph is being compiled."""
    return _recorded.get() is not None


@contextmanager
def recording() -> Iterator[list[torch.Tensor]]:
    """Inside, nothing branches; what is assumed is collected."""
    conditions: list[torch.Tensor] = []
    token = _recorded.set(conditions)
    try:
        yield conditions
    finally:
        _recorded.reset(token)

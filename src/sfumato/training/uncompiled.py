"""Calls that `torch.compile` leaves as they are written."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(call: Callable[P, T]) -> Callable[P, T]:
    """The same function, of which nothing is compiled where a compiled function calls it.

    Else `torch.compile` takes apart what is called: files, locks, and NumPy's arithmetic on random bits.
    """

    @functools.wraps(call)
    def as_written(*args: P.args, **kwargs: P.kwargs) -> T:
        # Not imported here, which takes 0.8 s: a program that compiles has done so. While another thread does, or the
        # call that a signal's handler interrupted, the module is there and has no `disable` yet; nothing is compiled.
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        return (call if disable is None else disable(call))(*args, **kwargs)

    return as_written

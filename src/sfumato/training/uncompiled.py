"""Calls that `torch.compile` leaves as they are written."""

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(call: Callable[P, T]) -> Callable[P, T]:
    """The same function, to be called at once: nothing of it is compiled, though a compiled function may call it.

    Else `torch.compile` takes apart what is called: files, locks, and NumPy's arithmetic on random bits.
    """
    # Not imported here, which takes 0.8 s: a program that compiles has done so. While another thread does, or the call
    # that a signal's handler interrupted, the module is there and has no `disable` yet; nothing is compiled then.
    disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
    return call if disable is None else disable(call)

"""The promise that a loss is a function of its arguments alone."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from sfumato.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])
_pure: "weakref.WeakValueDictionary[tuple[int, int], Any]" = weakref.WeakValueDictionary()
"""By function and object, what lives as long as the promise."""


def pure(loss_fn: F) -> F:
    """Promises that a loss is a function of its arguments alone, now and later: what it gives for one
    image depends on no other image, no earlier call and nothing that changes.

    The guarantee of `clipped_grad` rests on that promise where the loss cannot be written down as a
    graph. Where it can, the promise spares that a new graph is made at every call (10 to 40 ms).

    A method that is promised in the body of its class is promised for all objects of that class; one
    of an object for that object alone.

    Returns:
        The same object, so that it can be a decorator.
    """
    owner = getattr(loss_fn, "__self__", None)
    held = loss_fn if owner is None else owner
    try:
        # By identity: an attribute would be copied by functools.wraps.
        _pure[_key(loss_fn)] = held
    except TypeError:  # no weak reference to an object with slots
        raise InputError(f"a {type(held).__name__} cannot be marked. Wrap it in a function.") from None
    return loss_fn


def _key(loss_fn: Any) -> tuple[int, int]:
    """A bound method is another object at each look."""
    owner = getattr(loss_fn, "__self__", None)
    return id(getattr(loss_fn, "__func__", loss_fn)), 0 if owner is None else id(owner)


def is_promised(loss_fn: Any) -> bool:
    """Whether `pure` was called for it, or for its method in the body of the class."""
    function = getattr(loss_fn, "__func__", loss_fn)
    return _key(loss_fn) in _pure or _pure.get((id(function), 0)) is function

"""How often Python looks for objects that are garbage by reference to each other.

Imports and traces make half a million objects that stay. Python looks through them again and again while they are
made: a sixth of the computing of a short run. Steps make few objects, and a model of the user's own may leave large
tensors in a circle, so there Python collects as often as it did before.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

_RARELY = 100_000
"""Objects made, less those freed, between two looks."""

_lock = threading.Lock()
_inside: list[int] = []
_usual = gc.get_threshold()


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Within the block, or the function that it decorates, Python looks rarely: for imports and traces."""
    with _collecting(_RARELY):
        yield


@contextlib.contextmanager
def collecting_usually() -> Iterator[None]:
    """Within the block Python looks as often as before the outermost block: for steps."""
    with _collecting(0):
        yield


@contextlib.contextmanager
def _collecting(objects: int) -> Iterator[None]:
    """The threshold of the block, 0: the usual one; it holds for all threads until the last has left its block."""
    global _usual
    with _lock:
        if not _inside:
            _usual = gc.get_threshold()
        _inside.append(objects)
        _set(objects)
    try:
        yield
    finally:
        with _lock:
            _inside.remove(objects)
            _set(_inside[-1] if _inside else 0)


def _set(objects: int) -> None:
    first, *others = _usual
    if first:  # 0: somebody has switched it off
        gc.set_threshold(max(first, objects), *others)

"""Whether a loss changes something that it leads to when it is called: a counter would tell of images."""

import collections
import functools
import types
from typing import Any

import torch

_MOST = 5000
"""Values that are looked at for counters."""


def counts_of(loss_fn: Any) -> dict[str, str]:
    """Plain values that a loss leads to and may count in: by attributes, enclosing variables, the
    globals that it names, partials and containers. Calls of a loss are no steps: it is called to be
    traced.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    waiting: collections.deque[tuple[str, Any]] = collections.deque([("", loss_fn)])
    while waiting and len(seen) < _MOST:
        path, value = waiting.popleft()
        if isinstance(value, (bool, int, float, str)):
            found[path] = repr(value)
        elif id(value) not in seen:
            seen.add(id(value))
            waiting.extend((f"{path}.{name}".lstrip("."), part) for name, part in _parts_of(value))
    return found


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    """What a value leads to, by name."""
    if isinstance(value, (torch.Tensor, type, types.ModuleType, types.BuiltinFunctionType)):
        return []
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] in ("torch", "sfumato"):
            return []
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        parts = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
        named = ((name, value.__globals__.get(name)) for name in value.__code__.co_names)
        return [*parts, *named, *((f"default {i}", part) for i, part in enumerate(value.__defaults__ or ()))]
    if isinstance(value, functools.partial):
        return [("", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, dict):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [(str(number), part) for number, part in enumerate(value)]
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name)) for name in slots)]

"""What a function keeps between two calls, put back: attributes, variables, lists, dictionaries,
tensors.
"""

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from sfumato.errors import InputError
from sfumato.torch_internals import version

_MOST = 2_000
"""Values that are looked at; what lies behind more is not put back."""
_LARGEST = 2**20
"""Larger tensors are not copied: one that changes is refused."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType)
# Their objects hold nothing that a loss keeps.
_LIBRARIES = ("torch", "numpy", "builtins", "logging", "threading", "re", "pathlib", "random", "warnings", "typing")


class Kept:
    """What a function holds now, as far as it is found: by its object's attributes, its enclosing
    variables, the globals that it names, through lists, dictionaries, sets, helper objects and
    functions.

    Args:
        function: Any callable.
    """

    def __init__(self, function: Any) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # so that no identity is given to something else
        self._contents: list[tuple[Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor | None, int | None]] = []
        waiting = collections.deque([function])
        while waiting and len(self._seen) < _MOST:
            value = waiting.popleft()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._alive.append(value)
            waiting.extend(self._look(value))

    def restore(self) -> None:
        """Puts all of it back.

        Raises:
            InputError: If a large tensor was written to.
        """
        for now, before in self._contents:
            if isinstance(now, list):
                if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                    now[:] = before
            elif isinstance(now, (set, collections.deque)):
                if now != before:
                    now.clear()
                    now.update(before) if isinstance(now, set) else now.extend(before)
            elif now.keys() != before.keys() or any(now[key] is not before[key] for key in before):
                now.clear()
                now.update(before)
        for cell, content in self._cells:
            if _content(cell) is not content:
                cell.cell_contents = content
        for module, name, content in self._globals:
            if module.get(name) is not content:
                module[name] = content
        for tensor, held, number in self._tensors:
            if version(tensor) == number:
                continue
            if held is None:
                raise InputError(
                    f"loss_fn writes to a tensor of shape {tuple(tensor.shape)} that it keeps, so that what one image "
                    "gives depends on the images before it. Keep that outside of the loss."
                )
            with torch.no_grad():
                tensor.copy_(held)

    def _look(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            small = value.numel() <= _LARGEST
            self._tensors.append((value, value.detach().clone() if small else None, version(value)))
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, types.FunctionType):
            yield from self._look_at_function(value)
        elif isinstance(value, dict):
            self._contents.append((value, dict(value)))
            yield from value.values()
        elif isinstance(value, (list, set, collections.deque)):
            self._contents.append((value, value.copy()))
            yield from value
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        elif isinstance(value, torch.nn.Module) or type(value).__module__.partition(".")[0] not in _LIBRARIES:
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self._contents.append((attributes, dict(attributes)))
                yield from attributes.values()
            yield from _methods(type(value))

    def _look_at_function(self, function: types.FunctionType) -> Iterator[Any]:
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return
        for cell in function.__closure__ or ():
            self._cells.append((cell, _content(cell)))
            yield _content(cell)
        self._contents.append((function.__dict__, dict(function.__dict__)))
        yield from function.__dict__.values()
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        for code in _codes(function.__code__):
            for name in code.co_names:
                if name in function.__globals__:
                    content = function.__globals__[name]
                    self._globals.append((function.__globals__, name, content))
                    yield content


def _methods(kind: type) -> Iterator[Any]:
    """The functions of a class, in which globals are named."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            yield from (value for value in vars(base).values() if isinstance(value, types.FunctionType))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None

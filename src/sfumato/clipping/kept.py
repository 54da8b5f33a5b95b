"""What a function keeps between two calls, put back: attributes, variables, lists, dictionaries,
tensors.
"""

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from sfumato.clipping.stand_in import same_bits
from sfumato.errors import InputError
from sfumato.torch_internals import version

_MOST = 20_000
"""Values that are looked at."""
_LARGEST = 2**20
"""Larger tensors are not copied: one that changes is refused."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType)
# Their objects hold nothing that a loss keeps.
_LIBRARIES = ("torch", "numpy", "builtins", "logging", "threading", "re", "pathlib", "random", "warnings", "typing")


class Kept:
    """What a function holds now, as far as it is found: by its object's attributes, its enclosing
    variables, the globals that it names, through lists, dictionaries, sets, helper objects and
    functions.

    Attributes:
        is_complete: Whether all of it was looked at.

    Args:
        function: Any callable.
    """

    def __init__(self, function: Any) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # so that no identity is given to something else
        self._contents: list[tuple[Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        # Each with its own memory, a copy of what it holds, and how often it was written to.
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int | None]] = []
        waiting = collections.deque([function])
        while waiting and len(self._seen) < _MOST:
            value = waiting.popleft()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            if isinstance(value, (tuple, frozenset)) and all(isinstance(entry, _PLAIN) for entry in value):
                continue  # the paths and labels of a data set, say
            self._seen.add(id(value))
            self._alive.append(value)
            waiting.extend(self._look(value))
        self.is_complete = not waiting

    def require_all(self) -> None:
        """Raises InputError where there is more than is looked at."""
        if not self.is_complete:
            raise InputError(
                f"loss_fn leads to more than {_MOST} values, more than can be put back after each image. Make it a "
                "function of its arguments, apart from the rest of the training code."
            )

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
                if list(map(id, now)) != list(map(id, before)):
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
        for holder, name, content in self._slots:
            if getattr(holder, name, None) is not content:
                object.__setattr__(holder, name, content)
        for tensor, own, held, number in self._tensors:
            if number is not None:
                tensor.data = own  # another may have been put in its place
            # Writes to `.data` are not counted, so the bits themselves are compared.
            if held is not None and not same_bits(tensor.detach(), held):
                with torch.inference_mode(number is None), torch.no_grad():
                    tensor.copy_(held)
            elif held is None and version(tensor) != number:
                raise InputError(
                    f"loss_fn writes to a tensor of shape {tuple(tensor.shape)} that it keeps, so that what one image "
                    "gives depends on the images before it. Keep that outside of the loss."
                )

    def _look(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            small = value.numel() <= _LARGEST
            held = value.detach().clone() if small else None
            self._tensors.append((value, value.data, held, version(value)))
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, types.FunctionType):
            yield from self._look_at_function(value)
        elif isinstance(value, dict):
            self._contents.append((value, dict(value)))
            yield from value.values()
            yield getattr(value, "__dict__", None)
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
            for kind in type(value).__mro__:
                slots = vars(kind).get("__slots__", ())
                for name in [slots] if isinstance(slots, str) else slots:
                    content = getattr(value, name, None)
                    if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                        self._slots.append((value, name, content))
                        yield content
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
            for value in vars(base).values():
                if isinstance(value, property):
                    yield value.fget
                else:
                    yield getattr(value, "__func__", value) if callable(value) or hasattr(value, "__func__") else None


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

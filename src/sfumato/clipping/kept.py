"""What a function keeps between two calls, put back: attributes, variables, lists, dictionaries,
tensors.
"""

import collections
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from sfumato.clipping.stand_in import same_bits
from sfumato.errors import InputError
from sfumato.torch_internals import version

_MOST = 20_000
"""Values that are looked at."""
_LARGEST = 2**20
"""Larger tensors are compared once a microbatch, not after each example: one that changed is refused."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), types.ModuleType, types.BuiltinFunctionType)
# Their objects, functions and classes hold nothing that a loss keeps.
_LIBRARIES = frozenset(
    "torch numpy builtins logging threading re pathlib random warnings typing sfumato collections functools abc "
    "contextlib enum dataclasses".split()
)
_MISSING = object()


class Kept:
    """What a function holds now, as far as it is found: by its object's attributes, its enclosing
    variables, the globals that it names, through lists, dictionaries, sets, helper objects, classes
    and functions.

    A second line of defence: no list of the places in which Python code can keep something is
    complete (docs/engine.md).

    Attributes:
        is_complete: Whether all that was found was looked at.

    Args:
        function: Any callable.
    """

    def __init__(self, function: Any) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # so that no identity is given to something else
        self._contents: list[tuple[Any, Any]] = []
        # Each with how it is read, how it is set, and what it was: compared by identity, and by value.
        self._places: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []
        self._states: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []
        # Each with its own memory, a copy of what it holds, and how often it was written to.
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int | None]] = []
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
        """Puts all of it back but what large tensors hold.

        Raises:
            InputError: If a large tensor was written to, as far as PyTorch counts that.
        """
        for now, before in self._contents:
            if isinstance(now, list):
                if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                    now[:] = before
            elif isinstance(now, (set, collections.deque)):
                if list(map(id, now)) != list(map(id, before)):
                    now.clear()
                    now.update(before) if isinstance(now, set) else now.extend(before)
            elif list(now) != list(before) or any(now[key] is not before[key] for key in before):
                now.clear()
                now.update(before)
        for read, write, before in self._places:
            if read() is not before:
                write(before)
        for read, write, before in self._states:
            if read() != before:
                write(before)
        for tensor, own, held, number in self._tensors:
            if number is not None:
                tensor.data = own  # another may have been put in its place
            if held.numel() > _LARGEST:
                if version(tensor) != number:
                    raise _written_to(tensor)
            # Writes to `.data` are not counted, so the bits themselves are compared.
            elif not same_bits(tensor.detach(), held):
                with torch.inference_mode(number is None), torch.no_grad():
                    tensor.copy_(held)

    def require_unwritten(self) -> None:
        """Raises InputError if a large tensor was written to, behind PyTorch's back too."""
        for tensor, _, held, _ in self._tensors:
            if held.numel() > _LARGEST and not same_bits(tensor.detach(), held):
                raise _written_to(tensor)

    def _look(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield from self._look_at_tensor(value)
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
            return
        elif isinstance(value, types.FunctionType):
            yield from self._look_at_function(value)
        elif isinstance(value, (dict, list, set, collections.deque)):
            self._contents.append((value, dict(value) if isinstance(value, dict) else value.copy()))
            yield from value.values() if isinstance(value, dict) else value
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        elif isinstance(value, type):
            if not _is_of_library(value.__module__):
                yield from self._look_at_class(value)
            return
        elif isinstance(value, bytearray):
            self._states.append((lambda: bytes(value), lambda held: value.__setitem__(slice(None), held), bytes(value)))
        elif isinstance(value, random.Random):
            self._states.append((value.getstate, value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            self._states.append(
                (lambda: value.get_state().tolist(), lambda held: _set_state(value, held), value.get_state().tolist())
            )
        elif _is_of_library(type(value).__module__) and not isinstance(value, torch.nn.Module):
            return
        if not _is_of_library(type(value).__module__) or isinstance(value, torch.nn.Module):
            yield from self._look_at_slots(value)
            yield type(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield attributes

    def _look_at_tensor(self, tensor: torch.Tensor) -> Iterator[Any]:
        if (
            tensor.layout is not torch.strided
            or tensor.is_meta
            or tensor.is_quantized
            or tensor.is_nested
            or is_lazy(tensor)
        ):
            return
        if tensor.is_leaf:
            self._place(tensor, "grad", tensor.grad)
            yield tensor.grad
            if tensor.is_floating_point() or tensor.is_complex():
                self._place(tensor, "requires_grad", tensor.requires_grad)
        self._tensors.append((tensor, tensor.data, tensor.detach().clone(), version(tensor)))

    def _look_at_function(self, function: types.FunctionType) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            content = _content(cell)
            self._places.append((functools.partial(_content, cell), functools.partial(_set_content, cell), content))
            yield content
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        # By where its code is from: functools.wraps copies `__module__`.
        if _is_of_library(str(function.__globals__.get("__name__", ""))):
            return
        for name in {name for code in _codes(function.__code__) for name in code.co_names}:
            content = function.__globals__.get(name, _MISSING)
            read = functools.partial(function.__globals__.get, name, _MISSING)
            self._places.append((read, functools.partial(_set_key, function.__globals__, name), content))
            yield content

    def _look_at_slots(self, value: Any) -> Iterator[Any]:
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                if name in ("__dict__", "__weakref__"):
                    continue
                if name.startswith("__") and not name.endswith("__"):
                    name = f"_{kind.__name__.lstrip('_')}{name}"
                content = getattr(value, name, _MISSING)
                self._place(value, name, content)
                yield content

    def _look_at_class(self, kind: type) -> Iterator[Any]:
        for base in kind.__mro__:
            if _is_of_library(base.__module__):
                continue
            for name, value in list(vars(base).items()):
                if isinstance(value, (staticmethod, classmethod)):
                    yield value.__func__
                elif isinstance(value, property):
                    yield value.fget
                elif isinstance(value, types.FunctionType):
                    yield value
                elif not name.startswith("__"):
                    self._places.append(
                        (
                            functools.partial(_entry, base, name),
                            functools.partial(type.__setattr__, base, name),
                            value,
                        )
                    )
                    yield value

    def _place(self, holder: Any, name: str, content: Any) -> None:
        def write(held: Any) -> None:
            if held is _MISSING:
                object.__delattr__(holder, name)
            else:
                object.__setattr__(holder, name, held)

        self._places.append((lambda: getattr(holder, name, _MISSING), write, content))


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _written_to(tensor: torch.Tensor) -> InputError:
    return InputError(
        f"loss_fn writes to a tensor of shape {tuple(tensor.shape)} that it keeps, so that what one image "
        "gives depends on the images before it. Keep that outside of the loss."
    )


def _entry(kind: type, name: str) -> Any:
    return vars(kind).get(name, _MISSING)


def _set_key(holder: dict[str, Any], name: str, content: Any) -> None:
    if content is _MISSING:
        holder.pop(name, None)
    else:
        holder[name] = content


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


def _set_content(cell: types.CellType, content: Any) -> None:
    if content is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _set_state(generator: torch.Generator, state: list[int]) -> None:
    generator.set_state(torch.tensor(state, dtype=torch.uint8))

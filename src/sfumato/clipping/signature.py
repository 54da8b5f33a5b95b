"""What a model is made of and set to, so that a change between two calls is seen.

For engine "graph" computes what it traced. Values of parameters and buffers are no part of it: the
graph is given them at every call. Nor is code that is replaced by other code under the same name,
nor a global.
"""

import array
import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from sfumato.torch_internals import HOOKS, global_hooks, version

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_SIMPLE = frozenset({type(None), bool, str})  # no two of them are equal but of one type
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
# What every module has, its mode aside.
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}
# They change at every step, and no forward pass reads them.
_NO_SETTINGS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# So deep is what one attribute leads to followed, and so many values of it: a helper may lead to a
# whole data set.
_DEPTH = 20
_MOST = 5000
# Tensors of no more values are compared by value: `item()` writes what it reads into a graph.
_SMALL = 16


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a model was made of and set to at one time.

    Attributes:
        values: Plain values as they are, objects by their addresses and by what they hold.
        objects: What lies there. An address is believed as long as its object lives: another may
            come to lie there.
    """

    values: tuple[Any, ...]
    objects: tuple[Callable[[], Any], ...]

    def holds(self, now: "Signature") -> bool:
        """Whether nothing has changed."""
        return self.values == now.values and all(reference() is not None for reference in self.objects)


def signature(model: nn.Module) -> Signature:
    """Of a model: layers, modes, settings, hooks, which parameters train."""
    return _Walk().of(model)


class _Walk:
    """Goes through all that a model's attributes lead to."""

    def __init__(self) -> None:
        self._objects: list[Callable[[], Any]] = []
        # Address -> its place in the order of the walk, and the object, which must not make room
        # for another meanwhile.
        self._met: dict[int, tuple[int, Any]] = {}
        self._left = 0

    def of(self, model: nn.Module) -> Signature:
        modules = dict(model.named_modules())
        values: list[Any] = [(path, self._address(each)) for path, each in modules.items()]
        # Found again among settings, these are no news: an optimizer writes to parameters at every
        # step.
        for path, each in modules.items():
            for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is None:
                    continue
                number, _ = self._met.setdefault(id(tensor), (len(self._met), tensor))
                values.append((path, name, number, type(tensor), *_kind(tensor)))
                for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
                    values.append(self._setting(hooks) if hooks else None)
        for each in modules.values():
            for name, value in vars(each).items():
                if name in HOOKS:
                    values.append(self._setting(value) if value else None)
                elif name not in _OF_ALL_MODULES:
                    values.append((name, value if type(value) in _SIMPLE else self._setting(value)))
        values += [self._setting(hooks) for hooks in global_hooks()]
        return Signature(tuple(values), tuple(self._objects))

    def _setting(self, value: Any) -> Any:
        self._left = _MOST
        return self._value(value, 0)

    def _value(self, value: Any, depth: int) -> Any:
        """What is equal as long as nothing changes of a value and of what it leads to."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if id(value) in self._met:
            return self._met[id(value)][0]
        is_container = kind in _CONTAINERS or kind is OrderedDict
        if is_container:  # another that holds the same is as good
            self._met[id(value)] = len(self._met), value
        shown = (kind, len(value)) if is_container else self._address(value)
        if depth == _DEPTH or isinstance(value, _NO_SETTINGS):
            return shown
        inside = []
        for name, entry in _entries(value):
            if self._left <= 0:
                break
            self._left -= 1
            inside.append((name, self._value(entry, depth + 1)))
        return shown, frozenset(inside) if isinstance(value, (set, frozenset)) else tuple(inside)

    def _address(self, value: Any) -> tuple[type, int]:
        self._met[id(value)] = len(self._met), value
        try:
            self._objects.append(weakref.ref(value))
        except TypeError:  # such are small, and held instead
            self._objects.append(lambda: value)
        return type(value), id(value)


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object leads to: entries, attributes, slots, what functions carry along; each with a
    name or None.
    """
    if isinstance(value, torch.Tensor):
        yield "tensor", (*_kind(value), version(value), _memory(value), _small(value))
        return
    if isinstance(value, np.ndarray):
        yield "array", (value.dtype.str, value.shape, None if value.dtype.hasobject else value.tobytes())
        return
    if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
        return
    if isinstance(value, weakref.ref):
        yield "referent", value()
        return
    if isinstance(value, (bytearray, memoryview, array.array)):
        yield "bytes", bytes(value)
        return
    if isinstance(value, Mapping):
        for key, entry in list(itertools.islice(value.items(), _MOST)):
            yield None, key
            yield None, entry
    elif isinstance(value, _CONTAINERS):
        for entry in list(itertools.islice(value, _MOST)):
            yield None, entry
    elif isinstance(value, (int, float, complex, str, bytes)):  # of a class of their own
        yield "value", str(value)
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif isinstance(value, FunctionType):
        yield from (("defaults", value.__defaults__), ("keywords", value.__kwdefaults__))
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield "closure", cell.cell_contents
    yield from list(getattr(value, "__dict__", {}).items())
    kind: Any = type(value)
    for name in _slots(kind):
        yield name, getattr(value, name, None)


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    own = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = [name for names in own for name in ((names,) if isinstance(names, str) else names)]
    return tuple(name for name in names if not name.startswith("__"))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
    return shape, tensor.dtype, str(tensor.device), tensor.requires_grad


def _memory(tensor: torch.Tensor) -> int | None:
    """Where its values lie: other memory through ``tensor.data = ...`` bumps no version."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it has none
        return None


def _small(tensor: torch.Tensor) -> bytes | None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() > _SMALL or tensor.is_quantized:
        return None
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())

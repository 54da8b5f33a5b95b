"""What the code of a loss or a model could do with one image that others would notice."""

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sfumato.torch_internals import version

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Their code handles no error that an image's values raise.
_TRUSTED = ("torch", "numpy", "builtins", "math", "functools", "contextlib", "operator")


def catches(*functions: Any) -> bool:
    """Whether functions, or what they call by a name, hold a `try`.

    Where many images are computed at once, an error that one of them raises would send all of them
    into the handler.
    """
    seen: set[types.CodeType] = set()
    return any(_catches(function, seen) for function in functions)


def model_catches(model: nn.Module) -> bool:
    """Whether the code of a model's own modules holds a `try`."""
    seen: set[types.CodeType] = set()
    kinds = {type(module) for module in model.modules()}
    return any(_catches(kind.forward, seen, kind) for kind in kinds)


def plain_state(function: Callable[..., Any]) -> dict[str, object]:
    """Numbers, words and tensors that a function keeps: attributes of an object that is called, of the
    one that a method belongs to, and variables of an enclosing function, by name. What is only added
    to a list, as a log is, is not among them.
    """
    found: dict[str, object] = {}
    for holder in _holders(function):
        for name, value in holder:
            if isinstance(value, _PLAIN):
                found[f"{len(found)} {name}"] = value
            elif isinstance(value, torch.Tensor):
                found[f"{len(found)} {name}"] = (id(value), version(value))
    return found


def changed(before: dict[str, object], after: dict[str, object]) -> str | None:
    """The name of what changed first; None if nothing did."""
    for key in {**before, **after}:
        one, other = before.get(key, ...), after.get(key, ...)
        if one != other and not (one != one and other != other):  # NaN is NaN
            return key.partition(" ")[2]
    return None


def _catches(function: Any, seen: set[types.CodeType], owner: type | None = None) -> bool:
    owner = owner or _owner_of(function)
    function = _function_of(function)
    if function is None or function.__code__ in seen:
        return False
    module = getattr(function, "__module__", None) or ""
    if module.partition(".")[0] in _TRUSTED:
        return False
    seen.add(function.__code__)
    if any(_has_handler(code) for code in _codes(function.__code__)):
        return True
    return any(_catches(called, seen, own) for called, own in _called(function, owner))


def _function_of(value: Any) -> types.FunctionType | None:
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, nn.Module):
        value = type(value).forward
    elif not isinstance(value, (types.FunctionType, types.MethodType)) and not isinstance(value, type):
        value = getattr(type(value), "__call__", None)  # noqa: B004  (the function itself is meant)
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _has_handler(code: types.CodeType) -> bool:
    if "suppress" in code.co_names:
        return True
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    # `with` has a handler of its own, which hands errors on.
    return names.count("PUSH_EXC_INFO") > names.count("WITH_EXCEPT_START")


def _called(function: types.FunctionType, owner: type | None) -> Iterator[tuple[Any, type | None]]:
    """What a function may call: what it names among its module's globals and its class's methods, and
    what an enclosing function left it.
    """
    functions = (types.FunctionType, types.MethodType, functools.partial)
    for code in _codes(function.__code__):
        for name in code.co_names:
            if isinstance(found := function.__globals__.get(name), functions):
                yield found, None
            if isinstance(found := getattr(owner, name, None), functions):
                yield found, owner
    for cell in function.__closure__ or ():
        content = _content(cell)
        if callable(content):
            yield content, None


def _owner_of(value: Any) -> type | None:
    """The class whose method is called."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.MethodType):
        return type(value.__self__)
    return None if isinstance(value, (type, types.FunctionType)) else type(value)


def _holders(function: Any) -> Iterator[list[tuple[str, Any]]]:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        yield list(vars(owner).items()) if hasattr(owner, "__dict__") else []
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield [(name, _content(cell)) for name, cell in cells]
        yield list(vars(function).items())
        return
    for module in function.modules() if isinstance(function, nn.Module) else [function]:
        if hasattr(module, "__dict__"):
            yield list(vars(module).items())
        if isinstance(module, nn.Module):
            yield [*module._buffers.items(), *module._parameters.items()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None

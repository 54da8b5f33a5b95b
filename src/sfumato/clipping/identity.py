"""What a model computes, as a digest: two models that compute differently are not to meet the same
noise.

The digest is part of the environment of a run. No such digest can be complete: a model may read a
file or the clock. So the noise is bound to the very sum that it is added to, besides
(`sfumato.training.draws`).
"""

import contextlib
import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Node

from sfumato.clipping.graph.engine import GraphEngine
from sfumato.clipping.graph.export import Capture
from sfumato.clipping.protocol import Engine
from sfumato.randomness import digest
from sfumato.torch_internals import HOOKS, OpOverload

# Packages whose code is told by other means: the environment names torch's version and digests our
# own code.
_KNOWN_BY_VERSION = frozenset({"torch", "sfumato", "numpy", "builtins"}) | sys.stdlib_module_names


def identity(model: nn.Module, loss_fn: Callable[..., Any], engine: Engine | None) -> str:
    """A digest of what is computed: the same in every process, another where a model's code or its
    constants differ.

    Parameters and persistent buffers are left out: they are state, and in the checkpoint.

    Args:
        model: Of which non-persistent buffers are read by value.
        loss_fn: Its source, and that of what it uses.
        engine: Where it is `GraphEngine`, its graph stands for the model. For any other, and for
            None, the sources and versions of the modules that the model's classes come from.

    Returns:
        64 hexadecimal digits.
    """
    parts: dict[str, Any] = {"loss": _sources([loss_fn])}
    if isinstance(engine, GraphEngine):
        parts |= {"buffers": _buffers(model), "graph": _graph(engine.traced.capture)}
    else:
        parts |= _code(model)
    return digest(parts)


def identity_of_network(model: nn.Module) -> str:
    """A digest of what a frozen network computes besides its parameters and persistent buffers: its
    code, and the settings that its modules hold.

    Returns:
        64 hexadecimal digits.
    """
    settings = [
        [path, key, _setting(list(value.values()) if key in HOOKS else value)]  # hooks are numbered by process
        for path, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if key not in ("_parameters", "_buffers", "_modules")
    ]
    return digest({**_code(model), "settings": settings, "torch": torch.__version__})


def _code(model: nn.Module) -> dict[str, Any]:
    return {
        "buffers": _buffers(model),
        "sources": _sources(type(module) for module in model.modules()),
        "layers": re.sub(r" at 0x[0-9a-f]+", "", repr(model)),  # wherever their settings come from
    }


def _buffers(model: nn.Module) -> list[Any]:
    """Those that no state holds."""
    in_state = model.state_dict().keys()
    return _values(
        {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in in_state}
    )


def _setting(value: Any, deep: int = 8) -> Any:
    """What an attribute holds, as JSON: through containers, functions and objects to plain values.
    What leads deeper stands by its type alone.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))):
        return [kind, repr(value)]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return [kind, _value(torch.as_tensor(value))] if not isinstance(value, nn.Parameter) else [kind]
    if isinstance(value, (ModuleType, nn.Module)) or not deep:
        return [kind]
    parts: list[Any] = []
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else list(value)
    elif isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts = [_name(value), value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    elif isinstance(value, CodeType):
        parts = [value.co_code, value.co_names, value.co_consts]
    elif isinstance(value, MethodType):
        parts = [value.__func__]
    elif callable(value) and hasattr(value, "__qualname__"):
        parts = [_name(value)]
    else:
        slots = [name for base in type(value).__mro__ for name in _listed(vars(base).get("__slots__", ()))]
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        parts = [sorted((held | (getattr(value, "__dict__", None) or {})).items()), _plain_text(value)]
    return [kind, *(_setting(part, deep - 1) for part in parts)]


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _plain_text(value: Any) -> str | None:
    """How values that hold plain ones write themselves: a range, a pattern, a decimal number."""
    text = repr(value)
    return None if " at 0x" in text or len(text) > 1000 else text


def _values(tensors: Mapping[str, Any]) -> list[Any]:
    """Names, types, shapes and bits."""
    return [[name, _value(tensor)] for name, tensor in sorted(tensors.items())]


def _value(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return [type(value).__qualname__, repr(value)]
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(value.dtype), list(value.shape), hashlib.sha256(content).hexdigest()]


def _graph(capture: Capture) -> list[Any]:
    """Every operation with its arguments, numbered in their order: their names mean nothing."""
    numbers: dict[Node, int] = {}
    lines: list[Any] = []
    for node, (kind, name) in capture._placeholders.items():
        numbers[node] = len(numbers)
        lines.append([kind, _value(capture._constants[name]) if kind == "constant" else name])
    numbers[capture.input] = len(numbers)
    lines.append("input")
    for node in [*capture.shared, *capture.data]:
        lines.append(
            [
                _name(node.target),
                *(_plain(part, numbers) for part in (node.args, dict(node.kwargs), node.meta.get("val"))),
            ]
        )
        numbers[node] = len(numbers)
    lines.append(_plain(capture._outputs, numbers))
    return lines


def _plain(value: Any, numbers: Mapping[Node, int]) -> Any:
    """An argument as JSON, each type under its own name. Sizes that depend on the number of rows
    are left out.
    """
    if isinstance(value, Node):
        return {"operation": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_plain(each, numbers) for each in value]
    if isinstance(value, dict):
        return [[key, _plain(each, numbers)] for key, each in sorted(value.items())]
    if isinstance(value, slice):
        return ["slice", *(_plain(each, numbers) for each in (value.start, value.stop, value.step))]
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), [size if isinstance(size, int) else "rows" for size in value.shape]]
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return [type(value).__name__]
    if callable(value) and not isinstance(value, type):
        return _name(value)
    return [type(value).__name__, repr(value)]


def _name(target: Any) -> str:
    """Of an operation: its overload, or the place of a Python function."""
    if isinstance(target, OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', type(target).__qualname__)}"


def _sources(objects: Iterable[Any]) -> list[Any]:
    """The modules that objects come from and all that these name: each one's source, and the
    version of its package.
    """
    found: dict[str, Any] = {}
    waiting = [name for each in objects for name in _modules_of(each)]
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or top in _KNOWN_BY_VERSION:
            continue
        module = sys.modules.get(name)
        found[name] = [_versions(top), _digest_of_file(module)]
        path = Path(getattr(module, "__file__", None) or "")
        if module is not None and not {"site-packages", "dist-packages"} & set(path.parts):
            # Somebody's own code: what it names is likely to be changed with it.
            waiting += [named for value in vars(module).values() for named in _modules_of(value)]
    return sorted(found.items())


def _modules_of(value: Any) -> Iterator[str]:
    """Names of the modules that a value's code is in."""
    if isinstance(value, ModuleType):
        yield value.__name__
        return
    if isinstance(value, functools.partial):
        yield from _modules_of(value.func)
        return
    for kind in (value if isinstance(value, type) else type(value)).__mro__:
        yield kind.__module__
    with contextlib.suppress(Exception):  # a value that is loaded when it is asked for may raise anything
        if isinstance(value.__module__, str):
            yield value.__module__


def _digest_of_file(module: ModuleType | None) -> str | None:
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # in an archive, or gone
        return None


def _versions(top: str) -> list[str]:
    """Of the installed distributions that bring a package; none for a file on PYTHONPATH."""
    return sorted({f"{name} {metadata.version(name)}" for name in _distributions().get(top, [])})


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()

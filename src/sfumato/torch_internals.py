"""What is borrowed from PyTorch's private or experimental modules, all of it: here a new version is
looked at first.

The whole suite runs on the oldest and on the newest version that pyproject.toml allows; each name
says what it is for.
"""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table as _decompositions

# Operators as graphs name them: torch.export gives no public type for them.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.overrides import TorchFunctionMode

# Sees every operation that autograd leads to, which `__torch_function__` does not.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Outputs of models are nests of containers; torch.export and vmap take them apart by the same
# functions.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

_GROUP_NORM = torch.ops.aten.native_group_norm.default
_FORMULA = _decompositions[_GROUP_NORM]


@contextlib.contextmanager
def quick_group_norm() -> Iterator[None]:
    """Within, the shape of a group norm's result is known at once: PyTorch finds it by the formula of the layer, on
    symbols, which is half of the time of tracing a small network.
    """
    _decompositions[_GROUP_NORM] = _shapes_of_group_norm
    try:
        yield
    finally:
        _decompositions[_GROUP_NORM] = _FORMULA


def _shapes_of_group_norm(
    input: torch.Tensor, weight: Any, bias: Any, N: Any, C: Any, HxW: Any, group: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = input.new_empty((N, group))
    return torch.empty_like(input, memory_format=torch.contiguous_format), mean, torch.empty_like(mean)


@functools.cache
def _defaults(operation: Any) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in operation._schema.arguments}


def arguments_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operation's arguments by their names in its schema, those left out at their defaults."""
    defaults = _defaults(operation)
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def compile_graph(graph: torch.fx.GraphModule, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Straight to the compiler: the list is one graph already, and torch.compile would take it down
    once more.
    """
    from torch import _inductor  # large, and of no use without a compiler

    return _inductor.compile(graph, list(tensors))


@functools.cache
def _has_slow_products() -> bool:
    """Whether MKL, PyTorch's library for products, leaves AVX-512 alone since the processor is AMD's: twice the time of
    oneDNN, its library for convolutions.
    """
    libraries, processor = (torch.backends.mkl, torch.backends.mkldnn), pathlib.Path("/proc/cpuinfo")
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and all(one.is_available() for one in libraries)
    return is_wide and processor.exists() and "AuthenticAMD" in processor.read_text()


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, to rounding; no gradient passes. What is being compiled is left alone."""
    is_plain = type(input) is torch.Tensor and input.device.type == "cpu" and input.dtype == torch.float32
    # What does not fit, PyTorch refuses in clearer words, or broadcasts.
    fits = weight.dtype == input.dtype and weight.shape[1:] == input.shape[-1:]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if is_plain and fits and _has_slow_products():
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return torch.nn.functional.linear(input, weight, bias)


def quick_dilation(taps: Sequence[int], dilation: list[int], device: torch.device) -> list[int]:
    """Of a convolution: of a single tap, where dilation changes nothing, one with which PyTorch asks oneDNN. By one
    thread it asks MKL else.
    """
    is_slow = device.type == "cpu" and all(n == 1 for n in taps) and _has_slow_products()
    return [2] * len(taps) if is_slow else dilation


class QuickProducts(TorchFunctionMode):
    """Within, a model's linear layers are computed by `linear`; no gradient passes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (linear if func is torch.nn.functional.linear else func)(*args, **(kwargs or {}))


def set_own_threads(count: int) -> None:
    """How many threads PyTorch computes by where this thread asks it, for good. Without the question a thread that has
    computed little would take what another sets last: sums of a seeded run would then differ in their last bits.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def lerp_all(averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], weight: float) -> None:
    """Moves each average towards its value, all in one call."""
    torch._foreach_lerp_(list(averages), list(values), weight)

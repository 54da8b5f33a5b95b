"""One compiled graph for a microbatch: forward, backward, norms and clipped sum.

A compiled graph cannot branch on what it computes. It takes the common way, and returns whether
everything that it assumed (`guard`) was so; where it was not, its caller computes the microbatch again.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from sfumato.torch_internals import compile_graph, make_fx

Tensors = tuple[torch.Tensor, ...]
_recorded: ContextVar[list[torch.Tensor] | None] = ContextVar("recorded", default=None)


def guard(condition: torch.Tensor) -> bool:
    """Whether a condition holds; True in a graph that is being compiled, which then returns the
    condition.
    """
    recorded = _recorded.get()
    if recorded is None:
        return bool(condition)
    recorded.append(condition)
    return True


def is_recording() -> bool:
    """Whether a graph is being compiled."""
    return _recorded.get() is not None


@contextmanager
def _recording() -> Iterator[list[torch.Tensor]]:
    """Inside, nothing branches; what is assumed is collected."""
    conditions: list[torch.Tensor] = []
    token = _recorded.set(conditions)
    try:
        yield conditions
    finally:
        _recorded.reset(token)


def compiled(function: Callable[..., Tensors], tensors: Tensors) -> Callable[..., tuple[Tensors, bool]]:
    """A function of such tensors as a compiled one, which also says whether everything that it took for granted was so.

    The function may differentiate inside. It is written down operation by operation, backward
    pass included, and that list is compiled: no value may decide what happens.
    """

    count = 0

    def straight(*tensors: torch.Tensor) -> Tensors:
        nonlocal count
        with _recording() as assumed:
            results = function(*tensors)
        count = len(results)
        return *results, *([torch.stack(assumed).all()] if assumed else [])

    # Without threads of its own the backward pass is written down as well.
    with torch.autograd.set_multithreading_enabled(False):
        graph = make_fx(straight, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    alias = torch.ops.aten.alias.default
    for node in graph.graph.find_nodes(op="call_function", target=alias):  # a fifth of all operations
        node.replace_all_uses_with(*node.args)
        graph.graph.erase_node(node)
    # Strides that were written down are not always those to come: group norm keeps
    # channels_last on a CPU, its stand-in does not.
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, about itself
        run = compile_graph(graph, tensors)
        run(*tensors)

    def call(*tensors: torch.Tensor) -> tuple[Tensors, bool]:
        found = tuple(run(*tensors))
        return found[:count], all(map(bool, found[count:]))

    return call

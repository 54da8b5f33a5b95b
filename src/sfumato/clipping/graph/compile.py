"""One compiled graph for a microbatch: forward, backward, norms and clipped sum."""

import warnings
from collections.abc import Callable

import torch

from sfumato.clipping.graph.guards import recording
from sfumato.clipping.graph.losses import rehearsing
from sfumato.torch_internals import compile_graph, make_fx

Tensors = tuple[torch.Tensor, ...]


class CompiledPass:
    """Compiles a function of tensors, once for each set of their shapes.

    The function may differentiate inside. It is written down operation by operation, backward
    pass included, and that list is compiled: no value may decide what happens (`assumptions`).

    Args:
        function: From tensors to tensors.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self._function = function
        self._graphs: dict[tuple[object, ...], Callable[..., Tensors]] = {}

    def prepare(self, *tensors: torch.Tensor) -> None:
        """Compiles for such tensors, unless that is done. No two threads may be here at once."""
        if _key(tensors) not in self._graphs:
            self._graphs[_key(tensors)] = self._compile(tensors)

    def __call__(self, *tensors: torch.Tensor) -> tuple[Tensors, bool]:
        """What the function gives, and whether everything that it took for granted was so.

        `prepare` must have seen such tensors.
        """
        *results, holds = self._graphs[_key(tensors)](*tensors)
        return tuple(results), bool(holds)

    def _compile(self, tensors: Tensors) -> Callable[..., Tensors]:
        def straight(*tensors: torch.Tensor) -> Tensors:
            with recording() as assumed:
                results = self._function(*tensors)
            return *results, torch.stack([torch.ones((), dtype=torch.bool, device=tensors[0].device), *assumed]).all()

        # Without threads of its own the backward pass is written down as well.
        with torch.autograd.set_multithreading_enabled(False):
            graph = make_fx(straight, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        for node in graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.alias.default
        ):  # a fifth of all operations
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        # Strides that were written down are not always those to come: group norm keeps
        # channels_last on a CPU, its stand-in does not.
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        graph.recompile()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's, about itself
            compiled = compile_graph(graph, tensors)
        with rehearsing():
            compiled(*tensors)
        return compiled


def _key(tensors: Tensors) -> tuple[object, ...]:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)

"""One site of weights and images: what a rule for its operation is given."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from sfumato.clipping.graph.export import module_path
from sfumato.clipping.graph.rows import Layout, name_of
from sfumato.clipping.graph.rules.per_example import PerExampleGrads
from sfumato.torch_internals import OpOverload


@dataclasses.dataclass(frozen=True)
class SiteRecord:
    """A site while it happens: B examples of K views each.

    Attributes:
        args: The operation's arguments by their names in its schema; weights are detached.
        grad: Gradient of the sum of all losses with respect to the operation's output.
        output: What the operation returned, where a method may want it.
    """

    site: "GradSite"
    examples: int
    views: int
    args: dict[str, Any]
    grad: torch.Tensor
    output: torch.Tensor | None = None

    def example_arg(self, name: str) -> torch.Tensor:
        """An argument that holds images, (examples, *its shape for one example's rows)."""
        return self.site.arg_layouts[name].by_example(self.args[name], self.examples, self.views)

    def example_grad(self) -> torch.Tensor:
        """The output's gradient, examples first."""
        return self.site.out_layout.by_example(self.grad, self.examples, self.views)

    @functools.cached_property
    def grad_by_channel(self) -> torch.Tensor:
        """(m, rows, C): of an output (rows, C, *size), the gradient summed over its positions."""
        grad = self.example_grad()
        return grad.flatten(3).sum(3) if grad.ndim > 3 else grad


# How a weight's per-example gradients are had from a site.
Method = Callable[[SiteRecord, str], PerExampleGrads]


@dataclasses.dataclass(frozen=True)
class GradSite:
    """An operation of the graph that takes weights and images.

    Attributes:
        node: The operation.
        weight_of: Argument name -> name of the weight that it is given. An argument inside a
            list is named "tensors.1", for example.
        arg_layouts: Argument name -> where the images are in it.
        out_layout: Where they are in what it returns.
    """

    node: Node
    weight_of: dict[str, str]
    arg_layouts: dict[str, Layout]
    out_layout: Layout

    @functools.cached_property
    def name(self) -> str:
        """Names the operation to a reader: the module's path and the operation."""
        return f"{module_path(self.node) or 'model'}:{self.node.name}"

    @functools.cached_property
    def operation(self) -> str:
        """The operation's name without its overload: "conv2d", "add"."""
        return name_of(self.node)


def call(node: Node, named: dict[str, Any]) -> Any:
    """Calls an operation with arguments by name, as `named_args` gives them."""
    args, kwargs = [], {}
    for name, _, keyword_only in _schema(node.target):
        value = named[name]
        if isinstance(value, (list, tuple)):
            value = [named.get(f"{name}.{i}", item) for i, item in enumerate(value)]
        if keyword_only:
            kwargs[name] = value
        else:
            args.append(value)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def named_args(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the operation's schema, those left out at their defaults, lists
    taken apart.
    """
    if not isinstance(node.target, OpOverload):
        return {str(i): arg for i, arg in enumerate(args)} | kwargs
    named: dict[str, Any] = {}
    for position, (name, default, _) in enumerate(_schema(node.target)):
        value = named[name] = args[position] if position < len(args) else kwargs.get(name, default)
        if isinstance(value, (list, tuple)) and any(isinstance(item, (torch.Tensor, Node)) for item in value):
            named |= {f"{name}.{i}": item for i, item in enumerate(value)}
    return named


@functools.cache
def _schema(operation: OpOverload) -> list[tuple[str, Any, bool]]:
    """An operation's arguments: name, default, whether it is given by its name alone."""
    return [(argument.name, argument.default_value, argument.kwarg_only) for argument in operation._schema.arguments]

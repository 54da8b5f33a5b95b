"""One site of weights and images: what a rule for its operation is given, and what it makes of that."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import Node

from sfumato.clipping.clip import at_least_float32, roundings, row_norms, unit
from sfumato.clipping.graph.compile import guard
from sfumato.clipping.graph.rows import Layout, module_path, name_of
from sfumato.torch_internals import arguments_of

# Lengths of one that are no farther apart than this point in one direction, but for roundings.
_SAME_DIRECTION = 1e-5


class PerExampleGrads(Protocol):
    """Per-example gradients g_1, ..., g_m of a weight, written out or not: what one site adds to them."""

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(m,) the squares of the L2 norms, and bounds on their rounding errors."""
        ...

    def weighted_sum(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The sum of coefficient_i times g_i, shaped like the weight."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Direction:
    """Of each channel of a weight that is standardised; the rest is computed once for all microbatches.

    Attributes:
        along: u, (channels, fan-in).
        weight: Its value.
    """

    along: torch.Tensor
    weight: torch.Tensor

    @functools.cached_property
    def basis(self) -> torch.Tensor:
        """Ones and u, (channels, 2, fan-in)."""
        return torch.stack([torch.ones_like(self.along), self.along], dim=1)

    @functools.cached_property
    def length(self) -> torch.Tensor:
        """Of the weight along u, (channels,)."""
        return torch.linalg.vecdot(self.weight.flatten(1), self.along)

    @functools.cached_property
    def apart(self) -> torch.Tensor:
        """How far from u the weight lies, as a share of its length, (channels,)."""
        return torch.linalg.vector_norm(self.weight.flatten(1) / self.length[:, None] - self.along, dim=1)

    @functools.cached_property
    def is_of_weight(self) -> bool:
        """Whether each channel of the weight points there."""
        return guard((self.apart <= _SAME_DIRECTION).all())


class Moments(NamedTuple):
    """Sums over the fan-in of each output channel's gradient, and bounds on their rounding errors, all (m, channels).

    Attributes:
        squares: Of its squares.
        plain: Of its values.
        along: Of its products with that channel's direction.
        of_squares, of_plain, of_along: The bounds.
    """

    squares: torch.Tensor
    plain: torch.Tensor
    along: torch.Tensor
    of_squares: torch.Tensor
    of_plain: torch.Tensor
    of_along: torch.Tensor


class MaterializedGrads:
    """Per-example gradients written out: (m, *shape of the weight), float32 at least.

    Args:
        blocks: Some examples after others, each block in memory of its own.
    """

    def __init__(self, *blocks: torch.Tensor) -> None:
        self.blocks = list(map(at_least_float32, blocks))

    def __add__(self, other: "MaterializedGrads") -> "MaterializedGrads":
        if [len(block) for block in self.blocks] == [len(block) for block in other.blocks]:
            return MaterializedGrads(*(one + another for one, another in zip(self.blocks, other.blocks, strict=True)))
        return MaterializedGrads(self.written_out() + other.written_out())

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return self.blocks[0].shape[1:]

    def written_out(self) -> torch.Tensor:
        """All of them; a copy where there are several blocks."""
        return self.blocks[0] if len(self.blocks) == 1 else torch.cat(self.blocks)

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        norms = []
        for block in self.blocks:
            norms.append(row_norms(block.reshape(len(block), -1)))
        squares = torch.cat(norms).square()
        return squares, torch.zeros_like(squares)

    def moments(self, direction: Direction) -> Moments:
        """What weight standardisation needs to know of each output channel."""
        fan_in = direction.along.shape[1]
        basis = direction.basis.to(self.blocks[0].dtype)
        of_blocks = []
        for block in self.blocks:
            rows = block.flatten(2)  # (n, channels, fan-in)
            plain_and_along = torch.bmm(basis, rows.permute(1, 2, 0))  # this way round twice as fast on a CPU
            norms = row_norms(rows.flatten(0, 1)).view(1, *rows.shape[:2])
            of_blocks.append(torch.cat([norms, plain_and_along.permute(1, 2, 0)]))
        norms, plain, along = torch.cat(of_blocks, 1)
        error = unit(norms) * norms
        errors = 2 * roundings(fan_in) * error * norms, fan_in**1.5 * error, fan_in * error
        return Moments(norms.square(), plain, along, *errors)

    def weighted_sum(self, coefficients: torch.Tensor) -> torch.Tensor:
        total, start = self.blocks[0].new_empty(self.shape.numel()), 0
        for block in self.blocks:
            rows, own = block.reshape(len(block), -1), coefficients[start : start + len(block)]
            total.addmv_(rows.T, own.to(rows.dtype), beta=1 if start else 0)
            start += len(block)
        return total.view(self.shape)


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


def named_args(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the operation's schema, lists taken apart."""
    named = arguments_of(node.target, args, kwargs)
    for name, value in [*named.items()]:
        if isinstance(value, (list, tuple)) and any(isinstance(item, (torch.Tensor, Node)) for item in value):
            named |= {f"{name}.{i}": item for i, item in enumerate(value)}
    return named


def call(node: Node, named: dict[str, Any]) -> Any:
    """Calls an operation with arguments by name, as `named_args` gives them."""
    whole = {name: value for name, value in named.items() if "." not in name}
    for name, value in whole.items():
        if isinstance(value, (list, tuple)):
            whole[name] = [named.get(f"{name}.{i}", item) for i, item in enumerate(value)]
    return node.target(**whole)  # type: ignore[operator]


def channel_sums(grads: torch.Tensor) -> torch.Tensor:
    """(m, C): of (m, rows, C, *size), summed over everything but examples and channels."""
    return grads.flatten(3).sum(dim=(1, 3)) if grads.ndim > 3 else grads.sum(dim=1)


def repeated(record: SiteRecord, argument: str) -> MaterializedGrads:
    """A value repeated for every row (a class token, for example): the output's gradient summed over the copies that
    one example has.
    """
    weight, grads = record.args[argument], record.example_grad()  # (m, *shape for one example)
    shape = grads.shape[1:]

    def expand(value: torch.Tensor) -> torch.Tensor:
        if record.site.operation == "expand":
            return value.expand(shape)
        padded = (1,) * (len(shape) - value.ndim) + value.shape
        return value.repeat([size // own for size, own in zip(shape, padded, strict=True)])

    return MaterializedGrads(torch.func.vmap(lambda grad: torch.func.vjp(expand, weight)[1](grad)[0])(grads))


def by_vmap(record: SiteRecord, argument: str) -> MaterializedGrads:
    """The rule for every operation that has none of its own: torch.func.vmap over examples of the vector-Jacobian
    product of that operation alone.
    """
    names = list(record.site.arg_layouts)

    def pull_back(grad: torch.Tensor, *of_example: torch.Tensor) -> torch.Tensor:
        fixed = record.args | dict(zip(names, of_example, strict=True))
        operation = lambda value: call(record.site.node, fixed | {argument: value})  # noqa: E731
        return torch.func.vjp(operation, record.args[argument])[1](grad)[0]

    return MaterializedGrads(torch.func.vmap(pull_back)(record.example_grad(), *map(record.example_arg, names)))

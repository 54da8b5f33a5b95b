"""The rule for every operation that has none of its own: differentiate that operation alone, example by example."""

from typing import Any

import torch
from torch.fx import Node

from sfumato.clipping.rules.contribution import Rows
from sfumato.clipping.rules.meeting import Met


def by_vmap(met: Met, slot: str) -> Rows:
    """torch.func.vmap over examples of the operation's vector-Jacobian product."""
    names = list(met.meeting.arg_layouts)

    def pull_back(grad: torch.Tensor, *of_example: torch.Tensor) -> torch.Tensor:
        changed = dict(zip(names, of_example, strict=True))

        def operation(value: torch.Tensor) -> torch.Tensor:
            return call(met.meeting.node, met.args | changed | {slot: value})

        return torch.func.vjp(operation, met.args[slot])[1](grad)[0]

    return Rows(torch.func.vmap(pull_back)(met.example_grad(), *(met.example_arg(name) for name in names)))


def call(node: Node, named: dict[str, Any]) -> Any:
    """Calls an operation with arguments by name, as `named_args` gives them."""
    args, kwargs = [], {}
    for argument in node.target._schema.arguments:  # type: ignore[union-attr]
        value = named[argument.name]
        if isinstance(value, (list, tuple)):
            value = [named.get(f"{argument.name}.{i}", item) for i, item in enumerate(value)]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return node.target(*args, **kwargs)  # type: ignore[operator]

"""The rule for every operation that has none of its own: differentiate that operation alone, example by example."""

import torch

from sfumato.clipping.graph.rules.per_example import Rows
from sfumato.clipping.graph.rules.site import Met, call


def by_vmap(met: Met, slot: str) -> Rows:
    """torch.func.vmap over examples of the operation's vector-Jacobian product."""
    names = list(met.meeting.arg_layouts)

    def pull_back(grad: torch.Tensor, *of_example: torch.Tensor) -> torch.Tensor:
        changed = dict(zip(names, of_example, strict=True))

        def operation(value: torch.Tensor) -> torch.Tensor:
            return call(met.meeting.node, met.args | changed | {slot: value})

        return torch.func.vjp(operation, met.args[slot])[1](grad)[0]

    return Rows(torch.func.vmap(pull_back)(met.example_grad(), *(met.example_arg(name) for name in names)))

"""The rule for every operation that has none of its own: differentiate that operation alone,
example by example.
"""

import torch

from sfumato.clipping.graph.rules.per_example import MaterializedGrads
from sfumato.clipping.graph.rules.site import SiteRecord, call


def by_vmap(record: SiteRecord, argument: str) -> MaterializedGrads:
    """torch.func.vmap over examples of the operation's vector-Jacobian product."""
    names = list(record.site.arg_layouts)

    def pull_back(grad: torch.Tensor, *of_example: torch.Tensor) -> torch.Tensor:
        changed = dict(zip(names, of_example, strict=True))

        def operation(value: torch.Tensor) -> torch.Tensor:
            return call(record.site.node, record.args | changed | {argument: value})

        return torch.func.vjp(operation, record.args[argument])[1](grad)[0]

    return MaterializedGrads(
        torch.func.vmap(pull_back)(record.example_grad(), *(record.example_arg(name) for name in names))
    )

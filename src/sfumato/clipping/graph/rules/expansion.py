"""A value repeated for every row of the batch: class tokens, for example."""

import torch

from sfumato.clipping.graph.rules.per_example import MaterializedGrads
from sfumato.clipping.graph.rules.site import SiteRecord


def repeated(record: SiteRecord, argument: str) -> MaterializedGrads:
    """The output's gradient summed over the copies that one example has."""
    weight = record.args[argument]
    grads = record.example_grad()  # (m, *shape for one example)
    shape = grads.shape[1:]

    def pull_back(grad: torch.Tensor) -> torch.Tensor:
        def expand(value: torch.Tensor) -> torch.Tensor:
            if record.site.operation == "expand":
                return value.expand(shape)
            padded = (1,) * (len(shape) - value.ndim) + value.shape
            return value.repeat([size // own for size, own in zip(shape, padded, strict=True)])

        return torch.func.vjp(expand, weight)[1](grad)[0]

    return MaterializedGrads(torch.func.vmap(pull_back)(grads))

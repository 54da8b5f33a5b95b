"""What of a model's outputs a loss gets to see: nothing of an example that gave NaN or infinity.

Some losses raise at it, and would end a call; others look for it, and would change for all.
"""

from typing import Any

import torch

from sfumato.torch_internals import tree_leaves


def is_usual(outputs: list[torch.Tensor]) -> torch.Tensor:
    """(m,): whether no output of an example is NaN or infinite."""
    usual = torch.ones(len(outputs[0]), dtype=torch.bool, device=outputs[0].device)
    for output in outputs:
        if output.is_floating_point():
            usual = usual & (output < torch.inf).reshape(len(output), -1).all(1)
    return usual


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """The tensors in what a model returned."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
